"""The bridge is built once, and only if this machine can."""

import pytest
from native import build


def test_unchanged_sources_are_not_compiled_again(kvio, monkeypatch):
    folder = build.Path(kvio.__file__).parent.parent

    def refuse(command):
        raise AssertionError(f"compiled again: {command}")

    monkeypatch.setattr(build, "run", refuse)
    assert str(build.build(folder)) == kvio.__file__


def test_a_machine_without_a_compiler_is_told_apart_from_code_that_does_not_compile(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with pytest.raises(build.CannotBuildError, match="no-such-compiler is not on the PATH"):
        build.build(tmp_path)
