"""Pools of every kind, moved as a ROCm build moves them: its plan, and the source of the wave copy.

The bytes are real, the lanes are emulated, and the oracle is the one of every other transfer test.
"""

from functools import partial

import numpy as np
import pytest
import torch
from native import register_kernel

import cases
from reference import check_transfer

CASES = [
    cases.Case(**row)
    for row in cases.covering(
        cases.axes(gpu=False) | {"direction": ("h2d", "d2h", "d2d")},
        seed=0,
    )
]
DTYPES = {torch.float8_e5m2: "float8_e4m3fn"}  # a name that the bridge knows, of the same width


def described(kvio, tensor, place):
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    device = "gpu" if place == "d" else "cpu"
    sizes, strides = list(tensor.shape), list(tensor.stride())
    return kvio.Tensor(tensor.data_ptr(), sizes, strides, dtype=dtype, device=device)


class Memory:
    """The bytes of a pool's storage, by address."""

    def __init__(self, pool):
        self.bytes = pool.storage.numpy()
        self.begin = pool.storage.data_ptr()

    def places(self, addresses, width):
        places = (addresses - self.begin)[:, None] + np.arange(width)
        assert places.size == 0 or (places.min() >= 0 and places.max() < len(self.bytes))
        return places


def move(kvio, transfer, direction, dst, src, dst_indices, src_indices, **options):
    """`transfer` again, by its buffers and index lists, as a ROCm build's register kernel does."""
    options.pop("num_blocks")
    policy = kvio.register_policy(kvio.Platform.rocm)
    request = kvio.make_transfer_request(
        [described(kvio, tensor, direction[2]) for tensor in dst],
        [described(kvio, tensor, direction[0]) for tensor in src],
        kvio.Tensor.of_buffer(dst_indices.numpy(), device="gpu"),
        kvio.Tensor.of_buffer(src_indices.numpy(), device="gpu"),
        **options,
    )
    to, of = Memory(transfer.dst), Memory(transfer.src)
    for group in request.groups:
        plan = kvio.make_register_plan(request, group, policy=policy)
        lists = (dst_indices.numpy(), src_indices.numpy())
        for at, source, width in register_kernel.launch(kvio, plan, policy, group, *lists):
            to.bytes[to.places(at, width)] = of.bytes[of.places(source, width)]


@pytest.mark.parametrize("kind", cases.KINDS)
def test_named_rows_of_a_pool_and_no_other_byte_are_moved(kvio, monkeypatch, kind):
    waves = []
    moves_of = kvio.wave_copy_moves

    def noting(**options):
        waves.append((options["lanes"], options["alignment"]))
        return moves_of(**options)

    monkeypatch.setattr(kvio, "wave_copy_moves", noting)
    for case in CASES:
        if case.kind != kind:
            continue
        with case.open() as transfer:
            check_transfer(transfer, partial(move, kvio, transfer, case.direction))
    assert {1, 2, 4, 8, 16} >= {alignment for _, alignment in waves} >= {8, 16}
    assert {4, 8, 64} <= {lanes for lanes, _ in waves}
