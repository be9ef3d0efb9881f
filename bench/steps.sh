# shellcheck shell=bash
# Sourced by the scripts that run many steps on one machine: `run`, which needs $out, and $failed, 1 when a step failed.
failed=0

run() { # NAME LINES COMMAND...: runs COMMAND, shows the last LINES lines of its output; its exit status
    local name=$1 lines=$2 start=$SECONDS status
    shift 2
    "$@" >"$out/$name.log" 2>&1
    status=$?
    tail -n "$lines" "$out/$name.log"
    echo "== $name: exit $status, $((SECONDS - start)) s"
    ((status == 0)) || failed=1
    return "$status"
}
