"""LayerwiseLoader: restores KV rows layer by layer, beside the forward pass that uses them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import torch

from sgl_kvio import ops
from sgl_kvio.layouts import as_int

Buffers = Sequence[torch.Tensor]

SUBMIT_FROM = ("caller", "thread")
# CPU index lists up to here are cloned for the worker: some us, and no caller's slip can reach it.
MAX_CLONED_INDICES = 16384


class _Groups:
    """Which layers one transfer moves: layer 0 alone, so that it is early, then `size` layers each.

    A constant size after the first: a group that grew would make its first layer wait for layers
    that the forward pass needs much later.
    """

    def __init__(self, num_layers: int, size: int) -> None:
        starts = [0, *range(1, num_layers, size)] if num_layers else []
        stops = [*starts[1:], num_layers] if num_layers else []
        self.layers = [range(a, b) for a, b in zip(starts, stops, strict=True)]
        self.of_layer = [number for number, layers in enumerate(self.layers) for _ in layers]

    def __len__(self) -> int:
        return len(self.layers)

    def gather(self, layers: Sequence[Buffers]) -> list[list[torch.Tensor]]:
        """The buffers of every group, all first buffers (K) before all second ones (V).

        So neighbours in the list are neighbours in a pool that keeps a page's layers together.
        """
        return [_buffer_major([layers[layer] for layer in group]) for group in self.layers]


def _buffer_major(layers: Sequence[Buffers]) -> list[torch.Tensor]:
    most = max((len(buffers) for buffers in layers), default=0)
    return [buffers[i] for i in range(most) for buffers in layers if i < len(buffers)]


class LayerwiseLoad(ABC):
    """One restore in flight, as ``LayerwiseLoader.load`` returns it.

    It keeps the pools' views and the index tensors alive until every layer is in place.
    """

    def __init__(self, groups: _Groups, kept: object) -> None:
        self._groups = groups
        self._kept: object | None = kept

    def wait_layer(self, layer: int) -> None:
        """Orders the caller after layer ``layer``, which its whole group is in place with.

        On a GPU the caller's current stream waits and the host does not, except that with
        ``submit="thread"`` the host waits until the worker has submitted the group. On the CPU the
        caller blocks until the layer is in place.

        Raises TypeError for a layer that is no int, IndexError for one that the load does not have,
        and on the CPU and with ``submit="thread"`` whatever the copying raised.
        """
        layer = _layer_number("LayerwiseLoad", layer)
        of_layer = self._groups.of_layer
        if not 0 <= layer < len(of_layer):
            raise IndexError(
                f"LayerwiseLoad.wait_layer: layer got {layer}; needs 0..{len(of_layer) - 1}"
            )
        self._wait(of_layer[layer])

    def wait(self) -> None:
        """Orders the caller after all layers, as ``wait_layer`` of the last one does."""
        if self._groups:
            self._wait(len(self._groups) - 1)

    def synchronize(self) -> None:
        """Blocks the host until every layer is in place; raises what ``wait_layer`` would."""
        if self._groups:
            self._synchronize()
        self._kept = None

    def done(self) -> bool:
        """Whether nothing of the load is in flight any more (finished or failed); never waits."""
        if self._kept is not None and self._is_finished():
            self._kept = None
        return self._kept is None

    @abstractmethod
    def _wait(self, group: int) -> None: ...

    @abstractmethod
    def _synchronize(self) -> None: ...

    @abstractmethod
    def _is_finished(self) -> bool: ...


class _Answers:
    """What a worker thread says about the groups of a load, in order: that it did one, or why not.

    A forked child gets no more of them: groups that were unanswered at the fork fail there. One
    condition for all groups: a future for each would cost ``load`` a microsecond or two a group.
    """

    def __init__(self, groups: _Groups) -> None:
        self._groups = groups
        self._count = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.Lock())
        _with_threads.add(self)

    def succeed(self) -> None:
        """Answers the next group."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Answers all groups that are left."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, group: int) -> None:
        """Blocks until ``group`` is answered; raises its error."""
        if group >= self._count and self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: group < self._count or self._error is not None)
        if group >= self._count and self._error is not None:
            raise self._error

    def complete(self) -> bool:
        """Whether every group is answered."""
        return self._error is not None or self._count == len(self._groups)

    def _after_fork(self) -> None:
        # The worker may have held the condition.
        self._changed = threading.Condition(threading.Lock())
        if not self.complete():
            layer = self._groups.layers[self._count].start
            self._error = RuntimeError(
                f"LayerwiseLoad: layer {layer} and later ones were in flight when this process was "
                "forked; only the parent gets them, load again here"
            )


