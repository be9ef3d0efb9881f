"""load_layers and wait_layer on a GPU: bytes, flags, readers that wait, graphs, compiled functions.

Readers run on a stream of their own; a load is often held back by a long kernel before it, so that
whoever does not wait reads old bytes.
"""

import gc
import itertools
import os
import subprocess
import sys
import textwrap

import layers_rig
import pytest
import torch
import torch._dynamo
from test_load_layers import BAD, good_call, run, samples
from test_load_layers_compile import L as COMPILED_LAYERS
from test_load_layers_compile import (
    assert_close,
    check_loads,
    exported,
    forward,
    forward_by_op,
    inductor,
    make_arguments,
    make_inputs,
    make_pools,
    restore_and_forward,
)

import cases
import sgl_kvio
from reference import (
    assert_same_bytes,
    kernels_of_two_streams_run_side_by_side,
    moved,
    refused,
)

LONG = 400_000_000  # cycles, about 0.2 s
FORMS = pytest.mark.parametrize("form", layers_rig.FORMS, ids="-".join)


@pytest.fixture(scope="module")
def side_by_side():
    """Whether two streams run at once; where not, what a graph runs first is anyone's guess."""
    return kernels_of_two_streams_run_side_by_side()


@pytest.fixture
def needs_side_by_side(side_by_side):
    if not side_by_side:
        pytest.skip("here the kernels of two streams run one after the other")


# Bytes.

CASES = [case for case in cases.selected(gpu=True) if case.direction in ("h2d", "d2d")]


@pytest.mark.parametrize(
    ("case", "form"),
    list(zip(CASES, itertools.cycle(layers_rig.FORMS), strict=False)),
    ids=lambda value: value.name if isinstance(value, cases.Case) else "-".join(value),
)
def test_moves_the_named_rows_of_every_layer_and_no_other_byte(case, form):
    layers_rig.check_loaded_case(case, form, "cuda")


class Rig:
    """A device pool with canaries between its rows, a page-locked host pool, index lists, flags."""

    def __init__(
        self,
        *,
        layers=6,
        slots=256,
        rows=100,
        row=(2, 72),
        form=("stacked", "stacked"),
        index_dtype=torch.int64,
        index_place="cuda",
        seed=0,
    ):
        self.layers, self.slots, self.rows, self.row = layers, slots, rows, row
        self.form, self.index_place, self.seed = form, index_place, seed
        # A pitch: what lies between two rows must stay as it is.
        wide = (layers, slots, row[0], row[1] + 8)
        self.memory = [torch.empty(wide, dtype=torch.bfloat16, device="cuda") for _ in "KV"]
        self.device = [memory[..., : row[1]] for memory in self.memory]
        self.host = [
            torch.empty(layers, slots, *row, dtype=torch.bfloat16).pin_memory() for _ in "KV"
        ]
        self.at, self.frm = (
            torch.zeros(rows, dtype=index_dtype, device=index_place) for _ in range(2)
        )
        # The readers' own copy of the rows' places.
        self.read_at = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.out = [
            torch.empty(layers, rows, *row, dtype=torch.bfloat16, device="cuda") for _ in "KV"
        ]
        self.flags = sgl_kvio.layer_flags(layers, "cuda")
        self.epoch = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.side = torch.cuda.Stream()

    def refill(self, seed):
        """New rows on the host, new indices, poison on the device; nothing may be in flight."""
        torch.cuda.synchronize()
        for i, host in enumerate(self.host):
            host.copy_(
                cases.contiguous_pool(host.shape, host.dtype, 1000 * self.seed + 10 * seed + i)
            )
        for i, memory in enumerate(self.memory):
            number = 1000 * self.seed + 10 * seed + 5 + i
            memory.copy_(cases.contiguous_pool(memory.shape, memory.dtype, number))
        for out in self.out:
            out.view(torch.int16).fill_(-seed)
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        at, frm = (torch.randperm(self.slots, generator=generator)[: self.rows] for _ in range(2))
        self.at.copy_(at)
        self.frm.copy_(frm)
        self.read_at.copy_(at)
        torch.cuda.synchronize()
        self.want_memory = [memory.cpu() for memory in self.memory]
        for memory, host in zip(self.want_memory, self.host, strict=True):
            memory[:, at, :, : self.row[1]] = host[:, frm]
        self.want_out = [host[:, frm].clone() for host in self.host]

    def buffers(self, which, form):
        if form == "stacked":
            return which
        return [[buffer[layer] for buffer in which] for layer in range(self.layers)]

    def load(self, epoch, **options):
        sgl_kvio.load_layers(
            self.buffers(self.device, self.form[0]),
            self.buffers(self.host, self.form[1]),
            self.at,
            self.frm,
            self.flags,
            epoch,
            **options,
        )

    def load_beside(self, epoch, held_back=0, **options):
        """The load on the side stream, behind all that the current stream holds by now."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            if held_back:
                torch.cuda._sleep(held_back)
            self.load(epoch, **options)

    def read(self, epoch, timeout_ms=60000):
        """The readers of a forward pass: each layer's rows behind its wait."""
        for layer in range(self.layers):
            sgl_kvio.wait_layer(self.flags, layer, epoch, timeout_ms=timeout_ms)
            for out, device in zip(self.out, self.device, strict=True):
                out[layer].copy_(device[layer][self.read_at])

    def join(self):
        torch.cuda.current_stream().wait_stream(self.side)

    def check(self, epoch):
        torch.cuda.synchronize()
        sgl_kvio.check()
        for got, want in zip(self.out, self.want_out, strict=True):
            assert_same_bytes(got, want, f"what the readers of load {epoch} saw")
        for got, want in zip(self.memory, self.want_memory, strict=True):
            assert_same_bytes(got, want, f"device pool after load {epoch}")
        assert self.flags.tolist() == [[epoch] * self.layers, [0] * self.layers]


