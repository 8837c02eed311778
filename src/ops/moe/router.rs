//! Routers: which experts a row goes to, and what each of them counts.

use super::routing::Routing;
use crate::device::{Arg, Buffer, Device, Launch};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::{Finish, Matrix, Output, PackedRows, ROW_BLOCK, ROW_MULTIPLE};

/// Most groups of experts; `MOST_GROUPS` in `cl/moe.cl`.
const MOST_GROUPS: usize = 64;

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
        let Choosing { buffers, numbers } = self.choosing(OP, router, chosen, routing, rows)?;
        // A row's lanes, and how many they are.
        let (kernel, lanes) = match self.family() {
            Family::Vector => (self.moe_kernel(device, OP)?, 1),
            Family::Xmx => self.xmx(OP)?.route_kernel(device)?,
        };
        Ok(Launch::with_args(&kernel, &[&buffers[..], &numbers].concat(), &[rows * lanes], Some(&[lanes]))?)
    }

    /// The logits of packed rows by `matrix`, which is of the `vector` family, to `router.logits`, and the choice by them, in one
    /// launch. The bits are those of [`matmul`](Self::matmul) and [`choose_experts`](Self::choose_experts).
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn route_rows(
        &self,
        device: &Device,
        matrix: &Matrix,
        input: PackedRows<'_>,
        router: &Router<'_>,
        chosen: &Buffer,
        routing: &Routing,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "route_rows";
        let Choosing { buffers, numbers } = self.choosing(OP, router, chosen, routing, rows)?;
        check(
            OP,
            matrix.family == Family::Vector && matrix.pairs() == routing.experts.div_ceil(ROW_MULTIPLE),
            || {
                format!(
                    "{} outputs of the {:?} family for {} experts",
                    matrix.rows, matrix.family, routing.experts
                )
            },
        )?;
        let packed_groups = self.holds_packed(OP, matrix.columns, rows, input.packed, input.sums)?;
        let output = Output { rows: router.logits, at: 0, stride: router.stride };
        self.check_output(OP, matrix, &Finish::Store, &output, rows)?;
        Ok(Launch::with_args(
            &self.router_kernel(device, matrix.format, OP)?,
            &[
                &[Arg::Buffer(&matrix.buffer), Arg::Buffer(input.packed), Arg::Buffer(input.sums)],
                &buffers[..],
                &[
                    Arg::I32(int(OP, "pairs of tiles", matrix.pairs())?),
                    Arg::I32(int(OP, "groups", matrix.groups())?),
                    Arg::I32(int(OP, "groups", packed_groups)?),
                    Arg::I32(int(OP, "rows", rows)?),
                ],
                &numbers,
            ]
            .concat(),
            &[rows.div_ceil(ROW_BLOCK)],
            Some(&[1]),
        )?
        .doing(matrix.work(rows)))
    }

    /// What both launches of a choice say.
    fn choosing<'a>(
        &'a self,
        op: &'static str,
        router: &Router<'a>,
        chosen: &'a Buffer,
        routing: &'a Routing,
        rows: usize,
    ) -> Result<Choosing<'a>, OpsError> {
        let Router { logits: scores, stride, choice, .. } = *router;
        routing.check(op, rows)?;
        check(op, stride >= routing.experts, || {
            format!("scores of {} experts with a stride of {stride}", routing.experts)
        })?;
        holds_floats(op, "the scores", scores, (rows - 1) * stride + routing.experts)?;
        for (name, buffer) in
            [("the experts' scales", router.expert_scales), ("the experts' bias", router.bias)]
        {
            if let Some(buffer) = buffer {
                holds_floats(op, name, buffer, routing.experts)?;
            }
        }
        check(op, router.bias.is_none() || choice.scoring == Scoring::Sigmoid, || {
            "a bias for the choice belongs to sigmoids".to_owned()
        })?;
        routing.holds_chosen(op, chosen, rows)?;
        let groups = choice.groups.unwrap_or(ExpertGroups { count: 1, used: 1 });
        groups.check(op, routing)?;
        let flags = if choice.scoring == Scoring::Sigmoid { SIGMOID } else { 0 }
            | if choice.renormalised { RENORMALISE } else { 0 }
            | router.bias.map_or(0, |_| CHOICE_BIAS)
            | router.expert_scales.map_or(0, |_| EXPERT_SCALES);
        let unused = self.unused();
        Ok(Choosing {
            buffers: [
                Arg::Buffer(scores),
                Arg::Buffer(router.expert_scales.unwrap_or(unused)),
                Arg::Buffer(router.bias.unwrap_or(unused)),
                Arg::Buffer(chosen),
                Arg::Buffer(&routing.weights),
            ],
            numbers: [
                Arg::I32(int(op, "experts", routing.experts)?),
                Arg::I32(int(op, "experts a row", routing.top)?),
                Arg::I32(int(op, "stride", stride)?),
                Arg::I32(flags),
                Arg::I32(int(op, "groups", groups.count)?),
                Arg::I32(int(op, "groups", groups.used)?),
                Arg::F32(choice.scale),
                Arg::Local(routing.experts * 4),
            ],
        })
    }
}

/// What both launches of a choice are told, in the order of their kernels' arguments.
struct Choosing<'a> {
    buffers: [Arg<'a>; 5],
    numbers: [Arg<'a>; 8],
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
