#!/usr/bin/env bash
# On a machine with a GPU and without a network: installs a wheel into a folder of its own and runs tests/gpu against it,
# from a copy outside this tree. Needs torch and pytest in this Python, and nothing of this tree's build.
#
#   bench/wheel_check.sh OUTDIR [WHEEL] [PYTEST ARGUMENT...]     WHEEL: default the only dist/*+cu*.whl
#
# Prints from where sgl_kvio was imported. OUTDIR gets the log and wheel-GPU-pyX-torchY.json; put into bench/results/ that
# file is a row of docs/wheel-matrix.md (./build_wheels.sh --table). PYTHON names another Python than python3. Exit status
# 1 when the wheel does not install, was not the one imported, or a test failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=$PWD
out=${1:?usage: bench/wheel_check.sh OUTDIR [WHEEL] [PYTEST ARGUMENT...]}
shift
if [[ ${1:-} == *.whl ]]; then
    wheel=$(realpath "$1")
    shift
else
    wheels=(dist/sgl_kvio-*+cu*.whl)
    [[ ${#wheels[@]} -eq 1 && -f ${wheels[0]} ]] || { echo "dist/ holds no or several CUDA wheels: name one" >&2; exit 1; }
    wheel=$PWD/${wheels[0]}
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m pip install -q --no-deps --no-index --target "$place/site" "$wheel"
cp -r tests "$place/tests"
cd "$place" # where no source tree is
export PYTHONPATH=$place/site PYTHONUNBUFFERED=1
name=$("$python" -c '
import platform, re, torch
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no gpu"
text = f"{gpu}-py{platform.python_version()}-torch{torch.__version__}"
print(re.sub(r"[^a-z0-9.]+", "-", text.lower()))')
"$python" "$tree/tools/wheel_cell.py" --tests "$place/tests/gpu" --within "$place/site" --wheel "${wheel##*/}" \
    --out "$out/wheel-$name.json" -- "$@" 2>&1 | tee "$out/wheel-$name.log"
echo "wrote $out/wheel-$name.json"
