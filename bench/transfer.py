"""How fast is `kvio::transfer`, beside the link's ceiling and beside plain torch?

    python bench/transfer.py                 everything, about two minutes on an H200
    python bench/transfer.py --targets       only the promised rows, with PASS or MISS
    python bench/transfer.py --quick         a look, 30 seconds

Every timed configuration moves random rows, other ones in every call, and is byte-checked against a
torch gather. Without a GPU the device pool is ordinary memory and the ceiling is one memory copy.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jobs import (
    GPU_BACKENDS,
    MHA_ROWS,
    MLA_ROWS,
    PAGE,
    TORCH_PATHS,
    Case,
    Group,
    Recorder,
    Session,
    by_ctas,
)

from common import (
    GIB,
    MIB,
    Arena,
    RunOptions,
    add_mode_options,
    add_run_options,
    allowed_host_bytes,
    finish,
    measure_ceilings,
    mode_of,
    print_table,
    resolve_run_options,
)

ODD_ROWS = (132, 656, 4680)


# --- What is measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much one machine is asked to move."""

    layers: int
    restore_tokens: int
    restore_slots: int
    write_back_tokens: int
    write_back_slots: int
    growth_pages: tuple[int, ...]
    span_gib: tuple[float, ...]
    span_tokens: int
    bytes_per_repeat: int
    ceiling_bytes: int


GPU_SIZES = Sizes(
    layers=32,
    restore_tokens=32768,
    restore_slots=65536,
    write_back_tokens=4096,
    write_back_slots=16384,
    growth_pages=tuple(4**power for power in range(9)),
    span_gib=(0.5, 1, 4, 16),
    span_tokens=131072,
    bytes_per_repeat=512 * MIB,
    ceiling_bytes=256 * MIB,
)
CPU_SIZES = Sizes(
    layers=4,
    restore_tokens=8192,
    restore_slots=24576,
    write_back_tokens=4096,
    write_back_slots=16384,
    growth_pages=tuple(4**power for power in range(6)),
    span_gib=(0.125, 0.5),
    span_tokens=16384,
    bytes_per_repeat=8 * MIB,
    ceiling_bytes=64 * MIB,
)


@dataclass(frozen=True)
class Target:
    """GB/s that the register kernel owes for some configurations, by number of CTAs."""

    direction: str
    layout: str
    rows: tuple[int, ...]
    pattern: str
    gbps_by_ctas: dict[int, float]


TARGETS = (
    Target("H2D", "layer_first", MHA_ROWS, "pages", {1: 46, 2: 50.5, 4: 50.5}),
    Target("H2D", "layer_first", MHA_ROWS, "scattered", {1: 46, 2: 50.5, 4: 50.5}),
    Target("H2D", "layer_first", MLA_ROWS, "pages", {1: 36, 2: 50, 4: 50.5}),
    Target("H2D", "layer_first", MLA_ROWS, "scattered", {1: 36, 2: 50, 4: 50.5}),
    Target("H2D", "page_first", MHA_ROWS, "pages", {1: 24, 2: 47, 4: 50.5}),
    Target("D2H", "layer_first", (*MHA_ROWS, *MLA_ROWS), "pages", {1: 44, 2: 52, 4: 52}),
    Target("D2H", "layer_first", (*MHA_ROWS, *MLA_ROWS), "scattered", {1: 25, 2: 45, 4: 52}),
)
# Host microseconds a call may cost, by number of buffers in it.
CALL_COST_TARGETS_US = {2: 8.0, 64: 40.0}


