"""What does a swap-in cost beside its floor, and beside the same work by torch?

    python bench/swap_in.py                    everything, 40 seconds on an H200
    python bench/swap_in.py --quick            a look, 25 seconds
    python bench/swap_in.py --sections cpu     only some of: cpu, rows, ways, hosts
    python bench/swap_in.py --targets          the promised figures beside their floors, 15 seconds

A call serves one layer of a batch of long requests, each of which misses exactly as many tokens as
the configuration says. `swap_in` stands beside the same call in a CUDA graph, what resolving alone
costs, `copy_planned` and plain torch. Every timed configuration is byte-checked. Without a GPU the
sizes are small and both are CPU kernels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from hot_buffers import PATTERNS, Geometry, HotBuffers, torch_swap_in
from jobs import Recorder, Session

from common import (
    GIB,
    MIB,
    Arena,
    Clock,
    PreparedClock,
    QueuedClock,
    RunOptions,
    WallClock,
    host_cost_us,
    make_arena,
    new_side_stream,
    print_table,
    print_targets,
    run_with_sections,
    synchronize,
    time_calls,
    verdict,
)

# In the order of measuring: --budget cuts from the end.
SECTIONS = ("cpu", "rows", "ways", "hosts")
TOP_K = 2048
# A request's tokens: so many that a walk through them outgrows the caches of the host.
MAX_LEN_FEW, MAX_LEN_MANY, FEW = 131072, 32768, 10
PAGE_FIRST_LAYERS = 32
# Two buffers a layer: values, and their scales.
SPLIT_ROWS = (576, 8)
HOST_READ_US = 1.25  # from a load of a GPU thread until the value from host memory is there
LEAST_CALLS = 4  # of a repeat
GRAPH, RESOLVE, PLANNED, RECORD, TORCH = "graph", "resolve", "copy_planned", "record", "torch"
WAY_WORDS = {
    "swap_in": "swap_in",
    GRAPH: "swap_in in a CUDA graph",
    RECORD: "swap_in, plan recorded",
    RESOLVE: "swap_in, skip_io",
    PLANNED: "copy_planned",
    TORCH: "torch",
}


@dataclass(frozen=True)
class Case:
    """Calls on one geometry, by one way; every request of a call misses `misses` tokens."""

    geometry: Geometry
    misses: int
    way: str = "swap_in"

    @property
    def pool_bytes(self) -> int:
        return self.geometry.pool_bytes

    @property
    def device_pool_bytes(self) -> int:
        return self.geometry.device_pool_bytes

    @property
    def payload_bytes(self) -> int:
        if self.way == RESOLVE:
            return 0
        return self.geometry.batch * self.misses * self.geometry.token_bytes

    def as_record(self) -> dict[str, Any]:
        names = ("pool_bytes", "device_pool_bytes", "payload_bytes")
        return {
            "way": self.way,
            **asdict(self.geometry),
            "misses": self.misses,
            "row_words": row_words(self.geometry.row_bytes),
            **{name: getattr(self, name) for name in names},
        }


def row_words(row_bytes: Sequence[int]) -> str:
    return " + ".join(map(str, row_bytes)) + " B"


@dataclass(frozen=True)
class Sizes:
    """How much one machine is asked to move."""

    top_k: int
    hot_slots: tuple[int, ...]
    max_len_few: int
    max_len_many: int
    rows: tuple[tuple[int, ...], ...]
    named_rows: tuple[tuple[int, ...], ...]  # in the sections that vary something else
    batches: tuple[int, ...]
    host_batches: tuple[int, ...]
    cpu_batches: tuple[int, ...]
    misses: tuple[int, ...]
    spans: tuple[int, ...]
    pool_layers: int
    cost_calls: int
    most_calls: int
    bytes_per_repeat: int
    ceiling_bytes: int


def sizes_for(options: RunOptions, arena: Arena) -> Sizes:
    """The sizes of a machine; spans are cut down to the host memory that there is room for."""
    quick = options.mode == "quick"
    if options.device.type != "cuda":
        return cpu_sizes(arena, quick)
    spans = (GIB,) if options.mode == "targets" else (GIB, 32 * GIB)
    return Sizes(
        top_k=TOP_K,
        hot_slots=(4096,) if quick else (4096, 8192),
        max_len_few=MAX_LEN_FEW,
        max_len_many=MAX_LEN_MANY,
        rows=((512,), (1152,)) if quick else tuple((n,) for n in (512, 576, 656, 1024, 1152)),
        named_rows=((512,),) if quick else ((512,), (1152,)),
        batches=(1, 100) if quick else (1, 10, 100, 256),
        host_batches=(1, 100) if quick else (1, 10, 100, 256),
        cpu_batches=(1, 100),
        misses=(2, 410),
        spans=tuple(dict.fromkeys(min(span, arena.nbytes) for span in spans)),
        pool_layers=PAGE_FIRST_LAYERS,
        cost_calls=200,
        most_calls=32,
        bytes_per_repeat=128 * MIB,
        ceiling_bytes=256 * MIB,
    )


def cpu_sizes(arena: Arena, quick: bool) -> Sizes:
    """Little, so that a machine that is busy with something else still gets through."""
    return Sizes(
        top_k=128,
        hot_slots=(256, 512),
        max_len_few=2048,
        max_len_many=2048,
        rows=((512,), (1152,)) if quick else tuple((n,) for n in (512, 576, 656, 1024, 1152)),
        named_rows=((512,),),
        batches=(1, 10),
        host_batches=(1, 10),
        cpu_batches=(1, 10),
        misses=(2, 26),
        spans=tuple(dict.fromkeys(min(span, arena.nbytes) for span in (4 * MIB, 16 * MIB))),
        pool_layers=4,
        cost_calls=20,
        most_calls=4,
        bytes_per_repeat=MIB,
        ceiling_bytes=64 * MIB,
    )


class Bench:
    """A recorder with the sizes of its machine, and the hot buffers that it last worked on."""

    def __init__(self, run: Recorder, sizes: Sizes) -> None:
        self.run = run
        self.sizes = sizes
        self._records: dict[Case, dict[str, Any]] = {}
        self._sections: set[tuple[Case, str]] = set()
        self._state: HotBuffers | None = None

    def geometry(self, row_bytes: Sequence[int], batch: int, **options: Any) -> Geometry:
        """Random rows of a flat pool of the smaller span, unless `options` say otherwise."""
        sizes = self.sizes
        if options.get("layout") == "page_first":
            options["pool_layers"] = sizes.pool_layers
        return Geometry(
            tuple(row_bytes),
            batch,
            options.pop("hot_slots", sizes.hot_slots[0]),
            sizes.top_k,
            sizes.max_len_few if batch <= FEW else sizes.max_len_many,
            options.pop("span_bytes", sizes.spans[0]),
            **options,
        )

    def ways(self) -> tuple[str, ...]:
        """What this machine can do."""
        ways = ("swap_in", GRAPH, RECORD, RESOLVE, PLANNED, TORCH)
        on_gpu = self.run.device.type == "cuda"
        return tuple(way for way in ways if on_gpu or way != GRAPH)

    def measure(self, case: Case, section: str) -> dict[str, Any] | None:
        """The record of a case, timed now unless it was before; None without one."""
        record = self._records.get(case) or self._measure(case)
        if record is None:
            return None
        self._records[case] = record
        # Timed once, it stands in every section that it is a part of.
        if (case, section) not in self._sections:
            self._sections.add((case, section))
            self.run.records.append({**record, "section": section})
        return record

    def state_for(self, geometry: Geometry) -> HotBuffers:
        """Hot buffers in order; those of the geometry before are gone."""
        if self._state is not None and self._state.geometry == geometry:
            self._state.reset()
            return self._state
        self._state = None
        self._state = HotBuffers(geometry, self.run.arena, self.run.generator)
        return self._state

    def close(self) -> None:
        """Gives the memory back."""
        self._state = None

    def _measure(self, case: Case) -> dict[str, Any] | None:
        run, sizes = self.run, self.sizes
        if run.is_skipped(case):
            return None
        state = self.state_for(case.geometry)
        calls = sizes.bytes_per_repeat // max(1, case.payload_bytes)
        calls = max(LEAST_CALLS, min(sizes.most_calls, calls))
        if case.way == TORCH:  # the host gathers rows, and one call is long enough
            calls = 1
        try:
            flow = Flow(state, case, calls)
            flow.run()  # loads the kernels, which is slower than any head start of a clock
            clock: Clock = flow_clock(run.device, case.way)
            timing = time_calls(flow.call, calls, PreparedClock(clock, flow.prepare), 0.0)
            latency_us = None if case.way == GRAPH else single_call_us(state, case)
            right = is_right(state, case, flow)
        except RuntimeError as error:
            run.refuse(case, error)
            return None
        rates = timing.rates(case.payload_bytes)
        record = {
            **case.as_record(),
            **rates,
            "ratio": rates["gbps_median"] / run.ceilings["H2D"]["gbps_median"],
            "us_per_call": timing.median_s * 1e6,
            "us_min": timing.min_s * 1e6,
            "us_max": timing.max_s * 1e6,
            "latency_us": latency_us,
            "repeats": timing.repeats,
            "calls_per_repeat": calls,
            "clock": type(clock).__name__,
            # The thread that submits was slower than the device: its pace is what was timed.
            "host_bound": getattr(clock, "host_bound", False),
        }
        if not right:
            run.note_wrong_bytes(record)
            return None
        return record


class Flow:
    """Calls back to back: what has to be there before them, and the calls."""

    def __init__(self, state: HotBuffers, case: Case, calls: int) -> None:
        self._state = state
        self.calls = calls
        self._misses = case.misses
        self._select = state.make_plans if case.way == PLANNED else state.select
        if case.way == RECORD:
            state.reserve_plans(calls)
        self._call = self._ways(state)[case.way]
        self._graph: torch.cuda.CUDAGraph | None = None
        if case.way == GRAPH:
            self._graph = self._capture()

    def prepare(self) -> None:
        """Fresh misses for all calls of a repeat."""
        self._select(self._misses, self.calls)

    def call(self, number: int) -> None:
        """Call `number` of many; the first of a repeat replays a graph that holds all of them."""
        if self._graph is None:
            self._call(number % self.calls)
        elif number % self.calls == 0:
            self._graph.replay()

    def run(self) -> None:
        """One repeat on a side stream, from the selections to the last byte."""
        self.prepare()
        synchronize(self._state.out.device)
        with torch.cuda.stream(new_side_stream(self._state.out.device)):
            for number in range(self.calls):
                self.call(number)
        synchronize(self._state.out.device)

    def _ways(self, state: HotBuffers) -> dict[str, Callable[[int], None]]:
        return {
            "swap_in": state.swap_in,
            GRAPH: state.swap_in,
            RECORD: lambda index: state.swap_in(index, record=True),
            RESOLVE: lambda index: state.swap_in(index, skip_io=True),
            PLANNED: state.copy_planned,
            TORCH: lambda index: torch_swap_in(state, index),
        }

    def _capture(self) -> torch.cuda.CUDAGraph:
        """All calls in one graph, which reads the selections of the moment that it is replayed."""
        self.prepare()
        self._state.swap_in(0)  # loads the kernels, which a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self.calls):
                self._state.swap_in(index)
        self._state.reset()
        return graph


def flow_clock(device: torch.device, way: str) -> Clock:
    """Device time of calls back to back; of torch the host's, since its gathers are host work."""
    if device.type == "cuda" and way != TORCH:
        return QueuedClock(device)
    return WallClock(device)


