"""The tma kernel's walk over a plan, warp by warp, as csrc/gpu/transfer_tma.cu does it.

`launch` returns what was stored as arrays (dst addresses, src addresses, bytes of each). It carries
addresses through a model of a stage: a load writes the source address of every 16 bytes into it, a
store reads them from there, so rows that were never loaded, or loaded to a wrong place, show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from native.register_kernel import Moves, locate, offsets

PACKAGE = 16
NOTHING = -1


@dataclass
class Chunk:
    """Units of one chunk: addresses (0 for none), and which source slot and piece each one is."""

    dst: np.ndarray
    src: np.ndarray
    key: np.ndarray  # slot * pieces + piece, -2 for none


class Stage:
    def __init__(self, nbytes: int) -> None:
        assert nbytes % 128 == 0
        self.holds = np.full(nbytes // PACKAGE, NOTHING, np.int64)
        self.loaded = 0

    def load(self, to: int, src: int, nbytes: int) -> None:
        """A bulk copy: aligned, inside the stage, onto nothing else."""
        assert to % PACKAGE == src % PACKAGE == nbytes % PACKAGE == 0
        place = slice(to // PACKAGE, (to + nbytes) // PACKAGE)
        assert nbytes > 0
        assert (to + nbytes) // PACKAGE <= len(self.holds)
        assert (self.holds[place] == NOTHING).all()
        self.holds[place] = src + np.arange(0, nbytes, PACKAGE)
        self.loaded += nbytes


def chunks(plan, num_buffers) -> list[tuple[int, int]]:
    """(buffer, first unit) of every chunk, in the order of their numbers."""
    per_buffer = -(-plan.units // plan.units_per_chunk)
    assert plan.chunks == per_buffer * num_buffers
    found = []
    inner_chunks = num_buffers if plan.buffers_innermost else per_buffer
    for number in range(plan.chunks):
        outer, inner = divmod(number, inner_chunks)
        buffer, part = (inner, outer) if plan.buffers_innermost else (outer, inner)
        found.append((buffer, part * plan.units_per_chunk))
    return found


def follow(addresses: np.ndarray, step: int) -> bool:
    return bool((np.diff(addresses) == step).all())


def load_runs(plan, chunk: Chunk, stage: Stage) -> int:
    """One copy a run, with the bit arithmetic of the kernel; returns the number of copies."""
    unit = plan.unit_bytes
    held_src = held_first = held_units = copies = 0

    def issue_held():
        nonlocal held_units, copies
        if held_units > 0:
            stage.load(held_first * unit, held_src, held_units * unit)
            copies += 1
        held_units = 0

    for base in range(0, len(chunk.src), 32):
        src = np.zeros(32, np.int64)
        part = chunk.src[base : base + 32]
        src[: len(part)] = part
        before = np.concatenate(
            ([held_src + held_units * unit if held_units else 0], src[:-1] + unit)
        )
        follows = (src != 0) & (src == before)
        going_on = sum(1 << lane for lane in range(32) if follows[lane])
        starting = (src != 0) & ~follows
        front = next((lane for lane in range(32) if not follows[lane]), 32)
        held_units += front
        if front < 32:
            issue_held()
        last = None
        for lane in np.flatnonzero(starting):
            after = going_on >> (int(lane) + 1) if lane < 31 else 0
            units = 1
            while after & 1:
                units += 1
                after >>= 1
            if lane + units == 32:
                last = int(lane)
            else:
                stage.load((base + int(lane)) * unit, int(src[lane]), units * unit)
                copies += 1
        if last is not None:
            held_src, held_first, held_units = int(src[last]), base + last, 32 - last
    issue_held()
    return copies


def load_box(plan, base: int, chunk: Chunk, stage: Stage) -> None:
    """The box of `box_tokens` slots from the chunk's first one on, all inside one page."""
    view = plan.src
    slot = int(chunk.key[0]) // view.num_pieces
    page_slots = view.slots if view.is_flat else view.page_slots
    assert slot % page_slots + plan.box_tokens <= page_slots
    at = 0
    for token in range(plan.box_tokens):
        for piece in range(view.num_pieces):
            address = base + int(offsets(view, np.int64(slot + token), piece))
            stage.load(at, address, view.piece_bytes)
            at += view.piece_bytes


def store(plan, chunk: Chunk, stage: Stage) -> Moves:
    per_unit = plan.unit_bytes // PACKAGE
    package = np.arange(len(chunk.dst) * per_unit)
    unit, within = np.divmod(package, per_unit)
    wanted = chunk.dst[unit] != 0
    dst = chunk.dst[unit[wanted]] + within[wanted] * PACKAGE
    return dst, stage.holds[package[wanted]], PACKAGE


def launch(plan, group, dst_indices, src_indices) -> tuple[list[Moves], list[int]]:
    """What is stored, and how many copies each chunk took (a box is one)."""
    to, source, inside = locate(plan, dst_indices, src_indices)
    unit = np.arange(plan.units)
    position, in_index = np.divmod(unit, plan.dst.num_pieces * plan.slots_per_index)
    src_slots = src_indices.astype(np.int64)[position] * plan.slots_per_index
    keys = np.where(inside, src_slots * plan.dst.num_pieces + in_index, -2)
    moves, copies = [], []
    for buffer, first in chunks(plan, len(group.dst_base)):
        units = slice(first, min(first + plan.units_per_chunk, plan.units))
        good = inside[units]
        chunk = Chunk(
            np.where(good, group.dst_base[buffer] + to[units], 0),
            np.where(good, group.src_base[buffer] + source[units], 0),
            keys[units],
        )
        stage = Stage(plan.stage_bytes)
        if good.all() and follow(chunk.src, plan.unit_bytes):
            stage.load(0, int(chunk.src[0]), len(good) * plan.unit_bytes)
            copies.append(1)
        elif is_box(plan, chunk, good):
            load_box(plan, group.src_base[buffer], chunk, stage)
            copies.append(1)
        else:
            copies.append(load_runs(plan, chunk, stage))
        assert stage.loaded == int(good.sum()) * plan.unit_bytes, "the barrier expects other bytes"
        moves.append(store(plan, chunk, stage))
    return moves, copies


def is_box(plan, chunk: Chunk, good: np.ndarray) -> bool:
    if plan.box_tokens == 0 or len(good) != plan.units_per_chunk or not good.all():
        return False
    view = plan.src
    token = int(chunk.key[0]) // view.num_pieces % view.page_slots
    in_page = view.is_flat or token + len(good) // view.num_pieces <= view.page_slots
    return in_page and follow(chunk.key, 1)
