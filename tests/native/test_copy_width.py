"""The copy-width rule against its definition: every address that a load touches, enumerated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native.pools import Buffer, Transfer, index_array, layer_elements, transfers


def piece_addresses(buffers, pieces):
    """Where each piece of each row of each buffer starts."""
    return np.concatenate(
        [b.row_bytes().reshape(len(b.row_bytes()), pieces, -1)[:, :, 0].ravel() for b in buffers]
    )


def widest(addresses, limit):
    width = limit
    while (addresses % width).any():
        width //= 2
    return width


def facts(kvio, case):
    group = case.request(kvio).groups[0]
    bits = kvio.address_bits(group)
    touched = piece_addresses([*case.dst, *case.src], group.dst.num_pieces)
    return group, bits, touched


def uses_every_stride(view):
    """With a single slot the token stride is no address, and the rule may be narrower."""
    return view.slots > 1


@given(transfers())
def test_width_is_the_largest_power_of_two_that_divides_every_address_and_fits_the_piece(
    kvio, case
):
    group, bits, touched = facts(kvio, case)
    limit = 16
    while limit > group.dst.piece_bytes:
        limit //= 2
    width = kvio.copy_width(group.dst, group.src, bits)
    allowed = widest(touched, limit)
    assert width <= allowed
    if uses_every_stride(group.dst) and uses_every_stride(group.src):
        assert width == allowed


@given(transfers())
def test_alignment_is_the_largest_power_of_two_up_to_a_line_that_divides_every_address(kvio, case):
    group, bits, touched = facts(kvio, case)
    alignment = kvio.address_alignment(group.dst, group.src, bits)
    allowed = widest(touched, 128)
    assert alignment <= allowed
    if uses_every_stride(group.dst) and uses_every_stride(group.src):
        assert alignment == allowed


@given(transfers(), st.sampled_from(("dst", "src")))
def test_one_unaligned_buffer_narrows_the_whole_group(kvio, case, side):
    tensors = {
        name: [buffer.tensor(kvio) for buffer in getattr(case, name)] for name in ("dst", "src")
    }
    last = getattr(case, side)[-1]
    moved = Buffer(last.elements, last.address + last.itemsize, last.itemsize)
    tensors[side].append(moved.tensor(kvio))
    other = "src" if side == "dst" else "dst"
    tensors[other].append(tensors[other][-1])
    indices = kvio.Tensor.of_buffer(index_array([]))
    request = kvio.make_transfer_request(tensors["dst"], tensors["src"], indices, indices)
    group = request.groups[0]
    assert len(request.groups) == 1
    assert kvio.copy_width(group.dst, group.src, kvio.address_bits(group)) <= last.itemsize


def rows_case(row_bytes, *, pitch=0, start=0):
    views = layer_elements(
        "pitched", layers=1, pages=4, page_size=2, heads=1, dim=row_bytes, pad=pitch
    )
    host = Buffer(views[0], (1 << 20) + start, 1)
    whole = layer_elements("layer_first", layers=1, pages=4, page_size=2, heads=1, dim=row_bytes)
    none = index_array([])
    return Transfer([host], [Buffer(whole[0], 1 << 30, 1)], none, none)


@pytest.mark.parametrize(
    ("row_bytes", "pitch", "start", "width"),
    [
        (1152, 0, 0, 16),
        (656, 0, 0, 16),
        (576, 0, 0, 16),
        (1160, 0, 0, 8),
        (132, 0, 0, 4),
        (130, 0, 0, 2),
        (3, 0, 0, 1),
        (1152, 0, 8, 8),
        (1152, 0, 1, 1),
        (1152, 4, 0, 4),
        (8, 8, 0, 8),
        (12, 4, 0, 4),
        (1, 15, 0, 1),
    ],
)
def test_widths_of_rows_that_engines_have(kvio, row_bytes, pitch, start, width):
    group = rows_case(row_bytes, pitch=pitch, start=start).request(kvio).groups[0]
    assert kvio.copy_width(group.dst, group.src, kvio.address_bits(group)) == width


def test_row_length_beyond_the_strides_does_not_narrow_the_width(kvio):
    """Rows of 17 bytes, 32 apart on both sides: 16-byte loads and a remainder of 1."""
    views = layer_elements("pitched", layers=1, pages=4, page_size=2, heads=1, dim=17, pad=15)
    none = index_array([])
    case = Transfer([Buffer(views[0], 1 << 20, 1)], [Buffer(views[0], 1 << 30, 1)], none, none)
    group = case.request(kvio).groups[0]
    assert kvio.copy_width(group.dst, group.src, kvio.address_bits(group)) == 16
