"""The register plan, walked as the kernel walks it: every byte of every wanted row, once."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native import register_kernel
from native.pools import Buffer, Transfer, index_array, layer_elements, transfers, with_bad_entries

DIRECTIONS = (("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu"))
PLATFORMS = ("cuda", "rocm")


def policy_of(kvio, platform):
    return kvio.register_policy(getattr(kvio.Platform, platform))


def blocks_of(policy, direction):
    """Most blocks of a grid, direction (dst, src), on a GPU of 132 SMs."""
    return {
        ("gpu", "gpu"): 132,
        ("gpu", "cpu"): policy.read_blocks,
        ("cpu", "gpu"): policy.write_blocks,
    }[direction]


def small_policy(kvio, platform="cuda"):
    """Cuts, short items and several rounds within few bytes."""
    policy = policy_of(kvio, platform)
    policy.bytes_per_warp_step = 64
    policy.long_piece_bytes = 96
    return policy


def wanted_bytes(case, positions=slice(None)):
    """[bytes, 2]: (dst, src) address of every byte that the entries at `positions` name."""
    part = dataclasses.replace(
        case, dst_indices=case.dst_indices[positions], src_indices=case.src_indices[positions]
    )
    dst_slots, src_slots = part.slots()
    pairs = [np.empty((0, 2), np.int64)]
    for dst, src in zip(case.dst, case.src, strict=True):
        both = (dst.row_bytes()[dst_slots].ravel(), src.row_bytes()[src_slots].ravel())
        pairs.append(np.stack(both, axis=-1))
    wanted = np.concatenate(pairs)
    return wanted[np.lexsort((wanted[:, 1], wanted[:, 0]))]


def moved_bytes(kvio, case, positions=slice(None), policy=None):
    request = case.request(kvio)
    policy = policy or kvio.RegisterPolicy()
    moves = []
    for group in request.groups:
        dst, src = case.dst_indices[positions], case.src_indices[positions]
        plan = kvio.make_register_plan(request, group, range=len(dst), policy=policy)
        moves.extend(register_kernel.launch(kvio, plan, policy, group, dst, src))
    return register_kernel.bytes_moved(moves)


gpu_transfers = transfers(devices=DIRECTIONS, long_rows=True)


@pytest.mark.parametrize("platform", PLATFORMS)
@given(case=gpu_transfers)
def test_every_byte_of_every_wanted_row_is_moved_once(kvio, platform, case):
    moved = moved_bytes(kvio, case, policy=policy_of(kvio, platform))
    assert np.array_equal(moved, wanted_bytes(case))


@pytest.mark.parametrize("platform", PLATFORMS)
@given(case=gpu_transfers)
def test_every_byte_is_moved_once_when_pieces_are_cut_and_items_are_short(kvio, platform, case):
    moved = moved_bytes(kvio, case, policy=small_policy(kvio, platform))
    assert np.array_equal(moved, wanted_bytes(case))


@given(gpu_transfers, st.data())
def test_launches_of_two_ranges_move_what_one_launch_moves(kvio, case, data):
    cut = data.draw(st.integers(0, len(case.dst_indices)))
    for positions in (slice(None, cut), slice(cut, None)):
        moved = moved_bytes(kvio, case, positions)
        assert np.array_equal(moved, wanted_bytes(case, positions))


@pytest.mark.parametrize("platform", PLATFORMS)
@given(case=gpu_transfers, data=st.data())
def test_rows_with_an_entry_outside_its_pool_are_skipped_and_only_they(kvio, platform, case, data):
    broken, good = with_bad_entries(data, case)
    moved = moved_bytes(kvio, broken, policy=policy_of(kvio, platform))
    assert np.array_equal(moved, wanted_bytes(case, good))


def rows(row_bytes, *, slots, layout="layer_first", page_size=4, layers=1, pad=0, at=1 << 20):
    views = layer_elements(
        layout,
        layers=layers,
        pages=slots // page_size,
        page_size=page_size,
        heads=1,
        dim=row_bytes,
        pad=pad,
    )
    return [Buffer(view, at, 1) for view in views]


def make_case(dst, src, dst_indices, src_indices=None, *, direction=("gpu", "cpu"), **options):
    src_indices = dst_indices if src_indices is None else src_indices
    dst_device, src_device = direction
    return Transfer(
        dst,
        src,
        index_array(dst_indices),
        index_array(src_indices),
        dst_device=dst_device,
        src_device=src_device,
        index_device="gpu",
        **options,
    )


def between(row_bytes, indices, *, slots=64, dst="layer_first", src="layer_first", **options):
    """Rows between two pools of 2 layers, pages of 4 slots."""
    layers = options.pop("layers", 2)
    pad = options.pop("pad", 0)
    return make_case(
        rows(row_bytes, slots=slots, layout=dst, layers=layers, pad=pad),
        rows(row_bytes, slots=slots, layout=src, layers=layers, pad=pad, at=1 << 30),
        indices,
        **options,
    )


def plan_of(kvio, case, **options):
    request = case.request(kvio)
    return kvio.make_register_plan(request, request.groups[0], **options)


SCATTERED = [5, 0, 63, 17, 18, 40, 2, 60, 33]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("indices", [[7], [7, 3], SCATTERED, list(range(64)), list(range(33))])
@pytest.mark.parametrize(
    ("row_bytes", "pad"), [(17, 15), (20, 12), (31, 1), (130, 14), (1152, 0), (1160, 24), (3, 0)]
)
def test_remainders_are_moved_whole_for_any_number_of_rows(kvio, platform, row_bytes, pad, indices):
    layout = "pitched" if pad else "layer_first"
    case = between(row_bytes, indices, dst=layout, src=layout, pad=pad)
    moved = moved_bytes(kvio, case, policy=policy_of(kvio, platform))
    assert np.array_equal(moved, wanted_bytes(case))


@given(gpu_transfers)
def test_only_a_stretch_of_one_unit_can_have_a_remainder(kvio, case):
    """Units that follow each other begin at multiples of the package, so they hold whole ones."""
    request = case.request(kvio)
    group = request.groups[0]
    plan = kvio.make_register_plan(request, group)
    if plan.remainder == 0 or plan.units < 2:
        return
    dst, src, inside = register_kernel.locate(plan, case.dst_indices, case.src_indices)
    for first in range(plan.units - 1):
        pair = slice(first, first + 2)
        assert not register_kernel.is_stretch(plan, dst[pair], src[pair], inside[pair])


@given(gpu_transfers)
def test_units_hold_the_whole_payload(kvio, case):
    request = case.request(kvio)
    plan = kvio.make_register_plan(request, request.groups[0], policy=small_policy(kvio))
    assert plan.packages >= 1
    assert 0 <= plan.remainder < plan.package_bytes
    unit_bytes = plan.packages * plan.package_bytes + plan.remainder
    assert unit_bytes == plan.dst.piece_bytes == plan.src.piece_bytes
    assert plan.units * unit_bytes * request.num_buffers == request.payload_bytes


PAGES = {"page_size": 4, "index_unit": "page"}


@pytest.mark.parametrize(
    ("dst", "src", "joined"),
    [
        ("layer_first", "layer_first", True),
        ("layer_first", "page_first_direct", True),
        ("page_first_direct", "page_first_direct", True),
        ("page_first", "layer_first", False),
        ("layer_first", "page_first", False),
    ],
)
def test_whole_pages_packed_on_both_sides_are_one_unit(kvio, dst, src, joined):
    case = between(64, [3, 0, 9], dst=dst, src=src, **PAGES)
    plan = plan_of(kvio, case)
    assert (plan.units, plan.dst.piece_bytes) == ((3, 256) if joined else (12, 64))
    assert plan.slots_per_index == (1 if joined else 4)
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))


def test_token_entries_join_nothing(kvio):
    assert plan_of(kvio, between(64, [3, 0, 9], page_size=4)).units == 3


@pytest.mark.parametrize(("index_page", "units"), [(2, 1), (4, 1), (3, 3), (8, 8)])
def test_index_pages_join_only_inside_pages_of_the_pool(kvio, index_page, units):
    case = between(
        64, [1], dst="page_first_direct", page_size=index_page, index_unit="page", slots=64
    )
    assert plan_of(kvio, case).units == units
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))


def test_joined_pages_may_use_wider_loads_than_their_rows(kvio):
    case = between(12, [3, 0, 9], dst="page_first_direct", layers=4, **PAGES)
    assert plan_of(kvio, case).package_bytes == 16
    assert (
        plan_of(kvio, between(12, [3, 0, 9], dst="page_first_direct", layers=4)).package_bytes == 4
    )


@pytest.mark.parametrize(
    ("row_bytes", "parts"),
    [(8192, 1), (8208, 3), (8193, 3), (9216, 2), (16384, 2), (20480, 4), (3 * 8192, 3)],
)
def test_long_rows_are_cut_into_equal_parts_of_at_most_a_warp_step(kvio, row_bytes, parts):
    case = between(row_bytes, [0, 3], slots=4)
    plan = plan_of(kvio, case)
    assert plan.units == 2 * parts
    assert plan.dst.piece_bytes * parts == row_bytes
    assert plan.dst.piece_bytes <= 8192
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))


@pytest.mark.parametrize(("row_bytes", "pad"), [(16 * 521, 0), (8200, 24)])
def test_long_rows_without_equal_parts_worth_a_warp_stay_whole(kvio, row_bytes, pad):
    """521 packages are a prime number of them; 8200 bytes are no whole number of packages."""
    layout = "pitched" if pad else "layer_first"
    case = between(row_bytes, [0, 3], slots=4, dst=layout, src=layout, pad=pad)
    plan = plan_of(kvio, case)
    assert (plan.package_bytes, plan.units, plan.dst.piece_bytes) == (16, 2, row_bytes)
    assert np.array_equal(moved_bytes(kvio, case), wanted_bytes(case))


def test_rows_in_pieces_are_not_cut_further(kvio):
    views = layer_elements("page_head", layers=2, pages=2, page_size=4, heads=2, dim=16384)
    dst = [Buffer(view, 1 << 20, 1) for view in views]
    case = make_case(dst, [dataclasses.replace(b, address=1 << 30) for b in dst], [1, 5])
    plan = plan_of(kvio, case)
    assert (plan.dst.num_pieces, plan.dst.piece_bytes, plan.units) == (2, 16384, 4)


@pytest.mark.parametrize(
    ("row_bytes", "split"),
    [(576, (4, 4, 4)), (512, (64, 4, 4)), (1152, (64, 4, 4)), (20, (4, 1, 4))],
)
def test_the_wave_copy_takes_several_rows_at_once_only_at_multiples_of_16(kvio, row_bytes, split):
    """The kernel for them does not look at the alignment of each row."""
    plan = plan_of(kvio, between(row_bytes, SCATTERED), policy=policy_of(kvio, "rocm"))
    assert plan.split == split
    assert plan.split[0] == kvio.lanes_per_row(row_bytes, 64)
    assert (plan.split[1] > 1) == (plan.package_bytes == 16) == (row_bytes % 16 == 0)
    assert (plan.max_skew, plan.skew_by_dst) == (0, False), "its steps begin where the row does"


def test_splits_of_rows_that_engines_have(kvio):
    assert plan_of(kvio, between(1152, SCATTERED)).split == (8, 2, 9)
    assert plan_of(kvio, between(512, SCATTERED)).split == (8, 4, 4)


@given(gpu_transfers)
def test_plans_hold_the_split_of_their_own_unit(kvio, case):
    """The split of the previous plan is remembered: another shape must not get it."""
    request = case.request(kvio)
    group = request.groups[0]
    plan = kvio.make_register_plan(request, group)
    unit = kvio.UnitShape(
        packages=plan.packages,
        package_bytes=plan.package_bytes,
        alignment=kvio.address_alignment(plan.dst, plan.src, kvio.address_bits(group)),
    )
    assert plan.split == kvio.choose_lane_split(unit)
    assert plan.max_skew == kvio.max_skew(unit, plan.split[0])


@pytest.mark.parametrize(
    ("direction", "by_dst"),
    [(("gpu", "cpu"), False), (("cpu", "gpu"), True), (("gpu", "gpu"), False)],
)
def test_lines_are_those_of_the_host_side(kvio, direction, by_dst):
    assert plan_of(kvio, between(512, SCATTERED, direction=direction)).skew_by_dst == by_dst


def plan_of_many(
    kvio,
    row_bytes,
    num_indices,
    *,
    direction=("gpu", "cpu"),
    num_blocks=0,
    num_buffers=1,
    policy=None,
):
    """A plan for packed rows of pools of which only sizes and strides exist."""
    none = kvio.Tensor.of_buffer(index_array([]), device="gpu")
    dst, src = (
        [
            kvio.Tensor((b + 1) << place, [1 << 20, row_bytes], [row_bytes, 1], device=device)
            for b in range(num_buffers)
        ]
        for place, device in zip((40, 50), direction, strict=True)
    )
    request = kvio.make_transfer_request(dst, src, none, none, row_ndim=1, num_blocks=num_blocks)
    return kvio.make_register_plan(
        request,
        request.groups[0],
        range=num_indices,
        num_sms=132,
        policy=policy or kvio.RegisterPolicy(),
    )


@pytest.mark.parametrize(
    ("row_bytes", "loads"), [(512, 16), (1024, 16), (576, 18), (1152, 18), (144, 16), (16, 16)]
)
def test_stretches_of_a_full_item_take_the_fewest_rounds(kvio, row_bytes, loads):
    plan = plan_of_many(kvio, row_bytes, 4096)
    assert plan.units_per_item == 32
    assert plan.stretch_loads == loads


@given(
    st.sampled_from((16, 130, 512, 1152, 6000)),
    st.integers(0, 30000),
    st.sampled_from(DIRECTIONS),
    st.integers(0, 20),
    st.integers(1, 4),
)
def test_grids_stay_within_what_was_asked_and_what_there_is_to_do(
    kvio, row_bytes, num_indices, direction, num_blocks, num_buffers
):
    plan = plan_of_many(
        kvio,
        row_bytes,
        num_indices,
        direction=direction,
        num_blocks=num_blocks,
        num_buffers=num_buffers,
    )
    policy = kvio.RegisterPolicy()
    items = -(-plan.units // plan.units_per_item) * num_buffers
    most = num_blocks or blocks_of(policy, direction)
    assert 1 <= plan.num_blocks <= most
    assert plan.num_blocks == max(1, min(most, -(-items // policy.warps_per_block)))


@given(
    st.sampled_from((16, 130, 512, 1152, 6000, 9000)),
    st.integers(1, 30000),
    st.sampled_from(DIRECTIONS),
    st.integers(1, 4),
)
def test_items_are_short_only_while_warps_lack_work(
    kvio, row_bytes, num_indices, direction, num_buffers
):
    plan = plan_of_many(kvio, row_bytes, num_indices, direction=direction, num_buffers=num_buffers)
    policy = kvio.RegisterPolicy()
    assert plan.units_per_item in (1, 2, 4, 8, 16, 32)
    if plan.units_per_item == 32:
        return
    blocks = blocks_of(policy, direction)
    doubled = 2 * plan.units_per_item
    assert doubled * plan.dst.piece_bytes > policy.bytes_per_warp_step
    assert -(-plan.units // doubled) * num_buffers < 2 * blocks * policy.warps_per_block


@pytest.mark.parametrize(
    ("platform", "direction", "blocks"),
    [
        ("cuda", ("gpu", "cpu"), 4),
        ("cuda", ("cpu", "gpu"), 4),
        ("cuda", ("gpu", "gpu"), 132),
        ("rocm", ("gpu", "cpu"), 16),
        ("rocm", ("cpu", "gpu"), 4),
        ("rocm", ("gpu", "gpu"), 132),
    ],
)
def test_grids_of_a_long_call_are_the_platforms_unless_the_caller_says(
    kvio, platform, direction, blocks
):
    """Also one after the other: nothing of an earlier call is kept."""
    policy = policy_of(kvio, platform)
    for num_blocks, expected in ((0, blocks), (7, 7), (200, 200), (0, blocks)):
        plan = plan_of_many(
            kvio, 512, 1 << 18, direction=direction, num_blocks=num_blocks, policy=policy
        )
        assert plan.num_blocks == expected


def test_platforms_differ_in_one_table(kvio):
    table = {p: kvio.policy_of(getattr(kvio.Platform, p)) for p in PLATFORMS}
    assert [(p.wave_lanes, p.read_blocks) for p in table.values()] == [(32, 4), (64, 16)]
    assert [(p.write_blocks, p.planned_blocks) for p in table.values()] == [(4, 8), (4, 16)]
    assert [p.wave_copy for p in table.values()] == [False, True]
    for name, row in table.items():
        policy = policy_of(kvio, name)
        assert policy.wave_lanes * policy.warps_per_block == 512, "threads of a block"
        assert policy.max_units_per_item == row.wave_lanes, "a lane works out one address"
        assert policy.bytes_per_warp_step == row.wave_lanes * 256
    assert vars_of(policy_of(kvio, "cuda")) == vars_of(kvio.RegisterPolicy())


def vars_of(policy):
    return {n: getattr(policy, n) for n in dir(policy) if not n.startswith("_")}


@pytest.mark.parametrize(
    ("host", "innermost"),
    [
        ("layer_first", False),
        ("page_first", True),
        ("page_first_direct", True),
        ("page_head", True),
    ],
)
@pytest.mark.parametrize("direction", [("gpu", "cpu"), ("cpu", "gpu")])
def test_buffers_of_one_host_page_are_moved_together(kvio, host, innermost, direction):
    layouts = {"dst": host} if direction[0] == "cpu" else {"src": host}
    case = between(512, SCATTERED, direction=direction, **layouts)
    assert plan_of(kvio, case).buffers_innermost == innermost


def test_a_single_buffer_has_no_neighbour(kvio):
    case = between(512, SCATTERED, src="page_first", layers=1)
    assert plan_of(kvio, case).buffers_innermost is False


def test_buffers_of_one_host_page_are_moved_together_when_k_and_v_alternate(kvio):
    """The order [K0, V0, K1, V1]: K and V are pools of their own, layers share pages."""
    k, v = (rows(512, slots=64, layout="page_first", layers=2, at=at) for at in (1 << 30, 1 << 31))
    device = rows(512, slots=64, layers=4)
    case = make_case(device, [k[0], v[0], k[1], v[1]], SCATTERED)
    assert plan_of(kvio, case).buffers_innermost is True


@st.composite
def giants(draw):
    """Pools of any size, of which only sizes and strides exist."""
    heads = draw(st.sampled_from((1, 2, 8, 64)))
    dim = draw(st.sampled_from((1, 16, 32, 64, 128, 576, 1152, 16384)))
    page_size = draw(st.sampled_from((1, 4, 64, 1024)))
    in_pieces = draw(st.booleans())
    slots = 1 << 30
    if in_pieces:
        sizes, strides = (slots, heads, dim), (heads * 2 * dim, 2 * dim, 1)
    else:
        sizes, strides = (slots, heads, dim), (heads * dim, dim, 1)
    return sizes, strides, page_size, draw(st.sampled_from(("token", "page")))


def giant_request(kvio, giant, num_buffers=1):
    sizes, strides, page_size, unit = giant
    none = kvio.Tensor.of_buffer(index_array([]), device="gpu")
    return kvio.make_transfer_request(
        [kvio.Tensor(b << 50, sizes, strides, device="gpu") for b in range(num_buffers)],
        [kvio.Tensor((b << 50) + (1 << 49), sizes, strides) for b in range(num_buffers)],
        none,
        none,
        page_size=page_size,
        index_unit=unit,
    )


@given(giants())
def test_a_full_launch_numbers_its_units_in_30_bits(kvio, giant):
    request = giant_request(kvio, giant)
    group = request.groups[0]
    most = kvio.max_indices_per_launch(request, group)
    assert most >= 1
    plan = kvio.make_register_plan(request, group, range=most)
    assert 1 <= plan.units <= 1 << 30


@given(giants())
def test_a_full_launch_of_256_buffers_numbers_its_items_in_31_bits(kvio, giant):
    request = giant_request(kvio, giant, num_buffers=256)
    group = request.groups[0]
    most = kvio.max_indices_per_launch(request, group)
    plan = kvio.make_register_plan(request, group, range=most)
    assert -(-plan.units // plan.units_per_item) * 256 < 1 << 31
