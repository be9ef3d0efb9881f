"""Builds programs that run host code of csrc/gpu on a GPU runtime of their own.

They are written in CUDA's names, which csrc/gpu/platform.h maps to HIP's for the platform "rocm".
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from native import build

TORCH = Path(torch.__file__).parent
PLATFORMS = ("cuda", "rocm")
HIP_FOLDERS = ("/opt/rocm/include", "/usr/include")


def cuda_flags() -> list[str]:
    """The folder of cuda_runtime.h, which nvcc names without compiling anything."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: the CUDA headers are not there")
    command = ["nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    found = re.search(r'INCLUDES="-I([^"]+)"', said)
    if found is None or not (Path(found[1]) / "cuda_runtime.h").is_file():
        pytest.skip("nvcc names no folder with cuda_runtime.h")
    return ["-DUSE_CUDA", "-isystem", found[1]]


def hip_flags() -> list[str]:
    for folder in HIP_FOLDERS:
        if (Path(folder) / "hip" / "hip_runtime_api.h").is_file():
            flags = ["-DKVIO_ROCM", "-D__HIP_PLATFORM_AMD__"]
            return flags if folder == "/usr/include" else [*flags, "-isystem", folder]
    pytest.skip(f"no hip/hip_runtime_api.h in {' or '.join(HIP_FOLDERS)} (libamdhip64-dev)")


def build_program(folder: Path, platform: str, name: str, gpu_sources: tuple[str, ...]) -> Path:
    """Compiles tests/native/`name`.cpp with files of csrc/gpu and the host rooms."""
    try:
        compiler = build.compiler()
    except build.CannotBuildError as missing:
        pytest.skip(f"the program cannot be built: {missing}")
    flags = [
        "-std=c++17",
        "-O1",
        "-DTORCH_TARGET_VERSION=0x020a000000000000ULL",
        f"-I{build.CSRC}",
        *("-isystem", str(TORCH / "include")),
        *(cuda_flags() if platform == "cuda" else hip_flags()),
    ]
    sources = [build.HERE / f"{name}.cpp"]
    sources += [build.CSRC / "gpu" / f"{source}.cpp" for source in gpu_sources]
    sources += [source for source in build.SOURCES if source.parent.parent == build.CSRC]

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        build.run([*compiler, *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compiled, sources))
    libraries = TORCH / "lib"
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed"]
    linked += ["-ltorch", "-ltorch_cpu", "-lc10"]
    build.run([*compiler, *objects, *linked, "-o", str(folder / name)])
    return folder / name
