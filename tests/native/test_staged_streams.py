"""Orders that csrc/gpu/staged.cpp must keep, on streams of our own: see staged_streams.cpp."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from native import build

GPU_SOURCES = ("staged", "side_stream", "copy_engine")
TORCH = Path(torch.__file__).parent
SEEDS = 3000


def cuda_include() -> str:
    """The folder of cuda_runtime.h, which nvcc names without compiling anything."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: the CUDA headers are not there")
    command = ["nvcc", "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    found = re.search(r'INCLUDES="-I([^"]+)"', said)
    if found is None or not (Path(found[1]) / "cuda_runtime.h").is_file():
        pytest.skip("nvcc names no folder with cuda_runtime.h")
    return found[1]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    try:
        compiler = build.compiler()
    except build.CannotBuildError as missing:
        pytest.skip(f"the program cannot be built: {missing}")
    folder = tmp_path_factory.mktemp("staged_streams")
    flags = [
        "-std=c++17",
        "-O1",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020a000000000000ULL",
        f"-I{build.CSRC}",
        *("-isystem", str(TORCH / "include")),
        *("-isystem", cuda_include()),
    ]
    sources = [build.HERE / "staged_streams.cpp"]
    sources += [build.CSRC / "gpu" / f"{name}.cpp" for name in GPU_SOURCES]
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
    build.run([*compiler, *objects, *linked, "-o", str(folder / "staged_streams")])
    return folder / "staged_streams"


def test_no_interleaving_of_the_streams_moves_wrong_bytes_or_leaves_copies_behind(program):
    done = subprocess.run([program, str(SEEDS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
