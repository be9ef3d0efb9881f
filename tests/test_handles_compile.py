"""write_back and restore under torch.compile: every call stays, in its order, and moves its rows.

tests/gpu/test_handles.py compiles the same functions with page-locked pools.
"""

import random
import shutil
from functools import partial

import pytest
import torch
import torch._dynamo
from test_handles import L, N, P, assert_content, content, device_pool, make_pool

import sgl_kvio
from reference import assert_same_bytes, moved, refused, synchronize
from sgl_kvio import HostKVPool

SLOTS = N * P
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not any(map(shutil.which, ("g++", "clang++", "c++"))),
            reason="inductor needs a C++ compiler",
        ),
    ),
]
BOTH = BACKENDS[1:]


def save(pool, k, v, at, frm):
    """Nothing in the graph reads what the op leaves behind."""
    sgl_kvio.write_back(pool.handle, pool.token, [k * 2, v], at, frm)
    return k + 1


def save_then_load(pool, k, v, at, frm):
    sgl_kvio.write_back(pool.handle, pool.token, [k, v], at, frm, first_buffer=2)
    sgl_kvio.restore(pool.handle, pool.token, [v, k], frm + 8, at, first_buffer=2)
    return k * 3


def load_then_save(pool, k, v, at, frm):
    """The rows read are those from before the write."""
    sgl_kvio.restore(pool.handle, pool.token, [k], frm, at)
    sgl_kvio.write_back(pool.handle, pool.token, [v + 7], at, frm)
    return k - v


def save_twice(pool, k, v, at, frm):
    sgl_kvio.write_back(pool.handle, pool.token, [k * 2], at, frm)
    sgl_kvio.write_back(pool.handle, pool.token, [k * 3], at, frm)
    return k + 1


def load_twice(pool, k, v, at, frm):
    sgl_kvio.restore(pool.handle, pool.token, [k], frm, at, first_buffer=1)
    sgl_kvio.restore(pool.handle, pool.token, [k], frm, at + 1, first_buffer=3)
    return k.sum(dim=0)


def save_loaded_rows(pool, k, v, at, frm):
    """Layer 0's rows become layer 2's, changed on the way."""
    sgl_kvio.restore(pool.handle, pool.token, [k, v], frm, at)
    k.mul_(5)
    sgl_kvio.write_back(pool.handle, pool.token, [k, v - 1], at, frm, first_buffer=4)
    return v.flip(0)


def load_into_views(pool, k, v, at, frm):
    k[12:].add_(3)
    sgl_kvio.restore(pool.handle, pool.token, [k[:12], v[2:14]], frm, at)
    return k + v


def pages_by_the_op(pool, k, v, at, frm):
    """One page a call: of several indices two may name the same one, and on a GPU either wins."""
    options = {"page_size": P, "index_unit": "page", "prefer": "quiet"}
    at, frm = at[:1] % N, frm[:1] % N
    torch.ops.kvio.write_back(pool.handle, pool.token, [k], at, frm, **options)
    torch.ops.kvio.restore(pool.handle, pool.token, [v], frm, at, **options)
    return k + v


FUNCTIONS = [
    save,
    save_then_load,
    load_then_save,
    save_twice,
    load_twice,
    save_loaded_rows,
    load_into_views,
    pages_by_the_op,
]


def everything(pool, k, v, at, frm):
    """All of the functions in one graph: one compiler run of inductor costs many seconds."""
    results = [function(pool, k, v, at, frm) for function in FUNCTIONS]
    return torch.cat([result.flatten() for result in results])


def make_arguments(pool, device="cpu", at=(9, 13, 4), frm=(0, 2, 3)):
    k, v = (buffer % 1000 for buffer in device_pool(pool)[:2])
    return [t.to(device) for t in (k, v, torch.tensor(at), torch.tensor(frm))]


