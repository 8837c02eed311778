#!/usr/bin/env bash
# Fetches a model by name into .axe/models, checks its sha256 and prints its path.
#
# usage: scripts/fetch-model.sh NAME…
#
#   smollm2       SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache 2.0: the default model
#   gemma3-270m   Gemma 3 270M base, Q4_K_M, 253 MB, Gemma terms of use: for tests and benchmarks
#
# tiny-diffusion, a DiffusionGemma in miniature, is part of the project: nothing is fetched, its path is printed.
#
# A model that is there and right is not fetched again. An interrupted fetch can simply be repeated.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/packages.sh
. "$here/lib/packages.sh"
# shellcheck source=scripts/lib/models.sh
. "$here/lib/models.sh"

case ${1:-} in
    -h | --help)
        usage "$0"
        exit 0
        ;;
    '') die_usage "which model? known are: ${AXE_MODEL_NAMES[*]} (see --help)" ;;
esac
for name in "$@"; do
    fetch_model "$name"
    model_path "$name"
done
