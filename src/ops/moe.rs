//! A mixture of experts: the choice of experts for each row, the way of rows to them and back, and the products of all
//! experts in one launch each.
//!
//! A row at one of its experts is a *slot*; `cl/moe.cl` says how slots lie. A pass goes through the launchers in the order
//! `route`, `sort_rows`, `pack_for_experts`, `expert_gate_up`, `expert_down`, `combine`, all for the same number of rows;
//! the host reads nothing back in between.

use super::check::{check, holds_floats, int};
use super::kernels::{Kernels, OpsError};
use super::matmul::{Activation, Finish, Matrix, RowInput, activate};
use super::{ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};
use crate::device::{Arg, Buffer, Device, Launch, Purpose};

/// Slots that one work-item takes; `SLOT_BLOCK` in `cl/include/common.h`.
const SLOT_BLOCK: usize = 128;

/// Most experts that a row goes to; `MOST_TOP` in `cl/moe.cl`.
const MOST_TOP: usize = 64;

/// Most groups of experts; `MOST_GROUPS` in `cl/moe.cl`.
const MOST_GROUPS: usize = 64;

/// Values of a row that a work-item of `add_experts` makes; `16 * COMBINED` in `cl/moe.cl`.
const COMBINED: usize = 256;

/// Flags of `cl/moe.cl`.
const SIGMOID: i32 = 1;
const RENORMALISE: i32 = 2;
const CHOICE_BIAS: i32 = 4;
const EXPERT_SCALES: i32 = 8;

/// What a router's logits become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scoring {
    /// Their softmax over all experts.
    #[default]
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Experts by groups of as many each, of which a row uses some only. A group counts as its best expert, or, where scores
/// are sigmoids, as its two best together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are.
    pub count: usize,
    /// How many of them a row uses.
    pub used: usize,
}

/// How a router chooses, and what its choices count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertChoice {
    /// What its logits become.
    pub scoring: Scoring,
    /// The groups of its experts, if it looks at groups first.
    pub groups: Option<ExpertGroups>,
    /// The weights of the chosen are divided by their sum.
    pub renormalised: bool,
    /// Then they are multiplied by it.
    pub scale: f32,
}

impl Default for ExpertChoice {
    /// The chosen experts share the weight by their softmax.
    fn default() -> Self {
        Self { scoring: Scoring::Softmax, groups: None, renormalised: true, scale: 1.0 }
    }
}

/// What [`Kernels::choose_experts`] chooses by.
#[derive(Debug, Clone, Copy)]
pub struct Router<'a> {
    /// f32 rows: logits over all experts.
    pub logits: &'a Buffer,
    /// Values from row to row.
    pub stride: usize,
    /// How it chooses.
    pub choice: ExpertChoice,
    /// f32, one for each expert: added to scores, which are sigmoids, for the choice, and for nothing else.
    pub bias: Option<&'a Buffer>,
    /// f32, one for each expert: factor of its weight.
    pub expert_scales: Option<&'a Buffer>,
}

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
    places: Buffer,
    /// i32 `[rows * top]`: the block of a slot.
    block_of: Buffer,
    /// i32 `[most blocks][4]`: expert, first slot and number of slots.
    blocks: Buffer,
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
            block_of: buffer(rows * top)?,
            blocks: buffer(most_blocks(experts, rows * top) * 4)?,
        })
    }

    /// Bytes of the buffers that [`new`](Self::new) makes.
    pub fn bytes(experts: usize, top: usize, rows: usize) -> usize {
        (3 * rows * top + 4 * most_blocks(experts, rows * top)) * 4
    }

    /// Rows at their experts, for a pass of `rows`.
    pub fn slots(&self, rows: usize) -> usize {
        rows * self.top
    }

    fn check(&self, op: &'static str, rows: usize) -> Result<(), OpsError> {
        check(op, (1..=self.rows).contains(&rows), || {
            format!("{rows} rows, the routing was made for 1 to {}", self.rows)
        })
    }

    fn holds_chosen(&self, op: &'static str, chosen: &Buffer, rows: usize) -> Result<(), OpsError> {
        holds_floats(op, "the chosen experts", chosen, self.slots(rows))
    }
}

