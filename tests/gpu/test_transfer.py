"""kvio::transfer and kvio::memcpy_batch between page-locked host memory and a GPU."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import transfers

import cases
import sgl_kvio
from reference import (
    assert_same_bytes,
    check_case,
    check_transfer,
    moved,
    needs_bulk_copies,
    refused,
)

CASES = cases.selected(gpu=True)
DIRECTIONS = ("h2d", "d2h", "d2d")
TMA = pytest.param("tma", marks=needs_bulk_copies)


def register(*arguments, **options):
    """The register kernel, but between host pools with CPU indices: there no GPU takes part."""
    on_gpu = any(item.is_cuda for item in (*arguments[0], *arguments[1], *arguments[2:]))
    sgl_kvio.transfer(*arguments, backend="register" if on_gpu else "auto", **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, register, "cuda")


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
@pytest.mark.parametrize("prefer", ["throughput", "quiet"])
def test_whatever_auto_chooses_moves_the_named_rows_and_no_other_byte(case, prefer):
    check_case(case, partial(sgl_kvio.transfer, prefer=prefer), "cuda")


@settings(max_examples=100)
@given(transfers(), st.sampled_from([*DIRECTIONS, "h2h"]), st.booleans(), st.booleans())
def test_any_two_pools_exchange_exactly_the_named_rows(transfer, direction, gpu_indices, auto):
    sides = {
        name: cases.Pool(pool.spec, cases.put(pool.storage, place))
        for name, pool, place in (
            ("src", transfer.src, direction[0]),
            ("dst", transfer.dst, direction[2]),
        )
    }
    indices = {
        name: getattr(transfer, name).cuda() if gpu_indices else getattr(transfer, name)
        for name in ("dst_indices", "src_indices")
    }
    check_transfer(replace(transfer, **sides, **indices), sgl_kvio.transfer if auto else register)


def many_rows(shape, slots, row_bytes, place, seed):
    """A pool of `slots` rows in a block of bytes: the block and the [slots, pieces, bytes] view."""
    pieces, gap = {"packed": (1, 0), "gap_48": (1, 48), "gap_1": (1, 1), "pieces": (4, 16)}[shape]
    pieces = pieces if row_bytes % pieces == 0 else 1
    row = (slots, pieces, row_bytes // pieces + gap)
    block = cases.put(cases.contiguous_pool(row, torch.uint8, seed), place)
    return block, block[:, :, : row_bytes // pieces]


# Counts of 16-byte packages around the kernel's steps, besides the real rows.
MANY_ROW_BYTES = sorted({*cases.ROW_BYTES, 24, 48, 80, 192, 320, 384, 768, 1536, 4608, 65536})


@pytest.mark.parametrize("row_bytes", MANY_ROW_BYTES)
@pytest.mark.parametrize("shape", ["packed", "gap_48", "gap_1", "pieces"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_call_of_many_rows_is_exact_with_any_number_of_ctas(direction, shape, row_bytes):
    slots = min(20_000, max(70, (6 << 20) // row_bytes))
    _, src = many_rows(shape, slots, row_bytes, direction[0], 0)
    dst_shape = "packed" if shape == "gap_1" else shape
    block, dst = many_rows(dst_shape, slots + 3, row_bytes, direction[2], 1)
    generator = torch.Generator().manual_seed(2)
    frm = torch.randperm(slots, generator=generator)
    at = torch.randperm(slots + 3, generator=generator)[:slots]
    at[: slots // 2] = at[: slots // 2].sort().values
    poison = block.clone()
    want = poison.cpu()
    want[:, :, : dst.shape[2]] = moved(dst, src.reshape(slots, *dst.shape[1:]), at, frm)
    at, frm = at.cuda(), frm.cuda()
    for num_blocks in (0, 1, 2, 7):
        block.copy_(poison)
        sgl_kvio.transfer(dst, src, at, frm, num_blocks=num_blocks, backend="register")
        torch.cuda.synchronize()
        assert_same_bytes(block, want, f"destination, num_blocks={num_blocks}")


@pytest.mark.parametrize("row_bytes", [1, 17, 31, 130, 1159, 9001])
@pytest.mark.parametrize("count", [1, 2, 32, 33, 65])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_last_bytes_of_a_row_arrive_however_few_rows_there_are(direction, count, row_bytes):
    """Rows wider than their loads, at a wide pitch; a warp may find itself with one row alone."""
    pitch = (row_bytes + 63) // 32 * 32
    blocks = [
        cases.put(cases.contiguous_pool((count + 5, 1, pitch), torch.uint8, seed), place)
        for seed, place in ((0, direction[0]), (1, direction[2]))
    ]
    src, dst = (block[:, :, :row_bytes] for block in blocks)
    at, frm = torch.arange(count) + 3, torch.arange(count).flip(0)
    want = blocks[1].cpu().clone()
    want[:, :, :row_bytes] = moved(dst, src, at, frm)
    sgl_kvio.transfer(dst, src, at.cuda(), frm.cuda(), backend="register")
    torch.cuda.synchronize()
    assert_same_bytes(blocks[1], want, "destination")


@pytest.mark.parametrize("row_bytes", [24, 130, 512, 576])
@pytest.mark.parametrize("page_size", [3, 64, 256])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", ["auto", "register"])
def test_whole_pages_are_exact_however_long(backend, direction, page_size, row_bytes):
    pages = 40
    src = cases.put(
        cases.contiguous_pool((pages, page_size, row_bytes), torch.uint8, 0), direction[0]
    )
    dst = cases.put(
        cases.contiguous_pool((pages, page_size, row_bytes), torch.uint8, 1), direction[2]
    )
    generator = torch.Generator().manual_seed(2)
    at, frm = (torch.randperm(pages, generator=generator)[:25] for _ in range(2))
    want = moved(dst, src, at, frm)
    options = {
        "row_ndim": 1,
        "page_size": page_size,
        "index_unit": "page",
        "backend": backend,
    }
    sgl_kvio.transfer(dst, src, at.cuda(), frm.cuda(), **options)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 256, 257, 600])
@pytest.mark.parametrize("backend", ["register", TMA, "copy_engine"])
def test_one_call_serves_many_buffers(backend, count, index_place):
    if (backend, index_place) == ("copy_engine", "cuda"):
        pytest.skip("the copy engine needs CPU indices")
    content = cases.contiguous_pool((count, 8, 2, 20), torch.bfloat16, 0)
    src, dst = content.pin_memory(), torch.zeros_like(content, device="cuda")
    at, frm = torch.tensor([6, 0, 3]), torch.tensor([1, 7, 1])
    want = torch.stack([moved(dst[i], src[i], at, frm) for i in range(count)])
    lists = list(dst.unbind(0)), list(src.unbind(0))
    sgl_kvio.transfer(*lists, at.to(index_place), frm.to(index_place), backend=backend)
    assert_same_bytes(dst, want, "destination")


def test_pairs_of_one_call_may_differ_in_rows_dtypes_and_alignment():
    shapes = [((2, 8), torch.float32), ((3, 5), torch.uint8)]
    shapes += [((1, 65), torch.bfloat16), ((8, 128), torch.float16)]
    src = [
        cases.contiguous_pool((32, *r), t, 2 * i).pin_memory() for i, (r, t) in enumerate(shapes)
    ]
    dst = [cases.contiguous_pool((40, *r), t, 2 * i + 1).cuda() for i, (r, t) in enumerate(shapes)]
    at, frm = torch.tensor([4, 39, 31, 0]), torch.tensor([9, 10, 0, 0])
    want = [moved(d, s, at, frm) for d, s in zip(dst, src, strict=True)]
    sgl_kvio.transfer(dst, src, at.cuda(), frm.cuda())
    for got, good in zip(dst, want, strict=True):
        assert_same_bytes(got, good, "destination")


@pytest.mark.parametrize("empty_place", ["h", "d"])
def test_a_pair_of_empty_rows_does_not_disturb_its_neighbours(empty_place):
    src = cases.contiguous_pool((32, 2, 8), torch.float32, 0).pin_memory()
    dst = cases.contiguous_pool((32, 2, 8), torch.float32, 1).cuda()
    if empty_place == "d":
        src = src.cuda()
    nothing = torch.empty(32, 2, 0)
    at, frm = torch.tensor([3, 30]), torch.tensor([0, 1])
    want = moved(dst, src, at, frm)
    dsts, srcs = [nothing.cuda(), dst], [cases.put(nothing, empty_place), src]
    sgl_kvio.transfer(dsts, srcs, at.cuda(), frm.cuda())
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_strided_and_expanded_indices_are_read_with_their_strides(index_place):
    src = cases.contiguous_pool((64, 2, 8), torch.float32, 0).pin_memory()
    dst = cases.contiguous_pool((64, 2, 8), torch.float32, 1).cuda()
    line = torch.arange(64, device=index_place)
    want = moved(dst, src, line[1::2].cpu(), line[::2].cpu())
    sgl_kvio.transfer(dst, src, line[1::2], line[::2])
    assert_same_bytes(dst, want, "destination")
    want = moved(dst, src, line[:10].cpu(), line[5:6].expand(10).cpu())
    sgl_kvio.transfer(dst, src, line[:10], line[5:6].expand(10))
    assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_nothing_to_move_is_no_error(index_place):
    src = cases.contiguous_pool((16, 2, 8), torch.float32, 0).pin_memory()
    dst = cases.contiguous_pool((16, 2, 8), torch.float32, 1).cuda()
    before = dst.cpu()
    none = torch.empty(0, dtype=torch.int64, device=index_place)
    one = torch.zeros(1, dtype=torch.int64, device=index_place)
    sgl_kvio.transfer([dst], [src], none, none)
    sgl_kvio.transfer([], [], one, one)
    sgl_kvio.transfer([dst[:0]], [src[:0]], none, none)
    sgl_kvio.transfer([dst[:, :, :0]], [src[:, :, :0]], one, one)
    sgl_kvio.memcpy_batch([dst], [src], [], [], [])
    sgl_kvio.memcpy_batch([dst], [src], [0], [0], [0])
    assert_same_bytes(dst, before, "destination")


def test_explain_names_the_backend_and_the_grid_and_moves_nothing():
    src = cases.contiguous_pool((4096, 2, 128), torch.float32, 0).pin_memory()
    dst = torch.zeros_like(src, device="cuda")
    at = torch.arange(4096, device="cuda")
    text = sgl_kvio.explain([dst], [src], at, at, backend="register", num_blocks=3)
    assert text.startswith("backend: register\n")
    assert re.search(r"\b3 CTAs", text), text
    torch.cuda.synchronize()
    assert not dst.any()


def test_threads_with_streams_of_their_own_may_call_at_the_same_time():
    src = [cases.contiguous_pool((2048, 1, 144), torch.float32, i).pin_memory() for i in range(8)]
    dst = [torch.zeros_like(s, device="cuda") for s in src]
    at, frm = torch.randperm(2048), torch.randperm(2048)
    torch.cuda.synchronize()

    def restore(pair):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                sgl_kvio.transfer(*pair, at, frm)
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(restore, zip(dst, src, strict=True)))
    for d, s in zip(dst, src, strict=True):
        assert_same_bytes(d, moved(torch.zeros_like(s), s, at, frm), "destination")


@pytest.mark.parametrize("call", ["transfer", "memcpy_batch"])
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_the_first_gpu_call_of_a_thread_may_be_ours(call, index_place):
    """A new thread has no context yet, and the driver then knows no page-locked memory."""
    src = cases.contiguous_pool((64, 2, 8), torch.float32, 0).pin_memory()
    dst = torch.zeros_like(src, device="cuda")
    at = torch.arange(64, device=index_place)
    sgl_kvio.transfer(dst, src, at, at)  # what a process looks up once is known from here on
    dst.zero_()
    torch.cuda.synchronize()

    def restore():
        if call == "transfer":
            sgl_kvio.transfer(dst, src, at, at)
        else:
            sgl_kvio.memcpy_batch([dst], [src], [0], [0], [src.nbytes])

    with ThreadPoolExecutor(1) as thread:
        thread.submit(restore).result()
    torch.cuda.synchronize()
    assert_same_bytes(dst, src, "destination")


@pytest.mark.parametrize("layout", cases.HOST_LAYOUTS)
def test_a_host_pool_keeps_what_the_gpu_wrote_back(layout):
    layers, pages, size, heads, dim = 4, 12, 16, 4, 80
    content = cases.contiguous_pool((layers, 2, pages * size, heads, dim), torch.bfloat16, 0)
    device = content.cuda()
    views = [device[layer, buffer] for layer in range(layers) for buffer in range(2)]
    with sgl_kvio.HostKVPool(
        "mha",
        layout,
        num_pages=pages,
        page_size=size,
        num_layers=layers,
        num_heads=heads,
        head_dim=dim,
    ) as pool:
        assert pool.is_pinned
        host_pages = pool.alloc(5).flip(0)
        device_pages = torch.tensor([7, 2, 11, 0, 5])
        options = {"page_size": size, "index_unit": "page"}
        sgl_kvio.transfer(pool.all_layers(), views, host_pages, device_pages, **options)
        torch.cuda.synchronize()
        device.zero_()
        sgl_kvio.transfer(views, pool.all_layers(), device_pages, host_pages, **options)
        torch.cuda.synchronize()
    by_page = content.unflatten(2, (pages, size)).clone()
    by_page[:, :, [p for p in range(pages) if p not in device_pages.tolist()]] = 0
    assert_same_bytes(device, by_page.flatten(2, 3), "device pool")


# Page-locked memory from everywhere.


@pytest.fixture
def block():
    return cases.page_aligned_bytes(1 << 20)


def restore_is_exact(host):
    """Moves every fourth KiB of `host` (uint8) to the GPU and back behind it."""
    host.copy_(cases.random_bytes(host.numel(), 3))
    rows = host.view(-1, 1024)
    dst = torch.zeros_like(rows, device="cuda")
    at = torch.arange(0, rows.shape[0], 4, device="cuda")
    want = moved(dst, rows, at.cpu(), at.cpu())
    sgl_kvio.transfer(dst, rows, at, at, row_ndim=1)
    assert_same_bytes(dst, want, "destination")
    back = moved(rows, dst, (at + 1).cpu(), at.cpu())
    sgl_kvio.transfer(rows, dst, at + 1, at, row_ndim=1)
    torch.cuda.synchronize()
    assert_same_bytes(rows, back, "host rows")


@pytest.mark.parametrize("chunk_bytes", [0, 4096, 3 * 4096, 1 << 19, 1 << 22])
def test_registered_chunks_serve_as_one_registration(block, chunk_bytes):
    sgl_kvio.host_register(block, chunk_bytes)
    restore_is_exact(block)
    sgl_kvio.host_unregister(block)


def test_memory_that_somebody_else_page_locked_is_served(block):
    runtime = torch.cuda.cudart()
    torch.cuda.init()
    assert int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)) == 0
    try:
        restore_is_exact(block)
    finally:
        assert int(runtime.cudaHostUnregister(block.data_ptr())) == 0


def test_registering_the_same_range_again_does_nothing(block):
    sgl_kvio.host_register(block)
    sgl_kvio.host_register(block)
    sgl_kvio.host_register(block, 4096)
    restore_is_exact(block)
    sgl_kvio.host_unregister(block)
    with pytest.raises(RuntimeError, match=r"kvio::host_unregister: tensor"):
        sgl_kvio.host_unregister(block)


@pytest.mark.parametrize("part", [slice(0, 8192), slice(4096, 1 << 20), slice(4096, 8192)])
def test_a_range_that_overlaps_a_registration_is_refused_and_leaves_no_error(block, part):
    sgl_kvio.host_register(block)
    with pytest.raises(RuntimeError, match=r"kvio::host_register: tensor.*overlap"):
        sgl_kvio.host_register(block[part])
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    restore_is_exact(block)
    sgl_kvio.host_unregister(block)


def test_a_registration_that_fails_half_way_is_rolled_back(block):
    runtime = torch.cuda.cudart()
    torch.cuda.init()
    half = block.numel() // 2
    assert int(runtime.cudaHostRegister(block.data_ptr() + half, half, 0)) == 0
    with pytest.raises(RuntimeError, match=r"kvio::host_register: "):
        sgl_kvio.host_register(block, 4096)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    rows, at = block[:half].view(-1, 1024), torch.zeros(1, dtype=torch.int64, device="cuda")
    card = torch.zeros(4, 1024, dtype=torch.uint8, device="cuda")
    with refused(r"src\[0\]", got="not page-locked"):
        sgl_kvio.transfer(card, rows, at, at, row_ndim=1)
    assert int(runtime.cudaHostUnregister(block.data_ptr() + half)) == 0
    sgl_kvio.host_register(block, 4096)
    restore_is_exact(block)
    sgl_kvio.host_unregister(block)


def test_unregistering_waits_for_work_that_is_still_queued(block):
    sgl_kvio.host_register(block)
    rows = block.view(-1, 1024)
    rows.copy_(cases.random_bytes(rows.numel(), 4).view(-1, 1024))
    card = torch.zeros_like(rows, device="cuda")
    at = torch.arange(rows.shape[0], device="cuda")
    torch.cuda._sleep(200_000_000)
    sgl_kvio.transfer(card, rows, at, at, row_ndim=1)
    sgl_kvio.host_unregister(block)
    assert_same_bytes(card, rows, "destination")


UNREGISTER_IN_A_CAPTURE = """
import torch
import sgl_kvio

