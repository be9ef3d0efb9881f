"""Draws a result of bench/transfer.py: GB/s against the ceiling, restore left, write-back right.

    python bench/plot.py bench/results/NAME.json [-o NAME.png] [--backend register]

On a GPU the horizontal axis is the number of CTAs; on a CPU, which has none, the row size. Needs
matplotlib (`pip install sgl_kvio[bench]`).
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
    """Renders the JSON at `result_path` into a PNG; `backend` defaults to the first one measured.

    Raises ValueError when the result has no figure of that backend.
    """
    result = json.loads(result_path.read_text())
    records = result["records"]
    if backend is None:
        names = [r["backend"] for r in records if not r["backend"].startswith("torch")]
        backend = names[0] if names else "none"
    chosen = [r for r in records if r["backend"] == backend and _is_plain(r)]
    if not chosen:
        raise ValueError(f"plot: backend got {backend!r}; {result_path.name} has no figure of it")
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
        axis.set_ylim(bottom=0, top=1.12 * axis.get_ylim()[1])
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GB/s of payload")
    if by_ctas:
        handles: list[Any] = _line_legend(sorted({_row(record) for record in chosen}))
    else:
        handles, _ = axes[0].get_legend_handles_labels()
    columns = len(handles) if by_ctas else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    what = f"kvio::transfer, backend {backend}, pages of 64 tokens in random order"
    figure.suptitle(f"{what}\n{machine_title(result['machine'])}, {result['date'][:10]}")
    figure.savefig(png_path)


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
    parser = argparse.ArgumentParser(description="Draws a result of bench/transfer.py")
    parser.add_argument("result", type=Path, help="JSON that bench/transfer.py wrote")
    parser.add_argument("-o", "--out", type=Path, help="PNG (default: beside the JSON)")
    parser.add_argument("--backend", help="which backend's lines (default: the first measured)")
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".png")
    draw(args.result, out, args.backend)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