@pytest.fixture
def own_stream():
    """The readers' stream, the current one of the test."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


# Readers on another stream.


@FORMS
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_readers_wait_for_a_load_that_comes_late(kind, index_place, form, own_stream, side_by_side):
    rig = Rig(form=form, index_place=index_place)
    for number in range(1, 4):
        rig.refill(number)
        rig.epoch.fill_(number)
        epoch = number if kind == "int" else rig.epoch
        rig.load_beside(epoch, held_back=LONG if number > 1 else 0)
        rig.read(epoch)
        # The first time kernels are loaded, which may wait.
        waited = number > 1 and side_by_side and rig.side.query()
        rig.check(number)
        assert not waited, "the host waited for the load"


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_loads_and_readers_may_be_enqueued_far_ahead(kind, own_stream):
    """No host sync between loads: rows of each go where the next one's go, and none is lost."""
    rig = Rig(rows=64)
    rig.refill(1)
    rig.load_beside(1)
    rig.read(1)
    rig.join()
    rig.check(1)
    rig.epoch.fill_(1)
    orders = [torch.randperm(rig.slots)[: rig.rows] for _ in range(12)]
    lists = [order.cuda() for order in orders]
    seen = []
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for number, frm in enumerate(lists, 2):
        rig.frm.copy_(frm)
        rig.epoch.add_(1)
        epoch = number if kind == "int" else rig.epoch
        rig.load_beside(epoch)
        rig.read(epoch)
        seen.append([out.clone() for out in rig.out])
        rig.join()
    torch.cuda.synchronize()
    for order, outs in zip(orders, seen, strict=True):
        for got, host in zip(outs, rig.host, strict=True):
            assert_same_bytes(got, host[:, order], "what readers saw")
    assert rig.flags.tolist() == [[13] * rig.layers, [0] * rig.layers]


def test_many_streams_wait_for_one_load(own_stream):
    rig = Rig(layers=4)
    rig.refill(1)
    rig.load_beside(1)
    rig.read(1)
    rig.refill(2)
    readers = [torch.cuda.Stream() for _ in range(8)]
    outs = [torch.zeros_like(rig.out[0]) for _ in readers]
    torch.cuda.synchronize()
    rig.load_beside(2, held_back=LONG)
    for stream, out in zip(readers, outs, strict=True):
        with torch.cuda.stream(stream):
            for layer in reversed(range(rig.layers)):
                sgl_kvio.wait_layer(rig.flags, layer, 2)
                out[layer].copy_(rig.device[0][layer][rig.read_at])
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bytes(out, rig.want_out[0], "what a reader saw")


def test_layers_are_there_one_after_the_other(own_stream, needs_side_by_side):
    """The first layer of 32 is there long before the last one, and the last ends the load."""
    rig = Rig(layers=32, slots=4096, rows=4096, row=(2, 128))
    rig.refill(1)
    rig.load_beside(1)
    rig.read(1)
    torch.cuda.synchronize()
    rig.refill(2)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rig.layers + 1)]
    marks[0].record()
    rig.load_beside(2)
    for layer in range(rig.layers):
        sgl_kvio.wait_layer(rig.flags, layer, 2)
        marks[layer + 1].record()
    rig.read(2)
    rig.check(2)
    times = [marks[0].elapsed_time(mark) for mark in marks[1:]]
    assert times == sorted(times)
    assert times[0] < times[-1] / 4, times
    assert times[15] < 0.8 * times[-1], times


