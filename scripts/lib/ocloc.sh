# shellcheck shell=bash
# Intel's offline compiler for its GPUs, which needs no GPU. Sourced, never run.
#
# AXE_OCLOC_SUITE   the Debian suite that it is taken from (forky): this release's own does not know the cards

AXE_OCLOC_DIR=$AXE_STATE/ocloc
AXE_OCLOC=$AXE_OCLOC_DIR/ocloc
_ocloc_packages=(intel-ocloc libigc2 libigdfcl2 libc6 libstdc++6 libgcc-s1 zlib1g)

ocloc_ready() { [[ -x $AXE_OCLOC ]] && "$AXE_OCLOC" --version >/dev/null 2>&1; }

# install_ocloc: the compiler with a C library of its own, all of it in .axe/ocloc, from the Debian mirror that this
# system's apt already uses. The system's packages and lists stay as they are, so it needs no root.
install_ocloc() {
    ocloc_ready && return 0
    local suite=${AXE_OCLOC_SUITE:-forky} release mirror log=$AXE_STATE/ocloc.log new=$AXE_OCLOC_DIR.new
    [[ $(uname -sm) == "Linux x86_64" ]] || {
        warn "Intel's offline compiler exists for x86-64 Linux only, this is $(uname -sm)"
        return 1
    }
    if ! has apt-get || ! has dpkg-deb; then
        warn "Intel's offline compiler is taken from Debian packages, and there is no apt-get or dpkg-deb here"
        return 1
    fi
    # shellcheck source=/dev/null
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        awk -v release="$release" '$2 == release { print $1; exit }')
    [[ $mirror ]] || {
        warn "apt's sources name no Debian mirror for '$release', so there is none to take Intel's compiler from"
        return 1
    }
    say "Installing Intel's offline compiler into ${AXE_OCLOC_DIR#"$AXE_ROOT"/} (75 MB to fetch, once)"
    rm -rf "$new"
    if ! fetch_ocloc "$new" "$mirror" "$suite" >"$log" 2>&1; then
        rm -rf "$new"
        tail -n 5 "$log" >&2
        warn "Intel's offline compiler could not be fetched from Debian's suite '$suite' (whole log: $log)"
        return 1
    fi
    rm -rf "$AXE_OCLOC_DIR"
    mv "$new" "$AXE_OCLOC_DIR"
    ocloc_ready || {
        warn "Intel's offline compiler was installed, but does not run: $("$AXE_OCLOC" --version 2>&1 | head -n 1)"
        return 1
    }
}

# fetch_ocloc DIR MIRROR SUITE: apt with folders of its own; signatures are checked with the keys that Debian brings. An old
# index is as good as a new one: it may be that of a mirror that stands still.
fetch_ocloc() {
    local dir=$1 apt=$1/apt package
    mkdir -p "$apt"/{lists/partial,cache/archives/partial,etc/{preferences.d,apt.conf.d}} "$dir"/{packages,root} || return 1
    : >"$apt/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $2 $3 main" >"$apt/etc/sources.list"
    cat >"$apt/apt.conf" <<END
Dir::State "$apt";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc "$apt/etc";
Dir::Etc::sourcelist "$apt/etc/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "amd64";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
END
    APT_CONFIG=$apt/apt.conf apt-get -q update || return 1
    (cd "$dir/packages" && APT_CONFIG=$apt/apt.conf apt-get -q download "${_ocloc_packages[@]}") || return 1
    for package in "$dir"/packages/*.deb; do
        dpkg-deb -x "$package" "$dir/root" || return 1
    done
    # The loader of its own C library, by a way that still holds when the project's folder is moved.
    cat >"$dir/ocloc" <<'END'
#!/bin/sh
here=$(dirname -- "$(readlink -f -- "$0")")
libraries=$here/root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$here"/root/usr/bin/ocloc-* "$@"
END
    chmod +x "$dir/ocloc"
    rm -rf "$apt" "$dir/packages"
}
