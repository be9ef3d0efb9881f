"""Streams and CUDA graphs: the op follows the caller's current stream, never waits, replays."""

import functools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cases
import sgl_kvio
from reference import (
    assert_same_bytes,
    kernels_of_two_streams_run_side_by_side,
    moved,
    needs_bulk_copies,
    refused,
)

LONG = 400_000_000  # cycles, about 0.2 s
DIRECTIONS = ("h2d", "d2h", "d2d")
TMA = pytest.param("tma", marks=needs_bulk_copies)
KERNEL = pytest.mark.parametrize("backend", ["register", TMA])


def pools(direction, slots=256, row=(2, 72), dtype=torch.bfloat16, seed=0):
    """Destination and source of a direction, random, each flat."""

    def put(place, number):
        pool = cases.contiguous_pool((slots, *row), dtype, seed + number)
        return cases.put(pool, place)

    return put(direction[2], 1), put(direction[0], 2)


random_slots = functools.partial(cases.random_slots, slots=256)


# Graphs.


@KERNEL
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_replay_reads_the_indices_and_rows_of_its_time(direction, index_dtype, backend):
    dst, src = pools(direction)
    at, frm = (torch.zeros(100, dtype=index_dtype, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.transfer(dst, src, at, frm, backend=backend)
    for seed in range(3):
        src.copy_(cases.contiguous_pool(src.shape, src.dtype, 50 + seed))
        dst.copy_(cases.contiguous_pool(dst.shape, dst.dtype, 60 + seed))
        at.copy_(random_slots(100, 2 * seed))
        frm.copy_(random_slots(100, 2 * seed + 1))
        torch.cuda.synchronize()
        want = moved(dst, src, at.cpu(), frm.cpu())
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(dst, want, "destination")


@KERNEL
def test_a_graph_outlives_the_tensor_lists_of_its_capture(backend):
    """Base addresses are parameters of the kernel: no table on the device may have to survive."""
    content = cases.contiguous_pool((160, 32, 1, 64), torch.float32, 0)
    src, dst = content.pin_memory(), torch.zeros_like(content, device="cuda")
    at = torch.arange(0, 32, 2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = list(dst.unbind(0)), list(src.unbind(0))
        sgl_kvio.transfer(*lists, at, at + 1, backend=backend)
        del lists
    scratch = [torch.full((1 << 16,), 7, device="cuda") for _ in range(20)]
    graph.replay()
    torch.cuda.synchronize()
    want = torch.zeros_like(content)
    want[:, 0::2] = content[:, 1::2]
    assert_same_bytes(dst, want, "destination")
    del scratch


@KERNEL
def test_the_first_call_of_a_process_may_be_inside_a_capture(backend):
    code = """
        import torch, sgl_kvio
        src = torch.arange(64.0).view(16, 4).pin_memory()
        dst = torch.zeros(16, 4, device="cuda")
        back = torch.zeros(16, 4).pin_memory()
        at, frm = torch.tensor([3, 0], device="cuda"), torch.tensor([1, 15], device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
            sgl_kvio.transfer(back, dst, frm, at, row_ndim=1)
        graph.replay()
        torch.cuda.synchronize()
        want = torch.zeros(16, 4)
        want[[3, 0]] = src[[1, 15]]
        assert torch.equal(dst.cpu(), want), dst
        want = torch.zeros(16, 4)
        want[[1, 15]] = src[[1, 15]]
        assert torch.equal(back, want), back
        sgl_kvio.check()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "KVIO_BACKEND_ORDER": backend},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_empty_calls_may_be_captured():
    dst, src = pools("h2d")
    before = dst.clone()
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    one = torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.transfer([dst], [src], none, none)
        sgl_kvio.transfer([], [], one, one)
        one.add_(0)
    graph.replay()
    assert_same_bytes(dst, before, "destination")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_cpu_indices_in_a_capture_are_refused_and_the_capture_survives():
    dst, src = pools("h2d")
    at = random_slots(8, 0)
    there = at.cuda()
    want = moved(dst, src, at, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"kvio::transfer: dst_indices.*captur"):
            sgl_kvio.transfer(dst, src, at, at)
        sgl_kvio.transfer(dst, src, there, there)
    graph.replay()
    assert_same_bytes(dst, want, "destination")


def test_a_refused_call_does_not_break_the_capture_around_it():
    dst, src = pools("h2d")
    at = random_slots(8, 0).cuda()
    want = moved(dst, src, at.cpu(), at.cpu())
    pageable = torch.zeros_like(src, pin_memory=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"src\[0\].*page-locked"):
            sgl_kvio.transfer(dst, pageable, at, at)
        sgl_kvio.transfer(dst, src, at, at)
    graph.replay()
    assert_same_bytes(dst, want, "destination")


def test_byte_copies_may_be_captured():
    dst, src = pools("h2d")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.memcpy_batch([dst], [src], [0, 4096], [4096, 0], [100, 300])
    want = dst.cpu().view(-1).view(torch.uint8)
    content = src.view(-1).view(torch.uint8)
    want[:100], want[4096:4396] = content[4096:4196], content[:300]
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


# Streams.


def indices(place, count=64, seed=0):
    return random_slots(count, seed).to(place)


def move_behind_a_late_fill(filled, value, stream, call):
    """Enqueues sleep, fill, call on the stream; True when the call waited for the stream.

    Whoever is not ordered behind the fill sees or leaves old bytes. The call runs once before, so
    that what it allocates on first use is there.
    """
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        torch.cuda._sleep(LONG)
        filled.fill_(value)
        busy = not stream.query()  # not so under a tool that makes every launch wait
        call()
        return busy and stream.query()


@KERNEL
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("side_stream", [False, True])
def test_a_restore_comes_after_what_the_stream_still_writes(side_stream, index_place, backend):
    dst, src = pools("h2d")
    at, frm = indices(index_place, seed=1), indices(index_place, seed=2)
    want = moved(torch.zeros_like(src), src, at.cpu(), frm.cpu())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    call = functools.partial(sgl_kvio.transfer, dst, src, at, frm, backend=backend)
    waited = move_behind_a_late_fill(dst, 0, stream, call)
    with torch.cuda.stream(stream):
        seen = dst.clone()
    stream.synchronize()
    assert_same_bytes(dst, want, "device pool")
    assert_same_bytes(seen, want, "what the next kernel read")
    assert not waited, "the call waited for its stream"


@KERNEL
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("side_stream", [False, True])
def test_a_write_back_comes_after_what_the_stream_still_writes(side_stream, index_place, backend):
    dst, src = pools("d2h")
    at, frm = indices(index_place, seed=1), indices(index_place, seed=2)
    want = moved(dst, torch.full_like(dst, 3), at.cpu(), frm.cpu())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    call = functools.partial(sgl_kvio.transfer, dst, src, at, frm, backend=backend)
    waited = move_behind_a_late_fill(src, 3, stream, call)
    stream.synchronize()
    assert_same_bytes(dst, want, "host pool")
    assert not waited, "the call waited for its stream"


@KERNEL
def test_cpu_indices_may_change_right_after_the_call(backend):
    dst, src = pools("h2d")
    at, frm = indices("cpu", seed=1), indices("cpu", seed=2)
    want = moved(dst, src, at, frm)
    torch.cuda._sleep(LONG)
    sgl_kvio.transfer(dst, src, at, frm, backend=backend)
    at.fill_(0)
    frm.fill_(0)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


@KERNEL
def test_many_calls_with_cpu_indices_can_be_in_flight(backend):
    """Each call's index copy must keep its own staging until the stream has read it."""
    dst, src = pools("h2d")
    stream = torch.cuda.Stream()
    want = dst.cpu()
    with torch.cuda.stream(stream):
        load_kernels(dst, src, backend)
        torch.cuda.synchronize()
        dst.copy_(want)
        torch.cuda._sleep(3 * LONG)  # the calls and what is expected of them take the CPU a while
        busy = not stream.query()
        for seed in range(100):
            at, frm = random_slots(seed % 60 + 1, seed), random_slots(seed % 60 + 1, seed + 500)
            want = moved(want, src, at, frm)
            sgl_kvio.transfer(dst, src, at, frm, backend=backend)
        waited = busy and stream.query()
    stream.synchronize()
    assert_same_bytes(dst, want, "destination")
    assert not waited, "a call waited for its stream"


@KERNEL
def test_staging_that_is_still_read_does_not_disturb_a_call_on_another_stream(backend):
    """Finding it busy must leave no error behind for the launch to report."""
    first, second = pools("h2d", seed=0), pools("h2d", seed=10)
    want = second[0].cpu()
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(LONG)
        lists = indices("cpu", seed=1), indices("cpu", seed=2)
        sgl_kvio.transfer(*first, *lists, backend=backend)
    with torch.cuda.stream(fast):
        for seed in range(40):
            at, frm = random_slots(50, seed), random_slots(50, seed + 500)
            want = moved(want, second[1], at, frm)
            sgl_kvio.transfer(*second, at, frm, backend=backend)
    torch.cuda.synchronize()
    assert_same_bytes(second[0].cpu(), want, "destination")


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("backend", ["register", TMA, "copy_engine"])
def test_cpu_indices_in_one_thread_leave_the_capture_of_another_alone(backend, legacy):
    """Captures are global by default: no thread may then ask for memory or events."""
    graph_rows, call_rows = pools("h2d", seed=0), pools("h2d", seed=10)
    at, frm = indices("cuda", seed=1), indices("cuda", seed=2)
    cpu_at, cpu_frm = indices("cpu", seed=3), indices("cpu", seed=4)
    want_call = moved(*call_rows, cpu_at, cpu_frm)
    want_graph = moved(*graph_rows, at.cpu(), frm.cpu())
    torch.cuda.synchronize()

    def call_on_a_stream_of_its_own():
        stream = torch.cuda.default_stream() if legacy else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(40):  # more than there is staging made at once
                sgl_kvio.transfer(*call_rows, cpu_at, cpu_frm, backend=backend)
        return stream

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.cuda.current_stream).result()
        with torch.cuda.graph(graph):
            sgl_kvio.transfer(*graph_rows, at, frm)
            stream = other.submit(call_on_a_stream_of_its_own).result()
            sgl_kvio.transfer(*graph_rows, at, frm)
    stream.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(call_rows[0].cpu(), want_call, "destination of the call")
    assert_same_bytes(graph_rows[0].cpu(), want_graph, "destination of the graph")


@KERNEL
def test_device_memory_of_uploaded_indices_is_not_reused_too_early(backend):
    """The op frees its copy of the indices on return; the stream must still own that memory."""
    dst, src = pools("h2d")
    at, frm = indices("cpu", seed=1), indices("cpu", seed=2)
    want = moved(dst, src, at, frm)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        sgl_kvio.transfer(dst, src, at, frm, backend=backend)
    # Another stream takes whatever the allocator hands out and scribbles on it at once.
    scribbles = [torch.full((1024,), -1, dtype=torch.int64, device="cuda") for _ in range(64)]
    torch.cuda.current_stream().synchronize()
    stream.synchronize()
    sgl_kvio.check()
    assert_same_bytes(dst, want, "destination")
    del scribbles


def load_kernels(dst, src, backend):
    """Loads what calls of any length run, which may wait until the GPU is idle."""
    for place in ("cpu", "cuda"):
        for count in (1, 60):
            lists = indices(place, count, 1), indices(place, count, 2)
            sgl_kvio.transfer(dst, src, *lists, backend=backend)


@KERNEL
def test_two_streams_do_not_wait_for_each_other(backend):
    if not kernels_of_two_streams_run_side_by_side():
        pytest.skip("here the kernels of two streams run one after the other")
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    first, second = pools("h2d", seed=0), pools("h2d", seed=10)
    at, frm = indices("cuda", seed=1), indices("cuda", seed=2)
    want = moved(*second, at.cpu(), frm.cpu())
    before = second[0].clone()
    load_kernels(*second, backend)
    second[0].copy_(before)
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(2 * LONG)
        busy = not slow.query()
        sgl_kvio.transfer(*first, at, frm, backend=backend)
    with torch.cuda.stream(fast):
        sgl_kvio.transfer(*second, at, frm, backend=backend)
    fast.synchronize()
    assert not (busy and slow.query()), "the fast stream's work came after the slow one's"
    assert_same_bytes(second[0].cpu(), want, "destination")


def test_host_copies_with_gpu_indices_are_stream_ordered_too():
    dst, src = pools("h2h")
    at = torch.zeros(64, dtype=torch.int64, device="cuda")
    good, frm = indices("cuda", seed=1), indices("cuda", seed=2)
    want = moved(dst, src, good.cpu(), frm.cpu())
    torch.cuda._sleep(LONG)
    at.copy_(good)
    sgl_kvio.transfer(dst, src, at, frm)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


def test_a_bad_cpu_index_is_refused_while_the_stream_is_busy_and_nothing_is_enqueued():
    dst, src = pools("h2d")
    at = torch.tensor([0, 256])
    before = dst.cpu()
    torch.cuda._sleep(LONG)
    with refused(r"dst_indices\[1\]", got="256"):
        sgl_kvio.transfer(dst, src, at, at)
    assert_same_bytes(dst, before, "destination")
