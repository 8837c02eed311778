//! Products of rows with one matrix.

use super::arrange::xmx_takes;
use super::cost::XmxWork;
use super::kernels::Xmx;
use super::programs::Which;
use super::rows::{XmxRows, XmxTerms};
use crate::device::{Arg, Device, Launch};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::{Finish, Format, Matrix, OpsError, Output, ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Work-items of a sub-group; `LANES` in `cl/xmx/device.h`.
pub(super) const LANES: usize = 16;
/// Sub-groups of a work-group of `narrow`, and with that the most slices; `TEAM` in `cl/xmx/matmul.cl`.
const TEAM: usize = 8;
/// Rows and pairs of tiles of a work-group of `wide`.
const WIDE_ROWS: usize = 128;
const WIDE_PAIRS: usize = 4;
/// Pairs of tiles times slices that keep the memory of a large card busy.
const BUSY: usize = 1024;
/// The fewest spans that are worth a slice.
const LEAST_SPANS: usize = 8;

/// Slices of the columns of a matrix, whose sums are made apart and added in order: enough of them to fill a device with a
/// single row. They are part of what a product's bits are, so they follow from the matrix's shape alone.
pub fn xmx_slices(format: Format, rows: usize, columns: usize) -> usize {
    let pairs = rows.div_ceil(ROW_MULTIPLE);
    let spans = format.padded_columns(columns) / 32;
    let mut slices = 1;
    while slices < TEAM && pairs * slices < BUSY && spans >= 2 * slices * LEAST_SPANS {
        slices *= 2;
    }
    slices
}

/// The kernel for many rows.
const WIDE: &str = "wide";

/// The kernel for so many rows, and how many of them a sub-group takes.
fn kernel_for(rows: usize) -> (&'static str, usize) {
    match rows {
        0..=8 => ("narrow_1", 8),
        9..=16 => ("narrow_2", 16),
        17..=32 => ("narrow_4", 32),
        _ => (WIDE, 32),
    }
}

impl Xmx {
    /// `rows` rows through `matrix`, whose tiles [`xmx_arrange`](super::xmx_arrange) has put in order. A row's bits are the
    /// same whatever `rows` is.
    ///
    /// # Errors
    /// Sizes that do not fit, a format without kernels, or what the device says.
    pub fn matmul(
        &self,
        device: &Device,
        matrix: &Matrix,
        ready: &XmxRows,
        rows: usize,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "matmul";
        check(OP, xmx_takes(matrix.format) && matrix.format != Format::Bf16, || {
            format!("there are no xmx kernels for {}", matrix.format.name())
        })?;
        ready.hold(OP, rows, matrix.columns)?;
        let pairs = self.check_product(OP, matrix, &finish, rows, output)?;
        let slices = xmx_slices(matrix.format, matrix.rows, matrix.columns);
        let (kernel, block) = kernel_for(rows);
        let (global, local) = if kernel == WIDE {
            let teams = [rows.div_ceil(WIDE_ROWS), pairs.div_ceil(WIDE_PAIRS)];
            let items = WIDE_ROWS / 32 * WIDE_PAIRS * LANES;
            ([teams[0] * items, teams[1]], items)
        } else {
            let each = TEAM / slices;
            ([pairs.div_ceil(each) * TEAM * LANES, rows.div_ceil(block)], TEAM * LANES)
        };
        let other = match &finish {
            Finish::Add(buffer) | Finish::GatedWith(_, buffer) => buffer,
            Finish::Store | Finish::Gated(_) => self.unused(),
        };
        let which = Which::Matmul(matrix.format, ready.terms);
        Ok(Launch::with_args(
            &self.kernel(device, which, kernel)?,
            &[
                Arg::Buffer(&matrix.buffer),
                Arg::Buffer(&ready.values),
                Arg::Buffer(&ready.sums),
                Arg::Buffer(&ready.factors),
                Arg::Buffer(other),
                Arg::Buffer(output.rows),
                Arg::I32(finish.number()),
                Arg::I32(int(OP, "the output's start", output.at)?),
                Arg::I32(int(OP, "spans", matrix.groups() / which.span_groups())?),
                Arg::I32(int(OP, "bytes of a tile", matrix.format.tile_bytes(matrix.columns))?),
                Arg::I32(int(OP, "pairs of tiles", pairs)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(int(OP, "stride", ready.stride())?),
                Arg::I32(int(OP, "rows", ready.sums_stride())?),
                Arg::I32(int(OP, "the output's stride", output.stride)?),
                Arg::I32(int(OP, "slices", slices)?),
                Arg::I32(shared_scales(which, matrix.format)),
                Arg::U64(ready.plane()),
            ],
            &global,
            Some(&[local, 1]),
        )?)
    }

    /// Whether matrix and output have the room that the launch needs; the matrix's pairs of tiles.
    pub(super) fn check_product(
        &self,
        op: &'static str,
        matrix: &Matrix,
        finish: &Finish<'_>,
        rows: usize,
        output: &Output<'_>,
    ) -> Result<usize, OpsError> {
        check(op, matrix.buffer.size() >= matrix.bytes(), || {
            format!("the matrix has {} bytes, its shape needs {}", matrix.buffer.size(), matrix.bytes())
        })?;
        let pairs = matrix.pairs();
        let width = pairs * if matches!(finish, Finish::Gated(_)) { LANES } else { 2 * LANES };
        check(op, output.at.is_multiple_of(4) && output.stride.is_multiple_of(4), || {
            format!(
                "results from {} on, {} values a row: blocks are stored at multiples of 4",
                output.at, output.stride
            )
        })?;
        check(op, rows == 1 || output.stride >= width, || {
            format!("{width} results a row with a stride of {}", output.stride)
        })?;
        let reach = output.at + (rows - 1) * output.stride + width;
        holds_floats(op, "the output", output.rows, reach)?;
        match finish {
            Finish::Add(other) | Finish::GatedWith(_, other) => {
                holds_floats(op, "the other operand", other, reach)?
            }
            Finish::Store | Finish::Gated(_) => {}
        }
        Ok(pairs)
    }
}

/// The kernel that takes `rows` rows through a matrix, and what there is to do.
pub fn xmx_matmul_work(
    format: Format,
    terms: XmxTerms,
    outputs: usize,
    columns: usize,
    rows: usize,
) -> (&'static str, XmxWork) {
    let (kernel, block) = kernel_for(rows);
    let pairs = outputs.div_ceil(ROW_MULTIPLE);
    let spans = format.padded_columns(columns) / 32;
    let blocks = rows.div_ceil(block);
    let slices = xmx_slices(format, outputs, columns);
    // Two tiles of two steps a group, for each block of 8 rows that a sub-group takes.
    let each = Which::Matmul(format, terms).products_each() as usize;
    let engine = blocks * (block / 8) * pairs * spans * 4 * terms as usize * each;
    let ready = rows * round_up(columns, STRIDE_MULTIPLE) * 2 * terms as usize;
    let work = XmxWork {
        bytes: (format.matrix_bytes(outputs, columns) + ready + rows * pairs * ROW_MULTIPLE * 4) as u64,
        operations: 2 * (rows * outputs * columns) as u64,
        multiply_adds: engine as u64,
        turns: (blocks * pairs * spans) as u64,
        rounds: if kernel == WIDE { (blocks * pairs * slices) as u64 } else { 0 },
    };
    (kernel, work)
}

/// Spans that one scale of a block is for.
pub(super) fn shared_scales(which: Which, format: Format) -> i32 {
    if format == Format::W4 { (2 / which.span_groups()) as i32 } else { 1 }
}
