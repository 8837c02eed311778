//! What is done to whole rows between products, where no product can do it on the way: the soft cap of logits, the join of
//! a branch with a factor, gates whose other side is no product, and the inputs that a model has for each layer.

use super::check::{check, holds_floats, int};
use super::kernels::{Kernels, OpsError};
use super::matmul::{Activation, Finish, activate, prepare_reference};
use super::{STRIDE_MULTIPLE, TILE, round_up};
use crate::device::{Arg, Buffer, Device, Launch};

/// What [`Kernels::join_rows`] joins. Rows are `stride` values apart and zero past their `n` values up to
/// [`STRIDE_MULTIPLE`].
#[derive(Debug, Clone, Copy)]
pub struct Join<'a> {
    /// The residual stream.
    pub rows: &'a Buffer,
    /// What is normed and added to it.
    pub branch: &'a Buffer,
    /// Weight of the norm.
    pub weight: &'a Buffer,
    /// Factor of the sum.
    pub scalar: f32,
    /// Values in a row.
    pub n: usize,
    /// Values from row to row.
    pub stride: usize,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// What [`Kernels::mix_parts`] makes of the parts of a row.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// f32 rows of parts, one after the other; they become the result.
    pub parts: &'a Buffer,
    /// Rows that lie the same way.
    pub embedded: &'a Buffer,
    /// Weight of the norm of each part.
    pub weight: &'a Buffer,
    /// Factor of a part before its norm.
    pub scale: f32,
    /// Factor of the result.
    pub share: f32,
    /// Parts of a row.
    pub count: usize,
    /// Values of a part, a multiple of 16.
    pub size: usize,
    /// Values from row to row.
    pub stride: usize,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

impl Kernels {
    /// Logits, f32 `[rows][stride]`, of which the first `n` padded to 16 become `cap * tanh(logit / cap)`; those that are
    /// not finite become NaN.
    ///
    /// # Errors
    /// Sizes that do not fit, a cap that is none, or what the device says.
    pub fn cap_rows(
        &self,
        device: &Device,
        logits: &Buffer,
        rows: usize,
        n: usize,
        stride: usize,
        cap: f32,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "cap_rows";
        let lanes = round_up(n, TILE);
        check(OP, cap > 0.0 && cap.is_finite(), || format!("a soft cap of {cap}"))?;
        check(OP, rows > 0 && n > 0 && stride >= lanes, || {
            format!("{rows} rows of {n} values with a stride of {stride}")
        })?;
        holds_floats(OP, "the logits", logits, (rows - 1) * stride + lanes)?;
        Ok(Launch::with_args(
            &self.stream_kernel(device, OP)?,
            &[Arg::Buffer(logits), Arg::I32(int(OP, "stride", stride)?), Arg::F32(cap)],
            &[lanes / TILE, rows],
            Some(&[1, 1]),
        )?)
    }

