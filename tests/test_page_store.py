"""Page stores: one contract over every implementation, then what is the file store's own."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sgl_kvio
from sgl_kvio import FilePageStore, HostKVPool, PageStore, load_pages, page_store, save_pages
from sgl_kvio.memory import HostMemory

LAYOUTS = pytest.mark.parametrize(
    "layout", ["layer_first", "page_first", "page_first_direct", "page_head"]
)
PAGES = 6


class ServerStore:
    """A store as a network's are: it keeps the first bytes of a key, and it can be full.

    It keeps the contract honest: what only files do must not be in the contract's tests.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._held: dict[str, bytes] = {}
        self._room = capacity_bytes
        self._closed = False

    def put_from(self, keys, ranges):
        return [self._put(*page) for page in page_store.checked_pages("put_from", keys, ranges)]

    def _put(self, key, page):
        if self._closed:
            return False
        if key in self._held:
            return True
        value = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in page)
        if len(value) > self._room:
            return False
        self._room -= len(value)
        self._held[key] = value
        return True

    def get_into(self, keys, ranges):
        return [self._get(*page) for page in page_store.checked_pages("get_into", keys, ranges)]

    def _get(self, key, page):
        value = self._held.get(key)
        if self._closed or value is None or len(value) != sum(nbytes for _, nbytes in page):
            return False
        start = 0
        for address, nbytes in page:
            ctypes.memmove(address, value[start : start + nbytes], nbytes)
            start += nbytes
        return True

    def exists(self, keys):
        keys = page_store.checked_keys("exists", keys)
        return [not self._closed and key in self._held for key in keys]

    def remove(self, keys):
        for key in page_store.checked_keys("remove", keys):
            self._room += len(self._held.pop(key, b""))

    def close(self):
        self._closed = True


@pytest.fixture(params=["files", "direct files", "server"])
def store(request, tmp_path):
    if request.param == "server":
        made = ServerStore()
    else:
        made = file_store(tmp_path / "store", direct=request.param == "direct files")
    yield made
    made.close()


def file_store(folder, direct=False):
    try:
        return FilePageStore(folder, direct=direct)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            pytest.skip("this file system has no O_DIRECT")
        raise


def make(layout="page_first", **changes):
    """A pool whose ranges are multiples of 4096 bytes in every layout: direct files take it."""
    sizes = {
        "num_pages": PAGES,
        "page_size": 16,
        "num_layers": 3,
        "num_heads": 2,
        "head_dim": 64,
        "dtype": torch.float16,
        "device": "cpu",
    }
    return HostKVPool("mha", layout, **(sizes | changes))


