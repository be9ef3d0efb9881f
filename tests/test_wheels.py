"""build_wheels.sh and its tools: what they refuse, what they bind, what they write down."""

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import sgl_kvio

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"

pytestmark = pytest.mark.skipif(
    not (ROOT / "build_wheels.sh").exists(), reason="not run from a source tree"
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command, **env):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | env,
    )


def version_with(**env):
    return run(sys.executable, "setup.py", "-q", "--version", **env)


@pytest.mark.parametrize(("backend", "local"), [("auto", ""), ("cpu", "+cpu"), ("rocm", "+rocm")])
def test_a_wheel_is_named_after_its_backend(backend, local):
    done = version_with(KVIO_BACKEND=backend)
    assert done.stdout.strip().splitlines()[-1] == sgl_kvio.__version__ + local


def test_a_cuda_wheel_is_named_after_its_toolkit(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.7, V13.7.1'\n")
    nvcc.chmod(stat.S_IRWXU)
    done = version_with(KVIO_BACKEND="cuda", CUDACXX=str(nvcc))
    assert done.stdout.strip().splitlines()[-1] == f"{sgl_kvio.__version__}+cu137"


def test_a_cuda_wheel_without_nvcc_is_refused_by_name(tmp_path):
    done = version_with(KVIO_BACKEND="cuda", CUDACXX="", PATH=str(tmp_path))
    assert done.returncode != 0
    assert "KVIO_BACKEND is 'cuda' but there is no nvcc" in done.stderr


def test_an_unknown_backend_is_refused_before_anything_is_built():
    done = run("bash", "build_wheels.sh", "gpu")
    assert done.returncode == 2
    assert "unknown backend gpu; it needs cpu, cuda or rocm" in done.stderr


# --- what a wheel must not be


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sgl_kvio-1.0-cp310-abi3-linux_x86_64.whl", "no local version"),
        ("sgl_kvio-1.0+cpu-cp311-cp311-linux_x86_64.whl", "needs cp310-abi3"),
        ("other-1.0+cpu-cp310-abi3-linux_x86_64.whl", "not the name of a wheel"),
    ],
)
def test_a_wrong_name_is_refused(name, reason):
    wheels = load("wheels")
    with pytest.raises(wheels.CheckError, match=reason):
        wheels.check_name(name)


def test_the_parts_of_a_name_are_told_apart():
    parts = load("wheels").check_name("sgl_kvio-1.0+cu130-cp310-abi3-manylinux_2_28_x86_64.whl")
    assert parts == {"version": "1.0+cu130", "local": "cu130", "platform": "manylinux_2_28_x86_64"}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("sgl_kvio.libs/libtorch_cpu-1a2b.so", "bundles sgl_kvio.libs/libtorch_cpu-1a2b.so"),
        ("sgl_kvio/libcudart.so.13", "bundles sgl_kvio/libcudart.so.13"),
        ("sgl_kvio/libamdhip64.so", "bundles"),
        ("sgl_kvio/helper.so", "alone"),
        ("tests/conftest.py", "installs tests/conftest.py beside the package"),
    ],
)
def test_a_wheel_holds_the_package_and_one_library(extra, reason):
    wheels = load("wheels")
    files = ["sgl_kvio/__init__.py", wheels.LIBRARY, "sgl_kvio-1.0+cpu.dist-info/RECORD"]
    wheels.check_content(files)
    with pytest.raises(wheels.CheckError, match=reason):
        wheels.check_content([*files, extra])


@pytest.mark.parametrize(
    ("python", "requirement", "reason"),
    [
        (">=3.11", "torch>=2.10", "Requires-Python is >=3.11"),
        (">=3.10", "torch==2.13.0", "needs torch>=2.10 alone"),
        (">=3.10", "torch>=2.10\nRequires-Dist: numpy", "needs torch>=2.10 alone"),
    ],
)
def test_a_wheel_asks_for_python_and_torch_as_promised(python, requirement, reason):
    wheels = load("wheels")
    text = "Requires-Python: {}\nRequires-Dist: {}\nRequires-Dist: x; extra == 'test'\n"
    wheels.check_metadata(text.format(">=3.10", "torch>=2.10"))
    with pytest.raises(wheels.CheckError, match=reason):
        wheels.check_metadata(text.format(python, requirement))


# --- older names of glibc


