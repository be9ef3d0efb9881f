"""What every bench needs: memory, clocks, link ceilings, the machine in words, tables, results.

GB/s is 1e9 payload bytes a second, each byte counted once. Times are seconds unless a name says
otherwise.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from sgl_kvio.memory import HostMemory

SCHEMA_VERSION = 1
RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30
MIB = 1 << 20

MIN_REPEATS = 7
MAX_REPEATS = 25
# Repeats beyond the minimum stop here, so that a slow configuration cannot eat a whole run.
SECONDS_PER_FIGURE = 0.1


class Arena:
    """Bytes that a bench cuts its pools from: allocated and filled with random data once.

    `host` is page-locked memory (plain memory without a GPU): made as HostKVPool makes its own
    (`host_memory="pool"`), or by the driver, through torch's pin_memory (`"driver"`).
    `mirror` holds the same bytes on the device, for checks, and is `host` itself without a GPU.
    `device` is as large, for device pools. All three are 1-D uint8 tensors of `nbytes`.
    """

    _PIECE = 64 * MIB

    def __init__(self, where: torch.device, nbytes: int, host_memory: str = "pool") -> None:
        self.where = where
        self.nbytes = nbytes
        self._memory: HostMemory | None = None
        if host_memory == "pool":
            self._memory = HostMemory(nbytes, device_index=where.index)
            self.host = self._memory.tensor
        else:
            self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=where.type == "cuda")
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=where)
        self.mirror = torch.empty_like(self.device) if where.type == "cuda" else self.host
        fill_random(self.device)
        fill_random(self.mirror)
        if self.mirror is not self.host:
            self._copy(self.host, self.mirror)

    def refresh_mirror(self, nbytes: int) -> None:
        """Brings the first `nbytes` of `mirror` up to date with what was written to `host`."""
        if self.mirror is not self.host:
            self._copy(self.mirror[:nbytes], self.host[:nbytes])

    def close(self) -> None:
        """Gives the memory back; tensors cut from it must be gone."""
        synchronize(self.where)
        del self.host, self.mirror, self.device
        if self._memory is not None:
            self._memory.close()

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        pieces = zip(dst.split(self._PIECE), src.split(self._PIECE), strict=True)
        for dst_piece, src_piece in pieces:
            dst_piece.copy_(src_piece, non_blocking=True)
        synchronize(self.where)


def fill_random(flat: torch.Tensor) -> None:
    """Overwrites a 1-D uint8 tensor with random bytes."""
    words = flat.numel() // 8 * 8
    flat[:words].view(torch.int64).random_()
    flat[words:].random_(0, 256)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call, over repeats that each ran `calls_per_repeat` calls back to back."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int
    calls_per_repeat: int

    def rates(self, payload_bytes: int) -> dict[str, float]:
        """GB/s of a call that moves `payload_bytes`."""
        return {
            "gbps_median": payload_bytes / self.median_s / 1e9,
            "gbps_min": payload_bytes / self.max_s / 1e9,
            "gbps_max": payload_bytes / self.min_s / 1e9,
        }


class Clock(Protocol):
    """Runs a piece of work and says how many seconds it took."""

    def seconds(self, work: Callable[[], object]) -> float: ...


class WallClock:
    """Host time from the first call until the device is idle again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        synchronize(self._device)
        start = time.perf_counter()
        work()
        synchronize(self._device)
        return time.perf_counter() - start


class StreamClock:
    """Device time between two events around the work, on a side stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def seconds(self, work: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        synchronize(self._device)
        with torch.cuda.stream(self._stream):
            start.record()
            work()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def synchronize(device: torch.device) -> None:
    """Waits for all work of a CUDA device; the CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_clock(device: torch.device) -> Clock:
    """The clock that sees only the transfer: events on a GPU, the host's clock otherwise."""
    return StreamClock(device) if device.type == "cuda" else WallClock(device)


