"""What does staging whole pages gain over moving their rows directly, and what does it cost?

    python bench/write_back.py                    everything, 100 seconds on an H200
    python bench/write_back.py --quick            a look, 25 seconds
    python bench/write_back.py --sections cpu     only some of: cpu, pages, staging, beside, shapes
    python bench/write_back.py --targets          the promised figures, 45 seconds

Host pools are page-first, device pools layer-first; a call moves all layers of whole pages in
random order, out (write-back, D2H) or back (restore, H2D). `transfer_staged` stands beside
`transfer` by each backend and beside plain torch. Every timed configuration is byte-checked.
Without a GPU the sizes are small and both are CPU kernels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from interference import (
    LOOP_WORDS,
    Loop,
    Provider,
    loop_steps,
    measure_loop,
    print_loop,
    takers_of,
)
from jobs import GPU_BACKENDS, MHA_ROWS, MLA_ROWS, TORCH_PAGES, Case, Recorder, Session

from common import (
    GIB,
    MIB,
    Arena,
    RunOptions,
    allowed_host_bytes,
    host_cost_us,
    print_table,
    print_targets,
    run_with_sections,
    verdict,
)

# In the order of measuring: --budget cuts from the end.
SECTIONS = ("cpu", "pages", "staging", "beside", "shapes")
KIB = 1 << 10
DIRECTIONS = ("D2H", "H2D")
LAYOUTS = ("page_first", "page_first_direct")
LOOPS = ("matmul", "decode")
# Driver copies cost about a microsecond each: more of them would only make a slow cell slower.
MAX_ENTRIES = 4096
CALLS_OF_MANY_ENTRIES = 2
# Disjoint sets of rows that a pool has to hold, so that no call repeats the one before.
LEAST_SETS = 4


@dataclass(frozen=True)
class Shape:
    """A page: tokens, layers, and the bytes of one token in one layer of one buffer."""

    tokens: int
    layers: int
    row_bytes: int

    @property
    def buffers(self) -> int:
        return 2 if self.row_bytes in MHA_ROWS else 1

    @property
    def nbytes(self) -> int:
        """All layers of K and V, or of the latent."""
        return self.copy_bytes * self.buffers

    @property
    def copy_bytes(self) -> int:
        """What one driver copy moves: a page of one buffer, since pools keep K and V apart."""
        return self.tokens * self.layers * self.row_bytes

    def __str__(self) -> str:
        kind = "K+V" if self.buffers == 2 else "MLA"
        return (
            f"{self.tokens:>3} tokens x {self.layers} layers x {self.row_bytes:>4} B {kind}, "
            f"{bytes_words(self.nbytes):>8}"
        )


# Pages of 256 KiB and of 2 MiB, and those of which one driver copy moves as much.
PAGE_256K = Shape(16, 16, 512)
PAGE_2M = Shape(64, 32, 512)
COPY_256K = Shape(16, 16, 1024)
COPY_2M = Shape(64, 32, 1024)
PAGE_8M = Shape(128, 32, 1024)


@dataclass(frozen=True)
class Sizes:
    """How much one machine is asked to move."""

    shapes: tuple[Shape, ...]  # staged
    compared: tuple[Shape, ...]  # by everything else too
    named: tuple[Shape, ...]  # in the sections that vary something else than the shape
    page_counts: tuple[int, ...]
    cpu_pages: tuple[int, ...]
    cost_calls: int
    staging_bytes: int
    staging_pages: tuple[int, ...]
    beside: Shape
    beside_pages: int
    beside_staging_pages: tuple[int, ...]
    num_blocks: tuple[int, ...]
    rounds: int
    window_s: float
    call_bytes: int
    pool_bytes: int
    bytes_per_repeat: int
    ceiling_bytes: int


def sizes_for(options: RunOptions) -> Sizes:
    quick = options.mode == "quick"
    if options.device.type != "cuda":
        return cpu_sizes()
    tokens, layers = ((64,), (32,)) if quick else ((16, 64, 128), (16, 32, 80))
    mha_rows, mla_rows = ((512,), (576,)) if quick else (MHA_ROWS, MLA_ROWS)
    mha = tuple(Shape(*shape) for shape in itertools.product(tokens, layers, mha_rows))
    mla = tuple(Shape(*shape) for shape in itertools.product(tokens, (61,), mla_rows))
    return Sizes(
        shapes=(*mha, *mla),
        compared=(*(shape for shape in mha if shape.layers == 32), *mla),
        named=(PAGE_256K, PAGE_2M) if quick else (PAGE_256K, PAGE_2M, PAGE_8M),
        page_counts=(1, 16, 129) if quick else (1, 2, 8, 32, 64, 65, 128, 129),
        cpu_pages=(128,) if quick else (1, 64, 129),
        cost_calls=200,
        staging_bytes=64 * MIB,
        staging_pages=(2, 8, 32),
        beside=PAGE_2M,
        beside_pages=64,
        beside_staging_pages=() if quick else (8,),
        num_blocks=(0, 16) if quick else (0, 16, 32, 66, 132, 528),
        rounds=5 if options.mode == "targets" else 3,
        window_s=0.05,
        call_bytes=128 * MIB,
        pool_bytes=GIB,
        bytes_per_repeat=256 * MIB,
        ceiling_bytes=256 * MIB,
    )


def cpu_sizes() -> Sizes:
    """Little, so that a machine that is busy with something else still gets through."""
    mha, mla = Shape(16, 2, 512), Shape(16, 3, 576)
    return Sizes(
        shapes=(mha, Shape(16, 4, 512), mla),
        compared=(mha, mla),
        named=(mha, mla),
        page_counts=(1, 4),
        cpu_pages=(1, 4),
        cost_calls=20,
        staging_bytes=256 * KIB,
        staging_pages=(1, 4),
        beside=mha,
        beside_pages=8,
        beside_staging_pages=(1,),
        num_blocks=(0,),
        rounds=3,
        window_s=0.02,
        call_bytes=256 * KIB,
        pool_bytes=4 * MIB,
        bytes_per_repeat=256 * KIB,
        ceiling_bytes=64 * MIB,
    )


@dataclass(frozen=True)
class Way:
    """One way of moving pages, and where its index lists are."""

    name: str
    backend: str
    place: str


STAGED = Way("staged", "staged", "cpu")
# Each list beside its pool, as an engine has them.
STAGED_OWN = Way("staged, device list on GPU", "staged", "own")
TORCH = Way("torch, a copy a page", TORCH_PAGES, "own")


def direct_ways(device: torch.device) -> list[Way]:
    """`transfer` by each backend, with indices where that is at its best."""
    auto = Way("auto", "auto", "cpu")
    if device.type != "cuda":
        return [Way("cpu", "cpu", "cpu"), auto]
    places = {"copy_engine": "cpu"}
    return [*(Way(name, name, places.get(name, "gpu")) for name in GPU_BACKENDS), auto]


class Bench:
    """A recorder with the sizes of its machine, and the configurations made of both."""

    def __init__(self, run: Recorder, sizes: Sizes) -> None:
        self.run = run
        self.sizes = sizes
        self.direct = direct_ways(run.device)
        self._shared: set[tuple[Case, str]] = set()

    def case(
        self, shape: Shape, direction: str, way: Way, layout: str = "page_first", pages: int = 0
    ) -> Case:
        """All layers of `pages` pages a call; 0 is as many as make a steady flow."""
        pages = pages or max(LEAST_SETS, self.sizes.call_bytes // shape.nbytes)
        pool_pages = max(LEAST_SETS * pages, self.sizes.pool_bytes // shape.nbytes)
        case = Case(
            shape.layers,
            pages * shape.tokens,
            shape.layers,
            pool_pages * shape.tokens,
            backend=way.backend,
            direction=direction,
            layout=layout,
            row_bytes=shape.row_bytes,
            run_tokens=shape.tokens,
            index_unit="page",
            indices=way.place,
        )
        if way.backend == "staged":
            return replace(case, staging_bytes=max(self.sizes.staging_bytes, shape.nbytes))
        if way.backend == "copy_engine":
            return replace(case, tokens=few_entries(shape, layout, pages) * shape.tokens)
        return case

    def measure(self, case: Case, section: str, **options: Any) -> dict[str, Any] | None:
        """The record of a case; few calls make a repeat where each has thousands of entries."""
        calls = CALLS_OF_MANY_ENTRIES if case.backend == "copy_engine" else 0
        notes = {"section": section, "page_bytes": page_bytes(case), "pages": pages_of(case)}
        record = self.run.measure(case, calls=calls, **options, **notes)
        if record is None or record["section"] == section:
            return record
        # Timed once, it stands in every section that it is a part of.
        shared = {**record, "section": section}
        if (case, section) not in self._shared:
            self._shared.add((case, section))
            self.run.records.append(shared)
        return shared


def few_entries(shape: Shape, layout: str, pages: int) -> int:
    """Pages that copy_engine moves as at most MAX_ENTRIES runs, at least one."""
    rows_touch = layout == "page_first_direct"
    entries = shape.layers * shape.buffers * (1 if rows_touch else shape.tokens)
    return max(1, min(pages, MAX_ENTRIES // entries))


def pages_of(case: Case) -> int:
    return case.tokens // case.run_tokens


def page_bytes(case: Case) -> int:
    return case.payload_bytes // pages_of(case)


def bytes_words(nbytes: int) -> str:
    return f"{nbytes / MIB:.3g} MiB" if nbytes >= MIB else f"{nbytes / KIB:.4g} KiB"


def rate_words(record: dict[str, Any] | None) -> str:
    """GB/s and the share of the ceiling."""
    if record is None:
        return f"{'-':>12}"
    return f"{record['gbps_median']:5.2f} ({record['ratio']:.2f})"


# --- Rates ----------------------------------------------------------------------------------


def measure_shapes(bench: Bench) -> None:
    """GB/s of a steady flow over page sizes, layers and rows."""
    print("\nby shape of a page, GB/s (share of the ceiling)")
    grid = itertools.product(LAYOUTS, DIRECTIONS, bench.sizes.shapes)
    for layout, direction, shape in grid:
        ways = [STAGED]
        if shape in bench.sizes.compared:
            ways += [*bench.direct, TORCH]
        cells = []
        for way in ways:
            record = bench.measure(bench.case(shape, direction, way, layout), "shapes")
            cells.append(f"{way.name} {rate_words(record)}")
        print(f"  {direction} {layout:<17} {shape}  {'  '.join(cells)}", flush=True)
    for direction in DIRECTIONS:
        # Rows gathered on the CPU: one shape is enough to see what that costs.
        case = bench.case(bench.sizes.compared[0], direction, Way("", "torch_index", "own"))
        record = bench.measure(replace(case, index_unit="token"), "shapes")
        print(f"  {direction} torch, rows gathered on the CPU: {rate_words(record)}")


def measure_pages(bench: Bench) -> None:
    """GB/s of calls back to back, and the time of a single one, by pages a call."""
    print("\nby pages a call, GB/s (share of the ceiling), time of a single call")
    ways = [STAGED, *(way for way in bench.direct if way.backend in ("auto", "cpu", "register"))]
    ways.append(TORCH)
    shapes = bench.sizes.named[:2]
    for shape, direction, pages in itertools.product(shapes, DIRECTIONS, bench.sizes.page_counts):
        cells = []
        for way in ways:
            case = bench.case(shape, direction, way, pages=pages)
            record = bench.measure(case, "pages", latency=True)
            time_us = "" if record is None else f" {record['latency_us']:.0f} us"
            cells.append(f"{way.name} {rate_words(record)}{time_us}")
        print(f"  {direction} {shape} x {pages:<3}  {'  '.join(cells)}", flush=True)


def staging_sizes(sizes: Sizes, shape: Shape) -> list[tuple[str, int]]:
    """Sizes of the staging buffer in words and bytes."""
    by_pages = [
        (f"{count} page{'' if count == 1 else 's'}", count * shape.nbytes)
        for count in sizes.staging_pages
    ]
    return [*by_pages, (bytes_words(sizes.staging_bytes), sizes.staging_bytes)]


def measure_staging(bench: Bench) -> None:
    """GB/s by the size of the staging buffer."""
    print("\nby staging buffer, GB/s (share of the ceiling)")
    for shape, direction in itertools.product(bench.sizes.named, DIRECTIONS):
        cells = []
        for words, nbytes in staging_sizes(bench.sizes, shape):
            case = replace(bench.case(shape, direction, STAGED), staging_bytes=nbytes)
            cells.append(f"{words} {rate_words(bench.measure(case, 'staging'))}")
        print(f"  {direction} {shape}  {'  '.join(cells)}", flush=True)


# --- Host time ------------------------------------------------------------------------------


def measure_cpu(bench: Bench) -> list[dict[str, Any]]:
    """Host microseconds of a call, staged and direct, by pages a call."""
    ways = [STAGED, *(way for way in bench.direct if way.backend != "copy_engine")]
    if bench.run.device.type == "cuda":
        ways.insert(1, STAGED_OWN)
    shapes = bench.sizes.named[:2]
    costs = [
        call_cost(bench, bench.case(shape, direction, way, pages=pages), way)
        for shape, direction, pages, way in itertools.product(
            shapes, DIRECTIONS, bench.sizes.cpu_pages, ways
        )
    ]
    found = [cost for cost in costs if cost is not None]
    print("\nhost time of one call, us")
    rows = [
        [
            f"{cost['direction']} {cost['way']}, pages of {bytes_words(cost['page_bytes'])}",
            str(cost["pages"]),
            f"{cost['cpu_us_median']:.1f}",
            f"{cost['cpu_us_min']:.1f}",
            f"{cost['cpu_us_p90']:.1f}",
            f"{cost['cpu_us_per_page']:.2f}",
        ]
        for cost in found
    ]
    if rows:
        print_table(["call", "pages", "median", "min", "p90", "a page"], rows)
    return found


def call_cost(bench: Bench, case: Case, way: Way) -> dict[str, Any] | None:
    """Host time of a call, its bytes checked; None when it was skipped, refused or wrong."""
    run = bench.run
    job = run.ready(case)
    if job is None:
        return None
    number = itertools.count()
    # Enough calls for a median, and not more than some GiB.
    most = 8 * bench.sizes.bytes_per_repeat // case.payload_bytes
    calls = min(bench.sizes.cost_calls, max(12, most))
    pages = pages_of(case)
    cost = host_cost_us(lambda: job.call(next(number)), run.device, calls, max(1, 64 // pages))
    cost_record = {
        **case.as_record(),
        "way": way.name,
        "pages": pages,
        "page_bytes": page_bytes(case),
        **cost,
        "cpu_us_per_page": cost["cpu_us_median"] / pages,
    }
    run.call_costs.append(cost_record)
    return cost_record


# --- Beside a computation -------------------------------------------------------------------


def staged_name(num_blocks: int, staging_bytes: int) -> str:
    blocks = f"{num_blocks} CTAs" if num_blocks else "every SM"
    return f"staged, {blocks}, {bytes_words(staging_bytes)}"


def transfers_beside(bench: Bench, directions: Sequence[str]) -> Iterator[Provider]:
    """A contiguous copy as the ceiling, staged by grid and by staging buffer, and the others."""
    sizes, shape, pages = bench.sizes, bench.sizes.beside, bench.sizes.beside_pages
    for direction in directions:
        staged = bench.case(shape, direction, STAGED, pages=pages)
        nbytes = staged.payload_bytes
        yield Provider("contiguous copy", direction, None, nbytes)
        for num_blocks in sizes.num_blocks:
            name = staged_name(num_blocks, staged.staging_bytes)
            yield Provider(name, direction, replace(staged, num_blocks=num_blocks), nbytes)
        for count in sizes.beside_staging_pages:
            case = replace(staged, staging_bytes=count * shape.nbytes)
            yield Provider(staged_name(0, case.staging_bytes), direction, case, nbytes)
        for way in bench.direct:
            if way.backend != "copy_engine":  # an entry a row would be all that is seen
                case = bench.case(shape, direction, way, pages=pages)
                yield Provider(f"{way.name}, direct", direction, case, nbytes)


def measure_beside(bench: Bench, wanted: Sequence[Provider]) -> list[dict[str, Any]]:
    """Slowdown of a large and of a decode-size matrix product, and the GB/s of each transfer."""
    run, sizes = bench.run, bench.sizes
    takers = takers_of(run, wanted, sizes.window_s)
    steps = loop_steps(run.device)
    found = []
    for name in LOOPS:
        loop = Loop(name, steps[name](), run.device, sizes.window_s)
        records = measure_loop(run, loop, takers, sizes.rounds)
        print_loop(loop, records)
        found += records
        del loop
    for taker in takers:
        if taker.provider.direction == "D2H":
            run.arena.note_written(pool_bytes_of(taker.provider, run.arena))
    return found


def pool_bytes_of(provider: Provider, arena: Arena) -> int:
    return arena.nbytes if provider.case is None else provider.case.pool_bytes


# --- Promised figures -----------------------------------------------------------------------


def measure_targets(bench: Bench) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every promised figure with the measured one, and the records beside compute."""
    verdicts = list(rate_verdicts(bench))
    verdicts += cost_verdicts(bench)
    staged = {
        direction: bench.case(PAGE_2M, direction, STAGED, pages=bench.sizes.beside_pages)
        for direction in DIRECTIONS
    }
    wanted = []
    for direction, case in staged.items():
        wanted.append(Provider("contiguous copy", direction, None, case.payload_bytes))
        wanted.append(Provider("staged", direction, case, case.payload_bytes))
    beside = measure_beside(bench, wanted)
    return [*verdicts, *beside_verdicts(beside)], beside


