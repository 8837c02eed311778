//! Where the OpenCL runtime is taken from.

use std::path::PathBuf;

/// The vendor folder the loader reads.
pub(super) fn vendor_folder() -> PathBuf {
    std::env::var_os("OCL_ICD_VENDORS").map_or_else(|| PathBuf::from("/etc/OpenCL/vendors"), PathBuf::from)
}

/// The platform that `AXE_OPENCL` asks for.
pub(super) fn preferred_platform() -> Option<&'static str> {
    None
}
