# shellcheck shell=bash disable=SC2034 # the variables are for those who source it
# Debian packages, and Python packages in a virtual environment of the project's own. Sourced, never run.

# Python packages live here: Debian's own Python refuses pip outside of a virtual environment.
AXE_VENV=$AXE_STATE/opencl/venv

deb_installed() {
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# apt_need PACKAGE…: installs those that are missing; silent and quick when none is.
apt_need() {
    local package missing=()
    for package in "$@"; do
        deb_installed "$package" || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    has apt-get || die "these packages are missing and there is no apt-get here: ${missing[*]}"
    say "Installing Debian packages: ${missing[*]}"
    local log=$AXE_STATE/apt.log
    mkdir -p "$AXE_STATE"
    # The lists of a fresh machine are empty or old, so a first failure is met with an update.
    if ! apt_install "${missing[@]}" >"$log" 2>&1; then
        note "refreshing the package lists"
        if ! { as_root apt-get -q -o DPkg::Lock::Timeout=300 update && apt_install "${missing[@]}"; } >"$log" 2>&1; then
            tail -n 15 "$log" >&2
            die "apt could not install ${missing[*]} (whole log: $log)"
        fi
    fi
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@" </dev/null
}

# need_command COMMAND PACKAGE: the command may come from elsewhere than Debian, so ask for it, not for the package.
need_command() { has "$1" || apt_need "$2"; }

# make_venv DIR: a virtual environment with pip; made anew when its Python is gone or the folder was moved.
make_venv() {
    local dir=$1
    if [[ -x $dir/bin/python ]] && "$dir/bin/python" -c 'import pip' 2>/dev/null; then
        return 0
    fi
    need_command python3 python3
    # Debian splits the part of `venv` that brings pip into a package of its own.
    python3 -c 'import ensurepip, venv' 2>/dev/null || apt_need python3-venv
    rm -rf "$dir"
    mkdir -p "$(dirname "$dir")"
    python3 -m venv "$dir" >&2 || die "python3 could not make a virtual environment in $dir"
}

# pip_in DIR ARGUMENTS…: pip of that environment, as the user configured pip, without asking questions.
pip_in() {
    local dir=$1
    shift
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$dir/bin/python" -m pip "$@" </dev/null
}

# pinned_venv DIR NAME WHAT: an environment with just what requirements-NAME.txt lists, made again when the list changes.
pinned_venv() {
    local dir=$1 requirements=$AXE_LIB/requirements-$2.txt log=$AXE_STATE/$2-pip.log
    make_venv "$dir"
    cmp -s "$requirements" "$dir/installed.txt" && return 0
    say "Installing $3 from PyPI into ${dir#"$AXE_ROOT"/}"
    if ! pip_in "$dir" install --no-deps -r "$requirements" >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        die "pip could not install $3 (whole log: $log)"
    fi
    cp "$requirements" "$dir/installed.txt"
}
