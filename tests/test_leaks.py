"""Calls leave nothing behind: an engine makes millions of them."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import sgl_kvio

dst = [torch.zeros(8, 2, 4) for _ in range(2)]
src = [torch.zeros(8, 2, 4) for _ in range(2)]
good, bad = torch.arange(4), torch.tensor([0, 1, 2, 99])


def refused(call):
    try:
        call()
    except RuntimeError:
        return
    raise SystemExit("no error")


CALLS = {
    "transfer": lambda: sgl_kvio.transfer(dst, src, good, good),
    "transfer_refused": lambda: refused(lambda: sgl_kvio.transfer(dst, src, good, bad)),
    "transfer_lists": lambda: refused(lambda: sgl_kvio.transfer(dst, src[:1], good, good)),
    "memcpy_batch": lambda: sgl_kvio.memcpy_batch(dst[0], src[0], [0, 8], [8, 0], [8, 8]),
}


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


call = CALLS[NAME]
for _ in range(20_000):
    call()
before = resident_bytes()
for _ in range(40_000):
    call()
print((resident_bytes() - before) / 40_000)
"""


@pytest.mark.parametrize("name", ["transfer", "transfer_refused", "transfer_lists", "memcpy_batch"])
def test_a_call_leaves_no_memory_behind(name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("NAME", repr(name))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16, "bytes a call"
