# shellcheck shell=bash disable=SC2034,SC2154 # variables are shared with xe.sh
# The daemon as a background process of this project: start, wait, ask, stop. Sourced, never run.

AXE_BIN=${CARGO_TARGET_DIR:-$AXE_ROOT/target}/release
AXE_RUN=${AXE_RUN_DIR:-$AXE_STATE/run}
AXE_SOCKET=$AXE_RUN/admin.sock

# process_alive PID: a zombie has ended, whether or not someone has fetched its status.
process_alive() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    [[ ${stat##*) } != Z* ]]
}

daemon_pid() { cat "$AXE_RUN/axed.pid" 2>/dev/null; }

# Process ids are used again after a while, so the one that was written down must also be our daemon.
daemon_running() {
    local pid
    container_running && return 0
    pid=$(daemon_pid) || return 1
    [[ $pid =~ ^[0-9]+$ ]] && process_alive "$pid" &&
        tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF -- "$AXE_SOCKET"
}

# start_daemon: expects the variables port, config and model.
start_daemon() {
    # The kernel cuts names of sockets off.
    ((${#AXE_SOCKET} < 108)) ||
        die "the path of the admin socket is too long for a socket: $AXE_SOCKET; set AXE_RUN_DIR to a shorter folder"
    local arguments=(--model "$model" --port "$port" --admin-socket "$AXE_SOCKET")
    [[ ! -e $config ]] || arguments=(--config "$config" "${arguments[@]}")
    [[ -z ${SERVED_MODEL_NAME:-} ]] || arguments+=(--served-name "$SERVED_MODEL_NAME")
    [[ ! -e $AXE_RUN/axed.log ]] || mv "$AXE_RUN/axed.log" "$AXE_RUN/axed.log.1"
    say "Starting axed on port $port with ${model#"$AXE_ROOT"/}"
    # A session of its own, so that closing the terminal does not end it; without the lock of this script.
    AXE_DEVICE_CACHE_DIR=${AXE_DEVICE_CACHE_DIR:-$AXE_STATE/cache} setsid "$AXE_BIN/axed" "${arguments[@]}" \
        >"$AXE_RUN/axed.log" 2>&1 </dev/null {lock}>&- &
    echo "$!" >"$AXE_RUN/axed.pid"
}

ready() { curl -fsS --max-time 5 -o /dev/null "http://127.0.0.1:$port/ready" 2>/dev/null; }

# stage: what the daemon says it is doing before it is ready, in one line; "failed: …" when it cannot become ready.
stage() {
    curl -sS --max-time 2 "http://127.0.0.1:$port/ready" 2>/dev/null | python3 -c '
import json, sys
answer = json.load(sys.stdin)
words = answer.get("what") or answer["status"]
if answer.get("error"):
    words += ": " + answer["error"]
if isinstance(answer.get("progress"), float):
    words += " %d %%" % (100 * answer["progress"])
print(words)' 2>/dev/null || echo starting
}

# progress TEXT: one line that is written over on a terminal, a new line for each new text elsewhere.
progress() {
    if [[ -t 2 ]]; then
        printf '\r\e[K    %s (%d s)' "$1" "$((SECONDS - started))" >&2
    elif [[ $1 != "${progress_shown:-}" ]]; then
        note "$1"
    fi
    progress_shown=$1
}

progress_end() { [[ ! -t 2 ]] || printf '\r\e[K' >&2; }

wait_until_ready() {
    local started=$SECONDS limit=${AXE_START_TIMEOUT:-600} progress_shown='' began stage
    began=$(date +%s.%N)
    until ready; do
        if ! daemon_running; then
            progress_end
            warn "axed ended before it was ready; the last lines of its log:"
            daemon_log_tail >&2
            exit 1
        fi
        if ((SECONDS - started >= limit)); then
            progress_end
            warn "axed was not ready after $limit s (AXE_START_TIMEOUT); it goes on. The last lines of its log:"
            daemon_log_tail >&2
            exit 1
        fi
        stage=$(stage)
        if [[ $stage == failed* ]]; then
            progress_end
            daemon_log_tail >&2
            die "axed cannot start; $stage (its log ends as above; scripts/xe.sh down ends it)"
        fi
        [[ $stage == ready ]] || progress "waiting for /ready: $stage"
        sleep 0.2
    done
    progress_end
    # The answer may have come from someone who took the port in the meantime.
    daemon_running || {
        daemon_log_tail >&2
        die "something answers on port $port, but it is not this axed, whose log ends as above"
    }
    say "Ready after $(python3 -c 'import sys, time; print(round(time.time() - float(sys.argv[1]), 1))' "$began") s:" \
        "http://127.0.0.1:$port"
}

daemon_log_tail() {
    if [[ -s $AXE_RUN/container ]]; then
        container_logs
    else
        tail -n 20 "$AXE_RUN/axed.log"
    fi
}

# show_example: a request to paste, and its answer, so that it is known to work. On stdout: it is what `up` is for.
show_example() {
    local base=http://127.0.0.1:$port name body path answer
    name=$(request "$base/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])') ||
        die "the daemon is ready, but $base/v1/models does not answer as it should"
    path=/v1/chat/completions
    body='{"model": "'$name'", "max_tokens": 32, "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    if ! answer=$(ask "$base$path" "$body" message content); then
        # A base model has no chat template, but it can go on with a text.
        path=/v1/completions
        body='{"model": "'$name'", "max_tokens": 32, "temperature": 0, "prompt": "The capital of France is"}'
        answer=$(ask "$base$path" "$body" text) || die "the daemon is ready, but it did not answer: $answer"
    fi
    printf '\nAsk it:\n\n  curl %s \\\n' "$base$path"
    # The key itself does not belong on a screen.
    # shellcheck disable=SC2016 # it is the reader's shell that shall expand it
    [[ -z ${AXE_API_KEY:-} ]] || printf '    -H "Authorization: Bearer $AXE_API_KEY" \\\n'
    printf '    -H "Content-Type: application/json" \\\n    -d '\''%s'\''\n\nwhich answers: %s\n\n' "$body" "$answer"
    printf 'Stop it with: scripts/xe.sh down\n'
}

# request CURL_ARGUMENTS…: a request to the daemon, with the key if there is one (through stdin: not in the process list).
request() {
    curl -sS --max-time 120 -K - "$@" <<<"${AXE_API_KEY:+header = \"Authorization: Bearer $AXE_API_KEY\"}"
}

# ask URL BODY KEY…: prints that part of the first choice, or the error and fails.
ask() {
    request -H 'Content-Type: application/json' -d "$2" "$1" | python3 -c '
import json, sys
raw = sys.stdin.read()
try:
    value = json.loads(raw)["choices"][0]
    for key in sys.argv[1:]:
        value = value[key]
except (ValueError, LookupError, TypeError):
    print(raw.strip())
    sys.exit(1)
print(value.strip())' "${@:3}"
}

# axectl ARGUMENTS…: the operator's client of the running daemon.
axectl() {
    if container_running; then
        container_axectl "$@"
    else
        [[ -x $AXE_BIN/axectl ]] || die "$AXE_BIN/axectl is not there; build it with: scripts/xe.sh up"
        AXED_SOCKET=$AXE_SOCKET "$AXE_BIN/axectl" "$@"
    fi
}

# stop_daemon: asks it to finish what it is doing, and waits for that.
stop_daemon() {
    local pid started=$SECONDS limit=${AXE_STOP_TIMEOUT:-120} progress_shown=''
    if container_running; then
        stop_container
        return 0
    fi
    pid=$(daemon_pid)
    say "Stopping axed (pid $pid)"
    kill -TERM "$pid"
    while process_alive "$pid"; do
        if ((SECONDS - started >= limit)); then
            progress_end
            kill -KILL "$pid" 2>/dev/null || true
            rm -f "$AXE_RUN/axed.pid"
            die "axed had not finished its requests after $limit s (AXE_STOP_TIMEOUT) and was killed"
        fi
        ((SECONDS - started < 2)) || progress "finishing the running requests"
        sleep 0.1
    done
    progress_end
    rm -f "$AXE_RUN/axed.pid" "$AXE_RUN/started-with" "$AXE_RUN/port"
    say "Stopped"
}
