//! Products of all experts, in one launch each.

use super::arrange::xmx_takes;
use super::cost::XmxWork;
use super::kernels::Xmx;
use super::matmul::{LANES, shared_scales};
use super::programs::Which;
use super::rows::{XmxRows, XmxTerms};
use crate::device::{Arg, Buffer, Device, Launch};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::moe::most_blocks;
use crate::ops::{
    Activation, Experts, Finish, Format, OpsError, ROW_MULTIPLE, Routing, RowInput, TILE, round_up,
};

/// Sub-groups of a work-group, each with a pair of tiles; `TEAM` in `cl/xmx/experts.cl`.
const TEAM: usize = 8;

impl Xmx {
    /// Prepares `rows` rows and puts each to its slots at the experts that are `chosen` for it, i32 `[rows][top]`; makes the
    /// routing's places and blocks. `ready` has room for `rows * top` rows.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn prepare_for_experts(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
        ready: &XmxRows,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "prepare_for_experts";
        routing.check(OP, rows)?;
        routing.holds_chosen(OP, chosen, rows)?;
        self.prepare_to(device, input, rows, Some((chosen, routing)), ready)
    }

    /// activation(gate) * up of every slot, ready for [`expert_down`](Self::expert_down): `inner` has room for as many slots
    /// of `experts.outputs` columns. The matrices' tiles of gate and up alternate, and are in the family's order.
    ///
    /// Inner rows have no factor of their own: they are divided by 16, so f16 holds values up to 2^20, and those below 2^-10
    /// lose bits, at most 2^-21 of them. What is larger becomes infinite, which ends the generation with an error.
    ///
    /// `scale_columns`: columns that share a scale in W4, 64 or 128; in the latter case blocks of 64 have equal scales two by two,
    /// of which one is read.
    ///
    /// # Errors
    /// Sizes that do not fit, a format without kernels, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn expert_gate_up(
        &self,
        device: &Device,
        experts: &Experts,
        scale_columns: usize,
        activation: Activation,
        routing: &Routing,
        rows: usize,
        ready: &XmxRows,
        inner: &XmxRows,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "expert_gate_up";
        let which = check_experts(OP, experts, ready, routing, rows, 2 * round_up(experts.outputs, TILE))?;
        check(OP, inner.terms == ready.terms, || "inner rows are rounded in another way".to_owned())?;
        let slots = routing.slots(rows);
        inner.hold(OP, slots, experts.outputs)?;
        let pairs = experts.pairs();
        Ok(Launch::with_args(
            &self.kernel(device, which, OP)?,
            &[
                Arg::Buffer(&experts.matrix.buffer),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(&ready.values),
                Arg::Buffer(&ready.sums),
                Arg::Buffer(&ready.factors),
                Arg::Buffer(&inner.values),
                Arg::I32(Finish::Gated(activation).number()),
                Arg::I32(int(OP, "pairs of tiles", pairs)?),
                Arg::I32(int(OP, "spans", experts.matrix.groups() / which.span_groups())?),
                Arg::I32(int(
                    OP,
                    "bytes of a tile",
                    experts.matrix.format.tile_bytes(experts.matrix.columns),
                )?),
                Arg::I32(int(OP, "slots", slots)?),
                Arg::I32(int(OP, "stride", ready.stride())?),
                Arg::I32(int(OP, "rows", ready.sums_stride())?),
                Arg::I32(int(OP, "stride", inner.stride())?),
                Arg::I32(if scale_columns >= 128 { 2 } else { 1 }),
                Arg::U64(ready.plane()),
                Arg::U64(inner.plane()),
            ],
            &[pairs.div_ceil(TEAM) * TEAM * LANES, most_blocks(routing.experts, slots)],
            Some(&[TEAM * LANES, 1]),
        )?)
    }

    /// Sums of what [`expert_gate_up`](Self::expert_gate_up) left, which the second product needs of a format with offsets;
    /// none for others.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn sum_inner(
        &self,
        device: &Device,
        experts: &Experts,
        routing: &Routing,
        rows: usize,
        inner: &XmxRows,
    ) -> Result<Option<Launch>, OpsError> {
        const OP: &str = "sum_inner";
        if !matches!(experts.matrix.format, Format::Q4_1 | Format::Q4K | Format::Q5_1 | Format::Q5K) {
            return Ok(None);
        }
        let slots = routing.slots(rows);
        inner.hold(OP, slots, experts.matrix.columns)?;
        let launch = Launch::with_args(
            &self.kernel(device, Which::Experts(experts.matrix.format, inner.terms), OP)?,
            &[
                Arg::Buffer(&inner.values),
                Arg::Buffer(&inner.sums),
                Arg::I32(int(OP, "columns", round_up(inner.columns, 32))?),
                Arg::I32(int(OP, "stride", inner.stride())?),
                Arg::I32(int(OP, "rows", inner.sums_stride())?),
                Arg::U64(inner.plane()),
            ],
            &[slots * LANES],
            Some(&[LANES]),
        )?;
        Ok(Some(launch))
    }

    /// The second product of every slot. `out`: f32 `[rows * top][stride]`, of which the outputs padded to [`ROW_MULTIPLE`] are
    /// written.
    ///
    /// # Errors
    /// Sizes that do not fit, a format without kernels, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn expert_down(
        &self,
        device: &Device,
        experts: &Experts,
        routing: &Routing,
        rows: usize,
        inner: &XmxRows,
        out: &Buffer,
        stride: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "expert_down";
        let width = round_up(experts.outputs, ROW_MULTIPLE);
        let which = check_experts(OP, experts, inner, routing, rows, width)?;
        let slots = routing.slots(rows);
        check(OP, stride >= width && stride.is_multiple_of(4), || {
            format!("{width} results a slot with a stride of {stride}")
        })?;
        holds_floats(OP, "the output", out, (slots - 1) * stride + width)?;
        let pairs = experts.pairs();
        Ok(Launch::with_args(
            &self.kernel(device, which, OP)?,
            &[
                Arg::Buffer(&experts.matrix.buffer),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(&inner.values),
                Arg::Buffer(&inner.sums),
                Arg::Buffer(out),
                Arg::I32(int(OP, "pairs of tiles", pairs)?),
                Arg::I32(int(OP, "spans", experts.matrix.groups() / which.span_groups())?),
                Arg::I32(int(
                    OP,
                    "bytes of a tile",
                    experts.matrix.format.tile_bytes(experts.matrix.columns),
                )?),
                Arg::I32(int(OP, "slots", slots)?),
                Arg::I32(int(OP, "columns", round_up(inner.columns, 32))?),
                Arg::I32(int(OP, "stride", inner.stride())?),
                Arg::I32(int(OP, "rows", inner.sums_stride())?),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::I32(shared_scales(which, experts.matrix.format)),
                Arg::U64(inner.plane()),
            ],
            &[pairs.div_ceil(TEAM) * TEAM * LANES, most_blocks(routing.experts, slots)],
            Some(&[TEAM * LANES, 1]),
        )?)
    }
}

