#!/usr/bin/env bash
# Makes a Debian package of the built programs, their units and completions: target/debian/axed_VERSION_ARCH.deb
#
# usage: scripts/package.sh [--deb-version VERSION]
#
#   --deb-version   the package's version (that of Cargo.toml, with -1 behind it)
#
# cargo-deb makes it, from the description in Cargo.toml; the first run builds cargo-deb in .axe/tools, which takes some
# minutes.
#
# environment:
#   AXE_BIN     folder with axed and axectl, target/release or target/debug (target/release)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"

version=()
case ${1:-} in
    -h | --help)
        usage "$0"
        exit 0
        ;;
    --deb-version)
        (($# == 2)) || die_usage "--deb-version needs a version (see --help)"
        version=(--deb-version "$2")
        ;;
    '') ;;
    *) die_usage "unknown argument '$1' (see --help)" ;;
esac

bin=${AXE_BIN:-${CARGO_TARGET_DIR:-$AXE_ROOT/target}/release}
for file in "$bin/axed" "$bin/axectl"; do
    [[ -x $file ]] || die "$file is not there; build it with: cargo build --release --workspace"
done
# cargo-deb looks below the target folder, by the name of the profile.
case $(basename "$bin") in
    release) profile=release ;;
    debug) profile=dev ;;
    *) die "AXE_BIN is $bin, expected a folder called release or debug" ;;
esac

tools=$AXE_STATE/tools
cargo_deb=$tools/bin/cargo-deb
if [[ ! -x $cargo_deb ]]; then
    say "Building cargo-deb in ${tools#"$AXE_ROOT"/} (once; some minutes)"
    # It packs files: little is won by optimising it.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off CARGO_TARGET_DIR=$tools/build \
        cargo install --quiet --locked --root "$tools" cargo-deb
    rm -rf "$tools/build"
fi

# What is made rather than kept: completions, and a configuration as the service wants it.
made=$AXE_ROOT/target/package
rm -rf "$made"
mkdir -p "$made"
for shell in bash zsh fish; do
    "$bin/axectl" completions "$shell" >"$made/axectl.$shell"
done
sed -e 's|^#path = .*|#path = "/var/lib/axed/model.gguf"|' -e 's|^#group = .*|group = "axed"|' \
    "$AXE_ROOT/daemon.toml" >"$made/daemon.toml"
grep -q '^group = "axed"$' "$made/daemon.toml" || die "daemon.toml has no line '#group = …' any more"

cd "$AXE_ROOT"
CARGO_TARGET_DIR=$(dirname "$bin") "$cargo_deb" --package axe --no-build --profile "$profile" --fast \
    --output "$AXE_ROOT/target/debian/" "${version[@]}"
