"""The staged plan, walked as csrc/gpu/staged.cpp walks it: every byte of every wanted row, once."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import Buffer, Transfer, index_array, layer_elements
from native.register_kernel import offsets
from native.test_register_plan import wanted_bytes

STAGING_AT = 1 << 42


@st.composite
def calls(draw):
    """A page-wise host pool, any device pool, an index list with whole pages and others."""
    itemsize = draw(st.sampled_from((1, 2, 8)))
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    layers = draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    pages = draw(st.integers(2, 9))
    layout = draw(st.sampled_from(("page_first", "page_first_direct", "page_head", "layer_first")))
    flat = layout in ("page_first", "layer_first") and draw(st.booleans())
    host = [
        Buffer(view, at, itemsize)
        for at in ((1 << 30), (1 << 33))[: draw(st.integers(1, 2))]
        for view in layer_elements(
            layout,
            layers=layers,
            pages=pages,
            page_size=size,
            heads=heads,
            dim=dim,
            paged=not flat,
        )
    ]
    order = draw(st.permutations(range(len(host))))
    host = [host[i] for i in order]
    card_layout = draw(st.sampled_from(("layer_first", "pitched", "head_major", "page_first")))
    card = [
        Buffer(view, 1 << 20, itemsize)
        for view in layer_elements(
            card_layout, layers=len(host), pages=pages, page_size=size, heads=heads, dim=dim, pad=3
        )
    ]
    unit = draw(st.sampled_from(("page", "token")))
    host_list, card_list = draw(index_lists(pages, size, unit))
    to_host = draw(st.booleans())
    dst, src = (host, card) if to_host else (card, host)
    lists = (host_list, card_list) if to_host else (card_list, host_list)
    dtype = draw(st.sampled_from(("int32", "int64")))
    case = Transfer(
        dst,
        src,
        *(index_array(x, dtype=dtype, step=draw(st.integers(1, 2))) for x in lists),
        page_size=size,
        index_unit=unit,
        dst_device="cpu" if to_host else "gpu",
        src_device="gpu" if to_host else "cpu",
    )
    return case, draw(st.integers(1, 5))


@st.composite
def index_lists(draw, pages, size, unit):
    chosen = draw(st.lists(st.integers(0, pages - 1), unique=True, max_size=pages))
    others = draw(st.permutations(range(pages)))[: len(chosen)]
    if unit == "page":
        return chosen, others
    tokens = [page * size + token for page in chosen for token in range(size)]
    card = [page * size + token for page in others for token in range(size)]
    cut = draw(st.integers(0, len(tokens)))
    kind = draw(st.sampled_from(("whole", "late", "early", "swapped")))
    if kind == "late":
        return tokens[cut:], card[cut:]
    if kind == "early":
        return tokens[:cut], card[:cut]
    if kind == "swapped" and len(tokens) > 1:
        at = draw(st.integers(0, len(tokens) - 2))
        tokens[at], tokens[at + 1] = tokens[at + 1], tokens[at]
    return tokens, draw(st.permutations(card)) if kind == "whole" else card


def plan_of(kvio, case, staged_pages):
    def plan(nbytes):
        staging = kvio.Tensor(STAGING_AT, [nbytes], [1], device="gpu")
        sides = [
            [b.tensor(kvio, where) for b in side]
            for side, where in ((case.dst, case.dst_device), (case.src, case.src_device))
        ]
        lists = [kvio.Tensor.of_buffer(x) for x in (case.dst_indices, case.src_indices)]
        options = {"page_size": case.page_size, "index_unit": case.index_unit}
        return kvio.staged_plan(*sides, *lists, staging, **options)

    one_page = plan(1 << 30)[0].layout.page_bytes
    return plan(staged_pages * one_page)


def rows_at(view, bases, slots):
    """Address of every byte of rows `slots`, [buffers, slots, bytes]."""
    pieces = np.arange(view.num_pieces)
    starts = offsets(view, np.asarray(slots)[:, None], pieces[None, :])
    inside = starts[..., None] + np.arange(view.piece_bytes)
    return np.asarray(bases)[:, None, None] + inside.reshape(len(slots), -1)


def moved_bytes(kvio, case, staged_pages):
    plan, request = plan_of(kvio, case, staged_pages)
    to_host = case.dst_device == "cpu"
    assert plan.host_is_dst == to_host
    card_list = (case.src_indices if to_host else case.dst_indices).astype(np.int64)
    host_list = (case.dst_indices if to_host else case.src_indices).astype(np.int64)
    size, per_page = case.page_size, plan.positions_per_page
    pairs = [np.empty((0, 2), np.int64)]

    def add(host, card):
        both = (host, card) if to_host else (card, host)
        pairs.append(np.stack([np.asarray(x).ravel() for x in both], axis=-1))

    def slots_of(indices):
        per_index = case.slots_per_index
        return (indices[:, None] * per_index + np.arange(per_index)).ravel()

    for first, pages in plan.stretches:
        for done in range(0, len(pages), plan.half_pages):
            chunk = pages[done : done + plan.half_pages]
            at = first + done * per_page
            card_slots = slots_of(card_list[at : at + len(chunk) * per_page])
            for block in plan.layout.blocks:
                group = request.groups[block.group]
                card_view, host_view = (group.src, group.dst) if to_host else (group.dst, group.src)
                card_bases = group.src_base if to_host else group.dst_base
                host_bases = group.dst_base if to_host else group.src_base
                half = plan.half_pages
                staged = kvio.staged_view(host_view, size, block.staged_stride, half)
                assert 0 <= block.place(half, 0)
                assert block.place(half, half) <= half * plan.layout.page_bytes
                places = [block.place(half, 0) + host_bases[b] - block.host for b in block.buffers]
                inside = rows_at(staged, places, np.arange(len(card_slots)))
                page, offset = np.divmod(inside - block.place(half, 0), block.staged_stride)
                assert ((0 <= page) & (page < len(chunk)) & (offset < block.nbytes)).all()
                host = block.host + np.asarray(chunk)[page] * block.page_stride + offset
                add(host, rows_at(card_view, [card_bases[b] for b in block.buffers], card_slots))
                # A page is copied whole: nothing of it may be left as it was in the buffer.
                filled = np.unique(inside)
                assert len(filled) == len(chunk) * block.nbytes == inside.size
    for begin, end in plan.rest:
        for group in request.groups:
            card_view, host_view = (group.src, group.dst) if to_host else (group.dst, group.src)
            card_bases = group.src_base if to_host else group.dst_base
            host_bases = group.dst_base if to_host else group.src_base
            add(
                rows_at(host_view, host_bases, slots_of(host_list[begin:end])),
                rows_at(card_view, card_bases, slots_of(card_list[begin:end])),
            )
    moved = np.concatenate(pairs)
    return moved[np.lexsort((moved[:, 1], moved[:, 0]))]


@given(calls())
def test_every_byte_of_every_wanted_row_is_moved_once(kvio, call):
    case, staged_pages = call
    assert np.array_equal(moved_bytes(kvio, case, staged_pages), wanted_bytes(case))


@given(calls())
def test_positions_are_whole_pages_or_rest_and_pages_are_as_many_as_there_are(kvio, call):
    case, staged_pages = call
    plan, _ = plan_of(kvio, case, staged_pages)
    covered = sorted(
        [*(i for begin, end in plan.rest for i in range(begin, end))]
        + [
            i
            for first, pages in plan.stretches
            for i in range(first, first + len(pages) * plan.positions_per_page)
        ]
    )
    assert covered == list(range(len(case.dst_indices)))
    if case.index_unit == "page":
        assert plan.rest == []
    assert plan.num_pages == sum(len(pages) for _, pages in plan.stretches)
    assert plan.num_halves == (1 if staged_pages == 1 else 2)
    assert plan.half_pages == max(1, staged_pages // 2)
    end = 0
    for block in plan.layout.blocks:
        assert block.staged_offset == end
        assert block.staged_stride % kvio.STAGED_ALIGNMENT == 0
        end += block.staged_stride
    assert end == plan.layout.page_bytes


@given(calls(), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_pages_in_one_piece_follow_each_other_on_both_sides(kvio, call, steps):
    case, staged_pages = call
    plan, _ = plan_of(kvio, case, staged_pages)
    pages = list(itertools.accumulate(steps))
    for block in plan.layout.blocks:
        count = block.pages_in_one_piece(pages)
        run = pages[:count]
        host = [block.host + page * block.page_stride for page in run]
        staged = [block.place(plan.half_pages, k) for k in range(count)]
        for addresses in (host, staged):
            assert addresses == [addresses[0] + k * block.nbytes for k in range(count)]
        touching = block.page_stride == block.staged_stride == block.nbytes
        if touching and count < len(pages):
            assert pages[count] != run[-1] + 1


def chunks_of(kvio, pages, page_bytes, staged_pages, *, to_host):
    left, chunks = pages, []
    while left:
        chunks.append(
            kvio.next_chunk(
                staging_bytes=staged_pages * page_bytes,
                page_bytes=page_bytes,
                host_is_dst=to_host,
                lone=not chunks if to_host else True,
                left=left,
            )
        )
        left -= chunks[-1]
    return chunks


@given(st.integers(1, 300), st.sampled_from((256, 1 << 18, 1 << 21, 1 << 24)), st.integers(1, 40))
def test_chunks_fit_a_half_and_the_relayout_that_no_copy_hides_is_short(
    kvio, pages, page_bytes, staged_pages
):
    half = max(1, staged_pages // 2)
    for to_host in (True, False):
        chunks = chunks_of(kvio, pages, page_bytes, staged_pages, to_host=to_host)
        assert sum(chunks) == pages
        assert all(0 < chunk <= half for chunk in chunks)
        lone = chunks[0 if to_host else -1]
        assert lone * page_bytes <= max(page_bytes, 2 * kvio.LONE_CHUNK_BYTES)
        # Cutting a chunk off costs at most one more.
        assert len(chunks) <= -(-pages // half) + 1


def test_chunks_of_pages_of_2_mib_through_64_mib(kvio):
    page = 2 << 20
    assert chunks_of(kvio, 40, page, 32, to_host=True) == [2, 16, 16, 6]
    assert chunks_of(kvio, 40, page, 32, to_host=False) == [16, 16, 6, 2]
    assert chunks_of(kvio, 17, page, 32, to_host=False) == [15, 2]
    assert chunks_of(kvio, 4, page, 32, to_host=True) == [4]


@pytest.mark.parametrize(
    ("tokens", "pages", "rest"),
    [
        ([0, 1, 2, 3], [0], []),
        ([4, 5, 6, 7, 0, 1, 2, 3], [1, 0], []),
        ([1, 2, 3, 4, 5, 6, 7], [1], [(0, 3)]),
        ([0, 1, 2, 3, 4, 5], [0], [(4, 6)]),
        ([0, 2, 1, 3], [], [(0, 4)]),
        ([2, 3, 4, 5, 6, 7, 8, 9], [1], [(0, 2), (6, 8)]),
    ],
)
def test_which_tokens_make_a_page(kvio, tokens, pages, rest):
    views = layer_elements("page_first", layers=2, pages=4, page_size=4, heads=1, dim=8)
    host = [Buffer(view, 1 << 30, 1) for view in views]
    card = [dataclasses.replace(b, address=1 << 20) for b in host]
    case = Transfer(
        host,
        card,
        index_array(tokens),
        index_array(range(len(tokens))),
        page_size=4,
        src_device="gpu",
    )
    plan, _ = plan_of(kvio, case, 2)
    assert [page for _, found in plan.stretches for page in found] == pages
    assert plan.rest == rest


def test_a_call_without_buffers_takes_its_gpu_from_the_staging_buffer(kvio):
    staging = kvio.Tensor(STAGING_AT, [256], [1], device="gpu")
    lists = [kvio.Tensor.of_buffer(index_array([])) for _ in range(2)]
    plan, _ = kvio.staged_plan([], [], *lists, staging, page_size=4)
    assert plan.num_pages == 0
