"""HostKVPool without a GPU: views, page bytes, the allocator, bad arguments, lifetime."""

import contextlib
import copy
import gc
import math
import mmap
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sgl_kvio
from sgl_kvio import HostKVPool, memory, ops
from sgl_kvio import pool as pool_module

KINDS = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
    "k_only": ("layer_first", "page_first", "page_first_direct"),
    "asymmetric": ("layer_first", "page_first", "page_first_direct"),
}
COMBINATIONS = pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, names in KINDS.items() for layout in names]
)
N, P, L = 5, 4, 3


def arguments(kind="mha", **changes):
    values = {
        "num_pages": N,
        "page_size": P,
        "num_layers": L,
        "num_heads": 1 if kind == "mla" else 2,
        "head_dim": 6,
        "v_head_dim": 4 if kind == "asymmetric" else None,
        "dtype": torch.float16,
        "device": "cpu",
    }
    return values | changes


def make(kind="mha", layout="page_first", **changes):
    return HostKVPool(kind, layout, **arguments(kind, **changes))


def page_rows(pool, view, page):
    """The rows of one page in a layer view, whichever form the view has."""
    return view[page] if view.dim() == 4 else view[page * P : (page + 1) * P]


# ------------------------------------------------------------------------------------------ views


@COMBINATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_sizes_are_exact(kind, layout, dtype):
    with make(kind, layout, dtype=dtype) as pool:
        rows = sum(pool.buffer_row_bytes)
        assert rows == sum(
            view.shape[-2] * view.shape[-1] * dtype.itemsize for view in pool.layer(0)
        )
        assert pool.page_nbytes == P * L * rows
        assert pool.nbytes == N * pool.page_nbytes
        assert pool.nbytes == sum(tensor.nbytes for tensor in pool.tensors)
        assert all(tensor.is_contiguous() and tensor.dtype == dtype for tensor in pool.tensors)
        assert not any(tensor.view(torch.uint8).any() for tensor in pool.tensors)
        assert (pool.num_pages, pool.page_size, pool.num_layers, pool.num_slots) == (N, P, L, N * P)
        assert (pool.kind, pool.layout, pool.dtype) == (kind, layout, dtype)


@COMBINATIONS
def test_layer_lists_agree_with_each_other(kind, layout):
    with make(kind, layout) as pool:
        flat = [view.data_ptr() for view in pool.all_layers()]
        assert flat == [v.data_ptr() for i in range(L) for v in pool.layer(i)]
        assert flat == [v.data_ptr() for buffers in pool.layers() for v in buffers]
        assert len(set(flat)) == len(flat) == L * (2 if kind in ("mha", "asymmetric") else 1)
        shape = (N, P) if layout in ("page_first_direct", "page_head") else (N * P,)
        dims = {"mha": (6, 6), "mla": (6,), "k_only": (6,), "asymmetric": (6, 4)}[kind]
        for buffers in pool.layers():
            assert [view.shape[-1] for view in buffers] == list(dims)
            assert all(view.shape[:-2] == shape for view in buffers)


@COMBINATIONS
def test_stacked_views_hold_every_layer_at_its_place(kind, layout):
    with make(kind, layout) as pool:
        stacked = pool.stacked()
        assert len(stacked) == len(pool.layer(0))
        for i, buffers in enumerate(pool.layers()):
            for view, buffer in zip(stacked, buffers, strict=True):
                mine = view[i]
                assert (mine.data_ptr(), mine.shape, mine.stride()) == (
                    buffer.data_ptr(),
                    buffer.shape,
                    buffer.stride(),
                )


def test_changing_a_returned_list_does_not_change_the_pool():
    with make() as pool:
        pool.layers().clear()
        pool.stacked().clear()
        pool.layers()[0].clear()
        pool.layer(0).clear()
        assert len(pool.layers()) == L
        assert len(pool.layer(0)) == len(pool.stacked()) == 2


