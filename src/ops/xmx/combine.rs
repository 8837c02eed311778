//! The end of a layer with experts beside a network for all rows.

use super::kernels::Xmx;
use super::programs::Which;
use super::rows::{TEAM_ITEMS, XmxRows};
use crate::device::{Arg, Buffer, Device, Launch};
use crate::ops::OpsError;
use crate::ops::check::{check, int};
use crate::ops::moe::CombineBuffers;

impl Xmx {
    /// What [`Kernels::combine`](crate::ops::Kernels::combine) does, by sub-groups; `next`: the weight of the result's norm, and
    /// where the normed rows are rounded to for what follows. The numbers have been looked at.
    pub(in crate::ops) fn combine(
        &self,
        device: &Device,
        buffers: &CombineBuffers<'_>,
        rows: usize,
        next: Option<(&Buffer, &XmxRows)>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "combine";
        let CombineBuffers { input, routing, result, padded } = *buffers;
        check(OP, [input.stride, input.out_stride].iter().all(|stride| stride.is_multiple_of(4)), || {
            format!("strides of {} and {}, which are not multiples of 4", input.stride, input.out_stride)
        })?;
        if let Some((_, ready)) = next {
            ready.hold(OP, rows, input.n)?;
        }
        let unused = self.unused();
        let [values, sums, factors] = next.map_or([unused; 3], |(_, ready)| ready.buffers());
        let (sums_stride, terms, plane) =
            next.map_or((0, 0, 0), |(_, ready)| (ready.sums_stride(), ready.terms as i32, ready.plane()));
        Ok(Launch::with_args(
            &self.kernel(device, Which::Combine, OP)?,
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
                Arg::Buffer(next.map_or(unused, |(norm, _)| norm)),
                Arg::Buffer(values),
                Arg::Buffer(sums),
                Arg::F32(input.scalar),
                Arg::Buffer(factors),
                Arg::I32(int(OP, "experts a row", routing.top)?),
                Arg::I32(int(OP, "columns", input.n)?),
                Arg::I32(int(OP, "stride", input.out_stride)?),
                Arg::I32(int(OP, "stride", input.stride)?),
                Arg::I32(int(OP, "columns", padded)?),
                Arg::I32(int(OP, "rows", sums_stride)?),
                Arg::I32(terms),
                Arg::U64(plane),
                Arg::I32(i32::from(next.is_some())),
                Arg::F32(input.epsilon),
                Arg::Local(padded * 4),
                Arg::Local(padded * 4),
            ],
            &[rows * TEAM_ITEMS],
            Some(&[TEAM_ITEMS]),
        )?)
    }
}
