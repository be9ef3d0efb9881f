"""What build_wheels.sh asks of a finished wheel, and the table of what it saw.

    wheels.py check WHEEL FACTS.json --moved MOVED.json     reads the wheel, fails on what it must
                                                            not be, writes facts
    wheels.py describe RUN.json --epoch N ...               the machine and what was left out
    wheels.py matrix FOLDER TABLE.md [CELL.json ...]        the table, from FOLDER/run.json,
                                                            FOLDER/facts and FOLDER/cells

Needs auditwheel, abi3audit and pyelftools in this Python, torch to load the library, c++filt, and
for CUDA wheels cuobjdump and nvdisasm (their NVIDIA packages, or the PATH's).
"""

from __future__ import annotations

import argparse
import email
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LIBRARY = "sgl_kvio/_C.abi3.so"
MOST_BYTES = 10_000_000
# A wheel of a library that torch runs: what torch itself brings must stay outside.
FOREIGN = re.compile(
    r"lib(torch|c10|cuda|cudart|nv|cu[a-z]+|hip|hsa|amd|roc|python)", re.IGNORECASE
)
TORCH = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux-[\w-]+)\.so\.\d+")


class CheckError(Exception):
    """What the wheel is, and what it has to be."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise CheckError(text)


def run(*command: str | Path, env: dict[str, str] | None = None, folder: Path | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=folder, check=False)
    require(done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# --- name, content, metadata


def check_name(name: str) -> dict[str, str]:
    match = re.fullmatch(
        r"sgl_kvio-(?P<version>[^-]+)-(?P<tag>[^-]+-[^-]+)-(?P<platform>.+)\.whl", name
    )
    require(match is not None, f"{name} is not the name of a wheel of sgl_kvio")
    assert match is not None
    require(match["tag"] == "cp310-abi3", f"{name} has the tag {match['tag']}; it needs cp310-abi3")
    local = match["version"].partition("+")[2]
    require(bool(local), f"{name} has no local version; it needs one such as +cpu or +cu130")
    return {"version": match["version"], "local": local, "platform": match["platform"]}


def check_content(names: Iterable[str]) -> None:
    files = [name for name in names if not name.endswith("/")]
    bundled = [name for name in files if FOREIGN.match(name.rpartition("/")[2])]
    require(
        not bundled, f"the wheel bundles {', '.join(bundled)}; torch and the driver bring those"
    )
    binaries = [name for name in files if re.search(r"\.so(\.|$)|\.a$|\.o$", name)]
    require(binaries == [LIBRARY], f"the wheel holds {binaries}; it needs {LIBRARY} alone")
    strays = [n for n in files if not re.match(r"sgl_kvio(-[^/]+\.dist-info)?/", n)]
    require(not strays, f"the wheel installs {', '.join(strays)} beside the package")


def check_metadata(text: str) -> dict[str, str]:
    metadata = email.message_from_string(text)
    python = metadata["Requires-Python"]
    require(python == ">=3.10", f"Requires-Python is {python}; it needs >=3.10")
    needed = [n for n in metadata.get_all("Requires-Dist") or [] if "extra ==" not in n]
    require(needed == ["torch>=2.10"], f"Requires-Dist is {needed}; it needs torch>=2.10 alone")
    return {"requires_python": python, "requires_torch": needed[0]}


# --- the library


def symbol_versions(library: Path) -> dict[str, list[str]]:
    """{"GLIBC_2.17": names of the undefined symbols that ask for it}"""
    from elftools.elf.elffile import ELFFile

    versions: dict[str, list[str]] = defaultdict(list)
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".gnu.version_r")
        names = {
            auxiliary["vna_other"]: auxiliary.name
            for _, auxiliaries in table.iter_versions()
            for auxiliary in auxiliaries
        }
        numbers = elf.get_section_by_name(".gnu.version")
        for at, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            number = numbers.get_symbol(at)["ndx"]
            if symbol["st_shndx"] == "SHN_UNDEF" and number in names:
                versions[names[number]].append(symbol.name)
    return dict(versions)


def check_dynamic(library: Path) -> list[str]:
    """The libraries it asks for."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        tags = list(ELFFile(file).get_section_by_name(".dynamic").iter_tags())
        needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
        paths = [tag.entry.d_tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    require(not paths, f"{LIBRARY} has {', '.join(paths)}: folders of the machine that built it")
    require("libtorch.so" in needed, f"{LIBRARY} needs {needed}; libtorch.so has to be among them")
    others = [n for n in needed if n not in TORCH and not SYSTEM.fullmatch(n)]
    require(
        not others, f"{LIBRARY} needs {', '.join(others)}, which are neither torch nor the system's"
    )
    return needed


def glibc_facts(library: Path, moved: set[str]) -> dict[str, Any]:
    versions = symbol_versions(library)
    newest = {}
    for family in ("GLIBC", "GLIBCXX", "CXXABI"):
        found = [name for name in versions if name.startswith(f"{family}_")]
        if found:
            name = max(found, key=version_key)
            newest[family] = {"version": name.partition("_")[2], "symbols": sorted(versions[name])}
    asked = {name for names in versions.values() for name in names}
    return {"newest": newest, "bound_to_old_names": sorted(asked & moved)}


def check_policy(wheel: Path, platform_tag: str) -> dict[str, Any]:
    """auditwheel's word: the tag that the symbols allow has to be the one that the wheel bears."""
    said = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    tag = said["sym_tag"]
    require(tag.startswith("manylinux_"), f"auditwheel allows {tag}; it needs a manylinux tag")
    worn = platform_tag.split(".")
    require(tag in worn, f"auditwheel allows {tag}, the wheel says {platform_tag}")
    foreign = set(said["external_libs"]) - TORCH
    require(not foreign, f"auditwheel sees {', '.join(sorted(foreign))} outside the policy")
    return {"policy": tag, "auditwheel": importlib.metadata.version("auditwheel")}


def check_abi3(wheel: Path) -> dict[str, str]:
    said = json.loads(run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel))
    (spec,) = said["specs"].values()
    (audited,) = spec["wheel"]
    result = audited["result"]
    sound = result["is_abi3"] and result["is_abi3_baseline_compatible"]
    require(sound, f"abi3audit: {json.dumps(result)}")
    return {
        "abi3_promised": result["baseline"],
        "abi3_used": result["computed"],
        "abi3audit": importlib.metadata.version("abi3audit"),
    }


