"""Every transfer the tests make: which pools, which rows, which indices.

One generator serves the CPU tests, the GPU tests and the fuzz. A `Case` names one point of the
space; `Case.open` builds its two pools and index tensors. Pools are strided views of one block of
bytes, computed here from the layout formulas and not through `sgl_kvio.layouts`, so that a fault
there cannot hide behind an equal fault here.

`selected` returns a covering selection (every pair of values of any two axes), or the whole product
of the named axes when the environment has KVIO_TEST_FULL=1.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

ROW_BYTES = (2, 4, 8, 16, 130, 132, 144, 264, 512, 576, 656, 1024, 1152, 1160, 2048, 4680, 8192)
KINDS = ("mha", "mla", "k_only", "asymmetric")
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
# What engines' device pools look like: plain, rows with a pitch, K beside V, heads before tokens.
DEVICE_LAYOUTS = ("layer_first", "pitched", "pitched_odd", "interleaved", "head_major")
LAYOUTS = tuple(dict.fromkeys(HOST_LAYOUTS + DEVICE_LAYOUTS))
PATTERNS = (
    "one_page",
    "permuted_pages",
    "permuted_in_page",
    "scattered",
    "descending",
    "alternating",
    "source_duplicates",
    "one_sided",
    "mid_page",
    "short_last_page",
    "everything",
    "empty",
)
TOKEN_ONLY_PATTERNS = ("permuted_in_page", "mid_page", "short_last_page")
DIRECTIONS = ("h2d", "d2h", "d2d", "h2h")
INDEX_DTYPES = ("int32", "int64")
INDEX_UNITS = ("token", "page")
VIEWS = ("flat", "paged")
STARTS = ("first_byte", "odd_element", "sixteen_bytes")
LAYERS = ("all", "one", "two_swapped")

_TAIL_BYTES = 80
# Coverings with other seeds, so that most triples of values occur too at a cost of seconds. One
# still has every pair: enough for runs under a checker that takes a hundred times as long.
_COVERINGS = int(os.environ.get("KVIO_TEST_COVERINGS", "5"))
_NUM_LAYERS = 3

# Heads, head dim and element type whose product is the row: real head dims where one fits.
_HEAD_ROWS: dict[int, tuple[int, int, torch.dtype]] = {
    2: (1, 1, torch.bfloat16),
    4: (2, 1, torch.bfloat16),
    8: (2, 2, torch.float16),
    16: (2, 4, torch.bfloat16),
    130: (1, 65, torch.bfloat16),
    132: (2, 66, torch.uint8),
    144: (1, 72, torch.bfloat16),
    264: (2, 132, torch.int8),
    512: (2, 128, torch.bfloat16),
    576: (3, 96, torch.bfloat16),
    656: (4, 164, torch.float8_e4m3fn),
    1024: (4, 128, torch.bfloat16),
    1152: (3, 192, torch.float16),
    1160: (5, 58, torch.float32),
    2048: (8, 128, torch.bfloat16),
    4680: (9, 130, torch.float32),
    8192: (8, 128, torch.float64),
}
_LATENT_DTYPES: dict[int, torch.dtype] = {
    2: torch.bfloat16,
    4: torch.float32,
    8: torch.int64,
    16: torch.bfloat16,
    130: torch.float16,
    132: torch.uint8,
    144: torch.bfloat16,
    264: torch.uint8,
    512: torch.float8_e5m2,
    576: torch.float8_e4m3fn,
    656: torch.uint8,
    1024: torch.float16,
    1152: torch.bfloat16,
    1160: torch.float32,
    2048: torch.bfloat16,
    4680: torch.float32,
    8192: torch.bfloat16,
}


def full_product() -> bool:
    return os.environ.get("KVIO_TEST_FULL", "0") not in ("", "0")


def row_of(kind: str, row_bytes: int) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Heads, the head dim of each buffer, element type."""
    if kind == "mla":
        dtype = _LATENT_DTYPES[row_bytes]
        return 1, (row_bytes // dtype.itemsize,), dtype
    heads, dim, dtype = _HEAD_ROWS[row_bytes]
    if kind == "k_only":
        return heads, (dim,), dtype
    if kind == "mha":
        return heads, (dim, dim), dtype
    return heads, (dim, dim - dim // 3 if dim >= 3 else dim + 1), dtype


@dataclass(frozen=True)
class PoolSpec:
    """Geometry of one pool. `dims` has one head dim a buffer; `lead` counts elements before it."""

    layout: str
    num_layers: int
    num_pages: int
    page_size: int
    num_heads: int
    dims: tuple[int, ...]
    dtype: torch.dtype
    paged: bool = True
    lead: int = 0
    row_ndim: int = 2

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def is_flat(self) -> bool:
        return not (self.paged or self.layout in ("page_first_direct", "page_head", "head_major"))

    @property
    def nbytes(self) -> int:
        elements = sum(count for _, count in map(self._tensor, range(len(self.dims))))
        return (self.lead + elements) * self.dtype.itemsize + _TAIL_BYTES

    def _tensor(self, buffer: int) -> tuple[tuple[int, int, int, int], int]:
        """Strides of (layer, page, token, head) in elements, and the elements of the buffer."""
        layers, slots, size = self.num_layers, self.num_slots, self.page_size
        heads, dim = self.num_heads, self.dims[buffer]
        row = heads * dim
        if self.layout == "layer_first":  # (L, S, H, D)
            return (slots * row, size * row, row, dim), layers * slots * row
        if self.layout == "page_first":  # (S, L, H, D)
            return (row, size * layers * row, layers * row, dim), layers * slots * row
        if self.layout == "page_first_direct":  # (N, L, P, H, D)
            return (size * row, layers * size * row, row, dim), layers * slots * row
        if self.layout == "page_head":  # (N, H, P, L, D)
            token = layers * dim
            return (dim, heads * size * token, token, size * token), layers * slots * row
        if self.layout == "head_major":  # (L, N, H, P, D)
            return (slots * row, size * row, dim, size * dim), layers * slots * row
        if self.layout in ("pitched", "pitched_odd"):  # (L, S, pitch)
            gap = 3 if self.layout == "pitched_odd" else 64 // self.dtype.itemsize
            pitch = row + gap
            return (slots * pitch, size * pitch, pitch, dim), layers * slots * pitch
        assert self.layout == "interleaved", self.layout  # (L, S, buffer, H, D)
        pitch = heads * sum(self.dims)
        return (slots * pitch, size * pitch, pitch, dim), layers * slots * row

    def view(
        self, storage: torch.Tensor, layer: int, buffer: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Buffer `buffer` of layer `layer` inside `storage`, the pool's 1-D uint8 bytes.

        `dtype` (of the same width) replaces the element type: the reference moves integers, which
        no NaN rule can change.
        """
        (layer_stride, page, token, head), _ = self._tensor(buffer)
        if self.layout == "interleaved":
            before = self.num_heads * sum(self.dims[:buffer])
        else:
            before = sum(self._tensor(b)[1] for b in range(buffer))
        offset = self.lead + before + layer * layer_stride
        if self.is_flat:
            shape, strides = [self.num_slots], [token]
        else:
            shape, strides = [self.num_pages, self.page_size], [page, token]
        row_shape, row_strides = self._row(self.dims[buffer], head)
        width = self.dtype.itemsize
        elements = storage[: storage.numel() // width * width].view(dtype or self.dtype)
        return elements.as_strided(
            shape + row_shape, strides + row_strides, elements.storage_offset() + offset
        )

    def _row(self, dim: int, head_stride: int) -> tuple[list[int], list[int]]:
        heads = self.num_heads
        if self.row_ndim == 1:
            assert heads == 1 or head_stride == dim
            return [heads * dim], [1]
        if self.row_ndim == 2:
            return [heads, dim], [head_stride, 1]
        inner = next(f for f in (4, 3, 2, 1) if dim % f == 0)
        return [heads, dim // inner, inner], [head_stride, inner, 1]


@dataclass
class Pool:
    """A pool's geometry and its bytes: a 1-D uint8 tensor with canaries before and behind."""

    spec: PoolSpec
    storage: torch.Tensor

    def views(
        self, layers: Sequence[int] | None = None, storage: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Buffers of the layers, K then V of each."""
        layers = range(self.spec.num_layers) if layers is None else layers
        block = self.storage if storage is None else storage
        buffers = range(len(self.spec.dims))
        return [self.spec.view(block, layer, b) for layer in layers for b in buffers]


def random_bytes(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(
        -(2**63), 2**63 - 1, (-(-count // 8),), dtype=torch.int64, generator=generator
    )
    return words.view(torch.uint8)[:count]


def page_aligned_bytes(count: int) -> torch.Tensor:
    """Untouched pages of an own mapping, so that no two registrations can share a page."""
    return torch.frombuffer(mmap.mmap(-1, max(count, 1)), dtype=torch.uint8)[:count]


@contextmanager
def open_pool(
    spec: PoolSpec, *, device: str | torch.device = "cpu", memory: str = "plain", seed: int = 0
) -> Iterator[Pool]:
    """A pool filled with random bytes. `memory`: "plain", "pinned" or "registered" (host only)."""
    content = random_bytes(spec.nbytes, seed)
    if torch.device(device).type != "cpu":
        yield Pool(spec, content.to(device))
    elif memory == "plain":
        yield Pool(spec, content)
    elif memory == "pinned":
        yield Pool(spec, content.pin_memory())
    else:
        import sgl_kvio

        block = page_aligned_bytes(spec.nbytes)
        block.copy_(content)
        sgl_kvio.host_register(block)
        try:
            yield Pool(spec, block)
        finally:
            sgl_kvio.host_unregister(block)


def index_lists(
    pattern: str, page_size: int, num_dst: int, num_src: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Positions of both sides, below `num_dst` and `num_src`; destinations are distinct.

    `page_size` shapes the patterns about pages; with page indices it is 1 and positions are pages.
    """
    size = page_size
    dst_pages, src_pages = num_dst // size, num_src // size
    most = min(num_dst, num_src)

    def pages(numbers: Sequence[int]) -> list[int]:
        return [page * size + offset for page in numbers for offset in range(size)]

    if pattern == "empty" or most == 0:
        return [], []
    if pattern == "one_page":
        return pages([rng.randrange(dst_pages)]), pages([rng.randrange(src_pages)])
    if pattern in ("permuted_pages", "short_last_page"):
        count = max(1, min(dst_pages, src_pages) * 2 // 3)
        dst = pages(rng.sample(range(dst_pages), count))
        src = pages(rng.sample(range(src_pages), count))
        keep = len(dst) - (rng.randrange(1, size) if pattern == "short_last_page" else 0)
        return dst[:keep], src[:keep]
    if pattern == "permuted_in_page":
        dst, src = pages([rng.randrange(dst_pages)]), pages([rng.randrange(src_pages)])
        rng.shuffle(src)
        return dst, src
    if pattern == "scattered":
        count = max(1, most * 2 // 3)
        return rng.sample(range(num_dst), count), rng.sample(range(num_src), count)
    if pattern == "descending":
        count = max(1, most - 1)
        dst = list(range(num_dst - 1, -1, -1))[:count]
        return dst, list(range(num_src - 1, -1, -1))[:count]
    if pattern == "alternating":
        half = num_dst // 2
        pairs = zip(range(half), range(half, 2 * half), strict=True)
        dst = [slot for pair in pairs for slot in pair]
        count = max(1, min(len(dst), num_src))
        return (dst or [0])[:count], list(range(num_src))[:count]
    if pattern == "source_duplicates":
        count = max(1, num_dst * 3 // 4)
        few = rng.sample(range(num_src), max(1, num_src // 4))
        return rng.sample(range(num_dst), count), [rng.choice(few) for _ in range(count)]
    if pattern == "one_sided":
        dst = list(range(0, num_dst, 2))[:num_src]
        src = list(range(num_src - len(dst), num_src))
        return dst, src
    if pattern == "mid_page":
        dst_start, src_start = size // 2, size // 2 + (size > 1)
        count = max(1, min(2 * size + 1, num_dst - dst_start, num_src - src_start))
        return (
            list(range(dst_start, dst_start + count)),
            list(range(src_start, src_start + count)),
        )
    assert pattern == "everything", pattern
    return list(range(most)), list(range(most))


@dataclass
class Transfer:
    """One call: pools, the token slots it moves, and the arguments as `sgl_kvio.transfer` wants."""

    dst: Pool
    src: Pool
    layers: list[int]
    dst_slots: list[int]
    src_slots: list[int]
    dst_indices: torch.Tensor
    src_indices: torch.Tensor
    options: dict[str, Any]

    def run(self, call: Callable[..., None]) -> None:
        call(
            self.dst.views(self.layers),
            self.src.views(self.layers),
            self.dst_indices,
            self.src_indices,
            **self.options,
        )


def slots_of(indices: Sequence[int], index_unit: str, page_size: int) -> list[int]:
    if index_unit == "token":
        return list(indices)
    return [page * page_size + offset for page in indices for offset in range(page_size)]


@dataclass(frozen=True)
class Case:
    kind: str
    row_bytes: int
    host_layout: str
    device_layout: str
    pattern: str
    index_dtype: str
    index_place: str
    direction: str
    memory: str
    index_unit: str
    view: str
    start: str
    layers: str

    @property
    def name(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    def _spec(self, layout: str, slots: int, page_size: int) -> PoolSpec:
        heads, dims, dtype = row_of(self.kind, self.row_bytes)
        lead = {
            "first_byte": 0,
            "odd_element": 1,
            "sixteen_bytes": 16 // dtype.itemsize,
        }[self.start]
        return PoolSpec(
            layout=layout,
            num_layers=_NUM_LAYERS,
            num_pages=slots // page_size,
            page_size=page_size,
            num_heads=heads,
            dims=dims,
            dtype=dtype,
            paged=self.view == "paged",
            lead=lead,
            row_ndim=1 if self.kind == "mla" else 2,
        )

    @contextmanager
    def open(self, device: str | torch.device = "cpu") -> Iterator[Transfer]:
        """Builds pools and indices; `device` is where the device pool lies."""
        seed = zlib.crc32(self.name.encode())
        rng = random.Random(seed)
        host_slots, device_slots = (40, 48) if self.row_bytes >= 2048 else (56, 80)
        # Page sizes of the two pools and of the call are independent of each other by contract.
        host_page, device_page = rng.choice([(8, 8), (8, 4), (4, 8), (2, 8)])
        host = self._spec(self.host_layout, host_slots, host_page)
        accelerator = self._spec(self.device_layout, device_slots, device_page)
        turned = {
            "h2h": (HOST_LAYOUTS, self.host_layout),
            "d2d": (DEVICE_LAYOUTS, self.device_layout),
        }
        sides = {"h": (host, "cpu"), "d": (accelerator, device)}
        (src_spec, src_place), (dst_spec, dst_place) = (
            sides[self.direction[0]],
            sides[self.direction[2]],
        )
        if self.direction in turned:
            table, layout = turned[self.direction]
            other = table[(table.index(layout) + 1) % len(table)]
            dst_spec = self._spec(other, dst_spec.num_slots + 8, device_page)

        unit = "token" if self.pattern in TOKEN_ONLY_PATTERNS else self.index_unit
        page_size = rng.choice([4, 8])
        if unit == "page":
            units = (dst_spec.num_slots // page_size, src_spec.num_slots // page_size)
            dst, src = index_lists(self.pattern, 1, *units, rng)
        else:
            dst, src = index_lists(
                self.pattern, page_size, dst_spec.num_slots, src_spec.num_slots, rng
            )
            # The promise about runs may be absent, kept or broken: bytes must not depend on it.
            page_size = rng.choice([1, page_size])
        layers = {
            "all": list(range(_NUM_LAYERS)),
            "one": [1],
            "two_swapped": [2, 0],
        }[self.layers]
        index_dtype = getattr(torch, self.index_dtype)
        index_device = device if self.index_place == "cuda" else "cpu"
        with (
            open_pool(dst_spec, device=dst_place, memory=self.memory, seed=seed) as dst_pool,
            open_pool(src_spec, device=src_place, memory=self.memory, seed=seed + 1) as src_pool,
        ):
            yield Transfer(
                dst=dst_pool,
                src=src_pool,
                layers=layers,
                dst_slots=slots_of(dst, unit, page_size),
                src_slots=slots_of(src, unit, page_size),
                dst_indices=torch.tensor(dst, dtype=index_dtype).to(index_device),
                src_indices=torch.tensor(src, dtype=index_dtype).to(index_device),
                options={
                    "row_ndim": dst_spec.row_ndim,
                    "page_size": page_size,
                    "index_unit": unit,
                    "num_blocks": rng.choice([0, 0, 1, 3]),
                },
            )


# The axes that the full product multiplies; the others are drawn for each of its points.
_NAMED_AXES = (
    "kind",
    "row_bytes",
    "host_layout",
    "pattern",
    "index_dtype",
    "index_place",
    "direction",
)


def axes(*, gpu: bool) -> dict[str, tuple[Any, ...]]:
    """Values of every field of `Case`, in its order."""
    return {
        "kind": KINDS,
        "row_bytes": ROW_BYTES,
        "host_layout": HOST_LAYOUTS,
        "device_layout": DEVICE_LAYOUTS,
        "pattern": PATTERNS,
        "index_dtype": INDEX_DTYPES,
        "index_place": ("cpu", "cuda") if gpu else ("cpu",),
        "direction": DIRECTIONS,
        "memory": ("pinned", "registered") if gpu else ("plain",),
        "index_unit": INDEX_UNITS,
        "view": VIEWS,
        "start": STARTS,
        "layers": LAYERS,
    }


def selected(*, gpu: bool) -> list[Case]:
    space = axes(gpu=gpu)
    if not full_product():
        rows = [Case(**row) for seed in range(_COVERINGS) for row in covering(space, seed)]
        return list(dict.fromkeys(rows))
    rng = random.Random(2)
    return [
        Case(
            **{
                name: point[name] if name in point else rng.choice(values)
                for name, values in space.items()
            }
        )
        for chosen in itertools.product(*(space[name] for name in _NAMED_AXES))
        for point in [dict(zip(_NAMED_AXES, chosen, strict=True))]
    ]


def covering(space: dict[str, tuple[Any, ...]], seed: int) -> list[dict[str, Any]]:
    """Rows which together hold every pair of values of any two axes; the same rows every time.

    Greedy, one row at a time, in the manner of D. Cohen et al., "The AETG system" (1997).
    """
    rng = random.Random(seed)
    names = list(space)
    missing = {
        (a, va, b, vb)
        for a, b in itertools.combinations(names, 2)
        for va in space[a]
        for vb in space[b]
    }
    order = {name: place for place, name in enumerate(names)}

    def pair(a: str, va: Any, b: str, vb: Any) -> tuple[str, Any, str, Any]:
        return (a, va, b, vb) if order[a] < order[b] else (b, vb, a, va)

    rows = []
    agenda = sorted(missing, key=repr)
    rng.shuffle(agenda)
    for first in agenda:
        if first not in missing:
            continue
        a, va, b, vb = first
        row = {a: va, b: vb}
        rest = [name for name in names if name not in row]
        rng.shuffle(rest)
        for name in rest:
            values = list(space[name])
            rng.shuffle(values)
            gains = [sum(pair(name, v, n, w) in missing for n, w in row.items()) for v in values]
            row[name] = values[gains.index(max(gains))]
        missing -= {pair(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: row[name] for name in names})
    return rows


def put(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """`place`: "h" page-locked host memory, "d" the GPU."""
    return tensor.pin_memory() if place == "h" else tensor.cuda()


def random_slots(count: int, seed: int, slots: int) -> torch.Tensor:
    """`count` different slots of `slots`, at most all."""
    return torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:count]


def contiguous_pool(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A plain random tensor, for tests whose point is not the geometry."""
    return random_bytes(math.prod(shape) * dtype.itemsize, seed).view(dtype).view(*shape)
