"""What faults are called: one table in C++ for the next call, one in Python for check()."""

import pytest

from sgl_kvio import ops

NUMBERS = range(1, len(ops._FAULTS) + 1)


def test_both_tables_say_the_same(kvio):
    assert tuple(kvio.fault_subject(number) for number in NUMBERS) == ops._FAULTS


@pytest.mark.parametrize("number", NUMBERS)
def test_both_name_the_same_place(kvio, number):
    position = kvio.matrix_position(7, 2**31 + 5)
    place = kvio.fault_place(number, position)
    text = ops._fault_text(0, number, position, 9, 8)
    assert place in text
    assert f"it needs {kvio.fault_need(number, 8)}. " in text
    assert place.endswith("[7, 2147483653]" if ops._FAULTS[number - 1][2] else f"[{position}]")


def test_a_number_that_nobody_has_is_no_crash(kvio):
    assert kvio.fault_subject(0)[0] == "transfer"
    assert kvio.fault_subject(99)[0] == "wait_layer"
