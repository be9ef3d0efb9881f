"""write_back and restore on a GPU: page-locked pools behind a handle, eager, compiled, captured."""

import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch._dynamo
from test_handles import (
    assert_content,
    by_restore,
    by_write_back,
    content,
    device_pool,
    make_pool,
)
from test_handles_compile import (
    DECODER_SLOTS,
    FUNCTIONS,
    Decoder,
    Graphs,
    check_step,
    check_twice,
    decoder_arguments,
    decoder_pool,
    everything,
    random_program,
    save_loaded_rows,
    save_then_load,
)
from test_handles_export import NUMBER, PACKAGED, check_program, exported
from test_handles_export import make_arguments as export_arguments
from test_handles_memory import NUMBER as BIG
from test_handles_memory import big_pool, check_no_copy, pool_bytes
from test_schema import check_ops_on_a_handle
from torch.utils.cpp_extension import CUDA_HOME

import cases
import sgl_kvio
from reference import assert_same_bytes, check_case, needs_bulk_copies, refused

CASES = cases.selected(gpu=True)
TMA = pytest.param("tma", marks=needs_bulk_copies)
inductor = pytest.param(
    "inductor",
    marks=pytest.mark.skipif(
        not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="inductor needs a C compiler"
    ),
)
needs_inductor = inductor.marks[0]
BOTH = ["aot_eager", inductor]
AT, FROM = [9, 13, 4], [0, 2, 3]


def in_direction(*directions):
    chosen = [case for case in CASES if case.direction in directions]
    return pytest.mark.parametrize("case", chosen[::2], ids=lambda case: case.name)


@in_direction("d2h")
def test_write_back_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, by_write_back, "cuda")


@in_direction("h2d")
def test_restore_moves_the_named_rows_and_no_other_byte(case):
    check_case(case, by_restore, "cuda")


@pytest.mark.parametrize(
    ("backend", "place"), [("register", "cuda"), ("copy_engine", "cpu"), ("auto", "cpu")]
)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_every_backend_serves_a_pools_handle(layout, backend, place):
    at, frm = (torch.tensor(entries, device=place) for entries in (AT, FROM))
    with make_pool(layout, device="cuda") as pool, make_pool(layout, device="cpu") as twin:
        card = device_pool(pool, "cuda")
        where = {"first_buffer": 2, "backend": backend}
        sgl_kvio.write_back(pool.handle, pool.token, card[:2], at, frm, **where)
        torch.cuda.synchronize()
        sgl_kvio.transfer(twin.layer(1), device_pool(pool)[:2], torch.tensor(AT), frm.cpu())
        assert_content(pool, content(twin))
        sgl_kvio.restore(pool.handle, pool.token, card[2:4], frm, at, **where)
        for buffer, host in zip(card[2:4], pool.layer(1), strict=True):
            rows = host[AT] if host.dim() == 3 else host.flatten(0, 1)[AT]
            assert_same_bytes(buffer[FROM], rows, "restored rows")


@pytest.mark.parametrize("backend", [TMA])
def test_bulk_copies_serve_a_handle(backend):
    host = cases.contiguous_pool((64, 2, 64), torch.int16, 1).pin_memory()
    card = cases.contiguous_pool((64, 2, 64), torch.int16, 2).cuda()
    at = torch.randperm(64, device="cuda")
    handle = sgl_kvio.register_pool(host)
    sgl_kvio.restore(handle, torch.zeros(1), card, at, at.flip(0), backend=backend)
    torch.cuda.synchronize()
    sgl_kvio.unregister_pool(handle)
    assert_same_bytes(card[at], host[at.flip(0).cpu()], "restored rows")


