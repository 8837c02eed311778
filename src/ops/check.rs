//! Checks of sizes before a launch: a kernel itself checks nothing.

use super::kernels::OpsError;
use crate::device::Buffer;

/// A size as a kernel's `int`.
pub(super) fn int(op: &'static str, what: &str, value: usize) -> Result<i32, OpsError> {
    i32::try_from(value)
        .map_err(|_| OpsError::Shape { op, what: format!("{what} is {value}, more than 2147483647") })
}

/// What the caller must keep to.
pub(super) fn check(op: &'static str, holds: bool, what: impl FnOnce() -> String) -> Result<(), OpsError> {
    if holds { Ok(()) } else { Err(OpsError::Shape { op, what: what() }) }
}

/// A buffer must have room for that many f32.
pub(super) fn holds_floats(
    op: &'static str,
    name: &str,
    buffer: &Buffer,
    floats: usize,
) -> Result<(), OpsError> {
    check(op, buffer.size() >= floats * 4, || {
        format!("{name} has {} bytes, the launch needs {}", buffer.size(), floats * 4)
    })
}
