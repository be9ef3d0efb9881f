"""The GPU's way to resolve a swap-in, on the CPU: threads in any order, against the oracle.

The copying of rows is torch's here; what is tested is which rows go where, and the state.
"""

import random

import pytest
import torch

import sgl_kvio
import swap_in_cases

# Threads of a CTA.
TEAMS = (1, 3, 32, 128, 257)
SHARED_MEMORY = 227 << 10
STATE = ("host_cache_locs", "device_buffer_locs", "lru_slots")
ARGUMENTS = ("top_k_tokens", *STATE, "", "device_locs")


def address(tensor):
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0))


class Resolver:
    """Called like `sgl_kvio.swap_in`, by the steps of the kernel."""

    def __init__(self, kvio, team, seed=0, most_bytes=SHARED_MEMORY):
        self.kvio = kvio
        self.threads = team
        self.most_bytes = most_bytes
        self.random = random.Random(seed)
        self.faults = set()

    def __call__(self, **given):
        batch, top_k = given["top_k_device_locs"].shape
        plan = [
            given.get("miss_src", torch.empty(batch, top_k, dtype=torch.int64)),
            given.get("miss_dst", torch.empty(batch, top_k, dtype=torch.int32)),
            given.get("miss_count", torch.empty(batch, dtype=torch.int32)),
        ]
        real = int(given["num_real_reqs"][0])
        given["top_k_device_locs"][real:] = -1
        plan[2][real:] = 0
        for b in range(real):
            if not self.exists(given, b):
                given["top_k_device_locs"][b] = -1
                plan[2][b] = 0
                continue
            moves = self.resolve(given, plan, b)
            if not given.get("skip_io", False):
                self.copy(given, moves)

    def exists(self, given, b):
        """As the kernel does before the first step."""
        request = int(given["req_pool_indices"][b])
        if 0 <= request < len(given["device_buffer_tokens"]):
            return True
        self.faults.add(("req_pool_indices", (b,), request))
        return False

    def resolve(self, given, plan, b):
        hosts, devices = self.pool_slots(given)
        device_locs = given.get("device_locs")
        moves, faults = self.kvio.resolve_swap_in_row(
            top_k_tokens=address(given["top_k_tokens"]),
            tokens=address(given["device_buffer_tokens"]),
            locs=address(given["device_buffer_locs"]),
            host_locs=address(given["host_cache_locs"]),
            wide_host_locs=given["host_cache_locs"].dtype == torch.int64,
            lru=address(given["lru_slots"]),
            out=address(given["top_k_device_locs"]),
            device_locs=address(device_locs),
            miss_src=address(plan[0]),
            miss_dst=address(plan[1]),
            miss_count=address(plan[2]),
            host_slots=hosts,
            device_slots=devices,
            max_len=given["host_cache_locs"].shape[1],
            top_k=given["top_k_tokens"].shape[1],
            hot_slots=given["hot_buffer_size"],
            batch_row=b,
            request=int(given["req_pool_indices"][b]),
            seq_len=int(given["seq_lens"][b]),
            records=True,
            threads=self.threads,
            most_bytes=self.most_bytes,
            seed=self.random.getrandbits(32),
        )
        self.faults |= {
            (ARGUMENTS[argument], (position >> 32, position & 0xFFFFFFFF), value)
            for argument, position, value, _ in faults
        }
        return [(src, dst) for src, dst in moves if dst >= 0]

    @staticmethod
    def pool_slots(given):
        return tuple(
            min(v.shape[0] if v.ndim == 3 else v.shape[0] * v.shape[1] for v in given[name])
            for name in ("host_cache", "device_buffer")
        )

    @staticmethod
    def copy(given, moves):
        if not moves:
            return
        frm, to = (torch.tensor(column) for column in zip(*moves, strict=True))
        for host, device in zip(given["host_cache"], given["device_buffer"], strict=True):
            swap_in_cases.put_rows(device, to, swap_in_cases.take_rows(host, frm))


