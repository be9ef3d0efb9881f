"""torch.compile on a GPU, with page-locked pools, and opcheck on GPU tensors."""

import shutil

import pytest
import test_staged_compile
import test_swap_in_compile
import torch
import torch._dynamo
from test_compile import FUNCTIONS, check_compiled, make_arguments
from test_schema import transfer_samples

import cases
import sgl_kvio
from reference import assert_same_bytes, error_text, moved, twin_of

transfer = torch.ops.kvio.transfer
inductor = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="inductor needs a C compiler"
    ),
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_compiled_function_leaves_the_same_bytes(function, backend):
    check_compiled(function, backend, make_arguments("cuda"))


def everything(dst, src, at, frm):
    results = [function(dst, src, at, frm) for function in FUNCTIONS]
    return torch.cat([result.flatten() for result in results])


@pytest.mark.parametrize("backend", [inductor])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_keeps_every_copy(dynamic, backend):
    check_compiled(everything, backend, make_arguments("cuda"), dynamic=dynamic)


def pinned_arguments():
    """Device pool, page-locked host pool, indices on the GPU."""
    device, host, at, frm = make_arguments()
    return device.cuda(), host.pin_memory(), at.cuda(), frm.cuda()


def restore_and_read(device, host, at, frm):
    device.add_(5)
    transfer([device], [host], at, frm)
    return device * 3


