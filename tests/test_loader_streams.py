"""LayerwiseLoader's GPU side without a GPU: who submits, what waits for what, errors, lifetimes.

A side stream of Python objects stands in for CUDA's. Copies happen when they are submitted; events
are reached when the test says so.
"""

import contextlib
import gc
import os
import threading
import time
import weakref

import pytest
import torch
from loader_rig import WAIT_S, Gate, L, flat_layers, in_a_forked_child

from sgl_kvio import LayerwiseLoader, loader, ops

SLOTS = torch.arange(16)


class Event:
    """Is reached when its stream is let go."""

    def __init__(self, reached):
        self._reached = reached

    def query(self):
        return self._reached.is_set()

    def synchronize(self):
        assert self._reached.wait(WAIT_S)


class SideStream:
    """Stands in for loader._SideStream; `log` is what was asked of it, by which thread."""

    def __init__(self):
        self.log = []
        self.gpu = threading.Event()
        self.gpu.set()
        self.capturing = False

    def fork(self):
        if self.capturing:
            raise RuntimeError("captures a CUDA graph")
        return self._noted("fork")

    @contextlib.contextmanager
    def current(self):
        self._noted("enter")
        with torch.inference_mode():
            yield
        self._noted("leave")

    def mark(self):
        return self._noted("mark")

    def start_after(self, event):
        self._noted("start_after", event)

    def order_caller(self, event):
        self._noted("order_caller", event)

    def hold(self, tensor):
        self._noted("hold", id(tensor))

    def synchronize(self):
        self._noted("synchronize")

    def what(self):
        """The names of what was asked, in order."""
        return [name for name, _, _ in self.log]

    def arguments(self, wanted):
        return [argument for name, argument, _ in self.log if name == wanted]

    def threads(self, wanted):
        return {thread for name, _, thread in self.log if name == wanted}

    def _noted(self, name, argument=None):
        event = Event(self.gpu)
        self.log.append((name, argument or event, threading.get_ident()))
        return event


@pytest.fixture
def side(monkeypatch):
    made = SideStream()
    monkeypatch.setattr(loader, "_side_stream", lambda device: made)
    yield made
    made.gpu.set()


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open(1000)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def collected(references):
    gc.collect()
    return all(reference() is None for reference in references)


# ------------------------------------------------------------------------------------------ order


def test_the_caller_submits_every_group_between_two_edges(side):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, group=2) as it:
        side.log.clear()
        load = it.load(SLOTS, SLOTS)
        here = threading.get_ident()
        assert [thread for _, _, thread in side.log] == [here] * len(side.log)
        holds = ["hold", "hold"]
        assert side.what() == ["fork", "enter", "start_after", *holds, "mark", "mark", "leave"]
        assert side.arguments("start_after") == side.arguments("fork")
        marks = side.arguments("mark")
        for layer in range(3):
            load.wait_layer(layer)
        assert side.arguments("order_caller") == [marks[0], marks[1], marks[1]]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(to, host, strict=True))


def test_a_worker_submits_every_group_between_two_edges(side):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, group=2, submit="thread") as it:
        side.log.clear()
        load = it.load(SLOTS, SLOTS)
        load.wait()
        until(lambda: "leave" in side.what())
        here = threading.get_ident()
        assert side.threads("fork") == {here}
        assert side.threads("order_caller") == {here}
        (worker,) = side.threads("mark")
        assert worker != here
        assert side.threads("enter") == side.threads("start_after") == {worker}
        assert side.arguments("start_after") == side.arguments("fork")
        assert side.arguments("order_caller") == side.arguments("mark")[-1:]
        asked = side.what()
        assert asked.index("fork") < asked.index("start_after") < asked.index("mark")
    assert all(torch.equal(a[0], b[0]) for a, b in zip(to, host, strict=True))