def test_two_loads_with_flags_of_their_own_run_at_once(own_stream):
    rigs = [Rig(layers=5, seed=1), Rig(layers=9, row=(3, 40), seed=2)]
    for number in (1, 2):
        for rig in rigs:
            rig.refill(number)
        for rig in rigs:
            rig.load_beside(number, held_back=LONG // 4)
        for rig in reversed(rigs):
            rig.read(number)
        for rig in rigs:
            rig.check(number)


def test_loads_on_one_stream_need_no_side_stream(own_stream):
    rig = Rig()
    for number in range(1, 5):
        rig.refill(number)
        rig.load(number)
        rig.read(number)
        rig.check(number)


def test_a_load_comes_after_what_its_stream_still_writes(own_stream):
    rig = Rig()
    rig.refill(1)
    rig.load(1)
    torch.cuda.synchronize()
    rig.refill(2)
    torch.cuda._sleep(LONG)
    for memory in rig.memory:
        memory.zero_()
    for memory in rig.want_memory:
        kept = memory[:, rig.at.cpu(), :, : rig.row[1]].clone()
        memory.zero_()
        memory[:, rig.at.cpu(), :, : rig.row[1]] = kept
    rig.load_beside(2)
    rig.read(2)
    rig.check(2)


def test_other_layers_of_longer_flags_stay(own_stream):
    rig = Rig(layers=3)
    flags = sgl_kvio.layer_flags(6, "cuda")
    flags[0] = torch.arange(6)
    rig.flags = flags
    rig.refill(1)
    rig.load(9)
    torch.cuda.synchronize()
    assert flags.tolist() == [[9, 9, 9, 3, 4, 5], [0] * 6]


# Sizes.


@pytest.mark.parametrize("form", [("stacked", "stacked"), ("listed", "listed")], ids="-".join)
@pytest.mark.parametrize("layers", [1, 2, 7, 9, 128, 129, 300])
def test_any_number_of_layers(layers, form, own_stream):
    """From 8 layers listed buffers go by the large table, above 128 in several launches."""
    rig = Rig(layers=layers, slots=24, rows=20, row=(1, 40), form=form)
    for number in (1, 2):
        rig.refill(number)
        rig.load_beside(number)
        rig.read(number)
        rig.check(number)


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 4096])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 16])
def test_any_number_of_rows_and_blocks(num_blocks, rows, own_stream):
    """Fewer items than waves, and layers that end within a round of the waves."""
    rig = Rig(layers=5, slots=4096, rows=rows, row=(1, 64))
    for number in (1, 2):
        rig.refill(number)
        rig.load_beside(number, num_blocks=num_blocks)
        rig.read(number)
        rig.check(number)


@pytest.mark.parametrize("form", ["stacked", "listed"])
def test_buffers_of_several_shapes_share_a_launch(form, own_stream):
    """Four shapes, one without a byte among them: values, scales, an indexer's keys."""
    layers, slots, rows = 7, 64, 40
    widths = [(2, 64), (1, 3), (4, 96), (2, 64), (1, 0), (1, 132)]
    generator = torch.Generator().manual_seed(3)

    def bytes_of(width, seed):
        return cases.contiguous_pool((layers, slots, *width), torch.uint8, seed)

    host = [bytes_of(width, i).pin_memory() for i, width in enumerate(widths)]
    device = [bytes_of(width, 50 + i).cuda() for i, width in enumerate(widths)]
    at, frm = (torch.randperm(slots, generator=generator)[:rows] for _ in range(2))
    want = [
        torch.stack([moved(d, h, at, frm) for d, h in zip(*pair, strict=True)])
        for pair in zip(device, host, strict=True)
    ]
    flags = sgl_kvio.layer_flags(layers, "cuda")
    lists = [device, host]
    if form == "listed":
        lists = [[[b[layer] for b in side] for layer in range(layers)] for side in lists]
    sgl_kvio.load_layers(*lists, at.cuda(), frm.cuda(), flags, 1)
    for layer in range(layers):
        sgl_kvio.wait_layer(flags, layer, 1)
    for got, expected in zip(device, want, strict=True):
        assert_same_bytes(got, expected, "device pool")
    assert flags.tolist() == [[1] * layers, [0] * layers]


@pytest.mark.parametrize("form", ["stacked", "listed"])
@pytest.mark.parametrize(
    ("row", "rows"),
    [((2, 0), 5), ((0, 4), 5), ((2, 4), 0)],
    ids=["empty rows", "no heads", "no indices"],
)
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_layers_without_a_byte_are_in_place(kind, row, rows, form):
    layers = 200
    device = [torch.zeros(layers, 8, *row, device="cuda") for _ in "KV"]
    host = [torch.zeros(layers, 8, *row).pin_memory() for _ in "KV"]
    lists = [device, host]
    if form == "listed":
        lists = [[[b[layer] for b in side] for layer in range(layers)] for side in lists]
    flags = sgl_kvio.layer_flags(layers + 1, "cuda")
    at = torch.arange(rows, device="cuda")
    epoch = 4 if kind == "int" else torch.tensor([4], device="cuda")
    sgl_kvio.load_layers(*lists, at, at, flags, epoch)
    sgl_kvio.wait_layer(flags, layers - 1, epoch)
    assert flags.tolist() == [[4] * layers + [0], [0] * (layers + 1)]