@COMBINATIONS
def test_rows_moved_with_transfer_leave_every_other_byte_alone(kind, layout):
    with make(kind, layout) as pool, make(kind, "layer_first") as other:
        for tensor in pool.tensors:
            tensor.view(torch.uint8).fill_(0xA5)
        for tensor in other.tensors:
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8))
        slots = pool.token_indices([3, 1], 7)
        sources = torch.tensor([19, 0, 1, 2, 8, 4, 11])
        want = [view.clone() for view in pool.all_layers()]
        for view, src in zip(want, other.all_layers(), strict=True):
            index = (slots,) if view.dim() == 3 else (slots // P, slots % P)
            view[index] = src[sources]
        sgl_kvio.transfer(pool.all_layers(), other.all_layers(), slots, sources)
        for view, right in zip(pool.all_layers(), want, strict=True):
            assert torch.equal(view.view(torch.int16), right.view(torch.int16))


def test_row_bytes_of_an_asymmetric_pool_is_refused_instead_of_half_right():
    with make("asymmetric") as pool:
        assert pool.buffer_row_bytes == (24, 16)
        with pytest.raises(ValueError, match="buffer_row_bytes"):
            _ = pool.row_bytes
    with make("asymmetric", v_head_dim=6) as pool:
        assert pool.row_bytes == 24


# ------------------------------------------------------------------------------------- page bytes


@COMBINATIONS
def test_page_bytes_are_the_page_and_nothing_else(kind, layout):
    with make(kind, layout) as pool:
        for page in range(N):
            for tensor in pool.tensors:
                tensor.view(torch.uint8).zero_()
            ranges = pool.page_bytes(page)
            assert sum(len(part) for part in ranges) == pool.page_nbytes
            for part in ranges:
                part[:] = b"\xff" * len(part)
            for view in pool.all_layers():
                bits = view.view(torch.int16)
                for other in range(N):
                    assert bool((page_rows(pool, bits, other) == -1).all()) == (other == page)
                    assert bool((page_rows(pool, bits, other) == 0).all()) == (other != page)


@COMBINATIONS
def test_page_bytes_are_as_few_as_the_layout_allows(kind, layout):
    buffers = 2 if kind in ("mha", "asymmetric") else 1
    with make(kind, layout) as pool:
        ranges = pool.page_bytes(2)
        assert len(ranges) == buffers * (L if layout == "layer_first" else 1)
        for part in ranges:
            assert part.contiguous
            assert not part.readonly
            assert (part.format, part.itemsize, part.ndim) == ("B", 1, 1)


def test_page_bytes_copied_to_another_page_copy_its_rows():
    with make(layout="page_head") as pool:
        for i, view in enumerate(pool.all_layers()):
            page_rows(pool, view, 1).fill_(i + 1)
        for to, part in zip(pool.page_bytes(4), pool.page_bytes(1), strict=True):
            to[:] = part
        for i, view in enumerate(pool.all_layers()):
            assert bool((page_rows(pool, view, 4) == i + 1).all())
            assert not page_rows(pool, view, 3).any()


@pytest.mark.parametrize("page", [-1, N, 1.0, None, True, 2**70])
def test_page_bytes_of_an_unknown_page_are_refused(page):
    with make() as pool, pytest.raises(ValueError, match=r"page got .*; needs 0\.\.4"):
        pool.page_bytes(page)


def test_page_bytes_of_a_page_that_nobody_holds_are_readable():
    with make() as pool:
        pool.layer(0)[0].fill_(1.0)
        assert any(bytes(pool.page_bytes(0)[0]))
        assert pool.num_free == N


@COMBINATIONS
def test_page_ranges_are_the_addresses_of_page_bytes(kind, layout):
    with make(kind, layout) as pool:
        for page in pool.alloc(N).tolist():
            want = [
                (torch.frombuffer(part, dtype=torch.uint8).data_ptr(), len(part))
                for part in pool.page_bytes(page)
            ]
            ranges = pool.page_ranges(page)
            assert list(ranges) == want
            assert sum(nbytes for _, nbytes in ranges) == pool.page_nbytes
            assert all(type(number) is int for pair in ranges for number in pair)


@COMBINATIONS
def test_page_ranges_of_all_pages_cover_the_pool_once(kind, layout):
    with make(kind, layout) as pool:
        ranges = sorted(r for page in pool.alloc(N).tolist() for r in pool.page_ranges(page))
        assert all(a + n <= b for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False))
        for tensor in pool.tensors:
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert sum(n for address, n in ranges if start <= address < stop) == tensor.nbytes


