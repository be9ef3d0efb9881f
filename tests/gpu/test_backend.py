"""What a GPU adds to the choice of a backend: its facts, its refusals, its rates."""

import json
import re

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, moved
from sgl_kvio import calibrate, rates
from sgl_kvio.__main__ import main

PAGE = 64


def pools(slots=4096, heads=2, dim=128):
    src = cases.contiguous_pool((slots, heads, dim), torch.bfloat16, 0).pin_memory()
    return torch.zeros_like(src, device="cuda"), src


def pages(place):
    at = torch.arange(0, 4096 // PAGE, 2, device=place)
    return at, at.flip(0)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("prefer", ["throughput", "quiet"])
def test_auto_explains_its_choice_and_moves_the_bytes(place, prefer):
    dst, src = pools()
    to, frm = pages(place)
    options = {"page_size": PAGE, "index_unit": "page", "prefer": prefer}
    text = sgl_kvio.explain(dst, src, to, frm, **options)
    assert re.match(r"backend: (register|tma|copy_engine)\nreason: .+\n", text)
    assert re.search(r"\nexpected: \d+\.\d GB/s, \d+% of the link", text)
    assert f"(prefer {prefer}, " in text
    in_a_graph = {
        "cpu": "capture: refused, the indices are on the CPU",
        "cuda": "capture: indices and rows are read at every replay",
    }
    assert in_a_graph[place] in text
    inside = torch.arange(PAGE)
    slots = [(i.cpu()[:, None] * PAGE + inside).flatten() for i in (to, frm)]
    want = moved(dst.cpu(), src, *slots)
    sgl_kvio.transfer(dst, src, to, frm, **options)
    assert_same_bytes(dst, want, "destination")


def test_gpu_indices_never_go_to_the_copy_engine():
    dst, src = pools()
    to, frm = pages("cuda")
    with pytest.raises(
        RuntimeError, match="backend is 'copy_engine' but the indices are on the GPU"
    ):
        sgl_kvio.transfer(dst, src, to, frm, backend="copy_engine")
    assert "copy_engine no, the indices are on the GPU" in sgl_kvio.explain(dst, src, to, frm)
    assert not dst.any()


def test_the_environment_overrules_the_rates(monkeypatch):
    dst, src = pools()
    to, frm = pages("cuda")
    monkeypatch.setenv("KVIO_BACKEND_ORDER", "copy_engine,register")
    text = sgl_kvio.explain(dst, src, to, frm)
    assert text.startswith("backend: register\nreason: first of KVIO_BACKEND_ORDER")
    monkeypatch.setenv("KVIO_BACKEND_ORDER", "pigeon")
    with pytest.raises(RuntimeError, match="KVIO_BACKEND_ORDER names 'pigeon'"):
        sgl_kvio.transfer(dst, src, to, frm)
    assert not dst.any()


def test_calibrate_measures_this_gpu_and_stores_it(tmp_path, monkeypatch, capsys):
    quick = calibrate.Sizes(64 << 20, 8 << 20, 256, calls=1, repeats=1)
    monkeypatch.setattr(calibrate, "QUICK", quick)
    path = tmp_path / "rates.json"
    assert main(["calibrate", "--quick", "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["gpu"] == torch.cuda.get_device_name()
    # Of this machine, as far as the driver's files name its models.
    assert len(rates.read(path, rates.gpu_models())) == 168
    for shapes in content["rates"]["register"].values():
        assert all(gbps > 0 for row in shapes.values() for gbps in row)
    assert "register H2D" in capsys.readouterr().out
