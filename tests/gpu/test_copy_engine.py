"""The copy_engine backend and memcpy_batch: exact bytes, in stream order, on any stream."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, check_case, moved, refused

LONG = 400_000_000  # cycles, about 0.2 s
DIRECTIONS = ("h2d", "d2h", "d2d")
STREAMS = ("legacy", "side")
CASES = [
    case
    for case in cases.selected(gpu=True)
    if case.index_place == "cpu" and case.direction != "h2h"
]


@contextmanager
def on(stream):
    """Work of the block goes to the legacy default stream or to one of its own, behind all else."""
    torch.cuda.synchronize()
    if stream == "legacy":
        assert torch.cuda.current_stream().cuda_stream == 0
        yield torch.cuda.current_stream()
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield torch.cuda.current_stream()


def transfer(*arguments, **options):
    sgl_kvio.transfer(*arguments, backend="copy_engine", **options)


def pools(direction, slots=512, row=(2, 72), seed=0):
    """Destination and source of a direction, random, each flat."""
    return tuple(
        cases.put(
            cases.contiguous_pool((slots, *row), torch.bfloat16, seed + i), direction[2 - 2 * i]
        )
        for i in range(2)
    )


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte(case, stream):
    def call(*arguments, **options):
        with on(stream):
            transfer(*arguments, **options)

    check_case(case, call, "cuda")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 72, 73, 20_000])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_number_of_entries_arrives_whole(direction, count, stream):
    slots = 2 * count + 1
    dst, src = pools(direction, slots=slots)
    at, frm = cases.random_slots(count, 1, slots), cases.random_slots(count, 2, slots)
    want = moved(dst, src, at, frm)
    with on(stream):
        transfer(dst, src, at, frm)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_all_layers_of_pages_that_both_sides_keep_together_arrive(direction, layers):
    pages, size = 40, 16
    shape = (pages, layers, size, 2, 64)
    src = cases.put(cases.contiguous_pool(shape, torch.bfloat16, 0), direction[0])
    dst = cases.put(cases.contiguous_pool(shape, torch.bfloat16, 1), direction[2])
    at, frm = cases.random_slots(25, 3, pages), cases.random_slots(25, 4, pages)
    want = moved(dst, src, at, frm)
    views = [list(pool.unbind(1)) for pool in (dst, src)]
    transfer(*views, at, frm, page_size=size, index_unit="page")
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 4096, 1 << 20])
def test_runs_across_the_chunks_of_a_registration_are_cut_there(chunk_bytes, stream):
    block = cases.page_aligned_bytes(1 << 20)
    sgl_kvio.host_register(block, chunk_bytes)
    try:
        rows = block[: 1 << 20].view(-1, 1024)
        rows.copy_(cases.random_bytes(1 << 20, 3).view(-1, 1024))
        card = torch.zeros_like(rows, device="cuda")
        at = torch.cat([torch.arange(5, 905), torch.arange(1000, 1010)])
        want = moved(card, rows, at, at + 3)
        with on(stream):
            transfer(card, rows, at, at + 3, row_ndim=1)
        torch.cuda.synchronize()
        assert_same_bytes(card, want, "device rows")
        back = moved(rows, card, at + 7, at)
        with on(stream):
            transfer(rows, card, at + 7, at, row_ndim=1)
        torch.cuda.synchronize()
        assert_same_bytes(rows, back, "host rows")
        with on(stream):
            sgl_kvio.memcpy_batch([card], [block], [100], [50], [900_000])
        torch.cuda.synchronize()
        assert_same_bytes(card.view(-1)[100:900_100], block[50:900_050], "copied bytes")
    finally:
        sgl_kvio.host_unregister(block)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_come_between_what_the_stream_did_before_and_does_after(direction, stream):
    """The source is written late before the call and again right after it; nothing waits."""
    count = 300  # no more than a queue holds without waiting
    dst, src = pools(direction, slots=1200)
    at, frm = cases.random_slots(count, 1, 1200), cases.random_slots(count, 2, 1200)
    every = torch.arange(1200, device="cuda")
    before, after = (
        torch.full(src.shape, value, dtype=src.dtype, device="cuda") for value in (2, 7)
    )
    want = moved(dst, before, at, frm)

    def write(content):
        sgl_kvio.transfer(src, content, every, every, backend="register")

    first = torch.empty_like(dst, pin_memory=direction == "d2h")
    with on(stream) as current:
        write(before)
        transfer(first, src, at, frm)  # allocates what it needs once
        current.synchronize()
        write(after)
        torch.cuda._sleep(LONG)
        write(before)
        busy = not current.query()  # not so under a tool that makes every launch wait
        transfer(dst, src, at, frm)
        write(after)
        waited = busy and current.query()
        current.synchronize()
    assert_same_bytes(dst, want, "destination")
    assert_same_bytes(src, after, "source")
    assert not waited, "the call waited for its stream"


@pytest.mark.parametrize("stream", STREAMS)
def test_the_next_kernel_of_the_stream_sees_the_copied_rows(stream):
    dst, src = pools("h2d", slots=4096, row=(8, 128))
    at, frm = cases.random_slots(3000, 1, 4096), cases.random_slots(3000, 2, 4096)
    want = moved(dst, src, at, frm)
    with on(stream) as current:
        transfer(dst, src, at, frm)
        seen = dst.clone()
        current.synchronize()
    assert_same_bytes(seen, want, "what the next kernel read")


@pytest.mark.parametrize("stream", STREAMS)
def test_indices_may_change_right_after_the_call(stream):
    dst, src = pools("h2d")
    at, frm = cases.random_slots(200, 1, 512), cases.random_slots(200, 2, 512)
    want = moved(dst, src, at, frm)
    with on(stream):
        torch.cuda._sleep(LONG)
        transfer(dst, src, at, frm)
        at.fill_(0)
        frm.fill_(0)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


def test_calls_of_several_threads_on_the_legacy_stream_do_not_disturb_each_other():
    sides = [pools("h2d", slots=2048, row=(1, 144), seed=2 * i) for i in range(8)]
    at, frm = cases.random_slots(2048, 1, 2048), cases.random_slots(2048, 2, 2048)
    want = [moved(dst, src, at, frm) for dst, src in sides]
    torch.cuda.synchronize()

    def restore(pair):
        for _ in range(5):
            transfer(*pair, at, frm)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(restore, sides))
    torch.cuda.synchronize()
    for (dst, _), good in zip(sides, want, strict=True):
        assert_same_bytes(dst, good, "destination")


# Captures.


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_replay_copies_the_rows_of_its_time_by_the_indices_of_the_capture(direction):
    dst, src = pools(direction)
    at, frm = cases.random_slots(40, 1, 512), cases.random_slots(40, 2, 512)
    slots = at.clone(), frm.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transfer(dst, src, at, frm)
    at.fill_(0)
    frm.fill_(0)
    for seed in (50, 60):
        src.copy_(cases.contiguous_pool(src.shape, src.dtype, seed))
        dst.copy_(cases.contiguous_pool(dst.shape, dst.dtype, seed + 1))
        torch.cuda.synchronize()
        want = moved(dst, src, *slots)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(dst, want, "destination")


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_explain_says_that_a_capture_takes_single_copies():
    dst, src = pools("h2d")
    at = cases.random_slots(40, 1, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        text = sgl_kvio.explain(dst, src, at, at, backend="copy_engine")
        assert "capture: the graph keeps the values of these indices" in text
    assert "captured" in text, text


# What explain says, what is refused.


@pytest.mark.parametrize("stream", STREAMS)
def test_explain_counts_entries_and_names_the_stream(stream):
    dst, src = pools("h2d")
    at = torch.tensor([1, 2, 3, 7, 9])
    before = dst.clone()
    with on(stream):
        text = sgl_kvio.explain(dst, src, at, at, backend="copy_engine")
    assert "copy_engine" in text
    assert "driver copies: 3 " in text, text
    if sgl_kvio.capabilities()["entry_points"]["cuMemcpyBatchAsync"]:
        assert ("legacy" in text) == (stream == "legacy"), text
    assert "driver refused" not in text, text
    torch.cuda.synchronize()
    assert_same_bytes(dst, before, "destination")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_indices_are_refused_by_name(direction):
    dst, src = pools(direction)
    at = cases.random_slots(40, 1, 512).cuda()
    with refused("backend|dst_indices", got="copy_engine", unchanged=[dst]):
        transfer(dst, src, at, at)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_host_memory_that_is_not_page_locked_is_refused_before_anything_moves(side):
    good, bad = pools("h2d" if side == "src" else "d2h"), pools("h2d" if side == "src" else "d2h")
    lists = {"dst": [good[0], bad[0]], "src": [good[1], bad[1]]}
    lists[side][1] = lists[side][1].clone()
    at = cases.random_slots(40, 1, 512)
    with refused(rf"{side}\[1\]", got="page-locked", unchanged=lists["dst"]):
        transfer(lists["dst"], lists["src"], at, at)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_to_move_is_no_error(direction):
    dst, src = pools(direction)
    before = dst.cpu()
    none = torch.empty(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    transfer([dst], [src], none, none)
    transfer([dst[:, :, :0]], [src[:, :, :0]], one, one)
    torch.cuda.synchronize()
    assert_same_bytes(dst, before, "destination")


# kvio::memcpy_batch.


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_thousands_of_byte_ranges_of_any_size_arrive(direction, stream):
    count, span = 5000, 700
    src = cases.put(cases.random_bytes(count * span, 0), direction[0])
    dst = cases.put(cases.random_bytes(count * span, 1), direction[2])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    to = [k * span + k % 7 for k in range(count)]
    frm = [k * span + k % 5 for k in order]
    nbytes = [k % 690 for k in range(count)]
    want, content = dst.cpu().clone(), src.cpu()
    for k in range(count):
        want[to[k] : to[k] + nbytes[k]] = content[frm[k] : frm[k] + nbytes[k]]
    with on(stream):
        sgl_kvio.memcpy_batch([dst], [src], to, frm, nbytes)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_byte_ranges_of_many_tensors_arrive(direction, stream):
    count = 300
    src = [cases.put(cases.random_bytes(1000, i), direction[0]) for i in range(count)]
    dst = [cases.put(torch.zeros(1000, dtype=torch.uint8), direction[2]) for _ in range(count)]
    with on(stream):
        sgl_kvio.memcpy_batch(dst, src, [0] * count, [10] * count, [990] * count)
    torch.cuda.synchronize()
    for got, content in zip(dst, src, strict=True):
        assert_same_bytes(got[:990], content[10:], "copied bytes")
        assert not got[990:].any()
