#!/usr/bin/env bash
# Runs the daemon on this machine: sets up, builds, starts, asks, stops.
#
# usage: scripts/xe.sh COMMAND
#
#   up        install what is missing, build, fetch the model, start, wait until it is ready
#   status    what the daemon is doing (arguments go to axectl, e.g. --json)
#   logs      its log (logs -f follows)
#   gpu       the device and its load
#   test      ask the running daemon everything a client may ask, and measure it (test --help)
#   restart   down, then up
#   down      finish the running requests, then stop
#   help      this text
#
# environment:
#   AXE_PORT           port on 127.0.0.1 (8080)
#   AXE_MODEL          a GGUF file, a directory of a DiffusionGemma, or a name: smollm2 (the default), tiny-diffusion
#                      (block diffusion in miniature, fetches nothing), gemma3-270m
#   SERVED_MODEL_NAME  the name clients ask for (taken from the model when unset)
#   AXE_OPENCL         intel, pocl or system: the OpenCL runtime (see scripts/setup.sh)
#   AXE_CONFIG         the configuration file (daemon.toml of the project)
#   AXE_IMAGE          run this container image with podman or docker instead of the local build
#   AXE_RUN_DIR        where socket, log and process id are kept (.axe/run of the project)
#   AXE_START_TIMEOUT  seconds to wait until ready (600)
#   AXE_STOP_TIMEOUT   seconds to wait for running requests at a stop (120)
#
# exit status: 0 done, 1 failed, 2 wrong command line, 3 not running (status, logs, gpu, test, down)
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
# shellcheck source=scripts/lib/daemon.sh
. "$here/lib/daemon.sh"
# shellcheck source=scripts/lib/container.sh
. "$here/lib/container.sh"

port=${AXE_PORT:-8080}
config=${AXE_CONFIG:-$AXE_ROOT/daemon.toml}
if [[ ! $port =~ ^[0-9]{1,5}$ ]] || ((10#$port < 1 || 10#$port > 65535)); then
    die_usage "AXE_PORT is '$port'; it must be a port number from 1 to 65535"
fi

# What the running daemon was started with; a difference means that `up` has to start it anew.
fingerprint() {
    printf '%s\n' "port $port" "model $model" "name ${SERVED_MODEL_NAME:-}" "opencl ${OCL_ICD_VENDORS:-system}" \
        "config $(cat -- "$config" 2>/dev/null | sha256sum)"
    if [[ ${AXE_IMAGE:-} ]]; then
        echo "image $AXE_IMAGE"
    else
        stat -c 'binary %s %Y' "$AXE_BIN/axed"
    fi
}

up() {
    local model
    if [[ ${AXE_IMAGE:-} ]]; then
        find_engine
        need_command curl curl
        need_command python3 python3
        model=$(model_path "${AXE_MODEL:-$AXE_DEFAULT_MODEL}")
        [[ -e $model ]] || fetch_model "${AXE_MODEL:-$AXE_DEFAULT_MODEL}"
    else
        "$here/setup.sh"
        build_release
        model=$(model_path "${AXE_MODEL:-$AXE_DEFAULT_MODEL}")
        use_opencl "$(cat "$AXE_RUNTIME_FILE")"
    fi
    mkdir -p "$AXE_RUN"
    exec {lock}>"$AXE_RUN/lock"
    flock -n "$lock" || die "another scripts/xe.sh is starting or stopping the daemon right now"

    local wanted
    wanted=$(fingerprint)
    if daemon_running; then
        if [[ $(cat "$AXE_RUN/started-with" 2>/dev/null) == "$wanted" ]] && ready; then
            say "Already running (pid $(daemon_pid)) with this build and configuration"
            show_example
            return 0
        fi
        say "Running with another build or configuration: starting anew"
        stop_daemon
    fi

    local who
    if who=$(python3 "$AXE_LIB/port_owner.py" "$port"); then
        die "port $port is taken by $who; stop it, or choose another port: AXE_PORT=8081 scripts/xe.sh up"
    fi
    if [[ ${AXE_IMAGE:-} ]]; then start_container; else start_daemon; fi
    printf '%s\n' "$wanted" >"$AXE_RUN/started-with"
    printf '%s\n' "$port" >"$AXE_RUN/port"
    wait_until_ready
    show_example
}

down() {
    if ! daemon_running; then
        say "Not running"
        return 3
    fi
    exec {lock}>"$AXE_RUN/lock"
    flock -n "$lock" || die "another scripts/xe.sh is starting or stopping the daemon right now"
    stop_daemon
}

# The port of the running daemon, which need not be the one that AXE_PORT says now.
url() { echo "http://127.0.0.1:$(cat "$AXE_RUN/port" 2>/dev/null || echo "$port")"; }

need_running() {
    daemon_running && return 0
    warn "the daemon is not running; start it with: scripts/xe.sh up"
    exit 3
}

logs() {
    if daemon_running; then
        axectl logs "$@"
    elif [[ -s $AXE_RUN/axed.log ]]; then
        warn "the daemon is not running; these are the last lines of its log, ${AXE_RUN#"$AXE_ROOT"/}/axed.log"
        tail -n 100 "$AXE_RUN/axed.log"
        exit 3
    else
        need_running
    fi
}

command=${1:-help}
shift || true
case $command in
    up)
        (($# == 0)) || die_usage "'up' takes no arguments; it is told by its environment (see help)"
        up
        ;;
    down)
        (($# == 0)) || die_usage "'down' takes no arguments"
        down
        ;;
    restart)
        (($# == 0)) || die_usage "'restart' takes no arguments; it is told by its environment (see help)"
        # In a process of its own, which lets go of the lock when it ends.
        if daemon_running; then (down); fi
        exec "$0" up
        ;;
    status | gpu)
        need_running
        axectl "$command" "$@"
        ;;
    logs) logs "$@" ;;
    test)
        [[ " $* " == *" --help "* ]] || need_running
        ! grep -qxF "model $AXE_MINIATURE" "$AXE_RUN/started-with" 2>/dev/null || set -- --miniature "$@"
        python3 "$here/battery.py" --url "$(url)" "$@"
        ;;
    help | -h | --help) usage "$0" ;;
    *) die_usage "unknown command '$command' (see scripts/xe.sh help)" ;;
esac
