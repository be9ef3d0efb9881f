"""Scattered rows of a large host pool, which are moved in another order than the caller gave."""

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, needs_bulk_copies

TMA = pytest.param("tma", marks=needs_bulk_copies)
ROWS, ROW_BYTES, COUNT = 9 << 19, 512, 10_000  # 2.25 GiB, more than is left in the order given
MANY = 70_000  # rows whose order is changed unseen


@pytest.fixture(scope="module")
def host():
    block = cases.page_aligned_bytes(ROWS * ROW_BYTES)
    sgl_kvio.host_register(block)
    yield block.view(ROWS, ROW_BYTES)
    sgl_kvio.host_unregister(block)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scattered_rows_come_back_and_go_out_exactly(host, index_dtype):
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(ROWS, generator=generator)[:COUNT]
    at = torch.randperm(COUNT, generator=generator)
    content = cases.random_bytes(COUNT * ROW_BYTES, 1).view(COUNT, ROW_BYTES)
    card = content.cuda()
    options = {"row_ndim": 1, "backend": "register"}
    host.zero_()
    sgl_kvio.transfer(host, card, slots.to(index_dtype), at.to(index_dtype), **options)
    torch.cuda.synchronize()
    assert_same_bytes(host[slots], content[at], "host rows")
    assert int(host.view(torch.int64).ne(0).any(1).sum()) == COUNT
    card.zero_()
    sgl_kvio.transfer(card, host, at.to(index_dtype), slots.to(index_dtype), **options)
    torch.cuda.synchronize()
    assert_same_bytes(card, content, "device rows")


@pytest.fixture(scope="module")
def rows(host):
    """Host slots in random order, and their content, each row other than all others."""
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(ROWS, generator=generator)[:MANY]
    content = cases.random_bytes(MANY * ROW_BYTES, 4).view(MANY, ROW_BYTES)
    host[slots] = content
    return slots, content


def is_ordered(dst, src, dst_indices, src_indices):
    text = sgl_kvio.explain(dst, src, dst_indices, src_indices, row_ndim=1, backend="register")
    return "order: by host address" in text


@pytest.mark.parametrize("backend", ["register", TMA])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_named_on_the_gpu_come_back_and_go_out_exactly(host, rows, index_dtype, backend):
    slots, content = rows
    at = torch.randperm(MANY, generator=torch.Generator().manual_seed(5)).to("cuda", index_dtype)
    frm = slots.to("cuda", index_dtype)
    card = torch.zeros(MANY, ROW_BYTES, dtype=torch.uint8, device="cuda")
    assert is_ordered(card, host, at, frm)
    sgl_kvio.transfer(card, host, at, frm, row_ndim=1, backend=backend)
    torch.cuda.synchronize()
    want = torch.empty_like(content).index_copy_(0, at.cpu().long(), content)
    assert_same_bytes(card, want, "device rows")
    before = host[slots].clone()
    host[slots] = 0
    sgl_kvio.transfer(host, card, frm, at, row_ndim=1, backend=backend)
    torch.cuda.synchronize()
    assert_same_bytes(host[slots], before, "host rows")


@pytest.mark.parametrize("backend", ["register", TMA])
@pytest.mark.parametrize("bad", [0, 31_337, MANY - 1])
def test_a_bad_index_is_reported_at_its_place_in_the_callers_list(host, rows, bad, backend):
    slots, content = rows
    frm = slots.clone()
    frm[bad] = ROWS + 5
    at = torch.arange(MANY, device="cuda")
    card = torch.zeros(MANY, ROW_BYTES, dtype=torch.uint8, device="cuda")
    sgl_kvio.transfer(card, host, at, frm.cuda(), row_ndim=1, backend=backend)
    with pytest.raises(RuntimeError, match=rf"src_indices\[{bad}\] was {ROWS + 5}"):
        sgl_kvio.check()
    want = content.clone()
    want[bad] = 0
    assert_same_bytes(card, want, "device rows")


def test_every_replay_of_a_graph_orders_the_rows_of_that_time(host, rows):
    slots, content = rows
    at = torch.arange(MANY, device="cuda")
    frm = slots.cuda()
    card = torch.zeros(MANY, ROW_BYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.transfer(card, host, at, frm, row_ndim=1, backend="register")
    for seed in (7, 8):
        order = torch.randperm(MANY, generator=torch.Generator().manual_seed(seed))
        frm.copy_(slots[order])
        card.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(card, content[order], "device rows of a replay")
