"""Builds `kvio_native`, the pybind11 module of bridge.cpp, with the compiler of the PATH.

Objects are named after a digest of what they are made from, so a second build compiles only what
changed since. `CXX` names another compiler, `CXXFLAGS` adds flags (for example
`-fsanitize=undefined`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SOURCES = (
    HERE / "bridge.cpp",
    HERE / "layer_flags_steps.cpp",
    HERE / "swap_in_steps.cpp",
    HERE / "wave_copy_moves.cpp",
    CSRC / "request" / "buffer_list.cpp",
    CSRC / "request" / "fault_subject.cpp",
    CSRC / "request" / "load_layers_request.cpp",
    CSRC / "request" / "request.cpp",
    CSRC / "request" / "staged_request.cpp",
    CSRC / "request" / "swap_in_request.cpp",
    CSRC / "plan" / "register_plan.cpp",
    CSRC / "plan" / "tma_plan.cpp",
    CSRC / "plan" / "units.cpp",
    CSRC / "request" / "pool_view.cpp",
    CSRC / "plan" / "backend.cpp",
    CSRC / "plan" / "copy_plan.cpp",
    CSRC / "plan" / "copy_width.cpp",
    CSRC / "plan" / "layers_plan.cpp",
    CSRC / "plan" / "miss_copy_plan.cpp",
    CSRC / "plan" / "order.cpp",
    CSRC / "plan" / "rates.cpp",
    CSRC / "plan" / "run_stats.cpp",
    CSRC / "plan" / "staged_plan.cpp",
    CSRC / "plan" / "swap_in_plan.cpp",
)
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-fvisibility=hidden")


class CannotBuildError(Exception):
    """This machine lacks a tool; the text says which."""


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise CannotBuildError(f"no C++ compiler: {command[0]} is not on the PATH")
    return [*command, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def include_flags() -> list[str]:
    try:
        import pybind11
    except ImportError:
        raise CannotBuildError("pybind11 is not installed") from None
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise CannotBuildError(f"no Python.h in {python}")
    # System headers, so that -Werror judges only this repository.
    return [f"-I{CSRC}", "-isystem", pybind11.get_include(), "-isystem", str(python)]


def digest(command: list[str], files: list[Path]) -> str:
    content = hashlib.sha256(shlex.join(command).encode())
    content.update(sys.version.encode())
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def compile_object(folder: Path, command: list[str], source: Path, headers: list[Path]) -> Path:
    target = folder / f"{source.stem}-{digest(command, [source, *headers])}.o"
    if not target.is_file():
        unfinished = target.with_suffix(f".{os.getpid()}.o")
        run([*command, *FLAGS, "-c", str(source), "-o", str(unfinished)])
        unfinished.replace(target)
    return target


def build(folder: Path) -> Path:
    """The path of the module's shared library inside `folder`, built if it is not there yet.

    Raises CannotBuildError when a tool is missing, RuntimeError with the compiler's output when it
    refuses the code.
    """
    command = [*compiler(), *include_flags()]
    headers = sorted(path for room in ("request", "plan") for path in (CSRC / room).glob("*.h"))
    headers += [
        CSRC / "error.h",
        *(CSRC / "gpu" / f"{n}.h" for n in ("layer_flags", "swap_in_resolve", "wave_copy")),
    ]
    with ThreadPoolExecutor(max_workers=min(len(SOURCES), os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(compile_object, folder, command, s, headers) for s in SOURCES]
        objects = [str(job.result()) for job in jobs]
    link = [*compiler(), "-shared", *objects]
    target = folder / digest(link, []) / f"kvio_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.is_file():
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        run([*link, "-o", str(unfinished)])
        unfinished.replace(target)
    return target


def load(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvio_native", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
