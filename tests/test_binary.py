"""Machine code in the extension: every kernel has code for every architecture that is promised."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import sgl_kvio

LIBRARY = Path(sgl_kvio.__file__).parent / "_C.abi3.so"
CAPABILITIES = sgl_kvio.capabilities()

pytestmark = [
    pytest.mark.skipif(CAPABILITIES["backend"] != "cuda", reason="a build without CUDA kernels"),
    pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="needs cuobjdump"),
]


def dump(*arguments: str) -> str:
    command = ["cuobjdump", *arguments, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kernels_by_arch() -> dict[str, set[str]]:
    """Names of the kernels with machine code, for each compute capability."""
    found: dict[str, set[str]] = {}
    arch = ""
    for line in dump("-elf").splitlines():
        if match := re.match(r"arch = sm_(\d+)", line.strip()):
            arch = match[1]
            found.setdefault(arch, set())
        elif match := re.search(r"\.text\.(_Z\S*register_copy\S+)", line):
            found[arch].add(match[1])
    return found


def test_every_kernel_has_machine_code_for_every_promised_architecture():
    found = kernels_by_arch()
    assert sorted(found) == sorted(CAPABILITIES["archs"])
    every = set.union(*found.values())
    assert every
    assert {arch for arch, kernels in found.items() if kernels != every} == set()


def test_newer_cards_find_ptx_of_the_newest_architecture():
    newest = max(CAPABILITIES["archs"], key=int)
    assert re.findall(r"sm_(\d+)\.ptx", dump("--list-ptx")) == [newest]
