"""Tests here run kernels: without a GPU, or with a build that has no GPU code, they are skipped.

KVIO_TEST_PART="1/4" runs every fourth case of every test function, "2/4" the next ones: for runs
under a checker that takes a hundred times as long.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import sgl_kvio

HERE = Path(__file__).parent


def is_in_part(items, part):
    """For each item, whether it belongs to the part; a function's cases are dealt out in turn."""
    number, of = (int(word) for word in part.split("/"))
    assert 1 <= number <= of, f"KVIO_TEST_PART is {part}; it needs 1/1, 1/2, 2/2, ..."
    seen = Counter()
    for item in items:
        if HERE not in item.path.parents:
            yield True
            continue
        function = (item.path, getattr(item, "originalname", item.name))
        yield seen[function] % of == number - 1
        seen[function] += 1


def pytest_collection_modifyitems(config, items):
    part = os.environ.get("KVIO_TEST_PART", "1/1")
    chosen = list(is_in_part(items, part))
    left_out = [item for item, taken in zip(items, chosen, strict=True) if not taken]
    if left_out:
        items[:] = [item for item, taken in zip(items, chosen, strict=True) if taken]
        config.hook.pytest_deselected(items=left_out)
    if not torch.cuda.is_available():
        reason = "needs a GPU"
    elif sgl_kvio.capabilities()["backend"] == "cpu":
        reason = "this build of sgl_kvio has no GPU code"
    else:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_fault_stays_behind():
    """Every test ends with a live context and no index fault that it did not ask for."""
    yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
        assert sgl_kvio.take_fault(index) == []
