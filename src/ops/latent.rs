//! Heads over one latent (multi-head latent attention): products with a matrix for each head, and the way of a row's latent
//! into the cache.
//!
//! A key is a latent and some values that turn; the latent is the value, too. The matrices that would make keys and values
//! of each head out of the latent are applied to its queries and to its results instead.

use super::attention::Pairing;
use super::cache::Cache;
use super::check::{check, holds_floats, int};
use super::kernels::{Kernels, OpsError};
use super::matmul::Matrix;
use super::{ROW_BLOCK, ROW_MULTIPLE, TILE, round_up};
use crate::device::{Arg, Buffer, Device, Launch};

/// Index of the argument of [`Kernels::rotate_and_cache_latent`] that holds the position of the first row.
pub const LATENT_START: usize = 11;

/// What [`Kernels::rotate_and_cache_latent`] does to rows of queries and to their latent.
#[derive(Debug, Clone, Copy)]
pub struct LatentRotation<'a> {
    /// f32 rows: query heads of the cache's key size from 0 on, whose latent part is there; the key at `k_at`.
    pub rows: &'a Buffer,
    /// Values from row to row.
    pub stride: usize,
    /// Query heads.
    pub q_heads: usize,
    /// First value of the key in a row.
    pub k_at: usize,
    /// f32 rows with what turns of the query heads.
    pub turning: &'a Buffer,
    /// Values from row to row of `turning`.
    pub turning_stride: usize,
    /// Values from head to head.
    pub turning_step: usize,
    /// The first head's first value.
    pub turning_at: usize,
    /// f32 `[position][half of what turns][cos, sin]`.
    pub angles: &'a Buffer,
    /// Which values are a pair.
    pub pairing: Pairing,
    /// Weight of the latent's RMS norm.
    pub norm: &'a Buffer,
    /// Added to the mean of squares in the norm.
    pub epsilon: f32,
}

/// A matrix for each head, one below the other in one buffer: `matrix.rows / heads` rows each, `outputs` rounded up to
/// [`ROW_MULTIPLE`]; padding is zero.
#[derive(Debug, Clone)]
pub struct HeadMatrices {
    /// The matrices of all heads.
    pub matrix: Matrix,
    /// How many there are.
    pub heads: usize,
    /// Results of a head, a multiple of 16.
    pub outputs: usize,
}

/// Where heads lie in rows.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    /// f32 rows.
    pub rows: &'a Buffer,
    /// Values from row to row.
    pub stride: usize,
    /// The first head's first value.
    pub at: usize,
    /// Values from head to head.
    pub step: usize,
}

impl HeadRows<'_> {
    fn check(
        &self,
        op: &'static str,
        name: &str,
        heads: usize,
        size: usize,
        rows: usize,
    ) -> Result<(), OpsError> {
        let end = self.at + (heads - 1) * self.step + size;
        check(op, size.is_multiple_of(TILE) && size <= self.step && end <= self.stride, || {
            format!(
                "{heads} heads of {size} values, {} apart from {} on, in rows of {}",
                self.step, self.at, self.stride
            )
        })?;
        holds_floats(op, name, self.rows, (rows - 1) * self.stride + end)
    }
}

