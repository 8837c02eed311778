//! The products of all experts, in one launch each.

use super::routing::{Routing, most_blocks};
use crate::device::{Arg, Buffer, Device, Launch, Work};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::{Activation, Finish, Matrix, ROW_MULTIPLE, TILE, activate, round_up};

/// Columns of a scale of W4 that the `xmx` family reads: blocks of 64 have one each, whatever the file's groups.
const SCALE_COLUMNS: usize = 64;

/// One projection of all experts: their matrices, one below the other in one buffer.
///
/// Each expert has `matrix.rows / experts` rows, a multiple of [`ROW_MULTIPLE`]. Where the projection makes gate and up, their
/// tiles of 16 outputs alternate inside each expert, so an expert has `2 * round_up(outputs, 16)` rows; padding is zero.
#[derive(Debug, Clone)]
pub struct Experts {
    /// The matrices of all experts.
    pub matrix: Matrix,
    /// How many there are.
    pub experts: usize,
    /// Results of one expert that are meant: the inner width for gate and up, the hidden size for down.
    pub outputs: usize,
}

impl Experts {
    /// Pairs of tiles of one expert.
    pub(in crate::ops) fn pairs(&self) -> usize {
        self.matrix.rows / self.experts.max(1) / ROW_MULTIPLE
    }

    /// What so many rows at their experts take: an expert is read once, and no more of them than there are rows.
    fn work(&self, slots: usize) -> Work {
        let experts = self.experts.max(1);
        let each = self.matrix.rows / experts;
        Work {
            bytes: (self.matrix.bytes() / experts * slots.min(experts)) as u64,
            operations: 2 * (slots * each * self.matrix.columns) as u64,
            ..Work::default()
        }
    }

    pub(in crate::ops) fn check(
        &self,
        op: &'static str,
        routing: &Routing,
        rows_each: usize,
    ) -> Result<(), OpsError> {
        let matrix = &self.matrix;
        check(op, self.experts == routing.experts && self.outputs > 0, || {
            format!("{} experts, the routing was made for {}", self.experts, routing.experts)
        })?;
        check(op, matrix.rows == self.experts * rows_each, || {
            format!(
                "{} matrices of {} outputs have {} rows together, not {}",
                self.experts,
                self.outputs,
                matrix.rows,
                self.experts * rows_each
            )
        })?;
        check(op, matrix.buffer.size() >= matrix.bytes(), || {
            format!("the matrices have {} bytes, their shape needs {}", matrix.buffer.size(), matrix.bytes())
        })
    }
}

