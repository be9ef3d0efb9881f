#!/usr/bin/env bash
# On a machine with a GPU: what has to be seen there before a change of csrc/gpu is done, in one go. Needs no install: the
# built sgl_kvio/_C.abi3.so of this tree is used (build it anywhere; CUDA kernels need nvcc, not a GPU).
#
#   bench/gpu_check.sh OUTDIR [STEP...]     steps: tests demo targets full memcheck (default: all but memcheck)
#
# Logs, result files and the seconds each step took go to OUTDIR. Exit status 1 when a step failed. Seen on an H200:
# tests 65-95 s, demo 20 s, targets 30 s, full about 130 s, memcheck about 350 s with 12 workers.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: bench/gpu_check.sh OUTDIR [STEP...]}
shift
steps=("$@")
((${#steps[@]})) || steps=(tests demo targets full)
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=0

run() { # NAME LINES COMMAND...: runs COMMAND, shows the last LINES lines of its output
    local name=$1 lines=$2 start=$SECONDS status
    shift 2
    "$@" >"$out/$name.log" 2>&1
    status=$?
    tail -n "$lines" "$out/$name.log"
    echo "== $name: exit $status, $((SECONDS - start)) s"
    ((status == 0)) || failed=1
}

for step in "${steps[@]}"; do
    case $step in
    tests) run tests 40 python3 -m pytest tests/gpu -q -rs --durations=10 -p no:cacheprovider ;;
    demo) run demo 12 python3 -m sgl_kvio demo --text README.md ;;
    targets) run targets 80 python3 bench/transfer.py --targets --out "$out/targets.json" ;;
    full) run full 6 python3 bench/transfer.py --out "$out/full.json" ;;
    memcheck)
        # Workers of pytest-xdist where there are any: the checker makes every launch slow, not the GPU busy. Only our
        # kernels are instrumented: torch's many would take most of the time.
        workers=()
        python3 -c 'import xdist' 2>/dev/null && workers=(-n "${WORKERS:-12}")
        run memcheck 12 compute-sanitizer --tool memcheck --kernel-name kernel_substring=kvio --report-api-errors no --target-processes all \
            --error-exitcode 9 --log-file "$out/memcheck.%p.txt" \
            python3 -m pytest tests/gpu -q -p no:cacheprovider --deselect tests/gpu/test_cli.py "${workers[@]}"
        grep -h "ERROR SUMMARY" "$out"/memcheck.*.txt | sort | uniq -c
        ;;
    *)
        echo "unknown step $step" >&2
        exit 2
        ;;
    esac
done
exit "$failed"
