#!/bin/bash
# Runs inside the system that scripts/test-systemd.sh boots: installs axed and checks the service. Prints a line a
# check, `ok` or `not ok`; makes /results/complete at the end.
set -u

check() { # check NAME COMMAND…: the command must succeed; what it printed is shown when it does not
    local name=$1 printed
    shift
    if printed=$("$@" 2>&1); then
        echo "ok      $name"
    else
        echo "not ok  $name ($*)"
        printf '%s\n' "$printed" | tail -n 20 | sed 's/^/        /'
    fi
}
equal() { [[ $1 == "$2" ]] || { echo "found '$1', expected '$2'"; false; }; }
show() { systemctl show axed --value -p "$1"; }
exits() { # exits CODE COMMAND…
    local wanted=$1 code=0
    shift
    "$@" || code=$?
    equal "exit status $code" "exit status $wanted"
}
holds() { # holds TEXT COMMAND…: the command prints the text
    local wanted=$1 printed
    shift
    printed=$("$@" 2>&1)
    [[ $printed == *"$wanted"* ]] || { echo "'$wanted' is not in: $printed"; false; }
}
soon() { # soon SECONDS COMMAND…: the command succeeds within that time
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || { "$@"; return; }
        sleep 0.2
    done
}
# complete: asks for four tokens over HTTP; this system has no curl.
complete() {
    local body='{"model":"model","prompt":"Hello","max_tokens":4}'
    exec 3<>/dev/tcp/127.0.0.1/8080 || return
    printf 'POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n' >&3
    printf 'Content-Length: %s\r\n\r\n%s' "${#body}" "$body" >&3
    timeout 60 cat <&3
    exec 3>&-
}
as() { local user=$1; shift; runuser -u "$user" -- "$@"; }

check "the package installs" dpkg --install /payload/axed_0.1.0-1.deb
check "it makes user and groups" getent passwd axed
check "and starts nothing by itself" equal "$(systemctl is-active axed)" inactive
check "the doctor asks for a model" exits 1 axectl doctor
sed -i 's|^#path = .*|path = "/srv/model.gguf"|' /etc/axed/daemon.toml
useradd --groups axed member
useradd stranger
systemctl daemon-reload

check "units verify" systemd-analyze verify --man=no axed.service axed@.service axed.socket
check "exposure is at most 2.5" systemd-analyze security --threshold=25 --no-pager axed.service

check "start returns when the daemon is ready" systemctl start axed
if [[ $(show MainPID) == 0 ]]; then
    # Nothing below means anything without a daemon.
    journalctl -u axed --no-pager
    touch /results/complete
    exit 1
fi
check "it is active" equal "$(show ActiveState)/$(show SubState)" active/running
check "readiness was notified" equal "$(show Type)" notify
check "its status line tells the address" holds "ready on http://" show StatusText
check "the watchdog is armed" equal "$(show WatchdogUSec)" 1min
check "it runs as its own user" equal "$(stat -c %U "/proc/$(show MainPID)")" axed
check "it has no capabilities" holds "CapEff:	0000000000000000" grep CapEff "/proc/$(show MainPID)/status"
check "cache, state and runtime folders are its own" \
    equal "$(stat -c %U:%G /var/cache/axed /var/lib/axed /run/axed | tr '\n' ' ')" "axed:axed axed:axed axed:axed "
check "the socket belongs to the group" equal "$(stat -c '%U:%G %a' /run/axed/admin.sock)" "axed:axed 660"

