"""How much does a transfer slow the computation beside it, and what does it still move then?

    python bench/interference.py            everything, 100 seconds on an H200
    python bench/interference.py --quick    two compute loops, one direction, 25 seconds

Four compute loops run on a high-priority stream, each alone and beside each transfer in turn:
alone, beside A, alone, beside B, ..., several rounds. A feeder thread keeps calls of the transfer
in flight on a side stream for as long as the loop runs. Without a GPU both are host work on the
same cores, so that such figures only show that the bench runs.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jobs import PAGE, Case, Recorder, Session, ctas_words

from common import (
    GIB,
    MIB,
    Arena,
    RunOptions,
    add_run_options,
    allowed_host_bytes,
    finish,
    measure_ceilings,
    new_side_stream,
    print_ceilings,
    print_table,
    print_targets,
    resolve_run_options,
    synchronize,
    verdict,
)

ROW = 1024
# Calls that the feeder keeps enqueued: some milliseconds of work, so that the link never idles.
CALLS_AHEAD = 6
# A window of compute has to hold enough whole transfers for a rate.
LEAST_TRANSFERS = 3


# --- Time -----------------------------------------------------------------------------------


class Timeline(Protocol):
    """Marks in the order of work, and the seconds at which the work got to each."""

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None: ...

    def seconds(self, mark: Any) -> float: ...


class HostTimeline:
    """Host work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        return None

    def seconds(self, mark: float) -> float:
        return mark


class DeviceTimeline:
    """Marks are events on the current stream; all of one timeline share one zero."""

    def __init__(self) -> None:
        self._zero = self.mark()
        self._zero.synchronize()

    def mark(self) -> torch.cuda.Event:
        # Blocking: a thread that spins would take a core from the one that submits.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, mark: torch.cuda.Event) -> float:
        return self._zero.elapsed_time(mark) / 1e3


# --- Compute loops --------------------------------------------------------------------------


