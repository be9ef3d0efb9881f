"""What every bench needs: memory, clocks, link ceilings, the machine in words, tables, results.

GB/s is 1e9 payload bytes a second, each byte counted once. Times are seconds unless a name says
otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import secrets
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import sgl_kvio
from sgl_kvio.memory import HostMemory, memory_limits

SCHEMA_VERSION = 1
RESULTS = Path(__file__).resolve().parent / "results"
GIB = 1 << 30
MIB = 1 << 20

MIN_REPEATS = 7
MAX_REPEATS = 25
# Repeats beyond the minimum stop here, so that a slow configuration cannot eat a whole run.
SECONDS_PER_FIGURE = 0.1


class Arena:
    """Bytes that a bench cuts its pools from: allocated and filled with random data once.

    `host` is page-locked memory (plain memory without a GPU): made as HostKVPool makes its own
    (`host_memory="pool"`), or by the driver, through torch's pin_memory (`"driver"`).
    `mirror` holds the same bytes on the device, for checks, and is `host` itself without a GPU.
    `device` is as large, for device pools. All three are 1-D uint8 tensors of `nbytes`; with
    `device_nbytes` the two on the device are smaller, and `mirror` holds the first bytes of `host`.
    """

    _PIECE = 64 * MIB

    def __init__(
        self,
        where: torch.device,
        nbytes: int,
        host_memory: str = "pool",
        device_nbytes: int | None = None,
    ) -> None:
        self.where = where
        self.nbytes = nbytes
        small = nbytes if device_nbytes is None else min(nbytes, device_nbytes)
        self._memory: HostMemory | None = None
        if host_memory == "pool":
            self._memory = HostMemory(nbytes, device_index=where.index)
            self.host = self._memory.tensor
        else:
            self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=where.type == "cuda")
        self.device = torch.empty(small, dtype=torch.uint8, device=where)
        self.mirror = torch.empty_like(self.device) if where.type == "cuda" else self.host
        self._stale = 0
        fill_random(self.device)
        if self.mirror is self.host:
            fill_random(self.host)
            return
        # The head last, so that the mirror ends up with its bytes.
        for start in reversed(range(0, nbytes, small)):
            piece = self.host[start : start + small]
            fill_random(self.mirror)
            self._copy(piece, self.mirror[: piece.numel()])

    def refresh_mirror(self, written: int) -> None:
        """Brings `mirror` up to date after the first `written` bytes of `host` were written to."""
        stale = min(max(written, self._stale), self.mirror.numel())
        self._stale = 0
        if self.mirror is not self.host and stale:
            self._copy(self.mirror[:stale], self.host[:stale])

    def note_written(self, written: int) -> None:
        """Says that the first `written` bytes of `host` were written to, without a refresh."""
        self._stale = max(written, self._stale)

    def close(self) -> None:
        """Gives the memory back; tensors cut from it must be gone."""
        synchronize(self.where)
        del self.host, self.mirror, self.device
        if self._memory is not None:
            self._memory.close()

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        pieces = zip(dst.split(self._PIECE), src.split(self._PIECE), strict=True)
        for dst_piece, src_piece in pieces:
            dst_piece.copy_(src_piece, non_blocking=True)
        synchronize(self.where)


def fill_random(flat: torch.Tensor) -> None:
    """Overwrites a 1-D uint8 tensor with random bytes."""
    words = flat.numel() // 8 * 8
    flat[:words].view(torch.int64).random_()
    flat[words:].random_(0, 256)


def change_every_byte(flat: torch.Tensor) -> None:
    """Makes every byte of a 1-D uint8 tensor another one, by one random pattern of 8 bytes.

    What was random stays so. A constant instead would be carried into the other pool by later
    transfers, and then a row that is not moved could already look right.
    """
    pattern = bytes(1 + secrets.randbelow(255) for _ in range(8))
    words = flat.numel() // 8 * 8
    flat[:words].view(torch.int64).bitwise_xor_(int.from_bytes(pattern, "little", signed=True))
    flat[words:].bitwise_not_()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call, over repeats that each ran `calls_per_repeat` calls back to back."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int
    calls_per_repeat: int

    def rates(self, payload_bytes: int) -> dict[str, float]:
        """GB/s of a call that moves `payload_bytes`."""
        return {
            "gbps_median": payload_bytes / self.median_s / 1e9,
            "gbps_min": payload_bytes / self.max_s / 1e9,
            "gbps_max": payload_bytes / self.min_s / 1e9,
        }


class Clock(Protocol):
    """Runs a piece of work and says how many seconds it took."""

    def seconds(self, work: Callable[[], object]) -> float: ...


class WallClock:
    """Host time from the first call, on a side stream, until the device is idle again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_side_stream(device)

    def seconds(self, work: Callable[[], object]) -> float:
        with torch.cuda.stream(self._stream):
            synchronize(self._device)
            start = time.perf_counter()
            work()
            synchronize(self._device)
            return time.perf_counter() - start


