"""The file of measured rates: who reads it, when it is passed over, and what calibrate stores."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sgl_kvio
from reference import assert_same_bytes
from sgl_kvio import calibrate, ops, rates
from sgl_kvio.__main__ import main
from sgl_kvio.demo import Progress

NUM_RATES = 3 * 2 * 2 * 14
ABOUT = {"sgl_kvio": "0.1.0", "gpu": "A GPU", "driver": 13000, "date": "2026-01-01"}


@pytest.fixture(autouse=True)
def leave_the_table_alone():
    before, source = ops.get_rates(), ops.capabilities()["rates"]
    yield
    ops.set_rates(before if source != "built-in" else [], source)


def some_rates():
    return [float(i % 57) for i in range(NUM_RATES)]


def stored(**changes):
    """What calibrate writes, with changes; a value of None takes the entry away."""
    content = {"schema": 1, **ABOUT, "rates": rates.unflatten(some_rates()), **changes}
    return {key: value for key, value in content.items() if value is not None}


def with_row(row):
    table = rates.unflatten(some_rates())
    table["tma"]["D2H"]["packed"] = row
    return table


# -------------------------------------------------------------------------------------------------
# The ops


def test_rates_come_back_as_they_were_set():
    ops.set_rates(some_rates(), source="here")
    assert ops.get_rates() == some_rates()
    assert sgl_kvio.capabilities()["rates"] == "here"
    ops.set_rates(range(NUM_RATES))
    assert ops.get_rates() == [float(i) for i in range(NUM_RATES)]
    ops.set_rates([])
    assert ops.get_rates() != some_rates()
    assert sgl_kvio.capabilities()["rates"] == "built-in"


@pytest.mark.parametrize("wrong", [[1.0], [float("nan")] * NUM_RATES, [-1.0] * NUM_RATES])
def test_rates_that_are_none_are_refused_and_change_nothing(wrong):
    before = ops.get_rates()
    with pytest.raises(RuntimeError, match="kvio::set_rates: rates"):
        ops.set_rates(wrong, source="nowhere")
    assert ops.get_rates() == before
    assert sgl_kvio.capabilities()["rates"] != "nowhere"


def test_the_names_of_python_and_the_table_of_cpp_have_one_size():
    assert len(ops.get_rates()) == NUM_RATES
    assert rates.flatten(rates.unflatten(some_rates())) == some_rates()
    assert [c.backend for c in calibrate.cells()][::56] == list(rates.BACKENDS)


# -------------------------------------------------------------------------------------------------
# Reading


def import_with(cache, program="", **env):
    """Imports the package with `cache` as the XDG cache folder; (capabilities' rates, stderr)."""
    code = f"import sgl_kvio\n{program}\nprint(sgl_kvio.capabilities()['rates'])"
    home = str(Path(sgl_kvio.__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths, **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def put(cache, content):
    path = cache / "sgl_kvio" / "rates-v1.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_importing_reads_the_table_of_the_cache(tmp_path):
    # The GPU of this machine, if it has one: a table of another one would be passed over.
    model = next(iter(rates.gpu_models()), "A GPU")
    path = put(tmp_path, stored(gpu=model))
    check = f"assert sgl_kvio.get_rates() == {some_rates()}"
    assert import_with(tmp_path, check) == (str(path), "")


def test_without_a_table_the_built_in_one_serves_silently(tmp_path):
    assert import_with(tmp_path) == ("built-in", "")
    assert import_with(tmp_path / "nowhere") == ("built-in", "")


def test_without_a_home_the_built_in_one_serves_silently():
    assert import_with("", HOME="") == ("built-in", "")


def test_a_table_that_cannot_be_used_warns_once_and_the_built_in_one_serves(tmp_path):
    path = put(tmp_path, "{")
    source, warning = import_with(tmp_path)
    assert source == "built-in"
    assert warning.count("UserWarning") == 1
    assert str(path) in warning
    assert "python -m sgl_kvio calibrate" in warning


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "no JSON object"),
        ("null", "no JSON object"),
        (stored(schema=0), "schema is 0"),
        (stored(schema=2), "schema is 2"),
        (stored(schema=None), "schema is None"),
        (stored(rates=None), "register, H2D, packed: it needs a list of 14"),
        (stored(rates=[1, 2]), "register, H2D, packed: it needs a list of 14"),
        (stored(rates={"register": 3}), "register, H2D, packed: it needs a list of 14"),
        (stored(rates=with_row([1.0] * 13)), "tma, D2H, packed: it needs a list of 14"),
        (stored(rates=with_row([1.0] * 15)), "tma, D2H, packed: it needs a list of 14"),
        (stored(rates=with_row(["fast"] * 14)), "'fast' is no number"),
        (stored(rates=with_row([None] * 14)), "None is no number"),
        (stored(rates=with_row([True] * 14)), "True is no number"),
        (stored(rates=with_row([float("nan")] * 14)), "nan is not a rate"),
        (stored(rates=with_row([float("inf")] * 14)), "inf is not a rate"),
        (stored(rates=with_row([10**400] * 14)), "inf is not a rate"),
        (stored(rates=with_row([-0.1] * 14)), "-0.1 is not a rate"),
        (stored(gpu="Another"), "measured on 'Another', and this machine has A GPU, B GPU"),
        (stored(gpu=None), "measured on None"),
    ],
)
def test_what_must_not_be_used_is_refused_with_the_reason(tmp_path, content, why):
    path = put(tmp_path, content)
    with pytest.raises(rates.UnusableRatesError) as error:
        rates.read(path, {"B GPU", "A GPU"})
    assert why in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "rates"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(rates.UnusableRatesError, match="cannot be read"):
        rates.read(path, set())


