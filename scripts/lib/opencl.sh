# shellcheck shell=bash
# Which OpenCL runtime the project uses, and how to get it. Sourced, never run.
#
# AXE_OPENCL   intel   Intel's CPU runtime, from PyPI, kept inside the project
#              pocl    Debian's PoCL
#              system  whatever the machine's own loader shows; nothing is installed
#              (unset) a GPU platform of the machine when there is one, else intel, else pocl

AXE_OPENCL_DIR=$AXE_STATE/opencl
# The daemon looks into this folder by itself when the loader shows it no platform.
AXE_INTEL_VENDORS=$AXE_OPENCL_DIR/vendors
AXE_POCL_VENDORS=$AXE_OPENCL_DIR/vendors-pocl
AXE_RUNTIME_FILE=$AXE_OPENCL_DIR/runtime

# opencl_devices [VENDORS_DIR]: one line a device: kind, platform, name, driver; tab-separated.
opencl_devices() {
    if [[ -n ${1:-} ]]; then
        OCL_ICD_VENDORS=$1 python3 "$AXE_LIB/opencl_devices.py"
    else
        env -u OCL_ICD_VENDORS python3 "$AXE_LIB/opencl_devices.py"
    fi
}

# A look at the machine's own .icd files is enough to know that there can be no GPU platform.
system_has_gpu_platform() {
    local icd
    for icd in /etc/OpenCL/vendors/*.icd; do
        [[ -e $icd && ${icd##*/} != pocl* && ${icd##*/} != oclgrind* ]] || continue
        opencl_devices | grep -q '^gpu' && return 0
        return 1
    done
    return 1
}

intel_runtime_ready() {
    local library
    [[ -r $AXE_INTEL_VENDORS/intel.icd ]] || return 1
    read -r library <"$AXE_INTEL_VENDORS/intel.icd" || return 1
    [[ $library == "$AXE_VENV"/* && -e $library ]] &&
        cmp -s "$AXE_LIB/requirements-opencl.txt" "$AXE_OPENCL_DIR/installed.txt"
}

# The wheels hold x86-64 Linux libraries only.
intel_runtime_possible() { [[ $(uname -sm) == "Linux x86_64" ]]; }

install_intel_runtime() {
    intel_runtime_ready && return 0
    intel_runtime_possible || {
        warn "Intel's CPU runtime exists for x86-64 Linux only, this is $(uname -sm)"
        return 1
    }
    say "Installing Intel's OpenCL CPU runtime from PyPI into ${AXE_VENV#"$AXE_ROOT"/} (270 MB to fetch, once)"
    rm -f "$AXE_OPENCL_DIR/installed.txt"
    make_venv "$AXE_VENV"
    local log=$AXE_OPENCL_DIR/pip.log library
    if ! pip_in "$AXE_VENV" install --no-deps --require-hashes -r "$AXE_LIB/requirements-opencl.txt" >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        warn "pip could not install Intel's runtime (whole log: $log)"
        return 1
    fi
    library=$AXE_VENV/lib/libintelocl.so
    [[ -e $library ]] || {
        warn "Intel's runtime was installed, but $library is not there"
        return 1
    }
    # The .icd file in the package points to a place that does not exist, so the project writes its own.
    write_file "$AXE_INTEL_VENDORS/intel.icd" "$library"
    if ! opencl_devices "$AXE_INTEL_VENDORS" | grep -q '^cpu'; then
        warn "Intel's runtime was installed, but shows no CPU device"
        rm -f "$AXE_INTEL_VENDORS/intel.icd"
        return 1
    fi
    cp "$AXE_LIB/requirements-opencl.txt" "$AXE_OPENCL_DIR/installed.txt"
}

install_pocl() {
    apt_need pocl-opencl-icd
    # A folder of its own keeps the machine's other platforms out of sight.
    local icd=/etc/OpenCL/vendors/pocl.icd
    [[ -r $icd ]] || die "pocl-opencl-icd is installed, but $icd is not there"
    write_file "$AXE_POCL_VENDORS/pocl.icd" "$(<"$icd")"
}

# write_file PATH TEXT: only when the text is new, and never half.
write_file() {
    [[ -r $1 && $(<"$1") == "$2" ]] && return 0
    mkdir -p "$(dirname "$1")"
    printf '%s\n' "$2" >"$1.new"
    mv "$1.new" "$1"
}

# setup_opencl: installs what AXE_OPENCL asks for and remembers the choice for env.sh.
setup_opencl() {
    local choice=${AXE_OPENCL:-auto}
    case $choice in
        auto)
            if system_has_gpu_platform; then
                choice=system
            elif install_intel_runtime; then
                choice=intel
            else
                warn "taking Debian's PoCL instead, which is slower"
                install_pocl
                choice=pocl
            fi
            ;;
        intel)
            if ! install_intel_runtime; then
                warn "taking Debian's PoCL instead, which is slower"
                install_pocl
                choice=pocl
            fi
            ;;
        pocl) install_pocl ;;
        system)
            [[ -n $(opencl_devices) ]] ||
                warn "AXE_OPENCL=system, but this machine's OpenCL loader shows no device"
            ;;
        *) die_usage "AXE_OPENCL is '$choice'; it must be intel, pocl or system, or unset" ;;
    esac
    write_file "$AXE_RUNTIME_FILE" "$choice"
    if [[ $choice != system ]] && intel_gpu_present; then
        warn "there is an Intel GPU here (/dev/dri) but no OpenCL platform for it: install Intel's compute runtime" \
            "(package intel-opencl-icd, from Intel when Debian's is too old for the card) and run this again"
    fi
}

intel_gpu_present() {
    local vendor
    for vendor in /sys/class/drm/renderD*/device/vendor; do
        [[ -r $vendor && $(<"$vendor") == 0x8086 ]] && return 0
    done
    return 1
}

# use_opencl RUNTIME: makes this process and its children see that runtime. The daemon understands AXE_OPENCL too, but
# what was asked for need not be what could be had, so the choice that was made is all it shall see.
use_opencl() {
    case $1 in
        intel) export OCL_ICD_VENDORS=$AXE_INTEL_VENDORS ;;
        pocl) export OCL_ICD_VENDORS=$AXE_POCL_VENDORS ;;
        *)
            unset OCL_ICD_VENDORS
            return
            ;;
    esac
    unset AXE_OPENCL
}
