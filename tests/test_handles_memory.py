"""No pass copies a host pool that is named by its handle, however big it is; and the meter that
says so sees the copy where a pool is an argument.

tests/gpu/test_handles.py runs the same on a page-locked pool.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch._dynamo
from memory_meter import measured

import cases
import sgl_kvio
from reference import assert_same_bytes, moved, synchronize
from sgl_kvio import HostKVPool
from sgl_kvio.memory import GIB, memory_limits

MIB = 1 << 20
NUMBER = 78
LAYERS, SLOTS = 8, 256
# Compilers and what they load take some of their own.
COMPILER_BYTES = 1024 * MIB


def pool_bytes():
    """4 GiB where the machine has four times as much to give, else what a quarter of it is."""
    allowed = memory_limits().allowed_bytes
    return 4 * GIB if allowed is None else min(4 * GIB, allowed // 4)


def big_pool(nbytes, device="cpu", handle=None):
    page = LAYERS * 2 * 64 * 2 * 64 * 2
    sizes = {"page_size": 64, "num_layers": LAYERS, "num_heads": 2, "head_dim": 64}
    return HostKVPool(
        "mha",
        "page_first",
        num_pages=max(nbytes // page, 8),
        dtype=torch.int16,
        device=device,
        handle=handle,
        **sizes,
    )


@pytest.fixture(scope="module")
def pool():
    with big_pool(pool_bytes(), handle=NUMBER) as pool:
        yield pool


class Step(torch.nn.Module):
    """Writes rows of every layer back and restores them elsewhere."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.register_buffer("token", torch.zeros(1, dtype=torch.uint8, device=device))

    def forward(self, device_buffers, host_slots, slots):
        changed = [buffer + 1 for buffer in device_buffers]
        sgl_kvio.write_back(NUMBER, self.token, changed, host_slots, slots)
        sgl_kvio.restore(NUMBER, self.token, device_buffers, slots + 64, host_slots)
        return device_buffers[0] * 2


def make_arguments(pool, device="cpu", seed=0):
    buffers = [
        cases.contiguous_pool((SLOTS, 2, 64), torch.int16, seed + i).to(device)
        for i in range(2 * LAYERS)
    ]
    host_slots = torch.randperm(pool.num_slots, generator=torch.Generator().manual_seed(seed))[:64]
    return buffers, host_slots.to(device), torch.randperm(64).to(device)


def as_called(form, arguments, device, folder):
    """The step, as `form` runs it."""
    step = Step(device)
    if form in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        return torch.compile(step, backend=form, fullgraph=True)
    if form == "reduce-overhead":
        torch._dynamo.reset()
        return torch.compile(step, mode=form, fullgraph=True)
    program = torch.export.export(step, arguments)
    if form == "export":
        return program.module()
    if form == "decomposed":
        return program.run_decompositions().module()
    assert form == "package", form
    path = folder / "step.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    assert path.stat().st_size < 8 * MIB, "the package holds more than code"
    return torch._inductor.aoti_load_package(str(path))


def check_no_copy(pool, form, folder: Path, device="cpu"):
    limit = max(pool.nbytes // 8, COMPILER_BYTES)
    with measured() as preparing:
        step = as_called(form, make_arguments(pool, device), device, folder)
    uses = {"preparing": preparing}
    for call in (1, 2):
        arguments = make_arguments(pool, device, seed=10 * call)
        buffers, host_slots, slots = arguments
        before = [buffer.cpu().clone() for buffer in buffers]
        with measured() as uses[f"call {call}"]:
            got = step(*arguments)
            synchronize()
        host_slots, slots = host_slots.cpu(), slots.cpu()
        for buffer, view, old in zip(buffers, pool.all_layers(), before, strict=True):
            assert_same_bytes(view[host_slots], old[slots] + 1, "host rows")
            assert_same_bytes(buffer, moved(old, old + 1, slots + 64, slots), "device buffer")
        assert_same_bytes(got, buffers[0] * 2, "result")
    for name, use in uses.items():
        assert use.largest_allocation <= max(pool.nbytes // 64, MIB), (name, use)
        assert use.peak < limit, (name, use)


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
FORMS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=needs_compiler),
    "export",
    "decomposed",
    pytest.param("package", marks=needs_compiler),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_pool_behind_a_handle_is_never_copied(pool, form, tmp_path):
    check_no_copy(pool, form, tmp_path)


# The counter-example, and that the meter works.


def step_on_tensors(tensor, device_buffers, host_slots, slots):
    """The same with the pool as an argument: the op's schema says that it writes `views`."""
    views = [tensor[side, :, layer] for layer in range(LAYERS) for side in range(2)]
    sgl_kvio.transfer(views, [buffer + 1 for buffer in device_buffers], host_slots, slots)
    sgl_kvio.transfer(device_buffers, views, slots + 64, host_slots)
    return device_buffers[0] * 2


def use_with_a_tensor(backend):
    torch._dynamo.reset()
    with big_pool(64 * MIB) as pool:
        (tensor,) = pool.tensors
        compiled = torch.compile(step_on_tensors, backend=backend, fullgraph=True)
        compiled(tensor, *make_arguments(pool))
        with measured() as use:
            compiled(tensor, *make_arguments(pool))
        return use, pool.nbytes


def test_transfer_into_a_tensor_makes_aot_eager_copy_the_whole_pool():
    """What README says of torch 2.13; when this fails, torch has become better."""
    use, nbytes = use_with_a_tensor("aot_eager")
    assert use.largest_allocation == nbytes


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_transfer_into_a_tensor_is_made_in_place_by_the_others(backend):
    use, nbytes = use_with_a_tensor(backend)
    assert use.largest_allocation <= nbytes // 64


def test_the_meter_sees_a_copy_and_its_pages():
    block = torch.ones(256 * MIB, dtype=torch.uint8)
    with measured() as use:
        copy = block.clone()
    assert use.largest_allocation == block.numel()
    assert use.peak > block.numel() // 2
    del copy
    with measured() as use:
        block[:MIB].clone()
    assert use.largest_allocation == MIB
    assert use.peak < block.numel() // 2
