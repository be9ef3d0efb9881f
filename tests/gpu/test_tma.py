"""The tma backend: bulk copies and boxes through a ring, every byte compared, faults, graphs."""

import functools

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, check_transfer, moved, needs_bulk_copies, refused

pytestmark = needs_bulk_copies

tma = functools.partial(sgl_kvio.transfer, backend="tma")


def piece_bytes(view, row_ndim):
    """Contiguous bytes at the end of a view's row dims."""
    count = 1
    for size, stride in zip(
        reversed(view.shape[-row_ndim:]), reversed(view.stride()[-row_ndim:]), strict=True
    ):
        if size != 1 and stride != count:
            break
        count *= size
    return count * view.element_size()


def fits_bulk_copies(transfer):
    """Whether every address and every copy of a call is a multiple of 16 bytes."""
    row_ndim = transfer.options["row_ndim"]
    pairs = list(
        zip(transfer.dst.views(transfer.layers), transfer.src.views(transfer.layers), strict=True)
    )
    for pair in pairs:
        if min(piece_bytes(view, row_ndim) for view in pair) % 16:
            return False
        piece = min(piece_bytes(view, row_ndim) for view in pair)
        for view in pair:
            steps = [
                stride * view.element_size()
                for size, stride in zip(view.shape, view.stride(), strict=True)
                if size > 1 and stride * view.element_size() >= piece
            ]
            if view.data_ptr() % 16 or any(step % 16 for step in steps):
                return False
    return True


