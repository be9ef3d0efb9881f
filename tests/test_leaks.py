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


host = sgl_kvio.register_pool(src)
token = torch.zeros(1)


def refused(call):
    try:
        call()
    except RuntimeError:
        return
    raise SystemExit("no error")


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


tokens, locs = i32(1, 2, 3)[None], i32(0, 1, 2, 3)[None]
order, out = torch.arange(3, dtype=torch.int16)[None], i32(0, 0)[None]
plan = {"miss_src": out.long(), "miss_dst": out.clone(), "miss_count": i32(0)}


def swap_in(length):
    state = (tokens, locs, torch.arange(8)[None], order)
    batch = (i32(0), i32(length))
    options = {"hot_buffer_size": 3, "num_real_reqs": i32(1), **plan}
    sgl_kvio.swap_in(i32(1, 5)[None], *state, src, dst, out, *batch, **options)


CALLS = {
    "transfer": lambda: sgl_kvio.transfer(dst, src, good, good),
    "transfer_refused": lambda: refused(lambda: sgl_kvio.transfer(dst, src, good, bad)),
    "transfer_lists": lambda: refused(lambda: sgl_kvio.transfer(dst, src[:1], good, good)),
    "write_back": lambda: sgl_kvio.write_back(host, token, dst, good, good),
    "restore_refused": lambda: refused(lambda: sgl_kvio.restore(host, token, dst, good, bad)),
    "register_pool": lambda: sgl_kvio.unregister_pool(sgl_kvio.register_pool(dst)),
    "swap_in": lambda: swap_in(8),
    "swap_in_refused": lambda: refused(lambda: swap_in(5)),
    "copy_planned": lambda: sgl_kvio.copy_planned(src, dst, *plan.values(), i32(1)),
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


NAMES = [
    "transfer",
    "transfer_refused",
    "transfer_lists",
    "write_back",
    "restore_refused",
    "register_pool",
    "memcpy_batch",
    "swap_in",
    "swap_in_refused",
    "copy_planned",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_leaves_no_memory_behind(name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("NAME", repr(name))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16, "bytes a call"
