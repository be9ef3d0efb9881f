"""Writes docs/ops.md: what the library registers, and the contract of every op.

    ops_doc.py              all of it; imports torch and sgl_kvio, and needs a build with GPU code
    ops_doc.py --seen       its last section alone, from docs/wheel-matrix.md; imports neither

Schemas, written arguments and dispatch keys are asked of torch. The texts of the contracts live
here, once: `CONTRACTS` says of every op the same things, `RULES` what holds for all of them.
tests/test_ops_doc.py compares the file with what this makes of the library, and quoted errors
("...") with its sources.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "ops.md"
MATRIX = ROOT / "docs" / "wheel-matrix.md"
NAMESPACE = "kvio"
WIDTH = 100
SEEN = "## What was seen"


@dataclass(frozen=True)
class Modes:
    """One row of the table of ops by how they are called."""

    cpu: str
    gpu: str
    compiled: str
    exported: str
    graph: str


@dataclass(frozen=True)
class Contract:
    """What a caller may rely on; every text is Markdown, its line breaks mean nothing."""

    does: str
    python: str
    stream: str
    blocks: str
    capture: str
    traced: str
    faults: str
    modes: Modes


# How the fields are called in the document, in its order.
FIELDS = {
    "does": "does",
    "python": "in Python",
    "stream": "stream",
    "blocks": "blocks the host",
    "capture": "in a CUDA graph",
    "traced": "`torch.compile`, `torch.export`",
    "faults": "bad input, faults",
}

RULES = """\
* **Where a call runs.** On the GPU that its pools, index lists or flags are on; with none of them
  there, on the CPU. One call is about one GPU. Host memory that a GPU has to reach is page-locked,
  or the call raises.
* **The stream** of a GPU call is torch's current one of that GPU. What the caller enqueued there
  before comes before the call, what it enqueues next comes after it. On the CPU a call is over when
  it returns. Tensors of a GPU call have to live until the stream has passed it; CPU indices may
  change as soon as the call has returned.
* **The host** waits for a GPU in no op but `host_unregister`; `sgl_kvio.check` is what waits on
  purpose. Two things are apart. First uses: page-locked memory for CPU indices is allocated once
  and kept, kernels are loaded, and both may wait until the GPU is idle. And the driver's queue: who
  enqueues hundreds of copies behind a busy stream waits for room in it.
* **Bad input** raises `RuntimeError` before anything is enqueued or any byte moves; the text names
  op, argument, what it got and what it needs. Values of CPU indices count as input.
* **Faults.** A kernel cannot raise. It skips what a bad value on the GPU names, does the rest, and
  leaves one record for its GPU: op, position, value, limit. The next `transfer`, `write_back`,
  `restore`, `memcpy_batch`, `transfer_staged`, `swap_in`, `copy_planned`, `load_layers` or
  `wait_layer` on that GPU that finds the record raises it and does nothing else; so does
  `sgl_kvio.check`, after waiting for the GPU; `take_fault` hands it out. Whoever reads it clears
  it. Later faults are dropped as long as one is unread. A replayed graph leaves a record each time.
* **CUDA graphs.** A graph keeps addresses: pools, indices, flags and epochs stay where they were at
  the capture, alive. What lies on the GPU, and the rows of host pools, are read at every replay;
  everything else of a call is that of the capture (options, numbers, CPU lists, which backend). A
  call that is refused leaves the capture as it was, and calls of one thread leave what another one
  captures alone; `host_unregister` alone does neither. The first call of a process may be inside a
  capture.
