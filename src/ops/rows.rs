//! Whole rows of activations.

use super::check::{check, holds_floats, int};
use super::kernels::{Kernels, OpsError};
use super::{STRIDE_MULTIPLE, round_up};
use crate::device::{Arg, Buffer, Device, Launch};

impl Kernels {
    /// Gives each of `rows` rows of `n` values, `stride` apart and zero past their values, its RMS norm without a
    /// weight, in place.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn norm_rows(
        &self,
        device: &Device,
        values: &Buffer,
        rows: usize,
        n: usize,
        stride: usize,
        epsilon: f32,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "norm_rows";
        let padded = round_up(n, STRIDE_MULTIPLE);
        check(OP, stride >= padded && rows > 0, || {
            format!("{rows} rows of {n} values with a stride of {stride}")
        })?;
        holds_floats(OP, "the rows", values, (rows - 1) * stride + padded)?;
        Ok(Launch::with_args(
            &self.rows_kernel(device, OP)?,
            &[
                Arg::Buffer(values),
                Arg::I32(int(OP, "columns", n)?),
                Arg::I32(int(OP, "columns", padded)?),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::F32(epsilon),
                Arg::Local(padded * 4),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }
}