def test_page_ranges_stay_while_other_pages_come_and_go():
    with make() as pool:
        held, other = pool.alloc(2).tolist()
        before = pool.page_ranges(held)
        pool.free([other])
        pool.alloc(3)
        assert pool.page_ranges(held) == before


def test_page_ranges_of_a_page_that_is_not_allocated_are_refused():
    with make() as pool:
        (page,) = pool.alloc(1).tolist()
        pool.page_ranges(page)
        for idle in (page + 1, N - 1):
            with pytest.raises(ValueError, match=rf"page got {idle}; needs an allocated page"):
                pool.page_ranges(idle)
        pool.free([page])
        with pytest.raises(ValueError, match="page_ranges: page got 0; needs an allocated page"):
            pool.page_ranges(page)


@pytest.mark.parametrize("page", [-1, N, 1.0, None, True, 2**70])
def test_page_ranges_of_an_unknown_page_are_refused(page):
    with make() as pool, pytest.raises(ValueError, match=r"page_ranges: page got .*; needs 0\.\.4"):
        pool.page_ranges(page)


@pytest.mark.parametrize("layer", [-1, L, 0.5, True, 2**70])
def test_an_unknown_layer_is_refused(layer):
    with make() as pool, pytest.raises(ValueError, match=r"index got .*; needs 0\.\.2"):
        pool.layer(layer)


# -------------------------------------------------------------------------------------- allocator


def test_alloc_hands_out_distinct_pages_in_ascending_order():
    with make(num_pages=8) as pool:
        first, second = pool.alloc(3), pool.alloc(2)
        assert first.dtype == torch.int64
        assert first.device.type == "cpu"
        assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4])
        assert pool.num_free == 3


def test_pages_freed_in_disorder_come_back_as_runs():
    with make(num_pages=8) as pool:
        pool.alloc(8)
        pool.free([5, 2])
        pool.free(torch.tensor([3, 4], dtype=torch.int32))
        assert pool.alloc(4).tolist() == [2, 3, 4, 5]


def test_an_id_tensor_shares_no_memory_with_the_pool():
    with make() as pool:
        assert pool.alloc(2).untyped_storage().nbytes() == 2 * 8


def test_changing_a_returned_id_tensor_does_not_change_the_pool():
    with make() as pool:
        pages = pool.alloc(2)
        pages.fill_(4)
        pool.free([0])
        given = torch.tensor([1])
        pool.free(given)
        given.fill_(3)
        assert pool.alloc(5).tolist() == [0, 1, 2, 3, 4]


def test_allocating_nothing_and_freeing_nothing_is_allowed():
    with make() as pool:
        assert pool.alloc(0).tolist() == []
        pool.free([])
        pool.free(torch.empty(0, dtype=torch.int64))
        assert pool.num_free == N


def test_asking_for_more_pages_than_are_free_names_both_and_takes_none():
    with make() as pool:
        pool.alloc(2)
        with pytest.raises(RuntimeError, match="n got 4; needs at most 3"):
            pool.alloc(4)
        assert pool.alloc(3).tolist() == [2, 3, 4]