def single_call_us(state: HotBuffers, case: Case) -> float:
    """From one call until its last byte is there, by the host's clock."""
    flow = Flow(state, case, 1)
    clock = PreparedClock(WallClock(state.out.device), flow.prepare)
    return time_calls(flow.call, 1, clock, 0.0).median_s * 1e6


def is_right(state: HotBuffers, case: Case, flow: Flow) -> bool:
    """Whether the calls leave the state, outputs and bytes that they must.

    One more repeat, of which the last call's hits are rows that timed calls brought; another one
    after every byte of the device pool was changed, so that no row is right for having been there
    before; then the misses of a few more calls are counted.
    """
    last = flow.calls - 1
    for new_of in (0, case.misses):
        if new_of:
            state.forget_bytes()
        flow.run()
        if not state.is_resolved(last):
            return False
        if case.way != RESOLVE and not state.has_exact_bytes(last, new_of):
            return False
    return state.count_misses(case.misses) == (case.misses, case.misses)


# --- Sections -------------------------------------------------------------------------------


def us_words(record: dict[str, Any] | None) -> str:
    """Microseconds of a call; with bytes also the share of the link."""
    if record is None:
        return f"{'-':>13}"
    share = f"({record['ratio']:.2f})" if record["payload_bytes"] else ""
    mark = "!" if record["host_bound"] else ""
    return f"{record['us_per_call']:7.1f}{mark} {share:>6}"


