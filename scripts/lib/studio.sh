# shellcheck shell=bash
# A browser and what drives it, for the tests and the picture of the studio. Sourced, never run.

AXE_STUDIO_VENV=$AXE_STATE/studio-venv

# setup_studio: Chromium from Debian, Playwright and axe-core from PyPI, when they are not there already.
setup_studio() {
    need_command chromium chromium
    AXE_STUDIO_CHROMIUM=$(command -v chromium) || die "chromium was installed, but is not to be found"
    export AXE_STUDIO_CHROMIUM
    pinned_venv "$AXE_STUDIO_VENV" studio "Playwright and axe-core (55 MB to fetch, once)"
}
