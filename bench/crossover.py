"""Which backend is fastest for which run length, and does `auto` know?

    python bench/crossover.py                      everything, two minutes on an H200
    python bench/crossover.py --quick              a look, 25 seconds
    python bench/crossover.py --sections cpu       only some of: runs, large_pools, cpu, groups
    python bench/crossover.py --targets            the promised figures of tma and copy_engine

Beside the rates by run length: scattered rows over large host pools, the host time of a call and of
an entry, and how early the first layer of a restore in groups of layers is there. Every timed
configuration is byte-checked. Without a GPU the sizes are small and the backend is the CPU's.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jobs import (
    GPU_BACKENDS,
    MHA_ROWS,
    MLA_ROWS,
    PAGE,
    Case,
    Job,
    Recorder,
    Session,
    ctas_words,
    gather,
    pool_layers,
)

from common import (
    GIB,
    MIB,
    Arena,
    RunOptions,
    change_every_byte,
    host_cost_us,
    make_arena,
    marks_on,
    new_side_stream,
    print_table,
    print_targets,
    run_with_sections,
    synchronize,
    verdict,
)
from sgl_kvio import LayerwiseLoader

SECTIONS = ("runs", "large_pools", "cpu", "groups")
KIB = 1 << 10
ROW = 512
# Driver copies cost about a microsecond each: more of them would only make a slow cell slower.
MAX_ENTRIES = 4096
CALLS_OF_MANY_ENTRIES = 2
ENTRY_BYTES = 64 * KIB
AUTO_SHARE = 0.97
# Less than csrc/plan/order.h reorders without having seen the indices: rows go as they are given.
MOST_BYTES_AS_GIVEN = 24 * MIB
REPEATS = 7


@dataclass(frozen=True)
class Sizes:
    """How much one machine is asked to move."""

    layers: int
    run_pool_bytes: int
    call_bytes: int
    run_bytes: tuple[int, ...]
    span_gib: tuple[float, ...]
    span_rows: tuple[int, ...]
    span_tokens: int
    entries: tuple[int, ...]
    load_layers: int
    load_pages: int
    groups: tuple[int, ...]
    bytes_per_repeat: int
    ceiling_bytes: int


def sizes_for(options: RunOptions, arena: Arena) -> Sizes:
    """The sizes of a machine, cut down to the pools that there is room for."""
    on_gpu = options.device.type == "cuda"
    quick = options.mode == "quick"
    room = 1 << (arena.device.numel().bit_length() - 1)
    pool = min(room, 4 * GIB if on_gpu else 64 * MIB)
    call = min(pool // 4, 64 * MIB if on_gpu else 4 * MIB)
    layers = 32 if on_gpu else 4
    exponents = (9, 12, 14, 16, 19) if quick else (9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22)
    page_bytes = layers * 2 * PAGE * ROW
    host_gib = arena.nbytes / GIB
    spans = (1.0, 16.0, 64.0) if on_gpu else (0.125, 0.25)
    return Sizes(
        layers=layers,
        run_pool_bytes=pool,
        call_bytes=call,
        run_bytes=tuple(1 << power for power in exponents if 2 << power <= call),
        span_gib=tuple(dict.fromkeys(min(span, host_gib) for span in spans)),
        span_rows=(512,) if quick else (512, 1152),
        span_tokens=131072 if on_gpu else 8192,
        entries=tuple(
            count
            for count in ((64, 512, 4096) if on_gpu else (64, 256))
            if 2 * count * ENTRY_BYTES <= room
        ),
        load_layers=8,
        load_pages=min(128 if on_gpu else 8, pool // page_bytes),
        groups=(1, 4, layers - 1) if quick else (1, 2, 4, 8, layers - 1),
        bytes_per_repeat=256 * MIB if on_gpu else call,
        ceiling_bytes=256 * MIB if on_gpu else 64 * MIB,
    )


def providers(device: torch.device, backends: Sequence[str]) -> list[tuple[str, str]]:
    """Backends with the place of their indices; copy_engine has to know where they point."""
    if device.type != "cuda":
        return [("cpu", "cpu"), ("auto", "cpu")]
    pairs = [
        (backend, place)
        for backend, place in itertools.product((*backends, "auto"), ("gpu", "cpu"))
        if backend != "copy_engine" or place == "cpu"
    ]
    return pairs


# --- By run length --------------------------------------------------------------------------


def run_cell(sizes: Sizes, direction: str, layout: str, run_bytes: int) -> Case:
    """One layer of K and V in runs of `run_bytes`, in random order over the whole host pool."""
    # Rows of a layer-first pool touch each other, so one layer takes up the whole span.
    layers = 1 if layout == "layer_first" else sizes.layers
    slots = sizes.run_pool_bytes // (layers * 2 * ROW)
    run_tokens = run_bytes // ROW
    return Case(
        1,
        max(run_tokens, min(sizes.call_bytes // (2 * ROW), slots)),
        layers,
        slots,
        direction=direction,
        layout=layout,
        row_bytes=ROW,
        run_tokens=run_tokens,
        index_unit="page" if run_tokens > 1 else "token",
    )


def with_provider(cell: Case, backend: str, place: str) -> Case:
    """The cell served by one backend; with less to move where that would be too many entries."""
    case = replace(cell, backend=backend, indices=place)
    if backend != "copy_engine":
        return case
    entry_tokens = cell.run_tokens if cell.layout == "layer_first" else 1
    most = max(cell.run_tokens, MAX_ENTRIES // cell.buffers * entry_tokens)
    return replace(case, tokens=min(cell.tokens, most))


def calls_of(case: Case, usual_tokens: int) -> int:
    """Calls of one repeat: few where entries were cut down for being slow, otherwise as usual."""
    return CALLS_OF_MANY_ENTRIES if case.tokens < usual_tokens else 0


def measure_runs(run: Recorder, sizes: Sizes, backends: Sequence[str]) -> list[dict[str, Any]]:
    """GB/s of every backend in every cell; returns what `auto` reached of the best one."""
    shares = []
    layouts = ("layer_first", "page_first")
    for direction, layout in itertools.product(("H2D", "D2H"), layouts):
        print(f"\nby run length, {direction}, {layout} host rows of {ROW} B, K+V, GB/s")
        for run_bytes in sizes.run_bytes:
            cell = run_cell(sizes, direction, layout, run_bytes)
            if cell.tokens > cell.pool_slots:
                continue
            rates = {
                (backend, place): run_rate(run, cell, backend, place)
                for backend, place in providers(run.device, backends)
            }
            mine = auto_shares(cell, rates)
            shares += mine
            print_cell(run_bytes, rates, mine)
    print_shares(shares)
    return shares


def run_rate(run: Recorder, cell: Case, backend: str, place: str) -> float | None:
    case = with_provider(cell, backend, place)
    record = run.measure(case, calls=calls_of(case, cell.tokens), section="runs")
    return None if record is None else record["gbps_median"]


def auto_shares(cell: Case, rates: dict[tuple[str, str], float | None]) -> list[dict[str, Any]]:
    """For each index place: what `auto` reached of the best backend named outright."""
    found = []
    for place in ("gpu", "cpu"):
        auto = rates.get(("auto", place))
        others = {
            backend: rate
            for (backend, where), rate in rates.items()
            if where == place and backend != "auto" and rate is not None
        }
        if auto is None or not others:
            continue
        best = max(others, key=lambda backend: others[backend])
        found.append(
            {
                "direction": cell.direction,
                "layout": cell.layout,
                "row_bytes": cell.row_bytes,
                "run_bytes": cell.run_bytes,
                "index_place": place,
                "auto_gbps": auto,
                "best_backend": best,
                "best_gbps": others[best],
                "share": auto / others[best],
            }
        )
    return found


def print_cell(run_bytes: int, rates: dict[tuple[str, str], float | None], shares: Any) -> None:
    cells = [
        f"{backend}/{place} {'-' if rate is None else f'{rate:.2f}':>5}"
        for (backend, place), rate in rates.items()
    ]
    marks = [f"{item['share']:.2f}" for item in shares]
    print(f"  {run_bytes:>8} B  {'  '.join(cells)}  auto/best {' '.join(marks)}", flush=True)


def print_shares(shares: Sequence[dict[str, Any]]) -> None:
    if not shares:
        return
    low = sorted((item for item in shares if item["share"] < AUTO_SHARE), key=lambda i: i["share"])
    print(
        f"\nauto reached {AUTO_SHARE:.0%} of the best backend in {len(shares) - len(low)} of "
        f"{len(shares)} cells"
    )
    for item in low:
        print(
            f"  {item['direction']} {item['layout']} {item['run_bytes']} B, indices on "
            f"{item['index_place']}: {item['share']:.3f} of {item['best_backend']} "
            f"({item['best_gbps']:.2f})"
        )


# --- Large pools ----------------------------------------------------------------------------


def large_pool_case(sizes: Sizes, span_gib: float, row: int, backend: str, place: str) -> Case:
    """Scattered rows of one layer over `span_gib` of host memory, in random order, H2D."""
    case = Case(1, 0, 1, 1, backend=backend, row_bytes=row, pattern="scattered", indices=place)
    slots = int(span_gib * GIB) // (case.pool_bytes * PAGE) * PAGE
    tokens = min(sizes.span_tokens, slots // 8)
    if backend == "copy_engine":
        tokens = min(tokens, MAX_ENTRIES // case.buffers)
    # A device pool of a few calls: its size is not what is asked here.
    device_slots = min(slots, 4 * sizes.span_tokens)
    return replace(case, pool_slots=slots, tokens=tokens, device_slots=device_slots)


def as_given(case: Case) -> Case:
    """The case in calls too small for GPU indices to be put in order: what order is measured by."""
    return replace(
        case, tokens=min(case.tokens, MOST_BYTES_AS_GIVEN // (case.row_bytes * case.buffers))
    )


def large_pool_variants(case: Case) -> list[tuple[str, Case]]:
    """The case, in words; with register and GPU indices also unordered and in host order."""
    variants = [("", case)]
    if case.backend == "register" and case.index_place == "gpu":
        variants.insert(0, ("as given ", as_given(case)))
    if case.backend == "register":
        variants.append(("host order ", replace(case, pattern="host_order")))
    return variants


def measure_large_pools(run: Recorder, sizes: Sizes, backends: Sequence[str]) -> None:
    """GB/s over growing host pools, beside rows as they were given and in host-address order."""
    print("\nscattered rows over large host pools, H2D, GB/s")
    for row, span in itertools.product(sizes.span_rows, sizes.span_gib):
        cells = []
        for backend, place in providers(run.device, backends):
            case = large_pool_case(sizes, span, row, backend, place)
            calls = CALLS_OF_MANY_ENTRIES if backend == "copy_engine" else 0
            for words, variant in large_pool_variants(case):
                record = run.measure(variant, calls=calls, section="large_pools")
                rate = "-" if record is None else f"{record['gbps_median']:.2f}"
                cells.append(f"{backend}/{place} {words}{rate:>5}")
        print(f"  {row:>5} B over {span:.3g} GiB  {'  '.join(cells)}", flush=True)


# --- Host time ------------------------------------------------------------------------------


def measure_cpu(run: Recorder, sizes: Sizes, backends: Sequence[str]) -> None:
    """Host microseconds of a one-layer restore call, of an entry, and of a load off the thread."""
    for backend, place in providers(run.device, backends):
        run.call_cost(backend, 2, place)
    by_entries = "copy_engine" if run.device.type == "cuda" else "cpu"
    for entries in sizes.entries:
        entry_cost(run, by_entries, entries)
        for submit in ("caller", "thread"):
            load_cost(run, by_entries, entries, sizes.load_layers, submit)
    rows = [
        [
            cost_words(cost),
            f"{cost['cpu_us_median']:.2f}",
            f"{cost['cpu_us_min']:.2f}",
            f"{cost['cpu_us_p90']:.2f}",
            f"{cost['cpu_us_median'] / cost['entries']:.2f}" if "entries" in cost else "",
        ]
        for cost in run.call_costs
    ]
    if rows:
        print("\nhost time on the caller's thread, us")
        print_table(["call", "median", "min", "p90", "an entry"], rows)


def cost_words(cost: dict[str, Any]) -> str:
    words = f"{cost['backend']}, indices on {cost['index_place']}"
    if "submit" in cost:
        return f"LayerwiseLoader.load, submit={cost['submit']}, {words}, {cost['entries']} entries"
    if "entries" in cost:
        return f"one call, {words}, {cost['entries']} entries of 64 KiB"
    return f"one layer, one page, {words}"


def entries_case(backend: str, entries: int, layers: int = 1) -> Case:
    """`entries` runs of 64 KiB over `layers` layers of K and V, host to device."""
    tokens = entries // (2 * layers) * PAGE
    case = Case(1, tokens, layers, 2 * tokens, row_bytes=ENTRY_BYTES // PAGE, index_unit="page")
    return replace(case, backend=backend, indices="cpu")


def entry_cost(run: Recorder, backend: str, entries: int) -> dict[str, Any] | None:
    """Host time of one call of `entries` driver copies, the device idle before each."""
    case = entries_case(backend, entries)
    job = run.ready(case)
    if job is None:
        return None
    call = functools.partial(job.call, 0)
    cost = host_cost_us(call, run.device, calls=30, drain_every=1)
    return note_cost(run, case, cost, entries=entries)


def load_cost(
    run: Recorder, backend: str, entries: int, layers: int, submit: str
) -> dict[str, Any] | None:
    """Host time of `LayerwiseLoader.load` for `entries` driver copies, each load waited for."""
    case = entries_case(backend, entries, layers)
    if run.ready(case) is None:
        return None
    with Loads(run.arena, case, "layer_first", submit=submit) as loads:
        if not loads.moves_exact_bytes():
            run.note_wrong_bytes({**case.as_record(), "submit": submit})
            return None
        cost = host_cost_us(loads.load, run.device, 30, 1, drain=lambda load: load.synchronize())
    return note_cost(run, case, cost, entries=entries, submit=submit)


def note_cost(run: Recorder, case: Case, cost: dict[str, float], **what: Any) -> dict[str, Any]:
    facts = {"backend": case.backend, "buffers": 2, "index_place": case.index_place}
    run.call_costs.append({**facts, **what, **cost})
    return run.call_costs[-1]


# --- Groups of layers -----------------------------------------------------------------------


class Loads:
    """A LayerwiseLoader over pools of `case`, both in `layout`, with the rows of one load."""

    def __init__(self, arena: Arena, case: Case, layout: str, **options: Any) -> None:
        self._arena = arena
        self._case = case
        self._layout = layout
        self._host = pool_layers(arena.host, case, layout, case.pool_slots)
        self._far = pool_layers(arena.device, case, layout, case.device_pool_slots)
        generator = torch.Generator().manual_seed(case.tokens)
        pages = case.tokens // case.run_tokens
        self._ids = [
            torch.randperm(slots // case.run_tokens, generator=generator)[:pages]
            for slots in (case.pool_slots, case.device_pool_slots)
        ]
        place = torch.device("cpu") if case.index_place == "cpu" else arena.where
        self._indices = [ids.to(place) for ids in self._ids]
        self.loader = LayerwiseLoader(
            self._host, self._far, page_size=case.run_tokens, backend=case.backend, **options
        )

    def __enter__(self) -> Loads:
        return self

    def __exit__(self, *exception: object) -> None:
        self.loader.close()

    def load(self) -> Any:
        return self.loader.load(*self._indices, index_unit="page")

    def moves_exact_bytes(self) -> bool:
        """Loads over other bytes and compares every layer with a gather by torch."""
        arena, case = self._arena, self._case
        change_every_byte(arena.device[: case.device_pool_bytes])
        self.load().synchronize()
        arena.refresh_mirror(0)
        mirror = pool_layers(arena.mirror, case, self._layout, case.pool_slots)
        token = torch.arange(case.run_tokens)
        host_slots, far_slots = (
            (ids[:, None] * case.run_tokens + token).flatten().to(arena.where) for ids in self._ids
        )
        return all(
            torch.equal(gather(source, host_slots), gather(target, far_slots))
            for sources, targets in zip(mirror, self._far, strict=True)
            for source, target in zip(sources, targets, strict=True)
        )

    def seconds(self) -> tuple[float, float]:
        """From the call of `load` until layer 0, and until the last layer, is in place."""
        synchronize(self._arena.where)
        mark, seconds_between = marks_on(self._arena.where)
        start = mark()
        load = self.load()
        load.wait_layer(0)
        first = mark()
        load.wait()
        last = mark()
        load.synchronize()
        synchronize(self._arena.where)
        return seconds_between(start, first), seconds_between(start, last)


def measure_groups(run: Recorder, sizes: Sizes, backends: Sequence[str]) -> list[dict[str, Any]]:
    """Time to layer 0 and to the last layer of a restore of whole pages, by size of the groups."""
    case = Case(
        sizes.layers,
        sizes.load_pages * PAGE,
        sizes.layers,
        sizes.load_pages * PAGE,
        layout="page_first_direct",
        row_bytes=ROW,
        index_unit="page",
    )
    print(
        f"\nrestore in groups of layers: {sizes.load_pages} pages of {PAGE} tokens, {sizes.layers} "
        "layers, page_first_direct on both sides; us to layer 0 / to the last (GB/s)"
    )
    # One stream of the caller's own: the legacy default stream would serialize with the side one.
    stream = new_side_stream(run.device)
    loads = []
    # Where each backend's indices are in practice: more would only repeat section runs.
    pairs = [(backend, Case(1, 0, 1, 1, backend=backend).index_place) for backend in backends]
    on_cpu = [("cpu", "cpu")] if run.device.type != "cuda" else []
    for (backend, place), submit in itertools.product(
        [*pairs, *on_cpu, ("auto", "cpu")], ("caller", "thread")
    ):
        cells = []
        for group in sizes.groups:
            mine = replace(case, backend=backend, indices=place)
            with torch.cuda.stream(stream):
                record = measure_load(run, mine, group, submit)
            if record is None:
                cells.append(f"n={group} -")
                continue
            loads.append(record)
            times = f"{record['us_layer_0']:.0f} / {record['us_last']:.0f}"
            cells.append(f"n={group} {times} ({record['gbps_median']:.2f})")
        print(f"  {backend}/{place}, {submit:<6}  {'  '.join(cells)}", flush=True)
    return loads


def measure_load(run: Recorder, case: Case, group: int, submit: str) -> dict[str, Any] | None:
    what = {**case.as_record(), "group": group, "submit": submit}
    if run.is_skipped(case):
        return None
    try:
        with Loads(run.arena, case, case.layout, group=group, submit=submit) as loads:
            if not loads.moves_exact_bytes():
                run.note_wrong_bytes(what)
                return None
            times = [loads.seconds() for _ in range(REPEATS + 1)][1:]
    except RuntimeError as error:
        run.refuse(case, error)
        return None
    first, last = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        **what,
        "us_layer_0": first * 1e6,
        "us_last": last * 1e6,
        "gbps_median": case.payload_bytes / last / 1e9,
        "repeats": REPEATS,
    }


# --- Promised figures -----------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """GB/s that a configuration owes; `calls` back to back make one repeat (0: as many as fit)."""

    what: str
    case: Case
    gbps: float
    calls: int = 0


def promises() -> Iterator[Promise]:
    """The rows of the table that the tma and copy_engine backends were built against (H200)."""
    one_layer = Case(1, 32768, 32, 32768, backend="tma")
    all_layers = Case(32, 4096, 32, 16384, backend="tma", direction="D2H")
    for row, run_tokens in itertools.product((*MHA_ROWS, *MLA_ROWS), (64, 128)):
        first = 44 if row in MHA_ROWS else 36
        for base, limits in ((one_layer, (first, 50.5)), (all_layers, (42, 52.4))):
            case = replace(base, row_bytes=row, run_tokens=run_tokens)
            for ctas, gbps in enumerate(limits, start=1):
                yield promise_of(replace(case, num_blocks=ctas), gbps)
    for row in (*MHA_ROWS, *MLA_ROWS):
        case = replace(one_layer, layout="page_first", row_bytes=row)
        for ctas, gbps in enumerate((24, 46, 48) if row == 576 else (26, 48, 50.5), start=1):
            yield promise_of(replace(case, num_blocks=ctas), gbps)
    for ctas, gbps in ((1, 30), (2, 50)):
        yield promise_of(replace(one_layer, run_tokens=16, num_blocks=ctas), gbps)
    engine: dict[str, Any] = {"backend": "copy_engine", "index_unit": "page"}
    one_call = Case(1, 256 * MIB // (2 * ROW), 1, GIB // (2 * ROW), **engine)
    for run_tokens, gbps in ((64, 45), (128, 49.5), (256, 52), (1024, 53.5)):
        yield promise_of(replace(one_call, run_tokens=run_tokens), gbps, "one call of 256 MiB", 1)
    flow = Case(1, 32768, 32, 65536, run_tokens=128, **engine)
    yield promise_of(flow, 53.5, "40 layer calls of 512 entries", 40)
    scattered = Case(1, 131072, 1, GIB // (2 * ROW), backend="auto", pattern="scattered")
    yield promise_of(replace(scattered, num_blocks=4), 50, "scattered tokens, 1 GiB pool")


def promise_of(case: Case, gbps: float, words: str = "", calls: int = 0) -> Promise:
    ctas = f", {ctas_words(case.num_blocks)}" if case.num_blocks else ""
    run = f"{case.run_bytes // KIB} KiB runs" if case.pattern == "pages" else "single rows"
    rows = f"{case.row_bytes} B {'K+V' if case.buffers == 2 else 'MLA'}"
    what = f"{case.backend} {case.direction} {case.layout} {rows}, {run}{ctas}"
    return Promise(f"{what}, {words}" if words else what, case, gbps, calls)


def measure_targets(run: Recorder, sizes: Sizes) -> list[dict[str, Any]]:
    """Every promised figure with the measured one. Those beside compute are interference.py's."""
    verdicts = []
    for promise in promises():
        record = run.measure(promise.case, calls=promise.calls, section="targets")
        value = None if record is None else record["gbps_median"]
        verdicts.append(verdict(promise.what, "GB/s", promise.gbps, value))
    for row, times in ((512, 1.7), (1152, 1.5)):
        verdicts.append(large_pool_verdict(run, sizes, row, times))
    cost = run.call_cost("tma", 2, "gpu")
    verdicts.append(cost_verdict("one-layer MHA restore call, tma", 8, cost))
    entries = max(sizes.entries)
    cost = entry_cost(run, "copy_engine", entries)
    value = None if cost is None else cost["cpu_us_median"] / entries
    verdicts.append(verdict("copy_engine, an entry of 64 KiB", "us", 1, value, at_most=True))
    cost = load_cost(run, "copy_engine", entries, sizes.load_layers, "thread")
    verdicts.append(cost_verdict(f"load() of {entries} entries, submit=thread", 60, cost))
    return verdicts