def measure_rows(bench: Bench) -> None:
    """us of a call by the bytes of a row, the batch and the misses."""
    sizes = bench.sizes
    print("\nby row, random host rows: us of a call (share of the link)")
    for hot, row, batch in itertools.product(
        sizes.hot_slots, (*sizes.rows, SPLIT_ROWS), sizes.batches
    ):
        geometry = bench.geometry(row, batch, hot_slots=hot)
        cells = []
        for misses in sizes.misses:
            record = bench.measure(Case(geometry, misses), "rows")
            cells.append(f"{misses} misses {us_words(record)}")
        print(f"  B {hot}, {row_words(row):>9}, batch {batch:>3}  {'  '.join(cells)}", flush=True)


def measure_ways(bench: Bench) -> None:
    """us of a call by each way, and of a single one until its last byte is there."""
    sizes = bench.sizes
    print("\nby way: us of a call (share of the link), single: until the last byte of one call")
    for row, batch in itertools.product(sizes.named_rows, sizes.batches):
        geometry = bench.geometry(row, batch)
        for misses, way in itertools.product(sizes.misses, bench.ways()):
            record = bench.measure(Case(geometry, misses, way), "ways")
            single = ""
            if record is not None and record["latency_us"] is not None:
                single = f"single {record['latency_us']:.1f}"
            print(
                f"  {row_words(row):>6}, batch {batch:>3}, {misses:>3} misses, "
                f"{WAY_WORDS[way]:<23} {us_words(record)}  {single}",
                flush=True,
            )