@pytest.mark.parametrize("n", [-1, 1.0, None, "2", True, False])
def test_a_page_count_that_is_no_number_is_refused(n):
    with make() as pool:
        with pytest.raises(ValueError, match="n got"):
            pool.alloc(n)
        assert pool.num_free == N


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([2, 3], r"\[3\]; needs allocated"),
        ([0, 0], r"\[0\] more than once"),
        ([0, 1, 2, 1], r"\[1\] more than once"),
        ([0, 5], r"\[5\]; needs 0\.\.4"),
        ([-1], r"\[-1\]; needs 0\.\.4"),
        ([2**70], rf"\[{2**70}\]; needs 0\.\.4"),
        ([0, -(2**63) - 1], rf"\[{-(2**63) - 1}\]; needs 0\.\.4"),
        ([torch.tensor(2**63, dtype=torch.uint64)], ".*needs ints"),
        (torch.tensor([0.0]), "dtype torch.float32; needs int32 or int64"),
        (torch.tensor([True]), "dtype torch.bool"),
        (torch.tensor([0], dtype=torch.int16), "dtype torch.int16"),
        (torch.tensor([[0]]), "2 dims on cpu; needs a 1-D tensor"),
        (torch.tensor(0), "0 dims on cpu"),
        (torch.empty(1, dtype=torch.int64, device="meta"), "1 dims on meta"),
        (torch.tensor([0]).to_sparse(), "layout torch.sparse_coo; needs a dense tensor"),
        ([True], ".*needs ints"),
        ([0, torch.tensor(True)], r"tensor\(True\) at position 1; needs ints"),
        ([torch.empty((), dtype=torch.int64, device="meta")], ".*needs ints"),
        ([[0], [1]], r"\[0\] at position 0; needs ints"),
        (None, ".*needs ints"),
        ([0.0], ".*needs ints"),
        (["0"], ".*needs ints"),
        (0, ".*needs ints"),
    ],
)
def test_a_wrong_free_names_its_pages_and_changes_nothing(pages, text):
    with make() as pool:
        pool.alloc(3)
        with pytest.raises(ValueError, match=f"free: pages got {text}"):
            pool.free(pages)
        assert pool.num_free == 2
        pool.free([0, 1, 2])
        assert pool.alloc(N).tolist() == [0, 1, 2, 3, 4]


def test_freeing_a_page_twice_is_found_before_and_after_it_was_reused():
    with make(num_pages=2) as pool:
        pages = pool.alloc(2)
        pool.free(pages)
        with pytest.raises(ValueError, match="double free"):
            pool.free(pages)
        assert pool.alloc(2).tolist() == [0, 1]
        pool.free([1])
        with pytest.raises(ValueError, match="double free"):
            pool.free([0, 1])
        pool.free([0])
        assert pool.num_free == 2


def test_numpys_ints_are_ints_everywhere():
    numpy = pytest.importorskip("numpy")
    number = numpy.int32
    sizes = {"num_pages": number(N), "page_size": number(P), "v_head_dim": number(4)}
    limits = {"memory_limit_bytes": number(1 << 30), "reserve_bytes": number(0)}
    with make("asymmetric", **sizes, **limits, chunk_bytes=number(1 << 20)) as pool:
        assert type(pool.num_pages) is type(pool.nbytes) is int
        pages = pool.alloc(number(2))
        assert pool.token_indices(pages, number(5)).tolist() == [0, 1, 2, 3, 4]
        assert len(pool.layer(number(1))) == 2
        assert len(pool.page_bytes(number(1))) == 2


def test_ids_may_be_anything_that_indexes_a_list():
    numpy = pytest.importorskip("numpy")
    with make() as pool:
        pages = pool.alloc(4)
        pool.free(numpy.array([0]))
        pool.free([pages[1]])
        pool.free(range(2, 4))
        assert pool.num_free == N
        assert len(pool.page_bytes(pages[1])) == 2


@given(st.data())
def test_the_allocator_agrees_with_a_set_of_pages(data):
    with make(num_pages=12, head_dim=1) as pool:
        held = set()
        for _ in range(data.draw(st.integers(0, 30))):
            if data.draw(st.booleans()):
                n = data.draw(st.integers(0, 12 - len(held)))
                got = pool.alloc(n).tolist()
                assert len(set(got)) == n
                assert held.isdisjoint(got)
                assert all(0 <= page < 12 for page in got)
                held.update(got)
            else:
                gone = (
                    data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
                )
                pool.free(gone)
                held.difference_update(gone)
            assert pool.num_free == 12 - len(held)


def test_threads_never_get_the_same_page():
    pool = make(num_pages=64)
    seen, errors = [], []

    def work():
        try:
            for _ in range(200):
                pages = pool.alloc(4)
                seen.append(pages)
                for page in pages.tolist():
                    marks[page] += 1
                    assert marks[page] == 1
                for page in pages.tolist():
                    marks[page] -= 1
                pool.free(pages)
        except BaseException as error:
            errors.append(error)

    marks = [0] * 64
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(seen) == 1600
    assert pool.num_free == 64
    pool.close()