@pytest.mark.parametrize("op", ["write_back", "restore"])
@pytest.mark.parametrize("side", ["dst_indices", "src_indices"])
def test_an_index_outside_of_its_pool_is_reported_under_the_ops_name(op, side):
    lists = {"dst_indices": torch.tensor([3, 1]), "src_indices": torch.tensor([0, 2])}
    lists[side] = torch.tensor([3, 77])
    lists = {name: entries.cuda() for name, entries in lists.items()}
    with make_pool(device="cuda") as pool:
        getattr(sgl_kvio, op)(pool.handle, pool.token, device_pool(pool, "cuda"), **lists)
        with pytest.raises(RuntimeError, match=rf"kvio::{op}: on cuda:0 {side}\[1\] was 77"):
            sgl_kvio.check()


@pytest.mark.parametrize("op", ["write_back", "restore"])
def test_a_pool_of_plain_memory_never_reaches_a_kernel(op):
    at = torch.tensor([1], device="cuda")
    with make_pool(device="cpu") as pool:
        before = content(pool)
        with refused(r"pool\[0\]", got="not page-locked", op=op):
            getattr(sgl_kvio, op)(pool.handle, pool.token, device_pool(pool, "cuda"), at, at)
        assert_content(pool, before)


def test_a_token_on_a_gpu_that_has_no_part_in_the_call_is_refused():
    at, token = torch.tensor([1]), torch.zeros(1, device="cuda")
    with make_pool(device="cpu") as pool, refused("token", got="is on cuda:0", op="restore"):
        sgl_kvio.restore(pool.handle, token, device_pool(pool), at, at)


def test_a_pools_token_lies_on_its_gpu():
    with make_pool(device="cuda") as pool:
        assert pool.token.device == pool.device


def test_calls_may_be_captured_and_replays_read_what_there_is_then():
    with make_pool(device="cuda") as pool, make_pool(device="cuda") as twin:
        k, v = (buffer.cuda() for buffer in device_pool(pool)[:2])
        at, frm = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in "ab")
        save_then_load(pool, k.clone(), v.clone(), at, frm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            save_then_load(pool, k, v, at, frm)
        for seed in range(3):
            fresh = [buffer.cuda() for buffer in device_pool(pool, seed=10 * seed)[:2]]
            for tensor in (*pool.tensors, *twin.tensors):
                tensor.copy_(cases.contiguous_pool(tensor.shape, tensor.dtype, seed))
            generator = torch.Generator().manual_seed(seed)
            at.copy_(torch.randperm(12, generator=generator)[:3])
            frm.copy_(torch.randperm(8, generator=generator)[:3])
            k.copy_(fresh[0])
            v.copy_(fresh[1])
            torch.cuda.synchronize()
            graph.replay()
            save_then_load(twin, *fresh, at, frm)
            torch.cuda.synchronize()
            assert_content(pool, content(twin))
            for got, want in zip((k, v), fresh, strict=True):
                assert_same_bytes(got, want, "device buffer")
        del graph


def test_opcheck_passes_on_write_back_and_restore():
    check_ops_on_a_handle("cuda")


# torch.compile. check_twice also asserts that the pool is page-locked and where it was.


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_leaves_the_same_bytes(backend, function):
    check_twice(function, backend, "cuda")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BOTH)
def test_many_calls_in_one_graph_leave_the_same_bytes(backend, dynamic):
    check_twice(everything, backend, "cuda", dynamic=dynamic)


@pytest.mark.parametrize("backend", BOTH)
def test_calls_are_kept_under_inference_mode(backend):
    with torch.inference_mode():
        check_twice(save_loaded_rows, backend, "cuda")


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("backend", BOTH)
def test_random_programs_keep_their_order(backend, seed):
    check_twice(random_program(seed, 30), backend, "cuda")