@pytest.mark.parametrize("models", [set(), {"A GPU"}, {"A GPU", "B GPU"}])
def test_a_table_of_this_machine_is_read(tmp_path, models):
    assert rates.read(put(tmp_path, stored()), models) == some_rates()


def test_gpu_models_are_read_from_the_drivers_files(tmp_path):
    for number, model in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 24\n")
    assert rates.gpu_models(tmp_path) == {"NVIDIA H200", "NVIDIA L4"}
    assert rates.gpu_models(tmp_path / "nowhere") == set()


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for unset in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert rates.cache_path() == Path("/home/someone/.cache/sgl_kvio/rates-v1.json")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert rates.cache_path() == Path("/cache/sgl_kvio/rates-v1.json")


def test_importing_never_initializes_cuda_for_the_table(tmp_path):
    put(tmp_path, stored(gpu=next(iter(rates.gpu_models()), "A GPU")))
    import_with(tmp_path, "import torch; assert not torch.cuda.is_initialized()")


# -------------------------------------------------------------------------------------------------
# Writing


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "deep" / "folder" / "rates.json"
    rates.write(path, rates.unflatten(some_rates()), ABOUT)
    assert rates.read(path, {"A GPU"}) == some_rates()
    content = json.loads(path.read_text())
    assert {key: content[key] for key in ABOUT} == ABOUT
    assert content["schema"] == 1
    assert content["run_bytes"] == [512 << k for k in range(14)]
    assert [p.name for p in path.parent.iterdir()] == ["rates.json"]


def test_a_table_that_could_not_be_read_is_not_written(tmp_path):
    path = put(tmp_path, stored())
    with pytest.raises(rates.UnusableRatesError):
        rates.write(path, with_row([float("nan")] * 14), ABOUT)
    assert rates.read(path, set()) == some_rates()


# -------------------------------------------------------------------------------------------------
# Measuring

SMALL = calibrate.Sizes(pool_bytes=9 << 20, call_bytes=1 << 20, max_entries=64, calls=1, repeats=1)


@pytest.fixture(scope="module")
def arena():
    made = calibrate.Arena(SMALL, torch.device("cpu"))
    yield made
    made.close()


def on_cpu(cell, monkeypatch):
    """The calls of a cell, which names a GPU backend, served by the CPU."""

    def transfer(*arguments, **options):
        assert options.pop("backend") == cell.backend
        on_cpu.seen = (arguments, options)
        sgl_kvio.transfer(*arguments, **options)

    monkeypatch.setattr(calibrate, "transfer", transfer)


