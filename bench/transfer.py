"""How fast is `kvio::transfer`, beside the link's ceiling and beside plain torch?

    python bench/transfer.py                 everything, about two minutes on an H200
    python bench/transfer.py --targets       only the promised rows, with PASS or MISS
    python bench/transfer.py --quick         a look, 30 seconds

Every timed configuration moves fresh random rows and is byte-checked against a torch gather. All
host pools are strided views of one page-locked arena, made as HostKVPool makes its memory; the GPU
holds a copy of it for the check.
Without a GPU the device pool is ordinary memory and the ceiling is one large memory copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    GIB,
    MIB,
    RESULTS,
    Clock,
    WallClock,
    describe_machine,
    device_clock,
    host_cost_us,
    machine_slug,
    machine_title,
    measure_ceilings,
    print_table,
    synchronize,
    time_calls,
    write_result,
)

import sgl_kvio
from sgl_kvio.layouts import find_layout, make_geometry
from sgl_kvio.memory import HostMemory, memory_limits

PAGE = 64
MHA_ROWS = (512, 1024, 2048)
MLA_ROWS = (576, 1152)
ODD_ROWS = (132, 656, 4680)
SM_BACKENDS = ("register", "tma")
GPU_BACKENDS = (*SM_BACKENDS, "copy_engine")
# What a torch user would write without this library; rows move through a gather on the host.
TORCH_PATHS = ("torch_index", "torch_fancy")


# --- What is measured -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration. `row_bytes` is one token in one layer of one buffer.

    `layers_per_call` is 1 (rotating through the pool's layers) or the whole pool. `pattern` is
    "pages" (permuted pages of `page_size` tokens), "scattered" (single tokens in random order) or
    "host_order" (scattered tokens, sorted by host address).
    """

    backend: str
    direction: str
    layout: str
    row_bytes: int
    layers_per_call: int
    tokens: int
    pool_layers: int
    pool_slots: int
    pattern: str
    num_blocks: int = 0
    index_dtype: str = "int64"
    index_unit: str = "token"

    @property
    def kind(self) -> str:
        return "mla" if self.row_bytes in (*MLA_ROWS, *ODD_ROWS) else "mha"

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
        """Where the op wants indices: "gpu", "cpu", or "own" (each beside its pool)."""
        if self.backend in TORCH_PATHS:
            return "own"
        return "gpu" if self.backend in ("auto", *SM_BACKENDS) else "cpu"

    def as_record(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "kind": self.kind,
            "buffers": self.buffers,
            "page_size": self.page_size,
            "index_place": self.index_place,
            "payload_bytes": self.payload_bytes,
            "pool_bytes": self.pool_bytes,
        }


@dataclasses.dataclass(frozen=True)
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
    bytes_per_repeat=256 * MIB,
    ceiling_bytes=256 * MIB,
)
CPU_SIZES = Sizes(
    layers=4,
    restore_tokens=8192,
    restore_slots=32768,
    write_back_tokens=4096,
    write_back_slots=16384,
    growth_pages=tuple(4**power for power in range(6)),
    span_gib=(0.125, 0.5),
    span_tokens=16384,
    bytes_per_repeat=8 * MIB,
    ceiling_bytes=64 * MIB,
)


