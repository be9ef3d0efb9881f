"""Measures what each backend moves on this machine, for `backend="auto"` to choose by.

Every cell of the table (backend, direction, shape, length of a run) is a flow of `transfer` calls
with that backend forced: random runs over a pool of a few GiB, timed between two events of the
GPU's stream, so that the cost of submitting counts where it shows. A backend that refuses a cell
gets 0 there and is never chosen for it.

    >>> from sgl_kvio import calibrate
    >>> calibrate.run(quick=False, out=None)  # what `python -m sgl_kvio calibrate` does
    0
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sgl_kvio import rates
from sgl_kvio._version import __version__
from sgl_kvio.demo import Progress
from sgl_kvio.memory import HostMemory, memory_limits
from sgl_kvio.ops import capabilities, transfer

# Rows of the packed shape: as short as a run can be, so that every run length is made of them.
ROW_BYTES = 512
# What lies between two rows of a page where they are apart: 32 layers of a page-first pool for
# short rows; fewer for long ones, so that the pool still has many pages.
MAX_ROWS_APART_BYTES = 64 << 10
# A page of rows that are apart.
PAGE_SLOTS, MAX_PAGE_BYTES = 64, 1 << 20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured. A driver copy costs a microsecond whatever its size, hence the cap."""

    pool_bytes: int
    call_bytes: int
    max_entries: int
    calls: int
    repeats: int