check "it answers, so the sandbox lets kernels be compiled and run" holds '"completion_tokens":4' complete
kept() { ls /var/cache/axed/programs/* /var/cache/axed/weights/* /var/cache/axed/pocl/*; }
check "what was compiled and repacked is kept in the cache folder" kept
check "root sees the status" holds '"state":"ready"' axectl --json status
check "a member sees the status" holds '"state":"ready"' as member axectl --json status
check "a member sees the table" exits 0 as member axectl status
check "a stranger is refused" exits 3 as stranger axectl status
check "and told what to do" holds "usermod -aG axed" as stranger axectl status
# With the file open to all, only the daemon's own look at who connects is left.
chmod 777 /run/axed /run/axed/admin.sock
check "a stranger is refused by the daemon itself" holds "may not operate this daemon" as stranger axectl status
chmod 750 /run/axed
chmod 660 /run/axed/admin.sock
figures() {
    local gpu name
    gpu=$(axectl --json gpu) || return
    for name in memory_total_bytes memory_available_bytes rss_bytes load; do
        [[ $gpu =~ \"$name\":[[0-9] ]] || { echo "$name is missing in $gpu"; return 1; }
    done
}

check "figures of the host come through the hardening" figures

first=$(show MainPID)
kill -KILL "$first"
restarted() { [[ $(show MainPID) != "$first" && $(show MainPID) != 0 && $(show ActiveState) == active ]]; }
check "it comes back after a crash" soon 30 restarted
check "and answers, the stale socket replaced" soon 10 holds '"state":"ready"' axectl --json status

# A watchdog of two seconds, for this test only: it must not bite a daemon that is merely idle.
mkdir -p /run/systemd/system/axed.service.d
printf '[Service]\nWatchdogSec=2\n' >/run/systemd/system/axed.service.d/short.conf
systemctl daemon-reload
check "restart by hand" systemctl restart axed
first=$(show MainPID)
sleep 6
check "an idle daemon keeps the watchdog quiet" equal "$(show MainPID)" "$first"
kill -STOP "$first"
check "a daemon that hangs is killed and started again" soon 60 restarted
journalctl --sync
check "the journal says why" holds "Watchdog timeout" journalctl -u axed --no-pager

# Settings that can change live do so, without another process; what is wrong changes nothing.
first=$(show MainPID)
sed -i 's|^queue_capacity = .*|queue_capacity = 7|' /etc/axed/daemon.toml
check "reload" systemctl reload axed
check "takes what can change live" holds "room for 7" axectl status
sed -i 's|^queue_capacity = .*|queue_capacity = "many"|' /etc/axed/daemon.toml
check "a wrong configuration fails the reload" exits 1 systemctl reload axed
check "is named in the journal" holds "server.queue_capacity" journalctl -u axed --no-pager
check "and changes nothing" holds "room for 7" axectl status
sed -i 's|^queue_capacity = .*|queue_capacity = 64|' /etc/axed/daemon.toml
kill -HUP "$first"
check "SIGHUP reloads, too" soon 20 holds "room for 64" axectl status
check "all in one process" equal "$(show MainPID)" "$first"

# Only debug builds can be told to hang.
if [[ $(axectl version) == *"(debug"* ]]; then
    printf '[Service]\nEnvironment=AXE_FAULTS=/run/axed/faults AXE_DEVICE_PASS_TIMEOUT_S=2\n' \
        >/run/systemd/system/axed.service.d/faults.conf
    systemctl daemon-reload
    check "restart with faults to order" systemctl restart axed
    first=$(show MainPID)
    echo "hang 1 600" >/run/axed/faults
    complete >/dev/null 2>&1 &
    check "a daemon whose device never answers is killed and started again" soon 60 restarted
    rm -f /run/systemd/system/axed.service.d/faults.conf /run/axed/faults
    systemctl daemon-reload
    check "and serves again" soon 60 holds '"completion_tokens":4' complete
fi

prioritised() {
    local entry
    entry=$(journalctl -u axed --no-pager -o json -n 1 AXE_TARGET=axe::daemon::supervisor) || return
    [[ $entry == *'"PRIORITY":"6"'* && $entry == *'"AXE_ADDRESS"'* ]] || { echo "$entry"; return 1; }
}
check "with priorities and fields" prioritised
check "the doctor finds nothing that fails" exits 0 axectl doctor
check "the journal has the daemon's own lines" holds "ready" journalctl -u axed _COMM=axed --no-pager
check "axectl has them, too" holds "ready" axectl logs

check "stop drains" systemctl stop axed
check "and ends with success" equal "$(show Result) $(show ExecMainStatus)" "success 0"
check "the socket is gone" test ! -e /run/axed/admin.sock
check "axectl says that nobody is there" exits 3 axectl status

check "a second start works" systemctl start axed
check "axectl drain ends the daemon" axectl drain
ended() { [[ $(show ActiveState) == inactive ]]; }
check "for good, without a restart" soon 20 ended
check "and with success" equal "$(show Result) $(show ExecMainStatus)" "success 0"

check "systemd holds the port" systemctl start axed.socket
check "and starts no daemon before it is used" equal "$(show ActiveState)" inactive
check "which the first connection does" soon 60 holds '"completion_tokens":4' complete
check "the daemon serves that socket" holds "the public socket was handed over" axectl logs
# Each connection must come about, whatever is answered.
unbroken() {
    local end=$((SECONDS + 20))
    systemctl restart axed &
    while kill -0 $! 2>/dev/null && ((SECONDS < end)); do
        timeout 20 bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080' || return
        sleep 0.05
    done
    wait $!
}
check "no connection is refused while it restarts" unbroken
check "and it answers again" soon 30 holds '"completion_tokens":4' complete
check "stopping both closes the port" systemctl stop axed.socket axed.service
check "for good" exits 1 bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080'

# One daemon a card: without a card the unit refuses, and says which it looked for.
check "a unit for a card that is not there does not start" exits 1 systemctl start axed@0000:03:00.0
check "and says why" holds "Assertion failed for axed@0000:03:00.0.service - axed, text generation on the card at" \
    journalctl --no-pager -u axed@0000:03:00.0

printf 'alice:secret-of-alice\n' >/etc/credstore.keys
chmod 600 /etc/credstore.keys
mkdir -p /run/systemd/system/axed.service.d
printf '[Service]\nLoadCredential=api_keys:/etc/credstore.keys\n' >/run/systemd/system/axed.service.d/keys.conf
systemctl daemon-reload
check "it starts with keys from a credential" systemctl start axed
check "which are asked for" holds "401 Unauthorized" complete
check "and told where they come from" holds "credential" axectl config
rm /run/systemd/system/axed.service.d/keys.conf
systemctl daemon-reload

check "it starts before the upgrade" systemctl restart axed
first=$(show MainPID)
check "the package upgrades" dpkg --install /payload/axed_0.1.0-2.deb
check "the daemon goes on with the new one" soon 60 restarted
check "and the operator's configuration is kept" grep -q '^path = "/srv/model.gguf"' /etc/axed/daemon.toml
check "it answers after the upgrade" soon 30 holds '"completion_tokens":4' complete
systemctl stop axed

sed -i 's|^path = .*|path = "/nowhere/model.gguf"|' /etc/axed/daemon.toml
check "a missing model fails the start" exits 1 systemctl start axed
check "and the journal names it" holds "/nowhere/model.gguf" journalctl -u axed --no-pager
systemctl stop axed

sed -i 's|^path = .*|path = "/srv/model.gguf"|' /etc/axed/daemon.toml
systemctl reset-failed axed
check "it starts before the removal" systemctl start axed
check "removing the package ends the daemon" dpkg --remove axed
check "its programs are gone" test ! -e /usr/bin/axed -a ! -e /usr/bin/axectl
check "nothing runs" equal "$(systemctl is-active axed)" inactive
check "the configuration stays until the purge" test -e /etc/axed/daemon.toml
touch /var/lib/axed/kept.gguf
check "the package purges" dpkg --purge axed
check "nothing of it is left but what people put there" \
    equal "$(find /etc/axed /var/cache/axed /var/lib/axed /run/axed /usr/share/doc/axed -type f 2>/dev/null | tr '\n' ' ')" \
    "/var/lib/axed/kept.gguf "
check "and dpkg knows it no more" exits 1 dpkg --status axed

journalctl --no-pager >/results/journal.log 2>&1
touch /results/complete
