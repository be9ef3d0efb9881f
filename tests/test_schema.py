"""Schemas are the public contract: their text, their mutated arguments, their fake kernels."""

import inspect

import pytest
import torch

import cases
import sgl_kvio

TRANSFER_OPTIONS = (
    'int row_ndim=2, int page_size=1, str index_unit="token", str backend="auto", '
    'int num_blocks=0, str prefer="throughput"'
)
STAGED_OPTIONS = 'int page_size, int row_ndim=2, str index_unit="token", int num_blocks=0'
POOL_OPTIONS = (
    'int first_buffer=0, int page_size=1, str index_unit="token", str backend="auto", '
    'int num_blocks=0, str prefer="throughput"'
)
SWAP_IN_OPTIONS = "bool skip_io=False, int row_ndim=2, int num_blocks=0"
LOAD_OPTIONS = (
    'int num_layers=0, int row_ndim=2, int page_size=1, str index_unit="token", int num_blocks=0'
)
SCHEMAS = {
    "transfer": "(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, "
    f"{TRANSFER_OPTIONS}) -> ()",
    "transfer_staged": "(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, "
    f"Tensor(b!) staging, *, {STAGED_OPTIONS}) -> ()",
    "explain_staged": "(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, "
    f"Tensor staging, *, {STAGED_OPTIONS}) -> str",
    "register_pool": "(Tensor[] buffers, *, int row_ndim=2, int handle=0) -> int",
    "unregister_pool": "(int handle) -> ()",
    "write_back": "(int handle, Tensor(a!) token, Tensor[] src, Tensor dst_indices, "
    f"Tensor src_indices, *, {POOL_OPTIONS}) -> ()",
    "restore": "(int handle, Tensor(a!) token, Tensor(b!)[] dst, Tensor dst_indices, "
    f"Tensor src_indices, *, {POOL_OPTIONS}) -> ()",
    "memcpy_batch": "(Tensor(a!)[] dst, Tensor[] src, int[] dst_offsets, int[] src_offsets, "
    "int[] nbytes) -> ()",
    "swap_in": "(Tensor top_k_tokens, Tensor(a!) device_buffer_tokens, Tensor device_buffer_locs, "
    "Tensor host_cache_locs, Tensor(b!) lru_slots, Tensor[] host_cache, "
    "Tensor(c!)[] device_buffer, Tensor(d!) top_k_device_locs, Tensor req_pool_indices, "
    "Tensor seq_lens, *, int hot_buffer_size, Tensor? num_real_reqs=None, "
    "Tensor? device_locs=None, Tensor(e!)? miss_src=None, Tensor(f!)? miss_dst=None, "
    f"Tensor(g!)? miss_count=None, {SWAP_IN_OPTIONS}) -> ()",
    "copy_planned": "(Tensor[] host_cache, Tensor(a!)[] device_buffer, Tensor miss_src, "
    f"Tensor miss_dst, Tensor miss_count, Tensor num_real_reqs, *, {SWAP_IN_OPTIONS}) -> ()",
    "load_layers": "(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, "
    f"Tensor(b!) flags, Tensor epoch, *, {LOAD_OPTIONS}) -> ()",
    "load_layers.int": "(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, "
    f"Tensor(b!) flags, SymInt epoch, *, {LOAD_OPTIONS}) -> ()",
    "wait_layer": "(Tensor flags, int layer, Tensor epoch, Tensor(a!)[] after, *, "
    "int timeout_ms=60000) -> ()",
    "wait_layer.int": "(Tensor flags, int layer, SymInt epoch, Tensor(a!)[] after, *, "
    "int timeout_ms=60000) -> ()",
    "host_register": "(Tensor(a!) tensor, int chunk_bytes=0, int device_index=-1) -> ()",
    "host_unregister": "(Tensor(a!) tensor, int device_index=-1) -> ()",
    "device_pointer": "(Tensor tensor, int device_index=-1) -> int",
    "create_stream": "(int device_index=-1) -> int",
    "take_fault": "(int device_index=-1) -> int[]",
    "explain": "(Tensor[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, "
    f"{TRANSFER_OPTIONS}) -> str",
    "set_rates": "(float[] rates) -> ()",
    "get_rates": "() -> float[]",
    "copy_round": "(int row_bytes, int lanes) -> int[]",
    "build_info": "() -> str",
}
MUTATED = {
    "transfer": ["dst"],
    "transfer_staged": ["dst", "staging"],
    "write_back": ["token"],
    "restore": ["token", "dst"],
    "memcpy_batch": ["dst"],
    "swap_in": [
        "device_buffer_tokens",
        "lru_slots",
        "device_buffer",
        "top_k_device_locs",
        "miss_src",
        "miss_dst",
        "miss_count",
    ],
    "copy_planned": ["device_buffer"],
    "load_layers": ["dst", "flags"],
    "load_layers.int": ["dst", "flags"],
    "wait_layer": ["after"],
    "wait_layer.int": ["after"],
    "host_register": ["tensor"],
    "host_unregister": ["tensor"],
}