FULL = Sizes(pool_bytes=4 << 30, call_bytes=128 << 20, max_entries=8192, calls=4, repeats=5)
QUICK = Sizes(pool_bytes=1 << 30, call_bytes=64 << 20, max_entries=2048, calls=3, repeats=3)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure of the table."""

    backend: str
    direction: str
    shape: str
    run_bytes: int

    @property
    def row(self) -> str:
        """What it has in common with the other run lengths."""
        return f"{self.backend}, {self.direction}, {self.shape.replace('_', ' ')}"


def cells() -> Iterator[Cell]:
    """Every cell, in the order of the flat table."""
    shapes = itertools.product(rates.BACKENDS, rates.DIRECTIONS, rates.SHAPES, rates.RUN_BYTES)
    return (Cell(*keys) for keys in shapes)


class Arena:
    """A host pool and a device pool as plain bytes, and the transfers of every cell between them.

    Host bytes are all of `sizes.pool_bytes`; the device side holds what one call moves. `device`
    names a GPU with its index, or the CPU. Raises MemoryError when the pool does not fit.
    """

    def __init__(self, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
        self._sizes = sizes
        self._device = device
        allowed = memory_limits().allowed_bytes
        if allowed is not None and allowed < sizes.pool_bytes:
            raise MemoryError(
                f"the pool takes {sizes.pool_bytes >> 20} MiB of host memory and "
                f"{allowed >> 20} MiB are free; --quick takes {QUICK.pool_bytes >> 20}"
            )
        self._memory = HostMemory(sizes.pool_bytes, device_index=device.index)
        self.host = self._memory.tensor
        device_bytes = max(sizes.call_bytes, rates.RUN_BYTES[-1])
        self.on_device = torch.zeros(device_bytes, dtype=torch.uint8, device=device)
        self._generator = torch.Generator().manual_seed(seed)

    def close(self) -> None:
        """Lets go of the host pool, which must be idle."""
        self._memory.close()

    def call(self, cell: Cell) -> tuple[Callable[[], None], int]:
        """A transfer of random runs of the cell, and the bytes that it moves."""
        host, device, page_slots = self._views(cell)
        row_bytes = host.shape[1]
        page_bytes = page_slots * row_bytes
        wanted = self._sizes.call_bytes // page_bytes
        if cell.backend == "copy_engine":
            runs_a_page = page_bytes // cell.run_bytes
            wanted = min(wanted, self._sizes.max_entries // runs_a_page)
        host_pages, device_pages = len(host) // page_slots, len(device) // page_slots
        pages = max(1, min(wanted, host_pages, device_pages))
        at_host = torch.randperm(host_pages, generator=self._generator)[:pages]
        at_device = torch.randperm(device_pages, generator=self._generator)[:pages]
        # The copy engine needs indices that the host can read; for the kernels they are in place.
        if cell.backend != "copy_engine":
            at_host, at_device = at_host.to(self._device), at_device.to(self._device)
        dst, src, to, frm = host, device, at_host, at_device
        if cell.direction == "H2D":
            dst, src, to, frm = device, host, at_device, at_host
        options: dict[str, Any] = {
            "row_ndim": 1,
            "page_size": page_slots,
            "index_unit": "page" if page_slots > 1 else "token",
            "backend": cell.backend,
        }
        return lambda: transfer(dst, src, to, frm, **options), pages * page_bytes

    def _views(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Host rows, device rows (both [slots, row bytes]) and the slots of a page."""
        if cell.shape == "packed":
            return (
                self.host[: len(self.host) // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES),
                self.on_device[: len(self.on_device) // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES),
                cell.run_bytes // ROW_BYTES,
            )
        row_bytes = cell.run_bytes
        pitch = max(2, min(32, MAX_ROWS_APART_BYTES // row_bytes)) * row_bytes
        slots = len(self.host) // pitch
        apart = self.host[: slots * pitch].view(slots, pitch)[:, :row_bytes]
        packed = self.on_device[: len(self.on_device) // row_bytes * row_bytes].view(-1, row_bytes)
        return apart, packed, max(1, min(PAGE_SLOTS, MAX_PAGE_BYTES // row_bytes, slots))


def measure_gbps(arena: Arena, cell: Cell, sizes: Sizes) -> float:
    """GB/s of the cell in a flow of calls on the current stream; 0 when the backend refuses."""
    call, nbytes = arena.call(cell)
    try:
        call()
    except RuntimeError as error:
        if f"backend is '{cell.backend}'" not in str(error):
            raise
        return 0.0
    torch.cuda.synchronize()
    seconds = statistics.median(_seconds(call, sizes.calls) for _ in range(sizes.repeats))
    return nbytes * sizes.calls / seconds / 1e9


def _seconds(call: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_table(measure: Callable[[Cell], float], progress: Progress) -> rates.Table:
    """The table of `measure`, cell by cell."""
    flat = []
    for row, of_row in itertools.groupby(cells(), key=lambda cell: cell.row):
        progress.begin(row)
        for cell in of_row:
            flat.append(round(measure(cell), 2))
            progress.step()
    return rates.unflatten(flat)


def about_this_machine() -> dict[str, Any]:
    """What a table is about: the current GPU, the driver, the versions, the time."""
    return {
        "sgl_kvio": __version__,
        "gpu": torch.cuda.get_device_name(),
        "driver": capabilities()["driver"],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def as_text(table: rates.Table) -> str:
    """The table for a reader: a line a run length, a column a backend and direction."""
    lines = []
    for shape in rates.SHAPES:
        columns = [(b, d) for b in rates.BACKENDS for d in rates.DIRECTIONS]
        lines.append(f"{shape:>10} " + " ".join(f"{b + ' ' + d:>16}" for b, d in columns))
        for k, run_bytes in enumerate(rates.RUN_BYTES):
            figures = (table[b][d][shape][k] for b, d in columns)
            lines.append(f"{run_bytes:>10} " + " ".join(f"{gbps:16.1f}" for gbps in figures))
    return "\n".join(lines)


def run(quick: bool, out: str | None) -> int:
    """Measures, prints and stores the table; 1 where that cannot be."""
    if not torch.cuda.is_available() or capabilities()["backend"] == "cpu":
        print(
            "sgl_kvio calibrate: there is no GPU to measure; auto keeps its rates", file=sys.stderr
        )
        return 1
    path = Path(out) if out is not None else rates.cache_path()
    if path is None:
        print("sgl_kvio calibrate: no home folder to store rates in; use --out", file=sys.stderr)
        return 1
    try:
        table = _measure_on_gpu(QUICK if quick else FULL)
    except MemoryError as error:
        print(f"sgl_kvio calibrate: {error}", file=sys.stderr)
        return 1
    print(as_text(table))
    try:
        rates.write(path, table, about_this_machine())
    except OSError as error:
        print(f"sgl_kvio calibrate: {path} cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"stored in {path}" + ("" if out is None else ", which nothing reads by itself"))
    return 0


def _measure_on_gpu(sizes: Sizes) -> rates.Table:
    arena = Arena(sizes, torch.device("cuda", torch.cuda.current_device()))
    progress = Progress(sum(1 for _ in cells()))
    try:
        # A stream of its own: the legacy default one takes part in other streams' order.
        with torch.cuda.stream(torch.cuda.Stream()):
            table = measure_table(lambda cell: measure_gbps(arena, cell, sizes), progress)
            torch.cuda.synchronize()
        return table
    finally:
        progress.close()
        arena.close()
