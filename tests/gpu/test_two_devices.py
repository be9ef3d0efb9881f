"""Two GPUs in one process: each call runs on its tensors' GPU, whatever the current one is."""

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, check_case, moved, refused

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CASES = cases.selected(gpu=True)[::25]


def pools(direction, device, seed=0):
    def put(place, number):
        pool = cases.contiguous_pool((64, 2, 72), torch.bfloat16, seed + number)
        return pool.pin_memory() if place == "h" else pool.to(device)

    return put(direction[2], 1), put(direction[0], 2)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moves_rows_of_either_gpu_whatever_the_current_one_is(case, current):
    with torch.cuda.device(current):
        check_case(case, sgl_kvio.transfer, f"cuda:{1 - current}")
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize(
    ("index_place", "backend"), [("cpu", "auto"), ("cuda", "auto"), ("cpu", "copy_engine")]
)
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
def test_calls_to_both_gpus_may_alternate(direction, index_place, backend):
    sides = [pools(direction, f"cuda:{index}", 10 * index) for index in range(2)]
    want = [pool[0].cpu().clone() for pool in sides]
    for round_number in range(4):
        for index, (dst, src) in enumerate(sides):
            generator = torch.Generator().manual_seed(round_number)
            at, frm = (torch.randperm(64, generator=generator)[:20] for _ in range(2))
            want[index] = moved(want[index], src, at, frm)
            place = "cpu" if index_place == "cpu" else f"cuda:{index}"
            sgl_kvio.transfer(dst, src, at.to(place), frm.to(place), backend=backend)
    for index, (dst, _) in enumerate(sides):
        torch.cuda.synchronize(index)
        assert_same_bytes(dst, want[index], f"destination of cuda:{index}")


def test_one_registration_serves_both_gpus():
    block = cases.page_aligned_bytes(1 << 16)
    block.copy_(cases.random_bytes(1 << 16, 0))
    sgl_kvio.host_register(block, 0, 1)
    try:
        for index in range(2):
            card = torch.zeros(64, 1024, dtype=torch.uint8, device=f"cuda:{index}")
            at = torch.arange(64, device=card.device)
            sgl_kvio.transfer(card, block.view(64, 1024), at, at, row_ndim=1)
            assert_same_bytes(card, block, f"cuda:{index}")
    finally:
        sgl_kvio.host_unregister(block, 1)


@pytest.mark.parametrize(
    ("index_place", "backend"), [("cpu", "auto"), ("cuda:1", "auto"), ("cpu", "copy_engine")]
)
def test_the_current_stream_of_the_tensors_gpu_is_the_one_that_counts(index_place, backend):
    dst, src = pools("h2d", "cuda:1")
    at, frm = (torch.arange(start, start + 32).to(index_place) for start in (0, 32))
    sgl_kvio.transfer(dst, src, at, frm, backend=backend)
    want = moved(torch.zeros_like(src), src, at.cpu(), frm.cpu())
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device="cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        dst.zero_()
        busy = not stream.query()
        with torch.cuda.device(0):
            sgl_kvio.transfer(dst, src, at, frm, backend=backend)
        waited = busy and stream.query()
    stream.synchronize()
    assert_same_bytes(dst, want, "destination")
    assert not waited, "the call waited for its stream"


@pytest.mark.parametrize("index", [0, 1])
def test_a_fault_is_kept_with_its_own_gpu(index):
    dst, src = pools("h2d", f"cuda:{index}")
    at = torch.tensor([64], device=f"cuda:{index}")
    sgl_kvio.transfer(dst, src, at, torch.zeros_like(at))
    torch.cuda.synchronize(index)
    sgl_kvio.check(1 - index)
    other_dst, other_src = pools("h2d", f"cuda:{1 - index}")
    good = torch.zeros(1, dtype=torch.int64, device=f"cuda:{1 - index}")
    sgl_kvio.transfer(other_dst, other_src, good, good)
    with pytest.raises(RuntimeError, match=rf"cuda:{index}.*dst_indices\[0\].*64"):
        sgl_kvio.check(f"cuda:{index}")
    sgl_kvio.check(f"cuda:{index}")


def test_rows_between_two_gpus_are_refused_by_name():
    dst, _ = pools("d2d", "cuda:0")
    src, _ = pools("d2d", "cuda:1")
    for place in ("cpu", "cuda:0", "cuda:1"):
        at = torch.zeros(1, dtype=torch.int64, device=place)
        with refused(r"(dst|src)\[0\]", got="cuda:1", unchanged=[dst]):
            sgl_kvio.transfer(dst, src, at, at)


@pytest.mark.parametrize("index_place", ["cuda:0", "cuda:1"])
def test_indices_on_another_gpu_are_refused_by_name(index_place):
    other = "cuda:1" if index_place == "cuda:0" else "cuda:0"
    dst, src = pools("h2d", other)
    at = torch.zeros(1, dtype=torch.int64, device=index_place)
    with refused(r"dst\[0\]|src\[0\]|(dst|src)_indices", got=index_place, unchanged=[dst]):
        sgl_kvio.transfer(dst, src, at, at)


def test_the_two_index_tensors_must_be_on_one_gpu():
    dst, src = pools("h2d", "cuda:0")
    at = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    with refused(r"(dst|src)_indices", got="cuda:1", unchanged=[dst]):
        sgl_kvio.transfer(dst, src, at, at.to("cuda:1"))


def test_a_list_over_two_gpus_is_refused_by_name():
    dst, src = pools("h2d", "cuda:0")
    at = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    with refused(r"dst\[1\]", got="cuda:1", unchanged=[dst]):
        sgl_kvio.transfer([dst, dst.to("cuda:1")], [src, src], at, at)


def test_a_handle_serves_both_gpus_each_with_a_token_of_its_own():
    host = cases.contiguous_pool((64, 2, 8), torch.int32, 1).pin_memory()
    handle = sgl_kvio.register_pool(host)
    want = host.clone()
    for index in range(2):
        place = f"cuda:{index}"
        card = cases.contiguous_pool((64, 2, 8), torch.int32, 2 + index).to(place)
        at, frm = (torch.randperm(64)[:20].to(place) for _ in range(2))
        token, other = (torch.zeros(1, device=f"cuda:{i}") for i in (index, 1 - index))
        with refused("token", got=f"is on cuda:{1 - index}", op="write_back"):
            sgl_kvio.write_back(handle, other, card, at, frm)
        sgl_kvio.write_back(handle, token, card, at, frm)
        torch.cuda.synchronize(index)
        want = moved(want, card, at.cpu(), frm.cpu())
        assert_same_bytes(host, want, "host pool")
        sgl_kvio.restore(handle, token, card, frm, at)
        assert_same_bytes(card[frm], host[at.cpu()], place)
    sgl_kvio.unregister_pool(handle)
