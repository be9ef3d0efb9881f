"""The command line: `python -m sgl_kvio demo`, `doctor` and `calibrate`.

Exit status: 0 well, 1 a difference or a failure was found, 2 bad arguments or a missing extra, 141
when the reader of the output went away (as a shell counts SIGPIPE).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence

from sgl_kvio import calibrate, demo, doctor
from sgl_kvio._version import __version__

BROKEN_PIPE_STATUS = 141

DEMO_HELP = """\
A Llama-architecture decoder with random weights reads a text. Its KV cache is written back to a
host pool, the device pool is overwritten, and the pages are restored layer by layer while the next
chunk runs. The last line is "logits identical" when every logit equals the never-evicted run's bit
for bit. Needs the extra: pip install 'sgl_kvio[demo]'. Downloads nothing."""

DOCTOR_HELP = """\
Prints versions, devices, the architectures in the binary, the driver's entry points, how much
memory can be page-locked, and what transfer would choose for common KV shapes. Needs no GPU and no
driver."""

CALIBRATE_HELP = """\
Measures what every backend moves on this machine, by direction, shape and length of a run, and
stores the table where importing sgl_kvio reads it: $XDG_CACHE_HOME or ~/.cache,
sgl_kvio/rates-v1.json. From then on backend="auto" chooses by it. Needs a GPU that is idle
otherwise and 4 GiB of host memory (1 GiB with --quick). Delete the file to go back to the built-in
table."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_kvio",
        description="Moves KV-cache rows between a host pool and a device pool.",
    )
    parser.add_argument("--version", action="version", version=f"sgl_kvio {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    _add_doctor(commands)
    _add_calibrate(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="a real forward pass whose KV cache leaves and comes back",
        description=DEMO_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = demo.DemoOptions()
    add = parser.add_argument
    add("--text", metavar="FILE", help="text to read, bytes are tokens (default: the README)")
    add(
        "--model",
        choices=tuple(demo.MODELS),
        default=default.model,
        help="whose sizes to take (default: %(default)s); on a CPU KV heads and head_dim stay as "
        "they are, layers and widths shrink",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the prefix to evict, rounded down to whole pages "
        "(default: 2048 on a CPU, 16384 on a GPU)",
    )
    add(
        "--chunk",
        type=int,
        metavar="N",
        help="tokens of a prefill step and of the next chunk "
        "(default: 256 on a CPU, 2048 on a GPU)",
    )
    add(
        "--decode",
        type=int,
        metavar="N",
        default=default.decode,
        help="greedy steps after the next chunk (default: %(default)s)",
    )
    add(
        "--layout",
        choices=demo.LAYOUTS,
        default=default.layout,
        help="of the host pool (default: %(default)s)",
    )
    add(
        "--backend",
        default=default.backend,
        help="auto, register, tma, copy_engine or cpu (default: %(default)s)",
    )
    add(
        "--page-size",
        type=int,
        metavar="N",
        default=default.page_size,
        help="tokens a page (default: %(default)s)",
    )
    add(
        "--num-blocks",
        type=int,
        metavar="N",
        default=default.num_blocks,
        help="CTAs of the GPU kernels (default: 0, the library's choice)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        default=default.seed,
        help="of the weights and of the page placement (default: %(default)s)",
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this installation has and would do",
        description=DOCTOR_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what auto chooses by on this machine",
        description=CALIBRATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a smaller pool, fewer repeats")
    parser.add_argument("--out", metavar="FILE", help="store the table there instead")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (argparse itself exits with 2 on bad arguments)."""
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE_STATUS


def _discard_output() -> None:
    """Turns the streams away from a pipe that nobody reads: Python flushes them again at exit."""
    with open(os.devnull, "w") as nothing:
        for stream in (sys.stdout, sys.stderr):
            # A stream may be none, or a stand-in without a file.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                os.dup2(nothing.fileno(), stream.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    if arguments.command == "doctor":
        return doctor.run(as_json=arguments.json)
    if arguments.command == "calibrate":
        return calibrate.run(quick=arguments.quick, out=arguments.out)
    names = [field.name for field in dataclasses.fields(demo.DemoOptions)]
    options = demo.DemoOptions(**{name: getattr(arguments, name) for name in names})
    try:
        return demo.run(options)
    except demo.DemoError as error:
        print(f"sgl_kvio demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
