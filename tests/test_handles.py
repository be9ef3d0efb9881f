"""write_back and restore: the rows of transfer, between a device pool and a pool that has a handle.

Compiled calls are in test_handles_compile.py. tests/gpu/test_handles.py runs the helpers below.
"""

import gc
import mmap
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch

import cases
import sgl_kvio
from reference import assert_same_bytes, check_case, moved, refused, synchronize
from sgl_kvio import HostKVPool

CASES = cases.selected(gpu=False)
L, P, N, H, D = 3, 4, 5, 2, 6
SLOTS = N * P


def token_for(tensors):
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    return torch.zeros(1, dtype=torch.uint8, device=on_gpu[0].device if on_gpu else "cpu")


def through_a_handle(op, pool_side, device_side, at, frm, row_ndim=2, **options):
    handle = sgl_kvio.register_pool(pool_side, row_ndim=row_ndim)
    try:
        op(handle, token_for([*device_side, at]), device_side, at, frm, **options)
    finally:
        synchronize()
        sgl_kvio.unregister_pool(handle)


def by_write_back(dst, src, at, frm, **options):
    through_a_handle(sgl_kvio.write_back, dst, src, at, frm, **options)


def by_restore(dst, src, at, frm, **options):
    through_a_handle(sgl_kvio.restore, src, dst, at, frm, **options)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_write_back_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, by_write_back)


@pytest.mark.parametrize("case", CASES[1::2], ids=lambda case: case.name)
def test_restore_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, by_restore)


def make_pool(layout="page_first", kind="mha", device="cpu", **changes):
    sizes = {"num_pages": N, "page_size": P, "num_layers": L, "num_heads": H, "head_dim": D}
    if kind == "mla":
        sizes["num_heads"] = 1
    pool = HostKVPool(kind, layout, dtype=torch.int32, device=device, **(sizes | changes))
    for number, tensor in enumerate(pool.tensors):
        tensor.copy_(cases.contiguous_pool(tensor.shape, torch.int32, 70 + number))
    return pool


def device_pool(pool, device="cpu", seed=0):
    """A flat buffer for each of the pool's, random."""
    return [
        cases.contiguous_pool((SLOTS, *view.shape[-2:]), torch.int32, seed + number).to(device)
        for number, view in enumerate(pool.all_layers())
    ]


def content(pool):
    return [tensor.clone() for tensor in pool.tensors]


def assert_content(pool, want):
    for tensor, bytes_wanted in zip(pool.tensors, want, strict=True):
        assert_same_bytes(tensor, bytes_wanted, "host pool")


