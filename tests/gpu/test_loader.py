"""LayerwiseLoader on a GPU: both stream edges, the events of single layers, and lifetimes."""

import gc
import threading
import time

import pytest
import torch

import sgl_kvio
from reference import has_bulk_copies
from sgl_kvio import HostKVPool, LayerwiseLoader, ops

N, P, L, H, D = 8, 16, 4, 2, 64
SLOTS = N * P
POISON = -7
SLEEP_CYCLES = 20_000_000  # about 10 ms; far above what any of these transfers takes
SUBMIT = pytest.mark.parametrize("submit", ["caller", "thread"])
SIZES = {"num_pages": N, "page_size": P, "num_layers": L, "num_heads": H, "head_dim": D}
# `auto` takes a kernel for loads as small as these.
SERVED_BY = pytest.mark.parametrize(
    ("index_device", "backend"), [("cpu", "auto"), ("cuda", "auto"), ("cpu", "copy_engine")]
)


@pytest.fixture
def pool():
    """A host pool in which every element of layer i is its own number."""
    made = HostKVPool(
        "mha",
        "page_first",
        num_pages=N,
        page_size=P,
        num_layers=L,
        num_heads=H,
        head_dim=D,
        dtype=torch.int32,
    )
    for i, view in enumerate(made.all_layers()):
        view.copy_(numbers(i))
    yield made
    made.close()


def numbers(seed):
    return torch.arange(SLOTS * H * D, dtype=torch.int32).view(SLOTS, H, D) + seed * 1_000_003


def poisoned(device="cuda"):
    return [
        [torch.full((SLOTS, H, D), POISON, dtype=torch.int32, device=device) for _ in "KV"]
        for _ in range(L)
    ]


def expected(layer, buffer, host_slots, device_slots):
    """Layer content on the CPU after a load into poisoned buffers."""
    want = torch.full((SLOTS, H, D), POISON, dtype=torch.int32)
    want[device_slots] = numbers(2 * layer + buffer)[host_slots]
    return want


def assert_loaded(device, host_slots, device_slots):
    for i, buffers in enumerate(device):
        for b, got in enumerate(buffers):
            assert torch.equal(got.cpu(), expected(i, b, host_slots, device_slots)), (i, b)


@pytest.fixture
def slots():
    generator = torch.Generator().manual_seed(5)
    host = torch.randperm(SLOTS, generator=generator)[: 3 * P + 5]
    device = torch.randperm(SLOTS, generator=generator)[: 3 * P + 5]
    return host, device


@pytest.fixture
def gpu_slots(slots):
    """The same on the GPU: loads with them submit without a wait of any kind."""
    indices = [index.cuda() for index in slots]
    torch.cuda.synchronize()
    return indices


@pytest.fixture(scope="module", autouse=True)
def kernels_are_loaded():
    """Runs every kernel used here once: loading one may wait until the GPU is idle."""
    torch.cuda._sleep(1)
    device = poisoned()
    device[0][0].fill_(POISON).clone()
    backends = ["register", "tma"] if has_bulk_copies() else ["register"]
    with HostKVPool("mha", "page_first", **SIZES, dtype=torch.int32) as pool:
        for backend in backends:
            for group in (1, 2):
                with LayerwiseLoader(pool.layers(), device, group=group, backend=backend) as loader:
                    for count in (3, 3 * P + 5, SLOTS):
                        index = torch.arange(count).flip(0)
                        loader.load(index, index).synchronize()
                        loader.load(index.cuda(), index.cuda()).synchronize()


@pytest.fixture
def slow_layers(monkeypatch):
    """Every layer of a load takes SLEEP_CYCLES more on the stream that copies it."""
    transfer, streams = ops.transfer, []

    def slow(*args, **options):
        streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(SLEEP_CYCLES)
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", slow)
    return streams