@pytest.mark.parametrize("team", TEAMS, ids=str)
@pytest.mark.parametrize("spec", swap_in_cases.random_specs(12, 7), ids=lambda spec: str(spec.seed))
def test_threads_in_any_order_do_what_the_oracle_does(kvio, spec, team):
    world = swap_in_cases.World(spec)
    resolve = Resolver(kvio, team, spec.seed)
    for _ in range(25):
        world.step(call=resolve)
    assert not resolve.faults


@pytest.mark.parametrize("spec", swap_in_cases.random_specs(20, 8), ids=lambda spec: str(spec.seed))
def test_bad_values_spoil_no_more_than_they_name(kvio, spec, monkeypatch):
    world = swap_in_cases.World(spec)
    resolve = Resolver(kvio, 32, spec.seed)
    monkeypatch.setattr(sgl_kvio, "swap_in", resolve)
    for _ in range(25):
        resolve.faults.clear()
        seen = world.bad_step(raises=False)
        assert resolve.faults == {(name, tuple(at), value) for name, at, value in seen}


def large_call(hot, top_k, length, seed):
    """One request with the sizes that engines use, half of its selection resident."""
    generator = torch.Generator().manual_seed(seed)
    resident = torch.randperm(length - 1, generator=generator)[:hot].to(torch.int32)
    old = resident[torch.randperm(hot, generator=generator)[: top_k // 2]]
    rest = torch.randperm(length, generator=generator)[: top_k - len(old)].to(torch.int32)
    selected = torch.cat([old, rest])[torch.randperm(top_k, generator=generator)]
    locs = torch.randperm(hot + 1, generator=generator).to(torch.int32)
    host_locs = torch.randperm(length, generator=generator)
    order = torch.randperm(hot, generator=generator).to(torch.int16)
    return selected, resident, locs, host_locs, order


@pytest.mark.parametrize("team", [512, 1024], ids=str)
@pytest.mark.parametrize(("hot", "top_k"), [(4096, 2048), (8192, 2048), (32767, 32767), (64, 64)])
def test_sizes_of_engines_and_the_largest_ones(kvio, hot, top_k, team):
    length = 3 * hot
    selected, resident, locs, host_locs, order = large_call(hot, top_k, length, hot)
    call = swap_in_cases.swap_in_oracle.Call(
        [selected.tolist()],
        [resident.tolist()],
        [locs.tolist()],
        [host_locs.tolist()],
        [order.tolist()],
        [0],
        [length],
        hot,
        1,
        length,
        hot + 1,
    )
    want = swap_in_cases.swap_in_oracle.swap_in(call)
    out = torch.full((1, top_k), 123456, dtype=torch.int32)
    given = {
        "top_k_tokens": selected[None],
        "device_buffer_tokens": resident[None].clone(),
        "device_buffer_locs": locs[None],
        "host_cache_locs": host_locs[None],
        "lru_slots": order[None].clone(),
        "top_k_device_locs": out,
        "req_pool_indices": torch.zeros(1, dtype=torch.int64),
        "seq_lens": torch.tensor([length]),
        "num_real_reqs": torch.tensor([1]),
        "hot_buffer_size": hot,
        "host_cache": [torch.empty(length, 1, 1)],
        "device_buffer": [torch.empty(hot + 1, 1, 1)],
        "skip_io": True,
        "miss_src": torch.zeros(1, top_k, dtype=torch.int64),
        "miss_dst": torch.zeros(1, top_k, dtype=torch.int32),
        "miss_count": torch.zeros(1, dtype=torch.int32),
    }
    Resolver(kvio, team)(**given)
    assert out.tolist() == want.locs
    assert given["device_buffer_tokens"].tolist() == want.tokens
    assert given["lru_slots"].tolist() == want.lru
    count = int(given["miss_count"][0])
    moves = zip(given["miss_src"][0, :count], given["miss_dst"][0, :count], strict=True)
    assert [(int(src), int(dst)) for src, dst in moves] == want.misses[0]
