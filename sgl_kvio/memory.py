"""Host memory for pools: exact in size, in huge pages, near the GPU, touched by many, page-locked.

Measured limits that shaped it (H200, 40 GiB): the driver's own pinned allocation takes 0.5-0.7 s a
GiB; an anonymous mapping with huge pages advised, touched by 16 threads and then registered, 3.1 s
in all; registering 4 KiB pages costs eight times as much as registering 2 MiB pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_kvio import ops
from sgl_kvio.layouts import checked_int

GIB = 1 << 30
HUGE_PAGE_BYTES = 2 << 20
DEFAULT_CHUNK_BYTES = 256 * GIB
CHUNK_ENV = "KVIO_HOST_REGISTER_CHUNK_GB"

_DEFAULT_RESERVE_BYTES = 2 * GIB
_DEFAULT_RESERVE_SHARE = 0.05
# Pieces below torch's parallel grain in system pages, so that the threads here do not start teams.
_TOUCH_PIECE_BYTES = 64 << 20
_TOUCH_MAX_THREADS = 16
# Version 1 writes "no limit" as the largest multiple of a page below 2^63.
_CGROUP_UNLIMITED = 1 << 62
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1


# ------------------------------------------------------------------------------------------ limits


@dataclass(frozen=True)
class MemoryLimits:
    """What a new host pool may take, in bytes. ``None``: this system does not say.

    available_bytes  MemAvailable, or the caller's ``memory_limit_bytes`` in its place
    cgroup_bytes     the tightest room of the process's cgroup and its ancestors
    total_bytes      the memory of the machine or of the cgroup, whichever is smaller
    reserve_bytes    what stays free for everything else
    """

    available_bytes: int | None
    cgroup_bytes: int | None
    total_bytes: int | None
    reserve_bytes: int
    is_explicit: bool = False

    @property
    def allowed_bytes(self) -> int | None:
        """The largest pool, in bytes; None when nothing limits it."""
        known = [room for room in (self.available_bytes, self.cgroup_bytes) if room is not None]
        return max(0, min(known) - self.reserve_bytes) if known else None

    @property
    def bound_by(self) -> str:
        """The name of the figure that limits."""
        if self.available_bytes is None and self.cgroup_bytes is None:
            return "nothing"
        if self.available_bytes is None:
            return "cgroup"
        if self.cgroup_bytes is not None and self.cgroup_bytes < self.available_bytes:
            return "cgroup"
        return "memory_limit_bytes" if self.is_explicit else "MemAvailable"


def memory_limits(
    memory_limit_bytes: int | None = None,
    reserve_bytes: int | None = None,
    root: str | Path = "/",
) -> MemoryLimits:
    """Reads what memory and cgroup (v2 and v1) allow.

    An explicit ``memory_limit_bytes`` replaces MemAvailable, because some virtual machines grow
    their memory on use; it never replaces a cgroup limit, whose answer is an OOM kill.
    ``reserve_bytes`` is min(2 GiB, 5% of the total) unless given. ``root`` stands in for ``/``
    (tests).

    Raises ValueError when a size is negative or not an int.

    Example: ``memory_limits().allowed_bytes``
    """
    if memory_limit_bytes is not None:
        memory_limit_bytes = checked_int("HostKVPool: memory_limit_bytes", memory_limit_bytes, 0)
    if reserve_bytes is not None:
        reserve_bytes = checked_int("HostKVPool: reserve_bytes", reserve_bytes, 0)
    meminfo = _read_meminfo(Path(root))
    cgroups = list(_cgroup_levels(Path(root)))
    available, total = meminfo.get("MemAvailable"), meminfo.get("MemTotal")
    if memory_limit_bytes is not None:
        available = total = memory_limit_bytes
    totals = [limit for limit, _ in cgroups] + ([total] if total is not None else [])
    total = min(totals, default=None)
    if reserve_bytes is None:
        share = int(total * _DEFAULT_RESERVE_SHARE) if total is not None else _DEFAULT_RESERVE_BYTES
        reserve_bytes = min(_DEFAULT_RESERVE_BYTES, share)
    return MemoryLimits(
        available_bytes=available,
        cgroup_bytes=min((max(0, limit - used) for limit, used in cgroups), default=None),
        total_bytes=total,
        reserve_bytes=reserve_bytes,
        is_explicit=memory_limit_bytes is not None,
    )


def check_fits(nbytes: int, limits: MemoryLimits) -> None:
    """Raises MemoryError, with the sizes asked and allowed, when ``nbytes`` exceed ``limits``."""
    allowed = limits.allowed_bytes
    if allowed is None or nbytes <= allowed:
        return
    raise MemoryError(
        f"HostKVPool: num_pages asks for {_show(nbytes)} of host memory; "
        f"{_show(allowed)} are allowed ({limits.bound_by} leaves "
        f"{_show(allowed + limits.reserve_bytes)}, "
        f"of which reserve_bytes keeps {_show(limits.reserve_bytes)}). "
        "Take fewer pages, or pass memory_limit_bytes or reserve_bytes"
    )


def _show(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / GIB:.2f} GiB)"


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _read_int(path: Path) -> int | None:
    try:
        return int(_read_text(path) or "")
    except ValueError:  # "max", or no such file
        return None


def _read_meminfo(root: Path) -> dict[str, int]:
    """Entries of /proc/meminfo in bytes."""
    sizes = {}
    for line in (_read_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB" and fields[0].isdigit():
            sizes[name] = int(fields[0]) * 1024
    return sizes


def _read_stat(path: Path) -> dict[str, int]:
    fields = [line.split() for line in (_read_text(path) or "").splitlines()]
    return {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}


def _cgroup_levels(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, use) in bytes of the limited memory cgroups, from the process's own upwards.

    File pages count as free: the kernel drops them before it kills anything, and a process that
    has read its model's weights fills its cgroup with them.
    """
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            limit_file, use_file, stat_prefix = "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/memory"]
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
            stat_prefix = "total_"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        # In a container the path may be the host's while the mount shows the container's own group
        # only: levels that do not exist are passed over, and the mount itself always counts.
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                level = mount.joinpath(*parts[:depth])
                limit, used = _read_int(level / limit_file), _read_int(level / use_file)
                if limit is None or used is None or limit >= _CGROUP_UNLIMITED:
                    continue
                stat = _read_stat(level / "memory.stat")
                file_bytes = sum(
                    stat.get(f"{stat_prefix}{name}", 0) for name in ("inactive_file", "active_file")
                )
                yield limit, max(0, used - file_bytes)


