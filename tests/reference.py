"""What a transfer must leave behind, computed by torch on copies of both pools' bytes.

Comparisons take in a pool's whole storage: the gaps of a pitch, other layers, other rows and the
canaries around the view count as much as the rows that were moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from cases import Case, Pool, PoolSpec, Transfer

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(spec: PoolSpec, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if spec.is_flat:
        return view.index_select(0, slots)
    return view[slots // spec.page_size, slots % spec.page_size]


def scatter(spec: PoolSpec, view: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if spec.is_flat:
        view.index_copy_(0, slots, rows)
    else:
        view.index_put_((slots // spec.page_size, slots % spec.page_size), rows)


def expected_bytes(transfer: Transfer) -> torch.Tensor:
    """The destination's storage (uint8, CPU) after the transfer."""
    dst, src = transfer.dst.spec, transfer.src.spec
    result, content = transfer.dst.storage.cpu().clone(), transfer.src.storage.cpu()
    dst_slots = torch.tensor(transfer.dst_slots, dtype=torch.int64)
    src_slots = torch.tensor(transfer.src_slots, dtype=torch.int64)
    integer = _INTEGERS[dst.dtype.itemsize]
    for layer in transfer.layers:
        for buffer in range(len(dst.dims)):
            rows = gather(src, src.view(content, layer, buffer, integer), src_slots)
            scatter(dst, dst.view(result, layer, buffer, integer), dst_slots, rows)
    return result


def has_bulk_copies() -> bool:
    """Whether the GPU can serve backend="tma"."""
    # torch gives gfx9 of AMD's a capability of 9 too.
    is_amd = torch.version.hip is not None
    return torch.cuda.is_available() and not is_amd and torch.cuda.get_device_capability()[0] >= 9


needs_bulk_copies = pytest.mark.skipif(
    not has_bulk_copies(), reason="needs compute capability 9.0 or later"
)


def kernels_of_two_streams_run_side_by_side() -> bool:
    """On a GPU. Not so under a tool that checks every kernel by itself."""
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(800_000_000)
    with torch.cuda.stream(fast):
        torch.zeros(1, device="cuda")
    fast.synchronize()
    side_by_side = not slow.query()
    torch.cuda.synchronize()
    return side_by_side


def synchronize() -> None:
    """Waits for every GPU: a host pool says nothing about which one wrote it."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def twin_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, page-locked where the tensor is."""
    copy = tensor.clone()
    return copy.pin_memory() if tensor.is_pinned() else copy


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Compares two tensors' bytes; the message says how many differ and where the first one is."""
    a = got.detach().cpu().contiguous().view(-1).view(torch.uint8)
    b = want.detach().cpu().contiguous().view(-1).view(torch.uint8)
    assert a.shape == b.shape, f"{what}: {a.numel()} bytes, wanted {b.numel()}"
    if torch.equal(a, b):
        return
    wrong = (a != b).nonzero().flatten()
    first, last = int(wrong[0]), int(wrong[-1])
    raise AssertionError(
        f"{what}: {wrong.numel()} of {a.numel()} bytes differ, bytes {first} to {last};"
        f" got {a[first : first + 8].tolist()}, wanted {b[first : first + 8].tolist()}"
    )


def check_transfer(transfer: Transfer, call: Callable[..., None]) -> None:
    """Runs the transfer and compares every byte of both pools and both index tensors."""
    want = expected_bytes(transfer)
    source = transfer.src.storage.cpu().clone()
    indices = [t.cpu().clone() for t in (transfer.dst_indices, transfer.src_indices)]
    transfer.run(call)
    synchronize()
    assert_same_bytes(transfer.dst.storage, want, "destination")
    assert_same_bytes(transfer.src.storage, source, "source")
    assert_same_bytes(transfer.dst_indices, indices[0], "dst_indices")
    assert_same_bytes(transfer.src_indices, indices[1], "src_indices")


def check_case(case: Case, call: Callable[..., None], device: str | torch.device = "cpu") -> None:
    with case.open(device) as transfer:
        check_transfer(transfer, call)


def moved(
    dst: torch.Tensor, src: torch.Tensor, dst_slots: Sequence[int], src_slots: Sequence[int]
) -> torch.Tensor:
    """A copy of flat pool `dst` on the CPU with the rows of flat pool `src` in place."""
    result = dst.detach().cpu().clone()
    rows = src.detach().cpu().index_select(0, torch.as_tensor(src_slots, dtype=torch.int64))
    return result.index_copy_(0, torch.as_tensor(dst_slots, dtype=torch.int64), rows)


@contextmanager
def refused(
    argument: str,
    *,
    got: str = "",
    op: str = "transfer",
    unchanged: Sequence[torch.Tensor | Pool] = (),
) -> Iterator[None]:
    """The block raises `kvio::<op>: <argument> ... <got> ... needs ...` and leaves all bytes alone.

    `argument` and `got` are regular expressions, for example r"src\\[1\\]" and "float32".
    """
    tensors = [item.storage if isinstance(item, Pool) else item for item in unchanged]
    before = [tensor.cpu().clone() for tensor in tensors]
    with pytest.raises(RuntimeError) as caught:
        yield
    text = str(caught.value)
    assert re.search(rf"kvio::{op}: (?:{argument})(?!\w)", text), text
    assert re.search(got, text), text
    assert re.search(r"\bneeds?\b", text), text
    synchronize()
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bytes(tensor, old, "bytes after a refused call")


def error_text(function: Callable[..., object], *arguments: object, **options: object) -> str:
    """The text of the RuntimeError that a call raises, or "" where both outcomes are right."""
    try:
        function(*arguments, **options)
    except RuntimeError as error:
        return str(error)
    return ""