def test_linked_last_the_stubs_leave_no_name_of_glibc_2_34(tmp_path):
    for tool in ("cc", "objdump"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}")
    done = run(sys.executable, TOOLS / "old_glibc.py", tmp_path / "stubs")
    assert done.returncode == 0, done.stderr
    stubs = done.stdout.split()[0].split(";") if done.stdout.strip() else []
    if not stubs:
        pytest.skip("glibc before 2.34")
    source = tmp_path / "threads.c"
    source.write_text(
        "#include <dlfcn.h>\n#include <pthread.h>\n#include <semaphore.h>\n"
        "static pthread_once_t once = PTHREAD_ONCE_INIT;\n"
        "static sem_t seen;\n"
        "static void see(void) { sem_post(&seen); }\n"
        "static void *work(void *given) { pthread_once(&once, see); return given; }\n"
        "int threads(void) {\n"
        "  pthread_t thread;\n"
        "  sem_init(&seen, 0, 0);\n"
        "  if (pthread_create(&thread, 0, work, &thread) || pthread_join(thread, 0)) return 1;\n"
        '  return sem_trywait(&seen) || !dlsym(RTLD_DEFAULT, "malloc");\n'
        "}\n"
    )

    def versions(*link_last):
        library = tmp_path / "libthreads.so"
        done = run("cc", "-shared", "-fPIC", source, "-o", library, "-Wl,--as-needed", *link_last)
        assert done.returncode == 0, done.stderr
        return run("objdump", "-T", library).stdout, library

    assert "GLIBC_2.34" in versions()[0]
    symbols, library = versions(*stubs)
    assert "GLIBC_2.34" not in symbols
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).threads())"
    assert run(sys.executable, "-c", code, library).returncode == 0


# --- cells and the table


@pytest.fixture
def some_tests(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    body = "import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
    (folder / "test_some.py").write_text(body)
    return folder


def cell(tests, within, out, *pytest_arguments):
    home = str(Path(sgl_kvio.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, TOOLS / "wheel_cell.py", "--tests", tests, "--within", within]
    return run(*command, "--out", out, "--", *pytest_arguments, PYTHONPATH=paths)


def test_a_cell_counts_what_passed_and_says_where_it_was_imported(some_tests, tmp_path):
    package = Path(sgl_kvio.__file__)
    done = cell(some_tests, package.parents[1], tmp_path / "cell.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sgl_kvio imported from {package}" in done.stdout
    seen = json.loads((tmp_path / "cell.json").read_text())
    assert (seen["passed"], seen["skipped"], seen["failed"], seen["status"]) == (1, 1, 0, 0)
    assert seen["backend"] == sgl_kvio.capabilities()["backend"]


def test_a_cell_fails_when_another_package_was_imported(some_tests, tmp_path):
    done = cell(some_tests, tmp_path, tmp_path / "cell.json")
    assert done.returncode == 1
    assert f"not from {tmp_path}" in done.stdout
    assert not (tmp_path / "cell.json").exists()


def test_a_cell_fails_when_no_test_passed(some_tests, tmp_path):
    home = Path(sgl_kvio.__file__).parents[1]
    done = cell(some_tests, home, tmp_path / "cell.json", "-k", "test_b")
    assert done.returncode == 1
    assert "no test passed" in done.stdout


def test_the_table_tells_a_cell_of_another_build_apart(tmp_path):
    wheels = load("wheels")
    facts = {"local": "cu130", "library_sha256": "a", "backend": "cuda"}
    seen = {
        "library_sha256": "a",
        "backend": "cuda",
        "python": "3.12.3",
        "torch": "2.11.0",
        "gpu": "some GPU",
        "glibc": "2.35",
        "passed": 5,
        "skipped": 1,
        "failed": 0,
        "folder": "gpu",
        "cases": None,
        "selection": "-n 2 -k not compile",
        "seconds": 3,
    }
    same = wheels.cell_line(seen, [facts])
    assert same[0] == "cu130"
    assert "5 passed, 1 skipped, 0 failed" in same
    assert "`gpu`, every case, `-k 'not compile'`" in same
    other = wheels.cell_line(seen | {"library_sha256": "b"}, [facts])
    assert other[0] == "cuda, an earlier build"


def test_a_run_whose_tests_failed_makes_no_table(tmp_path):
    wheels = load("wheels")
    for folder in ("facts", "cells"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "facts" / "cpu.json").write_text('{"wheel": "a"}')
    (tmp_path / "cells" / "one.json").write_text('{"status": 1}')
    with pytest.raises(wheels.CheckError, match="tests failed"):
        wheels.matrix(tmp_path, [])


def test_kernels_are_named_without_their_template_arguments():
    wheels = load("wheels")
    name = "void kvio::gpu::(anonymous namespace)::copy<16, 1>(kvio::Params<2> const*)"
    assert wheels.family(name) == "copy"
    assert wheels.family("kvio::gpu::reset(kvio::(anonymous namespace)::Params)") == "reset"