* **Compilers.** Every written argument is marked in the schema, so that no pass drops or moves a
  call. There is no autograd formula: nothing is differentiable, version counters stay. Fake kernels
  move nothing; meta tensors among real ones are refused. What functionalization does to host pools
  that are written, with figures: [README](../README.md#torchcompile).
"""

BACKENDS = [
    ["backend", "what a captured call becomes", "index values", "refused in a capture"],
    [
        "`register`",
        "one kernel or more for each group of buffers of one geometry; those that put many rows of"
        " a large pool in host-address order, too",
        "read at every replay",
        'CPU indices: "is on the CPU while the stream is being captured"',
    ],
    ["`tma`", "the same with kernels of bulk copies", "read at every replay", "CPU indices, alike"],
    [
        "`copy_engine`",
        "a copy node for each driver copy, one by one: the driver refuses batches there",
        "those of the capture stay in the graph",
        'nothing more than outside of one: GPU indices, "the indices are on the GPU"',
    ],
    [
        "`auto`",
        "`register` or `tma`, chosen at the capture; never `copy_engine`",
        "read at every replay",
        "CPU indices, alike",
    ],
    ["`cpu`", "has no part in GPU calls", "", ""],
]

_AS_TRANSFER_STREAM = "The caller's current one, as for `transfer`."
_NEVER_WAITS = "Never."
_NO_STREAM = "None: it enqueues nothing."
_HOST_ONLY = "No: it touches no GPU."
_NOTHING_TO_CAPTURE = "Nothing to capture: it may be called, and no replay repeats it."
_KEPT = (
    "Traced with `fullgraph=True`, inductor and `aot_eager`; exported, decomposed, packaged by"
    " AOTInductor: every call stays, in its place."
)
_ANY_NUMBER = "The number of indices may vary (`dynamic=True`: one graph)."
_TEXT_IS_NOT_TRACED = """\
    Not meant for it: torch refuses an op that returns text with `fullgraph=True` and in strict
    export, and breaks the graph there otherwise. A non-strict export returns the text of the
    trace,"""

CONTRACTS = {
    "transfer": Contract(
        does="Copies rows between pools: `dst[i][dst_indices] = src[i][src_indices]`, every `i`.",
        python="`sgl_kvio.transfer`",
        stream="""The caller's current one. On the legacy default stream batched driver copies go to
            a stream of the library's own, which is forked from it and joined to it by events.""",
        blocks="""Never, with CPU indices neither. `copy_engine` takes about a microsecond of CPU a
            copy.""",
        capture="""By backend, see [the table](#cuda-graphs-by-backend): kernels that read the
            indices at every replay, or driver copies by the indices of the capture. Empty calls add
            nothing.""",
        traced=f"""{_KEPT} {_ANY_NUMBER} `dst` is marked as written, so functionalization may clone
            it: under `aot_eager` a page-locked host pool arrives as a pageable clone, which is
            refused ("is host memory that is not page-locked"). `write_back` names such a pool
            instead. Restores are fine in every form.""",
        faults="""Raised at once: arguments, CPU indices, a backend that cannot
            serve, host memory that is not page-locked. Recorded: a GPU index outside its pool; that
            row or page is not moved.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes, by backend"),
    ),
    "transfer_staged": Contract(
        does="""Copies whole pages of a host pool through a device buffer: relayout by a kernel, one
            driver copy a page.""",
        python="`sgl_kvio.transfer_staged`; `HostKVPool.staging` makes the buffer",
        stream="""The caller's current one for kernels; driver copies go to a stream of the
            library's own, forked from it and joined to it by events. Calls on different streams
            need staging buffers of their own.""",
        blocks=f"{_NEVER_WAITS} Driver copies cost the CPU what those of `transfer` do.",
        capture="""Kernels, and a copy node for each driver copy. The host pool's index list, which
            lies on the CPU, stays in the graph. The device pool's is read at every replay where it
            lies on the GPU, and stays in the graph too where it lies on the CPU. Nothing is
            refused.""",
        traced=f"{_KEPT} `dst` and `staging` are marked as written; for host pools as `transfer`.",
        faults="""Raised at once: as `transfer`; a staging buffer of less than a page; the host
            pool's list on the GPU ("names rows of the host pool; it needs the CPU"). Recorded: an
            index of the device pool's list on the GPU; in a write-back the host row that it was for
            gets undefined bytes, because its page is copied whole.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes"),
    ),
    "write_back": Contract(
        does="""Copies rows into a host pool that is named by its handle:
            `pool[first_buffer + i][dst_indices] = src[i][src_indices]`.""",
        python="`sgl_kvio.write_back`, with `HostKVPool.handle` and `HostKVPool.token`",
        stream=_AS_TRANSFER_STREAM,
        blocks="Never, as `transfer`.",
        capture="""As `transfer`, [by backend](#cuda-graphs-by-backend). The handle is looked up at
            the capture: the graph needs the pool's memory, not the handle.""",
        traced=f"""{_KEPT} {_ANY_NUMBER} No pass can clone the pool. The call writes `token`, which
            no kernel touches: it orders calls of one token among each other and against nothing
            else. The handle is a constant of the graph; a token made inside the graph makes the
            call dead code, and decomposing an export demands one that is a buffer of a module. With
            `mode="reduce-overhead"` the token and what is written need addresses that stay.""",
        faults="""As `transfer`, with the pool called `pool`; raised at once, when the call runs and
            not when it is traced: a handle "which names no pool of this process" or
            "whose pool was closed", and more tensors than there are buffers.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes, by backend"),
    ),
    "restore": Contract(
        does="""Copies rows out of a host pool that is named by its handle:
            `dst[i][dst_indices] = pool[first_buffer + i][src_indices]`.""",
        python="`sgl_kvio.restore`, with `HostKVPool.handle` and `HostKVPool.token`",
        stream=_AS_TRANSFER_STREAM,
        blocks="Never, as `transfer`.",
        capture="As `write_back`.",
        traced="""As `write_back`; `dst` is marked as written too, so that what stands behind the
            call reads the new rows.""",
        faults="As `write_back`.",
        modes=Modes("yes", "yes", "yes", "yes", "yes, by backend"),
    ),
    "register_pool": Contract(
        does="Gives host buffers a handle, by which `write_back` and `restore` reach them.",
        python="`sgl_kvio.register_pool`; a `HostKVPool` does it for itself",
        stream=_NO_STREAM,
        blocks=_HOST_ONLY,
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "a handle is known only at run time; call it outside the graph".',
        faults="""Raised at once: no buffers, one that is not host memory or has no rows, a number
            "which an open pool has".""",
        modes=Modes("yes", "yes", "refused", "refused", "nothing to capture"),
    ),
    "unregister_pool": Contract(
        does="""Closes a handle: later calls that name it raise, and the pool's tensors are let go
            of.""",
        python="`sgl_kvio.unregister_pool`; `HostKVPool.close` does it for its own",
        stream="""None. Work that a GPU still has to do needs the memory, and so does every graph
            that captured a call: synchronize first.""",
        blocks="No: calls under way on the CPU end as they would have.",
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "changes the process, not a tensor; call it outside the graph".',
        faults="Raised at once: a number that names no open pool.",
        modes=Modes("yes", "yes", "refused", "refused", "nothing to capture"),
    ),
    "memcpy_batch": Contract(
        does="Copies byte ranges between contiguous tensors, by driver copies on a GPU.",
        python="`sgl_kvio.memcpy_batch`",
        stream="""The caller's current one; batches forked from the legacy default stream as for
            `transfer`.""",
        blocks=f"{_NEVER_WAITS} Driver copies cost the CPU what those of `transfer` do.",
        capture="A copy node for each range; offsets and lengths stay in the graph.",
        traced=f"""{_KEPT} Offsets and lengths are constants of the graph; `dst` is marked as
            written, for host pools as `transfer`.""",
        faults="""Raised at once: the whole plan is checked before a byte moves. It leaves no record
            of its own, and raises that of an earlier call.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes"),
    ),
    "swap_in": Contract(
        does="""Brings the tokens that sparse attention selected into hot buffers, least recently
            used slots first, and says where each one lies (HiSparse).""",
        python="`sgl_kvio.swap_in`",
        stream="The caller's current one.",
        blocks=_NEVER_WAITS,
        capture="""Kernels. Selection, state, plan, lengths and `num_real_reqs` are read at every
            replay: capture the largest batch, and replay it with fewer real requests. `skip_io`,
            `hot_buffer_size` and shapes are those of the capture.""",
        traced=f"""{_KEPT} State, outputs and device buffers are marked as written; the host cache
            is only read, so nothing clones it.""",
        faults="""Raised at once: arguments, memory that is written and shared, and on the CPU every
            bad value, before anything changes. Recorded on a GPU: a bad token, location, request or
            LRU slot; what it was needed for yields -1, the rest is served.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes"),
    ),
    "copy_planned": Contract(
        does="Repeats the copies that a `swap_in` recorded, for another layer of its selection.",
        python="`sgl_kvio.copy_planned`",
        stream="The caller's current one.",
        blocks=_NEVER_WAITS,
        capture="Kernels, which read the plan and `num_real_reqs` at every replay.",
        traced=f"{_KEPT} `device_buffer` is marked as written; the host cache is only read.",
        faults="""Raised at once: arguments, and on the CPU a count or a row outside its pool,
            before a byte moves. Recorded on a GPU: a row outside its pool; it is not moved.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes"),
    ),
    "load_layers": Contract(
        does="""Restores the same rows of every layer, layer by layer, in one launch that raises a
            flag as each is in place.""",
        python="""`sgl_kvio.load_layers`, with `sgl_kvio.layer_flags` and `HostKVPool.stacked`; it
            calls `default` for an epoch in a tensor, `int` for a number""",
        stream="""The caller's current one; beside a forward pass give it a side stream. The waits
            for it are enqueued after it; the next load with its flags is ordered behind it.""",
        blocks=_NEVER_WAITS,
        capture="""One kernel; more of them for lists of more buffers than a launch takes, and where
            many rows of a large pool are put in order. Indices and the epoch's tensor are read at
            every replay. Refused: a number as epoch
            ("while the stream is being captured, which every replay would repeat") and CPU indices
            ("a graph needs indices on the GPU").""",
        traced=f"""{_KEPT} `dst` and `flags` are marked as written. A number as epoch is
            symbolic: another one needs no new graph.""",
        faults="""Raised at once: arguments, CPU indices, host memory that is not page-locked, a
            host pool as `dst` of a GPU call, on the CPU an epoch that is not above its flags.
            Recorded: a GPU index outside its pool (its row is skipped in every layer and keeps no
            flag down), and an epoch that is not above its flags.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes, with the epoch in a tensor"),
    ),
    "wait_layer": Contract(
        does="Holds the stream until a layer of a load is in place.",
        python="""`sgl_kvio.wait_layer`; it calls `default` for an epoch in a tensor, `int` for a
            number""",
        stream="""The caller's current one: a kernel of one thread polls the flag, and what is
            enqueued behind it sees the layer's rows. Any number of streams may wait.""",
        blocks="""Never: the stream waits. On the CPU loads are over when they return, so it only
            looks, and raises where the layer is not in place.""",
        capture="""One kernel, which reads the epoch's tensor at every replay; the load may be in
            the same graph or outside. Refused: a number as epoch
            ("while the stream is being captured, which every replay would repeat"), but for 0 and
            less, which wait for nothing.""",
        traced="""Traced and exported as `load_layers`. The schema says that `after` is written,
            which is not so, and keeps what uses those tensors behind the wait; neither pools nor
            flags are cloned for it. Refused: "after is empty while the call is being traced". With
            `mode="reduce-overhead"` flags, epoch, pools and inputs in `after` need addresses that
            stay.""",
        faults="""Raised at once: arguments, on the CPU a layer that "is not in place". Recorded: a
            wait that gave up after `timeout_ms`; what follows it read rows that were not in
            place.""",
        modes=Modes("yes", "yes", "yes", "yes", "yes, with the epoch in a tensor"),
    ),
    "explain": Contract(
        does="""Says what `transfer` would do with the same arguments, and why: backend, launch,
            runs, rate to expect. Moves nothing.""",
        python="`sgl_kvio.explain`",
        stream="""None: it looks at the caller's current one (captured, legacy default) and enqueues
            nothing.""",
        blocks="Never. With CPU indices it counts runs, as `auto` does.",
        capture="""Its line `capture:` says, inside of one or not, what a graph would keep of the
            call. Inside of one the rest is about the captured call: copies go one by one, `auto`
            leaves `copy_engine` out, CPU indices raise what `transfer` would raise.""",
        traced=f'{_TEXT_IS_NOT_TRACED} "backend: unknown while tracing".',
        faults="""Raised at once: arguments, CPU indices, a backend that cannot serve; host memory
            that is not page-locked only where the copy engine is chosen. It leaves no record and
            reports none.""",
        modes=Modes("answers", "answers", "refused", "text of the trace", "answers"),
    ),
    "explain_staged": Contract(
        does="Says what `transfer_staged` would do: pages, rest, staging, copies. Moves nothing.",
        python="`sgl_kvio.explain_staged`",
        stream="None: it looks at the caller's current one and enqueues nothing.",
        blocks=_NEVER_WAITS,
        capture="""Its line `capture:` says, inside of one or not, which list a graph would keep.
            Inside of one it says that copies go one by one.""",
        traced=f'{_TEXT_IS_NOT_TRACED} "pages: unknown while tracing".',
        faults="""Raised at once: what `transfer_staged` would raise. It leaves no record and
            reports none.""",
        modes=Modes("answers", "answers", "refused", "text of the trace", "answers"),
    ),
    "host_register": Contract(
        does="Page-locks the bytes of a contiguous CPU tensor, so that GPU calls may use them.",
        python="`sgl_kvio.host_register`; a `HostKVPool` does it for itself",
        stream=_NO_STREAM,
        blocks="Until the driver has locked the pages. It waits for no stream.",
        capture="Nothing to capture: page-locking is allowed while a stream is captured.",
        traced="""The fake kernel does nothing, and refuses a meta tensor. Call it outside the
            graph: `tensor` is marked as written, so functionalization may hand it a clone.""",
        faults="""Raised at once: no GPU, a build without GPU code, a tensor with gaps or on a GPU,
            overlap with an earlier registration, a driver error; then nothing stays locked.""",
        modes=Modes("needs a GPU", "yes", "outside", "outside", "nothing to capture"),
    ),
    "host_unregister": Contract(
        does="Undoes `host_register` for the same tensor.",
        python="`sgl_kvio.host_unregister`; `HostKVPool.close` does it for its own",
        stream="All of them: it waits for every GPU of the process.",
        blocks="Yes, until all work of the process is done on every GPU that it uses.",
        capture="""Refused ("of which a stream is being captured"): nothing can be waited for, the
            memory stays registered. CUDA ends the capture.""",
        traced="As `host_register`; the fake kernel does nothing.",
        faults="""Raised at once: no GPU, a build without GPU code, a tensor that is not one given
            to `host_register`.""",
        modes=Modes("needs a GPU", "yes", "outside", "outside", "refused"),
    ),
    "device_pointer": Contract(
        does="The address that the GPU uses for a GPU tensor or a page-locked host tensor.",
        python="`sgl_kvio.device_pointer`",
        stream=_NO_STREAM,
        blocks="No.",
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "an address is known only at run time; call it outside the graph".',
        faults="""Raised at once: no GPU, a build without GPU code, host memory that is not
            page-locked.""",
        modes=Modes("needs a GPU", "yes", "refused", "refused", "nothing to capture"),
    ),
    "create_stream": Contract(
        does="A new stream of a GPU that is nobody else's, as torch's 32 are not; its handle.",
        python="`sgl_kvio.create_stream`, as a torch stream; `LayerwiseLoader` has one of these",
        stream=_NO_STREAM,
        blocks="No.",
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "a stream is known only at run time; call it outside the graph".',
        faults="""Raised at once: no GPU, a build without GPU code, a `device_index` that cannot be.
            The stream lives as long as the process.""",
        modes=Modes("needs a GPU", "yes", "refused", "refused", "nothing to capture"),
    ),
    "take_fault": Contract(
        does="""The record of a fault on a device, `[op, position, value, limit]`, or `[]`; clears
            it. [What the numbers mean](#the-numbers-of-take_fault).""",
        python="`sgl_kvio.take_fault`; `sgl_kvio.check` synchronizes first and raises it in words",
        stream="None: it sees what kernels that have finished left.",
        blocks="No.",
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "a fault is known only at run time; call it outside the graph".',
        faults="""Raised at once: a `device_index` that cannot be. Without a GPU the answer is
            `[]`.""",
        modes=Modes("answers", "answers", "refused", "refused", "nothing to capture"),
    ),
    "set_rates": Contract(
        does='Makes a table of rates the one by which `backend="auto"` chooses.',
        python="`sgl_kvio.set_rates`",
        stream=_NO_STREAM,
        blocks="No: calls of other threads see the old table or the new one.",
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "changes the process, not a tensor; call it outside the graph".',
        faults="Raised at once: a wrong number of rates, one that is negative or not finite.",
        modes=Modes("yes", "yes", "refused", "refused", "nothing to capture"),
    ),
    "get_rates": Contract(
        does='The table by which `backend="auto"` chooses now.',
        python="`sgl_kvio.get_rates`",
        stream=_NO_STREAM,
        blocks=_HOST_ONLY,
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "rates are known only at run time; call it outside the graph".',
        faults="None.",
        modes=Modes("answers", "answers", "refused", "refused", "nothing to capture"),
    ),
    "copy_round": Contract(
        does="In what rounds GPU lanes that share a row move it: bytes of all lanes, bytes of one.",
        python="`sgl_kvio.copy_round`",
        stream=_NO_STREAM,
        blocks=_HOST_ONLY,
        capture=_NOTHING_TO_CAPTURE,
        traced='Refused: "answers the caller, not a kernel; call it outside the graph".',
        faults="Raised at once: row bytes or lanes below 1.",
        modes=Modes("answers", "answers", "refused", "refused", "nothing to capture"),
    ),
    "build_info": Contract(
        does="""What this build and machine offer, as JSON: version, backend, architectures, driver,
            entry points.""",
        python="`sgl_kvio.capabilities`, which asks once (torch leaks the text of such an op)",
        stream=_NO_STREAM,
        blocks="No: it initializes no device.",
        capture=_NOTHING_TO_CAPTURE,
        traced=f"{_TEXT_IS_NOT_TRACED} `{{}}`.",
        faults="None.",
        modes=Modes("answers", "answers", "refused", "text of the trace", "nothing to capture"),
    ),
}

