"""csrc/gpu/wave_copy.h on a GPU: the source by which ROCm builds move rows, over the cases by which
tests/native emulates it on the CPU.

The kernels are in a library of their own (tests/native/wave_copy_library.cu), which CMake's target
kvio_wave_copy builds on any machine with the compiler: build/libkvio_wave_copy.so, or what
KVIO_WAVE_COPY_LIB names. On CUDA a lane group is a warp, a part of one, or 64 threads of two.

A launch copies thousands of rows. They lie in two matrices of bytes, a row in each line, so that
what a copy must leave behind is an expression over whole matrices; all bytes beside rows are
canaries.
"""

import ctypes
import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import sgl_kvio

ROOT = Path(__file__).parents[2]
LIBRARY = Path(os.environ.get("KVIO_WAVE_COPY_LIB") or ROOT / "build" / "libkvio_wave_copy.so")
LONGEST = 4700
ROW_FIVE = 5140  # row 5 of rows of 1,028 bytes: no multiple of 8
CANARIES = 64  # behind a row, at least
MATRIX_BYTES = 1 << 25
WAVES = (32, 64)
PARTS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def library():
    if not LIBRARY.is_file():
        pytest.skip(
            f"no {LIBRARY}: on a machine with nvcc, after setup.py build_ext, `cmake --build"
            " build/cmake-* --target kvio_wave_copy` makes build/libkvio_wave_copy.so;"
            " KVIO_WAVE_COPY_LIB names another place"
        )
    loaded = ctypes.CDLL(str(LIBRARY))
    table, count, stream = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    loaded.kvio_wave_copy_each.argtypes = (ctypes.c_int, table, count, stream)
    loaded.kvio_wave_copy_several.argtypes = (ctypes.c_int, table, count, stream)
    loaded.kvio_wave_copy_waves.argtypes = (ctypes.c_int, table, count, table, stream)
    loaded.kvio_wave_copy_error.restype = ctypes.c_char_p
    return loaded


@dataclass(frozen=True)
class Row:
    """Its bytes, and where it begins on both sides, counted from a multiple of 128. One that is not
    `wanted` has no destination."""

    bytes: int
    dst: int
    src: int
    wanted: bool = True


@dataclass(frozen=True)
class Group:
    """Rows of one size that are moved together; in the loop over a wave's rows by `lanes` each."""

    rows: tuple[Row, ...]
    lanes: int = 0

    @property
    def line_bytes(self):
        ends = (max(row.dst, row.src) + row.bytes for row in self.rows)
        return (max(ends, default=0) + CANARIES + 127) // 128 * 128


# ---- the cases, as wave_copy_rows.cpp and wave_copy_units.cpp have them


def chosen_sizes():
    """Both sides of each gate and of each count of loads in flight, with all remainders of a word;
    sizes that engines have."""
    sizes = {1, 2, 3, 4, 20, 512, 576, 656, 1024, 1028, 1032, 1040, 1152, 2304, 4608, LONGEST}
    for edge in (256, 512, 1024, 1536, 2048, 4096):
        sizes.update(range(edge - 9, edge + 10))
    sizes.update(range(5, 80, 5))
    return sorted(sizes)


