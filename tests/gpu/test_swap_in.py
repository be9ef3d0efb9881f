"""kvio::swap_in and kvio::copy_planned on a GPU: the oracle's outputs, state and bytes."""

import os
import random

import pytest
import torch

import sgl_kvio
import swap_in_cases
from reference import assert_same_bytes
from swap_in_cases import UNWRITTEN, World, random_spec, random_specs

SLEEP_CYCLES = 400_000_000  # some 0.2 s

# The long run of 10,000 steps: KVIO_SWAP_IN_STEPS=10000. For a checker that takes a second for a
# step traces are cut short: KVIO_SWAP_IN_TRACE=3.
STEPS = int(os.environ.get("KVIO_SWAP_IN_STEPS", "1800"))
TRACE = int(os.environ.get("KVIO_SWAP_IN_TRACE", "30"))


def on_gpu(spec_list):
    return pytest.mark.parametrize("spec", spec_list, ids=lambda spec: str(spec.seed))


@on_gpu(random_specs(-(-STEPS // 30), 21, pinned=True))
def test_random_steps_do_what_the_oracle_does(spec):
    swap_in_cases.run_trace(spec, TRACE, "cuda")
    assert sgl_kvio.take_fault() == []


@on_gpu(random_specs(10, 22, pinned=True, row_bytes=(512,), heads=1, host_layout="flat"))
def test_rows_of_whole_packages_are_copied_by_those_who_resolve(spec):
    """One buffer of 16-byte packages and few requests: the cluster's own copying."""
    world = World(spec, "cuda")

    def call(**arguments):
        sgl_kvio.swap_in(**{**arguments, "num_blocks": 0})

    for _ in range(TRACE):
        world.step(call=call)
    assert sgl_kvio.take_fault() == []


@on_gpu(random_specs(30, 23, pinned=True))
def test_bad_values_spoil_no_more_than_they_name(spec):
    world = World(spec, "cuda")
    for _ in range(min(TRACE, 20)):
        seen = world.bad_step(raises=False)
        torch.cuda.synchronize()
        fault = sgl_kvio.take_fault()
        assert bool(fault) == bool(seen)
        if fault:
            assert fault[2] in {value for _, _, value in seen}


def test_a_fault_is_raised_by_check_with_its_place():
    world = World(random_spec(random.Random(1), pinned=True, with_device_locs=False), "cuda")
    batch, _ = world.draw_batch(1, 1)
    world.inputs["top_k_tokens"].set(2**31 - 1, (0, 0))
    sgl_kvio.swap_in(**world.arguments(batch))
    with pytest.raises(RuntimeError, match=r"kvio::swap_in: .*top_k_tokens\[0, 0\] was 2147483647"):
        sgl_kvio.check()
    sgl_kvio.check()


def test_an_unknown_request_yields_nothing_and_is_named():
    world = World(random_spec(random.Random(2), pinned=True), "cuda")
    batch, _ = world.draw_batch(1, 1)
    world.inputs["req_pool_indices"].set(world.spec.num_requests, 0)
    sgl_kvio.swap_in(**world.arguments(batch))
    torch.cuda.synchronize()
    assert (world.outputs["top_k_device_locs"].tensor[0].cpu() == -1).all()
    with pytest.raises(RuntimeError, match=r"req_pool_indices\[0\] was"):
        sgl_kvio.check()


@pytest.mark.parametrize("num_real", [0, 1, 3])
def test_a_graph_of_the_largest_batch_replays_with_fewer_real_requests(num_real):
    spec = random_spec(random.Random(3), pinned=True, num_requests=4, max_batch=6, with_plan=True)
    world = World(spec, "cuda")
    world.step(batch=6, num_real=4)  # what is allocated once
    graph = torch.cuda.CUDAGraph()
    world.draw_batch(6, 0)
    arguments = {**world.arguments(6), "skip_io": False}
    with torch.cuda.graph(graph):
        sgl_kvio.swap_in(**arguments)
    for _ in range(5):
        world.step(batch=6, num_real=num_real, call=lambda **_: graph.replay(), skip_io=False)
    assert sgl_kvio.take_fault() == []


def call_of(hot, top_k, row_bytes, batch, *, misses, seed=0, buffers=1, aligned=False):
    """Long requests of engines' sizes; `misses` selected tokens of each are not resident.

    `aligned`: every row of the state begins at a multiple of 16 bytes, and every eighth entry of
    the selection is empty or another one's token; else rows are as long as they have to be.
    """
    columns = -(-(hot + 1) // 8) * 8 if aligned else hot + 1
    generator = torch.Generator().manual_seed(seed)
    length = 4 * hot
    host_slots = batch * length
    host = torch.randint(0, 256, (buffers, host_slots, 1, row_bytes), dtype=torch.uint8)
    locs = torch.randperm(batch * columns, generator=generator).to(torch.int32).view(batch, -1)
    tokens = torch.full((batch, columns), -1, dtype=torch.int32)
    requests = torch.randperm(batch, generator=generator)
    selected = torch.empty(batch, top_k, dtype=torch.int32)
    for b in range(batch):
        order = torch.randperm(length - 1, generator=generator).to(torch.int32)
        tokens[requests[b], :hot] = order[:hot]
        chosen = torch.cat([order[: top_k - misses], order[hot : hot + misses]])
        selected[b] = chosen[torch.randperm(top_k, generator=generator)]
        if aligned:
            selected[b, 3::16] = -1
            selected[b, 11::16] = selected[b, torch.randint(0, top_k, (1,), generator=generator)]
    lru = torch.stack([torch.randperm(hot, generator=generator) for _ in range(batch)])
    device = torch.zeros(buffers, batch * columns, 1, row_bytes, dtype=torch.uint8)
    return {
        "top_k_tokens": selected,
        "device_buffer_tokens": tokens,
        "device_buffer_locs": locs,
        "host_cache_locs": torch.randperm(host_slots, generator=generator).view(batch, length),
        "lru_slots": lru.to(torch.int16),
        "host_cache": list(host),
        "device_buffer": list(device),
        "top_k_device_locs": torch.full((batch, top_k), UNWRITTEN, dtype=torch.int32),
        "req_pool_indices": requests,
        "seq_lens": torch.full((batch,), length),
    }


def moved_to_gpu(call):
    def put(name, value):
        if name == "host_cache":
            return [tensor.pin_memory() for tensor in value]
        if isinstance(value, list):
            return [tensor.cuda() for tensor in value]
        return value.cuda()

    return {name: put(name, value) for name, value in call.items()}


WRITTEN = ("device_buffer_tokens", "lru_slots", "top_k_device_locs")


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("hot", "top_k", "row_bytes", "batch", "misses", "buffers"),
    [
        (4096, 2048, 512, 1, 2, 1),
        (4096, 2048, 512, 1, 410, 1),
        (4096, 2048, 656, 10, 410, 1),
        (4096, 2048, 576, 40, 100, 1),  # too many for copying by those who resolve
        (8192, 2048, 1152, 3, 2048, 1),
        (4096, 2048, 520, 2, 33, 1),  # 8-byte packages
        (4096, 2048, 512, 2, 300, 20),  # more buffers than one launch takes
        (32767, 32767, 16, 1, 9000, 1),  # tables larger than shared memory
        (32767, 1, 16, 2, 1, 1),
        (1, 1, 4096, 200, 1, 1),
    ],
)
def test_sizes_of_engines_and_the_largest_ones(
    hot, top_k, row_bytes, batch, misses, buffers, aligned
):
    """Against the CPU's kernel, which the oracle is compared with."""
    call = call_of(hot, top_k, row_bytes, batch, misses=misses, buffers=buffers, aligned=aligned)
    gpu = moved_to_gpu(call)
    for _ in range(2):  # the second time everything is resident
        sgl_kvio.swap_in(**gpu, hot_buffer_size=hot)
        torch.cuda.synchronize()
        sgl_kvio.swap_in(**call, hot_buffer_size=hot)
        for name in WRITTEN:
            assert torch.equal(gpu[name].cpu(), call[name]), name
        for got, want in zip(gpu["device_buffer"], call["device_buffer"], strict=True):
            assert_same_bytes(got.cpu(), want, "device buffer")
    assert sgl_kvio.take_fault() == []


def test_two_thousand_requests_and_more_are_replayed():
    """More requests than a CTA keeps the sums of."""
    call = call_of(4, 3, 64, 5000, misses=2)
    gpu = moved_to_gpu(call)
    sgl_kvio.swap_in(**gpu, hot_buffer_size=4)
    sgl_kvio.swap_in(**call, hot_buffer_size=4)
    torch.cuda.synchronize()
    for name in WRITTEN:
        assert torch.equal(gpu[name].cpu(), call[name]), name
    assert_same_bytes(gpu["device_buffer"][0].cpu(), call["device_buffer"][0], "device buffer")


@pytest.mark.parametrize("batch", [1, 50])
def test_a_call_never_waits_for_the_gpu(batch):
    gpu = moved_to_gpu(call_of(64, 32, 512, batch, misses=8))
    sgl_kvio.swap_in(**gpu, hot_buffer_size=64)  # what is allocated once
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        after_sleep = torch.cuda.Event()
        after_sleep.record()
        sgl_kvio.swap_in(**gpu, hot_buffer_size=64)
        assert not after_sleep.query()
    torch.cuda.synchronize()


def test_host_memory_that_is_not_page_locked_is_refused():
    gpu = moved_to_gpu(call_of(64, 32, 512, 1, misses=8))
    gpu["host_cache"] = [tensor.clone() for tensor in gpu["host_cache"]]
    before = {name: gpu[name].clone() for name in WRITTEN}
    with pytest.raises(RuntimeError, match=r"kvio::swap_in: host_cache\[0\].*page-locked"):
        sgl_kvio.swap_in(**gpu, hot_buffer_size=64)
    torch.cuda.synchronize()
    for name, tensor in before.items():
        assert torch.equal(gpu[name], tensor), name


def test_a_batch_of_nothing_is_no_error():
    gpu = moved_to_gpu(call_of(8, 4, 16, 1, misses=1))
    for name in ("top_k_tokens", "top_k_device_locs", "req_pool_indices", "seq_lens"):
        gpu[name] = gpu[name][:0]
    sgl_kvio.swap_in(**gpu, hot_buffer_size=8)
    torch.cuda.synchronize()