impl Kernels {
    /// Packs the heads of `rows` rows for [`head_products`](Self::head_products): `packed` and `sums` are as for
    /// [`pack_rows`](Self::pack_rows), for `rows * heads` rows of a head's inputs.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn pack_heads(
        &self,
        device: &Device,
        matrices: &HeadMatrices,
        input: &HeadRows<'_>,
        rows: usize,
        packed: &Buffer,
        sums: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "pack_heads";
        let (heads, n) = (matrices.check(OP, rows)?, matrices.matrix.columns);
        input.check(OP, "the heads", heads, n, rows)?;
        self.holds_packed(OP, n, heads * rows, packed, sums)?;
        let groups = matrices.matrix.groups();
        Ok(Launch::with_args(
            &self.latent_kernel(device, matrices.matrix.format, OP)?,
            &[
                Arg::Buffer(input.rows),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::I32(int(OP, "the heads' start", input.at)?),
                Arg::I32(int(OP, "a head", input.step)?),
                Arg::I32(int(OP, "columns", n)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "stride", input.stride)?),
            ],
            &[heads, rows],
            Some(&[1, 1]),
        )?)
    }

    /// The product of each head of `rows` packed rows with its matrix.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn head_products(
        &self,
        device: &Device,
        matrices: &HeadMatrices,
        packed: &Buffer,
        sums: &Buffer,
        rows: usize,
        output: &HeadRows<'_>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "head_products";
        let heads = matrices.check(OP, rows)?;
        output.check(OP, "the output", heads, matrices.outputs, rows)?;
        self.holds_packed(OP, matrices.matrix.columns, heads * rows, packed, sums)?;
        let groups = matrices.matrix.groups();
        Ok(Launch::with_args(
            &self.latent_kernel(device, matrices.matrix.format, OP)?,
            &[
                Arg::Buffer(&matrices.matrix.buffer),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::Buffer(output.rows),
                Arg::I32(int(OP, "the outputs' start", output.at)?),
                Arg::I32(int(OP, "a head", output.step)?),
                Arg::I32(int(OP, "tiles", matrices.outputs / TILE)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(int(OP, "stride", output.stride)?),
            ],
            &[matrices.outputs.div_ceil(ROW_MULTIPLE), heads, rows.div_ceil(ROW_BLOCK)],
            Some(&[1, 1, 1]),
        )?)
    }

    /// Rotates what turns of `rows` rows' queries into them, norms their latents, rotates the rest of their keys and stores
    /// them; set argument [`LATENT_START`] to the position of the first row before each run.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn rotate_and_cache_latent(
        &self,
        device: &Device,
        rotation: &LatentRotation<'_>,
        cache: &Cache,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "rotate_and_cache_latent";
        cache.check(OP)?;
        check(OP, cache.values_in_keys(), || "the cache keeps values apart from keys".to_owned())?;
        let (size, latent) = (cache.head_size, cache.value_size);
        let turns = size - latent;
        let queries = HeadRows { rows: rotation.rows, stride: rotation.stride, at: 0, step: size };
        queries.check(OP, "the queries", rotation.q_heads, size, rows)?;
        let key = HeadRows { at: rotation.k_at, ..queries };
        key.check(OP, "the keys", 1, size, rows)?;
        let turning = HeadRows {
            rows: rotation.turning,
            stride: rotation.turning_stride,
            at: rotation.turning_at,
            step: rotation.turning_step,
        };
        turning.check(OP, "what turns of the queries", rotation.q_heads, turns, rows)?;
        holds_floats(OP, "the norm", rotation.norm, latent)?;
        let gap = match rotation.pairing {
            Pairing::Neighbours => 1,
            Pairing::RotatedHalves | Pairing::HeadHalves => turns / 2,
        };
        Ok(Launch::with_args(
            &self.attention_kernel(device, cache, OP)?,
            &[
                Arg::Buffer(rotation.rows),
                Arg::Buffer(rotation.turning),
                Arg::Buffer(rotation.angles),
                Arg::Buffer(rotation.norm),
                Arg::Buffer(&cache.keys),
                Arg::I32(int(OP, "stride", rotation.stride)?),
                Arg::I32(int(OP, "stride", rotation.turning_stride)?),
                Arg::I32(int(OP, "a head", rotation.turning_step)?),
                Arg::I32(int(OP, "what turns", rotation.turning_at)?),
                Arg::I32(int(OP, "query heads", rotation.q_heads)?),
                Arg::I32(int(OP, "the key's start", rotation.k_at)?),
                Arg::I32(0),
                Arg::I32(int(OP, "capacity", cache.capacity)?),
                Arg::I32(int(OP, "pairs' gap", gap)?),
                Arg::F32(rotation.epsilon),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }
}

impl HeadMatrices {
    /// The number of heads, if the sizes make sense.
    fn check(&self, op: &'static str, rows: usize) -> Result<usize, OpsError> {
        let each = round_up(self.outputs, ROW_MULTIPLE);
        check(op, self.heads > 0 && rows > 0 && self.matrix.rows == self.heads * each, || {
            format!(
                "{} heads of {} outputs ({each} rows) in a matrix of {} rows",
                self.heads, self.outputs, self.matrix.rows
            )
        })?;
        check(op, self.matrix.buffer.size() >= self.matrix.bytes(), || {
            format!(
                "{} bytes of matrices, their shape needs {}",
                self.matrix.buffer.size(),
                self.matrix.bytes()
            )
        })?;
        Ok(self.heads)
    }
}