/// However slots fall on experts, they make no more blocks: each expert with slots has at most one block that is not full.
fn most_blocks(experts: usize, slots: usize) -> usize {
    let last = experts.min(slots);
    last + (slots - last) / SLOT_BLOCK
}

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
    fn pairs(&self) -> usize {
        self.matrix.rows / self.experts.max(1) / ROW_MULTIPLE
    }

    fn check(&self, op: &'static str, routing: &Routing, rows_each: usize) -> Result<(), OpsError> {
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

/// Index of the argument of `combine` that is its scalar, an f32.
pub const COMBINE_SCALAR: usize = 9;

/// What `combine` joins. Rows are `stride` values apart, a multiple of [`STRIDE_MULTIPLE`], and zero past their `n` values;
/// so are the norms' weights.
#[derive(Debug, Clone, Copy)]
pub struct CombineInput<'a> {
    /// f32 `[slots][out_stride]`: what `expert_down` made.
    pub out: &'a Buffer,
    /// Values from slot to slot.
    pub out_stride: usize,
    /// The dense branch.
    pub mlp: &'a Buffer,
    /// The rows that both branches are added to.
    pub residual: &'a Buffer,
    /// Weight of the norm of the experts' sum.
    pub moe_norm: &'a Buffer,
    /// Weight of the norm of the dense branch.
    pub mlp_norm: &'a Buffer,
    /// Weight of the norm of the branches' sum.
    pub join_norm: &'a Buffer,
    /// Factor of the result; see [`COMBINE_SCALAR`].
    pub scalar: f32,
    /// Values in a row.
    pub n: usize,
    /// Values from row to row.
    pub stride: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
}

