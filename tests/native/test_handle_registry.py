"""Handles from many threads, also under ThreadSanitizer: see handle_threads.cpp. What their errors
say is in tests/test_handles.py."""

import subprocess

import pytest
from native import build

FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{build.CSRC}")


def ran(folder, source, *flags):
    program = folder / source.stem
    try:
        build.run([*build.compiler(), *FLAGS, *flags, str(source), "-o", str(program)])
    except build.CannotBuildError as missing:
        pytest.skip(f"the program cannot be built: {missing}")
    return subprocess.run([program], capture_output=True, text=True, timeout=300)


def test_threads_never_see_a_handle_of_somebody_else_or_half_an_item(tmp_path):
    done = ran(tmp_path, build.HERE / "handle_threads.cpp", "-O2")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_no_two_threads_touch_the_registry_without_an_order(tmp_path):
    flags = ("-O1", "-fsanitize=thread")
    trial = tmp_path / "trial.cpp"
    trial.write_text("int main() {}\n")
    try:
        works = ran(tmp_path, trial, *flags)
    except RuntimeError as missing:
        pytest.skip(f"no ThreadSanitizer here: {missing}")
    if works.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not run here: {works.stderr}")
    done = ran(tmp_path, build.HERE / "handle_threads.cpp", *flags)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