class StreamClock:
    """Device time between two events around the work, on a side stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def seconds(self, work: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        synchronize(self._device)
        with torch.cuda.stream(self._stream):
            start.record()
            work()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


class QueuedClock:
    """Device time as StreamClock's, of work that was all enqueued before the device began it.

    The stream is kept busy for `head_start_s` first, so that short calls are not timed at the pace
    of the thread that submits them. `host_bound` says that this was too short in some run.
    """

    _CYCLES_PER_SECOND = 2e9  # at least: a slower clock only makes the head start longer

    def __init__(self, device: torch.device, head_start_s: float = 1.5e-3) -> None:
        self.host_bound = False
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._cycles = int(head_start_s * self._CYCLES_PER_SECOND)

    def seconds(self, work: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        synchronize(self._device)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)
            start.record()
            work()
            self.host_bound = self.host_bound or start.query()
            stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


class PreparedClock:
    """Another clock, with something to be done before each run, outside of the timing."""

    def __init__(self, clock: Clock, prepare: Callable[[], object]) -> None:
        self._clock = clock
        self._prepare = prepare

    def seconds(self, work: Callable[[], object]) -> float:
        self._prepare()
        return self._clock.seconds(work)


def synchronize(device: torch.device) -> None:
    """Waits for all work of a CUDA device; the CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def new_side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for `torch.cuda.stream`: on the legacy default one a backend may be another path.

    None, which that takes too, without a GPU.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def device_clock(device: torch.device) -> Clock:
    """The clock that sees only the transfer: events on a GPU, the host's clock otherwise."""
    return StreamClock(device) if device.type == "cuda" else WallClock(device)


Marks = tuple[Callable[[], Any], Callable[[Any, Any], float]]


def marks_on(device: torch.device) -> Marks:
    """A function that marks this moment of the current stream, or of the host without a GPU, and
    one that says how many seconds lie between two such marks."""
    if device.type != "cuda":
        return time.perf_counter, lambda start, stop: stop - start

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark, lambda start, stop: start.elapsed_time(stop) / 1e3


def time_calls(
    call: Callable[[int], object],
    calls_per_repeat: int,
    clock: Clock,
    seconds_per_figure: float = SECONDS_PER_FIGURE,
) -> Timing:
    """Median of at least 7 repeats of `call(0), call(1), ...`, after one repeat of warm-up.

    The number passed to `call` never comes back, so that a caller can rotate its inputs by it.
    """
    issued = 0

    def repeat() -> None:
        nonlocal issued
        for _ in range(calls_per_repeat):
            call(issued)
            issued += 1

    clock.seconds(repeat)
    samples: list[float] = []
    while len(samples) < MIN_REPEATS or (
        len(samples) < MAX_REPEATS and sum(samples) < seconds_per_figure
    ):
        samples.append(clock.seconds(repeat) / calls_per_repeat)
        # An event pair can read 0 for nothing at all; a rate needs a positive time.
        samples[-1] = max(samples[-1], 1e-9)
    return Timing(
        statistics.median(samples), min(samples), max(samples), len(samples), calls_per_repeat
    )