def rate_verdicts(bench: Bench) -> Iterator[dict[str, Any]]:
    promises = ((PAGE_2M, 53), (COPY_2M, 53), (PAGE_256K, 48), (COPY_256K, 48))
    for (shape, gbps), direction, layout in itertools.product(promises, DIRECTIONS, LAYOUTS):
        record = bench.measure(bench.case(shape, direction, STAGED, layout), "targets")
        what = (
            f"{direction} {layout}, pages of {bytes_words(shape.nbytes)}"
            f" in copies of {bytes_words(shape.copy_bytes)}"
        )
        rate, share = (None, None) if record is None else (record["gbps_median"], record["ratio"])
        yield verdict(what, "GB/s", gbps, rate)
        if gbps == 53:
            yield verdict(f"{what}, over the ceiling", "times", 0.97, share)


def cost_verdicts(bench: Bench) -> Iterator[dict[str, Any]]:
    for shape, direction in itertools.product((PAGE_2M, PAGE_256K), DIRECTIONS):
        case = bench.case(shape, direction, STAGED, pages=128)
        cost = call_cost(bench, case, STAGED)
        value = None if cost is None else cost["cpu_us_per_page"]
        what = f"{direction}, host time of a page of {bytes_words(shape.nbytes)}, 128 a call"
        yield verdict(what, "us", 1.5, value, at_most=True)


