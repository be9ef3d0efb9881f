"""swap_in and copy_planned under torch.compile and opcheck: state, plans and rows stay what they
are eagerly. tests/gpu may compile the same functions."""

import shutil

import pytest
import torch
from test_compile import check_compiled

import sgl_kvio

INT32 = torch.int32
HOT, TOP_K, BATCH, MAX_LEN = 6, 4, 3, 20


def make_arguments(device="cpu"):
    """Three requests over a host pool of two layers: long, short, padded."""
    generator = torch.Generator().manual_seed(9)
    resident = torch.full((BATCH, HOT + 1), -1, dtype=INT32)
    resident[0, :HOT] = torch.tensor([1, 4, 2, 5, -1, 9])
    resident[1, :HOT] = torch.arange(HOT)
    pools = torch.randint(1000, (2, 64, 1, 4), generator=generator)
    arguments = {
        "top_k_tokens": torch.tensor([[4, 6, 6, 11], [2, -1, 0, 1], [0, 0, 0, 0]], dtype=INT32),
        "tokens": resident,
        "locs": torch.arange(BATCH * (HOT + 1), dtype=INT32).view(BATCH, HOT + 1),
        "host_locs": torch.arange(BATCH * MAX_LEN).view(BATCH, MAX_LEN),
        "lru": torch.arange(HOT, dtype=torch.int16).repeat(BATCH, 1),
        "host": pools,
        "device": torch.randint(1000, (2, 32, 1, 4), generator=generator),
        "requests": torch.arange(BATCH),
        "seq_lens": torch.tensor([12, 5, 0], dtype=INT32),
        "num_real": torch.tensor([2], dtype=INT32),
    }
    return [tensor.to(device) for tensor in arguments.values()]


def resolve(tokens, state, host, device, requests, seq_lens, num_real, **plan):
    out = torch.zeros_like(tokens)
    resident, locs, host_locs, lru = state
    sgl_kvio.swap_in(
        tokens,
        resident,
        locs,
        host_locs,
        lru,
        host,
        device,
        out,
        requests,
        seq_lens,
        hot_buffer_size=HOT,
        num_real_reqs=num_real,
        **plan,
    )
    return out


def swap_in_and_read(tokens, resident, locs, host_locs, lru, host, device, requests, lens, real):
    """A decode step: the indexer's tokens, the swap-in, attention over what came."""
    state = (resident, locs, host_locs, lru)
    device[0].add_(1)
    out = resolve(tokens + 0, state, host[0], device[0], requests, lens, real)
    rows = device[0][out.clamp(min=0).long()] * (out >= 0)[..., None, None]
    return rows.sum(dim=1)


def swap_in_then_replay(tokens, resident, locs, host_locs, lru, host, device, requests, lens, real):
    """Two layers share one selection: the second one replays the first one's plan."""
    state = (resident, locs, host_locs, lru)
    src = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    dst, count = torch.zeros_like(tokens), torch.zeros_like(tokens[:, 0])
    plan = {"miss_src": src, "miss_dst": dst, "miss_count": count}
    out = resolve(tokens, state, host[0], device[0], requests, lens, real, **plan)
    sgl_kvio.copy_planned(host[1], device[1], src, dst, count, real)
    return device[1].flatten(1).sum(1) + out.sum() + count.sum()


def swap_in_twice(tokens, resident, locs, host_locs, lru, host, device, requests, lens, real):
    """State written by one step is what the next one reads."""
    state = (resident, locs, host_locs, lru)
    passed = torch.full_like(host_locs, -1, dtype=INT32)
    first = resolve(tokens, state, host[0], device[0], requests, lens, real)
    again = resolve(tokens.flip(1), state, host[0], device[0], requests, lens, real)
    third = resolve(tokens, state, host[1], device[1], requests, lens, real, device_locs=passed)
    return torch.stack([first, again, third])


FUNCTIONS = [swap_in_and_read, swap_in_then_replay, swap_in_twice]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_leaves_the_same_state(backend, function):
    check_compiled(function, backend, make_arguments())


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_inductor_keeps_every_effect(function):
    check_compiled(function, "inductor", make_arguments())


def swap_in_samples(device="cpu"):
    """Arguments of kvio::swap_in: each form that the schema allows."""
    tokens, resident, locs, host_locs, lru, host, dev, requests, lens, real = make_arguments(device)
    state, batch = (resident, locs, host_locs, lru), (requests, lens)

    def arguments(hosts, devices):
        return (tokens, *state, hosts, devices, torch.zeros_like(tokens), *batch)

    one = arguments([host[0]], [dev[0]])
    yield one, {"hot_buffer_size": HOT, "num_real_reqs": real}
    yield (
        arguments([host[0].clone(), host[1].clone()], [dev[0].clone(), dev[1].clone()]),
        {
            "hot_buffer_size": HOT,
            "num_real_reqs": real,
            "device_locs": torch.full_like(host_locs, -1, dtype=INT32),
            "miss_src": torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device),
            "miss_dst": torch.zeros_like(tokens),
            "miss_count": torch.zeros(BATCH, dtype=INT32, device=tokens.device),
            "num_blocks": 2,
        },
    )
    yield arguments([], []), {"hot_buffer_size": HOT, "num_real_reqs": real, "skip_io": True}


@pytest.mark.parametrize("sample", list(swap_in_samples()), ids=["plain", "everything", "no rows"])
def test_opcheck_passes_on_swap_in(sample):
    torch.library.opcheck(torch.ops.kvio.swap_in.default, *sample)


@pytest.mark.parametrize("skip_io", [False, True])
def test_opcheck_passes_on_copy_planned(skip_io):
    *_, host, dev, _, _, real = make_arguments()
    plan = (torch.tensor([[3, 1], [60, 0]]), torch.tensor([[7, 1], [9, 0]], dtype=INT32))
    arguments = ([host[0]], [dev[0]], *plan, torch.tensor([2, 1], dtype=INT32), real)
    op = torch.ops.kvio.copy_planned.default
    torch.library.opcheck(op, arguments, {"skip_io": skip_io})
