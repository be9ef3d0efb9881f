"""torch.compile keeps loads and waits, orders readers behind them, and clones no pool for a wait.

The functions below are also what tests/gpu/test_load_layers.py compiles.
"""

import shutil

import pytest
import torch
import torch._dynamo
from reader_op import read_layer, reads
from torch._dynamo.backends.common import aot_autograd

import cases
import sgl_kvio
from reference import assert_same_bytes, twin_of

L, SLOTS, HEADS, DIM = 3, 16, 2, 4
ROWS = 5
inductor = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))),
        reason="inductor needs a C++ compiler",
    ),
)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])


def attention(query, keys, values):
    """Of one query [heads, dim] to rows [rows, heads, dim]."""
    weights = torch.softmax((query * keys).sum(-1), dim=0)
    return (weights[..., None] * values).sum(0)


def forward(k, v, slots, hidden, flags, epoch):
    """Layers of a Llama: each waits for its rows, which others bring."""
    for layer in range(L):
        query = torch.sin(hidden) * 2
        sgl_kvio.wait_layer(flags, layer, epoch, after=[query, slots])
        hidden = hidden + attention(query, k[layer][slots], v[layer][slots])
    return hidden


def restore_and_forward(k, v, slots, hidden, flags, epoch, host_k, host_v, at, frm):
    """The same behind a restore on the same stream, which the function makes itself."""
    epoch.add_(1)
    sgl_kvio.load_layers([k, v], [host_k, host_v], at, frm, flags, epoch)
    return forward(k, v, slots, hidden, flags, epoch)


def make_pools(device="cpu", seed=0):
    """Device pools and host pools, stacked; page-locked where the device is a GPU."""
    shape = (L, SLOTS, HEADS, DIM)
    pools = [cases.contiguous_pool(shape, torch.int32, seed + i) % 1000 / 500 for i in range(4)]
    if torch.device(device).type == "cpu":
        return pools
    return [p.to(device) for p in pools[:2]] + [p.pin_memory() for p in pools[2:]]


def make_inputs(device="cpu", seed=0):
    """slots, hidden, at, frm: the rows that attention reads are those that a load brings."""
    generator = torch.Generator().manual_seed(seed)
    at, frm = (torch.randperm(SLOTS, generator=generator)[:ROWS] for _ in range(2))
    hidden = torch.randn(HEADS, DIM, generator=generator)
    return [t.to(device) for t in (at.clone(), hidden, at, frm)]


def make_arguments(device="cpu", seed=0):
    """Arguments of restore_and_forward before its first load."""
    k, v, host_k, host_v = make_pools(device, seed)
    slots, hidden, at, frm = make_inputs(device, seed)
    flags = sgl_kvio.layer_flags(L, device)
    epoch = torch.zeros(1, dtype=torch.int64, device=device)
    return [k, v, slots, hidden, flags, epoch, host_k, host_v, at, frm]


def check_loads(compiled, arguments, loads=3):
    """Runs the compiled function beside the eager one, with other rows and indices every time."""
    k, _, slots, hidden, flags, epoch, *_ = arguments
    twins = [twin_of(t) for t in arguments]
    for load in range(1, loads + 1):
        fresh = make_inputs(k.device, seed=load)
        rows = make_pools(k.device, seed=10 * load)
        for mine in (arguments, twins):
            new = [*fresh[:2], *rows[2:], *fresh[2:]]
            places = [2, 3, 6, 7, 8, 9]
            for place, content in zip(places, new, strict=True):
                mine[place].copy_(content)
        want = restore_and_forward(*twins)
        got = compiled(*arguments)
        if k.is_cuda:
            torch.cuda.synchronize()
        assert_close(got, want)
        for place in (0, 1, 4, 5, 6, 7):
            assert_same_bytes(arguments[place], twins[place], f"argument {place} of load {load}")
        assert flags.tolist() == [[load] * L, [0] * L]
        moved = arguments[6][:, arguments[9].cpu()].cpu()
        assert_same_bytes(k[:, arguments[8]].cpu(), moved, "rows that were to be moved")
    assert epoch.item() == loads


def assert_close(got, want):
    """Rounded alike at best: rows that are not there are far from it."""
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-4, atol=1e-4)


@BACKENDS
def test_a_restore_and_the_attention_behind_it_are_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(restore_and_forward, backend=backend, fullgraph=True)
    check_loads(compiled, make_arguments())


@BACKENDS
@pytest.mark.parametrize("layer", range(L))
def test_no_wait_is_dropped(layer, backend):
    """A layer that is not in place raises, whichever it is."""
    torch._dynamo.reset()
    k, v, slots, hidden, flags, epoch, *_ = make_arguments()
    flags[0], epoch[0] = 7, 7
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    got = compiled(k, v, slots, hidden, flags, epoch)
    assert_close(got, forward(k, v, slots, hidden, flags, epoch))
    flags[0, layer] = 6
    with pytest.raises(RuntimeError, match=rf"flags\[0, {layer}\] is 6; it needs 7"):
        compiled(k, v, slots, hidden, flags, epoch)


