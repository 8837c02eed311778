# shellcheck shell=bash
# A browser and what drives it, for the tests and the picture of the studio. Sourced, never run.

AXE_STUDIO_VENV=$AXE_STATE/studio-venv

# setup_studio: Chromium from Debian, Playwright and axe-core from PyPI, when they are not there already.
setup_studio() {
    local stamp=$AXE_STUDIO_VENV/installed.txt requirements=$AXE_LIB/requirements-studio.txt log=$AXE_STATE/studio-pip.log
    need_command chromium chromium
    AXE_STUDIO_CHROMIUM=$(command -v chromium) || die "chromium was installed, but is not to be found"
    export AXE_STUDIO_CHROMIUM
    make_venv "$AXE_STUDIO_VENV"
    cmp -s "$requirements" "$stamp" && return 0
    say "Installing Playwright and axe-core from PyPI into ${AXE_STUDIO_VENV#"$AXE_ROOT"/} (55 MB to fetch, once)"
    if ! pip_in "$AXE_STUDIO_VENV" install --no-deps -r "$requirements" >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        die "pip could not install what the studio's tests need (whole log: $log)"
    fi
    cp "$requirements" "$stamp"
}
