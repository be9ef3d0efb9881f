"""The command line on a GPU: the cache leaves it, comes back, and the logits agree bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from sgl_kvio import demo, doctor
from sgl_kvio.__main__ import main
from sgl_kvio.ops import capabilities

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or capabilities()["backend"] == "cpu",
    reason="needs a GPU and a build with GPU kernels",
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the demo needs transformers: pip install 'sgl_kvio[demo]'",
)


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"Rows leave the device pool and come back unchanged. " * 20)
    return str(path)


@pytest.fixture
def gpu_demo(text_file: str, capsys: pytest.CaptureFixture[str]):
    """Runs a demo on the GPU in this process; gives the exit status and stdout's lines."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        status = main(["demo", "--device", "cuda", "--text", text_file, *arguments])
        return status, capsys.readouterr().out.splitlines()

    return run


@needs_transformers
def test_demo_ends_with_logits_identical(gpu_demo) -> None:
    status, lines = gpu_demo("--model", "llama-3.2-1b", "--tokens", "2048", "--chunk", "512")
    assert (status, lines[-1]) == (0, "logits identical"), "\n".join(lines)
    assert any("page-locked" in line for line in lines)
    assert any("link ceiling" in line for line in lines)


@needs_transformers
@pytest.mark.parametrize("layout", demo.LAYOUTS)
def test_every_layout_brings_the_cache_back(gpu_demo, layout: str) -> None:
    sizes = ["--tokens", "500", "--page-size", "16", "--chunk", "96", "--decode", "4"]
    status, lines = gpu_demo("--model", "tiny", "--layout", layout, *sizes)
    assert (status, lines[-1]) == (0, "logits identical"), "\n".join(lines)


@needs_transformers
def test_a_backend_that_cannot_serve_exits_2(
    text_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model", "tiny", "--tokens", "256", "--text", text_file]
    assert main(["demo", "--device", "cuda", *sizes, "--backend", "cpu"]) == 2
    assert "--backend cpu: kvio::explain: backend" in capsys.readouterr().err


def test_doctor_sees_the_devices_and_chooses_for_them() -> None:
    report = doctor.collect()
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["binary"]["driver"] > 0
    assert {choice["device"] for choice in report["choices"]} == {"cuda"}
    assert [choice for choice in report["choices"] if "error" in choice] == []
