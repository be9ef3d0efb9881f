"""HostKVPool: the host side of a KV cache. Memory, per-layer views, and a page allocator."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NoReturn, SupportsIndex

import torch

from sgl_kvio import layouts, ops
from sgl_kvio.memory import (
    CHUNK_ENV,
    HostMemory,
    check_fits,
    chunk_limit_from_env,
    memory_limits,
    registration_chunk,
)

# A page's ranges start at multiples of this in a staging tensor, as csrc/plan/staged_plan.h says.
STAGING_PAGE_ALIGNMENT = 256
DEFAULT_STAGING_BYTES = 64 << 20


class HostKVPool:
    """A host pool of KV-cache pages: page-locked for a GPU, plain memory without one.

    Args:
        kind: ``"mha"`` (K and V of one size), ``"mla"`` (one latent, ``num_heads`` 1),
            ``"k_only"``, or ``"asymmetric"`` (K rows of ``num_heads * head_dim``, V rows of
            ``num_heads * v_head_dim``).
        layout: how (layer, page, token, head) are ordered, outermost first. L layers, N pages, P
            tokens a page, S = N*P token slots, H heads, D head elements:

            ======================  ====================  =============================
            layout                  tensor (MHA)          ``layer(i)`` views
            ======================  ====================  =============================
            ``layer_first``         ``(2, L, S, H, D)``   ``[S, H, D]``
            ``page_first``          ``(2, S, L, H, D)``   ``[S, H, D]``
            ``page_first_direct``   ``(2, N, L, P, H, D)``  ``[N, P, H, D]``
            ``page_head``           ``(2, N, H, P, L, D)``  ``[N, P, H, D]`` (MHA only)
            ======================  ====================  =============================

            MLA and K-only have no leading 2; asymmetric has two tensors without it.
        num_pages, page_size, num_layers, num_heads, head_dim, v_head_dim: sizes, in pages, tokens,
            and elements. ``v_head_dim`` is for ``"asymmetric"`` alone.
        dtype: of the elements; any torch dtype of whole bytes that is not quantized.
        device: the CUDA device that will use the pool (``torch.device``, ``"cuda:1"``, ``1``), or
            ``"cpu"`` for plain memory. None: the current CUDA device where there is one, else
            plain memory.
        chunk_bytes: largest single registration; None takes ``KVIO_HOST_REGISTER_CHUNK_GB`` (GiB)
            or 256 GiB.
        memory_limit_bytes: stands in for the system's MemAvailable; a cgroup's limit still holds.
        reserve_bytes: host memory to leave free; None keeps min(2 GiB, 5% of the total).
        handle: the number by which graphs name the pool, 1 to 2**32 - 1; None chooses one. See
            the property ``handle``.

    Memory is exact in size, zeroed, starts at a 2 MiB boundary, asks for huge pages and prefers
    the GPU's NUMA node. Views have rows of ``row_ndim=2`` dims and go straight into
    ``sgl_kvio.transfer``.

    Page ids are handed out in ascending order, and freed ones sorted again once the others have run
    out, so that pages taken together mostly lie together (transfers merge such runs, and the GPU
    translates fewer host addresses). The allocator may be called from several threads.

    Stream contract: ``alloc``, ``free``, ``page_bytes`` and ``page_ranges`` order nothing. Free a
    page, or touch its bytes, only after the transfers that use it are done. ``close()`` waits for
    the device before it drops the registration. ``staging`` has a contract of its own.

    Lifetime: tensors and memoryviews taken from a pool keep its memory, not its registration.
    After ``close()`` they are plain memory, which the system gets back with the last of them.
    Copying or pickling a pool raises TypeError.

    Raises ValueError for a bad argument (named in the text), MemoryError when the pool is larger
    than memory or cgroup allow (both sizes in the text), RuntimeError when the driver refuses to
    lock the pages; in each case nothing stays allocated or registered.

    Example::

        with HostKVPool("mha", "page_first", num_pages=64, page_size=16, num_layers=4, num_heads=8,
                        head_dim=128) as pool:
            pages = pool.alloc(2)
            slots = pool.token_indices(pages, num_tokens=20)
            sgl_kvio.transfer(pool.layer(0), device_layer_0, slots, device_slots)
            pool.free(pages)
    """

    def __init__(
        self,
        kind: str,
        layout: str,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_heads: int = 1,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        chunk_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        reserve_bytes: int | None = None,
        handle: int | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._memories: list[HostMemory] = []
        self._staging: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._staging_lock = threading.Lock()
        self._closed = False
        self._drop_handle: weakref.finalize | None = None
        self._layout = layouts.find_layout(kind, layout)
        self._geometry = layouts.make_geometry(
            self._layout,
            num_pages=num_pages,
            page_size=page_size,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
        )
        self._dtype = _checked_dtype(dtype)
        self._device = (
            _default_device() if device is None else _checked_device("HostKVPool", device)
        )
        shapes = self._layout.tensor_shapes(self._geometry)
        self._tensor_nbytes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        check_fits(self.nbytes, memory_limits(memory_limit_bytes, reserve_bytes))
        chunks = self._registration_chunks(chunk_bytes)
        number = 0
        if handle is not None:
            number = layouts.checked_int("HostKVPool: handle", handle, 1, 2**32 - 1)
        try:
            self._allocate(shapes, chunks)
            self._handle = ops.register_pool(self.all_layers(), handle=number)
            # A finalizer, because the registry's views would keep the memory of a pool that nobody
            # closed.
            self._drop_handle = weakref.finalize(self, ops.unregister_pool, self._handle)
        except BaseException:
            self.close()
            raise

    def _registration_chunks(self, chunk_bytes: int | None) -> list[int]:
        """For each tensor the bytes of its registrations, which cut no page's contiguous bytes."""
        if chunk_bytes is None:
            limit, name = chunk_limit_from_env(), f"{CHUNK_ENV} (in bytes)"
        else:
            limit = layouts.checked_int("HostKVPool: chunk_bytes", chunk_bytes, 1)
            name = "chunk_bytes"
        units = [
            self._layout.page_unit(self._geometry, i) * self._dtype.itemsize
            for i in range(len(self._tensor_nbytes))
        ]
        return [
            registration_chunk(nbytes, unit, limit, name)
            for nbytes, unit in zip(self._tensor_nbytes, units, strict=True)
        ]

    def _allocate(self, shapes: Sequence[tuple[int, ...]], chunks: Sequence[int]) -> None:
        for nbytes, chunk in zip(self._tensor_nbytes, chunks, strict=True):
            self._memories.append(
                HostMemory(nbytes, device_index=self._device.index, chunk_bytes=chunk)
            )
        # Tensors made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            self._tensors = tuple(
                memory.tensor.view(self._dtype).view(shape)
                for memory, shape in zip(self._memories, shapes, strict=True)
            )
            self._layers = self._layout.layer_views(self._tensors)
            self._token = _make_token(self._device)
            self._stacked = self._layout.stacked_views(self._tensors)
            # Free pages: ascending ids from _cursor on, and those freed since the last sort.
            self._sorted = torch.arange(self.num_pages, dtype=torch.int64, device="cpu")
            self._cursor = 0
            self._released: list[torch.Tensor] = []
            self._in_use = torch.zeros(self.num_pages, dtype=torch.bool, device="cpu")
        self._num_free = self.num_pages
        itemsize = self._dtype.itemsize
        self._first_page = [
            (part.tensor, part.start * itemsize, part.length * itemsize)
            for part in self._layout.page_ranges(self._geometry, 0)
        ]

    # --------------------------------------------------------------------------------------- facts

    @property
    def kind(self) -> str:
        """The pool's kind, as given."""
        return self._layout.kind

    @property
    def layout(self) -> str:
        """The pool's layout, as given."""
        return self._layout.name

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device the pool is page-locked for; ``cpu`` for plain memory."""
        return self._device

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self._geometry.num_pages

    @property
    def page_size(self) -> int:
        """Token slots in a page."""
        return self._geometry.page_size

    @property
    def num_layers(self) -> int:
        """Layers."""
        return self._geometry.num_layers

    @property
    def num_slots(self) -> int:
        """Token slots in the pool, ``num_pages * page_size``."""
        return self._geometry.num_slots

    @property
    def buffer_row_bytes(self) -> tuple[int, ...]:
        """Bytes of one token in one layer, for each buffer of a layer."""
        heads = self._geometry.num_heads
        return tuple(heads * dim * self._dtype.itemsize for dim in self._geometry.head_dims)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer of one buffer.

        Raises ValueError where K and V differ in it; ``buffer_row_bytes`` has both.
        """
        sizes = self.buffer_row_bytes
        if len(set(sizes)) > 1:
            raise ValueError(
                f"HostKVPool: row_bytes is not one number here: K and V rows have {sizes} bytes; "
                "use buffer_row_bytes"
            )
        return sizes[0]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page: all layers, all buffers."""
        return self.page_size * self.num_layers * sum(self.buffer_row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, ``num_pages * page_nbytes``: exactly what is registered."""
        return sum(self._tensor_nbytes)

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is page-locked now; False after ``close()``."""
        return bool(self._memories) and all(memory.is_pinned for memory in self._memories)

    # --------------------------------------------------------------------------------------- views

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The pool's host tensors: one, or K's and V's for ``"asymmetric"``."""
        self._check_open()
        return self._tensors

    def layer(self, index: int) -> list[torch.Tensor]:
        """One layer, ``[K, V]`` or ``[latent]``: views ``[slots, H, D]`` or ``[pages, P, H, D]``.

        Raises ValueError for a layer that the pool does not have, and after ``close()``.
        """
        self._check_open()
        index = layouts.checked_int("HostKVPool.layer: index", index, 0, self.num_layers - 1)
        return list(self._layers[index])

    def layers(self) -> list[list[torch.Tensor]]:
        """``layer(i)`` of every layer, as ``LayerwiseLoader`` takes them."""
        self._check_open()
        return [list(buffers) for buffers in self._layers]

    def all_layers(self) -> list[torch.Tensor]:
        """The views of all layers in one flat list: K0, V0, K1, V1, ..."""
        self._check_open()
        return [buffer for buffers in self._layers for buffer in buffers]

    @property
    def handle(self) -> int:
        """The pool's name for ``write_back`` and ``restore``: a number that compilers cannot clone.

        Its buffers are those of ``all_layers()``, in that order. A handle that the pool chose is
        never given out again and means nothing in another process; a graph that outlives the
        process (``torch.export``, AOTInductor), in which it is a constant, needs a pool made with
        a ``handle`` of your own. Closed with the pool: calls that name it raise then.

        Raises ValueError after ``close()``.

        Example: ``sgl_kvio.restore(pool.handle, pool.token, [k, v], device_slots, host_slots)``
        """
        self._check_open()
        return self._handle

    @property
    def token(self) -> torch.Tensor:
        """What orders the calls on ``handle`` inside a graph: one byte, on the pool's device.

        No kernel reads or writes it; see ``write_back``. Raises ValueError after ``close()``.
        """
        self._check_open()
        return self._token

    def stacked(self) -> list[torch.Tensor]:
        """A view for each buffer of a layer (K, V), of all layers, as ``load_layers`` takes them.

        ``[layers, slots, heads, dim]``, or ``[layers, pages, page_size, heads, dim]`` where
        ``layer(i)`` is paged: entry ``i`` of the first dimension is a buffer of ``layer(i)``.
        """
        self._check_open()
        return list(self._stacked)

    def page_bytes(self, page: int) -> tuple[memoryview, ...]:
        """The contiguous writable byte ranges that together are one page, without a copy.

        ``page_first``, ``page_first_direct``, ``page_head``: one range a buffer (K, V).
        ``layer_first``: one a layer and buffer, in the order of ``all_layers()``.

        The page need not be allocated, since a memoryview keeps its memory: a snapshot may read
        all pages. Whoever allocates the page meanwhile writes to the same bytes.

        Raises ValueError for a page that the pool does not have, and after ``close()``.
        """
        page = self._page_number("page_bytes", page)
        memories = self._open_memories()
        return tuple(
            memories[tensor].bytes_view(start, nbytes)
            for tensor, start, nbytes in self._byte_ranges(page)
        )

    def page_ranges(self, page: int) -> tuple[tuple[int, int], ...]:
        """The ranges of ``page_bytes`` as ``(address, nbytes)``, for storage engines.

        As few as the layout allows and in the same order, see ``page_bytes``. The host addresses
        stay what they are until the pool is closed, and belong to the caller from ``alloc`` to
        ``free``. They keep nothing alive: no address may be used after ``free`` of its page, nor
        after ``close()`` unless one of ``tensors`` is still held.

        Raises ValueError for a page that the pool does not have or that is not allocated, and
        after ``close()``.

        Example::

            (page,) = pool.alloc(1).tolist()
            for address, nbytes in pool.page_ranges(page):
                engine.register(address, nbytes)
        """
        page = self._page_number("page_ranges", page)
        with self._lock:
            memories = self._open_memories()
            if not self._in_use[page]:
                raise ValueError(
                    f"HostKVPool.page_ranges: page got {page}; needs an allocated page, "
                    "whose bytes nobody else writes"
                )
            return tuple(
                (memories[tensor].address + start, nbytes)
                for tensor, start, nbytes in self._byte_ranges(page)
            )

    def _page_number(self, where: str, page: int) -> int:
        return layouts.checked_int(f"HostKVPool.{where}: page", page, 0, self.num_pages - 1)

    def _open_memories(self) -> list[HostMemory]:
        self._check_open()
        return self._memories

    def _byte_ranges(self, page: int) -> list[tuple[int, int, int]]:
        """The contiguous pieces of a page: tensor, first byte in it, bytes."""
        # In every layout the same piece of the next page follows at once.
        return [
            (tensor, start + page * nbytes, nbytes) for tensor, start, nbytes in self._first_page
        ]

    # ------------------------------------------------------------------------------------- staging

    def staging(
        self,
        nbytes: int = DEFAULT_STAGING_BYTES,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """A device buffer through which whole pages go, for ``transfer_staged``.

        A contiguous 1-D uint8 tensor, of as many pages as ``nbytes`` hold and at least one; a page
        takes the bytes of its ranges (see ``page_ranges``), each rounded up to 256. One buffer
        serves all layers and both directions.
        ``device`` None means the pool's device: the CPU for a pool of plain memory.

        Cost: the first call for a size takes that much device memory from torch's allocator and
        waits once for the caller's current stream, because the memory may come from work that is
        queued there. Later calls return the same tensor. Each size is memory of its own until
        ``close()``. Two halves of a buffer take turns, so relayout and copy overlap from two pages
        on.

        Stream contract: every call that uses the buffer writes to it, so such calls need an order
        among them: one stream, events, or buffers of different sizes. ``close()`` waits for the
        buffer's device before it lets go of it.

        Raises ValueError for a bad argument and after ``close()``, RuntimeError where the buffer
        would first be made inside a CUDA graph's capture (make it before), and torch's own error
        when the device has not that much memory; nothing stays allocated then.

        Example::

            staging = pool.staging()
            sgl_kvio.transfer_staged(pool.all_layers(), device_buffers, pages, device_pages,
                                     staging, page_size=pool.page_size, index_unit="page")
        """
        nbytes = layouts.checked_int("HostKVPool.staging: nbytes", nbytes, 0)
        self._check_open()
        place = self._device if device is None else _checked_device("HostKVPool.staging", device)
        unit = STAGING_PAGE_ALIGNMENT
        page_nbytes = sum(-(-count // unit) * unit for _, _, count in self._first_page)
        size = max(nbytes // page_nbytes, 1) * page_nbytes
        # A lock of its own: alloc and free need not wait for the device.
        with self._staging_lock:
            self._check_open()
            if (place, size) not in self._staging:
                self._staging[place, size] = _staging_buffer(place, size)
            return self._staging[place, size]

    # --------------------------------------------------------------------------------------- pages

    @property
    def num_free(self) -> int:
        """Pages that ``alloc`` can still hand out."""
        self._check_open()
        return self._num_free

    def alloc(self, n: int) -> torch.Tensor:
        """Takes ``n`` pages; an int64 CPU tensor of their ids, which is the caller's own.

        Raises RuntimeError, with both numbers, when fewer are free, and ValueError when ``n`` is
        not an int of at least 0; the pool is then unchanged.
        """
        n = layouts.checked_int("HostKVPool.alloc: n", n, 0)
        with self._lock:
            self._check_open()
            if n > self._num_free:
                raise RuntimeError(
                    f"HostKVPool.alloc: n got {n}; needs at most {self._num_free}, "
                    f"the free ones of {self.num_pages} pages"
                )
            if n > self._sorted.numel() - self._cursor:
                rest = [self._sorted[self._cursor :], *self._released]
                self._sorted, self._cursor, self._released = torch.cat(rest).sort().values, 0, []
            pages = self._sorted[self._cursor : self._cursor + n].clone()
            self._cursor += n
            self._num_free -= n
            self._in_use[pages] = True
            return pages

    def free(self, pages: torch.Tensor | Sequence[int]) -> None:
        """Gives pages back.

        ``pages`` is a 1-D int32 or int64 CPU tensor or a sequence of ints. Raises ValueError for a
        page that the pool does not have, that is not allocated, or that is named twice; the pool
        is then unchanged.
        """
        ids = self._page_ids("free", pages)
        with self._lock:
            self._check_open()
            idle = ids[~self._in_use[ids]]
            if idle.numel():
                raise ValueError(
                    f"HostKVPool.free: pages got {_some(idle.tolist())}; "
                    "needs allocated pages (double free?)"
                )
            distinct, counts = ids.unique(return_counts=True)
            if distinct.numel() != ids.numel():
                repeated = distinct[counts > 1].tolist()
                raise ValueError(
                    f"HostKVPool.free: pages got {_some(repeated)} more than once; "
                    "needs every page once (double free)"
                )
            self._in_use[ids] = False
            self._released.append(ids)
            self._num_free += ids.numel()

    def token_indices(
        self, pages: torch.Tensor | Sequence[int], num_tokens: int | None = None
    ) -> torch.Tensor:
        """Token slots of pages, in their order: an int64 CPU tensor of ``num_tokens`` entries.

        ``num_tokens`` None means all that the pages hold.
        Raises ValueError for a page that the pool does not have, or more tokens than the pages
        hold.

        Example: with ``page_size=4``, ``token_indices([2, 0], 6)`` is ``[8, 9, 10, 11, 0, 1]``.
        """
        self._check_open()
        ids = self._page_ids("token_indices", pages)
        room = ids.numel() * self.page_size
        if num_tokens is None:
            num_tokens = room
        num_tokens = layouts.checked_int(
            "HostKVPool.token_indices: num_tokens", num_tokens, 0, room
        )
        offsets = torch.arange(self.page_size, dtype=torch.int64, device="cpu")
        return (ids[:, None] * self.page_size + offsets).flatten()[:num_tokens]

    def _page_ids(self, where: str, pages: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """A private int64 copy of page ids, every one of them in the pool."""
        name = f"HostKVPool.{where}: pages"
        needed = f"0..{self.num_pages - 1}"
        if not isinstance(pages, torch.Tensor):
            numbers = _ints(name, pages)
            # Before they become int64, which not all of them need to fit.
            outside = [number for number in numbers if not 0 <= number < self.num_pages]
            if outside:
                raise ValueError(f"{name} got {_some(outside)}; needs {needed}")
            return torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if pages.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} got dtype {pages.dtype}; needs int32 or int64")
        if pages.device.type != "cpu" or pages.dim() != 1:
            raise ValueError(
                f"{name} got {pages.dim()} dims on {pages.device}; needs a 1-D tensor on the CPU"
            )
        if pages.layout != torch.strided:
            raise ValueError(f"{name} got layout {pages.layout}; needs a dense tensor")
        ids = pages.to(torch.int64, copy=True)
        unknown = ids[(ids < 0) | (ids >= self.num_pages)]
        if unknown.numel():
            raise ValueError(f"{name} got {_some(unknown.tolist())}; needs {needed}")
        return ids

    # ------------------------------------------------------------------------------------ lifetime

    def close(self) -> None:
        """Waits for the device, drops the registration, and lets go of the memory. Again: no-op.

        Views that are still held stay readable and writable as plain memory; the system gets the
        memory back with the last of them. Everything else of the pool raises ValueError
        afterwards.
        """
        with self._lock:
            self._closed = True
            self._tensors, self._layers, self._stacked = (), [], []
            memories, self._memories = self._memories, []
        error: BaseException | None = None
        closes = [memory.close for memory in reversed(memories)]
        for release in [self._close_handle, self._drop_staging, *closes]:
            try:
                release()
            except Exception as failed:
                error = error or failed
        if error is not None:
            raise error

    def _close_handle(self) -> None:
        if self._drop_handle is not None:
            self._drop_handle()

    def _drop_staging(self) -> None:
        with self._staging_lock:
            dropped, self._staging = self._staging, {}
        # torch's allocator orders a reuse after the stream that the memory was taken on, and no
        # other.
        for index in sorted({device.index for device, _ in dropped if device.type == "cuda"}):
            torch.cuda.synchronize(index)

    def __enter__(self) -> HostKVPool:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # copy, deepcopy and pickle all come through here.
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled: a copy would be a second "
            "allocator over the same memory"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "page-locked" if self.is_pinned else "plain memory"
        return (
            f"HostKVPool({self.kind!r}, {self.layout!r}, num_pages={self.num_pages}, "
            f"page_size={self.page_size}, num_layers={self.num_layers}, dtype={self.dtype}, "
            f"nbytes={self.nbytes}, {state})"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("HostKVPool: used after close()")


def _some(ids: Sequence[int]) -> str:
    """A few ids for an error text."""
    return f"{ids[:4]}" if len(ids) <= 4 else f"{ids[:4]} and {len(ids) - 4} more"


def _ints(name: str, values: Iterable[int]) -> list[int]:
    try:
        items = list(values)
    except TypeError as error:
        raise ValueError(f"{name} got {values!r}; needs ints") from error
    numbers = []
    for position, item in enumerate(items):
        number = layouts.as_int(item)
        if number is None:
            raise ValueError(f"{name} got {item!r} at position {position}; needs ints")
        numbers.append(number)
    return numbers


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"HostKVPool: dtype got {dtype!r}; needs a torch.dtype")
    # Quantized tensors carry scales that a view of bytes cannot have.
    if str(dtype).startswith("torch.q"):
        raise ValueError(f"HostKVPool: dtype got {dtype}; needs one without a quantizer, or uint8")
    return dtype


def _default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _checked_device(where: str, device: torch.device | str | int) -> torch.device:
    """``cpu``, or a CUDA device of this process with its index; ValueError for any other."""
    needed = "needs a CUDA device or 'cpu'"
    # Not through torch.device, which keeps 8 bits of a number: 256 would be GPU 0.
    index = layouts.as_int(device)
    if index is None:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: device got {device!r}; {needed}") from error
        if wanted.type == "cpu":
            return torch.device("cpu")
        if wanted.type != "cuda":
            raise ValueError(f"{where}: device got {device!r}; {needed}")
        index = wanted.index
    count = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index < 0:
        raise ValueError(f"{where}: device got {device!r}; {needed}")
    if index >= count:
        raise ValueError(f"{where}: device got {device!r}; this process has {count} CUDA devices")
    return torch.device("cuda", index)


def _make_token(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)


def _staging_buffer(device: torch.device, nbytes: int) -> torch.Tensor:
    """``nbytes`` of ``device``, which may be used on any stream."""
    # Tensors made under inference_mode could not be written outside of it.
    with torch.inference_mode(False):
        if device.type == "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"HostKVPool.staging: nbytes got {nbytes} while a CUDA graph is captured; "
                    "needs a first call before the capture"
                )
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.current_stream().synchronize()
            return buffer