class Plan:
    """Which configurations one machine measures."""

    def __init__(self, sizes: Sizes, backends: Sequence[str], arena_bytes: int) -> None:
        self.sizes = sizes
        self.backends = backends
        self.arena_bytes = arena_bytes
        self.one_layer = Case(1, sizes.restore_tokens, sizes.layers, sizes.restore_slots)
        self.all_layers = Case(
            sizes.layers, sizes.write_back_tokens, sizes.layers, sizes.write_back_slots
        )

    def targets(self) -> Iterator[tuple[Target, Group]]:
        for target in TARGETS:
            base = self.one_layer if target.direction == "H2D" else self.all_layers
            base = replace(base, direction=target.direction, layout=target.layout)
            for row in target.rows:
                case = replace(base, row_bytes=row, pattern=target.pattern)
                yield target, by_ctas(case, tuple(target.gbps_by_ctas))

    def quick(self) -> Iterator[tuple[str, Iterable[Group]]]:
        write_back = replace(self.all_layers, direction="D2H")
        some = (("layer_first", "page_first"), (512, 1152), (1, 2, 4))
        yield "restore, one layer", self.grid(self.one_layer, *some)
        yield "write-back, all layers", self.grid(write_back, *some)
        yield "plain torch", self.torch_paths((512,))

    def full(self) -> Iterator[tuple[str, Iterable[Group]]]:
        layouts = ("layer_first", "page_first", "page_first_direct")
        every = (layouts, (*MHA_ROWS, *MLA_ROWS), (1, 2, 4, 8, 0))
        some = (layouts[:2], (512, 1152), (1, 2, 4, 0))
        odd = (layouts[:2], ODD_ROWS, (1, 2, 4, 0))
        write_back = replace(self.all_layers, direction="D2H")
        int32 = replace(self.one_layer, index_dtype="int32")
        # What no other mode answers comes first, the long sweeps last: --budget cuts from the end.
        yield "plain torch", self.torch_paths((512, 1152, 2048))
        yield "growth, page indices (with latency)", self.growth()
        yield "large host pools", self.large_pools()
        yield "restore, one layer", self.grid(self.one_layer, *every)
        yield "write-back, all layers", self.grid(write_back, *every)
        yield "restore, one layer, odd rows", self.grid(self.one_layer, *odd)
        yield "restore, one layer, int32 indices", self.grid(int32, *some)
        yield "restore, all layers", self.grid(self.all_layers, *some)
        yield (
            "write-back, one layer",
            self.grid(replace(self.one_layer, direction="D2H"), *some),
        )

    def grid(
        self, base: Case, layouts: Sequence[str], rows: Sequence[int], ctas: Sequence[int]
    ) -> Iterator[Group]:
        patterns = ("pages", "scattered")
        for backend, layout, row, pattern in itertools.product(
            self.backends, layouts, rows, patterns
        ):
            case = replace(base, backend=backend, layout=layout, row_bytes=row, pattern=pattern)
            yield by_ctas(case, ctas)

    def torch_paths(self, restore_rows: Sequence[int]) -> Iterator[Group]:
        for path, layout in itertools.product(TORCH_PATHS, ("layer_first", "page_first")):
            mine: dict[str, Any] = {"backend": path, "layout": layout}
            for row in restore_rows:
                yield [replace(self.one_layer, row_bytes=row, **mine)]
            yield [replace(self.all_layers, direction="D2H", **mine)]

    def growth(self) -> Iterator[Group]:
        """One layer of 512-byte K+V rows, from one page to as many as there is room for."""
        one_page = Case(1, PAGE, 1, PAGE, index_unit="page")
        room = self.arena_bytes // one_page.pool_bytes
        counts = [count for count in self.sizes.growth_pages if count <= room]
        for backend, count in itertools.product(self.backends, counts):
            slots = counts[-1] * PAGE
            yield [replace(one_page, backend=backend, tokens=count * PAGE, pool_slots=slots)]

    def large_pools(self) -> Iterator[Group]:
        """Scattered rows over a growing span of host memory: address translation, not the link."""
        for backend, row, span, pattern in itertools.product(
            self.backends, (512, 1152), self.sizes.span_gib, ("scattered", "host_order")
        ):
            case = Case(1, 0, 1, 1, backend=backend, row_bytes=row, pattern=pattern)
            slots = int(span * GIB) // (case.pool_bytes * PAGE) * PAGE
            case = replace(case, pool_slots=slots, tokens=min(self.sizes.span_tokens, slots))
            yield by_ctas(case, (8, 0))


# --- The run --------------------------------------------------------------------------------


class Run(Recorder):
    """A recorder that prints a line for each group."""

    def section(self, title: str, groups: Iterable[Group]) -> None:
        """Measures groups and prints a line for each: GB/s and share of the ceiling, by CTAs."""
        print(f"\n{title}")
        for group in groups:
            cells = [self._cell(case) for case in group]
            print(f"  {group[0]!s:<70}{'  '.join(cells)}", flush=True)

    def _cell(self, case: Case) -> str:
        record = self.measure(case, latency=case.index_unit == "page")
        mark = f"q{case.num_blocks} " if case.num_blocks else ""
        if record is None:
            return f"{mark}{'-':>12}"
        text = f"{mark}{record['gbps_median']:5.2f} ({record['ratio']:.2f})"
        latency = record["latency_us"]
        return text if latency is None else f"{text} {latency:.0f} us"


def accepted_backends(run: Run, wanted: Sequence[str]) -> tuple[str, ...]:
    """Those of the wanted backends that take a small transfer here, with their cost of a call."""
    accepted = []
    for backend in wanted:
        place = Case(1, PAGE, 1, PAGE, backend=backend).index_place
        if not run.call_cost(backend, 2, place):
            print(f"without {backend}: {(run.refused or run.skipped)[-1]['reason']}")
            continue
        accepted.append(backend)
        run.call_cost(backend, 64, place)
        if place == "gpu":
            run.call_cost(backend, 2, "cpu")
    return tuple(accepted)


def judge(run: Run, plan: Plan) -> list[dict[str, Any]]:
    """Every target with what was measured for it; "MISS" also where nothing was."""
    verdicts = []
    for target, group in plan.targets():
        for case in group:
            record = run.find(case) or {"gbps_median": None, "ratio": None}
            value, wanted = record["gbps_median"], target.gbps_by_ctas[case.num_blocks]
            verdicts.append(
                {
                    "what": str(case),
                    "num_blocks": case.num_blocks,
                    "unit": "GB/s",
                    "target": wanted,
                    "value": value,
                    "ratio": record["ratio"],
                    "verdict": "PASS" if value is not None and value >= wanted else "MISS",
                }
            )
    costs = {
        cost["buffers"]: cost["cpu_us_median"]
        for cost in run.call_costs
        if cost["backend"] == "register" and cost["index_place"] == "gpu"
    }
    for buffers, limit in CALL_COST_TARGETS_US.items():
        value = costs.get(buffers)
        verdicts.append(
            {
                "what": f"host time of a call with {buffers} buffers",
                "num_blocks": 0,
                "unit": "us",
                "target": limit,
                "value": value,
                "ratio": None,
                "verdict": "PASS" if value is not None and value <= limit else "MISS",
            }
        )
    return verdicts


