"""One cell of the wheel matrix: runs tests against an installed sgl_kvio, writes what was seen.

    wheel_cell.py --tests FOLDER --within FOLDER --out CELL.json [--wheel NAME] [-- PYTEST...]

Runs in the Python that has sgl_kvio and pytest. The package has to be imported from inside --within
(site-packages of the environment, or the folder of pip install --target): tests that quietly run
against a source tree say nothing about a wheel. Exit status: pytest's, and 1 when no test passed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any


def seen_here() -> dict[str, Any]:
    import torch

    import sgl_kvio

    facts = sgl_kvio.capabilities()
    library = Path(sgl_kvio.__file__).with_name("_C.abi3.so")
    return {
        "file": sgl_kvio.__file__,
        "library_sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "backend": facts["backend"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def count(junit: Path) -> dict[str, int]:
    suites = xml.etree.ElementTree.parse(junit).getroot().iter("testsuite")
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    return {"passed": passed, "failed": failed, "skipped": total["skipped"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, required=True, help="folder outside the source tree")
    parser.add_argument("--within", type=Path, required=True, help="where sgl_kvio has to lie")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", default="", help="name of the wheel, for the record")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    given = parser.parse_args()

    facts = seen_here()
    print(f"sgl_kvio imported from {facts['file']}", flush=True)
    if given.within.resolve() not in Path(facts["file"]).resolve().parents:
        print(f"not from {given.within}: these tests would not be those of the wheel")
        return 1

    tests = given.tests.resolve()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", str(tests), *given.pytest, "-q", "-rfE"]
        command += ["-p", "no:cacheprovider", "--import-mode=importlib", f"--junitxml={junit}"]
        # tests/gpu alone has its conftest.py one folder up.
        command += [f"--rootdir={tests.parent}", f"--confcutdir={tests.parent}"]
        start = time.monotonic()
        status = subprocess.run(command, cwd=folder).returncode
        seconds = time.monotonic() - start
        counts = count(junit) if junit.exists() else {"passed": 0, "failed": 0, "skipped": 0}
    if status == 0 and counts["passed"] == 0:
        print("no test passed")
        status = 1
    record = {
        **{name: value for name, value in facts.items() if name != "file"},
        **counts,
        "wheel": given.wheel,
        "seconds": round(seconds),
        "cases": os.environ.get("KVIO_TEST_CASES"),
        "selection": " ".join(given.pytest),
        "folder": given.tests.name,
        "status": status,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
