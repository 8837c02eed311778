//! Activations as the matrix engine takes them.

use super::kernels::Xmx;
use super::programs::Which;
use crate::device::{Arg, Buffer, Device, Launch, Purpose};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::moe::most_blocks;
use crate::ops::{OpsError, Routing, RowInput, STRIDE_MULTIPLE, round_up};

/// Work-items of a work-group that takes a row; `LANES * TEAM` in `cl/xmx/team.h`.
pub(super) const TEAM_ITEMS: usize = 256;
/// Parts of a buffer begin at multiples of so many bytes; no device asks for more.
const PART: usize = 512;

/// How activations are rounded for the matrix engine, which multiplies f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum XmxTerms {
    /// To eleven bits: products are off by about two parts in ten thousand.
    One = 1,
    /// Cut into two terms, 22 bits in all: as exact as f32, and twice the work for the engine.
    Two = 2,
}

/// Rows made ready for products: f16, each scaled by a power of two of its own, and what formats with offsets need of them. All
/// rows that meet the same matrix must be rounded in the same way, or a row's bits depend on the pass.
#[derive(Debug, Clone)]
pub struct XmxRows {
    /// f16 `[terms][rows][stride]`.
    pub(super) values: Buffer,
    /// f32 `[stride / 32][sums_stride]`: sums over each 32 columns.
    pub(super) sums: Buffer,
    /// f32 `[rows]`: what a row's products are multiplied by.
    pub(super) factors: Buffer,
    /// The most rows.
    pub(super) rows: usize,
    /// Values that are meant.
    pub(super) columns: usize,
    /// How they are rounded.
    pub(super) terms: XmxTerms,
}

impl XmxRows {
    /// Room for `rows` rows of `columns` values.
    ///
    /// # Errors
    /// No memory, or nothing to hold.
    pub fn new(device: &Device, rows: usize, columns: usize, terms: XmxTerms) -> Result<Self, OpsError> {
        check("rows", rows > 0 && columns > 0, || format!("room for {rows} rows of {columns} values"))?;
        let [values, sums, factors] = Self::sizes(rows, columns, terms);
        let buffer = |bytes| device.alloc(Purpose::Scratch, bytes);
        Ok(Self {
            values: buffer(values)?,
            sums: buffer(sums)?,
            factors: buffer(factors)?,
            rows,
            columns,
            terms,
        })
    }

    /// Room for `rows` rows in two buffers that others use, too: one of at least 4 bytes a value in two terms, and one of
    /// [`beside`](Self::beside) bytes.
    ///
    /// # Errors
    /// Buffers that are too small, or what the device says.
    pub(in crate::ops) fn over(
        device: &Device,
        packed: &Buffer,
        sums: &Buffer,
        rows: usize,
        columns: usize,
        terms: XmxTerms,
    ) -> Result<Self, OpsError> {
        const OP: &str = "rows";
        check(OP, rows > 0 && columns > 0, || format!("room for {rows} rows of {columns} values"))?;
        let [values, of_sums, of_factors] = Self::sizes(rows, columns, terms);
        let factors_at = round_up(of_sums, PART);
        holds_floats(OP, "packed", packed, values.div_ceil(4))?;
        holds_floats(OP, "sums", sums, (factors_at + of_factors) / 4)?;
        Ok(Self {
            values: packed.clone(),
            sums: device.part(sums, 0..of_sums)?,
            factors: device.part(sums, factors_at..factors_at + of_factors)?,
            rows,
            columns,
            terms,
        })
    }

    /// Bytes of sums and factors of `rows` rows of `stride` values.
    pub(in crate::ops) fn beside(rows: usize, stride: usize) -> usize {
        let [_, sums, factors] = Self::sizes(rows, stride, XmxTerms::Two);
        round_up(sums, PART) + factors
    }

    /// Bytes of the buffers that [`new`](Self::new) makes.
    pub fn bytes(rows: usize, columns: usize, terms: XmxTerms) -> usize {
        Self::sizes(rows, columns, terms).into_iter().sum()
    }

    fn sizes(rows: usize, columns: usize, terms: XmxTerms) -> [usize; 3] {
        let stride = round_up(columns, STRIDE_MULTIPLE);
        // A block of 8 rows reads 16 sums, the head 32 factors.
        [
            terms as usize * rows * stride * 2,
            (stride / 32 * round_up(rows, 32) + 32) * 4,
            round_up(rows, 32) * 4,
        ]
    }

