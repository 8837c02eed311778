//! Sources, programs and kernels: each program is compiled once per device, format and head size.

use std::cell::RefCell;
use std::collections::HashMap;

use thiserror::Error;

use super::xmx::{self, Xmx, XmxRows, XmxTerms, xmx_takes};
use super::{Cache, CacheKind, Format};
use crate::device::{Buffer, Device, DeviceError, DeviceKind, Kernel, Program};

const COMMON: &str = include_str!("../../cl/include/common.h");
const WEIGHTS: &str = include_str!("../../cl/include/weights.h");
const PRODUCTS: &str = include_str!("../../cl/include/products.h");
const TRANSPOSE: &str = include_str!("../../cl/include/transpose.h");
const SOFT: &str = include_str!("../../cl/include/soft.h");
const SOFT_TILES: &str = include_str!("../../cl/include/soft_tiles.h");
const PHILOX: &str = include_str!("../../cl/include/philox.h");
const PREPARE: &str = include_str!("../../cl/include/prepare.h");
const FINISH: &str = include_str!("../../cl/include/finish.h");
const PACK_ROW: &str = include_str!("../../cl/include/pack_row.h");
const GATED_GROUP: &str = include_str!("../../cl/include/gated.h");
const EXPERT_CHOICE: &str = include_str!("../../cl/include/expert_choice.h");
const PACK: &str = include_str!("../../cl/include/pack.h");
const TILE_PAIR: &str = include_str!("../../cl/include/tile_pair.h");
const TILES: &str = concat!(include_str!("../../cl/include/amx.h"), include_str!("../../cl/include/tiles.h"));
const INTEGER: &str =
    concat!(include_str!("../../cl/include/amx.h"), include_str!("../../cl/include/integer.h"));
const FEW_ROWS: &str = include_str!("../../cl/include/few_rows.h");
const FEW_VECTORS: &str = include_str!("../../cl/include/few_vectors.h");
const FEW_TILES: &str = include_str!("../../cl/include/few_tiles.h");
const FEW_INTEGER: &str = include_str!("../../cl/include/few_integer.h");
const MATMUL: &str = include_str!("../../cl/matmul.cl");
const CHOICE: &str = include_str!("../../cl/choice.cl");
const HEAD: &str = include_str!("../../cl/head.cl");
const ROWS: &str = include_str!("../../cl/rows.cl");
const PEAK: &str = include_str!("../../cl/peak.cl");
const MOE: &str = include_str!("../../cl/moe.cl");
const EXPERTS: &str = include_str!("../../cl/experts.cl");
const GATED: &str = include_str!("../../cl/gated.cl");
const ROUTER: &str = include_str!("../../cl/router.cl");
const LATENT: &str = include_str!("../../cl/latent.cl");
const ATTENTION: &str = include_str!("../../cl/attention.cl");
const STREAM: &str = include_str!("../../cl/stream.cl");
pub(super) const PHASES: &str = include_str!("../../cl/phases.cl");

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

/// How products are made. Their results differ in rounding, and so does the form of packed rows: rows that one [`Kernels`]
/// packed are for its products only. [`Kernels::narrow`] and [`Kernels::matmul`] make the same bits of a row either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// By vectors.
    Vector,
    /// By the processor's matrix unit, as exact; see `cl/include/tiles.h`.
    MatrixUnit,
    /// By a processor's products of bytes, as exact, where a format's codes are integers: a single row's by vectors, more by
    /// its matrix unit; see `cl/include/integer.h`. Elsewhere by vectors in f32.
    Integer,
    /// By a card's matrix engine where there are kernels for a format ([`Family::Xmx`]), elsewhere by vectors.
    Xmx,
}

/// Whose kernels a matrix or a cache is for: how codes lie inside tiles, keys and values in a cache, and in which form rows meet
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    /// The `vector` family's, of either sort.
    #[default]
    Vector,
    /// The `xmx` family's: [`xmx_arrange`](super::xmx_arrange) has put its tiles in order.
    Xmx,
}

/// How rows are rounded for the matrix engine: a model's numbers stay as exact as f32.
const TERMS: XmxTerms = XmxTerms::Two;

/// Floats of packed rows for 32 values; `GROUP_FLOATS` in `cl/include/integer.h`.
const INTEGER_GROUP: usize = 57;

