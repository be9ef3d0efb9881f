"""The ROCm build, cross-compiled: what is in the file, and that it loads without ROCm."""

import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TARGETS = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}  # and their numbers in ELF flags
AMDGPU = 224  # ELF machine
KERNELS = (
    "register_copy",
    "load_layers_kernel",
    "wait_layer_kernel",
    "swap_in_kernel",
    "copy_planned_kernel",
    "count_buckets",
)

pytestmark = pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").exists(), reason="not run from a source tree"
)


def tool(name):
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def is_new_enough(compiler):
    """As cmake/rocm.cmake has it."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    hip = re.search(r"HIP version: (\d+)", said)
    clang = re.search(r"clang version (\d+)", said)
    return int(hip[1]) >= 6 if hip else clang is not None and int(clang[1]) >= 19


@functools.cache
def require_hip():
    names = ("hipcc", "/opt/rocm/bin/hipcc", *(f"clang++-{n}" for n in (22, 21, 20, 19)), "clang++")
    if not any(is_new_enough(found) for name in names if (found := shutil.which(name))):
        pytest.skip("no HIP compiler: hipcc of ROCm 6 or clang 19 (Debian: clang-19 lld-19)")
    if not any(Path(f, "hip").is_dir() for f in ("/opt/rocm/include", "/usr/include")):
        pytest.skip("no HIP headers (Debian: libamdhip64-dev)")


def configure(folder, **options):
    options = {
        "KVIO_BACKEND": "rocm",
        "KVIO_VERSION": "0",
        "KVIO_TORCH_ROOT": Path(torch.__file__).parent,
        "KVIO_PYTHON_INCLUDE": sysconfig.get_path("include"),
        "KVIO_OUTPUT_DIR": folder / "sgl_kvio",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        **options,
    }
    command = [tool("cmake"), "-S", ROOT, "-B", folder / "build", "-G", "Ninja"]
    command += [f"-D{name}={value}" for name, value in options.items()]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with this package and the ROCm build of its extension."""
    require_hip()
    folder = tmp_path_factory.mktemp("rocm")
    done = configure(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    command = [tool("cmake"), "--build", folder / "build", "-j", str(min(4, os.cpu_count() or 1))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stdout
    for file in (ROOT / "sgl_kvio").glob("*.py"):
        shutil.copy(file, folder / "sgl_kvio")
    return folder


@pytest.fixture(scope="module")
def library(package):
    return package / "sgl_kvio" / "_C.abi3.so"


def bundles(library):
    """A list of {gfx target: code object}, one for each file with kernels."""
    data = library.read_bytes()
    found = []
    for match in re.finditer(rb"__CLANG_OFFLOAD_BUNDLE__", data):
        start, at = match.start(), match.end() + 8
        codes = {}
        for _ in range(struct.unpack_from("<Q", data, match.end())[0]):
            offset, size, length = struct.unpack_from("<QQQ", data, at)
            name = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if name.startswith("hip"):
                target = name.rpartition("-")[2]
                codes[target] = data[start + offset : start + offset + size]
        found.append(codes)
    return found


def kernels_of(code):
    return set(re.findall(rb"(_Z\w+)\.kd\0", code))


def test_every_kernel_has_code_for_every_target(library):
    found = bundles(library)
    assert len(found) == 5, "files with kernels"
    targets = set(found[0])
    assert {"gfx90a", "gfx942"} <= targets <= set(TARGETS)
    every = set()
    for codes in found:
        assert set(codes) == targets
        for target, code in codes.items():
            machine, flags = struct.unpack_from("<H", code, 18)[0], code[48]
            assert (code[:4], machine, flags) == (b"\x7fELF", AMDGPU, TARGETS[target])
        kernels = {target: kernels_of(code) for target, code in codes.items()}
        assert len({frozenset(names) for names in kernels.values()}) == 1
        every |= kernels["gfx942"]
    for name in KERNELS:
        assert any(name.encode() in kernel for kernel in every), name
    assert not any(b"tma" in kernel for kernel in every)


def test_it_needs_nothing_of_rocm_and_exports_nothing_but_its_module(library):
    def symbols(kind):
        command = [tool("nm"), "-D", kind, library]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {line.split()[-1] for line in said.splitlines()}

    undefined = symbols("--undefined-only")
    assert {name for name in undefined if re.match(r"_*(hip|hsa|cu|amd)", name, re.I)} == set()
    assert symbols("--defined-only") == {"PyInit__C"}
    command = [tool("readelf"), "-d", library]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"NEEDED.*(hip|hsa|cuda)", said)


def run_with(package, code, **variables):
    env = os.environ | {"PYTHONPATH": str(package)} | variables
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=package)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


