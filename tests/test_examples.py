"""examples/: each one runs, says what it found, and fails when it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sgl_kvio

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PAGE_STORE = EXAMPLES / "page_store.py"
FEW = ["--pages", "10"]

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not run from a source tree")


def run(*arguments):
    """Runs Python with this test's sgl_kvio, wherever it was imported from."""
    package_home = str(Path(sgl_kvio.__file__).resolve().parents[1])
    paths = [package_home, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )


@pytest.fixture
def written(tmp_path):
    folder = tmp_path / "pages"
    done = run(PAGE_STORE, "write", folder, *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_page_store_runs_both_ways_in_two_processes():
    done = run(PAGE_STORE, *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    wrote, read = done.stdout.splitlines()
    assert wrote.startswith("write: 10 pages, 10,485,760 bytes, ")
    assert wrote.endswith(" stored from page_first pages")
    assert read.startswith("read: 10 pages, 10,485,760 bytes, ")
    assert read.endswith(" loaded, every byte equal")
    assert "stored 8/10 pages\nstored 10/10 pages\n" in done.stderr
    assert "compared 8/10 pages\ncompared 10/10 pages\n" in done.stderr


@pytest.mark.parametrize("layout", ["page_head", "layer_first"])
def test_page_store_takes_other_layouts(layout):
    done = run(PAGE_STORE, "--pages", "2", "--layout", layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every byte equal\n")


def test_page_store_finds_a_byte_that_differs(written):
    victim = sorted(written.glob("*.page"))[3]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    done = run(PAGE_STORE, "read", written, *FEW)
    assert done.returncode == 1
    assert done.stdout == "read: 0 of 10 pages MISSING, 1 bytes DIFFER\n"


def test_page_store_finds_a_page_that_is_missing_or_short(written):
    first, second, *_ = sorted(written.glob("*.page"))
    first.unlink()
    os.truncate(second, 1000)
    done = run(PAGE_STORE, "read", written, *FEW)
    assert done.returncode == 1
    assert done.stdout == "read: 2 of 10 pages MISSING, 0 bytes DIFFER\n"


def test_page_store_of_another_layout_does_not_take_the_pages(written):
    done = run(PAGE_STORE, "read", written, "--layout", "page_head", *FEW)
    assert done.returncode == 1
    assert done.stdout == "read: 10 of 10 pages MISSING, 0 bytes DIFFER\n"


@pytest.mark.parametrize("arguments", [["write"], ["copy", "x"], ["--pages", "0"]])
def test_page_store_says_what_it_needs(arguments):
    done = run(PAGE_STORE, *arguments)
    assert done.returncode == 2
    assert "error: " in done.stderr
