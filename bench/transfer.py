"""How fast is `kvio::transfer`, beside the link's ceiling and beside plain torch?

    python bench/transfer.py                 everything, about two minutes on an H200
    python bench/transfer.py --targets       only the promised rows, with PASS or MISS
    python bench/transfer.py --quick         a look, 30 seconds

Every timed configuration moves random rows, other ones in every call, and is byte-checked against a
torch gather. Without a GPU the device pool is ordinary memory and the ceiling is one memory copy.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import sgl_kvio
from common import (
    GIB,
    MIB,
    RESULTS,
    Arena,
    Clock,
    WallClock,
    describe_machine,
    device_clock,
    fill_random,
    host_cost_us,
    machine_slug,
    machine_title,
    measure_ceilings,
    print_table,
    synchronize,
    time_calls,
    write_result,
)
from sgl_kvio.layouts import find_layout, make_geometry
from sgl_kvio.memory import memory_limits

PAGE = 64
MHA_ROWS = (512, 1024, 2048)
MLA_ROWS = (576, 1152)
ODD_ROWS = (132, 656, 4680)
SM_BACKENDS = ("register", "tma")
GPU_BACKENDS = (*SM_BACKENDS, "copy_engine")
# What a torch user would write without this library.
TORCH_PATHS = ("torch_index", "torch_fancy")


# --- What is measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One configuration. `row_bytes` is one token in one layer of one buffer.

    `layers_per_call` is 1 (rotating through the pool's layers) or the whole pool. `pattern` is
    "pages" (permuted pages of 64 tokens), "scattered" (single tokens in random order) or
    "host_order" (scattered tokens, sorted by host address).
    """

    layers_per_call: int
    tokens: int
    pool_layers: int
    pool_slots: int
    backend: str = "register"
    direction: str = "H2D"
    layout: str = "layer_first"
    row_bytes: int = 512
    pattern: str = "pages"
    num_blocks: int = 0
    index_dtype: str = "int64"
    index_unit: str = "token"

    @property
    def kind(self) -> str:
        return "mha" if self.row_bytes in MHA_ROWS else "mla"

    @property
    def buffers(self) -> int:
        return 2 if self.kind == "mha" else 1

    @property
    def page_size(self) -> int:
        return PAGE if self.pattern == "pages" else 1

    @property
    def payload_bytes(self) -> int:
        return self.tokens * self.row_bytes * self.buffers * self.layers_per_call

    @property
    def pool_bytes(self) -> int:
        return self.pool_slots * self.row_bytes * self.buffers * self.pool_layers

    @property
    def index_place(self) -> str:
        """Where the indices lie: "gpu", "cpu", or "own" (each list beside its pool)."""
        if self.backend in TORCH_PATHS:
            return "own"
        return "gpu" if self.backend in ("auto", *SM_BACKENDS) else "cpu"

    def as_record(self) -> dict[str, Any]:
        names = ("kind", "buffers", "page_size", "payload_bytes", "pool_bytes", "index_place")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        """In words, without the number of CTAs."""
        rows = f"{self.row_bytes} B {'K+V' if self.buffers == 2 else 'MLA'}"
        words = f"{self.backend:<11} {self.direction} {self.layout:<17} {rows:>10} {self.pattern}"
        if self.index_unit == "page":
            return f"{words} x {self.tokens // PAGE}"
        return f"{words} over {self.pool_bytes / GIB:.3g} GiB" if self.pool_layers == 1 else words


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

# Configurations that differ only in the number of CTAs: one printed line.
Group = list[Case]


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
                yield target, _by_ctas(case, tuple(target.gbps_by_ctas))

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
            yield _by_ctas(case, ctas)

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
            yield _by_ctas(case, (8, 0))


def _by_ctas(case: Case, ctas: Sequence[int]) -> Group:
    counts = ctas if case.backend in SM_BACKENDS else (0,)
    return [replace(case, num_blocks=count) for count in counts]


# --- One configuration ----------------------------------------------------------------------


