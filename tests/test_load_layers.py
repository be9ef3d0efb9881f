"""kvio::load_layers and kvio::wait_layer on CPU tensors: the rows of every layer, and its flag."""

import itertools

import layers_rig
import pytest
import torch
from call_changes import both, pool, put, set_to

import cases
import sgl_kvio
from reference import assert_same_bytes, moved, refused

L, SLOTS = 3, 16
AT, FRM = [5, 1, 3, 8, 15], [0, 2, 7, 7, 9]
F32 = torch.float32


def pools(layers=L, slots=SLOTS, row=(2, 4), dtype=F32, buffers=2, seed=0):
    """Stacked device and host buffers, all random."""

    def side(first):
        return [
            cases.contiguous_pool((layers, slots, *row), dtype, first + i) for i in range(buffers)
        ]

    return side(seed), side(seed + 100)


def index(entries, dtype=torch.int64):
    return torch.tensor(entries, dtype=dtype)


def want_of(dst, src, at=AT, frm=FRM):
    """Copies of stacked buffers `dst` after a load."""
    return [
        torch.stack([moved(d, s, at, frm) for d, s in zip(to, of, strict=True)])
        for to, of in zip(dst, src, strict=True)
    ]


def raised(flags):
    return flags[0].tolist()


# One of four coverings: layers and forms multiply what transfer's own tests go through in full.
CASES = cases.selected(gpu=False)[::4]


@pytest.mark.parametrize(
    ("case", "form"),
    list(zip(CASES, itertools.cycle(layers_rig.FORMS), strict=False)),
    ids=lambda value: value.name if isinstance(value, cases.Case) else "-".join(value),
)
def test_moves_the_named_rows_of_every_layer_and_no_other_byte(case, form):
    layers_rig.check_loaded_case(case, form)


@pytest.mark.parametrize("kind", ["tensor", "int"])
def test_the_op_and_the_function_do_the_same(kind):
    dst, src = pools()
    other, want = [d.clone() for d in dst], want_of(dst, src)
    flags, twin = (sgl_kvio.layer_flags(L, "cpu") for _ in range(2))
    epoch = torch.tensor(4) if kind == "tensor" else 4
    sgl_kvio.load_layers(dst, src, index(AT), index(FRM), flags, epoch)
    torch.ops.kvio.load_layers(other, src, index(AT), index(FRM), twin, epoch)
    for tensors in zip(dst, other, want, strict=True):
        assert_same_bytes(tensors[0], tensors[2], "by the function")
        assert_same_bytes(tensors[1], tensors[2], "by the op")
    assert flags.tolist() == twin.tolist() == [[4] * L, [0] * L]
    for layer in range(L):
        sgl_kvio.wait_layer(flags, layer, epoch)
        torch.ops.kvio.wait_layer(flags, layer, epoch, [])


def test_a_single_tensor_stands_for_the_only_buffer():
    (dst,), (src,) = pools(buffers=1)
    flags = sgl_kvio.layer_flags(L, "cpu")
    for epoch, target in enumerate((dst, [[layer] for layer in dst]), 1):
        want = want_of([dst.zero_()], [src])[0]
        sgl_kvio.load_layers(target, src, index(AT), index(FRM), flags, epoch)
        assert_same_bytes(dst, want, f"load {epoch}")
        assert raised(flags) == [epoch] * L


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("unit", ["token", "page"])
def test_a_host_pool_is_restored_from_its_stacked_views(layout, unit):
    sizes = {"num_pages": 6, "page_size": 4, "num_layers": L, "num_heads": 3, "head_dim": 5}
    with sgl_kvio.HostKVPool("mha", layout, **sizes) as pool:
        for tensor in pool.tensors:
            tensor.copy_(torch.randn(tensor.shape))
        device = [torch.randn(L, 24, 3, 5).to(torch.bfloat16) for _ in "KV"]
        want = [d.clone() for d in device]
        to, of = index([4, 0, 2]), index([1, 5, 3])
        slots = [(pages[:, None] * 4 + torch.arange(4)).flatten() for pages in (to, of)]
        for layer, buffers in enumerate(pool.layers()):
            for target, buffer in zip(want, buffers, strict=True):
                rows = buffer if buffer.dim() == 3 else buffer.flatten(0, 1)
                target[layer, slots[0]] = rows[slots[1]]
        flags = sgl_kvio.layer_flags(L, "cpu")
        lists = (to, of) if unit == "page" else slots
        options = {"page_size": 4, "index_unit": unit}
        sgl_kvio.load_layers(device, pool.stacked(), *lists, flags, 1, **options)
        for got, expected in zip(device, want, strict=True):
            assert_same_bytes(got, expected, layout)
        assert raised(flags) == [1] * L


