"""LayerwiseLoader without a GPU: right bytes, right order, errors, lifetime of what a load uses."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from loader_rig import WAIT_S, Gate, L, flat_layers, in_a_forked_child

from sgl_kvio import HostKVPool, LayerwiseLoader, ops
from sgl_kvio.loader import MAX_CLONED_INDICES

COMBINATIONS = pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind in ("mha", "mla", "k_only", "asymmetric")
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
        if layout != "page_head" or kind == "mha"
    ],
)
N, P = 6, 4


def make_pool(kind="mha", layout="page_first", num_pages=N):
    return HostKVPool(
        kind,
        layout,
        num_pages=num_pages,
        page_size=P,
        num_layers=L,
        num_heads=1 if kind == "mla" else 2,
        head_dim=6,
        v_head_dim=4 if kind == "asymmetric" else None,
        dtype=torch.int16,
        device="cpu",
    )


def randomize(pool):
    for tensor in pool.tensors:
        tensor.copy_(torch.randint(-32768, 32767, tensor.shape, dtype=tensor.dtype))
    return pool


def rows(view, slots):
    return view[slots] if view.dim() == 3 else view[slots // P, slots % P]


def put_rows(view, slots, values):
    view[(slots,) if view.dim() == 3 else (slots // P, slots % P)] = values


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open(1000)


# ------------------------------------------------------------------------------------------ bytes


@COMBINATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_load_brings_the_rows_and_leaves_every_other_byte_alone(kind, layout, dtype):
    with (
        randomize(make_pool(kind, layout)) as host,
        randomize(make_pool(kind, "layer_first")) as to,
    ):
        host_slots = host.token_indices([4, 0, 5], 10).to(dtype)
        device_slots = torch.tensor([23, 0, 1, 7, 5, 4, 8, 12, 13, 20], dtype=dtype)
        source = [tensor.clone() for tensor in host.tensors]
        want = [view.clone() for view in to.all_layers()]
        for view, src in zip(want, host.all_layers(), strict=True):
            put_rows(view, device_slots.long(), rows(src, host_slots.long()))
        with LayerwiseLoader(host.layers(), to.layers(), page_size=P) as loader:
            load = loader.load(host_slots, device_slots)
            for i in range(L):
                load.wait_layer(i)
            load.wait()
            assert load.done()
        assert all(torch.equal(a, b) for a, b in zip(to.all_layers(), want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(host.tensors, source, strict=True))


def test_page_indices_bring_whole_pages():
    with randomize(make_pool(layout="page_head")) as host, randomize(make_pool()) as to:
        want = [view.clone() for view in to.all_layers()]
        for view, src in zip(want, host.all_layers(), strict=True):
            put_rows(view, to.token_indices([1, 0]), rows(src, host.token_indices([2, 5])))
        with LayerwiseLoader(host.layers(), to.layers(), page_size=P) as loader:
            loader.load(torch.tensor([2, 5]), torch.tensor([1, 0]), index_unit="page").wait()
        assert all(torch.equal(a, b) for a, b in zip(to.all_layers(), want, strict=True))


def test_a_load_of_nothing_changes_nothing():
    host, to = flat_layers(1), flat_layers(9)
    empty = torch.empty(0, dtype=torch.int64)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(empty, empty)
        load.wait_layer(L - 1)
        load.synchronize()
        assert load.done()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(to, flat_layers(9), strict=True))


def test_a_load_of_no_layers_is_done():
    with LayerwiseLoader([], []) as loader:
        load = loader.load(torch.tensor([0]), torch.tensor([0]))
        load.wait()
        load.synchronize()
        assert loader.num_layers == 0
        deadline = time.monotonic() + WAIT_S
        while not load.done():
            assert time.monotonic() < deadline


def test_a_layer_may_be_given_as_one_tensor():
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader([layer[0] for layer in host], [layer[0] for layer in to]) as loader:
        loader.load(torch.tensor([3]), torch.tensor([5])).wait()
    for src, dst in zip(host, to, strict=True):
        assert torch.equal(dst[0][5], src[0][3])


# ------------------------------------------------------------------------------------------ order


def test_a_layer_is_not_there_before_wait_layer_and_later_ones_are_not_waited_for(gate):
    host, to = flat_layers(1), flat_layers(9)
    slots = torch.arange(16)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(slots, slots)
        for i in range(L):
            assert not load.done()
            assert torch.equal(to[i][0], flat_layers(9)[i][0])
            gate.open()
            load.wait_layer(i)
            assert torch.equal(to[i][0], host[i][0])
        load.wait()
        assert load.done()


def test_wait_layer_blocks_until_the_layer_is_in_place(gate):
    host, to = flat_layers(1), flat_layers(9)
    slots = torch.arange(16)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(slots, slots)
        seen = []

        def consume():
            load.wait_layer(1)
            seen.append(to[1][0].clone())

        consumer = threading.Thread(target=consume)
        consumer.start()
        gate.open()
        load.wait_layer(0)
        time.sleep(0.05)
        assert seen == []
        gate.open()
        consumer.join(WAIT_S)
        assert torch.equal(seen[0], host[1][0])
        gate.open()


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_wait_and_synchronize_block_until_the_last_layer(monkeypatch, wait):
    transfer = ops.transfer

    def slow(*args, **options):
        time.sleep(0.02)
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", slow)
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(torch.arange(16), torch.arange(16))
        getattr(load, wait)()
        assert all(torch.equal(a[0], b[0]) for a, b in zip(to, host, strict=True))


def test_two_loads_run_in_the_order_of_the_calls(gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        first = loader.load(torch.tensor([0, 1]), torch.tensor([5, 6]))
        second = loader.load(torch.tensor([7]), torch.tensor([5]))
        gate.open(L)
        first.wait()
        assert torch.equal(to[0][0][5], host[0][0][0])
        assert not second.done()
        gate.open(L)
        second.wait()
        for src, dst in zip(host, to, strict=True):
            assert torch.equal(dst[0][5], src[0][7])
            assert torch.equal(dst[0][6], src[0][1])


def test_the_loaders_wait_layer_is_that_of_the_newest_load(gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        loader.wait_layer(0)
        loader.load(torch.tensor([0]), torch.tensor([5]))
        loader.load(torch.tensor([7]), torch.tensor([5]))
        gate.open(L + 1)
        loader.wait_layer(0)
        assert torch.equal(to[0][0][5], host[0][0][7])
        gate.open(L)


def test_layers_of_loads_from_several_threads_do_not_mix(monkeypatch):
    order, transfer = [], ops.transfer

    def record(dst, src, dst_indices, src_indices, **options):
        order.append((int(src_indices[0]), dst[0].data_ptr()))
        transfer(dst, src, dst_indices, src_indices, **options)

    monkeypatch.setattr(ops, "transfer", record)
    host, to = flat_layers(1), flat_layers(9)
    pointers = [layer[0].data_ptr() for layer in to]
    with LayerwiseLoader(host, to) as loader:
        threads = [
            threading.Thread(target=loader.load, args=(torch.tensor([i]), torch.tensor([i])))
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(order) == 8 * L
    for start in range(0, len(order), L):
        assert [pointer for _, pointer in order[start : start + L]] == pointers
        assert len({load for load, _ in order[start : start + L]}) == 1


@pytest.mark.parametrize("layer", [-1, L])
def test_waiting_for_a_layer_that_does_not_exist_is_refused(layer):
    with LayerwiseLoader(flat_layers(), flat_layers()) as loader:
        load = loader.load(torch.tensor([0]), torch.tensor([0]))
        with pytest.raises(IndexError, match=rf"layer got {layer}; needs 0\.\.2"):
            load.wait_layer(layer)


@pytest.mark.parametrize("layer", [True, 1.0, "0", None, torch.tensor(True)])
def test_a_layer_that_is_no_int_is_refused_by_name(layer):
    with LayerwiseLoader(flat_layers(), flat_layers()) as loader:
        with pytest.raises(TypeError, match="layer got .*; needs an int"):
            loader.wait_layer(layer)
        load = loader.load(torch.tensor([0]), torch.tensor([0]))
        for waiting in (load, loader):
            with pytest.raises(TypeError, match="layer got .*; needs an int"):
                waiting.wait_layer(layer)


def test_numpys_ints_are_ints_to_a_loader():
    numpy = pytest.importorskip("numpy")
    host, to = flat_layers(1), flat_layers(9)
    number = numpy.int64
    options = {"row_ndim": number(2), "page_size": number(1), "num_blocks": number(0)}
    with LayerwiseLoader(host, to, **options) as loader:
        loader.load(torch.tensor([3]), torch.tensor([5])).wait_layer(number(2))
    assert torch.equal(to[2][0][5], host[2][0][3])


# ----------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("group", [1, 2, 4, 100])
def test_a_load_in_groups_brings_the_same_bytes(layers, group):
    host, to = flat_layers(1, layers=layers), flat_layers(9, layers=layers)
    slots = torch.tensor([3, 15, 0])
    with LayerwiseLoader(host, to, group=group) as loader:
        load = loader.load(slots, slots.flip(0))
        for i in range(layers):
            load.wait_layer(i)
            assert torch.equal(to[i][0][slots.flip(0)], host[i][0][slots])
        load.synchronize()
    rest = torch.tensor([i for i in range(16) if i not in slots])
    for i, want in enumerate(flat_layers(9, layers=layers)):
        assert torch.equal(to[i][0][rest], want[0][rest])


@pytest.mark.parametrize(
    ("group", "sizes"), [(1, [1] * 6), (2, [1, 2, 2, 1]), (3, [1, 3, 2]), (5, [1, 5]), (99, [1, 5])]
)
def test_layer_0_moves_alone_and_the_others_in_groups(monkeypatch, group, sizes):
    moved, transfer = [], ops.transfer

    def record(dst, *rest, **options):
        moved.append(len(dst))
        transfer(dst, *rest, **options)

    monkeypatch.setattr(ops, "transfer", record)
    with LayerwiseLoader(flat_layers(1, layers=6), flat_layers(9, layers=6), group=group) as loader:
        loader.load(torch.tensor([0]), torch.tensor([0])).wait()
        assert loader.num_groups == len(sizes)
    assert moved == sizes


def test_wait_layer_waits_for_the_group_of_the_layer_and_no_later_one(gate):
    host, to = flat_layers(1, layers=6), flat_layers(9, layers=6)
    slots = torch.arange(16)
    with LayerwiseLoader(host, to, group=2) as loader:
        load = loader.load(slots, slots)
        for group in ([0], [1, 2], [3, 4], [5]):
            assert not load.done()
            assert torch.equal(to[group[0]][0], flat_layers(9, layers=6)[group[0]][0])
            gate.open()
            for layer in group:
                load.wait_layer(layer)
                assert torch.equal(to[layer][0], host[layer][0])
        load.wait()


def test_a_group_names_the_buffers_of_one_kind_one_after_another(gate):
    host, to = ([[torch.zeros(4, 1, 1) for _ in "KV"] for _ in range(3)] for _ in range(2))
    with LayerwiseLoader(host, to, group=2) as loader:
        load = loader.load(torch.tensor([0]), torch.tensor([0]))
        gate.open(2)
        load.wait()
    dst, src = gate.started[1][:2]
    for layers, given in ((to, dst), (host, src)):
        want = [layers[1][0], layers[2][0], layers[1][1], layers[2][1]]
        assert [id(buffer) for buffer in given] == [id(buffer) for buffer in want]


def test_layers_of_several_geometries_may_share_a_group():
    shapes = [(16, 2, 3), (4, 4, 2, 3), (16, 1, 8), (20, 2, 3), (5, 4, 5, 1)]
    dtypes = [torch.int32, torch.int32, torch.int16, torch.uint8, torch.int64]

    def layers(seed):
        generator = torch.Generator().manual_seed(seed)
        return [
            [
                torch.randint(0, 100, shape, dtype=dtype, generator=generator)
                for _ in range(1 + i % 2)
            ]
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    host, to, want = layers(1), layers(2), layers(2)
    host_slots, device_slots = torch.tensor([15, 2, 7]), torch.tensor([0, 9, 14])
    for sources, targets in zip(host, want, strict=True):
        for source, target in zip(sources, targets, strict=True):
            if source.dim() == 3:
                target[device_slots] = source[host_slots]
            else:
                target[device_slots // P, device_slots % P] = source[
                    host_slots // P, host_slots % P
                ]
    with LayerwiseLoader(host, to, group=4, page_size=P) as loader:
        loader.load(host_slots, device_slots).wait()
    for got, expected in zip(to, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_error_of_a_group_is_that_of_its_layers_and_of_all_later_ones():
    host, to = flat_layers(1, layers=6), flat_layers(9, layers=6)
    to[2] = flat_layers(9, slots=8, layers=1)[0]
    with LayerwiseLoader(host, to, group=2) as loader:
        load = loader.load(torch.tensor([1]), torch.tensor([12]))
        load.wait_layer(0)
        for layer in range(1, 6):
            with pytest.raises(RuntimeError, match="dst_indices"):
                load.wait_layer(layer)
            rows = flat_layers(9, layers=6)[layer][0][: to[layer][0].shape[0]]
            assert layer == 2 or torch.equal(to[layer][0], rows)


@pytest.mark.parametrize("group", [0, -1, True, 1.5, None, "2"])
def test_a_group_that_is_no_size_is_refused_by_name(group):
    with pytest.raises(ValueError, match="group got .*; needs an int of at least 1"):
        LayerwiseLoader(flat_layers(), flat_layers(), group=group)


@pytest.mark.parametrize("submit", ["", "Thread", None, 1])
def test_a_submitter_that_there_is_not_is_refused_by_name(submit):
    with pytest.raises(ValueError, match="submit got .*; needs one of caller, thread"):
        LayerwiseLoader(flat_layers(), flat_layers(), submit=submit)


def test_options_reach_every_transfer_and_a_preference_only_when_there_is_one(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "transfer", lambda *args, **options: seen.append(options))
    index = torch.tensor([0])
    for more in ({}, {"prefer": "quiet"}):
        options = {"row_ndim": 2, "page_size": 4, "backend": "cpu", "num_blocks": 3, **more}
        with LayerwiseLoader(flat_layers(), flat_layers(), **options) as loader:
            loader.load(index, index, index_unit="page").wait()
        assert seen == [{**options, "index_unit": "page"}] * L
        seen.clear()


def test_other_threads_run_python_while_a_transfer_is_copying(monkeypatch):
    spans, transfer = [], ops.transfer

    def timed(*args, **options):
        start = time.perf_counter()
        transfer(*args, **options)
        spans.append((start, time.perf_counter()))

    monkeypatch.setattr(ops, "transfer", timed)
    # Long enough for many turns of the interpreter: 32 MiB in rows of 64 bytes a layer.
    rows = 1 << 19
    slots = torch.randperm(rows)
    host, to = ([torch.zeros(rows, 1, 64, dtype=torch.uint8) for _ in range(L)] for _ in range(2))
    stamps = []
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(slots, slots)
        while not load.done():
            stamps.append(time.perf_counter())
    inside = [sum(start < stamp < stop for stamp in stamps) for start, stop in spans]
    assert max(inside) > 20, inside


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("wait", ["wait", "synchronize", "wait_layer"])
def test_an_error_of_the_copying_comes_out_of_every_wait(wait):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(torch.tensor([0, 16]), torch.tensor([0, 1]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="kvio::transfer: src_indices"):
                getattr(load, wait)(*([0] if wait == "wait_layer" else []))
        assert load.done()
        assert all(torch.equal(a[0], b[0]) for a, b in zip(to, flat_layers(9), strict=True))
        loader.load(torch.tensor([2]), torch.tensor([3])).wait()
        assert torch.equal(to[2][0][3], host[2][0][2])


def test_layers_after_a_failed_one_fail_with_it_and_are_not_copied(monkeypatch):
    transfer, failing = ops.transfer, []

    def fail_in_layer_1(dst, src, dst_indices, src_indices, **options):
        failing.append(len(failing))
        if failing[-1] == 1:
            raise RuntimeError("the copying broke")
        transfer(dst, src, dst_indices, src_indices, **options)

    monkeypatch.setattr(ops, "transfer", fail_in_layer_1)
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(torch.arange(16), torch.arange(16))
        load.wait_layer(0)
        assert torch.equal(to[0][0], host[0][0])
        for layer in (1, 2):
            with pytest.raises(RuntimeError, match="the copying broke"):
                load.wait_layer(layer)
            assert torch.equal(to[layer][0], flat_layers(9)[layer][0])
    assert failing == [0, 1]


@pytest.mark.parametrize("option", [{"page_size": 0}, {"backend": "magic"}, {"row_ndim": 7}])
def test_options_that_transfer_refuses_come_out_of_wait(option):
    with LayerwiseLoader(flat_layers(), flat_layers(), **option) as loader:
        load = loader.load(torch.tensor([0]), torch.tensor([0]))
        with pytest.raises(RuntimeError, match=next(iter(option))):
            load.wait()


@pytest.mark.parametrize("name", ["row_ndim", "page_size", "num_blocks"])
@pytest.mark.parametrize("value", [True, 1.0, None, "2"])
def test_an_option_that_is_no_int_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"LayerwiseLoader: {name} got {value!r}; needs an int"):
        LayerwiseLoader(flat_layers(), flat_layers(), **{name: value})


@pytest.mark.parametrize("name", ["host_indices", "device_indices"])
@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (torch.empty(1, dtype=torch.int64, device="meta"), "got a tensor on meta"),
        ([0], "got list; needs a Tensor"),
        (None, "got NoneType; needs a Tensor"),
    ],
)
def test_indices_of_no_device_are_refused_by_name_before_anything_is_started(name, indices, text):
    given = {"host_indices": torch.tensor([0]), "device_indices": torch.tensor([0])}
    before = threading.active_count()
    with LayerwiseLoader(flat_layers(1), flat_layers(9)) as loader:
        with pytest.raises(ValueError, match=f"load: {name} {text}"):
            loader.load(**given | {name: indices})
        assert threading.active_count() == before
        loader.load(**given).wait()


@pytest.mark.parametrize(
    ("host", "device", "text"),
    [
        (None, None, "host_layers got NoneType; needs a sequence"),
        (flat_layers(), None, "device_layers got NoneType; needs a sequence"),
        ([None], flat_layers(layers=1), r"host_layers\[0\] got NoneType; needs a sequence"),
        (flat_layers(layers=2), flat_layers(), r"host_layers got 2 layers; needs 3"),
        ([[], []], [[], flat_layers()[0]], r"host_layers\[1\] got 0 buffers; needs 1"),
        ([[3]], flat_layers(layers=1), r"host_layers\[0\]\[0\] got int; needs a Tensor"),
        (
            flat_layers(layers=1),
            [[torch.empty(4, 1, 1, device="meta")]],
            "device_layers got meta; needs the CPU or a GPU",
        ),
        (
            [[torch.empty(4, 1, 1, device="meta")]],
            flat_layers(layers=1),
            r"host_layers\[0\]\[0\] got meta; needs cpu",
        ),
        (
            flat_layers(layers=2),
            [flat_layers()[0], [torch.empty(4, 1, 1, device="meta")]],
            r"device_layers\[1\]\[0\] got meta; needs cpu",
        ),
    ],
)
def test_lists_that_do_not_fit_together_are_refused_by_name(host, device, text):
    with pytest.raises(ValueError, match=text):
        LayerwiseLoader(host, device)


# --------------------------------------------------------------------------------------- lifetime


def test_pools_live_until_the_load_is_done(gate):
    host, to = flat_layers(1), flat_layers(9)
    references = [weakref.ref(t) for t in (host[2][0], to[2][0])]
    loader = LayerwiseLoader(host, to)
    load = loader.load(torch.arange(16), torch.arange(16))
    del host, to, loader
    gc.collect()
    assert all(reference() is not None for reference in references)
    gate.started.clear()
    gate.open(L)
    load.synchronize()
    assert torch.equal(references[1](), flat_layers(1)[2][0])
    del load
    gate.started.clear()
    deadline = time.monotonic() + WAIT_S
    while any(reference() is not None for reference in references):
        assert time.monotonic() < deadline
        gc.collect()


def test_index_lists_may_change_and_go_while_a_worker_reads_them(gate):
    host, to = flat_layers(1), flat_layers(9)
    host_slots, device_slots = torch.arange(16), torch.arange(16).flip(0)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(host_slots, device_slots)
        host_slots.fill_(99)
        device_slots.fill_(99)
        gate.open(L)
        load.wait()
    for src, dst in zip(host, to, strict=True):
        assert torch.equal(dst[0], src[0].flip(0))


def test_an_index_list_too_long_to_be_copied_lives_until_the_load_is_done(gate):
    slots = torch.zeros(MAX_CLONED_INDICES + 1, dtype=torch.int64)
    reference = weakref.ref(slots)
    with LayerwiseLoader(flat_layers(1), flat_layers(9)) as loader:
        load = loader.load(slots, slots)
        del slots
        gc.collect()
        assert reference() is not None
        gate.open(L)
        load.synchronize()


def test_a_load_that_is_done_keeps_nothing_alive():
    host, to = flat_layers(1), flat_layers(9)
    host_slots = torch.arange(16)
    reference = weakref.ref(host_slots)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(host_slots, torch.arange(16))
        load.synchronize()
        del host_slots
        deadline = time.monotonic() + WAIT_S
        while reference() is not None:
            assert time.monotonic() < deadline
            gc.collect()
        assert load.done()


def test_a_load_finishes_although_its_pool_was_closed(gate):
    host, to = randomize(make_pool()), randomize(make_pool())
    want = [rows(view, host.token_indices([1])).clone() for view in host.all_layers()]
    kept = to.all_layers()
    with LayerwiseLoader(host.layers(), to.layers()) as loader:
        load = loader.load(host.token_indices([1]), to.token_indices([2]))
        host.close()
        to.close()
        gate.open(L)
        load.wait()
    got = [rows(view, torch.arange(2 * P, 3 * P)) for view in kept]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_close_waits_for_the_loads_in_flight_and_ends_the_thread(monkeypatch):
    transfer = ops.transfer

    def slow(*args, **options):
        time.sleep(0.02)
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", slow)
    before = threading.active_count()
    host, to = flat_layers(1), flat_layers(9)
    loader = LayerwiseLoader(host, to)
    load = loader.load(torch.arange(16), torch.arange(16))
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert load.done()
    assert torch.equal(to[2][0], host[2][0])
    assert threading.active_count() == before
    load.wait_layer(2)


def test_a_loader_that_nobody_closed_ends_its_thread():
    before = threading.active_count()
    loader = LayerwiseLoader(flat_layers(1), flat_layers(9))
    loader.load(torch.arange(16), torch.arange(16)).wait()
    del loader
    gc.collect()
    deadline = time.monotonic() + WAIT_S
    while threading.active_count() != before:
        assert time.monotonic() < deadline


def test_use_after_close_raises():
    loader = LayerwiseLoader(flat_layers(), flat_layers())
    loader.close()
    index = torch.tensor([0])
    for call in (lambda: loader.load(index, index), lambda: loader.wait_layer(0), loader.__enter__):
        with pytest.raises(ValueError, match="after close"):
            call()


def test_a_failed_load_does_not_make_close_raise():
    loader = LayerwiseLoader(flat_layers(), flat_layers())
    load = loader.load(torch.tensor([99]), torch.tensor([0]))
    loader.close()
    with pytest.raises(RuntimeError, match="src_indices"):
        load.wait()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_not_copied(duplicate):
    with (
        LayerwiseLoader(flat_layers(), flat_layers()) as loader,
        pytest.raises(TypeError, match="LayerwiseLoader: cannot be copied"),
    ):
        duplicate(loader)


# -------------------------------------------------------------------------------------------- fork


def check_a_load(loader, host, to, row):
    loader.load(torch.tensor([row]), torch.tensor([5])).wait()
    for src, dst in zip(host, to, strict=True):
        assert torch.equal(dst[0][5], src[0][row])


def test_a_loader_that_has_loaded_loads_in_a_forked_child_and_still_in_its_parent():
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        check_a_load(loader, host, to, 0)

        def work():
            check_a_load(loader, host, to, 7)
            loader.close()

        assert in_a_forked_child(work) == 0
        check_a_load(loader, host, to, 3)


def test_closing_in_a_forked_child_does_not_wait_for_the_parents_thread(gate):
    with LayerwiseLoader(flat_layers(1), flat_layers(9)) as loader:
        load = loader.load(torch.arange(16), torch.arange(16))
        assert in_a_forked_child(loader.close) == 0
        gate.open(L)
        load.wait()


def test_layers_in_flight_at_a_fork_fail_in_the_child_and_arrive_in_the_parent(gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to) as loader:
        load = loader.load(torch.arange(16), torch.arange(16))
        gate.open()
        load.wait_layer(0)
        deadline = time.monotonic() + WAIT_S
        while len(gate.started) < 2:  # the worker is past layer 0
            assert time.monotonic() < deadline

        def work():
            load.wait_layer(0)
            for wait in (load.wait, load.synchronize, lambda: loader.wait_layer(1)):
                with pytest.raises(RuntimeError, match="in flight when this process was forked"):
                    wait()
            assert load.done()

        assert in_a_forked_child(work) == 0
        gate.open(L)
        load.wait()
        assert torch.equal(to[2][0], host[2][0])


def test_a_load_that_failed_before_a_fork_keeps_its_error_in_the_child():
    with LayerwiseLoader(flat_layers(), flat_layers()) as loader:
        load = loader.load(torch.tensor([99]), torch.tensor([0]))
        while not load.done():
            time.sleep(0.001)

        def work():
            with pytest.raises(RuntimeError, match="src_indices"):
                load.wait()

        assert in_a_forked_child(work) == 0


def test_a_fork_while_another_thread_is_inside_close_does_not_lock_the_child_out(gate):
    loader = LayerwiseLoader(flat_layers(1), flat_layers(9))
    loader.load(torch.arange(16), torch.arange(16))
    closing = threading.Thread(target=loader.close)
    closing.start()
    deadline = time.monotonic() + WAIT_S
    while not loader._closed:
        assert time.monotonic() < deadline

    def work():
        with pytest.raises(ValueError, match="after close"):
            loader.load(torch.arange(16), torch.arange(16))

    assert in_a_forked_child(work) == 0
    gate.open(L)
    closing.join(WAIT_S)


# ------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
def test_a_load_works_in_and_across_grad_modes(mode, made_in):
    # Inference tensors are writable in inference mode only, and a worker thread starts outside.
    with made_in():
        host, to = flat_layers(1), flat_layers(9)
    with mode():
        loader = LayerwiseLoader(host, to)
        load = loader.load(torch.arange(16), torch.arange(16))
        for i in range(L):
            load.wait_layer(i)
            assert torch.equal(to[i][0], host[i][0])
    loader.close()
