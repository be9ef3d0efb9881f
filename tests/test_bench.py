"""bench/: a small CPU run gives a sound result file, notices wrong bytes, and can be drawn."""

from __future__ import annotations

import itertools
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


# ----------------------------------------------------------------------- crossover, interference

TINY = ["--device", "cpu", "--quick", "--pool-gib", "0.02", "--budget", "100"]


def run_bench(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    done = run_python(str(BENCH / f"{name}.py"), *TINY, *arguments, "--out", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(path.read_text()), "path": path, "printed": done.stdout}


@pytest.fixture(scope="module")
def crossover(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_bench("crossover", tmp_path_factory.mktemp("crossover"))


@pytest.fixture(scope="module")
def interference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_bench("interference", tmp_path_factory.mktemp("interference"))


def test_crossover_measures_every_cell_by_every_backend(crossover: dict[str, Any]) -> None:
    assert crossover["mismatches"] == crossover["refused"] == crossover["skipped"] == []
    cells: dict[Any, set[str]] = {}
    for record in crossover["records"]:
        if record["section"] == "runs":
            assert 0 < record["gbps_min"] <= record["gbps_median"] <= record["gbps_max"] < math.inf
            key = (record["direction"], record["layout"], record["run_bytes"])
            cells.setdefault(key, set()).add(record["backend"])
    assert {key[:2] for key in cells} == {
        (direction, layout)
        for direction in ("H2D", "D2H")
        for layout in ("layer_first", "page_first")
    }
    assert len({key[2] for key in cells}) >= 4
    assert all(backends == {"cpu", "auto"} for backends in cells.values())


def test_crossover_compares_auto_with_the_best_backend_of_its_cell(
    crossover: dict[str, Any],
) -> None:
    rates = {
        (r["direction"], r["layout"], r["run_bytes"], r["backend"]): r["gbps_median"]
        for r in crossover["records"]
        if r["section"] == "runs"
    }
    assert len(crossover["auto"]) == len(rates) / 2
    for item in crossover["auto"]:
        cell = (item["direction"], item["layout"], item["run_bytes"])
        auto, cpu = (rates[(*cell, backend)] for backend in ("auto", "cpu"))
        assert item["share"] == pytest.approx(auto / cpu, rel=1e-4)


def test_crossover_times_calls_entries_and_loads_on_the_callers_thread(
    crossover: dict[str, Any],
) -> None:
    costs = crossover["call_costs"]
    assert all(cost["cpu_us_median"] > 0 for cost in costs)
    assert {cost["backend"] for cost in costs if "entries" not in cost} == {"cpu", "auto"}
    entries = {(cost["entries"], cost.get("submit")) for cost in costs if "entries" in cost}
    counts = {count for count, _ in entries}
    assert entries == {(count, who) for count in counts for who in (None, "caller", "thread")}


def test_crossover_times_the_first_and_the_last_layer_of_every_grouping(
    crossover: dict[str, Any],
) -> None:
    loads = crossover["loads"]
    assert {load["submit"] for load in loads} == {"caller", "thread"}
    assert len({load["group"] for load in loads}) >= 2
    for load in loads:
        assert 0 < load["us_layer_0"] <= load["us_last"]
        rate = load["payload_bytes"] / (load["us_last"] * 1e3)
        assert load["gbps_median"] == pytest.approx(rate, rel=1e-3)


def test_crossover_measures_the_sections_that_it_is_told_to(tmp_path: Path) -> None:
    result = run_bench("crossover", tmp_path, "--sections", "groups")
    assert result["sections"] == ["groups"]
    assert result["loads"]
    assert result["records"] == result["call_costs"] == result["auto"] == []


def test_interference_measures_every_transfer_beside_every_loop(
    interference: dict[str, Any],
) -> None:
    assert interference["mismatches"] == interference["refused"] == interference["skipped"] == []
    seen = {(r["loop"], r["direction"], r["provider"]) for r in interference["records"]}
    assert seen == {
        (loop, "H2D", provider)
        for loop in ("matmul", "decode")
        for provider in ("contiguous copy", "cpu")
    }
    for record in interference["records"]:
        assert record["covered"], "a transfer ran for only a part of the loop"
        assert record["gbps_alone"] > 0
        # A busy machine may give the transfer no turn during so short a loop: then there is no
        # rate, and never a zero.
        assert record["gbps_beside"] is None or record["gbps_beside"] > 0
        assert record["rounds"] == 3


def test_interference_ratios_lie_between_their_extremes(interference: dict[str, Any]) -> None:
    for record in interference["records"]:
        low, middle, high = (record[f"slowdown{end}"] for end in ("_min", "", "_max"))
        assert 0 < low <= middle <= high < math.inf
        assert record["alone_us"] > 0
        assert record["beside_us"] > 0


# ------------------------------------------------------------------------------------ write_back


@pytest.fixture(scope="module")
def write_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_bench("write_back", tmp_path_factory.mktemp("write_back"))


def records_of(result: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [record for record in result["records"] if record["section"] == section]


def test_write_back_compares_staged_direct_and_torch_for_every_layout_both_ways(
    write_back: dict[str, Any],
) -> None:
    assert write_back["mismatches"] == write_back["refused"] == write_back["skipped"] == []
    cells: dict[Any, set[str]] = {}
    for record in records_of(write_back, "shapes"):
        assert 0 < record["gbps_min"] <= record["gbps_median"] <= record["gbps_max"] < math.inf
        key = (record["direction"], record["layout"], record["kind"])
        cells.setdefault(key, set()).add(record["backend"])
    assert set(cells) == {
        (direction, layout, kind)
        for direction in ("H2D", "D2H")
        for layout in ("page_first", "page_first_direct")
        for kind in ("mha", "mla")
    }
    for backends in cells.values():
        assert backends >= {"staged", "cpu", "auto", "torch_pages"}


def test_write_back_names_the_staging_buffer_of_every_staged_figure(
    write_back: dict[str, Any],
) -> None:
    for record in write_back["records"]:
        least = record["page_bytes"] if record["backend"] == "staged" else 0
        assert record["staging_bytes"] >= least
        assert bool(record["staging_bytes"]) == (record["backend"] == "staged")
    swept = {
        record["staging_bytes"] // record["page_bytes"]
        for record in records_of(write_back, "staging")
    }
    assert len(swept) >= 3
    assert min(swept) == 1


def test_write_back_counts_every_byte_of_every_page_once(write_back: dict[str, Any]) -> None:
    for record in write_back["records"]:
        row_of_all_layers = record["row_bytes"] * record["buffers"] * record["layers_per_call"]
        assert record["page_bytes"] == record["page_size"] * row_of_all_layers
        rate = record["pages"] * record["page_bytes"] / (record["us_per_call"] * 1e3)
        assert record["gbps_median"] == pytest.approx(rate, rel=1e-3)


def test_write_back_times_single_calls_and_their_host_cost(write_back: dict[str, Any]) -> None:
    pages = records_of(write_back, "pages")
    assert len({record["pages"] for record in pages}) >= 2
    assert all(record["latency_us"] > 0 for record in pages)
    costs = write_back["call_costs"]
    assert {(cost["backend"], cost["direction"]) for cost in costs} == {
        (backend, direction)
        for backend in ("staged", "cpu", "auto")
        for direction in ("H2D", "D2H")
    }
    for cost in costs:
        a_page = cost["cpu_us_median"] / cost["pages"]
        assert cost["cpu_us_per_page"] == pytest.approx(a_page, rel=1e-4)


def test_write_back_runs_staged_and_direct_beside_both_products(
    write_back: dict[str, Any],
) -> None:
    seen = {
        (record["loop"], record["backend"])
        for record in write_back["beside"]
        if "backend" in record
    }
    assert seen == {
        (loop, backend) for loop in ("matmul", "decode") for backend in ("staged", "cpu", "auto")
    }
    for record in write_back["beside"]:
        assert 0 < record["slowdown_min"] <= record["slowdown"] <= record["slowdown_max"]
        assert record["covered"], "a transfer ran for only a part of the loop"


def test_write_back_measures_the_sections_that_it_is_told_to(tmp_path: Path) -> None:
    result = run_bench("write_back", tmp_path, "--sections", "staging")
    assert result["sections"] == ["staging"]
    assert {record["section"] for record in result["records"]} == {"staging"}
    assert result["call_costs"] == result["beside"] == []


# --------------------------------------------------------------------------------------- swap_in


@pytest.fixture(scope="module")
def swap_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_bench("swap_in", tmp_path_factory.mktemp("swap_in"))


def test_swap_in_measures_every_row_size_batch_and_count_of_misses(
    swap_in: dict[str, Any],
) -> None:
    assert swap_in["mismatches"] == swap_in["refused"] == swap_in["skipped"] == []
    rows = records_of(swap_in, "rows")
    axes = [
        {record[name] for record in rows} for name in ("row_words", "hot_slots", "batch", "misses")
    ]
    assert "576 + 8 B" in axes[0]
    assert all(len(values) >= 2 for values in axes)
    assert len(rows) == math.prod(map(len, axes))


def test_swap_in_counts_every_missing_byte_once(swap_in: dict[str, Any]) -> None:
    for record in swap_in["records"]:
        assert 0 < record["us_min"] <= record["us_per_call"] <= record["us_max"] < math.inf
        row = 0 if record["way"] == "resolve" else sum(record["row_bytes"])
        payload = record["batch"] * record["misses"] * row
        assert record["payload_bytes"] == payload
        rate = payload / (record["us_per_call"] * 1e3)
        assert record["gbps_median"] == pytest.approx(rate, rel=1e-3)
        ceiling = swap_in["ceilings"]["H2D"]["gbps_median"]
        assert record["ratio"] == pytest.approx(record["gbps_median"] / ceiling, rel=1e-4)
        assert record["latency_us"] > 0
        assert not record["host_bound"]


def test_swap_in_stands_beside_its_parts_and_torch(swap_in: dict[str, Any]) -> None:
    ways = {"swap_in", "record", "resolve", "copy_planned", "torch"}
    cells: dict[Any, set[str]] = {}
    for record in records_of(swap_in, "ways"):
        key = (record["row_words"], record["batch"], record["misses"])
        cells.setdefault(key, set()).add(record["way"])
    assert len(cells) >= 4
    assert all(seen == ways for seen in cells.values())
    costs = {(cost["way"], cost["row_words"]) for cost in swap_in["call_costs"]}
    assert costs == {
        (way, rows)
        for way in ("swap_in", "record", "copy_planned")
        for rows in ("512 B", "576 + 8 B")
    }


def test_swap_in_reads_rows_from_every_place_of_pools_of_both_sizes(
    swap_in: dict[str, Any],
) -> None:
    hosts = records_of(swap_in, "hosts")
    places = {(record["pattern"], record["layout"]) for record in hosts}
    patterns = ("sequential", "region", "random")
    assert places == set(itertools.product(patterns, ("flat", "page_first")))
    assert len({record["span_bytes"] for record in hosts}) == 2
    for record in hosts:
        assert (record["pool_layers"] > 1) == (record["layout"] == "page_first")


def test_swap_in_measures_the_sections_that_it_is_told_to(tmp_path: Path) -> None:
    result = run_bench("swap_in", tmp_path, "--sections", "cpu")
    assert result["sections"] == ["cpu"]
    assert result["call_costs"]
    assert result["records"] == []


def run_bench_program(program: str) -> subprocess.CompletedProcess[str]:
    """Runs lines of Python that may import the modules of bench/."""
    return run_python("-c", f"import sys\nsys.path.insert(0, {str(BENCH)!r})\n{program}")


def test_swap_in_sets_every_promised_figure_beside_its_floor() -> None:
    done = run_bench_program("""
import json
import torch
import swap_in as bench
from common import MIB, Arena, measure_ceilings
from jobs import Recorder
cpu = torch.device("cpu")
arena = Arena(cpu, 8 * MIB)
ceilings = measure_ceilings(cpu, MIB)
run = Recorder(arena, ceilings=ceilings, bytes_per_repeat=MIB, budget_s=60, seed=1)
small = [bench.Figure(512, 1, 2, 1e9, None), bench.Figure(512, 2, 26, 1e-9, 5.0)]
small.append(bench.Figure(512, 2, 2, None, None, "copy_planned"))
figures = bench.measure_figures(bench.Bench(run, bench.cpu_sizes(arena, True)), small)
bench.print_figures(figures)
promised = [figure for figure in bench.FIGURES if figure.target_us]
rows = [(f.row, f.batch, f.misses, f.way, f.target_us) for f in promised]
print(json.dumps([figures, bench.verdicts_of(figures), rows]))
""")
    assert done.returncode == 0, done.stdout + done.stderr
    figures, verdicts, promised = json.loads(done.stdout.splitlines()[-1])
    assert [item["verdict"] for item in verdicts] == ["PASS", "MISS"]
    for figure in figures:
        parts = (figure["launch_us"], figure["host_read_us"], figure["link_us"])
        assert all(part > 0 for part in parts)
        assert figure["floor_us"] == pytest.approx(sum(parts))
        assert figure["us"] > 0
        assert figure["beside_us"]["sequential"] > 0
    assert len(promised) == 13
    assert [512, 100, 410, "swap_in", 425] in promised
    assert [512, 100, 2, "copy_planned", 9] in promised


def test_swap_in_fails_when_rows_stay_away_or_a_call_misses_too_few(tmp_path: Path) -> None:
    wrong_bytes = "swap_in = lambda *a, skip_io=False, **o: whole(*a, skip_io=True, **o)"
    wrong_count = """
def swap_in(top_k, *rest, **options):
    whole(top_k.clone().fill_(top_k[0, 0]), *rest, **options)"""
    for name, patch in (("bytes", wrong_bytes), ("count", wrong_count)):
        out = tmp_path / f"{name}.json"
        arguments = [*TINY, "--sections", "ways", "--out", str(out)]
        done = run_bench_program(f"""
import sgl_kvio
whole = sgl_kvio.swap_in
{patch}
sgl_kvio.swap_in = swap_in
import swap_in
sys.exit(swap_in.main({arguments!r}))
""")
        assert done.returncode == 1, done.stdout + done.stderr
        result = json.loads(out.read_text())
        # What does not copy cannot be told from one that does in what only resolves.
        right = {"bytes": {"resolve", "copy_planned", "torch"}, "count": set()}[name]
        assert {record["way"] for record in result["records"]} == right
        assert result["mismatches"]


# ----------------------------------------------------------------------------------- load_layers


@pytest.fixture(scope="module")
def load_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_bench("load_layers", tmp_path_factory.mktemp("load_layers"))


LOAD_WAYS = {"load_layers", "load_layers, lists", "transfer a layer"}


def test_load_layers_stands_beside_one_transfer_a_layer(load_layers: dict[str, Any]) -> None:
    assert load_layers["mismatches"] == load_layers["refused"] == load_layers["skipped"] == []
    cells: dict[int, set[str]] = {}
    for record in records_of(load_layers, "tokens"):
        cells.setdefault(record["tokens"], set()).add(record["way"])
    assert len(cells) >= 2
    assert all(ways == LOAD_WAYS for ways in cells.values())
    rows = records_of(load_layers, "rows")
    places = {(record["row_bytes"], record["layout"], record["pattern"]) for record in rows}
    assert len(rows) == 2 * len(places)
    assert {layout for _, layout, _ in places} == {
        "layer_first",
        "page_first",
        "page_first_direct",
    }


def test_load_layers_times_layer_0_the_last_layer_and_every_byte(
    load_layers: dict[str, Any],
) -> None:
    ceiling = load_layers["ceilings"]["H2D"]["gbps_median"]
    for record in load_layers["records"]:
        assert 0 < record["us_layer_0"] <= record["us_last"] < math.inf
        assert 0 < record["gbps_min"] <= record["gbps_median"] <= record["gbps_max"] < math.inf
        row = record["row_bytes"] * record["buffers"] * record["pool_layers"]
        rate = record["tokens"] * row / (record["us_per_call"] * 1e3)
        assert record["gbps_median"] == pytest.approx(rate, rel=1e-3)
        assert record["ratio"] == pytest.approx(record["gbps_median"] / ceiling, rel=1e-4)


def test_load_layers_times_loads_and_waits_on_the_host(load_layers: dict[str, Any]) -> None:
    assert {cost["way"] for cost in load_layers["call_costs"]} == LOAD_WAYS
    for cost in load_layers["call_costs"]:
        assert cost["load"]["cpu_us_median"] > 0
        assert cost["waits"]["cpu_us_median"] > 0


def test_load_layers_measures_the_sections_that_it_is_told_to(tmp_path: Path) -> None:
    result = run_bench("load_layers", tmp_path, "--sections", "cpu")
    assert result["sections"] == ["cpu"]
    assert result["call_costs"]
    assert result["records"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "whole(dst, src, at[:-1], frm[:-1], flags, epoch, **options)",
        "whole([d[:-1] for d in dst], [s[:-1] for s in src], at, frm, flags, epoch, **options)",
    ],
    ids=["a row", "a layer"],
)
def test_load_layers_fails_when_a_row_or_a_layer_stays_away(wrong: str, tmp_path: Path) -> None:
    out = tmp_path / "wrong.json"
    arguments = [*TINY, "--sections", "tokens", "--out", str(out)]
    done = run_bench_program(f"""
import sgl_kvio
whole = sgl_kvio.load_layers
def load_layers(dst, src, at, frm, flags, epoch, **options):
    {wrong}
    flags[0] = epoch
sgl_kvio.load_layers = load_layers
import load_layers
sys.exit(load_layers.main({arguments!r}))
""")
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert {record["way"] for record in result["mismatches"]} == LOAD_WAYS - {"transfer a layer"}
    assert {record["way"] for record in result["records"]} == {"transfer a layer"}


def test_load_layers_sets_every_promised_figure_beside_one_launch_a_layer() -> None:
    done = run_bench_program("""
import json
import torch
import load_layers as bench
from common import MIB, Arena, measure_ceilings
from jobs import Recorder
from dataclasses import replace
cpu = torch.device("cpu")
arena = Arena(cpu, 8 * MIB)
ceilings = measure_ceilings(cpu, MIB)
run = Recorder(arena, ceilings=ceilings, bytes_per_repeat=MIB, budget_s=60, seed=1)
class Options:
    mode, device = "targets", cpu
bench.TRANSFER = replace(bench.TRANSFER, backend="cpu")
verdicts = bench.measure_targets(bench.Bench(run, bench.sizes_for(Options, arena)))
print(json.dumps(verdicts))
""")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert verdicts[0]["target"] == 15
    assert len(verdicts) == 1 + 3 * 2
    assert all(item["value"] > 0 for item in verdicts)


# ------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "name", ["crossover", "interference", "write_back", "swap_in", "load_layers"]
)
def test_every_result_is_drawn_and_names_none_of_its_folders(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)["path"]
    assert str(path.parent) not in path.read_text()
    pytest.importorskip("matplotlib")
    picture = tmp_path / "small.png"
    done = run_python(str(BENCH / "plot.py"), str(path), "-o", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["crossover", "interference", "write_back"])
def test_other_benches_fail_when_a_call_misses_a_row(name: str, tmp_path: Path) -> None:
    out = tmp_path / "wrong.json"
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import sgl_kvio
from sgl_kvio import ops
def cut(whole):
    def all_but_the_last_row(dst, src, dst_indices, src_indices, **options):
        whole(dst, src, dst_indices[:-1], src_indices[:-1], **options)
    return all_but_the_last_row
sgl_kvio.transfer = ops.transfer = cut(sgl_kvio.transfer)
sgl_kvio.transfer_staged = cut(sgl_kvio.transfer_staged)
import {name}
sys.exit({name}.main({[*TINY, "--out", str(out)]!r}))
"""
    done = run_python("-c", program)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["mismatches"]
    assert result.get("loads", []) == []
    right = [*result["records"], *result.get("beside", [])]
    whole = ("torch_pages", "torch_index")
    assert all(r.get("provider") == "contiguous copy" or r["backend"] in whole for r in right)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("crossover", ["--sections", "runs,magic"], "magic"),
        ("crossover", ["--targets"], "needs a GPU"),
        ("write_back", ["--sections", "shapes,magic"], "magic"),
        ("write_back", ["--targets"], "needs a GPU"),
        ("swap_in", ["--sections", "rows,magic"], "magic"),
        ("swap_in", ["--targets"], "needs a GPU"),
        ("load_layers", ["--sections", "tokens,magic"], "magic"),
        ("load_layers", ["--targets"], "needs a GPU"),
        ("interference", ["--rounds", "2"], "--rounds"),
    ],
)
def test_bad_options_of_other_benches_are_named(name: str, arguments: list[str], text: str) -> None:
    done = run_python(str(BENCH / f"{name}.py"), "--device", "cpu", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
