"""torch.export of every op on a GPU, with page-locked host pools: the bytes of eager calls.

write_back and restore: test_handles.py. load_layers and wait_layer: test_load_layers.py.
"""

import pytest
import test_compile
import test_staged_compile
import test_swap_in_compile
import torch
from test_compile import check_twice
from test_export import Exported, every_staged, every_swap_in, every_transfer

import sgl_kvio

HOST_CACHE = 5  # among the arguments of test_swap_in_compile


def with_page_locked(arguments, *positions):
    """The arguments, those at `positions` in page-locked host memory."""
    places = range(len(arguments))
    return [arguments[i].cpu().pin_memory() if i in positions else arguments[i] for i in places]


def write_back_and_restore(host, device, at, frm):
    """Through page-locked memory and back: the second call reads what the first one wrote."""
    sgl_kvio.transfer([host], [device * 2], at, frm)
    device.add_(1)
    sgl_kvio.transfer([device], [host], frm + 8, at)
    return device * 3


def copy_bytes(host, device, at, frm):
    sgl_kvio.memcpy_batch([host], [device + 1], [0, 64], [128, 3], [16, 5])
    sgl_kvio.memcpy_batch([device], [host], [32], [0], [69])
    return device[at] + device[frm]


def gpu_arguments():
    return test_compile.make_arguments("cuda")


def pool_arguments():
    return with_page_locked(gpu_arguments(), 0)


def staged_arguments():
    return test_staged_compile.make_arguments("cuda", "pinned")[:4]


def swap_in_arguments():
    return with_page_locked(test_swap_in_compile.make_arguments("cuda"), HOST_CACHE)


PROGRAMS = {
    "transfer and memcpy_batch": (every_transfer, gpu_arguments),
    "transfer with a host pool": (write_back_and_restore, pool_arguments),
    "memcpy_batch with a host pool": (copy_bytes, pool_arguments),
    "transfer_staged": (every_staged, staged_arguments),
    "swap_in and copy_planned": (every_swap_in, swap_in_arguments),
}
# Functional graphs clone what they write: host pools are only read there, or named by handles.
READ_ONLY = ["transfer and memcpy_batch", "swap_in and copy_planned"]


def exported(name):
    function, make_arguments = PROGRAMS[name]
    return torch.export.export(Exported(function), tuple(make_arguments()))


def check_program(program, name):
    """Two runs beside two eager ones: results, all arguments, and page-locked memory in place."""
    function, make_arguments = PROGRAMS[name]
    arguments = make_arguments()
    places = [(t.data_ptr(), t.is_pinned()) for t in arguments]
    before = [t.clone() for t in arguments]
    check_twice(program, function, arguments)
    sgl_kvio.check()
    assert any(not torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert [(t.data_ptr(), t.is_pinned()) for t in arguments] == places


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_leaves_the_same_bytes(name):
    check_program(exported(name).module(), name)


@pytest.mark.parametrize("name", READ_ONLY)
def test_a_decomposed_program_leaves_the_same_bytes(name):
    check_program(exported(name).run_decompositions().module(), name)