def test_no_layers_are_no_load():
    flags = sgl_kvio.layer_flags(1, "cuda")
    at = torch.arange(3, device="cuda")
    sgl_kvio.load_layers([], [], at, at, flags, 1)
    empty = torch.zeros(0, 8, 2, 4)
    sgl_kvio.load_layers(empty.cuda(), empty.pin_memory(), at, at, flags, 1)
    assert flags.tolist() == [[0], [0]]


def test_layers_further_apart_than_4_gib():
    """Three layers at a distance of 2.1 GiB on either side, rows at both ends of each."""
    slots, width = 2100 << 10, 1024
    nbytes = 3 * slots * width
    if torch.cuda.mem_get_info()[0] < nbytes + (1 << 30):
        pytest.skip("needs 7.3 GiB of free GPU memory")
    with open("/proc/meminfo") as lines:
        facts = dict(line.split(":") for line in lines)
    if int(facts["MemAvailable"].split()[0]) << 10 < nbytes + (2 << 30):
        pytest.skip("needs 8.3 GiB of free host memory")
    block = cases.page_aligned_bytes(nbytes)
    sgl_kvio.host_register(block, 1 << 30)
    try:
        host = block.view(3, slots, width)
        device = torch.zeros(3, slots, width, dtype=torch.uint8, device="cuda")
        frm = torch.tensor([slots - 1, 0, slots // 2])
        at = torch.tensor([0, slots - 1, slots // 2 + 1])
        for layer in range(3):
            host[layer, frm] = cases.contiguous_pool((3, width), torch.uint8, layer)
        flags = sgl_kvio.layer_flags(3, "cuda")
        sgl_kvio.load_layers(device, host, at.cuda(), frm.cuda(), flags, 1, row_ndim=1)
        for layer in range(3):
            sgl_kvio.wait_layer(flags, layer, 1)
            got = device[layer][at.cuda()]
            assert_same_bytes(got, host[layer, frm], f"layer {layer}")
            assert int(device[layer].sum(dtype=torch.int64)) == int(got.sum(dtype=torch.int64))
    finally:
        torch.cuda.synchronize()
        sgl_kvio.host_unregister(block)


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_scattered_rows_of_a_large_pool_are_ordered_once_for_all_layers(index_place):
    """So many rows over so large a host buffer that their order is changed (csrc/plan/order.h)."""
    layers, slots, width, rows = 2, 2200 << 10, 1024, 60_000
    nbytes = layers * slots * width
    with open("/proc/meminfo") as lines:
        facts = dict(line.split(":") for line in lines)
    if int(facts["MemAvailable"].split()[0]) << 10 < nbytes + (2 << 30):
        pytest.skip("needs 6.4 GiB of free host memory")
    block = cases.page_aligned_bytes(nbytes)
    sgl_kvio.host_register(block, 1 << 30)
    try:
        host = block.view(layers, slots, width)
        generator = torch.Generator().manual_seed(1)
        frm = torch.randperm(slots, generator=generator)[:rows]
        at = torch.randperm(rows, generator=generator)
        for layer in range(layers):
            host[layer, frm] = cases.contiguous_pool((rows, width), torch.uint8, layer)
        device = torch.zeros(layers, rows, width, dtype=torch.uint8, device="cuda")
        flags = sgl_kvio.layer_flags(layers, "cuda")
        lists = at.to(index_place), frm.to(index_place)
        sgl_kvio.load_layers(device, host, *lists, flags, 1, row_ndim=1)
        for layer in range(layers):
            sgl_kvio.wait_layer(flags, layer, 1)
            assert_same_bytes(device[layer][at.cuda()], host[layer, frm], f"layer {layer}")
    finally:
        torch.cuda.synchronize()
        sgl_kvio.host_unregister(block)


# Graphs.


def capture(rig, compute=None, **options):
    """A graph of a whole step: the epoch grows, the load beside the readers, both joined."""
    compute = compute or rig.read
    rig.side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.epoch.add_(1)
        rig.load_beside(rig.epoch, **options)
        compute(rig.epoch)
        rig.join()
    return graph


@FORMS
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_replay_loads_and_reads_what_is_there_at_its_time(index_dtype, form, needs_side_by_side):
    rig = Rig(form=form, index_dtype=index_dtype)
    graph = capture(rig)
    for number in range(1, 6):
        rig.refill(number)
        graph.replay()
        rig.check(number)
        assert rig.epoch.item() == number


def test_replays_may_follow_each_other_at_once(needs_side_by_side):
    """Flags of one replay say nothing to the next one's readers."""
    rig = Rig(layers=8, slots=2048, rows=1024)
    graph = capture(rig)
    rig.refill(1)
    graph.replay()
    rig.check(1)
    orders = [torch.randperm(rig.slots)[: rig.rows].cuda() for _ in range(20)]
    seen = []
    torch.cuda.synchronize()
    for order in orders:
        rig.frm.copy_(order)
        graph.replay()
        seen.append([out.clone() for out in rig.out])
    torch.cuda.synchronize()
    for order, outs in zip(orders, seen, strict=True):
        for got, host in zip(outs, rig.host, strict=True):
            assert_same_bytes(got, host[:, order.cpu()], "what readers of a replay saw")
    assert rig.flags.tolist() == [[21] * rig.layers, [0] * rig.layers]


def test_two_graphs_and_eager_loads_take_turns_on_the_same_flags(needs_side_by_side):
    rig = Rig()
    graphs = [capture(rig), capture(rig)]
    for number in range(1, 8):
        rig.refill(number)
        if number % 3 == 0:
            rig.epoch.add_(1)
            rig.load_beside(rig.epoch)
            rig.read(rig.epoch)
            rig.join()
        else:
            graphs[number % 2].replay()
        rig.check(number)


def test_readers_alone_may_be_captured(own_stream):
    """The load is eager, on another stream; a step without one changes no epoch and waits for
    nothing."""
    rig = Rig()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.read(rig.epoch)
    for number in range(1, 5):
        rig.refill(number)
        rig.epoch.add_(1)
        rig.load_beside(rig.epoch, held_back=LONG if number > 1 else 0)
        graph.replay()
        rig.join()
        rig.check(number)
        for out in rig.out:
            out.zero_()
        graph.replay()
        rig.check(number)


def test_the_first_call_of_a_process_may_be_inside_a_capture():
    code = """
        import torch, sgl_kvio
        host = torch.arange(3 * 16 * 4.0).view(3, 16, 4).pin_memory()
        device = torch.zeros(3, 16, 4, device="cuda")
        at, frm = torch.tensor([3, 0], device="cuda"), torch.tensor([1, 15], device="cuda")
        flags = sgl_kvio.layer_flags(3, "cuda")
        epoch = torch.zeros(1, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            epoch.add_(1)
            sgl_kvio.load_layers(device, host, at, frm, flags, epoch, row_ndim=1)
            for layer in range(3):
                sgl_kvio.wait_layer(flags, layer, epoch)
        for replay in range(1, 4):
            device.zero_()
            graph.replay()
            torch.cuda.synchronize()
            want = torch.zeros(3, 16, 4)
            want[:, [3, 0]] = host[:, [1, 15]]
            assert torch.equal(device.cpu(), want), device
            assert flags.tolist() == [[replay] * 3, [0] * 3], flags
        sgl_kvio.check()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_graph_outlives_the_lists_of_its_capture(needs_side_by_side):
    rig = Rig(layers=40, form=("listed", "listed"))
    graph = capture(rig)
    scratch = [torch.full((1 << 16,), 7, device="cuda") for _ in range(20)]
    rig.refill(1)
    graph.replay()
    rig.check(1)
    del scratch


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_a_replay_could_not_repeat_is_refused_and_the_capture_survives(own_stream):
    rig = Rig()
    there = rig.at.cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"kvio::load_layers: epoch is the number 5.*tensor"):
            rig.load(5)
        with pytest.raises(RuntimeError, match=r"kvio::wait_layer: epoch is the number 5.*tensor"):
            sgl_kvio.wait_layer(rig.flags, 0, 5)
        with pytest.raises(RuntimeError, match=r"kvio::load_layers: dst_indices.*captur"):
            sgl_kvio.load_layers(rig.device, rig.host, there, there, rig.flags, rig.epoch)
        rig.epoch.add_(1)
        rig.load(rig.epoch)
        rig.read(rig.epoch)
    rig.refill(1)
    graph.replay()
    rig.check(1)


# Faults.


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_a_wait_for_what_nobody_loads_gives_up_and_says_so(kind):
    flags = sgl_kvio.layer_flags(3, "cuda")
    flags[0] = 2
    epoch = 7 if kind == "int" else torch.tensor([7], device="cuda")
    sgl_kvio.wait_layer(flags, 1, epoch, timeout_ms=20)
    with pytest.raises(RuntimeError, match=r"wait_layer.* flags\[0, 1\] was 2; it needs 7 or more"):
        sgl_kvio.check()
    sgl_kvio.wait_layer(flags, 1, 7, timeout_ms=20)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"earlier kvio::wait_layer.*flags\[0, 1\] = 2; .* 7 or"):
        sgl_kvio.wait_layer(flags, 0, 2)
    sgl_kvio.wait_layer(flags, 0, 2)
    sgl_kvio.check()


def test_an_epoch_that_was_loaded_is_reported():
    rig = Rig()
    rig.refill(1)
    rig.load(3)
    sgl_kvio.check()
    for epoch in (3, 2, torch.tensor([3], device="cuda")):
        rig.load(epoch)
        with pytest.raises(RuntimeError, match=r"load_layers: .*epoch\[0\] was \d; it needs 4 or"):
            sgl_kvio.check()
        assert rig.flags.tolist() == [[3] * rig.layers, [0] * rig.layers]
    rig.load(4)
    sgl_kvio.check()


@pytest.mark.parametrize("side", ["dst_indices", "src_indices"])
@pytest.mark.parametrize("value", [-1, 256, 2**40])
def test_a_bad_index_skips_its_row_in_every_layer_and_keeps_no_flag_down(value, side, own_stream):
    rig = Rig()
    rig.refill(1)
    good = torch.arange(rig.rows) != 5
    at, frm = rig.at.cpu()[good], rig.frm.cpu()[good]
    torch.cuda.synchronize()
    want = [memory.cpu() for memory in rig.memory]
    for memory, host in zip(want, rig.host, strict=True):
        memory[:, at, :, : rig.row[1]] = host[:, frm]
    (rig.at if side == "dst_indices" else rig.frm)[5] = value
    rig.load_beside(1)
    torch.cuda.synchronize()
    # Any call that comes later would raise it.
    fault = sgl_kvio.take_fault()
    assert fault == [17 if side == "dst_indices" else 18, 5, value, rig.slots]
    for layer in range(rig.layers):
        sgl_kvio.wait_layer(rig.flags, layer, 1)
    torch.cuda.synchronize()
    for got, expected in zip(rig.memory, want, strict=True):
        assert_same_bytes(got, expected, "device pool")
    assert rig.flags.tolist() == [[1] * rig.layers, [0] * rig.layers]


# Bad input.

# Values on the GPU are checked there; what shares memory does not survive being moved to a GPU.
ON_THE_GPU = {"epoch that was loaded", "epoch 0 in a tensor"}
SHARED = {"flags and the pool in one place", "flags and indices in one place"}
VALUES = {name for name, (_, argument, _) in BAD.items() if "_indices\\[" in argument}


def with_strides(tensor, place):
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    content = content.cuda() if place == "d" else content.pin_memory()
    result = torch.empty(0, dtype=tensor.dtype, device=content.device)
    return result.set_(
        content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def to_gpu_call(call, index_place, src_place="h"):
    def put(buffers, place):
        return [
            with_strides(entry, place) if isinstance(entry, torch.Tensor) else put(entry, place)
            for entry in buffers
        ]

    call["dst"], call["src"] = put(call["dst"], "d"), put(call["src"], src_place)
    for name in ("dst_indices", "src_indices"):
        call[name] = call[name].to(index_place)
    for name in ("flags", "epoch"):
        if isinstance(call[name], torch.Tensor):
            call[name] = with_strides(call[name], "d")
    return call


def flat(buffers):
    for entry in buffers:
        yield from [entry] if isinstance(entry, torch.Tensor) else flat(entry)


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [n for n in BAD if n not in ON_THE_GPU | SHARED])
def test_a_bad_argument_is_named_and_moves_nothing(name, index_place):
    if index_place == "cuda" and name in VALUES:
        pytest.skip("values on the GPU are checked there")
    change, argument, got = BAD[name]
    call = good_call()
    change(call)
    call = to_gpu_call(call, index_place)
    unchanged = [*flat(call["dst"]), *flat(call["src"]), call["flags"]]
    with refused(argument, got=got, op="load_layers", unchanged=unchanged):
        run(call)
    assert sgl_kvio.take_fault() == []


@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
@pytest.mark.parametrize("src_place", ["h", "d"])
def test_the_calls_that_the_others_spoil_are_good(src_place, index_place):
    run(to_gpu_call(good_call(), index_place, src_place))
    sgl_kvio.check()


def test_places_that_do_not_fit_are_refused():
    def check(argument, got, **changes):
        call = to_gpu_call(good_call(), "cuda") | changes
        with refused(argument, got=got, op="load_layers", unchanged=[*flat(call["dst"])]):
            run(call)

    good = good_call()
    pinned = [with_strides(tensor, "h") for tensor in good["dst"]]
    check(r"dst\[0\]", "cuda:0", dst=pinned)
    check("flags", "cpu", flags=good["flags"])
    check("epoch", "cpu", epoch=torch.tensor([3]))
    check(r"src\[0\]", "page-locked", src=good["src"])
    mixed = [with_strides(good["src"][0], "h"), good["src"][1]]
    check(r"src\[1\]", "page-locked", src=mixed)
    lists = [[list(layer) for layer in zip(*side, strict=True)] for side in (good["dst"], mixed)]
    lists[0] = [[b.cuda() for b in layer] for layer in lists[0]]
    check(r"src\[1\]", "page-locked", dst=lists[0], src=lists[1])
    check("src_indices", "cpu", src_indices=good["src_indices"])
    # All on the CPU but the flags.
    with refused("flags", got="cuda:0", op="load_layers", unchanged=good["dst"]):
        run(good_call() | {"flags": sgl_kvio.layer_flags(3, "cuda")})
    flags = sgl_kvio.layer_flags(3, "cuda")
    with refused("epoch", got="cpu", op="wait_layer"):
        sgl_kvio.wait_layer(flags, 0, torch.tensor(1))
    with refused("layer", got="3", op="wait_layer"):
        sgl_kvio.wait_layer(flags, 3, 1)


def test_a_later_layer_outside_the_registration_is_refused():
    """The whole span of a stacked host buffer has to be page-locked, not layer 0 alone."""
    block = cases.page_aligned_bytes(1 << 16)
    half = block[: 1 << 15]
    sgl_kvio.host_register(half)
    try:
        host = block.view(8, 16, 512)
        device = torch.zeros(8, 16, 512, dtype=torch.uint8, device="cuda")
        at = torch.arange(4, device="cuda")
        flags = sgl_kvio.layer_flags(8, "cuda")
        for lists in ([device, host], [[[b] for b in device], [[b] for b in host]]):
            with refused(r"src\[\d\]", op="load_layers", unchanged=[device, flags]):
                sgl_kvio.load_layers(*lists, at, at, flags, 1, row_ndim=1)
        sgl_kvio.load_layers(device[:4], host[:4], at, at, flags, 1, row_ndim=1)
        torch.cuda.synchronize()
    finally:
        sgl_kvio.host_unregister(half)


# Compiled functions.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
def test_a_restore_and_the_attention_behind_it_are_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(restore_and_forward, backend=backend, fullgraph=True)
    check_loads(compiled, make_arguments("cuda"))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_function_loads_and_waits(strict):
    check_loads(exported("cuda", strict).module(), make_arguments("cuda"))


def test_a_decomposed_function_loads_and_waits():
    """The page-locked pools are read only: nothing clones them."""
    check_loads(exported("cuda").run_decompositions().module(), make_arguments("cuda"))


def check_compiled_readers(function, arguments, loads=5):
    """`function` beside loads on another stream that come late; bytes of every one."""
    k, v, slots, hidden, flags, epoch, host_k, host_v, at, frm = arguments
    side = torch.cuda.Stream()
    function(k, v, slots, hidden, flags, epoch)  # compiles; epoch 0 waits for nothing
    for load in range(1, loads + 1):
        torch.cuda.synchronize()
        pools = make_pools("cpu", seed=10 * load)
        host_k.copy_(pools[2])
        host_v.copy_(pools[3])
        for pool in (k, v):
            pool.fill_(-load)
        fresh = make_inputs("cuda", seed=load)
        for mine, new in zip((slots, hidden, at, frm), fresh, strict=True):
            mine.copy_(new)
        torch.cuda.synchronize()
        epoch.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 2)
            sgl_kvio.load_layers([k, v], [host_k, host_v], at, frm, flags, epoch)
        got = function(k, v, slots, hidden, flags, epoch).clone()
        torch.cuda.synchronize()
        sgl_kvio.check()
        for pool, host in ((k, host_k), (v, host_v)):
            assert_same_bytes(pool[:, at], host[:, frm.cpu()], "rows that were to be moved")
        # On the CPU, where every layer is in place.
        flags_there = torch.full((2, COMPILED_LAYERS), load)
        there = [t.cpu() for t in (k, v, slots, hidden)]
        want = forward(*there, flags_there, load)
        assert_close(got, want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
def test_compiled_readers_wait_for_a_load_on_another_stream(backend, needs_side_by_side):
    torch._dynamo.reset()
    check_compiled_readers(
        torch.compile(forward, backend=backend, fullgraph=True), make_arguments("cuda")
    )


@pytest.mark.parametrize("backend", [inductor])
def test_compiled_readers_in_cuda_graphs_of_torch_wait_too(backend, needs_side_by_side):
    torch._dynamo.reset()
    arguments = make_arguments("cuda")
    # k, v, slots, flags, epoch: of other inputs these graphs read copies.
    for place in (0, 1, 2, 4, 5):
        torch._dynamo.mark_static_address(arguments[place])
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(forward, backend=backend, mode="reduce-overhead", fullgraph=True)

    def step(*inputs):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    check_compiled_readers(step, arguments, loads=6)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("backend", [inductor])
def test_a_compiled_forward_pass_is_captured_with_its_load(backend, needs_side_by_side):
    """The whole step in one graph: epoch, load beside the layers, attention."""
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    k, v, slots, hidden, flags, epoch, host_k, host_v, at, frm = make_arguments("cuda")
    side, warm = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(warm):
        compiled(k, v, slots, hidden, flags, epoch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        epoch.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sgl_kvio.load_layers([k, v], [host_k, host_v], at, frm, flags, epoch)
        got = compiled(k, v, slots, hidden, flags, epoch)
        torch.cuda.current_stream().wait_stream(side)
    for load in range(1, 5):
        pools = make_pools("cpu", seed=10 * load)
        host_k.copy_(pools[2])
        host_v.copy_(pools[3])
        for mine, new in zip((slots, hidden, at, frm), make_inputs("cuda", load), strict=True):
            mine.copy_(new)
        k.fill_(-load)
        v.fill_(-load)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        sgl_kvio.check()
        assert_same_bytes(k[:, at], host_k[:, frm.cpu()], "rows that were to be moved")
        there = [t.cpu() for t in (k, v, slots, hidden)]
        want = forward(*there, torch.full((2, COMPILED_LAYERS), load), load)
        assert_close(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_a_compiled_wait_copies_no_pool(backend):
    """By the memory that a call takes, over pools of 96 MiB."""
    layers, slots = COMPILED_LAYERS, 1 << 20
    pools = [torch.ones(layers, slots, 2, 4, device="cuda") for _ in "KV"]
    flags = torch.full((2, layers), 3, device="cuda")
    epoch = torch.tensor([3], device="cuda")
    hidden, read = torch.randn(2, 4, device="cuda"), torch.arange(7, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    compiled(*pools, read, hidden, flags, epoch)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(*pools, read, hidden, flags, epoch)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 8 << 20


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
def test_a_reader_that_is_an_op_waits(backend, needs_side_by_side):
    torch._dynamo.reset()
    compiled = torch.compile(forward_by_op, backend=backend, fullgraph=True)
    k, _, _, hidden, flags, epoch, host, _, at, frm = make_arguments("cuda")
    compiled(k, hidden, flags, epoch)
    side = torch.cuda.Stream()
    for load in (1, 2):
        torch.cuda.synchronize()
        k.fill_(-load)
        host.add_(1)
        torch.cuda.synchronize()
        epoch.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            sgl_kvio.load_layers(k, host, at, frm, flags, epoch)
        got = compiled(k, hidden, flags, epoch)
        torch.cuda.synchronize()
        want = forward_by_op(k.cpu(), hidden.cpu(), torch.full((2, COMPILED_LAYERS), load), load)
        assert_close(got, want)


# opcheck clones its arguments, which makes page-locked memory pageable: GPU tensors only.


@pytest.mark.parametrize("sample", list(samples()), ids=lambda sample: sample[0])
@pytest.mark.parametrize("kind", ["default", "int"])
@pytest.mark.parametrize("index_place", ["cpu", "cuda"])
def test_opcheck_passes_on_load_layers(index_place, kind, sample):
    _, (dst, src, at, frm, flags), options = sample
    lists = [[t.clone().cuda() for t in side] for side in (dst, src)]
    epoch = 2 if kind == "int" else torch.tensor([2], device="cuda")
    arguments = (*lists, at.to(index_place), frm.to(index_place), flags.cuda(), epoch)
    torch.library.opcheck(getattr(torch.ops.kvio.load_layers, kind), arguments, options)


@pytest.mark.parametrize("kind", ["default", "int"])
def test_opcheck_passes_on_wait_layer(kind):
    flags = torch.full((2, 3), 4, device="cuda")
    epoch = 3 if kind == "int" else torch.tensor(3, device="cuda")
    arguments = (flags, 1, epoch, [torch.arange(4.0, device="cuda")])
    overload = getattr(torch.ops.kvio.wait_layer, kind)
    torch.library.opcheck(overload, arguments, {"timeout_ms": 50})


# Two GPUs.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("case", CASES[::20], ids=lambda case: case.name)
def test_loads_to_either_gpu_whatever_the_current_one_is(case, current):
    with torch.cuda.device(current):
        layers_rig.check_loaded_case(case, ("stacked", "stacked"), f"cuda:{1 - current}")
        assert torch.cuda.current_device() == current


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_flags_of_another_gpu_are_refused():
    call = to_gpu_call(good_call(), "cuda")
    for name, got in (("flags", "cuda:1"), ("epoch", "cuda:1")):
        other = torch.full((1,), 4, device="cuda:1")
        changed = call | {name: sgl_kvio.layer_flags(3, "cuda:1") if name == "flags" else other}
        with refused(name, got=got, op="load_layers"):
            run(changed)