def large_pool_verdict(run: Recorder, sizes: Sizes, row: int, times: float) -> dict[str, Any]:
    """`auto` with CPU indices in random order, over the kernel that takes them as they come."""
    rates = []
    unordered_case = as_given(large_pool_case(sizes, 16.0, row, "register", "gpu"))
    for case in (large_pool_case(sizes, 16.0, row, "auto", "cpu"), unordered_case):
        record = run.measure(case, section="targets")
        rates.append(None if record is None else record["gbps_median"])
    ordered, unordered = rates
    value = ordered / unordered if ordered and unordered else None
    what = f"{row} B rows over 16 GiB, auto with CPU indices over register with rows as given"
    return verdict(what, "times", times, value)


def cost_verdict(what: str, limit: float, cost: dict[str, Any] | None) -> dict[str, Any]:
    value = None if cost is None else cost["cpu_us_median"]
    return verdict(what, "us", limit, value, at_most=True)


# --- The run --------------------------------------------------------------------------------


def accepted(run: Recorder) -> tuple[str, ...]:
    """The GPU backends that take a small transfer here; the others are in `refused`."""
    taken = []
    for backend in GPU_BACKENDS if run.device.type == "cuda" else ():
        case = Case(1, PAGE, 1, PAGE, backend=backend)
        try:
            Job(case, run.arena, run.generator).call(0)
        except RuntimeError as error:
            run.refuse(case, error)
            print(f"without {backend}: {run.refused[-1]['reason']}")
            continue
        taken.append(backend)
    return tuple(taken)


