//! Sources, programs and kernels: each program is compiled once per device, format and head size.

use std::cell::RefCell;
use std::collections::HashMap;

use thiserror::Error;

use super::{CacheKind, Format};
use crate::device::{Device, DeviceError, DeviceKind, Kernel, Program};

const COMMON: &str = include_str!("../../cl/include/common.h");
const WEIGHTS: &str = include_str!("../../cl/include/weights.h");
const PRODUCTS: &str = include_str!("../../cl/include/products.h");
const PHILOX: &str = include_str!("../../cl/include/philox.h");
const PREPARE: &str = include_str!("../../cl/include/prepare.h");
const FINISH: &str = include_str!("../../cl/include/finish.h");
const PACK: &str = include_str!("../../cl/include/pack.h");
const TILE_PAIR: &str = include_str!("../../cl/include/tile_pair.h");
const MATMUL: &str = include_str!("../../cl/matmul.cl");
const HEAD: &str = include_str!("../../cl/head.cl");
const ROWS: &str = include_str!("../../cl/rows.cl");
const PEAK: &str = include_str!("../../cl/peak.cl");
const MOE: &str = include_str!("../../cl/moe.cl");
const EXPERTS: &str = include_str!("../../cl/experts.cl");
const ATTENTION: &str = include_str!("../../cl/attention.cl");

/// Division and square root are rounded correctly, so that a row's norm has one value whatever the compiler makes
/// of its surroundings.
const OPTIONS: &str = "-cl-std=CL1.2 -cl-fp32-correctly-rounded-divide-sqrt";

/// Why an op cannot run.
#[derive(Debug, Error)]
pub enum OpsError {
    /// The device or its runtime refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Sizes that do not go together: a fault of the caller.
    #[error("{op}: {what}")]
    Shape {
        /// The op.
        op: &'static str,
        /// What does not fit.
        what: String,
    },
    /// A kernel's numbers differ from its CPU reference.
    #[error(
        "self-test: {kernel} is wrong on {device}: {what}. The driver or runtime miscompiles it: use another \
         version of it, or another device ([device] in daemon.toml)"
    )]
    SelfTest {
        /// The kernel and its variant.
        kernel: String,
        /// The device.
        device: String,
        /// What was found and expected, and where.
        what: String,
    },
}

/// Kernels of the `vector` family on one device.
pub struct Kernels {
    built: RefCell<HashMap<(&'static str, usize), Program>>,
    rows_at_once: usize,
    /// Defined where the compiler is known to have the host's prefetch instruction.
    prefetch: &'static str,
    /// Stands for buffers a launch does not use.
    unused: crate::device::Buffer,
    compute_units: usize,
}

impl Kernels {
    /// Kernels for `device`; programs are built when first asked for.
    ///
    /// # Errors
    /// No memory for the few bytes that every launch shares.
    pub fn new(device: &Device) -> Result<Self, OpsError> {
        let info = device.info();
        Ok(Self {
            built: RefCell::default(),
            prefetch: if info.kind == DeviceKind::Cpu && (info.is_pocl() || info.is_intel()) {
                "#define HOST_PREFETCH\n"
            } else {
                ""
            },
            // 16 or 32 vector registers: accumulators of a row block must stay in them.
            rows_at_once: if info.native_float_width >= 16 { 8 } else { 3 },
            unused: device.alloc(crate::device::Purpose::Scratch, 64)?,
            compute_units: info.compute_units.max(1) as usize,
        })
    }

    pub(super) fn unused(&self) -> &crate::device::Buffer {
        &self.unused
    }

    /// Work-items a one-row kernel is cut into: some for each compute unit, so that they end together.
    pub(super) fn shares(&self, pairs: usize) -> usize {
        pairs.min(4 * self.compute_units)
    }

    pub(super) fn matmul_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let number = format as usize;
        let (rows, prefetch) = (self.rows_at_once, self.prefetch);
        self.kernel(device, ("matmul", number), name, || {
            (
                format!("matmul.cl ({})", format.name()),
                format!(
                    "#define FORMAT {number}\n#define ROWS {rows}\n{prefetch}{COMMON}{WEIGHTS}{PRODUCTS}{TILE_PAIR}{PREPARE}{FINISH}{MATMUL}"
                ),
            )
        })
    }

    pub(super) fn head_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let (number, rows, slices) = (format as usize, self.rows_at_once, super::head::SLICES);
        self.kernel(device, ("head", number), name, || {
            (
                format!("head.cl ({})", format.name()),
                format!(
                    "#define FORMAT {number}\n#define ROWS {rows}\n#define HEAD_SLICES {slices}\n\
                     {COMMON}{WEIGHTS}{PRODUCTS}{PHILOX}{HEAD}"
                ),
            )
        })
    }

    pub(super) fn compute_units(&self) -> usize {
        self.compute_units
    }

    pub(super) fn peak_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("peak", 0), name, || ("peak.cl".to_owned(), format!("{COMMON}{PEAK}")))
    }

    pub(super) fn rows_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("rows", 0), name, || {
            ("rows.cl".to_owned(), format!("{COMMON}{PREPARE}{PACK}{ROWS}"))
        })
    }

    /// Rows that the many-row kernels take at once.
    pub(super) fn rows_at_once(&self) -> usize {
        self.rows_at_once
    }

    pub(super) fn moe_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("moe", 0), name, || {
            ("moe.cl".to_owned(), format!("{COMMON}{PREPARE}{PACK}{MOE}"))
        })
    }

    pub(super) fn experts_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let number = format as usize;
        let rows = self.rows_at_once;
        self.kernel(device, ("experts", number), name, || {
            (
                format!("experts.cl ({})", format.name()),
                format!(
                    "#define FORMAT {number}\n#define ROWS {rows}\n{COMMON}{WEIGHTS}{PRODUCTS}{TILE_PAIR}{FINISH}{PACK}{EXPERTS}"
                ),
            )
        })
    }

    pub(super) fn attention_kernel(
        &self,
        device: &Device,
        head_size: usize,
        kind: CacheKind,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let (part, define) = match kind {
            CacheKind::F16 => ("attention", ""),
            CacheKind::F32 => ("attention f32", "#define CACHE_F32\n"),
        };
        self.kernel(device, (part, head_size), name, || {
            (
                format!("attention.cl (head size {head_size}, cache {kind})"),
                format!("#define HEAD {head_size}\n{define}{COMMON}{ATTENTION}"),
            )
        })
    }

    fn kernel(
        &self,
        device: &Device,
        key: (&'static str, usize),
        name: &str,
        source: impl FnOnce() -> (String, String),
    ) -> Result<Kernel, OpsError> {
        let known = self.built.borrow().get(&key).cloned();
        let program = match known {
            Some(program) => program,
            None => {
                let (label, source) = source();
                let program = device.program(&label, &source, OPTIONS)?;
                self.built.borrow_mut().insert(key, program.clone());
                program
            }
        };
        Ok(program.kernel(name)?)
    }
}
