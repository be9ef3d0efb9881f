"""Where a pool's rows lie: every element of every layout against an address formula written out."""

import math
import re

import pytest
import torch

from sgl_kvio import layouts

N, P, L, H, DK, DV = 3, 4, 2, 3, 5, 7
S = N * P

# Offset of (buffer, layer, token, head, d) in elements of the tensor that holds it, as the design's
# table states it; each tensor's buffers follow each other.
OFFSETS = {
    "layer_first": lambda b, i, t, h, d, H, D: ((b * L + i) * S + t) * H * D + h * D + d,
    "page_first": lambda b, i, t, h, d, H, D: ((b * S + t) * L + i) * H * D + h * D + d,
    "page_first_direct": lambda b, i, t, h, d, H, D: (
        ((b * N + t // P) * L + i) * P * H * D + (t % P) * H * D + h * D + d
    ),
    "page_head": lambda b, i, t, h, d, H, D: (
        ((b * N + t // P) * H + h) * P * L * D + (t % P) * L * D + i * D + d
    ),
}
SHAPES = {
    ("mha", "layer_first"): ((2, L, S, H, DK),),
    ("mha", "page_first"): ((2, S, L, H, DK),),
    ("mha", "page_first_direct"): ((2, N, L, P, H, DK),),
    ("mha", "page_head"): ((2, N, H, P, L, DK),),
    ("mla", "layer_first"): ((L, S, 1, DK),),
    ("mla", "page_first"): ((S, L, 1, DK),),
    ("mla", "page_first_direct"): ((N, L, P, 1, DK),),
    ("k_only", "layer_first"): ((L, S, H, DK),),
    ("k_only", "page_first"): ((S, L, H, DK),),
    ("k_only", "page_first_direct"): ((N, L, P, H, DK),),
    ("asymmetric", "layer_first"): ((L, S, H, DK), (L, S, H, DV)),
    ("asymmetric", "page_first"): ((S, L, H, DK), (S, L, H, DV)),
    ("asymmetric", "page_first_direct"): ((N, L, P, H, DK), (N, L, P, H, DV)),
}
COMBINATIONS = pytest.mark.parametrize(("kind", "layout"), list(SHAPES))


def sizes(kind, **changes):
    values = {
        "num_pages": N,
        "page_size": P,
        "num_layers": L,
        "num_heads": 1 if kind == "mla" else H,
        "head_dim": DK,
        "v_head_dim": DV if kind == "asymmetric" else None,
    }
    return values | changes


def opened(kind, layout):
    """The entry, its geometry, and its tensors, in which every element is its own offset."""
    entry = layouts.find_layout(kind, layout)
    geometry = layouts.make_geometry(entry, **sizes(kind))
    shapes = entry.tensor_shapes(geometry)
    return entry, geometry, [torch.arange(math.prod(s)).view(s) for s in shapes]


def test_the_table_has_exactly_the_combinations_of_the_design():
    assert layouts.combinations() == list(SHAPES)


@COMBINATIONS
def test_tensor_shapes_are_those_of_the_design(kind, layout):
    entry, geometry, _ = opened(kind, layout)
    assert entry.tensor_shapes(geometry) == SHAPES[kind, layout]


@COMBINATIONS
def test_every_element_of_a_layer_view_is_where_the_formula_says(kind, layout):
    entry, geometry, tensors = opened(kind, layout)
    heads = geometry.num_heads
    views = entry.layer_views(tensors)
    assert len(views) == L
    for i, buffers in enumerate(views):
        assert len(buffers) == entry.num_buffers
        for b, view in enumerate(buffers):
            dim = geometry.head_dims[b]
            in_tensor = 0 if entry.num_tensors == 2 else b
            assert view.shape == ((N, P, heads, dim) if entry.is_paged else (S, heads, dim))
            want = torch.tensor(
                [
                    OFFSETS[layout](in_tensor, i, t, h, d, heads, dim)
                    for t in range(S)
                    for h in range(heads)
                    for d in range(dim)
                ]
            )
            assert torch.equal(view.flatten(), want)


@COMBINATIONS
def test_a_layer_view_writes_through_to_the_pool(kind, layout):
    entry, _, tensors = opened(kind, layout)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for buffers in entry.layer_views(tensors):
        for view in buffers:
            assert view.untyped_storage().data_ptr() in storages


@COMBINATIONS
def test_page_ranges_are_the_elements_that_the_views_call_that_page(kind, layout):
    entry, geometry, tensors = opened(kind, layout)
    for page in range(N):
        want = [set() for _ in tensors]
        for buffers in entry.layer_views(tensors):
            for b, view in enumerate(buffers):
                rows = view[page] if entry.is_paged else view[page * P : (page + 1) * P]
                want[b if entry.num_tensors == 2 else 0].update(rows.flatten().tolist())
        got = [[] for _ in tensors]
        for part in entry.page_ranges(geometry, page):
            got[part.tensor].extend(range(part.start, part.start + part.length))
        assert [sorted(elements) for elements in got] == [sorted(elements) for elements in want]


@COMBINATIONS
def test_a_page_has_one_range_a_buffer_unless_layers_are_outermost(kind, layout):
    entry, geometry, _ = opened(kind, layout)
    ranges = list(entry.page_ranges(geometry, 1))
    assert len(ranges) == entry.num_buffers * (L if layout == "layer_first" else 1)


def test_ranges_of_a_layer_first_page_come_in_the_order_of_all_layers():
    entry, geometry, tensors = opened("mha", "layer_first")
    firsts = [buffer[P].flatten()[0].item() for b in entry.layer_views(tensors) for buffer in b]
    assert [part.start for part in entry.page_ranges(geometry, 1)] == firsts


@COMBINATIONS
def test_every_page_range_starts_at_a_multiple_of_the_copy_unit(kind, layout):
    # Registration chunks are multiples of the unit: a range off the grid would span two of them.
    entry, geometry, _ = opened(kind, layout)
    for page in range(N):
        for part in entry.page_ranges(geometry, page):
            unit = entry.page_unit(geometry, part.tensor)
            assert part.length == unit
            assert part.start % unit == 0


def test_an_unknown_kind_is_named_with_the_kinds_that_exist():
    with pytest.raises(
        ValueError, match="kind got 'gqa'; needs one of 'mha', 'mla', 'k_only', 'asymmetric'"
    ):
        layouts.find_layout("gqa", "page_first")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mha", "token_first"),
        ("mla", "page_head"),
        ("k_only", "page_head"),
        ("asymmetric", "page_head"),
        ("mha", None),
    ],
)
def test_a_layout_that_a_kind_lacks_is_named_with_those_it_has(kind, layout):
    with pytest.raises(ValueError, match=f"layout got {layout!r}; kind '{kind}' needs") as caught:
        layouts.find_layout(kind, layout)
    for other_kind, name in SHAPES:
        if other_kind == kind:
            assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["num_pages", "page_size", "num_layers", "num_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "4", torch.tensor(True)])
def test_a_size_that_is_no_positive_int_is_refused_by_name(name, value):
    entry = layouts.find_layout("mha", "page_first")
    text = re.escape(f"{name} got {value!r}; needs an int of at least 1")
    with pytest.raises(ValueError, match=text):
        layouts.make_geometry(entry, **sizes("mha", **{name: value}))


def test_sizes_of_numpy_and_torch_give_the_geometry_that_ints_give():
    numpy = pytest.importorskip("numpy")
    entry = layouts.find_layout("asymmetric", "page_first")
    want = layouts.make_geometry(entry, **sizes("asymmetric"))
    for as_number in (numpy.int64, numpy.uint8, torch.tensor):
        given = {name: as_number(size) for name, size in sizes("asymmetric").items()}
        got = layouts.make_geometry(entry, **given)
        assert got == want
        numbers = [got.num_pages, got.page_size, got.num_layers, got.num_heads, *got.head_dims]
        assert {type(number) for number in numbers} == {int}


def test_what_can_index_a_list_is_an_int_but_for_bools():
    numpy = pytest.importorskip("numpy")
    for value in (7, numpy.int32(7), numpy.uint64(7), torch.tensor(7), torch.tensor([7])):
        assert layouts.as_int(value) == 7
        assert type(layouts.as_int(value)) is int
    others = (7.0, "7", None, [7], numpy.float32(7), torch.tensor(7.0), torch.tensor([7, 7]))
    bools = (True, numpy.bool_(True), torch.tensor(True))
    for value in (*others, *bools, torch.empty((), dtype=torch.int64, device="meta")):
        assert layouts.as_int(value) is None


def test_an_mla_pool_of_several_heads_is_refused():
    entry = layouts.find_layout("mla", "page_first")
    with pytest.raises(ValueError, match="num_heads got 2; kind 'mla' needs 1"):
        layouts.make_geometry(entry, **sizes("mla", num_heads=2))


def test_v_head_dim_is_refused_where_k_and_v_are_alike():
    entry = layouts.find_layout("mha", "page_first")
    with pytest.raises(ValueError, match="v_head_dim got 7; kind 'mha' needs None"):
        layouts.make_geometry(entry, **sizes("mha", v_head_dim=7))


@pytest.mark.parametrize("value", [None, 0, -3, True, 4.0])
def test_an_asymmetric_pool_without_a_v_size_is_refused(value):
    entry = layouts.find_layout("asymmetric", "page_first")
    with pytest.raises(ValueError, match=f"v_head_dim got {value}"):
        layouts.make_geometry(entry, **sizes("asymmetric", v_head_dim=value))