class _ThreadLoad(LayerwiseLoad):
    """A load that a worker thread copies on the CPU."""

    def __init__(self, groups: _Groups, kept: object) -> None:
        super().__init__(groups, kept)
        self._answers = _Answers(groups)

    def run(self, copy_group: Callable[[int], None]) -> None:
        """Copies every group; the first error is that of its group and of all later ones."""
        try:
            # Inference tensors may be written in that mode only, and a thread starts outside of it.
            with torch.inference_mode():
                for group in range(len(self._groups)):
                    copy_group(group)
                    self._answers.succeed()
        except BaseException as error:
            self._answers.fail(error)
        self._kept = None

    def _wait(self, group: int) -> None:
        self._answers.wait(group)

    def _synchronize(self) -> None:
        self._answers.wait(len(self._groups) - 1)

    def _is_finished(self) -> bool:
        return self._answers.complete()


class _SideStream:
    """The stream that one loader's loads run on: all that they ask of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _take_stream(device.index)
        # Every load has this object: only when the last one is gone may another loader follow.
        finalizer = weakref.finalize(self, _give_back_stream, self._stream, os.getpid())
        finalizer.atexit = False

    def fork(self) -> torch.cuda.Event:
        """An event after everything that the caller's current stream holds by now."""
        if self._is_capturing():
            raise RuntimeError(
                "LayerwiseLoader.load: got a current stream that captures a CUDA graph; "
                "needs one that does not (sgl_kvio.transfer can be captured)"
            )
        return torch.cuda.current_stream(self._device).record_event()

    def _is_capturing(self) -> bool:
        # torch asks the current device's stream; selecting a device costs as much as all the rest.
        if torch.cuda.current_device() == self._device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes this stream the calling thread's current one; inference tensors may be written."""
        # The device is selected apart from the stream: leaving the stream of another GPU would
        # select the caller's GPU for good, which creates a context there.
        with (
            torch.inference_mode(),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
        ):
            yield

    def mark(self) -> torch.cuda.Event:
        """An event after everything that this stream holds by now."""
        # New every time: a reused event would make a late wait_layer wait for another load.
        return self._stream.record_event()

    def start_after(self, event: torch.cuda.Event) -> None:
        """Makes this stream wait for ``event``."""
        self._stream.wait_event(event)

    def order_caller(self, event: torch.cuda.Event) -> None:
        """Makes the caller's current stream wait for ``event``."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a GPU tensor from being reused while this stream may read it."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Blocks the host until this stream is idle."""
        self._stream.synchronize()


class _StreamLoad(LayerwiseLoad):
    """A load on a side stream: groups run in order, so the last event stands for all of them."""

    def __init__(self, groups: _Groups, kept: object, side: _SideStream) -> None:
        super().__init__(groups, kept)
        self._side = side
        self._events: list[torch.cuda.Event] = []

    def submit(
        self,
        start: torch.cuda.Event,
        copy_group: Callable[[int], None],
        indices: Sequence[torch.Tensor],
    ) -> None:
        """Enqueues every group behind ``start``; after an error nothing is in flight."""
        with self._side.current():
            self._side.start_after(start)
            try:
                for group in range(len(self._groups)):
                    copy_group(group)
                    # Not earlier: by now the op has refused indices of another device.
                    for index in indices if group == 0 else ():
                        self._side.hold(index)
                    self._events.append(self._side.mark())
                    self._submitted()
            except BaseException:
                # Groups before the failing one may be under way, and nobody waits for them.
                self._side.synchronize()
                raise

    def is_submitted(self) -> bool:
        """Whether everything that will be enqueued is."""
        return True

    def drain(self) -> None:
        """Blocks the host until nothing that was enqueued is in flight; raises no load's error."""
        if self._events:
            self._events[-1].synchronize()
        self._kept = None

    def _submitted(self) -> None:
        """Called after each group."""

    def _wait(self, group: int) -> None:
        self._side.order_caller(self._events[group])

    def _synchronize(self) -> None:
        self._events[-1].synchronize()

    def _is_finished(self) -> bool:
        return not self._events or self._events[-1].query()


