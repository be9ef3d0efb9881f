"""Pages in storage: what a store of pages has to do, one that keeps them in files, and two helpers.

A page-first host pool keeps a page in one contiguous range of each tensor, so a store takes it by
address, without a copy. `PageStore` is what a network store implements; `FilePageStore` needs no
server.

Measured limits that shaped it (64 pages of 1 MiB, one thread, the disk of a virtual machine): a
file a page moves 1.0-3.1 GB/s written and 11-12 read through the page cache, one file for all pages
3.5-7.6 and 12. A file a page it is, because a rename is all the agreement that processes need.
O_DIRECT: 1.0-1.8 written and 1.5-1.9 read, and the page cache is left to others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from sgl_kvio.memory import HostMemory
from sgl_kvio.pool import HostKVPool

PageRanges = Sequence[tuple[int, int]]

# Block sizes of disks are 512 or 4096 bytes; O_DIRECT wants multiples of them everywhere.
DIRECT_ALIGNMENT = 4096

# Fewer than the 255 bytes that file systems take, so that the suffix fits.
_LONGEST_ESCAPED = 200
_SUFFIX = ".page"
# No capitals: some file systems take "A" and "a" for one name.
_PLAIN = frozenset(string.ascii_lowercase + string.digits + "_-")
_MOST_RANGES_A_CALL = 1024  # IOV_MAX of Linux
_VectoredCall = Callable[[int, list[ctypes.Array[ctypes.c_char]], int], int]


@runtime_checkable
class PageStore(Protocol):
    """What a store of pages does, on this machine or over a network.

    A key is a non-empty string. A page is given as the ``(address, nbytes)`` pairs that
    ``HostKVPool.page_ranges`` returns; a store keeps their bytes one after the other.

    A store is a **lossy cache**, and its answers are one bool a key:

    * A miss, a refused put, a full disk, a server that is down: False, never an exception. Pages
      may vanish at any time. Every key of a call is answered for itself.
    * ``get_into`` alone says that bytes are there; ``exists`` is a hint.
    * Lengths are checked: a page of another length than the ranges together is a miss. After a
      False of ``get_into`` the bytes of the ranges are undefined; nothing beside them is touched.
    * A page is seen whole or not at all, whoever writes to the key at the time.
    * Keys stand for contents. A put of a key that is there may keep the old bytes or take the new
      ones, and is True in both cases; so put everything that the bytes depend on into the key: the
      tokens and those before them, the model, kind, layout, dtype and sizes of the pool.
    * After ``close()`` a store holds nothing: every answer is False.

    What can only be a mistake of the caller raises ValueError before a byte moves: lists of
    different lengths, a key that is no string or empty, a page without bytes, ranges that the store
    can never serve.

    The calls block, order nothing on any stream, and may come from several threads. Ranges stay
    valid during a call, and no longer.

    Example::

        class ServerStore:
            def put_from(self, keys, ranges):
                pointers, sizes = split(ranges)
                return [code == 0 for code in self._server.put(keys, pointers, sizes)]
            ...
    """

    def put_from(self, keys: Sequence[str], ranges: Sequence[PageRanges]) -> list[bool]:
        """Stores ``ranges[i]`` under ``keys[i]``; whether it is stored, for each."""
        ...

    def get_into(self, keys: Sequence[str], ranges: Sequence[PageRanges]) -> list[bool]:
        """Fills ``ranges[i]`` with the page ``keys[i]``; whether it did, for each."""
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether a page is likely to be there, for each key."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Forgets pages, as far as the store can; those that it has not are no error."""
        ...

    def close(self) -> None:
        """Lets go of what the store holds in this process. Again: no-op."""
        ...


