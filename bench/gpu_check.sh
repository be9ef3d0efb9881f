#!/usr/bin/env bash
# On a machine with a GPU: what has to be seen there before a change of csrc/gpu is done, in one go. Needs no install: the
# built sgl_kvio/_C.abi3.so of this tree is used (build it anywhere; CUDA kernels need nvcc, not a GPU).
#
#   bench/gpu_check.sh OUTDIR [STEP...]     default: tests demo targets full
#
#   tests demo targets full                 tests/gpu, the demo, bench/transfer.py --targets and in full
#   crossover crossover-targets interference   bench/crossover.py in full and --targets, bench/interference.py
#   write_back write_back-targets           bench/write_back.py in full and --targets
#   swap_in swap_in-targets                 bench/swap_in.py in full and --targets
#   load_layers load_layers-targets         bench/load_layers.py in full and --targets
#   memcheck racecheck synccheck            compute-sanitizer; memcheck over tests/gpu, the other two over the tma tests
#
# The checkers run in one process (12 side by side are three times slower in total than one: each call waits for the
# others in the driver) over one covering of the cases instead of two (KVIO_TEST_COVERINGS). MEMCHECK_TESTS="FILE..."
# narrows memcheck down; MEMCHECK_PART=1/4 takes every fourth case of every test, 2/4, 3/4 and 4/4 the others. Left out:
# the command line, which starts processes of its own, and the test that two streams run side by side, because the
# checkers serialize kernels.
# Logs, result files and the seconds each step took go to OUTDIR. Exit status 1 when a step failed. Seen on an H200:
# tests about 200 s for 5,400 cases, demo 20 s, targets 30 s, full about 135 s, crossover 80 s, interference 60 s,
# memcheck about 10 cases a second, synccheck 35.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
out=${1:?usage: bench/gpu_check.sh OUTDIR [STEP...]}
shift
steps=("$@")
((${#steps[@]})) || steps=(tests demo targets full)
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
. bench/steps.sh

sanitize() { # TOOL TESTS...: runs the tests under a tool of compute-sanitizer
    local tool=$1
    shift
    # Only our kernels are instrumented: torch's many would take most of the time.
    run "$tool" 12 env KVIO_TEST_COVERINGS=1 compute-sanitizer --tool "$tool" \
        --kernel-name kernel_substring=kvio --report-api-errors no --error-exitcode 9 --log-file "$out/$tool.txt" \
        python3 -m pytest "$@" -q -p no:cacheprovider --deselect tests/gpu/test_cli.py \
        --deselect tests/gpu/test_graphs.py::test_two_streams_do_not_wait_for_each_other
    grep -hE "(ERROR|RACECHECK) SUMMARY" "$out/$tool.txt"
}

for step in "${steps[@]}"; do
    case $step in
    tests) run tests 40 python3 -m pytest tests/gpu -q -rs --durations=10 -p no:cacheprovider ;;
    demo) run demo 12 python3 -m sgl_kvio demo --text README.md ;;
    targets) run targets 80 python3 bench/transfer.py --targets --out "$out/targets.json" ;;
    full) run full 6 python3 bench/transfer.py --out "$out/full.json" ;;
    crossover) run crossover 60 python3 bench/crossover.py --out "$out/crossover.json" ;;
    crossover-targets)
        run crossover-targets 100 python3 bench/crossover.py --targets --out "$out/crossover-targets.json"
        ;;
    interference) run interference 130 python3 bench/interference.py --out "$out/interference.json" ;;
    write_back) run write_back 320 python3 bench/write_back.py --out "$out/write_back.json" ;;
    write_back-targets)
        run write_back-targets 60 python3 bench/write_back.py --targets --out "$out/write_back-targets.json"
        ;;
    swap_in) run swap_in 300 python3 bench/swap_in.py --out "$out/swap_in.json" ;;
    swap_in-targets)
        run swap_in-targets 60 python3 bench/swap_in.py --targets --out "$out/swap_in-targets.json"
        ;;
    load_layers) run load_layers 120 python3 bench/load_layers.py --out "$out/load_layers.json" ;;
    load_layers-targets)
        run load_layers-targets 40 python3 bench/load_layers.py --targets --out "$out/load_layers-targets.json"
        ;;
    memcheck)
        read -ra chosen <<<"${MEMCHECK_TESTS:-tests/gpu}"
        KVIO_TEST_PART=${MEMCHECK_PART:-1/1} sanitize memcheck "${chosen[@]}"
        ;;
    racecheck | synccheck) sanitize "$step" tests/gpu/test_tma.py ;;
    *)
        echo "unknown step $step" >&2
        exit 2
        ;;
    esac
done
exit "$failed"
