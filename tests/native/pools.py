"""Buffers whose every byte has a known address, and transfers between them, drawn at random.

A buffer is a strided NumPy view of an array that counts its elements, so NumPy's own indexing says
where each byte lies: the definition that the C++ is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}
HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LAYOUTS = (*HOST_LAYOUTS, "pitched", "padded_heads", "head_major")


@dataclass(frozen=True)
class Buffer:
    """`elements` has shape [slots, *row] or [pages, page_size, *row] and holds element numbers."""

    elements: np.ndarray
    address: int  # of element 0
    itemsize: int

    def tensor(self, kvio, device="cpu", device_index=0):
        return kvio.Tensor(
            self.address + int(self.elements.flat[0]) * self.itemsize,
            list(self.elements.shape),
            [stride // self.elements.itemsize for stride in self.elements.strides],
            dtype=DTYPES[self.itemsize],
            device=device,
            device_index=device_index,
        )

    def row_bytes(self, row_ndim=2):
        """Address of every byte, shape [slots, bytes of a row]."""
        row = self.elements.shape[self.elements.ndim - row_ndim :]
        numbers = self.elements.reshape(-1, int(np.prod(row, dtype=np.int64)))
        first = self.address + numbers[:, :, None] * self.itemsize
        return (first + np.arange(self.itemsize)).reshape(len(numbers), -1)


def count(*dims):
    return np.arange(np.prod(dims, dtype=np.int64)).reshape(dims)


def layer_elements(layout, *, layers, pages, page_size, heads, dim, pad=0, paged=True):
    """One [pages, page_size, heads, dim] view a layer; [slots, heads, dim] where `paged` is False
    and the layout is affine over slots."""
    if layout == "layer_first":
        views = count(layers, pages, page_size, heads, dim)
    elif layout == "page_first":
        views = count(pages, page_size, layers, heads, dim).transpose(2, 0, 1, 3, 4)
    elif layout == "page_first_direct":
        views = count(pages, layers, page_size, heads, dim).transpose(1, 0, 2, 3, 4)
    elif layout == "page_head":
        views = count(pages, heads, page_size, layers, dim).transpose(3, 0, 2, 1, 4)
    elif layout == "head_major":
        views = count(layers, pages, heads, page_size, dim).transpose(0, 1, 3, 2, 4)
    elif layout == "padded_heads":
        views = count(layers, pages, page_size, heads, dim + pad)[..., :dim]
    else:
        assert layout == "pitched", layout
        rows = count(layers, pages, page_size, heads * dim + pad)
        views = np.lib.stride_tricks.as_strided(
            rows, (layers, pages, page_size, heads, dim), (*rows.strides[:3], dim * 8, 8)
        )
    return [view if paged else flattened(view) for view in views]


def flattened(view):
    pages, page_size, *row = view.shape
    if view.strides[0] != page_size * view.strides[1]:
        return view
    return np.lib.stride_tricks.as_strided(view, (pages * page_size, *row), view.strides[1:])


def index_array(values, *, dtype="int64", step=1):
    """A 1-D array of `values` whose neighbours lie `step` elements apart."""
    spread = np.full(max(len(values) * step, 1), -7, dtype)
    spread[: len(values) * step : step] = values
    return spread[: len(values) * step : step]


@dataclass(frozen=True)
class Transfer:
    dst: list[Buffer]
    src: list[Buffer]
    dst_indices: np.ndarray
    src_indices: np.ndarray
    page_size: int = 1
    index_unit: str = "token"
    dst_device: str = "cpu"
    src_device: str = "cpu"
    index_device: str = "cpu"
    options: dict = field(default_factory=dict)

    def request(self, kvio):
        return kvio.make_transfer_request(
            [buffer.tensor(kvio, self.dst_device) for buffer in self.dst],
            [buffer.tensor(kvio, self.src_device) for buffer in self.src],
            kvio.Tensor.of_buffer(self.dst_indices, device=self.index_device),
            kvio.Tensor.of_buffer(self.src_indices, device=self.index_device),
            page_size=self.page_size,
            index_unit=self.index_unit,
            **self.options,
        )

    @property
    def slots_per_index(self):
        return self.page_size if self.index_unit == "page" else 1

    def slots(self):
        """Token slots in the order of the index lists: (dst, src) of every row wanted."""
        per_index = self.slots_per_index
        inside = np.arange(per_index)
        return (
            (self.dst_indices.astype(np.int64)[:, None] * per_index + inside).ravel(),
            (self.src_indices.astype(np.int64)[:, None] * per_index + inside).ravel(),
        )


@st.composite
def transfers(draw, *, max_pages=6, max_buffers=3, devices=(("cpu", "cpu"),), long_rows=False):
    """Pools of any two layouts, page sizes and starts; destinations named once."""
    itemsize = draw(st.sampled_from((1, 2, 4, 8)))
    heads = draw(st.integers(1, 3))
    dims = st.integers(1, 20) | st.sampled_from((24, 32, 64))
    if long_rows:
        dims = dims | st.sampled_from((509, 512, 520))
    dim = draw(dims)
    layers = draw(st.integers(1, max_buffers))
    dst, src = (
        draw(
            sides(
                itemsize=itemsize, heads=heads, dim=dim, layers=layers, max_pages=max_pages, at=at
            )
        )
        for at in (1 << 20, 1 << 30)
    )
    page_size = draw(st.integers(1, 4))
    fewest = min(len(side[0].row_bytes()) for side in (dst, src))
    index_unit = draw(st.sampled_from(("token", "page"))) if fewest >= page_size else "token"
    per_index = page_size if index_unit == "page" else 1
    dst_indices, src_indices = draw(
        index_lists(
            len(dst[0].row_bytes()) // per_index,
            len(src[0].row_bytes()) // per_index,
        )
    )
    dst_device, src_device = draw(st.sampled_from(devices))
    any_gpu = "gpu" in (dst_device, src_device)
    dtype = draw(st.sampled_from(("int32", "int64")))
    return Transfer(
        dst,
        src,
        index_array(dst_indices, dtype=dtype, step=draw(st.integers(1, 2))),
        index_array(src_indices, dtype=dtype, step=draw(st.integers(1, 2))),
        page_size=page_size,
        index_unit=index_unit,
        dst_device=dst_device,
        src_device=src_device,
        index_device="gpu" if any_gpu else "cpu",
    )


@st.composite
def sides(draw, *, itemsize, heads, dim, layers, max_pages, at):
    """The buffers of one pool, somewhere near address `at`."""
    start = at + draw(st.sampled_from((0, 128, 64, 16, 8, itemsize)))
    views = layer_elements(
        draw(st.sampled_from(LAYOUTS)),
        layers=layers,
        pages=draw(st.integers(1, max_pages)),
        page_size=draw(st.integers(1, 8)),
        heads=heads,
        dim=dim,
        pad=draw(st.sampled_from((0, 1, 2, 3, 8))),
        paged=draw(st.booleans()),
    )
    start -= start % itemsize
    return [Buffer(view, start, itemsize) for view in views]


def with_bad_entries(data, case):
    """`case` with some entries outside their pools, and the positions of the entries that are not.

    `data` is hypothesis' interactive draw.
    """
    count = len(case.dst_indices)
    bad = data.draw(st.lists(st.integers(0, count - 1), max_size=4)) if count else []
    lists = {"dst": case.dst_indices.copy(), "src": case.src_indices.copy()}
    for position in bad:
        side = data.draw(st.sampled_from(("dst", "src")))
        entries = len(getattr(case, side)[0].row_bytes()) // case.slots_per_index
        lists[side][position] = data.draw(st.sampled_from((-1, entries, entries + 7, -(2**31))))
    broken = replace(case, dst_indices=lists["dst"], src_indices=lists["src"])
    return broken, np.setdiff1d(np.arange(count), bad)


@st.composite
def index_lists(draw, num_dst, num_src):
    """Stretches of either direction, and single entries, of distinct destinations."""
    dst, src = [], []
    taken = set()
    for _ in range(draw(st.integers(0, 5))):
        at_dst = draw(st.integers(0, num_dst - 1))
        at_src = draw(st.integers(0, num_src - 1))
        steps = draw(st.sampled_from(((1, 1), (1, 1), (1, 1), (1, 0), (0, 1), (-1, -1), (2, 1))))
        for i in range(draw(st.integers(1, 24))):
            d, s = at_dst + i * steps[0], at_src + i * steps[1]
            if not (0 <= d < num_dst and 0 <= s < num_src) or d in taken:
                break
            taken.add(d)
            dst.append(d)
            src.append(s)
    return dst, src