impl Kernels {
    /// activation(gate) * up of every slot, packed for [`expert_down`](Self::expert_down): `inner_packed` and `inner_sums`
    /// as `packed` and `sums`, for `experts.outputs` columns.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn expert_gate_up(
        &self,
        device: &Device,
        experts: &Experts,
        activation: Activation,
        routing: &Routing,
        rows: usize,
        packed: &Buffer,
        sums: &Buffer,
        inner_packed: &Buffer,
        inner_sums: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "expert_gate_up";
        routing.check(OP, rows)?;
        experts.check(OP, routing, 2 * round_up(experts.outputs, TILE))?;
        let slots = routing.slots(rows);
        let packed_groups = self.holds_packed(OP, experts.matrix.columns, slots, packed, sums)?;
        if experts.matrix.family == Family::Xmx {
            let (xmx, ready) = self.xmx_rows(OP, device, [packed, sums], slots, experts.matrix.columns)?;
            let (_, inner) = self.xmx_rows(OP, device, [inner_packed, inner_sums], slots, experts.outputs)?;
            let launch = xmx.expert_gate_up(
                device,
                experts,
                SCALE_COLUMNS,
                activation,
                routing,
                rows,
                &ready,
                &inner,
            )?;
            return Ok(launch.doing(experts.work(slots)));
        }
        let inner_groups = self.holds_packed(OP, experts.outputs, slots, inner_packed, inner_sums)?;
        Ok(Launch::with_args(
            &self.experts_kernel(device, experts.matrix.format, OP)?,
            &[
                Arg::Buffer(&experts.matrix.buffer),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::Buffer(inner_packed),
                Arg::Buffer(inner_sums),
                Arg::I32(Finish::Gated(activation).number()),
                Arg::I32(int(OP, "pairs of tiles", experts.pairs())?),
                Arg::I32(int(OP, "groups", experts.matrix.groups())?),
                Arg::I32(int(OP, "groups", packed_groups)?),
                Arg::I32(int(OP, "groups", inner_groups)?),
            ],
            &[inner_groups, most_blocks(routing.experts, slots)],
            Some(&[1, 1]),
        )?
        .doing(experts.work(slots)))
    }

    /// What has to be done to inner rows between the two products, for some formats of the `xmx` family: sums of their columns.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn sum_inner(
        &self,
        device: &Device,
        experts: &Experts,
        routing: &Routing,
        rows: usize,
        inner_packed: &Buffer,
        inner_sums: &Buffer,
    ) -> Result<Option<Launch>, OpsError> {
        if experts.matrix.family == Family::Vector {
            return Ok(None);
        }
        let (slots, columns) = (routing.slots(rows), experts.matrix.columns);
        let (xmx, inner) = self.xmx_rows("sum_inner", device, [inner_packed, inner_sums], slots, columns)?;
        xmx.sum_inner(device, experts, routing, rows, &inner)
    }

    /// The second product of every slot, behind [`sum_inner`](Self::sum_inner). `out`: f32 `[rows * top][stride]`, of which the outputs padded to
    /// [`ROW_MULTIPLE`] are written.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn expert_down(
        &self,
        device: &Device,
        experts: &Experts,
        routing: &Routing,
        rows: usize,
        inner_packed: &Buffer,
        inner_sums: &Buffer,
        out: &Buffer,
        stride: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "expert_down";
        routing.check(OP, rows)?;
        let width = round_up(experts.outputs, ROW_MULTIPLE);
        experts.check(OP, routing, width)?;
        let slots = routing.slots(rows);
        let packed_groups = self.holds_packed(OP, experts.matrix.columns, slots, inner_packed, inner_sums)?;
        check(OP, stride >= width, || format!("{width} results a slot with a stride of {stride}"))?;
        holds_floats(OP, "the output", out, (slots - 1) * stride + width)?;
        if experts.matrix.family == Family::Xmx {
            let columns = experts.matrix.columns;
            let (xmx, inner) = self.xmx_rows(OP, device, [inner_packed, inner_sums], slots, columns)?;
            let launch = xmx.expert_down(device, experts, routing, rows, &inner, out, stride)?;
            return Ok(launch.doing(experts.work(slots)));
        }
        Ok(Launch::with_args(
            &self.experts_kernel(device, experts.matrix.format, OP)?,
            &[
                Arg::Buffer(&experts.matrix.buffer),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(inner_packed),
                Arg::Buffer(inner_sums),
                Arg::Buffer(out),
                Arg::I32(int(OP, "pairs of tiles", experts.pairs())?),
                Arg::I32(int(OP, "groups", experts.matrix.groups())?),
                Arg::I32(int(OP, "groups", packed_groups)?),
                Arg::I32(int(OP, "stride", stride)?),
            ],
            &[experts.pairs(), most_blocks(routing.experts, slots)],
            Some(&[1, 1]),
        )?
        .doing(experts.work(slots)))
    }
}

/// CPU reference of one expert's gate and up product for one prepared row: `gate` and `up` are rows of weights.
pub fn expert_reference(gate: &[f64], up: &[f64], row: &[f64], activation: Activation) -> f64 {
    let dot = |weights: &[f64]| -> f64 { weights.iter().zip(row).map(|(w, x)| w * x).sum() };
    activate(activation, dot(gate)) * dot(up)
}
