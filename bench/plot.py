"""Draws a result of any bench here: the question that the JSON answers decides the picture.

    python bench/plot.py bench/results/NAME.json [-o NAME.png] [--backend register]

transfer: GB/s against the ceiling, restore left, write-back right, by number of CTAs (on a CPU,
which has none, by row size). crossover: GB/s by run length. interference: what each transfer costs
the computation beside it, and what it moves then. write_back: GB/s by the bytes of a page and by
pages a call, and what staging costs the computation beside it. swap_in: microseconds by batch, and
the share of the link. load_layers: microseconds to layer 0 and to the last layer, GB/s, host time.
Needs matplotlib (`pip install sgl_kvio[bench]`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common import machine_title

Record = dict[str, Any]

PANELS = {"H2D": "Restore, host to device", "D2H": "Write-back, device to host"}
# Okabe and Ito's palette: told apart by colour-blind readers, and in the order of the row sizes.
ROW_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
LAYOUT_STYLES: dict[str, Any] = {"layer_first": "-", "page_first": "--"}
CEILING_COLOUR = "#444444"
TORCH_COLOUR = "#999999"


def draw(result_path: Path, png_path: Path, backend: str | None = None) -> None:
    """Renders the JSON at `result_path` into a PNG.

    `backend` chooses the lines of a transfer result and defaults to the first one measured. Raises
    ValueError when the result has no figure to draw.
    """
    result = json.loads(result_path.read_text())
    question = result["question"]
    if question == "crossover":
        draw_crossover(result, result_path.name).savefig(png_path)
    elif question == "interference":
        draw_interference(result, result_path.name).savefig(png_path)
    elif question == "write_back":
        draw_write_back(result, result_path.name).savefig(png_path)
    elif question == "swap_in":
        draw_swap_in(result, result_path.name).savefig(png_path)
    elif question == "load_layers":
        draw_load_layers(result, result_path.name).savefig(png_path)
    else:
        draw_transfer(result, result_path.name, backend).savefig(png_path)


def draw_transfer(result: Record, name: str, backend: str | None) -> Figure:
    """GB/s by number of CTAs (or row size), one panel a direction."""
    records = result["records"]
    if backend is None:
        names = [r["backend"] for r in records if not r["backend"].startswith("torch")]
        backend = names[0] if names else "none"
    chosen = [r for r in records if r["backend"] == backend and _is_plain(r)]
    if not chosen:
        raise ValueError(f"plot: backend got {backend!r}; {name} has no figure of it")
    by_ctas = any(record["num_blocks"] for record in chosen)
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, (direction, title) in zip(axes, PANELS.items(), strict=True):
        mine = [record for record in chosen if record["direction"] == direction]
        _draw_ceiling(axis, result["ceilings"][direction]["gbps_median"])
        if by_ctas:
            _draw_lines(axis, mine)
            _draw_torch(axis, records, direction)
        else:
            _draw_bars(axis, [*mine, *_torch_records(records, direction)])
        axis.set_title(f"{title}{_amount(mine)}", fontsize=11)
        _finish_axis(axis)
    axes[0].set_ylabel("GB/s of payload")
    if by_ctas:
        handles: list[Any] = _line_legend(sorted({_row(record) for record in chosen}))
    else:
        handles, _ = axes[0].get_legend_handles_labels()
    columns = len(handles) if by_ctas else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    what = f"kvio::transfer, backend {backend}, pages of 64 tokens in random order"
    _title(figure, result, what)
    return figure


def draw_crossover(result: Record, name: str) -> Figure:
    """GB/s by run length, a panel for each direction and layout, a line for each backend."""
    records = [record for record in result["records"] if record.get("section") == "runs"]
    if not records:
        raise ValueError(f"plot: {name} has no figures by run length (section runs)")
    layouts = sorted({record["layout"] for record in records})
    lines = sorted({(record["backend"], record["index_place"]) for record in records})
    named = sorted({backend for backend, _ in lines} - {"auto"})
    colours = dict(zip(named, ROW_COLOURS, strict=False))
    figure = Figure(figsize=(11, 3.9 * len(layouts)), dpi=150, layout="constrained")
    axes = figure.subplots(len(layouts), 2, squeeze=False)
    for row, layout in zip(axes, layouts, strict=True):
        for axis, direction in zip(row, PANELS, strict=True):
            _draw_ceiling(axis, result["ceilings"][direction]["gbps_median"])
            cells = [r for r in records if (r["layout"], r["direction"]) == (layout, direction)]
            for backend, place in lines:
                line = [r for r in cells if (r["backend"], r["index_place"]) == (backend, place)]
                line.sort(key=lambda record: record["run_bytes"])
                axis.plot(
                    [record["run_bytes"] for record in line],
                    [record["gbps_median"] for record in line],
                    color=colours.get(backend, "black"),
                    linestyle="-" if place == "cpu" else "--",
                    linewidth=1.0 if backend == "auto" else 1.8,
                    marker="o",
                    markersize=3.5,
                    label=f"{backend}, indices on {place.upper()}",
                )
            axis.set_xscale("log", base=2)
            ticks = sorted({record["run_bytes"] for record in cells})
            axis.set_xticks(ticks, [_bytes_words(tick) for tick in ticks], rotation=45)
            axis.minorticks_off()
            axis.set_title(f"{PANELS[direction]}, {layout.replace('_', '-')} host", fontsize=11)
            _finish_axis(axis)
        row[0].set_ylabel("GB/s of payload")
    for axis in axes[-1]:
        axis.set_xlabel("run: bytes of consecutive tokens in one buffer")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    pool = max(record["pool_bytes"] for record in records) / (1 << 30)
    _title(figure, result, f"kvio::transfer by run length, random order over {pool:.3g} GiB")
    return figure


def draw_interference(result: Record, name: str) -> Figure:
    """Two bars a transfer: compute time beside it over alone, and the GB/s it moves then."""
    records = result["records"]
    if not records:
        raise ValueError(f"plot: {name} has no figures")
    loops = list(dict.fromkeys(record["loop"] for record in records))
    directions = [d for d in PANELS if any(record["direction"] == d for record in records)]
    names = list(dict.fromkeys(record["provider"] for record in records))
    height = 1.6 + 0.3 * len(names) * len(directions)
    figure = Figure(figsize=(3.1 * len(loops) + 3.2, height), dpi=150, layout="constrained")
    axes = figure.subplots(len(directions), len(loops), squeeze=False, sharey=True)
    for row, direction in zip(axes, directions, strict=True):
        for axis, loop in zip(row, loops, strict=True):
            bars = {
                record["provider"]: record
                for record in records
                if (record["loop"], record["direction"]) == (loop, direction)
            }
            _draw_costs(axis, bars, names)
            axis.set_title(f"{loop}, {direction}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("more compute time, %")
    _title(figure, result, "What a transfer costs the computation beside it")
    return figure


def draw_write_back(result: Record, name: str) -> Figure:
    """Restore left, write-back right; a row of panels for each section that was measured."""
    shapes, pages = (_of_section(result, section) for section in ("shapes", "pages"))
    beside = result["beside"]
    loops = list(dict.fromkeys(record["loop"] for record in beside))
    names = list(dict.fromkeys(record["provider"] for record in beside))
    heights = [5.0] * (bool(shapes) + bool(pages)) + [0.8 + 0.28 * len(names)] * len(loops)
    if not heights:
        raise ValueError(f"plot: {name} has no figures of sections shapes, pages or beside")
    figure = Figure(figsize=(12, 0.6 + sum(heights)), dpi=150, layout="constrained")
    grid = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    rows = iter(grid)
    for records, draw_panel in ((shapes, _draw_by_page_bytes), (pages, _draw_by_pages)):
        if not records:
            continue
        axes = next(rows)
        for axis, direction in zip(axes, PANELS, strict=True):
            _draw_ceiling(axis, result["ceilings"][direction]["gbps_median"])
            draw_panel(axis, [r for r in records if r["direction"] == direction])
            axis.set_title(PANELS[direction], fontsize=11)
            _finish_axis(axis)
        axes[0].set_ylabel("GB/s of payload")
        # Below: the points fill the panel.
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.16)}
        axes[0].legend(frameon=False, fontsize=7, ncols=3, **place)
    for loop in loops:
        for axis, direction in zip(next(rows), PANELS, strict=True):
            key = (loop, direction)
            bars = {r["provider"]: r for r in beside if (r["loop"], r["direction"]) == key}
            axis.set_title(f"beside {loop}, {direction}: more compute time, %", fontsize=10)
            _draw_costs(axis, bars, names)
    _title(figure, result, "kvio::transfer_staged beside kvio::transfer, page-first host pools")
    return figure


def draw_swap_in(result: Record, name: str) -> Figure:
    """Microseconds by batch left, share of the link right; a row of panels for few and for many.

    A line for each row size: solid for swap_in, dashed in a CUDA graph, dotted for copy_planned;
    grey for torch, and for resolving alone.
    """
    smallest = min((record["hot_slots"] for record in result["records"]), default=0)
    records = [
        record
        for record in result["records"]
        if record["section"] in ("rows", "ways", "targets")
        and (record["hot_slots"], record["pattern"]) == (smallest, "random")
    ]
    if not records:
        raise ValueError(f"plot: {name} has no figures of sections rows or ways")
    misses = sorted({record["misses"] for record in records})
    figure = Figure(figsize=(12, 0.8 + 4.2 * len(misses)), dpi=150, layout="constrained")
    axes = figure.subplots(len(misses), 2, squeeze=False)
    rows = sorted({(tuple(record["row_bytes"]), record["row_words"]) for record in records})
    colours = dict(zip((words for _, words in rows), (*ROW_COLOURS, "#56B4E9"), strict=False))
    for (left, right), count in zip(axes, misses, strict=True):
        mine = [record for record in records if record["misses"] == count]
        batches = sorted({record["batch"] for record in mine})
        for axis, field in ((left, "us_per_call"), (right, "ratio")):
            _draw_swap_in_lines(axis, mine, field, colours)
            axis.set_xscale("log")
            axis.set_xticks(batches, [str(batch) for batch in batches])
            axis.minorticks_off()
            axis.set_xlabel("requests in the batch")
            axis.set_title(f"{count} misses a request", fontsize=11)
        left.set_ylabel("us of a call")
        left.set_yscale("log")
        left.grid(axis="y", alpha=0.25)
        left.spines[["top", "right"]].set_visible(False)
        right.set_ylabel("share of the link")
        _finish_axis(right)
    handles, _ = axes[0][0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    first = records[0]
    what = f"kvio::swap_in, {first['top_k']} selected of {smallest} hot slots, random host rows"
    _title(figure, result, what)
    return figure


def draw_load_layers(result: Record, name: str) -> Figure:
    """By tokens of a restore: time to layer 0 and to the last layer left, GB/s in the middle.

    Right, where it was measured, the host time of a restore: its load, and all its waits.
    """
    sections = ("tokens", "targets")
    records = [record for record in result["records"] if record["section"] in sections]
    costs = result["call_costs"]
    if not records:
        raise ValueError(f"plot: {name} has no figures by tokens (section tokens)")
    ways = list(dict.fromkeys(record["way"] for record in (*records, *costs)))
    colours = dict(zip(ways, (*ROW_COLOURS, "#56B4E9", TORCH_COLOUR), strict=False))
    figure = Figure(figsize=(15 if costs else 11, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots(1, 3 if costs else 2)
    tokens = sorted({record["tokens"] for record in records})
    for way, colour in colours.items():
        line = sorted((r for r in records if r["way"] == way), key=lambda r: r["tokens"])
        for field, style in (("us_last", "-"), ("us_layer_0", ":")):
            points = [(r["tokens"], r[field]) for r in line if r[field]]
            axes[0].plot(*zip(*points, strict=True) if points else ([], []), style, color=colour)
        rates = [(r["tokens"], r["gbps_median"]) for r in line]
        points = zip(*rates, strict=True) if rates else ([], [])
        axes[1].plot(*points, color=colour, marker="o", markersize=3, label=way)
    axes[0].set_ylabel("us until the last layer (dotted: layer 0) is in place")
    axes[0].grid(axis="y", alpha=0.25)
    axes[1].set_ylabel("GB/s of loads back to back")
    _draw_ceiling(axes[1], result["ceilings"]["H2D"]["gbps_median"])
    _finish_axis(axes[1])
    for axis in axes[:2]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [str(count) for count in tokens])
        axis.minorticks_off()
        axis.set_xlabel("tokens of a restore")
    axes[0].set_yscale("log")
    if costs:
        _draw_restore_costs(axes[2], costs, colours)
    handles, _ = axes[1].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    first = records[0]
    kind = "K+V" if first["buffers"] == 2 else "MLA"
    what = f"restore of {first['pool_layers']} layers, rows of {first['row_bytes']} bytes {kind}"
    _title(figure, result, what)
    return figure


def _draw_restore_costs(axis: Axes, costs: Sequence[Record], colours: dict[str, str]) -> None:
    """A bar a way: the host time of the load, and paler behind it of the waits for all layers."""
    for place, cost in enumerate(costs):
        load = cost["load"]["cpu_us_median"]
        waits = 0.0 if cost["waits"] is None else cost["waits"]["cpu_us_median"]
        axis.barh(place, load, color=colours[cost["way"]])
        axis.barh(place, waits, left=load, color=colours[cost["way"]], alpha=0.4)
        axis.annotate(f" {load:.1f} + {waits:.1f}", (load + waits, place), va="center", fontsize=8)
    axis.set_yticks(range(len(costs)), [cost["way"] for cost in costs], fontsize=8)
    axis.set_ylim(len(costs) - 0.5, -0.5)
    axis.set_xlim(right=1.4 * axis.get_xlim()[1])
    axis.set_xlabel("host us of a restore: load + waits")
    axis.spines[["top", "right"]].set_visible(False)


# Way of a call: its line, and whether it has the colour of its row size.
SWAP_IN_STYLES: dict[str, tuple[str, bool]] = {
    "swap_in": ("-", True),
    "graph": ("--", True),
    "copy_planned": (":", True),
    "torch": ("-", False),
    "resolve": ("--", False),
}


def _draw_swap_in_lines(
    axis: Axes, records: Sequence[Record], field: str, colours: dict[str, str]
) -> None:
    for way, (style, coloured) in SWAP_IN_STYLES.items():
        for row, colour in colours.items():
            by_batch = {
                record["batch"]: record[field]
                for record in records
                if (record["way"], record["row_words"]) == (way, row) and record[field]
            }
            if not by_batch:
                continue
            batches = sorted(by_batch)
            axis.plot(
                batches,
                [by_batch[batch] for batch in batches],
                color=colour if coloured else TORCH_COLOUR,
                linestyle=style,
                marker="o",
                markersize=3,
                label=f"{way}, {row}",
            )


def _of_section(result: Record, section: str) -> list[Record]:
    return [record for record in result["records"] if record["section"] == section]


def _way_colours(records: Sequence[Record]) -> dict[str, str]:
    """By backend, in the order of measuring, which is the same in every panel."""
    backends = dict.fromkeys(record["backend"] for record in records)
    return dict(zip(backends, (*ROW_COLOURS, "#56B4E9", TORCH_COLOUR), strict=False))


def _draw_by_page_bytes(axis: Axes, records: Sequence[Record]) -> None:
    """A point for each shape of a page: filled for token-major pages, hollow for layer-major."""
    for backend, colour in _way_colours(records).items():
        for layout, face in (("page_first", colour), ("page_first_direct", "none")):
            points = [r for r in records if (r["backend"], r["layout"]) == (backend, layout)]
            axis.scatter(
                [record["page_bytes"] for record in points],
                [record["gbps_median"] for record in points],
                s=18,
                edgecolors=colour,
                facecolors=face,
                linewidths=0.9,
                label=f"{backend}, {layout.replace('_', '-')}" if points else None,
            )
    _log_ticks(axis, "a page: all layers, K and V", records, "page_bytes")


def _draw_by_pages(axis: Axes, records: Sequence[Record]) -> None:
    """A line for each way and size of a page, dashed for the larger pages."""
    sizes = sorted({record["page_bytes"] for record in records})
    for backend, colour in _way_colours(records).items():
        for size, style in zip(sizes, ("-", "--"), strict=False):
            line = [r for r in records if (r["backend"], r["page_bytes"]) == (backend, size)]
            line.sort(key=lambda record: record["pages"])
            axis.plot(
                [record["pages"] for record in line],
                [record["gbps_median"] for record in line],
                color=colour,
                linestyle=style,
                marker="o",
                markersize=3,
                label=f"{backend}, {_bytes_words(size)}" if line else None,
            )
    axis.set_xscale("log", base=2)
    counts = [1 << power for power in range(9)]
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("pages a call")


def _log_ticks(axis: Axes, label: str, records: Sequence[Record], field: str) -> None:
    """A logarithmic axis of bytes with a tick for each power of 4."""
    most = max((record[field] for record in records), default=1 << 20)
    least = min((record[field] for record in records), default=1 << 20)
    ticks = [1 << power for power in range(10, 32, 2) if least <= 4 << power and 1 << power <= most]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [_bytes_words(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(label)


def _draw_costs(axis: Axes, bars: dict[str, Record], names: Sequence[str]) -> None:
    """A bar a provider: how much longer the computation takes, and the transfer's rate then."""
    if not bars:
        axis.set_axis_off()
        return
    places = [names.index(provider) for provider in bars]
    costs = [100 * (record["slowdown"] - 1) for record in bars.values()]
    axis.barh(places, costs, color=ROW_COLOURS[0])
    for place, cost, record in zip(places, costs, bars.values(), strict=True):
        rate = record["gbps_beside"]
        words = f" {cost:+.1f}%" + ("" if rate is None else f", {rate:.1f} GB/s")
        axis.annotate(words, (max(cost, 0.0), place), va="center", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlim(left=min(*costs, 0.0), right=1.7 * max(*costs, 1.0))
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def _title(figure: Figure, result: Record, what: str) -> None:
    figure.suptitle(f"{what}\n{machine_title(result['machine'])}, {result['date'][:10]}")


def _finish_axis(axis: Axes) -> None:
    axis.set_ylim(bottom=0, top=1.12 * axis.get_ylim()[1])
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _bytes_words(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def _is_plain(record: Record) -> bool:
    """Whether a record is of the main tables: no growth, no large pool, no other index type."""
    restores_a_layer = record["direction"] == "H2D" and record["layers_per_call"] == 1
    writes_back_all = record["direction"] == "D2H" and record["layers_per_call"] > 1
    return (
        (restores_a_layer or writes_back_all)
        and record["pattern"] == "pages"
        and record["index_unit"] == "token"
        and record["index_dtype"] == "int64"
        and record["layout"] in LAYOUT_STYLES
        and (record["kind"] == "mha" or record["row_bytes"] in (576, 1152))
    )


def _row(record: Record) -> tuple[int, str]:
    return record["row_bytes"], "K+V" if record["buffers"] == 2 else "MLA"


def _amount(records: Sequence[Record]) -> str:
    if not records:
        return ""
    tokens, layers = records[0]["tokens"], records[0]["layers_per_call"]
    return f"\n{tokens:,} tokens, {layers} layer{'s' if layers > 1 else ''} a call"


def _draw_ceiling(axis: Axes, gbps: float) -> None:
    axis.axhline(gbps, color=CEILING_COLOUR, linewidth=1.2, linestyle=":")
    axis.annotate(
        f"ceiling: one contiguous copy, {gbps:.1f}",
        xy=(0.99, gbps),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        horizontalalignment="right",
        color=CEILING_COLOUR,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
    )


def _draw_lines(axis: Axes, records: Sequence[Record]) -> None:
    """A line for each row size and layout over the number of CTAs, with min and max as bars."""
    rows = sorted({_row(record) for record in records})
    swept = [record for record in records if record["num_blocks"]]
    for colour, row in zip(ROW_COLOURS, rows, strict=False):
        for layout, style in LAYOUT_STYLES.items():
            line = [r for r in swept if _row(r) == row and r["layout"] == layout]
            if not line:
                continue
            line.sort(key=lambda record: record["num_blocks"])
            axis.errorbar(
                [record["num_blocks"] for record in line],
                [record["gbps_median"] for record in line],
                yerr=_spread(line),
                color=colour,
                linestyle=style,
                marker="o",
                markersize=4,
                linewidth=1.6,
                elinewidth=0.8,
                capsize=2,
            )
    ctas = sorted({record["num_blocks"] for record in swept})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ctas, [str(count) for count in ctas])
    axis.minorticks_off()
    axis.set_xlabel("CTAs (num_blocks)")


def _torch_records(records: Sequence[Record], direction: str) -> list[Record]:
    return [
        record
        for record in records
        if record["backend"].startswith("torch") and record["direction"] == direction
    ]


def _draw_torch(axis: Axes, records: Sequence[Record], direction: str) -> None:
    """Plain torch, which has no CTAs to choose, as one band from its slowest to its fastest."""
    rates = [record["gbps_median"] for record in _torch_records(records, direction)]
    if not rates:
        return
    axis.axhspan(min(rates), max(rates), color=TORCH_COLOUR, alpha=0.4, linewidth=0)
    axis.annotate(
        f"plain torch, {min(rates):.1f} to {max(rates):.1f}",
        xy=(0.99, max(rates)),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        horizontalalignment="right",
        color="#666666",
        fontsize=9,
    )


def _draw_bars(axis: Axes, records: Sequence[Record]) -> None:
    """Bars by row size, one colour for each backend and layout."""
    rows = sorted({_row(record) for record in records})
    names = list(dict.fromkeys((record["backend"], record["layout"]) for record in records))
    width = 0.8 / max(1, len(names))
    palette = (*ROW_COLOURS, "#56B4E9", "#F0E442", TORCH_COLOUR)
    for name, colour in zip(names, palette, strict=False):
        bars = [record for record in records if (record["backend"], record["layout"]) == name]
        axis.bar(
            [_bar_position(record, records, rows, width) for record in bars],
            [record["gbps_median"] for record in bars],
            width,
            yerr=_spread(bars),
            error_kw={"elinewidth": 0.8},
            color=colour,
            label=f"{name[0]}, {name[1].replace('_', '-')}",
        )
    axis.set_xticks(range(len(rows)), [f"{size} B {kind}" for size, kind in rows])
    axis.set_xlabel("row")


def _bar_position(
    record: Record, records: Sequence[Record], rows: Sequence[tuple[int, str]], width: float
) -> float:
    """Bars of one row size stand side by side around its tick, however many there are."""
    group = [other for other in records if _row(other) == _row(record)]
    return rows.index(_row(record)) + (group.index(record) - (len(group) - 1) / 2) * width


def _spread(records: Sequence[Record]) -> list[list[float]]:
    return [
        [record["gbps_median"] - record["gbps_min"] for record in records],
        [record["gbps_max"] - record["gbps_median"] for record in records],
    ]


def _line_legend(rows: Sequence[tuple[int, str]]) -> list[Line2D]:
    sizes = [
        Line2D([], [], color=colour, linewidth=2, label=f"{size} B {kind}")
        for colour, (size, kind) in zip(ROW_COLOURS, rows, strict=False)
    ]
    layouts = [
        Line2D([], [], color="black", linestyle=style, label=layout.replace("_", "-"))
        for layout, style in LAYOUT_STYLES.items()
    ]
    return [*sizes, *layouts]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws a result of a bench")
    parser.add_argument("result", type=Path, help="JSON that a bench wrote")
    parser.add_argument("-o", "--out", type=Path, help="PNG (default: beside the JSON)")
    parser.add_argument("--backend", help="of a transfer result: which lines (default: the first)")
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".png")
    draw(args.result, out, args.backend)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