impl Kernels {
    /// Chooses the experts of `rows` rows. `scores`: f32 `[rows][stride]`, the router's logits over all experts;
    /// `per_expert_scale`: f32 `[experts]`; `chosen`: i32 `[rows][top]`, what is chosen, by falling score and the lower index
    /// first among equals. Their softmax over all experts, divided by the sum of the chosen and times the expert's scale,
    /// goes to `routing.weights`. A NaN among a row's scores makes all its weights NaN; its indices stay valid.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn route(
        &self,
        device: &Device,
        scores: &Buffer,
        stride: usize,
        per_expert_scale: &Buffer,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        let router = Router {
            logits: scores,
            stride,
            choice: ExpertChoice::default(),
            bias: None,
            expert_scales: Some(per_expert_scale),
        };
        self.choose_experts(device, &router, chosen, routing, rows)
    }

    /// The same for any router: `chosen` is by falling score, bias included, and the lower index first among equals;
    /// weights are scores without the bias.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn choose_experts(
        &self,
        device: &Device,
        router: &Router<'_>,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "route";
        let Router { logits: scores, stride, choice, .. } = *router;
        routing.check(OP, rows)?;
        check(OP, stride >= routing.experts, || {
            format!("scores of {} experts with a stride of {stride}", routing.experts)
        })?;
        holds_floats(OP, "the scores", scores, (rows - 1) * stride + routing.experts)?;
        for (name, buffer) in
            [("the experts' scales", router.expert_scales), ("the experts' bias", router.bias)]
        {
            if let Some(buffer) = buffer {
                holds_floats(OP, name, buffer, routing.experts)?;
            }
        }
        check(OP, router.bias.is_none() || choice.scoring == Scoring::Sigmoid, || {
            "a bias for the choice belongs to sigmoids".to_owned()
        })?;
        routing.holds_chosen(OP, chosen, rows)?;
        let groups = choice.groups.unwrap_or(ExpertGroups { count: 1, used: 1 });
        groups.check(OP, routing)?;
        let flags = if choice.scoring == Scoring::Sigmoid { SIGMOID } else { 0 }
            | if choice.renormalised { RENORMALISE } else { 0 }
            | router.bias.map_or(0, |_| CHOICE_BIAS)
            | router.expert_scales.map_or(0, |_| EXPERT_SCALES);
        let unused = self.unused();
        Ok(Launch::with_args(
            &self.moe_kernel(device, OP)?,
            &[
                Arg::Buffer(scores),
                Arg::Buffer(router.expert_scales.unwrap_or(unused)),
                Arg::Buffer(router.bias.unwrap_or(unused)),
                Arg::Buffer(chosen),
                Arg::Buffer(&routing.weights),
                Arg::I32(int(OP, "experts", routing.experts)?),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::I32(flags),
                Arg::I32(int(OP, "groups", groups.count)?),
                Arg::I32(int(OP, "groups", groups.used)?),
                Arg::F32(choice.scale),
                Arg::Local(routing.experts * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

    /// Sorts the slots of `rows` rows by expert, inside an expert by row, and cuts them into blocks.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn sort_rows(
        &self,
        device: &Device,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "sort_rows";
        routing.check(OP, rows)?;
        routing.holds_chosen(OP, chosen, rows)?;
        let slots = routing.slots(rows);
        Ok(Launch::with_args(
            &self.moe_kernel(device, OP)?,
            &[
                Arg::Buffer(chosen),
                Arg::Buffer(&routing.places),
                Arg::Buffer(&routing.block_of),
                Arg::Buffer(&routing.blocks),
                Arg::I32(int(OP, "slots", slots)?),
                Arg::I32(int(OP, "experts", routing.experts)?),
                Arg::I32(int(OP, "blocks", most_blocks(routing.experts, slots))?),
                Arg::I32(int(OP, "rows at once", self.rows_at_once())?),
                Arg::Local(routing.experts * 4),
            ],
            &[1],
            Some(&[1]),
        )?)
    }

    /// Prepares `rows` rows and packs each for all its experts. `packed` and `sums` are as for
    /// [`pack_rows`](Self::pack_rows), for `rows * top` rows.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn pack_for_experts(
        &self,
        device: &Device,
        input: &RowInput<'_>,
        routing: &Routing,
        rows: usize,
        packed: &Buffer,
        sums: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "pack_for_experts";
        routing.check(OP, rows)?;
        self.check_input(OP, input, rows)?;
        check(OP, input.at == 0, || "rows to pack start at 0".to_owned())?;
        let groups = self.holds_packed(OP, input.n, routing.slots(rows), packed, sums)?;
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
                Arg::Buffer(&routing.places),
                Arg::Buffer(&routing.block_of),
                Arg::Buffer(&routing.blocks),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(input.flags()),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::F32(input.epsilon),
                Arg::Local(groups * 32 * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

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
        )?)
    }

    /// The second product of every slot. `out`: f32 `[rows * top][stride]`, of which the outputs padded to
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
        )?)
    }

    /// Adds up each row's experts by weight, in the order of choice, and joins the sum with the dense branch and the
    /// residual: `(residual + norm(norm(mlp) + norm(sum))) * scalar`. `result`: rows like the residual's, which it may be;
    /// zero from `n` on up to [`STRIDE_MULTIPLE`].
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn combine(
        &self,
        device: &Device,
        input: &CombineInput<'_>,
        routing: &Routing,
        rows: usize,
        result: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "combine";
        routing.check(OP, rows)?;
        let padded = round_up(input.n, STRIDE_MULTIPLE);
        let lanes = round_up(input.n, TILE);
        check(OP, input.n > 0 && input.stride >= padded && input.out_stride >= lanes, || {
            format!("rows of {} values with strides of {} and {}", input.n, input.stride, input.out_stride)
        })?;
        let reach = (rows - 1) * input.stride + padded;
        let slots = routing.slots(rows);
        holds_floats(OP, "the experts' results", input.out, (slots - 1) * input.out_stride + lanes)?;
        for (name, buffer) in
            [("the dense branch", input.mlp), ("the residual", input.residual), ("the result", result)]
        {
            holds_floats(OP, name, buffer, reach)?;
        }
        for norm in [input.moe_norm, input.mlp_norm, input.join_norm] {
            holds_floats(OP, "a norm", norm, lanes)?;
        }
        Ok(Launch::with_args(
            &self.moe_kernel(device, OP)?,
            &[
                Arg::Buffer(input.out),
                Arg::Buffer(&routing.places),
                Arg::Buffer(&routing.weights),
                Arg::Buffer(input.mlp),
                Arg::Buffer(input.residual),
                Arg::Buffer(input.moe_norm),
                Arg::Buffer(input.mlp_norm),
                Arg::Buffer(input.join_norm),
                Arg::Buffer(result),
                Arg::F32(input.scalar),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "stride", input.out_stride)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::I32(int(OP, "columns", padded)?),
                Arg::F32(input.epsilon),
                Arg::Local(lanes * 4),
                Arg::Local(lanes * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }
}

impl ExpertGroups {
    fn check(&self, op: &'static str, routing: &Routing) -> Result<(), OpsError> {
        let Self { count, used } = *self;
        let fits = (1..=MOST_GROUPS).contains(&count)
            && (1..=count).contains(&used)
            && routing.experts.is_multiple_of(count)
            && routing.top <= routing.experts / count * used;
        check(op, fits, || {
            format!("{} of {} experts from {used} of {count} groups", routing.top, routing.experts)
        })
    }
}

impl Kernels {
    /// Adds up each row's experts by weight, in the order of choice, and adds the sum to `stream`: rows `stride` values
    /// apart, of which the first `n` are written, rounded up to whole 16. `out` is what `expert_down` made.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn add_experts(
        &self,
        device: &Device,
        out: &Buffer,
        out_stride: usize,
        routing: &Routing,
        rows: usize,
        stream: &Buffer,
        n: usize,
        stride: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "add_experts";
        routing.check(OP, rows)?;
        let lanes = round_up(n, TILE);
        check(OP, n > 0 && stride >= lanes && out_stride >= lanes, || {
            format!("rows of {n} values with strides of {out_stride} and {stride}")
        })?;
        let slots = routing.slots(rows);
        holds_floats(OP, "the experts' results", out, (slots - 1) * out_stride + lanes)?;
        holds_floats(OP, "the stream", stream, (rows - 1) * stride + lanes)?;
        Ok(Launch::with_args(
            &self.moe_kernel(device, OP)?,
            &[
                Arg::Buffer(out),
                Arg::Buffer(&routing.places),
                Arg::Buffer(&routing.weights),
                Arg::Buffer(stream),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "columns", lanes)?),
                Arg::I32(int(OP, "stride", out_stride)?),
                Arg::I32(int(OP, "stride", stride)?),
            ],
            &[rows, lanes.div_ceil(COMBINED)],
            Some(&[1, 1]),
        )?)
    }
}

