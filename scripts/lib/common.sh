# shellcheck shell=bash disable=SC2034 # the variables are for those who source it
# Messages, places and small helpers that every script shares. Sourced, never run.

AXE_ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
# Everything the project installs for itself lives here, and git ignores it.
AXE_STATE=$AXE_ROOT/.axe
AXE_LIB=$AXE_ROOT/scripts/lib
export AXE_ROOT

# Colour is for people: only on a terminal, and never when NO_COLOR is set.
if [[ -t 2 && -z ${NO_COLOR:-} && ${TERM:-dumb} != dumb ]]; then
    _bold=$'\e[1m' _yellow=$'\e[33m' _red=$'\e[31m' _plain=$'\e[0m'
else
    _bold='' _yellow='' _red='' _plain=''
fi

# Progress goes to stderr, so that a script's stdout holds only what was asked for.
say() { printf '%s==>%s %s\n' "$_bold" "$_plain" "$*" >&2; }
note() { printf '    %s\n' "$*" >&2; }
warn() { printf '%swarning:%s %s\n' "$_yellow" "$_plain" "$*" >&2; }
die() {
    printf '%serror:%s %s\n' "$_red" "$_plain" "$*" >&2
    exit 1
}
# A wrong command line exits with 2, as most tools do.
die_usage() {
    printf '%serror:%s %s\n' "$_red" "$_plain" "$*" >&2
    exit 2
}

# usage FILE: prints the comment block at the head of a script, which is its help text.
usage() { sed -n '2,/^[^#]/ { s/^# \{0,1\}//p }' "$1"; }

has() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [[ $(id -u) == 0 ]]; then
        "$@"
    elif has sudo; then
        sudo "$@"
    else
        die "this needs root and there is no sudo; run as root: $*"
    fi
}

# rustup puts cargo in the home directory, which a non-login shell does not always look into.
need_cargo() {
    if ! has cargo && [[ -x ${CARGO_HOME:-$HOME/.cargo}/bin/cargo ]]; then
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    fi
    has cargo || die "cargo was not found; install Rust with rustup, then run this again"
    has cc || has gcc || die "no C compiler was found; install gcc, then run this again"
}

build_release() {
    need_cargo
    say "Building in release (cargo build --release --locked)"
    (cd "$AXE_ROOT" && cargo build --release --locked --workspace) ||
        die "the build failed; the compiler's messages are above"
}

# What is being run, for the head of a report.
build_name() { git -C "$AXE_ROOT" describe --always --dirty --tags 2>/dev/null || echo unknown; }

# free_port: prints a TCP port of 127.0.0.1 that nobody uses right now.
free_port() {
    python3 -c 'import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