class Loop:
    """A computation repeated for about `window_s`, timed as one piece.

    On a GPU the steps are one CUDA graph on a high-priority stream: launches from Python would
    compete with the feeder for the interpreter, and that would be counted as the transfer's doing.
    """

    def __init__(
        self, name: str, step: Callable[[], object], device: torch.device, window_s: float
    ) -> None:
        self.name = name
        self._step = step
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)
        synchronize(device)  # the step's tensors were made on another stream
        with torch.no_grad():
            self.steps = self._fitting_steps(window_s)
            self._capture()

    def run(self, timeline: Timeline) -> tuple[float, float]:
        """Runs all steps; returns the seconds at which they started and were done."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            start = timeline.mark()
            if self._graph is not None:
                self._graph.replay()
            else:
                self._repeat(self.steps)
            stop = timeline.mark()
        timeline.wait(stop)
        return timeline.seconds(start), timeline.seconds(stop)

    def _repeat(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _fitting_steps(self, window_s: float) -> int:
        timeline = new_timeline(self._device)
        with torch.cuda.stream(self._stream):
            self._repeat(3)
            start = timeline.mark()
            self._repeat(5)
            stop = timeline.mark()
        timeline.wait(stop)
        step_s = (timeline.seconds(stop) - timeline.seconds(start)) / 5
        return max(3, min(4000, round(window_s / max(step_s, 1e-6))))

    def _capture(self) -> None:
        if self._device.type != "cuda":
            return
        synchronize(self._device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._repeat(self.steps)
        synchronize(self._device)


def new_timeline(device: torch.device) -> Timeline:
    return DeviceTimeline() if device.type == "cuda" else HostTimeline()


def loop_steps(device: torch.device) -> dict[str, Callable[[], Callable[[], object]]]:
    """By name, what makes the tensors of a compute loop and returns its step."""
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if on_gpu else None}

    def matmul() -> Callable[[], object]:
        size = 4096 if on_gpu else 256
        a, b = (torch.randn(size, size, **options) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def prefill() -> Callable[[], object]:
        heads, tokens, dim = (32, 8192, 128) if on_gpu else (2, 256, 64)
        q, k, v = (torch.randn(1, heads, tokens, dim, **options) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def add() -> Callable[[], object]:
        x = torch.randn(1 << (28 if on_gpu else 20), **options)
        out = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=out)

    def decode() -> Callable[[], object]:
        batch, size = (32, 8192) if on_gpu else (4, 512)
        x, weight = torch.randn(batch, size, **options), torch.randn(size, size, **options)
        out = torch.empty(batch, size, **options)
        return lambda: torch.mm(x, weight.t(), out=out)

    return {"matmul": matmul, "prefill": prefill, "add": add, "decode": decode}


LOOP_WORDS = {
    "matmul": "bf16 matrix product, 4096^3",
    "prefill": "attention prefill, 8,192 tokens, 32 heads of 128",
    "add": "add on 512 MiB, memory-bound",
    "decode": "batch of 32 times 8192 x 8192, bf16",
}


# --- Transfers ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """One way of moving rows beside a computation. Without a case: one contiguous copy a call."""

    name: str
    direction: str
    case: Case | None
    payload_bytes: int

    def as_record(self) -> dict[str, Any]:
        facts = {} if self.case is None else self.case.as_record()
        return {
            **facts,
            "provider": self.name,
            "direction": self.direction,
            "payload_bytes": self.payload_bytes,
        }


def base_case(device: torch.device) -> Case:
    """32 MiB a call: one layer of K and V, pages of 64 KiB in random order."""
    if device.type == "cuda":
        return Case(1, 16384, 32, 32768, row_bytes=ROW, index_unit="page")
    return Case(1, 512, 2, 1024, row_bytes=ROW, index_unit="page")


def providers(device: torch.device, directions: Sequence[str]) -> Iterator[Provider]:
    for direction in directions:
        base = replace(base_case(device), direction=direction)
        yield Provider("contiguous copy", direction, None, base.payload_bytes)
        for name, case in named_cases(base, device):
            yield Provider(name, direction, case, case.payload_bytes)


def named_cases(base: Case, device: torch.device) -> Iterator[tuple[str, Case]]:
    if device.type != "cuda":
        yield "cpu", replace(base, backend="cpu")
        return
    for backend, ctas in (("register", (2, 4)), ("tma", (1, 2))):
        for count in ctas:
            yield (
                f"{backend}, {ctas_words(count)}",
                replace(base, backend=backend, num_blocks=count),
            )
    for run_tokens in (PAGE, 8 * PAGE):
        case = replace(base, backend="copy_engine", run_tokens=run_tokens)
        yield f"copy_engine, {run_tokens * ROW >> 10} KiB runs", case
    for prefer, place in itertools.product(("throughput", "quiet"), ("gpu", "cpu")):
        words = "" if prefer == "throughput" else f", prefer={prefer}"
        case = replace(base, backend="auto", indices=place, prefer=prefer)
        yield f"auto, indices on {place}{words}", case


def caller_of(run: Recorder, provider: Provider) -> Callable[[int], object] | None:
    """The call that makes transfer number `i`, its bytes checked; None when it was refused."""
    if provider.case is None:
        return contiguous_copy(run.arena, provider)
    job = run.ready(provider.case)
    return None if job is None else job.call


def contiguous_copy(arena: Arena, provider: Provider) -> Callable[[int], object]:
    nbytes = provider.payload_bytes
    pieces = arena.device.numel() // nbytes
    dst, src = arena.device, arena.host
    if provider.direction == "D2H":
        dst, src = src, dst
        arena.note_written(pieces * nbytes)

    def copy(number: int) -> None:
        start = number % pieces * nbytes
        piece = slice(start, start + nbytes)
        dst[piece].copy_(src[piece], non_blocking=True)

    return copy


class Feeder:
    """A thread that makes one transfer after another until it is stopped."""

    def __init__(
        self, call: Callable[[int], object], timeline: Timeline, device: torch.device
    ) -> None:
        self._call = call
        self._timeline = timeline
        self._device = device
        self._stream = new_side_stream(device)
        self._ends: list[Any] = []
        self._started = threading.Event()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvio-feeder")

    def __enter__(self) -> Feeder:
        """Returns when the first transfers are finished and others are in flight."""
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        synchronize(self._device)
        if self._error is not None and exception[1] is None:
            raise self._error

    def ends(self) -> list[float]:
        """The seconds at which the transfers were finished, in order."""
        return [self._timeline.seconds(mark) for mark in self._ends]

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream):
                self._feed()
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def _feed(self) -> None:
        ahead: collections.deque[Any] = collections.deque()
        number = 0
        last = False
        while not last:
            # One more transfer after the stop, so that the last one ends after the loop.
            last = self._stop.is_set()
            self._call(number)
            mark = self._timeline.mark()
            self._ends.append(mark)
            ahead.append(mark)
            number += 1
            if len(ahead) >= CALLS_AHEAD:
                self._timeline.wait(ahead.popleft())
                self._started.set()


@dataclass(frozen=True)
class Window:
    """One run of a compute loop beside a transfer."""

    seconds: float
    gbps: float | None
    transfers: int
    longest_gap_s: float  # between the ends of two transfers: shows a feeder that fell behind
    covered: bool  # transfers ran from before the loop's start until after its end


def beside(loop: Loop, call: Callable[[int], object], nbytes: int, device: torch.device) -> Window:
    timeline = new_timeline(device)
    with Feeder(call, timeline, device) as feeder:
        start, stop = loop.run(timeline)
    ends = feeder.ends()
    inside = [end for end in ends if start <= end <= stop]
    return Window(
        stop - start,
        rate_of(inside, nbytes),
        len(inside),
        max((b - a for a, b in zip(inside, inside[1:], strict=False)), default=0.0),
        bool(ends) and ends[0] < start and ends[-1] > stop,
    )


def rate_of(ends: Sequence[float], nbytes: int) -> float | None:
    """GB/s of the transfers that ended after the first one; None when they are too few."""
    if len(ends) < LEAST_TRANSFERS or ends[-1] <= ends[0]:
        return None
    return (len(ends) - 1) * nbytes / (ends[-1] - ends[0]) / 1e9


def alone_rate(
    call: Callable[[int], object], nbytes: int, device: torch.device, seconds: float
) -> float | None:
    """GB/s of the same transfers with nothing beside them."""
    timeline = new_timeline(device)
    with Feeder(call, timeline, device) as feeder:
        time.sleep(seconds)
    return rate_of(feeder.ends(), nbytes)


# --- The run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """How long and how often one machine measures."""

    loops: tuple[str, ...]
    directions: tuple[str, ...]
    rounds: int
    window_s: float
    pool_bytes: int
    ceiling_bytes: int


def amount_of(options: RunOptions) -> Amount:
    on_gpu, quick = options.device.type == "cuda", options.mode == "quick"
    every = tuple(LOOP_WORDS)
    return Amount(
        loops=("matmul", "decode") if quick else every,
        directions=("H2D",) if quick else ("H2D", "D2H"),
        rounds=3 if quick else 5,
        window_s=0.05 if on_gpu else 0.02,
        pool_bytes=4 * GIB if on_gpu else 32 * MIB,
        ceiling_bytes=256 * MIB if on_gpu else 64 * MIB,
    )


@dataclass
class Series:
    """What was seen of one provider beside one loop, a figure a round."""

    provider: Provider
    call: Callable[[int], object]
    gbps_alone: float | None
    alone_s: list[float]
    windows: list[Window]

    def record(self, loop: Loop) -> dict[str, Any]:
        """Medians; the ratio is that of neighbours in time, so that a drifting clock cancels."""
        pairs = zip(self.windows, self.alone_s, strict=True)
        rates = [window.gbps for window in self.windows if window.gbps is not None]
        ratios = [window.seconds / alone for window, alone in pairs]
        return {
            **self.provider.as_record(),
            "loop": loop.name,
            "loop_steps": loop.steps,
            "alone_us": statistics.median(self.alone_s) / loop.steps * 1e6,
            "beside_us": statistics.median(w.seconds for w in self.windows) / loop.steps * 1e6,
            "slowdown": statistics.median(ratios),
            "slowdown_min": min(ratios),
            "slowdown_max": max(ratios),
            "gbps_beside": statistics.median(rates) if rates else None,
            "gbps_alone": self.gbps_alone,
            "transfers_inside_min": min(window.transfers for window in self.windows),
            "longest_gap_us": max(window.longest_gap_s for window in self.windows) * 1e6,
            "covered": all(window.covered for window in self.windows),
            "rounds": len(self.windows),
        }


def takers_of(run: Recorder, wanted: Iterable[Provider], seconds: float) -> list[Series]:
    """Checks every transfer and takes its rate alone; says which ones cannot take part and why."""
    takers = []
    for provider in wanted:
        call = caller_of(run, provider)
        if call is None:
            why = (run.refused or run.skipped or [{"reason": "wrong bytes"}])[-1]["reason"]
            print(f"without {provider.direction} {provider.name}: {why}")
            continue
        rate = alone_rate(call, provider.payload_bytes, run.device, seconds)
        takers.append(Series(provider, call, rate, [], []))
    return takers


def measure_loop(
    run: Recorder, loop: Loop, takers: Sequence[Series], rounds: int
) -> list[dict[str, Any]]:
    """Alone, beside A, alone, beside B, ...: `rounds` times; returns a record a provider."""
    loop.run(new_timeline(run.device))
    for taker in takers:
        taker.alone_s, taker.windows = [], []
    for _ in range(rounds):
        for taker in takers:
            if run.is_late():
                break
            start, stop = loop.run(new_timeline(run.device))
            taker.alone_s.append(stop - start)
            taker.windows.append(beside(loop, taker.call, taker.provider.payload_bytes, run.device))
    for taker in takers:
        if not taker.windows:
            reason = "out of time (--budget)"
            run.skipped.append({**taker.provider.as_record(), "loop": loop.name, "reason": reason})
    return [taker.record(loop) for taker in takers if taker.windows]


def print_loop(loop: Loop, records: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            f"{record['direction']} {record['provider']}",
            f"{record['slowdown']:.3f}",
            f"{record['slowdown_min']:.3f} - {record['slowdown_max']:.3f}",
            "-" if record["gbps_beside"] is None else f"{record['gbps_beside']:.2f}",
            "-" if record["gbps_alone"] is None else f"{record['gbps_alone']:.2f}",
            "" if record["covered"] else "NOT ALL THE TIME",
        ]
        for record in records
    ]
    print(f"\nbeside {loop.name}, {loop.steps} steps")
    headers = ["transfer", "compute time", "lowest - highest", "GB/s beside", "GB/s alone", ""]
    if rows:
        print_table(headers, rows)


def judge(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The promised figures beside compute, each with what was measured."""
    found = {(r["loop"], r["direction"], r["provider"]): r for r in records}

    def value(loop: str, provider: str, figure: str) -> float | None:
        record = found.get((loop, "H2D", provider))
        return None if record is None else record[figure]

    engine = "copy_engine, 64 KiB runs"
    return [
        verdict(
            "tma, 2 CTAs, beside the large matrix product",
            "GB/s",
            48,
            value("matmul", "tma, 2 CTAs", "gbps_beside"),
        ),
        verdict(
            f"{engine}, beside the large matrix product",
            "GB/s",
            53,
            value("matmul", engine, "gbps_beside"),
        ),
        verdict(
            f"large matrix product beside {engine}",
            "times",
            1.02,
            value("matmul", engine, "slowdown"),
            at_most=True,
        ),
        verdict(
            f"{engine}, beside the decode-size product",
            "GB/s",
            53,
            value("decode", engine, "gbps_beside"),
        ),
        verdict(
            f"decode-size product beside {engine}",
            "times",
            1.04,
            value("decode", engine, "slowdown"),
            at_most=True,
        ),
    ]


