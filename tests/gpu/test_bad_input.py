"""Bad arguments of a GPU call raise before anything is enqueued, and leave every byte alone."""

import pytest
import torch
from test_bad_input import BAD, good_call, run

import cases
import sgl_kvio
from reference import refused

# Refused on a CPU only; indices on a GPU are checked by the kernel (test_faults.py).
CPU_ONLY = {
    "backend that needs a GPU",
    "bulk copies without a GPU",
    "driver copies without a GPU",
}
VALUES = {name for name, (_, argument, _) in BAD.items() if "_indices\\[" in argument}


def with_strides(tensor, place):
    """The tensor on the GPU ("d") or page-locked ("h"), with its strides and storage offset."""
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    content = content.cuda() if place == "d" else content.pin_memory()
    result = torch.empty(0, dtype=tensor.dtype, device=content.device)
    return result.set_(
        content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def to_gpu_call(call, direction, index_place):
    for name, place in (("src", direction[0]), ("dst", direction[2])):
        call[name] = [with_strides(tensor, place) for tensor in call[name]]
    for name in ("dst_indices", "src_indices"):
        call[name] = call[name].to(index_place)
    return call


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize("name", [name for name in BAD if name not in CPU_ONLY])
def test_is_refused_by_name_and_nothing_moves(name, direction, index_place):
    if index_place == "cuda" and name in VALUES:
        pytest.skip("values on the GPU are checked there")
    change, argument, got = BAD[name]
    call = good_call()
    change(call)
    call = to_gpu_call(call, direction, index_place)
    with refused(argument, got=got, unchanged=[*call["dst"], *call["src"]]):
        run(call)
    assert sgl_kvio.take_fault() == []


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d", "h2h"])
def test_the_calls_that_the_others_spoil_are_good(direction, index_place):
    run(to_gpu_call(good_call(), direction, index_place))
    torch.cuda.synchronize()


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_host_tensor_that_is_not_page_locked_is_refused(side, index_place):
    call = to_gpu_call(good_call(), "h2d" if side == "src" else "d2h", index_place)
    call[side][1] = call[side][1].clone()
    assert not call[side][1].is_pinned()
    with refused(rf"{side}\[1\]", got="page-locked", unchanged=[*call["dst"]]):
        run(call)
    with pytest.raises(RuntimeError, match=r"pin_memory|host_register"):
        run(call)
    with pytest.raises(RuntimeError, match=r"clone"):
        run(call)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_gpu_indices_do_not_make_pageable_pools_usable(side):
    call = to_gpu_call(good_call(), "h2h", "cuda")
    call[side] = [tensor.clone() for tensor in call[side]]
    with refused(rf"{side}\[0\]", got="page-locked", unchanged=[*call["dst"]]):
        run(call)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_tensor_across_two_registrations_is_refused(side):
    block = cases.page_aligned_bytes(1 << 16)
    halves = block.chunk(2)
    for half in halves:
        sgl_kvio.host_register(half)
    try:
        host = block.view(-1, 256)
        card = torch.ones(host.shape, dtype=torch.uint8, device="cuda")
        dst, src = (host, card) if side == "dst" else (card, host)
        at = torch.zeros(1, dtype=torch.int64, device="cuda")
        with refused(rf"{side}\[0\]", got="registration", unchanged=[dst]):
            sgl_kvio.transfer(dst, src, at, at, row_ndim=1)
        # Each half alone, and both as two buffers of one call, are fine.
        sides = [half.view(-1, 256) for half in halves]
        cards = [torch.ones_like(half, device="cuda") for half in sides]
        lists = (sides, cards) if side == "dst" else (cards, sides)
        sgl_kvio.transfer(*lists, at, at, row_ndim=1)
        torch.cuda.synchronize()
    finally:
        for half in halves:
            sgl_kvio.host_unregister(half)


def test_memory_whose_registration_was_dropped_is_refused():
    block = cases.page_aligned_bytes(1 << 16)
    sgl_kvio.host_register(block)
    rows, card = block.view(-1, 256), torch.ones(4, 256, dtype=torch.uint8, device="cuda")
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    sgl_kvio.transfer(rows, card, at, at, row_ndim=1)
    sgl_kvio.host_unregister(block)
    with refused(r"dst\[0\]", got="page-locked", unchanged=[rows]):
        sgl_kvio.transfer(rows, card, at, at, row_ndim=1)


@pytest.mark.parametrize("gpu_side", ["dst_indices", "src_indices"])
def test_indices_on_two_devices_are_refused(gpu_side):
    call = to_gpu_call(good_call(), "h2d", "cpu")
    call[gpu_side] = call[gpu_side].cuda()
    with refused(r"(dst|src)_indices", got="cuda:0", unchanged=call["dst"]):
        run(call)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_list_over_two_devices_is_refused(side):
    call = to_gpu_call(good_call(), "d2d", "cuda")
    call[side][1] = call[side][1].cpu().pin_memory()
    with refused(rf"{side}\[1\]", got="cpu", unchanged=call["dst"]):
        run(call)


def test_the_cpu_backend_refuses_gpu_tensors():
    call = to_gpu_call(good_call(), "h2d", "cuda") | {"backend": "cpu"}
    with refused("backend", got="cpu", unchanged=call["dst"]):
        run(call)


def test_page_locking_a_gpu_tensor_is_refused():
    with pytest.raises(RuntimeError, match=r"kvio::host_register: tensor.*cuda:0"):
        sgl_kvio.host_register(torch.zeros(64, device="cuda"))


def test_page_locking_a_tensor_with_gaps_is_refused():
    block = cases.page_aligned_bytes(1 << 14).view(4, -1)
    with pytest.raises(RuntimeError, match=r"kvio::host_register: tensor.*contiguous"):
        sgl_kvio.host_register(block[:, :128])


def test_a_negative_chunk_is_refused():
    with pytest.raises(RuntimeError, match=r"kvio::host_register: chunk_bytes.*-1"):
        sgl_kvio.host_register(cases.page_aligned_bytes(4096), -1)


def test_the_device_pointer_of_pageable_memory_is_refused():
    with pytest.raises(RuntimeError, match=r"kvio::device_pointer: tensor"):
        sgl_kvio.device_pointer(cases.page_aligned_bytes(4096))
