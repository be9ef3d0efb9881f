"""Loads the compiled part, and says in words what is wrong when it does not load."""

import platform
from pathlib import Path

import torch

from sgl_kvio._version import __version__

try:
    import sgl_kvio._C  # noqa: F401  registers torch.ops.kvio
except ImportError as error:
    here = Path(__file__).parent
    if not (here / "_C.abi3.so").exists():
        reason = (
            f"{here} holds no _C.abi3.so: this is a source tree that has not been built."
            " Install it with: pip install --no-build-isolation -e . (or run from another folder"
            " when a wheel of sgl_kvio is installed)"
        )
    else:
        reason = (
            f"the binary does not load with torch {torch.__version__} and Python"
            f" {platform.python_version()}; it needs torch 2.10 or later and CPython 3.10 or later"
        )
    raise ImportError(f"sgl_kvio {__version__}: {reason}. Cause: {error}") from error
