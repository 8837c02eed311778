# shellcheck shell=bash
# The clients and routers that tests/clients puts before the daemon. Sourced, never run.

AXE_CLIENTS_VENV=$AXE_STATE/clients-venv

# setup_clients: OpenAI's, Anthropic's and LiteLLM's clients from PyPI, HAProxy and nginx from Debian.
setup_clients() {
    need_router haproxy haproxy
    need_router nginx nginx-light
    pinned_venv "$AXE_CLIENTS_VENV" clients "the clients' libraries (85 MB to fetch, once)"
}

# need_router PROGRAM PACKAGE: the program only. Debian starts what it installs, where there is something to start it.
need_router() {
    [[ -x /usr/sbin/$1 ]] && return 0
    apt_need "$2"
    [[ ! -d /run/systemd/system ]] || as_root systemctl disable --quiet --now "$1"
}
