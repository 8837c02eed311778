#!/usr/bin/env bash
# Measures prefill and decode, and compares them with llama.cpp in the same run.
#
# usage: scripts/bench.sh [--peer] [--rounds N] [--models NAME,…] [--quick] [--threads N] [--json FILE]
#        scripts/bench.sh diffusion [--peer] [--rounds N] [--quick] [--threads N] [--json FILE]
#        scripts/bench.sh block-scaling [--peer] [--rounds N] [--models NAME,…] [--sets NAME,…] [--blocks B,…] [--context N]
#                         [--temp T] [--tokens N] [--quick] [--threads N] [--json FILE]
#        scripts/bench.sh load [--clients N] [--seconds N] [--models NAME] [--quick] [--json FILE]
#        scripts/bench.sh kernels [ARGUMENT…]
#
#   --peer          also llama.cpp's CPU build (from PyPI, kept in .axe/bench-venv), on the same file with as many threads
#   --rounds N      paired rounds (5)
#   --models LIST   names that scripts/fetch-model.sh knows (smollm2,gemma3-270m)
#   --quick         2 rounds with fewer tokens: to see that it works, not to quote
#   --threads N     threads, and processors, for each side (all)
#   --json FILE     also every round as JSON; - for standard output
#
#   diffusion       denoising steps of a random DiffusionGemma of a billion parameters; with --peer beside PyTorch, in f32
#                   and bf16 (a venv in .axe, several GB to fetch)
#   block-scaling   decoding at several block sizes, on the texts of scripts/prompts; with --peer beside llama.cpp, the better
#                   of its plain decoding and its own n-gram speculation for each set of texts (3 rounds)
#   --sets LIST     which texts (prose,code,editing,extraction,chat)
#   --blocks LIST   block sizes, auto among them (1,4,8,16,auto)
#   --context N     positions of the cache (2048)
#   --temp T        temperature; 0 is greedy (0)
#   --tokens N      most tokens of an answer (128); fewer where it comes to an end before
#   load            the daemon under many clients at once: streams, those who leave or are slow, garbage. Fails when a slot,
#                   memory or a descriptor is lost, an answer is wrong, or /health is slow (the first of --models is served)
#   --clients N     clients at once (64)
#   --seconds N     for so long, after a sixth of it to get warm (120; with --quick 12)
#   kernels         every kernel by itself: GB/s and GFLOP/s as a share of what this device can do (axed bench-ops)
#
# Run it on a quiet machine; it warns when other processes took part. scripts/lib/bench.py, bench_blocks.py and bench_load.py say how
# they measure.
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
# shellcheck source=scripts/lib/daemon.sh
. "$here/lib/daemon.sh"

peer='' rounds='' models=smollm2,gemma3-270m quick='' threads=$(nproc) json='' kernels='' diffusion=''
load='' clients=64 seconds='' of_load='' block_scaling='' sets='' blocks=1,4,8,16,auto context=2048 temp=0 tokens='' of_scaling=''

# value_of FLAG COUNT VALUE: the value of a flag that needs one.
value_of() {
    (($2 >= 2)) || die_usage "$1 needs a value (see --help)"
    echo "$3"
}

while (($#)); do
    case $1 in
        -h | --help)
            usage "$0"
            exit 0
            ;;
        kernels)
            kernels=1
            shift
            break
            ;;
        diffusion) diffusion=1 ;;
        block-scaling) block_scaling=1 ;;
        load) load=1 ;;
        --peer) peer=1 ;;
        --quick) quick=1 ;;
        --rounds | --models | --threads | --json | --sets | --blocks | --context | --temp | --tokens | --clients | --seconds)
            value=$(value_of "$1" $# "${2:-}")
            [[ ! " --sets --blocks --context --temp --tokens " == *" $1 "* ]] || of_scaling=$1
            [[ ! " --clients --seconds " == *" $1 "* ]] || of_load=$1
            printf -v "${1#--}" '%s' "$value"
            shift
            ;;
        *) die_usage "unknown argument '$1' (see --help)" ;;
    esac
    shift
done
[[ $block_scaling || ! $of_scaling ]] || die_usage "$of_scaling belongs to block-scaling (see --help)"
[[ $load || ! $of_load ]] || die_usage "$of_load belongs to load (see --help)"
seconds=${seconds:-$([[ $quick ]] && echo 12 || echo 120)}
usual=5
[[ ! $block_scaling ]] || usual=3
rounds=${rounds:-$([[ $quick ]] && echo 2 || echo "$usual")}
tokens=${tokens:-$([[ $quick ]] && echo 24 || echo 128)}
for number in "$rounds" "$threads" "$tokens" "$clients" "$seconds"; do
    [[ $number =~ ^[1-9][0-9]{0,3}$ ]] || die_usage "'$number' is not a number from 1 to 9999 (see --help)"
done
[[ $context =~ ^[1-9][0-9]{2,6}$ ]] || die_usage "--context '$context' is not a number from 100 to 9999999 (see --help)"
[[ $temp =~ ^([01](\.[0-9]+)?|2(\.0+)?)$ ]] || die_usage "--temp '$temp' is not a number from 0 to 2 (see --help)"
[[ $blocks =~ ^(auto|[1-9]|1[0-6])(,(auto|[1-9]|1[0-6]))*$ ]] ||
    die_usage "--blocks '$blocks' is no list of auto and numbers from 1 to 16 (see --help)"
