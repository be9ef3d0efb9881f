"""A bad index on the GPU skips its row, is reported once, and harms nothing else."""

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, expected_bytes, moved, needs_bulk_copies

SLOTS, PAGE = 64, 4
BAD_INT32 = [-1, SLOTS, SLOTS + 1, 2**31 - 1, -(2**31)]
BAD_INT64 = [*BAD_INT32, 2**31, 2**32, 2**32 + 5, 2**62, 2**63 - 1, -(2**63)]


@pytest.fixture(autouse=True, params=["register", pytest.param("tma", marks=needs_bulk_copies)])
def kernel(request, monkeypatch):
    """Which kernel meets the bad index; rows that tma cannot move go to register all the same."""
    monkeypatch.setenv("KVIO_BACKEND_ORDER", request.param)
    return request.param


def spec(layout):
    return cases.PoolSpec(
        layout=layout,
        num_layers=2,
        num_pages=SLOTS // PAGE,
        page_size=PAGE,
        num_heads=2,
        dims=(72, 72),
        dtype=torch.bfloat16,
        lead=8,
    )


def good_lists(unit):
    count = SLOTS if unit == "token" else SLOTS // PAGE
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randperm(count, generator=generator)[: count // 2] for _ in range(2)]
    return dict(zip(("dst_indices", "src_indices"), lists, strict=True))


def faulty_transfer(dst, src, side, position, value, dtype, unit="token"):
    """A transfer whose entry `position` on `side` is `value`; its slots leave that entry out."""
    lists = good_lists(unit)
    slots = {}
    for name, entries in lists.items():
        good = [e for i, e in enumerate(entries.tolist()) if i != position]
        slots[name.replace("indices", "slots")] = cases.slots_of(good, unit, PAGE)
    lists[side][position] = value
    return cases.Transfer(
        dst=dst,
        src=src,
        layers=[0, 1],
        **slots,
        **{name: entries.to(dtype).cuda() for name, entries in lists.items()},
        options={"page_size": PAGE, "index_unit": unit},
    )


def run_checked(transfer):
    """Good rows arrive, and neither the bad row nor anything outside the pools is written."""
    want = expected_bytes(transfer)
    source = transfer.src.storage.cpu().clone()
    transfer.run(sgl_kvio.transfer)
    torch.cuda.synchronize()
    assert_same_bytes(transfer.dst.storage, want, "destination")
    assert_same_bytes(transfer.src.storage, source, "source")


def open_pools(direction, kernel):
    places = {"h": {"memory": "pinned"}, "d": {"device": "cuda"}}
    pitched = "pitched" if kernel == "tma" else "pitched_odd"
    src = cases.open_pool(spec("page_head"), **places[direction[0]], seed=1)
    dst = cases.open_pool(spec(pitched), **places[direction[2]], seed=2)
    return dst, src


def dtypes_and_values():
    for dtype, values in ((torch.int32, BAD_INT32), (torch.int64, BAD_INT64)):
        for value in values:
            yield pytest.param(dtype, value, id=f"{dtype}-{value}".removeprefix("torch."))


@pytest.mark.parametrize("side", ["dst_indices", "src_indices"])
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize(("dtype", "value"), list(dtypes_and_values()))
def test_a_bad_index_skips_its_row_and_is_reported_once(dtype, value, direction, side, kernel):
    opened_dst, opened_src = open_pools(direction, kernel)
    with opened_dst as dst, opened_src as src:
        run_checked(faulty_transfer(dst, src, side, 5, value, dtype))
        with pytest.raises(RuntimeError, match=rf"{side}\[5\].*{value}\b.*{SLOTS - 1}\b"):
            sgl_kvio.check()
        sgl_kvio.check()


@pytest.mark.parametrize("value", [-1, SLOTS // PAGE, 2**40])
@pytest.mark.parametrize("side", ["dst_indices", "src_indices"])
def test_a_bad_page_skips_all_its_rows(side, value, kernel):
    opened_dst, opened_src = open_pools("h2d", kernel)
    with opened_dst as dst, opened_src as src:
        run_checked(faulty_transfer(dst, src, side, 2, value, torch.int64, "page"))
        fault = sgl_kvio.take_fault()
        assert fault == [1 if side == "dst_indices" else 2, 2, value, SLOTS // PAGE]
        assert sgl_kvio.take_fault() == []


def test_a_page_that_ends_outside_the_pool_is_a_fault():
    dst = torch.zeros(18, 1, 8, device="cuda")
    src = torch.ones(32, 1, 8).pin_memory()
    at = torch.tensor([4], device="cuda")  # slots 16 to 19 of 18
    sgl_kvio.transfer(dst, src, at, at, page_size=4, index_unit="page")
    with pytest.raises(RuntimeError, match=r"dst_indices\[0\].*\b4\b"):
        sgl_kvio.check()
    assert not dst.any()


@pytest.mark.parametrize("page_size", [SLOTS + 1, 2**20, 2**31, 2**32, 2**33 + 8])
def test_a_page_far_larger_than_the_pool_is_never_moved_in_silence(page_size):
    dst = torch.zeros(SLOTS, 1, 8, device="cuda")
    src = torch.ones(SLOTS, 1, 8).pin_memory()
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def move_and_check():
        sgl_kvio.transfer(dst, src, at, at, page_size=page_size, index_unit="page")
        sgl_kvio.check()

    with pytest.raises(RuntimeError, match=r"page_size|slots|indices\[0\]"):
        move_and_check()
    assert not dst.any()


def small_call(*bad):
    """Four rows, of which those at the positions `bad` have a bad destination."""
    src = torch.arange(32.0).view(8, 4).pin_memory()
    dst = torch.zeros(8, 4, device="cuda")
    at, frm = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6, 7])
    want = moved(dst, src, *(t[[i for i in range(4) if i not in bad]] for t in (at, frm)))
    at[list(bad)] = 8
    return dst, src, at.cuda(), frm.cuda(), want


def test_the_next_call_reports_the_fault_and_the_one_after_it_works():
    dst, src, at, frm, want = small_call(2)
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
    torch.cuda.synchronize()
    assert_same_bytes(dst, want, "destination")
    good, src, at, frm, want = small_call()
    with pytest.raises(RuntimeError, match=r"kvio::transfer: .*dst_indices\[2\].*\b8\b"):
        sgl_kvio.transfer(good, src, at, frm, row_ndim=1)
    torch.cuda.synchronize()
    assert not good.any()
    sgl_kvio.transfer(good, src, at, frm, row_ndim=1)
    assert_same_bytes(good, want, "destination")
    sgl_kvio.check()


def test_the_next_byte_copy_reports_the_fault_too():
    dst, src, at, frm, _ = small_call(1)
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"dst_indices\[1\]"):
        sgl_kvio.memcpy_batch([dst], [src], [0], [0], [16])
    sgl_kvio.check()


def test_when_both_sides_are_bad_one_of_them_is_reported():
    dst, src, at, frm, _ = small_call(0, 1, 2, 3)
    frm.fill_(-7)
    sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
    torch.cuda.synchronize()
    op, position, value, limit = sgl_kvio.take_fault()
    assert op in (1, 2)
    assert position in range(4)
    assert value == (8 if op == 1 else -7)
    assert limit == 8
    assert not dst.any()


def test_a_hundred_thousand_bad_indices_leave_one_report_and_a_live_context():
    count = 100_000
    src = torch.ones(16, 128).pin_memory()
    dst = torch.zeros(16, 128, device="cuda")
    at = torch.arange(16, 16 + count, device="cuda")
    sgl_kvio.transfer(dst, src, at, at, row_ndim=1)
    torch.cuda.synchronize()
    op, position, value, limit = sgl_kvio.take_fault()
    assert op in (1, 2)
    assert 0 <= position < count
    assert value == 16 + position
    assert limit == 16
    assert not dst.any()
    assert sgl_kvio.take_fault() == []


def test_positions_count_from_the_start_of_the_callers_list():
    count = 50_000
    src = torch.ones(16, 1, dtype=torch.uint8).pin_memory()
    dst = torch.zeros(16, 1, dtype=torch.uint8, device="cuda")
    at = torch.zeros(count, dtype=torch.int32, device="cuda")
    for position in (0, 31, 32, 1023, 33_333, count - 1):
        at[position] = 16
        sgl_kvio.transfer(dst, src, at, torch.zeros_like(at), row_ndim=1)
        torch.cuda.synchronize()
        assert sgl_kvio.take_fault() == [1, position, 16, 16]
        at[position] = 0


def test_an_index_outside_the_shorter_of_two_pools_writes_nothing_there():
    src = [torch.ones(64, 4).pin_memory(), torch.ones(64, 4).pin_memory()]
    block = torch.zeros(64, 4, device="cuda")
    dst = [torch.zeros(64, 4, device="cuda"), block[:32]]
    at = torch.tensor([40], device="cuda")
    sgl_kvio.transfer(dst, src, at, at, row_ndim=1)
    torch.cuda.synchronize()
    assert sgl_kvio.take_fault() == [1, 0, 40, 32]
    assert not block.any()


def test_no_report_is_lost_when_faults_follow_each_other():
    for round_number in range(20):
        dst, src, at, frm, want = small_call(round_number % 4)
        sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
        with pytest.raises(RuntimeError, match=rf"dst_indices\[{round_number % 4}\]"):
            sgl_kvio.check()
        assert_same_bytes(dst, want, "destination")


def test_a_replayed_graph_reports_its_fault_every_time():
    dst, src, at, frm, want = small_call(3)
    graph = torch.cuda.CUDAGraph()
    sgl_kvio.transfer(dst, src, frm, frm, row_ndim=1)  # the kernel is loaded before the capture
    torch.cuda.synchronize()
    dst.zero_()
    with torch.cuda.graph(graph):
        sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
    sgl_kvio.check()
    for _ in range(2):
        dst.zero_()
        graph.replay()
        with pytest.raises(RuntimeError, match=r"dst_indices\[3\].*\b8\b"):
            sgl_kvio.check()
        sgl_kvio.check()
        assert_same_bytes(dst, want, "destination")
    at[3] = 3
    graph.replay()
    sgl_kvio.check()


def test_a_bad_index_on_the_cpu_leaves_no_fault_behind():
    dst, src, at, frm, _ = small_call(1)
    with pytest.raises(RuntimeError, match=r"dst_indices\[1\]"):
        sgl_kvio.transfer(dst, src, at.cpu(), frm.cpu(), row_ndim=1)
    sgl_kvio.check()
    assert not dst.any()


def test_check_waits_for_kernels_that_are_still_running():
    dst, src, at, frm, _ = small_call(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)
        sgl_kvio.transfer(dst, src, at, frm, row_ndim=1)
    with pytest.raises(RuntimeError, match=r"dst_indices\[0\]"):
        sgl_kvio.check()
