//! One owner for every kind of OpenCL object.
//!
//! The wrappers of opencl3 panic when a release fails, which a lost device does make happen, so the handles are owned
//! here and a failing release is only logged.

use std::ffi::c_void;

use opencl3::error_codes::error_text;
use opencl3::types::cl_int;

/// An OpenCL object this process holds one reference to; the reference goes with it.
///
/// A raw pointer inside keeps it (and all that holds it) on the thread that made it.
#[derive(Debug)]
pub(super) struct Handle {
    raw: *mut c_void,
    release: unsafe fn(*mut c_void) -> Result<(), cl_int>,
    what: &'static str,
}

impl Handle {
    /// Takes over one reference to `raw`, which `release` gives back.
    ///
    /// # Safety
    /// `raw` must be a live object of the kind `release` takes, and the caller's reference to it must be its own to
    /// give away.
    #[allow(unsafe_code)]
    pub(super) unsafe fn own(
        raw: *mut c_void,
        release: unsafe fn(*mut c_void) -> Result<(), cl_int>,
        what: &'static str,
    ) -> Self {
        Self { raw, release, what }
    }

    /// The object, for a call that borrows it.
    pub(super) fn get(&self) -> *mut c_void {
        self.raw
    }
}

impl Drop for Handle {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: `own` was promised a live object of the right kind and a reference that is ours; it goes only here.
        if let Err(code) = unsafe { (self.release)(self.raw) } {
            tracing::warn!(
                object = self.what,
                code = error_text(code),
                "an OpenCL object could not be released"
            );
        }
    }
}