/// The program for experts whose matrices and routing fit.
fn check_experts(
    op: &'static str,
    experts: &Experts,
    ready: &XmxRows,
    routing: &Routing,
    rows: usize,
    rows_each: usize,
) -> Result<Which, OpsError> {
    let format = experts.matrix.format;
    check(op, xmx_takes(format) && format != Format::Bf16, || {
        format!("there are no xmx kernels for {}", format.name())
    })?;
    routing.check(op, rows)?;
    ready.hold(op, routing.slots(rows), experts.matrix.columns)?;
    experts.check(op, routing, rows_each)?;
    Ok(Which::Experts(format, ready.terms))
}

/// What one of the two products of all experts is expected to do in a pass of `rows` rows, each of which goes to `used` of `count`
/// experts, every one of them with the same chance.
pub fn xmx_experts_work(
    format: Format,
    terms: XmxTerms,
    shape: [usize; 2],
    scale_columns: usize,
    gate_up: bool,
    [count, used, rows]: [usize; 3],
) -> [XmxWork; 4] {
    // Chances that an expert has so many rows, one after the other. They are added up in thousandths of an expert.
    let chance = used as f64 / count.max(1) as f64;
    let mut parts = [XmxWork::default(); 4];
    if chance >= 1.0 {
        let work = xmx_expert_work(format, terms, shape, scale_columns, gate_up, rows);
        return work.map(|work| work.times(count as u64));
    }
    let mut has = (1.0 - chance).powf(rows as f64);
    for taken in 0..=rows {
        let times = (has * count as f64 * 1000.0).round() as u64;
        if times > 0 {
            let work = xmx_expert_work(format, terms, shape, scale_columns, gate_up, taken);
            for (sum, work) in parts.iter_mut().zip(work) {
                *sum = sum.and(work.times(times));
            }
        }
        has *= (rows - taken) as f64 / (taken + 1) as f64 * chance / (1.0 - chance);
    }
    parts.map(|work| work.share(1000))
}

/// What one of the two products of one expert with `rows` rows has to do: by the blocks of 8 rows that a sub-group takes at once,
/// 1 to 4, since each number has a loop of its own. The first product makes gate and up, and stores f16.
///
/// `outputs` and `columns` are the matrix's, `scale_columns` as for [`Xmx::expert_gate_up`].
pub fn xmx_expert_work(
    format: Format,
    terms: XmxTerms,
    [outputs, columns]: [usize; 2],
    scale_columns: usize,
    gate_up: bool,
    rows: usize,
) -> [XmxWork; 4] {
    let mut work = [XmxWork::default(); 4];
    let which = Which::Experts(format, terms);
    let pairs = outputs.div_ceil(ROW_MULTIPLE);
    let spans = format.padded_columns(columns) / 32 / which.span_groups();
    for first in (0..rows).step_by(32) {
        let blocks = (rows - first).min(32).div_ceil(8);
        let turns = pairs * spans;
        let part = XmxWork {
            operations: 2 * ((rows - first).min(32) * outputs * columns) as u64,
            multiply_adds: (turns * blocks * 4 * which.span_groups() * terms as usize) as u64
                * u64::from(which.products_each()),
            turns: turns as u64,
            ..XmxWork::default()
        };
        if let Some(sum) = work.get_mut(blocks - 1) {
            *sum = sum.and(part);
        }
    }
    if rows > 0 {
        // Of two blocks with equal scales, those of the second are not read.
        let unread = if scale_columns > 64 { pairs * 2 * (columns / 128) * 64 } else { 0 };
        let weights = format.matrix_bytes(outputs, columns) - unread;
        let made = if gate_up { outputs / 2 * 2 * terms as usize } else { outputs * 4 };
        work[0].bytes = (weights + rows * (columns * 2 * terms as usize + made)) as u64;
    }
    work
}