class FilePageStore:
    """A `PageStore` of one file a page, straight from and into the pool's memory.

    Args:
        folder: made if it is missing, readable for its owner alone; nothing else should be in it.
        direct: past the page cache (O_DIRECT), which leaves the cache to others and is slower.
            Every range then has to begin at a multiple of 4096 bytes and be one long, as all
            ranges of a pool are whose ``page_ranges`` have such lengths. Others raise ValueError,
            for they would never be stored.

    A put overwrites. A page is written to a temporary name and renamed, so that any number of
    threads and processes, on one machine or on a shared file system, may use a folder at once and
    see a page whole or not at all. Nothing is synced to the disk: after a crash of the machine a
    file of another length is a miss, but one of the right length is taken as it is, so start with
    an empty folder then. Files are never evicted; a process that is killed while it writes leaves
    one ``*.tmp`` file.

    File names are the escaped keys, or their SHA-256 where that is too long: a key cannot name a
    place outside of the folder, and different keys never share a file.

    Raises OSError when the folder cannot be made, or, with ``direct``, when its file system has no
    O_DIRECT. A folder that cannot be written to serves what it has.

    Example::

        store = FilePageStore("/var/cache/kv")
        stored = store.put_from(["prefix-1"], [pool.page_ranges(page)])
    """

    def __init__(self, folder: str | os.PathLike[str], *, direct: bool = False) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not to move when the process changes its directory.
        self._folder = os.path.abspath(os.fspath(folder))
        self._direct = direct
        self._closed = False
        self._last_error: OSError | None = None
        if direct:
            self._try_direct()

    @property
    def folder(self) -> str:
        """The folder, as an absolute path."""
        return self._folder

    @property
    def last_error(self) -> OSError | None:
        """Why a page was last refused or could not be read, other than for not being there."""
        return self._last_error

    def put_from(self, keys: Sequence[str], ranges: Sequence[PageRanges]) -> list[bool]:
        """Stores pages, over those that are there; see ``PageStore``."""
        pages = self._checked("put_from", keys, ranges)
        return [self._put(key, page) for key, page in pages]

    def get_into(self, keys: Sequence[str], ranges: Sequence[PageRanges]) -> list[bool]:
        """Reads pages; a file of another length is a miss and leaves the ranges as they were."""
        pages = self._checked("get_into", keys, ranges)
        return [self._get(key, page) for key, page in pages]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether there is a file, of whatever length, for each key."""
        keys = checked_keys("FilePageStore.exists", keys)
        return [not self._closed and os.path.isfile(self._path(key)) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Deletes pages. A ``get_into`` that already has its file open still gets all of it."""
        for key in checked_keys("FilePageStore.remove", keys):
            if not self._closed:
                self._unlink(self._path(key))

    def close(self) -> None:
        """Stops serving; the files stay. Again: no-op."""
        self._closed = True

    def _checked(
        self, where: str, keys: Sequence[str], ranges: Sequence[PageRanges]
    ) -> list[tuple[str, PageRanges]]:
        pages = checked_pages(f"FilePageStore.{where}", keys, ranges)
        if self._direct:
            for position, (_, page) in enumerate(pages):
                _check_aligned(f"FilePageStore.{where}: ranges[{position}]", page)
        return pages

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, file_name(key))

    def _flags(self) -> int:
        return os.O_DIRECT if self._direct else 0

    def _put(self, key: str, ranges: PageRanges) -> bool:
        if self._closed:
            return False
        try:
            self._write_and_rename(self._path(key), ranges)
        except OSError as error:
            self._last_error = error
            return False
        return True

    def _write_and_rename(self, path: str, ranges: PageRanges) -> None:
        temporary = os.path.join(self._folder, f"{secrets.token_hex(16)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags()
        fd = os.open(temporary, flags, 0o666)
        try:
            try:
                _move_all(os.pwritev, fd, ranges)
            finally:
                # Quotas and network file systems report a failed write here, before the rename.
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            self._unlink(temporary)
            raise

    def _get(self, key: str, ranges: PageRanges) -> bool:
        if self._closed:
            return False
        try:
            self._read(self._path(key), ranges)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._last_error = error
            return False
        return True

    def _read(self, path: str, ranges: PageRanges) -> None:
        fd = os.open(path, os.O_RDONLY | self._flags())
        try:
            _check_length(fd, ranges)
            _move_all(os.preadv, fd, ranges)
        finally:
            os.close(fd)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _try_direct(self) -> None:
        """Writes a block, since a file system without O_DIRECT would refuse every page."""
        if not hasattr(os, "O_DIRECT"):
            raise OSError("FilePageStore: direct got True; this system has no O_DIRECT")
        path = os.path.join(self._folder, f"{secrets.token_hex(16)}.tmp")
        block = HostMemory(DIRECT_ALIGNMENT)
        try:
            self._write_and_rename(path, [(block.address, block.nbytes)])
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                text = "FilePageStore: direct got True; the folder's file system has no O_DIRECT"
                raise OSError(error.errno, text, self._folder) from error
        self._unlink(path)


# ------------------------------------------------------------------------------------------ helpers


def save_pages(
    store: PageStore,
    pool: HostKVPool,
    pages: torch.Tensor | Sequence[int],
    keys: Sequence[str],
) -> list[bool]:
    """Stores allocated pages of a pool under keys; whether each is stored.

    Orders nothing: the write-back that fills the pages has to be done (not only queued). The pages
    may be freed when the call returns.

    Raises ValueError for a page that is not allocated, for lists of different lengths, and for what
    the store can never serve; nothing is stored then.

    Example: ``save_pages(store, pool, pages, [f"{prefix}/{i}" for i in range(len(pages))])``
    """
    with _held_ranges("save_pages", pool, pages, keys) as ranges:
        return store.put_from(keys, ranges)


def load_pages(
    store: PageStore,
    pool: HostKVPool,
    pages: torch.Tensor | Sequence[int],
    keys: Sequence[str],
) -> list[bool]:
    """Fills allocated pages of a pool from a store; whether each is in place.

    Where it is False, the bytes of that page are undefined; other pages are not touched. Transfers
    may read the pages when the call returns.

    Raises as ``save_pages`` does, before a byte moves.

    Example: ``hits = load_pages(store, pool, pool.alloc(len(keys)), keys)``
    """
    with _held_ranges("load_pages", pool, pages, keys) as ranges:
        return store.get_into(keys, ranges)


@contextlib.contextmanager
def _held_ranges(
    where: str, pool: HostKVPool, pages: torch.Tensor | Sequence[int], keys: Sequence[str]
) -> Iterator[list[PageRanges]]:
    """The ranges of pages, whose memory stays mapped in the block even if the pool is closed."""
    kept = pool.tensors
    ids = pages.tolist() if isinstance(pages, torch.Tensor) else list(pages)
    if len(ids) != len(keys):
        raise ValueError(f"{where}: keys got {len(keys)} for {len(ids)} pages; needs one a page")
    yield [pool.page_ranges(page) for page in ids]
    del kept


# ------------------------------------------------------------------------------------------- checks


def checked_keys(where: str, keys: Sequence[str]) -> list[str]:
    """``keys`` as a list, or ValueError naming the first that is no key.

    For stores to use: a bare string is refused too, since it is a sequence of other keys.
    """
    if isinstance(keys, str):
        raise ValueError(f"{where}: keys got {keys!r}; needs a list of strings")
    for position, key in enumerate(keys):
        if not isinstance(key, str) or not key:
            raise ValueError(f"{where}: keys[{position}] got {key!r}; needs a non-empty string")
    return list(keys)


def checked_pages(
    where: str, keys: Sequence[str], ranges: Sequence[PageRanges]
) -> list[tuple[str, PageRanges]]:
    """Keys with their pages, or ValueError naming what cannot be one. For stores to use."""
    keys = checked_keys(where, keys)
    if len(keys) != len(ranges):
        raise ValueError(f"{where}: ranges got {len(ranges)} for {len(keys)} keys; needs one a key")
    for position, page in enumerate(ranges):
        if not page or any(address <= 0 or nbytes <= 0 for address, nbytes in page):
            raise ValueError(
                f"{where}: ranges[{position}] got {page!r}; needs pairs of an address and a length"
            )
    return list(zip(keys, ranges, strict=True))


def _check_aligned(name: str, ranges: PageRanges) -> None:
    for address, nbytes in ranges:
        if address % DIRECT_ALIGNMENT or nbytes % DIRECT_ALIGNMENT:
            raise ValueError(
                f"{name} got {nbytes} bytes at {address:#x}; direct=True needs multiples of "
                f"{DIRECT_ALIGNMENT} (a larger page, or direct=False)"
            )


def _check_length(fd: int, ranges: PageRanges) -> None:
    have, need = os.fstat(fd).st_size, sum(nbytes for _, nbytes in ranges)
    if have != need:
        raise OSError(f"a page of {have} bytes where {need} are wanted")


# -------------------------------------------------------------------------------------------- files


def file_name(key: str) -> str:
    """The name of a key's file: small letters, digits and ``_-%=`` alone, and never too long.

    Example: ``file_name("../A b") == "%2e%2e%2f%41%20b.page"``
    """
    raw = key.encode("utf-8", "surrogatepass")
    name = "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02x}" for byte in raw)
    if len(name) > _LONGEST_ESCAPED:
        # An escaped key holds no "=", so a digest is never another key's name.
        name = f"sha256={hashlib.sha256(raw).hexdigest()}"
    return name + _SUFFIX


def _move_all(call: _VectoredCall, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Reads or writes all ranges from the file's start on; OSError if the file ends before."""
    pending = list(ranges)
    offset = 0
    while pending:
        moved = call(fd, [_buffer(*part) for part in pending[:_MOST_RANGES_A_CALL]], offset)
        if moved <= 0:
            raise OSError(f"the file ended at byte {offset}")
        offset += moved
        pending = _rest(pending, moved)


def _rest(ranges: list[tuple[int, int]], moved: int) -> list[tuple[int, int]]:
    """What is left of ranges whose first ``moved`` bytes are done."""
    for position, (address, nbytes) in enumerate(ranges):
        if moved < nbytes:
            return [(address + moved, nbytes - moved), *ranges[position + 1 :]]
        moved -= nbytes
    return []


def _buffer(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)