# ------------------------------------------------------------------------------------------ chunks


def chunk_limit_from_env() -> int:
    """The largest registration, in bytes: ``KVIO_HOST_REGISTER_CHUNK_GB`` (GiB), or 256 GiB."""
    text = os.environ.get(CHUNK_ENV)
    if text is None:
        return DEFAULT_CHUNK_BYTES
    try:
        limit = int(float(text) * GIB)
    except (ValueError, OverflowError):
        limit = 0
    if limit < 1:
        raise ValueError(f"{CHUNK_ENV} got {text!r}; needs a positive number of GiB")
    return limit


def registration_chunk(
    nbytes: int, granularity_bytes: int, limit_bytes: int, limit_name: str = "chunk_bytes"
) -> int:
    """Bytes of each piece that ``nbytes`` are registered in; 0 when one piece does.

    A piece is a multiple of ``granularity_bytes`` (a driver copy across two registrations is an
    invalid argument) and of the system page (two registrations may not share one).

    Raises ValueError when no such piece is within ``limit_bytes``; the text calls the limit
    ``limit_name``, which is where it came from.

    Example: ``registration_chunk(10 << 20, 3 << 20, 4 << 20) == 3 << 20``
    """
    if nbytes <= limit_bytes:
        return 0
    step = math.lcm(granularity_bytes, mmap.PAGESIZE)
    if step > limit_bytes:
        raise ValueError(
            f"HostKVPool: {limit_name} got {limit_bytes}; needs at least {step}, "
            f"the smallest multiple of a page's {granularity_bytes} bytes "
            f"and of the system page's {mmap.PAGESIZE}"
        )
    return limit_bytes // step * step


# -------------------------------------------------------------------------------------------- NUMA


def gpu_numa_node(device_index: int, root: str | Path = "/") -> int | None:
    """The NUMA node that a CUDA device is attached to; None where the system does not say.

    Reads sysfs by the device's PCI address and creates no CUDA context.
    """
    properties = torch.cuda.get_device_properties(device_index)
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
    except AttributeError:
        return None
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    node = _read_int(Path(root) / "sys/bus/pci/devices" / address / "numa_node")
    return node if node is not None and node >= 0 else None


def prefer_numa_node(address: int, nbytes: int, node: int) -> bool:
    """Asks that pages of a mapping come from ``node`` first; False where the system refuses.

    The policy is a preference, not a binding: a full node then costs speed instead of an OOM kill.
    ``address`` is a multiple of the system page.
    """
    number = _MBIND_NUMBER.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return False
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // word_bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // word_bits] = 1 << (node % word_bits)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_PREFERRED),
        mask,
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(words * word_bits + 1),
        ctypes.c_ulong(0),
    )
    return result == 0


# ------------------------------------------------------------------------------------------ memory


