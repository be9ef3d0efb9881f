"""The one table of host pool layouts: a pool's tensors, and where each layer's rows lie in them.

Every other room sees only strided views, so a layout is one line here and nothing anywhere else.
The layouts and their names are the ones that SGLang's HiCache host pools use.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Geometry:
    """Sizes of one pool. ``head_dims`` has one entry a buffer of a layer (K, V; or the latent)."""

    num_pages: int
    page_size: int
    num_layers: int
    num_heads: int
    head_dims: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Token slots: ``num_pages * page_size``."""
        return self.num_pages * self.page_size

    def size(self, dim: str, head_dim: int) -> int:
        """Length of the dimension that ``dim`` names in a table entry."""
        return {
            "2": 2,
            "L": self.num_layers,
            "S": self.num_slots,
            "N": self.num_pages,
            "P": self.page_size,
            "H": self.num_heads,
            "D": head_dim,
        }[dim]


@dataclass(frozen=True)
class PageRange:
    """One contiguous piece of a page: ``length`` elements of a tensor from element ``start``."""

    tensor: int
    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """One table entry: the dimensions of the host tensors, outermost first.

    ``dims`` is a string of names: ``2`` K and V, ``L`` layer, ``S`` token slot, ``N`` page, ``P``
    token in its page, ``H`` head, ``D`` head element. ``num_tensors`` is 2 where K and V have
    tensors of their own.
    """

    kind: str
    name: str
    dims: str
    num_tensors: int = 1

    @property
    def _names(self) -> list[str]:
        return self.dims.split()

    @property
    def _page_axis(self) -> int:
        names = self._names
        return names.index("N" if "N" in names else "S")

    @property
    def num_buffers(self) -> int:
        """Buffers of one layer: 2 (K, V) or 1 (the latent, or K alone)."""
        return self.num_tensors * (2 if "2" in self._names else 1)

    @property
    def is_paged(self) -> bool:
        """Whether a layer's view is ``[pages, page_size, H, D]`` rather than ``[slots, H, D]``."""
        return "N" in self._names

    def tensor_shapes(self, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
        """Shapes of the pool's host tensors."""
        return tuple(
            tuple(geometry.size(name, head_dim) for name in self._names)
            for head_dim in geometry.head_dims[: self.num_tensors]
        )

    def stacked_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A view for each buffer, ``[layers, slots, H, D]`` or ``[layers, pages, P, H, D]``."""
        names = self._names
        buffers: list[torch.Tensor] = []
        for tensor in tensors:
            buffers.extend(tensor.unbind(0) if "2" in names else [tensor])
        names = [name for name in names if name != "2"]
        order = [names.index(name) for name in ("LNPHD" if self.is_paged else "LSHD")]
        return [buffer.permute(order) for buffer in buffers]

    def layer_views(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Views ``[layer][buffer]``, each ``[slots, H, D]`` or ``[pages, P, H, D]``."""
        stacked = self.stacked_views(tensors)
        return [list(layer) for layer in zip(*(view.unbind(0) for view in stacked), strict=True)]

    def page_unit(self, geometry: Geometry, tensor: int) -> int:
        """Elements of a tensor that lie together for one page: the copy unit."""
        names = self._names
        inner = names[self._page_axis + 1 :]
        head_dim = geometry.head_dims[tensor]
        unit = math.prod(geometry.size(name, head_dim) for name in inner)
        return unit if self.is_paged else unit * geometry.page_size

    def page_ranges(self, geometry: Geometry, page: int) -> Iterator[PageRange]:
        """The contiguous pieces that together are ``page``, by layer and then by buffer."""
        outer = self._names[: self._page_axis]
        halves = 2 if "2" in outer else 1
        layers = geometry.num_layers if "L" in outer else 1
        units = [self.page_unit(geometry, tensor) for tensor in range(self.num_tensors)]
        for layer in range(layers):
            for tensor, unit in enumerate(units):
                for half in range(halves):
                    block = (half * layers + layer) * geometry.num_pages + page
                    yield PageRange(tensor, block * unit, unit)


_TABLE = (
    Layout("mha", "layer_first", "2 L S H D"),
    Layout("mha", "page_first", "2 S L H D"),
    Layout("mha", "page_first_direct", "2 N L P H D"),
    Layout("mha", "page_head", "2 N H P L D"),
    Layout("mla", "layer_first", "L S H D"),
    Layout("mla", "page_first", "S L H D"),
    Layout("mla", "page_first_direct", "N L P H D"),
    Layout("k_only", "layer_first", "L S H D"),
    Layout("k_only", "page_first", "S L H D"),
    Layout("k_only", "page_first_direct", "N L P H D"),
    Layout("asymmetric", "layer_first", "L S H D", num_tensors=2),
    Layout("asymmetric", "page_first", "S L H D", num_tensors=2),
    Layout("asymmetric", "page_first_direct", "N L P H D", num_tensors=2),
)


def _choices(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in dict.fromkeys(names))


def combinations() -> list[tuple[str, str]]:
    """All supported ``(kind, layout)`` pairs."""
    return [(entry.kind, entry.name) for entry in _TABLE]


def find_layout(kind: str, layout: str) -> Layout:
    """The table entry of a kind and a layout.

    Raises ValueError when the kind is unknown, or when the kind has no such layout; the text names
    the argument, what it got and what exists.

    Example: ``find_layout("mha", "page_first").dims == "2 S L H D"``
    """
    entries = [entry for entry in _TABLE if entry.kind == kind]
    if not entries:
        known = _choices(entry.kind for entry in _TABLE)
        raise ValueError(f"HostKVPool: kind got {kind!r}; needs one of {known}")
    for entry in entries:
        if entry.name == layout:
            return entry
    known = _choices(entry.name for entry in entries)
    raise ValueError(f"HostKVPool: layout got {layout!r}; kind {kind!r} needs one of {known}")


def as_int(value: Any) -> int | None:
    """``value`` as an int where it can index a list (numpy's ints, tensors of one); else None.

    The package's one rule for sizes, pages and layers. A bool is an int to Python, and never one of
    these to a person: None.
    """
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        return None
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor that holds no value
        return None


def checked_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int of ``low..high``, or ValueError naming the argument."""
    number = as_int(value)
    if number is None or number < low or (high is not None and number > high):
        needed = f"an int of at least {low}" if high is None else f"{low}..{high}"
        raise ValueError(f"{name} got {value!r}; needs {needed}")
    return number


def make_geometry(
    entry: Layout,
    *,
    num_pages: int,
    page_size: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    v_head_dim: int | None,
) -> Geometry:
    """Checked sizes for one table entry.

    Raises ValueError naming the argument when a size is not a positive int, when ``v_head_dim`` is
    given to a kind without a V of its own size (or missing where it is needed), or when an MLA
    pool is asked for more than one head.
    """
    sizes = {
        "num_pages": num_pages,
        "page_size": page_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "head_dim": head_dim,
    }
    separate_v = entry.num_tensors == 2
    if separate_v:
        if v_head_dim is None:
            raise ValueError(f"HostKVPool: v_head_dim got None; kind {entry.kind!r} needs an int")
        sizes["v_head_dim"] = v_head_dim
    elif v_head_dim is not None:
        raise ValueError(
            f"HostKVPool: v_head_dim got {v_head_dim!r}; kind {entry.kind!r} needs None "
            "(only 'asymmetric' has a V row of its own size)"
        )
    sizes = {name: checked_int(f"HostKVPool: {name}", size, 1) for name, size in sizes.items()}
    if entry.kind == "mla" and sizes["num_heads"] != 1:
        raise ValueError(f"HostKVPool: num_heads got {num_heads!r}; kind 'mla' needs 1")
    k_dim = sizes.pop("head_dim")
    v_dim = sizes.pop("v_head_dim", None)
    head_dims = (k_dim,) * entry.num_buffers if v_dim is None else (k_dim, v_dim)
    return Geometry(**sizes, head_dims=head_dims)