ABOUT_MODES = """\
**yes**: a test calls it so, on the CPU in `tests/`, on a GPU in `tests/gpu`, and compares every
byte where it moves rows. **answers**: it returns what it is asked for. **refused**: it raises, or
torch does. **outside**: it is meant to stand outside of graphs. **needs a GPU**: it raises where
there is none. "compiled" is `torch.compile(fullgraph=True)` by inductor and by `aot_eager`;
"exported" is `torch.export`, and on the CPU decomposed programs and AOTInductor packages too; "CUDA
graph" is capture and replay.
"""


# --- what the library registers


@dataclass(frozen=True)
class Overload:
    schema: str
    written: tuple[str, ...]
    kernels: tuple[str, ...]


def dispatch_keys(full_name: str) -> tuple[str, ...]:
    """The dispatch keys that have a kernel of their own, as torch's dispatcher says."""
    import torch

    def has(key: str) -> bool:
        try:
            return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full_name, key))
        except RuntimeError:  # a name that this torch has and the dispatcher takes no kernels for
            return False

    first = ["CPU", "CUDA"]
    names = sorted(torch._C.DispatchKey.__members__, key=lambda key: (key not in first, key))
    return tuple(dict.fromkeys(key for key in names if has(key)))


def overload_of(full_name: str) -> Overload:
    import torch

    name, _, overload = full_name.partition("::")[2].partition(".")
    schema = getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload or "default")._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return Overload(str(schema), tuple(written), dispatch_keys(full_name))


