"""Stubs that bind a build to the older names of what glibc 2.34 took into libc.so.6.

    old_glibc.py FOLDER    writes libpthread.so.0, libdl.so.2, librt.so.1 and moved.json there

Prints the stubs' paths, for KVIO_LINK_LAST. glibc 2.34 moved threads, semaphores, dlopen and shared
memory into libc.so.6 under new version names; the older ones stayed and lead to the same code. A
linker takes the newest name, so that a file built there loads nowhere older although it asks for
nothing new. Linked last and where needed, these stubs offer the older names in the older libraries,
which every later glibc has. Before 2.34 there is nothing to do. moved.json lists the functions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

MOVED = (2, 34)
HOMES = {"dl": "libdl.so.2", "shm_": "librt.so.1"}  # by the beginning of the name; all else:
THREADS = "libpthread.so.0"
MOVED_NAMES = re.compile(r"(pthread|sem|shm|dl)_?[a-z]\w*|call_once")


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def moved_functions(libc: str) -> dict[str, str]:
    """{name: its version before} of every function whose default version in `libc` is 2.34."""
    said = subprocess.run(["objdump", "-T", libc], capture_output=True, text=True, check=True)
    defaults, older = set(), defaultdict(list)
    for line in said.stdout.splitlines():
        # Versions that are not the default are in parentheses.
        match = re.search(r"\s(\(?)GLIBC_(2[\d.]+)\)?\s+(\w+)$", line)
        if match is None or not MOVED_NAMES.fullmatch(match[3]):
            continue
        if number(match[2]) == MOVED and not match[1]:
            defaults.add(match[3])
        elif number(match[2]) < MOVED:
            older[match[3]].append(match[2])
    return {name: max(older[name], key=number) for name in sorted(defaults) if older[name]}


def home(name: str) -> str:
    return next((library for start, library in HOMES.items() if name.startswith(start)), THREADS)


def write_stub(folder: Path, library: str, functions: dict[str, str]) -> Path:
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    by_version = defaultdict(list)
    for name, version in functions.items():
        by_version[version].append(name)
    versions.write_text(
        "".join(
            f"GLIBC_{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n"
            for version, names in by_version.items()
        )
    )
    stub = folder / library
    command = [*compiler(), "-shared", "-nostdlib", "-fno-builtin", "-w", str(source)]
    command += ["-o", str(stub), f"-Wl,-soname,{library},--version-script={versions}"]
    subprocess.run(command, check=True)
    return stub


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = [*compiler(), "-print-file-name=libc.so.6"]
    libc = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    functions = moved_functions(libc)
    (folder / "moved.json").write_text(json.dumps(sorted(functions)))
    libraries = sorted({home(name) for name in functions})
    stubs = [
        write_stub(folder, library, {n: v for n, v in functions.items() if home(n) == library})
        for library in libraries
    ]
    print(*stubs, sep=";")


if __name__ == "__main__":
    main()
