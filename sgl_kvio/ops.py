"""The ops as Python functions, and their fake kernels.

Every function here is the same-named op ``torch.ops.kvio.*`` with documentation; model code may
call either. Ops raise ``RuntimeError`` whose text names the op, the argument, what it got and what
it needs.
"""

import functools
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvio import _binary  # noqa: F401  registers torch.ops.kvio

_kvio = torch.ops.kvio
# Overloads by name: looking for the one that fits an epoch costs a call 10 us.
_LOAD_LAYERS_TENSOR, _LOAD_LAYERS_INT = _kvio.load_layers.default, _kvio.load_layers.int
_WAIT_LAYER_TENSOR, _WAIT_LAYER_INT = _kvio.wait_layer.default, _kvio.wait_layer.int


def _changed(
    row_ndim: int, page_size: int, index_unit: str, backend: str, num_blocks: int, prefer: str
) -> dict[str, Any]:
    """The options that are not the op's defaults: passing one costs a call 0.3 us."""
    options: dict[str, Any] = {}
    if row_ndim != 2:
        options["row_ndim"] = row_ndim
    if page_size != 1:
        options["page_size"] = page_size
    if index_unit != "token":
        options["index_unit"] = index_unit
    if backend != "auto":
        options["backend"] = backend
    if num_blocks != 0:
        options["num_blocks"] = num_blocks
    if prefer != "throughput":
        options["prefer"] = prefer
    return options