def check_twice(function, backend, device="cpu", **options):
    """Two compiled calls leave the bytes that two eager ones leave, on both sides."""
    torch._dynamo.reset()
    with make_pool(device=device) as pool, make_pool(device=device) as twin:
        arguments = make_arguments(pool, device)
        twins = [t.clone() for t in arguments]
        address = pool.tensors[0].data_ptr()
        compiled = torch.compile(
            partial(function, pool), backend=backend, fullgraph=True, **options
        )
        for _ in range(2):
            want, got = function(twin, *twins), compiled(*arguments)
            synchronize()
            assert_same_bytes(got, want, "result")
            assert_content(pool, content(twin))
            for position, (argument, other) in enumerate(zip(arguments, twins, strict=True)):
                assert_same_bytes(argument, other, f"argument {position}")
        assert pool.tensors[0].data_ptr() == address
        assert pool.tensors[0].is_pinned() == (device != "cpu")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_leaves_the_same_bytes(backend, function):
    check_twice(function, backend)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BOTH)
def test_many_calls_in_one_graph_leave_the_same_bytes(backend, dynamic):
    check_twice(everything, backend, dynamic=dynamic)


@pytest.mark.parametrize("backend", BOTH)
def test_calls_are_kept_under_inference_mode(backend):
    with torch.inference_mode():
        check_twice(save_loaded_rows, backend)


# Order, with the bytes worked out by hand.


@pytest.mark.parametrize("backend", BOTH)
def test_rows_written_back_are_the_ones_restored_behind(backend):
    torch._dynamo.reset()
    with make_pool() as pool:
        k, v, at, frm = make_arguments(pool)
        want_v = moved(v, k, frm + 8, frm)
        want_k = moved(k, v, frm + 8, frm)
        before = [view.clone() for view in pool.layer(1)]
        old_k, old_v = k.clone(), v.clone()
        torch.compile(partial(save_then_load, pool), backend=backend, fullgraph=True)(k, v, at, frm)
        assert_same_bytes(k, want_k, "restored K")
        assert_same_bytes(v, want_v, "restored V")
        assert_same_bytes(pool.layer(1)[0], moved(before[0], old_k, at, frm), "host K")
        assert_same_bytes(pool.layer(1)[1], moved(before[1], old_v, at, frm), "host V")


@pytest.mark.parametrize("backend", BOTH)
def test_of_two_write_backs_to_one_row_the_last_one_wins(backend):
    torch._dynamo.reset()
    with make_pool() as pool:
        k, v, at, frm = make_arguments(pool)
        want = moved(pool.layer(0)[0], k * 3, at, frm)
        torch.compile(partial(save_twice, pool), backend=backend, fullgraph=True)(k, v, at, frm)
        assert_same_bytes(pool.layer(0)[0], want, "host K")


@pytest.mark.parametrize("backend", BOTH)
def test_a_write_back_waits_for_the_restore_of_the_same_rows(backend):
    torch._dynamo.reset()
    with make_pool() as pool:
        k, v, at, frm = make_arguments(pool)
        old = pool.layer(0)[0].clone()
        torch.compile(partial(load_then_save, pool), backend=backend, fullgraph=True)(k, v, at, frm)
        assert_same_bytes(k[frm], old[at], "restored rows")
        assert_same_bytes(pool.layer(0)[0], moved(old, v + 7, at, frm), "host K")


def random_program(seed, length):
    """Calls over few rows of one pool, and arithmetic between them that could be moved about."""
    rng = random.Random(seed)
    steps = [
        (
            rng.choice(["write_back", "restore", "compute"]),
            rng.randrange(2),
            rng.randrange(2 * L),
            [rng.sample(range(6), 3) for _ in range(2)],
        )
        for _ in range(length)
    ]

    def program(pool, k, v, at, frm):
        pools = [k, v]
        for kind, which, buffer, (a, b) in steps:
            if kind == "compute":
                pools[which] = pools[which] * 3 + pools[1 - which]
                continue
            call = sgl_kvio.write_back if kind == "write_back" else sgl_kvio.restore
            lists = torch.tensor(a, device=k.device), torch.tensor(b, device=k.device)
            call(pool.handle, pool.token, [pools[which]], *lists, first_buffer=buffer)
        return pools[0] + 2 * pools[1]

    return program


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_random_programs_keep_their_order(backend, seed):
    check_twice(random_program(seed, 24), backend)


