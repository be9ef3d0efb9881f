"""kvio::swap_in and kvio::copy_planned on the CPU: outputs, state and bytes, against an oracle."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import sgl_kvio
import swap_in_cases
from reference import assert_same_bytes, refused

INT16, INT32, INT64 = torch.int16, torch.int32, torch.int64
UNWRITTEN = swap_in_cases.UNWRITTEN
SEEDS = st.integers(0, 2**31)
# The long run of 10,000 steps: KVIO_SWAP_IN_STEPS=10000.
STEPS = int(os.environ.get("KVIO_SWAP_IN_STEPS", "1000"))


def i32(values):
    return torch.tensor(values, dtype=INT32)


def small_world(tokens=(1, 4, 2, 5), *, seq_len=8, num_requests=1, max_len=16):
    """Hot buffers of 4 slots and rows of 32 bytes. Host row t of request 0 is token t's."""
    slots = 4
    locs = torch.arange(100, 100 + 5 * num_requests, dtype=INT32).view(num_requests, 5) % 90 + 20
    locs[0] = i32([9, 7, 3, 5, 11])
    resident = torch.full((num_requests, slots + 1), -1, dtype=INT32)
    resident[:, :slots] = i32(list(tokens))
    order = torch.arange(slots, dtype=INT16).repeat(num_requests, 1)
    host_locs = torch.arange(num_requests * max_len).view(num_requests, max_len)
    generator = torch.Generator().manual_seed(5)
    return SimpleNamespace(
        tokens=resident,
        locs=locs,
        host_locs=host_locs,
        lru=order,
        host=torch.randn(num_requests * max_len, 1, 8, generator=generator),
        device=torch.randn(128, 1, 8, generator=generator),
        seq_lens=torch.full((num_requests,), seq_len),
        requests=torch.arange(num_requests),
        hot=slots,
    )


def query(world, *rows, call=sgl_kvio.swap_in, **options):
    """Runs swap_in with these top-k rows; returns the device locations as lists."""
    out = torch.full((len(rows), len(rows[0])), UNWRITTEN, dtype=INT32)
    call(
        i32(rows),
        world.tokens,
        world.locs,
        world.host_locs,
        world.lru,
        [world.host],
        [world.device],
        out,
        world.requests,
        world.seq_lens,
        hot_buffer_size=world.hot,
        **options,
    )
    return out.tolist()


def check_rows(world, before, copies):
    """Device rows are those of `before`, but for {device row: host row} in `copies`."""
    want = before.clone()
    for device_row, host_row in copies.items():
        want[device_row] = world.host[host_row]
    assert_same_bytes(world.device, want, "device buffer")


