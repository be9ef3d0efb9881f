"""The tma plan, walked as the kernel walks it: every byte of every wanted row, once."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from native import tma_kernel
from native.pools import Buffer, layer_elements, transfers, with_bad_entries
from native.register_kernel import bytes_moved
from native.test_register_plan import (
    DIRECTIONS,
    SCATTERED,
    between,
    giant_request,
    giants,
    make_case,
    rows,
    wanted_bytes,
)

gpu_transfers = transfers(devices=DIRECTIONS, long_rows=True)


def moved_bytes(kvio, case, positions=slice(None), *, with_boxes=True, policy=None):
    request = case.request(kvio)
    moves = []
    for group in request.groups:
        dst, src = case.dst_indices[positions], case.src_indices[positions]
        plan = kvio.make_tma_plan(
            request,
            group,
            range=len(dst),
            with_boxes=with_boxes,
            policy=policy or kvio.TmaPolicy(),
        )
        moves.extend(tma_kernel.launch(plan, group, dst, src)[0])
    return bytes_moved(moves)


def small_policy(kvio):
    """Chunks of a few rows."""
    policy = kvio.TmaPolicy()
    policy.chunk_bytes = 256
    policy.max_chunk_bytes = 512
    policy.min_chunk_bytes = 64
    return policy


def widen(case):
    """The same transfer, 16 times as long in every respect, so that bulk copies can serve it."""

    def wide(buffer):
        old = buffer.elements
        first = int(old.flat[0]) * 16
        numbers = np.arange(first, int(old.max()) * 16 + 16)
        elements = np.lib.stride_tricks.as_strided(
            numbers,
            (*old.shape[:-1], old.shape[-1] * 16),
            (*(stride * 16 for stride in old.strides[:-1]), old.strides[-1]),
        )
        return dataclasses.replace(buffer, elements=elements, address=buffer.address * 16)

    return dataclasses.replace(
        case, dst=[wide(b) for b in case.dst], src=[wide(b) for b in case.src]
    )


def has_long_pieces(case):
    """Rows in pieces longer than a stage, which nothing cuts."""
    return max(b.row_bytes().shape[1] for b in case.dst) > 36 << 10


wide_transfers = gpu_transfers.map(widen).filter(lambda case: not has_long_pieces(case))


@given(wide_transfers, st.booleans())
def test_every_byte_of_every_wanted_row_is_moved_once(kvio, case, with_boxes):
    assert kvio.tma_refusal(case.request(kvio)) is None
    assert np.array_equal(moved_bytes(kvio, case, with_boxes=with_boxes), wanted_bytes(case))


@given(wide_transfers)
def test_every_byte_is_moved_once_when_chunks_are_short(kvio, case):
    policy = small_policy(kvio)
    longest = max(b.row_bytes().shape[1] for b in case.dst)
    assume(longest <= policy.max_chunk_bytes)
    assert np.array_equal(moved_bytes(kvio, case, policy=policy), wanted_bytes(case))


@given(wide_transfers, st.data())
def test_launches_of_two_ranges_move_what_one_launch_moves(kvio, case, data):
    cut = data.draw(st.integers(0, len(case.dst_indices)))
    for positions in (slice(None, cut), slice(cut, None)):
        moved = moved_bytes(kvio, case, positions)
        assert np.array_equal(moved, wanted_bytes(case, positions))


@given(wide_transfers, st.data())
def test_rows_with_an_entry_outside_its_pool_are_skipped_and_only_they(kvio, case, data):
    broken, good = with_bad_entries(data, case)
    assert np.array_equal(moved_bytes(kvio, broken), wanted_bytes(case, good))


@given(gpu_transfers)
def test_what_is_not_refused_lies_on_16_bytes_throughout(kvio, case):
    request = case.request(kvio)
    refusal = kvio.tma_refusal(request)
    assume(not has_long_pieces(case))
    fits = all(
        group.dst.piece_bytes % 16 == 0
        and kvio.address_alignment(group.dst, group.src, kvio.address_bits(group)) >= 16
        for group in request.groups
    )
    assert (refusal is None) == fits
    if fits:
        assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))
    else:
        assert "16 bytes" in refusal


def pages_of(numbers, size):
    return [page * size + token for page in numbers for token in range(size)]


def plan_and_copies(kvio, case, **options):
    request = case.request(kvio)
    group = request.groups[0]
    plan = kvio.make_tma_plan(request, group, range=len(case.dst_indices), **options)
    _, copies = tma_kernel.launch(plan, group, case.dst_indices, case.src_indices)
    return plan, copies


@pytest.mark.parametrize(
    ("row_bytes", "page_size", "rows_a_chunk"),
    [
        (512, 64, 64),  # a page is 32 KiB
        (512, 128, 64),
        (512, 16, 64),  # four pages
        (1024, 64, 32),
        (2048, 64, 16),
        (576, 64, 64),  # 36 KiB: the whole page
        (1152, 64, 32),
        (1152, 128, 32),
        (656, 64, 32),
        (128, 64, 256),
        (16, 64, 256),  # a lane works out eight units at most
    ],
)
def test_chunks_hold_whole_pages_or_equal_parts_of_one(kvio, row_bytes, page_size, rows_a_chunk):
    pages = 32
    slots = pages * page_size
    order = pages_of(np.random.default_rng(0).permutation(pages), page_size)
    sides = (rows(row_bytes, slots=slots, at=at) for at in (1 << 20, 1 << 30))
    case = make_case(*sides, range(slots), order, page_size=page_size)
    plan, copies = plan_and_copies(kvio, case, with_boxes=True)
    assert plan.units_per_chunk == rows_a_chunk
    assert plan.box_tokens == 0
    assert max(copies) <= max(1, rows_a_chunk // page_size)


@pytest.mark.parametrize(
    ("row_bytes", "page_size", "tokens"),
    [(512, 64, 64), (1024, 64, 32), (2048, 64, 16), (576, 64, 64), (1152, 64, 32), (512, 16, 16)],
)
def test_whole_pages_of_a_page_first_pool_are_boxes(kvio, row_bytes, page_size, tokens):
    pages = 8
    slots = pages * page_size
    order = pages_of(np.random.default_rng(0).permutation(pages), page_size)
    case = make_case(
        rows(row_bytes, slots=slots, layers=3),
        rows(row_bytes, slots=slots, layout="page_first", layers=3, at=1 << 30),
        range(slots),
        order,
        page_size=page_size,
    )
    plan, copies = plan_and_copies(kvio, case, with_boxes=True)
    assert plan.box_tokens == tokens
    assert set(copies) == {1}
    assert plan.buffers_innermost
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))
    without, copies = plan_and_copies(kvio, case, with_boxes=False)
    assert without.box_tokens == 0
    assert min(copies) > 1


def test_a_box_never_starts_where_the_promise_is_broken(kvio):
    case = make_case(
        rows(512, slots=256, layers=2),
        rows(512, slots=256, layout="page_first", layers=2, at=1 << 30),
        range(128),
        [*range(3, 67), *range(64, 128)],
        page_size=64,
    )
    _, copies = plan_and_copies(kvio, case, with_boxes=True)
    # Flat pools have no page to cross: the first 64 rows are consecutive and make a box too.
    assert copies == [1, 1, 1, 1]
    broken = dataclasses.replace(case, src_indices=case.src_indices[::-1].copy())
    _, copies = plan_and_copies(kvio, broken, with_boxes=True)
    assert copies == [64, 64, 64, 64]


@pytest.mark.parametrize("row_bytes", [16, 512, 1152, 9000 * 16, 1 << 20])
def test_rings_fit_shared_memory(kvio, row_bytes):
    case = between(row_bytes, SCATTERED)
    for shared in (232448 - 1024, 101376 - 1024):
        policy = kvio.TmaPolicy()
        policy.shared_bytes = shared
        request = case.request(kvio)
        plan = kvio.make_tma_plan(
            request, request.groups[0], range=9, with_boxes=True, policy=policy
        )
        stage = plan.stage_bytes + kvio.tma_stage_overhead(plan.units_per_chunk)
        assert plan.stages * stage <= shared
        assert 2 <= plan.stages <= policy.max_stages
        assert 1 <= plan.loaders <= plan.stages
        assert plan.units_per_chunk * plan.unit_bytes <= plan.stage_bytes
        assert np.array_equal(moved_bytes(kvio, case, policy=policy), wanted_bytes(case))


def test_rows_that_have_no_equal_parts_are_refused_by_name(kvio):
    prime = 16 * 5003  # packages
    assert "equal parts" in kvio.tma_refusal(between(prime, SCATTERED).request(kvio))
    assert kvio.tma_refusal(between(16 * 5000, SCATTERED).request(kvio)) is None


@pytest.mark.parametrize(("num_blocks", "most"), [(0, 2), (1, 1), (7, 7)])
def test_grids_stay_within_what_was_asked(kvio, num_blocks, most):
    slots = 4096
    sides = (rows(512, slots=slots, at=at) for at in (1 << 20, 1 << 30))
    case = make_case(*sides, range(slots), options={"num_blocks": num_blocks})
    plan, _ = plan_and_copies(kvio, case, with_boxes=True)
    assert plan.num_blocks == most


def test_a_small_call_is_cut_so_that_every_cta_has_work(kvio):
    sides = (rows(512, slots=64, at=at) for at in (1 << 20, 1 << 30))
    plan, _ = plan_and_copies(kvio, make_case(*sides, range(64), page_size=64), with_boxes=True)
    assert (plan.units_per_chunk, plan.num_blocks) == (16, 2)


@given(giants())
def test_a_full_launch_of_256_buffers_numbers_its_chunks_in_31_bits(kvio, giant):
    request = giant_request(kvio, giant, num_buffers=256)
    if kvio.tma_refusal(request) is not None:
        return
    group = request.groups[0]
    most = kvio.max_indices_per_launch(request, group)
    plan = kvio.make_tma_plan(request, group, range=most, with_boxes=True)
    assert 1 <= plan.units <= 1 << 30
    assert plan.chunks < 1 << 31


@pytest.mark.parametrize(("slots", "tokens"), [(1 << 31, 64), ((1 << 31) + 64, 0), (1 << 40, 0)])
def test_pools_with_more_slots_than_box_coordinates_have_no_boxes(kvio, slots, tokens):
    request = giant_request(kvio, ((slots, 1, 64), (128, 64, 1), 64, "token"))
    plan = kvio.make_tma_plan(request, request.groups[0], range=4096, with_boxes=True)
    assert plan.box_tokens == tokens


@pytest.mark.parametrize("paged", [True, False])
def test_contiguous_rows_cut_into_heads_have_no_boxes(kvio, paged):
    """Rows written to a page_head pool are in pieces on both sides, but read as one stretch."""
    shape = {"pages": 4, "page_size": 16, "heads": 8, "dim": 128}
    card = layer_elements("layer_first", layers=1, paged=paged, **shape)
    host = layer_elements("page_head", layers=2, **shape)
    case = make_case(
        [Buffer(host[0], 1 << 20, 1)],
        [Buffer(card[0], 1 << 30, 1)],
        range(64),
        direction=("cpu", "gpu"),
        page_size=16,
    )
    plan, copies = plan_and_copies(kvio, case, with_boxes=True)
    assert plan.dst.num_pieces == 8
    assert plan.box_tokens == 0
    assert set(copies) == {1}
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))
    back = dataclasses.replace(case, dst=case.src, src=case.dst, dst_device="gpu", src_device="cpu")
    plan, copies = plan_and_copies(kvio, back, with_boxes=True)
    assert plan.box_tokens == 16
    assert set(copies) == {1}
    assert np.array_equal(moved_bytes(kvio, back), wanted_bytes(back))
