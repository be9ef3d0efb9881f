"""What this installation has, and what `transfer` would choose here for common KV shapes.

Works without a GPU and without a driver, and initializes CUDA only where a GPU can be used. A
section that fails reports its error instead of hiding the others: this is the command for broken
machines.

    >>> from sgl_kvio import doctor
    >>> doctor.collect()["versions"]["sgl_kvio"]  # a dict that json.dumps takes
    >>> doctor.run(as_json=False)                 # prints the same as text
    0
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_kvio._version import __version__
from sgl_kvio.layouts import combinations
from sgl_kvio.memory import CHUNK_ENV, chunk_limit_from_env, gpu_numa_node, memory_limits
from sgl_kvio.ops import capabilities, explain
from sgl_kvio.pool import HostKVPool

PAGE_SIZE = 64
NUM_PAGES = 4


@dataclasses.dataclass(frozen=True)
class KVShape:
    """KV sizes of a model as one rank holds them; `models` says where they occur."""

    kind: str
    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    models: str

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize


# Real models' caches: grouped-query attention on 4, 2 and 1 ranks, MLA latents in 1 and 2 bytes.
COMMON_SHAPES = (
    KVShape("mha", 32, 2, 128, torch.bfloat16, "Llama-3.1-8B on 4 ranks"),
    KVShape("mha", 32, 4, 128, torch.bfloat16, "Llama-3.1-8B on 2 ranks"),
    KVShape("mha", 32, 8, 128, torch.bfloat16, "Llama-3.1-8B, Qwen3-8B"),
    KVShape("mla", 61, 1, 576, torch.uint8, "DeepSeek-V3 in 8 bits"),
    KVShape("mla", 61, 1, 576, torch.bfloat16, "DeepSeek-V3"),
)


def collect() -> dict[str, Any]:
    """Everything the doctor knows, as plain dicts and lists."""
    sections: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "binary": capabilities,
        "devices": _devices,
        "memory": _memory,
        "environment": _environment,
        "choices": _choices,
    }
    return {name: _or_error(section) for name, section in sections.items()}


def _or_error(section: Callable[[], Any]) -> Any:
    try:
        return section()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, Any]:
    return {
        "sgl_kvio": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "transformers": _installed_version("transformers"),
        "platform": platform.platform(),
    }


def _installed_version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    return [_device(index) for index in range(torch.cuda.device_count())]


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    arch = (
        properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    )
    return {
        "index": index,
        "name": properties.name,
        "arch": arch,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "numa_node": gpu_numa_node(index),
    }


def _memory() -> dict[str, Any]:
    limits = memory_limits()
    return {
        **dataclasses.asdict(limits),
        "allowed_bytes": limits.allowed_bytes,
        "bound_by": limits.bound_by,
        "memlock_bytes": _memlock_bytes(),
        "chunk_bytes": chunk_limit_from_env(),
        "transparent_huge_pages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _memlock_bytes() -> int | None:
    """The soft RLIMIT_MEMLOCK, None without one. GPU drivers mostly lock pages outside of it."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _selected(path: str) -> str | None:
    """The entry in brackets of a kernel setting such as `always [madvise] never`."""
    try:
        words = Path(path).read_text().split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _environment() -> dict[str, str]:
    """The variables that change what the library or its view of the devices does."""
    names = {CHUNK_ENV, "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"}
    names |= {name for name in os.environ if name.startswith("KVIO_")}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


# -------------------------------------------------------------------------------------------------
# Choices


def _choices() -> list[dict[str, Any]]:
    """By shape and layout: what a restore of one layer and a write-back of all would do."""
    usable = torch.cuda.is_available() and capabilities()["backend"] != "cpu"
    device = torch.device("cuda" if usable else "cpu")
    return [
        {
            "kind": shape.kind,
            "row_bytes": shape.row_bytes,
            "layers": shape.layers,
            "models": shape.models,
            "layout": layout,
            "device": device.type,
            **_explained(shape, layout, device),
        }
        for shape in COMMON_SHAPES
        for kind, layout in combinations()
        if kind == shape.kind
    ]


def _explained(shape: KVShape, layout: str, device: torch.device) -> dict[str, Any]:
    try:
        with HostKVPool(
            shape.kind,
            layout,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_layers=shape.layers,
            num_heads=shape.heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=device,
        ) as pool:
            return _explain_pool(pool, shape, device)
    except (RuntimeError, MemoryError) as error:
        return {"error": str(error)}


