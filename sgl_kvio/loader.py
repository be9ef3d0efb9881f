"""LayerwiseLoader: restores KV rows layer by layer, beside the forward pass that uses them."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import torch

from sgl_kvio import ops
from sgl_kvio.layouts import as_int

Buffers = Sequence[torch.Tensor]


class LayerwiseLoad(ABC):
    """One restore in flight, as ``LayerwiseLoader.load`` returns it.

    It keeps the pools' views and the index tensors alive until every layer is in place.
    """

    def __init__(self, num_layers: int, kept: object) -> None:
        self._num_layers = num_layers
        self._kept: object | None = kept

    def wait_layer(self, layer: int) -> None:
        """Orders the caller after layer ``layer``.

        On a GPU the caller's current stream waits and the host does not. On the CPU the caller
        blocks until the layer is in place.

        Raises TypeError for a layer that is no int, IndexError for one that the load does not have,
        and on the CPU whatever the copying raised.
        """
        layer = _layer_number("LayerwiseLoad", layer)
        if not 0 <= layer < self._num_layers:
            raise IndexError(
                f"LayerwiseLoad.wait_layer: layer got {layer}; needs 0..{self._num_layers - 1}"
            )
        self._wait(layer)

    def wait(self) -> None:
        """Orders the caller after all layers, as ``wait_layer`` of the last one does."""
        if self._num_layers:
            self._wait(self._num_layers - 1)

    def synchronize(self) -> None:
        """Blocks the host until every layer is in place; on the CPU raises the copying's error."""
        if self._num_layers:
            self._synchronize()
        self._kept = None

    def done(self) -> bool:
        """Whether nothing of the load is in flight any more (finished or failed); never waits."""
        if self._kept is not None and self._is_finished():
            self._kept = None
        return self._kept is None

    @abstractmethod
    def _wait(self, layer: int) -> None: ...

    @abstractmethod
    def _synchronize(self) -> None: ...

    @abstractmethod
    def _is_finished(self) -> bool: ...


