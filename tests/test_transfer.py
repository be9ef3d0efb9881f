"""kvio::transfer on CPU tensors moves exactly the rows it is told to."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, check_case, moved

CASES = cases.selected(gpu=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, sgl_kvio.transfer)


@pytest.mark.parametrize("gpu", [False, True])
def test_selection_holds_every_pair_of_axis_values(gpu):
    space = cases.axes(gpu=gpu)
    chosen = cases.selected(gpu=gpu)
    axes_to_pair = list(space)
    if cases.full_product():
        axes_to_pair = ["kind", "row_bytes", "host_layout", "pattern", "direction"]
    for a, b in itertools.combinations(axes_to_pair, 2):
        have = {(getattr(case, a), getattr(case, b)) for case in chosen}
        assert have == set(itertools.product(space[a], space[b])), (a, b)


def test_selection_is_the_same_in_every_run():
    assert [case.name for case in cases.selected(gpu=False)] == [case.name for case in CASES]


def flat_pools(slots=32, row=(2, 8), dtype=torch.float32, seed=0):
    dst = cases.contiguous_pool((slots, *row), dtype, seed)
    src = cases.contiguous_pool((slots, *row), dtype, seed + 1)
    return dst, src


def test_the_op_and_the_function_do_the_same():
    dst, src = flat_pools()
    other = dst.clone()
    at = torch.tensor([3, 1, 30])
    sgl_kvio.transfer([dst], [src], at, at.flip(0))
    torch.ops.kvio.transfer([other], [src], at, at.flip(0))
    assert_same_bytes(dst, other, "destination")


def test_a_single_tensor_stands_for_a_list_of_one():
    dst, src = flat_pools()
    at = torch.tensor([3, 1, 30])
    want = moved(dst, src, at, at.flip(0))
    sgl_kvio.transfer(dst, src, at, at.flip(0))
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
def test_every_element_type_is_moved_as_bytes(dtype):
    dst, src = (
        cases.random_bytes(16 * 48 * dtype.itemsize, seed).view(16, 48 * dtype.itemsize)
        for seed in (0, 1)
    )
    if dtype is torch.bool:
        dst, src = dst & 1, src & 1
    at = torch.tensor([15, 0, 7])
    want = moved(dst, src, at, [1, 2, 3])
    sgl_kvio.transfer(dst.view(dtype), src.view(dtype), at, torch.tensor([1, 2, 3]), row_ndim=1)
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("count", [1, 2, 64, 160, 256])
def test_one_call_serves_many_buffers(count):
    pools = [flat_pools(slots=8, seed=2 * i) for i in range(count)]
    at, frm = torch.tensor([6, 0, 3]), torch.tensor([1, 7, 1])
    want = [moved(dst, src, at, frm) for dst, src in pools]
    sgl_kvio.transfer([dst for dst, _ in pools], [src for _, src in pools], at, frm)
    for (dst, _), expected in zip(pools, want, strict=True):
        assert_same_bytes(dst, expected, "destination")


def test_pairs_of_one_call_may_differ_in_rows_dtypes_and_strides():
    dst_a, src_a = flat_pools(row=(2, 8), dtype=torch.float32)
    dst_b, src_b = flat_pools(row=(3, 5), dtype=torch.uint8, seed=2)
    wide = cases.contiguous_pool((32, 40), torch.bfloat16, 4)
    dst_c, src_c = wide[:, 3:19].unflatten(1, (4, 4)), flat_pools(row=(4, 4), dtype=wide.dtype)[1]
    at, frm = torch.tensor([4, 5, 31, 0]), torch.tensor([9, 10, 0, 0])
    want_a, want_b = moved(dst_a, src_a, at, frm), moved(dst_b, src_b, at, frm)
    want_wide = wide.clone()
    want_wide[:, 3:19] = moved(dst_c, src_c, at, frm).flatten(1)
    sgl_kvio.transfer([dst_a, dst_b, dst_c], [src_a, src_b, src_c], at, frm)
    assert_same_bytes(dst_a, want_a, "first pair")
    assert_same_bytes(dst_b, want_b, "second pair")
    assert_same_bytes(wide, want_wide, "third pair")


def test_views_without_a_byte_may_begin_anywhere():
    nothing = torch.zeros(2, 16, 2, 0)[1]
    assert nothing.storage_offset() > 0
    sgl_kvio.transfer(nothing, nothing, torch.tensor([15]), torch.tensor([0]))


def test_rows_move_between_disjoint_slots_of_one_pool():
    pool, _ = flat_pools()
    at, frm = torch.arange(16, 32), torch.arange(0, 16)
    want = moved(pool, pool, at, frm)
    sgl_kvio.transfer(pool, pool, at, frm)
    assert_same_bytes(pool, want, "pool")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_strided_index_tensor_is_read_with_its_stride(dtype):
    dst, src = flat_pools()
    at = torch.arange(0, 32, dtype=dtype)
    want = moved(dst, src, at[1:31:3], at[2:32:3])
    sgl_kvio.transfer(dst, src, at[1:31:3], at[2:32:3])
    assert_same_bytes(dst, want, "destination")


def test_one_index_may_be_expanded_over_many_sources():
    dst, src = flat_pools()
    at = torch.arange(8)
    frm = torch.tensor([5]).expand(8)
    want = moved(dst, src, at, frm)
    sgl_kvio.transfer(dst, src, at, frm)
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("unit_rows", [1, 3])
@pytest.mark.parametrize("row_bytes", [2, 130, 576, 4680])
def test_a_call_large_enough_for_every_thread_is_exact(row_bytes, unit_rows):
    slots = 3 * max(64, (12 << 20) // row_bytes // 3)
    dst, src = (cases.contiguous_pool((slots, row_bytes), torch.uint8, seed) for seed in (0, 1))
    units = slots // unit_rows
    generator = torch.Generator().manual_seed(2)
    at = torch.randperm(units, generator=generator)
    frm = torch.randperm(units, generator=generator)
    # Half of the list in runs, so that runs meet the borders between threads.
    at[: units // 2] = at[: units // 2].sort().values
    frm[: units // 2] = frm[: units // 2].sort().values
    rows = torch.arange(unit_rows)
    want = moved(
        dst,
        src,
        (at[:, None] * unit_rows + rows).flatten(),
        (frm[:, None] * unit_rows + rows).flatten(),
    )
    unit = "page" if unit_rows > 1 else "token"
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=1, page_size=unit_rows, index_unit=unit)
    assert_same_bytes(dst, want, "destination")


def test_threads_may_call_at_the_same_time():
    pools = [flat_pools(slots=4096, row=(1, 128), seed=2 * i) for i in range(8)]
    at, frm = torch.randperm(4096), torch.randperm(4096)
    want = [moved(dst, src, at, frm) for dst, src in pools]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda pair: sgl_kvio.transfer(*pair, at, frm), pools))
    for (dst, _), expected in zip(pools, want, strict=True):
        assert_same_bytes(dst, expected, "destination")


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_the_cpu_backend_serves_cpu_tensors(backend):
    dst, src = flat_pools()
    at = torch.tensor([2])
    want = moved(dst, src, at, at)
    sgl_kvio.transfer(dst, src, at, at, backend=backend)
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("index_unit", ["token", "page"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_nothing_to_move_is_no_error(index_dtype, index_unit):
    dst, src = flat_pools()
    before = dst.clone()
    none = torch.empty(0, dtype=index_dtype)
    one = torch.zeros(1, dtype=index_dtype)
    options = {"index_unit": index_unit, "page_size": 4}
    sgl_kvio.transfer([dst], [src], none, none, **options)
    sgl_kvio.transfer([], [], none, none, **options)
    sgl_kvio.transfer([], [], one, one, **options)
    sgl_kvio.transfer([dst[:0]], [src[:0]], none, none, **options)
    sgl_kvio.transfer([dst[:, :, :0]], [src[:, :, :0]], one, one, **options)
    sgl_kvio.transfer([dst[:, :0]], [src[:, :0]], one, one, **options)
    assert_same_bytes(dst, before, "destination")


def test_a_row_of_one_element_needs_no_row_dims():
    dst, src = (cases.contiguous_pool((32,), torch.int64, seed) for seed in (0, 1))
    at, frm = torch.tensor([31, 0]), torch.tensor([0, 1])
    want = moved(dst, src, at, frm)
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=0)
    assert_same_bytes(dst, want, "destination")


def test_a_row_may_have_many_dims_when_they_are_one_block():
    dst, src = flat_pools(row=(2, 3, 2, 5))
    at, frm = torch.tensor([31, 0]), torch.tensor([0, 1])
    want = moved(dst, src, at, frm)
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=4)
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("cut_side", ["dst", "src", "both"])
@pytest.mark.parametrize("dim", [1, 3, 80])
def test_heads_with_a_gap_between_them_move_without_the_gap(dim, cut_side):
    heads, pitch = 6, dim + 5
    blocks = [cases.contiguous_pool((16, heads, pitch), torch.bfloat16, seed) for seed in (0, 1)]
    plain = [cases.contiguous_pool((16, heads, dim), torch.bfloat16, seed) for seed in (2, 3)]
    dst_block = blocks[0] if cut_side in ("dst", "both") else plain[0]
    src_block = blocks[1] if cut_side in ("src", "both") else plain[1]
    at, frm = torch.tensor([15, 3, 4, 5]), torch.tensor([0, 7, 8, 9])
    want = dst_block.clone()
    want[:, :, :dim] = moved(dst_block[:, :, :dim], src_block[:, :, :dim], at, frm)
    sgl_kvio.transfer(dst_block[:, :, :dim], src_block[:, :, :dim], at, frm)
    assert_same_bytes(dst_block, want, "destination")


@pytest.mark.parametrize("side", ["dst", "src"])
def test_rows_of_single_elements_apart_are_moved_one_by_one(side):
    pools = dict(zip(("dst", "src"), flat_pools(), strict=True))
    wide = cases.contiguous_pool((32, 2, 16), torch.float32, 5)
    pools[side] = wide[:, :, ::2]
    block = wide if side == "dst" else pools["dst"]
    at, frm = torch.tensor([31, 0, 1]), torch.tensor([0, 1, 9])
    want = block.clone()
    want[:, :, :: want.shape[2] // 8] = moved(pools["dst"], pools["src"], at, frm)
    sgl_kvio.transfer(pools["dst"], pools["src"], at, frm)
    assert_same_bytes(block, want, "destination")


def test_a_pair_of_empty_rows_does_not_disturb_its_neighbours():
    dst, src = flat_pools()
    at, frm = torch.tensor([3, 30]), torch.tensor([0, 1])
    want = moved(dst, src, at, frm)
    nothing = torch.empty(32, 2, 0)
    sgl_kvio.transfer([nothing, dst, nothing], [nothing, src, nothing], at, frm)
    assert_same_bytes(dst, want, "destination")


def test_explain_moves_nothing_and_names_the_backend():
    dst, src = flat_pools()
    before = dst.clone()
    at = torch.tensor([1])
    text = sgl_kvio.explain([dst], [src], at, at)
    assert isinstance(text, str)
    assert "cpu" in text
    assert_same_bytes(dst, before, "destination")


@pytest.mark.parametrize("gib", [3, 5])
@pytest.mark.parametrize("side", ["dst", "src"])
def test_rows_far_beyond_31_and_32_bit_offsets_are_found(side, gib):
    row_bytes = 1152
    slots = (gib << 30) // row_bytes
    try:
        # Untouched pages cost no memory: only the rows named below become real.
        large = torch.empty((slots, row_bytes), dtype=torch.uint8)
    except RuntimeError:
        pytest.skip(f"no address space for {gib} GiB")
    edges = [1 << 31, slots * row_bytes] + ([1 << 32] if gib > 4 else [])
    far = torch.tensor([edge // row_bytes - 1 for edge in edges] + [0], dtype=torch.int32)
    near = torch.tensor([5, 0, 3, 9][: len(far)], dtype=torch.int32)
    small = cases.contiguous_pool((16, row_bytes), torch.uint8, 0)
    around = torch.cat([far - 1, far, far + 1]).clamp(0, slots - 1).unique()
    large[around] = cases.contiguous_pool((len(around), row_bytes), torch.uint8, 1)
    before = large[around]
    if side == "src":
        want = moved(small, large, near, far)
        sgl_kvio.transfer(small, large, near, far, row_ndim=1)
        assert_same_bytes(small, want, "destination")
        assert_same_bytes(large[around], before, "source")
        return
    places = torch.searchsorted(around, far)
    want = moved(before, small, places, near)
    sgl_kvio.transfer(large, small, far, near, row_ndim=1)
    assert_same_bytes(large[around], want, "destination")


def test_a_pitch_beyond_31_bits_is_no_overflow():
    pitch = (1 << 31) + 4096
    try:
        block = torch.empty(2 * pitch + 64, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("no address space for 4 GiB")
    pool = block.as_strided((3, 64), (pitch, 1))
    content = cases.contiguous_pool((3, 64), torch.uint8, 0)
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    sgl_kvio.transfer(pool, content, order, torch.arange(3, dtype=torch.int32), row_ndim=1)
    assert_same_bytes(pool, content[[1, 2, 0]], "destination")


def test_rows_moved_inside_one_pool_stay_inside_it():
    """Bytes of a row that is read and written are undefined; everything else is not."""
    pool = cases.contiguous_pool((64, 2, 8), torch.int32, 0)
    before = pool.clone()
    sgl_kvio.transfer(pool, pool, torch.arange(1, 33), torch.arange(32))
    assert torch.equal(pool[33:], before[33:])
    assert torch.equal(pool[0], before[0])


@pytest.mark.parametrize("value", ["", "0", "false", "off", "no"])
def test_debug_checks_can_be_switched_off(value, monkeypatch):
    monkeypatch.setenv("KVIO_DEBUG_CHECKS", value)
    rows = torch.zeros(4, 1, 2)
    sgl_kvio.transfer(rows, rows.clone(), torch.tensor([1, 1]), torch.tensor([0, 2]))