def measure_hosts(bench: Bench) -> None:
    """us of a call by where its rows lie in the host pool, and how large that is."""
    sizes = bench.sizes
    print("\nby host rows: us of a call (share of the link)")
    grid = itertools.product(
        sizes.named_rows, sizes.host_batches, sizes.spans, ("flat", "page_first"), PATTERNS
    )
    for row, batch, span, layout, pattern in grid:
        geometry = bench.geometry(row, batch, span_bytes=span, layout=layout, pattern=pattern)
        cells = []
        for misses in sizes.misses:
            record = bench.measure(Case(geometry, misses), "hosts")
            cells.append(f"{misses} misses {us_words(record)}")
        print(
            f"  {row_words(row):>6}, batch {batch:>3}, {span / GIB:.3g} GiB {layout:<10} "
            f"{pattern:<10}  {'  '.join(cells)}",
            flush=True,
        )


def measure_cpu(bench: Bench) -> list[dict[str, Any]]:
    """Host microseconds of a call."""
    sizes = bench.sizes
    costs = [
        call_cost(bench, Case(bench.geometry(row, batch), sizes.misses[0], way))
        for row, batch in itertools.product((*sizes.named_rows[:1], SPLIT_ROWS), sizes.cpu_batches)
        for way in ("swap_in", RECORD, PLANNED)
    ]
    found = [cost for cost in costs if cost is not None]
    print("\nhost time of one call, us")
    rows = [
        [
            f"{WAY_WORDS[cost['way']]}, {cost['row_words']}",
            str(cost["batch"]),
            f"{cost['cpu_us_median']:.1f}",
            f"{cost['cpu_us_min']:.1f}",
            f"{cost['cpu_us_p90']:.1f}",
        ]
        for cost in found
    ]
    if rows:
        print_table(["call", "batch", "median", "min", "p90"], rows)
    return found


