"""Host memory has another address on the device: see host_aliases.cpp."""

import functools
import subprocess

import pytest
from native import gpu_program

CASES = (
    "own_registration",
    "sub_range_of_a_foreign_registration",
    "across_two_of_ours",
    "across_two_of_others",
    "chunks_whose_aliases_do_not_follow_each_other",
    "memory_that_is_not_page_locked",
    "unregistered_again",
    "a_whole_request",
    "all_layers_of_a_load",
)
HIP_CASES = ("long_batches", "batches_of_an_unknown_runtime")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    @functools.cache
    def built(platform):
        sources = ("host_memory", "driver_hip") if platform == "rocm" else ("host_memory",)
        folder = tmp_path_factory.mktemp(platform)
        return gpu_program.build_program(folder, platform, "host_aliases", sources)

    return built


def check(program, case):
    done = subprocess.run([program, case], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("platform", gpu_program.PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_addresses_are_those_of_the_device_inside_one_registration(program, platform, case):
    check(program(platform), case)


@pytest.mark.parametrize("case", HIP_CASES)
def test_batches_of_driver_copies_stay_within_what_hip_takes(program, case):
    check(program("rocm"), case)