def registered_ops() -> dict[str, dict[str, Overload]]:
    """Overloads by op, both by name; "default" is the one without a name."""
    import torch

    import sgl_kvio  # noqa: F401  registers them

    ops: dict[str, dict[str, Overload]] = {}
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, name = full_name.partition("::")
        if space != NAMESPACE:
            continue
        op, _, overload = name.partition(".")
        ops.setdefault(op, {})[overload or "default"] = overload_of(full_name)
    return ops


# --- the document


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |") for cells in lines]


def flat(text: str) -> str:
    return " ".join(text.split())


def wrapped(schema: str) -> list[str]:
    """A schema over several lines, cut between arguments."""
    lines = [""]
    for part in re.split(r"(?<=, )", schema):
        if len(lines[-1]) + len(part.rstrip()) > WIDTH:
            lines.append("    ")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def code_list(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def kernel_list(keys: tuple[str, ...]) -> str:
    return ", ".join(f"`{key}` (fake)" if key == "Meta" else f"`{key}`" for key in keys)


def one_or_each(overloads: dict[str, Overload], say: Any) -> str:
    """What all overloads have in common, or what each of them has."""
    texts = {name: say(overload) for name, overload in overloads.items()}
    if len(set(texts.values())) == 1:
        return str(next(iter(texts.values())))
    return "; ".join(f"`{name}`: {text}" for name, text in texts.items())


def op_section(op: str, overloads: dict[str, Overload]) -> list[str]:
    contract = CONTRACTS[op]
    texts = {name: flat(getattr(contract, name)) for name in FIELDS}
    rows = [[FIELDS["does"], texts.pop("does")], [FIELDS["python"], texts.pop("python")]]
    rows.append(["writes", one_or_each(overloads, lambda o: code_list(o.written))])
    rows.append(["kernels", one_or_each(overloads, lambda o: kernel_list(o.kernels))])
    rows += [[FIELDS[name], text] for name, text in texts.items()]
    lines = [f"## {op}", ""]
    for overload in overloads.values():
        lines += ["```", *wrapped(overload.schema), "```", ""]
    return [*lines, *table(["", ""], rows), ""]


def fault_rows() -> list[list[str]]:
    from sgl_kvio import ops

    return [
        [str(number), f"`{op}`", f"`{argument}`", f"{consequence}."]
        for number, (op, argument, _, consequence, _) in enumerate(ops._FAULTS, 1)
    ]


def modes_rows() -> list[list[str]]:
    rows = []
    for op, contract in CONTRACTS.items():
        m = contract.modes
        rows.append([f"[`{op}`](#{op})", m.cpu, m.gpu, m.compiled, m.exported, m.graph])
    return rows


def document(ops: dict[str, dict[str, Overload]], matrix: str) -> str:
    lines = [
        f"# The ops of `torch.ops.{NAMESPACE}`",
        "",
        "Written by `tools/ops_doc.py`: schemas, written arguments and kernels as torch has them"
        " registered, contracts from its table. Change them there, or in `csrc/ops.cpp`.",
        "",
        *table(
            ["op", "does"],
            [[f"[`{op}`](#{op})", flat(contract.does)] for op, contract in CONTRACTS.items()],
        ),
        "",
        "## What holds for all of them",
        "",
        *RULES.splitlines(),
        "",
        "`kernels` below are torch's dispatch keys. `CUDA` is its key for NVIDIA's and AMD's GPUs;"
        " `CompositeExplicitAutograd` serves calls that have no tensor to choose by; `Meta` is what"
        " compilers trace with.",
        "",
        "### CUDA graphs, by backend",
        "",
        "Of `transfer`, `write_back` and `restore`; replays move the rows that are there then.",
        "",
        *table(BACKENDS[0], BACKENDS[1:]),
        "",
    ]
    for op in CONTRACTS:
        lines += op_section(op, ops[op])
    lines += [
        "## The numbers of take_fault",
        "",
        *table(["number", "op", "argument", "what became of it"], fault_rows()),
        "",
        "## Ops by how they are called",
        "",
        *table(["op", "CPU", "GPU", "compiled", "exported", "CUDA graph"], modes_rows()),
        "",
        *ABOUT_MODES.splitlines(),
        "",
    ]
    return "\n".join(lines) + "\n" + seen_section(matrix)


# --- what was seen, from docs/wheel-matrix.md


def rows_under(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, its head first, the rule left out."""
    below = text.partition(f"\n{heading}\n")[2]
    if not below:
        raise ValueError(f"{MATRIX.name} has no heading '{heading}'")
    lines = below[below.index("|") :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if set("".join(row)) != {"-"}]


def prose_under(text: str, heading: str) -> list[str]:
    """The lines between a heading and the next one."""
    _, found, below = text.partition(f"{heading}\n")
    if not found:
        raise ValueError(f"{MATRIX.name} has no heading '{heading}'")
    return re.split(r"^#", below, maxsplit=1, flags=re.MULTILINE)[0].strip().splitlines()


def wheel_rows(matrix: str) -> list[list[str]]:
    head, *rows = rows_under(matrix, "## Wheels")
    by_name = {name: cells for name, *cells in rows}
    asked = ["metadata", "machine code for", "PTX for", "compiler of the kernels"]
    asked += ["newest glibc version it asks for", "auditwheel's policy"]
    return [[wheel, *(by_name[name][i] for name in asked)] for i, wheel in enumerate(head[1:])]


def seen_section(matrix: str) -> str:
    head = ["wheel", "asks for", "machine code", "PTX", "compiler of kernels"]
    head += ["newest glibc it asks for", "policy"]
    tested, *runs = rows_under(matrix, "## Installed and tested")
    names = ["wheel", "Python", "torch", "GPU", "glibc", "tests", "which"]
    columns = [tested.index(name) for name in names]
    lines = [
        SEEN,
        "",
        "From [wheel-matrix.md](wheel-matrix.md), which has every kernel's machine code too. What"
        " is meant to work beyond it: [README](../README.md#support). The file says of itself:",
        "",
        *(f"> {line}".rstrip() for line in prose_under(matrix, "# Wheel matrix")),
        "",
        *table(head, wheel_rows(matrix)),
        "",
    ]
    if runs:
        lines += table(names, [[run[i] for i in columns] for run in runs])
    else:
        lines.append("No run of the tests with these files is recorded there.")
    lines += ["", "Left out of that run:", "", *prose_under(matrix, "## Left out")]
    return "\n".join(lines) + "\n"


def with_new_seen_section(document: str, matrix: str) -> str:
    before, heading, _ = document.partition(f"{SEEN}\n")
    if not heading:
        raise ValueError(f"{DOC.name} has no heading '{SEEN}'")
    return before + seen_section(matrix)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seen", action="store_true", help="the last section alone")
    matrix = MATRIX.read_text()
    if parser.parse_args().seen:
        DOC.write_text(with_new_seen_section(DOC.read_text(), matrix))
        return 0
    ops = registered_ops()
    if ops.keys() != CONTRACTS.keys():
        print(
            f"ops_doc.py: without a contract {sorted(ops.keys() - CONTRACTS.keys())},"
            f" not registered {sorted(CONTRACTS.keys() - ops.keys())}",
            file=sys.stderr,
        )
        return 1
    if not any("CUDA" in overload.kernels for overload in ops["transfer"].values()):
        print("ops_doc.py: this build has no GPU code; it needs one that has", file=sys.stderr)
        return 1
    DOC.write_text(document(ops, matrix))
    return 0


if __name__ == "__main__":
    sys.exit(main())