@dataclasses.dataclass(frozen=True)
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
    """Lists configurations for one machine; a group shares all but the number of CTAs."""

    def __init__(self, sizes: Sizes, backends: Sequence[str]) -> None:
        self.sizes = sizes
        self.backends = backends

    def one_layer(self, backend: str, direction: str, row_bytes: int, **rest: Any) -> Case:
        return Case(
            backend=backend,
            direction=direction,
            row_bytes=row_bytes,
            layers_per_call=1,
            tokens=self.sizes.restore_tokens,
            pool_layers=self.sizes.layers,
            pool_slots=self.sizes.restore_slots,
            **rest,
        )

    def all_layers(self, backend: str, direction: str, row_bytes: int, **rest: Any) -> Case:
        return Case(
            backend=backend,
            direction=direction,
            row_bytes=row_bytes,
            layers_per_call=self.sizes.layers,
            tokens=self.sizes.write_back_tokens,
            pool_layers=self.sizes.layers,
            pool_slots=self.sizes.write_back_slots,
            **rest,
        )

    def targets(self) -> Iterator[list[Case]]:
        for target in TARGETS:
            make = self.one_layer if target.direction == "H2D" else self.all_layers
            for row in target.rows:
                yield [
                    make(
                        "register",
                        target.direction,
                        row,
                        layout=target.layout,
                        pattern=target.pattern,
                        num_blocks=ctas,
                    )
                    for ctas in target.gbps_by_ctas
                ]

    def grid(
        self,
        make: Callable[..., Case],
        direction: str,
        *,
        layouts: Sequence[str],
        rows: Sequence[int],
        ctas: Sequence[int],
        **rest: Any,
    ) -> Iterator[list[Case]]:
        for backend in self.backends:
            for layout in layouts:
                for row in rows:
                    for pattern in ("pages", "scattered"):
                        yield [
                            make(
                                backend,
                                direction,
                                row,
                                layout=layout,
                                pattern=pattern,
                                num_blocks=blocks,
                                **rest,
                            )
                            for blocks in (ctas if backend in SM_BACKENDS else (0,))
                        ]

    def torch_paths(self, rows: Sequence[int]) -> Iterator[list[Case]]:
        for path in TORCH_PATHS:
            for layout in ("layer_first", "page_first"):
                for row in rows:
                    yield [self.one_layer(path, "H2D", row, layout=layout, pattern="scattered")]
                yield [self.all_layers(path, "D2H", rows[0], layout=layout, pattern="scattered")]

    def growth(self) -> Iterator[list[Case]]:
        """One layer of 512-byte K+V rows, from one page to as many as the sizes say."""
        pages = self.sizes.growth_pages
        for backend in self.backends:
            for count in pages:
                yield [
                    Case(
                        backend=backend,
                        direction="H2D",
                        layout="layer_first",
                        row_bytes=512,
                        layers_per_call=1,
                        tokens=count * PAGE,
                        pool_layers=1,
                        pool_slots=pages[-1] * PAGE,
                        pattern="pages",
                        index_unit="page",
                    )
                ]

    def large_pools(self) -> Iterator[list[Case]]:
        """Scattered rows over a growing span of host memory: address translation, not the link."""
        for backend in self.backends:
            for row in (512, 1152):
                for span in self.sizes.span_gib:
                    for pattern in ("scattered", "host_order"):
                        slots = (
                            int(span * GIB) // (row * (1 if row in MLA_ROWS else 2) * PAGE) * PAGE
                        )
                        case = Case(
                            backend=backend,
                            direction="H2D",
                            layout="layer_first",
                            row_bytes=row,
                            layers_per_call=1,
                            tokens=min(self.sizes.span_tokens, slots // PAGE * PAGE),
                            pool_layers=1,
                            pool_slots=slots,
                            pattern=pattern,
                        )
                        ctas = (8, 0) if backend in SM_BACKENDS else (0,)
                        yield [dataclasses.replace(case, num_blocks=blocks) for blocks in ctas]

    def quick(self) -> Iterator[tuple[str, Iterable[list[Case]]]]:
        layouts, rows, ctas = ("layer_first", "page_first"), (512, 1152), (1, 2, 4)
        yield (
            "restore, one layer",
            self.grid(self.one_layer, "H2D", layouts=layouts, rows=rows, ctas=ctas),
        )
        yield (
            "write-back, all layers",
            self.grid(self.all_layers, "D2H", layouts=layouts, rows=rows, ctas=ctas),
        )
        yield "plain torch", self.torch_paths((512,))

    def full(self) -> Iterator[tuple[str, Iterable[list[Case]]]]:
        layouts = ("layer_first", "page_first", "page_first_direct")
        rows, ctas = (*MHA_ROWS, *MLA_ROWS), (1, 2, 4, 8, 0)
        some = {"layouts": layouts[:2], "rows": (512, 1152)}
        yield (
            "restore, one layer",
            self.grid(self.one_layer, "H2D", layouts=layouts, rows=rows, ctas=ctas),
        )
        yield (
            "write-back, all layers",
            self.grid(self.all_layers, "D2H", layouts=layouts, rows=rows, ctas=ctas),
        )
        yield "plain torch", self.torch_paths((512, 1152, 2048))
        yield "growth, page indices", self.growth()
        yield "large host pools", self.large_pools()
        yield (
            "restore, one layer, odd rows",
            self.grid(self.one_layer, "H2D", layouts=layouts[:2], rows=ODD_ROWS, ctas=(1, 2, 4, 0)),
        )
        yield (
            "restore, one layer, int32 indices",
            self.grid(self.one_layer, "H2D", ctas=(1, 4), index_dtype="int32", **some),
        )
        yield (
            "restore, all layers",
            self.grid(self.all_layers, "H2D", ctas=(1, 2, 4, 0), **some),
        )
        yield (
            "write-back, one layer",
            self.grid(self.one_layer, "D2H", ctas=(1, 2, 4, 0), **some),
        )


# --- Pools ----------------------------------------------------------------------------------


class Arena:
    """The memory every configuration's pools are cut from, allocated and filled once.

    `host` is the host pool's bytes (page-locked beside a GPU), `mirror` the same bytes on the
    device, `device` the device pool's. Without a GPU `mirror` is `host` itself.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.where = device
        self.nbytes = nbytes
        self._memory = HostMemory(nbytes, device_index=device.index)
        self.host = self._memory.tensor
        self.device = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self.mirror = torch.empty_like(self.device)
            self.mirror.view(torch.int64).random_()
            for host, mirror in zip(self._pieces(self.host), self._pieces(self.mirror)):
                host.copy_(mirror)
        else:
            self.mirror = self.host
            self.host.view(torch.int64).random_()
        self.device.view(torch.int64).random_()

    def refresh_mirror(self, nbytes: int) -> None:
        """Brings the first `nbytes` of `mirror` up to date with what a write-back wrote."""
        if self.mirror is self.host:
            return
        pairs = zip(self._pieces(self.host[:nbytes]), self._pieces(self.mirror[:nbytes]))
        for host, mirror in pairs:
            mirror.copy_(host, non_blocking=True)
        synchronize(self.where)

    def close(self) -> None:
        synchronize(self.where)
        del self.host, self.mirror, self.device
        self._memory.close()

    @staticmethod
    def _pieces(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split(64 * MIB)


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
    """The rows at token `slots` of a flat or paged view, by torch."""
    if view.dim() == 4:
        return view[slots // PAGE, slots % PAGE]
    return view[slots]


# --- One configuration ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """One set of rows to move: token slots on the device for checks, indices as the op gets them."""

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
        self._device = arena.where
        self._host = pool_layers(arena.host, case, case.layout)
        self._mirror = pool_layers(arena.mirror, case, case.layout)
        self._far = pool_layers(arena.device, case, "layer_first")
        self._sets = self._draw_rows(generator)
        self._mover = mover(case)

    def call(self, number: int) -> None:
        """Call `number` of many: other rows, and another layer, than the calls before it."""
        self._mover(*self.arguments(number))

    def arguments(self, number: int) -> tuple[Any, ...]:
        """dst, src, dst_indices, src_indices of call `number`."""
        host, far = self._buffers(self._host, number), self._buffers(self._far, number)
        rows = self._sets[number % len(self._sets)]
        if self.case.direction == "H2D":
            return far, host, rows.device_indices, rows.host_indices
        return host, far, rows.host_indices, rows.device_indices

    def moves_exact_bytes(self) -> bool:
        """Runs call 0 on content that no earlier call has seen and compares all of its rows."""
        written = self._arena.device[: self.case.pool_bytes]
        if self.case.direction == "H2D":
            written.zero_()
        else:
            written[: written.numel() // 8 * 8].view(torch.int64).random_()
        synchronize(self._device)
        self.call(0)
        synchronize(self._device)
        if self.case.direction == "D2H":
            self._arena.refresh_mirror(self.case.pool_bytes)
        rows = self._sets[0]
        pairs = zip(self._buffers(self._mirror, 0), self._buffers(self._far, 0), strict=True)
        return all(
            torch.equal(
                gather(host, rows.host_slots).view(torch.int16),
                gather(far, rows.device_slots).view(torch.int16),
            )
            for host, far in pairs
        )

    def _buffers(self, layers: list[list[torch.Tensor]], number: int) -> list[torch.Tensor]:
        if self.case.layers_per_call == 1:
            return layers[number % len(layers)]
        return [buffer for layer in layers for buffer in layer]

    def _draw_rows(self, generator: torch.Generator) -> list[Rows]:
        host, far = (_shuffled(self.case, self._device, generator) for _ in range(2))
        count = min(self.MAX_SETS, host.numel() // self.case.tokens)
        return [
            self._rows(*(side[at * self.case.tokens :][: self.case.tokens] for side in (host, far)))
            for at in range(count)
        ]

    def _rows(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Rows:
        case = self.case
        if case.pattern == "host_order":
            host_slots = host_slots.sort().values
        host_place, device_place = {
            "gpu": (self._device, self._device),
            "cpu": (torch.device("cpu"), torch.device("cpu")),
            "own": (torch.device("cpu"), self._device),
        }[case.index_place]

        def indices(slots: torch.Tensor, place: torch.device) -> torch.Tensor:
            wanted = slots[::PAGE] // PAGE if case.index_unit == "page" else slots
            return wanted.to(place, getattr(torch, case.index_dtype))

        return Rows(
            host_slots,
            device_slots,
            indices(host_slots, host_place),
            indices(device_slots, device_place),
        )


def _shuffled(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """All token slots of the pool in the order of the pattern, int64 on the device."""
    run = case.page_size
    starts = torch.randperm(case.pool_slots // run, generator=generator, device=device) * run
    return (starts[:, None] + torch.arange(run, device=device)).flatten()


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
    """index_select, one copy over the link, index_copy_."""
    for target, source in zip(dst, src, strict=True):
        packed = source.index_select(0, src_indices).to(target.device, non_blocking=True)
        target.index_copy_(0, dst_indices, packed)


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

    def __init__(self, device: torch.device, arena: Arena, options: Options) -> None:
        self.device = device
        self.arena = arena
        self.sizes = options.sizes
        self.ceilings = measure_ceilings(device, options.sizes.ceiling_bytes)
        self.records: list[dict[str, Any]] = []
        self.call_costs: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.mismatches: list[dict[str, Any]] = []
        self._deadline = time.monotonic() + options.budget_s
        self._generator = torch.Generator(device=device).manual_seed(options.seed)
        self._clock = device_clock(device)
        self._by_case: dict[Case, dict[str, Any]] = {}

    def find(self, case: Case) -> dict[str, Any] | None:
        """The record of a configuration, when it was measured."""
        return self._by_case.get(case)

    def section(self, title: str, groups: Iterable[list[Case]]) -> None:
        """Measures groups and prints one line for each: GB/s and share of the ceiling."""
        print(f"\n{title}")
        for group in groups:
            cells = [self._cell(case) for case in group]
            print(f"  {label(group[0])}  {'  '.join(cells)}", flush=True)

    def call_cost(self, buffers: int, backend: str, index_place: str) -> None:
        """Host time of a small call over `buffers` buffers of 512-byte K+V rows."""
        layers = buffers // 2
        case = Case(
            backend=backend,
            direction="H2D" if layers == 1 else "D2H",
            layout="layer_first",
            row_bytes=512,
            layers_per_call=layers,
            tokens=PAGE,
            pool_layers=layers,
            pool_slots=64 * PAGE,
            pattern="pages",
        )
        if case.pool_bytes > self.arena.nbytes:
            self.skipped.append({**case.as_record(), "reason": "pool larger than the arena"})
            return
        job = Job(case, self.arena, self._generator)
        dst, src, dst_indices, src_indices = job.arguments(0)
        if index_place == "cpu":
            dst_indices, src_indices = dst_indices.cpu(), src_indices.cpu()
        call = functools.partial(mover(case), dst, src, dst_indices, src_indices)
        try:
            cost = host_cost_us(call, self.device, calls=600)
        except RuntimeError as error:
            self._refuse(case, error)
            return
        self.call_costs.append(
            {"backend": backend, "buffers": buffers, "index_place": index_place, **cost}
        )

    def _cell(self, case: Case) -> str:
        mark = f"q{case.num_blocks}:" if case.num_blocks else ""
        record = self._by_case.get(case) or self._measure(case)
        if record is None:
            return f"{mark}{'-':>6}{'':7}"
        late = f" {record['latency_us']:.0f} us" if record["latency_us"] is not None else ""
        return f"{mark}{record['gbps_median']:6.2f} ({record['ratio']:.2f}){late}"

    def _measure(self, case: Case) -> dict[str, Any] | None:
        if case.pool_bytes > self.arena.nbytes:
            self.skipped.append({**case.as_record(), "reason": "pool larger than the arena"})
            return None
        if time.monotonic() > self._deadline:
            self.skipped.append({**case.as_record(), "reason": "out of time (--budget)"})
            return None
        job = Job(case, self.arena, self._generator)
        try:
            job.call(0)
        except RuntimeError as error:
            self._refuse(case, error)
            return None
        clock: Clock = self._clock
        calls = min(64, math.ceil(self.sizes.bytes_per_repeat / case.payload_bytes))
        if case.backend in TORCH_PATHS:
            # Host gathers are host work: events would not see them, and one call is long enough.
            clock, calls = WallClock(self.device), 1
        timing = time_calls(job.call, calls, clock)
        latency = time_calls(job.call, 1, WallClock(self.device)) if is_growth(case) else None
        rates = timing.rates(case.payload_bytes)
        record = {
            **case.as_record(),
            **rates,
            "ratio": rates["gbps_median"] / self.ceilings[case.direction]["gbps_median"],
            "us_per_call": timing.median_s * 1e6,
            "latency_us": latency.median_s * 1e6 if latency else None,
            "repeats": timing.repeats,
            "calls_per_repeat": timing.calls_per_repeat,
            "clock": type(clock).__name__,
        }
        if not job.moves_exact_bytes():
            print(f"  WRONG BYTES: {case}", flush=True)
            self.mismatches.append(record)
            return None
        self.records.append(record)
        self._by_case[case] = record
        return record

    def _refuse(self, case: Case, error: RuntimeError) -> None:
        """Notes an error of the op's front door; any other error ends the run."""
        reason = str(error).strip().splitlines()[0]
        if not reason.startswith("kvio::"):
            raise error
        self.refused.append({**case.as_record(), "reason": reason})


def is_growth(case: Case) -> bool:
    return case.index_unit == "page"


def label(case: Case) -> str:
    """A configuration in words, without its number of CTAs."""
    rows = f"{case.row_bytes:>4} B {'K+V' if case.buffers == 2 else 'MLA'}"
    words = [f"{case.backend:<11} {case.direction} {case.layout:<17} {rows} {case.pattern:<10}"]
    if is_growth(case):
        words.append(f"{case.tokens // PAGE:>6} pages")
    elif case.pool_layers == 1:
        words.append(f"{case.pool_bytes / GIB:>5.1f} GiB pool")
    return " ".join(words)


def judge(run: Run, plan: Plan) -> list[dict[str, Any]]:
    """Every target with what was measured for it; "MISS" also where nothing was."""
    verdicts = []
    groups = plan.targets()
    for target in TARGETS:
        for _ in target.rows:
            for case in next(groups):
                record = run.find(case)
                value = record["gbps_median"] if record else None
                wanted = target.gbps_by_ctas[case.num_blocks]
                verdicts.append(
                    {
                        "what": label(case),
                        "num_blocks": case.num_blocks,
                        "unit": "GB/s",
                        "target": wanted,
                        "value": value,
                        "ratio": record["ratio"] if record else None,
                        "verdict": "PASS" if value is not None and value >= wanted else "MISS",
                    }
                )
    for buffers, limit in CALL_COST_TARGETS_US.items():
        found = [c for c in run.call_costs if c["buffers"] == buffers and c["index_place"] == "gpu"]
        cost = min((c["cpu_us_median"] for c in found if c["backend"] == "register"), default=None)
        verdicts.append(
            {
                "what": f"host time of a call with {buffers} buffers",
                "num_blocks": 0,
                "unit": "us",
                "target": limit,
                "value": cost,
                "ratio": None,
                "verdict": "PASS" if cost is not None and cost <= limit else "MISS",
            }
        )
    return verdicts


def print_verdicts(verdicts: list[dict[str, Any]]) -> None:
    rows = []
    for item in verdicts:
        value = "-" if item["value"] is None else f"{item['value']:.2f}"
        ratio = "" if item["ratio"] is None else f"{item['ratio']:.2f}"
        ctas = str(item["num_blocks"] or "")
        sign = "<=" if item["unit"] == "us" else ">="
        wanted = f"{sign} {item['target']:g} {item['unit']}"
        rows.append([item["what"], ctas, value, wanted, ratio, item["verdict"]])
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


# --- Command line ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line, resolved for one machine."""

    mode: str
    device: torch.device
    backends: tuple[str, ...]
    sizes: Sizes
    pool_gib: float
    budget_s: float
    seed: int
    out: Path | None
    png: bool
    command: str


def parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        description="How fast is kvio::transfer?", formatter_class=argparse.RawTextHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="a look in 30 seconds")
    mode.add_argument("--targets", action="store_true", help="only the promised rows, PASS or MISS")
    parser.add_argument("--device", default=None, help="cuda, cuda:1, cpu (default: a GPU if any)")
    parser.add_argument("--backends", default="", help="comma list (default: all that accept)")
    parser.add_argument("--pool-gib", type=float, default=None, help="host memory to use")
    parser.add_argument("--tokens", type=int, default=None, help="tokens a call, a multiple of 64")
    parser.add_argument("--layers", type=int, default=None, help="layers of a pool")
    parser.add_argument("--budget", type=float, default=None, help="start nothing after SECONDS")
    parser.add_argument("--seed", type=int, default=None, help="default: fresh, and recorded")
    parser.add_argument("--out", type=Path, default=None, help="JSON (default: bench/results/...)")
    parser.add_argument("--png", action="store_true", help="draw the JSON into a PNG beside it")
    args = parser.parse_args(argv)

    on_gpu = torch.cuda.is_available()
    device = torch.device(args.device or ("cuda" if on_gpu else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif args.targets:
        parser.error("--targets: the targets are an H200's; this run has no GPU")
    name = "targets" if args.targets else "quick" if args.quick else "full"
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    if args.tokens is not None:
        if args.tokens < PAGE or args.tokens % PAGE:
            parser.error(f"--tokens got {args.tokens}, needs a positive multiple of {PAGE}")
        sizes = dataclasses.replace(
            sizes,
            restore_tokens=args.tokens,
            restore_slots=2 * args.tokens,
            write_back_tokens=args.tokens,
            write_back_slots=2 * args.tokens,
        )
    if args.layers is not None:
        if args.layers < 1:
            parser.error(f"--layers got {args.layers}, needs at least 1")
        sizes = dataclasses.replace(sizes, layers=args.layers)
    gpu_gib = {"full": 16.0, "quick": 4.0, "targets": 8.0}[name]
    shown = [arg for arg in argv if arg != str(args.out)]
    return Options(
        mode=name,
        device=device,
        backends=tuple(filter(None, args.backends.split(","))),
        sizes=sizes,
        pool_gib=args.pool_gib or (gpu_gib if device.type == "cuda" else 0.5),
        budget_s=args.budget or {"full": 130.0, "quick": 20.0, "targets": 45.0}[name],
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        out=args.out,
        png=args.png,
        # An --out path would carry a machine's folders into a committed file.
        command=shlex.join(["python", "bench/transfer.py", *(a for a in shown if a != "--out")]),
    )


def arena_bytes(options: Options) -> int:
    """What was asked for, within half of the free host memory and a third of the GPU's."""
    limits = [options.pool_gib * GIB, (memory_limits().allowed_bytes or math.inf) / 2]
    if options.device.type == "cuda":
        limits.append(torch.cuda.mem_get_info(options.device)[0] / 3)
    else:
        limits[1] /= 2  # The device pool is host memory too.
    return int(min(limits)) // MIB * MIB


def accepted_backends(run: Run, wanted: Sequence[str]) -> tuple[str, ...]:
    """The wanted backends (default: every known one) that take a small transfer here."""
    known = GPU_BACKENDS if run.device.type == "cuda" else ("cpu",)
    accepted = []
    for backend in wanted or known:
        before = len(run.call_costs)
        place = "gpu" if backend in ("auto", *SM_BACKENDS) else "cpu"
        for buffers in (2, 64):
            run.call_cost(buffers, backend, place)
        if len(run.call_costs) > before:
            accepted.append(backend)
            if backend == "register":
                run.call_cost(2, backend, "cpu")
        else:
            print(f"backend {backend}: {(run.refused or run.skipped)[-1]['reason']}")
    return tuple(accepted)


def measure(options: Options) -> dict[str, Any]:
    """One run: ceilings first, then everything the mode asks for. Returns what the JSON holds."""
    started = time.monotonic()
    machine = describe_machine(options.device)
    machine["sgl_kvio"] = getattr(sgl_kvio, "__version__", None)
    print(machine_title(machine), flush=True)
    arena = Arena(options.device, arena_bytes(options))
    run = Run(options.device, arena, options)
    for direction, ceiling in run.ceilings.items():
        print(f"ceiling {direction} {ceiling['gbps_median']:.2f} GB/s, contiguous")
    print(f"host pool {arena.nbytes / GIB:.2f} GiB, ready in {time.monotonic() - started:.1f} s")

    backends = accepted_backends(run, options.backends)
    plan = Plan(options.sizes, backends)
    judged = options.device.type == "cuda" and "register" in backends and options.mode != "quick"
    if judged:
        run.section("targets, by CTAs (qN): GB/s (share of the ceiling)", plan.targets())
    if options.mode != "targets":
        for title, groups in plan.full() if options.mode == "full" else plan.quick():
            run.section(title, groups)
    print_call_costs(run.call_costs)
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
        "wall_seconds": time.monotonic() - started,
        "ceilings": run.ceilings,
        "records": run.records,
        "call_costs": run.call_costs,
        "targets": verdicts,
        "refused": run.refused,
        "skipped": run.skipped,
        "mismatches": run.mismatches,
    }


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