block = torch.zeros(1 << 21, dtype=torch.uint8)
start = -block.data_ptr() % 4096
block = block[start : start + (1 << 20)]
sgl_kvio.host_register(block)
rows, card = block.view(-1, 1024), torch.zeros(1024, 1024, dtype=torch.uint8, device="cuda")
at = torch.arange(1024, device="cuda")
stream = torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, stream=stream):
        card.add_(1)
        try:
            sgl_kvio.host_unregister(block)
        except RuntimeError as error:
            print(error)
except RuntimeError:
    pass  # the capture is lost, by CUDA's rule
rows.fill_(7)
sgl_kvio.transfer(card, rows, at, at, row_ndim=1)
torch.cuda.synchronize()
print("restored", bool((card == 7).all()))
sgl_kvio.host_unregister(block)
"""


def test_unregistering_during_a_capture_is_refused_and_leaves_the_memory_registered():
    done = subprocess.run(
        [sys.executable, "-c", UNREGISTER_IN_A_CAPTURE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("kvio::host_unregister: waiting for the GPUs")
    assert last == "restored True"


def test_only_the_whole_registered_range_can_be_unregistered(block):
    sgl_kvio.host_register(block)
    for wrong in (block[:4096], block[4096:]):
        with pytest.raises(RuntimeError, match="kvio::host_unregister: tensor is not a range"):
            sgl_kvio.host_unregister(wrong)
    with pytest.raises(RuntimeError, match="kvio::host_unregister: tensor is on cuda:0"):
        sgl_kvio.host_unregister(torch.zeros(4096, dtype=torch.uint8, device="cuda"))
    restore_is_exact(block)
    sgl_kvio.host_unregister(block)


@pytest.mark.parametrize("device_index", [-2, 64, 1 << 32])
def test_a_device_index_that_cannot_be_is_refused(block, device_index):
    for call in (sgl_kvio.host_register, sgl_kvio.host_unregister, sgl_kvio.device_pointer):
        with pytest.raises(RuntimeError, match=f"device_index is {device_index}"):
            call(block, device_index=device_index)
    for call in (sgl_kvio.take_fault, sgl_kvio.create_stream):
        with pytest.raises(RuntimeError, match=f"device_index is {device_index}"):
            call(device_index)


def test_no_byte_copies_are_no_error_on_a_gpu():
    card, host = torch.zeros(8, device="cuda"), torch.zeros(8)
    sgl_kvio.memcpy_batch([], [card], [], [], [])
    sgl_kvio.memcpy_batch([card], [host], [], [], [])
    sgl_kvio.memcpy_batch([card], [host], [0], [0], [0])


def test_the_device_pointer_of_a_view_keeps_its_offset(block):
    sgl_kvio.host_register(block)
    first = sgl_kvio.device_pointer(block)
    assert sgl_kvio.device_pointer(block[4100:]) == first + 4100
    card = torch.zeros(8, device="cuda")
    assert sgl_kvio.device_pointer(card[2:]) == card.data_ptr() + 8
    sgl_kvio.host_unregister(block)


# kvio::memcpy_batch.


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_byte_ranges_are_copied_exactly(direction):
    count, span = 500, 700
    src = cases.put(cases.random_bytes(count * span, 0), direction[0])
    dst = cases.put(cases.random_bytes(count * span, 1), direction[2])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    to = [k * span + k % 7 for k in range(count)]
    frm = [k * span + k % 5 for k in order]
    nbytes = [k % 690 for k in range(count)]
    want = dst.cpu().clone()
    content = src.cpu()
    for k in range(count):
        want[to[k] : to[k] + nbytes[k]] = content[frm[k] : frm[k] + nbytes[k]]
    sgl_kvio.memcpy_batch([dst], [src], to, frm, nbytes)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")


def test_byte_copies_follow_the_current_stream():
    src = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    dst = torch.zeros(1 << 16, dtype=torch.uint8).pin_memory()
    stream = torch.cuda.Stream()
    sgl_kvio.memcpy_batch([dst], [src], [0], [0], [1 << 16])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        src.fill_(7)
        busy = not stream.query()  # not so under a tool that makes every launch wait
        sgl_kvio.memcpy_batch([dst], [src], [0], [0], [1 << 16])
        waited = busy and stream.query()
    stream.synchronize()
    assert (dst == 7).all()
    assert not waited, "the call waited for its stream"


@pytest.mark.parametrize("side", ["dst", "src"])
def test_byte_copies_refuse_memory_that_is_not_page_locked(side):
    tensors = {"dst": torch.zeros(64, device="cuda"), "src": torch.ones(64, device="cuda")}
    tensors[side] = tensors[side].cpu()
    with refused(rf"(copy \w+ )?{side}\[0\]", op="memcpy_batch", unchanged=[tensors["dst"]]):
        sgl_kvio.memcpy_batch([tensors["dst"]], [tensors["src"]], [0], [0], [64])