def restore_into_views_and_read(device, host, at, frm):
    device.mul_(2)
    transfer([device[8:12], device[:4]], [host[4:8], host[:4]], at, frm)
    return device.sum(dim=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
@pytest.mark.parametrize("function", [restore_and_read, restore_into_views_and_read])
def test_a_restore_from_a_page_locked_pool_is_kept(function, backend):
    torch._dynamo.reset()
    device, host, at, frm = pinned_arguments()
    twin = device.clone()
    want = function(twin, host, at, frm)
    got = torch.compile(function, backend=backend, fullgraph=True)(device, host, at, frm)
    assert_same_bytes(got, want, "result")
    assert_same_bytes(device, twin, "device pool")


def write_back(host, device, at, frm):
    transfer([host], [device * 2], at, frm)
    return device + 1


def write_back_to_views(host, device, at, frm):
    transfer([host[8:], host[:8]], [device[:8], device[8:]], at, frm)
    return device + 1


def write_back_layers(host, device, at, frm):
    layers = device.unflatten(0, (4, 4))
    transfer(list(host.unflatten(0, (4, 4)).unbind(0)), list(layers.unbind(0)), at, frm)
    return device + 1


def write_back_twice(host, device, at, frm):
    transfer([host], [device], at, frm)
    transfer([host], [device + 1], frm + 8, at)
    return device + 1


WRITE_BACKS = [write_back, write_back_to_views, write_back_layers, write_back_twice]


def write_back_arguments():
    device, host, at, frm = pinned_arguments()
    return host, device, at, frm


def check_write_back(function, backend):
    """Compiled and eager write-backs leave the same bytes in page-locked memory, in place."""
    torch._dynamo.reset()
    arguments = write_back_arguments()
    host, device, at, frm = arguments
    twin = twin_of(host)
    want = function(twin, device, at, frm)
    torch.cuda.synchronize()
    address = host.data_ptr()
    got = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    torch.cuda.synchronize()
    assert_same_bytes(got, want, "result")
    assert_same_bytes(host, twin, "host pool")
    assert host.data_ptr() == address
    assert host.is_pinned()


@pytest.mark.parametrize("backend", ["eager", inductor])
@pytest.mark.parametrize("function", WRITE_BACKS)
def test_a_page_locked_destination_is_written_where_it_lies(function, backend):
    check_write_back(function, backend)


@pytest.mark.parametrize("function", WRITE_BACKS)
def test_a_destination_that_aot_eager_cloned_is_right_or_refused_in_words(function):
    """Functionalization hands the op a pageable clone: it must never reach the kernel."""
    text = error_text(check_write_back, function, "aot_eager")
    assert text == "" or ("page-locked" in text and "clone" in text)
    torch.cuda.synchronize()
    sgl_kvio.check()


@pytest.mark.parametrize("backend", ["eager", inductor])
def test_a_page_locked_pool_held_by_a_module_is_written(backend):
    class Holder(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.pool = pool

        def forward(self, device, at, frm):
            transfer([self.pool], [device], at, frm)
            return device + 1

    torch._dynamo.reset()
    host, device, at, frm = write_back_arguments()
    want = moved(host, device, at.cpu(), frm.cpu())
    torch.compile(Holder(host), backend=backend, fullgraph=True)(device, at, frm)
    torch.cuda.synchronize()
    assert_same_bytes(host, want, "host pool")


@pytest.mark.parametrize("backend", [inductor])
def test_a_compiled_restore_can_be_captured_and_replayed(backend):
    torch._dynamo.reset()
    device, host, at, frm = pinned_arguments()
    compiled = torch.compile(restore_and_read, backend=backend, fullgraph=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compiled(device, host, at, frm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compiled(device, host, at, frm)
    for seed in (5, 6):
        host.copy_(cases.contiguous_pool(host.shape, host.dtype, seed) % 1000)
        twin = device.clone()
        want = restore_and_read(twin, host, at, frm)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(got, want, "result")
        assert_same_bytes(device, twin, "device pool")


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_an_out_of_range_index_in_a_compiled_function_is_reported(backend):
    torch._dynamo.reset()
    device, host, at, frm = pinned_arguments()
    compiled = torch.compile(restore_and_read, backend=backend, fullgraph=True)
    compiled(device, host, at, frm)
    sgl_kvio.check()
    at[1] = 16
    compiled(device, host, at, frm)
    with pytest.raises(RuntimeError, match=r"dst_indices\[1\].*16"):
        sgl_kvio.check()


# The other ops that move rows.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
@pytest.mark.parametrize(
    "function", test_swap_in_compile.FUNCTIONS, ids=lambda function: function.__name__
)
def test_a_compiled_swap_in_leaves_the_same_state(function, backend):
    check_compiled(function, backend, test_swap_in_compile.make_arguments("cuda"))


def check_staged(function, backend):
    """Two compiled and two eager calls leave the same bytes in both pools, in place."""
    torch._dynamo.reset()
    arguments = test_staged_compile.make_arguments("cuda", "pinned")
    host, card, *lists, staging = arguments
    twin_host, twin_card = twin_of(host), twin_of(card)
    address = host.data_ptr()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        want = function(twin_host, twin_card, *lists, staging.clone())
        got = compiled(*arguments)
        torch.cuda.synchronize()
        assert_same_bytes(got, want, "result")
        assert_same_bytes(host, twin_host, "host pool")
        assert_same_bytes(card, twin_card, "device pool")
    assert host.data_ptr() == address
    assert host.is_pinned()


@pytest.mark.parametrize("backend", ["eager", inductor])
@pytest.mark.parametrize(
    "function", test_staged_compile.FUNCTIONS, ids=lambda function: function.__name__
)
def test_compiled_staged_transfers_leave_the_same_bytes(function, backend):
    check_staged(function, backend)


def test_aot_eager_restores_whole_pages():
    check_staged(test_staged_compile.restore_pages, "aot_eager")


@pytest.mark.parametrize(
    "function",
    [test_staged_compile.write_back_pages, test_staged_compile.write_back_and_restore],
    ids=lambda function: function.__name__,
)
def test_a_staged_destination_that_aot_eager_cloned_is_right_or_refused_in_words(function):
    text = error_text(check_staged, function, "aot_eager")
    assert text == "" or ("page-locked" in text and "clone" in text)
    torch.cuda.synchronize()
    sgl_kvio.check()


# opcheck clones its arguments, which makes page-locked memory pageable: GPU tensors only.


@pytest.mark.parametrize(
    "sample", list(transfer_samples()), ids=lambda sample: str(sample[1]) or "defaults"
)
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_opcheck_passes_on_transfer(sample, index_place):
    (dst, src, at, frm), options = sample
    lists = [[t.cuda() for t in side] for side in (dst, src)]
    arguments = (*lists, at.to(index_place), frm.to(index_place))
    torch.library.opcheck(torch.ops.kvio.transfer.default, arguments, options)


def test_opcheck_passes_on_memcpy_batch():
    dst, src = ([cases.contiguous_pool((8, 16), torch.int32, s).cuda()] for s in (0, 1))
    arguments = (dst, src, [0, 64], [128, 3], [16, 5])
    torch.library.opcheck(torch.ops.kvio.memcpy_batch.default, arguments)


@pytest.mark.parametrize(
    "sample",
    range(len(list(test_swap_in_compile.swap_in_samples()))),
    ids=["plain", "everything", "no rows"],
)
def test_opcheck_passes_on_swap_in(sample):
    arguments, options = list(test_swap_in_compile.swap_in_samples("cuda"))[sample]
    torch.library.opcheck(torch.ops.kvio.swap_in.default, arguments, options)


@pytest.mark.parametrize("skip_io", [False, True])
def test_opcheck_passes_on_copy_planned(skip_io):
    *_, host, device, _, _, real = test_swap_in_compile.make_arguments("cuda")
    src = torch.tensor([[3, 1], [60, 0]], device="cuda")
    dst, count = (
        torch.tensor(entries, dtype=torch.int32, device="cuda")
        for entries in ([[7, 1], [9, 0]], [2, 1])
    )
    op = torch.ops.kvio.copy_planned.default
    arguments = ([host[0]], [device[0]], src, dst, count, real)
    torch.library.opcheck(op, arguments, {"skip_io": skip_io})