# ------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@SERVED_BY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("group", [1, 2, 100])
@SUBMIT
def test_a_load_brings_the_rows_and_leaves_every_other_byte_alone(
    layout, index_device, backend, dtype, group, submit, slots
):
    with HostKVPool("mha", layout, **SIZES, dtype=torch.int32) as pool:
        for i, view in enumerate(pool.all_layers()):
            view.copy_(numbers(i).view(view.shape))
        device = poisoned()
        options = {"page_size": P, "group": group, "submit": submit, "backend": backend}
        with LayerwiseLoader(pool.layers(), device, **options) as loader:
            load = loader.load(*(index.to(index_device, dtype) for index in slots))
            for i in range(L):
                load.wait_layer(i)
            load.synchronize()
            assert load.done()
        assert_loaded(device, *slots)


def test_page_indices_bring_whole_pages(pool):
    device = poisoned()
    with LayerwiseLoader(pool.layers(), device, page_size=P) as loader:
        pages = torch.tensor([5, 0, 6]), torch.tensor([2, 3, 0])
        loader.load(*pages, index_unit="page").wait()
        assert_loaded(device, *(pool.token_indices(ids) for ids in pages))


@SERVED_BY
@SUBMIT
def test_groups_of_pages_that_keep_their_layers_together_on_both_sides(
    index_device, backend, submit
):
    pages = torch.tensor([5, 0, 6]), torch.tensor([2, 3, 0])
    with HostKVPool("mha", "page_first_direct", **SIZES, dtype=torch.int32) as pool:
        for i, view in enumerate(pool.all_layers()):
            view.copy_(numbers(i).view(view.shape))
        both = torch.full((2, N, L, P, H, D), POISON, dtype=torch.int32, device="cuda")
        device = [[both[b, :, i] for b in range(2)] for i in range(L)]
        options = {"page_size": P, "group": 2, "submit": submit, "backend": backend}
        with LayerwiseLoader(pool.layers(), device, **options) as loader:
            ids = [page.to(index_device) for page in pages]
            loader.load(*ids, index_unit="page").synchronize()
        flat = [[view.reshape(SLOTS, H, D) for view in buffers] for buffers in device]
        assert_loaded(flat, *(pool.token_indices(page) for page in pages))


@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_a_load_of_nothing_changes_nothing(pool, index_device):
    device = poisoned()
    empty = torch.empty(0, dtype=torch.int64, device=index_device)
    with LayerwiseLoader(pool.layers(), device) as loader:
        load = loader.load(empty, empty)
        load.wait_layer(L - 1)
        load.synchronize()
    assert all(bool((b == POISON).all()) for buffers in device for b in buffers)


# ------------------------------------------------------------------------------------------ order


@SERVED_BY
@pytest.mark.parametrize("caller", ["default", "own"])
@SUBMIT
def test_a_load_runs_after_what_the_callers_stream_still_writes(
    pool, slots, index_device, backend, caller, submit
):
    device = poisoned()
    indices = [index.to(index_device) for index in slots]
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if caller == "default" else torch.cuda.Stream()
    loader = LayerwiseLoader(pool.layers(), device, submit=submit, backend=backend)
    with loader, torch.cuda.stream(stream):
        torch.cuda._sleep(5 * SLEEP_CYCLES)
        for buffers in device:
            for buffer in buffers:
                buffer.fill_(POISON)
        load = loader.load(*indices)
        load.wait()
        copies = [[buffer.clone() for buffer in buffers] for buffers in device]
    torch.cuda.synchronize()
    assert_loaded(copies, *slots)
    assert_loaded(device, *slots)


@SUBMIT
def test_a_load_runs_on_a_stream_of_its_own(pool, slots, slow_layers, submit):
    with LayerwiseLoader(pool.layers(), poisoned(), submit=submit) as loader:
        caller = torch.cuda.current_stream()
        loader.load(*slots).synchronize()
        assert torch.cuda.current_stream() == caller
    assert len(set(slow_layers)) == 1
    assert caller not in slow_layers
    assert torch.cuda.default_stream() not in slow_layers


