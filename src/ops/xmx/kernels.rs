//! The family on one device: its programs, built when first asked for.

use std::cell::RefCell;
use std::collections::HashMap;

use super::programs::{MANY_REGISTERS, OPTIONS, Which};
use crate::device::{Buffer, Device, DeviceInfo, DeviceKind, Kernel, Program, Purpose};
use crate::ops::OpsError;

/// Kernels of the `xmx` family on one device.
pub struct Xmx {
    built: RefCell<HashMap<Which, Program>>,
    /// Whether the device's compiler takes options for registers.
    takes_registers: bool,
    /// Stands for buffers a launch does not use.
    unused: Buffer,
}

impl Xmx {
    /// Kernels for `device`; none where it has no sub-groups with loads of blocks.
    ///
    /// # Errors
    /// No memory for the few bytes that every launch shares.
    pub fn new(device: &Device) -> Result<Option<Self>, OpsError> {
        let info = device.info();
        let wanted =
            ["cl_intel_subgroups", "cl_intel_subgroups_short", "cl_intel_subgroups_char", "cl_khr_fp16"];
        if !wanted.iter().all(|name| info.has_extension(name)) {
            return Ok(None);
        }
        Ok(Some(Self {
            built: RefCell::default(),
            takes_registers: info.kind == DeviceKind::Gpu && info.is_intel(),
            unused: device.alloc(Purpose::Scratch, 64)?,
        }))
    }

    /// Whether the device has the matrix engine, so that the family is worth taking there.
    pub fn has_matrix_engine(info: &DeviceInfo) -> bool {
        info.has_extension("cl_intel_subgroup_matrix_multiply_accumulate")
    }

    pub(super) fn unused(&self) -> &Buffer {
        &self.unused
    }

    pub(super) fn kernel(&self, device: &Device, which: Which, name: &str) -> Result<Kernel, OpsError> {
        if let Some(program) = self.built.borrow().get(&which) {
            return Ok(program.kernel(name)?);
        }
        let registers = if self.takes_registers && which.many_registers() { MANY_REGISTERS } else { "" };
        let program = device.program(&which.label(), &which.source(), &format!("{OPTIONS} {registers}"))?;
        let kernel = program.kernel(name)?;
        self.built.borrow_mut().insert(which, program);
        Ok(kernel)
    }
}
