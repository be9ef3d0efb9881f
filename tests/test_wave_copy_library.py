"""CMake's target kvio_wave_copy, whose kernels tests/gpu/test_wave_copy.py runs: it builds and
loads without a GPU, so that it can be built anywhere and carried to one."""

import ctypes
import shutil
import subprocess

import pytest
from test_rocm_build import ROOT, configure, require_hip, tool

pytestmark = pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").exists(), reason="not run from a source tree"
)


@pytest.mark.parametrize(("backend", "wave_lanes"), [("cuda", 32), ("rocm", 64)])
def test_it_builds_and_loads_without_a_gpu(tmp_path, backend, wave_lanes):
    if backend == "rocm":
        require_hip()
    elif shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    options = {
        "KVIO_BACKEND": backend,
        "KVIO_CUDA_ARCHS": "90",
        "KVIO_ROCM_ARCHS": "gfx942",
        "KVIO_WAVE_COPY_DIR": tmp_path,
    }
    done = configure(tmp_path, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    command = [tool("cmake"), "--build", tmp_path / "build", "--target", "kvio_wave_copy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("sgl_kvio/*")), "the extension was not asked for"

    library = ctypes.CDLL(str(tmp_path / "libkvio_wave_copy.so"))
    assert library.kvio_wave_copy_wave_lanes() == wave_lanes
    invalid = library.kvio_wave_copy_each(3, None, 0, None)
    assert invalid == library.kvio_wave_copy_several(16, None, 0, None) != 0
    assert invalid == library.kvio_wave_copy_waves(3, None, 0, None, None)
    command = [tool("readelf"), "-d", tmp_path / "libkvio_wave_copy.so"]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "amdhip" not in needed
    assert "cuda" not in needed