@pytest.mark.parametrize("caller", ["default", "own"])
@SUBMIT
def test_a_layer_is_read_after_its_event_and_not_before(
    pool, slots, gpu_slots, slow_layers, caller, submit
):
    device = poisoned()
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if caller == "default" else torch.cuda.Stream()
    loader = LayerwiseLoader(pool.layers(), device, submit=submit)
    with loader, torch.cuda.stream(stream):
        load = loader.load(*gpu_slots)
        # Without a wait the reader is first: this is the fault that wait_layer prevents.
        too_early = device[-1][0].clone()
        assert not load.done()
        seen = []
        for i in range(L):
            load.wait_layer(i)
            seen.append([buffer.clone() for buffer in device[i]])
    torch.cuda.synchronize()
    assert load.done()
    assert bool((too_early == POISON).all())
    assert_loaded(seen, *slots)


@SUBMIT
@pytest.mark.parametrize("group", [1, 2])
def test_waiting_for_an_early_layer_does_not_wait_for_the_last(
    pool, slots, gpu_slots, slow_layers, group, submit
):
    device = poisoned()
    torch.cuda.synchronize()
    with LayerwiseLoader(pool.layers(), device, group=group, submit=submit) as loader:
        load = loader.load(*gpu_slots)
        load.wait_layer(0)
        first = torch.cuda.Event()
        first.record()
        first.synchronize()
        assert not load.done()
        assert torch.equal(device[0][0].cpu(), expected(0, 0, *slots))


def test_every_stream_can_wait_for_a_layer(pool, slots, slow_layers):
    device = poisoned()
    torch.cuda.synchronize()
    with LayerwiseLoader(pool.layers(), device) as loader:
        load = loader.load(*slots)
        copies = []
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                load.wait_layer(L - 1)
                copies.append(device[-1][1].clone())
    torch.cuda.synchronize()
    assert all(torch.equal(copy.cpu(), expected(L - 1, 1, *slots)) for copy in copies)


@SUBMIT
def test_two_loads_run_in_the_order_of_the_calls(pool, slow_layers, submit):
    device = poisoned()
    torch.cuda.synchronize()
    everything = torch.arange(SLOTS)
    with LayerwiseLoader(pool.layers(), device, submit=submit) as loader:
        first = loader.load(everything.flip(0), everything)
        second = loader.load(everything[:5], everything[:5])
        loader.wait_layer(L - 1)
        copies = [[buffer.clone() for buffer in buffers] for buffers in device]
        torch.cuda.synchronize()
        assert first.done()
        assert second.done()
    source = everything.flip(0)
    source[:5] = everything[:5]
    assert_loaded(copies, source, everything)


def test_a_late_wait_for_an_older_load_is_not_a_wait_for_a_newer_one(pool, gpu_slots, slow_layers):
    with LayerwiseLoader(pool.layers(), poisoned()) as loader:
        first = loader.load(*gpu_slots)
        first.synchronize()
        second = loader.load(*gpu_slots)
        first.wait()
        torch.cuda.current_stream().synchronize()
        assert not second.done()
        second.synchronize()


def test_wait_layer_before_any_load_returns_at_once(pool):
    with LayerwiseLoader(pool.layers(), poisoned()) as loader:
        loader.wait_layer(0)


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("position", "value", "argument"), [(0, SLOTS, "src_indices"), (1, -1, "dst_indices")]
)
def test_cpu_indices_out_of_range_raise_from_load_and_nothing_moves(
    pool, slots, position, value, argument
):
    device = poisoned()
    slots[position][3] = value
    with LayerwiseLoader(pool.layers(), device) as loader:
        with pytest.raises(RuntimeError, match=rf"kvio::transfer: {argument}\[3\]"):
            loader.load(*slots)
        loader.wait_layer(0)
        torch.cuda.synchronize()
        assert all(bool((b == POISON).all()) for buffers in device for b in buffers)
        slots[position][3] = 0
        loader.load(*slots).synchronize()


