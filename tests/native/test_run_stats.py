"""Counts of runs against a list of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import Buffer, Transfer, index_array, layer_elements, transfers


def pages_of(view):
    """Slots that belong together: a page, or everything where pages follow each other."""
    return view.slots if view.is_flat else view.page_slots


def count_stretches(case, group):
    """By definition, one slot after the other."""
    dst, src = case.slots()
    dst_page, src_page = pages_of(group.dst), pages_of(group.src)
    stretches = 0
    for i in range(len(dst)):
        continues = (
            i > 0
            and dst[i] == dst[i - 1] + 1
            and src[i] == src[i - 1] + 1
            and dst[i] % dst_page != 0
            and src[i] % src_page != 0
        )
        stretches += not continues
    return stretches


@given(transfers())
def test_runs_are_counted_as_they_are_listed(kvio, case):
    request = case.request(kvio)
    runs = stretches = one_an_index = 0
    for group in request.groups:
        buffers = len(group.dst_base)
        runs += len(kvio.runs(request, group)) * buffers * group.dst.num_pieces
        stretches += count_stretches(case, group) * buffers
        one_an_index += request.num_indices * buffers
    joined = joined_pages(case, request)
    got_runs, got_stretches = kvio.count_runs(request)
    if are_packed(request):
        assert got_runs == (runs if joined is None else joined)
    else:
        # Buffers that lie between each other may close the gaps of each.
        assert kvio.count_copy_entries(request) <= got_runs <= runs
    # Pages that do not nest are not worth a walk where rows are apart anyway.
    allowed = {stretches} if are_packed(request) else {stretches, one_an_index}
    assert got_stretches in allowed


def are_packed(request):
    return all(group.dst.packed and group.src.packed for group in request.groups)


def joined_pages(case, request):
    """Runs where layers of whole pages follow each other on both sides; None where they do not."""
    runs = 0
    for group in request.groups:
        listed = joined_pages_of(case, group)
        if listed is None:
            return None
        runs += listed
    return runs


def joined_pages_of(case, group):
    """Maximal stretches of bytes of all buffers that are whole pages; None when not only those."""
    if group.dst.is_flat or group.src.is_flat or not (group.dst.packed and group.src.packed):
        return None
    page = group.dst.page_slots
    if page != group.src.page_slots or len(group.dst_base) < 2:
        return None
    if count_stretches(case, group) * page != len(case.slots()[0]):
        return None
    dst, src = case.slots()
    places = sorted(
        (base_d + group.dst.offset(int(d)), base_s + group.src.offset(int(s)))
        for base_d, base_s in zip(group.dst_base, group.src_base, strict=True)
        for d, s in zip(dst[::page], src[::page], strict=True)
    )
    nbytes = page * group.dst.piece_bytes
    joined = sum(
        b[0] - a[0] == nbytes and b[1] - a[1] == nbytes
        for a, b in zip(places, places[1:], strict=False)
    )
    return len(places) - joined


def layers_case(dst_layout, src_layout, at, frm, **options):
    """Three layers of pools whose pages hold 4 slots of 16 bytes."""
    sizes = {"layers": 3, "pages": 8, "page_size": 4, "heads": 2, "dim": 4}
    sides = [
        [Buffer(view, base, 2) for view in layer_elements(layout, **sizes)]
        for layout, base in ((dst_layout, 1 << 20), (src_layout, 1 << 30))
    ]
    return Transfer(*sides, index_array(at), index_array(frm), **options)


@pytest.mark.parametrize(
    ("dst", "src", "runs", "stretches"),
    [
        ("layer_first", "layer_first", 3 * 2, 3 * 2),  # pages 2, 3 and 5
        ("layer_first", "page_first_direct", 3 * 3, 3 * 3),
        ("page_first_direct", "page_first_direct", 3, 3 * 3),  # all layers of a page at once
        ("layer_first", "page_first", 3 * 12, 3 * 2),
        ("page_head", "layer_first", 3 * 24, 3 * 3),
        ("page_first", "page_first", 2, 3 * 2),  # all layers of a token at once
        ("page_first", "page_first_direct", 3 * 12, 3 * 3),
    ],
)
def test_runs_of_three_pages_of_three_layers(kvio, dst, src, runs, stretches):
    case = layers_case(dst, src, [2, 3, 5], [0, 1, 7], page_size=4, index_unit="page")
    assert kvio.count_runs(case.request(kvio)) == (runs, stretches)


def test_parts_of_pages_are_not_joined_over_layers(kvio):
    case = layers_case("page_first_direct", "page_first_direct", [0, 1, 4, 5], [0, 1, 4, 5])
    assert kvio.count_runs(case.request(kvio)) == (2 * 3, 2 * 3)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [1, 2])
def test_long_lists_are_counted_to_their_end(kvio, dtype, step):
    """Longer than a block of the narrow counter."""
    count = (1 << 20) + 5000
    slots = np.arange(count)
    slots[::3] = slots[::3][::-1].copy()
    tensor = kvio.Tensor(1 << 30, [count, 1, 4], [4, 4, 1], dtype="bfloat16")
    other = kvio.Tensor(1 << 40, [count, 1, 4], [4, 4, 1], dtype="bfloat16")
    at, frm = index_array(slots, dtype=dtype, step=step), index_array(slots, dtype=dtype)
    request = kvio.make_transfer_request(
        [tensor], [other], kvio.Tensor.of_buffer(at), kvio.Tensor.of_buffer(frm)
    )
    expected = 1 + int(np.count_nonzero(np.diff(slots) != 1))
    assert kvio.count_runs(request) == (expected, expected)


@given(st.integers(1, 9), st.integers(2, 9), st.integers(1, 40), st.sampled_from(["token", "page"]))
def test_promised_runs_end_with_pages(kvio, page_size, pool_page, count, unit):
    sizes = {"layers": 2, "pages": 400, "page_size": pool_page, "heads": 1, "dim": 4}
    host = Buffer(layer_elements("page_first_direct", **sizes)[0], 1 << 20, 2)
    device = Buffer(layer_elements("layer_first", **sizes)[0], 1 << 30, 2)
    if unit == "page" and count > 400 * pool_page // page_size:
        return
    case = Transfer(
        [device],
        [host],
        index_array(range(count)),
        index_array(range(count)),
        page_size=page_size,
        index_unit=unit,
        dst_device="gpu",
        index_device="gpu",
    )
    slots = count * (page_size if unit == "page" else 1)
    together = min(page_size, pool_page)
    expected = -(-slots // together)
    assert kvio.promised_runs(case.request(kvio)) == (expected, expected)
