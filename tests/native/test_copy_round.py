"""The copy-round rule against its definition, and how many lanes share a row by it."""

import itertools

import pytest

import sgl_kvio

LANES = range(1, 65)
WAVES = (32, 64)


def rounds(row_bytes, lanes):
    """Every (round, package) that the rule's text allows."""
    return [
        (lanes * package, package)
        for package in (4, 8, 16)
        if lanes * package in (16, 32, 64, 128) and row_bytes % (lanes * package) == 0
    ]


def test_the_widest_round_that_divides_the_row_and_splits_over_the_lanes(kvio):
    for row_bytes, lanes in itertools.product(range(1, 4701), LANES):
        want = max(rounds(row_bytes, lanes), default=(0, 0))
        assert kvio.copy_round(row_bytes, lanes) == want, (row_bytes, lanes)


@pytest.mark.parametrize(
    ("lanes", "round_bytes", "package_bytes"),
    [(1, 16, 16), (2, 32, 16), (4, 64, 16), (8, 64, 8), (16, 64, 4), (32, 0, 0), (64, 0, 0)],
)
def test_576_bytes_are_no_whole_lines_and_go_in_half_ones(kvio, lanes, round_bytes, package_bytes):
    assert kvio.copy_round(576, lanes) == (round_bytes, package_bytes)
    assert kvio.copy_round(1152, 8) == (128, 16)


@pytest.mark.parametrize("row_bytes", [-128, 0])
@pytest.mark.parametrize("lanes", [-8, 0, 8, 1 << 62])
def test_what_is_no_row_and_no_group_has_no_round(kvio, row_bytes, lanes):
    assert kvio.copy_round(row_bytes, lanes) == (0, 0)
    assert kvio.copy_round(128, min(lanes, 0)) == (0, 0)


def test_the_library_answers_by_the_same_rule(kvio):
    for row_bytes, lanes in itertools.product((1, 20, 64, 576, 656, 1028, 1152, 4700), LANES):
        of_library = sgl_kvio.copy_round(row_bytes, lanes)
        assert (of_library or (0, 0)) == kvio.copy_round(row_bytes, lanes)


@pytest.mark.parametrize(
    ("row_bytes", "lanes", "named"), [(0, 4, "row_bytes"), (576, 0, "lanes"), (576, -1, "lanes")]
)
def test_a_question_without_sense_is_refused(row_bytes, lanes, named):
    with pytest.raises(RuntimeError, match=rf"kvio::copy_round: {named} is .*needs at least 1"):
        sgl_kvio.copy_round(row_bytes, lanes)


@pytest.mark.parametrize("wave", WAVES)
def test_the_lanes_of_a_row_are_a_part_of_the_wave(kvio, wave):
    for row_bytes in range(1, 4701):
        assert kvio.lanes_per_row(row_bytes, wave) in {1, 2, 4, 8, 16, 32, wave}


@pytest.mark.parametrize("wave", WAVES)
def test_a_row_that_fills_the_wave_has_all_of_it(kvio, wave):
    assert kvio.lanes_per_row(8 * wave, wave) == wave
    for row_bytes in range(16 * wave, 4701):
        assert kvio.lanes_per_row(row_bytes, wave) == wave


@pytest.mark.parametrize("wave", WAVES)
def test_no_lane_of_a_smaller_row_idles_unless_it_has_no_round(kvio, wave):
    for row_bytes in set(range(1, 16 * wave)) - {8 * wave}:
        lanes = kvio.lanes_per_row(row_bytes, wave)
        if row_bytes % 128 == 0:
            assert lanes == 8
        elif row_bytes % 64 == 0:
            assert lanes == 4
        else:  # a word a lane, as far as the wave goes
            assert lanes == wave or lanes // 2 * 8 < row_bytes <= lanes * 8


@pytest.mark.parametrize(
    ("row_bytes", "of_32", "of_64"),
    [(20, 4, 4), (256, 32, 8), (512, 32, 64), (576, 32, 4), (656, 32, 64), (1152, 32, 64)],
)
def test_lanes_of_rows_that_engines_have(kvio, row_bytes, of_32, of_64):
    assert kvio.lanes_per_row(row_bytes, 32) == of_32
    assert kvio.lanes_per_row(row_bytes, 64) == of_64