class _WorkerStreamLoad(_StreamLoad):
    """A load on a side stream that a worker thread submits."""

    def __init__(self, groups: _Groups, kept: object, side: _SideStream) -> None:
        super().__init__(groups, kept, side)
        self._answers = _Answers(groups)

    def run(
        self,
        owner: weakref.ref[LayerwiseLoader],
        start: torch.cuda.Event,
        copy_group: Callable[[int], None],
        indices: Sequence[torch.Tensor],
    ) -> None:
        """Submits every group; the first error is that of its group and of all later ones."""
        try:
            self.submit(start, copy_group, indices)
        except BaseException as error:
            self._answers.fail(error)
        # A loader that went before this point left the load to its worker (_drain_all).
        if owner() is None:
            self.drain()

    def is_submitted(self) -> bool:
        return self._answers.complete()

    def _submitted(self) -> None:
        self._answers.succeed()

    def _wait(self, group: int) -> None:
        self._answers.wait(group)
        super()._wait(group)

    def _synchronize(self) -> None:
        self._answers.wait(len(self._groups) - 1)
        super()._synchronize()

    def _is_finished(self) -> bool:
        return self._answers.complete() and super()._is_finished()


class LayerwiseLoader:
    """Restores rows of a host pool into a device pool, layer by layer, on a stream of its own.

    Args:
        host_layers: for each layer the list of its host buffers, as ``HostKVPool.layers()`` gives
            them: views ``[slots, *row]`` or ``[pages, P, *row]``. For a GPU they are page-locked
            (or on that GPU).
        device_layers: for each layer the list of its device buffers, in the same order; all on one
            device.
        group: most layers that one transfer moves. Layer 0 always goes alone, so that it is there
            early; then come groups of ``group`` layers, each in place as a whole. 1 is one
            transfer a layer. More pays where a page keeps its layers together on both sides
            (``page_first_direct``), since several layers of a page are one driver copy then, and
            where the calls themselves cost too much.
        submit: who enqueues the transfers on a GPU: the thread that calls ``load`` (``"caller"``),
            or a worker of the loader (``"thread"``), so that ``load`` returns after some ten
            microseconds however much there is to enqueue. On the CPU a worker always copies.
        row_ndim, page_size, backend, num_blocks, prefer: as in ``sgl_kvio.transfer``.

    Stream contract on a GPU. ``load`` makes both edges: its side stream first waits for everything
    that the caller's current stream of the device holds by then (so a kernel that still writes or
    zeroes the pages is finished), and records one event after each group, which ``wait_layer``
    makes the caller's current stream wait for. Pages that a load writes are read only after
    ``wait_layer``. Loads of one loader run in the order of ``load``. Host rows and index tensors
    must keep their contents, and a host pool its registration, until the load is done; the tensors
    themselves are kept alive here. Neither ``load`` nor a wait for a load can be captured into a
    CUDA graph: call ``wait_layer`` before the layer's graph is replayed, or take
    ``sgl_kvio.load_layers``, which can be captured and compiled, and is one launch for all layers.
    The side stream is one that torch gives to nobody (``sgl_kvio.create_stream``), so a load may
    run and be submitted while another thread captures on any stream.

    With ``submit="thread"`` a ``wait_layer`` first blocks the host until the worker has enqueued
    that layer's group, and errors of the transfers come out of ``wait_layer``, ``wait`` and
    ``synchronize`` of that load instead of ``load``. Synchronizing a stream or the GPU does not
    wait for what the worker has yet to enqueue: ``synchronize`` of the load does, and so does
    ``close``; call one of them before a host pool is closed.

    Without a GPU (all tensors on the CPU) one worker thread copies, in the order of ``load``, and
    ``wait_layer`` blocks. Errors of the copying come out of ``wait_layer``, ``wait`` and
    ``synchronize`` of that load. A forked child goes on with a worker of its own; layers in flight
    at the fork reach the parent only and raise RuntimeError in the child.

    Raises ValueError when the lists do not fit together or mix devices, or an option is none that
    there is. Copying or pickling a loader raises TypeError.

    Example::

        loader = LayerwiseLoader(pool.layers(), device_layers, page_size=pool.page_size)
        load = loader.load(pool.token_indices(pages), device_slots)
        for i, block in enumerate(blocks):
            load.wait_layer(i)
            hidden = block(hidden)
    """

    def __init__(
        self,
        host_layers: Sequence[Buffers],
        device_layers: Sequence[Buffers],
        *,
        group: int = 1,
        submit: str = "caller",
        row_ndim: int = 2,
        page_size: int = 1,
        backend: str = "auto",
        num_blocks: int = 0,
        prefer: str = "throughput",
    ) -> None:
        host = _as_layers("host_layers", host_layers)
        dst = _as_layers("device_layers", device_layers)
        self._device = _checked_device(host, dst)
        self._groups = _Groups(len(dst), _group_size(group))
        self._host, self._dst = self._groups.gather(host), self._groups.gather(dst)
        if submit not in SUBMIT_FROM:
            raise ValueError(
                f"LayerwiseLoader: submit got {submit!r}; needs one of {', '.join(SUBMIT_FROM)}"
            )
        self._submit = submit
        self._options: dict[str, Any] = {
            "row_ndim": _option("row_ndim", row_ndim),
            "page_size": _option("page_size", page_size),
            "backend": backend,
            "num_blocks": _option("num_blocks", num_blocks),
        }
        if prefer != "throughput":
            self._options["prefer"] = prefer
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._newest: LayerwiseLoad | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._in_flight: list[_StreamLoad] = []
        self._side = _side_stream(self._device)
        if self._side is not None:
            # Once is enough: the allocator looks at a block's streams when the block is freed.
            with torch.inference_mode():
                for buffers in self._dst:
                    for buffer in buffers:
                        self._side.hold(buffer)
            # A loader dropped with a load in flight must not let go of what the side stream still
            # reads. At exit nothing is given to anyone else, so there is nothing to wait for.
            release = weakref.finalize(self, _drain_all, self._in_flight, self._owner_pid)
            release.atexit = False
        _with_threads.add(self)

    @property
    def num_layers(self) -> int:
        """Layers of a load."""
        return len(self._groups.of_layer)

    @property
    def num_groups(self) -> int:
        """Transfers of a load: layer 0, then groups of ``group`` layers."""
        return len(self._groups)

    @property
    def device(self) -> torch.device:
        """The device that loads write to."""
        return self._device

    def load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        index_unit: str = "token",
    ) -> LayerwiseLoad:
        """Starts restoring rows ``host_indices`` into rows ``device_indices`` of every layer.

        Indices are as in ``sgl_kvio.transfer``: 1-D int32 or int64 of equal length, one entry a
        token slot (``index_unit="token"``) or page (``"page"``). CPU indices that do not fit raise
        here when the device is a GPU and this thread submits. GPU indices out of range skip their
        rows and raise from the first call that sees it: this load at a later layer, another
        transfer, or ``sgl_kvio.check()``. A worker thread gets copies of CPU index lists of up to
        16,384 entries, so that those may change at once; longer ones may not.

        Raises ValueError after ``close()`` and for indices that are no tensor of the CPU or a GPU,
        RuntimeError inside a CUDA graph capture, and what ``sgl_kvio.transfer`` raises (from
        ``wait_layer`` when a worker thread runs it). After an error nothing is in flight.
        """
        _check_indices("host_indices", host_indices)
        _check_indices("device_indices", device_indices)
        side = self._side
        if side is None or self._submit == "thread":
            host_indices, device_indices = _for_worker(host_indices), _for_worker(device_indices)
        host, dst, options = self._host, self._dst, dict(self._options, index_unit=index_unit)

        def copy_group(group: int) -> None:
            ops.transfer(dst[group], host[group], device_indices, host_indices, **options)

        kept = (host, dst, host_indices, device_indices)
        # Held throughout, so that loads do not mix and run in the order of the calls.
        with self._lock:
            self._check_open()
            if side is None:
                self._newest = self._load_on_thread(copy_group, kept)
            else:
                indices = (host_indices, device_indices)
                self._newest = self._load_on_stream(side, copy_group, kept, indices)
            return self._newest

    def wait_layer(self, layer: int) -> None:
        """``wait_layer`` of the newest load; returns at once when there has been none.

        So model code may call it in every forward pass, whether or not that pass restores
        anything.
        """
        layer = _layer_number("LayerwiseLoader", layer)
        self._check_open()
        newest = self._newest
        if newest is not None:
            newest.wait_layer(layer)

    def close(self) -> None:
        """Waits for loads in flight, ends the worker thread, lets go of the pools. Again: no-op.

        Loads keep answering; an error that nobody waited for stays with its load.
        """
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.shutdown(wait=True)
                self._worker = None
            _drain_all(self._in_flight, self._owner_pid)
            self._newest = None
            self._host, self._dst = [], []

    def _after_fork(self) -> None:
        """In the child, which has neither the worker nor the thread that may have held the lock."""
        self._lock = threading.Lock()
        self._worker = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # copy, deepcopy and pickle all come through here.
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled: a copy would order its loads "
            "apart from these; make another loader over the same layers"
        )

    def __enter__(self) -> LayerwiseLoader:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("LayerwiseLoader: used after close()")

    def _start_on_worker(self, run: Callable[..., None], *arguments: object) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvio-loader")
        self._worker.submit(run, *arguments)

    def _load_on_thread(self, copy_group: Callable[[int], None], kept: object) -> LayerwiseLoad:
        load = _ThreadLoad(self._groups, kept)
        self._start_on_worker(load.run, copy_group)
        return load

    def _load_on_stream(
        self,
        side: _SideStream,
        copy_group: Callable[[int], None],
        kept: object,
        indices: Sequence[torch.Tensor],
    ) -> LayerwiseLoad:
        start = side.fork()
        # Loads end in the order of the calls. Asking an event may fail: nothing is enqueued yet.
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.pop(0)
        load: _StreamLoad
        if self._submit == "thread":
            load = _WorkerStreamLoad(self._groups, kept, side)
            self._start_on_worker(load.run, weakref.ref(self), start, copy_group, indices)
        else:
            load = _StreamLoad(self._groups, kept, side)
            load.submit(start, copy_group, indices)
        self._in_flight.append(load)
        return load