def _explain_pool(pool: HostKVPool, shape: KVShape, device: torch.device) -> dict[str, str]:
    row = (shape.heads, shape.head_dim)
    # Every layer's stand-in is the same buffer: explain reads shapes and addresses only.
    buffer = torch.empty((NUM_PAGES * PAGE_SIZE, *row), dtype=shape.dtype, device=device)
    host_pages = torch.arange(NUM_PAGES)
    device_pages = host_pages.flip(0)
    layer, everything = pool.layer(0), pool.all_layers()
    restore = explain(
        [buffer] * len(layer),
        layer,
        device_pages,
        host_pages,
        page_size=PAGE_SIZE,
        index_unit="page",
    )
    write_back = explain(
        everything,
        [buffer] * len(everything),
        host_pages,
        device_pages,
        page_size=PAGE_SIZE,
        index_unit="page",
    )
    return {"restore_layer": restore.strip(), "write_back": write_back.strip()}


# -------------------------------------------------------------------------------------------------
# Text


def run(as_json: bool) -> int:
    """Prints the report to stdout, as text or as one JSON object; 0, or 1 when a section failed."""
    report = collect()
    print(json.dumps(report, indent=2) if as_json else as_text(report), flush=True)
    return 1 if _has_failure(report) else 0


def _has_failure(report: dict[str, Any]) -> bool:
    if any(_error_of(section) for section in report.values()):
        return True
    return any(_error_of(choice) for choice in report["choices"])


def _error_of(section: Any) -> str | None:
    return section.get("error") if isinstance(section, dict) else None


def as_text(report: dict[str, Any]) -> str:
    """The report of `collect` for a reader."""
    writers: dict[str, Callable[[Any], list[str]]] = {
        "versions": _mapping_lines,
        "binary": _binary_lines,
        "devices": _device_lines,
        "memory": _memory_lines,
        "environment": _mapping_lines,
        "choices": _choice_lines,
    }
    lines: list[str] = []
    for name, section in report.items():
        error = _error_of(section)
        body = [f"failed: {error}"] if error else writers[name](section)
        lines += [name, *(f"  {line}" for line in body or ["none"])]
    return "\n".join(lines)


def _mapping_lines(section: dict[str, Any]) -> list[str]:
    return [f"{name:22} {_shown(value)}" for name, value in section.items()]


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _binary_lines(section: dict[str, Any]) -> list[str]:
    elsewhere = {"version", "torch", "python"}  # the versions section has them
    return _mapping_lines({name: value for name, value in section.items() if name not in elsewhere})


def _device_lines(section: list[dict[str, Any]]) -> list[str]:
    if not section:
        return ["no GPU that torch can use: transfers run on the CPU"]
    return [
        f"{device['index']}: {device['name']}, {device['arch']}, {_size(device['memory_bytes'])}, "
        f"{device['multiprocessors']} multiprocessors, NUMA node {_shown(device['numa_node'])}"
        for device in section
    ]


def _memory_lines(section: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in section.items():
        if name == "is_explicit":
            continue
        if name.endswith("_bytes"):
            lines.append(f"{name.removesuffix('_bytes'):22} {_size(value)}")
        else:
            lines.append(f"{name:22} {_shown(value)}")
    return lines


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "not limited"
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.2f} MiB"


def _choice_lines(section: list[dict[str, Any]]) -> list[str]:
    """One paragraph a shape; layouts whose answers agree share their lines."""
    lines = [f"for {NUM_PAGES} pages of {PAGE_SIZE} tokens, pages given by CPU indices"]
    by_shape: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for choice in section:
        title = (
            f"{choice['kind']} rows of {choice['row_bytes']} B, {choice['layers']} layers "
            f"({choice['models']}), {choice['device']}"
        )
        layouts = by_shape.setdefault(title, {}).setdefault(_answers(choice), [])
        layouts.append(choice["layout"])
    for title, groups in by_shape.items():
        lines.append(title)
        for answers, layouts in groups.items():
            lines.append(f"  {', '.join(layouts)}")
            lines += [f"    {answer}" for answer in answers]
    return lines


def _answers(choice: dict[str, Any]) -> tuple[str, ...]:
    if "error" in choice:
        return (f"failed: {choice['error']}",)
    return (
        f"restore of a layer: {_summary(choice['restore_layer'])}",
        f"write-back of all:  {_summary(choice['write_back'])}",
    )


def _summary(explanation: str) -> str:
    """An explanation in one line, without what only repeats the question."""
    fields = [line.partition(": ") for line in explanation.splitlines()]
    repeated = {"backend", "buffers", "indices", "bytes", "candidates"}
    backend = next((value for name, _, value in fields if name == "backend"), "")
    rest = [f"{name}: {value}" for name, _, value in fields if name not in repeated]
    return "; ".join([backend, *rest])
