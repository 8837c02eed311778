#!/usr/bin/env bash
# Writes a random GGUF with the sizes of Gemma 4 E4B in Q4_K_M: what such a model takes can be measured, what it says is
# nonsense.
#
# usage: scripts/make-synthetic-e4b.sh [OPTION…] FILE
#
#   --small    toy sizes, for tests
#   --hollow   a file of the right length without content: for `axed plan`; it takes no room on the disk
#   --seed N   other random numbers (1)
#
# FILE gets about 5 GB, with a tokenizer that has a token for each row of the table. The same seed gives the same bytes. It
# is written under another name until it is whole; one that is there and whole is left alone.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
# shellcheck source=scripts/lib/common.sh
. "$here/lib/common.sh"
# shellcheck source=scripts/lib/synthetic.sh
. "$here/lib/synthetic.sh"

synthetic "$AXE_LIB/synthetic_e4b.py" --seed -- "$@"