@pytest.mark.parametrize("backend", BOTH[1:])
def test_a_long_random_program_keeps_its_order(backend):
    check_twice(random_program(99, 24), backend)


def test_the_order_check_would_see_calls_that_swapped():
    """Two eager runs of the same program with two calls exchanged differ."""
    with make_pool() as pool, make_pool() as twin:
        k, v, at, frm = make_arguments(pool)
        save_twice(pool, k, v, at, frm)
        sgl_kvio.write_back(twin.handle, twin.token, [k * 3], at, frm)
        sgl_kvio.write_back(twin.handle, twin.token, [k * 2], at, frm)
        assert not torch.equal(pool.tensors[0], twin.tensors[0])


# Recompilation.


class Graphs:
    """A backend that counts what it is asked to compile."""

    def __init__(self, backend):
        self.backend, self.count = torch._dynamo.lookup_backend(backend), 0

    def __call__(self, graph, example):
        self.count += 1
        return self.backend(graph, example)


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
@pytest.mark.parametrize("backend", BOTH)
def test_another_number_of_indices_needs_at_most_one_more_graph(backend, dynamic, most):
    torch._dynamo.reset()
    graphs = Graphs(backend)
    with make_pool() as pool, make_pool() as twin:
        compiled = torch.compile(
            partial(save_then_load, pool), backend=graphs, fullgraph=True, dynamic=dynamic
        )
        for count in (3, 5, 9, 12):
            at, frm = torch.randperm(12)[:count], torch.randperm(12)[:count]
            k, v, at, frm = make_arguments(pool, at=at.tolist(), frm=frm.tolist())
            twin_k, twin_v = k.clone(), v.clone()
            want = save_then_load(twin, twin_k, twin_v, at, frm)
            assert_same_bytes(compiled(k, v, at, frm), want, "result")
            assert_same_bytes(k, twin_k, "K")
            assert_same_bytes(v, twin_v, "V")
            assert_content(pool, content(twin))
    assert graphs.count <= most