    /// `(row + norm(branch) * weight) * scalar` of `rows` rows; `result` are rows like the others, and may be the stream.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn join_rows(
        &self,
        device: &Device,
        join: &Join<'_>,
        rows: usize,
        result: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "join_rows";
        let padded = round_up(join.n, STRIDE_MULTIPLE);
        check(OP, rows > 0 && join.n > 0 && join.stride >= padded, || {
            format!("{rows} rows of {} values with a stride of {}", join.n, join.stride)
        })?;
        let reach = (rows - 1) * join.stride + padded;
        for (name, buffer) in [("the rows", join.rows), ("the branch", join.branch), ("the result", result)] {
            holds_floats(OP, name, buffer, reach)?;
        }
        holds_floats(OP, "the norm", join.weight, padded)?;
        Ok(Launch::with_args(
            &self.stream_kernel(device, OP)?,
            &[
                Arg::Buffer(join.rows),
                Arg::Buffer(join.branch),
                Arg::Buffer(join.weight),
                Arg::Buffer(result),
                Arg::F32(join.scalar),
                Arg::I32(int(OP, "columns", join.n)?),
                Arg::I32(int(OP, "columns", padded)?),
                Arg::I32(int(OP, "stride", join.stride)?),
                Arg::F32(join.epsilon),
                Arg::Local(padded * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

    /// `activation(gate) * other` of `rows` rows of `n` values, in place of `gate`, f32 `[rows][stride]`. `other` is
    /// f32 rows and their stride, taken from value `at` of each row on; of both, `n` padded to 16 are read.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn gate_rows(
        &self,
        device: &Device,
        activation: Activation,
        gate: &Buffer,
        stride: usize,
        other: (&Buffer, usize),
        at: usize,
        rows: usize,
        n: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "gate_rows";
        let lanes = round_up(n, TILE);
        let (other, other_stride) = other;
        check(OP, rows > 0 && n > 0 && stride >= lanes && other_stride >= at + lanes, || {
            format!("{rows} rows of {n} values with strides of {stride} and {other_stride}, from {at} on")
        })?;
        holds_floats(OP, "the gates", gate, (rows - 1) * stride + lanes)?;
        holds_floats(OP, "the other side", other, (rows - 1) * other_stride + at + lanes)?;
        Ok(Launch::with_args(
            &self.stream_kernel(device, OP)?,
            &[
                Arg::Buffer(gate),
                Arg::Buffer(other),
                Arg::I32(Finish::Gated(activation).number()),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::I32(int(OP, "the start", at)?),
                Arg::I32(int(OP, "stride", other_stride)?),
            ],
            &[lanes / TILE, rows],
            Some(&[1, 1]),
        )?)
    }

    /// `(norm(part * scale) * weight + embedded) * share` of each part of `rows` rows, in place.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn mix_parts(&self, device: &Device, parts: &Parts<'_>, rows: usize) -> Result<Launch, OpsError> {
        const OP: &str = "mix_parts";
        let Parts { count, size, stride, .. } = *parts;
        let width = count * size;
        check(OP, rows > 0 && width > 0 && size.is_multiple_of(TILE) && stride >= width, || {
            format!("{rows} rows of {count} parts of {size} values with a stride of {stride}")
        })?;
        let reach = (rows - 1) * stride + width;
        holds_floats(OP, "the parts", parts.parts, reach)?;
        holds_floats(OP, "the embedded parts", parts.embedded, reach)?;
        holds_floats(OP, "the norm", parts.weight, size)?;
        Ok(Launch::with_args(
            &self.stream_kernel(device, OP)?,
            &[
                Arg::Buffer(parts.parts),
                Arg::Buffer(parts.embedded),
                Arg::Buffer(parts.weight),
                Arg::F32(parts.scale),
                Arg::F32(parts.share),
                Arg::I32(int(OP, "values of a part", size)?),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::F32(parts.epsilon),
                Arg::Local(size * 4),
            ],
            &[count, rows],
            Some(&[1, 1]),
        )?)
    }
}

/// CPU reference of [`Kernels::cap_rows`] for one logit.
pub fn cap_reference(logit: f64, cap: f64) -> f64 {
    if logit.is_finite() { cap * (logit / cap).tanh() } else { f64::NAN }
}

/// CPU reference of [`Kernels::join_rows`] for one row.
pub fn join_reference(row: &[f64], branch: &[f64], weight: &[f64], scalar: f64, epsilon: f64) -> Vec<f64> {
    let (sum, _) = prepare_reference(row, Some((branch, weight)), None, epsilon);
    sum.iter().map(|value| value * scalar).collect()
}

/// CPU reference of [`Kernels::gate_rows`] for one value.
pub fn gate_reference(activation: Activation, gate: f64, other: f64) -> f64 {
    activate(activation, gate) * other
}

/// CPU reference of [`Kernels::mix_parts`] for one part.
pub fn mix_reference(
    part: &[f64],
    embedded: &[f64],
    weight: &[f64],
    scale: f64,
    share: f64,
    epsilon: f64,
) -> Vec<f64> {
    let scaled: Vec<f64> = part.iter().map(|value| value * scale).collect();
    let (_, normed) = prepare_reference(&scaled, None, Some(weight), epsilon);
    normed.iter().zip(embedded).map(|(value, embedded)| (value + embedded) * share).collect()
}