def host_cost_us(
    call: Callable[[], Any],
    device: torch.device,
    calls: int,
    drain_every: int = 16,
    drain: Callable[[Any], object] | None = None,
) -> dict[str, float]:
    """Host microseconds that one `call` on a side stream keeps its thread busy, over many calls.

    The device is drained every `drain_every` calls, outside of the timing: a full launch queue
    would block the thread and be counted as cost of the call. `drain` gets what the call returned
    and waits for what a synchronized device does not cover.
    """
    wait = drain or (lambda answer: synchronize(device))
    samples: list[float] = []
    with torch.cuda.stream(new_side_stream(device)):
        for _ in range(min(16, calls)):
            wait(call())
        for index in range(calls):
            start = time.perf_counter_ns()
            answer = call()
            samples.append((time.perf_counter_ns() - start) / 1e3)
            if index % drain_every == drain_every - 1:
                wait(answer)
    synchronize(device)
    samples.sort()
    return {
        "cpu_us_median": statistics.median(samples),
        "cpu_us_min": samples[0],
        "cpu_us_p90": samples[int(0.9 * (len(samples) - 1))],
        "cpu_us_max": samples[-1],
        "calls": calls,
    }


def measure_ceilings(device: torch.device, nbytes: int) -> dict[str, dict[str, Any]]:
    """GB/s of one large contiguous copy of `nbytes` in each direction: the yardstick of a run.

    On a GPU: the copy engine, from and to page-locked memory. On a CPU both directions are the
    same plain memory copy.
    """
    on_gpu = device.type == "cuda"
    # Two buffers in turn, so that the CPU's caches hold nothing of the next copy.
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    far = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    for buffer in (*host, *far):
        fill_random(buffer)
    clock = device_clock(device)
    ceilings: dict[str, dict[str, Any]] = {}
    for direction, dst, src in (("H2D", far, host), ("D2H", host, far)):

        def copy(index: int, dst: list[torch.Tensor] = dst, src: list[torch.Tensor] = src) -> None:
            dst[index % 2].copy_(src[index % 2], non_blocking=True)

        timing = time_calls(copy, 2, clock)
        ceilings[direction] = {
            "nbytes": nbytes,
            "repeats": timing.repeats,
            **timing.rates(nbytes),
        }
    return ceilings


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What every bench's command line says, resolved for one machine."""

    mode: str
    device: torch.device
    host_memory: str
    pool_bytes: int
    budget_s: float
    seed: int
    out: Path | None
    png: bool
    command: str


def add_mode_options(parser: argparse.ArgumentParser, quick: str, targets: str) -> None:
    """Adds --quick and --targets, which `mode_of` reads, with their words of help."""
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help=quick)
    modes.add_argument("--targets", action="store_true", help=targets)


def mode_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """ "full", "quick" or "targets", which is an error without a GPU."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.targets and device.type != "cuda":
        parser.error("--targets needs a GPU: the promised figures are an H200's")
    return "targets" if args.targets else "quick" if args.quick else "full"


def add_section_option(parser: argparse.ArgumentParser, known: Sequence[str]) -> None:
    """Adds --sections, which `sections_of` reads."""
    parser.add_argument("--sections", help=f"comma list of {', '.join(known)} (default: all)")


def sections_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace, known: Sequence[str]
) -> tuple[str, ...]:
    """The sections asked for; none with --targets, which measures its own."""
    sections = tuple((args.sections or ",".join(known)).split(","))
    unknown = [name for name in sections if name not in known]
    if unknown:
        parser.error(f"--sections got {unknown[0]!r}, needs some of {', '.join(known)}")
    return () if args.targets else sections


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `resolve_run_options` reads, all but the mode."""
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    parser.add_argument("--pool-gib", type=float, help="host memory to use (default: by mode)")
    parser.add_argument(
        "--host-memory",
        choices=("pool", "driver"),
        default="pool",
        help="page-locked as HostKVPool does it, or allocated by the driver (pin_memory)",
    )
    parser.add_argument("--budget", type=float, help="start no measurement after SECONDS")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which the JSON records")
    parser.add_argument("--out", type=Path, help="JSON (default: bench/results/, named by device)")
    parser.add_argument("--png", action="store_true", help="draw the JSON into a PNG beside it")