def pool_layers(flat: torch.Tensor, case: Case, layout: str) -> list[list[torch.Tensor]]:
    """Views [layer][buffer] (K and V, or the latent) of a pool cut from the start of `flat`."""
    entry = find_layout(case.kind, layout)
    geometry = make_geometry(
        entry,
        num_pages=case.pool_slots // PAGE,
        page_size=PAGE,
        num_layers=case.pool_layers,
        num_heads=1,
        head_dim=case.row_bytes // 2,
        v_head_dim=None,
    )
    (shape,) = entry.tensor_shapes(geometry)
    return entry.layer_views([flat[: case.pool_bytes].view(torch.bfloat16).view(shape)])


def gather(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows at token `slots` of a flat or paged view, by torch, as comparable integers."""
    rows = view[slots // PAGE, slots % PAGE] if view.dim() == 4 else view[slots]
    return rows.view(torch.int16)


@dataclass(frozen=True)
class Rows:
    """One set of rows to move: token slots on the device for the check, indices for the call."""

    host_slots: torch.Tensor
    device_slots: torch.Tensor
    host_indices: torch.Tensor
    device_indices: torch.Tensor


class Job:
    """A configuration with its pools and index sets, ready to be called, timed and checked."""

    MAX_SETS = 8

    def __init__(self, case: Case, arena: Arena, generator: torch.Generator) -> None:
        self.case = case
        self._arena = arena
        self._host = pool_layers(arena.host, case, case.layout)
        self._mirror = pool_layers(arena.mirror, case, case.layout)
        self._far = pool_layers(arena.device, case, "layer_first")
        self._sets = self._draw_sets(generator)
        self._move = mover(case)

    def call(self, number: int) -> None:
        """Call `number` of many: other rows, or another layer, than the calls before it."""
        self._move(*self.arguments(number))

    def arguments(self, number: int) -> tuple[Any, ...]:
        """dst, src, dst_indices, src_indices of call `number`."""
        host, far = self._buffers(self._host, number), self._buffers(self._far, number)
        rows = self._sets[number % len(self._sets)]
        if self.case.direction == "H2D":
            return far, host, rows.device_indices, rows.host_indices
        return host, far, rows.host_indices, rows.device_indices

    def moves_exact_bytes(self) -> bool:
        """Runs call 0 on content that no earlier call has seen and compares all of its rows."""
        device_pool = self._arena.device[: self.case.pool_bytes]
        if self.case.direction == "H2D":
            device_pool.zero_()
        else:
            fill_random(device_pool)
        synchronize(self._arena.where)
        self.call(0)
        synchronize(self._arena.where)
        if self.case.direction == "D2H":
            self._arena.refresh_mirror(self.case.pool_bytes)
        rows = self._sets[0]
        pairs = zip(self._buffers(self._mirror, 0), self._buffers(self._far, 0), strict=True)
        return all(
            torch.equal(gather(host, rows.host_slots), gather(far, rows.device_slots))
            for host, far in pairs
        )

    def _buffers(self, layers: list[list[torch.Tensor]], number: int) -> list[torch.Tensor]:
        if self.case.layers_per_call == 1:
            return layers[number % len(layers)]
        return [buffer for layer in layers for buffer in layer]

    def _draw_sets(self, generator: torch.Generator) -> list[Rows]:
        """Disjoint sets of rows, so that no call finds its rows in a cache from the one before."""
        host, far = (self._shuffled_slots(generator) for _ in range(2))
        tokens = self.case.tokens
        count = min(self.MAX_SETS, host.numel() // tokens)
        sets = zip(host.split(tokens)[:count], far.split(tokens)[:count], strict=True)
        return [self._rows(host_slots, device_slots) for host_slots, device_slots in sets]

    def _shuffled_slots(self, generator: torch.Generator) -> torch.Tensor:
        """All token slots of the pool in the order of the pattern, int64 on the device."""
        run, where = self.case.page_size, self._arena.where
        runs = torch.randperm(self.case.pool_slots // run, generator=generator, device=where)
        return (runs[:, None] * run + torch.arange(run, device=where)).flatten()

    def _rows(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Rows:
        if self.case.pattern == "host_order":
            host_slots = host_slots.sort().values
        place, cpu, where = self.case.index_place, torch.device("cpu"), self._arena.where
        return Rows(
            host_slots,
            device_slots,
            self._indices(host_slots).to(where if place == "gpu" else cpu),
            self._indices(device_slots).to(cpu if place == "cpu" else where),
        )

    def _indices(self, slots: torch.Tensor) -> torch.Tensor:
        wanted = slots[::PAGE] // PAGE if self.case.index_unit == "page" else slots
        return wanted.to(getattr(torch, self.case.index_dtype))


def mover(case: Case) -> Callable[..., None]:
    """The function that moves rows: (dst, src, dst_indices, src_indices) -> None."""
    if case.backend == "torch_index":
        return _torch_index
    if case.backend == "torch_fancy":
        return _torch_fancy
    return functools.partial(
        sgl_kvio.transfer,
        page_size=case.page_size,
        index_unit=case.index_unit,
        backend=case.backend,
        num_blocks=case.num_blocks,
    )


def _torch_index(
    dst: list[torch.Tensor],
    src: list[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
) -> None:
    """The careful way: index_select, one copy over the link through pinned memory, index_copy_."""
    for target, source in zip(dst, src, strict=True):
        shape = (src_indices.numel(), *source.shape[1:])
        on_gpu = target.is_cuda or source.is_cuda
        packed = torch.empty(shape, dtype=source.dtype, pin_memory=on_gpu)
        if source.is_cuda:
            packed.copy_(source.index_select(0, src_indices))
        else:
            torch.index_select(source, 0, src_indices, out=packed)
        target.index_copy_(0, dst_indices, packed.to(target.device, non_blocking=target.is_cuda))


def _torch_fancy(
    dst: list[torch.Tensor],
    src: list[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
) -> None:
    """What one writes first: `dst[i] = src[j].to(device)`."""
    for target, source in zip(dst, src, strict=True):
        target[dst_indices] = source[src_indices].to(target.device)


# --- The run --------------------------------------------------------------------------------


class Run:
    """Measures configurations one after another and keeps what it found."""

    def __init__(self, options: Options, arena: Arena) -> None:
        self.sizes = options.sizes
        self.ceilings = measure_ceilings(options.device, options.sizes.ceiling_bytes)
        self.records: list[dict[str, Any]] = []
        self.call_costs: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.mismatches: list[dict[str, Any]] = []
        self._arena = arena
        self._device = options.device
        self._deadline = time.monotonic() + options.budget_s
        self._generator = torch.Generator(options.device).manual_seed(options.seed)
        self._clock = device_clock(options.device)
        self._by_case: dict[Case, dict[str, Any]] = {}

    def find(self, case: Case) -> dict[str, Any] | None:
        """The record of a configuration, when it was measured."""
        return self._by_case.get(case)

    def section(self, title: str, groups: Iterable[Group]) -> None:
        """Measures groups and prints a line for each: GB/s and share of the ceiling, by CTAs."""
        print(f"\n{title}")
        for group in groups:
            cells = [self._cell(case) for case in group]
            print(f"  {group[0]!s:<70}{'  '.join(cells)}", flush=True)

    def call_cost(self, backend: str, buffers: int, index_place: str) -> bool:
        """Host time of a small call over `buffers` buffers of K+V rows; False when refused."""
        layers = buffers // 2
        case = Case(layers, PAGE, layers, 2 * PAGE, backend=backend)
        if self._is_skipped(case):
            return False
        dst, src, *indices = Job(case, self._arena, self._generator).arguments(0)
        if index_place == "cpu":
            indices = [index.cpu() for index in indices]
        try:
            cost = host_cost_us(
                functools.partial(mover(case), dst, src, *indices), self._device, calls=600
            )
        except RuntimeError as error:
            self._refuse(case, error)
            return False
        what = {"backend": backend, "buffers": buffers, "index_place": index_place}
        self.call_costs.append({**what, **cost})
        return True

    def _cell(self, case: Case) -> str:
        record = self._by_case.get(case) or self._measure(case)
        mark = f"q{case.num_blocks} " if case.num_blocks else ""
        if record is None:
            return f"{mark}{'-':>12}"
        text = f"{mark}{record['gbps_median']:5.2f} ({record['ratio']:.2f})"
        latency = record["latency_us"]
        return text if latency is None else f"{text} {latency:.0f} us"

    def _measure(self, case: Case) -> dict[str, Any] | None:
        if self._is_skipped(case):
            return None
        job = Job(case, self._arena, self._generator)
        try:
            job.call(0)
        except RuntimeError as error:
            self._refuse(case, error)
            return None
        clock: Clock = self._clock
        calls = min(64, math.ceil(self.sizes.bytes_per_repeat / case.payload_bytes))
        if case.backend in TORCH_PATHS:
            # Host gathers are host work that events would not see, and one call is long enough.
            clock, calls = WallClock(self._device), 1
        timing = time_calls(job.call, calls, clock)
        latency_us = None
        if case.index_unit == "page":
            latency_us = time_calls(job.call, 1, WallClock(self._device)).median_s * 1e6
        rates = timing.rates(case.payload_bytes)
        record = {
            **case.as_record(),
            **rates,
            "ratio": rates["gbps_median"] / self.ceilings[case.direction]["gbps_median"],
            "us_per_call": timing.median_s * 1e6,
            "latency_us": latency_us,
            "repeats": timing.repeats,
            "calls_per_repeat": timing.calls_per_repeat,
            "clock": type(clock).__name__,
        }
        if not job.moves_exact_bytes():
            print(f"  WRONG BYTES: {case!r}", flush=True)
            self.mismatches.append(record)
            return None
        self.records.append(record)
        self._by_case[case] = record
        return record

    def _is_skipped(self, case: Case) -> bool:
        if case.pool_bytes > self._arena.nbytes:
            reason = "the pool is larger than --pool-gib"
        elif time.monotonic() > self._deadline:
            reason = "out of time (--budget)"
        else:
            return False
        self.skipped.append({**case.as_record(), "reason": reason})
        return True

    def _refuse(self, case: Case, error: RuntimeError) -> None:
        """Notes an error of the op's front door; any other error ends the run."""
        reason = str(error).strip().splitlines()[0]
        if "kvio::" not in reason:
            raise error
        self.refused.append({**case.as_record(), "reason": reason})


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


def print_drift(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    """Says when the yardstick itself moved during the run: then something else used the machine."""
    for direction, ceiling in before.items():
        was, now = ceiling["gbps_median"], after[direction]["gbps_median"]
        if abs(now / was - 1) > 0.03:
            print(f"NOTE: {direction} ceiling went from {was:.2f} to {now:.2f} GB/s: measure again")


def measure(options: Options) -> dict[str, Any]:
    """One run: ceilings first, then everything the mode asks for. Returns what the JSON holds."""
    started = time.monotonic()
    machine = describe_machine(options.device)
    machine["sgl_kvio"] = sgl_kvio.__version__
    print(machine_title(machine), flush=True)
    arena = Arena(options.device, arena_bytes(options), options.host_memory)
    run = Run(options, arena)
    for direction, ceiling in run.ceilings.items():
        print(f"ceiling {direction} {ceiling['gbps_median']:.2f} GB/s, contiguous")
    print(f"host pool {arena.nbytes / GIB:.2f} GiB, ready in {time.monotonic() - started:.1f} s")

    plan = Plan(options.sizes, accepted_backends(run, options.backends), arena.nbytes)
    judged = options.device.type == "cuda" and "register" in plan.backends
    judged = judged and options.mode != "quick"
    if judged:
        run.section("targets", (group for _, group in plan.targets()))
    sections = {"full": plan.full, "quick": plan.quick, "targets": lambda: ()}[options.mode]
    for title, groups in sections():
        run.section(title, groups)
    print_call_costs(run.call_costs)
    ceilings_after = measure_ceilings(options.device, options.sizes.ceiling_bytes)
    print_drift(run.ceilings, ceilings_after)
    verdicts = judge(run, plan) if judged else []
    if verdicts:
        print_verdicts(verdicts)
    arena.close()
    return {
        "question": "transfer",
        "mode": options.mode,
        "command": options.command,
        "seed": options.seed,
        "machine": machine,
        "host_pool_gib": arena.nbytes / GIB,
        "host_memory": options.host_memory,
        "wall_seconds": time.monotonic() - started,
        "ceilings": run.ceilings,
        "ceilings_after": ceilings_after,
        "records": run.records,
        "call_costs": run.call_costs,
        "targets": verdicts,
        "refused": run.refused,
        "skipped": run.skipped,
        "mismatches": run.mismatches,
    }


# --- Command line ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The command line, resolved for one machine."""

    mode: str
    device: torch.device
    backends: tuple[str, ...]
    sizes: Sizes
    host_memory: str
    pool_gib: float
    budget_s: float
    seed: int
    out: Path | None
    png: bool
    command: str


def parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description="How fast is kvio::transfer?")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="a look in 30 seconds")
    mode.add_argument("--targets", action="store_true", help="only the promised rows, PASS or MISS")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--backends", help="comma list (default: all that accept a transfer)")
    parser.add_argument("--pool-gib", type=float, help="host memory to use (default: by mode)")
    parser.add_argument(
        "--host-memory",
        choices=("pool", "driver"),
        default="pool",
        help="page-locked as HostKVPool does it, or allocated by the driver (pin_memory)",
    )
    parser.add_argument("--tokens", type=int, help="tokens of a call, a multiple of 64")
    parser.add_argument("--layers", type=int, help="layers of a pool")
    parser.add_argument("--budget", type=float, help="start no measurement after SECONDS")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which the JSON records")
    parser.add_argument("--out", type=Path, help="JSON (default: bench/results/, named by device)")
    parser.add_argument("--png", action="store_true", help="draw the JSON into a PNG beside it")
    args = parser.parse_args(argv)
    if args.tokens is not None and (args.tokens < PAGE or args.tokens % PAGE):
        parser.error(f"--tokens got {args.tokens}, needs a positive multiple of {PAGE}")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers got {args.layers}, needs at least 1")

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif args.targets:
        parser.error("--targets needs a GPU: the promised figures are an H200's")
    name = "targets" if args.targets else "quick" if args.quick else "full"
    known = ",".join(GPU_BACKENDS) if on_gpu else "cpu"
    gpu_pool_gib = {"full": 16.0, "quick": 4.0, "targets": 8.0}
    budget_s = {"full": 130.0, "quick": 20.0, "targets": 45.0}
    return Options(
        mode=name,
        device=device,
        backends=tuple((args.backends or known).split(",")),
        sizes=_sizes(GPU_SIZES if on_gpu else CPU_SIZES, args.tokens, args.layers),
        host_memory=args.host_memory,
        pool_gib=args.pool_gib or (gpu_pool_gib[name] if on_gpu else 0.5),
        budget_s=args.budget or (budget_s[name] if on_gpu else min(50.0, budget_s[name])),
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        out=args.out,
        png=args.png,
        command=_command(argv, args.out),
    )