# Nothing to move: layers are in place all the same.


@pytest.mark.parametrize(
    ("shape", "entries"),
    [
        ({"row": (2, 0)}, AT),
        ({"row": (0, 4)}, AT),
        ({}, []),
        ({"slots": 0}, []),
        ({"buffers": 0}, []),
    ],
    ids=["empty rows", "no heads", "no indices", "no slots", "no buffers"],
)
@pytest.mark.parametrize("form", ["stacked", "listed"])
def test_layers_without_a_byte_are_in_place(form, shape, entries):
    dst, src = pools(**shape)
    before = [d.clone() for d in dst]
    lists = [dst, src]
    if form == "listed":
        lists = [[[buffer[layer] for buffer in side] for layer in range(L)] for side in (dst, src)]
    flags = sgl_kvio.layer_flags(L, "cpu")
    sgl_kvio.load_layers(*lists, index(entries), index(entries), flags, 1)
    # Without buffers only a list of layers says how many there are.
    layers = 0 if form == "stacked" and not dst else L
    assert raised(flags) == [1] * layers + [0] * (L - layers)
    for got, old in zip(dst, before, strict=True):
        assert_same_bytes(got, old, "pool")


def test_no_layers_are_no_load():
    dst, src = pools(layers=0)
    flags = sgl_kvio.layer_flags(1, "cpu")
    sgl_kvio.load_layers(dst, src, index(AT), index(FRM), flags, 1)
    assert raised(flags) == [0]


# Flags.


def test_flags_count_loads_and_waits_see_the_newest():
    dst, src = pools()
    flags = sgl_kvio.layer_flags(L, "cpu")
    for epoch in (1, 2, 5, 2**40):
        for layer in range(L):
            with refused(rf"flags\[0, {layer}\]", got=str(epoch), op="wait_layer"):
                sgl_kvio.wait_layer(flags, layer, epoch)
        sgl_kvio.load_layers(dst, src, index(AT), index(FRM), flags, epoch)
        for layer in range(L):
            for reached in (epoch, epoch - 1, 0, -1):
                sgl_kvio.wait_layer(flags, layer, reached)
                sgl_kvio.wait_layer(flags, layer, torch.tensor([reached]))


def test_nothing_is_waited_for_before_the_first_load():
    flags = sgl_kvio.layer_flags(L, "cpu")
    sgl_kvio.wait_layer(flags, 0, 0)
    sgl_kvio.wait_layer(flags, 0, torch.tensor(0))


def test_two_loads_have_flags_of_their_own():
    first, second = pools(seed=1), pools(seed=2)
    flags = [sgl_kvio.layer_flags(L, "cpu") for _ in range(2)]
    sgl_kvio.load_layers(*first, index(AT), index(FRM), flags[0], 1)
    assert [raised(f) for f in flags] == [[1] * L, [0] * L]
    with pytest.raises(RuntimeError, match="not in place"):
        sgl_kvio.wait_layer(flags[1], 0, 1)
    sgl_kvio.load_layers(*second, index(AT), index(FRM), flags[1], 9)
    assert [raised(f) for f in flags] == [[1] * L, [9] * L]


