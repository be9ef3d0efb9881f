"""Requests: what is grouped, what is refused and how the refusal reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import DTYPES, Buffer, Transfer, index_array, layer_elements, transfers


def tensor(kvio, *sizes, strides=None, at=1 << 20, **facts):
    if strides is None:
        strides = [int(np.prod([max(n, 1) for n in sizes[i + 1 :]])) for i in range(len(sizes))]
    return kvio.Tensor(at, sizes, strides, **{"dtype": "bfloat16", **facts})


def indices(kvio, values=(0, 1), *, device="cpu", device_index=0, **options):
    return kvio.Tensor.of_buffer(
        index_array(list(values), **options), device=device, device_index=device_index
    )


def call(kvio, **changes):
    """A request between pools of 10 slots of 2 x 4 elements, with `changes` to its arguments."""
    pools = [tensor(kvio, 10, 2, 4, at=i << 20) for i in (1, 2, 3, 4)]
    arguments = {
        "dst": pools[:2],
        "src": pools[2:],
        "dst_indices": indices(kvio),
        "src_indices": indices(kvio),
    }
    return kvio.make_transfer_request(**{**arguments, **changes})


def refusal(kvio, **changes):
    with pytest.raises(RuntimeError) as error:
        call(kvio, **changes)
    return str(error.value)


def test_a_good_request_holds_what_was_asked(kvio):
    request = call(kvio, page_size=5, index_unit="page", backend="cpu", num_blocks=3)
    assert (request.num_indices, request.slots_per_index, request.num_buffers) == (2, 5, 2)
    assert (request.backend, request.num_blocks) == ("cpu", 3)
    assert request.payload_bytes == 2 * 2 * 5 * 16
    assert (request.dst_device, request.src_device, request.index_device) == ("cpu",) * 3
    assert request.gpu_index == -1
    assert not request.empty


def test_page_size_means_nothing_to_token_entries(kvio):
    assert call(kvio, page_size=5).slots_per_index == 1


def test_buffers_of_one_geometry_share_a_group_in_the_callers_order(kvio):
    k = [tensor(kvio, 10, 2, 4, at=i << 20) for i in (1, 2, 3)]
    v = [tensor(kvio, 10, 2, 3, at=i << 20) for i in (4, 5, 6)]
    order = [k[0], v[0], v[1], k[1], k[2], v[2]]
    groups = call(kvio, dst=order, src=order).groups
    assert [g.position for g in groups] == [[0, 3, 4], [1, 2, 5]]
    assert [g.dst_base for g in groups] == [
        [1 << 20, 2 << 20, 3 << 20],
        [4 << 20, 5 << 20, 6 << 20],
    ]
    assert [g.dst.row_bytes for g in groups] == [16, 12]
    assert [g.src_extent for g in groups] == [160, 120]


@given(transfers())
def test_every_buffer_is_in_one_group_with_the_view_of_its_own_tensor(kvio, case):
    request = case.request(kvio)
    assert sorted(p for g in request.groups for p in g.position) == list(range(len(case.dst)))
    for group in request.groups:
        for position, base in zip(group.position, group.dst_base, strict=True):
            rows = case.dst[position].row_bytes()
            assert base == rows[0, 0]
            assert base + group.dst_extent == rows.max() + 1
            assert [base + group.dst.offset(s) for s in range(len(rows))] == rows[:, 0].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"dst": [], "src": []},
        {"dst_indices": (), "src_indices": ()},
        {"dst": [(10, 0, 4)], "src": [(10, 0, 4)]},
        {"dst": [(10, 2, 0)], "src": [(10, 2, 0)]},
        {"dst": [(0, 2, 4)], "src": [(0, 2, 4)], "dst_indices": (), "src_indices": ()},
    ],
)
def test_requests_of_no_bytes_are_good_and_empty(kvio, changes):
    made = {
        name: [tensor(kvio, *sizes) for sizes in value]
        if name in ("dst", "src")
        else indices(kvio, value)
        for name, value in changes.items()
    }
    assert call(kvio, **made).empty


REFUSALS = {
    "row_ndim below 0": ({"row_ndim": -1}, "row_ndim is -1", "0 to 62"),
    "page_size below 1": ({"page_size": 0}, "page_size is 0", "1 or more"),
    "unknown index unit": ({"index_unit": "row"}, "index_unit is 'row'", "'token' or 'page'"),
    "num_blocks below 0": ({"num_blocks": -1}, "num_blocks is -1", "0 (chosen for you) to 65535"),
    "num_blocks too many": ({"num_blocks": 65536}, "num_blocks is 65536", "to 65535"),
    "lists of two lengths": (
        {"src": lambda k: [tensor(k, 10, 2, 4)]},
        "src has 1 tensors but dst has 2",
        "lists of equal length",
    ),
    "index dtype": (
        {"dst_indices": lambda k: k.Tensor.of_buffer(np.zeros(2))},
        "dst_indices has dtype float64",
        "int32 or int64",
    ),
    "narrow index dtype": (
        {"src_indices": lambda k: k.Tensor.of_buffer(np.zeros(2, np.int16))},
        "src_indices has dtype int16",
        "int32 or int64",
    ),
    "index dims": (
        {"src_indices": lambda k: k.Tensor.of_buffer(np.zeros((2, 3), np.int64))},
        "src_indices has shape [2, 3]",
        "one dimension",
    ),
    "index on another kind of device": (
        {"dst_indices": lambda k: indices(k, device="other")},
        "dst_indices is on another kind of device",
        "the CPU or a GPU",
    ),
    "two index dtypes": (
        {"src_indices": lambda k: indices(k, dtype="int32")},
        "src_indices has dtype int32 but dst_indices has int64",
        "the same dtype",
    ),
    "two index lengths": (
        {"src_indices": lambda k: indices(k, [0, 1, 2])},
        "src_indices has 3 entries but dst_indices has 2",
        "equal lengths",
    ),
    "indices on two devices": (
        {"src_indices": lambda k: indices(k, device="gpu")},
        "src_indices is on cuda:0 but dst_indices is on cpu",
        "both on one device",
    ),
    "buffers on two devices": (
        {"dst": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 2, 4, device="gpu")]},
        "dst[1] is on cuda:0 but dst[0] is on cpu",
        "every tensor of dst on one device",
    ),
    "buffer on another kind of device": (
        {"src": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 2, 4, device="other")]},
        "src[1] is on a device of another kind",
        "a CPU or a GPU tensor",
    ),
    "two GPUs": (
        {
            "dst": lambda k: [tensor(k, 10, 2, 4, device="gpu", device_index=0)] * 2,
            "src": lambda k: [tensor(k, 10, 2, 4, device="gpu", device_index=1)] * 2,
        },
        "src[0] is on cuda:1 but another argument is on cuda:0",
        "one GPU for dst, src and indices",
    ),
    "indices on another GPU than the pool": (
        {
            "dst": lambda k: [tensor(k, 10, 2, 4, device="gpu", device_index=2)] * 2,
            "dst_indices": lambda k: indices(k, device="gpu", device_index=1),
            "src_indices": lambda k: indices(k, device="gpu", device_index=1),
        },
        "dst[0] is on cuda:2 but another argument is on cuda:1",
        "one GPU",
    ),
    "two dtypes in a pair": (
        {"src": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 2, 4, dtype="float16")]},
        "src[1] has dtype float16 but dst[1] has bfloat16",
        "the same dtype",
    ),
    "two row shapes in a pair": (
        {"src": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 4, 2)]},
        "src[1] has rows of shape [4, 2] but dst[1] has [2, 4]",
        "the same row shape (row_ndim=2)",
    ),
    "a shape without a slot dim": (
        {"dst": lambda k: [tensor(k, 2, 4)] * 2},
        "dst[0] has shape [2, 4] with row_ndim=2",
        "[slots, *row] (3 dims)",
    ),
    "rows of no equal pieces": (
        {"src": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 2, 4, strides=[8, 1, 2])]},
        "src[1] has row dims of shape [2, 4] and strides [1, 2]",
        "rows that are contiguous, or equal pieces",
    ),
    "an expanded destination": (
        {"dst": lambda k: [tensor(k, 10, 2, 4), tensor(k, 10, 2, 4, strides=[8, 0, 1])]},
        "dst[1] has stride 0 in dimension 1 of size 2",
        "memory of its own for every element",
    ),
    "rows cut in two ways": (
        {
            "dst": lambda k: [tensor(k, 10, 2, 4, strides=[16, 8, 1])] * 2,
            "src": lambda k: [tensor(k, 10, 2, 4, strides=[16, 8, 2])] * 2,
        },
        "dst[0] has rows in 2 pieces of 8 bytes and src[0] in 8 pieces of 2 bytes",
        "rows cut alike on both sides, or contiguous on one",
    ),
    "entries for a pool without slots": (
        {"dst": lambda k: [tensor(k, 0, 2, 4)] * 2},
        "dst[0] has 0 token slots",
        "at least that many when there are indices",
    ),
    "page entries for less than a page": (
        {"page_size": 11, "index_unit": "page"},
        "dst[0] has 10 token slots, less than one index names (11)",
        "at least that many",
    ),
    "more slots in pages than kernels count": (
        {
            "dst": lambda k: [tensor(k, 1 << 16, 1 << 16, 2, 4, strides=[1 << 20, 8, 4, 1])] * 2,
        },
        "dst[0] has 4294967296 token slots in pages apart from each other",
        "at most 2147483648",
    ),
    "more pieces in a page than kernels count": (
        {
            "dst": lambda k: [tensor(k, 1 << 31, 2, 4)] * 2,
            "src": lambda k: [tensor(k, 1 << 31, 2, 4, strides=[16, 8, 1])] * 2,
            "page_size": 1 << 30,
            "index_unit": "page",
        },
        "page_size is 1073741824 with rows of 2 pieces",
        "at most 1073741824 pieces a page",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_argument_what_it_got_and_what_it_needs(kvio, name):
    changes, got, needs = REFUSALS[name]
    made = {key: value(kvio) if callable(value) else value for key, value in changes.items()}
    text = refusal(kvio, **made)
    assert text.startswith(f"kvio::transfer: {got}")
    assert "; it needs " in text
    assert needs in text.split("; it needs ", 1)[1]


def test_an_expanded_source_is_read_many_times(kvio):
    one = tensor(kvio, 10, 2, 4, strides=[0, 4, 1])
    assert call(kvio, src=[one, one]).groups[0].src.offset(9) == 0


def test_a_refusal_of_a_later_buffer_names_its_place(kvio):
    good, bad = tensor(kvio, 10, 2, 4), tensor(kvio, 10, 2, 4, strides=[8, 1, 2])
    assert refusal(kvio, dst=[good] * 6, src=[good] * 5 + [bad]).startswith(
        "kvio::transfer: src[5] has row dims"
    )


@given(
    st.lists(st.integers(-2, 12), max_size=8),
    st.lists(st.integers(-2, 12), max_size=8),
    st.sampled_from(("int32", "int64")),
    st.integers(1, 3),
)
def test_entries_are_good_only_inside_both_pools(kvio, dst, src, dtype, step):
    n = min(len(dst), len(src))
    dst, src = dst[:n], src[:n]
    request = call(
        kvio,
        dst_indices=indices(kvio, dst, dtype=dtype, step=step),
        src_indices=indices(kvio, src, dtype=dtype, step=step),
    )
    outside = [
        (side, i, value)
        for side, values in (("dst", dst), ("src", src))
        for i, value in enumerate(values)
        if not 0 <= value < 10
    ]
    if not outside:
        kvio.check_cpu_indices(request)
        return
    side, i, value = outside[0]
    with pytest.raises(RuntimeError) as error:
        kvio.check_cpu_indices(request)
    assert str(error.value) == (
        f"kvio::transfer: {side}_indices[{i}] is {value}; it needs 0 to 9 "
        f"({side}[0] has 10 token slots)"
    )


@pytest.mark.parametrize("value", [2**31, -(2**63), 2**63 - 1, 2**32])
def test_entries_of_64_bits_are_compared_in_64_bits(kvio, value):
    request = call(kvio, src_indices=indices(kvio, [0, value]))
    with pytest.raises(RuntimeError, match=rf"src_indices\[1\] is {value}; it needs 0 to 9"):
        kvio.check_cpu_indices(request)


def test_the_smallest_pool_of_a_list_bounds_the_entries(kvio):
    large, small = tensor(kvio, 10, 2, 4), tensor(kvio, 7, 2, 4)
    request = call(
        kvio,
        dst=[large, small, large],
        src=[large] * 3,
        dst_indices=indices(kvio, [6, 7]),
        src_indices=indices(kvio, [9, 9]),
    )
    with pytest.raises(
        RuntimeError, match=r"dst_indices\[1\] is 7; it needs 0 to 6 \(dst\[1\] has"
    ):
        kvio.check_cpu_indices(request)


def test_page_entries_count_whole_pages(kvio):
    """10 slots hold 3 pages of 3; the tenth slot is in none."""
    options = {"page_size": 3, "index_unit": "page"}
    kvio.check_cpu_indices(call(kvio, dst_indices=indices(kvio, [2, 0]), **options))
    request = call(kvio, dst_indices=indices(kvio, [2, 3]), **options)
    text = r"dst_indices\[1\] is 3; it needs 0 to 2 \(dst\[0\] has 3 pages of page_size=3\)"
    with pytest.raises(RuntimeError, match=text):
        kvio.check_cpu_indices(request)


def test_a_destination_named_twice_is_found_only_when_looked_for(kvio):
    request = call(
        kvio,
        dst_indices=indices(kvio, [4, 2, 9, 2], step=2),
        src_indices=indices(kvio, [1, 1, 1, 1]),
    )
    kvio.check_cpu_indices(request)
    text = r"dst_indices\[3\] is 2, as dst_indices\[1\] is; it needs every destination once"
    with pytest.raises(RuntimeError, match=text):
        kvio.check_cpu_indices(request, find_duplicates=True)


def test_the_same_buffer_named_twice_is_found_when_looked_for(kvio):
    pool = tensor(kvio, 10, 2, 4)
    request = call(kvio, dst=[pool, pool])
    kvio.check_cpu_indices(request)
    with pytest.raises(RuntimeError, match=r"dst\[1\] is the memory of dst\[0\]"):
        kvio.check_cpu_indices(request, find_duplicates=True)


def test_a_row_that_is_read_and_written_is_found_when_looked_for(kvio):
    pool = tensor(kvio, 10, 2, 4)
    request = call(
        kvio,
        dst=[pool],
        src=[pool],
        dst_indices=indices(kvio, [4, 2]),
        src_indices=indices(kvio, [1, 4]),
    )
    kvio.check_cpu_indices(request)
    text = r"src_indices\[1\] is 4, a row of dst\[0\] that dst_indices\[0\] writes"
    with pytest.raises(RuntimeError, match=text):
        kvio.check_cpu_indices(request, find_duplicates=True)


def test_indices_in_the_memory_that_the_call_writes_are_refused(kvio):
    """A CPU kernel reads an index long after it was checked."""
    rows = np.arange(8, dtype=np.int64)
    pool = kvio.Tensor.of_buffer(rows.reshape(8, 1, 1))
    entries = kvio.Tensor.of_buffer(rows)
    for name in ("dst_indices", "src_indices"):
        other = {"dst_indices", "src_indices"} - {name}
        changes = {name: entries, other.pop(): indices(kvio, list(range(8)))}
        with pytest.raises(RuntimeError, match=rf"{name} shares memory with dst\[0\]"):
            call(kvio, dst=[pool], src=[pool], **changes)


def test_sources_named_twice_are_no_fault(kvio):
    request = call(kvio, dst_indices=indices(kvio, [4, 2]), src_indices=indices(kvio, [1, 1]))
    kvio.check_cpu_indices(request, find_duplicates=True)


@given(transfers())
def test_distinct_entries_inside_their_pools_pass_every_check(kvio, case):
    kvio.check_cpu_indices(case.request(kvio), find_duplicates=True)


@pytest.mark.parametrize("itemsize", DTYPES)
def test_extents_reach_one_past_the_last_byte(kvio, itemsize):
    view = layer_elements("page_head", layers=3, pages=2, page_size=4, heads=2, dim=5, pad=0)[1]
    buffer = Buffer(view, 1 << 20, itemsize)
    rows = buffer.row_bytes()
    assert buffer.tensor(kvio).extent_bytes == rows.max() + 1 - rows.min()


def test_tensors_without_elements_have_no_extent(kvio):
    assert tensor(kvio, 10, 0, 4).extent_bytes == 0


def test_a_gpu_anywhere_is_the_requests_gpu(kvio):
    view = layer_elements("layer_first", layers=1, pages=2, page_size=2, heads=1, dim=4)[0]
    for place in ("dst_device", "src_device", "index_device"):
        case = Transfer(
            [Buffer(view, 1 << 20, 2)],
            [Buffer(view, 1 << 30, 2)],
            index_array([0]),
            index_array([1]),
            **{place: "gpu"},
        )
        assert case.request(kvio).gpu_index == 0