@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("backend", BOTH)
def test_a_handle_that_is_an_argument_never_reaches_another_pool(backend, dynamic):
    torch._dynamo.reset()
    graphs = Graphs(backend)

    def save_to(handle, token, k, at, frm):
        sgl_kvio.write_back(handle, token, [k * 2], at, frm)
        return k + 1

    compiled = torch.compile(save_to, backend=graphs, fullgraph=True, dynamic=dynamic)
    with make_pool() as first, make_pool(handle=5) as second:
        k, _, at, frm = make_arguments(first)
        for number, pool in enumerate((first, second, first, second)):
            other = second if pool is first else first
            untouched = content(other)
            want = moved(pool.layer(0)[0], (k + number) * 2, at, frm)
            compiled(pool.handle, pool.token, k + number, at, frm)
            assert_same_bytes(pool.layer(0)[0], want, "host K")
            assert_content(other, untouched)
    assert graphs.count <= 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_whose_pool_was_replaced_uses_the_new_one(backend):
    torch._dynamo.reset()

    class Model(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.pool = pool

        def forward(self, k, v, at, frm):
            return save(self.pool, k, v, at, frm)

    first = make_pool()
    model = Model(first)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    arguments = make_arguments(first)
    compiled(*arguments)
    handle = first.handle
    first.close()
    with refused("handle", got=str(handle), op="write_back"):
        sgl_kvio.write_back(handle, torch.zeros(1), arguments[0], *arguments[2:])
    with make_pool() as second, make_pool() as twin:
        model.pool = second
        compiled(*arguments)
        save(twin, *arguments)
        assert_content(second, content(twin))


@pytest.mark.parametrize("backend", BOTH)
def test_a_compiled_call_on_a_closed_pool_raises(backend):
    torch._dynamo.reset()
    with make_pool() as pool:
        handle, token = pool.handle, pool.token
        arguments = make_arguments(pool)

    def save_to_closed(k, v, at, frm):
        sgl_kvio.write_back(handle, token, [k], at, frm)
        return v + 1

    compiled = torch.compile(save_to_closed, backend=backend, fullgraph=True)
    with refused("handle", got=f"{handle}, whose pool was closed", op="write_back"):
        compiled(*arguments)


@pytest.mark.parametrize("backend", BOTH)
def test_an_out_of_range_index_still_raises_when_compiled(backend):
    torch._dynamo.reset()
    with make_pool() as pool:
        k, v, at, frm = make_arguments(pool)
        compiled = torch.compile(partial(save_then_load, pool), backend=backend, fullgraph=True)
        compiled(k, v, at, frm)
        at[1] = SLOTS
        before = content(pool)
        with pytest.raises(RuntimeError, match=rf"kvio::write_back: dst_indices\[1\] is {SLOTS}"):
            compiled(k, v, at, frm)
        assert_content(pool, before)


# A model.


class Decoder(torch.nn.Module):
    """Llama-style layers whose prefix lies on the host: restore a layer, attend to it, go on.

    Every layer's rows arrive before the layer's attention reads them and not all at once. Hidden
    size 32, two KV heads of 8, four query heads. Rows of new tokens are written back.
    """

    HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 32, 4, 2, 8, 4

    def __init__(self, host, slots, device="cpu"):
        super().__init__()
        self.host = host
        generator = torch.Generator().manual_seed(3)

        def weights(*shape):
            rows = torch.randn(self.LAYERS, *shape, generator=generator)
            return torch.nn.Parameter((rows / shape[-1] ** 0.5).to(device))

        width = self.HEADS * self.DIM
        self.qkv = weights(width + 2 * self.KV_HEADS * self.DIM, self.HIDDEN)
        self.out = weights(self.HIDDEN, width)
        self.up = weights(4 * self.HIDDEN, self.HIDDEN)
        self.down = weights(self.HIDDEN, 2 * self.HIDDEN)
        cache = torch.zeros(self.LAYERS, 2, slots, self.KV_HEADS, self.DIM, device=device)
        self.register_buffer("cache", cache)
        self.register_buffer("token", torch.zeros(1, dtype=torch.uint8, device=device))

    def attention(self, x, layer, prefix, new):
        k_cache, v_cache = self.cache[layer, 0], self.cache[layer, 1]
        widths = [self.HEADS * self.DIM, *[self.KV_HEADS * self.DIM] * 2]
        q, k, v = (x @ self.qkv[layer].T).split(widths, dim=-1)
        k_cache.index_copy_(0, new, k.view(-1, self.KV_HEADS, self.DIM))
        v_cache.index_copy_(0, new, v.view(-1, self.KV_HEADS, self.DIM))
        context = torch.cat([prefix, new])
        keys, values = (cache[context].transpose(0, 1) for cache in (k_cache, v_cache))
        q = q.view(-1, self.HEADS, self.DIM).transpose(0, 1)
        group = self.HEADS // self.KV_HEADS
        keys, values = (t.repeat_interleave(group, dim=0) for t in (keys, values))
        length = x.shape[0]
        seen = torch.arange(context.shape[0], device=x.device)
        last = prefix.shape[0] + torch.arange(length, device=x.device)
        mask = seen[None, :] <= last[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask)
        return attended.transpose(0, 1).reshape(length, -1) @ self.out[layer].T

    def forward(self, x, host_prefix, prefix, host_new, new):
        for layer in range(self.LAYERS):
            kv = [self.cache[layer, 0], self.cache[layer, 1]]
            where = {"first_buffer": 2 * layer}
            sgl_kvio.restore(self.host.handle, self.token, kv, prefix, host_prefix, **where)
            x = x + self.attention(
                torch.nn.functional.rms_norm(x, x.shape[-1:]), layer, prefix, new
            )
            gate, value = (x @ self.up[layer].T).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * value) @ self.down[layer].T
            sgl_kvio.write_back(self.host.handle, self.token, kv, host_new, new, **where)
        return x