CASES = [
    case
    for case in cases.selected(gpu=True)
    if case.row_bytes % 16 == 0 and (case.direction, case.index_place) != ("h2h", "cpu")
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moves_the_named_rows_and_no_other_byte_or_says_why_not(case):
    with case.open("cuda") as transfer:
        if fits_bulk_copies(transfer):
            check_transfer(transfer, tma)
        else:
            with refused("backend", got="16 bytes", unchanged=[transfer.dst]):
                transfer.run(tma)


def runs_of(lengths, slots, seed):
    """Slots in runs of random lengths, the runs in random order, every slot once."""
    generator = torch.Generator().manual_seed(seed)
    pieces, at = [], 0
    while at < slots:
        pick = int(torch.randint(len(lengths), (1,), generator=generator))
        pieces.append(torch.arange(at, min(slots, at + lengths[pick])))
        at += lengths[pick]
    return torch.cat([pieces[i] for i in torch.randperm(len(pieces), generator=generator)])


@pytest.mark.parametrize("row_bytes", [16, 48, 128, 512, 576, 1152, 2048, 8192, 40960])
@pytest.mark.parametrize("gap", [0, 48])
@pytest.mark.parametrize("lengths", [(1,), (1, 2, 5, 33, 70), (64,)], ids=str)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_more_chunks_than_stages_and_ctas(direction, lengths, gap, row_bytes):
    slots = min(9000, max(80, (5 << 20) // row_bytes))
    src = cases.put(cases.contiguous_pool((slots, row_bytes + gap), torch.uint8, 0), direction[0])
    block = cases.put(cases.contiguous_pool((slots + 3, row_bytes), torch.uint8, 1), direction[2])
    frm, at = runs_of(lengths, slots, 2), runs_of(lengths, slots, 3) + 3
    count = slots - 7  # the last chunk is a short one
    frm, at = frm[:count], at[:count]
    rows = src[:, :row_bytes]
    poison = block.clone()
    want = moved(poison, rows, at, frm)
    for num_blocks, page_size, dtype in (
        (0, 1, torch.int64),
        (1, 64, torch.int32),
        (7, 5, torch.int64),
    ):
        block.copy_(poison)
        tma(
            block,
            rows,
            at.to("cuda", dtype),
            frm.to("cuda", dtype),
            row_ndim=1,
            page_size=page_size,
            num_blocks=num_blocks,
        )
        torch.cuda.synchronize()
        assert_same_bytes(block, want, f"destination, num_blocks={num_blocks}")


@pytest.mark.parametrize("row_bytes", [32, 512, 576, 1024, 1152, 2048, 4096])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("pages", ["whole", "shifted", "shuffled", "units"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_page_first_pools_with_promises_kept_and_broken(direction, pages, page_size, row_bytes):
    """Rows at a pitch of several layers: boxes where whole pages move, rows where not."""
    layers, num_pages = 3, 20
    shape = (num_pages * page_size, layers, row_bytes)
    host = cases.contiguous_pool(shape, torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((layers, *shape[::2]), torch.uint8, 1).cuda()
    generator = torch.Generator().manual_seed(4)
    at, frm = (torch.randperm(num_pages, generator=generator)[:13] for _ in range(2))
    tokens = [(p[:, None] * page_size + torch.arange(page_size)).flatten() for p in (at, frm)]
    if pages == "shifted":
        tokens = [t[3:-2] for t in tokens]
    if pages == "shuffled":
        tokens[1] = tokens[1][torch.randperm(tokens[1].numel(), generator=generator)]
    host_views = [host[:, layer] for layer in range(layers)]
    card_views = [card[layer] for layer in range(layers)]
    dst, src = (card_views, host_views) if direction == "h2d" else (host_views, card_views)
    want = [moved(d, s, *tokens) for d, s in zip(dst, src, strict=True)]
    indices = [at.cuda(), frm.cuda()] if pages == "units" else [t.cuda() for t in tokens]
    unit = "page" if pages == "units" else "token"
    tma(dst, src, *indices, row_ndim=1, page_size=page_size, index_unit=unit)
    torch.cuda.synchronize()
    for got, wanted in zip(dst, want, strict=True):
        assert_same_bytes(got.contiguous(), wanted, f"{pages} pages of {page_size}")


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_head_pieces_of_whole_pages(direction, unit, heads):
    """The page_head layout (pages, heads, tokens, layers, dim): a box has three strides."""
    pages, size, layers, dim = 9, 16, 2, 256
    host = cases.contiguous_pool((pages, heads, size, layers, dim), torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((layers, pages, size, heads, dim), torch.uint8, 1).cuda()
    host_views = [host[:, :, :, layer].transpose(1, 2) for layer in range(layers)]
    card_views = [card[layer] for layer in range(layers)]
    dst, src = (card_views, host_views) if direction == "h2d" else (host_views, card_views)
    at, frm = torch.tensor([4, 0, 7, 2]), torch.tensor([8, 1, 3, 0])
    want = [d.cpu().clone() for d in dst]
    for wanted, source in zip(want, src, strict=True):
        wanted[at] = source.cpu()[frm]
    if unit == "token":
        at, frm = ((p[:, None] * size + torch.arange(size)).flatten() for p in (at, frm))
    tma(dst, src, at.cuda(), frm.cuda(), page_size=size, index_unit=unit)
    torch.cuda.synchronize()
    for got, wanted in zip(dst, want, strict=True):
        assert_same_bytes(got.contiguous(), wanted, "destination")


@pytest.mark.parametrize("layers", [9, 70, 300])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_more_buffers_than_one_launch_takes(layout, layers):
    slots, row = 64, 128
    host = cases.contiguous_pool((slots, layers, row), torch.uint8, 0).pin_memory()
    if layout == "layer_first":
        host = host.transpose(0, 1).contiguous().pin_memory().transpose(0, 1)
    card = cases.contiguous_pool((layers, slots, row), torch.uint8, 1).cuda()
    at = torch.arange(32) + 16
    want = card.cpu().clone()
    want[:, at] = host.transpose(0, 1)[:, :32]
    views = [[pool[layer] for layer in range(layers)] for pool in (card, host.transpose(0, 1))]
    tma(*views, at.cuda(), torch.arange(32).cuda(), row_ndim=1, page_size=16)
    torch.cuda.synchronize()
    assert_same_bytes(card, want, "destination")


@pytest.mark.parametrize("bad", [0, 37, 63, 64, 99])
@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize("pitch", [512, 1536])
def test_a_bad_index_skips_its_row_and_is_reported(pitch, side, bad):
    slots = 100
    host = cases.contiguous_pool((slots, pitch), torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((slots, 512), torch.uint8, 1).cuda()
    at, frm = torch.arange(slots), torch.arange(slots)
    keep = torch.arange(slots) != bad
    want = moved(card, host[:, :512], at[keep], frm[keep])
    indices = {"dst": at.clone(), "src": frm.clone()}
    indices[side][bad] = slots
    tma(card, host[:, :512], indices["dst"].cuda(), indices["src"].cuda(), row_ndim=1, page_size=20)
    with pytest.raises(
        RuntimeError, match=rf"{side}_indices\[{bad}\] was {slots}; it needs 0 to 99"
    ):
        sgl_kvio.check()
    assert_same_bytes(card, want, "destination")


@pytest.mark.parametrize("steps", [(1, 3), (2, 1), (5, 4)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_lists_may_have_strides(index_dtype, steps):
    slots, count = 3000, 2500
    host = cases.contiguous_pool((slots, 256), torch.uint8, 0).pin_memory()
    card = cases.contiguous_pool((slots, 256), torch.uint8, 1).cuda()
    generator = torch.Generator().manual_seed(6)
    at, frm = (torch.randperm(slots, generator=generator)[:count] for _ in range(2))
    want = moved(card, host, at, frm)
    lists = []
    for values, step in zip((at, frm), steps, strict=True):
        block = torch.full((count * step,), -1, dtype=index_dtype, device="cuda")
        block[::step] = values.to("cuda", index_dtype)
        lists.append(block[::step])
    tma(card, host, *lists, row_ndim=1)
    torch.cuda.synchronize()
    assert_same_bytes(card, want, "destination")


@pytest.mark.parametrize("pitch", [1024, 4096])
def test_a_replayed_graph_reads_the_indices_of_that_time(pitch):
    slots, size = 256, 16
    host = cases.contiguous_pool((slots, pitch), torch.uint8, 0).pin_memory()[:, :1024]
    card = torch.zeros(slots, 1024, dtype=torch.uint8, device="cuda")
    at = torch.arange(64, device="cuda")
    frm = torch.arange(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tma(card, host, at, frm, row_ndim=1, page_size=size)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        pages = torch.randperm(slots // size, generator=generator)[:4]
        tokens = (pages[:, None] * size + torch.arange(size)).flatten()
        scattered = torch.randperm(slots, generator=generator)[:64]
        at.copy_(scattered)
        frm.copy_(tokens)
        card.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = moved(torch.zeros_like(card), host, scattered, tokens)
        assert_same_bytes(card, want, "destination of a replay")


def test_two_streams_share_the_card():
    """Rings of two calls at once, in both directions."""
    host = [cases.contiguous_pool((4096, 1024), torch.uint8, s).pin_memory() for s in (0, 1)]
    card = [cases.contiguous_pool((4096, 1024), torch.uint8, s).cuda() for s in (2, 3)]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    tokens = (order[:, None] * 64 + torch.arange(64)).flatten().cuda()
    straight = torch.arange(4096, device="cuda")
    want = [
        moved(card[0], host[0], straight.cpu(), tokens.cpu()),
        moved(host[1], card[1], tokens.cpu(), straight.cpu()),
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            tma(card[0], host[0], straight, tokens, row_ndim=1, page_size=64)
        with torch.cuda.stream(streams[1]):
            tma(host[1], card[1], tokens, straight, row_ndim=1, page_size=64)
    torch.cuda.synchronize()
    assert_same_bytes(card[0], want[0], "restored")
    assert_same_bytes(host[1], want[1], "written back")


@pytest.mark.parametrize(("row", "start"), [(24, 0), (520, 0), (512, 8)])
def test_rows_that_bulk_copies_cannot_move_are_refused_by_name(row, start):
    host = cases.contiguous_pool((8, row + 16), torch.uint8, 0).pin_memory()
    card = torch.zeros(8, row, dtype=torch.uint8, device="cuda")
    at = torch.arange(4, device="cuda")
    with refused("backend", got="16 bytes", unchanged=[card]):
        tma(card, host[:, start : start + row], at, at, row_ndim=1)


def test_explain_shows_the_ring():
    host = cases.contiguous_pool((4096, 4, 512), torch.uint8, 0).pin_memory()
    card = torch.zeros(4096, 512, dtype=torch.uint8, device="cuda")
    at = torch.arange(1024, device="cuda")
    explain = functools.partial(sgl_kvio.explain, backend="tma", row_ndim=1, page_size=64)
    flat = host.view(-1, 512)[:4096]
    assert "32768-byte chunks, 6 stages, 1-D bulk copies" in explain(card, flat, at, at)
    assert "32768-byte chunks, 6 stages, boxes of 64 tokens" in explain(card, host[:, 1], at, at)
