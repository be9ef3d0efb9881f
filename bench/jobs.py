"""Configurations of `kvio::transfer`: their pools and rows, the call, its time, and its byte check.

A `Case` says what is moved, a `Job` holds the tensors of one, a `Recorder` times jobs and keeps
what it found.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

import sgl_kvio
from common import (
    GIB,
    SECONDS_PER_FIGURE,
    Arena,
    Clock,
    RunOptions,
    WallClock,
    change_every_byte,
    describe_machine,
    device_clock,
    host_cost_us,
    machine_title,
    measure_ceilings,
    new_side_stream,
    print_ceilings,
    print_drift,
    synchronize,
    time_calls,
)
from sgl_kvio.layouts import find_layout, make_geometry

PAGE = 64
MHA_ROWS = (512, 1024, 2048)
MLA_ROWS = (576, 1152)
SM_BACKENDS = ("register", "tma")
GPU_BACKENDS = (*SM_BACKENDS, "copy_engine")
# What a torch user would write without this library.
TORCH_PATHS = ("torch_index", "torch_fancy")
# The same for whole pages of a page-first pool: gather on the GPU, then one copy a page.
TORCH_PAGES = "torch_pages"


@dataclass(frozen=True)
class Case:
    """One configuration. `row_bytes` is one token in one layer of one buffer.

    `layers_per_call` is 1 (rotating through the pool's layers) or the whole pool. `pattern` is
    "pages" (permuted pages of `run_tokens` tokens), "scattered" (single tokens in random order) or
    "host_order" (scattered tokens, sorted by host address). `device_slots` 0 is as many as the host
    pool has; `indices` "" is the place that suits the backend.
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
    run_tokens: int = PAGE
    device_slots: int = 0
    indices: str = ""
    prefer: str = "throughput"
    staging_bytes: int = 0

    @property
    def kind(self) -> str:
        return "mha" if self.row_bytes in MHA_ROWS else "mla"

    @property
    def buffers(self) -> int:
        return 2 if self.kind == "mha" else 1

    @property
    def page_size(self) -> int:
        return self.run_tokens if self.pattern == "pages" else 1

    @property
    def payload_bytes(self) -> int:
        return self.tokens * self.row_bytes * self.buffers * self.layers_per_call

    @property
    def pool_bytes(self) -> int:
        return self.pool_slots * self.row_bytes * self.buffers * self.pool_layers

    @property
    def device_pool_slots(self) -> int:
        return self.device_slots or self.pool_slots

    @property
    def device_pool_bytes(self) -> int:
        return self.pool_bytes // self.pool_slots * self.device_pool_slots

    @property
    def run_bytes(self) -> int:
        """Bytes of consecutive tokens, whether or not their rows touch each other."""
        return self.page_size * self.row_bytes

    @property
    def index_place(self) -> str:
        """Where the indices lie: "gpu", "cpu", or "own" (each list beside its pool)."""
        if self.backend in (*TORCH_PATHS, TORCH_PAGES):
            return "own"
        if self.indices:
            return self.indices
        return "gpu" if self.backend in ("auto", *SM_BACKENDS) else "cpu"

    def as_record(self) -> dict[str, Any]:
        names = ("kind", "buffers", "page_size", "run_bytes", "payload_bytes", "pool_bytes")
        return {
            **asdict(self),
            **{name: getattr(self, name) for name in names},
            "index_place": self.index_place,
        }

    def __str__(self) -> str:
        """In words, without the number of CTAs."""
        rows = f"{self.row_bytes} B {'K+V' if self.buffers == 2 else 'MLA'}"
        words = f"{self.backend:<11} {self.direction} {self.layout:<17} {rows:>10} {self.pattern}"
        if self.index_unit == "page":
            return f"{words} x {self.tokens // self.run_tokens}"
        return f"{words} over {self.pool_bytes / GIB:.3g} GiB" if self.pool_layers == 1 else words


def ctas_words(count: int) -> str:
    """`num_blocks` in words."""
    return f"{count} CTA{'' if count == 1 else 's'}"


# Configurations that differ only in the number of CTAs: one printed line.
Group = list[Case]


def by_ctas(case: Case, ctas: Sequence[int]) -> Group:
    """The configuration with each number of CTAs; once where the backend has none to choose."""
    counts = ctas if case.backend in SM_BACKENDS else (0,)
    return [replace(case, num_blocks=count) for count in counts]


def pool_layers(
    flat: torch.Tensor, case: Case, layout: str, slots: int
) -> list[list[torch.Tensor]]:
    """Views [layer][buffer] (K and V, or the latent) of a pool cut from the start of `flat`."""
    entry = find_layout(case.kind, layout)
    geometry = make_geometry(
        entry,
        num_pages=slots // case.run_tokens,
        page_size=case.run_tokens,
        num_layers=case.pool_layers,
        num_heads=1,
        head_dim=case.row_bytes // 2,
        v_head_dim=None,
    )
    (shape,) = entry.tensor_shapes(geometry)
    nbytes = slots * case.row_bytes * case.buffers * case.pool_layers
    return entry.layer_views([flat[:nbytes].view(torch.bfloat16).view(shape)])


def gather(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows at token `slots` of a flat or paged view, by torch, as comparable integers."""
    if view.dim() == 4:
        page = view.shape[1]
        return view[slots // page, slots % page].view(torch.int16)
    return view[slots].view(torch.int16)


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
        self._host = pool_layers(arena.host, case, case.layout, case.pool_slots)
        self._far = pool_layers(arena.device, case, "layer_first", case.device_pool_slots)
        self._sets = self._draw_sets(generator)
        staging = torch.empty(case.staging_bytes, dtype=torch.uint8, device=arena.where)
        self._move = mover(case, staging)

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
        change_every_byte(self._arena.device[: self.case.device_pool_bytes])
        synchronize(self._arena.where)
        with torch.cuda.stream(new_side_stream(self._arena.where)):
            self.call(0)
        synchronize(self._arena.where)
        rows = self._sets[0]
        pairs = zip(self._host_rows(rows), self._buffers(self._far, 0), strict=True)
        return all(torch.equal(host, gather(far, rows.device_slots)) for host, far in pairs)

    def _host_rows(self, rows: Rows) -> Iterator[torch.Tensor]:
        """What the host pool holds at the rows of call 0, on the device."""
        arena, case = self._arena, self.case
        written = case.pool_bytes if case.direction == "D2H" else 0
        # Gathering the rows on the CPU is slow, and so is bringing a large pool over for a few.
        if case.pool_bytes <= arena.mirror.numel() and written <= 8 * case.payload_bytes:
            arena.refresh_mirror(written)
            mirror = pool_layers(arena.mirror, case, case.layout, case.pool_slots)
            for view in self._buffers(mirror, 0):
                yield gather(view, rows.host_slots)
            return
        arena.note_written(written)
        slots = rows.host_slots.cpu()
        for view in self._buffers(self._host, 0):
            yield gather(view, slots).to(arena.where)

    def _buffers(self, layers: list[list[torch.Tensor]], number: int) -> list[torch.Tensor]:
        if self.case.layers_per_call == 1:
            return layers[number % len(layers)]
        return [buffer for layer in layers for buffer in layer]

    def _draw_sets(self, generator: torch.Generator) -> list[Rows]:
        """Disjoint sets of rows, so that no call finds its rows in a cache from the one before."""
        case = self.case
        host = self._shuffled_slots(case.pool_slots, generator)
        far = self._shuffled_slots(case.device_pool_slots, generator)
        count = min(host.numel(), far.numel()) // case.tokens
        sets = zip(host.split(case.tokens)[:count], far.split(case.tokens)[:count], strict=True)
        return [self._rows(host_slots, device_slots) for host_slots, device_slots in sets]

    def _shuffled_slots(self, slots: int, generator: torch.Generator) -> torch.Tensor:
        """Token slots of the pool in the order of the pattern, as many as all sets may need."""
        run, where = self.case.page_size, self._arena.where
        wanted = -(-self.MAX_SETS * self.case.tokens // run)
        runs = torch.randperm(slots // run, generator=generator, device=where)[:wanted]
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
        run = self.case.run_tokens
        wanted = slots[::run] // run if self.case.index_unit == "page" else slots
        return wanted.to(getattr(torch, self.case.index_dtype))


def mover(case: Case, staging: torch.Tensor | None = None) -> Callable[..., None]:
    """The function that moves rows: (dst, src, dst_indices, src_indices) -> None."""
    if case.backend == "torch_index":
        return torch_index
    if case.backend == "torch_fancy":
        return _torch_fancy
    if case.backend == TORCH_PAGES:
        move_pages = _torch_pages_in if case.direction == "H2D" else _torch_pages_out
        return functools.partial(move_pages, page_size=case.page_size, buffers=case.buffers)
    options: dict[str, Any] = {
        "page_size": case.page_size,
        "index_unit": case.index_unit,
        "num_blocks": case.num_blocks,
    }
    if case.backend == "staged":
        return functools.partial(sgl_kvio.transfer_staged, staging=staging, **options)
    if case.prefer != "throughput":
        options["prefer"] = case.prefer
    return functools.partial(sgl_kvio.transfer, backend=case.backend, **options)


def torch_index(
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


def _torch_pages_out(
    dst: list[torch.Tensor],
    src: list[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    page_size: int,
    buffers: int,
) -> None:
    """Write-back of whole pages: one gather on the GPU, then an asynchronous copy for each page."""
    for first in range(buffers):
        host, far = _page_pairs(dst[first::buffers], src[first::buffers], page_size)
        packed = far[src_indices].contiguous()
        for place, page in enumerate(dst_indices.tolist()):
            host[page].copy_(packed[place], non_blocking=True)


def _torch_pages_in(
    dst: list[torch.Tensor],
    src: list[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    page_size: int,
    buffers: int,
) -> None:
    """Restore of whole pages: an asynchronous copy for each page, then one scatter on the GPU."""
    for first in range(buffers):
        host, far = _page_pairs(src[first::buffers], dst[first::buffers], page_size)
        shape = (src_indices.numel(), *host.shape[1:])
        packed = torch.empty(shape, dtype=far.dtype, device=far.device)
        for place, page in enumerate(src_indices.tolist()):
            packed[place].copy_(host[page], non_blocking=True)
        far[dst_indices] = packed


def _page_pairs(
    host: list[torch.Tensor], far: list[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools of one buffer as [pages, ...], in the order in which a host page is contiguous."""
    sides = _by_page(host, page_size), _by_page(far, page_size)
    if sides[0][0].is_contiguous():
        return sides
    return sides[0].transpose(1, 2), sides[1].transpose(1, 2)


def _by_page(layers: list[torch.Tensor], page_size: int) -> torch.Tensor:
    """The evenly spaced views of all layers as one view [pages, tokens, layers, heads, dim]."""
    first = layers[0]
    paged = first if first.dim() == 4 else first.unflatten(0, (-1, page_size))
    step = layers[1].storage_offset() - first.storage_offset() if len(layers) > 1 else 0
    sizes = (*paged.shape[:2], len(layers), *paged.shape[2:])
    strides = (*paged.stride()[:2], step, *paged.stride()[2:])
    return torch.as_strided(first, sizes, strides, first.storage_offset())


class Configuration(Protocol):
    """What a recorder has to know of what it lists: the memory it takes, and its fields."""

    @property
    def pool_bytes(self) -> int: ...

    @property
    def device_pool_bytes(self) -> int: ...

    def as_record(self) -> dict[str, Any]: ...


class Recorder:
    """Times configurations one after another and keeps what it found."""

    def __init__(
        self,
        arena: Arena,
        *,
        ceilings: dict[str, dict[str, Any]],
        bytes_per_repeat: int,
        budget_s: float,
        seed: int,
        seconds_per_figure: float = SECONDS_PER_FIGURE,
    ) -> None:
        self.ceilings = ceilings
        self.records: list[dict[str, Any]] = []
        self.call_costs: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.mismatches: list[dict[str, Any]] = []
        self.arena = arena
        self.device = arena.where
        self.generator = torch.Generator(arena.where).manual_seed(seed)
        self._bytes_per_repeat = bytes_per_repeat
        self._seconds_per_figure = seconds_per_figure
        self._deadline = time.monotonic() + budget_s
        self._clock = device_clock(arena.where)
        self._by_case: dict[Case, dict[str, Any]] = {}

    def findings(self) -> dict[str, Any]:
        """What every bench's JSON holds of its configurations."""
        return {
            "records": self.records,
            "refused": self.refused,
            "skipped": self.skipped,
            "mismatches": self.mismatches,
        }

    def find(self, case: Case) -> dict[str, Any] | None:
        """The record of a configuration, when it was measured."""
        return self._by_case.get(case)

    def measure(
        self, case: Case, *, calls: int = 0, latency: bool = False, **notes: Any
    ) -> dict[str, Any] | None:
        """The record of a configuration, timed now unless it was before; None without one.

        `calls` back to back make one repeat; 0 chooses as many as move `bytes_per_repeat`.
        `latency` also times single calls by the host's clock. `notes` go into the record.
        """
        if case in self._by_case:
            return self._by_case[case]
        if self.is_skipped(case):
            return None
        job = Job(case, self.arena, self.generator)
        try:
            job.call(0)
        except RuntimeError as error:
            self.refuse(case, error)
            return None
        clock: Clock = self._clock
        calls = calls or min(64, math.ceil(self._bytes_per_repeat / case.payload_bytes))
        if case.backend in TORCH_PATHS:
            # Host gathers are host work that events would not see, and one call is long enough.
            clock, calls = WallClock(self.device), 1
        timing = time_calls(job.call, calls, clock, self._seconds_per_figure)
        latency_us = None
        if latency:
            latency_us = time_calls(job.call, 1, WallClock(self.device)).median_s * 1e6
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
            **notes,
        }
        if not job.moves_exact_bytes():
            self.note_wrong_bytes(record)
            return None
        self.records.append(record)
        self._by_case[case] = record
        return record

    def ready(self, case: Case) -> Job | None:
        """A job that has made one call and moves exact bytes; None when skipped, refused, wrong."""
        if self.is_skipped(case):
            return None
        job = Job(case, self.arena, self.generator)
        try:
            job.call(0)
        except RuntimeError as error:
            self.refuse(case, error)
            return None
        if not job.moves_exact_bytes():
            self.note_wrong_bytes(case.as_record())
            return None
        if case.direction == "D2H":
            self.arena.note_written(case.pool_bytes)  # by the calls to come
        return job

    def call_cost(
        self, backend: str, buffers: int, index_place: str, drain_every: int = 16
    ) -> dict[str, Any] | None:
        """Host time of a small call over `buffers` buffers of K+V rows; None when refused."""
        layers = buffers // 2
        case = Case(layers, PAGE, layers, 2 * PAGE, backend=backend, indices=index_place)
        if self.is_skipped(case):
            return None
        call = functools.partial(mover(case), *Job(case, self.arena, self.generator).arguments(0))
        try:
            cost = host_cost_us(call, self.device, calls=600, drain_every=drain_every)
        except RuntimeError as error:
            self.refuse(case, error)
            return None
        what = {"backend": backend, "buffers": buffers, "index_place": index_place}
        self.call_costs.append({**what, **cost})
        return self.call_costs[-1]

    def is_skipped(self, case: Configuration) -> bool:
        """Whether there is no room or no time for a configuration, which is then listed."""
        if case.pool_bytes > self.arena.nbytes:
            reason = "the pool is larger than --pool-gib"
        elif case.device_pool_bytes > self.arena.device.numel():
            reason = "the device pool is larger than there is room for"
        elif self.is_late():
            reason = "out of time (--budget)"
        else:
            return False
        self.skipped.append({**case.as_record(), "reason": reason})
        return True

    def is_late(self) -> bool:
        """Whether no measurement may start any more."""
        return time.monotonic() > self._deadline

    def refuse(self, case: Configuration, error: RuntimeError) -> None:
        """Notes an error of the op's front door; any other error ends the run."""
        reason = str(error).strip().splitlines()[0]
        if "kvio::" not in reason:
            raise error
        self.refused.append({**case.as_record(), "reason": reason})

    def note_wrong_bytes(self, record: dict[str, Any]) -> None:
        """Notes a configuration whose copy differs from torch's, which fails the run."""
        print(f"  WRONG BYTES: {record}", flush=True)
        self.mismatches.append(record)


class Session:
    """What every bench says and records around its own measurements. Begins with its first line."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._started = time.monotonic()
        self._machine = describe_machine(options.device)
        print(machine_title(self._machine), flush=True)

    def recorder(self, arena: Arena, ceiling_bytes: int, bytes_per_repeat: int) -> Recorder:
        """A recorder without a least time for a figure; measures the ceilings first."""
        return Recorder(
            arena,
            ceilings=measure_ceilings(arena.where, ceiling_bytes),
            bytes_per_repeat=bytes_per_repeat,
            budget_s=self._options.budget_s,
            seed=self._options.seed,
            seconds_per_figure=0.0,
        )

    def ready(self, run: Recorder) -> None:
        """The pools and the ceilings are there."""
        print_ceilings(run.ceilings)
        seconds = time.monotonic() - self._started
        print(f"host pool {run.arena.nbytes / GIB:.2f} GiB, ready in {seconds:.1f} s")

    def close(
        self, run: Recorder, ceiling_bytes: int, report: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The ceilings again, then `report`, which lets go of what is cut from the arena.

        Returns what the JSON of every bench holds.
        """
        ceilings_after = measure_ceilings(run.device, ceiling_bytes)
        print_drift(run.ceilings, ceilings_after)
        report()
        run.arena.close()
        return {
            "machine": self._machine,
            "host_pool_gib": run.arena.nbytes / GIB,
            "wall_seconds": time.monotonic() - self._started,
            "ceilings": run.ceilings,
            "ceilings_after": ceilings_after,
            **run.findings(),
        }
