"""bench/: a small CPU run gives a sound result file, notices wrong bytes, and can be drawn."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgl_kvio

BENCH = Path(__file__).resolve().parents[1] / "bench"
SMALL = ["--device", "cpu", "--quick", "--tokens", "128", "--layers", "2", "--pool-gib", "0.02"]
# A busy machine may be slow, but nothing is to be left out.
SMALL += ["--budget", "100"]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with this test's sgl_kvio, wherever it was imported from."""
    package_home = str(Path(sgl_kvio.__file__).resolve().parents[1])
    paths = [package_home, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.fixture(scope="module")
def result_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "small.json"
    done = run_python(str(BENCH / "transfer.py"), *SMALL, "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def result(result_path: Path) -> dict[str, Any]:
    return json.loads(result_path.read_text())


def test_every_record_has_positive_finite_ordered_rates(result: dict[str, Any]) -> None:
    assert result["records"]
    for record in result["records"]:
        low, middle, high = (record[f"gbps_{name}"] for name in ("min", "median", "max"))
        assert 0 < low <= middle <= high < math.inf
        assert record["repeats"] >= 7
        assert record["us_per_call"] > 0


def test_ratio_is_the_rate_over_the_ceiling_of_its_direction(result: dict[str, Any]) -> None:
    for record in result["records"]:
        ceiling = result["ceilings"][record["direction"]]["gbps_median"]
        assert record["ratio"] == pytest.approx(record["gbps_median"] / ceiling, rel=1e-4)


def test_rate_counts_every_payload_byte_once(result: dict[str, Any]) -> None:
    for record in result["records"]:
        layers = record["layers_per_call"]
        payload = record["tokens"] * record["row_bytes"] * record["buffers"] * layers
        rate = payload / (record["us_per_call"] * 1e3)
        assert record["gbps_median"] == pytest.approx(rate, rel=1e-3)


def test_nothing_is_left_out_of_a_small_run(result: dict[str, Any]) -> None:
    assert result["mismatches"] == result["refused"] == result["skipped"] == []
    seen = {(record["backend"], record["direction"]) for record in result["records"]}
    names = ("cpu", "torch_index", "torch_fancy")
    assert seen == {(name, direction) for name in names for direction in ("H2D", "D2H")}
    assert {cost["buffers"] for cost in result["call_costs"]} == {2, 64}


def test_result_names_its_machine_and_none_of_its_folders(result_path: Path) -> None:
    text = result_path.read_text()
    machine = json.loads(text)["machine"]
    assert machine["cpu"]
    assert machine["torch"]
    assert str(result_path.parent) not in text


def test_a_call_that_misses_one_row_fails_the_run(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import sgl_kvio
whole = sgl_kvio.transfer
def all_but_the_last_row(dst, src, dst_indices, src_indices, **options):
    whole(dst, src, dst_indices[:-1], src_indices[:-1], **options)
sgl_kvio.transfer = all_but_the_last_row
import transfer
sys.exit(transfer.main({[*SMALL, "--out", str(tmp_path / "wrong.json")]!r}))
"""
    done = run_python("-c", program)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((tmp_path / "wrong.json").read_text())
    assert {record["direction"] for record in result["mismatches"]} == {"H2D", "D2H"}
    assert all(record["backend"].startswith("torch") for record in result["records"])


@pytest.mark.parametrize("arguments", [["--tokens", "100"], ["--layers", "0"], ["--targets"]])
def test_bad_options_are_named(arguments: list[str]) -> None:
    done = run_python(str(BENCH / "transfer.py"), "--device", "cpu", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_plot_draws_a_result(result_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "small.png"
    done = run_python(str(BENCH / "plot.py"), str(result_path), "-o", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
