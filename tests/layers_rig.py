"""Calls of load_layers made of the transfers that `cases` draws, in every form that pools take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import sgl_kvio
from cases import Case, Transfer
from reference import check_transfer

# What dst is, and what src is.
FORMS = (
    ("stacked", "stacked"),
    ("listed", "listed"),
    ("stacked", "listed"),
    ("listed", "stacked"),
)


def by_layer(buffers: Sequence[torch.Tensor], num_layers: int) -> list[list[torch.Tensor]]:
    """K0, V0, K1, V1, ... as a list a layer."""
    count = len(buffers) // num_layers
    return [list(buffers[layer * count : (layer + 1) * count]) for layer in range(num_layers)]


def stacked(buffers: Sequence[torch.Tensor], num_layers: int) -> list[torch.Tensor]:
    """The same as one view a buffer; the layers are evenly spaced in one storage."""
    layers = by_layer(buffers, num_layers)
    views = []
    for of_buffer in zip(*layers, strict=True):
        first = of_buffer[0]
        offsets = [buffer.storage_offset() for buffer in of_buffer]
        steps = {b - a for a, b in itertools.pairwise(offsets)}
        assert len(steps) <= 1, "layers at one distance"
        sizes, strides = (num_layers, *first.shape), (*steps, *first.stride())
        views.append(first.as_strided(sizes, strides) if steps else first.unsqueeze(0))
    return views


def in_form(form: str, buffers: Sequence[torch.Tensor], num_layers: int) -> Any:
    return (stacked if form == "stacked" else by_layer)(buffers, num_layers)


def loading(
    form: tuple[str, str], num_layers: int, flags: torch.Tensor, epoch: torch.Tensor | int
) -> Callable[..., None]:
    """A call with the arguments of `sgl_kvio.transfer`, whose lists are K0, V0, K1, V1, ..."""

    def call(
        dst: Sequence[torch.Tensor],
        src: Sequence[torch.Tensor],
        dst_indices: torch.Tensor,
        src_indices: torch.Tensor,
        **options: Any,
    ) -> None:
        sgl_kvio.load_layers(
            in_form(form[0], dst, num_layers),
            in_form(form[1], src, num_layers),
            dst_indices,
            src_indices,
            flags,
            epoch,
            **options,
        )

    return call


def can_stack(transfer: Transfer) -> bool:
    """Whether a view can hold the layers: not in descending order."""
    return transfer.layers == sorted(transfer.layers)


def check_loaded(
    transfer: Transfer, form: tuple[str, str], device: str | torch.device = "cpu"
) -> None:
    """Every byte of both pools, and flags of its layers and no other."""
    num_layers = len(transfer.layers)
    flags = sgl_kvio.layer_flags(num_layers + 2, device)
    flags[0] = torch.arange(num_layers + 2)
    epoch = 2 * num_layers + 7
    check_transfer(transfer, loading(form, num_layers, flags, epoch))
    raised = [epoch] * num_layers + [num_layers, num_layers + 1]
    assert flags.tolist() == [raised, [0] * (num_layers + 2)]


def check_loaded_case(
    case: Case, form: tuple[str, str], device: str | torch.device = "cpu"
) -> None:
    with case.open(device) as transfer:
        check_loaded(transfer, form if can_stack(transfer) else ("listed", "listed"), device)
