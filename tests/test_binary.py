"""Machine code in the extension: every kernel has code for every architecture that is promised."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import sgl_kvio

LIBRARY = Path(sgl_kvio.__file__).parent / "_C.abi3.so"
CAPABILITIES = sgl_kvio.capabilities()


def toolkit_folders() -> str:
    """The PATH, and where the packages of the `test` extra put NVIDIA's binary tools."""
    folders = [os.environ.get("PATH", "")]
    for package in ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        folders += {str(Path(str(f.locate())).parent) for f in files if f.parent.name == "bin"}
    return os.pathsep.join(folders)


FOLDERS = toolkit_folders()
CUOBJDUMP = shutil.which("cuobjdump", path=FOLDERS)

pytestmark = [
    pytest.mark.skipif(CAPABILITIES["backend"] != "cuda", reason="a build without CUDA kernels"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump"),
]


def dump(*arguments: str) -> str:
    command = [str(CUOBJDUMP), *arguments, str(LIBRARY)]
    env = os.environ | {"PATH": FOLDERS}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def kernels_by_arch() -> dict[str, set[str]]:
    """Names of the kernels with machine code, for each compute capability."""
    found: dict[str, set[str]] = {}
    arch = ""
    for line in dump("-elf").splitlines():
        if match := re.match(r"arch = sm_(\d+)", line.strip()):
            arch = match[1]
            found.setdefault(arch, set())
        elif match := re.search(r"\.text\.(_Z\S*(?:register|tma)_copy\S+)", line):
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
    assert set(re.findall(r"sm_(\d+)\.ptx", dump("--list-ptx"))) == {newest}


def test_the_ring_uses_bulk_copies_and_tensor_maps():
    code = dump("-sass", "-arch", "sm_90")
    kernels = re.split(r"Function : ", code)[1:]
    boxes = [body for body in kernels if re.match(r"_Z\S*tma_copy\S*Lb1", body)]
    rows = [body for body in kernels if re.match(r"_Z\S*tma_copy\S*Lb0", body)]
    assert boxes
    assert rows
    assert all("UBLKCP" in body and "UTMALDG.4D" in body for body in boxes)
    assert all("UBLKCP" in body and "UTMALDG" not in body for body in rows)
