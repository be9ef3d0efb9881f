"""Copy-engine entries against the bytes they have to move; batches; how they are submitted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import LAYOUTS, Buffer, Transfer, index_array, layer_elements, transfers

DIRECTIONS = (("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu"))


def entries_of(kvio, case):
    request = case.request(kvio)
    entries = kvio.copy_entries(request)
    assert kvio.count_copy_entries(request) == len(entries)
    return entries


def byte_pairs(entries):
    """Every (destination, source) address that the entries copy, in order of the destination."""
    pairs = [
        np.stack([dst + np.arange(count), src + np.arange(count)], 1) for dst, src, count in entries
    ]
    joined = np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)
    return joined[np.lexsort(joined.T[::-1])]


def expected_pairs(case):
    dst_slots, src_slots = case.slots()
    pairs = [
        np.stack([d.row_bytes()[dst_slots].ravel(), s.row_bytes()[src_slots].ravel()], 1)
        for d, s in zip(case.dst, case.src, strict=True)
    ]
    joined = np.concatenate(pairs)
    return joined[np.lexsort(joined.T[::-1])]


def fewest(pairs):
    """Into how few pieces, contiguous on both sides, the pairs can be cut at all."""
    return 0 if len(pairs) == 0 else 1 + int((np.diff(pairs, axis=0) != 1).any(axis=1).sum())


def with_cpu_indices(case):
    return replace(case, index_device="cpu")


@given(transfers(devices=DIRECTIONS).map(with_cpu_indices))
def test_entries_copy_every_named_byte_once_and_no_other(kvio, case):
    entries = entries_of(kvio, case)
    assert all(count > 0 for _, _, count in entries)
    np.testing.assert_array_equal(byte_pairs(entries), expected_pairs(case))


@given(transfers(devices=DIRECTIONS, max_buffers=1).map(with_cpu_indices))
def test_no_entry_ends_where_the_next_one_begins_on_both_sides(kvio, case):
    entries = entries_of(kvio, case)
    for (dst, src, count), (next_dst, next_src, _) in zip(entries, entries[1:], strict=False):
        assert (dst + count, src + count) != (next_dst, next_src)


def one_piece(buffer):
    rows = buffer.row_bytes()
    return bool((rows[:, -1] - rows[:, 0] == rows.shape[1] - 1).all())


@given(transfers(devices=DIRECTIONS, max_buffers=1).map(with_cpu_indices))
def test_ascending_rows_of_one_buffer_give_the_fewest_entries_there_can_be(kvio, case):
    order = np.argsort(case.dst_indices)
    case = replace(
        case,
        dst_indices=np.ascontiguousarray(case.dst_indices[order]),
        src_indices=np.ascontiguousarray(case.src_indices[order]),
    )
    if one_piece(case.dst[0]) and one_piece(case.src[0]):
        assert len(entries_of(kvio, case)) == fewest(expected_pairs(case))


# Pools of 3 layers and 8 pages of 4 tokens.
LAYERS, PAGES, PAGE = 3, 8, 4
# Layouts whose pages hold all layers without a gap.
WHOLE_PAGES = ("page_first", "page_first_direct", "page_head")


def pool(layout, at, layers=LAYERS, pages=PAGES):
    views = layer_elements(
        layout, layers=layers, pages=pages, page_size=PAGE, heads=2, dim=8, paged=True
    )
    return [Buffer(view, at, 2) for view in views]


def make_case(dst, src, dst_indices, src_indices, *, unit="page", dtype="int64", step=1):
    return Transfer(
        dst,
        src,
        index_array(dst_indices, dtype=dtype, step=step),
        index_array(src_indices, dtype=dtype, step=step),
        page_size=PAGE,
        index_unit=unit,
        dst_device="gpu",
    )


def same_layout(layout, dst_pages, src_pages, **options):
    return make_case(pool(layout, 1 << 20), pool(layout, 1 << 30), dst_pages, src_pages, **options)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_all_layers_of_a_page_are_one_entry_where_both_pools_keep_them_together(
    kvio, layout, step, dtype
):
    case = same_layout(layout, [6, 0, 3], [1, 7, 2], step=step, dtype=dtype)
    entries = entries_of(kvio, case)
    page_bytes = LAYERS * PAGE * 2 * 8 * 2
    assert [count for _, _, count in entries] == [page_bytes] * 3
    np.testing.assert_array_equal(byte_pairs(entries), expected_pairs(case))


@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_pages_that_follow_each_other_on_both_sides_are_one_entry(kvio, layout):
    assert len(entries_of(kvio, same_layout(layout, [2, 3, 4], [5, 6, 7]))) == 1
    assert len(entries_of(kvio, same_layout(layout, [2, 3, 4], [5, 7, 6]))) == 3


@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_pages_named_token_by_token_are_as_long(kvio, layout):
    tokens = [page * PAGE + i for page in (6, 0) for i in range(PAGE)]
    assert len(entries_of(kvio, same_layout(layout, tokens, tokens, unit="token"))) == 2


@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_the_order_of_the_buffers_does_not_matter(kvio, layout):
    case = same_layout(layout, [6, 0, 3], [1, 7, 2])
    turned = replace(case, dst=case.dst[::-1], src=case.src[::-1])
    assert entries_of(kvio, turned) == entries_of(kvio, case)


@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_keys_and_values_are_merged_each_for_itself(kvio, layout):
    sides = [pool(layout, at) + pool(layout, at + (1 << 16)) for at in (1 << 20, 1 << 30)]
    assert len(entries_of(kvio, make_case(*sides, [6, 0, 3], [1, 7, 2]))) == 6
    assert len(entries_of(kvio, make_case(*sides, [1, 2, 3], [4, 5, 6]))) == 2


def test_layers_merge_for_some_of_a_page_first_token_only_where_tokens_are_apart(kvio):
    case = same_layout("page_first", [9, 2], [3, 30], unit="token")
    assert [count for _, _, count in entries_of(kvio, case)] == [LAYERS * 2 * 8 * 2] * 2


@pytest.mark.parametrize("layout", WHOLE_PAGES)
def test_layers_apart_on_one_side_never_merge(kvio, layout):
    for dst, src in ((layout, "layer_first"), ("layer_first", layout)):
        case = make_case(pool(dst, 1 << 20), pool(src, 1 << 30), [6, 0, 3], [1, 7, 2])
        entries = entries_of(kvio, case)
        # Heads lie apart in page_head, tokens too in page_first.
        pieces = {"page_first_direct": 1, "page_first": PAGE, "page_head": PAGE * 2}[layout]
        assert len(entries) == 3 * LAYERS * pieces
        np.testing.assert_array_equal(byte_pairs(entries), expected_pairs(case))


def test_entries_never_reach_into_a_buffer_that_may_be_another_allocation(kvio):
    """Whole layer-first buffers follow each other in memory, and so may two allocations."""
    everything = list(range(PAGES))
    case = same_layout("layer_first", everything, everything)
    layer_bytes = PAGES * PAGE * 2 * 8 * 2
    assert [count for _, _, count in entries_of(kvio, case)] == [layer_bytes] * LAYERS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_consecutive_side_is_not_enough(kvio, layout):
    for dst, src in (([1, 2, 3], [9, 7, 5]), ([3, 9, 6], [4, 5, 6]), ([1, 2, 3], [5, 5, 5])):
        case = same_layout(layout, dst, src, unit="token")
        assert len(entries_of(kvio, case)) >= 3
        np.testing.assert_array_equal(byte_pairs(entries_of(kvio, case)), expected_pairs(case))


def test_rows_of_no_bytes_and_no_indices_give_no_entries(kvio):
    case = same_layout("layer_first", [], [])
    assert entries_of(kvio, case) == []
    empty = [Buffer(np.empty((8, 2, 0), np.int64), 1 << 20, 2)]
    tensors = [kvio.Tensor(1 << 20, [8, 2, 0], [1, 1, 1]) for _ in empty]
    at = kvio.Tensor.of_buffer(np.array([1, 2]))
    assert kvio.copy_entries(kvio.make_transfer_request(tensors, tensors, at, at)) == []


def test_pairs_of_several_shapes_each_give_their_entries(kvio):
    wide = [Buffer(np.arange(8 * 64).reshape(8, 2, 32), 1 << 21, 2)]
    far = [Buffer(np.arange(8 * 64).reshape(8, 2, 32), 1 << 31, 2)]
    narrow, other = pool("layer_first", 1 << 20), pool("layer_first", 1 << 30)
    case = make_case(narrow + wide, other + far, [3, 4], [1, 2], unit="token")
    np.testing.assert_array_equal(byte_pairs(entries_of(kvio, case)), expected_pairs(case))


chunks = st.tuples(st.integers(0, 50), st.sampled_from((0, 1, 7, 16, 4096)))


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 200), chunks, chunks)
def test_no_part_of_an_entry_crosses_a_registration_on_either_side(
    kvio, dst_offset, src_offset, nbytes, dst_chunks, src_chunks
):
    whole = (1000 + dst_offset, 9000 + src_offset, nbytes)
    sides = {"dst_chunks": dst_chunks, "src_chunks": src_chunks}
    parts = kvio.split_copy_entry(whole, **sides)
    np.testing.assert_array_equal(byte_pairs(parts), byte_pairs([whole]))
    for dst, src, count in parts:
        assert count > 0
        for at, (begin, size) in ((dst, dst_chunks), (src, src_chunks)):
            assert size == 0 or (at - begin) // size == (at + count - 1 - begin) // size
    if dst_chunks[1] == src_chunks[1] == 0:
        assert len(parts) == (nbytes > 0)


def policy_of(kvio, first, growth_percent, most):
    policy = kvio.BatchPolicy()
    policy.first, policy.growth_percent, policy.most = first, growth_percent, most
    return policy


@given(
    st.integers(0, 30_000), st.integers(-1, 20_000), st.integers(0, 300), st.integers(-1, 20_000)
)
def test_batches_hold_all_entries_and_never_too_many(kvio, entries, first, growth, most):
    batches = kvio.cut_into_batches(entries, policy=policy_of(kvio, first, growth, most))
    assert sum(batches) == entries
    assert all(0 < size <= kvio.MAX_BATCH_ENTRIES for size in batches)
    assert all(size <= max(most, 1) for size in batches)
    assert sorted(batches[:-1]) == batches[:-1]


def test_the_first_batch_is_small_and_later_ones_grow(kvio):
    policy = kvio.BatchPolicy()
    batches = kvio.cut_into_batches(100_000)
    assert batches[0] == policy.first
    assert max(batches) == policy.most
    assert all(b <= a * 1.25 + 1 for a, b in zip(batches, batches[1:], strict=False))
    assert kvio.cut_into_batches(5) == [5]
    assert kvio.cut_into_batches(0) == []


def test_batches_go_to_the_callers_stream_if_the_driver_takes_them(kvio):
    assert kvio.copy_engine_route()[:2] == (True, False)
    batched, forked, text = kvio.copy_engine_route(legacy_stream=True)
    assert (batched, forked) == (True, True)
    assert "legacy default stream" in text


@pytest.mark.parametrize("legacy_stream", [False, True])
@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("capturing", True, "captured"),
        ("has_batch_call", False, "12.8"),
        ("alias_differs", True, "another address"),
    ],
)
def test_single_copies_say_why(kvio, fact, value, reason, legacy_stream):
    route = kvio.copy_engine_route(legacy_stream=legacy_stream, **{fact: value})
    assert route[:2] == (False, False)
    assert reason in route[2]