impl Products {
    /// Values (of 4 bytes) of a buffer for `rows` packed rows of `stride` values, a multiple of
    /// [`STRIDE_MULTIPLE`](super::STRIDE_MULTIPLE).
    pub fn packed_values(self, rows: usize, stride: usize) -> usize {
        match self {
            // Two f16 for each value.
            Self::Vector | Self::Xmx => rows * stride,
            // Three terms of 2 bytes a value; a tile reads 16 rows of 64 bytes, whatever they are.
            Self::MatrixUnit => rows * stride / 2 * 3 + 256,
            // 32 values, as many in three digits of a byte, and what a digit is worth; a tile reads 16 rows here, too.
            Self::Integer => rows * stride / 32 * INTEGER_GROUP + 128,
        }
    }

    /// Values of a buffer for the sums of as many rows.
    pub fn sums_values(self, rows: usize, stride: usize) -> usize {
        match self {
            Self::Vector | Self::Integer => rows * stride / 32 * 3,
            Self::MatrixUnit => rows * stride / 32 * 3 + 16,
            Self::Xmx => (rows * stride / 32 * 3).max(XmxRows::beside(rows, stride) / 4),
        }
    }

    /// Whether products with matrices of a format are made of integers.
    pub fn by_integers(self, format: Format) -> bool {
        self == Self::Integer && !matches!(format, Format::F32 | Format::F16 | Format::Bf16 | Format::Q3K)
    }

    /// Bytes of what stands for buffers that a launch does not use, one for each family.
    pub fn unused_bytes(self) -> usize {
        if self == Self::Xmx { 128 } else { 64 }
    }

    /// Whose tiles a matrix of that format should be made of.
    pub fn family(self, format: Format) -> Family {
        if self == Self::Xmx && xmx_takes(format) { Family::Xmx } else { Family::Vector }
    }

    /// Whose attention a layer's should be, by its cache's number type and the values of a head. A cache of latents is always
    /// the `vector` family's.
    pub fn attention(self, cache: CacheKind, head_size: usize) -> Family {
        if self == Self::Xmx && xmx::attends(cache, head_size) { Family::Xmx } else { Family::Vector }
    }

    /// Bytes of what such a layer's queries need beside their rows, for so many query heads, key-value heads and values a head.
    pub fn query_bytes(self, cache: CacheKind, [heads, kv_heads, size]: [usize; 3], rows: usize) -> usize {
        match self.attention(cache, size) {
            Family::Vector => 0,
            Family::Xmx => xmx::query_bytes(heads, kv_heads, size, rows),
        }
    }
}

/// Kernels of the `vector` family on one device, and those of the `xmx` family where products are made by it.
pub struct Kernels {
    products: Products,
    xmx: Option<Xmx>,
    built: RefCell<HashMap<(&'static str, usize), Program>>,
    /// What programs are made of behind `common.h`, by label.
    sources: RefCell<HashMap<String, String>>,
    rows_at_once: usize,
    /// Defined where the compiler is known to have the host's prefetch instruction.
    prefetch: &'static str,
    /// Defined where it is known to take the host's instruction that looks 16 numbers up among 16.
    permute: &'static str,
    /// Stands for buffers a launch does not use.
    unused: crate::device::Buffer,
    compute_units: usize,
    /// Bytes that a work-group may have.
    local_memory: usize,
}

impl Kernels {
    /// Kernels for `device`; programs are built when first asked for.
    ///
    /// # Errors
    /// No memory for the few bytes that every launch shares.
    pub fn new(device: &Device) -> Result<Self, OpsError> {
        Self::with_products(device, Products::Vector)
    }

    /// Kernels that make products of many rows by the matrix unit of the host's processor; none where the device does not
    /// run on it, or it may not be used.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_matrix_unit(device: &Device) -> Result<Option<Self>, OpsError> {
        let granted = device.info().grants_matrix_unit();
        granted.then(|| Self::with_products(device, Products::MatrixUnit)).transpose()
    }

