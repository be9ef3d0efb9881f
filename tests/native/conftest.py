"""`kvio`: the host C++ of this library as a Python module, built once a session."""

import pytest
from native import build


@pytest.fixture(scope="session")
def kvio(request, tmp_path_factory):
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("kvio_native") if cache else tmp_path_factory.mktemp("kvio_native")
    try:
        library = build.build(folder)
    except build.CannotBuildError as missing:
        pytest.skip(f"the native test bridge cannot be built: {missing}")
    return build.load(library)
