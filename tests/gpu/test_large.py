"""Pools above 4 GiB: offsets beyond 31 and 32 bits, on the host and on the GPU."""

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, error_text, needs_bulk_copies

TMA = pytest.param("tma", marks=needs_bulk_copies)
PLACES = pytest.mark.parametrize(
    ("index_place", "backend"),
    [
        ("cpu", "register"),
        ("cuda", "register"),
        pytest.param("cpu", "tma", marks=needs_bulk_copies),
        pytest.param("cuda", "tma", marks=needs_bulk_copies),
        ("cpu", "copy_engine"),
    ],
)

ROW = 1152
SIZE = (9 << 30) // 2
LAYERS = 32
EDGES = (0, 1 << 31, 1 << 32, SIZE)


@pytest.fixture(scope="module")
def host():
    """4.5 GiB of page-locked host memory in one registration made of chunks."""
    with open("/proc/meminfo") as lines:
        facts = dict(line.split(":") for line in lines)
    if int(facts["MemAvailable"].split()[0]) << 10 < SIZE + (2 << 30):
        pytest.skip("needs 6.5 GiB of free host memory")
    block = cases.page_aligned_bytes(SIZE)
    # Whole pages of every layout here, as HostKVPool does it: no row lies across two chunks.
    sgl_kvio.host_register(block, (1 << 30) // (LAYERS * ROW) * (LAYERS * ROW))
    yield block
    sgl_kvio.host_unregister(block)


@pytest.fixture(scope="module")
def device():
    if torch.cuda.mem_get_info()[0] < SIZE + (1 << 30):
        pytest.skip("needs 5.5 GiB of free GPU memory")
    return torch.empty(SIZE, dtype=torch.uint8, device="cuda")


def rows_at_edges(num_rows, pitch):
    """Row numbers beside each edge, so that offsets lie on both sides of it."""
    near = [edge // pitch + step for edge in EDGES for step in (-1, 0, 1)]
    return torch.tensor(sorted({row for row in near if 0 <= row < num_rows}))


def check_rows(dst, src, dst_rows, src_rows, index_dtype, index_place, **options):
    """Moves the rows of two [rows, bytes] views; the rows beside each destination stay."""
    last = dst.shape[0] - 1
    around = torch.cat([dst_rows - 1, dst_rows, dst_rows + 1]).clamp(0, last).unique()
    src[src_rows.to(src.device)] = cases.contiguous_pool(
        (len(src_rows), src.shape[1]), torch.uint8, 1
    ).to(src.device)
    dst[around.to(dst.device)] = cases.contiguous_pool(
        (len(around), dst.shape[1]), torch.uint8, 2
    ).to(dst.device)
    torch.cuda.synchronize()
    want = dst[around.to(dst.device)].cpu()
    want[torch.searchsorted(around, dst_rows)] = src[src_rows.to(src.device)].cpu()
    at, frm = (rows.to(index_dtype).to(index_place) for rows in (dst_rows, src_rows))
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=1, **options)
    sgl_kvio.check()
    assert_same_bytes(dst[around.to(dst.device)], want, "rows at and around the destinations")


def row_first(block):
    return block[: SIZE // ROW * ROW].view(-1, ROW)


def one_layer_of_page_first(block):
    """Row pitch of 32 layers: few slots, far offsets."""
    pitch = LAYERS * ROW
    return block[: SIZE // pitch * pitch].view(-1, LAYERS, ROW)[:, LAYERS - 1]


@PLACES
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("view", [row_first, one_layer_of_page_first])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_rows_beyond_4_gib_are_found(
    host, device, direction, view, index_dtype, index_place, backend
):
    src, dst = (view(host), view(device)) if direction == "h2d" else (view(device), view(host))
    pitch = src.stride(0)
    rows = rows_at_edges(src.shape[0], pitch)
    check_rows(dst, src, rows, rows.flip(0), index_dtype, index_place, backend=backend)


@pytest.mark.parametrize("backend", ["register", TMA, "copy_engine"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_beyond_4_gib_are_found(host, device, page_size, backend):
    """The same bytes as [pages, page_size, row] views, by page index."""
    slots = SIZE // ROW // 64 * 64
    paged_host, paged_device = (block[: slots * ROW].view(-1, 64, ROW) for block in (host, device))
    page_bytes = page_size * ROW
    pages = rows_at_edges(slots // page_size, page_bytes)
    flat_host, flat_device = (block[: slots * ROW].view(-1, page_bytes) for block in (host, device))
    flat_host[pages] = cases.contiguous_pool((len(pages), page_bytes), torch.uint8, 3)
    flat_device[pages.cuda()] = 0
    want = flat_host[pages.flip(0)]
    place = "cpu" if backend == "copy_engine" else "cuda"
    at, frm = pages.to(place).int(), pages.flip(0).to(place).int()
    options = {"row_ndim": 1, "page_size": page_size, "index_unit": "page", "backend": backend}
    sgl_kvio.transfer(paged_device, paged_host, at, frm, **options)
    sgl_kvio.check()
    assert_same_bytes(flat_device[pages.cuda()], want, "pages")


@pytest.mark.parametrize("backend", ["register", TMA])
def test_a_row_beyond_the_pool_is_a_fault_here_too(host, device, backend):
    src, dst = row_first(host), row_first(device)
    last = dst.shape[0] - 1
    dst[last] = 9
    at = torch.tensor([dst.shape[0]], device="cuda", dtype=torch.int32)
    sgl_kvio.transfer(dst, src, at, torch.zeros_like(at), row_ndim=1, backend=backend)
    torch.cuda.synchronize()
    assert sgl_kvio.take_fault() == [1, 0, last + 1, last + 1]
    assert (dst[last] == 9).all()


def test_byte_copies_beyond_4_gib_are_found(host, device):
    offsets = [(1 << 31) - 100, (1 << 32) - 100, SIZE - 300]
    for offset in offsets:
        host[offset : offset + 300] = cases.random_bytes(300, offset % 97)
        device[offset : offset + 300] = 0
    sgl_kvio.memcpy_batch([device], [host], offsets, offsets, [300] * 3)
    torch.cuda.synchronize()
    for offset in offsets:
        span = slice(offset, offset + 300)
        assert_same_bytes(device[span], host[span], f"bytes at {offset}")


def test_a_paged_pool_of_more_than_31_bits_of_slots_is_served_or_refused_by_name(device):
    """One-byte rows in pages of 64 with a gap: 2^31 slots and a few in 2.03 GiB."""
    pages = (1 << 25) + 4
    pool = device.as_strided((pages, 64, 1), (65, 1, 1))
    slot = pages * 64 - 70
    content = torch.full((4, 1), 7, dtype=torch.uint8, device="cuda")
    page, offset = slot // 64, slot % 64
    pool[page] = 1
    at = torch.tensor([slot], device="cuda")
    before = device[:4096].clone()
    text = error_text(sgl_kvio.transfer, pool, content, at, torch.zeros_like(at), row_ndim=1)
    sgl_kvio.check()
    if text:
        assert "dst[0]" in text
        return
    assert pool[page, offset] == 7
    assert pool[page].sum() == 63 + 7
    assert_same_bytes(device[:4096], before, "bytes near the start")