def _command(argv: Sequence[str], out: Path | None) -> str:
    """The command line without --out, whose folders of this machine would be committed with it."""
    kept = [arg for arg in argv if arg not in ("--out", str(out)) and not arg.startswith("--out=")]
    return shlex.join(["python", "bench/transfer.py", *kept])


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


def arena_bytes(options: Options) -> int:
    """What was asked for, within half of what host memory allows and a third of the GPU's."""
    allowed = memory_limits().allowed_bytes or math.inf
    if options.device.type == "cuda":
        free_on_gpu, _ = torch.cuda.mem_get_info(options.device)
        allowed = min(allowed / 2, free_on_gpu / 3)
    else:
        # The device pool is host memory too.
        allowed = allowed / 4
    return int(min(options.pool_gib * GIB, allowed)) // MIB * MIB


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    options = parse(argv)
    result = measure(options)
    suffix = "" if options.mode == "full" else f"-{options.mode}"
    default = RESULTS / f"transfer-{machine_slug(result['machine'])}{suffix}.json"
    out = options.out or default
    write_result(out, result)
    print(
        f"\n{len(result['records'])} configurations, bytes checked; {len(result['refused'])} "
        f"refused, {len(result['skipped'])} skipped, {len(result['mismatches'])} WRONG; "
        f"{result['wall_seconds']:.0f} s; {out}"
    )
    if options.png:
        from plot import draw

        draw(out, out.with_suffix(".png"))
    return 1 if result["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