if [[ $sets ]]; then
    IFS=, read -ra names <<<"$sets"
    for name in "${names[@]}"; do
        [[ $name && -d $here/prompts/$name ]] || die_usage "--sets: there are no texts '$name' in scripts/prompts (see --help)"
    done
fi
((threads <= $(nproc))) || die_usage "--threads $threads: there are $(nproc) processors here"

"$here/setup.sh" --no-model
build_release
use_opencl "$(cat "$AXE_RUNTIME_FILE")"
export AXE_DEVICE_CACHE_DIR=${AXE_DEVICE_CACHE_DIR:-$AXE_STATE/cache}
if [[ $kernels ]]; then
    exec "$AXE_BIN/axed" bench-ops "$@"
fi

if [[ $diffusion ]]; then
    unset AXE_MODEL AXE_CONFIG
    venv=$AXE_STATE/torch-venv requirements=$here/peer/requirements.txt
    make_venv "$venv"
    if ! cmp -s "$requirements" "$venv/installed.txt"; then
        say "Installing PyTorch from PyPI into ${venv#"$AXE_ROOT"/}: it makes the checkpoint, and is the peer"
        pip_in "$venv" install --quiet -r "$requirements" >&2 || die "pip could not install PyTorch (see above)"
        cp "$requirements" "$venv/installed.txt"
    fi
    checkpoint=$AXE_STATE/bench/mid-diffusion
    if [[ ! -e $checkpoint/config.json ]]; then
        say "Making a random checkpoint of a billion parameters (2.1 GB)"
        rm -rf "$checkpoint.partial"
        "$venv/bin/python" "$here/peer/diffusion_torch.py" make "$checkpoint.partial"
        mv "$checkpoint.partial" "$checkpoint"
    fi
    options=()
    [[ ! $peer ]] || options+=(--peer-python "$venv/bin/python" --peer-script "$here/peer/diffusion_torch.py")
    [[ ! $json ]] || options+=(--json "$json")
    [[ ! $quick ]] || options+=(--steps 2)
    runtime=$(opencl_devices "${OCL_ICD_VENDORS:-}" | awk -F '\t' 'NR == 1 { print $2 " " $4 }')
    exec python3 "$AXE_LIB/bench_diffusion.py" --axed "$AXE_BIN/axed" --model "$checkpoint" --rounds "$rounds" \
        --threads "$threads" --build "$(build_name)" --runtime "${runtime:-none}" "${options[@]}"
fi

# The files are settled here; a configuration for another purpose must not change what is measured.
unset AXE_MODEL AXE_PORT AXE_CONFIG AXE_API_KEY SERVED_MODEL_NAME
specs=()
IFS=, read -ra names <<<"$models"
if [[ $load ]]; then
    fetch_model "${names[0]}"
    options=()
    [[ ! $json ]] || options+=(--json "$json")
    AXE_TEST_DAEMON=$AXE_BIN/axed exec python3 "$AXE_LIB/bench_load.py" --model "$(model_path "${names[0]}")" \
        --clients "$clients" --seconds "$seconds" --build "$(build_name)" "${options[@]}"
fi
for name in "${names[@]}"; do
    fetch_model "$name"
    path=$(model_path "$name")
    quantisation=${path%.gguf}
    quantisation=${quantisation##*-}
    specs+=("$name=${quantisation^^}=$path")
done

options=()
if [[ $peer ]]; then
    venv=$AXE_STATE/bench-venv requirements=$AXE_LIB/requirements-bench.txt
    make_venv "$venv"
    if ! cmp -s "$requirements" "$venv/installed.txt"; then
        say "Installing llama.cpp's CPU build from PyPI into ${venv#"$AXE_ROOT"/}"
        pip_in "$venv" install --quiet -r "$requirements" >&2 || die "pip could not install the peer (see above)"
        cp "$requirements" "$venv/installed.txt"
    fi
    options+=(--peer-python "$venv/bin/python" --peer-version "$(sed -n '/^#/!p' "$requirements")")
fi
if [[ $json ]]; then
    [[ $json == - ]] || json=$(realpath -m -- "$json")
    options+=(--json "$json")
fi

runtime=$(opencl_devices "${OCL_ICD_VENDORS:-}" | awk -F '\t' 'NR == 1 { print $2 " " $4 }')
cd "$AXE_ROOT"
if [[ $block_scaling ]]; then
    [[ ! $sets ]] || options+=(--sets "$sets")
    [[ ! $quick ]] || options+=(--quick)
    exec python3 "$AXE_LIB/bench_blocks.py" --axed "$AXE_BIN/axed" --prompts "$here/prompts" --blocks "$blocks" \
        --context "$context" --temperature "$temp" --tokens "$tokens" --rounds "$rounds" --threads "$threads" \
        --build "$(build_name)" --runtime "${runtime:-none}" "${options[@]}" "${specs[@]}"
fi
prefill=512 decode=128
[[ ! $quick ]] || prefill=128 decode=24
exec python3 "$AXE_LIB/bench.py" --axed "$AXE_BIN/axed" --port "$(free_port)" --rounds "$rounds" --threads "$threads" \
    --prefill "$prefill" --decode "$decode" --build "$(build_name)" --runtime "${runtime:-none}" \
    "${options[@]}" "${specs[@]}"