    /// Kernels that make products by integers; none where the device does not run on a processor that has instructions for
    /// products of bytes, of vectors and of its matrix unit, or the latter may not be used.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_integers(device: &Device) -> Result<Option<Self>, OpsError> {
        let info = device.info();
        let granted = info.takes_byte_products() && info.grants_matrix_unit();
        granted.then(|| Self::with_products(device, Products::Integer)).transpose()
    }

    /// Kernels that make products by the `xmx` family; none where the device has no sub-groups with loads of blocks.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_xmx(device: &Device) -> Result<Option<Self>, OpsError> {
        let Some(xmx) = Xmx::new(device)? else { return Ok(None) };
        Ok(Some(Self { xmx: Some(xmx), ..Self::with_products(device, Products::Xmx)? }))
    }

    fn with_products(device: &Device, products: Products) -> Result<Self, OpsError> {
        let info = device.info();
        Ok(Self {
            products,
            xmx: None,
            built: RefCell::default(),
            sources: RefCell::default(),
            prefetch: if info.kind == DeviceKind::Cpu && (info.is_pocl() || info.is_intel()) {
                "#define HOST_PREFETCH\n"
            } else {
                ""
            },
            permute: if info.takes_avx512() { "#define HOST_PERMUTE\n" } else { "" },
            // 16 or 32 vector registers: accumulators of a row block must stay in them.
            rows_at_once: if info.native_float_width >= 16 { 8 } else { 3 },
            unused: device.alloc(crate::device::Purpose::Scratch, 64)?,
            compute_units: info.compute_units.max(1) as usize,
            local_memory: usize::try_from(info.local_mem).unwrap_or(usize::MAX),
        })
    }

    /// How products of many rows are made.
    pub fn products(&self) -> Products {
        self.products
    }

    /// The family that makes products where it knows a matrix's format, and whole rows between them.
    pub fn family(&self) -> Family {
        if self.products == Products::Xmx { Family::Xmx } else { Family::Vector }
    }

    /// How rows are packed, and how a block of them goes through a pair of tiles.
    fn pair(&self) -> [&'static str; 2] {
        match self.products {
            Products::Vector | Products::Xmx => [PACK, TILE_PAIR],
            Products::MatrixUnit => [TILES, ""],
            Products::Integer => [INTEGER, TILE_PAIR],
        }
    }

    /// The kernels that take matrices of the `xmx` family, and `packed` and `sums` as rows in its form.
    pub(super) fn xmx_rows(
        &self,
        op: &'static str,
        device: &Device,
        [packed, sums]: [&Buffer; 2],
        rows: usize,
        columns: usize,
    ) -> Result<(&Xmx, XmxRows), OpsError> {
        Ok((self.xmx(op)?, XmxRows::over(device, packed, sums, rows, columns, TERMS)?))
    }

    /// The kernels that take matrices and caches of the `xmx` family.
    pub(super) fn xmx(&self, op: &'static str) -> Result<&Xmx, OpsError> {
        self.xmx.as_ref().ok_or_else(|| OpsError::Shape {
            op,
            what: "what it is given is for the xmx family, which these kernels are not".to_owned(),
        })
    }

    pub(super) fn unused(&self) -> &crate::device::Buffer {
        &self.unused
    }

    /// Work-items a kernel for a few rows is cut into: some for each compute unit, so that they end together.
    pub(super) fn shares(&self, pairs: usize) -> usize {
        pairs.min(4 * self.compute_units)
    }

    pub(super) fn matmul_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        self.kernel(device, ("matmul", format as usize), name, || {
            let few = match self.products {
                Products::Vector | Products::Xmx => FEW_VECTORS,
                Products::MatrixUnit => FEW_TILES,
                Products::Integer if self.products.by_integers(format) => FEW_INTEGER,
                Products::Integer => FEW_VECTORS,
            };
            let source = format!("{}{PREPARE}{FINISH}{FEW_ROWS}{few}{MATMUL}", self.products_source(format));
            (format!("matmul.cl ({})", format.name()), source)
        })
    }

    /// What begins every program that multiplies packed rows with weights of a format.
    fn products_source(&self, format: Format) -> String {
        let (number, rows, [pack, pair]) = (format as usize, self.rows_at_once, self.pair());
        let (prefetch, permute) = (self.prefetch, self.permute);
        let pair = if self.products.by_integers(format) { "" } else { pair };
        format!(
            "#define FORMAT {number}\n#define ROWS {rows}\n{prefetch}{permute}{WEIGHTS}{PRODUCTS}{pack}{pair}"
        )
    }

    pub(super) fn head_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let slices = super::head::SLICES;
        let soft = match (self.products, format) {
            (Products::MatrixUnit, Format::Bf16 | Format::Q8_0) => SOFT_TILES,
            _ => SOFT,
        };
        self.kernel(device, ("head", format as usize), name, || {
            let source = format!(
                "#define HEAD_SLICES {slices}\n{}{TRANSPOSE}{soft}{PHILOX}{HEAD}",
                self.products_source(format)
            );
            (format!("head.cl ({})", format.name()), source)
        })
    }

    pub(super) fn choice_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        let (top, slices) = (super::choice::TOP, super::choice::SLICES);
        self.kernel(device, ("choice", 0), name, || {
            let source = format!("#define TOP {top}\n#define CHOICE_SLICES {slices}\n{CHOICE}");
            ("choice.cl".to_owned(), source)
        })
    }

    pub(super) fn local_memory(&self) -> usize {
        self.local_memory
    }

    pub(super) fn compute_units(&self) -> usize {
        self.compute_units
    }

    pub(super) fn peak_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("peak", 0), name, || ("peak.cl".to_owned(), PEAK.to_owned()))
    }

    pub(super) fn rows_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("rows", 0), name, || {
            ("rows.cl".to_owned(), format!("{PREPARE}{}{PACK_ROW}{ROWS}", self.pair()[0]))
        })
    }

    pub(super) fn stream_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("stream", 0), name, || {
            ("stream.cl".to_owned(), format!("{PREPARE}{FINISH}{STREAM}"))
        })
    }

    /// Rows that the many-row kernels take at once.
    pub(super) fn rows_at_once(&self) -> usize {
        self.rows_at_once
    }

    pub(super) fn moe_kernel(&self, device: &Device, name: &str) -> Result<Kernel, OpsError> {
        self.kernel(device, ("moe", 0), name, || {
            ("moe.cl".to_owned(), format!("{PREPARE}{}{PACK_ROW}{EXPERT_CHOICE}{MOE}", self.pair()[0]))
        })
    }

    pub(super) fn experts_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        self.kernel(device, ("experts", format as usize), name, || {
            let source = format!("{}{FINISH}{GATED_GROUP}{EXPERTS}", self.products_source(format));
            (format!("experts.cl ({})", format.name()), source)
        })
    }

    pub(super) fn gated_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        self.kernel(device, ("gated", format as usize), name, || {
            let source = format!("{}{FINISH}{GATED_GROUP}{GATED}", self.products_source(format));
            (format!("gated.cl ({})", format.name()), source)
        })
    }

    pub(super) fn router_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        self.kernel(device, ("router", format as usize), name, || {
            let source = format!("{}{FINISH}{EXPERT_CHOICE}{ROUTER}", self.products_source(format));
            (format!("router.cl ({})", format.name()), source)
        })
    }

    pub(super) fn latent_kernel(
        &self,
        device: &Device,
        format: Format,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        self.kernel(device, ("latent", format as usize), name, || {
            (format!("latent.cl ({})", format.name()), format!("{}{LATENT}", self.products_source(format)))
        })
    }

    pub(super) fn attention_kernel(
        &self,
        device: &Device,
        cache: &Cache,
        name: &str,
    ) -> Result<Kernel, OpsError> {
        let (key, value) = (cache.head_size, cache.value_size);
        let (part, define) = match (cache.kind, cache.values_in_keys()) {
            (CacheKind::F16, false) => ("attention", ""),
            (CacheKind::F32, false) => ("attention f32", "#define CACHE_F32\n"),
            (CacheKind::F16, true) => ("latent attention", "#define VALUES_IN_KEYS\n"),
            (CacheKind::F32, true) => ("latent attention f32", "#define VALUES_IN_KEYS\n#define CACHE_F32\n"),
        };
        self.kernel(device, (part, key << 16 | value), name, || {
            let transpose = if cache.values_in_keys() { TRANSPOSE } else { "" };
            let [pack, _] = self.pair();
            (
                format!("attention.cl (head size {key}:{value}, cache {})", cache.kind),
                format!(
                    "#define HEAD {key}\n#define VALUE {value}\n{define}{}{transpose}{pack}{ATTENTION}",
                    self.prefetch
                ),
            )
        })
    }

    /// What a program that was built is made of, behind `common.h`.
    pub(super) fn source(&self, label: &str) -> Option<String> {
        self.sources.borrow().get(label).cloned()
    }

    /// A program of functions, which are kernels elsewhere, and of what calls them.
    pub(super) fn phases_program(&self, device: &Device, source: &str) -> Result<Program, OpsError> {
        let source = format!("#define PHASES\n{COMMON}{source}");
        Ok(device.program("phases.cl", &source, &OPTIONS.replace("CL1.2", "CL3.0"))?)
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
                let program = device.program(&label, &format!("{COMMON}{source}"), OPTIONS)?;
                self.sources.borrow_mut().insert(label, source);
                self.built.borrow_mut().insert(key, program.clone());
                program
            }
        };
        Ok(program.kernel(name)?)
    }
}