MOVE = """
import torch, sgl_kvio
pool = torch.arange(64, dtype=torch.int32).reshape(16, 1, 4)
out = torch.zeros_like(pool)
to, of = torch.tensor([3, 5]), torch.tensor([8, 2])
torch.ops.kvio.transfer([out], [pool], to, of)
assert torch.equal(out[to], pool[of]) and out.count_nonzero() == 8
facts = sgl_kvio.capabilities()
print(facts["backend"], facts["driver"], facts["devices"], *facts["archs"])
"""


def test_it_loads_and_runs_its_cpu_ops_without_rocm(package):
    backend, driver, devices, *archs = run_with(package, MOVE)
    assert (backend, driver, devices) == ("rocm", "0", "0")
    assert {"gfx90a", "gfx942"} <= set(archs)


@pytest.mark.parametrize("name", ["test_transfer", "test_staged", "test_swap_in"])
def test_its_cpu_ops_pass_the_tests_of_any_build(package, name):
    """MHA, MLA and K-only pools; one covering of the cases, without the longest test."""
    code = f"""
import sys, pytest, sgl_kvio
assert sgl_kvio.capabilities()["backend"] == "rocm"
options = ["-q", "-p", "no:cacheprovider", "-k", "not state_machine"]
sys.exit(pytest.main([*options, {str(ROOT / "tests" / name)!r} + ".py"]))
"""
    said = " ".join(run_with(package, code, KVIO_TEST_COVERINGS="1"))
    assert int(re.search(r"(\d+) passed", said)[1]) > 200


def test_its_kernels_register_with_the_hip_runtime_that_is_loaded(package):
    """No GPU is needed for that, only the runtime."""
    names = [f"libamdhip64.so.{major}" for major in (7, 6, 5)]
    load = f"""
import ctypes
for name in {names}:
    try:
        ctypes.CDLL(name)
        break
    except OSError:
        pass
else:
    raise SystemExit(print("missing"))
"""
    said = run_with(package, load + MOVE)
    if said == ["missing"]:
        pytest.skip(f"no HIP runtime: {' or '.join(names)}")
    assert said[0] == "rocm"
    assert int(said[1]) > 0, "the runtime's version"


@functools.cache
def disassembly_of_gfx942(library):
    """{kernel: its instructions}"""
    names = ("llvm-objdump-19", "/opt/rocm/llvm/bin/llvm-objdump")
    objdump = next((found for name in names if (found := shutil.which(name))), None)
    if objdump is None:
        pytest.skip("no llvm-objdump (Debian: llvm-19)")
    kernels = {}
    for number, codes in enumerate(bundles(library)):
        code = library.parent / f"{number}.co"
        code.write_bytes(codes["gfx942"])
        command = [objdump, "-d", "--mcpu=gfx942", code]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, body in re.findall(r"<(_Z\w+)>:\n(.*?)(?=\n\n|\Z)", said, re.DOTALL):
            kernels[name] = body
    return kernels


