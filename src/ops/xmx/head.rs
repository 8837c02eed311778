//! The head: what is wanted of each row's distribution, in one pass over the table of embeddings.

use super::arrange::xmx_takes;
use super::cost::XmxWork;
use super::kernels::Xmx;
use super::matmul::{LANES, shared_scales};
use super::programs::Which;
use super::rows::{XmxRows, XmxTerms};
use crate::device::{Arg, Buffer, Device, Launch, Purpose};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::{Format, HeadOptions, HeadState, Matrix, OpsError, ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Parts that a vocabulary is cut into; `HEAD_SLICES` in `cl/xmx/head.cl`, where results depend on it. Times the work-groups of
/// a canvas, two for each core of a large card.
pub(super) const SLICES: usize = 32;
/// Rows of a work-group, and the sub-groups that share them; 32 `TEAM_ROWS` and `TEAM_PAIRS` in `cl/xmx/head.cl`.
const TEAM_ROWS: usize = 128;
const TEAM_PAIRS: usize = 8;
/// Bytes of a `Part` in `cl/xmx/head.cl`.
const PART_BYTES: usize = 32;

/// Room for a head's parts and results.
#[derive(Debug)]
pub struct XmxHeadState {
    /// Results and barred ids, for [`HeadRun::set`](crate::ops::HeadRun::set) and [`HeadState::read`]. It makes no soft
    /// embeddings.
    pub state: HeadState,
    parts: Buffer,
    rows: usize,
    hidden: usize,
}

impl XmxHeadState {
    /// Room for `rows` rows of `hidden` values.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &Device, rows: usize, hidden: usize) -> Result<Self, OpsError> {
        Ok(Self {
            state: HeadState::new(device, rows, hidden, false)?,
            parts: device.alloc(Purpose::Scratch, SLICES * TEAM_PAIRS * rows * PART_BYTES)?,
            rows,
            hidden,
        })
    }
}

impl Xmx {
    /// The head over `rows` rows: two launches, to be enqueued in their order, that leave the state's results.
    /// [`HeadRun::set`](crate::ops::HeadRun::set) gives them what changes from run to run. Row i of the pass is row i of the
    /// noise's counter. `options.scale` is not used: soft embeddings are not made yet.
    ///
    /// # Errors
    /// Sizes that do not fit, a format without kernels, or what the device says.
    pub fn streaming_head(
        &self,
        device: &Device,
        table: &Matrix,
        ready: &XmxRows,
        rows: usize,
        options: &HeadOptions,
        state: &XmxHeadState,
    ) -> Result<Vec<Launch>, OpsError> {
        const OP: &str = "streaming_head";
        check(OP, xmx_takes(table.format) && table.format != Format::Bf16, || {
            format!("there are no xmx kernels for {}", table.format.name())
        })?;
        check(
            OP,
            table.buffer.size() >= table.bytes() && (1..=table.rows).contains(&options.vocabulary),
            || {
                format!(
                    "{} tokens, the table has {} rows in {} bytes",
                    options.vocabulary,
                    table.rows,
                    table.buffer.size()
                )
            },
        )?;
        check(OP, rows <= state.rows && table.columns == state.hidden, || {
            format!(
                "{rows} rows of {} values with room for {} of {}",
                table.columns, state.rows, state.hidden
            )
        })?;
        check(OP, options.softcap >= 0.0 && options.softcap.is_finite(), || {
            format!("a soft cap of {}", options.softcap)
        })?;
        ready.hold(OP, rows, table.columns)?;
        holds_floats(OP, "the parts", &state.parts, SLICES * TEAM_PAIRS * rows * PART_BYTES / 4)?;
        let which = Which::Head(table.format, ready.terms);
        let items = TEAM_ROWS / 32 * TEAM_PAIRS * LANES;
        let rows_int = Arg::I32(int(OP, "rows", rows)?);
        let stream = Launch::with_args(
            &self.kernel(device, which, "stream_head")?,
            &[
                Arg::F32(1.0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::I32(1),
                Arg::I32(0),
                Arg::I32(0),
                Arg::Buffer(&table.buffer),
                Arg::Buffer(&ready.values),
                Arg::Buffer(&ready.sums),
                Arg::Buffer(&ready.factors),
                Arg::Buffer(&state.state.barred),
                Arg::Buffer(&state.parts),
                Arg::F32(options.softcap),
                Arg::I32(int(OP, "the vocabulary", options.vocabulary)?),
                Arg::I32(int(OP, "spans", table.groups() / which.span_groups())?),
                Arg::I32(int(OP, "bytes of a tile", table.format.tile_bytes(table.columns))?),
                rows_int,
                Arg::I32(int(OP, "stride", ready.stride())?),
                Arg::I32(int(OP, "rows", ready.sums_stride())?),
                Arg::I32(shared_scales(which, table.format)),
                Arg::U64(ready.plane()),
            ],
            &[rows.div_ceil(TEAM_ROWS) * items, SLICES],
            Some(&[items, 1]),
        )?;
        let merge = Launch::with_args(
            &self.kernel(device, which, "merge_head")?,
            &[
                Arg::I32(1),
                Arg::I32(0),
                Arg::Buffer(&state.parts),
                Arg::Buffer(&state.state.results),
                rows_int,
            ],
            &[round_up(rows, LANES)],
            Some(&[LANES]),
        )?;
        Ok(vec![stream, merge])
    }
}

/// What the first launch of the head has to do.
pub fn xmx_head_work(
    format: Format,
    terms: XmxTerms,
    vocabulary: usize,
    hidden: usize,
    rows: usize,
) -> XmxWork {
    let pairs = vocabulary.div_ceil(ROW_MULTIPLE);
    let spans = format.padded_columns(hidden) / 32;
    let blocks = rows.div_ceil(32);
    let ready = rows * round_up(hidden, STRIDE_MULTIPLE) * 2 * terms as usize;
    XmxWork {
        bytes: (format.matrix_bytes(vocabulary, hidden) + ready + SLICES * TEAM_PAIRS * rows * PART_BYTES)
            as u64,
        operations: 2 * (rows * vocabulary * hidden) as u64,
        multiply_adds: (blocks * pairs * spans * 16 * terms as usize) as u64
            * u64::from(Which::Head(format, terms).products_each()),
        turns: (blocks * pairs * spans) as u64,
        // What is done with logits are loops over 32 tokens by fours, for two halves of 32 rows.
        rounds: (blocks * pairs * 16) as u64,
    }
}
