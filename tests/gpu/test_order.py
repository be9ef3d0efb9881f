"""Scattered rows of a large host pool with CPU indices, which go to the GPU in another order."""

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes

ROWS, ROW_BYTES, COUNT = 5 << 19, 512, 10_000  # 1.25 GiB, more than is left in the order given


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