@pytest.mark.parametrize("kind", ["mha", "mla", "k_only"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_pools_handle_reaches_the_buffers_of_all_layers(layout, kind):
    at, frm = torch.tensor([4, 2]), torch.tensor([0, 3])
    options = {"page_size": P, "index_unit": "page"}
    with make_pool(layout, kind) as pool, make_pool(layout, kind) as twin:
        device = device_pool(pool)
        sgl_kvio.write_back(pool.handle, pool.token, device, at, frm, **options)
        sgl_kvio.transfer(twin.all_layers(), device, at, frm, **options)
        assert_content(pool, content(twin))
        got, want = device_pool(pool, seed=40), device_pool(pool, seed=40)
        sgl_kvio.restore(pool.handle, pool.token, got, frm, at, **options)
        sgl_kvio.transfer(want, twin.all_layers(), frm, at, **options)
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a, b, "device pool")


def test_first_buffer_names_the_layers_that_a_call_is_about():
    at, frm = torch.tensor([4, 2, 19]), torch.tensor([0, 3, 7])
    with make_pool() as pool, make_pool() as twin:
        k, v = device_pool(pool)[:2]
        sgl_kvio.write_back(pool.handle, pool.token, [k, v], at, frm, first_buffer=2)
        sgl_kvio.write_back(pool.handle, pool.token, v, at, frm, first_buffer=2 * L - 1)
        sgl_kvio.transfer(twin.layer(1), [k, v], at, frm)
        sgl_kvio.transfer(twin.layer(2)[1], v, at, frm)
        assert_content(pool, content(twin))
        want = moved(k, pool.layer(2)[0], frm, at)
        sgl_kvio.restore(pool.handle, pool.token, k, frm, at, first_buffer=2 * (L - 1))
        assert_same_bytes(k, want, "device buffer")


def test_the_op_and_the_function_do_the_same():
    at, frm = torch.tensor([4, 2]), torch.tensor([0, 3])
    with make_pool() as pool, make_pool() as twin:
        k = device_pool(pool)[0]
        torch.ops.kvio.write_back(pool.handle, pool.token, [k], at, frm, first_buffer=1)
        sgl_kvio.write_back(twin.handle, twin.token, k, at, frm, first_buffer=1)
        assert_content(pool, content(twin))
        other = k.clone()
        torch.ops.kvio.restore(pool.handle, pool.token, [k], at, frm, first_buffer=3)
        sgl_kvio.restore(pool.handle, pool.token, [other], at, frm, first_buffer=3)
        assert_same_bytes(k, other, "device buffer")


@pytest.mark.parametrize("row_ndim", [1, 3])
def test_a_handle_knows_how_many_dims_a_row_of_its_pool_has(row_ndim):
    shape = (8, *[2] * row_ndim)
    host, device = (cases.contiguous_pool(shape, torch.int16, seed) for seed in (0, 1))
    at, frm = torch.tensor([5, 1]), torch.tensor([2, 7])
    want = moved(host, device, at, frm)
    by_write_back([host], [device], at, frm, row_ndim=row_ndim)
    assert_same_bytes(host, want, "host pool")


def test_no_kernel_touches_the_token():
    at = torch.arange(3)
    with make_pool() as pool:
        token = torch.full((4,), 9, dtype=torch.uint8)
        device = device_pool(pool)
        sgl_kvio.write_back(pool.handle, token, device, at, at)
        sgl_kvio.restore(pool.handle, token, device, at, at)
        assert token.tolist() == [9] * 4


def test_nothing_to_move_is_no_error():
    none, one = torch.empty(0, dtype=torch.int64), torch.tensor([1])
    with make_pool() as pool:
        before = content(pool)
        sgl_kvio.write_back(pool.handle, pool.token, device_pool(pool), none, none)
        sgl_kvio.write_back(pool.handle, pool.token, [], one, one)
        sgl_kvio.restore(pool.handle, pool.token, [], one, one, first_buffer=2 * L)
        assert_content(pool, before)


# What a handle is.


def some_call(op, handle):
    at = torch.tensor([1])
    rows = torch.zeros(SLOTS, H, D, dtype=torch.int32)
    getattr(sgl_kvio, op)(handle, torch.zeros(1), [rows], at, at)


OPS = pytest.mark.parametrize("op", ["write_back", "restore"])


@OPS
@pytest.mark.parametrize("handle", [0, -1, 3, 2**32 - 1, 2**62])
def test_a_number_that_names_no_pool_is_refused(op, handle):
    with refused("handle", got=f"is {handle}, which names no pool", op=op):
        some_call(op, handle)


@OPS
@pytest.mark.parametrize("number", [None, 41])
def test_the_handle_of_a_closed_pool_is_refused(op, number):
    pool = make_pool(handle=number)
    handle = pool.handle
    some_call(op, handle)
    pool.close()
    with refused("handle", got=f"is {handle}, whose pool was closed", op=op):
        some_call(op, handle)


@OPS
@pytest.mark.parametrize("what", [1.5, None, "pool", torch.zeros(2)], ids=str)
def test_something_that_is_no_number_is_refused(op, what):
    with pytest.raises((RuntimeError, TypeError), match=f"kvio::{op}|{op}"):
        some_call(op, what)


def test_handles_that_the_library_chooses_are_never_given_out_twice():
    seen = set()
    for _ in range(4):
        with make_pool() as pool, make_pool() as other:
            assert len({pool.handle, other.handle} - seen) == 2
            seen |= {pool.handle, other.handle}
    assert min(seen) >= 2**32
    assert max(seen) < 2**53, "a number that JSON readers round"


def test_another_process_chooses_other_handles():
    """A compiled graph that is cached on disk must not find a pool that it was not made for."""
    code = """
        import torch, sgl_kvio
        print(sgl_kvio.register_pool([torch.zeros(2, 1, 1)]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in "ab"]
    assert int(runs[0].stdout) != int(runs[1].stdout)


def test_a_number_of_the_callers_own_is_the_pools_handle_until_it_is_closed():
    with make_pool(handle=7) as pool:
        assert pool.handle == 7
        with pytest.raises(RuntimeError, match=r"handle is 7, which an open pool has.* needs"):
            make_pool(handle=7)
        some_call("write_back", 7)
    with make_pool(handle=7, layout="layer_first") as pool:
        some_call("restore", 7)


@pytest.mark.parametrize("number", [0, -3, 2**32, 1.5, "7"])
def test_a_pool_refuses_a_handle_that_is_no_number_of_the_callers(number):
    with pytest.raises(ValueError, match=r"HostKVPool: handle got .*needs"):
        make_pool(handle=number)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_register_pool_refuses_such_a_number_too(number):
    with refused("handle", got=str(number), op="register_pool"):
        sgl_kvio.register_pool([torch.zeros(2, 1, 1)], handle=number)


@pytest.mark.parametrize(
    ("buffers", "row_ndim", "argument"),
    [
        ([], 2, "buffers is empty"),
        ([torch.zeros(2, 1)], 2, r"buffers\[0\] has shape \[2, 1\]"),
        ([torch.zeros(2, 1, 1), torch.zeros(2, 1, 1, 1, 1)], 2, r"buffers\[1\] has shape"),
        ([torch.zeros(2, 1, 1)], -1, "row_ndim"),
        ([torch.zeros(1, 1, 4).expand(3, 1, 4)], 2, r"buffers\[0\] has stride 0"),
        ([torch.zeros(4, 4, 4)[:, ::2, ::2]], 2, r"buffers\[0\] has row dims"),
        ([torch.zeros(2, 1, 1, device="meta")], 2, "call it outside the graph"),
    ],
)
def test_what_is_no_pool_gets_no_handle(buffers, row_ndim, argument):
    with pytest.raises(RuntimeError, match=f"kvio::register_pool: .*{argument}"):
        sgl_kvio.register_pool(buffers, row_ndim=row_ndim)


def test_unregistering_twice_raises():
    handle = sgl_kvio.register_pool(torch.zeros(2, 1, 1))
    sgl_kvio.unregister_pool(handle)
    with refused("handle", got="closed", op="unregister_pool"):
        sgl_kvio.unregister_pool(handle)


# What a call with a handle refuses; everything else is checked where transfer's arguments are.


def bad_calls():
    at = torch.tensor([1, 2])
    rows = torch.zeros(SLOTS, H, D, dtype=torch.int32)
    yield "beyond the last", [rows], at, at, {"first_buffer": 2 * L}, "first_buffer", "is 6"
    yield "before the first", [rows], at, at, {"first_buffer": -1}, "first_buffer", "is -1"
    yield "wraps", [rows], at, at, {"first_buffer": 2**63 - 1}, "first_buffer", "6 buffers"
    yield "too many", [rows] * 7, at, at, {}, "first_buffer", "has 7 tensors"
    yield "dtype", [rows.float()], at, at, {}, r"(src|pool)\[0\] has dtype", "float32"
    yield "row", [rows[:, :, 1:]], at, at, {}, r"(src|pool)\[0\] has rows of shape", "5"
    yield "unit", [rows], at, at, {"index_unit": "layer"}, "index_unit", "layer"
    yield "backend", [rows], at, at, {"backend": "tma"}, "backend", "GPU"
    yield "lengths", [rows], at, at[:1], {}, "src_indices", "1 entries"
    yield "dst index", [rows], at + SLOTS, at, {}, r"dst_indices\[0\]", str(SLOTS + 1)
    yield "src index", [rows], at, -at, {}, r"src_indices\[0\]", "-1"


@OPS
@pytest.mark.parametrize("bad", list(bad_calls()), ids=lambda bad: bad[0])
def test_a_bad_argument_is_refused_by_name_and_nothing_moves(op, bad):
    _, device, at, frm, options, argument, got = bad
    with make_pool() as pool, refused(argument, got=got, op=op, unchanged=[*device, *pool.tensors]):
        getattr(sgl_kvio, op)(pool.handle, pool.token, device, at, frm, **options)


def test_an_index_error_names_the_pool():
    at, rows = torch.tensor([1]), torch.zeros(4 * SLOTS, H, D, dtype=torch.int32)
    outside = torch.tensor([SLOTS])
    where = rf"pool\[0\] has {SLOTS} token slots"
    with make_pool() as pool:
        with refused(r"dst_indices\[0\]", got=where, op="write_back"):
            sgl_kvio.write_back(pool.handle, pool.token, rows, outside, at)
        with refused(r"src_indices\[0\]", got=where, op="restore"):
            sgl_kvio.restore(pool.handle, pool.token, rows, at, outside)


def test_an_index_list_inside_the_pool_is_refused():
    with make_pool() as pool:
        inside = pool.tensors[0].view(-1)[:4]
        at = torch.arange(4, dtype=torch.int32)
        with refused("dst_indices", got=r"shares memory with pool\[0\]", op="write_back"):
            sgl_kvio.write_back(pool.handle, pool.token, device_pool(pool), inside, at)


@pytest.mark.parametrize("environment", ["1"])
def test_debug_checks_find_a_host_row_that_is_written_twice(monkeypatch, environment):
    monkeypatch.setenv("KVIO_DEBUG_CHECKS", environment)
    twice, at = torch.tensor([1, 1]), torch.tensor([1, 2])
    with make_pool() as pool:
        with refused(r"dst_indices\[1\]", got="KVIO_DEBUG_CHECKS", op="write_back"):
            sgl_kvio.write_back(pool.handle, pool.token, device_pool(pool), twice, at)
        rows = pool.layer(0)[0]
        with refused(r"src_indices\[0\]", got=r"a row of pool\[0\]", op="write_back"):
            sgl_kvio.write_back(pool.handle, pool.token, rows, at, at.flip(0))


@OPS
def test_a_meta_tensor_among_real_ones_is_refused(op):
    at, rows = torch.tensor([1]), torch.zeros(SLOTS, H, D, dtype=torch.int32)
    with make_pool() as pool:
        call = getattr(sgl_kvio, op)
        with refused("some arguments", got="meta", op=op, unchanged=pool.tensors):
            call(pool.handle, pool.token.to("meta"), rows, at, at)
        with refused("some arguments", got="meta", op=op, unchanged=pool.tensors):
            call(pool.handle, pool.token, rows.to("meta"), at, at)


@OPS
def test_a_pool_whose_storage_was_shrunk_is_refused(op):
    host, device, at = torch.zeros(8, 1, 2), torch.zeros(8, 1, 2), torch.tensor([7])
    handle = sgl_kvio.register_pool(host)
    host.untyped_storage().resize_(16)
    with refused(r"pool\[0\]", got="spans 64 bytes but its storage has 16", op=op):
        getattr(sgl_kvio, op)(handle, torch.zeros(1), device, at, at)
    sgl_kvio.unregister_pool(handle)


# Lifetime.


def test_a_handle_keeps_memory_that_its_owner_let_go_of():
    mapping = mmap.mmap(-1, 4096)
    memory = weakref.ref(mapping)
    host = torch.frombuffer(mapping, dtype=torch.float32, count=16).view(8, 1, 2)
    device = cases.contiguous_pool((8, 1, 2), torch.float32, 3)
    handle = sgl_kvio.register_pool(host)
    del host, mapping
    at = torch.tensor([7, 0])
    back = torch.zeros(8, 1, 2)
    sgl_kvio.write_back(handle, torch.zeros(1), device, at, at)
    sgl_kvio.restore(handle, torch.zeros(1), back, at, at)
    assert_same_bytes(back, moved(torch.zeros(8, 1, 2), device, at, at), "rows there and back")
    assert memory() is not None
    sgl_kvio.unregister_pool(handle)
    assert memory() is None


def test_a_pool_that_nobody_closed_gives_its_handle_back():
    pool = make_pool()
    handle = pool.handle
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    with refused("handle", got="closed", op="restore"):
        some_call("restore", handle)


def test_a_pool_whose_handle_somebody_closed_still_gives_its_memory_back():
    pool = make_pool()
    mapping = weakref.ref(pool._memories[0]._mapping)
    sgl_kvio.unregister_pool(pool.handle)
    with pytest.raises(RuntimeError, match="whose pool was closed"):
        pool.close()
    gc.collect()
    assert mapping() is None
    pool.close()


def test_the_handle_and_the_token_of_a_closed_pool_raise():
    pool = make_pool()
    pool.close()
    for name in ("handle", "token"):
        with pytest.raises(ValueError, match="after close"):
            getattr(pool, name)


def test_a_pool_made_under_inference_mode_has_a_token_for_use_outside():
    with torch.inference_mode():
        pool = make_pool()
    assert not pool.token.is_inference()
    pool.close()


def test_closing_a_handle_while_calls_run_ends_them_whole_or_with_an_error():
    """Each call finds the pool open, and moves all rows, or closed, and moves none."""
    rows = torch.arange(4096 * 16, dtype=torch.int32).view(4096, 1, 16)
    at = torch.randperm(4096)
    wrong = []

    def restore_until_closed(handle):
        token, back = torch.zeros(1), torch.zeros_like(rows)
        try:
            while True:
                back.zero_()
                sgl_kvio.restore(handle, token, back, at, at)
                if not torch.equal(back, rows):
                    wrong.append("rows differ")
        except RuntimeError as error:
            if "closed" not in str(error) or back.any():
                wrong.append(str(error))

    for _ in range(20):
        handle = sgl_kvio.register_pool(rows.clone())
        threads = [threading.Thread(target=restore_until_closed, args=(handle,)) for _ in "ab"]
        for thread in threads:
            thread.start()
        sgl_kvio.unregister_pool(handle)
        for thread in threads:
            thread.join()
    assert wrong == []