/// CPU reference of `choose_experts` for one row without NaN: the chosen experts and their weights. `bias` is empty where
/// there is none.
pub fn router_reference(
    logits: &[f32],
    choice: &ExpertChoice,
    bias: &[f32],
    top: usize,
) -> (Vec<usize>, Vec<f64>) {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |most, &v| most.max(f64::from(v)));
    let total: f64 = logits.iter().map(|&v| (f64::from(v) - largest).exp()).sum();
    let score = |e: usize| match choice.scoring {
        Scoring::Softmax => (f64::from(logits[e]) - largest).exp() / total,
        Scoring::Sigmoid => 1.0 / (1.0 + (-f64::from(logits[e])).exp()),
    };
    // Among softmaxes the order is that of the logits.
    let by: Vec<f64> = (0..logits.len())
        .map(|e| match choice.scoring {
            Scoring::Softmax => f64::from(logits[e]),
            Scoring::Sigmoid => score(e),
        })
        .enumerate()
        .map(|(e, by)| by + bias.get(e).map_or(0.0, |&bias| f64::from(bias)))
        .collect();
    let falling = |values: &[f64], among: Vec<usize>| -> Vec<usize> {
        let mut order = among;
        // Stable, so the lower index stays first among equals.
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let mut open: Vec<usize> = (0..logits.len()).collect();
    if let Some(groups) = choice.groups {
        let size = logits.len() / groups.count;
        let values: Vec<f64> = by
            .chunks(size)
            .map(|group| {
                let best = falling(group, (0..group.len()).collect());
                let taken = if choice.scoring == Scoring::Sigmoid { 2 } else { 1 };
                best.iter().take(taken).map(|&e| group[e]).sum()
            })
            .collect();
        let kept = &falling(&values, (0..groups.count).collect())[..groups.used];
        open.retain(|e| kept.contains(&(e / size)));
    }
    let mut chosen = falling(&by, open);
    chosen.truncate(top);
    let share: f64 = if choice.renormalised { chosen.iter().map(|&e| score(e)).sum() } else { 1.0 };
    let weights = chosen.iter().map(|&e| score(e) / share * f64::from(choice.scale)).collect();
    (chosen, weights)
}

/// CPU reference of `route` for one row without NaN: the chosen experts and their weights.
pub fn route_reference(scores: &[f32], per_expert_scale: &[f32], top: usize) -> (Vec<usize>, Vec<f64>) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    // Stable, so the lower index stays first among equals.
    order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap_or(std::cmp::Ordering::Equal));
    order.truncate(top);
    let largest = order.first().map_or(0.0, |&first| f64::from(scores[first]));
    let share = |e: usize| (f64::from(scores[e]) - largest).exp();
    let total: f64 = order.iter().map(|&e| share(e)).sum();
    let weights = order.iter().map(|&e| share(e) / total * f64::from(per_expert_scale[e])).collect();
    (order, weights)
}

/// CPU reference of one expert's gate and up product for one prepared row: `gate` and `up` are rows of weights.
pub fn expert_reference(gate: &[f64], up: &[f64], row: &[f64], activation: Activation) -> f64 {
    let dot = |weights: &[f64]| -> f64 { weights.iter().zip(row).map(|(w, x)| w * x).sum() };
    activate(activation, dot(gate)) * dot(up)
}

/// CPU reference of `combine` for one row: `experts` are the results of the chosen ones, `norms` the weights of the norms of
/// their sum, of the dense branch and of both together.
pub fn combine_reference(
    experts: &[(f64, &[f64])],
    mlp: &[f64],
    residual: &[f64],
    norms: [&[f64]; 3],
    scalar: f64,
    epsilon: f64,
) -> Vec<f64> {
    let normed = |x: &[f64], weight: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(v, w)| v / (mean + epsilon).sqrt() * w).collect()
    };
    let mut sum = vec![0.0; mlp.len()];
    for (weight, result) in experts {
        for (sum, value) in sum.iter_mut().zip(*result) {
            *sum += weight * value;
        }
    }
    let [moe_norm, mlp_norm, join_norm] = norms;
    let both: Vec<f64> =
        normed(mlp, mlp_norm).iter().zip(normed(&sum, moe_norm)).map(|(a, b)| a + b).collect();
    normed(&both, join_norm).iter().zip(residual).map(|(branch, x)| (x + branch) * scalar).collect()
}
