# shellcheck shell=bash disable=SC2154 # variables are shared with xe.sh
# The daemon in a container, when AXE_IMAGE names an image. Sourced, never run.

# find_engine: sets engine to podman or docker, whichever can run something.
find_engine() {
    local candidate found=''
    for candidate in podman docker; do
        has "$candidate" || continue
        found=$candidate
        if "$candidate" info >/dev/null 2>&1; then
            engine=$candidate
            return 0
        fi
    done
    [[ -z $found ]] || die "AXE_IMAGE is set, but '$found info' fails: is its service running, and may you use it?"
    die "AXE_IMAGE is set, but there is neither podman nor docker; install one, or unset AXE_IMAGE to use the local build"
}

# start_container: expects the variables port, config and model.
start_container() {
    local name=axed-$port render_group options
    [[ $engine != podman ]] || options=(--userns keep-id)
    # The admin socket is shared through .axe/run, so the daemon must run as the user who asks it.
    options+=(--user "$(id -u):$(id -g)" --network host --detach --name "$name"
        --volume "$model:/model.gguf:ro" --volume "$AXE_RUN:/run/axed" --volume "$AXE_STATE/cache:/var/cache/axed"
        --env AXE_DEVICE_CACHE_DIR=/var/cache/axed --env AXE_API_KEY)
    mkdir -p "$AXE_STATE/cache"
    if [[ -d /dev/dri ]]; then
        options+=(--device /dev/dri)
        for render_group in /dev/dri/renderD*; do
            [[ ! -e $render_group ]] || options+=(--group-add "$(stat -c %g "$render_group")")
        done
    fi
    "$engine" image inspect "$AXE_IMAGE" >/dev/null 2>&1 ||
        die "$engine has no image '$AXE_IMAGE'; build it with: $engine build -t $AXE_IMAGE -f scripts/Containerfile ."
    local arguments=(--model /model.gguf --port "$port" --admin-socket /run/axed/admin.sock)
    if [[ -e $config ]]; then
        options+=(--volume "$config:/etc/axed/daemon.toml:ro")
        arguments=(--config /etc/axed/daemon.toml "${arguments[@]}")
    fi
    # Inside, the file has a name that says nothing, so the model's own is passed on.
    local served=${model##*/}
    arguments+=(--served-name "${SERVED_MODEL_NAME:-${served%.gguf}}")
    "$engine" rm --force "$name" >/dev/null 2>&1 || true
    say "Starting $AXE_IMAGE with $engine on port $port"
    "$engine" run "${options[@]}" "$AXE_IMAGE" "${arguments[@]}" >/dev/null {lock}>&- || die "$engine could not start $AXE_IMAGE"
    printf '%s %s\n' "$engine" "$name" >"$AXE_RUN/container"
}

# container_running: sets engine and container from what start_container wrote down.
container_running() {
    [[ -s $AXE_RUN/container ]] || return 1
    read -r engine container <"$AXE_RUN/container"
    [[ $("$engine" container inspect -f '{{.State.Running}}' "$container" 2>/dev/null) == true ]]
}

container_logs() { "$engine" logs --tail 20 "$container"; }

container_axectl() { "$engine" exec -e AXED_SOCKET=/run/axed/admin.sock "$container" axectl "$@"; }

stop_container() {
    say "Stopping the container $container"
    "$engine" stop -t "${AXE_STOP_TIMEOUT:-120}" "$container" >/dev/null
    "$engine" rm --force "$container" >/dev/null 2>&1 || true
    rm -f "$AXE_RUN/container" "$AXE_RUN/started-with" "$AXE_RUN/port"
    say "Stopped"
}
