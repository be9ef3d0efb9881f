"""Runs against their definition: slots that follow each other on both sides, in memory too."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import Buffer, Transfer, index_array, layer_elements, transfers


def follows(buffer, slot, other):
    """Row `other` is the slot after `slot` and begins where that one's row, one piece, ends."""
    rows = buffer.row_bytes()
    before, after = rows[slot], rows[other]
    in_one_piece = before[-1] - before[0] == len(before) - 1
    return other == slot + 1 and in_one_piece and after[0] == before[-1] + 1


def expected_runs(case, begin=0, end=None):
    per_index = case.slots_per_index
    dst, src = (s[begin * per_index : end and end * per_index] for s in case.slots())
    runs = []
    for d, s in zip(dst.tolist(), src.tolist(), strict=True):
        if runs:
            first_d, first_s, n = runs[-1]
            if follows(case.dst[0], first_d + n - 1, d) and follows(
                case.src[0], first_s + n - 1, s
            ):
                runs[-1] = (first_d, first_s, n + 1)
                continue
        runs.append((d, s, 1))
    return runs


def runs_of(kvio, case, **limits):
    request = case.request(kvio)
    return kvio.runs(request, request.groups[0], **limits)


@given(transfers())
def test_runs_are_the_longest_stretches_consecutive_on_both_sides(kvio, case):
    assert runs_of(kvio, case) == expected_runs(case)


@given(transfers(), st.data())
def test_runs_of_a_range_stay_inside_it(kvio, case, data):
    if len(case.dst_indices) == 0:
        return
    begin = data.draw(st.integers(0, len(case.dst_indices) - 1))
    end = data.draw(st.integers(begin + 1, len(case.dst_indices)))
    assert runs_of(kvio, case, begin=begin, end=end) == expected_runs(case, begin, end)


def make_case(dst, src, *, layout="layer_first", page_size=1, paged=True, **options):
    view = layer_elements(
        layout, layers=2, pages=4, page_size=4, heads=2, dim=3, paged=paged, pad=1
    )[1]
    device = layer_elements(
        "layer_first", layers=2, pages=8, page_size=2, heads=2, dim=3, paged=False
    )[0]
    return Transfer(
        [Buffer(view, 1 << 20, 2)],
        [Buffer(device, 1 << 30, 2)],
        index_array(dst),
        index_array(src),
        page_size=page_size,
        **options,
    )


@pytest.mark.parametrize(
    ("dst", "src", "runs"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7], [(0, 4, 4)]),
        ([0, 1, 2, 3], [4, 5, 9, 10], [(0, 4, 2), (2, 9, 2)]),
        ([0, 1, 2], [5, 5, 5], [(0, 5, 1), (1, 5, 1), (2, 5, 1)]),
        ([2, 4, 6], [0, 1, 2], [(2, 0, 1), (4, 1, 1), (6, 2, 1)]),
        ([3, 2, 1], [3, 2, 1], [(3, 3, 1), (2, 2, 1), (1, 1, 1)]),
        ([], [], []),
    ],
)
def test_only_steps_of_one_on_both_sides_merge(kvio, dst, src, runs):
    assert runs_of(kvio, make_case(dst, src)) == runs


def test_a_run_ends_where_pages_lie_apart(kvio):
    case = make_case(range(2, 11), range(9), layout="page_first_direct")
    assert runs_of(kvio, case) == [(2, 0, 2), (4, 2, 4), (8, 6, 3)]


@pytest.mark.parametrize("layout", ["page_first", "pitched", "page_head"])
def test_rows_with_gaps_between_them_never_merge(kvio, layout):
    case = make_case(range(5), range(5), layout=layout)
    assert runs_of(kvio, case) == [(i, i, 1) for i in range(5)]


def test_page_entries_merge_across_pages_that_follow_each_other(kvio):
    case = make_case([0, 1, 3], [2, 3, 0], page_size=4, index_unit="page")
    assert runs_of(kvio, case) == [(0, 8, 8), (12, 0, 4)]


def test_an_index_page_may_span_pages_of_the_pool(kvio):
    """Pages of 8 slots over a pool whose pages of 4 lie apart."""
    case = make_case([1], [0], layout="page_first_direct", page_size=8, index_unit="page")
    assert runs_of(kvio, case) == [(8, 0, 4), (12, 4, 4)]


@given(transfers())
def test_runs_cover_every_index_position_once_in_order(kvio, case):
    dst, src = case.slots()
    runs = runs_of(kvio, case)
    covered = [(d + i, s + i) for d, s, n in runs for i in range(n)]
    assert covered == list(zip(dst.tolist(), src.tolist(), strict=True))
    assert all(n > 0 for _, _, n in runs)
    assert np.sum([n for _, _, n in runs], dtype=int) == len(dst)
