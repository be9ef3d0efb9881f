"""Orders that csrc/gpu/staged.cpp must keep, on streams of our own: see staged_streams.cpp."""

import subprocess

import pytest
from native import gpu_program

SEEDS = {"cuda": 3000, "rocm": 300}  # the same code in other names


@pytest.mark.parametrize("platform", gpu_program.PLATFORMS)
def test_no_interleaving_of_the_streams_moves_wrong_bytes_or_leaves_copies_behind(
    platform, tmp_path
):
    program = gpu_program.build_program(
        tmp_path, platform, "staged_streams", ("staged", "side_stream", "copy_engine")
    )
    done = subprocess.run([program, str(SEEDS[platform])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