def call_cost(bench: Bench, case: Case) -> dict[str, Any] | None:
    """Host time of a call, its bytes checked; None when it was skipped, refused or wrong."""
    run = bench.run
    if run.is_skipped(case):
        return None
    state = bench.state_for(case.geometry)
    numbers = itertools.count()
    try:
        flow = Flow(state, case, bench.sizes.cost_calls)
        # Selections come round again: the host's part of a call is the same without misses.
        flow.prepare()
        synchronize(run.device)
        cost = host_cost_us(lambda: flow.call(next(numbers)), run.device, flow.calls)
        state.reset()
        right = is_right(state, case, Flow(state, case, 1))
    except RuntimeError as error:
        run.refuse(case, error)
        return None
    if not right:
        run.note_wrong_bytes(case.as_record())
        return None
    run.call_costs.append({**case.as_record(), **cost})
    return run.call_costs[-1]


# --- Promised figures -----------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A call with K = 2048 and B = 4096 on an H200: the us it owes, and those of users today."""

    row: int
    batch: int
    misses: int
    target_us: float | None
    today_us: float | None
    way: str = "swap_in"

    def __str__(self) -> str:
        words = WAY_WORDS[self.way]
        return f"{words}, {self.row} B, batch {self.batch}, {self.misses} misses"


FIGURES = (
    Figure(512, 1, 2, 9, 13.3),
    Figure(512, 1, 410, 16, 32.9),
    Figure(512, 10, 2, 9, 13.8),
    Figure(512, 10, 410, 52, 55.1),
    Figure(512, 100, 2, 11, 15.7),
    Figure(512, 100, 410, 425, 426),
    Figure(656, 1, 2, 9, 14.6),
    Figure(656, 1, 410, 18, 49.3),
    Figure(656, 10, 2, None, 15.2),
    Figure(656, 10, 410, 66, 73.4),
    Figure(656, 100, 2, None, 17.3),
    Figure(656, 100, 410, None, 588),
    Figure(1152, 1, 2, 9, 14.6),
    Figure(1152, 1, 410, 24, 50.9),
    Figure(1152, 10, 2, None, 14.9),
    Figure(1152, 10, 410, 105, 107),
    Figure(1152, 100, 2, None, 18.1),
    Figure(1152, 100, 410, None, 948),
    Figure(512, 100, 2, 9, None, PLANNED),
)


def launch_us(device: torch.device, clock: Clock, calls: int = 32) -> float:
    """Device time of as good as nothing: a torch kernel on one element, back to back."""
    one = torch.zeros(1, device=device)
    return time_calls(lambda number: one.add_(1), calls, clock).median_s * 1e6


def floor_of(bench: Bench, case: Case, launch: float) -> dict[str, float]:
    """What no swap-in can go below in this run: a launch, a read from the host, the link's time."""
    link = case.payload_bytes / bench.run.ceilings["H2D"]["gbps_median"] / 1e3
    parts = {"launch_us": launch, "host_read_us": HOST_READ_US, "link_us": link}
    return {**parts, "floor_us": sum(parts.values())}