def scramble(pool, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def page_content(pool, page):
    return b"".join(bytes(part) for part in pool.page_bytes(page))


def names(n):
    return [f"page/{i}" for i in range(n)]


# ----------------------------------------------------------------------------------- the contract


def test_every_store_has_the_methods_of_the_interface(store):
    assert isinstance(store, PageStore)


@LAYOUTS
def test_pages_come_back_to_other_places_and_no_other_byte_changes(store, layout):
    with make(layout) as pool, make(layout) as other:
        scramble(pool, 1)
        scramble(other, 2)
        pages, targets = pool.alloc(4), other.alloc(PAGES)[[5, 0, 3, 2]]
        assert save_pages(store, pool, pages, names(4)) == [True] * 4
        untouched = [page_content(other, page) for page in (1, 4)]
        assert load_pages(store, other, targets, names(4)) == [True] * 4
        for page, target in zip(pages, targets, strict=True):
            assert page_content(pool, page) == page_content(other, target)
        assert [page_content(other, page) for page in (1, 4)] == untouched


def test_rows_written_through_layer_views_are_what_another_pool_reads(store):
    with make("page_head") as pool, make("page_head") as other:
        page, target = pool.alloc(1), other.alloc(2)[1:]
        for i, view in enumerate(pool.all_layers()):
            view[page] = i + 0.5
        assert save_pages(store, pool, page, ["a"]) == [True]
        assert load_pages(store, other, target, ["a"]) == [True]
        assert all(bool((v[1] == i + 0.5).all()) for i, v in enumerate(other.all_layers()))


def test_every_key_is_answered_for_itself(store):
    with make() as pool:
        scramble(pool)
        pages = pool.alloc(3)
        want = page_content(pool, 1)
        assert save_pages(store, pool, [1], ["there"]) == [True]
        keys = ["missing", "there", "missing too"]
        assert store.exists(keys) == [False, True, False]
        assert load_pages(store, pool, pages.flip(0), keys) == [False, True, False]
        assert page_content(pool, 1) == want


def test_a_page_of_another_length_is_a_miss(store):
    with make() as pool, make(num_layers=6) as larger, make(num_layers=1) as smaller:
        save_pages(store, pool, pool.alloc(1), ["a"])
        for other in (larger, smaller):
            scramble(other)
            (page,) = other.alloc(1).tolist()
            beside = page_content(other, page + 1)
            assert load_pages(store, other, [page], ["a"]) == [False]
            assert page_content(other, page + 1) == beside


def test_putting_the_same_page_again_is_true_and_keeps_it(store):
    with make() as pool:
        scramble(pool)
        page = pool.alloc(2)[:1]
        for _ in range(2):
            assert save_pages(store, pool, page, ["a"]) == [True]
        assert load_pages(store, pool, [1], ["a"]) == [True]
        assert page_content(pool, 0) == page_content(pool, 1)


def test_a_removed_page_is_a_miss_and_removing_nothing_is_no_error(store):
    with make() as pool:
        pages = pool.alloc(2)
        save_pages(store, pool, pages, ["a", "b"])
        store.remove(["a", "never there"])
        store.remove(["a"])
        store.remove([])
        assert store.exists(["a", "b"]) == [False, True]
        assert load_pages(store, pool, pages, ["a", "b"]) == [False, True]


def test_no_pages_are_no_answers(store):
    assert store.put_from([], []) == store.get_into([], []) == store.exists([]) == []


def test_after_close_a_store_holds_nothing_and_raises_nothing(store):
    with make() as pool:
        pages = pool.alloc(1)
        save_pages(store, pool, pages, ["a"])
        store.close()
        store.close()
        assert save_pages(store, pool, pages, ["b"]) == [False]
        assert load_pages(store, pool, pages, ["a"]) == [False]
        assert store.exists(["a"]) == [False]
        store.remove(["a"])


# A surrogate alone cannot be encoded, a slash and dots lead elsewhere, case may be ignored.
ODD_KEYS = [
    "a",
    "A",
    "a.page",
    "..",
    ".",
    "../a",
    "/etc/passwd",
    "a/b",
    "a%2fb",
    "a\0b",
    "a\nb",
    " ",
    "é",
    "e\u0301",
    "\ud800",
    "x" * 5000,
    "x" * 5001,
    "sha256=" + "0" * 64,
]


def test_keys_may_be_any_strings_and_are_never_mixed_up(store):
    with make(num_pages=len(ODD_KEYS) + 1) as pool:
        scramble(pool)
        *pages, target = pool.alloc(len(ODD_KEYS) + 1).tolist()
        assert all(save_pages(store, pool, pages, ODD_KEYS))
        for key, page in zip(ODD_KEYS, pages, strict=True):
            assert load_pages(store, pool, [target], [key]) == [True]
            assert page_content(pool, target) == page_content(pool, page)


@pytest.mark.parametrize("method", ["put_from", "get_into"])
def test_a_callers_mistake_raises_before_a_byte_moves(store, method):
    with make() as pool:
        scramble(pool)
        before = page_content(pool, 0)
        ranges = [pool.page_ranges(page) for page in pool.alloc(2).tolist()]
        save_pages(store, pool, [1], ["there"])
        call = getattr(store, method)
        for keys, pages, text in [
            (["there"], ranges, "ranges got 2 for 1 keys"),
            (["there", ""], ranges, r"keys\[1\] got ''; needs a non-empty string"),
            (["there", None], ranges, r"keys\[1\] got None"),
            ("ab", ranges, "keys got 'ab'; needs a list"),
            (["there", "b"], [ranges[0], ()], r"ranges\[1\] got \(\)"),
            (["there", "b"], [ranges[0], ((0, 4096),)], r"ranges\[1\] got"),
            (["there", "b"], [ranges[0], ((ranges[1][0][0], 0),)], r"ranges\[1\] got"),
        ]:
            with pytest.raises(ValueError, match=text):
                call(keys, pages)
        assert store.exists(["there", "a", "b"]) == [True, False, False]
        assert page_content(pool, 0) == before


def test_threads_share_a_store(store):
    rounds, errors = 20, []

    def work(number):
        try:
            with make() as pool:
                scramble(pool, number)
                pages = pool.alloc(2)
                for i in range(rounds):
                    keys = [f"{number}/{i}"]
                    assert save_pages(store, pool, pages[:1], keys) == [True]
                    assert load_pages(store, pool, pages[1:], keys) == [True]
                    assert page_content(pool, 0) == page_content(pool, 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(store.exists([f"{n}/{i}" for n in range(4) for i in range(rounds)]))


def test_a_full_store_says_false_and_keeps_the_others():
    with make() as pool:
        pages = pool.alloc(3)
        store = ServerStore(capacity_bytes=2 * pool.page_nbytes)
        assert save_pages(store, pool, pages, names(3)) == [True, True, False]
        assert load_pages(store, pool, pages, names(3)) == [True, True, False]


# ------------------------------------------------------------------------------------ the helpers


@pytest.mark.parametrize("helper", [save_pages, load_pages])
def test_pages_that_are_not_allocated_are_neither_stored_nor_filled(helper):
    with make() as pool:
        store = ServerStore()
        pages = pool.alloc(2)
        with pytest.raises(ValueError, match="page got 4; needs an allocated page"):
            helper(store, pool, [0, 4], names(2))
        pool.free(pages[:1])
        with pytest.raises(ValueError, match="page got 0; needs an allocated page"):
            helper(store, pool, pages, names(2))
        with pytest.raises(ValueError, match="keys got 1 for 2 pages"):
            helper(store, pool, pages, names(1))
        assert store.exists(names(2)) == [False, False]


def test_a_pool_closed_during_a_call_keeps_its_memory_until_the_end():
    class Closing(ServerStore):
        def put_from(self, keys, ranges):
            pool.close()
            return super().put_from(keys, ranges)

    pool = make()
    scramble(pool)
    pages, store = pool.alloc(2), Closing()
    want = [page_content(pool, page) for page in pages]
    assert save_pages(store, pool, pages, names(2)) == [True, True]
    assert [store._held[key] for key in names(2)] == want


# ------------------------------------------------------------------------------------- file store


def test_a_put_overwrites(tmp_path):
    store = FilePageStore(tmp_path)
    with make() as pool:
        scramble(pool)
        pages = pool.alloc(3).tolist()
        for page in pages[:2]:
            assert save_pages(store, pool, [page], ["a"]) == [True]
        assert load_pages(store, pool, pages[2:], ["a"]) == [True]
        assert page_content(pool, 2) == page_content(pool, 1)


def test_a_file_is_the_page_and_the_folder_holds_nothing_else(tmp_path):
    with make() as pool:
        scramble(pool)
        save_pages(FilePageStore(tmp_path / "new" / "folder"), pool, pool.alloc(2), names(2))
        files = sorted((tmp_path / "new" / "folder").iterdir())
        assert [file.name for file in files] == ["page%2f0.page", "page%2f1.page"]
        assert [file.read_bytes() for file in files] == [page_content(pool, i) for i in (0, 1)]


def test_a_new_folder_is_for_its_owner_alone_and_an_old_one_stays_as_it_is(tmp_path):
    FilePageStore(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o750)
    FilePageStore(tmp_path / "old")
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o750


def test_a_store_opened_again_has_the_pages(tmp_path):
    with make() as pool:
        scramble(pool)
        pages = pool.alloc(2)
        first = FilePageStore(tmp_path)
        save_pages(first, pool, pages[:1], ["a"])
        first.close()
        assert load_pages(FilePageStore(tmp_path), pool, pages[1:], ["a"]) == [True]
        assert page_content(pool, 0) == page_content(pool, 1)


def test_a_relative_folder_stays_the_same_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = FilePageStore("pages")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with make() as pool:
        assert save_pages(store, pool, pool.alloc(1), ["a"]) == [True]
    assert store.folder == str(tmp_path / "pages")
    assert (tmp_path / "pages" / "a.page").is_file()


@pytest.mark.parametrize("change", [-1, 1, -4096, 4096, None])
def test_a_short_or_long_file_is_a_miss_that_leaves_the_page_alone(tmp_path, change):
    store = FilePageStore(tmp_path)
    with make() as pool:
        scramble(pool)
        pages = pool.alloc(2)
        save_pages(store, pool, pages[:1], ["a"])
        before = page_content(pool, 1)
        size = 0 if change is None else pool.page_nbytes + change
        os.truncate(tmp_path / "a.page", size)
        assert load_pages(store, pool, pages[1:], ["a"]) == [False]
        assert f"a page of {size} bytes" in str(store.last_error)
        assert page_content(pool, 1) == before
        assert save_pages(store, pool, pages[:1], ["a"]) == [True]
        assert load_pages(store, pool, pages[1:], ["a"]) == [True]


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(tmp_path, monkeypatch):
    store = FilePageStore(tmp_path)
    with make() as pool:
        page = pool.alloc(1)
        save_pages(store, pool, page, ["a"])
        check_length = page_store._check_length

        def check_and_shrink(fd, ranges):
            check_length(fd, ranges)
            os.truncate(tmp_path / "a.page", 100)

        monkeypatch.setattr(page_store, "_check_length", check_and_shrink)
        assert load_pages(store, pool, page, ["a"]) == [False]
        assert "ended at byte 100" in str(store.last_error)


@LAYOUTS
@pytest.mark.parametrize("most", [1, 1000, 2048, 2049])
def test_reads_and_writes_that_stop_early_are_continued(tmp_path, monkeypatch, layout, most):
    """The system may move fewer bytes than asked for, wherever that is inside of the ranges."""
    pwritev, preadv = os.pwritev, os.preadv

    def shorten(buffers):
        room = most
        for buffer in buffers:
            yield memoryview(buffer)[:room]
            room -= min(room, len(buffer))
            if not room:
                return

    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: pwritev(fd, list(shorten(b)), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, list(shorten(b)), at))
    store = FilePageStore(tmp_path)
    with make(layout, head_dim=8) as pool:
        scramble(pool)
        pages = pool.alloc(2)
        assert save_pages(store, pool, pages[:1], ["a"]) == [True]
        assert (tmp_path / "a.page").read_bytes() == page_content(pool, 0)
        assert load_pages(store, pool, pages[1:], ["a"]) == [True]
        assert page_content(pool, 0) == page_content(pool, 1)


def test_a_page_of_more_ranges_than_one_system_call_takes(tmp_path):
    store = FilePageStore(tmp_path)
    with make("layer_first", num_layers=700, head_dim=1) as pool:
        scramble(pool)
        pages = pool.alloc(2)
        assert len(pool.page_ranges(0)) == 1400
        assert save_pages(store, pool, pages[:1], ["a"]) == [True]
        assert load_pages(store, pool, pages[1:], ["a"]) == [True]
        assert page_content(pool, 0) == page_content(pool, 1)


@pytest.mark.parametrize("failing", ["pwritev", "replace", "close", "open"])
def test_a_refused_write_is_false_and_leaves_no_file_behind(tmp_path, monkeypatch, failing):
    store = FilePageStore(tmp_path)
    real = getattr(os, failing)

    def fail(*arguments, **options):
        if failing == "close":
            real(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with make() as pool:
        page = pool.alloc(1)
        save_pages(store, pool, page, ["old"])
        before = (tmp_path / "old.page").read_bytes()
        scramble(pool)
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            assert save_pages(store, pool, page, ["old"]) == [False]
        assert store.last_error.errno == errno.ENOSPC
        assert [file.name for file in tmp_path.iterdir()] == ["old.page"]
        assert (tmp_path / "old.page").read_bytes() == before


@pytest.mark.parametrize("failing", ["open", "fstat", "preadv", "close"])
def test_a_read_that_the_system_refuses_is_a_miss(tmp_path, monkeypatch, failing):
    store = FilePageStore(tmp_path)
    real = getattr(os, failing)

    def fail(*arguments):
        if failing == "close":
            real(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    with make() as pool:
        page = pool.alloc(1)
        save_pages(store, pool, page, ["a"])
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            assert load_pages(store, pool, page, ["a"]) == [False]
        assert store.last_error.errno == errno.EIO
        assert load_pages(store, pool, page, ["a"]) == [True]


def test_an_interrupt_during_a_write_leaves_no_file_behind(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    store = FilePageStore(tmp_path)
    monkeypatch.setattr(os, "pwritev", interrupt)
    with make() as pool, pytest.raises(KeyboardInterrupt):
        save_pages(store, pool, pool.alloc(1), ["a"])
    assert list(tmp_path.iterdir()) == []


def test_no_file_stays_open(tmp_path):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list open files")
    store = FilePageStore(tmp_path)
    with make() as pool:
        page = pool.alloc(1)
        before = open_files()
        for key in ("a", "b"):
            save_pages(store, pool, page, [key])
        os.truncate(tmp_path / "b.page", 5)
        assert load_pages(store, pool, [0, 0, 0], ["a", "b", "c"]) == [True, False, False]
        assert open_files() == before


def test_a_folder_that_is_gone_is_a_miss(tmp_path):
    store = FilePageStore(tmp_path / "pages")
    (tmp_path / "pages").rmdir()
    with make() as pool:
        page = pool.alloc(1)
        assert save_pages(store, pool, page, ["a"]) == [False]
        assert isinstance(store.last_error, FileNotFoundError)
        assert load_pages(store, pool, page, ["a"]) == [False]
        assert store.exists(["a"]) == [False]


def test_something_that_is_no_file_is_a_miss(tmp_path):
    store = FilePageStore(tmp_path)
    (tmp_path / "a.page").mkdir()
    with make() as pool:
        page = pool.alloc(1)
        assert store.exists(["a"]) == [False]
        assert load_pages(store, pool, page, ["a"]) == [False]
        assert save_pages(store, pool, page, ["a"]) == [False]
        assert [file.name for file in tmp_path.iterdir()] == ["a.page"]


def test_a_folder_that_cannot_be_made_raises_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        FilePageStore(tmp_path / "file")
    with pytest.raises(OSError):
        FilePageStore(tmp_path / "file" / "below")


# ------------------------------------------------------------------------------------- file names


def test_a_name_stays_in_its_folder_and_within_the_longest_name():
    for key in ODD_KEYS:
        name = page_store.file_name(key)
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-%=."), key
        assert name.count(".") == 1
        assert name.endswith(".page")
        assert not name.startswith(".")
        assert len(name) <= 255


@given(st.lists(st.text(st.characters(), min_size=1), min_size=2, max_size=2, unique=True))
def test_different_keys_have_different_names_whatever_the_case(keys):
    first, second = (page_store.file_name(key).casefold() for key in keys)
    assert first != second


def test_the_name_of_a_key_never_changes():
    """Files of earlier versions stay readable."""
    assert page_store.file_name("../A b") == "%2e%2e%2f%41%20b.page"
    assert page_store.file_name("x" * 200) == "x" * 200 + ".page"
    digest = "84a0678c90937f5dcf9994d5866668da6b995109c8ad845410559b48a4ecafed"
    assert page_store.file_name("x" * 201) == f"sha256={digest}.page"


# ----------------------------------------------------------------------------------- direct files


def test_direct_ranges_that_are_not_aligned_raise_before_a_byte_moves(tmp_path):
    store = file_store(tmp_path, direct=True)
    memory = HostMemory(4 * 4096)
    good = ((memory.address, 4096),)
    for bad in (((memory.address + 512, 4096),), ((memory.address, 4096 + 512),)):
        for call in (store.put_from, store.get_into):
            with pytest.raises(ValueError, match=r"ranges\[1\] got .*needs multiples of 4096"):
                call(["a", "b"], [good, bad])
    assert list(tmp_path.iterdir()) == []
    assert store.put_from(["a"], [good]) == [True]


def test_direct_files_go_past_the_page_cache(tmp_path, monkeypatch):
    store, flags, real = file_store(tmp_path, direct=True), [], os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: flags.append(a[1]) or real(*a, **k))
    with make() as pool:
        page = pool.alloc(1)
        assert save_pages(store, pool, page, ["a"]) == [True]
        assert load_pages(store, pool, page, ["a"]) == [True]
    assert len(flags) == 2
    assert all(flag & os.O_DIRECT for flag in flags)


def test_direct_and_cached_stores_read_each_others_files(tmp_path):
    direct, cached = file_store(tmp_path, direct=True), FilePageStore(tmp_path)
    with make() as pool:
        for seed, (writer, reader) in enumerate([(direct, cached), (cached, direct)]):
            scramble(pool, seed)
            pages = pool.alloc(2)
            assert save_pages(writer, pool, pages[:1], ["a"]) == [True]
            assert load_pages(reader, pool, pages[1:], ["a"]) == [True]
            assert page_content(pool, pages[0]) == page_content(pool, pages[1])
            pool.free(pages)


def test_a_file_system_without_direct_files_is_refused_when_the_store_is_made(
    tmp_path, monkeypatch
):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="direct got True; the folder's file system has no O_DIRECT"):
        FilePageStore(tmp_path, direct=True)
    FilePageStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_direct_files_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(OSError, match="this system has no O_DIRECT"):
        FilePageStore(tmp_path, direct=True)
    with make() as pool:
        assert save_pages(FilePageStore(tmp_path), pool, pool.alloc(1), ["a"]) == [True]


def test_a_pool_starts_where_direct_files_want_it():
    with make() as pool:
        ranges = [part for page in pool.alloc(PAGES).tolist() for part in pool.page_ranges(page)]
        assert all(address % mmap.PAGESIZE == 0 == nbytes % 4096 for address, nbytes in ranges)


# -------------------------------------------------------------------------------------- processes

WRITER = """
import sys, torch
from sgl_kvio import FilePageStore, HostKVPool, save_pages
folder, mark = sys.argv[1], int(sys.argv[2])
store = FilePageStore(folder)
with HostKVPool("k_only", "page_first", num_pages=1, page_size=64, num_layers=64, head_dim=64,
                dtype=torch.uint8, device="cpu") as pool:
    pool.alloc(1)
    pool.tensors[0].fill_(mark)
    print("ready", flush=True)
    while True:
        assert save_pages(store, pool, [0], ["shared"]) == [True]
"""


def test_a_reader_sees_whole_pages_while_other_processes_overwrite_them(tmp_path):
    """Two writers of different bytes: a page of both would be a torn one. Then both are killed."""
    package_home = str(Path(sgl_kvio.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": package_home}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(mark)],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for mark in (0x11, 0x22)
    ]
    store, seen = FilePageStore(tmp_path), set()
    sizes = {"num_pages": 1, "page_size": 64, "num_layers": 64, "head_dim": 64}
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        with HostKVPool("k_only", "page_first", dtype=torch.uint8, device="cpu", **sizes) as pool:
            page, reads = pool.alloc(1), 0
            while reads < 200 or (len(seen) < 2 and reads < 20000):
                reads += 1
                if load_pages(store, pool, page, ["shared"]) == [True]:
                    values = pool.tensors[0].unique().tolist()
                    assert len(values) == 1
                    seen.update(values)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    assert seen == {0x11, 0x22}
    assert store.exists(["shared"]) == [True]