@pytest.mark.parametrize("backend", BOTH)
def test_another_number_of_indices_needs_no_new_graph(backend):
    torch._dynamo.reset()
    graphs = Graphs(backend)
    with make_pool(device="cuda") as pool, make_pool(device="cuda") as twin:
        compiled = torch.compile(
            partial(save_then_load, pool), backend=graphs, fullgraph=True, dynamic=True
        )
        for count in (3, 5, 9, 12):
            at, frm = (torch.randperm(12, device="cuda")[:count] for _ in "ab")
            k, v = (buffer.cuda() for buffer in device_pool(pool, seed=count)[:2])
            twins = k.clone(), v.clone()
            want = save_then_load(twin, *twins, at, frm)
            assert_same_bytes(compiled(k, v, at, frm), want, "result")
            torch.cuda.synchronize()
            assert_content(pool, content(twin))
            for got, other in zip((k, v), twins, strict=True):
                assert_same_bytes(got, other, "device buffer")
    assert graphs.count == 1


@pytest.mark.parametrize("backend", BOTH)
def test_a_bad_index_in_a_compiled_function_is_reported(backend):
    torch._dynamo.reset()
    with make_pool(device="cuda") as pool:
        k, v = (buffer.cuda() for buffer in device_pool(pool)[:2])
        at, frm = torch.tensor(AT, device="cuda"), torch.tensor(FROM, device="cuda")
        compiled = torch.compile(partial(save_then_load, pool), backend=backend, fullgraph=True)
        compiled(k, v, at, frm)
        sgl_kvio.check()
        at[1] = 20
        # The restore behind it may see the fault already, and raises it then.
        with pytest.raises(RuntimeError, match=r"kvio::write_back.* on cuda:0 .*dst_indices\[1\]"):
            compiled(k, v, at, frm)
            sgl_kvio.check()


@pytest.mark.parametrize("backend", BOTH)
def test_a_decoder_restores_each_layer_before_its_attention(backend):
    torch._dynamo.reset()
    with torch.no_grad(), decoder_pool("cuda") as pool:
        decoder = Decoder(pool, DECODER_SLOTS, "cuda")
        compiled = torch.compile(decoder, backend=backend, fullgraph=True)
        for seed in (5, 6):
            arguments = decoder_arguments("cuda", seed)
            decoder.cache.fill_(float("nan"))
            check_step(pool, decoder, arguments, compiled(*arguments))


# mode="reduce-overhead": inductor, and a CUDA graph around what it makes.


