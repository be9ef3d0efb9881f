"""What docs/ops.md says of CUDA graphs, as far as no test of the op itself shows it."""

import functools

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, moved

ROWS, ROW = 64, (2, 72)


def put(place, seed, shape=(ROWS, *ROW)):
    """Random rows, "h" in page-locked memory or "d" on the GPU."""
    return cases.put(cases.contiguous_pool(shape, torch.bfloat16, seed), place)


random_slots = functools.partial(cases.random_slots, slots=ROWS)


def refill(*tensors, seed):
    for i, tensor in enumerate(tensors):
        tensor.copy_(cases.contiguous_pool(tensor.shape, tensor.dtype, seed + i))
    torch.cuda.synchronize()


def test_a_replayed_copy_planned_reads_the_plan_of_its_time():
    host, card = put("h", 0), put("d", 1)
    src = torch.zeros(3, 4, dtype=torch.int64, device="cuda")
    dst = torch.zeros(3, 4, dtype=torch.int32, device="cuda")
    count = torch.zeros(3, dtype=torch.int32, device="cuda")
    real = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.copy_planned(host, card, src, dst, count, real)
    for seed, counts, rows in ((10, [4, 0, 2], 3), (20, [1, 3, 4], 2), (30, [4, 4, 4], 0)):
        refill(host, card, seed=seed)
        frm, at = (random_slots(12, seed + i).view(3, 4) for i in range(2))
        for mine, content in ((src, frm), (dst, at), (count, counts), (real, [rows])):
            mine.copy_(torch.as_tensor(content))
        taken = [(b, m) for b in range(rows) for m in range(counts[b])]
        want = moved(card, host, [int(at[i]) for i in taken], [int(frm[i]) for i in taken])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(card, want, "device rows")
    assert sgl_kvio.take_fault() == []


@pytest.mark.parametrize("op", ["write_back", "restore"])
def test_an_op_on_a_handle_refuses_cpu_indices_and_the_copy_engine_keeps_them(op):
    pool, card = put("h", 0), put("d", 1)
    handle, token = sgl_kvio.register_pool(pool), torch.zeros(1, device="cuda")
    at, frm = random_slots(20, 2), random_slots(20, 3)
    slots = at.clone(), frm.clone()
    call = getattr(sgl_kvio, op)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for backend in ("auto", "register"):
            with pytest.raises(RuntimeError, match=rf"kvio::{op}: dst_indices.*captur"):
                call(handle, token, card, at, frm, backend=backend)
        call(handle, token, card, at, frm, backend="copy_engine")
    sgl_kvio.unregister_pool(handle)  # the graph needs the memory alone
    at.fill_(0)
    frm.fill_(0)
    dst, src = (pool, card) if op == "write_back" else (card, pool)
    for seed in (10, 20):
        refill(pool, card, seed=seed)
        want = moved(dst, src, *slots)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(dst, want, "destination")


@pytest.mark.parametrize("direction", ["write_back", "restore"])
def test_a_staged_graph_keeps_both_lists_that_lie_on_the_cpu(direction):
    layers, pages, size = 2, 6, 4
    host = put("h", 0, (pages * size, layers, 128))
    card = put("d", 1, (layers, pages * size, 128))
    staging = torch.zeros(1 << 14, dtype=torch.uint8, device="cuda")
    # Whole pages, and tokens that make none.
    host_list = torch.tensor([20, 21, 22, 23, 0, 1, 2, 3, 9, 13])
    card_list = torch.tensor([4, 5, 6, 7, 8, 9, 10, 11, 16, 1])
    slots = host_list.clone(), card_list.clone()
    sides = [(list(host.unbind(1)), host_list), (list(card.unbind(0)), card_list)]
    (dst, at), (src, frm) = sides if direction == "write_back" else reversed(sides)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgl_kvio.transfer_staged(dst, src, at, frm, staging, page_size=size, row_ndim=1)
    host_list.fill_(0)
    card_list.fill_(0)
    for seed in (10, 20):
        refill(host, card, seed=seed)
        want_host, want_card = host.clone(), card.cpu()
        if direction == "write_back":
            want_host[slots[0]] = want_card[:, slots[1]].transpose(0, 1)
        else:
            want_card[:, slots[1]] = want_host[slots[0]].transpose(0, 1)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(host, want_host, "host rows")
        assert_same_bytes(card, want_card, "device rows")


def capture_beside(call):
    """A graph of one addition with `call` in the middle of its capture; the call's answer."""
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        answer = call()
        value.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert value.item() == 2
    return answer


def open_and_close():
    handle = sgl_kvio.register_pool(torch.zeros(4, 1, 8))
    sgl_kvio.unregister_pool(handle)


HOST_CALLS = {
    "register_pool, unregister_pool": open_and_close,
    "take_fault": sgl_kvio.take_fault,
    "get_rates": sgl_kvio.get_rates,
    "copy_round": lambda: sgl_kvio.copy_round(576, 4),
    "build_info": lambda: torch.ops.kvio.build_info(),
}


@pytest.mark.parametrize("name", HOST_CALLS)
def test_a_call_that_enqueues_nothing_leaves_a_capture_alone(name):
    assert capture_beside(HOST_CALLS[name]) == HOST_CALLS[name]()


def test_rates_may_be_set_while_a_graph_is_captured():
    before = sgl_kvio.get_rates()
    source = sgl_kvio.capabilities()["rates"]
    try:
        capture_beside(lambda: sgl_kvio.set_rates([2 * rate for rate in before]))
        assert sgl_kvio.get_rates() == [2 * rate for rate in before]
    finally:
        sgl_kvio.set_rates([] if source == "built-in" else before, source)


def test_an_address_may_be_asked_for_while_a_graph_is_captured():
    card, host = torch.zeros(8, device="cuda"), torch.zeros(8).pin_memory()
    assert capture_beside(lambda: sgl_kvio.device_pointer(card[2:])) == card.data_ptr() + 8
    asked = capture_beside(lambda: sgl_kvio.device_pointer(host[2:]))
    assert asked == sgl_kvio.device_pointer(host) + 8


def test_a_stream_may_be_made_while_a_graph_is_captured():
    stream = capture_beside(sgl_kvio.create_stream)
    value = torch.ones(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        value.mul_(3)
    stream.synchronize()
    assert value.tolist() == [3.0] * 4


def test_memory_may_be_page_locked_while_a_graph_is_captured():
    block = cases.page_aligned_bytes(1 << 16)
    capture_beside(lambda: sgl_kvio.host_register(block))
    try:
        rows = block.view(-1, 1024)
        rows.copy_(cases.random_bytes(1 << 16, 5).view(-1, 1024))
        card = torch.zeros_like(rows, device="cuda")
        at = torch.arange(0, 64, 2, device="cuda")
        sgl_kvio.transfer(card, rows, at, at, row_ndim=1, backend="register")
        torch.cuda.synchronize()
        assert_same_bytes(card[at], rows[at.cpu()], "rows that came from there")
    finally:
        sgl_kvio.host_unregister(block)
