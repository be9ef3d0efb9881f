"""HiSparse worlds: requests whose hot buffers live through random decode steps, on any device.

A `World` owns every tensor of a layer twice: as the op sees it, and as a mirror on the CPU that the
oracle keeps. Both are views of blocks of random bytes, and blocks are compared whole, so the gaps
between rows, neighbouring columns and the bytes around a tensor are canaries.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import sgl_kvio
import swap_in_oracle
from cases import random_bytes
from reference import assert_same_bytes, synchronize

ROW_BYTES = (1, 13, 32, 576, 656)
HOST_LAYOUTS = ("flat", "page_first", "paged", "gaps_between_heads")
DEVICE_LAYOUTS = ("flat", "pitched", "paged", "gaps_between_heads")
UNWRITTEN = 123456  # what outputs hold before a call
_LAYERS = 3  # of a page-first host pool
_PAGE = 4


class Held:
    """One tensor inside a block of random bytes, and its mirror."""

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        *,
        device: str | torch.device = "cpu",
        pinned: bool = False,
        lead: int = 0,
        seed: int = 0,
    ) -> None:
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)
        nbytes = (lead + last + 8) * dtype.itemsize
        self.mirror_block = random_bytes(nbytes, seed).clone()
        self.block = self.mirror_block.clone().to(device)
        if pinned:
            self.block = self.block.pin_memory()

        def view(block: torch.Tensor) -> torch.Tensor:
            return block.view(dtype).as_strided(list(shape), list(strides), lead)

        self.tensor, self.mirror = view(self.block), view(self.mirror_block)

    def set(self, values: object, at: object = ...) -> None:
        """The same in both: an input, or what the caller of the op does to its state."""
        tensor = torch.as_tensor(values, dtype=self.mirror.dtype)
        self.mirror[at] = tensor
        self.tensor[at] = tensor.to(self.tensor.device)

    def expect(self, values: object, at: object = ...) -> None:
        """What the op has to make of it."""
        self.mirror[at] = torch.as_tensor(values, dtype=self.mirror.dtype)

    def check(self, name: str) -> None:
        assert_same_bytes(self.block, self.mirror_block, name)


@dataclass(frozen=True)
class WorldSpec:
    """One geometry. Sizes are small, so that evictions are frequent."""

    seed: int
    hot_buffer_size: int
    top_k: int
    num_requests: int
    max_batch: int
    max_len: int
    row_bytes: tuple[int, ...]  # of each buffer of a layer
    heads: int
    host_layout: str
    device_layout: str
    req_dtype: torch.dtype
    seq_dtype: torch.dtype
    host_loc_dtype: torch.dtype
    with_device_locs: bool
    with_plan: bool
    pinned: bool = False


def random_spec(rng: random.Random, **fixed: object) -> WorldSpec:
    hot = rng.choice((1, 2, 3, 4, 5, 8, 16))
    requests = rng.randint(1, 4)
    ints = (torch.int32, torch.int64)
    values: dict[str, object] = {
        "seed": rng.randrange(2**31),
        "hot_buffer_size": hot,
        "top_k": rng.randint(1, hot),
        "num_requests": requests,
        "max_batch": rng.randint(1, requests + 2),
        "max_len": hot + rng.randint(2, 4 * hot + 4),
        "row_bytes": tuple(rng.choice(ROW_BYTES) for _ in range(rng.randint(1, 2))),
        "heads": rng.choice((1, 1, 2)),
        "host_layout": rng.choice(HOST_LAYOUTS),
        "device_layout": rng.choice(DEVICE_LAYOUTS),
        "req_dtype": rng.choice(ints),
        "seq_dtype": rng.choice(ints),
        "host_loc_dtype": rng.choice(ints),
        "with_device_locs": rng.random() < 0.4,
        "with_plan": rng.random() < 0.6,
    }
    return WorldSpec(**{**values, **fixed})  # type: ignore[arg-type]


def random_specs(count: int, seed: int, **fixed: object) -> list[WorldSpec]:
    rng = random.Random(seed)
    return [random_spec(rng, **fixed) for _ in range(count)]


@dataclass
class Request:
    length: int
    tokens: list[int] = field(default_factory=list)


class World:
    """Every tensor of two layers that share one selection, and the requests of a batch.

    The first layer is resolved by `swap_in`; the second one is served by `copy_planned` where a
    plan is recorded.
    """

    def __init__(self, spec: WorldSpec, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.rng = rng = random.Random(spec.seed)
        self.seeds = itertools.count(spec.seed)
        hot, requests, batch = spec.hot_buffer_size, spec.num_requests, spec.max_batch
        own_rows = requests * (hot + 1)
        pool_rows = 12 if spec.with_device_locs else 1
        self.device_slots = -(-(own_rows + pool_rows) // _PAGE) * _PAGE
        self.host_slots = -(-(requests * spec.max_len + 3) // _PAGE) * _PAGE
        rows = rng.sample(range(self.device_slots), self.device_slots)
        self.pool_rows = rows[own_rows:]
        self.state = self._make_state()
        locs = self.state["device_buffer_locs"]
        for r in range(requests):
            locs.set(rows[r * (hot + 1) : (r + 1) * (hot + 1)], (r, slice(0, hot + 1)))
        self.inputs = {
            "top_k_tokens": self._matrix(batch, spec.top_k, torch.int32),
            "req_pool_indices": self._list(batch, spec.req_dtype),
            "seq_lens": self._list(batch, spec.seq_dtype),
            "num_real_reqs": self._list(1, torch.int32),
        }
        self.outputs = {"top_k_device_locs": self._matrix(batch, spec.top_k, torch.int32)}
        if spec.with_plan:
            self.outputs["miss_src"] = self._matrix(batch, spec.top_k, torch.int64)
            self.outputs["miss_dst"] = self._matrix(batch, spec.top_k, torch.int32)
            self.outputs["miss_count"] = self._list(batch, torch.int32)
        self.layers = [self._make_layer(), self._make_layer()]
        self.requests = [Request(0) for _ in range(requests)]
        for r in range(requests):
            self.restart(r)

    # Tensors

    def _held(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Held:
        lead = self.rng.randint(0, 3)
        return Held(shape, strides, dtype, device=self.device, lead=lead, seed=next(self.seeds))

    def _matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Held:
        pitch = columns + self.rng.choice((0, 1, 5))
        return self._held((rows, columns), (pitch, 1), dtype)

    def _list(self, entries: int, dtype: torch.dtype) -> Held:
        return self._held((entries,), (self.rng.randint(1, 2),), dtype)

    def _make_state(self) -> dict[str, Held]:
        spec, rng = self.spec, self.rng
        hot, requests = spec.hot_buffer_size, spec.num_requests
        state = {
            "device_buffer_tokens": self._matrix(requests, hot + rng.randint(0, 2), torch.int32),
            "device_buffer_locs": self._matrix(requests, hot + rng.randint(1, 3), torch.int32),
            "host_cache_locs": self._matrix(requests, spec.max_len, spec.host_loc_dtype),
            "lru_slots": self._matrix(requests, hot, torch.int16),
        }
        if spec.with_device_locs:
            state["device_locs"] = self._matrix(requests, spec.max_len, torch.int32)
        return state

    def _buffer(self, layout: str, slots: int, row_bytes: int, *, host: bool) -> Held:
        heads = self.spec.heads
        row, head = heads * row_bytes, row_bytes
        if layout == "gaps_between_heads":
            head += 3
            row = heads * head
        token = row
        if layout == "page_first":
            token *= _LAYERS
        elif layout == "pitched":
            token += 5
        if layout == "paged":
            shape: tuple[int, ...] = (slots // _PAGE, _PAGE, heads, row_bytes)
            strides: tuple[int, ...] = (_PAGE * token + 7, token, head, 1)
        else:
            shape, strides = (slots, heads, row_bytes), (token, head, 1)
        lead = self.rng.choice((0, 16, self.rng.randint(0, 2 * row)))
        return Held(
            shape,
            strides,
            torch.uint8,
            device="cpu" if host else self.device,
            pinned=host and self.spec.pinned,
            lead=lead,
            seed=next(self.seeds),
        )

    def _make_layer(self) -> dict[str, list[Held]]:
        spec = self.spec
        return {
            "host_cache": [
                self._buffer(spec.host_layout, self.host_slots, n, host=True)
                for n in spec.row_bytes
            ],
            "device_buffer": [
                self._buffer(spec.device_layout, self.device_slots, n, host=False)
                for n in spec.row_bytes
            ],
        }

    def _named(self) -> dict[str, Held]:
        named = {**self.state, **self.inputs, **self.outputs}
        for number, layer in enumerate(self.layers):
            for side, buffers in layer.items():
                named.update({f"layer {number} {side}[{i}]": b for i, b in enumerate(buffers)})
        return named

    # What an engine does between calls

    def restart(self, r: int, length: int | None = None) -> None:
        """Request `r` ends and its slot serves a new one, admitted long or preloaded short."""
        spec, rng, hot = self.spec, self.rng, self.spec.hot_buffer_size
        length = rng.randint(1, spec.max_len) if length is None else length
        self.requests[r].length = length
        short = length <= hot
        residents = list(range(hot)) if short else [-1] * hot
        self.state["device_buffer_tokens"].set(residents, (r, slice(0, hot)))
        self.state["lru_slots"].set(range_list(hot), r)
        # The newest token has no host row yet, and nobody may ask for it.
        locs = [rng.randrange(self.host_slots) for _ in range(length - 1)]
        self.state["host_cache_locs"].set(locs + [-1] * (spec.max_len - length + 1), r)
        self._redraw_device_locs(r)

    def advance(self, r: int) -> None:
        """Request `r` decodes one token; the one that was newest gets a host row."""
        request = self.requests[r]
        if request.length == self.spec.max_len:
            self.restart(r)
            return
        at = (r, request.length - 1)
        self.state["host_cache_locs"].set(self.rng.randrange(self.host_slots), at)
        request.length += 1

    def _redraw_device_locs(self, r: int) -> None:
        if not self.spec.with_device_locs:
            return
        drawn = [
            self.rng.choice(self.pool_rows) if self.rng.random() < 0.3 else -1
            for _ in range(self.spec.max_len)
        ]
        self.state["device_locs"].set(drawn, r)

    # Calls

    def _select(self, r: int) -> list[int]:
        """Top-k entries of one request: residents, strangers, duplicates, unfilled ones."""
        rng, spec, length = self.rng, self.spec, self.requests[r].length
        residents = self.state["device_buffer_tokens"].mirror[r, : spec.hot_buffer_size].tolist()
        residents = [t for t in residents if 0 <= t < length]
        entries: list[int] = []
        for i in range(spec.top_k):
            draw = rng.random()
            if draw < 0.08:
                entries.append(rng.choice((-1, -1, -5, -(2**31))))
            elif draw < 0.18 and entries:
                entries.append(rng.choice(entries))
            elif draw < 0.25:
                entries.append(length - 1)
            elif draw < 0.6 and residents:
                entries.append(rng.choice(residents))
            else:
                entries.append(rng.randrange(length))
            if not spec.with_device_locs and length <= spec.hot_buffer_size and i >= length:
                entries[-1] = rng.choice((entries[-1], 10**9))  # never looked at
        return entries

    def draw_batch(self, batch: int | None = None, num_real: int | None = None) -> tuple[int, int]:
        """Fills the inputs of a call; returns the batch and how many of its rows are real."""
        rng, spec = self.rng, self.spec
        if batch is None:
            batch = rng.choice((spec.max_batch, rng.randint(0, spec.max_batch)))
        most = min(batch, spec.num_requests)
        if num_real is None:
            num_real = rng.choice((most, most, rng.randint(0, most)))
        rows = rng.sample(range(spec.num_requests), num_real)
        for b in range(batch):
            if b < num_real:
                r = rows[b]
                if rng.random() < 0.2:
                    self.restart(r)
                elif rng.random() < 0.7:
                    self.advance(r)
                if rng.random() < 0.1:
                    self._redraw_device_locs(r)
                values = (self._select(r), r, self.requests[r].length)
            else:
                values = ([10**9] * spec.top_k, rng.choice((0, -1, 10**6)), rng.choice((0, 9)))
            for name, value in zip(
                ("top_k_tokens", "req_pool_indices", "seq_lens"), values, strict=True
            ):
                self.inputs[name].set(value, b)
        self.inputs["num_real_reqs"].set([num_real])
        for held in self.outputs.values():
            held.set(torch.full(held.mirror.shape, UNWRITTEN))
        return batch, num_real

    def oracle_call(self, batch: int, num_real: int) -> swap_in_oracle.Call:
        state = {name: held.mirror.tolist() for name, held in self.state.items()}
        inputs = {name: held.mirror[:batch].tolist() for name, held in self.inputs.items()}
        del inputs["num_real_reqs"]
        return swap_in_oracle.Call(
            **state,
            **inputs,
            hot_buffer_size=self.spec.hot_buffer_size,
            num_real=num_real,
            host_slots=self.host_slots,
            device_slots=self.device_slots,
        )

    def arguments(self, batch: int, *, layer: int = 0) -> dict[str, object]:
        """What `sgl_kvio.swap_in` is called with."""
        arguments: dict[str, object] = {name: held.tensor for name, held in self.state.items()}
        for name, held in {**self.inputs, **self.outputs}.items():
            arguments[name] = held.tensor if name == "num_real_reqs" else held.tensor[:batch]
        for side, buffers in self.layers[layer].items():
            arguments[side] = [held.tensor for held in buffers]
        return {
            **arguments,
            "hot_buffer_size": self.spec.hot_buffer_size,
            "num_blocks": self.rng.choice((0, 1, 3)),
        }

    def _expect_rows(self, layer: int, outcome: swap_in_oracle.Outcome) -> None:
        moves = [
            (host, device)
            for misses in outcome.misses
            for host, device in misses
            if 0 <= host < self.host_slots and 0 <= device < self.device_slots
        ]
        if not moves:
            return
        frm, to = (torch.tensor(column) for column in zip(*moves, strict=True))
        sides = self.layers[layer]
        for host, device in zip(sides["host_cache"], sides["device_buffer"], strict=True):
            put_rows(device.mirror, to, take_rows(host.mirror, frm))

    def _expect(self, batch: int, outcome: swap_in_oracle.Outcome, skip_io: bool) -> None:
        hot = self.spec.hot_buffer_size
        self.state["device_buffer_tokens"].expect(
            [row[:hot] for row in outcome.tokens], (slice(None), slice(0, hot))
        )
        self.state["lru_slots"].expect(outcome.lru)
        if not skip_io:
            self._expect_rows(0, outcome)
        if batch == 0:
            return
        self.outputs["top_k_device_locs"].expect(outcome.locs, slice(0, batch))
        if not self.spec.with_plan:
            return
        counts = [len(misses) for misses in outcome.misses]
        self.outputs["miss_count"].expect(counts, slice(0, batch))
        for b, misses in enumerate(outcome.misses):
            for m, (host, device) in enumerate(misses):
                self.outputs["miss_src"].expect(host, (b, m))
                self.outputs["miss_dst"].expect(device, (b, m))

    def check(self) -> None:
        """Every block is what the oracle made of it."""
        synchronize()
        for name, held in self._named().items():
            held.check(name)

    def step(
        self,
        *,
        batch: int | None = None,
        num_real: int | None = None,
        skip_io: bool | None = None,
        call: Callable[..., None] = sgl_kvio.swap_in,
    ) -> swap_in_oracle.Outcome:
        """One random call, and the replay of its plan for the second layer, compared."""
        batch, num_real = self.draw_batch(batch, num_real)
        outcome = swap_in_oracle.swap_in(self.oracle_call(batch, num_real))
        assert not outcome.faults
        if skip_io is None:
            skip_io = self.rng.random() < 0.1
        call(**self.arguments(batch), skip_io=skip_io)
        self._expect(batch, outcome, skip_io)
        if self.spec.with_plan:
            self.replay(batch)
            self._expect_rows(1, outcome)
        self.check()
        return outcome

    def replay(self, batch: int) -> None:
        arguments = self.arguments(batch, layer=1)
        names = ("host_cache", "device_buffer", "miss_src", "miss_dst", "miss_count")
        sgl_kvio.copy_planned(
            *(arguments[name] for name in names),
            arguments["num_real_reqs"],
            num_blocks=arguments["num_blocks"],
        )

    def bad_step(self, *, raises: bool) -> list[swap_in_oracle.Fault]:
        """A call with a few bad values in it. On the CPU it `raises` where they matter and changes
        nothing; a kernel skips what they spoil. Returns the faults that the oracle saw."""
        batch, num_real = self.draw_batch()
        damaged = self._damage(num_real)
        outcome = swap_in_oracle.swap_in(self.oracle_call(batch, num_real))
        arguments = self.arguments(batch)
        if outcome.faults and raises:
            text = self._refusal(arguments)
            named = [f"{name}{list(at)} is {value};" for name, at, value in outcome.faults]
            assert any(name in text for name in named), (text, named)
            assert re.search(r"kvio::swap_in: .*; it needs ", text), text
        else:
            sgl_kvio.swap_in(**arguments)
            self._expect(batch, outcome, skip_io=False)
        self.check()
        for held, at, value in reversed(damaged):
            held.set(value, at)
        return outcome.faults

    @staticmethod
    def _refusal(arguments: dict[str, object]) -> str:
        try:
            sgl_kvio.swap_in(**arguments)  # type: ignore[arg-type]
        except RuntimeError as error:
            return str(error)
        raise AssertionError("a bad value was not refused")

    def _damage(self, num_real: int) -> list[tuple[Held, tuple[int, ...], int]]:
        """Puts bad values where real rows may meet them; returns what was there."""
        rng, spec = self.rng, self.spec
        damaged: list[tuple[Held, tuple[int, ...], int]] = []

        def put(held: Held, at: tuple[int, ...], value: int) -> None:
            damaged.append((held, at, int(held.mirror[at])))
            held.set(value, at)

        for b in range(num_real):
            r = int(self.inputs["req_pool_indices"].mirror[b])
            length = self.requests[r].length
            kind = rng.choice(("none", "token", "host", "device", "pass", "request"))
            if kind == "token":
                at = (b, rng.randrange(spec.top_k))
                beyond = rng.choice((length, spec.max_len, 2**31 - 1))
                put(self.inputs["top_k_tokens"], at, beyond)
            elif kind == "host":
                wide = spec.host_loc_dtype == torch.int64
                value = rng.choice((-1, self.host_slots, 2**40 if wide else 2**31 - 1))
                for token in rng.sample(range(spec.max_len), 3):
                    put(self.state["host_cache_locs"], (r, token), value)
            elif kind == "device":
                value = rng.choice((-1, self.device_slots, -(2**31), 2**31 - 1))
                at = (r, rng.randint(0, spec.hot_buffer_size))
                put(self.state["device_buffer_locs"], at, value)
            elif kind == "request":
                value = rng.choice((-1, spec.num_requests, 2**31 - 1))
                put(self.inputs["req_pool_indices"], (b,), value)
            elif kind == "pass" and spec.with_device_locs:
                at = (r, rng.randrange(length))
                put(self.state["device_locs"], at, rng.choice((self.device_slots, 2**31 - 1)))
        return damaged


def range_list(count: int) -> list[int]:
    return list(range(count))


def take_rows(view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a [slots, heads, n] or [pages, page, heads, n] view."""
    if view.ndim == 3:
        return view[slots]
    return view[slots // _PAGE, slots % _PAGE]


def put_rows(view: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if view.ndim == 3:
        view[slots] = rows
    else:
        view[slots // _PAGE, slots % _PAGE] = rows


def run_trace(spec: WorldSpec, steps: int, device: str | torch.device = "cpu") -> World:
    """`steps` random calls in one world, each compared with the oracle."""
    world = World(spec, device)
    for _ in range(steps):
        world.step()
    return world
