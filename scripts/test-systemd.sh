#!/usr/bin/env bash
# Boots a small Debian with a real systemd, installs the daemon's package in it, and checks the service: readiness, who
# may use axectl, watchdog, restart after a crash, the journal, a drain on stop, the port that systemd holds, an upgrade
# of the package, its removal.
#
# usage: scripts/test-systemd.sh [--fresh]
#
#   --fresh   make the Debian system anew; otherwise the one in .axe/systemd-test is used again
#
# The first run fetches about 300 MB of Debian packages, and the model. The system is only read: what a run writes is
# kept in memory and gone afterwards. The log of the last boot is .axe/systemd-test/console.log.
#
# exit status: 0 all checks passed, 1 some failed, 2 wrong command line, 77 a system cannot be booted here: it needs
# root, and mounts and namespaces, which most containers forbid
#
# environment:
#   AXE_BIN     folder with axed and axectl (target/release)
#   AXE_MODEL   model to serve, a name or a file (smollm2)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$here/lib/packages.sh"
# shellcheck source=scripts/lib/models.sh
. "$here/lib/models.sh"

# Seconds a boot with all checks may take.
limit=300
# An OpenCL runtime for CPUs comes along, since the daemon needs one.
packages=systemd,systemd-sysv,dbus,ocl-icd-libopencl1,pocl-opencl-icd

fresh=no
case ${1:-} in
    -h | --help)
        usage "$0"
        exit 0
        ;;
    --fresh) fresh=yes ;;
    '') ;;
    *) die_usage "unknown argument '$1' (see --help)" ;;
esac

# cannot REASON…: this machine is not able to; nothing was tested, so it is neither success nor failure.
cannot() {
    warn "no systemd was booted: $*"
    exit 77
}
[[ $(id -u) == 0 ]] || cannot "that needs root; run: sudo $0"
refused=$(unshare --mount --pid --uts --ipc --fork --mount-proc true 2>&1) ||
    cannot "this machine allows no mounts and namespaces ($refused)"
bin=${AXE_BIN:-${CARGO_TARGET_DIR:-$AXE_ROOT/target}/release}
name=${AXE_MODEL:-$AXE_DEFAULT_MODEL}
model=$(model_path "$name")
for file in "$bin/axed" "$bin/axectl"; do
    [[ -x $file ]] || die "$file is not there; build it with: cargo build --release --workspace"
done
[[ -r $model ]] || fetch_model "$name"
need_command debootstrap debootstrap
need_command systemd-nspawn systemd-container

place=$AXE_STATE/systemd-test
root=$place/root
mkdir -p "$place"

# The mirror that this machine's apt uses; nothing where it cannot be told, which lets debootstrap choose.
mirror() {
    grep -rhoE '(^deb +(\[[^]]*\] +)?|^URIs: *)https?://[^ ]*debian/?( |$)' /etc/apt/sources.list \
        /etc/apt/sources.list.d 2>/dev/null | grep -v security | grep -oE 'https?://[^ ]+' | head -n 1 || true
}

if [[ $fresh == yes || ! -e $root.complete ]]; then
    say "Making a Debian system in ${root#"$AXE_ROOT"/} (once; a minute or two)"
    rm -rf "$root" "$root.complete"
    from=$(mirror)
    debootstrap --variant=minbase --include="$packages" bookworm "$root" ${from:+"$from"} \
        >"$place/debootstrap.log" 2>&1 || {
        tail -n 15 "$place/debootstrap.log" >&2
        die "debootstrap failed (whole log: $place/debootstrap.log)"
    }
    touch "$root.complete"
fi

# Everything the system gets from here, in one folder that it sees read-only.
payload=$(mktemp -d)
trap 'rm -rf "$payload"' EXIT
mkdir "$payload/results"
install -m 755 "$here/lib/systemd_checks.sh" "$payload"
say "Making packages"
for version in 0.1.0-1 0.1.0-2; do
    deb=$(AXE_BIN=$bin "$here/package.sh" --deb-version "$version" | tail -n 1)
    cp "$deb" "$payload/axed_$version.deb"
done
cat >"$payload/checks.service" <<'UNIT'
[Unit]
Description=checks of axed.service
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/payload/systemd_checks.sh
ExecStopPost=/usr/bin/systemctl --no-block poweroff
StandardOutput=append:/results/checks.log
StandardError=append:/results/checks.log
UNIT

# Without --keep-unit and --register=no nspawn asks the host's systemd for a scope, and there may be none.
nspawn=(systemd-nspawn --quiet --directory="$root" --volatile=overlay --register=no --keep-unit --private-network
    --console=pipe)
refused=$("${nspawn[@]}" /bin/true </dev/null 2>&1) ||
    cannot "systemd-nspawn can start nothing in a container here ($refused)"

say "Booting it"
began=$SECONDS
nspawn+=(--boot --bind-ro="$payload:/payload" --bind="$payload/results:/results" --bind-ro="$model:/srv/model.gguf"
    --bind-ro="$payload/checks.service:/etc/systemd/system/checks.service"
    -- systemd.unit=checks.service systemd.wants=multi-user.target)
status=0
timeout --kill-after=20 "$limit" "${nspawn[@]}" </dev/null >"$place/console.log" 2>&1 || status=$?
cp "$payload/results/"* "$place/" 2>/dev/null || true
if [[ ! -e $payload/results/checks.log ]]; then
    tail -n 20 "$place/console.log" >&2
    die "the system did not come up (nspawn ended with $status; console: $place/console.log)"
fi
cat "$payload/results/checks.log"
if [[ ! -e $payload/results/complete ]]; then
    die "the checks did not come to their end within $limit s (nspawn ended with $status; see ${place#"$AXE_ROOT"/})"
fi
failed=$(grep -c '^not ok' "$payload/results/checks.log" || true)
passed=$(grep -c '^ok' "$payload/results/checks.log" || true)
note "$((SECONDS - began)) s"
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
