"""Tests here run kernels: without a GPU, or with a build that has no GPU code, they are skipped."""

from pathlib import Path

import pytest
import torch

import sgl_kvio


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        reason = "needs a GPU"
    elif sgl_kvio.capabilities()["backend"] == "cpu":
        reason = "this build of sgl_kvio has no GPU code"
    else:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_fault_stays_behind():
    """Every test ends with a live context and no index fault that it did not ask for."""
    yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
        assert sgl_kvio.take_fault(index) == []
