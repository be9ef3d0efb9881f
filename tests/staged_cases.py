"""Calls of kvio::transfer_staged that CPU tests and GPU tests make."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import cases

KINDS = ("mha", "mla", "k_only", "asymmetric")
HOST_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
DEVICE_LAYOUTS = ("layer_first", "pitched", "pitched_odd", "head_major")
ROW_BYTES = (4, 130, 144, 576, 656, 1152, 2048)
DIRECTIONS = ("write_back", "restore")
# How index lists look: whole pages, or tokens of which some make no whole page.
PATTERNS = (
    "permuted",
    "reversed",
    "neighbours",
    "one_page",
    "all_tokens",
    "mid_page_start",
    "short_last_page",
    "shuffled_in_page",
    "scattered",
    "empty",
)


@dataclass(frozen=True)
class StagedCase:
    kind: str = "mha"
    row_bytes: int = 576
    host_layout: str = "page_first"
    device_layout: str = "layer_first"
    direction: str = "restore"
    pattern: str = "permuted"
    unit: str = "page"
    dtype: str = "int64"
    device_list: str = "cpu"  # where the device pool's index list is
    page_size: int = 4
    pages: int = 9
    moved: int = 7
    layers: int = 3
    staged_pages: float = 4

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    def page_nbytes(self) -> int:
        """Bytes of one page of all buffers, each contiguous range rounded up to 256."""
        heads, dims, dtype = cases.row_of(self.kind, self.row_bytes)
        blocks = [self.page_size * heads * dim * dtype.itemsize for dim in dims]
        if self.host_layout != "layer_first":
            blocks = [block * self.layers for block in blocks]
        ranges = self.layers if self.host_layout == "layer_first" else 1
        return sum(-(-block // 256) * 256 * ranges for block in blocks)

    def staging(self, device: str | torch.device) -> torch.Tensor:
        nbytes = int(self.staged_pages * self.page_nbytes())
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=device)

    def _spec(self, layout: str, pages: int) -> cases.PoolSpec:
        heads, dims, dtype = cases.row_of(self.kind, self.row_bytes)
        return cases.PoolSpec(
            layout=layout,
            num_layers=self.layers,
            num_pages=pages,
            page_size=self.page_size,
            num_heads=heads,
            dims=dims,
            dtype=dtype,
            paged=layout in ("page_first_direct", "page_head", "head_major"),
            lead=16 // dtype.itemsize,
            row_ndim=1 if self.kind == "mla" else 2,
        )

    def _lists(self, device_slots: int) -> tuple[list[int], list[int]]:
        """Host and device indices in the call's unit."""
        rng = random.Random(self.name)
        size = self.page_size
        host = rng.sample(range(self.pages), self.moved)
        card = rng.sample(range(device_slots // size), self.moved)
        if self.pattern == "reversed":
            host, card = sorted(host, reverse=True), sorted(card)
        if self.pattern == "neighbours":
            host = list(range(self.moved))  # one copy may take several pages
        if self.pattern == "one_page":
            host, card = host[:1], card[:1]
        if self.pattern == "empty":
            return [], []
        if self.unit == "page":
            return host, card
        host_tokens = [page * size + token for page in host for token in range(size)]
        card_tokens = [page * size + token for page in card for token in range(size)]
        if self.pattern == "all_tokens":
            rng.shuffle(card_tokens)  # device rows need no order
        if self.pattern == "mid_page_start":
            host_tokens, card_tokens = host_tokens[1:], card_tokens[1:]
        if self.pattern == "short_last_page":
            host_tokens, card_tokens = host_tokens[:-1], card_tokens[:-1]
        if self.pattern == "shuffled_in_page":
            middle = slice(size, 2 * size)
            host_tokens[middle] = rng.sample(host_tokens[middle], size)
        if self.pattern == "scattered":
            rng.shuffle(host_tokens)
        return host_tokens, card_tokens

    @contextmanager
    def open(self, device: str | torch.device = "cpu") -> Iterator[cases.Transfer]:
        host_spec = self._spec(self.host_layout, self.pages)
        card_spec = self._spec(self.device_layout, self.pages + 2)
        host_list, card_list = self._lists(card_spec.num_slots)
        on_gpu = torch.device(device).type != "cpu"
        memory = "pinned" if on_gpu else "plain"
        dtype = getattr(torch, self.dtype)
        host_indices = torch.tensor(host_list, dtype=dtype)
        card_indices = torch.tensor(card_list, dtype=dtype)
        if self.device_list == "cuda" and on_gpu:
            card_indices = card_indices.to(device)
        slots = [cases.slots_of(x, self.unit, self.page_size) for x in (host_list, card_list)]
        with (
            cases.open_pool(host_spec, device="cpu", memory=memory, seed=1) as host,
            cases.open_pool(card_spec, device=device, memory="plain", seed=2) as card,
        ):
            sides = [(host, slots[0], host_indices), (card, slots[1], card_indices)]
            dst, src = sides if self.direction == "write_back" else reversed(sides)
            yield cases.Transfer(
                dst=dst[0],
                src=src[0],
                layers=list(range(self.layers)),
                dst_slots=dst[1],
                src_slots=src[1],
                dst_indices=dst[2],
                src_indices=src[2],
                options={
                    "row_ndim": host_spec.row_ndim,
                    "page_size": self.page_size,
                    "index_unit": self.unit,
                },
            )


def selected(*, gpu: bool) -> list[StagedCase]:
    """Every pair of values of any two axes."""
    space = {
        "kind": KINDS,
        "row_bytes": ROW_BYTES,
        "host_layout": HOST_LAYOUTS,
        "device_layout": DEVICE_LAYOUTS,
        "direction": DIRECTIONS,
        "pattern": PATTERNS,
        "unit": ("page", "token"),
        "dtype": ("int32", "int64"),
        "device_list": ("cpu", "cuda") if gpu else ("cpu",),
        "page_size": (1, 4, 16),
        "staged_pages": (1, 2, 3, 5.5, 64),
    }
    rows = [StagedCase(**row) for seed in range(2) for row in cases.covering(space, seed)]
    return list(dict.fromkeys(rows))


PAGE_COUNTS = (1, 63, 64, 65, 67, 128, 129, 1000)


def counts(staged_pages: Sequence[int] = (1, 2, 3, 64)) -> list[StagedCase]:
    """Numbers of pages around the sizes of the halves."""
    return [
        StagedCase(
            kind="mla",
            row_bytes=144,
            direction=direction,
            pattern=pattern,
            dtype=dtype,
            page_size=2,
            pages=moved + 3,
            moved=moved,
            layers=2,
            staged_pages=staged,
        )
        for moved in PAGE_COUNTS
        for staged in staged_pages
        for direction in DIRECTIONS
        for pattern, dtype in (("permuted", "int32"), ("reversed", "int64"))
    ] + [
        StagedCase(
            kind="mha",
            row_bytes=1024,
            direction=direction,
            pattern="neighbours",
            page_size=2,
            pages=70,
            moved=67,
            layers=2,
            staged_pages=staged,
        )
        for staged in staged_pages
        for direction in DIRECTIONS
    ]