def graph_of(function, arguments):
    """What AOTAutograd makes of a function."""
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*arguments)
    return graphs[0].graph


def test_no_pool_and_no_flag_is_cloned_for_a_wait():
    k, v, slots, hidden, flags, epoch, *_ = make_arguments()
    flags[0], epoch[0] = 1, 1
    graph = graph_of(forward, (k, v, slots, hidden, flags, epoch))
    waits = [node for node in graph.nodes if torch.ops.kvio.wait_layer.default in node.args]
    assert len(waits) == L
    for wait in waits:
        shapes = [tuple(base.meta["val"].shape) for base in wait.kwargs["_all_bases"]]
        assert sorted(shapes) == sorted([(HEADS, DIM), (ROWS,)])
    written = [node for node in graph.nodes if node.target == torch.ops.aten.copy_.default]
    assert all(node.args[0].meta["val"].shape == slots.shape for node in written)


def forward_by_op(k, hidden, flags, epoch):
    for layer in range(L):
        query = torch.cos(hidden)
        sgl_kvio.wait_layer(flags, layer, epoch, after=query)
        hidden = torch.sin(read_layer(query, k[layer]))
    return hidden


@BACKENDS
def test_a_reader_never_runs_before_its_wait(backend):
    """A wait that raises lets the readers of all earlier layers run before it, and no other.

    The op counts its own runs: to torch 2.14's profiler an op with a kernel in Python is invisible.
    """
    k, _, _, hidden, flags, epoch, *_ = make_arguments()
    flags[0], epoch[0] = 1, 1
    torch._dynamo.reset()
    compiled = torch.compile(forward_by_op, backend=backend, fullgraph=True)
    want = forward_by_op(k, hidden, flags, epoch)
    reads.clear()
    assert_close(compiled(k, hidden, flags, epoch), want)
    assert reads == [k[0].shape] * L
    for layer in range(L):
        flags[0], flags[0, layer] = 1, 0
        reads.clear()
        with pytest.raises(RuntimeError, match=rf"flags\[0, {layer}\] is 0; it needs 1"):
            compiled(k, hidden, flags, epoch)
        assert reads == [k[0].shape] * layer


@BACKENDS
def test_a_number_is_symbolic(backend):
    """Another epoch needs no new graph, once it is known to vary."""
    graphs = 0

    def counting(graph, example):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, example)

    def function(k, host, slots, at, frm, flags, epoch):
        sgl_kvio.load_layers(k, host, at, frm, flags, epoch)
        sgl_kvio.wait_layer(flags, L - 1, epoch, after=slots)
        return k[L - 1][slots] * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=counting, fullgraph=True)
    k, _, slots, _, flags, _, host, _, at, frm = make_arguments()
    for epoch in range(1, 7):
        host.add_(1)
        got = compiled(k, host, slots, at, frm, flags, epoch)
        assert_close(got, host[L - 1][frm] * 2)
        assert flags.tolist() == [[epoch] * L, [0] * L]
    assert graphs <= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_wait_that_orders_nothing_is_refused_where_it_would_be_dropped(backend):
    def function(k, flags, epoch):
        sgl_kvio.wait_layer(flags, 0, epoch)
        return k * 2

    k, *_, flags, epoch = make_arguments()[:6]
    function(k, flags, epoch)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="after is empty"):
        torch.compile(function, backend=backend, fullgraph=True)(k, flags, epoch)


class RestoreAndForward(torch.nn.Module):
    def forward(self, *arguments):
        return restore_and_forward(*arguments)


def exported(device="cpu", strict=False):
    program = torch.export.export(RestoreAndForward(), tuple(make_arguments(device)), strict=strict)
    names = {str(node.target) for node in program.graph.nodes}
    assert {"kvio.load_layers.default", "kvio.wait_layer.default"} <= names
    return program


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_function_loads_and_waits(strict):
    check_loads(exported(strict=strict).module(), make_arguments())


def test_a_decomposed_function_loads_and_waits():
    """run_decompositions makes the graph functional: readers have to stay behind their waits."""
    check_loads(exported().run_decompositions().module(), make_arguments())


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="AOTInductor needs a C++ compiler"
)
def test_a_packaged_function_loads_and_waits(tmp_path):
    path = torch._inductor.aoti_compile_and_package(
        exported(), package_path=str(tmp_path / "program.pt2")
    )
    check_loads(torch._inductor.aoti_load_package(path), make_arguments())


def test_page_tables_may_have_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    k, v, _, hidden, flags, epoch, *_ = make_arguments()
    for count in (2, 3, 7, SLOTS):
        slots = torch.randperm(SLOTS)[:count]
        got = compiled(k, v, slots, hidden, flags, epoch)
        assert_close(got, forward(k, v, slots, hidden, flags, epoch))
