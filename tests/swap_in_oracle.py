"""HiSparse swap-in in plain Python: lists of integers in, lists of integers out.

Written from the description of the scheme, one batch row after the other, with no eye to speed.
What a kernel does with a bad value is here too: the entry yields -1, and a fault is noted. (CPU
calls raise instead, before anything changes.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Fault(NamedTuple):
    argument: str
    position: tuple[int, ...]
    value: int


@dataclass
class Call:
    """The integers of a call. `num_real` rows of the batch are real, the others are padding."""

    top_k_tokens: list[list[int]]
    device_buffer_tokens: list[list[int]]
    device_buffer_locs: list[list[int]]
    host_cache_locs: list[list[int]]
    lru_slots: list[list[int]]
    req_pool_indices: list[int]
    seq_lens: list[int]
    hot_buffer_size: int
    num_real: int
    host_slots: int
    device_slots: int
    device_locs: list[list[int]] | None = None


@dataclass
class Outcome:
    locs: list[list[int]]  # top_k_device_locs
    tokens: list[list[int]]  # device_buffer_tokens
    lru: list[list[int]]
    # Of each batch row: host row and device row of every miss, in order. A row outside its pool
    # is recorded and not copied.
    misses: list[list[tuple[int, int]]]
    faults: list[Fault] = field(default_factory=list)


def swap_in(call: Call) -> Outcome:
    outcome = Outcome(
        locs=[[-1] * len(row) for row in call.top_k_tokens],
        tokens=[list(row) for row in call.device_buffer_tokens],
        lru=[list(row) for row in call.lru_slots],
        misses=[[] for _ in call.top_k_tokens],
    )
    for b in range(call.num_real):
        request = call.req_pool_indices[b]
        if not 0 <= request < len(call.device_buffer_tokens):
            outcome.faults.append(Fault("req_pool_indices", (b,), request))
            continue
        if call.device_locs is None and call.seq_lens[b] <= call.hot_buffer_size:
            look_up_short_request(call, outcome, b, request)
        else:
            resolve_long_request(call, outcome, b, request)
    return outcome


def device_row(call: Call, outcome: Outcome, request: int, slot: int) -> int:
    """Where a slot lies, -1 and a fault where that is outside the device buffer."""
    loc = call.device_buffer_locs[request][slot]
    if 0 <= loc < call.device_slots:
        return loc
    outcome.faults.append(Fault("device_buffer_locs", (request, slot), loc))
    return -1


def look_up_short_request(call: Call, outcome: Outcome, b: int, request: int) -> None:
    length = call.seq_lens[b]
    for i, token in enumerate(call.top_k_tokens[b]):
        if i >= length or token < 0:
            continue
        if token >= length:
            outcome.faults.append(Fault("top_k_tokens", (b, i), token))
            continue
        outcome.locs[b][i] = device_row(call, outcome, request, token)


def resolve_long_request(call: Call, outcome: Outcome, b: int, request: int) -> None:
    length = call.seq_lens[b]
    slots = range(call.hot_buffer_size)
    max_len = len(call.host_cache_locs[request])
    resident = {outcome.tokens[request][s]: s for s in slots if outcome.tokens[request][s] >= 0}
    old_order = outcome.lru[request]

    # Which tokens need a slot of the hot buffer, and at which entries.
    entries: dict[int, list[int]] = {}
    for i, token in enumerate(call.top_k_tokens[b]):
        if token < 0:
            continue
        if token >= length or token >= max_len:
            outcome.faults.append(Fault("top_k_tokens", (b, i), token))
            continue
        passed = -1 if call.device_locs is None else call.device_locs[request][token]
        if passed >= call.device_slots:
            outcome.faults.append(Fault("device_locs", (request, token), passed))
        elif passed >= 0:
            outcome.locs[b][i] = passed
        elif token == length - 1:
            outcome.locs[b][i] = device_row(call, outcome, request, call.hot_buffer_size)
        else:
            entries.setdefault(token, []).append(i)

    hits = {resident[token]: token for token in entries if token in resident}
    evictable = [slot for slot in old_order if slot not in hits]
    for slot, token in hits.items():
        row = device_row(call, outcome, request, slot)
        for i in entries[token]:
            outcome.locs[b][i] = row

    taken = []
    for token in entries:
        if token in resident:
            continue
        host_row = call.host_cache_locs[request][token]
        if not 0 <= host_row < call.host_slots:
            outcome.faults.append(Fault("host_cache_locs", (request, token), host_row))
            continue  # takes nothing
        slot = evictable[len(taken)]
        taken.append(slot)
        outcome.misses[b].append((host_row, call.device_buffer_locs[request][slot]))
        row = device_row(call, outcome, request, slot)
        outcome.tokens[request][slot] = token if row >= 0 else -1
        for i in entries[token]:
            outcome.locs[b][i] = row

    unused = [slot for slot in evictable if slot not in taken]
    outcome.lru[request] = unused + taken + [slot for slot in old_order if slot in hits]
