"""The command line on a CPU: output, exit status, and that it sees bytes moved wrongly."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sgl_kvio
from sgl_kvio import demo, doctor, loader, ops
from sgl_kvio.__main__ import main
from sgl_kvio.layouts import combinations

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the demo needs transformers: pip install 'sgl_kvio[demo]'",
)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what holds without a GPU")


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m sgl_kvio ...` away from the source tree, with the package imported here."""
    home = str(Path(sgl_kvio.__file__).resolve().parent.parent)
    paths = [home, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "sgl_kvio", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"Rows leave the device pool and come back unchanged. " * 20)
    return path


@pytest.fixture
def tiny_demo(text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a tiny CPU demo in this process; gives the exit status and stdout's last line."""
    monkeypatch.setattr(demo, "CEILING_BYTES", 1 << 20)
    monkeypatch.setattr(demo, "TIMED_REPEATS", 1)

    def run(*arguments: str) -> tuple[int, str]:
        sizes = ["--tokens", "192", "--page-size", "16", "--chunk", "64", "--decode", "3"]
        where = ["--model", "tiny", "--device", "cpu", "--text", str(text_file)]
        status = main(["demo", *where, *sizes, *arguments])
        run.lines = capsys.readouterr().out.splitlines()
        return status, run.lines[-1]

    return run


# -------------------------------------------------------------------------------------------------
# The command line itself


def test_no_command_prints_help_and_fails(tmp_path: Path) -> None:
    result = run_cli(cwd=tmp_path)
    assert result.returncode == 2
    assert "demo" in result.stdout
    assert "doctor" in result.stdout
    assert "calibrate" in result.stdout


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"sgl_kvio {sgl_kvio.__version__}"


def run_unread(*arguments: str) -> tuple[int, str]:
    """Exit status and stderr of `python -m sgl_kvio ...` whose reader is gone already."""
    unread, stdout = os.pipe()
    os.close(unread)
    home = str(Path(sgl_kvio.__file__).resolve().parent.parent)
    result = subprocess.run(
        [sys.executable, "-m", "sgl_kvio", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
        timeout=300,
        # Buffered as in most shells: then the error waits until the last flush.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    os.close(stdout)
    return result.returncode, result.stderr


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"]])
def test_a_reader_that_went_away_ends_the_command_without_a_traceback(arguments) -> None:
    assert run_unread(*arguments) == (141, "")


@needs_transformers
def test_a_reader_that_went_away_ends_the_demo_without_a_traceback(text_file: Path) -> None:
    sizes = ["--tokens", "64", "--chunk", "64", "--decode", "1"]
    where = ["--model", "tiny", "--device", "cpu", "--text", str(text_file)]
    status, stderr = run_unread("demo", *where, *sizes)
    assert status == 141
    assert {line[0] for line in stderr.splitlines()} == {"["}  # progress and nothing else


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_help_of_a_command_needs_no_transformers(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert command in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------
# doctor


def test_doctor_prints_every_section(tmp_path: Path) -> None:
    result = run_cli("doctor", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    sections = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert sections == ["versions", "binary", "devices", "memory", "environment", "choices"]
    assert sgl_kvio.__version__ in result.stdout


def test_doctor_json_has_a_choice_for_every_common_shape_and_layout(tmp_path: Path) -> None:
    result = run_cli("doctor", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert report["binary"]["backend"] in ("cpu", "cuda", "rocm")
    choices = report["choices"]
    rows = {(choice["kind"], choice["row_bytes"]) for choice in choices}
    assert rows == {("mha", 512), ("mha", 1024), ("mha", 2048), ("mla", 576), ("mla", 1152)}
    layouts = {(choice["kind"], choice["layout"]) for choice in choices}
    assert layouts == {pair for pair in combinations() if pair[0] in ("mha", "mla")}
    assert all("backend: " in choice["restore_layer"] for choice in choices)
    assert all("backend: " in choice["write_back"] for choice in choices)


@without_gpu
def test_doctor_without_a_gpu_does_not_initialize_cuda() -> None:
    report = doctor.collect()
    assert report["devices"] == []
    assert {choice["device"] for choice in report["choices"]} == {"cpu"}
    assert not torch.cuda.is_initialized()


def test_doctor_reports_a_failing_section_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no such meminfo")

    monkeypatch.setattr(doctor, "memory_limits", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "failed: OSError: no such meminfo" in out
    assert "rows of 2048 B" in out


def test_doctor_reports_a_pool_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise MemoryError("HostKVPool: too large")

    monkeypatch.setattr(doctor, "HostKVPool", refused)
    assert main(["doctor"]) == 1
    assert "failed: HostKVPool: too large" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------
# demo: what it accepts


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "3"], "--tokens got 3"),
        (["--tokens", "-5"], "--tokens got -5"),
        (["--page-size", "0"], "--page-size got 0"),
        (["--chunk", "0"], "--chunk got 0"),
        (["--decode", "-1"], "--decode got -1"),
        (["--seed", "-1"], "--seed got -1"),
        (["--num-blocks", "-1"], "--num-blocks got -1"),
        (["--seed", str(2**64)], f"--seed got {2**64}, needs at most {2**64 - 1}"),
        (["--num-blocks", "65536"], "--num-blocks 65536: kvio::explain: num_blocks"),
        (["--num-blocks", str(2**70)], f"--num-blocks {2**70}: kvio::explain: num_blocks"),
        (["--text", "no/such/file"], "--text no/such/file"),
        (["--tokens", "1000000000000"], "--tokens 1000000000000: both pools need"),
    ],
)
def test_bad_option_exits_2_and_is_named(
    arguments: list[str], named: str, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["demo", "--model", "tiny", "--device", "cpu", "--text", str(text_file), *arguments]
    assert main(given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"sgl_kvio demo: {named}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--model", "gpt-9"], ["--device", "tpu"], ["--layout", "diagonal"], ["--tokens", "many"]],
)
def test_unknown_choice_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2


def test_empty_text_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    arguments = ["--device", "cpu", "--text", str(tmp_path / "empty")]
    assert main(["demo", "--model", "tiny", *arguments]) == 2
    assert "the file is empty" in capsys.readouterr().err


@without_gpu
def test_cuda_without_a_gpu_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_missing_transformers_exits_2_and_says_what_to_install(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo", "--model", "tiny", "--device", "cpu", "--text", str(text_file)]) == 2
    assert "pip install 'sgl_kvio[demo]'" in capsys.readouterr().err


@needs_transformers
def test_old_transformers_exits_2_and_says_what_to_install(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.0.0")
    assert main(["demo", "--model", "tiny", "--device", "cpu", "--text", str(text_file)]) == 2
    message = capsys.readouterr().err
    assert "5.17 or newer, found 5.0.0: pip install 'sgl_kvio[demo]'" in message


def test_unknown_backend_exits_2_with_the_ops_words_before_there_is_a_model(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "Decoder", lambda *args: pytest.fail("a model was built"))
    monkeypatch.setattr(demo, "HostKVPool", lambda *args, **kw: pytest.fail("a pool was made"))
    arguments = ["--device", "cpu", "--text", str(text_file), "--backend", "pigeon"]
    assert main(["demo", "--model", "tiny", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("sgl_kvio demo: --backend pigeon: kvio::explain: backend")


def test_text_defaults_to_the_description_away_from_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Metadata:
        json = {"description": "moves rows"}  # noqa: RUF012

    monkeypatch.setattr(demo, "__file__", str(tmp_path / "sgl_kvio" / "demo.py"))
    (tmp_path / "README.md").write_text("a stray file of another package")
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: Metadata())
    assert demo.read_text(None) == (b"moves rows", "the package's description")


def test_text_defaults_to_the_readme_of_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "sgl_kvio" / "demo.py"))
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "pyproject.toml").touch()
    assert demo.read_text(None) == (b"read me", "README.md")


@pytest.mark.parametrize("model", demo.MODELS)
def test_scaling_for_the_cpu_keeps_the_row(model: str) -> None:
    shape = demo.MODELS[model]
    scaled = demo.scaled_for_cpu(shape)
    assert scaled.row_bytes == shape.row_bytes
    assert scaled.head_dim == shape.head_dim
    assert scaled.heads % scaled.kv_heads == 0
    assert scaled.layers <= shape.layers


# -------------------------------------------------------------------------------------------------
# demo: what it finds


@needs_transformers
def test_demo_ends_with_logits_identical(tmp_path: Path, text_file: Path) -> None:
    sizes = ["--tokens", "512", "--chunk", "128", "--decode", "4"]
    where = ["--model", "tiny", "--device", "cpu", "--text", str(text_file)]
    result = run_cli("demo", *where, *sizes, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "logits identical"
    assert result.stdout.endswith("\n")
    names = {line.split()[0] for line in result.stdout.splitlines()}
    assert {"machine", "model", "text", "moved", "write-back", "restore", "recompute"} <= names
    assert "131,072 bytes each way" in result.stdout  # 512 tokens, 2 layers, K and V of 64 B
    assert "\r" not in result.stderr


@needs_transformers
@pytest.mark.parametrize("layout", demo.LAYOUTS)
def test_every_layout_brings_the_cache_back(tiny_demo, layout: str) -> None:
    assert tiny_demo("--layout", layout) == (0, "logits identical")


@needs_transformers
@pytest.mark.parametrize(
    "sizes",
    [
        ["--tokens", "200", "--page-size", "16", "--chunk", "72"],
        ["--tokens", "7", "--page-size", "7", "--chunk", "1"],
        ["--tokens", "64", "--page-size", "1", "--chunk", "500", "--decode", "0"],
    ],
    ids=["rounded-down", "one-page", "one-token-pages"],
)
def test_odd_sizes_bring_the_cache_back(tiny_demo, sizes: list[str]) -> None:
    assert tiny_demo(*sizes) == (0, "logits identical")


@needs_transformers
def test_demo_leaves_torchs_settings_and_random_state_alone(tiny_demo) -> None:
    state = torch.random.get_rng_state()
    assert tiny_demo()[0] == 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def flip_a_byte(buffer: torch.Tensor, slot: int) -> None:
    """Changes the sign and the exponent of one element of a `[slots, heads, head_dim]` view."""
    element = buffer[slot, 0, :1].view(torch.uint8)
    element[1] ^= 0xFF


@needs_transformers
def test_a_byte_restored_wrongly_is_found(tiny_demo, monkeypatch: pytest.MonkeyPatch) -> None:
    real_transfer = ops.transfer

    def corrupting(dst, src, dst_indices, src_indices, **options) -> None:
        real_transfer(dst, src, dst_indices, src_indices, **options)
        flip_a_byte(dst[0], int(dst_indices[0]) * options["page_size"])

    monkeypatch.setattr(ops, "transfer", corrupting)  # the loader calls it through the module
    status, last = tiny_demo()
    assert status == 1
    assert last.startswith("logits DIFFER: next chunk, position 0: ")


@needs_transformers
def test_a_byte_written_back_wrongly_is_found(tiny_demo, monkeypatch: pytest.MonkeyPatch) -> None:
    real_transfer = demo.transfer

    def corrupting(dst, src, dst_indices, src_indices, **options) -> None:
        real_transfer(dst, src, dst_indices, src_indices, **options)
        flip_a_byte(dst[-1], int(dst_indices[-1]) * options["page_size"])

    monkeypatch.setattr(demo, "transfer", corrupting)
    status, last = tiny_demo()
    assert status == 1
    assert last.startswith("logits DIFFER: next chunk, ")


@needs_transformers
def test_a_layer_that_never_came_back_is_found(tiny_demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "transfer", lambda *args, **options: None)
    status, last = tiny_demo()
    assert status == 1
    assert last.startswith("logits DIFFER: next chunk, position 0: ")
    # The arithmetic is not to blame.
    assert tiny_demo.lines[-2].endswith("gives the first one's logits")


def slow_down_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    real_transfer = ops.transfer

    def slow(*args, **options) -> None:
        time.sleep(0.2)
        real_transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", slow)


@needs_transformers
def test_the_forward_pass_waits_for_a_slow_restore(
    tiny_demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_restores(monkeypatch)
    assert tiny_demo() == (0, "logits identical")


@needs_transformers
def test_a_forward_pass_that_does_not_wait_is_found(
    tiny_demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_restores(monkeypatch)
    monkeypatch.setattr(loader.LayerwiseLoad, "wait_layer", lambda self, layer: None)
    status, last = tiny_demo()
    assert status == 1
    assert last.startswith("logits DIFFER: next chunk, position 0: ")


# -------------------------------------------------------------------------------------------------
# demo: its parts


def test_runs_are_positions_consecutive_on_both_sides() -> None:
    ascending = torch.arange(6)
    assert demo.count_runs(ascending, ascending + 10) == 1
    assert demo.count_runs(ascending, ascending.flip(0)) == 6
    assert demo.count_runs(ascending, torch.tensor([3, 4, 5, 0, 1, 9])) == 3
    assert demo.count_runs(ascending[:0], ascending[:0]) == 0


def test_a_share_above_the_ceiling_of_a_cpu_says_why() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert demo.share_of_ceiling(12e9, 10e9, cpu) == (
        "120% of the 10.00 GB/s memcpy ceiling, as small payloads fit into caches"
    )
    assert demo.share_of_ceiling(10.04e9, 10e9, cpu) == "100% of the 10.00 GB/s memcpy ceiling"
    assert demo.share_of_ceiling(9e9, 10e9, gpu) == "90% of the 10.00 GB/s link ceiling"
    assert demo.share_of_ceiling(11e9, 10e9, gpu) == "110% of the 10.00 GB/s link ceiling"


def test_a_difference_of_one_bit_is_placed() -> None:
    expected, actual = demo.Transcript(), demo.Transcript()
    logits = torch.ones(4, 8, dtype=torch.bfloat16)
    changed = logits.clone()
    changed[2, 5] = 1.0078125  # the next bfloat16 after 1
    for transcript, last in ((expected, logits), (actual, changed)):
        transcript.add("next chunk", logits)
        transcript.add("decode step 0", last)
    assert demo.first_difference(expected, expected) is None
    assert demo.first_difference(expected, actual) == (
        "decode step 0, position 2: 1 of 32 logits in 1 of 4 positions, "
        "largest difference 0.0078125"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        progress = demo.Progress(4, stream)
        progress.begin("first part")
        for _ in range(2):
            progress.step()
        progress.begin("second part")
        progress.close()
    assert "[###############...............]  50% second part" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert pipe.getvalue() == "[  0%] first part\n[ 50%] second part\n"