def beside_verdicts(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    found = {(r["loop"], r["direction"]): r for r in records if r["provider"] == "staged"}
    words = {"matmul": "large matrix product", "decode": "decode-size product"}
    limits = {"matmul": 1.04, "decode": 1.10}
    for loop, direction in itertools.product(LOOPS, DIRECTIONS):
        record = found.get((loop, direction), {"slowdown": None, "gbps_beside": None})
        yield verdict(
            f"{words[loop]} beside {direction} of 2 MiB pages",
            "times",
            limits[loop],
            record["slowdown"],
            at_most=True,
        )
        yield verdict(
            f"{direction} of 2 MiB pages beside the {words[loop]}",
            "GB/s",
            52,
            record["gbps_beside"],
        )


# --- The run --------------------------------------------------------------------------------


def measure(options: RunOptions, sections: Sequence[str]) -> dict[str, Any]:
    """One run: ceilings first, then the sections. Returns what the JSON holds."""
    session = Session(options)
    sizes = sizes_for(options)
    pool = int(min(options.pool_bytes, allowed_host_bytes(options.device))) // MIB * MIB
    arena = Arena(options.device, pool, options.host_memory)
    run = session.recorder(arena, sizes.ceiling_bytes, sizes.bytes_per_repeat)
    bench = Bench(run, sizes)
    session.ready(run)
    targets: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    if options.mode == "targets":
        targets, beside = measure_targets(bench)
    if "cpu" in sections:
        measure_cpu(bench)
    if "pages" in sections:
        measure_pages(bench)
    if "staging" in sections:
        measure_staging(bench)
    if "beside" in sections:
        directions = ("D2H",) if options.mode == "quick" else DIRECTIONS
        beside = measure_beside(bench, list(transfers_beside(bench, directions)))
    if "shapes" in sections:
        measure_shapes(bench)
    return {
        "sections": list(sections),
        "loops": {name: LOOP_WORDS[name] for name in LOOPS},
        **session.close(run, sizes.ceiling_bytes, lambda: print_targets(targets)),
        "call_costs": run.call_costs,
        "beside": beside,
        "targets": targets,
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    return run_with_sections(
        argv,
        "write_back",
        "What does staging whole pages gain and cost?",
        SECTIONS,
        measure,
        gpu_pool_gib=dict.fromkeys(("full", "quick", "targets"), 4.0),
        gpu_budget_s={"full": 88.0, "quick": 18.0, "targets": 35.0},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
