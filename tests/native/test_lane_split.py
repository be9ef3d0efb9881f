"""How lanes share scattered rows: every choice has a kernel, wastes few lanes and cuts no line."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native import register_kernel

WIDTHS = (1, 2, 4, 8, 16)


@st.composite
def shapes(draw):
    package_bytes = draw(st.sampled_from(WIDTHS))
    alignment = draw(
        st.sampled_from([a for a in (1, 2, 4, 8, 16, 32, 64, 128) if a >= package_bytes])
    )
    packages = draw(st.integers(1, 80) | st.integers(1, 9000))
    return SimpleNamespace(packages=packages, package_bytes=package_bytes, alignment=alignment)


def in_cpp(kvio, shape):
    return kvio.UnitShape(**vars(shape))


waves = st.sampled_from((32, 64))


@given(shapes(), waves)
def test_every_split_has_a_kernel_and_fills_a_warp(kvio, shape, wave):
    lanes, units, loads = kvio.choose_lane_split(in_cpp(kvio, shape), wave)
    assert lanes in (1, 2, 4, 8, 16, 32, wave)
    assert (units, loads) in register_kernel.KERNELS


@given(shapes(), waves)
def test_a_group_steps_by_whole_lines_unless_one_step_holds_the_unit(kvio, shape, wave):
    lanes, _, _ = kvio.choose_lane_split(in_cpp(kvio, shape), wave)
    step_bytes = lanes * shape.package_bytes
    unit_bytes = shape.packages * shape.package_bytes
    assert lanes == wave or step_bytes % kvio.LINE_BYTES == 0 or step_bytes >= unit_bytes


def busy(kvio, shape, lanes, loads):
    """Share of a unit's load slots that carry a package."""
    reach = shape.packages + kvio.max_skew(in_cpp(kvio, shape), lanes)
    rounds = -(-reach // (lanes * loads))
    return shape.packages / (rounds * loads * lanes)


@given(shapes(), waves)
def test_no_other_split_with_a_kernel_keeps_more_lanes_busy(kvio, shape, wave):
    lanes, _, loads = kvio.choose_lane_split(in_cpp(kvio, shape), wave)
    unit_bytes = shape.packages * shape.package_bytes
    chosen = busy(kvio, shape, lanes, loads)
    for other in (1, 2, 4, 8, 16, 32, wave):
        step_bytes = other * shape.package_bytes
        if other < wave and step_bytes < min(kvio.LINE_BYTES, unit_bytes):
            continue
        for _, other_loads in register_kernel.KERNELS:
            assert busy(kvio, shape, other, other_loads) <= chosen * 1.002


@pytest.mark.parametrize(
    ("row_bytes", "split"),
    [
        (128, (8, 8, 2)),
        (256, (8, 8, 2)),
        (512, (8, 4, 4)),
        (1024, (8, 2, 8)),
        (1152, (8, 2, 9)),
        (2048, (8, 1, 16)),
        (4096, (8, 1, 16)),
    ],
)
def test_splits_of_line_aligned_rows_that_engines_have(kvio, row_bytes, split):
    unit = kvio.UnitShape(packages=row_bytes // 16, package_bytes=16, alignment=128)
    assert kvio.choose_lane_split(unit) == split


@given(shapes(), st.sampled_from((1, 2, 4, 8, 16, 32)))
def test_skew_reaches_from_any_aligned_start_back_to_where_a_step_may_begin(kvio, shape, lanes):
    step = kvio.step_alignment(lanes, shape.package_bytes)
    assert step == min(kvio.LINE_BYTES, lanes * shape.package_bytes)
    starts = np.arange(0, kvio.LINE_BYTES, shape.alignment)
    skews = starts % step // shape.package_bytes
    assert skews.max() == kvio.max_skew(in_cpp(kvio, shape), lanes)


@given(shapes(), waves, st.integers(0, 127), st.booleans())
def test_one_unit_is_read_once_and_each_of_its_lines_in_one_step(kvio, shape, wave, place, by_dst):
    """Lines are those of the side that the plan names; the other side may lie anywhere."""
    unit = in_cpp(kvio, shape)
    split = kvio.choose_lane_split(unit, wave)
    plan = SimpleNamespace(
        package_bytes=shape.package_bytes,
        packages=shape.packages,
        split=split,
        skew_alignment=kvio.step_alignment(split[0], shape.package_bytes),
        max_skew=kvio.max_skew(unit, split[0]),
        skew_by_dst=by_dst,
    )
    start = (1 << 20) + place * shape.alignment % kvio.LINE_BYTES
    elsewhere = (1 << 30) + shape.package_bytes
    ends = (start, elsewhere) if by_dst else (elsewhere, start)
    dst, src = (np.array([address]) for address in ends)
    steps = list(register_kernel.copy_units(plan, dst, src, np.array([True]), wave))

    moved = register_kernel.bytes_moved(steps)
    expected = np.arange(shape.packages * shape.package_bytes)
    assert np.array_equal(moved, np.stack((dst[0] + expected, src[0] + expected), axis=-1))

    if split[0] * shape.package_bytes >= kvio.LINE_BYTES:
        lines = [set((step[0 if by_dst else 1] // kvio.LINE_BYTES).tolist()) for step in steps]
        assert sum(map(len, lines)) == len(set().union(*lines))
