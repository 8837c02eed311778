#!/usr/bin/env bash
# Sets the machine up and runs every test of the project. The last line is the total: "N passed, M failed".
#
# usage: scripts/test.sh [STAGE…]
#
#   scripts    the shell and Python scripts: shellcheck, and their tests against a stand-in for the daemon
#   fmt        cargo fmt --check
#   clippy     cargo clippy, warnings are errors
#   tests      all Rust tests, on Intel's OpenCL runtime (on PoCL where Intel's does not exist)
#   card       the miniature answers its whole card with seeds 1 to 20 as exactly as PyTorch, in as many steps
#   pocl       the tests of device, kernels and models again, on PoCL
#   oclgrind   the tests of the kernels in a simulator that finds races and accesses out of bounds
#   offline    kernels for Intel's GPUs by Intel's offline compiler: registers, spills, block loads, predicted times
#   doc        the documentation builds, warnings are errors
#   studio     the page in a browser (Chromium), by clicks and keys, over real daemons with the miniature
#   clients    the clients of OpenAI, Anthropic and LiteLLM, and LiteLLM's proxy, HAProxy and nginx before two daemons
#   run        scripts/xe.sh up, test, down, with the default model and with the miniature: the way a user takes
#   systemd    scripts/test-systemd.sh: the service on a booted system; skipped where none can be booted
#
# Without STAGE all of them run. Logs are kept in .axe/test. Tests find out where they run by AXE_TEST_PLATFORM
# (intel, pocl, oclgrind) and find the models in AXE_TEST_MODELS.
#
# environment:
#   AXE_OCLGRIND_LIMIT  seconds for each test program in the simulator (300)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$here/lib/packages.sh"
# shellcheck source=scripts/lib/opencl.sh
. "$here/lib/opencl.sh"
# shellcheck source=scripts/lib/models.sh
. "$here/lib/models.sh"
# shellcheck source=scripts/lib/stages.sh
. "$here/lib/stages.sh"
# shellcheck source=scripts/lib/ocloc.sh
. "$here/lib/ocloc.sh"
# shellcheck source=scripts/lib/studio.sh
. "$here/lib/studio.sh"
# shellcheck source=scripts/lib/clients.sh
. "$here/lib/clients.sh"

all=(scripts fmt clippy tests card pocl oclgrind offline doc studio clients run systemd)
case ${1:-} in
    -h | --help)
        usage "$0"
        exit 0
        ;;