def test_columns_of_other_layers_stay():
    dst, src = pools()
    flags = sgl_kvio.layer_flags(L + 2, "cpu")
    flags[0] = torch.arange(L + 2)
    sgl_kvio.load_layers(dst, src, index(AT), index(FRM), flags, L + 9)
    assert raised(flags) == [L + 9] * L + [L, L + 1]


def test_what_orders_the_readers_is_left_alone():
    flags = sgl_kvio.layer_flags(L, "cpu")
    after = [torch.arange(5), torch.randn(3)]
    before = [t.clone() for t in after]
    versions = [t._version for t in after]
    sgl_kvio.wait_layer(flags, 0, 0, after=after)
    sgl_kvio.wait_layer(flags, 0, 0, after[0])
    assert [t._version for t in after] == versions
    for tensor, old in zip(after, before, strict=True):
        assert_same_bytes(tensor, old, "after")


# Bad input.


def good_call():
    dst, src = pools()
    return {
        "dst": dst,
        "src": src,
        "dst_indices": index(AT),
        "src_indices": index(FRM),
        "flags": sgl_kvio.layer_flags(L, "cpu"),
        "epoch": 3,
    }


def run(call):
    sgl_kvio.load_layers(**call)


def listed(*changes):
    """The call with lists by layer, then changed."""

    def change(call):
        for side in ("dst", "src"):
            call[side] = [list(layer) for layer in zip(*call[side], strict=True)]
        for one in changes:
            one(call)

    return change


def put_buffer(side, layer, position, tensor):
    def change(call):
        call[side][layer][position] = tensor

    return change


def flags_of(shape, dtype=torch.int64):
    return set_to(flags=torch.zeros(shape, dtype=dtype))


def share_flags(name):
    def change(call):
        memory = torch.zeros(64, dtype=torch.int64)
        call["flags"] = memory[: 2 * L].view(2, L)
        if name == "dst":
            call["dst"][1] = memory.view(F32)[: L * 8].view(L, 1, 2, 4)
            call["dst_indices"] = call["src_indices"] = index([0])
        else:
            call[name] = memory[2 : 2 + len(AT)]

    return change


