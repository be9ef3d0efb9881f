"""Byte copies: checked as one plan before any is made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def block(kvio, nbytes, at=0, **facts):
    return kvio.Tensor(at, [nbytes], [1], **facts)


def make(kvio, dst, src, dst_offsets, src_offsets, nbytes):
    return kvio.make_memcpy_batch_request(dst, src, dst_offsets, src_offsets, nbytes)


def test_copies_name_addresses_of_one_tensor_each(kvio):
    dst = [block(kvio, 100, at=1000), block(kvio, 100, at=2000)]
    src = [block(kvio, 100, at=5000), block(kvio, 100, at=6000)]
    copies, gpu = make(kvio, dst, src, [3, 40], [0, 50], [10, 50])
    assert copies == [(1003, 5000, 10), (2040, 6050, 50)]
    assert gpu == -1


def test_one_tensor_serves_every_copy(kvio):
    src = [block(kvio, 100, at=5000), block(kvio, 100, at=6000)]
    copies, _ = make(kvio, [block(kvio, 100, at=1000)], src, [0, 90], [1, 2], [10, 10])
    assert copies == [(1000, 5001, 10), (1090, 6002, 10)]


def test_offsets_are_bytes_whatever_the_dtype(kvio):
    tensor = kvio.Tensor(1000, [5, 2], [2, 1], dtype="float32")
    copies, _ = make(kvio, [tensor], [tensor], [39], [1], [1])
    assert copies == [(1039, 1001, 1)]


def test_copies_of_no_bytes_are_left_out(kvio):
    one = [block(kvio, 8, at=1000)]
    assert make(kvio, one, one, [8, 0], [0, 8], [0, 0]) == ([], -1)
    assert make(kvio, [], [], [], [], []) == ([], -1)
    assert make(kvio, one, [], [], [], []) == ([], -1)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_the_gpu_of_either_side_is_the_requests(kvio, side):
    sides = {"dst": [block(kvio, 8)], "src": [block(kvio, 8)]}
    sides[side] = [block(kvio, 8, device="gpu", device_index=3)]
    assert make(kvio, sides["dst"], sides["src"], [0], [0], [8])[1] == 3


@given(st.integers(0, 6), st.integers(-2, 8), st.integers(-1, 8), st.sampled_from(("dst", "src")))
def test_a_copy_is_good_only_inside_both_tensors(kvio, size, offset, nbytes, side):
    tensors = {"dst": [block(kvio, 64)], "src": [block(kvio, 64)]}
    tensors[side] = [block(kvio, size)]
    offsets = {"dst": [0], "src": [0]}
    offsets[side] = [offset]
    arguments = (tensors["dst"], tensors["src"], offsets["dst"], offsets["src"], [nbytes])
    if nbytes >= 0 and 0 <= offset and offset + nbytes <= size:
        make(kvio, *arguments)
        return
    with pytest.raises(RuntimeError) as error:
        make(kvio, *arguments)
    expected = (
        f"kvio::memcpy_batch: nbytes[0] is {nbytes}; it needs 0 or more"
        if nbytes < 0
        else f"kvio::memcpy_batch: {side}_offsets[0] is {offset} with nbytes[0]={nbytes}; it needs "
        f"to stay inside {side}[0] of {size} bytes"
    )
    assert str(error.value) == expected


@pytest.mark.parametrize("huge", [2**63 - 1, 2**62])
def test_sums_beyond_64_bits_do_not_wrap(kvio, huge):
    one = [block(kvio, 100)]
    with pytest.raises(RuntimeError, match=r"dst_offsets\[0\] is 1 with nbytes"):
        make(kvio, one, one, [1], [0], [huge])
    with pytest.raises(RuntimeError, match=rf"src_offsets\[0\] is {huge}"):
        make(kvio, one, one, [0], [huge], [50])


def test_the_tensor_named_is_the_copys_own(kvio):
    two = [block(kvio, 10), block(kvio, 5)]
    with pytest.raises(RuntimeError, match=r"src_offsets\[1\] is 4 .* inside src\[1\] of 5 bytes"):
        make(kvio, [block(kvio, 10)], two, [0, 0], [4, 4], [2, 2])


@pytest.mark.parametrize(
    ("changes", "got", "needs"),
    [
        (
            {"dst_offsets": [0]},
            "dst_offsets has 1 entries but nbytes has 2",
            "equal lengths",
        ),
        (
            {"src_offsets": [0] * 3},
            "src_offsets has 3 entries but nbytes has 2",
            "equal lengths",
        ),
        ({"dst": 3}, "dst has 3 tensors for 2 copies", "one tensor a copy, or one for all"),
        ({"src": 0}, "src has 0 tensors for 2 copies", "one tensor a copy, or one for all"),
        (
            {"src": lambda k: k.Tensor(0, [4, 4], [1, 4])},
            "src[0] has shape [4, 4] and strides [1, 4]",
            "a contiguous tensor",
        ),
        ({"dst": lambda k: block(k, 8, device="other")}, "dst[0] is on a device", "a CPU or a GPU"),
    ],
)
def test_a_refusal_names_the_argument_what_it_got_and_what_it_needs(kvio, changes, got, needs):
    arguments = {
        "dst": 2,
        "src": 2,
        "dst_offsets": [0, 0],
        "src_offsets": [0, 0],
        "nbytes": [4, 4],
        **changes,
    }
    for side in ("dst", "src"):
        value = arguments[side]
        arguments[side] = [value(kvio)] if callable(value) else [block(kvio, 8)] * value
    with pytest.raises(RuntimeError) as error:
        kvio.make_memcpy_batch_request(**arguments)
    text = str(error.value)
    assert text.startswith(f"kvio::memcpy_batch: {got}")
    assert needs in text.split("; it needs ", 1)[1]


def test_two_gpus_are_refused(kvio):
    dst = [block(kvio, 8, device="gpu", device_index=0)]
    src = [block(kvio, 8, device="gpu", device_index=1)]
    with pytest.raises(RuntimeError, match=r"src\[0\] is on cuda:1 but dst\[0\] is on cuda:0"):
        make(kvio, dst, src, [0], [0], [8])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_contiguous_is_what_numpy_calls_contiguous(kvio, dims, data):
    array = np.arange(np.prod(dims)).reshape(dims)
    array = array.transpose(data.draw(st.permutations(range(len(dims)))))
    array = array[:: data.draw(st.integers(1, 2))]
    tensor = kvio.Tensor(0, list(array.shape), [s // 8 for s in array.strides])
    if array.flags.c_contiguous:
        kvio.check_contiguous(tensor)
        return
    with pytest.raises(RuntimeError, match=r"^kvio::host_register: pool has shape .* contiguous"):
        kvio.check_contiguous(tensor, argument="pool")
