"""What does one launch for all layers of a restore gain over one transfer and one event a layer?

    python bench/load_layers.py                     everything, 60 seconds on an H200
    python bench/load_layers.py --quick             a look, 20 seconds
    python bench/load_layers.py --sections cpu      only some of: cpu, tokens, rows
    python bench/load_layers.py --targets           the promised figures, 20 seconds

A restore brings the same tokens of every layer, host to device, on a side stream, while the reader
on another stream waits for layer after layer. `load_layers` and `wait_layer` stand beside one
`transfer` launch and one event a layer, eagerly and in a CUDA graph. Every timed configuration is
byte-checked. Without a GPU the sizes are small, both are CPU kernels, and nothing runs beside
anything.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jobs import MHA_ROWS, MLA_ROWS, PAGE, Case, Job, Recorder, Session, mover

import sgl_kvio
from common import (
    GIB,
    MIB,
    Arena,
    RunOptions,
    WallClock,
    device_clock,
    host_cost_us,
    make_arena,
    marks_on,
    new_side_stream,
    print_table,
    print_targets,
    run_with_sections,
    synchronize,
    time_calls,
    verdict,
)

# In the order of measuring: --budget cuts from the end.
SECTIONS = ("cpu", "tokens", "rows")
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
REPEATS = 11  # of a single restore


@dataclass(frozen=True)
class Way:
    """How all layers come in: one launch or one a layer, and whether a CUDA graph holds it all."""

    name: str
    one_launch: bool
    listed: bool = False  # a tensor for every buffer of every layer, as engines may have them
    backend: str = "register"
    in_graph: bool = False


LOAD = Way("load_layers", True)
LISTED = Way("load_layers, lists", True, listed=True)
TRANSFER = Way("transfer a layer", False)
AUTO = Way("transfer a layer, auto", False, backend="auto")
LOAD_GRAPH = Way("load_layers, graph", True, in_graph=True)
TRANSFER_GRAPH = Way("transfer a layer, graph", False, in_graph=True)


def ways_on(device: torch.device) -> tuple[Way, ...]:
    """The ways that a machine has; without a GPU the one backend there is has another name."""
    if device.type != "cuda":
        return LOAD, LISTED, Way(TRANSFER.name, False, backend="cpu")
    return LOAD, LISTED, TRANSFER, AUTO, LOAD_GRAPH, TRANSFER_GRAPH


@dataclass(frozen=True)
class Sizes:
    """How much one machine is asked to move."""

    layers: int
    pool_slots: int
    tokens: tuple[int, ...]
    named_tokens: int  # in the sections that vary something else
    rows: tuple[int, ...]
    named_row: int
    cost_calls: int
    bytes_per_repeat: int
    ceiling_bytes: int


def sizes_for(options: RunOptions, arena: Arena) -> Sizes:
    quick = options.mode == "quick"
    if options.device.type != "cuda":
        return Sizes(
            layers=4,
            pool_slots=512,
            tokens=(64, 256),
            named_tokens=128,
            rows=(512, 576),
            named_row=512,
            cost_calls=20,
            bytes_per_repeat=MIB // 2,
            ceiling_bytes=64 * MIB,
        )
    layers, row = 32, 1024
    slots = min(32768, arena.device.numel() // (2 * row * layers) // PAGE * PAGE)
    return Sizes(
        layers=layers,
        pool_slots=slots,
        tokens=(64, 2048) if quick else (64, 256, 1024, 4096, 16384),
        named_tokens=2048,
        rows=(1024,) if quick else (*MHA_ROWS[:2], *MLA_ROWS),
        named_row=row,
        cost_calls=200,
        bytes_per_repeat=256 * MIB,
        ceiling_bytes=256 * MIB,
    )


def restore_of(
    sizes: Sizes, tokens: int, row_bytes: int, layout: str = "layer_first", pattern: str = "pages"
) -> Case:
    """All layers of `tokens` tokens, pages in random order unless `pattern` says otherwise."""
    return Case(
        sizes.layers,
        tokens,
        sizes.layers,
        sizes.pool_slots,
        layout=layout,
        row_bytes=row_bytes,
        pattern=pattern,
        run_tokens=min(PAGE, tokens),
    )


class Restores(Job):
    """Restores of one case by one way, each with other rows than the ones before it."""

    def __init__(self, case: Case, arena: Arena, generator: torch.Generator, way: Way) -> None:
        super().__init__(case, arena, generator)
        self.way = way
        self._where = arena.where
        self._layers = case.pool_layers
        self._flags = sgl_kvio.layer_flags(self._layers, arena.where)
        self._epoch: torch.Tensor | int = 0
        self._side = new_side_stream(arena.where)
        self._events: list[torch.cuda.Event] = []
        self._loads = [self._prepared(number) for number in range(len(self._sets))]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if way.in_graph:
            self._capture()

    def load(self, number: int) -> None:
        """Enqueues the load alone, on the current stream."""
        self._loads[number % len(self._loads)]()

    def wait(self, layer: int) -> None:
        """Orders the current stream behind one layer of the newest load."""
        if self.way.one_launch:
            sgl_kvio.wait_layer(self._flags, layer, self._epoch)
        elif self._events:
            torch.cuda.current_stream(self._where).wait_event(self._events[layer])

    def call(self, number: int) -> None:
        """The load on the side stream, and the reader's waits on the current one."""
        if self._graphs:
            self._graphs[number % len(self._graphs)].replay()
            return
        self._load_beside(number)
        for layer in range(self._layers):
            self.wait(layer)

    def seconds(self, number: int) -> tuple[float | None, float]:
        """From the reader's stream being there until layer 0, and until all layers, are in place.

        In a graph nothing can be marked between two layers: None for the first.
        """
        synchronize(self._where)
        mark, seconds_between = marks_on(self._where)
        with torch.cuda.stream(new_side_stream(self._where)):
            start = mark()
            if self._graphs:
                self.call(number)
                last = mark()
                synchronize(self._where)
                return None, seconds_between(start, last)
            self._load_beside(number)
            self.wait(0)
            first = mark()
            for layer in range(1, self._layers):
                self.wait(layer)
            last = mark()
        synchronize(self._where)
        return seconds_between(start, first), seconds_between(start, last)

    def _load_beside(self, number: int) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._side):
            self.load(number)

    def _prepared(self, number: int) -> Callable[[], None]:
        """Call `number` as a function of nothing: what is made of lists is made before."""
        dst, src, at, frm = self.arguments(number)
        options = {"page_size": self.case.page_size, "index_unit": self.case.index_unit}
        layers = [by_layer(side, self._layers) for side in (dst, src)]
        if not self.way.one_launch:
            move = mover(self.case)
            return lambda: self._transfer_layers(move, *layers, at, frm)
        pools = layers if self.way.listed else [stacked(side) for side in layers]

        def load() -> None:
            if isinstance(self._epoch, int):
                self._epoch += 1
            sgl_kvio.load_layers(*pools, at, frm, self._flags, self._epoch, **options)

        return load

    def _transfer_layers(
        self,
        move: Callable[..., None],
        dst: list[list[torch.Tensor]],
        src: list[list[torch.Tensor]],
        at: torch.Tensor,
        frm: torch.Tensor,
    ) -> None:
        self._events.clear()
        stream = torch.cuda.current_stream(self._where) if self._side is not None else None
        for targets, sources in zip(dst, src, strict=True):
            move(targets, sources, at, frm)
            if stream is not None:
                self._events.append(stream.record_event())

    def _capture(self) -> None:
        """A graph for each set of rows: the load beside the reader's waits, joined at the end."""
        assert self._side is not None, "a GPU"
        self.load(0)  # loads the kernels
        self.wait(0)
        synchronize(self._where)
        epoch = torch.zeros(1, dtype=torch.int64, device=self._where)
        epoch.fill_(self._epoch)
        self._epoch = epoch
        for number in range(len(self._loads)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                if self.way.one_launch:
                    epoch.add_(1)
                self._load_beside(number)
                for layer in range(self._layers):
                    self.wait(layer)
                torch.cuda.current_stream(self._where).wait_stream(self._side)
            self._graphs.append(graph)
        synchronize(self._where)


def by_layer(buffers: Sequence[torch.Tensor], layers: int) -> list[list[torch.Tensor]]:
    """K0, V0, K1, V1, ... as a list a layer."""
    count = len(buffers) // layers
    return [list(buffers[layer * count : (layer + 1) * count]) for layer in range(layers)]


def stacked(layers: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Evenly spaced buffers of all layers as one view each, [layers, ...]."""
    views = []
    for of_buffer in zip(*layers, strict=True):
        first = of_buffer[0]
        step = of_buffer[1].storage_offset() - first.storage_offset() if len(layers) > 1 else 0
        shape, strides = (len(layers), *first.shape), (step, *first.stride())
        views.append(torch.as_strided(first, shape, strides, first.storage_offset()))
    return views


class Bench:
    """A recorder with the sizes of its machine, and what it has measured."""

    def __init__(self, run: Recorder, sizes: Sizes) -> None:
        self.run = run
        self.sizes = sizes
        self._records: dict[tuple[Case, Way], dict[str, Any]] = {}
        self._sections: set[tuple[Case, Way, str]] = set()

    def measure(self, case: Case, way: Way, section: str) -> dict[str, Any] | None:
        """The record of a case by a way, timed now unless it was before; None without one."""
        record = self._records.get((case, way)) or self._measure(case, way)
        if record is None:
            return None
        self._records[case, way] = record
        # Timed once, it stands in every section that it is a part of.
        if (case, way, section) not in self._sections:
            self._sections.add((case, way, section))
            self.run.records.append({**record, "section": section})
        return record

    def restores(self, case: Case, way: Way) -> Restores | None:
        """Restores that move exact bytes; None when skipped, refused or wrong."""
        run = self.run
        case_of_way = with_backend(case, way)
        if run.is_skipped(case_of_way):
            return None
        try:
            job = Restores(case_of_way, run.arena, run.generator, way)
            job.call(0)
            right = job.moves_exact_bytes()
        except RuntimeError as error:
            run.refuse(case_of_way, error)
            return None
        if not right:
            run.note_wrong_bytes({**case_of_way.as_record(), "way": way.name})
            return None
        return job

    def _measure(self, case: Case, way: Way) -> dict[str, Any] | None:
        job = self.restores(case, way)
        if job is None:
            return None
        run = self.run
        # The rate of loads back to back on one stream, no reader in between; a graph has its own.
        flow = job.call if way.in_graph else job.load
        calls = max(2, min(16, self.sizes.bytes_per_repeat // case.payload_bytes))
        on_gpu = run.device.type == "cuda"
        clock = device_clock(run.device) if on_gpu else WallClock(run.device)
        timing = time_calls(flow, calls, clock, 0.0)
        times = [job.seconds(number) for number in range(REPEATS + 1)][1:]
        firsts = [first for first, _ in times if first is not None]
        rates = timing.rates(case.payload_bytes)
        return {
            **with_backend(case, way).as_record(),
            "way": way.name,
            **rates,
            "ratio": rates["gbps_median"] / run.ceilings["H2D"]["gbps_median"],
            "us_per_call": timing.median_s * 1e6,
            "us_layer_0": statistics.median(firsts) * 1e6 if firsts else None,
            "us_last": statistics.median(last for _, last in times) * 1e6,
            "repeats": timing.repeats,
            "calls_per_repeat": timing.calls_per_repeat,
            "single_repeats": REPEATS,
        }


def with_backend(case: Case, way: Way) -> Case:
    """The case as it is recorded: which backend moves its rows."""
    return replace(case, backend=way.backend, indices="gpu")


# --- Sections -------------------------------------------------------------------------------


def words_of(record: dict[str, Any] | None) -> str:
    """us to layer 0 and to the last layer of one restore, GB/s of a flow and its share."""
    if record is None:
        return f"{'-':>34}"
    first = "-" if record["us_layer_0"] is None else f"{record['us_layer_0']:.0f}"
    rate = f"{record['gbps_median']:5.2f} ({record['ratio']:.2f})"
    return f"{first:>6} / {record['us_last']:7.0f} us {rate:>13}"


def measure_tokens(bench: Bench) -> None:
    """By the tokens of a restore."""
    sizes = bench.sizes
    print("\nby tokens: us to layer 0 / to the last layer, GB/s of loads back to back (share)")
    for tokens, way in itertools.product(sizes.tokens, ways_on(bench.run.device)):
        record = bench.measure(restore_of(sizes, tokens, sizes.named_row), way, "tokens")
        print(f"  {tokens:>6} tokens  {way.name:<24} {words_of(record)}", flush=True)


def measure_rows(bench: Bench) -> None:
    """By row, layout of the host pool, and order of the tokens."""
    sizes = bench.sizes
    print("\nby row: us to layer 0 / to the last layer, GB/s of loads back to back (share)")
    a_layer = next(way for way in ways_on(bench.run.device) if not way.one_launch)
    for row, layout, pattern in itertools.product(sizes.rows, LAYOUTS, ("pages", "scattered")):
        case = restore_of(sizes, sizes.named_tokens, row, layout, pattern)
        cells = [
            f"{way.name} {words_of(bench.measure(case, way, 'rows'))}" for way in (LOAD, a_layer)
        ]
        print(f"  {row:>5} B {layout:<17} {pattern:<9}  {'  '.join(cells)}", flush=True)


def measure_cpu(bench: Bench) -> list[dict[str, Any]]:
    """Host microseconds of a restore: of the load, and of the waits for all layers."""
    sizes = bench.sizes
    case = restore_of(sizes, min(sizes.tokens), sizes.named_row)
    found = [cost_of(bench, case, way) for way in ways_on(bench.run.device)]
    costs = [cost for cost in found if cost is not None]
    print(f"\nhost time of a restore of {sizes.layers} layers, us")
    rows = [
        [
            cost["way"],
            f"{cost['load']['cpu_us_median']:.1f}",
            f"{cost['load']['cpu_us_min']:.1f}",
            f"{cost['load']['cpu_us_p90']:.1f}",
            "-" if cost["waits"] is None else f"{cost['waits']['cpu_us_median']:.1f}",
        ]
        for cost in costs
    ]
    if rows:
        print_table(["way", "load", "min", "p90", "all waits"], rows)
    return costs


def cost_of(bench: Bench, case: Case, way: Way) -> dict[str, Any] | None:
    """Host time of the load and of the waits; a graph is one replay that has both."""
    run = bench.run
    job = bench.restores(case, way)
    if job is None:
        return None
    number = itertools.count()
    calls = bench.sizes.cost_calls

    def wait_for_all() -> None:
        for layer in range(case.pool_layers):
            job.wait(layer)

    # Few enough in flight that no launch queue fills up.
    each = max(1, 64 // (1 if way.one_launch or way.in_graph else case.pool_layers))
    enqueue = job.call if way.in_graph else job.load
    load = host_cost_us(lambda: enqueue(next(number)), run.device, calls, each)
    waits = None
    if not way.in_graph:
        waits = host_cost_us(wait_for_all, run.device, calls, 2)
    cost = {**with_backend(case, way).as_record(), "way": way.name, "load": load, "waits": waits}
    run.call_costs.append(cost)
    return cost


# --- Promised figures -----------------------------------------------------------------------


def measure_targets(bench: Bench) -> list[dict[str, Any]]:
    """32 layers: CPU time of a restore; bandwidth and layer 0 beside one launch a layer."""
    sizes = bench.sizes
    cost = cost_of(bench, restore_of(sizes, min(sizes.tokens), sizes.named_row), LOAD)
    value = None if cost is None else cost["load"]["cpu_us_median"]
    what = f"host time of load_layers, {sizes.layers} layers of K and V"
    verdicts = [verdict(what, "us", 15, value, at_most=True)]
    for tokens in sizes.tokens:
        case = restore_of(sizes, tokens, sizes.named_row)
        one, many = (bench.measure(case, way, "targets") for way in (LOAD, TRANSFER))
        for field, words, at_most in (
            ("gbps_median", "bandwidth of load_layers over one launch a layer", False),
            ("us_last", "time to the last layer, over one launch a layer", True),
            ("us_layer_0", "time to layer 0, over one launch a layer", True),
        ):
            both = one is not None and many is not None
            ratio = one[field] / many[field] if both else None
            limit = 1.02 if at_most else 0.99  # what two runs of one configuration differ by
            verdicts.append(verdict(f"{tokens} tokens: {words}", "times", limit, ratio, at_most))
    return verdicts


# --- The run --------------------------------------------------------------------------------


def measure(options: RunOptions, sections: Sequence[str]) -> dict[str, Any]:
    """One run: ceilings first, then the sections. Returns what the JSON holds."""
    session = Session(options)
    arena = make_arena(options, 4 * GIB)
    sizes = sizes_for(options, arena)
    run = session.recorder(arena, sizes.ceiling_bytes, sizes.bytes_per_repeat)
    bench = Bench(run, sizes)
    session.ready(run)
    targets = measure_targets(bench) if options.mode == "targets" else []
    steps = {"cpu": measure_cpu, "tokens": measure_tokens, "rows": measure_rows}
    for name in SECTIONS:
        if name in sections:
            steps[name](bench)
    return {
        "sections": list(sections),
        **session.close(run, sizes.ceiling_bytes, lambda: print_targets(targets)),
        "call_costs": run.call_costs,
        "targets": targets,
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    return run_with_sections(
        argv,
        "load_layers",
        "What does one launch for all layers gain?",
        SECTIONS,
        measure,
        gpu_pool_gib=dict.fromkeys(("full", "quick", "targets"), 4.0),
        gpu_budget_s={"full": 60.0, "quick": 18.0, "targets": 20.0},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