def test_rows_are_loaded_past_the_caches_and_stored_through_them(library):
    wide = {
        name: body
        for name, body in disassembly_of_gfx942(library).items()
        if re.search(r"register_copyILi16", name)
    }
    assert len(wide) == 2, "of few buffers and of many"
    for body in wide.values():
        loads = re.findall(r"global_load_dwordx4 .*", body)
        stores = re.findall(r"global_store_dwordx4 .*", body)
        assert len(loads) >= 16
        assert len(stores) >= 16
        assert sum(" nt" in load for load in loads) >= 16
        assert not any(" nt" in store for store in stores)


@pytest.mark.parametrize(("width", "rows_at_once"), [(16, 4), (8, 1), (4, 1), (2, 1), (1, 1)])
def test_scattered_rows_are_moved_by_the_wave_copy(library, width, rows_at_once):
    """By 1 to 64 lanes, several at once where all of them lie at multiples of 16. Stretches, of 16
    or 18 loads a lane, are moved by packages of the kernel's width."""
    kernels = [
        body
        for name, body in disassembly_of_gfx942(library).items()
        if re.search(rf"(register_copy|load_layers_kernel)ILi{width}E", name)
    ]
    assert len(kernels) == 4, "of few buffers and of many"
    of_stretches = 2 * 16 + 2 * 18 if width == 16 else 0
    for body in kernels:
        non_temporal = re.findall(r"global_load_dwordx4 .* nt\b", body)
        assert len(non_temporal) == 7 * rows_at_once * (4 + 3) + of_stretches


def test_no_wide_store_waits_for_the_one_before_it(library):
    """What conditional stores do that come before all loads are known to be there."""
    for name, body in disassembly_of_gfx942(library).items():
        if not re.search("register_copyILi16E", name):
            continue
        words = re.findall(r"global_store_dwordx4|global_load_dwordx4|vmcnt\(0\)", body)
        text = "".join({"s": "S", "l": "L"}.get(word[7], "w") for word in words)
        assert len(re.findall("L{16,18}w+S", text)) >= 2, "stretches shorter than a round"
        assert not re.search("SwS", text), name


def test_swap_in_copies_rows_by_the_wave_copy(library):
    """Its wide loads, for groups of 1 to 64 lanes: 4 in the long loop, 3 after it. Of all other
    loads none is non-temporal."""
    swap_in = {
        name: body
        for name, body in disassembly_of_gfx942(library).items()
        if re.search("swap_in_kernel|copy_planned_kernel", name)
    }
    assert len(swap_in) == 3, "tables in shared memory, tables elsewhere, a replay"
    for body in swap_in.values():
        non_temporal = re.findall(r"(\S+_(?:load|store)_\S+) .* nt\b", body)
        assert non_temporal == ["global_load_dwordx4"] * 7 * (4 + 3)
        assert len(re.findall("global_store_dwordx4 ", body)) >= 7 * (4 + 3)


def test_no_kernel_keeps_anything_in_scratch_memory(library):
    for name, body in disassembly_of_gfx942(library).items():
        assert not re.search(r"\b(scratch|buffer)_(load|store)", body), name


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("gfx999", r"KVIO_ROCM_ARCHS names 'gfx999', which \S+ \(.+\) does not know"),
        ("gfx1100", "KVIO_ROCM_ARCHS names 'gfx1100', whose waves have 32 lanes"),
    ],
)
def test_a_target_that_cannot_be_served_is_refused_by_name(tmp_path, target, reason):
    require_hip()
    done = configure(tmp_path, KVIO_ROCM_ARCHS=f"gfx942;{target}")
    assert done.returncode != 0
    assert re.search(reason, " ".join(done.stderr.split()))


def test_a_compiler_that_knows_no_hip_is_refused_by_name(tmp_path):
    done = configure(tmp_path, KVIO_HIP_COMPILER=tool("c++"))
    assert done.returncode != 0
    assert re.search(r"no HIP compiler was found .*c\+\+", " ".join(done.stderr.split()))