def measure(options: RunOptions, sections: Sequence[str]) -> dict[str, Any]:
    """One run: ceilings first, then the sections. Returns what the JSON holds."""
    session = Session(options)
    arena = make_arena(options, 4 * GIB)
    sizes = sizes_for(options, arena)
    run = session.recorder(arena, sizes.ceiling_bytes, sizes.bytes_per_repeat)
    session.ready(run)
    backends = accepted(run)
    shares: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    if options.mode == "targets":
        targets = measure_targets(run, sizes)
    # The long sweep last: --budget cuts from the end.
    if "cpu" in sections:
        measure_cpu(run, sizes, backends)
    if "groups" in sections:
        loads = measure_groups(run, sizes, backends)
    if "large_pools" in sections:
        measure_large_pools(run, sizes, backends)
    if "runs" in sections:
        shares = measure_runs(run, sizes, backends)
    return {
        "sections": list(sections),
        **session.close(run, sizes.ceiling_bytes, lambda: print_targets(targets)),
        "auto": shares,
        "call_costs": run.call_costs,
        "loads": loads,
        "targets": targets,
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    return run_with_sections(
        argv,
        "crossover",
        "Which backend is fastest where?",
        SECTIONS,
        measure,
        gpu_pool_gib={"full": 64.0, "quick": 4.0, "targets": 16.0},
        gpu_budget_s={"full": 105.0, "quick": 18.0, "targets": 45.0},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