@pytest.mark.parametrize("cell", list(calibrate.cells()), ids=str)
def test_every_cell_moves_the_bytes_that_it_counts_in_runs_of_its_length(arena, cell, monkeypatch):
    on_cpu(cell, monkeypatch)
    call, nbytes = arena.call(cell)
    written, read = arena.on_device, arena.host
    if cell.direction == "D2H":
        written, read = read, written
    read.fill_(1)
    written.zero_()
    call()
    assert int(written.sum(dtype=torch.int64)) == nbytes
    # Runs only join by chance, when random pages happen to follow each other.
    (dst, src, to, frm), options = on_cpu.seen
    text = sgl_kvio.explain(dst, src, to, frm, **options)
    entries, average = (
        int(word) for word in text.split("entries: ")[1].split(" bytes")[0].split(", ")
    )
    assert entries * average <= nbytes
    assert cell.run_bytes <= average <= max(1.5 * cell.run_bytes, nbytes / 2 + 1)
    if cell.backend == "copy_engine" and cell.run_bytes < 16 << 10:
        assert nbytes // cell.run_bytes <= max(SMALL.max_entries, 64)


def test_a_table_has_a_figure_of_every_cell_in_its_place():
    order = {cell: float(i % 50) for i, cell in enumerate(calibrate.cells())}
    stream = io.StringIO()
    table = calibrate.measure_table(order.__getitem__, Progress(NUM_RATES, stream))
    assert rates.flatten(table) == list(order.values())
    assert (
        table["tma"]["D2H"]["rows_apart"][3]
        == order[calibrate.Cell("tma", "D2H", "rows_apart", 4096)]
    )
    assert stream.getvalue().count("\n") == 12
    text = calibrate.as_text(table)
    assert len(text.splitlines()) == 2 * 15
    assert "copy_engine D2H" in text


def test_a_backend_that_refuses_has_no_rate(arena):
    """Without a GPU every backend of the table refuses, and nothing else fails."""
    cell = calibrate.Cell("tma", "H2D", "packed", 4096)
    assert calibrate.measure_gbps(arena, cell, SMALL) == 0


def test_an_error_that_is_no_refusal_is_not_taken_for_one(arena, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("kvio::transfer: copying failed")

    monkeypatch.setattr(calibrate, "transfer", broken)
    with pytest.raises(RuntimeError, match="copying failed"):
        calibrate.measure_gbps(arena, calibrate.Cell("tma", "H2D", "packed", 4096), SMALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds without a GPU")
@pytest.mark.parametrize("arguments", [[], ["--quick"], ["--out", "table.json"]])
def test_without_a_gpu_calibrate_says_so_and_stores_nothing(
    arguments, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "no GPU" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_calibrate_stores_what_it_measured(tmp_path, monkeypatch, capsys):
    """All but the measuring, which needs a GPU."""
    table = rates.unflatten(some_rates())
    monkeypatch.setattr(calibrate, "_measure_on_gpu", lambda sizes: table)
    monkeypatch.setattr(calibrate, "about_this_machine", lambda: ABOUT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate, "capabilities", lambda: {"backend": "cuda"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    path = tmp_path / "sgl_kvio" / "rates-v1.json"
    assert rates.read(path, {"A GPU"}) == some_rates()
    assert str(path) in capsys.readouterr().out
    assert main(["calibrate", "--out", str(tmp_path / "other.json")]) == 0
    assert rates.read(tmp_path / "other.json", set()) == some_rates()
    assert main(["calibrate", "--out", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_pool_that_does_not_fit_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    huge = calibrate.Sizes(1 << 60, 1 << 20, 64, 1, 1)
    with pytest.raises(MemoryError, match="--quick"):
        calibrate.Arena(huge, torch.device("cpu"))


def test_the_demo_and_the_doctor_know_the_table():
    from sgl_kvio import doctor

    assert doctor.collect()["binary"]["rates"] == ops.capabilities()["rates"]


def test_moving_rows_is_the_same_under_any_table():
    dst, src = torch.zeros(8, 2, 4), torch.rand(8, 2, 4)
    ops.set_rates([0.0] * NUM_RATES)
    at = torch.arange(8)
    sgl_kvio.transfer(dst, src, at, at, prefer="quiet")
    assert_same_bytes(dst, src, "destination")
