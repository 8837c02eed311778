# shellcheck shell=bash disable=SC2154 # `logs`, a folder, is set by who sources this
# Runs the stages of a test run one after the other, and counts. Sourced, never run.

passed=0 failed=0 report=()
AXE_CANNOT_RUN=77

# run_stage NAME KIND COMMAND…: runs it, shows and keeps its output, and counts. KIND is how it counts: `check` is one
# test; `suite` prints its own numbers, which are added up, and must have run at least one test. A command that ends
# with 77 says that it cannot run on this machine, and why in its last line: that is shown, and counts for nothing.
run_stage() {
    local name=$1 kind=$2 log=$logs/$1.log status=0 began=$SECONDS counts good bad
    shift 2
    say "$name: $*"
    "$@" </dev/null 2>&1 | tee "$log" || status=$?
    if ((status == AXE_CANNOT_RUN)); then
        report+=("$(printf '%-24s skipped: %s' "$name" "$(tail -n 1 "$log")")")
        return 0
    fi
    if [[ $kind == check ]]; then
        good=1 bad=0
    else
        counts=$(python3 "$AXE_LIB/count_tests.py" "$log")
        read -r good bad <<<"$counts"
        if ((status == 0 && good + bad == 0)); then
            warn "$name ran no test"
            status=1
        fi
    fi
    # A runner that broke down (a build error, a signal) is a failure even when no test of it failed.
    if ((status != 0 && bad == 0)); then
        bad=1
        [[ $kind != check ]] || good=0
    elif ((status == 0 && bad != 0)); then
        warn "$name printed failures, yet ended well"
    fi
    passed=$((passed + good)) failed=$((failed + bad))
    report+=("$(printf '%-24s %5d passed %4d failed %5d s' "$name" "$good" "$bad" "$((SECONDS - began))")")
}

# stages_end TEXT: the table of all stages, TEXT, and the total alone on the last line; fails when a test failed.
stages_end() {
    printf '\n'
    printf '%s\n' "${report[@]}"
    printf '\n%s\n' "$1"
    echo "$passed passed, $failed failed"
    ((failed == 0))
}
