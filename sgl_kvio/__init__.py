"""sgl_kvio: moves KV-cache rows between host and device pools, as torch ops compiled ahead of time.

Importing registers ``torch.ops.kvio.*``; it initializes no GPU and works without a driver.
"""

from sgl_kvio import _binary  # noqa: F401  loads the ops, or says what is wrong with the build
from sgl_kvio import rates as _rates
from sgl_kvio._version import __version__
from sgl_kvio.loader import LayerwiseLoad, LayerwiseLoader
from sgl_kvio.ops import (
    capabilities,
    check,
    copy_planned,
    copy_round,
    create_stream,
    device_pointer,
    explain,
    explain_staged,
    get_rates,
    host_register,
    host_unregister,
    layer_flags,
    load_layers,
    memcpy_batch,
    register_pool,
    restore,
    set_rates,
    swap_in,
    take_fault,
    transfer,
    transfer_staged,
    unregister_pool,
    wait_layer,
    write_back,
)
from sgl_kvio.page_store import FilePageStore, PageStore, load_pages, save_pages
from sgl_kvio.pool import HostKVPool

__all__ = [
    "FilePageStore",
    "HostKVPool",
    "LayerwiseLoad",
    "LayerwiseLoader",
    "PageStore",
    "__version__",
    "capabilities",
    "check",
    "copy_planned",
    "copy_round",
    "create_stream",
    "device_pointer",
    "explain",
    "explain_staged",
    "get_rates",
    "host_register",
    "host_unregister",
    "layer_flags",
    "load_layers",
    "load_pages",
    "memcpy_batch",
    "register_pool",
    "restore",
    "save_pages",
    "set_rates",
    "swap_in",
    "take_fault",
    "transfer",
    "transfer_staged",
    "unregister_pool",
    "wait_layer",
    "write_back",
]

_rates.load()
