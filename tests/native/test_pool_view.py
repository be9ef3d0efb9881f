"""A pool view is the affine map of its tensor: it names the address of every byte, or refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import HOST_LAYOUTS, LAYOUTS, Buffer, layer_elements

ADDRESS = 1 << 20


def addresses_named(view, base):
    """Address of every byte by the view's formula, shape [slots, bytes of a row]."""
    rows = []
    for slot in range(view.slots):
        first = (slot // view.page_slots) * view.page_stride
        first += (slot % view.page_slots) * view.token_stride
        assert view.offset(slot) == first
        pieces = base + first + np.arange(view.num_pieces) * view.piece_stride
        rows.append((pieces[:, None] + np.arange(view.piece_bytes)).ravel())
    return np.array(rows)


def first_address(buffer):
    return buffer.address + int(buffer.elements.flat[0]) * buffer.itemsize


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_every_layout_has_the_address_that_numpy_gives(kvio, layout, layer, paged):
    views = layer_elements(
        layout, layers=3, pages=4, page_size=5, heads=2, dim=6, pad=3, paged=paged
    )
    buffer = Buffer(views[layer], ADDRESS, 2)
    view = kvio.pool_view(buffer.tensor(kvio))
    assert np.array_equal(addresses_named(view, first_address(buffer)), buffer.row_bytes())


@pytest.mark.parametrize(
    ("layout", "pieces", "page_slots", "packed"),
    [
        ("layer_first", 1, 1, True),
        ("page_first", 1, 1, False),
        ("page_first_direct", 1, 5, True),
        ("page_head", 2, 5, False),
    ],
)
def test_host_layouts_have_as_few_pieces_and_pages_as_their_strides_allow(
    kvio, layout, pieces, page_slots, packed
):
    views = layer_elements(layout, layers=3, pages=4, page_size=5, heads=2, dim=6)
    view = kvio.pool_view(Buffer(views[1], ADDRESS, 2).tensor(kvio))
    assert (view.slots, view.row_bytes) == (20, 24)
    assert (view.num_pieces, view.page_slots, view.packed) == (pieces, page_slots, packed)
    assert view.is_flat == (page_slots == 1)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_one_layer_pools_of_pages_of_one_token_are_flat(kvio, layout):
    views = layer_elements(layout, layers=1, pages=7, page_size=1, heads=2, dim=6)
    view = kvio.pool_view(Buffer(views[0], ADDRESS, 2).tensor(kvio))
    assert (view.is_flat, view.packed, view.token_stride) == (True, True, 24)


def test_a_pool_of_one_page_is_flat(kvio):
    view = kvio.pool_view(kvio.Tensor(ADDRESS, [1, 4, 8], [9999, 40, 1]), row_ndim=1)
    assert (view.slots, view.is_flat, view.token_stride) == (4, True, 40)


@pytest.mark.parametrize("row_ndim", [0, 1, 2, 3])
def test_the_last_row_ndim_dims_are_the_row(kvio, row_ndim):
    elements = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)[:, :, :, :]
    lead = {0: (2, 60), 1: (2, 3, 20), 2: (2, 3, 4, 5), 3: (2, 3, 4, 5)}[row_ndim]
    buffer = Buffer(elements.reshape(lead), ADDRESS, 4)
    view = kvio.pool_view(buffer.tensor(kvio), row_ndim=row_ndim)
    assert np.array_equal(addresses_named(view, ADDRESS), buffer.row_bytes(row_ndim))


@st.composite
def strided(draw):
    """Any permutation and slicing of a counting array, and how many trailing dims are its row."""
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    array = np.arange(np.prod(dims)).reshape(dims)
    array = array.transpose(draw(st.permutations(range(len(dims)))))
    steps = draw(st.lists(st.sampled_from((1, 1, 2)), min_size=len(dims), max_size=len(dims)))
    array = array[tuple(slice(None, None, step) for step in steps)]
    lead = draw(st.integers(1, min(2, len(dims))))
    return array, len(dims) - lead


def fewest_pieces(row):
    """Least number of equal contiguous pieces at one stride that make up a row, or None."""
    for pieces in range(1, len(row) + 1):
        if len(row) % pieces:
            continue
        cut = row.reshape(pieces, -1)
        if (np.diff(cut, axis=1) == 1).all() and len(set(np.diff(cut[:, 0]))) <= 1:
            return pieces
    return None