def test_cpu_indices_out_of_range_raise_from_the_waits_when_a_worker_submits(pool, slots):
    device = poisoned()
    slots[0][3] = SLOTS
    with LayerwiseLoader(pool.layers(), device, submit="thread") as loader:
        load = loader.load(*slots)
        for wait in (load.wait, load.synchronize, lambda: loader.wait_layer(0)):
            with pytest.raises(RuntimeError, match=r"kvio::transfer: src_indices\[3\]"):
                wait()
        torch.cuda.synchronize()
        assert all(bool((b == POISON).all()) for buffers in device for b in buffers)
        slots[0][3] = 0
        loader.load(*slots).synchronize()


def test_gpu_indices_out_of_range_skip_their_rows_and_are_reported(pool, slots, slow_layers):
    device = poisoned()
    host_slots, device_slots = (index.cuda() for index in slots)
    host_slots[3] = SLOTS
    torch.cuda.synchronize()
    with LayerwiseLoader(pool.layers(), device) as loader:
        loader.load(host_slots, device_slots).wait()
        with pytest.raises(RuntimeError, match=rf"src_indices\[3\] was {SLOTS}"):
            sgl_kvio.check()
    keep = torch.arange(slots[0].numel()) != 3
    assert_loaded(device, slots[0][keep], slots[1][keep])


def test_an_error_in_a_later_layer_raises_when_nothing_is_in_flight(pool, slots, monkeypatch):
    transfer, calls = ops.transfer, []

    def fail_in_layer_2(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("the copying broke")
        torch.cuda._sleep(SLEEP_CYCLES)
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", fail_in_layer_2)
    device = poisoned()
    torch.cuda.synchronize()
    with LayerwiseLoader(pool.layers(), device) as loader:
        with pytest.raises(RuntimeError, match="the copying broke"):
            loader.load(*slots)
        copied = [[buffer.clone() for buffer in buffers] for buffers in device[:2]]
    assert_loaded(copied, *slots)
    assert all(bool((b == POISON).all()) for buffers in device[2:] for b in buffers)


def test_a_host_layer_that_is_not_page_locked_is_refused(slots):
    host = [[numbers(0), numbers(1)]]
    with (
        LayerwiseLoader(host, poisoned()[:1]) as loader,
        pytest.raises(RuntimeError, match=r"src\[0\].*page-locked"),
    ):
        loader.load(*slots)


def test_device_layers_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"device_layers\[1\]\[0\] got cpu; needs cuda:0"):
        LayerwiseLoader([[numbers(0)], [numbers(1)]], [[numbers(0).to("cuda:0")], [numbers(1)]])


@SUBMIT
def test_a_load_inside_a_graph_capture_is_refused_by_name(pool, slots, submit):
    indices = [index.cuda() for index in slots]
    with LayerwiseLoader(pool.layers(), poisoned(), submit=submit) as loader:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with (
            torch.cuda.graph(graph),
            pytest.raises(RuntimeError, match="captures a CUDA graph"),
        ):
            loader.load(*indices)
        torch.cuda.synchronize()
        loader.load(*indices).synchronize()


@pytest.fixture
def capturing(monkeypatch):
    """Until this event is set, transfers wait."""
    transfer, event = ops.transfer, threading.Event()

    def during_the_capture(*args, **options):
        assert event.wait(30)
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", during_the_capture)
    return event


