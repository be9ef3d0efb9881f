"""The register kernel's walk over a plan, lane by lane, as csrc/gpu/transfer_register.cu does it.

`launch` yields what the lanes copy as arrays (dst addresses, src addresses, bytes of each).
A remainder is copied whichever way its unit's packages went: a stretch of one unit may have one.
The wave copy is not written here once more: `kvio.wave_copy_moves` runs its source.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# (units a lane, loads a unit) that the kernel is compiled for.
KERNELS = {(1, 16), (2, 8), (2, 9), (4, 4), (8, 2)}

Moves = tuple[np.ndarray, np.ndarray, int]


def offsets(view, slots, pieces):
    in_row = pieces * (view.piece_stride if view.num_pieces > 1 else 0)
    if view.is_flat:
        return slots * view.token_stride + in_row
    page, token = np.divmod(slots, view.page_slots)
    return page * view.page_stride + token * view.token_stride + in_row


def locate(plan, dst_indices, src_indices):
    """Offsets of every unit in its buffer, and whether both its entries are inside their pools."""
    unit = np.arange(plan.units)
    position, in_index = np.divmod(unit, plan.dst.num_pieces * plan.slots_per_index)
    token, piece = np.divmod(in_index, plan.dst.num_pieces)
    dst = dst_indices.astype(np.int64)[position]
    src = src_indices.astype(np.int64)[position]
    per_index = plan.slots_per_index
    inside = (0 <= dst) & (dst < plan.dst.slots // per_index)
    inside &= (0 <= src) & (src < plan.src.slots // per_index)
    return (
        offsets(plan.dst, dst * per_index + token, piece),
        offsets(plan.src, src * per_index + token, piece),
        inside,
    )


def items_of_warp(plan, num_buffers, warp, num_warps) -> Iterator[tuple[int, int]]:
    """(buffer, first unit) of the items that one warp takes."""
    per_buffer = -(-plan.units // plan.units_per_item)
    inner_items = num_buffers if plan.buffers_innermost else per_buffer
    for number in range(warp, per_buffer * num_buffers, num_warps):
        outer, inner = divmod(number, inner_items)
        buffer, item = (inner, outer) if plan.buffers_innermost else (outer, inner)
        yield buffer, item * plan.units_per_item


def is_stretch(plan, dst, src, inside):
    step = plan.dst.piece_bytes
    return bool(inside.all() and (np.diff(dst) == step).all() and (np.diff(src) == step).all())


def copy_stretch(plan, dst, src, wave=32) -> Iterator[Moves]:
    width = plan.package_bytes
    total = len(dst) * plan.packages
    for done in range(0, total, wave * plan.stretch_loads):
        package = done + np.arange(wave * plan.stretch_loads)
        package = package[package < total]
        yield dst[0] + package * width, src[0] + package * width, width


def copy_units(plan, dst, src, inside, wave=32) -> Iterator[Moves]:
    width = plan.package_bytes
    lanes, units_per_lane, loads_per_unit = plan.split
    groups = wave // lanes
    group, column = np.divmod(np.arange(wave), lanes)
    lines_of = dst if plan.skew_by_dst else src
    for first in range(0, len(dst), groups * units_per_lane):
        unit = first + np.arange(units_per_lane)[:, None] * groups + group
        writable = unit < len(dst)
        unit = np.minimum(unit, len(dst) - 1)
        writable &= inside[unit]
        start = column - (lines_of[unit] & (plan.skew_alignment - 1)) // width
        start[~writable] = plan.packages + plan.max_skew
        for step in range(0, plan.packages + plan.max_skew, lanes * loads_per_unit):
            for j in range(loads_per_unit):
                package = start + step + j * lanes
                wanted = (0 <= package) & (package < plan.packages)
                at = package[wanted] * width
                yield dst[unit[wanted]] + at, src[unit[wanted]] + at, width


def copy_remainder(plan, dst, src) -> Iterator[Moves]:
    at = plan.packages * plan.package_bytes
    left = plan.remainder
    width = plan.package_bytes // 2
    while width >= 1:
        if left >= width:
            yield dst + at, src + at, width
            at += width
            left -= width
        width //= 2
    assert left == 0, "a remainder is shorter than a package"


def wave_copy(kvio, plan, dst, src, inside) -> Iterator[Moves]:
    noted = kvio.wave_copy_moves(
        lanes=plan.split[0],
        alignment=plan.package_bytes,
        dst=np.where(inside, dst, 0).tolist(),
        src=src.tolist(),
        row_bytes=plan.dst.piece_bytes,
    )
    moves = np.frombuffer(noted, np.int64).reshape(-1, 3)
    for width in np.unique(moves[:, 2]).tolist():
        to, of, _ = moves[moves[:, 2] == width].T
        yield to, of, width


def copy_item(kvio, plan, policy, dst, src, inside) -> Iterator[Moves]:
    wave = policy.wave_lanes
    if is_stretch(plan, dst, src, inside):
        yield from copy_stretch(plan, dst, src, wave)
    elif policy.wave_copy:
        yield from wave_copy(kvio, plan, dst, src, inside)
        return  # it moves all of a unit
    else:
        yield from copy_units(plan, dst, src, inside, wave)
    yield from copy_remainder(plan, dst[inside], src[inside])


def launch(kvio, plan, policy, group, dst_indices, src_indices) -> Iterator[Moves]:
    to, source, inside = locate(plan, dst_indices, src_indices)
    num_warps = plan.num_blocks * policy.warps_per_block
    for warp in range(num_warps):
        for buffer, first in items_of_warp(plan, len(group.dst_base), warp, num_warps):
            units = slice(first, min(first + plan.units_per_item, plan.units))
            dst = group.dst_base[buffer] + to[units]
            src = group.src_base[buffer] + source[units]
            yield from copy_item(kvio, plan, policy, dst, src, inside[units])


def bytes_moved(moves) -> np.ndarray:
    """[bytes, 2]: the (dst, src) address of every byte copied, sorted; repeated if copied twice."""
    pairs = [np.empty((0, 2), np.int64)]
    for dst, src, width in moves:
        assert (dst % width == 0).all(), "a store off its alignment"
        assert (src % width == 0).all(), "a load off its alignment"
        inside = np.arange(width)
        both = np.stack((dst, src), axis=-1)[:, None, :] + inside[:, None]
        pairs.append(both.reshape(-1, 2))
    moved = np.concatenate(pairs)
    return moved[np.lexsort((moved[:, 1], moved[:, 0]))]
