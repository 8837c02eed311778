//! What only the C library can do to the process that the OpenCL runtimes live in.
#![allow(unsafe_code)]

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Gives memory back that the process holds without need once its kernels are compiled: freed heap, and pages of
/// libraries' code and constants, which an OpenCL runtime's compiler reads tens of megabytes of. They are the files'
/// own, so whatever is called again is read again, from the system's cache.
pub fn release_unused() {
    release_freed_memory();
    release_library_code();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn release_library_code() {
    // SAFETY: the callback gets what the loader holds still for as long as it runs, and keeps none of it.
    let _last = unsafe { nix::libc::dl_iterate_phdr(Some(release_segments), std::ptr::null_mut()) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn release_library_code() {}

/// Releases what of one library is never written, not even by the loader: segments that are mapped from its file without
/// the right to write, and, where the system lets this user, pages of large others that still are the file's. Where the loader had to change code, which no library of ours needs, that would be lost: those
/// are left alone.
///
/// # Safety
/// `info` must be what `dl_iterate_phdr` gives its callback.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe extern "C" fn release_segments(
    info: *mut nix::libc::dl_phdr_info,
    _size: usize,
    _data: *mut std::ffi::c_void,
) -> std::ffi::c_int {
    use nix::libc::{_SC_PAGESIZE, MADV_DONTNEED, MADV_PAGEOUT, PF_W, PT_DYNAMIC, PT_LOAD, madvise, sysconf};
    const DT_NULL: u64 = 0;
    const DT_TEXTREL: u64 = 22;
    const DT_FLAGS: u64 = 30;
    const DF_TEXTREL: u64 = 4;
    const LARGE: u64 = 1 << 20;
    // SAFETY: the caller's promise: a live description, with a name or none, and as many headers as it says.
    let (base, segments, is_file) = unsafe {
        let info = &*info;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        // The program itself has no name here, and what the system adds to every process has one without a folder.
        let is_file = !info.dlpi_name.is_null() && info.dlpi_name.read() == b'/'.cast_signed();
        (info.dlpi_addr, headers, is_file)
    };
    if !is_file {
        return 0;
    }
    for dynamic in segments.iter().filter(|header| header.p_type == PT_DYNAMIC) {
        let entries = (base + dynamic.p_vaddr) as *const [u64; 2];
        for i in 0..dynamic.p_memsz as usize / size_of::<[u64; 2]>() {
            // SAFETY: the loader has mapped the section and read the same entries.
            let [tag, value] = unsafe { entries.add(i).read() };
            if tag == DT_TEXTREL || tag == DT_FLAGS && value & DF_TEXTREL != 0 {
                return 0;
            }
            if tag == DT_NULL {
                break;
            }
        }
    }
    // SAFETY: asks for a number.
    let page = u64::try_from(unsafe { sysconf(_SC_PAGESIZE) }).unwrap_or(4096);
    for header in segments.iter().filter(|header| header.p_type == PT_LOAD) {
        // Whole pages inside the segment: what surrounds it is not ours to touch.
        let start = (base + header.p_vaddr).next_multiple_of(page);
        let end = (base + header.p_vaddr + header.p_filesz) / page * page;
        let advice = match header.p_flags & PF_W {
            0 => MADV_DONTNEED,
            // A compiler's tables and headers; what somebody wrote there stays, which costs the system a look at each page.
            _ if end.saturating_sub(start) > LARGE => MADV_PAGEOUT,
            _ => continue,
        };
        if start < end {
            // SAFETY: a private map of the library's file. The first advice goes to pages that nobody has written, which
            // come back from the file with the same bytes, whoever runs in them; the second loses nothing anywhere.
            let _released = unsafe { madvise(start as *mut _, (end - start) as usize, advice) };
        }
    }
    0
}

/// The sockets that a supervisor opened for this process and handed over (`LISTEN_FDS`, as systemd does); at the first
/// call only, since they belong to whoever takes them.
pub fn inherited_sockets() -> Vec<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Vec::new();
    }
    // Also keeps them from child processes; an error means that the variables speak of descriptors that are not open.
    match sd_notify::listen_fds_with_names(false) {
        // SAFETY: the supervisor opened them for this process, nothing here has a claim on them before, and they are
        // taken once.
        Ok(sockets) => sockets.map(|(socket, _name)| unsafe { OwnedFd::from_raw_fd(socket) }).collect(),
        Err(error) => {
            tracing::warn!(%error, "the sockets that were handed over cannot be used");
            Vec::new()
        }
    }
}