class HostMemory:
    """``nbytes`` of zeroed host memory at a 2 MiB boundary, page-locked for a CUDA device if given.

    ``device_index`` None: plain memory. Otherwise the bytes are registered with that device
    current (so no other GPU gets a context), in pieces of ``chunk_bytes`` (0: in one piece, see
    ``registration_chunk``), and their pages prefer the device's NUMA node.

    ``tensor`` is a uint8 tensor of all bytes, ``bytes_view(start, length)`` a writable memoryview
    of some. Both keep the mapping alive: ``close()`` drops the registration (after the device is
    idle) and this object's references, and the memory goes back to the system with the last view
    of it. A view held longer is plain memory, never a dangling pointer.

    Raises MemoryError when the system has no such mapping, RuntimeError when registration fails;
    then nothing stays registered and the pages have gone back to the system.

    Example::

        memory = HostMemory(1 << 30, device_index=0)
        memory.tensor[:16].fill_(7)
        memory.close()
    """

    def __init__(
        self,
        nbytes: int,
        *,
        device_index: int | None = None,
        chunk_bytes: int = 0,
    ) -> None:
        mapping, start = _map_aligned(nbytes)
        # A pool made under inference_mode must still be writable outside of it.
        with torch.inference_mode(False):
            tensor = torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=nbytes)
        self.nbytes = nbytes
        self.device_index = device_index
        self.chunk_bytes = chunk_bytes
        self.numa_node = _place_on_node(tensor, device_index)
        _first_touch(tensor)
        self._release: weakref.finalize | None = None
        if device_index is not None:
            try:
                # Selected by torch, whose guard goes back to a GPU without a context lazily: the
                # op's own would make one there.
                with torch.cuda.device(device_index):
                    ops.host_register(tensor, chunk_bytes, device_index)
            except BaseException:
                # The error's traceback keeps the mapping alive, so give its pages back without it.
                _madvise(mapping, "MADV_DONTNEED", start, nbytes)
                raise
            # A finalizer, because it also runs for a pool that nobody closed, and at exit while
            # the interpreter is still whole.
            self._release = weakref.finalize(self, _unregister, tensor, device_index, os.getpid())
        self._tensor: torch.Tensor | None = tensor
        self._mapping: mmap.mmap | None = mapping
        self._start = start

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as a 1-D uint8 tensor. Raises ValueError after ``close()``."""
        if self._tensor is None:
            raise ValueError("HostMemory: used after close()")
        return self._tensor

    @property
    def is_pinned(self) -> bool:
        """Whether the bytes are page-locked now."""
        return self._release is not None and self._release.alive

    @property
    def address(self) -> int:
        """The host address of the first byte. Raises ValueError after ``close()``."""
        return self.tensor.data_ptr()

    def bytes_view(self, start: int, length: int) -> memoryview:
        """``length`` bytes from ``start`` on, writable. Raises ValueError after ``close()``."""
        if self._mapping is None:
            raise ValueError("HostMemory: used after close()")
        if not 0 <= start <= start + length <= self.nbytes:
            raise ValueError(
                f"HostMemory: range {start}..{start + length} is outside of {self.nbytes} bytes"
            )
        return memoryview(self._mapping)[self._start + start : self._start + start + length]

    def close(self) -> None:
        """Waits for the device, drops the registration and lets go of the memory. Again: no-op."""
        # The mapping is let go, not closed: closing fails while memoryviews exist, and unmaps
        # under tensors.
        self._tensor = None
        self._mapping = None
        if self._release is not None:
            self._release()


def _unregister(tensor: torch.Tensor, device_index: int, owner_pid: int) -> None:
    # A forked child inherits the object, not the CUDA context that its parent registered with.
    if os.getpid() != owner_pid:
        return
    with torch.cuda.device(device_index):
        ops.host_unregister(tensor, device_index)


def _map_aligned(nbytes: int) -> tuple[mmap.mmap, int]:
    """An anonymous mapping, and the offset at which ``nbytes`` start on a 2 MiB boundary."""
    reserved = nbytes + HUGE_PAGE_BYTES
    try:
        # Private: huge pages of shared mappings have a switch of their own, mostly off.
        mapping = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"HostMemory: the system refused to map {_show(reserved)}: {error}"
        ) from error
    base = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    start = -base % HUGE_PAGE_BYTES
    _madvise(mapping, "MADV_HUGEPAGE", start, nbytes)
    return mapping, start


def _madvise(mapping: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Gives the kernel an advice, which it may not know or may refuse."""
    value = getattr(mmap, advice, None)
    if value is None:
        return
    with contextlib.suppress(OSError):
        mapping.madvise(value, start, length)


def _place_on_node(tensor: torch.Tensor, device_index: int | None) -> int | None:
    """Prefers the device's NUMA node for untouched pages; the node if the system went along."""
    node = gpu_numa_node(device_index) if device_index is not None else None
    if node is None:
        return None
    nbytes = -(-tensor.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    return node if prefer_numa_node(tensor.data_ptr(), nbytes, node) else None


def _first_touch(tensor: torch.Tensor) -> None:
    """Writes one byte of every system page, from several threads: faults are most of the cost.

    Threads of its own rather than torch's: launchers set those to one a process.
    """
    pieces = tensor.split(_TOUCH_PIECE_BYTES)
    threads = min(_TOUCH_MAX_THREADS, len(pieces), _usable_cpus())
    if threads <= 1:
        tensor[:: mmap.PAGESIZE].zero_()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="kvio-touch") as executor:
        for _ in executor.map(lambda piece: piece[:: mmap.PAGESIZE].zero_(), pieces):
            pass


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