@given(strided(), st.sampled_from((1, 2, 4, 8)))
def test_a_view_is_refused_only_if_its_rows_have_no_equal_pieces(kvio, case, itemsize):
    elements, row_ndim = case
    buffer = Buffer(elements, ADDRESS, itemsize)
    row = elements.reshape(-1, int(np.prod(elements.shape[elements.ndim - row_ndim :])))[0]
    pieces = fewest_pieces(row)
    if pieces is None:
        with pytest.raises(RuntimeError, match="needs rows that are contiguous, or equal pieces"):
            kvio.pool_view(buffer.tensor(kvio), row_ndim=row_ndim)
        return
    view = kvio.pool_view(buffer.tensor(kvio), row_ndim=row_ndim)
    assert view.num_pieces == pieces
    assert np.array_equal(addresses_named(view, first_address(buffer)), buffer.row_bytes(row_ndim))


@pytest.mark.parametrize(
    ("sizes", "row_ndim", "got", "needs"),
    [
        ([4, 8], 2, r"shape \[4, 8\] with row_ndim=2", r"\[slots, \*row\] \(3 dims\)"),
        ([2, 3, 4, 5, 6], 2, r"shape \[2, 3, 4, 5, 6\]", r"\[pages, page_size, \*row\] \(4 dims\)"),
        ([], 0, r"shape \[\] with row_ndim=0", r"\[slots, \*row\] \(1 dims\)"),
    ],
)
def test_a_tensor_of_other_dims_is_refused_by_name(kvio, sizes, row_ndim, got, needs):
    tensor = kvio.Tensor(ADDRESS, sizes, [1] * len(sizes))
    with pytest.raises(RuntimeError, match=rf"^kvio::transfer: src\[7\] has {got}.*{needs}"):
        kvio.pool_view(tensor, row_ndim=row_ndim, argument="src", position=7)


def test_rows_of_transposed_dims_are_refused_by_name(kvio):
    tensor = kvio.Tensor(ADDRESS, [10, 4, 8], [32, 1, 4])
    text = (
        r"^kvio::transfer: dst\[3\] has row dims of shape \[4, 8\] and strides \[1, 4\]; it needs"
    )
    with pytest.raises(RuntimeError, match=text):
        kvio.pool_view(tensor, position=3)


@pytest.mark.parametrize("sizes", [[0, 2, 4], [3, 0, 4], [3, 2, 0], [0, 5, 2, 4], [5, 0, 2, 4]])
def test_tensors_without_elements_are_views_that_hold_nothing(kvio, sizes):
    strides = [max(int(np.prod(np.maximum(sizes[i + 1 :], 1))), 1) for i in range(len(sizes))]
    view = kvio.pool_view(kvio.Tensor(ADDRESS, sizes, strides))
    assert view.slots * view.row_bytes == 0


def head_views(kvio, *strides):
    return [kvio.pool_view(kvio.Tensor(ADDRESS, [9, 4, 8], list(s))) for s in strides]


def test_contiguous_rows_are_cut_as_the_other_side_is(kvio):
    whole, heads = head_views(kvio, (32, 8, 1), (8, 72, 1))
    for dst, src in (kvio.align_pieces(whole, heads), kvio.align_pieces(heads, whole)):
        assert (dst.num_pieces, dst.piece_bytes) == (src.num_pieces, src.piece_bytes) == (4, 8)
    cut, kept = kvio.align_pieces(whole, heads)
    assert (cut.piece_stride, kept.piece_stride) == (8, 72)


def test_rows_that_are_cut_alike_stay_as_they_are(kvio):
    for strides in ((32, 8, 1), (8, 72, 1), (2, 144, 18)):
        a, b = head_views(kvio, strides, strides)
        dst, src = kvio.align_pieces(a, b)
        assert (dst.num_pieces, dst.piece_bytes) == (a.num_pieces, a.piece_bytes)
        assert (src.num_pieces, src.piece_bytes) == (a.num_pieces, a.piece_bytes)


def test_rows_cut_in_two_ways_are_refused_by_name(kvio):
    heads, singles = head_views(kvio, (8, 72, 1), (64, 16, 2))
    text = (
        r"^kvio::transfer: dst\[5\] has rows in 4 pieces of 8 bytes and src\[5\] in 32 pieces of 1 "
        r"bytes; it needs rows cut alike on both sides, or contiguous on one"
    )
    with pytest.raises(RuntimeError, match=text):
        kvio.align_pieces(heads, singles, position=5)
