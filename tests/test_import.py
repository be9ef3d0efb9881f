"""Importing touches no GPU and needs no driver; the binary asks little of the machine."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

import sgl_kvio

LIBRARY = pathlib.Path(sgl_kvio.__file__).with_name("_C.abi3.so")


def run_python(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={k: v for k, v in (os.environ | env).items() if v is not None},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MOVE_A_ROW = """
dst, src = torch.zeros(4, 8), torch.arange(32.0).view(4, 8)
sgl_kvio.transfer(dst, src, torch.tensor([3]), torch.tensor([1]), row_ndim=1)
assert torch.equal(dst[3], src[1]) and not dst[:3].any()
"""


def test_importing_does_not_initialize_cuda():
    quiet = "assert not torch.cuda.is_initialized()\n"
    run_python("import torch, sgl_kvio\n" + quiet + MOVE_A_ROW + quiet)


def test_importing_and_moving_cpu_rows_works_without_a_visible_gpu():
    run_python("import torch, sgl_kvio\n" + MOVE_A_ROW, CUDA_VISIBLE_DEVICES="")


def test_a_process_may_fork_after_the_import():
    """The child uses a GPU when there is one: an import that touched the driver would forbid it."""
    out = run_python(
        """
        import os, sys, torch, sgl_kvio
        dst, src, at = torch.zeros(4, 8), torch.ones(4, 8), torch.tensor([1])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                sgl_kvio.transfer(dst, src, at, at, row_ndim=1)
                assert dst[1].all() and not dst[0].any()
                if torch.cuda.is_available():
                    card = torch.zeros(4, 8, device="cuda")
                    sgl_kvio.transfer(card, src.pin_memory(), at, at, row_ndim=1)
                    assert card[1].all().item()
                    print("moved rows to a GPU", flush=True)
                code = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        raise SystemExit(os.waitstatus_to_exitcode(status))
        """
    )
    assert out in ("", "moved rows to a GPU\n")


def test_every_public_name_exists():
    for name in sgl_kvio.__all__:
        assert hasattr(sgl_kvio, name), name


def test_the_version_has_one_home():
    version = sgl_kvio.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)
    assert sgl_kvio.capabilities()["version"] == version


def test_the_package_is_marked_as_typed():
    assert LIBRARY.with_name("py.typed").exists()


@pytest.fixture(scope="module")
def dynamic_symbols():
    """(kind, name) of every dynamic symbol of the library."""
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    done = subprocess.run(["nm", "-D", str(LIBRARY)], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(fields[-2], fields[-1].split("@")[0]) for fields in lines]


def test_no_undefined_symbol_of_a_gpu_driver_or_runtime(dynamic_symbols):
    bad = [
        name
        for kind, name in dynamic_symbols
        if kind == "U" and re.match(r"(cu[A-Z]|cuda[A-Z]|__cuda|hip[A-Z]|nvrtc|nvml)", name)
    ]
    assert bad == []


def test_no_cpp_symbol_of_torch(dynamic_symbols):
    """Only the C functions of the stable ABI: a mangled torch name ties the file to one release."""
    bad = [
        name
        for kind, name in dynamic_symbols
        if kind in "Uvw" and re.match(r"_Z(T[IVSK]|G[VR])?N?K?S?(2at|3c10|5torch)\d", name)
    ]
    assert bad == []


def test_the_function_that_a_cpu_torch_lacks_is_weak(dynamic_symbols):
    kinds = {kind for kind, name in dynamic_symbols if name == "aoti_torch_get_current_cuda_stream"}
    assert kinds <= {"w"}


def test_only_the_limited_python_api_is_used(dynamic_symbols):
    """Names outside the limited API of 3.10 that modules commonly pull in."""
    python = {name for kind, name in dynamic_symbols if kind == "U" and name.startswith("_Py")}
    assert python <= {"_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_Dealloc"}


def test_torch_stays_a_dependency_of_the_library():
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    done = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.+?)\]", done.stdout)
    assert "libtorch.so" in needed
    assert not [name for name in needed if re.match(r"lib(cuda|cudart|nvrtc|python)", name)]
