# shellcheck shell=sh
# To be sourced, by bash, zsh or sh:   . scripts/env.sh
#
# Lets a shell run the built binaries directly: PATH gets target/release, OCL_ICD_VENDORS points to the OpenCL
# runtime that scripts/setup.sh chose. In a plain sh the file cannot know its own place: source it from the
# project's root there, or set AXE_ROOT before.

# shellcheck disable=SC3028,SC3054,SC2296 # each shell's own name for the sourced file
if [ -n "${BASH_VERSION:-}" ]; then
    _axe_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
elif [ -n "${ZSH_VERSION:-}" ]; then
    _axe_root=$(eval 'cd -- "${${(%):-%x}:A:h}/.." && pwd -P')
else
    _axe_root=${AXE_ROOT:-$(pwd -P)}
fi

if [ -r "$_axe_root/scripts/env.sh" ]; then
    AXE_ROOT=$_axe_root
    export AXE_ROOT
    case $(cat "$AXE_ROOT/.axe/opencl/runtime" 2>/dev/null) in
        intel)
            OCL_ICD_VENDORS=$AXE_ROOT/.axe/opencl/vendors
            export OCL_ICD_VENDORS
            ;;
        pocl)
            OCL_ICD_VENDORS=$AXE_ROOT/.axe/opencl/vendors-pocl
            export OCL_ICD_VENDORS
            ;;
    esac
    case ":$PATH:" in
        *":$AXE_ROOT/target/release:"*) ;;
        *) PATH=$AXE_ROOT/target/release:$PATH ;;
    esac
    export PATH
    case $- in
        *i*) echo "axe: binaries from $AXE_ROOT/target/release, OpenCL from ${OCL_ICD_VENDORS:-the system}" ;;
    esac
else
    echo "env.sh: source it from the project's root, or set AXE_ROOT to that folder" >&2
fi
unset _axe_root