def capture_during(load, capturing, number, **options):
    """A graph that adds one to `number`; its capture lasts until all of the load is submitted."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        capturing.set()
        number.add_(1)
        while not load.is_submitted():
            time.sleep(0.001)
    load.synchronize()
    return graph


@SERVED_BY
def test_a_worker_submits_while_the_callers_thread_captures_a_graph(
    pool, slots, capturing, index_device, backend
):
    device, indices = poisoned(), [index.to(index_device) for index in slots]
    number = torch.zeros(1, device="cuda")
    options = {"submit": "thread", "backend": backend}
    with LayerwiseLoader(pool.layers(), device, **options) as loader:
        graph = capture_during(loader.load(*indices), capturing, number)
    graph.replay()
    assert number.item() == 1
    assert_loaded(device, *slots)


TORCH_STREAMS = 32  # of a device and a priority, handed out in turn


def torch_streams():
    """Every stream that torch.cuda.Stream() gives, and some of them twice."""
    return [torch.cuda.Stream() for _ in range(TORCH_STREAMS + 8)]


@SUBMIT
def test_a_loader_has_a_stream_that_torch_gives_to_nobody(pool, submit):
    with LayerwiseLoader(pool.layers(), poisoned(), submit=submit) as loader:
        mine = loader._side._stream.cuda_stream
        with LayerwiseLoader(pool.layers(), poisoned(), submit=submit) as other:
            assert other._side._stream.cuda_stream != mine
        taken = {stream.cuda_stream for stream in torch_streams()}
        assert len(taken) <= TORCH_STREAMS
        assert mine not in taken
        assert torch.cuda.default_stream().cuda_stream != mine


@pytest.mark.parametrize("backend", ["auto", "copy_engine"])
def test_a_worker_submits_into_no_capture_whichever_stream_is_captured(
    pool, slots, capturing, backend
):
    """With a stream of torch's, one capture of 32 would have got the copies of the load."""
    number = torch.zeros(1, device="cuda")
    options = {"submit": "thread", "backend": backend}
    device = poisoned()
    with LayerwiseLoader(pool.layers(), device, **options) as loader:
        for replay, stream in enumerate(torch_streams(), 1):
            capturing.clear()
            for buffers in device:
                for buffer in buffers:
                    buffer.fill_(POISON)
            load = loader.load(*slots)
            torch.cuda.synchronize()
            graph = capture_during(load, capturing, number, stream=stream)
            assert_loaded(device, *slots)
            graph.replay()
            assert number.item() == replay


def test_a_stream_of_a_loader_that_is_gone_serves_the_next_one(pool, slots):
    device = poisoned()
    loader = LayerwiseLoader(pool.layers(), device)
    load, handle = loader.load(*slots), loader._side._stream.cuda_stream
    loader.close()
    del loader
    with LayerwiseLoader(pool.layers(), device) as other:
        assert other._side._stream.cuda_stream != handle, "the load still has it"
    load.synchronize()
    del load, other
    gc.collect()
    loaders = [LayerwiseLoader(pool.layers(), device) for _ in range(3)]
    handles = [loader._side._stream.cuda_stream for loader in loaders]
    assert handle in handles
    assert len(set(handles)) == 3
    for loader in loaders:
        loader.load(*slots).synchronize()
        assert_loaded(device, *slots)
        loader.close()


# --------------------------------------------------------------------------------------- lifetime


def test_index_tensors_dropped_after_load_are_not_reused_before_it_is_done(
    pool, slots, slow_layers
):
    device = poisoned()
    with LayerwiseLoader(pool.layers(), device) as loader:
        # Made on a stream that is gone by then, as a worker's indices are.
        with torch.cuda.stream(torch.cuda.Stream()):
            indices = [index.cuda() for index in slots]
            load = loader.load(*indices)
            del indices
            noise = [torch.full_like(slots[0], -1).cuda() for _ in range(64)]
        load.synchronize()
        del noise
    sgl_kvio.check()
    assert_loaded(device, *slots)


@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_everything_dropped_after_load_lives_until_it_is_done(slots, slow_layers, index_device):
    host = [[numbers(2 * i + b).pin_memory() for b in (0, 1)] for i in range(L)]
    device = poisoned()
    indices = [index.to(index_device) for index in slots]
    torch.cuda.synchronize()
    loader = LayerwiseLoader(host, device)
    load = loader.load(*indices)
    del host, indices, load, loader
    gc.collect()
    noise = [torch.full((SLOTS, H, D), 99, dtype=torch.int32).pin_memory() for _ in range(2 * L)]
    torch.cuda.synchronize()
    assert_loaded(device, *slots)
    del noise


