"""Builds sgl_kvio/_C.abi3.so with CMake and ninja.

Environment:
    KVIO_BACKEND       auto (default: cuda when nvcc is found, else cpu), cpu, cuda, rocm
    KVIO_CUDA_ARCHS    compute capabilities, such as "80;90" (default: the list in CMakeLists.txt)
    KVIO_ROCM_ARCHS    gfx targets, such as "gfx942" (default: the list in cmake/rocm.cmake)
    KVIO_HIP_COMPILER  hipcc or clang++ for rocm (default: looked for)
    MAX_JOBS           parallel compile jobs
    CUDACXX            nvcc, when it is not the PATH's
    KVIO_LINK_LAST     libraries to link after all others, such as tools/old_glibc.py makes

KVIO_BACKEND=cpu, cuda or rocm is named in the package's version too (0.1.0+cpu, +cu130, +rocm), so
that the wheels of one release lie side by side; auto adds nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def version() -> str:
    text = (ROOT / "sgl_kvio" / "_version.py").read_text()
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise RuntimeError("sgl_kvio/_version.py holds no __version__")
    return match.group(1)


def backend() -> str:
    return os.environ.get("KVIO_BACKEND") or "auto"


def local_version() -> str:
    """What tells the wheels of one release apart: "+cpu", "+cu130", "+rocm", or nothing."""
    if backend() == "auto":
        return ""
    if backend() != "cuda":
        return f"+{backend()}"
    # CMake looks in the same two places.
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit(
            "KVIO_BACKEND is 'cuda' but there is no nvcc; it needs one on the PATH, or CUDACXX"
        )
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        raise SystemExit(f"{nvcc} --version names no release")
    return f"+cu{release[1]}{release[2]}"


def torch_root() -> Path:
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "building sgl_kvio needs torch>=2.10 in this environment:"
            " pip install torch, then pip install --no-build-isolation ."
        ) from error
    return Path(torch.__file__).resolve().parent


def tool(name: str) -> str:
    """The tool beside Python (where the packages cmake and ninja put it), else of the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"building sgl_kvio needs {name}: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """One CMake project instead of setuptools' own compiler driver."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = ROOT / "build" / f"cmake-{sysconfig.get_platform()}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"),
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DKVIO_VERSION={version()}",
            f"-DKVIO_BACKEND={backend()}",
            f"-DKVIO_TORCH_ROOT={torch_root()}",
            f"-DKVIO_PYTHON_INCLUDE={sysconfig.get_path('include')}",
            f"-DKVIO_OUTPUT_DIR={output}",
        ]
        # Unset means what the build files say, not that of an earlier build in this tree.
        names = ("KVIO_CUDA_ARCHS", "KVIO_ROCM_ARCHS", "KVIO_HIP_COMPILER", "KVIO_LINK_LAST")
        for name in names:
            value = os.environ.get(name)
            configure.append(f"-D{name}={value}" if value else f"-U{name}")
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run([tool("cmake"), "--build", str(build), "-j", jobs], check=True)


setup(
    version=version() + local_version(),
    ext_modules=[Extension("sgl_kvio._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
