"""Every bad argument of kvio::transfer raises, names itself, and leaves every byte where it was."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from call_changes import both, pool, put, set_to
from hypothesis import given
from hypothesis import strategies as st

import cases
import sgl_kvio
from reference import assert_same_bytes, refused

SLOTS = 16
F32 = torch.float32


def good_call():
    """Two pairs of flat pools, five rows: valid as it stands."""
    return {
        "dst": [cases.contiguous_pool((SLOTS, 2, 4), F32, seed) for seed in (0, 1)],
        "src": [cases.contiguous_pool((SLOTS, 2, 4), F32, seed) for seed in (2, 3)],
        "dst_indices": torch.tensor([5, 1, 3, 8, 15]),
        "src_indices": torch.tensor([0, 2, 7, 7, 9]),
        "row_ndim": 2,
        "page_size": 1,
        "index_unit": "token",
        "backend": "auto",
        "num_blocks": 0,
    }


def run(call):
    options = dict(call)
    lists = [options.pop(name) for name in ("dst", "src", "dst_indices", "src_indices")]
    sgl_kvio.transfer(*lists, **options)


def check_refused(call, argument, got):
    with refused(argument, got=got, unchanged=[*call["dst"], *call["src"]]):
        run(call)


DST, SRC = r"dst\[1\]", r"src\[1\]"
EITHER = r"(?:dst|src)\[1\]"
LISTS = r"(?:dst|src)"
INDICES = r"(?:dst|src)_indices"

BAD = {
    # options
    "unknown backend": (set_to(backend="warp_drive"), "backend", "warp_drive"),
    "empty backend": (set_to(backend=""), "backend", "''"),
    "backend that needs a GPU": (set_to(backend="register"), "backend", "register"),
    "bulk copies without a GPU": (set_to(backend="tma"), "backend", "tma"),
    "driver copies without a GPU": (set_to(backend="copy_engine"), "backend", "copy_engine"),
    "staged of a later version": (set_to(backend="staged"), "backend", "staged"),
    "unknown preference": (set_to(prefer="loud"), "prefer", "loud"),
    "unknown index unit": (set_to(index_unit="block"), "index_unit", "block"),
    "zero page_size": (set_to(page_size=0), "page_size", "0"),
    "negative page_size": (set_to(page_size=-16), "page_size", "-16"),
    "zero page_size, pages": (set_to(page_size=0, index_unit="page"), "page_size", "0"),
    "negative row_ndim": (set_to(row_ndim=-1), "row_ndim", "-1"),
    "negative num_blocks": (set_to(num_blocks=-1), "num_blocks", "-1"),
    # lists
    "fewer sources": (lambda call: call["src"].pop(), LISTS, "1"),
    "fewer destinations": (lambda call: call["dst"].pop(), LISTS, "1"),
    "no source": (set_to(src=[]), LISTS, "0"),
    "dtypes differ": (put("src", 1, pool(SLOTS, 2, 4, dtype=torch.int32)), SRC, "int32"),
    "dtypes of one width differ": (
        both(
            put("dst", 1, pool(SLOTS, 2, 4, dtype=torch.float16)),
            put("src", 1, pool(SLOTS, 2, 4, dtype=torch.bfloat16)),
        ),
        SRC,
        "bfloat16",
    ),
    "row shapes differ": (put("src", 1, pool(SLOTS, 2, 5)), SRC, r"\[2, 5\]"),
    "row bytes equal, shapes differ": (put("src", 1, pool(SLOTS, 4, 2)), SRC, r"\[4, 2\]"),
    "row dims differ": (put("src", 1, pool(SLOTS, 8)), EITHER, r"\[16, 8\]|\[16, 2, 4\]"),
    "too few dims": (
        both(put("dst", 1, pool(2, 4)), put("src", 1, pool(2, 4))),
        EITHER,
        r"\[2, 4\]",
    ),
    "too many dims": (
        both(put("dst", 1, pool(2, 4, 2, 2, 4)), put("src", 1, pool(2, 4, 2, 2, 4))),
        EITHER,
        r"\[2, 4, 2, 2, 4\]",
    ),
    "row_ndim larger than the tensors": (set_to(row_ndim=3), r"(?:dst|src)\[0\]", "3"),
    "row_ndim too small": (set_to(row_ndim=0), r"(?:dst|src)\[0\]", "0"),
    # strides
    "source elements with gaps": (put("src", 1, pool(SLOTS, 2, 9)[:, :, :8:2]), SRC, ""),
    "destination elements with gaps": (put("dst", 1, pool(SLOTS, 2, 9)[:, :, :8:2]), DST, ""),
    "transposed row": (put("src", 1, pool(SLOTS, 4, 2).transpose(1, 2)), SRC, ""),
    "two levels of gaps in a row": (
        lambda call: call.update(
            dst=[pool(SLOTS, 2, 3, 4)],
            src=[pool(SLOTS, 2, 4, 6)[:, :, :3, :4]],
            row_ndim=3,
        ),
        r"src\[0\]",
        "",
    ),
    "expanded destination": (put("dst", 1, pool(1, 2, 4).expand(SLOTS, 2, 4)), DST, ""),
    # index tensors
    "index dtype int16": (
        set_to(dst_indices=torch.zeros(5, dtype=torch.int16)),
        "dst_indices",
        "int16",
    ),
    "index dtype float": (set_to(src_indices=torch.zeros(5)), "src_indices", "float"),
    "index dtype bool": (
        set_to(src_indices=torch.zeros(5, dtype=torch.bool)),
        "src_indices",
        "bool",
    ),
    "index dtype uint8": (
        set_to(dst_indices=torch.zeros(5, dtype=torch.uint8)),
        "dst_indices",
        "uint8",
    ),
    "index dtypes mixed": (
        set_to(src_indices=torch.zeros(5, dtype=torch.int32)),
        INDICES,
        "int32",
    ),
    "index lengths differ": (set_to(src_indices=torch.zeros(4, dtype=torch.int64)), INDICES, "4"),
    "one side empty": (set_to(dst_indices=torch.empty(0, dtype=torch.int64)), INDICES, "0"),
    "indices in two dims": (
        set_to(dst_indices=torch.zeros(5, 1, dtype=torch.int64)),
        "dst_indices",
        r"\[5, 1\]",
    ),
    "index scalar": (set_to(src_indices=torch.tensor(3)), "src_indices", r"\[\]"),
    # index values
    "index -1 as destination": (put("dst_indices", 4, -1), r"dst_indices\[4\]", "-1"),
    "index -1 as source": (put("src_indices", 0, -1), r"src_indices\[0\]", "-1"),
    "index one past the end": (put("dst_indices", 2, SLOTS), r"dst_indices\[2\]", "16"),
    "source one past the end": (put("src_indices", 4, SLOTS), r"src_indices\[4\]", "16"),
    "huge index": (put("dst_indices", 1, 2**62), r"dst_indices\[1\]", str(2**62)),
    "index that wraps to a good one": (
        put("src_indices", 3, 2**32 + 1),
        r"src_indices\[3\]",
        str(2**32 + 1),
    ),
    "page past the end": (
        set_to(index_unit="page", page_size=4, dst_indices=torch.tensor([0, 3, 1, 2, 4])),
        r"(?:dst|src)_indices\[\d\]",
        "",
    ),
    "index outside the shorter pool": (
        both(put("dst", 1, pool(SLOTS - 1, 2, 4)), put("dst_indices", 0, SLOTS - 1)),
        r"dst_indices\[[04]\]",
        "15",
    ),
    "any index into a pool of no slots": (put("src", 1, pool(0, 2, 4)), SRC, r"\b0\b"),
    "a page longer than a pool": (
        set_to(index_unit="page", page_size=SLOTS + 1, dst_indices=torch.zeros(5).long()),
        r"(?:dst|src)\[0\]",
        "17",
    ),
    "a page far longer than any pool": (
        set_to(index_unit="page", page_size=2**40, dst_indices=torch.zeros(5).long()),
        r"(?:dst|src)\[0\]|page_size",
        str(2**40),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_is_refused_by_name_and_nothing_moves(name):
    change, argument, got = BAD[name]
    call = good_call()
    change(call)
    check_refused(call, argument, got)


def test_the_call_that_the_others_spoil_is_good():
    run(good_call())


@pytest.mark.parametrize("view_page", [None, 2, 3, 9])
def test_a_page_that_ends_outside_the_pool_is_refused(view_page):
    call = good_call()
    call["dst"] = [pool(18, 2, 4) for _ in range(2)]
    if view_page:
        call["dst"] = [view.unflatten(0, (-1, view_page)) for view in call["dst"]]
    call |= {"index_unit": "page", "page_size": 4, "src_indices": torch.tensor([0, 1, 2, 3])}
    call["dst_indices"] = torch.tensor([0, 1, 2, 3])
    run(call)
    call["dst_indices"] = torch.tensor([0, 1, 2, 4])  # slots 16 to 19 of 18
    check_refused(call, r"dst_indices\[3\]", "4")


@given(
    position=st.integers(0, 299),
    value=st.one_of(
        st.integers(-(2**63), -1), st.integers(300, 2**63 - 1), st.sampled_from([-1, 300])
    ),
    side=st.sampled_from(["dst_indices", "src_indices"]),
)
def test_one_bad_index_anywhere_in_a_long_list_stops_the_call(position, value, side):
    dst, src = pool(300, 4), cases.contiguous_pool((300, 4), F32, 1)
    indices = {"dst_indices": torch.arange(300), "src_indices": torch.arange(300)}
    indices[side][position] = value
    with refused(rf"{side}\[{position}\]", got=str(value), unchanged=[dst, src]):
        sgl_kvio.transfer([dst], [src], **indices, row_ndim=1)


@pytest.mark.parametrize("value", [-1, SLOTS, 2**31 - 1, -(2**31)])
def test_int32_indices_are_checked_as_well(value):
    call = good_call()
    for side in ("dst_indices", "src_indices"):
        call[side] = call[side].int()
    call["src_indices"][2] = value
    check_refused(call, r"src_indices\[2\]", str(value))


def test_explain_refuses_what_transfer_refuses():
    call = good_call() | {"backend": "warp_drive"}
    lists = [call.pop(name) for name in ("dst", "src", "dst_indices", "src_indices")]
    with pytest.raises(RuntimeError, match=r"backend.*warp_drive"):
        sgl_kvio.explain(*lists, **call)


def test_something_that_is_no_tensor_is_refused():
    call = good_call()
    with pytest.raises((RuntimeError, TypeError)):
        sgl_kvio.transfer(call["dst"], [[1.0]], call["dst_indices"], call["src_indices"])
    with pytest.raises((RuntimeError, TypeError)):
        sgl_kvio.transfer(call["dst"], call["src"], [1], [2])


def test_duplicate_destinations_are_found_when_debug_checks_are_on():
    code = """
        import torch, sgl_kvio
        dst, src = torch.zeros(8, 4), torch.ones(8, 4)
        frm = torch.arange(3)
        sgl_kvio.transfer(dst, src, torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1]), row_ndim=1)
        dst.zero_()
        try:
            sgl_kvio.transfer(dst, src, torch.tensor([5, 2, 5]), frm, row_ndim=1)
        except RuntimeError as error:
            assert "dst_indices[2]" in str(error) and "5" in str(error), error
        else:
            raise SystemExit("the duplicate was not found")
        assert not dst.any()
    """
    env = os.environ | {"KVIO_DEBUG_CHECKS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_refused_call_does_not_spoil_the_next_one():
    call = good_call()
    bad = good_call() | {"page_size": 0}
    with pytest.raises(RuntimeError):
        run(bad)
    run(call)
    assert_same_bytes(call["dst"][0][5], call["src"][0][0], "row")


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@needs_no_gpu
@pytest.mark.parametrize("call", ["host_register", "device_pointer"])
def test_page_locking_says_that_there_is_no_gpu(call):
    block = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=rf"kvio::{call}: .*(?i:gpu|cuda|driver|device)"):
        getattr(sgl_kvio, call)(block)


@needs_no_gpu
def test_a_stream_needs_a_gpu():
    with pytest.raises(RuntimeError, match=r"kvio::create_stream: .*(?i:gpu|cuda|driver|device)"):
        sgl_kvio.create_stream()


@needs_no_gpu
def test_unregistering_what_was_never_registered_raises():
    with pytest.raises(RuntimeError, match="kvio::host_unregister: "):
        sgl_kvio.host_unregister(torch.zeros(4096, dtype=torch.uint8))


@needs_no_gpu
def test_without_a_gpu_no_fault_is_pending():
    assert list(torch.ops.kvio.take_fault()) == []
    sgl_kvio.check()


@pytest.mark.parametrize("name", ["dst", "src", "dst_indices", "src_indices"])
def test_a_meta_tensor_among_real_ones_is_refused(name):
    """It would make the whole call a silent no-op."""
    arguments = {
        "dst": torch.zeros(4, 1, 2),
        "src": torch.ones(4, 1, 2),
        "dst_indices": torch.arange(2),
        "src_indices": torch.arange(2),
    }
    dst = arguments["dst"]
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(RuntimeError, match="kvio::transfer: some arguments are meta tensors"):
        sgl_kvio.transfer(*arguments.values())
    assert not dst.any()


def test_meta_tensors_are_refused_by_the_other_ops():
    real, meta = torch.zeros(8), torch.zeros(8, device="meta")
    with pytest.raises(RuntimeError, match="kvio::memcpy_batch: some arguments are meta"):
        sgl_kvio.memcpy_batch(real, meta, [0], [0], [8])
    with pytest.raises(RuntimeError, match="kvio::host_register: tensor is on meta"):
        sgl_kvio.host_register(meta)


@pytest.mark.parametrize("name", ["dst", "src", "dst_indices", "src_indices"])
@pytest.mark.parametrize("left", [0, 8])
def test_a_tensor_whose_storage_was_shrunk_is_refused(name, left):
    """Resizing a storage leaves its views as they are: reading them would end the process."""
    arguments = {
        "dst": torch.zeros(4, 1, 2),
        "src": torch.ones(4, 1, 2),
        "dst_indices": torch.arange(2),
        "src_indices": torch.arange(2),
    }
    arguments[name].untyped_storage().resize_(left)
    with pytest.raises(RuntimeError, match=rf"{name}.* spans \d+ bytes but its storage has {left}"):
        sgl_kvio.transfer(*arguments.values())


def test_a_byte_copy_of_a_freed_storage_is_refused():
    dst, src = torch.zeros(8), torch.zeros(8)
    src.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"src\[0\] spans 32 bytes but its storage has 0"):
        sgl_kvio.memcpy_batch(dst, src, [0], [0], [8])
