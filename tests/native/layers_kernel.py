"""The walk of load_layers over its plan, wave by wave, as csrc/gpu/load_layers.cu does it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from native import register_kernel
from native.register_kernel import Moves


@dataclass(frozen=True)
class Buffer:
    """Of a layer: its shape's number and group, its place in the group, its first item."""

    shape: int
    group: int
    place: int
    first_item: int


def buffers_of(plan, groups) -> list[Buffer]:
    found = []
    item = 0
    for number, shape in enumerate(plan.shapes):
        for place in range(len(groups[shape.group].dst_base)):
            found.append(Buffer(number, shape.group, place, item))
            item += shape.items
    assert item == plan.items_per_layer
    return found


def item_at(plan, buffers, item) -> tuple[Buffer, int]:
    """Buffer and first unit of an item of a layer."""
    if len(plan.shapes) > 1:
        buffer = max(b for b in range(len(buffers)) if item >= buffers[b].first_item)
        buffer = buffers[buffer]
        cut = plan.shapes[buffer.shape].plan
        return buffer, (item - buffer.first_item) * cut.units_per_item
    (shape,) = plan.shapes
    inner = len(buffers) if shape.plan.buffers_innermost else shape.items
    outer, rest = divmod(item, inner)
    number, unit = (rest, outer) if shape.plan.buffers_innermost else (outer, rest)
    return buffers[number], unit * shape.plan.units_per_item


def items_of_wave(plan, num_layers, wave, num_waves) -> Iterator[tuple[int, int]]:
    """(layer, item) in order: items of all layers in a row, dealt out in turn."""
    for number in range(wave, plan.items_per_layer * num_layers, num_waves):
        yield divmod(number, plan.items_per_layer)


def launch(
    kvio, plan, policy, request, dst_indices, src_indices
) -> Iterator[tuple[int, int, Moves]]:
    """(layer, wave, what its lanes copy) of every item."""
    layers = [request.groups_of(layer) for layer in range(request.num_layers)]
    buffers = buffers_of(plan, layers[0])
    located = [
        register_kernel.locate(shape.plan, dst_indices, src_indices) for shape in plan.shapes
    ]
    num_waves = plan.num_blocks * policy.warps_per_block
    for number in range(num_waves):
        for layer, item in items_of_wave(plan, request.num_layers, number, num_waves):
            buffer, first = item_at(plan, buffers, item)
            cut = plan.shapes[buffer.shape].plan
            # One kernel serves all shapes.
            assert cut.package_bytes == plan.package_bytes
            assert cut.split[1:] == plan.kernel[1:]
            to, source, inside = located[buffer.shape]
            units = slice(first, min(first + cut.units_per_item, cut.units))
            assert first < cut.units, "an item without a unit"
            group = layers[layer][buffer.group]
            dst = group.dst_base[buffer.place] + to[units]
            src = group.src_base[buffer.place] + source[units]
            good = inside[units]
            for move in register_kernel.copy_item(kvio, cut, policy, dst, src, good):
                yield layer, number, move
