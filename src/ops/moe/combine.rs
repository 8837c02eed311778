//! The way back: what a row's experts made is added up by weight.

use super::routing::Routing;
use crate::device::{Arg, Buffer, Device, Launch};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::{PackedRows, STRIDE_MULTIPLE, TILE, round_up};

/// Values of a row that a work-item of `add_experts` makes; `16 * COMBINED` in `cl/moe.cl`.
const COMBINED: usize = 256;

/// Index of the argument of `combine` that is its scalar, an f32.
pub const COMBINE_SCALAR: usize = 12;

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
    /// What follows, if it is matrices of the kernels' own [`family`](Kernels::family): the weight of the result's norm, and
    /// where the normed rows are packed for them.
    pub next: Option<(&'a Buffer, PackedRows<'a>)>,
}

/// What a launch of `combine` is told, looked at.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct CombineBuffers<'a> {
    pub(in crate::ops) input: &'a CombineInput<'a>,
    pub(in crate::ops) routing: &'a Routing,
    pub(in crate::ops) result: &'a Buffer,
    /// Values of a row of the result that are written.
    pub(in crate::ops) padded: usize,
}

impl Kernels {
    /// Adds up each row's experts by weight, in the order of choice, and joins the sum with the dense branch and the
    /// residual: `(residual + norm(norm(mlp) + norm(sum))) * scalar`. `result`: rows like the residual's, which it may be;
    /// zero from `n` on up to [`STRIDE_MULTIPLE`]. Packs them for what follows, with the bits of
    /// [`pack_rows`](Self::pack_rows).
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
        if let Some((norm, packed)) = input.next {
            self.holds_packed(OP, input.n, rows, packed.packed, packed.sums)?;
            holds_floats(OP, "the next norm", norm, padded)?;
        }
        if self.family() == Family::Xmx {
            let buffers = CombineBuffers { input, routing, result, padded };
            let next = match input.next {
                Some((norm, PackedRows { packed, sums })) => {
                    Some((norm, self.xmx_rows(OP, device, [packed, sums], rows, input.n)?.1))
                }
                None => None,
            };
            let next = next.as_ref().map(|(norm, ready)| (*norm, ready));
            return self.xmx(OP)?.combine(device, &buffers, rows, next);
        }
        let unused = self.unused();
        let (next_norm, next) = input.next.unwrap_or((unused, PackedRows { packed: unused, sums: unused }));
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
                Arg::Buffer(next_norm),
                Arg::Buffer(next.packed),
                Arg::Buffer(next.sums),
                Arg::F32(input.scalar),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "stride", input.out_stride)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::I32(int(OP, "columns", padded)?),
                Arg::I32(i32::from(input.next.is_some())),
                Arg::F32(input.epsilon),
                Arg::Local(padded * 4),
                Arg::Local(lanes * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

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