def print_verdicts(verdicts: list[dict[str, Any]]) -> None:
    if not verdicts:
        return
    rows = [
        [
            item["what"],
            str(item["num_blocks"] or ""),
            "-" if item["value"] is None else f"{item['value']:.2f}",
            f"{'<=' if item['unit'] == 'us' else '>='} {item['target']:g} {item['unit']}",
            "" if item["ratio"] is None else f"{item['ratio']:.2f}",
            item["verdict"],
        ]
        for item in verdicts
    ]
    print("\ntargets")
    print_table(["what", "CTAs", "measured", "target", "of ceiling", "verdict"], rows)
    passed = sum(item["verdict"] == "PASS" for item in verdicts)
    print(f"{passed} of {len(verdicts)} targets met")


def print_call_costs(costs: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{cost['backend']}, {cost['buffers']} buffers, indices on {cost['index_place']}",
            f"{cost['cpu_us_median']:.2f}",
            f"{cost['cpu_us_min']:.2f}",
            f"{cost['cpu_us_p90']:.2f}",
        ]
        for cost in costs
    ]
    print("\nhost time of one call, us")
    print_table(["call", "median", "min", "p90"], rows)


def measure(options: RunOptions, backends: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """One run: ceilings first, then everything the mode asks for. Returns what the JSON holds."""
    session = Session(options)
    arena = Arena(options.device, arena_bytes(options), options.host_memory)
    run = Run(
        arena,
        ceilings=measure_ceilings(options.device, sizes.ceiling_bytes),
        bytes_per_repeat=sizes.bytes_per_repeat,
        budget_s=options.budget_s,
        seed=options.seed,
    )
    session.ready(run)

    plan = Plan(sizes, accepted_backends(run, backends), arena.nbytes)
    judged = options.device.type == "cuda" and "register" in plan.backends
    judged = judged and options.mode != "quick"
    if judged:
        run.section("targets", (group for _, group in plan.targets()))
    sections = {"full": plan.full, "quick": plan.quick, "targets": lambda: ()}[options.mode]
    for title, groups in sections():
        run.section(title, groups)
    print_call_costs(run.call_costs)
    verdicts = judge(run, plan) if judged else []
    return {
        **session.close(run, sizes.ceiling_bytes, lambda: print_verdicts(verdicts)),
        "call_costs": run.call_costs,
        "targets": verdicts,
    }


# --- Command line ---------------------------------------------------------------------------


def _sizes(sizes: Sizes, tokens: int | None, layers: int | None) -> Sizes:
    if layers is not None:
        sizes = replace(sizes, layers=layers)
    if tokens is None:
        return sizes
    return replace(
        sizes,
        restore_tokens=tokens,
        restore_slots=2 * tokens,
        write_back_tokens=tokens,
        write_back_slots=2 * tokens,
    )


def arena_bytes(options: RunOptions) -> int:
    """What was asked for, within half of what host memory allows and a third of the GPU's."""
    allowed = allowed_host_bytes(options.device)
    if options.device.type == "cuda":
        free_on_gpu, _ = torch.cuda.mem_get_info(options.device)
        allowed = min(allowed, free_on_gpu / 3)
    return int(min(options.pool_bytes, allowed)) // MIB * MIB


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    parser = argparse.ArgumentParser(description="How fast is kvio::transfer?")
    add_mode_options(parser, "a look in 30 seconds", "only the promised rows, PASS or MISS")
    parser.add_argument("--backends", help="comma list (default: all that accept a transfer)")
    parser.add_argument("--tokens", type=int, help="tokens of a call, a multiple of 64")
    parser.add_argument("--layers", type=int, help="layers of a pool")
    add_run_options(parser)
    args = parser.parse_args(argv)
    if args.tokens is not None and (args.tokens < PAGE or args.tokens % PAGE):
        parser.error(f"--tokens got {args.tokens}, needs a positive multiple of {PAGE}")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers got {args.layers}, needs at least 1")
    mode = mode_of(parser, args)
    options = resolve_run_options(
        args,
        argv,
        "transfer.py",
        mode=mode,
        gpu_pool_gib={"full": 16.0, "quick": 4.0, "targets": 8.0}[mode],
        gpu_budget_s={"full": 130.0, "quick": 20.0, "targets": 45.0}[mode],
    )
    on_gpu = options.device.type == "cuda"
    backends = (args.backends or (",".join(GPU_BACKENDS) if on_gpu else "cpu")).split(",")
    sizes = _sizes(GPU_SIZES if on_gpu else CPU_SIZES, args.tokens, args.layers)
    return finish(options, "transfer", measure(options, backends, sizes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
