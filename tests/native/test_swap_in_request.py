"""The request of swap_in, with tensors on devices that this machine need not have."""

import numpy as np
import pytest

BATCH, TOP_K, HOT, REQUESTS, MAX_LEN = 3, 4, 8, 5, 30


def tensor(kvio, *sizes, dtype="int32", at, strides=None, **device):
    if strides is None:
        strides = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
    return kvio.Tensor(at, sizes, strides, dtype=dtype, **device)


def arguments(kvio, **device):
    """A good call; every tensor has 64 KiB of addresses of its own."""
    shapes = {
        "top_k_tokens": ((BATCH, TOP_K), "int32"),
        "device_buffer_tokens": ((REQUESTS, HOT + 2), "int32"),
        "device_buffer_locs": ((REQUESTS, HOT + 1), "int32"),
        "host_cache_locs": ((REQUESTS, MAX_LEN), "int64"),
        "lru_slots": ((REQUESTS, HOT), "int16"),
        "top_k_device_locs": ((BATCH, TOP_K), "int32"),
        "req_pool_indices": ((BATCH,), "int64"),
        "seq_lens": ((BATCH,), "int32"),
        "num_real_reqs": ((1,), "int32"),
        "device_locs": ((REQUESTS, MAX_LEN), "int32"),
        "miss_src": ((BATCH, TOP_K), "int64"),
        "miss_dst": ((BATCH, TOP_K), "int32"),
        "miss_count": ((BATCH,), "int32"),
    }
    state = {
        name: tensor(kvio, *shape, dtype=dtype, at=(i + 1) << 16, **device)
        for i, (name, (shape, dtype)) in enumerate(shapes.items())
    }
    return {
        "state": state,
        "host_cache": [tensor(kvio, 100, 1, 16, dtype="uint8", at=at << 20) for at in (2, 3)],
        "device_buffer": [
            tensor(kvio, 60, 1, 16, dtype="uint8", at=at << 20, **device) for at in (4, 5)
        ],
        "hot_buffer_size": HOT,
    }


def refusal(kvio, call):
    with pytest.raises(RuntimeError) as error:
        kvio.make_swap_in_request(**call)
    return str(error.value)


def test_a_gpu_request_holds_the_facts_that_a_kernel_needs(kvio):
    call = arguments(kvio, device="gpu", device_index=1)
    request = kvio.make_swap_in_request(**call, num_blocks=7)
    assert (request.batch, request.top_k, request.hot_buffer_size) == (BATCH, TOP_K, HOT)
    assert (request.pool_slots, request.max_len) == (REQUESTS, MAX_LEN)
    pools = request.pools
    assert (pools.device, pools.host_device, pools.gpu_index) == ("gpu", "cpu", 1)
    assert (pools.host_slots, pools.device_slots, pools.num_blocks) == (100, 60, 7)
    assert pools.moves_bytes
    (group,) = pools.groups
    assert group.dst_base == [4 << 20, 5 << 20]
    assert group.src_base == [2 << 20, 3 << 20]
    assert request.has_plan
    assert request.has_device_locs


def test_every_row_stride_is_the_tensors_own(kvio):
    call = arguments(kvio)
    names = (
        "top_k_tokens",
        "device_buffer_tokens",
        "device_buffer_locs",
        "host_cache_locs",
        "lru_slots",
        "top_k_device_locs",
        "device_locs",
        "miss_src",
        "miss_dst",
    )
    shapes = {"top": TOP_K, "miss": TOP_K, "lru": HOT, "host": MAX_LEN}
    for i, name in enumerate(names):
        columns = shapes.get(name.split("_")[0], MAX_LEN if name == "device_locs" else HOT + 1)
        rows = BATCH if columns == TOP_K else REQUESTS
        dtype = {"lru_slots": "int16", "miss_src": "int64"}.get(name, "int32")
        call["state"][name] = tensor(
            kvio, rows, columns, dtype=dtype, at=(i + 100) << 16, strides=[50 + i, 1]
        )
    assert kvio.make_swap_in_request(**call).row_strides == [50 + i for i in range(len(names))]


def test_what_is_left_out_is_absent(kvio):
    call = arguments(kvio)
    for name in ("num_real_reqs", "device_locs", "miss_src", "miss_dst", "miss_count"):
        del call["state"][name]
    request = kvio.make_swap_in_request(**call, skip_io=True)
    assert not request.has_plan
    assert not request.has_device_locs
    assert not request.pools.moves_bytes


def test_a_host_cache_may_lie_on_the_gpu_of_the_rest(kvio):
    call = arguments(kvio, device="gpu", device_index=1)
    for index, fits in ((1, True), (0, False)):
        call["host_cache"] = [
            tensor(kvio, 9, 1, 16, dtype="uint8", at=2 << 20, device="gpu", device_index=index)
        ]
        call["device_buffer"] = call["device_buffer"][:1]
        if fits:
            assert kvio.make_swap_in_request(**call).pools.host_device == "gpu"
        else:
            assert "host_cache[0] is on cuda:0; it needs the CPU" in refusal(kvio, call)


@pytest.mark.parametrize(
    "name", ["lru_slots", "seq_lens", "num_real_reqs", "device_locs", "miss_dst"]
)
def test_state_on_another_device_is_refused(kvio, name):
    call = arguments(kvio, device="gpu", device_index=0)
    call["state"][name] = arguments(kvio)["state"][name]
    text = refusal(kvio, call)
    assert f"kvio::swap_in: {name} is on cpu but top_k_tokens is on cuda:0; it needs" in text


def test_a_device_buffer_on_another_device_is_refused(kvio):
    call = arguments(kvio, device="gpu", device_index=0)
    call["device_buffer"] = arguments(kvio)["device_buffer"]
    assert "device_buffer[0] is on cpu but top_k_tokens is on cuda:0" in refusal(kvio, call)


def test_a_device_of_another_kind_is_refused(kvio):
    call = arguments(kvio, device="other")
    assert "top_k_tokens is on a device of another kind; it needs" in refusal(kvio, call)


def test_addresses_of_different_devices_never_overlap(kvio):
    """A host address says nothing about a GPU address of equal value."""
    call = arguments(kvio, device="gpu")
    call["host_cache"] = [tensor(kvio, 100, 1, 16, dtype="uint8", at=at << 20) for at in (4, 5)]
    kvio.make_swap_in_request(**call)


@pytest.mark.parametrize(
    ("first", "fits"), [(0, False), (7, False), (10, True), (23, True), (24, False)]
)
def test_columns_of_one_wide_tensor_overlap_only_where_they_do(kvio, first, fits):
    """Residents in columns 0 to 9 of 32; locations (9 columns) from `first` on, a row lower."""
    call = arguments(kvio)
    wide = 1 << 26
    call["state"]["device_buffer_tokens"] = tensor(
        kvio, REQUESTS, HOT + 2, at=wide, strides=[32, 1]
    )
    call["state"]["device_buffer_locs"] = tensor(
        kvio, REQUESTS, HOT + 1, at=wide + 4 * (32 + first), strides=[32, 1]
    )
    if fits:
        kvio.make_swap_in_request(**call)
    else:
        text = refusal(kvio, call)
        assert "device_buffer_locs shares memory with device_buffer_tokens; it needs" in text