# What a forked child must know to be without the parent's threads.
_with_threads: weakref.WeakSet[LayerwiseLoader | _Answers] = weakref.WeakSet()


def _leave_threads() -> None:
    for each in list(_with_threads):
        each._after_fork()


os.register_at_fork(after_in_child=_leave_threads)


def _drain_all(loads: list[_StreamLoad], owner_pid: int) -> None:
    # A forked child inherits the loads, not the CUDA context that their events are of.
    if os.getpid() != owner_pid:
        return
    while loads:
        load = loads.pop()
        # One that a worker has yet to submit is drained there: a finalizer may run on any thread,
        # the worker itself included, and must not wait for one.
        if load.is_submitted():
            load.drain()


# Streams of loaders that are gone, by device. None is one of torch's: those 32 are handed out again
# and again, and a worker would submit into whatever another thread captures on the same one.
_idle_streams: dict[int, list[torch.cuda.Stream]] = {}


def _take_stream(device_index: int) -> torch.cuda.Stream:
    try:
        return _idle_streams[device_index].pop()
    except LookupError:
        return ops.create_stream(device_index)


def _give_back_stream(stream: torch.cuda.Stream, owner_pid: int) -> None:
    # Runs on any thread at any time: no lock, no op. A forked child has none of the streams.
    if os.getpid() == owner_pid:
        _idle_streams.setdefault(stream.device.index, []).append(stream)