@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_everything_but_the_load_dropped_lives_until_a_worker_is_done(
    slots, slow_layers, index_device
):
    host = [[numbers(2 * i + b).pin_memory() for b in (0, 1)] for i in range(L)]
    device = poisoned()
    indices = [index.to(index_device) for index in slots]
    torch.cuda.synchronize()
    loader = LayerwiseLoader(host, device, submit="thread")
    load = loader.load(*indices)
    del host, indices, loader
    gc.collect()
    noise = [torch.full((SLOTS, H, D), 99, dtype=torch.int32).pin_memory() for _ in range(2 * L)]
    load.synchronize()
    assert_loaded(device, *slots)
    del noise


def test_device_layers_dropped_after_load_are_not_given_to_others_before_it_is_done(
    pool, slots, slow_layers
):
    device = poisoned()
    torch.cuda.synchronize()
    loader = LayerwiseLoader(pool.layers(), device)
    load = loader.load(*slots)
    del device, load, loader
    gc.collect()
    others = poisoned()
    torch.cuda.synchronize()
    assert all(bool((b == POISON).all()) for buffers in others for b in buffers)


def test_a_pool_closed_while_a_load_is_queued_waits_for_it(pool, slots, gpu_slots, slow_layers):
    device = poisoned()
    torch.cuda.synchronize()
    with LayerwiseLoader(pool.layers(), device) as loader:
        load = loader.load(*gpu_slots)
        assert not load.done()
        pool.close()
        assert load.done()
        assert_loaded(device, *slots)
        with pytest.raises(RuntimeError, match="page-locked"):
            loader.load(*gpu_slots)


@SUBMIT
def test_close_waits_for_the_loads_in_flight(pool, slots, slow_layers, submit):
    device = poisoned()
    loader = LayerwiseLoader(pool.layers(), device, submit=submit)
    load = loader.load(*slots)
    loader.close()
    loader.close()
    assert load.done()
    load.wait()
    assert_loaded(device, *slots)
    with pytest.raises(ValueError, match="after close"):
        loader.load(*slots)


def test_loads_that_are_done_are_let_go(pool, slots):
    with LayerwiseLoader(pool.layers(), poisoned()) as loader:
        for _ in range(10):
            loader.load(*slots).synchronize()
        assert len(loader._in_flight) == 1


# ------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
@SUBMIT
def test_a_load_works_in_and_across_grad_modes(pool, slots, mode, made_in, index_device, submit):
    with made_in():
        device = poisoned()
        indices = [index.to(index_device) for index in slots]
    with mode(), LayerwiseLoader(pool.layers(), device, submit=submit) as loader:
        load = loader.load(*indices)
        for i in range(L):
            load.wait_layer(i)
        torch.cuda.synchronize()
    assert_loaded(device, *slots)


# ------------------------------------------------------------------------------------ two devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
@SUBMIT
def test_a_loader_works_while_another_device_is_current(slots, slow_layers, index_device, submit):
    sizes = {"num_pages": N, "page_size": P, "num_layers": L, "num_heads": H, "head_dim": D}
    loads = []
    for index in (1, 0):
        place = torch.device("cuda", index)
        pool = HostKVPool("mha", "page_first", **sizes, dtype=torch.int32, device=place)
        for i, view in enumerate(pool.all_layers()):
            view.copy_(numbers(i))
        device = poisoned(place)
        torch.cuda.synchronize(index)
        with torch.cuda.device(1 - index):
            loader = LayerwiseLoader(pool.layers(), device, submit=submit)
            where = place if index_device == "cuda" else "cpu"
            load = loader.load(*(slot.to(where) for slot in slots))
            load.wait_layer(L - 1)
            copy = device[-1][0].clone()
            assert torch.cuda.current_device() == 1 - index
        loads.append((pool, loader, load, device, copy))
    for pool, loader, load, device, copy in loads:
        load.synchronize()
        assert_loaded(device, *slots)
        assert torch.equal(copy.cpu(), expected(L - 1, 0, *slots))
        loader.close()
        pool.close()