DECODER_SLOTS, PREFIX, NEW = 64, 24, 6


def decoder_pool(device="cpu"):
    pool = HostKVPool(
        "mha",
        "page_first",
        num_pages=12,
        page_size=8,
        num_layers=Decoder.LAYERS,
        num_heads=Decoder.KV_HEADS,
        head_dim=Decoder.DIM,
        dtype=torch.float32,
        device=device,
    )
    pool.tensors[0].normal_(generator=torch.Generator().manual_seed(4))
    return pool


def decoder_arguments(device="cpu", seed=5, prefix=PREFIX):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NEW, Decoder.HIDDEN, generator=generator)
    host = torch.randperm(96, generator=generator)
    card = torch.randperm(DECODER_SLOTS, generator=generator)
    lists = host[:prefix], card[:prefix], host[-NEW:], card[-NEW:]
    return [t.to(device) for t in (x, *lists)]


def check_step(pool, decoder, arguments, got):
    """The rows of every layer came and went, and the output is that of a cache never evicted."""
    x, host_prefix, prefix, host_new, new = arguments
    synchronize()
    host_prefix, host_new = host_prefix.cpu(), host_new.cpu()
    for layer in range(decoder.LAYERS):
        for side in range(2):
            host, cache = pool.layer(layer)[side], decoder.cache[layer, side]
            assert_same_bytes(cache[prefix], host[host_prefix], f"restored, layer {layer}")
            assert_same_bytes(host[host_new], cache[new], f"written back, layer {layer}")
    with decoder_pool(pool.device) as full:
        twin = Decoder(full, DECODER_SLOTS, x.device)
        full.tensors[0].copy_(pool.tensors[0])
        want = twin(x, host_prefix.to(x.device), prefix, host_new.to(x.device), new)
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BOTH)
def test_a_decoder_restores_each_layer_before_its_attention(backend):
    torch._dynamo.reset()
    with torch.no_grad(), decoder_pool() as pool:
        decoder = Decoder(pool, DECODER_SLOTS)
        compiled = torch.compile(decoder, backend=backend, fullgraph=True)
        for seed in (5, 6):
            arguments = decoder_arguments(seed=seed)
            decoder.cache.fill_(float("nan"))
            check_step(pool, decoder, arguments, compiled(*arguments))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_decoder_takes_prefixes_of_any_length_with_one_graph(backend):
    torch._dynamo.reset()
    graphs = Graphs(backend)
    with torch.no_grad(), decoder_pool() as pool:
        decoder = Decoder(pool, DECODER_SLOTS)
        compiled = torch.compile(decoder, backend=graphs, fullgraph=True, dynamic=True)
        for prefix in (24, 7, 40, 3):
            arguments = decoder_arguments(seed=prefix, prefix=prefix)
            decoder.cache.fill_(float("nan"))
            check_step(pool, decoder, arguments, compiled(*arguments))
    assert graphs.count == 1


def test_the_check_of_the_decoder_sees_a_layer_that_was_not_restored():
    with torch.no_grad(), decoder_pool() as pool:
        decoder = Decoder(pool, DECODER_SLOTS)
        arguments = decoder_arguments()
        got = decoder(*arguments)
        decoder.cache[2, 1, arguments[2][0]] += 1
        with pytest.raises(AssertionError, match="restored, layer 2"):
            check_step(pool, decoder, arguments, got)