def loaded_facts(folder: Path) -> dict[str, Any]:
    """What the library says of itself, loaded by this Python's torch from the unpacked wheel."""
    code = "import json, sgl_kvio; print(json.dumps(sgl_kvio.capabilities(), default=str))"
    # There, and not where a source tree would come first.
    return json.loads(run(sys.executable, "-c", code, folder=folder).splitlines()[-1])


# --- kernels


def family(symbol: str) -> str:
    """register_copy of `void kvio::gpu::(anonymous namespace)::register_copy<16, 1>(...)`"""
    plain = symbol.replace("(anonymous namespace)::", "").replace("void ", "")
    return re.split(r"[<(]", plain)[0].rpartition("::")[2]


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    ordered = sorted(symbols)
    done = subprocess.run(
        ["c++filt"], input="\n".join(ordered), capture_output=True, text=True, check=True
    )
    return dict(zip(ordered, done.stdout.splitlines(), strict=True))


def nvidia_path() -> str:
    """The PATH, and where packages put NVIDIA's binary tools."""
    folders = [os.environ.get("PATH", "")]
    for package in ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += {str(Path(str(f.locate())).parent) for f in files if f.parent.name == "bin"}
    return os.pathsep.join(folders)


def cuda_kernels(library: Path) -> tuple[dict[str, dict[str, dict[str, int]]], list[str]]:
    """{kernel: {arch: its registers and stack bytes}}, and the architectures of the PTX."""
    path = nvidia_path()
    cuobjdump = shutil.which("cuobjdump", path=path)
    require(cuobjdump is not None, "no cuobjdump: pip install nvidia-cuda-cuobjdump")
    env = os.environ | {"PATH": path}
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    arch = name = ""
    for line in run(str(cuobjdump), "-res-usage", library, env=env).splitlines():
        if match := re.match(r"\s*arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif (match := re.match(r"\s*REG:(\d+) STACK:(\d+)", line)) and name:
            found[name][arch] = {"registers": int(match[1]), "stack_bytes": int(match[2])}
            name = ""
    listed = run(str(cuobjdump), "--list-ptx", library, env=env)
    return dict(found), sorted(set(re.findall(r"(sm_\w+)\.ptx", listed)))


def rocm_kernels(library: Path) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {gfx target: {}}}, from the code objects that clang bundles into the library."""
    data = library.read_bytes()
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for start, target, offset, size in rocm_code_objects(data):
        code = data[start + offset : start + offset + size]
        for name in set(re.findall(rb"(_Z\w+)\.kd\0", code)):
            found[name.decode()][target] = {}
    return dict(found)


def rocm_code_objects(data: bytes) -> Iterator[tuple[int, str, int, int]]:
    for match in re.finditer(rb"__CLANG_OFFLOAD_BUNDLE__", data):
        at = match.end() + 8
        for _ in range(struct.unpack_from("<Q", data, match.end())[0]):
            offset, size, length = struct.unpack_from("<QQQ", data, at)
            name = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if name.startswith("hip"):
                yield match.start(), name.rpartition("-")[2], offset, size


def kernel_facts(backend: str, library: Path, promised: list[str]) -> dict[str, Any]:
    """By kernel family: its instances, and what they take at most on each architecture."""
    ptx: list[str] = []
    if backend == "cuda":
        kernels, ptx = cuda_kernels(library)
        archs = [f"sm_{arch}" for arch in promised]
        require(ptx == [archs[-1]], f"PTX is for {ptx}; it needs {archs[-1]} alone, the newest")
    elif backend == "rocm":
        kernels, archs = rocm_kernels(library), promised
    else:
        return {"archs": [], "ptx": [], "kernels": {}}
    require(bool(kernels), f"{LIBRARY} holds no kernel")
    lacking = {name: set(archs) ^ set(by_arch) for name, by_arch in kernels.items()}
    lacking = {name: archs for name, archs in lacking.items() if archs}
    require(not lacking, f"kernels without code for some architecture, or with too much: {lacking}")
    names = demangle(kernels)
    families: dict[str, dict[str, Any]] = {}
    for symbol, by_arch in kernels.items():
        entry = families.setdefault(family(names[symbol]), {"instances": 0, "archs": {}})
        entry["instances"] += 1
        for arch, usage in by_arch.items():
            most = entry["archs"].setdefault(arch, {})
            for what, value in usage.items():
                most[what] = max(most.get(what, 0), value)
    return {"archs": archs, "ptx": ptx, "kernels": dict(sorted(families.items()))}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check(wheel: Path, moved: set[str]) -> dict[str, Any]:
    named = check_name(wheel.name)
    size = wheel.stat().st_size
    require(size < MOST_BYTES, f"{wheel.name} has {size} bytes; it needs fewer than {MOST_BYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        check_content(archive.namelist())
        info = f"sgl_kvio-{named['version']}.dist-info"
        metadata = check_metadata(archive.read(f"{info}/METADATA").decode())
        archive.extractall(folder)
        library = Path(folder) / LIBRARY
        says = loaded_facts(Path(folder))
        local = named["local"]
        backend = says["backend"]
        wanted = "cu" + "".join(says["toolkit"].split(".")[:2]) if backend == "cuda" else backend
        require(local == wanted, f"{wheel.name} is {local}, but its library is {wanted}")
        base = named["version"].partition("+")[0]
        require(says["version"] == base, f"{wheel.name} holds a library of {says['version']}")
        return {
            **named,
            **metadata,
            "wheel": wheel.name,
            "backend": backend,
            "toolkit": says["toolkit"],
            "sha256": sha256(wheel.read_bytes()),
            "bytes": size,
            "library_sha256": sha256(library.read_bytes()),
            "library_bytes": library.stat().st_size,
            "needed": check_dynamic(library),
            **glibc_facts(library, moved),
            **check_policy(wheel, named["platform"]),
            **check_abi3(wheel),
            **kernel_facts(backend, library, list(says["archs"])),
        }


# --- the table


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def asked_for(facts: dict[str, Any], family: str) -> str:
    """The newest version and who asks for it: "2.17 (`clock_gettime`)"."""
    newest = facts["newest"].get(family)
    if newest is None:
        return "none"
    shown = ", ".join(f"`{name}`" for name in newest["symbols"][:2])
    more = len(newest["symbols"]) - 2
    if family != "GLIBC":
        return f"{newest['version']} ({len(newest['symbols'])} symbols)"
    return f"{newest['version']} ({shown}{f' and {more} more' if more > 0 else ''})"


def wheels_section(wheels: list[dict[str, Any]], built_twice: dict[str, str]) -> list[str]:
    def row(name: str, value: Any) -> list[str]:
        return [name, *(str(value(facts)) for facts in wheels)]

    rows = [
        row("file", lambda w: f"`{w['wheel']}`"),
        row("size of the wheel", lambda w: megabytes(w["bytes"])),
        row("size of the library", lambda w: megabytes(w["library_bytes"])),
        row("auditwheel's policy", lambda w: f"`{w['policy']}`"),
        row("newest glibc version it asks for", lambda w: asked_for(w, "GLIBC")),
        row("newest libstdc++ version", lambda w: asked_for(w, "GLIBCXX")),
        row(
            "functions bound to names older than glibc 2.34",
            lambda w: len(w["bound_to_old_names"]) or "none",
        ),
        row("libraries it needs", lambda w: ", ".join(f"`{name}`" for name in w["needed"])),
        row("abi3audit: promised / used", lambda w: f"{w['abi3_promised']} / {w['abi3_used']}"),
        row("metadata", lambda w: f"`{w['requires_torch']}`, Python `{w['requires_python']}`"),
        row("machine code for", lambda w: ", ".join(w["archs"]) or "the CPU alone"),
        row("PTX for", lambda w: ", ".join(w["ptx"]) or "-"),
        row("compiler of the kernels", lambda w: w["toolkit"] or "-"),
        row("built twice, bytes equal", lambda w: built_twice.get(w["backend"], "not tried")),
    ]
    return table(["", *(w["local"] for w in wheels)], rows)


def cell_line(cell: dict[str, Any], wheels: list[dict[str, Any]]) -> list[str]:
    same = [w for w in wheels if w["library_sha256"] == cell["library_sha256"]]
    chosen = f"first {cell['cases']} of every function's cases" if cell["cases"] else "every case"
    left_out = re.search(r"-k (.*?)(?: -\w |$)", cell["selection"])
    return [
        same[0]["local"] if same else f"{cell['backend']}, an earlier build",
        cell["python"],
        cell["torch"],
        cell["gpu"] or "no GPU",
        cell["glibc"],
        f"{cell['passed']} passed, {cell['skipped']} skipped, {cell['failed']} failed",
        f"`{cell['folder']}`, {chosen}" + (f", `-k '{left_out[1]}'`" if left_out else ""),
        f"{cell['seconds']} s",
    ]


def kernels_section(facts: dict[str, Any]) -> list[str]:
    def usage(most: dict[str, int]) -> str:
        if not most:
            return "yes"
        stack = most["stack_bytes"]
        return f"{most['registers']}" + (f", {stack} B stack" if stack else "")

    rows = [
        [f"`{name}`", str(entry["instances"]), *(usage(entry["archs"][a]) for a in facts["archs"])]
        for name, entry in facts["kernels"].items()
    ]
    head = ["kernel", "instances", *facts["archs"]]
    what = "registers at most" if facts["backend"] == "cuda" else "a code object has it"
    return [f"### {facts['local']}: {what}", "", *table(head, rows), ""]


ABOUT_GLIBC = """\
A machine with an older glibc than the policy's does not load the file; torch's own wheels ask for
2.28. A build takes the newest names that the build machine has: glibc 2.34 renamed threads,
semaphores and dlopen, which CUDA's static runtime and libstdc++ use, so that a plain build on a
later glibc asks for 2.34. `build_wheels.sh` binds these functions to their older names, which every
later glibc keeps (`tools/old_glibc.py`), and `csrc/module.cpp` answers the one question for which
libstdc++ would ask glibc 2.32. What is left are the versions above. libstdc++ stays outside the
wheel: the one that is loaded must be at least as new as the row says, and a second one in the
process would gain nothing, since libstdc++ is what policies bound next. **The file was run only on
the glibc versions in the next table**, not on the oldest that it asks for."""


def matrix(run_folder: Path, others: list[Path]) -> str:
    record = json.loads((run_folder / "run.json").read_text())
    wheels = [json.loads(p.read_text()) for p in sorted((run_folder / "facts").glob("*.json"))]
    cells = [json.loads(p.read_text()) for p in sorted((run_folder / "cells").glob("*.json"))]
    cells += [json.loads(path.read_text()) for path in others]
    require(bool(wheels), f"{run_folder} holds no facts of a wheel")
    failed = [cell for cell in cells if cell["status"] != 0]
    require(not failed, f"tests failed: {failed}")
    head = ["wheel", "Python", "torch", "GPU", "glibc", "tests", "which", "time"]
    lines = [
        "# Wheel matrix",
        "",
        "Written by `build_wheels.sh` from what it saw; no cell is written by hand.",
        "",
        f"Built on {record['machine']}, glibc {record['glibc']}, {record['cxx']}, Python"
        f" {record['python']}, torch {record['torch']}; SOURCE_DATE_EPOCH={record['epoch']}.",
        "",
        "## Wheels",
        "",
        *wheels_section(wheels, record["built_twice"]),
        "",
        ABOUT_GLIBC,
        "",
        "## Installed and tested",
        "",
        "Each row is a new virtual environment with the wheel, torch and pytest, or, with a GPU, a"
        " folder of `pip install --target` (`bench/wheel_check.sh`). Tests run from a copy outside"
        " the source tree; those that need the tree are skipped, and so are `tests/gpu` without a"
        " GPU.",
        "",
        *table(head, [cell_line(cell, wheels) for cell in cells]),
        "",
        "## Left out",
        "",
        *([f"* {text}" for text in record["left_out"]] or ["Nothing."]),
        "",
        "## Machine code of every kernel",
        "",
    ]
    for facts in wheels:
        if facts["kernels"]:
            lines += kernels_section(facts)
    return "\n".join(lines).rstrip() + "\n"


def describe(left_out: list[str], built_twice: list[str], epoch: str) -> dict[str, Any]:
    """What the run was: the machine, its compilers, what it could not do."""
    cxx = run(os.environ.get("CXX", "c++"), "--version").splitlines()[0]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "glibc": platform.libc_ver()[1],
        "cxx": cxx,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "epoch": epoch,
        "left_out": left_out,
        "built_twice": dict(item.split("=", 1) for item in built_twice),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("check")
    one.add_argument("wheel", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--moved", type=Path, required=True)
    about = commands.add_parser("describe")
    about.add_argument("out", type=Path)
    about.add_argument("--left-out", action="append", default=[])
    about.add_argument("--built-twice", action="append", default=[])
    about.add_argument("--epoch", required=True)
    whole = commands.add_parser("matrix")
    whole.add_argument("run", type=Path)
    whole.add_argument("out", type=Path)
    whole.add_argument("cells", type=Path, nargs="*")
    given = parser.parse_args()
    try:
        if given.command == "check":
            facts = check(given.wheel, set(json.loads(given.moved.read_text())))
            given.out.write_text(json.dumps(facts, indent=1) + "\n")
            print(
                f"{facts['wheel']}: {megabytes(facts['bytes'])}, {facts['policy']},"
                f" {', '.join(facts['archs']) or 'no kernels'}: as it has to be"
            )
        elif given.command == "describe":
            facts = describe(given.left_out, given.built_twice, given.epoch)
            given.out.write_text(json.dumps(facts, indent=1) + "\n")
        else:
            given.out.write_text(matrix(given.run, given.cells))
    except CheckError as error:
        print(f"wheels.py {given.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
