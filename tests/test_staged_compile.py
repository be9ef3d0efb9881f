"""transfer_staged under torch.compile: pools that the graph cuts into layers, and lists of views.

tests/gpu/test_compile.py compiles the same functions with a page-locked host pool.
"""

import shutil

import pytest
import torch
from test_compile import check_compiled

import cases
import sgl_kvio

LAYERS, PAGES, PAGE = 3, 5, 4
OPTIONS = {"page_size": PAGE, "index_unit": "page"}


def make_arguments(device="cpu", memory="plain"):
    """A token-major host pool, device pools, host pages, device pages, a staging buffer."""
    slots = PAGES * PAGE
    host = cases.contiguous_pool((slots, LAYERS, 2, 4), torch.int32, 1) % 1000
    card = cases.contiguous_pool((LAYERS, slots, 2, 4), torch.int32, 2) % 1000
    if memory == "pinned":
        host = host.pin_memory()
    staging = torch.zeros(8192, dtype=torch.uint8)
    lists = torch.tensor([3, 0, 1]), torch.tensor([0, 2, 4])
    return [host, card.to(device), *lists, staging.to(device)]


def layers_of(host, card):
    return list(host.unbind(1)), list(card.unbind(0))


def write_back_pages(host, card, at, frm, staging):
    on_host, on_card = layers_of(host, card * 2)
    sgl_kvio.transfer_staged(on_host, on_card, at, frm, staging, **OPTIONS)
    return card + 1


def restore_pages(host, card, at, frm, staging):
    on_host, on_card = layers_of(host, card)
    sgl_kvio.transfer_staged(on_card, on_host, frm, at, staging, **OPTIONS)
    return card * 3


def write_back_and_restore(host, card, at, frm, staging):
    """Two calls share the staging buffer; the second one reads what the first one wrote."""
    on_host, on_card = layers_of(host, card)
    sgl_kvio.transfer_staged(on_host, on_card, at, frm, staging, **OPTIONS)
    card.mul_(2)
    sgl_kvio.transfer_staged(on_card, on_host, at, frm, staging, **OPTIONS)
    return card + 1


FUNCTIONS = [write_back_pages, restore_pages, write_back_and_restore]


def result_and_pools(function):
    """The staging buffer's content is nobody's: left out of what is compared."""

    def compared(host, card, at, frm):
        staging = torch.zeros(8192, dtype=torch.uint8, device=card.device)
        return function(host, card, at, frm, staging)

    return compared


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_leaves_the_same_bytes(backend, function):
    check_compiled(result_and_pools(function), backend, make_arguments()[:4])


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_inductor_keeps_every_page(function):
    check_compiled(result_and_pools(function), "inductor", make_arguments()[:4])


def views_as_arguments(host_views, card_views, at, frm, staging):
    sgl_kvio.transfer_staged(host_views, card_views, at, frm, staging, **OPTIONS)
    return card_views[0] + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_views_that_are_arguments_are_written_in_their_pool(backend):
    torch._dynamo.reset()
    host, card, at, frm, staging = make_arguments()
    twin = host.clone()
    compiled = torch.compile(views_as_arguments, backend=backend, fullgraph=True)
    for _ in range(2):
        views_as_arguments(*layers_of(twin, card), at, frm, staging)
        compiled(*layers_of(host, card), at, frm, staging)
        assert torch.equal(host, twin)
        host[0], twin[0] = 5, 5
