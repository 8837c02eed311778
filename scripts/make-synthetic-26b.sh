#!/usr/bin/env bash
# Writes a random checkpoint with the sizes of DiffusionGemma 26B-A4B: what such a model takes can be measured, what it says
# is nonsense.
#
# usage: scripts/make-synthetic-26b.sh [OPTION…] DIR
#
#   --layers N   the first N of its 30 layers (the last one sees everything, as in the model)
#   --small      toy sizes, for tests
#   --hollow     files of the right length without content: for `axed plan`; they take no room on the disk
#   --seed N     other random numbers (1)
#
# DIR gets a directory of format dg-w4a16-v1: about 17 GB, experts in 4 bits, everything else bf16, and a tokenizer with a
# token for each row of the table. The same seed gives the same bytes. Files are written under another name until they are
# whole: when it was cut off, the same command goes on with the first file that is missing.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/synthetic.sh
. "$here/lib/synthetic.sh"

synthetic "$AXE_LIB/synthetic_26b.py" --layers --seed -- "$@"
