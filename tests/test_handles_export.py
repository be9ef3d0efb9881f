"""torch.export and AOTInductor packages that call write_back and restore, in this process and in
another one, where the pool is another object with the same number."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from test_handles import assert_content, content, make_pool
from test_handles_compile import FUNCTIONS, load_then_save, make_arguments, save_then_load

from reference import assert_same_bytes, refused, synchronize

NUMBER = 77


class OnPool(torch.nn.Module):
    """A function of test_handles_compile on the pool `NUMBER`; its token is a buffer."""

    def __init__(self, functions, device="cpu"):
        super().__init__()
        self.functions = functions
        self.handle = NUMBER
        self.register_buffer("token", torch.zeros(1, dtype=torch.uint8, device=device))

    def forward(self, k, v, at, frm):
        return [function(self, k, v, at, frm) for function in self.functions]


def exported(functions, arguments, device="cpu", strict=False):
    count = torch.export.Dim("count", min=1, max=12)
    shapes = {"k": None, "v": None, "at": {0: count}, "frm": {0: count}}
    module = OnPool(functions, device)
    return torch.export.export(module, tuple(arguments), dynamic_shapes=shapes, strict=strict)


def check_program(program, functions, device="cpu"):
    """Two calls each with three numbers of indices leave the bytes of eager calls."""
    for count in (3, 1, 9):
        at, frm = torch.randperm(12)[:count].tolist(), torch.randperm(8)[:count].tolist()
        if count > 8:
            frm = [*frm, 8]
        with make_pool(device=device, handle=NUMBER) as pool, make_pool(device=device) as twin:
            arguments = make_arguments(pool, device, at, frm)
            twins = [t.clone() for t in arguments]
            for _ in range(2):
                got = program(*arguments)
                want = [function(twin, *twins) for function in functions]
                synchronize()
                for a, b in zip(got, want, strict=True):
                    assert_same_bytes(a, b, "result")
                assert_content(pool, content(twin))
                for position, (a, b) in enumerate(zip(arguments, twins, strict=True)):
                    assert_same_bytes(a, b, f"argument {position}")


@pytest.fixture(scope="module")
def arguments():
    with make_pool() as pool:
        return make_arguments(pool)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_leaves_the_same_bytes(arguments, strict):
    check_program(exported(FUNCTIONS, arguments, strict=strict).module(), FUNCTIONS)


def test_a_decomposed_program_leaves_the_same_bytes(arguments):
    """run_decompositions functionalizes: every call is there, wrapped, in a chain of tokens."""
    program = exported(FUNCTIONS, arguments).run_decompositions()
    check_program(program.module(), FUNCTIONS)


def test_a_program_that_was_saved_and_loaded_leaves_the_same_bytes(arguments, tmp_path):
    torch.export.save(exported(FUNCTIONS, arguments), tmp_path / "program.pt2")
    check_program(torch.export.load(tmp_path / "program.pt2").module(), FUNCTIONS)


def test_a_program_is_exported_where_its_pool_is_not(arguments):
    program = exported([save_then_load], arguments).module()
    with refused("handle", got=f"is {NUMBER}", op="write_back"):
        program(*arguments)
    check_program(program, [save_then_load])


def test_a_token_that_belongs_to_no_module_is_refused_by_torch_in_words(arguments):
    """The pool's own token would be a constant of the program, which nothing may write."""
    pool = make_pool()

    class Holder(torch.nn.Module):
        def forward(self, k, v, at, frm):
            return save_then_load(pool, k, v, at, frm)

    program = torch.export.export(Holder(), tuple(arguments))
    with pytest.raises(RuntimeError, match="register it as buffer"):
        program.run_decompositions()
    pool.close()


# AOTInductor.

PACKAGED = [save_then_load, load_then_save, *FUNCTIONS]


@pytest.fixture(scope="module")
def package(arguments, tmp_path_factory):
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("AOTInductor needs a C++ compiler")
    path = tmp_path_factory.mktemp("package") / "calls.pt2"
    program = exported(PACKAGED, arguments)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def test_a_package_leaves_the_same_bytes(package):
    check_program(torch._inductor.aoti_load_package(package), PACKAGED)


PROGRAM = """
    import sys

    import torch
    import sgl_kvio

    sys.path.insert(0, {tests!r})
    import test_handles_export as tests

    program = torch._inductor.aoti_load_package({package!r})
    with tests.make_pool() as pool:
        arguments = tests.make_arguments(pool)
        try:
            program(*arguments)
        except RuntimeError as error:
            assert "handle is 77, which names no pool of this process" in str(error), error
        else:
            raise SystemExit("a package ran without its pool")
    tests.check_program(program, tests.PACKAGED)
    print("same bytes")
"""


def test_a_package_finds_the_pool_of_its_number_in_another_process(package):
    code = PROGRAM.format(package=str(package), tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("same bytes\n")