esac
stages=("$@")
(($#)) || stages=("${all[@]}")
for stage in "${stages[@]}"; do
    [[ " ${all[*]} " == *" $stage "* ]] || die_usage "unknown stage '$stage' (see --help)"
done

cd "$AXE_ROOT"
logs=$AXE_STATE/test
mkdir -p "$logs"

check_scripts() {
    local script
    for script in scripts/*.sh scripts/lib/*.sh .ci/run; do
        bash -n "$script" || return 1
    done
    # The libraries are checked along with the scripts that use them.
    shellcheck -x scripts/*.sh .ci/run && python3 -W error -m py_compile scripts/*.py scripts/lib/*.py scripts/training/*.py \
        tests/studio/*.py tests/clients/*.py
}

# test_targets PATTERN…: the names of the integration tests whose files match, for cargo's --test.
test_targets() {
    local pattern file
    for pattern in "$@"; do
        for file in tests/$pattern.rs; do
            [[ ! -e $file ]] || printf -- '--test\n%s\n' "$(basename "$file" .rs)"
        done
    done
}

# What depends on the device: the rooms next to it, and the tests that cross rooms.
device_tests() {
    local targets
    mapfile -t targets < <(test_targets 'ops*' 'device*' 'kernel*' 'width*' 'model*' 'block*')
    cargo test --release --locked --features faults --no-fail-fast --lib "${targets[@]}"
}

under_oclgrind() {
    local targets programs program status=0 log
    mapfile -t targets < <(test_targets 'ops*' 'kernel*' 'device_basics')
    ((${#targets[@]})) || {
        echo "there are no tests of kernels (tests/ops*.rs)"
        return 1
    }
    programs=$(cargo test --release --locked --features faults --no-run --message-format=json "${targets[@]}" |
        python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message.get("executable"):
        print(message["executable"])') || return 1
    for program in $programs; do
        log=$logs/oclgrind-$(basename "$program").txt
        rm -f "$log"
        timeout "${AXE_OCLGRIND_LIMIT:-300}" oclgrind --data-races --max-errors 20 --log "$log" \
            "$program" --test-threads=1 || status=$?
        # The simulator reports what it finds in its log only; the program itself may still be content.
        if [[ -s $log ]]; then
            head -n 60 "$log"
            status=1
        fi
    done
    return "$status"
}

# Prints tables of what became of each kernel, and keeps them beside the logs.
for_cards() {
    install_ocloc || {
        echo "Intel's offline compiler is not here and cannot be installed (see above): no kernel was compiled for the cards"
        return "$AXE_CANNOT_RUN"
    }
    AXE_OCLOC=$AXE_OCLOC AXE_OFFLINE=$logs/offline \
        cargo test --release --locked --features faults --test xmx_offline -- --ignored --nocapture --test-threads=1
}

whole_card() {
    build_release &&
        AXE_DEVICE_CACHE_DIR=$AXE_STATE/cache scripts/evaluate-miniature.py --model "$AXE_MINIATURE" --seeds 1..20 --judge
}

in_browser() {
    setup_studio && with_daemons "$AXE_STUDIO_VENV" -s tests/studio
}

real_clients() {
    setup_clients && with_daemons "$AXE_CLIENTS_VENV" -s tests/clients
}

# with_daemons VENV ARGUMENTS…: Python tests that start the daemon built here.
with_daemons() {
    build_release && AXE_TEST_DAEMON=${CARGO_TARGET_DIR:-$AXE_ROOT/target}/release/axed \
        AXE_DEVICE_CACHE_DIR=$AXE_STATE/cache "$1/bin/python" -W ignore::UserWarning -W ignore::DeprecationWarning -m unittest discover "${@:2}"
}

# The daemon of a user of this very checkout is left alone: another port and another run folder.
user_path() {
    local status=0 name
    export AXE_PORT AXE_RUN_DIR=$AXE_STATE/test/run
    AXE_PORT=$(free_port)
    unset SERVED_MODEL_NAME AXE_IMAGE AXE_API_KEY
    for name in "$AXE_DEFAULT_MODEL" tiny-diffusion; do
        export AXE_MODEL=$name
        scripts/xe.sh up && scripts/xe.sh status && scripts/xe.sh gpu && scripts/xe.sh test || status=$?
        scripts/xe.sh down || status=$?
    done
    return "$status"
}

installed_path() {
    unset AXE_MODEL
    build_release && scripts/test-systemd.sh
}

began=$SECONDS
say "Setting up"
AXE_MODEL='' "$here/setup.sh" --tests
platform=pocl
! intel_runtime_ready || platform=intel
use_opencl "$platform"
export AXE_TEST_PLATFORM=$platform AXE_TEST_MODELS=$AXE_MODELS
need_cargo
for component in rustfmt:cargo-fmt clippy:cargo-clippy; do
    has "${component#*:}" || rustup component add "${component%:*}" >&2 || die "rustup could not add ${component%:*}"
done

for stage in "${stages[@]}"; do
    case $stage in
        scripts)
            run_stage shellcheck check check_scripts
            run_stage scripts suite python3 -m unittest discover -s tests/scripts
            ;;
        fmt) run_stage fmt check cargo fmt --all --check ;;
        clippy) run_stage clippy check cargo clippy --workspace --all-targets --locked -- -D warnings ;;
        tests) run_stage "tests-$platform" suite cargo test --release --locked --workspace --features axe/faults --no-fail-fast ;;
        card) run_stage card check whole_card ;;
        pocl)
            if [[ $platform != pocl ]]; then
                AXE_TEST_PLATFORM=pocl OCL_ICD_VENDORS=$AXE_POCL_VENDORS run_stage pocl suite device_tests
            fi
            ;;
        oclgrind) AXE_TEST_PLATFORM=oclgrind run_stage oclgrind suite under_oclgrind ;;
        offline) run_stage offline suite for_cards ;;
        doc) RUSTDOCFLAGS='-D warnings' run_stage doc check cargo doc --workspace --no-deps --locked ;;
        studio) run_stage studio suite in_browser ;;
        clients) run_stage clients suite real_clients ;;
        run) run_stage run suite user_path ;;
        systemd) run_stage systemd suite installed_path ;;
    esac
done

stages_end "$(build_name), OpenCL: $platform, $((SECONDS - began)) s"