def _side_stream(device: torch.device) -> _SideStream | None:
    return _SideStream(device) if device.type == "cuda" else None


def _for_worker(indices: torch.Tensor) -> torch.Tensor:
    """Indices that the caller cannot change under the worker, as far as that is cheap."""
    on_cpu = indices.device.type == "cpu"
    return indices.clone() if on_cpu and indices.numel() <= MAX_CLONED_INDICES else indices


def _group_size(group: int) -> int:
    size = as_int(group)
    if size is None or size < 1:
        raise ValueError(f"LayerwiseLoader: group got {group!r}; needs an int of at least 1")
    return size


def _layer_number(where: str, layer: int) -> int:
    number = as_int(layer)
    if number is None:
        raise TypeError(f"{where}.wait_layer: layer got {layer!r}; needs an int")
    return number


def _option(name: str, value: int) -> int:
    """An option that is a number. Its range is the op's to know."""
    number = as_int(value)
    if number is None:
        raise ValueError(f"LayerwiseLoader: {name} got {value!r}; needs an int")
    return number


def _check_indices(name: str, indices: torch.Tensor) -> None:
    if not isinstance(indices, torch.Tensor):
        raise ValueError(
            f"LayerwiseLoader.load: {name} got {type(indices).__name__}; needs a Tensor"
        )
    if indices.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"LayerwiseLoader.load: {name} got a tensor on {indices.device}; "
            "needs one on the CPU or a GPU"
        )


