#!/usr/bin/env bash
# On a machine with an AMD GPU: builds this tree for ROCm, tests and measures it, in one go. Written without such a
# machine: the steps build and compiled have been run, the others have not on AMD hardware.
#
#   bench/rocm_check.sh OUTDIR [STEP...]    default: build compiled doctor tests demo calibrate full swap_in
#
#   build                 sgl_kvio/_C.abi3.so of this tree and build/libkvio_wave_copy.so for its tests, by hipcc of
#                         ROCm 6 or clang 19; KVIO_ROCM_ARCHS narrows it
#   compiled              without a GPU: the file's code objects and instructions, the emulated row copy, the plans
#   doctor                what torch, the library and the GPU say of themselves
#   calibrate             the rates of this machine, to OUTDIR/rates.json; the built-in ones are an H200's
#   tests demo full swap_in   and every other step but the -targets, which are an H200's: of bench/gpu_check.sh
#
# Needs torch for ROCm in this Python, setuptools, ninja and cmake, and what pyproject.toml lists under test and demo.
# Logs and results go to OUTDIR. Exit status 1 when a step failed. If you run this: OUTDIR is what a bug report wants.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${1:?usage: bench/rocm_check.sh OUTDIR [STEP...]}
shift
steps=("$@")
((${#steps[@]})) || steps=(build compiled doctor tests demo calibrate full swap_in)
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
. bench/steps.sh

# Without an AMD GPU the steps below would skip their tests, or measure something else.
require_gpu() {
    python3 - <<'PY' && return
import sys, torch
if torch.version.hip is None or not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no AMD GPU; these steps need torch for ROCm and a GPU")
import sgl_kvio
if (backend := sgl_kvio.capabilities()["backend"]) != "rocm":
    sys.exit(f"sgl_kvio is built for {backend}; these steps need the step build, which KVIO_BACKEND=rocm makes")
PY
    exit 1
}

for step in "${steps[@]}"; do
    case $step in
    build)
        KVIO_BACKEND=rocm run build 3 python3 setup.py build_ext --inplace || exit 1
        # The wave copy by itself, which the step tests runs as well.
        made=build/cmake-$(python3 -c "import sysconfig; print(sysconfig.get_platform())")
        run wave_copy 3 cmake --build "$made" --target kvio_wave_copy || exit 1
        ;;
    compiled)
        run compiled 40 python3 -m pytest tests/test_rocm_build.py tests/test_wave_copy_library.py tests/native \
            -q -rs -p no:cacheprovider
        ;;
    doctor) run doctor 30 python3 -m sgl_kvio doctor ;;
    calibrate)
        require_gpu
        run calibrate 30 python3 -m sgl_kvio calibrate --out "$out/rates.json"
        ;;
    *)
        require_gpu
        bench/gpu_check.sh "$out" "$step" || failed=1
        ;;
    esac
done
exit "$failed"
