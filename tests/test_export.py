"""torch.export and AOTInductor packages of every op that moves rows: the bytes of eager calls.

The functions are those of the compile tests. write_back and restore: test_handles_export.py.
"""

import inspect
import shutil
from functools import cache

import pytest
import test_compile
import test_staged_compile
import test_swap_in_compile
import torch
from test_compile import check_twice


class Exported(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)


# Of each op all functions in turn in one graph: what one leaves is what the next one reads.
def every_transfer(dst, src, at, frm):
    return test_compile.everything(dst, src, at, frm)


def every_staged(host, card, at, frm):
    functions = map(test_staged_compile.result_and_pools, test_staged_compile.FUNCTIONS)
    return torch.stack([function(host, card, at, frm) for function in functions])


def every_swap_in(*arguments):
    results = [function(*arguments) for function in test_swap_in_compile.FUNCTIONS]
    return torch.cat([result.flatten() for result in results])


PROGRAMS = {
    "transfer and memcpy_batch": (every_transfer, test_compile.make_arguments),
    "transfer_staged": (every_staged, lambda: test_staged_compile.make_arguments()[:4]),
    "swap_in and copy_planned": (every_swap_in, test_swap_in_compile.make_arguments),
}
OPS = {"transfer", "memcpy_batch", "transfer_staged", "swap_in", "copy_planned"}


@cache
def exported(name):
    function, make_arguments = PROGRAMS[name]
    return torch.export.export(Exported(function), tuple(make_arguments()))


def test_the_programs_hold_every_op():
    named = {
        str(node.target).split(".")[1]
        for name in PROGRAMS
        for node in exported(name).graph.nodes
        if str(node.target).startswith("kvio.")
    }
    assert named == OPS


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_leaves_the_same_bytes(name):
    function, make_arguments = PROGRAMS[name]
    check_twice(exported(name).module(), function, make_arguments())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_decomposed_program_leaves_the_same_bytes(name):
    """run_decompositions makes the graph functional: no copy may go with the writes."""
    function, make_arguments = PROGRAMS[name]
    check_twice(exported(name).run_decompositions().module(), function, make_arguments())


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="AOTInductor needs a C++ compiler"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_package_leaves_the_same_bytes(name, tmp_path):
    function, make_arguments = PROGRAMS[name]
    path = torch._inductor.aoti_compile_and_package(
        exported(name), package_path=str(tmp_path / "program.pt2")
    )
    check_twice(torch._inductor.aoti_load_package(path), function, make_arguments())


def test_a_number_of_indices_may_be_left_open():
    count = torch.export.Dim("count", min=1, max=16)
    names = inspect.signature(test_compile.write_move_read).parameters
    shapes = {name: {0: count} if name in ("at", "frm") else None for name in names}
    program = torch.export.export(
        Exported(test_compile.write_move_read),
        tuple(test_compile.make_arguments()),
        dynamic_shapes=(tuple(shapes.values()),),
    ).module()
    for entries in (1, 3, 12, 16):
        dst, src, _, _ = test_compile.make_arguments()
        at, frm = torch.randperm(16)[:entries], torch.randperm(16)[:entries]
        check_twice(program, test_compile.write_move_read, [dst, src, at, frm])