DST, SRC = r"dst\[1\]", r"src\[1\]"
BAD = {
    # flags and epoch
    "flags of another dtype": (flags_of((2, L), torch.int32), "flags", "int32"),
    "flags of one row": (flags_of((1, L)), "flags", r"\[1, 3\]"),
    "flags without rows": (flags_of((2 * L,)), "flags", r"\[6\]"),
    "flags of fewer layers": (flags_of((2, L - 1)), "flags", r"\[2, 3 or more\]"),
    "flags with gaps": (set_to(flags=torch.zeros(2, 2 * L).long()[:, ::2]), "flags", "strides"),
    "flags and the pool in one place": (share_flags("dst"), "flags", DST),
    "flags and indices in one place": (share_flags("dst_indices"), "flags", "dst_indices"),
    "epoch 0": (set_to(epoch=0), "epoch", "0"),
    "epoch below 0": (set_to(epoch=-4), "epoch", "-4"),
    "epoch that was loaded": (set_to(flags=torch.full((2, L), 3)), "epoch", "3"),
    "epoch 0 in a tensor": (set_to(epoch=torch.tensor(0)), "epoch", "0"),
    "epoch of another dtype": (set_to(epoch=torch.tensor(4.0)), "epoch", "float32"),
    "epoch of two entries": (set_to(epoch=index([4, 5])), "epoch", r"\[2\]"),
    # layers
    "fewer sources": (lambda call: call["src"].pop(), "src", "1"),
    "layers differ in dst": (put("dst", 1, pool(L - 1, SLOTS, 2, 4)), DST, "2 layers"),
    "layers differ in src": (put("src", 1, pool(L + 1, SLOTS, 2, 4)), SRC, "4 layers"),
    "one-layer buffers": (
        both(put("dst", 1, pool(SLOTS, 2, 4)), put("src", 1, pool(SLOTS, 2, 4))),
        DST,
        r"\[16, 2, 4\].*num_layers",
    ),
    "too many dims": (
        both(put("dst", 1, pool(L, 2, 4, 2, 2, 4)), put("src", 1, pool(L, 2, 4, 2, 2, 4))),
        DST,
        r"\[3, 2, 4, 2, 2, 4\]",
    ),
    "layers in one place": (put("dst", 1, pool(1, SLOTS, 2, 4).expand(L, -1, -1, -1)), DST, "0"),
    "expanded slots": (put("dst", 1, pool(L, 1, 2, 4).expand(-1, SLOTS, -1, -1)), DST, "0"),
    "dtypes differ": (put("src", 1, pool(L, SLOTS, 2, 4, dtype=torch.int32)), SRC, "int32"),
    "row shapes differ": (put("src", 1, pool(L, SLOTS, 2, 5)), SRC, r"\[2, 5\]"),
    "too many buffers": (
        set_to(dst=[pool(L, SLOTS, 2, 4)] * 17, src=[pool(L, SLOTS, 2, 4)] * 17),
        "dst",
        "17",
    ),
    "too many shapes": (
        set_to(
            dst=[pool(L, SLOTS, 2, 4 + i) for i in range(5)],
            src=[pool(L, SLOTS, 2, 4 + i) for i in range(5)],
        ),
        "dst",
        "5",
    ),
    # by layer
    "a layer without its V": (listed(lambda call: call["dst"][1].pop()), "layer 1", "1 buffers"),
    "fewer layers in src": (listed(lambda call: call["src"].pop()), "src", "2 layers"),
    "fewer layers in a stacked src": (
        lambda call: call.update(
            dst=[list(layer) for layer in zip(*call["dst"], strict=True)],
            src=[s[: L - 1] for s in call["src"]],
        ),
        "src",
        "2 layers",
    ),
    "layers of another dtype": (
        listed(put_buffer("src", 2, 1, pool(SLOTS, 2, 4, dtype=torch.int32))),
        r"src\[5\]",
        "",
    ),
    "layers of other strides": (
        listed(put_buffer("dst", 1, 0, pool(2 * SLOTS, 2, 4)[::2])),
        r"dst\[2\]",
        r"\[16, 4, 1\]",
    ),
    "layers of other lengths": (
        listed(put_buffer("dst", 2, 0, pool(SLOTS + 1, 2, 4))),
        r"dst\[4\]",
        r"\[17, 2, 4\]",
    ),
    # as of a transfer
    "unknown index unit": (set_to(index_unit="block"), "index_unit", "block"),
    "zero page_size": (set_to(page_size=0), "page_size", "0"),
    "negative row_ndim": (set_to(row_ndim=-1), "row_ndim", "-1"),
    "negative num_blocks": (set_to(num_blocks=-1), "num_blocks", "-1"),
    "index dtype": (set_to(src_indices=torch.zeros(5)), "src_indices", "float"),
    "index lengths differ": (set_to(src_indices=index([0] * 4)), "src_indices", "4"),
    "index past the end": (put("dst_indices", 2, SLOTS), r"dst_indices\[2\]", "16"),
    "index below 0": (put("src_indices", 0, -1), r"src_indices\[0\]", "-1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_and_moves_nothing(name):
    change, argument, got = BAD[name]
    call = good_call()
    change(call)

    def tensors(buffers):
        for entry in buffers:
            yield from [entry] if isinstance(entry, torch.Tensor) else entry

    flags = call["flags"]
    unchanged = [*tensors(call["dst"]), *tensors(call["src"]), flags]
    with refused(argument, got=got, op="load_layers", unchanged=unchanged):
        run(call)


def test_a_list_whose_layers_do_not_come_out_even_is_refused_by_the_op():
    dst, src = pools()
    flags = sgl_kvio.layer_flags(L, "cpu")
    lists = [[t for buffer in side for t in buffer] for side in (dst, src)]
    for num_layers, got in ((4, "num_layers=4"), (-1, "-1")):
        with refused(r"dst|num_layers", got=got, op="load_layers", unchanged=[*dst, flags]):
            torch.ops.kvio.load_layers.int(
                *lists, index(AT), index(FRM), flags, 1, num_layers=num_layers
            )


WAITS = {
    "layer below 0": ({"layer": -1}, "layer", "-1"),
    "layer past the end": ({"layer": L}, "layer", "3"),
    "no time": ({"timeout_ms": 0}, "timeout_ms", "0"),
    "time below 0": ({"timeout_ms": -5}, "timeout_ms", "-5"),
    "flags of another dtype": ({"flags": torch.zeros(2, L)}, "flags", "float32"),
    "flags of one row": ({"flags": torch.zeros(1, L).long()}, "flags", r"\[1, 3\]"),
    "flags of no layer": ({"flags": torch.zeros(2, 0).long()}, "flags", r"\[2, 0\]"),
    "epoch of another dtype": ({"epoch": torch.tensor(1.0)}, "epoch", "float32"),
    "epoch of no entry": ({"epoch": index([])}, "epoch", r"\[0\]"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_bad_wait_is_refused(name):
    changes, argument, got = WAITS[name]
    call = {"flags": sgl_kvio.layer_flags(L, "cpu"), "layer": 1, "epoch": 0} | changes
    with refused(argument, got=got, op="wait_layer"):
        sgl_kvio.wait_layer(**call)


@pytest.mark.parametrize("op", ["load_layers", "wait_layer"])
def test_meta_tensors_are_refused_among_real_ones(op):
    call = good_call() | {"flags": sgl_kvio.layer_flags(L, "meta")}
    with pytest.raises(RuntimeError, match=rf"kvio::{op}: .*meta"):
        if op == "load_layers":
            run(call)
        else:
            sgl_kvio.wait_layer(call["flags"], 0, torch.tensor(1))


def test_a_destination_named_twice_is_refused_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("KVIO_DEBUG_CHECKS", "1")
    call = good_call()
    call["dst_indices"][1] = call["dst_indices"][0]
    with refused(r"dst_indices\[1\]", op="load_layers", unchanged=[*call["dst"], call["flags"]]):
        run(call)


# opcheck.


def samples():
    dst, src = pools()
    flags = sgl_kvio.layer_flags(L, "cpu")
    lists = [[t for layer in zip(*side, strict=True) for t in layer] for side in pools(seed=7)]
    yield "stacked", (dst, src, index(AT), index(FRM), flags), {}
    yield "listed", (*lists, index(AT), index(FRM), flags), {"num_layers": L}
    pages = [pool(L, 4, 4, 6) for _ in range(2)]
    at = index([1, 0], torch.int32)
    options = {"row_ndim": 1, "page_size": 4, "index_unit": "page", "num_blocks": 2}
    yield "pages", ([pages[0]], [pages[1]], at, at.flip(0), flags), options
    yield "empty", ([], [], index([]), index([]), flags), {}


@pytest.mark.parametrize("sample", list(samples()), ids=lambda sample: sample[0])
@pytest.mark.parametrize("kind", ["default", "int"])
def test_opcheck_passes_on_load_layers(kind, sample):
    _, arguments, options = sample
    dst, src, *rest = arguments
    # Clones: an opcheck with views of one base is one of torch's aliasing, not of the op.
    arguments = [[t.clone() for t in dst], [t.clone() for t in src], *rest]
    epoch = 2 if kind == "int" else torch.tensor([2])
    overload = getattr(torch.ops.kvio.load_layers, kind)
    torch.library.opcheck(overload, (*arguments, epoch), options)


@pytest.mark.parametrize("kind", ["default", "int"])
@pytest.mark.parametrize("after", [1, 2])
def test_opcheck_passes_on_wait_layer(after, kind):
    flags = torch.full((2, L), 4)
    epoch = 3 if kind == "int" else torch.tensor(3)
    tensors = [torch.arange(4.0) + i for i in range(after)]
    overload = getattr(torch.ops.kvio.wait_layer, kind)
    torch.library.opcheck(overload, (flags, 1, epoch, tensors), {"timeout_ms": 50})
