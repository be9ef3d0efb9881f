"""The source distribution holds what a build and its tests need."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or not (ROOT / ".git").exists(), reason="needs the checkout"
)


def test_the_sdist_holds_every_tracked_source(tmp_path):
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    listed = subprocess.run(
        "git ls-files csrc sgl_kvio tests bench/*.py examples *.toml *.txt *.md".split(),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(listed.stdout.split()) - held == set()