def measure(options: RunOptions) -> dict[str, Any]:
    """One run: ceilings, every provider alone, then every loop. Returns what the JSON holds."""
    session = Session(options)
    amount = amount_of(options)
    pool = min(amount.pool_bytes, options.pool_bytes, allowed_host_bytes(options.device))
    arena = Arena(options.device, int(pool) // MIB * MIB, options.host_memory)
    run = Recorder(
        arena,
        ceilings=measure_ceilings(options.device, amount.ceiling_bytes),
        bytes_per_repeat=amount.ceiling_bytes,
        budget_s=options.budget_s,
        seed=options.seed,
    )
    print_ceilings(run.ceilings)
    wanted = providers(options.device, amount.directions)
    takers = takers_of(run, wanted, amount.window_s)
    steps = loop_steps(options.device)
    for name in amount.loops:
        loop = Loop(name, steps[name](), options.device, amount.window_s)
        records = measure_loop(run, loop, takers, amount.rounds)
        print_loop(loop, records)
        run.records += records
        del loop
    targets = judge(run.records) if options.device.type == "cuda" else []

    def report() -> None:
        print_targets(targets)
        takers.clear()

    return {
        "loops": {name: LOOP_WORDS[name] for name in amount.loops},
        **session.close(run, amount.ceiling_bytes, report),
        "targets": targets,
    }


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 when a configuration moved wrong bytes."""
    parser = argparse.ArgumentParser(description="What does a transfer cost the compute beside it?")
    parser.add_argument("--quick", action="store_true", help="a look in 25 seconds")
    add_run_options(parser)
    args = parser.parse_args(argv)
    options = resolve_run_options(
        args,
        argv,
        "interference.py",
        mode="quick" if args.quick else "full",
        gpu_pool_gib=4.0,
        gpu_budget_s=18.0 if args.quick else 85.0,
    )
    return finish(options, "interference", measure(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