class _StreamLoad(LayerwiseLoad):
    """A load on a side stream: layers run in order, so the last event stands for all of them."""

    def __init__(self, num_layers: int, kept: object, device: torch.device) -> None:
        super().__init__(num_layers, kept)
        self._device = device
        # New for every load: a reused event would make a late wait_layer wait for another load.
        self._events = [torch.cuda.Event() for _ in range(num_layers)]

    def record(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Marks ``layer`` as in place once ``stream`` gets here."""
        self._events[layer].record(stream)

    def _wait(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    def _synchronize(self) -> None:
        self._events[-1].synchronize()

    def _is_finished(self) -> bool:
        return not self._events or self._events[-1].query()


class _ThreadLoad(LayerwiseLoad):
    """A load on a worker thread: one future a layer."""

    def __init__(self, num_layers: int, kept: object) -> None:
        super().__init__(num_layers, kept)
        self._futures: list[Future[None]] = [Future() for _ in range(num_layers)]
        self._num_answered = 0
        _with_threads.add(self)

    def run(self, copy_layer: Callable[[int], None]) -> None:
        """Copies every layer; the first error is that of its layer and of all later ones."""
        # Inference tensors may be written in that mode only, and a thread starts outside of it.
        with torch.inference_mode():
            for layer, future in enumerate(self._futures):
                try:
                    copy_layer(layer)
                except BaseException as error:
                    for rest in self._futures[layer:]:
                        rest.set_exception(error)
                    self._num_answered = self._num_layers
                    break
                future.set_result(None)
                self._num_answered = layer + 1
        self._kept = None

    def _after_fork(self) -> None:
        """In the child: layers that were not in place at the fork never will be, so they fail."""
        # Counted, because a future tells by a lock, which the worker may have held.
        for layer in range(self._num_answered, self._num_layers):
            lost: Future[None] = Future()
            lost.set_exception(
                RuntimeError(
                    f"LayerwiseLoad: layer {layer} was in flight when this process was forked; "
                    "only the parent gets it, load again here"
                )
            )
            self._futures[layer] = lost

    def _wait(self, layer: int) -> None:
        self._futures[layer].result()

    def _synchronize(self) -> None:
        self._futures[-1].result()

    def _is_finished(self) -> bool:
        return all(future.done() for future in self._futures)


class LayerwiseLoader:
    """Restores rows of a host pool into a device pool, layer by layer, on a stream of its own.

    Args:
        host_layers: for each layer the list of its host buffers, as ``HostKVPool.layers()`` gives
            them: views ``[slots, *row]`` or ``[pages, P, *row]``. For a GPU they are page-locked
            (or on that GPU).
        device_layers: for each layer the list of its device buffers, in the same order; all on one
            device.
        row_ndim, page_size, backend, num_blocks: as in ``sgl_kvio.transfer``.

    Stream contract on a GPU. ``load`` makes both edges: its side stream first waits for everything
    that the caller's current stream of the device holds by then (so a kernel that still writes or
    zeroes the pages is finished), and records one event after each layer, which ``wait_layer``
    makes the caller's current stream wait for. Pages that a load writes are read only after
    ``wait_layer``. Loads of one loader run in the order of ``load``. Host rows and index tensors
    must keep their contents, and a host pool its registration, until the load is done; the tensors
    themselves are kept alive here. ``load`` cannot be captured into a CUDA graph.

    Without a GPU (all tensors on the CPU) one worker thread copies, in the order of ``load``, and
    ``wait_layer`` blocks. Errors of the copying come out of ``wait_layer``, ``wait`` and
    ``synchronize`` of that load. A forked child goes on with a worker of its own; layers in flight
    at the fork reach the parent only and raise RuntimeError in the child.

    Raises ValueError when the lists do not fit together or mix devices, or an option that is a
    number is none. Copying or pickling a loader raises TypeError.

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
        row_ndim: int = 2,
        page_size: int = 1,
        backend: str = "auto",
        num_blocks: int = 0,
    ) -> None:
        self._host = _as_layers("host_layers", host_layers)
        self._dst = _as_layers("device_layers", device_layers)
        self._device = _checked_device(self._host, self._dst)
        self._num_layers = len(self._dst)
        self._options: dict[str, Any] = {
            "row_ndim": _option("row_ndim", row_ndim),
            "page_size": _option("page_size", page_size),
            "backend": backend,
            "num_blocks": _option("num_blocks", num_blocks),
        }
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._newest: LayerwiseLoad | None = None
        self._side: torch.cuda.Stream | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._in_flight: list[LayerwiseLoad] = []
        if self._device.type == "cuda":
            self._side = torch.cuda.Stream(device=self._device)
            # Once is enough: the allocator looks at a block's streams when the block is freed.
            with torch.inference_mode():
                for buffers in self._dst:
                    for buffer in buffers:
                        buffer.record_stream(self._side)
            # A loader dropped with a load in flight must not let go of what the side stream still
            # reads. At exit nothing is given to anyone else, so there is nothing to wait for.
            release = weakref.finalize(self, _synchronize_all, self._in_flight, self._owner_pid)
            release.atexit = False
        _with_threads.add(self)

    @property
    def num_layers(self) -> int:
        """Layers of a load."""
        return self._num_layers

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
        here when the device is a GPU. GPU indices out of range skip their rows and raise from the
        first call that sees it: this load at a later layer, another transfer, or
        ``sgl_kvio.check()``.

        Raises ValueError after ``close()`` and for indices that are no tensor of the CPU or a GPU,
        RuntimeError inside a CUDA graph capture, and what ``sgl_kvio.transfer`` raises (on the CPU
        from ``wait_layer``). After an error nothing is in flight.
        """
        _check_indices("host_indices", host_indices)
        _check_indices("device_indices", device_indices)
        host, dst, options = self._host, self._dst, dict(self._options, index_unit=index_unit)

        def copy_layer(layer: int) -> None:
            ops.transfer(dst[layer], host[layer], device_indices, host_indices, **options)

        kept = (host, dst, host_indices, device_indices)
        # Held throughout, so that loads do not mix and run in the order of the calls.
        with self._lock:
            self._check_open()
            if self._side is None:
                load = self._load_on_thread(copy_layer, kept)
            else:
                indices = (host_indices, device_indices)
                load = self._load_on_stream(self._side, copy_layer, kept, indices)
            self._newest = load
            return load

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
            _synchronize_all(self._in_flight, self._owner_pid)
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

    def _load_on_thread(self, copy_layer: Callable[[int], None], kept: object) -> LayerwiseLoad:
        load = _ThreadLoad(self.num_layers, kept)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvio-loader")
        self._worker.submit(load.run, copy_layer)
        return load

    def _load_on_stream(
        self,
        side: torch.cuda.Stream,
        copy_layer: Callable[[int], None],
        kept: object,
        indices: Sequence[torch.Tensor],
    ) -> LayerwiseLoad:
        # The device is selected apart from the stream: leaving the stream of another GPU would
        # select the caller's GPU for good, which creates a context there.
        with torch.inference_mode(), torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "LayerwiseLoader.load: got a current stream that captures a CUDA graph; "
                    "needs one that does not (sgl_kvio.transfer can be captured)"
                )
            load = _StreamLoad(self.num_layers, kept, self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(side):
                    for layer in range(self.num_layers):
                        copy_layer(layer)
                        load.record(layer, side)
                    # Last: by now the op has refused indices of another device.
                    for index in indices:
                        if index.is_cuda:
                            index.record_stream(side)
            except BaseException:
                # Layers before the failing one may be under way, and the caller has no load to
                # wait for.
                side.synchronize()
                raise
        self._in_flight[:] = [other for other in self._in_flight if not other.done()]
        self._in_flight.append(load)
        return load


# What a forked child must know to be without the parent's threads.
_with_threads: weakref.WeakSet[LayerwiseLoader | _ThreadLoad] = weakref.WeakSet()


def _leave_threads() -> None:
    for each in list(_with_threads):
        each._after_fork()


os.register_at_fork(after_in_child=_leave_threads)


def _synchronize_all(loads: list[LayerwiseLoad], owner_pid: int) -> None:
    # A forked child inherits the loads, not the CUDA context that their events are of.
    if os.getpid() != owner_pid:
        return
    while loads:
        loads.pop().synchronize()


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