def _as_list(name: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise ValueError(
            f"LayerwiseLoader: {name} got {type(values).__name__}; needs a sequence"
        ) from error


def _as_layers(name: str, layers: Sequence[Buffers]) -> list[list[torch.Tensor]]:
    """Layers as lists of tensors; a bare tensor is a layer of one buffer."""
    result = [
        [layer] if isinstance(layer, torch.Tensor) else _as_list(f"{name}[{i}]", layer)
        for i, layer in enumerate(_as_list(name, layers))
    ]
    for i, buffers in enumerate(result):
        for j, buffer in enumerate(buffers):
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(
                    f"LayerwiseLoader: {name}[{i}][{j}] got {type(buffer).__name__}; needs a Tensor"
                )
    return result


def _checked_device(host: Sequence[Buffers], device_layers: Sequence[Buffers]) -> torch.device:
    """The one device that all device layers are on."""
    if len(host) != len(device_layers):
        raise ValueError(
            f"LayerwiseLoader: host_layers got {len(host)} layers; "
            f"needs {len(device_layers)}, as device_layers has"
        )
    for i, (sources, targets) in enumerate(zip(host, device_layers, strict=True)):
        if len(sources) != len(targets):
            raise ValueError(
                f"LayerwiseLoader: host_layers[{i}] got {len(sources)} buffers; "
                f"needs {len(targets)}, as device_layers[{i}] has"
            )
    device = next((t.device for buffers in device_layers for t in buffers), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"LayerwiseLoader: device_layers got {device}; needs the CPU or a GPU")
    for name, layers, allowed in (
        ("device_layers", device_layers, (device,)),
        ("host_layers", host, (torch.device("cpu"), device)),
    ):
        for i, buffers in enumerate(layers):
            for j, buffer in enumerate(buffers):
                if buffer.device not in allowed:
                    needed = " or ".join(str(place) for place in dict.fromkeys(allowed))
                    raise ValueError(
                        f"LayerwiseLoader: {name}[{i}][{j}] got {buffer.device}; needs {needed}"
                    )
    return device
