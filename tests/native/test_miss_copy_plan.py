"""How the missing rows of a swap-in are cut, on each platform."""

import pytest
from native.pools import index_array

ROWS = (*range(1, 140), 512, 576, 656, 1024, 1028, 1152, 4700, 65536)


def group_of(kvio, row_bytes, alignment):
    """Packed rows of pools of which only sizes and strides exist."""
    none = kvio.Tensor.of_buffer(index_array([]), device="gpu")
    dst, src = (
        kvio.Tensor((1 << place) + alignment, [64, row_bytes], [row_bytes, 1], device=device)
        for place, device in ((40, "gpu"), (50, "cpu"))
    )
    return kvio.make_transfer_request([dst], [src], none, none, row_ndim=1).groups[0]


@pytest.fixture(params=["fused", "planned"])
def make_plan(kvio, request):
    return getattr(kvio, f"make_{request.param}_copy_plan")


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_packages_and_remainder_are_the_row(kvio, make_plan, platform):
    policy = kvio.policy_of(getattr(kvio.Platform, platform))
    for row_bytes in ROWS:
        for alignment in (1, 2, 4, 8, 16):
            plan = make_plan(group_of(kvio, row_bytes, alignment), policy)
            assert plan.packages * plan.package_bytes + plan.remainder == row_bytes
            assert 0 <= plan.remainder < plan.package_bytes
            assert plan.split[0] in (1, 2, 4, 8, 16, 32, policy.wave_lanes)


def test_on_rocm_lanes_share_a_row_by_the_copy_round_rule_whatever_its_alignment(kvio, make_plan):
    """The kernels there have one shape, for 16-byte packages; the wave copy sees to alignment."""
    policy = kvio.policy_of(kvio.Platform.rocm)
    for row_bytes in ROWS:
        for alignment in (1, 16):
            plan = make_plan(group_of(kvio, row_bytes, alignment), policy)
            assert plan.package_bytes == 16
            assert plan.split == (kvio.lanes_per_row(row_bytes, 64), 1, 1)
    assert make_plan(group_of(kvio, 576, 16), policy).split[0] == 4


def test_on_cuda_packages_are_as_wide_as_addresses_allow(kvio, make_plan):
    policy = kvio.policy_of(kvio.Platform.cuda)
    for alignment in (1, 2, 4, 8, 16):
        plan = make_plan(group_of(kvio, 512, alignment), policy)
        assert plan.package_bytes == alignment


def test_those_who_resolve_reach_every_package_and_the_remainder_in_their_steps(kvio):
    """The walk of copy_steps: lane c of a step has package step * lanes + c - skew, and the lane
    behind the last package the remainder."""
    policy = kvio.policy_of(kvio.Platform.cuda)
    for row_bytes in ROWS:
        for alignment in (1, 2, 4, 8, 16, 32, 64, 128):
            plan = kvio.make_fused_copy_plan(group_of(kvio, row_bytes, alignment), policy)
            lanes, width = plan.split[0], plan.package_bytes
            behind = 1 if plan.remainder else 0
            # Rows follow each other: they begin where both their size and the first one allow.
            apart = min(alignment, row_bytes & -row_bytes)
            for start in range(0, plan.skew_alignment, apart):
                skew = start // width
                at = range(-skew, plan.steps * lanes - skew)
                assert set(range(plan.packages + behind)) <= set(at), (row_bytes, alignment)


def test_few_requests_have_a_cluster_each(kvio):
    ctas = {batch: kvio.cluster_ctas_for(batch, 132, True) for batch in range(1, 300)}
    assert ctas[1] == 4
    assert ctas[100] == 1
    for batch, count in ctas.items():
        assert count in (1, 2, 4)
        assert count == 1 or batch * count <= 16
    assert kvio.cluster_ctas_for(1, 132, False) == 1
    assert kvio.cluster_ctas_for(1, 2, True) == 2