def test_load_returns_before_a_worker_has_submitted_anything(side, gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        assert not load.done()
        assert torch.equal(to[0][0], flat_layers(9)[0][0])
        gate.open(L)
        load.synchronize()
        assert load.done()
        assert all(torch.equal(a[0], b[0]) for a, b in zip(to, host, strict=True))


def test_wait_layer_waits_for_the_submission_of_its_group_and_no_later_one(side, gate):
    with LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        waited = []

        def wait():
            load.wait_layer(0)
            waited.append(len(side.arguments("mark")))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: gate.started)
        time.sleep(0.02)
        assert waited == []
        gate.open()
        thread.join(WAIT_S)
        assert waited == [1]
        assert side.arguments("order_caller") == side.arguments("mark")
        gate.open(L)


def test_a_load_is_done_when_its_last_event_is_reached_and_not_when_it_is_submitted(side):
    side.gpu.clear()
    with LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        load.wait()
        assert not load.done()
        side.gpu.set()
        assert load.done()


def test_a_worker_runs_loads_in_the_order_of_the_calls(side, gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, submit="thread") as it:
        it.load(torch.tensor([0, 1]), torch.tensor([5, 6]))
        second = it.load(torch.tensor([7]), torch.tensor([5]))
        gate.open(2 * L)
        second.wait()
    for src, dst in zip(host, to, strict=True):
        assert torch.equal(dst[0][5], src[0][7])
        assert torch.equal(dst[0][6], src[0][1])
    assert [int(call[3][0]) for call in gate.started] == [0] * L + [7] * L


def test_loads_that_are_done_are_let_go(side):
    with LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread") as it:
        for _ in range(10):
            it.load(SLOTS, SLOTS).synchronize()
        assert len(it._in_flight) == 1


# ----------------------------------------------------------------------------------------- errors


def failing(monkeypatch, number):
    """Makes transfer number `number` raise."""
    calls, transfer = [], ops.transfer

    def fail(*args, **options):
        calls.append(args)
        if len(calls) == number + 1:
            raise RuntimeError("the copying broke")
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", fail)
    return calls


@pytest.mark.parametrize("submit", ["caller", "thread"])
def test_a_load_that_cannot_ask_for_earlier_ones_starts_nothing(side, monkeypatch, submit):
    """As while another thread captures a graph, when CUDA answers no event's query."""

    def refuse(event):
        raise RuntimeError("not while a stream is captured")

    device = flat_layers(1)
    with LayerwiseLoader(flat_layers(), device, submit=submit) as made:
        first = made.load(SLOTS, SLOTS)
        first.wait()
        monkeypatch.setattr(Event, "query", refuse)
        with pytest.raises(RuntimeError, match="not while a stream is captured"):
            made.load(SLOTS.flip(0), SLOTS)
        monkeypatch.undo()
        first.synchronize()
        assert side.what().count("start_after") == 1
    assert torch.equal(device[0][0], flat_layers()[0][0])


def test_an_error_under_the_caller_raises_from_load_when_nothing_is_in_flight(side, monkeypatch):
    calls = failing(monkeypatch, 1)
    with LayerwiseLoader(flat_layers(1), flat_layers(9)) as it:
        with pytest.raises(RuntimeError, match="the copying broke"):
            it.load(SLOTS, SLOTS)
        assert side.what()[-1] == "synchronize"
        assert len(calls) == 2
        it.wait_layer(0)
        assert "order_caller" not in side.what()


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_an_error_under_a_worker_comes_out_of_the_waits_of_its_load(side, monkeypatch, wait):
    calls = failing(monkeypatch, 1)
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        for layer in (1, 2):
            with pytest.raises(RuntimeError, match="the copying broke"):
                load.wait_layer(layer)
        with pytest.raises(RuntimeError, match="the copying broke"):
            getattr(load, wait)()
        load.wait_layer(0)
        assert side.arguments("order_caller") == side.arguments("mark")
        assert "synchronize" in side.what()
        assert len(calls) == 2
        assert load.done()
        assert torch.equal(to[0][0], host[0][0])
        assert torch.equal(to[1][0], flat_layers(9)[1][0])
        it.load(SLOTS, SLOTS).wait()
    assert torch.equal(to[2][0], host[2][0])


