#!/usr/bin/env bash
# Makes docs/studio.png and docs/edit.png: the studio in a browser, with an answer of the miniature in mid-replay, and its
# editor, with an edit that can be accepted.
#
# usage: scripts/studio-screenshot.sh
#
# It builds the daemon in release, and installs what it needs like the stage `studio` of scripts/test.sh.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$here/lib/packages.sh"
# shellcheck source=scripts/lib/opencl.sh
. "$here/lib/opencl.sh"
# shellcheck source=scripts/lib/studio.sh
. "$here/lib/studio.sh"

case ${1:-} in
    '') ;;
    -h | --help)
        usage "$0"
        exit 0
        ;;
    *) die_usage "unknown argument '$1' (see --help)" ;;
esac

AXE_MODEL='' "$here/setup.sh" --no-model
use_opencl "$(<"$AXE_RUNTIME_FILE")"
setup_studio
[[ -n ${AXE_TEST_DAEMON:-} ]] || build_release
"$AXE_STUDIO_VENV/bin/python" "$AXE_LIB/studio_screenshot.py" "$AXE_ROOT/docs"