def measure_figures(bench: Bench, figures: Sequence[Figure] = FIGURES) -> list[dict[str, Any]]:
    """Every promised figure, and those beside them, with its floor.

    The figure is a flow of calls on random rows over the pool; beside it stand the same in a CUDA
    graph, resolving alone, and host rows one behind the other.
    """
    device = bench.run.device
    launch = launch_us(device, flow_clock(device, "swap_in"))
    found = []
    for figure in figures:
        case = Case(bench.geometry((figure.row,), figure.batch), figure.misses, figure.way)
        value = us_of(bench, case)
        found.append(
            {
                "what": str(figure),
                "us": value,
                "beside_us": dict(figures_beside(bench, case)),
                **floor_of(bench, case, launch),
                "target_us": figure.target_us,
                "today_us": figure.today_us,
            }
        )
    return found


def us_of(bench: Bench, case: Case) -> float | None:
    record = bench.measure(case, "targets")
    return None if record is None else record["us_per_call"]


def figures_beside(bench: Bench, case: Case) -> Iterator[tuple[str, float | None]]:
    if case.way == "swap_in":
        if GRAPH in bench.ways():
            yield "graph", us_of(bench, replace(case, way=GRAPH))
        yield "resolve", us_of(bench, replace(case, way=RESOLVE))
    geometry = replace(case.geometry, pattern="sequential")
    yield "sequential", us_of(bench, replace(case, geometry=geometry))


def verdicts_of(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **verdict(figure["what"], "us", figure["target_us"], figure["us"], at_most=True),
            "floor_us": figure["floor_us"],
        }
        for figure in figures
        if figure["target_us"] is not None
    ]


def print_figures(figures: Sequence[dict[str, Any]]) -> None:
    """Prints each figure there is, its neighbours, and what it consists of at least."""
    if not figures:
        return

    def words(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    beside = ("graph", "resolve", "sequential")
    parts = ("launch_us", "host_read_us", "link_us", "floor_us", "target_us", "today_us")
    rows = [
        [
            figure["what"],
            words(figure["us"]),
            *(words(figure["beside_us"].get(name)) for name in beside),
            *(words(figure[part]) for part in parts),
        ]
        for figure in figures
    ]
    print("\nus of a call on random host rows, what stands beside it, floor = launch + read + link")
    heads = ["what", "flow", *beside, "launch", "read", "link", "floor", "target", "today"]
    print_table(heads, rows)


# --- The run --------------------------------------------------------------------------------


def measure(options: RunOptions, sections: Sequence[str]) -> dict[str, Any]:
    """One run: ceilings first, then the sections. Returns what the JSON holds."""
    session = Session(options)
    arena = make_arena(options)
    sizes = sizes_for(options, arena)
    run = session.recorder(arena, sizes.ceiling_bytes, sizes.bytes_per_repeat)
    bench = Bench(run, sizes)
    session.ready(run)
    figures = measure_figures(bench) if options.mode == "targets" else []
    targets = verdicts_of(figures)
    steps = {"cpu": measure_cpu, "rows": measure_rows, "ways": measure_ways, "hosts": measure_hosts}
    for name in SECTIONS:
        if name in sections:
            steps[name](bench)

    def report() -> None:
        print_figures(figures)
        print_targets(targets)
        bench.close()

    return {
        "sections": list(sections),
        **session.close(run, sizes.ceiling_bytes, report),
        "call_costs": run.call_costs,
        "figures": figures,
        "targets": targets,
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    return run_with_sections(
        argv,
        "swap_in",
        "What does a swap-in cost beside its floor?",
        SECTIONS,
        measure,
        gpu_pool_gib={"full": 32.0, "quick": 4.0, "targets": 1.0},
        gpu_budget_s={"full": 88.0, "quick": 18.0, "targets": 32.0},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
