"""Random geometry: any two affine pools, any index lists, moved exactly."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
import sgl_kvio
from reference import assert_same_bytes, check_transfer

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


@st.composite
def pool_specs(draw, like=None):
    """A pool; `like` fixes what the two sides of a pair must agree on."""
    layout = draw(st.sampled_from(cases.LAYOUTS))
    heads = draw(st.integers(1, 5))
    dims = tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=2)))
    spec = cases.PoolSpec(
        layout=layout,
        num_layers=draw(st.integers(1, 4)),
        num_pages=draw(st.integers(1, 9)),
        page_size=draw(st.integers(1, 9)),
        num_heads=heads,
        dims=dims,
        dtype=draw(st.sampled_from(DTYPES)),
        paged=draw(st.booleans()),
        lead=draw(st.integers(0, 40)),
        row_ndim=draw(st.sampled_from([2, 3])),
    )
    if like is None:
        return spec
    return replace(
        spec,
        num_layers=like.num_layers,
        num_heads=like.num_heads,
        dims=like.dims,
        dtype=like.dtype,
        row_ndim=like.row_ndim,
    )


@st.composite
def index_pairs(draw, num_dst, num_src):
    """Distinct destinations, any sources: single entries and runs, ascending or not."""
    dst = draw(st.permutations(range(num_dst))) if draw(st.booleans()) else list(range(num_dst))
    dst = dst[draw(st.integers(0, num_dst)) :]
    if not num_src or not dst:
        return [], []
    if draw(st.booleans()):
        start = draw(st.integers(0, num_src - 1))
        src = [(start + i) % num_src for i in range(len(dst))]
    else:
        one = st.integers(0, num_src - 1)
        src = draw(st.lists(one, min_size=len(dst), max_size=len(dst)))
    return dst, src


@st.composite
def transfers(draw):
    dst_spec = draw(pool_specs())
    src_spec = draw(pool_specs(like=dst_spec))
    unit = draw(st.sampled_from(cases.INDEX_UNITS))
    page_size = draw(st.integers(1, 12))
    per_entry = page_size if unit == "page" else 1
    dst, src = draw(index_pairs(dst_spec.num_slots // per_entry, src_spec.num_slots // per_entry))
    layers = draw(st.lists(st.sampled_from(range(dst_spec.num_layers)), unique=True, max_size=4))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    seed = draw(st.integers(0, 2**32))
    return cases.Transfer(
        dst=cases.Pool(dst_spec, cases.random_bytes(dst_spec.nbytes, seed)),
        src=cases.Pool(src_spec, cases.random_bytes(src_spec.nbytes, seed + 1)),
        layers=layers,
        dst_slots=cases.slots_of(dst, unit, page_size),
        src_slots=cases.slots_of(src, unit, page_size),
        dst_indices=torch.tensor(dst, dtype=dtype),
        src_indices=torch.tensor(src, dtype=dtype),
        options={
            "row_ndim": dst_spec.row_ndim,
            "page_size": page_size,
            "index_unit": unit,
            "num_blocks": draw(st.integers(0, 4)),
        },
    )


@given(transfers())
def test_any_two_pools_exchange_exactly_the_named_rows(transfer):
    check_transfer(transfer, sgl_kvio.transfer)


@given(transfers())
def test_a_round_trip_brings_every_row_back(transfer):
    """There and back restores what a scrub destroyed, so no row was lost on either way."""
    first = dict(zip(transfer.dst_slots, transfer.src_slots, strict=True))
    if len(set(transfer.src_slots)) != len(first):
        return  # duplicate sources cannot be destinations of the way back
    before = transfer.src.storage.clone()
    transfer.run(sgl_kvio.transfer)
    rows = torch.tensor(transfer.src_slots, dtype=torch.int64)
    spec = transfer.src.spec
    for view in transfer.src.views(transfer.layers):
        if spec.is_flat:
            view.view(_integer(view))[rows] = 0
        else:
            view.view(_integer(view))[rows // spec.page_size, rows % spec.page_size] = 0
    sgl_kvio.transfer(
        transfer.src.views(transfer.layers),
        transfer.dst.views(transfer.layers),
        transfer.src_indices,
        transfer.dst_indices,
        **transfer.options,
    )
    assert_same_bytes(transfer.src.storage, before, "source after a round trip")


def _integer(view):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]


@st.composite
def copy_plans(draw):
    size = draw(st.integers(1, 3000))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
    borders = list(zip([0, *cuts], [*cuts, size], strict=True))
    plan = []
    for begin, end in draw(st.permutations(borders)):
        count = draw(st.integers(0, end - begin))
        plan.append((begin, draw(st.integers(0, size - count)), count))
    return size, plan


@given(copy_plans())
def test_any_plan_of_disjoint_byte_ranges_is_copied_exactly(sized_plan):
    size, plan = sized_plan
    dst, src = cases.random_bytes(size, 0).clone(), cases.random_bytes(size, 1)
    want = dst.clone()
    for to, frm, count in plan:
        want[to : to + count] = src[frm : frm + count]
    columns = [list(column) for column in zip(*plan, strict=True)] or [[], [], []]
    sgl_kvio.memcpy_batch([dst], [src], *columns)
    assert_same_bytes(dst, want, "destination")
