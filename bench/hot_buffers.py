"""Requests with hot buffers for the bench of `kvio::swap_in`: the state, the calls, their checks.

A `Geometry` says what lies where, `HotBuffers` holds the tensors of one layer and makes calls that
miss an exact number of tokens each, and `torch_swap_in` does the same work by torch ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jobs import torch_index

import sgl_kvio
from common import Arena, change_every_byte, synchronize

# Columns of the state tensors behind the hot buffer, of which the first is the newest token's.
EXTRA_COLUMNS = 64
PATTERNS = ("sequential", "region", "random")
LAYOUTS = ("flat", "page_first")
_ALIGNMENT = 256


@dataclass(frozen=True)
class Geometry:
    """Where rows lie, and how many requests there are. `row_bytes` has one entry for each buffer.

    `pattern` is where the missing rows of a request lie in the host pool: "sequential" (one behind
    the other), "region" (anywhere among the rows of the request, which lie together) or "random"
    (anywhere in the pool). `pool_layers` is the layers of a page-first pool, 1 for a flat one.
    """

    row_bytes: tuple[int, ...]
    batch: int
    hot_slots: int
    top_k: int
    max_len: int
    span_bytes: int
    pattern: str = "random"
    layout: str = "flat"
    pool_layers: int = 1

    @property
    def token_bytes(self) -> int:
        """One token of one layer, every buffer."""
        return sum(self.row_bytes)

    @property
    def host_slots(self) -> int:
        room = self.span_bytes - _ALIGNMENT * len(self.row_bytes)
        return room // (self.token_bytes * self.pool_layers)

    @property
    def pool_bytes(self) -> int:
        return sum(_cut_sizes(self.row_bytes, self.host_slots * self.pool_layers))

    @property
    def device_slots(self) -> int:
        return self.batch * (self.hot_slots + 1)

    @property
    def device_pool_bytes(self) -> int:
        return sum(_cut_sizes(self.row_bytes, self.device_slots))


def _cut_sizes(row_bytes: Sequence[int], rows: int) -> list[int]:
    return [-(-rows * size // _ALIGNMENT) * _ALIGNMENT for size in row_bytes]


def _views(flat: torch.Tensor, row_bytes: Sequence[int], slots: int, layers: int) -> Any:
    """Views [slots, 1, bytes] of one layer, a buffer behind the other, token-major."""
    starts = itertools.accumulate(_cut_sizes(row_bytes, slots * layers), initial=0)
    return [
        flat[start : start + slots * layers * size].view(slots, layers, size)[:, :1]
        for start, size in zip(starts, row_bytes, strict=False)
    ]


class HotBuffers:
    """The tensors of one layer, with everything resident that its requests selected last.

    Every request walks through its tokens in an order of its own, round and round. The hot buffer
    holds the last `hot_slots` tokens of the walk, a call selects the last `top_k` of them after as
    many steps as it is to miss. What has gone furthest from the selection has been unused for
    longest, so each call evicts what it will not need for a whole round. Missing tokens stand at
    random entries of the selection, in the order of the walk. The newest token is not selected.
    """

    def __init__(self, geometry: Geometry, arena: Arena, generator: torch.Generator) -> None:
        self.geometry = geometry
        self._arena = arena
        self._generator = generator
        where, batch, hot = arena.where, geometry.batch, geometry.hot_slots
        pool = (geometry.row_bytes, geometry.host_slots, geometry.pool_layers)
        self.host = _views(arena.host, *pool)
        self.far = _views(arena.device, geometry.row_bytes, geometry.device_slots, 1)
        # A pool larger than the mirror is gathered on the CPU instead.
        mirrored = geometry.pool_bytes <= arena.mirror.numel()
        self._mirror = _views(arena.mirror, *pool) if mirrored else None

        walk = self._random(batch, geometry.max_len - 1).argsort(dim=1)
        self._walk = torch.cat([walk, walk[:, :hot]], dim=1).to(torch.int32)
        self._round = geometry.max_len - 1
        self._oldest = 0  # step of the oldest resident token
        self.host_locs = self._place(walk)
        columns = hot + EXTRA_COLUMNS
        self.tokens = torch.full((batch, columns), -1, dtype=torch.int32, device=where)
        self.locs = torch.full((batch, columns), -1, dtype=torch.int32, device=where)
        slots = torch.randperm(geometry.device_slots, generator=generator, device=where)
        self.locs[:, : hot + 1] = slots.view(batch, hot + 1)
        self.lru = torch.empty((batch, hot), dtype=torch.int16, device=where)
        self.requests = torch.randperm(batch, generator=generator, device=where)
        self.lengths = torch.full((batch,), geometry.max_len, dtype=torch.int32, device=where)
        self.real = torch.full((1,), batch, dtype=torch.int32, device=where)
        self.out = torch.full((batch, geometry.top_k), -1, dtype=torch.int32, device=where)
        self.selections = self.out.new_empty((0, *self.out.shape))
        self.plans: tuple[torch.Tensor, ...] = ()
        self._order: dict[int, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Puts the hot buffers in order by torch alone, whatever the calls before made of them."""
        geometry = self.geometry
        resident = self._steps(self._oldest, geometry.hot_slots)
        order = self._random(geometry.batch, geometry.hot_slots).argsort(dim=1)
        self.lru.copy_(order)
        self.tokens[:, : geometry.hot_slots].scatter_(1, order, resident)
        locs = self.locs.gather(1, order).flatten().long()
        host_rows = self.host_locs.gather(1, resident.long()).flatten()
        for far, rows in zip(self.far, self._host_rows(host_rows), strict=True):
            in_words(far)[locs] = rows

    def select(self, misses: int, count: int) -> None:
        """Makes the selections of the next `count` calls, each of which will miss `misses`."""
        geometry = self.geometry
        if len(self.selections) < count:
            self.selections = self.out.new_empty((count, *self.out.shape))
        for index in range(count):
            self._oldest = (self._oldest + misses) % self._round
            first = self._oldest + geometry.hot_slots - geometry.top_k
            steps = self._steps(first, geometry.top_k)
            # Row i of the state is the request of batch row requests.index(i).
            selection = steps.index_select(1, self._entries(misses))
            torch.index_select(selection, 0, self.requests, out=self.selections[index])

    def reserve_plans(self, count: int) -> None:
        """Makes room for the plans of `count` calls."""
        if self.plans and len(self.plans[0]) >= count:
            return
        self.plans = tuple(
            torch.zeros((count, *shape), dtype=dtype, device=self._arena.where)
            for dtype, shape in (
                (torch.int64, self.out.shape),
                (torch.int32, self.out.shape),
                (torch.int32, self.out.shape[:1]),
            )
        )

    def make_plans(self, misses: int, count: int) -> None:
        """Selects as `select` does and records what each call would copy, without copying it."""
        self.select(misses, count)
        self.reserve_plans(count)
        for index in range(count):
            self.swap_in(index, record=True, skip_io=True)

    def swap_in(self, index: int, *, record: bool = False, skip_io: bool = False) -> None:
        """Serves selection `index`."""
        plan: dict[str, torch.Tensor] = {}
        if record:
            names = ("miss_src", "miss_dst", "miss_count")
            plan = {name: part[index] for name, part in zip(names, self.plans, strict=True)}
        sgl_kvio.swap_in(
            self.selections[index],
            self.tokens,
            self.locs,
            self.host_locs,
            self.lru,
            self.host,
            self.far,
            self.out,
            self.requests,
            self.lengths,
            hot_buffer_size=self.geometry.hot_slots,
            num_real_reqs=self.real,
            skip_io=skip_io,
            **plan,
        )

    def copy_planned(self, index: int) -> None:
        """Copies what call `index` of `make_plans` recorded."""
        src, dst, counts = self.plans
        sgl_kvio.copy_planned(self.host, self.far, src[index], dst[index], counts[index], self.real)

    def count_misses(self, misses: int, calls: int = 4) -> tuple[int, int]:
        """Least and most misses of a request in `calls` more calls, as they are recorded."""
        self.make_plans(misses, calls)
        # The bytes that making plans left out.
        for index in range(calls):
            self.copy_planned(index)
        synchronize(self._arena.where)
        counts = self.plans[2][:calls]
        return int(counts.min()), int(counts.max())

    def forget_bytes(self) -> None:
        """Makes every byte of the device pool another one: only new rows can be right then."""
        change_every_byte(self._arena.device[: self.geometry.device_pool_bytes])
        synchronize(self._arena.where)

    def is_resolved(self, index: int) -> bool:
        """Whether `out` names the slots that hold the tokens of selection `index`."""
        wanted = self.selections[index].long()
        slots = slots_of(self.tokens[self.requests, : self.geometry.hot_slots], wanted, self._round)
        locs = self.locs[self.requests].gather(1, slots.clamp(min=0).long())
        return bool((slots >= 0).all()) and torch.equal(locs, self.out)

    def has_exact_bytes(self, index: int, new_of: int = 0) -> bool:
        """Whether every location in `out` holds the host row of its token in selection `index`.

        `new_of` > 0 looks only at the entries of the tokens that a call missing so many brought.
        """
        wanted, locs = self.selections[index].long(), self.out
        host_rows = self.host_locs[self.requests].gather(1, wanted)
        if new_of:
            entries = self._new_entries(new_of)
            host_rows, locs = host_rows[:, entries], locs[:, entries]
        places = locs.flatten().long()
        if int(places.min()) < 0:
            return False
        pairs = zip(self.far, self._host_rows(host_rows.flatten()), strict=True)
        return all(torch.equal(in_words(far)[places], rows) for far, rows in pairs)

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        where = self._arena.where
        return torch.rand((rows, columns), generator=self._generator, device=where)

    def _place(self, walk: torch.Tensor) -> torch.Tensor:
        """The host row of each token position, int64 [batch, max_len]."""
        geometry, where = self.geometry, self._arena.where
        slots, shape = geometry.host_slots, (geometry.batch, geometry.max_len)
        if geometry.pattern == "random":
            return torch.randint(slots, shape, generator=self._generator, device=where)
        first = torch.arange(geometry.batch, device=where)[:, None] * (slots // geometry.batch)
        rows = (first + torch.arange(geometry.max_len, device=where)) % slots
        if geometry.pattern == "sequential":
            return rows.scatter(1, walk, rows[:, :-1])
        return rows

    def _steps(self, first: int, count: int) -> torch.Tensor:
        first %= self._round
        return self._walk[:, first : first + count]

    def _entries(self, misses: int) -> torch.Tensor:
        """For each entry of a selection, which of its steps stands there."""
        if misses not in self._order:
            top_k, where = self.geometry.top_k, self._arena.where
            shuffled = torch.randperm(top_k, generator=self._generator, device=where)
            order = torch.empty(top_k, dtype=torch.int64, device=where)
            order[shuffled[misses:]] = torch.arange(top_k - misses, device=where)
            order[shuffled[:misses].sort().values] = torch.arange(
                top_k - misses, top_k, device=where
            )
            self._order[misses] = order
        return self._order[misses]

    def _new_entries(self, misses: int) -> torch.Tensor:
        return (self._entries(misses) >= self.geometry.top_k - misses).nonzero().flatten()

    def _host_rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Rows of the host pool, on the device, by torch, in words."""
        if self._mirror is not None:
            return [in_words(view)[slots] for view in self._mirror]
        on_cpu = slots.cpu()
        return [in_words(view)[on_cpu].to(self._arena.where) for view in self.host]


def in_words(view: torch.Tensor) -> torch.Tensor:
    """Rows as 8-byte words, which torch moves faster than bytes; every row here is whole words."""
    return view.view(torch.int64)


def slots_of(resident: torch.Tensor, wanted: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The slot of each wanted token, -1 where it is not resident; both [batch, ...]."""
    batch, hot = resident.shape
    table = torch.full((batch, num_tokens + 1), -1, dtype=torch.int32, device=resident.device)
    slots = torch.arange(hot, dtype=torch.int32, device=resident.device).expand(batch, hot)
    # Empty slots (-1) write behind the last token.
    places = torch.where(resident < 0, num_tokens, resident).long()
    return table.scatter_(1, places, slots).gather(1, wanted)


def torch_swap_in(state: HotBuffers, index: int) -> None:
    """What `HotBuffers.swap_in` does, by plain vectorized torch ops: state, output and rows.

    Straightforward, and for this bench only: long requests, and tokens that are valid, distinct and
    not the newest one. Rows are gathered on the CPU into page-locked memory, so the host waits.
    """
    hot = state.geometry.hot_slots
    wanted = state.selections[index].long()
    resident = state.tokens[state.requests, :hot]
    held = slots_of(resident, wanted, state.geometry.max_len - 1)
    missing = held < 0
    num_missing = missing.sum(1, keepdim=True)

    # Evictable slots first, then those that are selected, both in their old order.
    is_hit = torch.zeros((len(wanted), hot + 1), dtype=torch.bool, device=wanted.device)
    is_hit.scatter_(1, torch.where(missing, hot, held).long(), True)
    order = state.lru[state.requests].long()
    order = order.gather(1, is_hit.gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
    taken = order.gather(1, (missing.cumsum(1) - 1).clamp(min=0))
    slots = torch.where(missing, taken, held.long())
    locs = state.locs[state.requests].gather(1, slots)
    state.out.copy_(locs)
    state.tokens[state.requests, :hot] = resident.scatter(1, slots, wanted.to(torch.int32))

    # The slots just taken go behind the evictable ones that are left.
    place = torch.arange(hot, device=wanted.device).expand_as(order)
    evictable = hot - wanted.shape[1] + num_missing
    left = evictable - num_missing
    rotated = torch.where(place < left, place + num_missing, place - left)
    source = torch.where(place < evictable, rotated, place)
    state.lru[state.requests] = order.gather(1, source).to(torch.int16)

    src = state.host_locs[state.requests].gather(1, wanted)[missing].cpu()
    pools = ([in_words(view) for view in views] for views in (state.far, state.host))
    torch_index(*pools, locs[missing].long(), src)