def schema_of(op):
    name, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.kvio, name), overload or "default")._schema


@pytest.mark.parametrize("op", SCHEMAS)
def test_schema_is_the_published_one(op):
    want = torch._C.parse_schema(f"kvio::{op}{SCHEMAS[op]}")
    assert str(schema_of(op)) == str(want)


@pytest.mark.parametrize("op", SCHEMAS)
def test_exactly_the_written_arguments_are_marked(op):
    written = [
        argument.name
        for argument in schema_of(op).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert written == MUTATED.get(op, [])


def test_no_op_is_without_a_published_schema():
    registered = {
        name.removeprefix("kvio::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("kvio::")
    }
    assert registered == set(SCHEMAS)


def fake_kernel(op):
    """The function that was given to torch.library.register_fake, or None."""
    entry = torch._library.simple_registry.singleton.find(f"kvio::{op}")
    if entry.fake_impl.kernel is None:
        return None
    registered = entry.fake_impl.kernel.func
    # torch wraps it in a check that hides the signature.
    return inspect.getclosurevars(registered).nonlocals.get("func", registered)


@pytest.mark.parametrize("op", SCHEMAS)
def test_fake_kernel_takes_what_the_schema_says(op):
    kernel = fake_kernel(op)
    assert kernel is not None, f"kvio::{op} has no fake kernel"
    parameters = list(inspect.signature(kernel).parameters.values())
    arguments = schema_of(op).arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        if argument.has_default_value():
            assert parameter.default in (argument.default_value, parameter.empty), argument.name


def test_the_python_functions_take_the_schemas_arguments():
    for op in (
        "transfer",
        "transfer_staged",
        "explain_staged",
        "memcpy_batch",
        "explain",
        "swap_in",
        "copy_planned",
        "register_pool",
        "unregister_pool",
        "write_back",
        "restore",
    ):
        parameters = inspect.signature(getattr(sgl_kvio, op)).parameters
        arguments = {a.name: a for a in schema_of(op).arguments}
        assert list(parameters) == list(arguments), op
        for name, argument in arguments.items():
            if argument.has_default_value():
                assert parameters[name].default == argument.default_value, (op, name)


def transfer_samples(device="cpu"):
    """Arguments of kvio::transfer: each form that the schema allows."""

    def pool(*shape, dtype=torch.float32, seed=0):
        return cases.contiguous_pool(shape, dtype, seed).nan_to_num(0).to(device)

    def index(*entries, dtype=torch.int64):
        return torch.tensor(entries, dtype=dtype, device=device)

    def i32(*entries):
        return index(*entries, dtype=torch.int32)

    yield ([pool(8, 2, 4)], [pool(8, 2, 4, seed=1)], index(1, 5), index(0, 7)), {}
    yield (
        (
            [pool(8, 2, 4), pool(8, 2, 2)],
            [pool(8, 2, 4, seed=1), pool(8, 2, 2, seed=1)],
            i32(1, 5),
            i32(0, 7),
        ),
        {"page_size": 4},
    )
    yield (
        (
            [pool(4, 2, 6)],
            [pool(2, 4, 6, seed=1)],
            index(1, 0),
            index(0, 3),
        ),
        {
            "row_ndim": 1,
            "page_size": 2,
            "index_unit": "page",
            "num_blocks": 1,
            "prefer": "quiet",
        },
    )
    yield ([pool(8, 2, 8)[:, :, :4]], [pool(8, 2, 4, seed=1)], index(1), index(0)), {}
    yield ([], [], index(), index()), {}
    yield ([pool(8, 2, 4)], [pool(8, 2, 4, seed=1)], index(), index()), {}


@pytest.mark.parametrize("sample", list(transfer_samples()), ids=lambda s: str(s[1]) or "defaults")
def test_opcheck_passes_on_transfer(sample):
    arguments, options = sample
    torch.library.opcheck(torch.ops.kvio.transfer.default, arguments, options)


def test_opcheck_passes_on_memcpy_batch():
    def block(seed):
        return cases.contiguous_pool((8, 16), torch.int32, seed)

    op = torch.ops.kvio.memcpy_batch.default
    torch.library.opcheck(op, ([block(0)], [block(1)], [0, 64], [128, 3], [16, 5]))
    torch.library.opcheck(op, ([block(0), block(2)], [block(1)], [0, 64], [128, 3], [16, 5]))
    torch.library.opcheck(op, ([], [], [], [], []))


def check_ops_on_a_handle(device="cpu"):
    host = [cases.contiguous_pool((8, 2, 4), torch.int32, seed) for seed in (0, 1)]
    rows = [cases.contiguous_pool((8, 2, 4), torch.int32, seed).to(device) for seed in (2, 3)]
    if device != "cpu":
        host = [buffer.pin_memory() for buffer in host]
    at, frm = (torch.tensor(entries, device=device) for entries in ([3, 1], [0, 7]))
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    handle = sgl_kvio.register_pool(host)
    pages = {"page_size": 2, "index_unit": "page", "num_blocks": 1, "prefer": "quiet"}
    for op in (torch.ops.kvio.write_back.default, torch.ops.kvio.restore.default):
        torch.library.opcheck(op, (handle, token, rows, at, frm))
        torch.library.opcheck(op, (handle, token, rows[:1], at, frm), {"first_buffer": 1})
        torch.library.opcheck(op, (handle, token, rows, at // 2, frm // 2), pages)
        torch.library.opcheck(op, (handle, token, [], at, frm))
    if device != "cpu":
        torch.cuda.synchronize()
    sgl_kvio.unregister_pool(handle)


def test_opcheck_passes_on_write_back_and_restore():
    check_ops_on_a_handle()


def test_opcheck_passes_on_the_registry():
    checks = ["test_schema", "test_autograd_registration"]
    buffers = [torch.zeros(8, 2, 4)]
    torch.library.opcheck(torch.ops.kvio.register_pool.default, (buffers,), test_utils=checks)
    # Each check runs the op, which a handle lives through once.
    for check in checks:
        handle = sgl_kvio.register_pool(buffers)
        torch.library.opcheck(torch.ops.kvio.unregister_pool.default, (handle,), test_utils=check)


@pytest.mark.parametrize("unit", ["page", "token"])
def test_opcheck_passes_on_transfer_staged(unit):
    """Alone, contiguous pools: an earlier op of the same graph may be given clones of its views."""
    dst, src = (cases.contiguous_pool((8, 1, 16), torch.int32, seed) for seed in (0, 1))
    at = torch.tensor([1, 0] if unit == "page" else [4, 5, 6, 7, 1, 0])
    staging = torch.zeros(2048, dtype=torch.uint8)
    options = {"page_size": 4, "index_unit": unit}
    op = torch.ops.kvio.transfer_staged.default
    torch.library.opcheck(op, ([dst], [src], at, at.flip(0), staging), options)
    torch.library.opcheck(op, ([], [], at[:0], at[:0], staging), options)


# opcheck's other checks run an op on clones of its arguments, and these ops need a GPU and memory
# that outlives them: a clone would be freed while it is page-locked. tests/gpu calls them itself.
@pytest.mark.parametrize("op", ["host_register", "host_unregister", "device_pointer"])
def test_host_memory_ops_need_no_autograd(op):
    block = torch.zeros(4096, dtype=torch.uint8)
    overload = getattr(torch.ops.kvio, op).default
    torch.library.opcheck(overload, (block,), test_utils=["test_autograd_registration"])


@pytest.mark.parametrize("op", ["host_register", "host_unregister"])
def test_page_locking_can_be_traced_without_running(op):
    with torch._subclasses.FakeTensorMode() as mode:
        block = mode.from_tensor(torch.zeros(4096, dtype=torch.uint8))
        assert getattr(torch.ops.kvio, op)(block) is None


def test_what_only_the_run_knows_is_never_baked_into_a_graph():
    with torch._subclasses.FakeTensorMode() as mode:
        block = mode.from_tensor(torch.zeros(4096, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match=r"kvio::device_pointer: .*outside"):
            torch.ops.kvio.device_pointer(block)
        with pytest.raises(RuntimeError, match=r"kvio::create_stream: .*outside"):
            torch.ops.kvio.create_stream()
        with pytest.raises(RuntimeError, match=r"kvio::take_fault: .*outside"):
            torch.ops.kvio.take_fault()
        with pytest.raises(RuntimeError, match=r"kvio::set_rates: .*outside"):
            torch.ops.kvio.set_rates([])
        with pytest.raises(RuntimeError, match=r"kvio::get_rates: .*outside"):
            torch.ops.kvio.get_rates()
        with pytest.raises(RuntimeError, match=r"kvio::copy_round: .*outside"):
            torch.ops.kvio.copy_round(576, 4)
        with pytest.raises(RuntimeError, match=r"kvio::register_pool: .*outside"):
            torch.ops.kvio.register_pool([block.view(2, 1, -1)])
        with pytest.raises(RuntimeError, match=r"kvio::unregister_pool: .*outside"):
            torch.ops.kvio.unregister_pool(5)


def test_opcheck_passes_on_queries():
    checks = ["test_schema", "test_autograd_registration"]
    torch.library.opcheck(torch.ops.kvio.take_fault.default, (), test_utils=checks)
    torch.library.opcheck(torch.ops.kvio.get_rates.default, (), test_utils=checks)
    torch.library.opcheck(torch.ops.kvio.set_rates.default, ([],), test_utils=checks)
    torch.library.opcheck(torch.ops.kvio.copy_round.default, (576, 4), test_utils=checks)
    # opcheck's comparison of compiled and eager results knows no strings.
    checks.append("test_faketensor")
    torch.library.opcheck(torch.ops.kvio.build_info.default, (), test_utils=checks)
    arguments, options = next(transfer_samples())
    torch.library.opcheck(torch.ops.kvio.explain.default, arguments, options, test_utils=checks)


@pytest.mark.parametrize("name", ["transfer", "explain", "write_back", "restore"])
def test_the_functions_have_the_defaults_of_the_ops(name):
    """They leave out what equals a default, so both must mean the same one."""
    arguments = getattr(torch.ops.kvio, name).default._schema.arguments
    of_op = {a.name: a.default_value for a in arguments if a.has_default_value()}
    parameters = inspect.signature(getattr(sgl_kvio, name)).parameters.values()
    empty = inspect.Parameter.empty
    of_function = {p.name: p.default for p in parameters if p.default is not empty}
    assert of_function == of_op


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("row_ndim", -1),
        ("page_size", 0),
        ("index_unit", "?"),
        ("backend", "?"),
        ("num_blocks", -1),
        ("prefer", "?"),
    ],
)
@pytest.mark.parametrize("name", ["transfer", "explain"])
def test_the_functions_hand_every_option_on(name, option, value):
    rows, indices = torch.zeros(4, 1, 2), torch.arange(2)
    with pytest.raises(RuntimeError, match=option):
        getattr(sgl_kvio, name)(rows, rows.clone(), indices, indices, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("first_buffer", 1),
        ("page_size", 0),
        ("index_unit", "?"),
        ("backend", "?"),
        ("num_blocks", -1),
        ("prefer", "?"),
    ],
)
@pytest.mark.parametrize("name", ["write_back", "restore"])
def test_the_functions_on_a_handle_hand_every_option_on(name, option, value):
    rows, indices = torch.zeros(4, 1, 2), torch.arange(2)
    handle = sgl_kvio.register_pool(rows.clone())
    with pytest.raises(RuntimeError, match=option):
        getattr(sgl_kvio, name)(handle, torch.zeros(1), rows, indices, indices, **{option: value})
    sgl_kvio.unregister_pool(handle)