def test_a_side_stream_that_cannot_be_entered_fails_the_load_and_hangs_no_wait(side, monkeypatch):
    def broken(event):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(side, "start_after", broken)
    with LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        with pytest.raises(RuntimeError, match="the device is gone"):
            load.wait_layer(0)
        assert load.done()


def test_an_error_that_nobody_waited_for_does_not_make_close_raise(side, monkeypatch):
    failing(monkeypatch, 0)
    it = LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread")
    load = it.load(SLOTS, SLOTS)
    it.close()
    with pytest.raises(RuntimeError, match="the copying broke"):
        load.wait()


@pytest.mark.parametrize("submit", ["caller", "thread"])
def test_a_capture_is_refused_by_load_before_anything_is_started(side, submit):
    before = threading.active_count()
    to = flat_layers(9)
    with LayerwiseLoader(flat_layers(1), to, submit=submit) as it:
        side.capturing = True
        with pytest.raises(RuntimeError, match="captures a CUDA graph"):
            it.load(SLOTS, SLOTS)
        assert threading.active_count() == before
        assert torch.equal(to[0][0], flat_layers(9)[0][0])
        side.capturing = False
        it.load(SLOTS, SLOTS).wait()


# --------------------------------------------------------------------------------------- lifetime


def test_close_waits_for_the_submission_and_for_the_gpu(side, gate):
    side.gpu.clear()
    it = LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread")
    load = it.load(SLOTS, SLOTS)
    closing = threading.Thread(target=it.close)
    closing.start()
    time.sleep(0.02)
    assert closing.is_alive()
    gate.open(L)
    until(lambda: len(side.arguments("mark")) == L)
    time.sleep(0.02)
    assert closing.is_alive()
    side.gpu.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert load.done()
    load.wait_layer(2)


def test_everything_dropped_before_it_is_submitted_lives_until_the_gpu_is_past_it(side, gate):
    side.gpu.clear()
    host, to = flat_layers(1), flat_layers(9)
    references = [weakref.ref(tensor) for tensor in (host[2][0], to[2][0])]
    it = LayerwiseLoader(host, to, submit="thread")
    load = it.load(SLOTS, SLOTS)
    del host, to, it, load  # returns although nothing was submitted
    gate.open(L)
    until(lambda: len(side.arguments("mark")) == L)
    gate.started.clear()
    time.sleep(0.02)
    gc.collect()
    assert all(reference() is not None for reference in references)
    side.gpu.set()
    until(lambda: collected(references))


def test_a_loader_dropped_after_the_submission_waits_for_the_gpu(side):
    side.gpu.clear()
    it = LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread")
    load = it.load(SLOTS, SLOTS)
    load.wait()
    threading.Timer(0.05, side.gpu.set).start()
    del it
    gc.collect()
    assert load.done()


def test_a_loader_collected_on_its_own_worker_does_not_wait_for_itself(side, monkeypatch):
    transfer, box = ops.transfer, []

    def drop_the_loader(*args, **options):
        box.clear()
        gc.collect()
        transfer(*args, **options)

    monkeypatch.setattr(ops, "transfer", drop_the_loader)
    host, to = flat_layers(1), flat_layers(9)
    it = LayerwiseLoader(host, to, submit="thread")
    gone = weakref.ref(it)
    load = it.load(SLOTS, SLOTS)
    box.append(it)
    del it
    load.synchronize()
    assert torch.equal(to[2][0], host[2][0])
    until(lambda: gone() is None)


def test_a_loader_that_nobody_closed_ends_its_worker(side):
    it = LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread")
    it.load(SLOTS, SLOTS).wait()
    (worker,) = it._worker._threads
    del it
    until(lambda: not worker.is_alive())


