"""kvio::memcpy_batch on CPU tensors: byte ranges, checked as a whole before a byte moves."""

import random

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, refused


def blocks(count=1, nbytes=4096, seed=0):
    return [cases.random_bytes(nbytes, seed + i).clone() for i in range(count)]


def expected(dst, src, dst_offsets, src_offsets, nbytes):
    """The destinations after the copies, one at a time."""
    result = [t.clone() for t in dst]
    for k, count in enumerate(nbytes):
        to, frm = result[k if len(dst) > 1 else 0], src[k if len(src) > 1 else 0]
        to = to.view(-1).view(torch.uint8)
        frm = frm.reshape(-1).view(torch.uint8)
        to[dst_offsets[k] : dst_offsets[k] + count] = frm[src_offsets[k] : src_offsets[k] + count]
    return result


def check(dst, src, dst_offsets, src_offsets, nbytes):
    want = expected(dst, src, dst_offsets, src_offsets, nbytes)
    sgl_kvio.memcpy_batch(dst, src, dst_offsets, src_offsets, nbytes)
    for got, good in zip(dst, want, strict=True):
        assert_same_bytes(got, good, "destination")


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 130, 4095, 4096])
def test_one_range_moves_whole_and_nothing_beside_it(count):
    check(blocks(), blocks(seed=1), [4096 - count], [0], [count])


def test_ranges_of_one_pair_of_tensors_may_come_in_any_order():
    rng = random.Random(0)
    pieces = list(range(0, 4096, 64))
    rng.shuffle(pieces)
    check(blocks(), blocks(seed=1), pieces, pieces[::-1], [rng.randrange(0, 65) for _ in pieces])


@pytest.mark.parametrize("several", ["dst", "src", "both"])
def test_each_copy_may_have_tensors_of_its_own(several):
    dst = blocks(4 if several != "src" else 1)
    src = blocks(4 if several != "dst" else 1, seed=9)
    check(dst, src, [0, 100, 200, 1000], [3, 5, 7, 4000], [64, 1, 33, 96])


def test_offsets_count_bytes_whatever_the_dtypes_are():
    dst = [cases.contiguous_pool((8, 16), torch.float32, 0)]
    src = [cases.contiguous_pool((64,), torch.int64, 1)]
    check(dst, src, [1, 500], [3, 0], [17, 12])


def test_a_tensor_may_start_inside_its_storage():
    dst, src = blocks()[0], blocks(seed=1)[0]
    before, want = dst.clone(), expected([dst[100:200]], [src[7:90]], [10], [3], [80])[0]
    sgl_kvio.memcpy_batch([dst[100:200]], [src[7:90]], [10], [3], [80])
    assert_same_bytes(dst[100:200], want, "destination")
    assert_same_bytes(dst[:100], before[:100], "bytes before the view")
    assert_same_bytes(dst[200:], before[200:], "bytes behind the view")


def test_thousands_of_copies_in_one_call_are_exact():
    rng = random.Random(3)
    nbytes = [rng.randrange(0, 256) for _ in range(20_000)]
    starts = [256 * k for k in range(len(nbytes))]
    dst, src = blocks(nbytes=256 * len(nbytes)), blocks(nbytes=256 * len(nbytes), seed=1)
    check(dst, src, starts, starts[::-1], nbytes)


def test_nothing_to_copy_is_no_error():
    dst, src = blocks(), blocks(seed=1)
    check(dst, src, [], [], [])
    check(dst, src, [4096], [4096], [0])
    sgl_kvio.memcpy_batch([], [], [], [], [])


BAD = {
    "dst_offsets shorter": (r"dst_offsets", "1", {"dst_offsets": [0]}),
    "src_offsets longer": (r"src_offsets", "3", {"src_offsets": [0, 0, 0]}),
    "too few dst tensors": (r"dst", "2", {"dst": 2, "nbytes": 3}),
    "too many src tensors": (r"src", "3", {"src": 3}),
    "no dst tensor": (r"dst", "0", {"dst": 0}),
    "negative nbytes": (r"nbytes\[1\]", "-1", {"nbytes": [8, -1]}),
    "negative dst offset": (r"dst_offsets\[1\]", "-8", {"dst_offsets": [0, -8]}),
    "negative src offset": (r"src_offsets\[0\]", "-1", {"src_offsets": [-1, 0]}),
    "dst range past the end": (r"dst_offsets\[1\]", "4090", {"dst_offsets": [0, 4090]}),
    "src range past the end": (r"src_offsets\[1\]", "4089", {"src_offsets": [0, 4089]}),
    "offset far outside": (r"dst_offsets\[0\]", "", {"dst_offsets": [2**63 - 1, 0]}),
    "sum overflows": (r"(dst|src)_offsets\[1\]", "", {"nbytes": [8, 2**63 - 1]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_moves_nothing(name):
    argument, got, change = BAD[name]
    plan = {
        "dst": blocks(),
        "src": blocks(seed=1),
        "dst_offsets": [0, 64],
        "src_offsets": [0, 64],
        "nbytes": [8, 8],
    }
    change = dict(change)
    if change.get("nbytes") == 3:
        change |= {"nbytes": [8] * 3, "dst_offsets": [0, 8, 16], "src_offsets": [0, 8, 16]}
    for side in ("dst", "src"):
        if side in change:
            change[side] = blocks(change[side], seed=20)
    plan |= change
    with refused(argument, got=got, op="memcpy_batch", unchanged=plan["dst"]):
        sgl_kvio.memcpy_batch(**plan)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_tensor_with_gaps_is_refused_by_name(side):
    tensors = {"dst": blocks(2), "src": blocks(2, seed=2)}
    tensors[side][1] = tensors[side][1].view(64, 64)[:, :32]
    with refused(rf"{side}\[1\]", op="memcpy_batch", unchanged=tensors["dst"]):
        sgl_kvio.memcpy_batch(tensors["dst"], tensors["src"], [0, 0], [0, 0], [8, 8])