def time_calls(call: Callable[[int], object], calls_per_repeat: int, clock: Clock) -> Timing:
    """Median of at least 7 repeats of `call(0), call(1), ...`, after one repeat of warm-up.

    The number passed to `call` never comes back, so that a caller can rotate its inputs by it.
    """
    issued = 0

    def repeat() -> None:
        nonlocal issued
        for _ in range(calls_per_repeat):
            call(issued)
            issued += 1

    clock.seconds(repeat)
    samples: list[float] = []
    while len(samples) < MIN_REPEATS or (
        len(samples) < MAX_REPEATS and sum(samples) < SECONDS_PER_FIGURE
    ):
        samples.append(clock.seconds(repeat) / calls_per_repeat)
        # An event pair can read 0 for nothing at all; a rate needs a positive time.
        samples[-1] = max(samples[-1], 1e-9)
    return Timing(
        statistics.median(samples), min(samples), max(samples), len(samples), calls_per_repeat
    )


def host_cost_us(call: Callable[[], object], device: torch.device, calls: int) -> dict[str, float]:
    """Host microseconds that one `call` keeps its thread busy, over many calls.

    The device is drained every 16 calls, outside of the timing: a full launch queue would block
    the thread and be counted as cost of the call.
    """
    for _ in range(16):
        call()
    samples: list[float] = []
    for index in range(calls):
        if index % 16 == 0:
            synchronize(device)
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    synchronize(device)
    samples.sort()
    return {
        "cpu_us_median": statistics.median(samples),
        "cpu_us_min": samples[0],
        "cpu_us_p90": samples[int(0.9 * (len(samples) - 1))],
        "cpu_us_max": samples[-1],
        "calls": calls,
    }


def measure_ceilings(device: torch.device, nbytes: int) -> dict[str, dict[str, Any]]:
    """GB/s of one large contiguous copy of `nbytes` in each direction: the yardstick of a run.

    On a GPU: the copy engine, from and to page-locked memory. On a CPU both directions are the
    same plain memory copy.
    """
    on_gpu = device.type == "cuda"
    # Two buffers in turn, so that the CPU's caches hold nothing of the next copy.
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    far = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    for buffer in (*host, *far):
        fill_random(buffer)
    clock = device_clock(device)
    ceilings: dict[str, dict[str, Any]] = {}
    for direction, dst, src in (("H2D", far, host), ("D2H", host, far)):

        def copy(index: int, dst: list[torch.Tensor] = dst, src: list[torch.Tensor] = src) -> None:
            dst[index % 2].copy_(src[index % 2], non_blocking=True)

        timing = time_calls(copy, 2, clock)
        ceilings[direction] = {
            "nbytes": nbytes,
            "repeats": timing.repeats,
            **timing.rates(nbytes),
        }
    return ceilings


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The facts a reader needs to compare a figure with one from elsewhere; no host name."""
    cpu = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    machine: dict[str, Any] = {
        "device": device.type,
        "cpu": cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "os": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / GIB, 1)
        machine["sms"] = properties.multi_processor_count
        machine.update(_driver_facts(device))
    return machine


def machine_title(machine: dict[str, Any]) -> str:
    """One line for a heading: what ran, and the versions that matter."""
    if machine["gpu"]:
        return (
            f"{machine['gpu']}, driver {machine.get('driver') or '?'}, "
            f"PCIe gen{machine.get('pcie_gen') or '?'} x{machine.get('pcie_width') or '?'}, "
            f"torch {machine['torch']}"
        )
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def machine_slug(machine: dict[str, Any]) -> str:
    """The machine's name as part of a file name."""
    name = machine["gpu"] or f"cpu {machine['cpu']}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes one run as JSON; refuses a number that JSON cannot hold, such as NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **result,
    }
    path.write_text(json.dumps(_rounded(stamped), indent=1, allow_nan=False) + "\n")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    for row in (headers, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), flush=True)


def _driver_facts(device: torch.device) -> dict[str, str]:
    """Driver version and link of a GPU from nvidia-smi; empty where there is none."""
    fields = ["driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = answer.stdout.strip().splitlines()
    line = lines[min(device.index or 0, len(lines) - 1)] if lines else ""
    values = [value.strip() for value in line.split(",")]
    return dict(zip(("driver", "pcie_gen", "pcie_width"), values, strict=False))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _rounded(value: Any) -> Any:
    """Floats cut to 6 significant digits: more would only claim what no clock can see."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value
