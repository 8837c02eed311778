#!/usr/bin/env bash
# Installs what the project needs to be built and run, and nothing that is there already.
#
# usage: scripts/setup.sh [--no-model] [--tests]
#
#   --no-model   do not fetch the default model
#   --tests      also what scripts/test.sh needs: PoCL, oclgrind, shellcheck, both test models
#
# It installs Debian packages (as root, or through sudo): the OpenCL loader and its headers, curl and
# Python's venv module. Everything else goes into .axe/ in the project: a CPU OpenCL runtime when the machine
# has no GPU platform, and the default model.
#
# environment:
#   AXE_OPENCL   intel, pocl or system; unset: a GPU platform if there is one, else intel, else pocl
#   AXE_MODEL    a GGUF file, a directory, or a name that scripts/fetch-model.sh knows (default: smollm2)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$here/lib/packages.sh"
# shellcheck source=scripts/lib/opencl.sh
. "$here/lib/opencl.sh"
# shellcheck source=scripts/lib/models.sh
. "$here/lib/models.sh"

with_model=1 with_tests=''
while (($#)); do
    case $1 in
        -h | --help)
            usage "$0"
            exit 0
            ;;
        --no-model) with_model='' ;;
        --tests) with_tests=1 ;;
        *) die_usage "unknown argument '$1' (see --help)" ;;
    esac
    shift
done

need_cargo
need_command curl curl
need_command python3 python3
apt_need ocl-icd-opencl-dev ocl-icd-libopencl1
setup_opencl
if [[ $with_tests ]]; then
    install_pocl
    install_intel_runtime || warn "the tests will run on PoCL only"
    need_command oclgrind oclgrind
    need_command shellcheck shellcheck
fi
if [[ $with_tests ]]; then
    for name in "${AXE_MODEL_NAMES[@]}"; do fetch_model "$name"; done
elif [[ $with_model ]]; then
    model=${AXE_MODEL:-$AXE_DEFAULT_MODEL}
    if [[ -e $model ]]; then
        :
    elif [[ $model == */* || $model == *.gguf ]]; then
        die "AXE_MODEL is '$model', and there is no such file"
    else
        fetch_model "$model"
    fi
fi
