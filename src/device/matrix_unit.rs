//! Whether kernels may use the matrix unit of the host's processor: AMX with bf16 and bytes.
//!
//! OpenCL tells nothing of it, but a CPU device's work-items run in this process. Linux hands the unit's registers, 8 KiB a
//! thread, only to processes that ask; one that does not ask is killed by its first tile instruction.

use super::discover::{DeviceInfo, DeviceKind};

impl DeviceInfo {
    /// Whether this device runs on the host's processor, that has a matrix unit (AMX, bf16 and int8), its compiler is known to pass
    /// inline assembly on, and the kernel lets this process use it, for which it is asked here.
    pub fn grants_matrix_unit(&self) -> bool {
        self.kind == DeviceKind::Cpu
            && (self.is_intel() || self.is_pocl())
            && self.native_float_width >= 16
            && processor_has_it()
            && permitted()
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, unused_unsafe)] // some versions of the standard library have it safe
fn processor_has_it() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AVX512F_AND_BW: u32 = 1 << 16 | 1 << 30;
    const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25; // bf16, tiles, int8
    // SAFETY: every processor of this architecture has the instruction; it writes registers only.
    let (most, features) = unsafe { (__cpuid(0).eax, __cpuid_count(7, 0)) };
    most >= 7 && features.ebx & AVX512F_AND_BW == AVX512F_AND_BW && features.edx & AMX == AMX
}

/// Asks for the tile registers. They are the process's from then on, threads that exist included; asking again is fine. A
/// kernel refuses that does not know them, or where a thread's alternate signal stack is too small for them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[allow(unsafe_code)]
fn permitted() -> bool {
    use nix::libc::{SYS_arch_prctl, c_long, syscall};
    const ARCH_GET_XCOMP_SUPP: c_long = 0x1021;
    const ARCH_REQ_XCOMP_PERM: c_long = 0x1023;
    const TILE_CONFIG: u64 = 17;
    const TILE_DATA: u64 = 18;
    let mut supported = 0u64;
    // SAFETY: the kernel writes one u64 through the pointer, which is ours, and nothing else.
    let told = unsafe { syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &raw mut supported) };
    let both = 1 << TILE_CONFIG | 1 << TILE_DATA;
    if told != 0 || supported & both != both {
        return false;
    }
    // SAFETY: takes two numbers; widens what the kernel saves of this process's threads and changes no memory of ours.
    let granted = unsafe { syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA as c_long) };
    if granted != 0 {
        let error = std::io::Error::last_os_error();
        tracing::info!(%error, "the kernel does not let this process use the processor's matrix unit");
    }
    granted == 0
}

#[cfg(not(target_arch = "x86_64"))]
fn processor_has_it() -> bool {
    false
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn permitted() -> bool {
    false
}