def test_a_pool_works_across_inference_mode():
    with torch.inference_mode():
        pool = make()
        pages = pool.alloc(N)
        pool.free(pages)
        inside = pool.alloc(3)
    pool.free(inside)
    pool.layer(1)[0].fill_(2)
    with torch.inference_mode():
        pool.layer(1)[0].fill_(3)
        rest = pool.alloc(N)
    pool.free(rest)
    slots = pool.token_indices(rest)
    sgl_kvio.transfer(pool.layer(0), pool.layer(1), slots, slots)
    assert bool((pool.layer(0)[0] == 3).all())
    pool.close()


def test_a_default_device_set_by_the_caller_does_not_move_the_pool():
    torch.set_default_device("meta")
    try:
        pool = make()
        pages = pool.alloc(2)
        slots = pool.token_indices([0, 1])
        pool.free([0])
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in (*pool.tensors, *pool.all_layers(), pages, slots)} == {"cpu"}
    pool.close()


# ---------------------------------------------------------------------------------------- staging


def staged_page_nbytes(pool):
    """What transfer_staged takes for a page: its ranges, each from a multiple of 256 on."""
    pages = pool.alloc(1)
    ranges = pool.page_ranges(int(pages[0]))
    pool.free(pages)
    return sum(-(-nbytes // 256) * 256 for _, nbytes in ranges)


@COMBINATIONS
def test_staging_is_whole_pages_within_what_was_asked_for(kind, layout):
    with make(kind, layout) as pool:
        page = staged_page_nbytes(pool)
        assert page > pool.page_nbytes
        for nbytes, pages in [
            (page, 1),
            (2 * page - 1, 1),
            (2 * page, 2),
            (3 * page + 17, 3),
            (64 * page, 64),
        ]:
            staging = pool.staging(nbytes)
            assert (staging.numel(), staging.dtype) == (pages * page, torch.uint8)
            assert (staging.device.type, staging.dim()) == ("cpu", 1)
            assert staging.is_contiguous()


def test_a_page_of_whole_256_bytes_is_not_rounded_up():
    with make(head_dim=64) as pool:
        assert pool.page_nbytes % 256 == 0
        assert pool.staging(5 * pool.page_nbytes).numel() == 5 * pool.page_nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_staging_holds_a_page_even_where_less_was_asked_for(nbytes):
    with make() as pool:
        assert pool.page_nbytes > 100
        assert pool.staging(nbytes).numel() == staged_page_nbytes(pool)


def test_staging_is_64_mib_unless_asked_otherwise():
    with make(head_dim=64) as pool:
        size = pool.staging().numel()
        assert (64 << 20) - pool.page_nbytes < size <= 64 << 20


def test_the_same_size_of_staging_is_the_same_tensor():
    with make() as pool:
        page = -(-pool.page_nbytes // 256) * 256
        first = pool.staging(2 * page)
        assert pool.staging(2 * page) is first
        assert pool.staging(2 * page + 5, device="cpu") is first
        other = pool.staging(3 * page)
        assert other.data_ptr() != first.data_ptr()
        assert pool.staging(2 * page) is first
        assert pool.staging(3 * page) is other


def test_threads_asking_for_staging_at_once_get_the_same_tensor():
    with make() as pool:
        start, got = threading.Barrier(8), []

        def ask():
            start.wait()
            got.append(pool.staging(1 << 20))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 8
        assert len({id(tensor) for tensor in got}) == 1


def test_close_drops_the_staging():
    pool = make()
    staging = weakref.ref(pool.staging(1 << 20))
    assert staging() is not None
    pool.close()
    assert staging() is None


def test_staging_made_under_inference_mode_is_writable_outside_of_it():
    with make() as pool:
        with torch.inference_mode():
            staging = pool.staging(1 << 20)
        assert not staging.is_inference()
        staging.fill_(3)


@pytest.mark.parametrize("nbytes", [-1, 1.5, None, "64M", True])
def test_a_staging_size_that_is_no_number_is_refused(nbytes):
    with make() as pool, pytest.raises(ValueError, match="staging: nbytes got .*; needs an int"):
        pool.staging(nbytes)


@pytest.mark.parametrize("device", ["meta", "nowhere", True, -1, 99])
def test_a_staging_device_that_cannot_be_is_refused(device):
    with make() as pool, pytest.raises(ValueError, match=f"staging: device got {device!r}"):
        pool.staging(device=device)


# ------------------------------------------------------------------------------------ token slots


def test_token_indices_follow_the_pages_in_their_order():
    with make() as pool:
        assert pool.token_indices([2, 0], 6).tolist() == [8, 9, 10, 11, 0, 1]
        assert pool.token_indices(torch.tensor([1], dtype=torch.int32)).tolist() == [4, 5, 6, 7]
        assert pool.token_indices([3], 0).tolist() == []
        assert pool.token_indices([]).tolist() == []
        assert pool.token_indices([2]).dtype == torch.int64


@pytest.mark.parametrize("num_tokens", [-1, 9, 1.5, True])
def test_more_tokens_than_the_pages_hold_are_refused(num_tokens):
    with make() as pool, pytest.raises(ValueError, match=r"num_tokens got .*; needs 0\.\.8"):
        pool.token_indices([0, 1], num_tokens)


def test_token_indices_of_an_unknown_page_are_refused():
    with make() as pool, pytest.raises(ValueError, match=r"pages got \[5, 9\]; needs 0\.\.4"):
        pool.token_indices([1, 5, 9])


# ------------------------------------------------------------------------------------ bad argument


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_pages": 0}, "num_pages got 0"),
        ({"page_size": -4}, "page_size got -4"),
        ({"num_layers": 2.0}, "num_layers got 2.0"),
        ({"v_head_dim": 3}, "v_head_dim got 3"),
        ({"dtype": "bfloat16"}, "dtype got 'bfloat16'; needs a torch.dtype"),
        ({"dtype": torch.qint8}, "dtype got torch.qint8"),
        ({"device": "meta"}, "device got 'meta'; needs a CUDA device or 'cpu'"),
        ({"device": "nowhere"}, "device got 'nowhere'"),
        ({"device": 99}, "device got 99"),
        ({"device": -1}, "device got -1"),
        ({"device": 256}, "device got 256"),
        ({"device": 2**70}, f"device got {2**70}"),
        ({"device": True}, "device got True"),
        ({"num_pages": True}, "num_pages got True"),
        ({"chunk_bytes": 0}, "chunk_bytes got 0"),
        ({"chunk_bytes": True}, "chunk_bytes got True"),
        ({"memory_limit_bytes": True}, "memory_limit_bytes got True"),
        ({"chunk_bytes": 100}, r"chunk_bytes got 100; needs at least \d+"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes got -1"),
        ({"reserve_bytes": "1G"}, "reserve_bytes got '1G'"),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_allocated(changes, text, monkeypatch):
    monkeypatch.setattr(memory, "_map_aligned", lambda nbytes: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=text):
        make(**changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0.0000001", r"KVIO_HOST_REGISTER_CHUNK_GB \(in bytes\) got 107; needs at least \d+"),
        ("0", "KVIO_HOST_REGISTER_CHUNK_GB got '0'"),
        ("many", "KVIO_HOST_REGISTER_CHUNK_GB got 'many'"),
    ],
)
def test_a_chunk_of_the_environment_that_does_not_do_is_named_by_its_variable(
    text, error, monkeypatch
):
    monkeypatch.setattr(memory, "_map_aligned", lambda nbytes: pytest.fail("allocated"))
    monkeypatch.setenv("KVIO_HOST_REGISTER_CHUNK_GB", text)
    with pytest.raises(ValueError, match=error) as caught:
        make()
    assert "chunk_bytes" not in str(caught.value)


def test_an_unknown_layout_or_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="layout got 'page_head'; kind 'mla' needs one of"):
        make("mla", "page_head")
    with pytest.raises(ValueError, match="kind got 'mqa'"):
        HostKVPool("mqa", "page_first", **arguments())


def test_a_pool_larger_than_allowed_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(memory, "_map_aligned", lambda nbytes: pytest.fail("allocated"))
    need = 2 * N * P * L * 24
    with pytest.raises(MemoryError, match=rf"num_pages asks for {need} bytes .* {need - 1} bytes"):
        make(memory_limit_bytes=need - 1, reserve_bytes=0)
    with pytest.raises(MemoryError, match=rf"asks for {need} bytes .*{need - 1} bytes"):
        make(memory_limit_bytes=need + 9, reserve_bytes=10)


def test_both_tensors_of_an_asymmetric_pool_count_against_the_limit():
    need = N * P * L * (24 + 16)
    make("asymmetric", memory_limit_bytes=need, reserve_bytes=0).close()
    with pytest.raises(MemoryError, match=f"asks for {need} bytes"):
        make("asymmetric", memory_limit_bytes=need - 1, reserve_bytes=0)


def test_a_pool_larger_than_the_machine_is_refused():
    with pytest.raises(MemoryError, match=rf"asks for {2**52} bytes"):
        make(num_pages=1, page_size=2**20, num_layers=1, num_heads=2**10, head_dim=2**20)


# --------------------------------------------------------------------------------------- lifetime


def calls_after_close(pool):
    return [
        lambda: pool.layer(0),
        pool.layers,
        pool.all_layers,
        pool.stacked,
        lambda: pool.tensors,
        lambda: pool.page_bytes(0),
        lambda: pool.page_ranges(0),
        lambda: pool.staging(1),
        lambda: pool.alloc(1),
        lambda: pool.free([0]),
        lambda: pool.num_free,
        lambda: pool.token_indices([0]),
        pool.__enter__,
    ]


def test_every_use_after_close_raises():
    pool = make()
    pool.alloc(1)
    pool.close()
    pool.close()
    for call in calls_after_close(pool):
        with pytest.raises(ValueError, match="after close"):
            call()
    assert not pool.is_pinned
    assert "closed" in repr(pool)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_is_not_copied_into_a_second_allocator_over_the_same_memory(duplicate):
    with make() as pool:
        with pytest.raises(TypeError, match="HostKVPool: cannot be copied"):
            duplicate(pool)
        assert pool.alloc(N).tolist() == list(range(N))


def test_leaving_the_context_closes_even_after_an_error():
    with pytest.raises(KeyError), make() as pool:
        raise KeyError
    with pytest.raises(ValueError, match="after close"):
        pool.layers()


def test_tensors_and_bytes_held_after_close_stay_readable_and_writable():
    pool = make()
    view, (part, *_) = pool.layer(0)[0], pool.page_bytes(0)
    view.fill_(1.5)
    pool.close()
    del pool
    gc.collect()
    assert bool((view == 1.5).all())
    assert part[:2].tobytes() == torch.tensor([1.5], dtype=torch.float16).numpy().tobytes()
    part[:2] = b"\0\0"
    assert view.flatten()[0] == 0


def test_close_gives_the_memory_back_when_no_view_is_held():
    pool = make("asymmetric")
    mappings = [weakref.ref(part.obj) for part in pool.page_bytes(0)]
    assert all(isinstance(mapping(), mmap.mmap) for mapping in mappings)
    pool.close()
    assert [mapping() for mapping in mappings] == [None, None]


def test_a_pool_that_nobody_closed_gives_its_memory_back():
    pool = make()
    mapping = weakref.ref(pool.page_bytes(0)[0].obj)
    del pool
    assert mapping() is None


# ----------------------------------------------------------------------------------- registration


@pytest.fixture
def driver(monkeypatch):
    """Two GPUs whose driver only records; `fail_at` makes the n-th registration fail."""

    class Driver:
        def __init__(self):
            self.calls, self.fail_at = [], None

        def register(self, tensor, chunk_bytes=0, device_index=-1):
            if len(self.calls) == self.fail_at:
                raise RuntimeError("kvio::host_register: tensor got refused; needs a better day")
            self.calls.append(("register", tensor.numel(), chunk_bytes, device_index))

        def unregister(self, tensor, device_index=-1):
            self.calls.append(("unregister", tensor.numel(), device_index))

    made = Driver()
    monkeypatch.setattr(ops, "host_register", made.register)
    monkeypatch.setattr(ops, "host_unregister", made.unregister)
    monkeypatch.setattr(memory, "gpu_numa_node", lambda device_index: None)
    monkeypatch.setattr(pool_module, "_make_token", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return made


@pytest.mark.parametrize(
    ("device", "want"), [(None, 1), ("cuda", 1), ("cuda:0", 0), (0, 0), (torch.device("cuda:1"), 1)]
)
def test_registration_is_for_the_device_that_was_asked_for(driver, device, want):
    with make(device=device) as pool:
        assert driver.calls == [("register", pool.nbytes, 0, want)]
        assert pool.is_pinned
        assert pool.device == torch.device("cuda", want)
    assert driver.calls[1:] == [("unregister", pool.nbytes, want)]


def test_a_plain_pool_is_not_registered_beside_a_gpu(driver):
    with make(device="cpu") as pool:
        assert not pool.is_pinned
        assert pool.device == torch.device("cpu")
    assert driver.calls == []


# torch.device would keep 8 bits of 256 and 257.
@pytest.mark.parametrize("device", ["cuda:2", 2, 256, 257])
def test_a_device_that_the_machine_lacks_is_refused_by_name(driver, device):
    with pytest.raises(ValueError, match=f"device got {device!r}; this process has 2"):
        make(device=device)
    assert driver.calls == []


@COMBINATIONS
def test_registration_chunks_never_cut_a_page(driver, kind, layout):
    unit = P * 24 * (1 if layout == "layer_first" else L) // (2 if kind == "mla" else 1)
    limit = 2 * math.lcm(unit, mmap.PAGESIZE) + 1
    num_pages = 5 * limit // unit
    with make(kind, layout, num_pages=num_pages, device=0, chunk_bytes=limit) as pool:
        assert driver.calls[0] == ("register", pool.tensors[0].nbytes, limit - 1, 0)
        for tensor, call in zip(pool.tensors, driver.calls, strict=True):
            assert call[2] % mmap.PAGESIZE == 0
            assert call[2] <= limit
            base = tensor.data_ptr()
            assert base % mmap.PAGESIZE == 0
            for page in (0, num_pages // 3, num_pages - 1):
                for part in pool.page_bytes(page):
                    start = torch.frombuffer(part, dtype=torch.uint8).data_ptr() - base
                    if 0 <= start < tensor.nbytes:
                        assert start // call[2] == (start + len(part) - 1) // call[2]


def test_the_environment_sets_the_chunk(driver, monkeypatch):
    monkeypatch.setenv("KVIO_HOST_REGISTER_CHUNK_GB", str(1 / 1024))
    with make(num_pages=512, head_dim=64, device=0, num_layers=2) as pool:
        assert driver.calls == [("register", pool.nbytes, 1 << 20, 0)]


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_failed_registration_leaves_nothing_registered(driver, fail_at):
    driver.fail_at = fail_at
    with pytest.raises(RuntimeError, match="host_register") as caught:
        make("asymmetric", device=0)
    # The error is still alive here, and with its traceback the pool that was never made.
    assert caught.value.__traceback__ is not None
    registered = sum(1 if call[0] == "register" else -1 for call in driver.calls)
    assert registered == 0
    assert len(driver.calls) == 2 * fail_at


def test_an_unregistration_that_fails_does_not_keep_the_other_tensor_registered(
    driver, monkeypatch
):
    pool = make("asymmetric", device=0)
    released = []

    def refuse(tensor, device_index):
        released.append(tensor.numel())
        if len(released) == 1:
            raise RuntimeError("kvio::host_unregister: tensor got lost; needs finding")

    monkeypatch.setattr(ops, "host_unregister", refuse)
    with pytest.raises(RuntimeError, match="host_unregister"):
        pool.close()
    assert len(released) == 2
    pool.close()
    assert len(released) == 2


def test_a_registered_pool_that_nobody_closed_is_unregistered(driver):
    pool = make("asymmetric", device=0)
    del pool
    gc.collect()
    assert [call[0] for call in driver.calls] == ["register"] * 2 + ["unregister"] * 2
