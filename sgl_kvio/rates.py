"""The file of measured rates: by what `backend="auto"` chooses on this machine.

`python -m sgl_kvio calibrate` writes it, importing the package reads it. A table that cannot be
used (broken, of an older version, of another GPU) is passed over with one warning, and the built-in
one serves. Reading touches no GPU and no driver.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_kvio import ops

SCHEMA_VERSION = 1
# The order of the table in C++ (csrc/plan/rates.h).
BACKENDS = ("register", "tma", "copy_engine")
DIRECTIONS = ("H2D", "D2H")
SHAPES = ("packed", "rows_apart")
RUN_BYTES = tuple(512 << k for k in range(14))

# Rates by backend, direction, shape; each row has one GB/s figure a run length.
Table = dict[str, dict[str, dict[str, list[float]]]]

_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


class UnusableRatesError(Exception):
    """A table that must not be used; the text says why."""


def cache_path() -> Path | None:
    """Where the table lies: the user's cache folder, by the XDG rules. None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, the specification says.
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return Path(base, "sgl_kvio", f"rates-v{SCHEMA_VERSION}.json")


def flatten(table: Mapping[str, Any]) -> list[float]:
    """The rates of a table in the order that ``set_rates`` takes.

    Raises UnusableRatesError when a row is missing, has another length, or holds anything but
    finite numbers of 0 and more.
    """
    flat: list[float] = []
    for backend in BACKENDS:
        for direction in DIRECTIONS:
            for shape in SHAPES:
                name = f"rates of {backend}, {direction}, {shape}"
                flat += _checked_row(name, _row(table, backend, direction, shape))
    return flat


def _row(table: Any, *keys: str) -> Any:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _checked_row(name: str, row: Any) -> list[float]:
    if not isinstance(row, list) or len(row) != len(RUN_BYTES):
        raise UnusableRatesError(f"{name}: it needs a list of {len(RUN_BYTES)} numbers")
    return [_checked_rate(name, rate) for rate in row]


def _checked_rate(name: str, rate: Any) -> float:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise UnusableRatesError(f"{name}: {rate!r} is no number")
    try:
        gbps = float(rate)
    except OverflowError:  # JSON's integers have no limit
        gbps = math.inf
    if not math.isfinite(gbps) or gbps < 0:
        raise UnusableRatesError(f"{name}: {gbps} is not a rate; it needs 0 or more, finite")
    return gbps


def unflatten(flat: Sequence[float]) -> Table:
    """The inverse of ``flatten``."""
    if len(flat) != len(BACKENDS) * len(DIRECTIONS) * len(SHAPES) * len(RUN_BYTES):
        raise ValueError(f"rates: got {len(flat)} numbers")
    rates = iter(flat)
    return {
        backend: {
            direction: {shape: [next(rates) for _ in RUN_BYTES] for shape in SHAPES}
            for direction in DIRECTIONS
        }
        for backend in BACKENDS
    }


def gpu_models(folder: Path = _GPU_FOLDER) -> set[str]:
    """Names of this machine's NVIDIA GPUs as the driver's files give them; empty without them."""
    models = set()
    try:
        for gpu in os.scandir(folder):
            with open(os.path.join(gpu.path, "information")) as information:
                for line in information:
                    key, _, value = line.partition(":")
                    if key.strip() == "Model":
                        models.add(value.strip())
    except OSError:
        return set()
    return models


def read(path: Path, models: set[str]) -> list[float]:
    """The flat rates of a file that was measured on a GPU of `models` (empty: nobody knows).

    Raises FileNotFoundError without a file, UnusableRatesError for one that must not be used.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableRatesError(f"it cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnusableRatesError("it holds no JSON object")
    if content.get("schema") != SCHEMA_VERSION:
        raise UnusableRatesError(
            f"its schema is {content.get('schema')!r}; this version needs {SCHEMA_VERSION}"
        )
    flat = flatten(content.get("rates") or {})
    if models and content.get("gpu") not in models:
        raise UnusableRatesError(
            f"it was measured on {content.get('gpu')!r}, and this machine has "
            f"{', '.join(sorted(models))}"
        )
    return flat


def write(path: Path, table: Table, about: Mapping[str, Any]) -> None:
    """Stores a table and what it is `about` (GPU, driver, date, version); readers see all or none.

    Raises UnusableRatesError for a table that ``read`` would refuse, OSError from the disk.
    """
    flatten(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    content = {"schema": SCHEMA_VERSION, **about, "run_bytes": RUN_BYTES, "rates": table}
    try:
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load() -> None:
    """Puts the machine's measured table in use where there is one; warns when it cannot be used."""
    path = cache_path()
    if path is None or not os.path.exists(path):
        return
    try:
        ops.set_rates(read(path, gpu_models()), source=str(path))
    except FileNotFoundError:
        return
    except UnusableRatesError as error:
        warnings.warn(
            f"sgl_kvio: {path} is not used, the built-in rates are: {error}."
            " Measure it again with: python -m sgl_kvio calibrate",
            stacklevel=2,
        )