    /// Its buffers: values, sums and factors.
    pub fn buffers(&self) -> [&Buffer; 3] {
        [&self.values, &self.sums, &self.factors]
    }

    /// Values from row to row.
    pub fn stride(&self) -> usize {
        round_up(self.columns, STRIDE_MULTIPLE)
    }

    /// Values from term to term.
    pub(super) fn plane(&self) -> u64 {
        (self.rows * self.stride()) as u64
    }

    pub(super) fn sums_stride(&self) -> usize {
        round_up(self.rows, 32)
    }

    /// Whether these are rows of so many columns, and as many of them.
    pub(super) fn hold(&self, op: &'static str, rows: usize, columns: usize) -> Result<(), OpsError> {
        check(op, columns == self.columns && (1..=self.rows).contains(&rows), || {
            format!("{rows} rows of {columns} values, there is room for {} of {}", self.rows, self.columns)
        })
    }
}

impl Xmx {
    /// Does to `rows` rows what `input` says, and makes them ready for products.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn prepare(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        rows: usize,
        ready: &XmxRows,
    ) -> Result<Launch, OpsError> {
        self.prepare_to(device, input, rows, None, ready)
    }

    /// Likewise; each row goes to its slots at the experts that are chosen for it, i32 `[rows][top]`, for which the routing's
    /// places and blocks are made.
    pub(super) fn prepare_to(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        rows: usize,
        experts: Option<(&Buffer, &Routing)>,
        ready: &XmxRows,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "prepare";
        let unused = self.unused();
        let [chosen, places, blocks] =
            experts.map_or([unused; 3], |(chosen, routing)| [chosen, &routing.places, &routing.blocks]);
        let [top, count] = experts.map_or([0; 2], |(_, routing)| [routing.top, routing.experts]);
        ready.hold(OP, rows * top.max(1), input.n)?;
        let padded = ready.stride();
        check(
            OP,
            input.stride >= padded && input.at.is_multiple_of(4) && input.stride.is_multiple_of(4),
            || {
                format!(
                    "{rows} rows of {} values with a stride of {}, from {}",
                    input.n, input.stride, input.at
                )
            },
        )?;
        let reach = input.at + (rows - 1) * input.stride + padded;
        holds_floats(OP, "the input", input.rows, reach)?;
        let (branch, branch_weight, new_rows) = input.branch.unwrap_or((unused, unused, unused));
        if input.branch.is_some() {
            holds_floats(OP, "the branch", branch, reach)?;
            holds_floats(OP, "the branch's norm", branch_weight, padded)?;
            holds_floats(OP, "the new rows", new_rows, reach)?;
        }
        if let Some(weight) = input.norm {
            holds_floats(OP, "the norm", weight, padded)?;
        }
        Ok(Launch::with_args(
            &self.kernel(device, Which::Prepare, OP)?,
            &[
                Arg::Buffer(input.rows),
                Arg::Buffer(branch),
                Arg::Buffer(branch_weight),
                Arg::Buffer(input.norm.unwrap_or(unused)),
                Arg::Buffer(new_rows),
                Arg::Buffer(chosen),
                Arg::Buffer(places),
                Arg::Buffer(blocks),
                Arg::Buffer(&ready.values),
                Arg::Buffer(&ready.sums),
                Arg::Buffer(&ready.factors),
                Arg::I32(input.flags()),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "the input's start", input.at)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::I32(int(OP, "stride", padded)?),
                Arg::I32(int(OP, "rows", ready.sums_stride())?),
                Arg::I32(int(OP, "experts a row", top)?),
                Arg::I32(int(OP, "experts", count)?),
                Arg::I32(int(OP, "blocks", most_blocks(count, rows * top))?),
                Arg::I32(ready.terms as i32),
                Arg::U64(ready.plane()),
                Arg::F32(input.epsilon),
                Arg::Local(padded * 4),
                Arg::Local(count.max(1) * 4),
            ],
            &[rows * TEAM_ITEMS],
            Some(&[TEAM_ITEMS]),
        )?)
    }
}
