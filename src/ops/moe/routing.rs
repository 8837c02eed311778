//! The way of rows to their experts: slots sorted by expert, cut into blocks, and packed.

use crate::device::{Arg, Buffer, Device, Launch, Purpose};
use crate::ops::RowInput;
use crate::ops::check::{check, holds_floats, int};
use crate::ops::kernels::{Family, Kernels, OpsError};

/// Slots that one work-item takes; `SLOT_BLOCK` in `cl/include/common.h`.
const SLOT_BLOCK: usize = 128;

/// Most experts that a row goes to; `MOST_TOP` in `cl/moe.cl`.
const MOST_TOP: usize = 64;

/// Buffers that carry the rows of a pass to their experts and back.
#[derive(Debug, Clone)]
pub struct Routing {
    /// Experts there are.
    pub experts: usize,
    /// Experts that a row goes to.
    pub top: usize,
    /// The most rows of a pass.
    pub rows: usize,
    /// f32 `[rows][top]`: what each chosen expert's result counts.
    pub weights: Buffer,
    /// i32 `[rows][top]`: the slot of a row's choice.
    pub(in crate::ops) places: Buffer,
    /// i32 `[most blocks][4]`: expert, first slot and number of slots.
    pub(in crate::ops) blocks: Buffer,
}

impl Routing {
    /// Buffers for up to `rows` rows that go to `top` of `experts` each.
    ///
    /// # Errors
    /// Numbers that make no sense, or no memory.
    pub fn new(device: &Device, experts: usize, top: usize, rows: usize) -> Result<Self, OpsError> {
        const OP: &str = "routing";
        check(OP, top <= MOST_TOP, || format!("{top} experts a row, {MOST_TOP} at most"))?;
        check(OP, (1..=experts).contains(&top) && rows > 0, || {
            format!("{rows} rows cannot go to {top} of {experts} experts each")
        })?;
        int(OP, "rows times experts a row", rows.saturating_mul(top))?;
        let buffer = |values: usize| device.alloc(Purpose::Scratch, values * 4);
        Ok(Self {
            experts,
            top,
            rows,
            weights: buffer(rows * top)?,
            places: buffer(rows * top)?,
            blocks: buffer(most_blocks(experts, rows * top) * 4)?,
        })
    }

    /// Bytes of the buffers that [`new`](Self::new) makes.
    pub fn bytes(experts: usize, top: usize, rows: usize) -> usize {
        (2 * rows * top + 4 * most_blocks(experts, rows * top)) * 4
    }

    /// Rows at their experts, for a pass of `rows`.
    pub fn slots(&self, rows: usize) -> usize {
        rows * self.top
    }

    pub(in crate::ops) fn check(&self, op: &'static str, rows: usize) -> Result<(), OpsError> {
        check(op, (1..=self.rows).contains(&rows), || {
            format!("{rows} rows, the routing was made for 1 to {}", self.rows)
        })
    }

    pub(in crate::ops) fn holds_chosen(
        &self,
        op: &'static str,
        chosen: &Buffer,
        rows: usize,
    ) -> Result<(), OpsError> {
        holds_floats(op, "the chosen experts", chosen, self.slots(rows))
    }
}

/// However slots fall on experts, they make no more blocks: each expert with slots has at most one block that is not full.
pub(in crate::ops) fn most_blocks(experts: usize, slots: usize) -> usize {
    let last = experts.min(slots);
    last + (slots - last) / SLOT_BLOCK
}

impl Kernels {
    /// Prepares `rows` rows and packs each for the experts `chosen` for it, i32 `[rows][top]`, whose matrices are of `family`.
    /// Slots are sorted by expert, inside an expert by row, and cut into blocks on the way. `packed` and `sums` are as for
    /// [`pack_rows`](Self::pack_rows), for `rows * top` rows.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn pack_for_experts(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
        family: Family,
        packed: &Buffer,
        sums: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "pack_for_experts";
        routing.check(OP, rows)?;
        routing.holds_chosen(OP, chosen, rows)?;
        self.check_input(OP, input, rows)?;
        check(OP, input.at == 0, || "rows to pack start at 0".to_owned())?;
        let slots = routing.slots(rows);
        let groups = self.holds_packed(OP, input.n, slots, packed, sums)?;
        if family == Family::Xmx {
            let (xmx, ready) = self.xmx_rows(OP, device, [packed, sums], slots, input.n)?;
            return xmx.prepare_for_experts(device, input, chosen, routing, rows, &ready);
        }
        let unused = self.unused();
        let (branch, branch_weight, new_rows) = input.branch.unwrap_or((unused, unused, unused));
        Ok(Launch::with_args(
            &self.moe_kernel(device, OP)?,
            &[
                Arg::Buffer(input.rows),
                Arg::Buffer(branch),
                Arg::Buffer(branch_weight),
                Arg::Buffer(input.norm.unwrap_or(unused)),
                Arg::Buffer(new_rows),
                Arg::Buffer(chosen),
                Arg::Buffer(&routing.places),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::I32(int(OP, "experts", routing.experts)?),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "blocks", most_blocks(routing.experts, slots))?),
                Arg::I32(int(OP, "rows at once", self.rows_at_once())?),
                Arg::I32(input.flags()),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::F32(input.epsilon),
                Arg::Local(groups * 32 * 4),
                Arg::Local(routing.experts * 4),
                Arg::Local(routing.experts * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }
}
