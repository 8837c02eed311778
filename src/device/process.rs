//! What only the C library can do to the process that the OpenCL runtimes live in.
#![allow(unsafe_code)]

use std::io::Write;

/// Ends the process at once, without the exit handlers of libraries: those of OpenCL runtimes crash or hang while
/// another thread still compiles kernels.
pub fn leave(code: u8) -> ! {
    // The only buffer of ours; a closed standard output is no reason to stay.
    let _flushed = std::io::stdout().flush();
    // SAFETY: takes a number, touches no memory of ours and does not return.
    unsafe { nix::libc::_exit(i32::from(code)) }
}

/// Gives freed memory back to the system, which glibc keeps otherwise: after a large request that is much.
pub fn release_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: only touches free chunks, under the allocator's own locks; any thread may call it at any time.
    let _released = unsafe { nix::libc::malloc_trim(0) };
}
