"""The plan of load_layers, walked as the kernel walks it: every byte of every layer, once."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native import layers_kernel, pools, register_kernel
from native.pools import Buffer, index_array

PLATFORMS = ("cuda", "rocm")


@dataclass(frozen=True)
class Load:
    """`dst[b][layer]`, `src[b][layer]`: buffer b of a layer."""

    dst: list[list[Buffer]]
    src: list[list[Buffer]]
    dst_indices: np.ndarray
    src_indices: np.ndarray
    src_device: str = "cpu"
    page_size: int = 1
    index_unit: str = "token"
    num_blocks: int = 0

    @property
    def num_layers(self):
        return len(self.dst[0])

    def request(self, kvio, form):
        sides = []
        for side, device in ((self.dst, "gpu"), (self.src, self.src_device)):
            if form == "stacked":
                sides.append([stacked(kvio, layers, device) for layers in side])
            else:
                by_layer = zip(*side, strict=True)
                sides.append([b.tensor(kvio, device) for layer in by_layer for b in layer])
        return kvio.make_load_layers_request(
            *sides,
            *(kvio.Tensor.of_buffer(i, device="gpu") for i in (self.dst_indices, self.src_indices)),
            kvio.Tensor(64, [2, 512], [512, 1], dtype="int64", device="gpu"),
            num_layers=0 if form == "stacked" else self.num_layers,
            page_size=self.page_size,
            index_unit=self.index_unit,
            num_blocks=self.num_blocks,
        )

    def wanted(self, layer, positions=slice(None)):
        """[bytes, 2]: (dst, src) address of every byte of a layer that the entries name."""
        per_index = self.page_size if self.index_unit == "page" else 1
        inside = np.arange(per_index)
        slots = [
            (i[positions].astype(np.int64)[:, None] * per_index + inside).ravel()
            for i in (self.dst_indices, self.src_indices)
        ]
        pairs = [np.empty((0, 2), np.int64)]
        for dst, src in zip(self.dst, self.src, strict=True):
            both = (
                dst[layer].row_bytes()[slots[0]].ravel(),
                src[layer].row_bytes()[slots[1]].ravel(),
            )
            pairs.append(np.stack(both, axis=-1))
        wanted = np.concatenate(pairs)
        return wanted[np.lexsort((wanted[:, 1], wanted[:, 0]))]


def stacked(kvio, layers, device):
    """All layers of a buffer as one tensor."""
    first = layers[0]
    view = first.elements
    strides = [stride // view.itemsize for stride in view.strides]
    step = int(layers[1].elements.flat[0] - view.flat[0]) if len(layers) > 1 else 0
    return kvio.Tensor(
        first.address + int(view.flat[0]) * first.itemsize,
        [len(layers), *view.shape],
        [step, *strides],
        dtype=pools.DTYPES[first.itemsize],
        device=device,
    )


@st.composite
def loads(draw, *, most_buffers=3):
    """Up to three buffers a layer, alike or not, between any layouts."""
    layers = draw(st.integers(1, 4))
    itemsize = draw(st.sampled_from((1, 2, 4, 8)))
    dims = draw(
        st.lists(st.sampled_from((1, 3, 8, 24, 64, 130)), min_size=1, max_size=most_buffers)
    )
    heads = draw(st.integers(1, 2))

    def side(at):
        one = {"itemsize": itemsize, "heads": heads, "layers": layers, "max_pages": 5}
        return [draw(pools.sides(dim=dim, at=at + (b << 22), **one)) for b, dim in enumerate(dims)]

    dst, src = side(1 << 26), side(1 << 30)
    fewest = [min(len(layers[0].row_bytes()) for layers in side) for side in (dst, src)]
    page_size = draw(st.integers(1, 4))
    unit = draw(st.sampled_from(("token", "page"))) if min(fewest) >= page_size else "token"
    per_index = page_size if unit == "page" else 1
    lists = draw(pools.index_lists(*(slots // per_index for slots in fewest)))
    return Load(
        dst,
        src,
        *(index_array(entries) for entries in lists),
        src_device=draw(st.sampled_from(("cpu", "cpu", "gpu"))),
        page_size=page_size,
        index_unit=unit,
        num_blocks=draw(st.sampled_from((0, 0, 1, 2))),
    )


FORMS = st.sampled_from(("stacked", "listed"))


def by_layer(kvio, load, form, policy):
    """For each layer the bytes moved, and the waves that have an item of it; and the plan."""
    request = load.request(kvio, form)
    plan = kvio.make_layers_plan(request, policy=policy)
    moves = [[] for _ in range(load.num_layers)]
    waves = [set() for _ in range(load.num_layers)]
    walked = ()
    if plan.items_per_layer:
        lists = (load.dst_indices, load.src_indices)
        walked = layers_kernel.launch(kvio, plan, policy, request, *lists)
    for layer, wave, move in walked:
        moves[layer].append(move)
        waves[layer].add(wave)
    return [register_kernel.bytes_moved(m) for m in moves], waves, plan


def check(kvio, load, form, policy):
    moved, waves, plan = by_layer(kvio, load, form, policy)
    num_waves = plan.num_blocks * policy.warps_per_block
    for layer in range(load.num_layers):
        assert np.array_equal(moved[layer], load.wanted(layer))
        # What gpu/layer_flags.h takes a layer to be complete by.
        if len(load.dst_indices):
            assert len(waves[layer]) == min(num_waves, plan.items_per_layer)


@pytest.mark.parametrize("platform", PLATFORMS)
@given(load=loads(), form=FORMS)
def test_every_byte_of_every_layer_is_moved_once(kvio, platform, load, form):
    check(kvio, load, form, kvio.register_policy(getattr(kvio.Platform, platform)))


@given(load=loads(), form=FORMS)
def test_every_byte_is_moved_once_when_items_are_short_and_blocks_small(kvio, load, form):
    policy = kvio.RegisterPolicy()
    policy.bytes_per_warp_step = 64
    policy.long_piece_bytes = 96
    policy.max_units_per_item = 2
    policy.warps_per_block = 3
    check(kvio, load, form, policy)


@given(load=loads(), form=FORMS, data=st.data())
def test_rows_outside_their_pools_are_left_out_of_every_layer(kvio, load, form, data):
    count = len(load.dst_indices)
    bad = data.draw(st.lists(st.integers(0, count - 1), max_size=3)) if count else []
    lists = {"dst_indices": load.dst_indices.copy(), "src_indices": load.src_indices.copy()}
    for position in bad:
        lists[data.draw(st.sampled_from(sorted(lists)))][position] = data.draw(
            st.sampled_from((-1, 1 << 20, -(2**31)))
        )
    moved, _, _ = by_layer(kvio, replace(load, **lists), form, kvio.RegisterPolicy())
    good = np.setdiff1d(np.arange(count), bad)
    for layer in range(load.num_layers):
        assert np.array_equal(moved[layer], load.wanted(layer, good))


def rows(row_bytes, *, slots, layers, at, layout="layer_first"):
    views = pools.layer_elements(
        layout, layers=layers, pages=slots, page_size=1, heads=1, dim=row_bytes, paged=False
    )
    return [Buffer(view, at, 1) for view in views]


def uniform(row_sizes, *, slots=256, layers=4, indices=range(256), layout="layer_first", **options):
    dst = [
        rows(n, slots=slots, layers=layers, at=(1 << 26) + (b << 23))
        for b, n in enumerate(row_sizes)
    ]
    src = [
        rows(n, slots=slots, layers=layers, at=(1 << 30) + (b << 23), layout=layout)
        for b, n in enumerate(row_sizes)
    ]
    lists = index_array(list(indices)), index_array(list(indices))
    return Load(dst, src, *lists, **options)


def plan_of(kvio, load, form="stacked", **options):
    return kvio.make_layers_plan(load.request(kvio, form), **options)


@pytest.mark.parametrize("form", ["stacked", "listed"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("row_bytes", [16, 130, 512, 576, 656, 1152, 4096])
def test_a_layer_is_cut_as_a_transfer_of_it_would_be(kvio, row_bytes, layout, form):
    load = uniform([row_bytes] * 2, layout=layout)
    plan = plan_of(kvio, load, form)
    (shape,) = plan.shapes
    transfer = pools.Transfer(
        [layers[0] for layers in load.dst],
        [layers[0] for layers in load.src],
        load.dst_indices,
        load.src_indices,
        dst_device="gpu",
        index_device="gpu",
    ).request(kvio)
    alone = kvio.make_register_plan(transfer, transfer.groups[0])
    for name in ("package_bytes", "split", "units", "units_per_item", "stretch_loads", "max_skew"):
        assert getattr(shape.plan, name) == getattr(alone, name), name
    assert plan.num_blocks == 4


def test_blocks_without_an_item_of_a_short_layer_have_items_of_the_next(kvio):
    """32 rows of 64 bytes are one item a buffer: a transfer of them takes one block."""
    load = uniform([64, 64], indices=range(32), layers=40)
    assert plan_of(kvio, load).num_blocks == 4
    assert plan_of(kvio, uniform([64, 64], indices=range(32), layers=1)).num_blocks == 1


@pytest.mark.parametrize("form", ["stacked", "listed"])
@pytest.mark.parametrize(("offset", "package"), [(8, 8), (4, 4), (2, 2), (1, 1), (16, 16)])
def test_a_later_layer_that_is_less_aligned_narrows_the_loads(kvio, form, offset, package):
    views = pools.layer_elements(
        "layer_first", layers=2, pages=64, page_size=1, heads=1, dim=512, paged=False
    )
    apart = Buffer(views[1] + offset, 1 << 26, 1)
    load = uniform([512], slots=64, layers=2, indices=range(64))
    load = replace(load, dst=[[Buffer(views[0], 1 << 26, 1), apart]])
    plan = plan_of(kvio, load, form)
    assert plan.package_bytes == package
    check(kvio, load, form, kvio.RegisterPolicy())


def test_shapes_share_the_narrowest_load_and_the_split_of_most_bytes(kvio):
    plan = plan_of(kvio, uniform([1024, 132, 1024]))
    assert len(plan.shapes) == 2
    assert plan.package_bytes == 4
    alone = plan_of(kvio, uniform([1024, 1024]))
    assert plan.kernel[1:] == alone.kernel[1:]
    assert all(shape.plan.package_bytes == 4 for shape in plan.shapes)
    assert all(shape.plan.split[1:] == plan.kernel[1:] for shape in plan.shapes)


def test_nothing_to_move_is_no_item(kvio):
    plan = plan_of(kvio, uniform([64], indices=[]))
    assert (plan.items_per_layer, plan.num_buffers, plan.shapes) == (0, 0, [])


def huge(kvio, count, row_bytes=64, layers=128, slots=2**33, buffers=2):
    """A request whose lists and pools are only described."""

    def side(at, device):
        return [
            kvio.Tensor(
                at + (b << 50),
                [layers, slots, 1, row_bytes],
                [slots * row_bytes, row_bytes, row_bytes, 1],
                device=device,
            )
            for b in range(buffers)
        ]

    def indices():
        return kvio.Tensor(1 << 14, [count], [1], dtype="int64", device="gpu")

    return kvio.make_load_layers_request(
        side(1 << 56, "gpu"),
        side(1 << 57, "cpu"),
        indices(),
        indices(),
        kvio.Tensor(64, [2, 512], [512, 1], dtype="int64", device="gpu"),
    )


def test_the_largest_layers_are_counted(kvio):
    """128 layers of 16 million tokens of 64 bytes, K and V: 512 GiB of one launch."""
    plan = kvio.make_layers_plan(huge(kvio, 2**24))
    assert plan.items_per_layer == 2 * 2**24 // 32
    assert plan.num_blocks == 4


@pytest.mark.parametrize(("count", "row_bytes"), [(2**28, 64), (2**24, 1024), (2**40, 1)])
def test_more_entries_than_a_layer_can_count_are_refused(kvio, count, row_bytes):
    with pytest.raises(RuntimeError, match=r"kvio::load_layers: dst_indices has \d+ .*needs"):
        kvio.make_layers_plan(huge(kvio, count, row_bytes))