def resolve_run_options(
    args: argparse.Namespace,
    argv: Sequence[str],
    script: str,
    *,
    mode: str,
    gpu_pool_gib: float,
    gpu_budget_s: float,
) -> RunOptions:
    """The options for this machine; a run on a CPU takes half a GiB and at most 50 seconds."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return RunOptions(
        mode=mode,
        device=device,
        host_memory=args.host_memory,
        pool_bytes=int((args.pool_gib or (gpu_pool_gib if on_gpu else 0.5)) * GIB),
        budget_s=args.budget or (gpu_budget_s if on_gpu else min(50.0, gpu_budget_s)),
        seed=secrets.randbits(31) if args.seed is None else args.seed,
        out=args.out,
        png=args.png,
        command=command_line(script, argv, args.out),
    )


def run_with_sections(
    argv: Sequence[str],
    question: str,
    description: str,
    known: Sequence[str],
    measure: Callable[[RunOptions, Sequence[str]], dict[str, Any]],
    *,
    gpu_pool_gib: dict[str, float],
    gpu_budget_s: dict[str, float],
) -> int:
    """A bench with modes and sections, from its command line to its files; its exit code.

    Host memory and seconds on a GPU are given by mode.
    """
    parser = argparse.ArgumentParser(description=description)
    add_mode_options(parser, "a look in 25 seconds", "the promised figures, PASS or MISS")
    add_section_option(parser, known)
    add_run_options(parser)
    args = parser.parse_args(argv)
    sections = sections_of(parser, args, known)
    mode = mode_of(parser, args)
    options = resolve_run_options(
        args,
        argv,
        f"{question}.py",
        mode=mode,
        gpu_pool_gib=gpu_pool_gib[mode],
        gpu_budget_s=gpu_budget_s[mode],
    )
    return finish(options, question, measure(options, sections))


def command_line(script: str, argv: Sequence[str], out: Path | None) -> str:
    """The command without --out, whose folders of this machine would be committed with it."""
    kept = [arg for arg in argv if arg not in ("--out", str(out)) and not arg.startswith("--out=")]
    return shlex.join(["python", f"bench/{script}", *kept])


def allowed_host_bytes(device: torch.device) -> float:
    """Most host memory that a bench may take for its pools: half, a quarter without a GPU."""
    # The device pool is host memory too on a CPU.
    return (memory_limits().allowed_bytes or math.inf) / (2 if device.type == "cuda" else 4)


def make_arena(options: RunOptions, most_on_device: float = math.inf) -> Arena:
    """Host memory for the largest pool, and as much on the device where a third of it is free."""
    host = int(min(options.pool_bytes, allowed_host_bytes(options.device))) // MIB * MIB
    if options.device.type != "cuda":
        return Arena(options.device, host, options.host_memory)
    free_on_gpu, _ = torch.cuda.mem_get_info(options.device)
    device = int(min(host, most_on_device, free_on_gpu / 3)) // MIB * MIB
    return Arena(options.device, host, options.host_memory, device)


def finish(options: RunOptions, question: str, result: dict[str, Any]) -> int:
    """Writes a run's JSON and picture and says what it holds; exit code 1 for wrong bytes."""
    suffix = "" if options.mode == "full" else f"-{options.mode}"
    default = RESULTS / f"{question}-{machine_slug(result['machine'])}{suffix}.json"
    out = options.out or default
    write_result(
        out,
        {
            "question": question,
            "mode": options.mode,
            "command": options.command,
            "seed": options.seed,
            "host_memory": options.host_memory,
            **result,
        },
    )
    print(
        f"\n{len(result['records'])} configurations, bytes checked; {len(result['refused'])} "
        f"refused, {len(result['skipped'])} skipped, {len(result['mismatches'])} WRONG; "
        f"{result['wall_seconds']:.0f} s; {out}"
    )
    if options.png:
        from plot import draw

        draw(out, out.with_suffix(".png"))
    return 1 if result["mismatches"] else 0