def _as_list(buffers: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(buffers, list):
        return buffers
    return [buffers] if isinstance(buffers, torch.Tensor) else list(buffers)


def transfer(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    """Copy KV-cache rows between pools: ``dst[i][dst_indices] = src[i][src_indices]``, every ``i``.

    One call serves one buffer or all layers, K and V, on the CPU, on a GPU, or between page-locked
    host memory and a GPU, in either direction.

    Args:
        dst: Buffers to write, strided views ``[slots, *row]`` or ``[pages, page_size, *row]``; the
            last ``row_ndim`` dims are one token's row. All on one device. A single tensor stands
            for a list of one.
        src: Buffers to read, as many as ``dst``. ``src[i]`` has the dtype and row shape of
            ``dst[i]``; slots and strides may differ, and different pairs may have different rows.
        dst_indices: 1-D int32 or int64, on the CPU or on the GPU of the pools.
        src_indices: Like ``dst_indices``: same dtype, length and device.
        row_ndim: Number of trailing dims that make a row.
        page_size: Token slots of one page. With ``index_unit="page"`` it is what an index counts;
            with token indices it may only speed things up, never change a byte.
        index_unit: ``"token"``: an index is a token slot. ``"page"``: index ``p`` is the
            ``page_size`` slots from ``p * page_size`` on.
        backend: ``"auto"``, ``"register"`` (a GPU kernel for rows of any size and alignment),
            ``"tma"`` (a GPU kernel of bulk copies, compute capability 9.0 and later),
            ``"copy_engine"`` (driver copies, CPU indices only) or ``"cpu"``. A backend that cannot
            serve the call raises. ``"auto"`` takes the one with the highest rate for the call's
            runs, see :func:`explain`; ``KVIO_BACKEND_ORDER``, ``KVIO_TMA=0`` and
            ``KVIO_COPY_ENGINE=0`` overrule it.
        num_blocks: Most CTAs the GPU kernel may take; 0 lets the library choose.
        prefer: What ``"auto"`` favours. ``"throughput"``: the highest rate, and among backends
            within 3% of it the one that disturbs compute least. ``"quiet"``: the one that disturbs
            compute least among those that have at least 90% of the highest rate.

    Stream contract: with any tensor on a GPU the copy is enqueued on the caller's current stream of
    that GPU, after everything enqueued there before, and the call returns without a host sync, with
    GPU indices as with CPU ones. Keep pools and GPU index tensors alive until the stream has passed
    (``record_stream`` those made on another stream); CPU indices may change at once. With every
    tensor on the CPU the copy is done on return.

    Indices: CPU indices are checked before a byte moves. A GPU index outside its pool moves nothing
    for its entry and is reported by the next call or by :func:`check`. Sources may repeat; the
    order in which a repeated destination is written is undefined (``KVIO_DEBUG_CHECKS=1`` refuses
    it for CPU indices), and so are the bytes of a row that one call both reads and writes (refused
    likewise). Empty lists are a no-op.

    Not differentiable: the copy is invisible to autograd and does not bump version counters.
    ``torch.compile`` may clone a host pool that is written; :func:`write_back` names it instead.

    Raises:
        RuntimeError: any argument that does not fit, host memory that is not page-locked in a GPU
            call, or a fault that an earlier call left.

    Example::

        pages = torch.tensor([7, 2])  # host pages 7, 2 -> device pages 0, 1
        sgl_kvio.transfer(
            [k_device, v_device],
            [k_host, v_host],
            torch.tensor([0, 1]),
            pages,
            page_size=64,
            index_unit="page",
        )
    """
    options = _changed(row_ndim, page_size, index_unit, backend, num_blocks, prefer)
    _kvio.transfer(_as_list(dst), _as_list(src), dst_indices, src_indices, **options)


def transfer_staged(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    staging: torch.Tensor,
    *,
    page_size: int,
    row_ndim: int = 2,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> None:
    """Copy whole pages between a host pool and a device pool through a device buffer.

    The same rows as :func:`transfer` moves, for host pools in which a page's bytes lie together
    (``page_first``, ``page_first_direct``, ``page_head``; all layers of a page in one call).
    Write-back gathers pages into ``staging`` by a kernel and copies each to the host in one piece,
    restore the other way round. The two halves of ``staging`` take turns, so that copying and
    relayout overlap.

    Args:
        dst, src, row_ndim, index_unit: as in :func:`transfer`. One of the pools is on the host and
            the other one on a GPU, or everything is on the CPU.
        dst_indices, src_indices: 1-D int32 or int64 of equal dtype and length. The host pool's list
            is on the CPU; the device pool's list may be on the CPU or on its GPU.
        staging: contiguous, any dtype, on the device pool's GPU; its content is lost. At least one
            page of all buffers (each contiguous range of it rounded up to 256 bytes); two halves of
            several pages each are faster. ``HostKVPool.staging`` makes one. Calls on different
            streams need staging buffers of their own.
        page_size: token slots of a host page.
        num_blocks: most CTAs of the relayout kernel; 0 takes every SM for a short time, which
            disturbs what runs beside it least.

    Positions that make no whole host page (tokens that are not consecutive, a page that begins in
    the middle, a short last page) are moved row by row by the ``register`` kernel in the same call.

    Stream contract: as :func:`transfer`. Copies run on a stream of the library's own, forked from
    the caller's current stream and joined to it by events; the host never waits. While the stream
    is being captured every page is a copy node, and the host pool's index values stay in the graph.

    A GPU index outside its pool is reported as for :func:`transfer`. In a write-back the host row
    that it was for gets undefined bytes, because its page is copied whole; nothing outside the page
    is written.

    Raises:
        RuntimeError: as :func:`transfer`; host rows that do not fill their pages; a staging buffer
            smaller than one page; the host pool's index list on a GPU.
    """
    _kvio.transfer_staged(
        _as_list(dst),
        _as_list(src),
        dst_indices,
        src_indices,
        staging,
        page_size=page_size,
        row_ndim=row_ndim,
        index_unit=index_unit,
        num_blocks=num_blocks,
    )


def explain_staged(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    staging: torch.Tensor,
    *,
    page_size: int,
    row_ndim: int = 2,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> str:
    """What :func:`transfer_staged` would do: pages, rest, staging, copies, what a CUDA graph keeps.

    Moves nothing.
    """
    text = _kvio.explain_staged(
        _as_list(dst),
        _as_list(src),
        dst_indices,
        src_indices,
        staging,
        page_size=page_size,
        row_ndim=row_ndim,
        index_unit=index_unit,
        num_blocks=num_blocks,
    )
    return str(text)


def register_pool(
    buffers: torch.Tensor | Sequence[torch.Tensor], *, row_ndim: int = 2, handle: int = 0
) -> int:
    """Give host buffers a handle, by which :func:`write_back` and :func:`restore` reach them.

    A ``HostKVPool`` has one already (``HostKVPool.handle``); this is for host memory of your own.
    The handle is a number, so a compiled or exported graph names the pool without holding it, and
    no pass can clone it.

    Args:
        buffers: host tensors, strided views as in :func:`transfer`, in the order in which
            ``first_buffer`` counts them. For calls on a GPU their memory must be page-locked.
        row_ndim: trailing dims of a buffer that make a row.
        handle: a number of your own, 1 to 2**32 - 1, for graphs that outlive the process: an
            exported program, in which the handle is a constant, finds the pool that has its number.
            0 chooses one, which no other pool of the process ever gets.

    The buffers stay alive until :func:`unregister_pool`.

    Raises:
        RuntimeError: no buffers, a tensor that is not on the CPU or has no rows of ``row_ndim``
            dims, a handle that an open pool has.
    """
    return int(_kvio.register_pool(_as_list(buffers), row_ndim=row_ndim, handle=handle))


def unregister_pool(handle: int) -> None:
    """Close a handle of :func:`register_pool`: later calls that name it raise.

    The handle of a ``HostKVPool`` is closed with the pool.

    Calls under way on the CPU end as they would have; work that a GPU still has to do needs the
    memory (synchronize first), and so does every CUDA graph that captured a call.

    Raises:
        RuntimeError: no open pool has the handle.
    """
    _kvio.unregister_pool(handle)


def write_back(
    handle: int,
    token: torch.Tensor,
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    first_buffer: int = 0,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    """Copy rows into a host pool that is named by its handle: what ``torch.compile`` needs.

    ``pool[first_buffer + i][dst_indices] = src[i][src_indices]``, every ``i``, by the same kernels
    and under the same contract as :func:`transfer`. The pool is no argument of the graph:
    functionalization, which under ``aot_eager`` hands :func:`transfer` a clone of a mutated host
    pool, does not see it.

    Args:
        handle: ``HostKVPool.handle``, or what :func:`register_pool` returned.
        token: ``HostKVPool.token``, or any tensor (one element is enough) on the CPU or on the GPU
            of the call. The schema says that the op writes it, so compilers keep every call and the
            order among calls of one token; no kernel touches it. In a graph it has to be an input
            or a buffer of a module: a call whose token is made inside the graph is dead code.
        src: buffers to read, a device pool's.
        dst_indices, src_indices: rows of the host pool, rows of ``src``; as in :func:`transfer`.
        first_buffer: the pool's buffer that ``src[0]`` goes to: ``2 * layer`` where a layer is K
            and V.
        page_size, index_unit, backend, num_blocks, prefer: as in :func:`transfer`.

    Order: a token orders calls of :func:`write_back` and :func:`restore` among each other, as they
    stand in the program, and against nothing else. Other accesses to the pool's memory inside one
    graph (:func:`transfer` on its tensors, reads of its views) have no order against them. Give
    every call on one pool the same token.

    Errors call the host side ``pool``: ``pool[i]`` is the buffer that ``src[i]`` is paired with.

    Raises:
        RuntimeError: as :func:`transfer`; a handle that is unknown or whose pool was closed; more
            tensors than the pool has buffers from ``first_buffer`` on.

    Example::

        @torch.compile(fullgraph=True)
        def save(layer: int, k, v, host_pages, device_pages):
            sgl_kvio.write_back(pool.handle, pool.token, [k, v], host_pages, device_pages,
                                first_buffer=2 * layer, page_size=64, index_unit="page")
    """
    options = _changed(2, page_size, index_unit, backend, num_blocks, prefer)
    if first_buffer != 0:
        options["first_buffer"] = first_buffer
    _kvio.write_back(handle, token, _as_list(src), dst_indices, src_indices, **options)


def restore(
    handle: int,
    token: torch.Tensor,
    dst: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    first_buffer: int = 0,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    """Copy rows out of a host pool that is named by its handle; see :func:`write_back`.

    ``dst[i][dst_indices] = pool[first_buffer + i][src_indices]``, every ``i``. ``dst`` is marked as
    written, so what stands behind the call in a graph reads the new rows.

    Example::

        for layer, (k, v) in enumerate(device_layers):  # inside a compiled function
            sgl_kvio.restore(pool.handle, pool.token, [k, v], device_slots, host_slots,
                             first_buffer=2 * layer)
            x = attention(x, k, v)
    """
    options = _changed(2, page_size, index_unit, backend, num_blocks, prefer)
    if first_buffer != 0:
        options["first_buffer"] = first_buffer
    _kvio.restore(handle, token, _as_list(dst), dst_indices, src_indices, **options)


def memcpy_batch(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_offsets: Sequence[int],
    src_offsets: Sequence[int],
    nbytes: Sequence[int],
) -> None:
    """Copy byte ranges: ``nbytes[k]`` bytes from ``src[k]`` to ``dst[k]``, each at its offset.

    ``dst`` and ``src`` hold contiguous tensors, one a copy or exactly one for all copies. Offsets
    are bytes from the tensor's first element. The whole plan is checked before a byte moves. Ranges
    written must not overlap each other, nor ranges read. On a GPU the copies are driver copies on
    the caller's current stream, without a host sync; host tensors must be page-locked.

    Raises:
        RuntimeError: lengths that differ, a range outside its tensor, a tensor that is not
            contiguous.
    """
    _kvio.memcpy_batch(
        _as_list(dst), _as_list(src), list(dst_offsets), list(src_offsets), list(nbytes)
    )


def swap_in(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache_locs: torch.Tensor,
    lru_slots: torch.Tensor,
    host_cache: torch.Tensor | Sequence[torch.Tensor],
    device_buffer: torch.Tensor | Sequence[torch.Tensor],
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    hot_buffer_size: int,
    num_real_reqs: torch.Tensor | None = None,
    device_locs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
    row_ndim: int = 2,
    num_blocks: int = 0,
) -> None:
    """Bring the tokens that sparse attention selected onto the device; say where each one lies.

    Every request has a hot buffer: ``hot_buffer_size`` slots (B) on the device for a cache that is
    complete on the host only. Selected tokens that are resident stay; each other one takes the
    least recently used slot that no selected token holds, and its row is copied there from the
    host. Column B of ``device_buffer_locs`` is the newest token's slot: its row is there already,
    and it is never evicted or written.

    ``bs`` is the batch, ``K`` its selection (at most B), ``R`` the request slots. Every 2-D tensor
    may have a row stride of its own.

    Args:
        top_k_tokens: int32 ``[bs, K]``, token positions; a negative entry selects nothing.
        device_buffer_tokens: int32 ``[R, B or more]``, in and out: the token in each slot, -1 for
            none, each token once a row. Columns from B on are never touched.
        device_buffer_locs: int32 ``[R, B + 1 or more]``: each slot's row in ``device_buffer``.
        host_cache_locs: int32 or int64 ``[R, max_len]``: each token's row in ``host_cache``.
        lru_slots: int16 ``[R, B]``, in and out: permutation of the slots, least recently used one
            first.
        host_cache: buffers to read, strided views as in :func:`transfer`; a location is a token
            slot of each. May be empty: then nothing is copied.
        device_buffer: buffers to write, as many, with the row shapes and dtypes of ``host_cache``.
        top_k_device_locs: int32 ``[bs, K]``, out: the device row of each entry, or -1. Every entry
            is written.
        req_pool_indices: int32 or int64 ``[bs]``: the request slot of each batch row. Two rows must
            not work on one hot buffer.
        seq_lens: int32 or int64 ``[bs]``: tokens of the request, the newest one included.
        hot_buffer_size: B, 1 to 32,767.
        num_real_reqs: int32 ``[1]``: rows from here on are padding; -1 is written to their entries
            and nothing else is touched. ``None``: every row is real.
        device_locs: int32 ``[R, max_len]``: the device row of tokens that the regular pool still
            has, -1 for others. Those tokens get that row and take no slot.
        miss_src, miss_dst, miss_count: int64 ``[bs, K]``, int32 ``[bs, K]``, int32 ``[bs]``, out,
            all three or none: host row and device row of each copy of a batch row, and their
            number, for :func:`copy_planned`. The number of a padded row is 0. Entries behind the
            number keep their values.
        skip_io: do everything but copy rows.
        row_ndim: trailing dims of a buffer that make a row.
        num_blocks: most CTAs that the GPU kernel may take; 0 lets the library choose.

    Entries that name one token share its slot. A request of at most B tokens that has no
    ``device_locs`` keeps every token in the slot of its position: entry ``i`` below its length gets
    that slot's row, entries behind it -1, and no state changes. Otherwise ``lru_slots`` becomes:
    slots that neither were selected nor taken, in their old order; slots that were taken, in
    the order in which their tokens were first named; selected slots, in their old order.

    Stream contract: with every tensor on the CPU the work is done on return. With every tensor but
    the host cache on one GPU the call is enqueued on the caller's current stream of that GPU and
    returns without a host sync; it may be captured into a CUDA graph, at the largest batch with
    ``num_real_reqs``. The host cache is then page-locked host memory or on the same GPU.

    Bad values on a GPU cannot raise: the entry yields -1, a fault is recorded (:func:`check`), and
    the rest is served. On the CPU they are found before anything changes: a token that is neither
    negative nor below its request's length and ``max_len``; a location that would be read, written
    or given out and is outside its pool; a request slot that does not exist; an ``lru_slots`` row
    that is no permutation; a resident token twice. A location that the call has no use for may be
    anything.

    Not differentiable: invisible to autograd, and version counters stay.

    Raises:
        RuntimeError: any argument that does not fit, tensors that share memory with one that is
            written, or a bad value; names the argument, its position, the value and the limit.

    Example::

        # Tokens 4 and 2 are resident in slots 1 and 2; token 6 takes slot 0, row 9.
        sgl_kvio.swap_in(
            torch.tensor([[4, 6, 2]], dtype=torch.int32),
            tokens,  # [[1, 4, 2, 5]] -> [[6, 4, 2, 5]]
            locs,  # [[9, 7, 3, 5, 11]]
            host_locs,
            lru,  # [[0, 1, 2, 3]] -> [[3, 0, 1, 2]]
            host_rows,
            device_rows,
            out,  # [[7, 9, 3]]
            torch.tensor([0]),
            torch.tensor([8]),
            hot_buffer_size=4,
        )

    The scheme is that of HiSparse in SGLang (``load_cache_to_device_buffer_mla``), whose tensors
    these are.
    """
    _kvio.swap_in(
        top_k_tokens,
        device_buffer_tokens,
        device_buffer_locs,
        host_cache_locs,
        lru_slots,
        _as_list(host_cache),
        _as_list(device_buffer),
        top_k_device_locs,
        req_pool_indices,
        seq_lens,
        hot_buffer_size=hot_buffer_size,
        num_real_reqs=num_real_reqs,
        device_locs=device_locs,
        miss_src=miss_src,
        miss_dst=miss_dst,
        miss_count=miss_count,
        skip_io=skip_io,
        row_ndim=row_ndim,
        num_blocks=num_blocks,
    )


def copy_planned(
    host_cache: torch.Tensor | Sequence[torch.Tensor],
    device_buffer: torch.Tensor | Sequence[torch.Tensor],
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    num_real_reqs: torch.Tensor,
    *,
    skip_io: bool = False,
    row_ndim: int = 2,
    num_blocks: int = 0,
) -> None:
    """Repeat the copies that a :func:`swap_in` recorded, for another layer of the same selection.

    Copies row ``miss_src[b, m]`` of every host buffer to row ``miss_dst[b, m]`` of its device
    buffer, for ``b < num_real_reqs[0]`` and ``m < miss_count[b]``. No state is read or changed.

    Args:
        host_cache, device_buffer, row_ndim, num_blocks: as in :func:`swap_in`.
        miss_src, miss_dst, miss_count: int64 ``[bs, K]``, int32 ``[bs, K]``, int32 ``[bs]``, as
            recorded; row strides may differ.
        num_real_reqs: int32 ``[1]``: rows of the plan from here on are not read.
        skip_io: check the plan and copy nothing.

    Stream contract: as :func:`swap_in`. Every device row is named once; the bytes of one that is
    named twice are undefined.

    Raises:
        RuntimeError: any argument that does not fit, a count or a row outside its pool, before a
            byte moves.

    Example::

        sgl_kvio.swap_in(..., miss_src=src, miss_dst=dst, miss_count=count, num_real_reqs=real)
        sgl_kvio.copy_planned(host_layer_1, device_layer_1, src, dst, count, real)

    The plan is that of HiSparse in SGLang (``copy_cache_planned_mla``).
    """
    _kvio.copy_planned(
        _as_list(host_cache),
        _as_list(device_buffer),
        miss_src,
        miss_dst,
        miss_count,
        num_real_reqs,
        skip_io=skip_io,
        row_ndim=row_ndim,
        num_blocks=num_blocks,
    )


LayerBuffers = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


def layer_flags(num_layers: int, device: torch.device | str | int) -> torch.Tensor:
    """The flags of loads of up to ``num_layers`` layers, for :func:`load_layers`.

    An int64 tensor ``[2, num_layers]`` of zeros on ``device``, which is where the device pool is.
    ``flags[0, i]`` is the newest epoch whose rows of layer ``i`` are in place; row 1 belongs to
    loads in flight. Loads with one tensor have to follow each other: on one stream, or ordered by
    events.
    """
    return torch.zeros(2, num_layers, dtype=torch.int64, device=device)


def load_layers(
    dst: LayerBuffers,
    src: LayerBuffers,
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    flags: torch.Tensor,
    epoch: torch.Tensor | int,
    *,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> None:
    """Restore the same rows of every layer, layer by layer, in one launch that says how far it is.

    What :func:`transfer` does for one layer, for all of them in order: layer ``i``'s flag is raised
    to ``epoch`` as soon as all its rows are in place, and :func:`wait_layer` waits for that on the
    stream of those who read it. One launch costs the CPU what a one-layer :func:`transfer` does,
    and between two layers the link does not pause.

    Args:
        dst: The device pool, in one of two forms. Stacked: a tensor ``[layers, slots, *row]`` or
            ``[layers, pages, page_size, *row]``, or a list of one for each buffer of a layer (K,
            V); any strides, which may differ between buffers. Or a list of layers, each the list of
            its buffers as :func:`transfer` takes them (``HostKVPool.layers()``): then buffer ``j``
            has the same dtype, shape and strides in every layer. Stacked pools cost less: every
            tensor of a list adds a quarter of a microsecond. At most 16 buffers a layer, of at most
            4 row shapes.
        src: The host pool (or a pool on the same GPU), in the form of ``dst``, or in the other one.
            ``HostKVPool.stacked()`` gives a pool's layers stacked, whatever its layout.
        dst_indices, src_indices, row_ndim, page_size, index_unit, num_blocks: as in
            :func:`transfer`; all layers have the same.
        flags: Of :func:`layer_flags`, on the device of ``dst``, at least as many columns as layers.
        epoch: Which load it is: a number that grows from load to load on these flags, 1 or more.
            Either an int, or an int64 tensor of one entry on the device of ``flags``, which is read
            when the load begins to run. A CUDA graph needs the tensor, grown within the graph, on
            the stream that the load's stream and its readers both come from.

    Stream contract: as :func:`transfer`. The load runs on the caller's current stream; give it a
    side stream that waits for the current one, as for any transfer beside a forward pass. Enqueue
    it before the waits for it: a wait that is enqueued first, on a stream that the load has to
    wait for, is one for something that cannot begin. Ordering after the whole load by an event
    works too, and the next load with the same flags, or a change of ``epoch``'s tensor, needs that
    or a wait for the last layer.

    While a CUDA graph is being captured: indices on the GPU and an epoch in a tensor, both read at
    every replay. Faults are as in :func:`transfer`; a row that is not moved keeps no flag down, and
    an epoch that is not above its flag raises from the next call or :func:`check`. On the CPU the
    layers are in place on return.

    Raises:
        RuntimeError: any argument that does not fit, host memory that is not page-locked, a host
            pool as ``dst`` of a GPU call, or a fault that an earlier call left.

    Example::

        flags = sgl_kvio.layer_flags(len(blocks), "cuda")
        side = sgl_kvio.create_stream()
        for epoch, request in enumerate(requests, 1):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                sgl_kvio.load_layers([k, v], pool.stacked(), to, of, flags, epoch)
            for i, block in enumerate(blocks):
                sgl_kvio.wait_layer(flags, i, epoch)
                hidden = block(hidden, k[i], v[i])

    In a CUDA graph ``epoch`` is a tensor, and the capture begins with ``epoch.add_(1)``.
    """
    options = _changed(row_ndim, page_size, index_unit, "auto", num_blocks, "throughput")
    targets, num_layers = _by_layer(dst)
    sources, num_source_layers = _by_layer(src)
    if num_layers != num_source_layers:
        targets, num_layers = _listed(targets, num_layers)
        sources, num_source_layers = _listed(sources, num_source_layers)
        if num_layers != num_source_layers:
            raise RuntimeError(
                f"kvio::load_layers: src has {num_source_layers} layers but dst has {num_layers};"
                " it needs equal numbers"
            )
    if num_layers:
        options["num_layers"] = num_layers
    op = _LOAD_LAYERS_TENSOR if isinstance(epoch, torch.Tensor) else _LOAD_LAYERS_INT
    op(targets, sources, dst_indices, src_indices, flags, epoch, **options)


def _by_layer(buffers: LayerBuffers) -> tuple[list[torch.Tensor], int]:
    """Tensors as the op takes them, and the number of layers they are listed by, 0 for stacked."""
    # Lists first: that something is no tensor takes longest to find out.
    if not isinstance(buffers, list) and isinstance(buffers, torch.Tensor):
        return [buffers], 0
    layers: list[Any] = buffers if isinstance(buffers, list) else list(buffers)
    if not layers or isinstance(layers[0], torch.Tensor):
        return layers, 0
    for i, layer in enumerate(layers):
        if len(layer) != len(layers[0]):
            raise RuntimeError(
                f"kvio::load_layers: layer {i} has {len(layer)} buffers but layer 0 has"
                f" {len(layers[0])}; it needs as many for every layer"
            )
    return [buffer for layer in layers for buffer in layer], len(layers)


def _listed(buffers: list[torch.Tensor], num_layers: int) -> tuple[list[torch.Tensor], int]:
    """The same by layer, where it was stacked."""
    if num_layers:
        return buffers, num_layers
    layers = list(zip(*(buffer.unbind(0) for buffer in buffers), strict=True))
    return [buffer for layer in layers for buffer in layer], len(layers)


def wait_layer(
    flags: torch.Tensor,
    layer: int,
    epoch: torch.Tensor | int,
    after: torch.Tensor | Sequence[torch.Tensor] = (),
    *,
    timeout_ms: int = 60000,
) -> None:
    """Hold the caller's current stream until ``layer`` of load ``epoch`` is in place.

    Args:
        flags, epoch: as in :func:`load_layers`. An epoch that a later load has reached counts as
            reached, and 0 or less as there from the start: so model code may wait in every forward
            pass, with 0 or an epoch that stands still where nothing was loaded.
        layer: which layer, from 0.
        after: what the code that reads the layer's rows takes besides them: page table, slots,
            queries. Nothing happens to these tensors, but the schema says that they are written, so
            that a compiler puts nothing that uses them before the wait. Needed wherever
            ``torch.compile`` or ``torch.export`` sees the call; everything that reads the rows has
            to take one of them. The pools do not belong here: functionalization would clone them,
            before the wait. Eagerly they change nothing and may be left out.
        timeout_ms: how long to wait at most, on a GPU. A wait that gives up leaves a fault, which
            the next call or :func:`check` raises, instead of a stream that hangs for good.

    Stream contract: one thread of the caller's current stream polls the flag; the host never waits.
    :func:`load_layers` must have been enqueued before, on another stream or the same one. What is
    enqueued behind the wait sees the layer's rows. Any number of streams may wait for a layer. The
    waiting thread occupies one warp of one SM, which leaves room for the load on the others.

    While a CUDA graph is being captured ``epoch`` has to be a tensor, which is read at every
    replay: an int would be reached for good after the first one. With
    ``torch.compile(mode="reduce-overhead")``, ``flags``, ``epoch`` and the pools need addresses
    that stay (``torch._dynamo.mark_static_address``, or buffers of a module), as it copies other
    inputs; so does an input of the function that stands in ``after`` (or pass a copy made in the
    function), as it makes no graph of one that writes to others. An int epoch is symbolic in a
    compiled function.

    On the CPU loads are over when they return: there it only looks.

    Raises:
        RuntimeError: any argument that does not fit, a fault that an earlier call left, or on the
            CPU a layer that is not in place.

    Example::

        sgl_kvio.wait_layer(flags, i, epoch, after=[query, page_table])
        out = paged_attention(query, k[i], v[i], page_table)
    """
    options = {} if timeout_ms == 60000 else {"timeout_ms": timeout_ms}
    op = _WAIT_LAYER_TENSOR if isinstance(epoch, torch.Tensor) else _WAIT_LAYER_INT
    op(flags, layer, epoch, _as_list(after), **options)


def host_register(tensor: torch.Tensor, chunk_bytes: int = 0, device_index: int = -1) -> None:
    """Page-lock the bytes of a contiguous CPU tensor, so that GPU kernels may use them.

    ``chunk_bytes`` > 0 registers in chunks of that many bytes (choose a multiple of a page of the
    pool: a driver copy must not span two chunks); all chunks count as one registration. Nothing
    stays registered when any chunk fails. Registering the same range again does nothing, whatever
    ``chunk_bytes``.
    ``device_index`` -1 is the current device; only that device's context is made. The memory must
    stay mapped until :func:`host_unregister`.

    Raises:
        RuntimeError: no GPU, overlap with an earlier registration, memory page-locked by somebody
            else, driver error.
    """
    _kvio.host_register(tensor, chunk_bytes, device_index)


def host_unregister(tensor: torch.Tensor, device_index: int = -1) -> None:
    """Undo :func:`host_register` for the same tensor, after waiting for every GPU of the process.

    No other call that uses the range may be running. While a CUDA graph is being captured nothing
    can be waited for: then this raises, and the memory stays registered.

    Raises:
        RuntimeError: the tensor does not start a range that :func:`host_register` page-locked.
    """
    _kvio.host_unregister(tensor, device_index)


def device_pointer(tensor: torch.Tensor, device_index: int = -1) -> int:
    """Address that the GPU uses for the first byte of a GPU or page-locked host tensor."""
    return int(_kvio.device_pointer(tensor, device_index))


def create_stream(device_index: int = -1) -> torch.cuda.Stream:
    """A new stream of a GPU that nobody else has, for work beside a forward pass.

    ``torch.cuda.Stream()`` hands out the same 32 streams of a device again and again, so one that
    was meant for restores may be the one on which somebody captures a CUDA graph, or computes:
    then restores end up in the graph, or wait for the forward pass. :class:`LayerwiseLoader` has a
    stream of this kind; make one for :func:`load_layers`. ``device_index`` -1 is the current
    device. The stream lives as long as the process: make it once, not for each call.

    Raises:
        RuntimeError: no GPU, a ``device_index`` that cannot be, driver error.
    """
    handle = _kvio.create_stream(device_index)
    index = torch.cuda.current_device() if device_index == -1 else device_index
    return torch.cuda.ExternalStream(handle, device=index)


def take_fault(device_index: int = -1) -> list[int]:
    """The recorded index fault of a device: ``[op, position, value, limit]``, or ``[]``; clears it.

    ``op`` is 1 for ``dst_indices`` and 2 for ``src_indices`` of ``transfer``, 3 and 4 for those of
    ``transfer_staged``; 5 to 10 for ``top_k_tokens``, ``host_cache_locs``, ``device_buffer_locs``,
    ``lru_slots``, ``req_pool_indices`` and ``device_locs`` of ``swap_in``; 11 for ``miss_src`` and
    12 for ``miss_dst`` of ``copy_planned``; 13 to 16 for ``dst_indices`` and ``src_indices`` of
    ``write_back`` and of ``restore``; 17 to 19 for ``dst_indices``, ``src_indices`` and ``epoch``
    of ``load_layers``; 20 for ``flags`` of ``wait_layer``. A position in a 2-D argument is
    ``row * 2**32 + column``. Values have to be below ``limit``, those of 19 and 20 at least
    ``limit``. Only kernels that have finished are seen; synchronize first, or use :func:`check`.
    """
    return list(_kvio.take_fault(device_index))


_NOT_MOVED = "That row was not moved; the others were"
_NO_LOCATION = "What it was needed for yields -1; the rest was served"
_PASSED = "Waits for that epoch may have passed before its rows were in place"
_GAVE_UP = "It gave up after timeout_ms, and what follows it read rows that were not in place"
# Op, argument, whether it is 2-D, what became of it, and whether the limit is the least value that
# would do; number 1 first. As fault_subject.cpp.
_FAULTS = (
    ("transfer", "dst_indices", False, _NOT_MOVED, False),
    ("transfer", "src_indices", False, _NOT_MOVED, False),
    ("transfer_staged", "dst_indices", False, _NOT_MOVED, False),
    ("transfer_staged", "src_indices", False, _NOT_MOVED, False),
    ("swap_in", "top_k_tokens", True, _NO_LOCATION, False),
    ("swap_in", "host_cache_locs", True, _NO_LOCATION, False),
    ("swap_in", "device_buffer_locs", True, _NO_LOCATION, False),
    ("swap_in", "lru_slots", True, "That slot is not given away; the rest was served", False),
    ("swap_in", "req_pool_indices", False, _NO_LOCATION, False),
    ("swap_in", "device_locs", True, _NO_LOCATION, False),
    ("copy_planned", "miss_src", True, _NOT_MOVED, False),
    ("copy_planned", "miss_dst", True, _NOT_MOVED, False),
    ("write_back", "dst_indices", False, _NOT_MOVED, False),
    ("write_back", "src_indices", False, _NOT_MOVED, False),
    ("restore", "dst_indices", False, _NOT_MOVED, False),
    ("restore", "src_indices", False, _NOT_MOVED, False),
    ("load_layers", "dst_indices", False, _NOT_MOVED, False),
    ("load_layers", "src_indices", False, _NOT_MOVED, False),
    ("load_layers", "epoch", False, _PASSED, True),
    ("wait_layer", "flags", True, _GAVE_UP, True),
)


def _fault_text(index: int, op: int, position: int, value: int, limit: int) -> str:
    name, argument, is_matrix, consequence, is_too_old = _FAULTS[op - 1]
    place = f"{position >> 32}, {position & 0xFFFFFFFF}" if is_matrix else str(position)
    need = f"{limit} or more" if is_too_old else f"0 to {limit - 1}"
    return (
        f"kvio::{name}: on cuda:{index} {argument}[{place}] was {value}; it needs {need}."
        f" {consequence}"
    )


def check(device: torch.device | int | str | None = None) -> None:
    """Wait for ``device`` (default: the current one); raise when an index was outside its pool.

    Without a GPU there is nothing to wait for: CPU calls raise by themselves.

    Raises:
        RuntimeError: names the argument, its position, value and limit. Reading clears the record.
    """
    if not torch.cuda.is_available():
        return
    resolved = torch.device("cuda") if device is None else torch.device(device)
    if resolved.type != "cuda":
        return
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    torch.cuda.synchronize(index)
    fault = take_fault(index)
    if not fault:
        return
    raise RuntimeError(_fault_text(index, *fault))


def explain(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> str:
    """What :func:`transfer` would do: backend, reason, launch, rows, bytes, runs. Moves nothing.

    On a GPU also the rate to expect and its share of the link, what every other backend would
    reach, or why it cannot serve, and what a CUDA graph would keep of the call. Takes the arguments
    of :func:`transfer` and raises what it would raise about them. Not for hot loops: torch leaks
    the text of every op that returns one.
    """
    options = _changed(row_ndim, page_size, index_unit, backend, num_blocks, prefer)
    return str(_kvio.explain(_as_list(dst), _as_list(src), dst_indices, src_indices, **options))


RATES_BUILT_IN = "built-in"
_rates_source = RATES_BUILT_IN


def set_rates(rates: Sequence[float], source: str = "set by the caller") -> None:
    """Make ``rates`` the table by which ``backend="auto"`` chooses; an empty one: the built-in.

    GB/s, flat, in the order [register, tma, copy_engine][host to device, device to host][rows of a
    page follow each other on the host, rows lie apart][runs of 512 B, 1 KiB, ... 4 MiB]; 0 where a
    backend cannot serve. ``source`` is what :func:`capabilities` says about it. Calls of other
    threads see the old table or the new one. ``python -m sgl_kvio calibrate`` measures a table.

    Raises:
        RuntimeError: a wrong number of rates, or one that is negative or not finite.
    """
    global _rates_source
    _kvio.set_rates([float(rate) for rate in rates])
    _rates_source = source if len(rates) else RATES_BUILT_IN


def get_rates() -> list[float]:
    """The table by which ``backend="auto"`` chooses now, as :func:`set_rates` takes it."""
    return list(_kvio.get_rates())


def copy_round(row_bytes: int, lanes: int) -> tuple[int, int] | None:
    """In what rounds ``lanes`` GPU lanes that share a row move it: bytes of all, bytes of one.

    The widest round of 128, 64, 32 or 16 bytes that divides the row and splits over the lanes into
    packages of 4, 8 or 16 bytes. ``None`` where there is none: such rows are moved all the same, in
    words and bytes. For kernel authors and tests; asks the rule that the library compiles in.

    Raises:
        RuntimeError: ``row_bytes`` or ``lanes`` below 1.

    Example::

        sgl_kvio.copy_round(576, lanes=4)  # (64, 16): 576 bytes are 4.5 times 128
    """
    round_bytes, package_bytes = _kvio.copy_round(row_bytes, lanes)
    return (round_bytes, package_bytes) if round_bytes else None


@functools.cache
def _build_info() -> dict[str, Any]:
    # Once: torch leaks the text of every op that returns one.
    info: dict[str, Any] = json.loads(_kvio.build_info())
    return info


def capabilities() -> dict[str, Any]:
    """What this build and machine offer.

    Keys: ``version``, ``backend`` (``"cpu"``, ``"cuda"``, ``"rocm"``), ``archs`` (list of compute
    capabilities, or gfx targets, with machine code in the binary), ``toolkit``, ``driver`` (CUDA
    driver version such as 13000, or HIP's, 0 for none), ``devices`` (their number),
    ``entry_points`` (driver calls found), ``rates`` (the table by which ``backend="auto"`` chooses:
    ``"built-in"``, or the file it came from), ``torch``, ``python``. Initializes no device.
    """
    info = dict(_build_info())
    info["rates"] = _rates_source
    info["archs"] = info["archs"].split()
    info["torch"] = torch.__version__
    info["python"] = platform.python_version()
    return info


def _refuse_mixed_meta(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """A meta tensor among real ones would make the call a silent no-op."""
    on_meta = [tensor.device.type == "meta" for tensor in tensors]
    if any(on_meta) and not all(on_meta):
        raise RuntimeError(
            f"kvio::{op}: some arguments are meta tensors and others are not;"
            " it needs every tensor to have memory, or none"
        )


def _fake_transfer(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    _refuse_mixed_meta("transfer", [*dst, *src, dst_indices, src_indices])


def _fake_transfer_staged(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    staging: torch.Tensor,
    *,
    page_size: int,
    row_ndim: int = 2,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> None:
    _refuse_mixed_meta("transfer_staged", [*dst, *src, dst_indices, src_indices, staging])


def _fake_explain_staged(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    staging: torch.Tensor,
    *,
    page_size: int,
    row_ndim: int = 2,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> str:
    return "pages: unknown while tracing\n"


def _fake_register_pool(
    buffers: Sequence[torch.Tensor], *, row_ndim: int = 2, handle: int = 0
) -> int:
    raise RuntimeError(
        "kvio::register_pool: a handle is known only at run time; call it outside the graph"
    )


def _fake_unregister_pool(handle: int) -> None:
    raise RuntimeError(
        "kvio::unregister_pool: changes the process, not a tensor; call it outside the graph"
    )


def _fake_write_back(
    handle: int,
    token: torch.Tensor,
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    first_buffer: int = 0,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    # Not the handle: a program may be traced where the pool is not.
    _refuse_mixed_meta("write_back", [token, *src, dst_indices, src_indices])


def _fake_restore(
    handle: int,
    token: torch.Tensor,
    dst: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    first_buffer: int = 0,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> None:
    _refuse_mixed_meta("restore", [token, *dst, dst_indices, src_indices])


def _fake_memcpy_batch(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_offsets: Sequence[int],
    src_offsets: Sequence[int],
    nbytes: Sequence[int],
) -> None:
    _refuse_mixed_meta("memcpy_batch", [*dst, *src])


def _fake_swap_in(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache_locs: torch.Tensor,
    lru_slots: torch.Tensor,
    host_cache: Sequence[torch.Tensor],
    device_buffer: Sequence[torch.Tensor],
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    hot_buffer_size: int,
    num_real_reqs: torch.Tensor | None = None,
    device_locs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
    row_ndim: int = 2,
    num_blocks: int = 0,
) -> None:
    given = [
        t for t in (num_real_reqs, device_locs, miss_src, miss_dst, miss_count) if t is not None
    ]
    state = [top_k_tokens, device_buffer_tokens, device_buffer_locs, host_cache_locs, lru_slots]
    batch = [top_k_device_locs, req_pool_indices, seq_lens]
    _refuse_mixed_meta("swap_in", [*state, *host_cache, *device_buffer, *batch, *given])


def _fake_copy_planned(
    host_cache: Sequence[torch.Tensor],
    device_buffer: Sequence[torch.Tensor],
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    num_real_reqs: torch.Tensor,
    *,
    skip_io: bool = False,
    row_ndim: int = 2,
    num_blocks: int = 0,
) -> None:
    plan = [miss_src, miss_dst, miss_count, num_real_reqs]
    _refuse_mixed_meta("copy_planned", [*host_cache, *device_buffer, *plan])


def _fake_load_layers(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    flags: torch.Tensor,
    epoch: torch.Tensor | int,
    *,
    num_layers: int = 0,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    num_blocks: int = 0,
) -> None:
    given = [epoch] if isinstance(epoch, torch.Tensor) else []
    _refuse_mixed_meta("load_layers", [*dst, *src, dst_indices, src_indices, flags, *given])


def _fake_wait_layer(
    flags: torch.Tensor,
    layer: int,
    epoch: torch.Tensor | int,
    after: Sequence[torch.Tensor],
    *,
    timeout_ms: int = 60000,
) -> None:
    given = [epoch] if isinstance(epoch, torch.Tensor) else []
    _refuse_mixed_meta("wait_layer", [flags, *given])
    if not after:
        raise RuntimeError(
            "kvio::wait_layer: after is empty while the call is being traced, so that a compiler"
            " would drop the wait; it needs what the code that reads the layer takes besides its"
            " rows, such as slots or queries"
        )


def _fake_host_register(tensor: torch.Tensor, chunk_bytes: int = 0, device_index: int = -1) -> None:
    if tensor.device.type == "meta":
        raise RuntimeError("kvio::host_register: tensor is on meta; it needs a CPU tensor")


def _fake_host_unregister(tensor: torch.Tensor, device_index: int = -1) -> None:
    return None


def _fake_device_pointer(tensor: torch.Tensor, device_index: int = -1) -> int:
    raise RuntimeError(
        "kvio::device_pointer: an address is known only at run time; call it outside the graph"
    )


def _fake_create_stream(device_index: int = -1) -> int:
    raise RuntimeError(
        "kvio::create_stream: a stream is known only at run time; call it outside the graph"
    )


def _fake_take_fault(device_index: int = -1) -> list[int]:
    raise RuntimeError(
        "kvio::take_fault: a fault is known only at run time; call it outside the graph"
    )


def _fake_explain(
    dst: Sequence[torch.Tensor],
    src: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    src_indices: torch.Tensor,
    *,
    row_ndim: int = 2,
    page_size: int = 1,
    index_unit: str = "token",
    backend: str = "auto",
    num_blocks: int = 0,
    prefer: str = "throughput",
) -> str:
    return "backend: unknown while tracing\n"


def _fake_set_rates(rates: Sequence[float]) -> None:
    raise RuntimeError(
        "kvio::set_rates: changes the process, not a tensor; call it outside the graph"
    )


def _fake_get_rates() -> list[float]:
    raise RuntimeError(
        "kvio::get_rates: rates are known only at run time; call it outside the graph"
    )


def _fake_copy_round(row_bytes: int, lanes: int) -> list[int]:
    raise RuntimeError(
        "kvio::copy_round: answers the caller, not a kernel; call it outside the graph"
    )


def _fake_build_info() -> str:
    return "{}"


_FAKES: dict[str, Callable[..., Any]] = {
    "transfer": _fake_transfer,
    "transfer_staged": _fake_transfer_staged,
    "explain_staged": _fake_explain_staged,
    "register_pool": _fake_register_pool,
    "unregister_pool": _fake_unregister_pool,
    "write_back": _fake_write_back,
    "restore": _fake_restore,
    "memcpy_batch": _fake_memcpy_batch,
    "swap_in": _fake_swap_in,
    "copy_planned": _fake_copy_planned,
    "load_layers": _fake_load_layers,
    "load_layers.int": _fake_load_layers,
    "wait_layer": _fake_wait_layer,
    "wait_layer.int": _fake_wait_layer,
    "host_register": _fake_host_register,
    "host_unregister": _fake_host_unregister,
    "device_pointer": _fake_device_pointer,
    "create_stream": _fake_create_stream,
    "take_fault": _fake_take_fault,
    "explain": _fake_explain,
    "set_rates": _fake_set_rates,
    "get_rates": _fake_get_rates,
    "copy_round": _fake_copy_round,
    "build_info": _fake_build_info,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"kvio::{_name}", _fake)