def test_index_lists_may_change_before_a_worker_reads_them(side, gate):
    host, to = flat_layers(1), flat_layers(9)
    host_slots, device_slots = torch.arange(16), torch.arange(16).flip(0)
    with LayerwiseLoader(host, to, submit="thread") as it:
        load = it.load(host_slots, device_slots)
        host_slots.fill_(99)
        device_slots.fill_(99)
        gate.open(L)
        load.wait()
    assert all(torch.equal(dst[0], src[0].flip(0)) for src, dst in zip(host, to, strict=True))


# -------------------------------------------------------------------------------------------- fork


def test_groups_unsubmitted_at_a_fork_fail_in_the_child_and_arrive_in_the_parent(side, gate):
    host, to = flat_layers(1), flat_layers(9)
    with LayerwiseLoader(host, to, submit="thread") as it:
        load = it.load(SLOTS, SLOTS)
        gate.open()
        load.wait_layer(0)
        until(lambda: len(gate.started) == 2)

        def work():
            for wait in (load.wait, load.synchronize, lambda: it.wait_layer(1)):
                with pytest.raises(RuntimeError, match="in flight when this process was forked"):
                    wait()
            it.close()

        assert in_a_forked_child(work) == 0
        gate.open(L)
        load.wait()
        assert torch.equal(to[2][0], host[2][0])


def test_a_forked_child_does_not_wait_for_its_parents_gpu(side):
    side.gpu.clear()
    it = LayerwiseLoader(flat_layers(1), flat_layers(9), submit="thread")
    it.load(SLOTS, SLOTS).wait()
    assert in_a_forked_child(it.close) == 0
    assert os.getpid() == it._owner_pid
    side.gpu.set()
    it.close()


# ------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("submit", ["caller", "thread"])
def test_inference_tensors_are_written_under_both_submitters(side, made_in, submit):
    with made_in():
        host, to, index = flat_layers(1), flat_layers(9), torch.arange(16)
    with LayerwiseLoader(host, to, submit=submit) as it:
        it.load(index, index).wait()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(to, host, strict=True))


# ---------------------------------------------------------------------------- streams of its own


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, index):
        self.device = torch.device("cuda", index)


@pytest.fixture
def made(monkeypatch):
    """Streams that were created, in order; none is idle before."""
    streams = []

    def create(index):
        streams.append(Stream(index))
        return streams[-1]

    monkeypatch.setattr(loader, "_idle_streams", {})
    monkeypatch.setattr(ops, "create_stream", create)
    return streams


def side_stream_of(index):
    return loader._SideStream(torch.device("cuda", index))


def test_every_loader_has_a_stream_and_the_next_one_gets_that_of_one_that_is_gone(made):
    first, second, other = side_stream_of(0), side_stream_of(0), side_stream_of(1)
    assert [each._stream for each in (first, second, other)] == made
    assert len(set(made)) == 3
    del second
    gc.collect()
    assert side_stream_of(1)._stream is made[3], "of another device"
    assert side_stream_of(0)._stream is made[1]
    assert len(made) == 4
    assert first._stream is made[0]


def test_a_load_that_is_kept_keeps_the_stream(made):
    side = side_stream_of(0)
    load = loader._StreamLoad(loader._Groups(1, 1), None, side)
    del side
    gc.collect()
    assert side_stream_of(0)._stream is made[1]
    del load
    gc.collect()
    assert {side_stream_of(0)._stream, made[1]} == set(made)


def test_a_forked_child_gives_no_stream_back(made):
    side = side_stream_of(0)

    def drop():
        nonlocal side
        del side
        gc.collect()
        assert loader._idle_streams == {}

    assert in_a_forked_child(drop) == 0
    del side
    gc.collect()
    assert loader._idle_streams == {0: made}