@pytest.fixture
def replays(monkeypatch):
    """How often a CUDA graph was replayed; dynamo starts anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counting(graph):
        counts[0] += 1
        return replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counting)
    yield counts
    torch._dynamo.reset()


@needs_inductor
def test_a_decoder_is_replayed_with_new_indices_and_new_rows(replays):
    """Caches and the token are buffers of the module, whose addresses a graph may keep."""
    with torch.no_grad(), decoder_pool("cuda") as pool:
        decoder = Decoder(pool, DECODER_SLOTS, "cuda")
        compiled = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
        address = pool.tensors[0].data_ptr()
        for seed in range(6):
            pool.tensors[0].normal_(generator=torch.Generator().manual_seed(seed))
            arguments = decoder_arguments("cuda", seed)
            decoder.cache.fill_(float("nan"))
            torch.compiler.cudagraph_mark_step_begin()
            check_step(pool, decoder, arguments, compiled(*arguments).clone())
        assert pool.tensors[0].data_ptr() == address
        assert pool.tensors[0].is_pinned()
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        assert replays[0] >= 3
        del compiled
        torch._dynamo.reset()


@needs_inductor
def test_tensors_that_no_module_owns_may_be_marked_as_static(replays):
    with make_pool(device="cuda") as pool, make_pool(device="cuda") as twin:
        k, v = (buffer.cuda() for buffer in device_pool(pool)[:2])
        twins = k.clone(), v.clone()
        token = pool.token
        for tensor in (k, v, token):
            torch._dynamo.mark_static_address(tensor)
        compiled = torch.compile(
            partial(save_then_load, pool), mode="reduce-overhead", fullgraph=True
        )
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            at = torch.randperm(12, generator=generator)[:3].cuda()
            frm = torch.randperm(8, generator=generator)[:3].cuda()
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(k, v, at, frm).clone()
            want = save_then_load(twin, *twins, at, frm)
            torch.cuda.synchronize()
            assert_same_bytes(got, want, "result")
            assert_content(pool, content(twin))
            for tensor, other in zip((k, v), twins, strict=True):
                assert_same_bytes(tensor, other, "device buffer")
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        assert replays[0] >= 2
        del compiled
        torch._dynamo.reset()


@needs_inductor
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_reduce_overhead_leaves_the_same_bytes_where_it_makes_no_graph_too(function):
    """Pools that are plain arguments and written: torch says that it skips the CUDA graph."""
    torch._dynamo.reset()
    with make_pool(device="cuda") as pool, make_pool(device="cuda") as twin:
        k, v = (buffer.cuda() for buffer in device_pool(pool)[:2])
        at, frm = torch.tensor(AT, device="cuda"), torch.tensor(FROM, device="cuda")
        twins = k.clone(), v.clone()
        compiled = torch.compile(partial(function, pool), mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            got, want = compiled(k, v, at, frm).clone(), function(twin, *twins, at, frm)
            torch.cuda.synchronize()
            assert_same_bytes(got, want, "result")
            assert_content(pool, content(twin))
            for tensor, other in zip((k, v), twins, strict=True):
                assert_same_bytes(tensor, other, "device buffer")


# Export.


@pytest.fixture(scope="module")
def arguments():
    with make_pool(device="cuda", handle=NUMBER) as pool:
        return export_arguments(pool, "cuda")


def test_an_exported_program_leaves_the_same_bytes(arguments):
    program = exported(FUNCTIONS, arguments, "cuda")
    check_program(program.module(), FUNCTIONS, "cuda")
    check_program(program.run_decompositions().module(), FUNCTIONS, "cuda")


needs_toolkit = pytest.mark.skipif(
    CUDA_HOME is None or shutil.which("g++") is None,
    reason="AOTInductor for a GPU needs g++ and the CUDA toolkit's headers",
)


PLAIN_PACKAGE = """
import sys, torch
class Double(torch.nn.Module):
    def forward(self, x):
        return x * 2
program = torch.export.export(Double(), (torch.ones(4, device="cuda"),))
path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
assert torch._inductor.aoti_load_package(path)(torch.ones(4, device="cuda")).tolist() == [2.0] * 4
"""


@pytest.fixture(scope="module")
def loads_packages(tmp_path_factory):
    """Skips where torch cannot load a package of its own ops: that ends the process."""
    path = tmp_path_factory.mktemp("plain") / "plain.pt2"
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PACKAGE, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"a package of torch's ops alone ends with {done.returncode}: {last}")


@needs_toolkit
@pytest.mark.usefixtures("loads_packages")
def test_a_package_leaves_the_same_bytes(arguments, tmp_path):
    path = torch._inductor.aoti_compile_and_package(
        exported(PACKAGED, arguments, "cuda"), package_path=str(tmp_path / "calls.pt2")
    )
    check_program(torch._inductor.aoti_load_package(path), PACKAGED, "cuda")


# Memory.


@pytest.fixture(scope="module")
def pool():
    with big_pool(pool_bytes(), "cuda", BIG) as pool:
        yield pool


@pytest.mark.parametrize(
    "form",
    [
        "eager",
        "aot_eager",
        inductor,
        pytest.param("reduce-overhead", marks=needs_inductor),
        "export",
        "decomposed",
        pytest.param("package", marks=needs_toolkit),
    ],
)
def test_a_page_locked_pool_behind_a_handle_is_never_copied(pool, form, tmp_path, request):
    if form == "package":
        request.getfixturevalue("loads_packages")
    address = pool.tensors[0].data_ptr()
    check_no_copy(pool, form, tmp_path, "cuda")
    assert pool.tensors[0].data_ptr() == address
    assert pool.tensors[0].is_pinned()
