"""What a block of code takes of host memory: by torch's allocator, and of the process at its peak.

A copy of a big tensor shows in both: as one allocation of its size, whoever asks torch's allocator
for it (eager kernels, inductor's generated code), and as resident pages, whatever allocates them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_PROC = Path("/proc/self")


@dataclass
class Use:
    """Bytes; filled in when the block has ended."""

    largest_allocation: int = 0
    peak: int = 0  # of resident memory, above what was resident when the block began


def _status(name: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def _begin_peak() -> int:
    """Resident bytes now, from which the next peak counts."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        # The old peak stays: what is under it is not seen.
        return _status("VmHWM")
    return _status("VmRSS")


@contextlib.contextmanager
def measured() -> Iterator[Use]:
    use = Use()
    before = _begin_peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield use
    use.peak = max(0, _status("VmHWM") - before)
    events = profiler.profiler.kineto_results.events()
    sizes = [
        event.nbytes()
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    use.largest_allocation = max(sizes, default=0)