def verdict(
    what: str, unit: str, target: float, value: float | None, at_most: bool = False
) -> dict[str, Any]:
    """One promised figure beside the measured one; "MISS" also where nothing was measured."""
    met = value is not None and (value <= target if at_most else value >= target)
    return {
        "what": what,
        "unit": unit,
        "target": target,
        "at_most": at_most,
        "value": value,
        "verdict": "PASS" if met else "MISS",
    }


def print_targets(verdicts: Sequence[dict[str, Any]]) -> None:
    """Prints verdicts, if there are any, as a table, and how many were met."""
    if not verdicts:
        return
    rows = [
        [
            item["what"],
            "-" if item["value"] is None else f"{item['value']:.2f}",
            f"{'<=' if item['at_most'] else '>='} {item['target']:g} {item['unit']}",
            item["verdict"],
        ]
        for item in verdicts
    ]
    print("\ntargets")
    print_table(["what", "measured", "target", "verdict"], rows)
    passed = sum(item["verdict"] == "PASS" for item in verdicts)
    print(f"{passed} of {len(verdicts)} targets met")


def print_ceilings(ceilings: dict[str, dict[str, Any]]) -> None:
    """Prints the yardsticks of a run."""
    for direction, ceiling in ceilings.items():
        print(f"ceiling {direction} {ceiling['gbps_median']:.2f} GB/s, contiguous")


def print_drift(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    """Says when the yardstick itself moved during the run: then something else used the machine."""
    for direction, ceiling in before.items():
        was, now = ceiling["gbps_median"], after[direction]["gbps_median"]
        if abs(now / was - 1) > 0.03:
            print(f"NOTE: {direction} ceiling went from {was:.2f} to {now:.2f} GB/s: measure again")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The facts a reader needs to compare a figure with one from elsewhere; no host name."""
    cpu = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    machine: dict[str, Any] = {
        "sgl_kvio": sgl_kvio.__version__,
        "device": device.type,
        "cpu": cpu[1].strip() if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "os": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / GIB, 1)
        machine["sms"] = properties.multi_processor_count
        machine.update(_driver_facts(device))
    return machine


def machine_title(machine: dict[str, Any]) -> str:
    """One line for a heading: what ran, and the versions that matter."""
    if machine["gpu"]:
        return (
            f"{machine['gpu']}, driver {machine.get('driver') or '?'}, "
            f"PCIe gen{machine.get('pcie_gen') or '?'} x{machine.get('pcie_width') or '?'}, "
            f"torch {machine['torch']}"
        )
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def machine_slug(machine: dict[str, Any]) -> str:
    """The machine's name as part of a file name."""
    name = machine["gpu"] or f"cpu {machine['cpu']}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes one run as JSON; refuses a number that JSON cannot hold, such as NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **result,
    }
    path.write_text(json.dumps(_rounded(stamped), indent=1, allow_nan=False) + "\n")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    for row in (headers, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), flush=True)


def _driver_facts(device: torch.device) -> dict[str, str]:
    """Driver version and link of a GPU from nvidia-smi; empty where there is none."""
    fields = ["driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = answer.stdout.strip().splitlines()
    line = lines[min(device.index or 0, len(lines) - 1)] if lines else ""
    values = [value.strip() for value in line.split(",")]
    return dict(zip(("driver", "pcie_gen", "pcie_width"), values, strict=False))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _rounded(value: Any) -> Any:
    """Floats cut to 6 significant digits: more would only claim what no clock can see."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return value
