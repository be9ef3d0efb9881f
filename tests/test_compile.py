"""torch.compile keeps the copy: writes before the op are moved, reads behind it see the rows.

The functions below are also what tests/gpu/test_compile.py compiles.
"""

import shutil

import pytest
import torch
import torch._dynamo

import cases
import sgl_kvio
from reference import assert_same_bytes, synchronize, twin_of

transfer = torch.ops.kvio.transfer


def write_move_read(dst, src, at, frm):
    src.mul_(2)
    transfer([dst], [src], at, frm)
    return dst + 1


def move_views(dst, src, at, frm):
    """Both ends are views, one of them of the same pool that is written before and read behind."""
    dst[8:].add_(3)
    transfer([dst[4:12], dst[12:]], [src[:8], src[8:12]], at, frm)
    return dst.sum(dim=0)


def move_computed_rows(dst, src, at, frm):
    transfer([dst], [src * 3], (at + 1) % 4, frm.flip(0))
    return dst[1] * 2


def move_twice(dst, src, at, frm):
    transfer([dst], [src], at, frm)
    transfer([src], [dst], at + 4, frm)
    return dst + src


def move_layers(dst, src, at, frm):
    """All layers of a stacked pool: [layers, slots, heads, dim] unbound inside the graph."""
    stacked_dst, stacked_src = dst.unflatten(0, (4, 4)), src.unflatten(0, (4, 4))
    transfer(list(stacked_dst.unbind(0)), list(stacked_src.unbind(0)), at, frm)
    return stacked_dst[2].clone()


def move_through_the_function(dst, src, at, frm):
    sgl_kvio.transfer(dst, src, at, frm, page_size=2)
    return dst - 1


def copy_bytes(dst, src, at, frm):
    src.add_(1)
    torch.ops.kvio.memcpy_batch([dst], [src], [0, 64], [128, 0], [64, 32])
    return dst * 2


FUNCTIONS = [
    write_move_read,
    move_views,
    move_computed_rows,
    move_twice,
    move_layers,
    move_through_the_function,
    copy_bytes,
]


def make_arguments(device="cpu"):
    pools = [cases.contiguous_pool((16, 2, 4), torch.int32, seed) % 1000 for seed in (0, 1)]
    at, frm = torch.tensor([3, 0, 1]), torch.tensor([0, 2, 3])
    return [t.to(device) for t in (*pools, at, frm)]


def check_compiled(function, backend, arguments, **options):
    """Two compiled and two eager runs return the same and leave every argument the same."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    check_twice(compiled, function, arguments)


def check_twice(program, function, arguments):
    """As check_compiled, of anything that was made of the function."""
    twins = [twin_of(t) for t in arguments]
    for _ in range(2):
        want, got = function(*twins), program(*arguments)
        synchronize()
        assert_same_bytes(got, want, "result")
        for position, (argument, twin) in enumerate(zip(arguments, twins, strict=True)):
            assert_same_bytes(argument, twin, f"argument {position}")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_leaves_the_same_bytes(backend, function):
    check_compiled(function, backend, make_arguments())


def everything(dst, src, at, frm):
    """All of the functions in one graph: one compiler run of inductor costs many seconds here."""
    results = [function(dst, src, at, frm) for function in FUNCTIONS]
    return torch.cat([result.flatten() for result in results])


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_keeps_every_copy(dynamic):
    check_compiled(everything, "inductor", make_arguments(), dynamic=dynamic)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_another_number_of_indices_needs_no_new_graph(backend):
    graphs = 0

    def counting(graph, example):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(write_move_read, backend=counting, fullgraph=True, dynamic=True)
    for count in (3, 5, 9, 16):
        dst, src, _, _ = make_arguments()
        twin_dst, twin_src = dst.clone(), src.clone()
        at, frm = torch.randperm(16)[:count], torch.randperm(16)[:count]
        want = write_move_read(twin_dst, twin_src, at, frm)
        assert_same_bytes(compiled(dst, src, at, frm), want, "result")
        assert_same_bytes(dst, twin_dst, "destination")
    assert graphs == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pool_held_by_a_module_is_written(backend):
    class Holder(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.pool = pool

        def forward(self, src, at, frm):
            transfer([self.pool], [src], at, frm)
            return src + 1

    dst, src, at, frm = make_arguments()
    want = dst.clone()
    transfer([want], [src], at, frm)
    torch._dynamo.reset()
    torch.compile(Holder(dst), backend=backend, fullgraph=True)(src, at, frm)
    assert_same_bytes(dst, want, "pool")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_out_of_range_index_still_raises_when_compiled(backend):
    torch._dynamo.reset()
    dst, src, at, frm = make_arguments()
    compiled = torch.compile(write_move_read, backend=backend, fullgraph=True)
    compiled(dst, src, at, frm)
    at[1] = 16
    with pytest.raises(RuntimeError, match=r"dst_indices\[1\]"):
        compiled(dst, src, at, frm)
    sgl_kvio.check()