def every_row(rng):
    """All pairs of alignments for the chosen sizes, several pairs for every size."""
    for size in chosen_sizes():
        for pair in range(256):
            yield Row(size, pair // 16, pair % 16)
        for dst in range(16):
            yield Row(size, dst, ROW_FIVE)
    for size in range(LONGEST + 1):
        yield Row(size, 0, 0)
        yield Row(size, 8 * rng.randrange(2), 8 * rng.randrange(2))
        yield Row(size, 4 * rng.randrange(4), 4 * rng.randrange(4))
        # In 256 sizes that follow each other, each pair with each remainder of 16 bytes.
        for dst in range(16):
            yield Row(size, dst, (dst + size // 16) % 16)


def few_rows(rng):
    for size in chosen_sizes():
        yield Row(size, 0, 0)
        yield Row(size, rng.randrange(16), ROW_FIVE)
        for _ in range(8):
            yield Row(size, rng.randrange(16), rng.randrange(16))
    for size in range(4, LONGEST, 7):
        yield Row(size, rng.randrange(16), rng.randrange(16))


def some_rows(rng, size, count, alignment):
    """At multiples of `alignment`; often some of them are not wanted."""
    unwanted = rng.choice((0, 0, 1, 2, 3))

    def begin():
        return alignment * rng.randrange(32 // alignment)

    return tuple(Row(size, begin(), begin(), rng.randrange(3) >= unwanted) for _ in range(count))


def sets_of_rows(rng, at_once):
    for size in [*chosen_sizes(), *range(4, LONGEST, 7)]:
        for _ in range(8):
            yield Group(some_rows(rng, size, at_once, alignment=16))


def rows_of_waves(rng, alignment, wave_lanes, at_once):
    """For lane groups of every size: no row, one, as many as they move at once and around that, a
    row a lane."""
    for size in chosen_sizes():
        for lanes in (1 << n for n in range(wave_lanes.bit_length())):
            groups = wave_lanes // lanes
            edges = {0, 1, groups, groups * at_once, wave_lanes}
            for count in sorted({edge + by for edge in edges for by in (-1, 0, 1)}):
                if 0 <= count <= wave_lanes:
                    yield Group(some_rows(rng, size, count, alignment), lanes)


# ---- running and judging them


def parts_of(groups):
    """The groups in order of their lines' length, cut where their rows fill a matrix."""
    part, lines = [], 0
    for group in sorted(groups, key=lambda group: group.line_bytes):
        part.append(group)
        lines += len(group.rows)
        if lines * group.line_bytes >= MATRIX_BYTES:
            yield part
            part, lines = [], 0
    if part:
        yield part


def put(matrix, place):
    return matrix.cpu().pin_memory() if place == "h" else matrix.clone()


def check_part(part, launch, direction):
    """Copies the rows of a part by `launch(table of rows)`, and compares every byte of both
    matrices; returns how many rows were wanted."""
    rows = [row for group in part for row in group.rows]
    if not rows:
        return 0
    width = max(group.line_bytes for group in part)
    shape = (2, len(rows), width)
    generator = torch.Generator("cuda").manual_seed(len(rows))
    before, source = torch.randint(
        256, shape, dtype=torch.uint8, device="cuda", generator=generator
    )
    dst, src = put(before, direction[2]), put(source, direction[0])

    facts = [(row.bytes, row.dst, row.src, row.wanted) for row in rows]
    bytes_, to, of, wanted = torch.tensor(facts, device="cuda").T
    line = torch.arange(len(rows), device="cuda") * width
    places = (
        (sgl_kvio.device_pointer(dst, 0) + line + to) * wanted,
        sgl_kvio.device_pointer(src, 0) + line + of,
        bytes_,
    )
    launch(torch.stack(places, dim=1).contiguous())
    torch.cuda.synchronize()

    in_row = torch.arange(width, device="cuda") - to[:, None]
    moved = (in_row >= 0) & (in_row < (bytes_ * wanted)[:, None])
    want = source.gather(1, (in_row + of[:, None]).clamp(0, width - 1))
    want = torch.where(moved, want, before)
    for got, right, what in ((dst, want, "destination"), (src, source, "source")):
        wrong = (got.cuda() != right).any(dim=1).nonzero().flatten().tolist()
        assert not wrong, (
            f"{what}: {len(wrong)} of {len(rows)} lines, the first is {rows[wrong[0]]}"
        )
    return int(wanted.sum())


def check(groups, launch, direction="d2d"):
    """`launch(table, part)`; returns how many rows were copied."""
    copied = 0
    for part in parts_of(groups):
        copied += check_part(part, lambda table, part=part: launch(table, part), direction)
    return copied


def done(library, error):
    assert error == 0, library.kvio_wave_copy_error(error).decode()


def stream():
    return torch.cuda.current_stream().cuda_stream


def each_by(library, lanes):
    def launch(table, _):
        done(library, library.kvio_wave_copy_each(lanes, table.data_ptr(), len(table), stream()))

    return launch


@pytest.mark.parametrize("lanes", WAVES)
def test_any_row_at_any_alignment_is_copied(library, lanes):
    rows = [Group((row,)) for row in every_row(random.Random(lanes))]
    assert check(rows, each_by(library, lanes)) > 120_000


@pytest.mark.parametrize("lanes", WAVES)
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_rows_in_page_locked_memory_are_copied(library, direction, lanes):
    rows = [Group((row,)) for row in few_rows(random.Random(lanes))]
    assert check(rows, each_by(library, lanes), direction) > 1_500


@pytest.mark.parametrize("lanes", PARTS)
def test_rows_are_copied_by_parts_of_a_wave(library, lanes):
    rng = random.Random(lanes)
    rows = [
        Group((Row(size, *begin),))
        for size in range(1301)
        for begin in ((0, 0), (rng.randrange(16), rng.randrange(16)))
    ]
    assert check(rows, each_by(library, lanes)) == 2_602


@pytest.mark.parametrize("lanes", WAVES)
@pytest.mark.parametrize("direction", ["d2d", "h2d", "d2h"])
def test_several_rows_at_once_are_copied_and_those_left_out_are_not(library, direction, lanes):
    def launch(table, _):
        table_rows = (table.data_ptr(), len(table))
        done(library, library.kvio_wave_copy_several(lanes, *table_rows, stream()))

    sets = sets_of_rows(random.Random(lanes), library.kvio_wave_copy_rows_at_once())
    assert check(sets, launch, direction) > 10_000


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_rows_of_a_wave_are_copied_by_lane_groups_of_any_size(library, alignment):
    """Lanes tell each other the addresses of their rows; lanes without a row hold bad ones."""

    def launch(table, part):
        waves, first = [], 0
        for group in part:
            waves.append((first, len(group.rows), group.lanes))
            first += len(group.rows)
        waves = torch.tensor(waves, device="cuda")
        arguments = (waves.data_ptr(), len(waves), table.data_ptr(), stream())
        done(library, library.kvio_wave_copy_waves(alignment, *arguments))
        torch.cuda.synchronize()  # the table of waves must live as long as the kernel

    at_once = library.kvio_wave_copy_rows_at_once() if alignment == 16 else 1
    waves = rows_of_waves(
        random.Random(alignment), alignment, library.kvio_wave_copy_wave_lanes(), at_once
    )
    assert check(waves, launch) > 30_000
