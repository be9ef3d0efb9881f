"""Which calls are moved in host-address order: those it pays for. The moving is in tests/gpu."""

import numpy as np
import pytest


def request_of(kvio, dst, src, *, slots, row_bytes=512, host="src", pitch=None, **options):
    """A call between a host pool and a GPU pool of `slots` rows each; no memory is touched."""
    pitch = pitch or row_bytes
    sides = {
        side: kvio.Tensor(
            1 << 40,
            [slots, 1, row_bytes],
            [pitch if side == host else row_bytes, row_bytes, 1],
            device="cpu" if side == host else "gpu",
        )
        for side in ("dst", "src")
    }
    return kvio.make_transfer_request(
        [sides["dst"]],
        [sides["src"]],
        kvio.Tensor.of_buffer(dst),
        kvio.Tensor.of_buffer(src),
        **options,
    )


# Worth it, or not: 2^23 rows of 512 bytes are 4 GiB.
SLOTS = 1 << 23
COUNT = 16384


def scattered(count=COUNT, slots=SLOTS, run=1):
    starts = np.random.default_rng(1).choice(slots // run, count // run, replace=False)
    return (starts[:, None] * run + np.arange(run)).ravel()


@pytest.mark.parametrize("host", ["dst", "src"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_scattered_short_rows_of_a_large_host_pool_are_worth_it(kvio, host, dtype):
    line, rows = np.arange(COUNT, dtype=dtype), scattered().astype(dtype)
    dst, src = (rows, line) if host == "dst" else (line, rows)
    assert kvio.worth_ordering(request_of(kvio, dst, src, slots=SLOTS, host=host))
    other = "src" if host == "dst" else "dst"
    assert not kvio.worth_ordering(request_of(kvio, dst, src, slots=SLOTS, host=other))


NOT_WORTH = {
    "ascending": np.sort(scattered()),
    "descending": np.sort(scattered())[::-1].copy(),
    "few": scattered(1024),
    "near each other": scattered(slots=1 << 19),
    "in long runs": scattered(run=16),
    "one row": np.zeros(COUNT, np.int64),
}


@pytest.mark.parametrize("name", NOT_WORTH)
def test_rows_that_translation_does_not_hurt_are_left_alone(kvio, name):
    src = NOT_WORTH[name]
    assert not kvio.worth_ordering(request_of(kvio, np.arange(len(src)), src, slots=SLOTS))


@pytest.mark.parametrize("count", [COUNT, 8 * COUNT])
def test_several_requests_each_in_order_are_still_worth_it(kvio, count):
    src = np.concatenate([np.sort(part) for part in scattered(count).reshape(8, -1)])
    assert kvio.worth_ordering(request_of(kvio, np.arange(count), src, slots=SLOTS))


@pytest.mark.parametrize("count", [COUNT + 1, 3 * COUNT + 7, 131_072])
def test_long_lists_are_judged_by_parts_of_them(kvio, count):
    line, rows = np.arange(count), scattered(count)
    long_runs = np.resize(scattered(16 * (count // 16), run=16), count)
    assert kvio.worth_ordering(request_of(kvio, line, rows, slots=SLOTS))
    for calm in (np.sort(rows), np.sort(rows)[::-1].copy(), long_runs):
        assert not kvio.worth_ordering(request_of(kvio, line, calm, slots=SLOTS))


def test_rows_consecutive_on_the_host_alone_are_short_runs(kvio):
    """The GPU side breaks every run, so the kernel moves single rows."""
    src = scattered(run=16)
    request = request_of(kvio, np.arange(COUNT)[::-1].copy(), src, slots=SLOTS)
    assert kvio.worth_ordering(request)


def test_long_rows_and_small_pools_are_left_alone_and_a_wide_pitch_counts(kvio):
    line = np.arange(COUNT)
    rows = scattered(slots=1 << 20)
    assert not kvio.worth_ordering(request_of(kvio, line, rows, slots=1 << 20, row_bytes=4096))
    assert not kvio.worth_ordering(request_of(kvio, line, rows, slots=1 << 20))
    assert kvio.worth_ordering(request_of(kvio, line, rows, slots=1 << 20, pitch=16384))


def test_the_numbers_come_from_the_policy(kvio):
    policy = kvio.OrderPolicy()
    request = request_of(kvio, np.arange(COUNT), scattered(), slots=SLOTS)
    assert kvio.worth_ordering(request, policy=policy)
    for name in ("span_bytes", "indices", "sweeps"):
        strict = kvio.OrderPolicy()
        setattr(strict, name, 1 << 60)
        assert not kvio.worth_ordering(request, policy=strict), name
    strict = kvio.OrderPolicy()
    strict.run_bytes = 512
    assert not kvio.worth_ordering(request, policy=strict)


def test_nothing_to_move_is_not_worth_ordering(kvio):
    none = np.empty(0, np.int64)
    policy = kvio.OrderPolicy()
    policy.indices = 0
    request = request_of(kvio, none, none, slots=SLOTS)
    assert not kvio.worth_ordering(request, policy=policy)


@pytest.mark.parametrize(
    ("change", "worth"),
    [
        ({}, True),
        ({"host": "dst"}, True),
        ({"page_size": 64}, False),  # a promise of runs
        ({"slots": 1 << 21}, False),  # 1 GiB
        ({"row_bytes": 4096}, False),
        ({"count": 60_000}, False),  # 30 MB
    ],
)
def test_rows_that_only_the_gpu_knows_are_ordered_in_large_calls_alone(kvio, change, worth):
    options = {"slots": 5 << 20, "count": 70_000, **change}
    at = np.arange(options.pop("count"))
    assert kvio.worth_ordering_unseen(request_of(kvio, at, at, **options)) is worth