# (resident tokens, seq_len, query) -> (locations, tokens, LRU, {device row: host row} copied)
EXAMPLES = {
    "hits and the newest token": (
        ((1, 4, 2, 5), 8, [4, 2, 7]),
        ([7, 3, 11], [1, 4, 2, 5], [0, 3, 1, 2], {}),
    ),
    "a hit, a miss and the newest token": (
        ((1, 4, 2, 5), 8, [4, 6, 7]),
        ([7, 9, 11], [6, 4, 2, 5], [2, 3, 0, 1], {9: 6}),
    ),
    "every slot is replaced": (
        ((0, 1, 2, 3), 9, [4, 5, 6, 7]),
        ([9, 7, 3, 5], [4, 5, 6, 7], [0, 1, 2, 3], {9: 4, 7: 5, 3: 6, 5: 7}),
    ),
    "a short request, entries behind its length": (
        ((0, 1, 2, 3), 2, [1, -1, 0, 0]),
        ([7, -1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3], {}),
    ),
    "a request that just fits its hot buffer": (
        ((0, 1, 2, 3), 4, [3, 0, -7, 2]),
        ([5, 9, -1, 3], [0, 1, 2, 3], [0, 1, 2, 3], {}),
    ),
    "a request one token longer than that": (
        ((0, 1, 2, 3), 5, [3, 0, 4, 2]),
        ([5, 9, 11, 3], [0, 1, 2, 3], [1, 0, 2, 3], {}),
    ),
    # Unspecified in the kernels of the field: an unfilled entry, a token that is named twice.
    "an unfilled entry takes nothing": (
        ((1, 4, 2, 5), 8, [-1, 6, -3]),
        ([-1, 9, -1], [6, 4, 2, 5], [1, 2, 3, 0], {9: 6}),
    ),
    "nothing is selected": (
        ((1, 4, 2, 5), 8, [-1, -1]),
        ([-1, -1], [1, 4, 2, 5], [0, 1, 2, 3], {}),
    ),
    "a miss named three times takes one slot": (
        ((1, 4, 2, 5), 8, [6, 3, 6, 6]),
        ([9, 7, 9, 9], [6, 3, 2, 5], [2, 3, 0, 1], {9: 6, 7: 3}),
    ),
    "a hit named twice moves once": (
        ((1, 4, 2, 5), 8, [2, 2, 1]),
        ([3, 3, 9], [1, 4, 2, 5], [1, 3, 0, 2], {}),
    ),
    "the newest token twice": (
        ((1, 4, 2, 5), 8, [7, 7]),
        ([11, 11], [1, 4, 2, 5], [0, 1, 2, 3], {}),
    ),
    "the newest token is served from its own slot though a hot slot names it": (
        ((1, 7, 2, 5), 8, [7, 6, 0]),
        ([11, 9, 7], [6, 0, 2, 5], [2, 3, 0, 1], {9: 6, 7: 0}),
    ),
    "empty slots are taken in LRU order": (
        ((-1, 4, -1, 5), 8, [4, 6, 2]),
        ([7, 9, 3], [6, 4, 2, 5], [3, 0, 2, 1], {9: 6, 3: 2}),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name):
    (tokens, seq_len, entries), (locs, left, order, copies) = EXAMPLES[name]
    world = small_world(tokens, seq_len=seq_len)
    before = world.device.clone()
    assert query(world, entries) == [locs]
    assert world.tokens.tolist() == [[*left, -1]]
    assert world.lru.tolist() == [order]
    check_rows(world, before, copies)


def test_a_second_step_evicts_what_the_first_one_left_least_recently_used():
    world = small_world()
    before = world.device.clone()
    assert query(world, [4, 2]) == [[7, 3]]
    assert query(world, [6]) == [[9]]
    assert world.tokens.tolist() == [[6, 4, 2, 5, -1]]
    assert world.lru.tolist() == [[3, 1, 2, 0]]
    check_rows(world, before, {9: 6})


def test_a_padded_row_gets_minus_one_and_its_state_stays():
    world = small_world(num_requests=3)
    world.tokens[1, :4] = torch.arange(4)
    world.seq_lens = torch.tensor([8, 3, 8])
    before = world.device.clone()
    locs = query(world, [4, 6, 7], [2, 0, 1], [4, 6, 7], num_real_reqs=i32([2]))
    short = world.locs[1].tolist()
    assert locs == [[7, 9, 11], [short[2], short[0], short[1]], [-1, -1, -1]]
    assert world.tokens.tolist() == [[6, 4, 2, 5, -1], [0, 1, 2, 3, -1], [1, 4, 2, 5, -1]]
    assert world.lru.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    check_rows(world, before, {9: 6})


def test_a_padded_row_may_name_anything():
    world = small_world()
    world.requests, world.seq_lens = torch.tensor([0, -5]), torch.tensor([8, 2**40])
    locs = query(world, [4, 7], [10**9, 3], num_real_reqs=i32([1]))
    assert locs == [[7, 11], [-1, -1]]


def test_large_hot_buffer_has_the_order_of_the_description():
    slots, top_k = 4096, 2048
    world = SimpleNamespace(
        tokens=torch.arange(slots, dtype=INT32)[None],
        locs=torch.arange(slots + 1, dtype=INT32).flip(0)[None],
        host_locs=torch.arange(6100)[None],
        lru=torch.arange(slots, dtype=INT16)[None],
        host=torch.arange(6100, dtype=INT32).view(-1, 1, 1),
        device=torch.zeros(slots + 1, 1, 1, dtype=INT32),
        seq_lens=torch.tensor([6100]),
        requests=torch.tensor([0]),
        hot=slots,
    )
    selected = [*range(1000, 2000), *range(5000, 6048)]
    assert len(selected) == top_k
    locs = query(world, selected)
    taken = [*range(1000), *range(2000, 2048)]
    order = [*range(2048, 4096), *taken, *range(1000, 2000)]
    assert world.lru.tolist() == [order]
    assert locs == [[slots - s for s in [*range(1000, 2000), *taken]]]
    assert world.device[world.locs[0, taken].long()].flatten().tolist() == [*range(5000, 6048)]
    assert world.tokens[0, taken].tolist() == [*range(5000, 6048)]


@pytest.mark.parametrize("slots", [1, 2, 32767])
def test_hot_buffers_of_any_size(slots):
    world = SimpleNamespace(
        tokens=torch.full((1, slots), -1, dtype=INT32),
        locs=torch.arange(slots + 1, dtype=INT32)[None],
        host_locs=torch.arange(slots + 2)[None],
        lru=torch.arange(slots, dtype=INT16)[None],
        host=torch.arange(slots + 2, dtype=INT32).view(-1, 1, 1),
        device=torch.zeros(slots + 1, 1, 1, dtype=INT32),
        seq_lens=torch.tensor([slots + 2]),
        requests=torch.tensor([0]),
        hot=slots,
    )
    assert query(world, list(range(slots))) == [list(range(slots))]
    assert world.device.flatten().tolist() == [*range(slots), 0]
    assert world.lru.tolist() == [list(range(slots))]


def test_an_empty_batch_and_an_empty_selection_are_no_ops():
    world = small_world()
    state = [t.clone() for t in (world.tokens, world.lru, world.device)]
    for batch, top_k in ((0, 3), (0, 0), (1, 0)):
        world.requests, world.seq_lens = torch.zeros(batch, dtype=INT32), torch.full((batch,), 8)
        out = torch.empty(batch, top_k, dtype=INT32)
        args = (out.clone(), world.tokens, world.locs, world.host_locs, world.lru)
        count = torch.full((batch,), UNWRITTEN, dtype=INT32)
        plan = {"miss_src": out.long(), "miss_dst": out.clone(), "miss_count": count}
        pools = ([world.host], [world.device], out, world.requests, world.seq_lens)
        sgl_kvio.swap_in(*args, *pools, hot_buffer_size=4, **plan)
        assert count.tolist() == [0] * batch
    for tensor, old in zip((world.tokens, world.lru, world.device), state, strict=True):
        assert_same_bytes(tensor, old, "state")


def test_without_buffers_only_the_selection_is_resolved():
    world = small_world()
    out = torch.empty(1, 3, dtype=INT32)
    args = (i32([[4, 6, 7]]), world.tokens, world.locs, world.host_locs, world.lru)
    sgl_kvio.swap_in(*args, [], [], out, world.requests, world.seq_lens, hot_buffer_size=4)
    assert out.tolist() == [[7, 9, 11]]
    assert world.lru.tolist() == [[2, 3, 0, 1]]


def test_skip_io_changes_the_state_and_no_row():
    world = small_world()
    before = world.device.clone()
    assert query(world, [4, 6, 7], skip_io=True) == [[7, 9, 11]]
    assert world.tokens.tolist() == [[6, 4, 2, 5, -1]]
    check_rows(world, before, {})


# device_locs: tokens that the regular pool still has.


def pool_locs(world, held):
    locs = torch.full(world.host_locs.shape, -1, dtype=INT32)
    for token, loc in held.items():
        locs[0, token] = loc
    return locs


def test_a_short_request_with_device_locs_is_resolved_through_the_pool():
    world = small_world(seq_len=3)
    before = world.device.clone()
    passed = pool_locs(world, {0: 14, 1: 15, 2: 12})
    assert query(world, [0, 1, 2], device_locs=passed) == [[14, 15, 12]]
    assert world.tokens.tolist() == [[1, 4, 2, 5, -1]]
    assert world.lru.tolist() == [[0, 1, 2, 3]]
    check_rows(world, before, {})


def test_a_short_request_with_device_locs_misses_like_a_long_one():
    world = small_world(seq_len=4)
    assert query(world, [0, 2, 3, -1], device_locs=pool_locs(world, {})) == [[9, 3, 11, -1]]
    assert world.tokens.tolist() == [[0, 4, 2, 5, -1]]
    assert world.lru.tolist() == [[1, 3, 0, 2]]


def test_pool_hits_take_no_slot_and_do_not_count_as_use():
    world = small_world()
    before = world.device.clone()
    passed = pool_locs(world, {0: 14, 4: 15})
    # 0 and 4 lie in the pool (4 in slot 1 too), 2 in the buffer, 6 and 3 on the host only.
    locs = query(world, [0, 6, 4, 2], device_locs=passed)
    assert locs == [[14, 9, 15, 3]]
    assert world.tokens.tolist() == [[6, 4, 2, 5, -1]]
    assert world.lru.tolist() == [[1, 3, 0, 2]]
    check_rows(world, before, {9: 6})


def test_a_negative_entry_beside_pool_hits_takes_nothing():
    world = small_world()
    before = world.device.clone()
    assert query(world, [0, -1, 3], device_locs=pool_locs(world, {0: 14, 3: 12})) == [[14, -1, 12]]
    assert world.lru.tolist() == [[0, 1, 2, 3]]
    check_rows(world, before, {})


# Buffers are views.


def test_a_page_first_host_pool_gives_the_rows_of_its_layer():
    host_pool = torch.randn(16, 3, 8)  # [tokens, layers, elements]
    for layer in range(3):
        world = small_world()
        world.host = host_pool[:, layer : layer + 1]
        before = world.device.clone()
        query(world, [4, 6, 3])
        check_rows(world, before, {9: 6, 3: 3} if world.tokens[0, 2] == 3 else {9: 6, 5: 3})


def test_values_and_scales_of_one_padded_page_are_two_views():
    """Pages of 64 tokens: 576 bytes of values each, then 8 bytes of scale each, then padding."""
    page_bytes = 64 * 584 + 64
    host, device = (
        torch.randint(256, (pages * page_bytes,), dtype=torch.uint8) for pages in (2, 3)
    )

    def views(block):
        pages = block.numel() // page_bytes
        values = block.as_strided((pages, 64, 576), (page_bytes, 576, 1))
        scales = block.as_strided((pages, 64, 8), (page_bytes, 8, 1), 64 * 576)
        return [values, scales]

    world = small_world()
    world.locs[0] = i32([70, 7, 3, 130, 11])
    world.host_locs = torch.arange(100, 116)[None]
    want = device.clone()
    for token, loc in ((6, 70), (3, 130)):
        for to, frm in zip(views(want), views(host), strict=True):
            to[loc // 64, loc % 64] = frm[(100 + token) // 64, (100 + token) % 64]
    world.lru[0] = torch.tensor([0, 3, 1, 2], dtype=INT16)
    out = torch.empty(1, 2, dtype=INT32)
    sgl_kvio.swap_in(
        i32([[6, 3]]),
        world.tokens,
        world.locs,
        world.host_locs,
        world.lru,
        views(host),
        views(device),
        out,
        world.requests,
        world.seq_lens,
        hot_buffer_size=4,
        row_ndim=1,
    )
    assert out.tolist() == [[70, 130]]
    assert_same_bytes(device, want, "device pages")


def test_state_may_be_columns_of_one_wide_tensor():
    wide = torch.full((3, 32), 77, dtype=INT32)
    world = small_world(num_requests=3)
    for name, first in (("tokens", 0), ("locs", 8), ("host_locs", 13)):
        old = getattr(world, name)
        columns = wide[:, first : first + old.shape[1]]
        columns.copy_(old)
        setattr(world, name, columns)
    before, locs = wide.clone(), world.locs.tolist()
    got = query(world, [4, 6], [2, 6], [5, 7])
    assert got == [[7, 9], [locs[1][2], locs[1][0]], [locs[2][3], locs[2][4]]]
    before[:2, 0] = 6
    assert_same_bytes(wide, before, "the wide tensor")


def test_all_requests_may_share_one_row_of_host_locations():
    world = small_world(num_requests=2)
    world.host_locs = torch.arange(16)[None].expand(2, 16)
    query(world, [4, 6], [2, 6])
    assert_same_bytes(world.device[9], world.host[6], "row of request 0")
    assert_same_bytes(world.device[world.locs[1, 0].item()], world.host[6], "row of request 1")


# Plans.


def planned(world, *rows, **options):
    src = torch.full((len(rows), len(rows[0])), UNWRITTEN, dtype=INT64)
    dst, count = src.int(), torch.full((len(rows),), UNWRITTEN, dtype=INT32)
    locs = query(world, *rows, miss_src=src, miss_dst=dst, miss_count=count, **options)
    return locs, src, dst, count


def test_a_plan_holds_the_misses_in_order_and_nothing_behind_them():
    world = small_world(num_requests=3)
    world.tokens[1, :4] = torch.arange(4)
    world.seq_lens = torch.tensor([8, 3, 8])
    rows = ([6, 4, 6, 3], [0, 1, 2, -1], [6, 3, 1, 0])
    _, src, dst, count = planned(world, *rows, num_real_reqs=i32([2]))
    assert count.tolist() == [2, 0, 0]
    assert src.tolist() == [[6, 3, UNWRITTEN, UNWRITTEN]] + [[UNWRITTEN] * 4] * 2
    assert dst.tolist() == [[9, 3, UNWRITTEN, UNWRITTEN]] + [[UNWRITTEN] * 4] * 2


def test_a_replayed_plan_copies_the_same_rows_for_another_layer():
    world = small_world(num_requests=2)
    other_host, other_device = torch.randn_like(world.host), torch.randn_like(world.device)
    want = other_device.clone()
    _, src, dst, count = planned(world, [6, 4, 3], [7, 0, 3])
    for b in range(2):
        for m in range(count[b]):
            want[dst[b, m]] = other_host[src[b, m]]
    sgl_kvio.copy_planned(other_host, other_device, src, dst, count, i32([2]))
    assert_same_bytes(other_device, want, "the other layer")


@pytest.mark.parametrize("row_bytes", [1, 8, 13, 512, 656, 1152])
@pytest.mark.parametrize("num_real", [0, 3, 6])
@pytest.mark.parametrize("skip_io", [False, True])
def test_ragged_plans_are_replayed_to_the_byte(row_bytes, num_real, skip_io):
    counts = [3, 0, 8, 1, 5, 2]
    rng = random.Random(row_bytes)
    host, device = (
        torch.randint(256, (64, row_bytes), dtype=torch.uint8).view(64, 1, -1) for _ in "hd"
    )
    src = torch.full((6, 9), 2**50)[:, :8]
    dst = torch.full((6, 11), -3, dtype=INT32)[:, :8]
    to = rng.sample(range(64), sum(counts))
    want = device.clone()
    for b, count in enumerate(counts):
        for m in range(count):
            src[b, m], dst[b, m] = rng.randrange(64), to.pop()
            if b < num_real and not skip_io:
                want[dst[b, m]] = host[src[b, m]]
    real = i32([num_real])
    sgl_kvio.copy_planned(host, device, src, dst, i32(counts), real, skip_io=skip_io, num_blocks=2)
    assert_same_bytes(device, want, "device buffer")


# Random decode steps.


class SwapInMachine(RuleBasedStateMachine):
    """One world lives through steps that hypothesis puts together."""

    calls = 0  # of every machine together

    @initialize(seed=SEEDS)
    def begin(self, seed):
        self.world = swap_in_cases.World(swap_in_cases.random_spec(random.Random(seed)))

    @rule(seed=SEEDS, calls=st.integers(1, 8))
    def decode(self, seed, calls):
        self.world.rng.seed(seed)
        for _ in range(calls):
            self.world.step()
        SwapInMachine.calls += calls

    @rule(seed=SEEDS)
    def decode_the_largest_batch(self, seed):
        self.world.rng.seed(seed)
        self.world.step(batch=self.world.spec.max_batch)
        SwapInMachine.calls += 1

    @rule(seed=SEEDS)
    def meet_bad_values(self, seed):
        self.world.rng.seed(seed)
        self.world.bad_step(raises=True)
        SwapInMachine.calls += 1

    @rule(seed=SEEDS, length=st.integers(1, 24))
    def restart(self, seed, length):
        world = self.world
        world.rng.seed(seed)
        number = world.rng.randrange(world.spec.num_requests)
        world.restart(number, min(length, world.spec.max_len))


def test_state_machine_agrees_with_the_oracle():
    SwapInMachine.calls = 0
    run_state_machine_as_test(
        SwapInMachine,
        settings=settings(
            max_examples=max(1, STEPS // 25),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SwapInMachine.calls >= STEPS


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_worlds_agree_with_the_oracle_after_every_step(first):
    """A covering of geometries that hypothesis' few examples may miss."""
    specs = swap_in_cases.random_specs(40, seed=7)[first : first + 10]
    for spec in specs:
        swap_in_cases.run_trace(spec, max(1, STEPS // 40))


@pytest.mark.parametrize("loc_dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("req_dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("seq_dtype", [INT32, INT64], ids=str)
def test_every_mix_of_integer_types(loc_dtype, req_dtype, seq_dtype):
    dtypes = {"host_loc_dtype": loc_dtype, "req_dtype": req_dtype, "seq_dtype": seq_dtype}
    for spec in swap_in_cases.random_specs(2, seed=11, **dtypes):
        swap_in_cases.run_trace(spec, 10)


@pytest.mark.parametrize("row_bytes", swap_in_cases.ROW_BYTES)
@pytest.mark.parametrize("host_layout", swap_in_cases.HOST_LAYOUTS)
@pytest.mark.parametrize("device_layout", swap_in_cases.DEVICE_LAYOUTS)
def test_every_pair_of_layouts(host_layout, device_layout, row_bytes):
    layouts = {"host_layout": host_layout, "device_layout": device_layout}
    for spec in swap_in_cases.random_specs(1, seed=13, row_bytes=(row_bytes,), **layouts):
        swap_in_cases.run_trace(spec, 5)


def test_many_threads_give_the_oracles_result():
    """Batches large enough that rows are resolved by several threads."""
    fixed = {
        "hot_buffer_size": 600,
        "top_k": 500,
        "num_requests": 40,
        "max_batch": 40,
        "max_len": 1500,
        "row_bytes": (656,),
    }
    (spec,) = swap_in_cases.random_specs(1, seed=3, **fixed)
    world = swap_in_cases.World(spec)
    for _ in range(3):
        world.step(batch=40, num_real=38)


def test_the_random_steps_meet_what_they_are_for():
    """Guards the generator: misses, hits, evictions, padding and every fault happen."""
    faults, misses, padded, lookups = set(), 0, 0, 0
    for spec in swap_in_cases.random_specs(60, seed=17):
        world = swap_in_cases.World(spec)
        for _ in range(10):
            outcome = world.step()
            misses += sum(map(len, outcome.misses))
            lookups += sum(loc >= 0 for row in outcome.locs for loc in row)
            padded += len(outcome.locs) - int(world.inputs["num_real_reqs"].mirror)
        for _ in range(10):
            faults |= {fault.argument for fault in world.bad_step(raises=True)}
    assert misses > 300
    assert lookups > 2 * misses
    assert padded > 100
    assert faults == {
        "top_k_tokens",
        "device_buffer_locs",
        "host_cache_locs",
        "device_locs",
        "req_pool_indices",
    }


# Bad input: every error names its argument, and nothing has changed.


def good_call():
    """Two requests, three entries each, with a plan: valid as it stands."""
    world = small_world(num_requests=2)
    return {
        "top_k_tokens": i32([[4, 6, 7], [2, 0, 3]]),
        "device_buffer_tokens": world.tokens,
        "device_buffer_locs": world.locs,
        "host_cache_locs": world.host_locs,
        "lru_slots": world.lru,
        "host_cache": [world.host],
        "device_buffer": [world.device],
        "top_k_device_locs": torch.full((2, 3), UNWRITTEN, dtype=INT32),
        "req_pool_indices": world.requests,
        "seq_lens": world.seq_lens,
        "hot_buffer_size": 4,
        "num_real_reqs": i32([2]),
        "device_locs": torch.full((2, 16), -1, dtype=INT32),
        "miss_src": torch.full((2, 3), UNWRITTEN),
        "miss_dst": torch.full((2, 3), UNWRITTEN, dtype=INT32),
        "miss_count": torch.full((2,), UNWRITTEN, dtype=INT32),
    }


def tensors_of(call):
    flat = []
    for value in call.values():
        flat += value if isinstance(value, list) else [value]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def put(name, at, value):
    def change(call):
        call[name][at] = value

    return change


def make(name, how):
    def change(call):
        call[name] = how(call.get(name))

    return change


def alias(name, other, how=lambda t: t):
    def change(call):
        of = call[other]
        call[name] = how(of[0] if isinstance(of, list) else of)

    return change


def no_pool_locs(change):
    def both(call):
        call["device_locs"] = None
        change(call)

    return both


def narrow(columns):
    return lambda t: t[:, :columns]


BAD = {
    # sizes and options
    "no hot buffer": (make("hot_buffer_size", lambda _: 0), "hot_buffer_size", "is 0"),
    "hot buffer beyond int16": (make("hot_buffer_size", lambda _: 32768), "hot_buffer_size", ""),
    "more entries than slots": (
        make("top_k_tokens", lambda t: torch.cat([t, t], 1)),
        "top_k_tokens",
        "6 entries a row",
    ),
    "negative num_blocks": (make("num_blocks", lambda _: -1), "num_blocks", "-1"),
    "negative row_ndim": (make("row_ndim", lambda _: -1), "row_ndim", "-1"),
    # dtypes
    "int64 tokens": (make("top_k_tokens", torch.Tensor.long), "top_k_tokens", "int64"),
    "int64 residents": (
        make("device_buffer_tokens", torch.Tensor.long),
        "device_buffer_tokens",
        "int64.*int32",
    ),
    "int64 slots' rows": (
        make("device_buffer_locs", torch.Tensor.long),
        "device_buffer_locs",
        "int64",
    ),
    "int16 host rows": (make("host_cache_locs", torch.Tensor.short), "host_cache_locs", "int16"),
    "int32 LRU": (make("lru_slots", torch.Tensor.int), "lru_slots", "int32.*int16"),
    "float output": (make("top_k_device_locs", torch.Tensor.float), "top_k_device_locs", "float32"),
    "int16 request slots": (
        make("req_pool_indices", torch.Tensor.short),
        "req_pool_indices",
        "int16",
    ),
    "float lengths": (make("seq_lens", torch.Tensor.float), "seq_lens", "float32"),
    "int64 number of rows": (make("num_real_reqs", torch.Tensor.long), "num_real_reqs", "int64"),
    "int64 pool rows": (make("device_locs", torch.Tensor.long), "device_locs", "int64"),
    "int32 plan sources": (make("miss_src", torch.Tensor.int), "miss_src", "int32"),
    "int64 plan destinations": (make("miss_dst", torch.Tensor.long), "miss_dst", "int64"),
    "int64 plan counts": (make("miss_count", torch.Tensor.long), "miss_count", "int64"),
    # shapes
    "flat tokens": (make("top_k_tokens", torch.Tensor.flatten), "top_k_tokens", r"\[6\]"),
    "output of another size": (
        make("top_k_device_locs", narrow(2)),
        "top_k_device_locs",
        r"\[2, 2\].*\[2, 3\]",
    ),
    "too few resident columns": (
        make("device_buffer_tokens", narrow(3)),
        "device_buffer_tokens",
        "3 columns",
    ),
    "no column for the newest token": (
        make("device_buffer_locs", narrow(4)),
        "device_buffer_locs",
        "4 columns.*5 or more",
    ),
    "LRU of another size": (make("lru_slots", narrow(3)), "lru_slots", r"\[2, 3\].*\[2, 4\]"),
    "LRU of fewer requests": (make("lru_slots", lambda t: t[:1]), "lru_slots", r"\[1, 4\]"),
    "slots' rows of fewer requests": (
        make("device_buffer_locs", lambda t: t[:1]),
        "device_buffer_locs",
        r"\[1, 5\].*\[2, any\]",
    ),
    "host rows of fewer requests": (
        make("host_cache_locs", lambda t: t[:1]),
        "host_cache_locs",
        r"\[1, 16\]",
    ),
    "pool rows of other lengths": (make("device_locs", narrow(9)), "device_locs", r"\[2, 9\]"),
    "fewer request slots": (
        make("req_pool_indices", lambda t: t[:1]),
        "req_pool_indices",
        r"\[1\].*\[2\]",
    ),
    "fewer lengths": (make("seq_lens", lambda t: t[:1]), "seq_lens", r"\[1\].*\[2\]"),
    "two numbers of rows": (make("num_real_reqs", lambda t: t.repeat(2)), "num_real_reqs", ""),
    "scalar number of rows": (make("num_real_reqs", lambda t: t[0]), "num_real_reqs", r"\[\]"),
    "narrow plan": (make("miss_src", narrow(2)), "miss_src", r"\[2, 2\]"),
    "half a plan": (make("miss_dst", lambda _: None), "miss_src", "miss_dst is None.*all three"),
    "counts alone": (
        lambda call: call.update(miss_src=None, miss_dst=None),
        "miss_src",
        "miss_count is given",
    ),
    # strides
    "transposed tokens": (
        make("top_k_tokens", lambda t: t.t().contiguous().t()),
        "top_k_tokens",
        "stride 2",
    ),
    "entries with gaps": (
        make("lru_slots", lambda t: torch.repeat_interleave(t, 2, dim=1)[:, ::2]),
        "lru_slots",
        "stride 2",
    ),
    "expanded residents": (
        make("device_buffer_tokens", lambda t: t[:1].expand(2, 5)),
        "device_buffer_tokens",
        "stride 0",
    ),
    "expanded counts": (make("miss_count", lambda t: t[:1].expand(2)), "miss_count", "stride 0"),
    # memory that is written and shared
    "output over tokens": (alias("top_k_device_locs", "top_k_tokens"), "top_k_device_locs", ""),
    "plan over plan": (alias("miss_dst", "top_k_device_locs"), "miss_dst", "top_k_device_locs"),
    "residents over rows": (
        alias("device_buffer_locs", "device_buffer_tokens"),
        "device_buffer_locs",
        "device_buffer_tokens",
    ),
    "counts inside lengths": (
        make("seq_lens", lambda t: t.int()),
        "miss_count",
        "seq_lens",
    ),
    "tokens in the device buffer": (
        alias("top_k_tokens", "device_buffer", lambda t: t.view(INT32).view(-1)[:6].view(2, 3)),
        "top_k_tokens",
        r"device_buffer\[0\]",
    ),
    "output in the host cache": (
        alias("top_k_device_locs", "host_cache", lambda t: t.view(INT32).view(-1)[:6].view(2, 3)),
        "top_k_device_locs",
        r"host_cache\[0\]",
    ),
    "one pool for both": (
        alias("host_cache", "device_buffer", lambda t: [t]),
        r"host_cache\[0\]",
        "",
    ),
    "one buffer twice": (
        lambda call: call.update(
            device_buffer=call["device_buffer"] * 2, host_cache=call["host_cache"] * 2
        ),
        r"device_buffer\[1\]",
        r"device_buffer\[0\]",
    ),
    # buffers
    "fewer host buffers": (make("host_cache", lambda _: []), "host_cache", "0 tensors"),
    "dtypes differ": (
        make("host_cache", lambda ts: [ts[0].half()]),
        r"host_cache\[0\]",
        r"float16 but device_buffer\[0\]",
    ),
    "row shapes differ": (
        make("host_cache", lambda ts: [ts[0][..., :4]]),
        r"host_cache\[0\]",
        r"\[1, 4\] but device_buffer",
    ),
    "transposed host rows": (
        lambda call: call.update(
            host_cache=[call["host_cache"][0].view(32, 4, 2).transpose(1, 2)],
            device_buffer=[call["device_buffer"][0].view(128, 2, 4)],
        ),
        r"host_cache\[0\]",
        "",
    ),
    "expanded device buffer": (
        make("device_buffer", lambda ts: [ts[0][:1].expand(128, 1, 8)]),
        r"device_buffer\[0\]",
        "stride 0",
    ),
    "empty host cache": (
        make("host_cache", lambda ts: [ts[0][:0]]),
        r"host_cache\[0\]",
        "no token slot",
    ),
    # values
    "more real rows than rows": (put("num_real_reqs", 0, 3), r"num_real_reqs\[0\]", "0 to 2"),
    "fewer than no real rows": (put("num_real_reqs", 0, -1), r"num_real_reqs\[0\]", "-1"),
    "request beyond the slots": (put("req_pool_indices", 1, 2), r"req_pool_indices\[1\]", "0 to 1"),
    "negative request": (put("req_pool_indices", 0, -1), r"req_pool_indices\[0\]", "-1"),
    "one hot buffer twice": (
        put("req_pool_indices", 1, 0),
        r"req_pool_indices\[1\]",
        r"as req_pool_indices\[0\]",
    ),
    "negative length": (put("seq_lens", 1, -1), r"seq_lens\[1\]", "-1"),
    "token beyond the length": (put("top_k_tokens", (1, 2), 8), r"top_k_tokens\[1, 2\]", "0 to 7"),
    "token beyond the host locations": (
        lambda call: (put("seq_lens", 1, 99)(call), put("top_k_tokens", (1, 0), 16)(call)),
        r"top_k_tokens\[1, 0\]",
        "0 to 15.*16 columns",
    ),
    "token beyond a short length": (
        no_pool_locs(
            lambda call: (put("seq_lens", 1, 3)(call), put("top_k_tokens", (1, 2), 3)(call))
        ),
        r"top_k_tokens\[1, 2\]",
        "0 to 2",
    ),
    "host row beyond the pool": (
        put("host_cache_locs", (0, 6), 32),
        r"host_cache_locs\[0, 6\]",
        r"0 to 31 \(host_cache\[0\] has 32 token slots\)",
    ),
    "no host row": (put("host_cache_locs", (1, 0), -1), r"host_cache_locs\[1, 0\]", "-1"),
    "device row of a hit": (
        put("device_buffer_locs", (0, 1), 128),
        r"device_buffer_locs\[0, 1\]",
        r"0 to 127 \(device_buffer\[0\] has 128 token slots\)",
    ),
    "device row of an evicted slot": (
        put("device_buffer_locs", (0, 0), -1),
        r"device_buffer_locs\[0, 0\]",
        "-1",
    ),
    "device row of the newest token": (
        put("device_buffer_locs", (0, 4), 9999),
        r"device_buffer_locs\[0, 4\]",
        "9999",
    ),
    "device row of a short request": (
        no_pool_locs(
            lambda call: (put("seq_lens", 1, 4)(call), put("device_buffer_locs", (1, 2), -1)(call))
        ),
        r"device_buffer_locs\[1, 2\]",
        "-1",
    ),
    "pool row beyond the device buffer": (
        put("device_locs", (1, 3), 128),
        r"device_locs\[1, 3\]",
        "0 to 127",
    ),
    "slot beyond the hot buffer": (put("lru_slots", (1, 3), 4), r"lru_slots\[1, 3\]", "0 to 3"),
    "negative slot": (put("lru_slots", (1, 0), -1), r"lru_slots\[1, 0\]", "-1"),
    "slot twice": (put("lru_slots", (1, 2), 1), r"lru_slots\[1, 2\]", "each once"),
    "resident token twice": (
        put("device_buffer_tokens", (0, 3), 4),
        r"device_buffer_tokens\[0, 3\]",
        r"as device_buffer_tokens\[0, 1\]",
    ),
}
# An error in the second request must not let the first one through.
LIKE_COUNTS = {"counts inside lengths": lambda call: call.update(miss_count=call["seq_lens"])}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_changes_nothing(name):
    change, argument, got = BAD[name]
    call = good_call()
    change(call)
    LIKE_COUNTS.get(name, lambda call: None)(call)
    with refused(argument, got=got, op="swap_in", unchanged=tensors_of(call)):
        sgl_kvio.swap_in(**call)


def test_the_call_that_bad_input_is_made_from_is_good():
    call = good_call()
    sgl_kvio.swap_in(**call)
    assert call["top_k_device_locs"][0].tolist() == [7, 9, 11]
    assert call["miss_count"].tolist() == [1, 2]


def test_what_a_call_has_no_use_for_may_be_anything():
    world = small_world()
    world.host_locs[0] = -1
    world.host_locs[0, 6] = 6
    world.locs[0, 2:4] = -1
    world.tokens[0, 4] = 4
    assert query(world, [4, 6, 7]) == [[7, 9, 11]]


def test_requests_that_share_a_slot_are_fine_while_they_only_look_up():
    world = small_world((0, 1, 2, 3))
    world.requests, world.seq_lens = i32([0, 0, 0]), i32([3, 9, 4])
    assert query(world, [2, 0], [4, 8], [3, 1]) == [[3, 9], [9, 11], [5, 7]]


def good_plan():
    return {
        "host_cache": [torch.randn(16, 1, 8)],
        "device_buffer": [torch.randn(8, 1, 8)],
        "miss_src": torch.tensor([[3, 15, 99], [0, 99, 99]]),
        "miss_dst": i32([[7, 0, -1], [4, -1, -1]]),
        "miss_count": i32([2, 1]),
        "num_real_reqs": i32([2]),
    }


BAD_PLANS = {
    "int32 sources": (make("miss_src", torch.Tensor.int), "miss_src", "int32"),
    "int64 destinations": (make("miss_dst", torch.Tensor.long), "miss_dst", "int64"),
    "int64 counts": (make("miss_count", torch.Tensor.long), "miss_count", "int64"),
    "int64 number of rows": (make("num_real_reqs", torch.Tensor.long), "num_real_reqs", "int64"),
    "narrow destinations": (make("miss_dst", narrow(2)), "miss_dst", r"\[2, 2\].*\[2, 3\]"),
    "fewer counts": (make("miss_count", lambda t: t[:1]), "miss_count", r"\[1\].*\[2\]"),
    "fewer buffers": (make("device_buffer", lambda _: []), "host_cache", "0"),
    "plan in the device buffer": (
        alias("miss_dst", "device_buffer", lambda t: t.view(INT32).view(-1)[:6].view(2, 3)),
        "miss_dst",
        r"device_buffer\[0\]",
    ),
    "more real rows than rows": (put("num_real_reqs", 0, 3), r"num_real_reqs\[0\]", "0 to 2"),
    "count beyond the columns": (put("miss_count", 1, 4), r"miss_count\[1\]", "0 to 3"),
    "negative count": (put("miss_count", 0, -1), r"miss_count\[0\]", "-1"),
    "source beyond the pool": (put("miss_src", (1, 0), 16), r"miss_src\[1, 0\]", "0 to 15"),
    "negative destination": (put("miss_dst", (0, 1), -1), r"miss_dst\[0, 1\]", "0 to 7"),
    "negative num_blocks": (make("num_blocks", lambda _: -1), "num_blocks", "-1"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_raises_and_moves_nothing(name):
    change, argument, got = BAD_PLANS[name]
    call = {**good_plan(), "num_blocks": 0}
    change(call)
    with refused(argument, got=got, op="copy_planned", unchanged=tensors_of(call)):
        sgl_kvio.copy_planned(**call)


def test_what_lies_behind_a_count_is_not_read():
    call = good_plan()
    sgl_kvio.copy_planned(**call)
    for to, frm in ((7, 3), (0, 15), (4, 0)):
        assert_same_bytes(call["device_buffer"][0][to], call["host_cache"][0][frm], "row")


@pytest.mark.parametrize("name", [name for name in good_call() if name != "hot_buffer_size"])
def test_a_meta_tensor_among_real_ones_is_refused(name):
    call = good_call()
    value = call[name]
    call[name] = [t.to("meta") for t in value] if isinstance(value, list) else value.to("meta")
    with pytest.raises(RuntimeError, match="kvio::swap_in: some arguments are meta tensors"):
        sgl_kvio.swap_in(**call)
