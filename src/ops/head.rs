//! The two ends of a diffusion model that share one table: rows of embeddings, and the head that reads a canvas's
//! distributions in one pass over the table, without ever holding a row of logits.

use bytemuck::{Pod, Zeroable};

use super::check::{check, holds_floats, int};
use super::kernels::{Family, Kernels, OpsError};
use super::matmul::{Finish, Matrix, Output};
use super::{Format, ROW_BLOCK, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};
use crate::device::{Arg, Buffer, Device, Launch, Purpose};

/// Parts that a vocabulary is cut into, whatever its size and the device: they are `HEAD_SLICES` in `cl/head.cl`, where
/// results depend on them. Times the row blocks of a canvas, enough for 32 cores.
pub(super) const SLICES: usize = 8;
/// Rows that one work-item of `mean_rows` takes; `MEAN_ROWS` in `cl/head.cl`.
const MEAN_ROWS: usize = 4;
/// Bytes of a `Part` in `cl/head.cl`.
const PART_BYTES: usize = 32;

/// Ids that [`HeadRun::barred`] may hold.
pub const MOST_BARRED: usize = 64;

/// Argument of the first launch of [`Kernels::streaming_head`]: f32, the temperature that logits are divided by.
pub const HEAD_TEMPERATURE: usize = 0;
/// Argument of the first launch: u32, low word of the seed.
pub const HEAD_SEED_LO: usize = 1;
/// Argument of the first launch: u32, high word of the seed.
pub const HEAD_SEED_HI: usize = 2;
/// Argument of the first launch: u32, number of the canvas.
pub const HEAD_CANVAS: usize = 3;
/// Argument of the first launch: u32, number of the step.
pub const HEAD_STEP: usize = 4;
/// Argument of the first launch: i32, not zero if the sampled token is to be the argmax.
pub const HEAD_GREEDY: usize = 5;
/// Argument of the first launch: i32, how many ids of [`HeadState::barred`] may not be chosen at row 0.
pub const HEAD_BARRED: usize = 6;
/// Argument of the first launch: i32, whether soft embeddings are made.
const HEAD_SOFT: usize = 7;
/// Arguments of the second launch that mean the same.
const MERGE_GREEDY: usize = 0;
const MERGE_SOFT: usize = 1;

/// What the head found out about one row.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct HeadRow {
    /// The likeliest token that may be chosen; of equals the one with the lower id.
    pub argmax: i32,
    /// A token drawn from the distribution, or the argmax.
    pub sampled: i32,
    /// Entropy of the distribution in nats.
    pub entropy: f32,
    /// The largest processed logit.
    pub peak: f32,
    /// 0, or 1 + the first token whose logit is NaN or infinite: then nothing else here means anything.
    pub bad: i32,
}

/// What does not change from run to run.
#[derive(Debug, Clone, Copy)]
pub struct HeadOptions {
    /// Logits become `softcap * tanh(logit / softcap)`; 0 leaves them.
    pub softcap: f32,
    /// Tokens; later rows of the table take no part.
    pub vocabulary: usize,
    /// Factor of the soft embedding.
    pub scale: f32,
}

/// What a step of denoising asks of the head.
#[derive(Debug, Clone, Copy)]
pub struct HeadRun<'a> {
    /// Logits are divided by it; above zero.
    pub temperature: f32,
    /// Key of the noise.
    pub seed: u64,
    /// Number of the canvas, part of the noise's counter.
    pub canvas: u32,
    /// Number of the step, part of the noise's counter.
    pub step: u32,
    /// The sampled token is the argmax; no noise.
    pub greedy: bool,
    /// Ids that may be neither argmax nor sampled at row 0, at most [`MOST_BARRED`]; they stay in the distribution.
    pub barred: &'a [u32],
    /// Whether soft embeddings are wanted. A [`HeadState`] without room for them makes none.
    pub soft: bool,
}

impl HeadRun<'_> {
    /// Sets the arguments of `launches`, as [`Kernels::streaming_head`] made them with `state`, for all runs enqueued
    /// from now on.
    ///
    /// # Errors
    /// Other launches, a temperature that is not above zero, too many barred ids, or what the device says.
    pub fn set(&self, device: &Device, launches: &mut [Launch], state: &HeadState) -> Result<(), OpsError> {
        const OP: &str = "streaming_head";
        let [stream, merge] = launches else {
            return Err(OpsError::Shape { op: OP, what: format!("{} launches, not 2", launches.len()) });
        };
        check(OP, self.temperature > 0.0 && self.temperature.is_finite(), || {
            format!("a temperature of {}", self.temperature)
        })?;
        check(OP, self.barred.len() <= MOST_BARRED, || {
            format!("{} barred ids, more than {MOST_BARRED}", self.barred.len())
        })?;
        if !self.barred.is_empty() {
            device.write(&state.barred, 0, bytemuck::cast_slice(self.barred))?;
        }
        let soft = i32::from(self.soft && state.has_soft);
        stream.set(HEAD_TEMPERATURE, Arg::F32(self.temperature))?;
        stream.set(HEAD_SEED_LO, Arg::U32(self.seed as u32))?;
        stream.set(HEAD_SEED_HI, Arg::U32((self.seed >> 32) as u32))?;
        stream.set(HEAD_CANVAS, Arg::U32(self.canvas))?;
        stream.set(HEAD_STEP, Arg::U32(self.step))?;
        stream.set(HEAD_GREEDY, Arg::I32(i32::from(self.greedy)))?;
        stream.set(HEAD_BARRED, Arg::I32(self.barred.len() as i32))?;
        stream.set(HEAD_SOFT, Arg::I32(soft))?;
        merge.set(MERGE_GREEDY, Arg::I32(i32::from(self.greedy)))?;
        merge.set(MERGE_SOFT, Arg::I32(soft))?;
        Ok(())
    }
}

/// Partial sums of a head and its results, for up to `rows` rows.
#[derive(Debug)]
pub struct HeadState {
    /// [`HeadRow`] of each row.
    pub results: Buffer,
    /// Soft embeddings, f32 `[rows][stride]`, zero past `hidden`: factor times the mean of the table's rows under the
    /// row's distribution. One vector's room where there are none.
    pub soft: Buffer,
    /// Values from row to row of [`soft`](Self::soft): `hidden` rounded up to [`STRIDE_MULTIPLE`].
    pub stride: usize,
    /// Ids, `i32`, that may not be chosen at row 0; [`HeadRun::set`] fills it.
    pub barred: Buffer,
    parts: Buffer,
    softs: Buffer,
    rows: usize,
    hidden: usize,
    has_soft: bool,
}

impl HeadState {
    /// Room for `rows` rows of `hidden` values; without `soft` no soft embeddings can be made.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &Device, rows: usize, hidden: usize, soft: bool) -> Result<Self, OpsError> {
        let bytes = if soft { Self::partial_bytes(rows, hidden).max(64) } else { 64 };
        Self::make(device, rows, hidden, soft, device.alloc(Purpose::Scratch, bytes)?)
    }

    /// As [`new`](Self::new), with soft embeddings whose partial sums lie in `partial`, of
    /// [`partial_bytes`](Self::partial_bytes): what it holds before a run is all one, and so is what becomes of it after.
    ///
    /// # Errors
    /// Too small a buffer, or no memory for the rest.
    pub fn with_partial(
        device: &Device,
        rows: usize,
        hidden: usize,
        partial: Buffer,
    ) -> Result<Self, OpsError> {
        holds_floats("streaming_head", "the partial sums", &partial, Self::partial_bytes(rows, hidden) / 4)?;
        Self::make(device, rows, hidden, true, partial)
    }

    fn make(
        device: &Device,
        rows: usize,
        hidden: usize,
        soft: bool,
        softs: Buffer,
    ) -> Result<Self, OpsError> {
        check("streaming_head", rows > 0 && hidden > 0, || format!("{rows} rows of {hidden} values"))?;
        let stride = round_up(hidden, STRIDE_MULTIPLE);
        let alloc = |bytes: usize| device.alloc(Purpose::Scratch, bytes);
        Ok(Self {
            results: alloc(rows * size_of::<HeadRow>())?,
            soft: alloc(if soft { rows * stride * 4 } else { 64 })?,
            stride,
            barred: alloc(MOST_BARRED * 4)?,
            parts: alloc(SLICES * rows * PART_BYTES)?,
            softs,
            rows,
            hidden,
            has_soft: soft,
        })
    }

    /// Bytes that [`new`](Self::new) takes: 26 MB for 256 rows of 2816 values, whatever the vocabulary. Of these
    /// [`with_partial`](Self::with_partial) takes all but [`partial_bytes`](Self::partial_bytes).
    pub fn bytes(rows: usize, hidden: usize, soft: bool) -> usize {
        let soft = if soft {
            rows * round_up(hidden, STRIDE_MULTIPLE) * 4 + Self::partial_bytes(rows, hidden)
        } else {
            128
        };
        rows * (size_of::<HeadRow>() + SLICES * PART_BYTES) + MOST_BARRED * 4 + soft
    }

    /// Bytes of the partial sums of soft embeddings, which are needed while the head runs and at no other time.
    pub fn partial_bytes(rows: usize, hidden: usize) -> usize {
        SLICES * round_up(rows, TILE) * round_up(hidden, STRIDE_MULTIPLE) * 4
    }

    /// What the last run found out about the first `rows` rows; waits for it.
    ///
    /// # Errors
    /// More rows than there is room for, or what the device says.
    pub fn read(&self, device: &Device, rows: usize) -> Result<Vec<HeadRow>, OpsError> {
        check("streaming_head", rows <= self.rows, || format!("{rows} rows of {}", self.rows))?;
        let mut results = vec![HeadRow::zeroed(); rows];
        device.read(&self.results, 0, bytemuck::cast_slice_mut(&mut results))?;
        Ok(results)
    }
}

impl Kernels {
    /// Rows `ids[i]` (i32) of the table times `scale` into `out`: f32 rows, `stride` values apart, zero past the table's
    /// columns. Ids are checked by the caller: one that is out of range reads another row of the table.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn embed(
        &self,
        device: &Device,
        table: &Matrix,
        ids: &Buffer,
        rows: usize,
        scale: f32,
        out: &Buffer,
        stride: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "embed";
        check_table(OP, table, table.rows)?;
        check(OP, rows > 0 && stride >= table.groups() * 32, || {
            format!("{rows} rows of {} values with a stride of {stride}", table.columns)
        })?;
        holds_floats(OP, "the ids", ids, rows)?;
        holds_floats(OP, "the output", out, rows * stride)?;
        Ok(Launch::with_args(
            &self.head_kernel(device, table.format, OP)?,
            &[
                Arg::Buffer(&table.buffer),
                Arg::Buffer(ids),
                Arg::Buffer(out),
                Arg::I32(int(OP, "rows of the table", table.rows)?),
                Arg::I32(int(OP, "groups", table.groups())?),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::F32(scale),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

    /// The head over `rows` packed rows: two launches, to be enqueued in their order, that leave
    /// [`HeadState::results`] and [`HeadState::soft`]. [`HeadRun::set`] gives them what changes from run to run and must
    /// be called before the first one. Row i of the pass is row i of the noise's counter.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn streaming_head(
        &self,
        device: &Device,
        table: &Matrix,
        packed: &Buffer,
        sums: &Buffer,
        rows: usize,
        options: &HeadOptions,
        state: &HeadState,
    ) -> Result<Vec<Launch>, OpsError> {
        const OP: &str = "streaming_head";
        check_table(OP, table, options.vocabulary)?;
        check(OP, rows > 0 && rows <= state.rows && table.columns == state.hidden, || {
            format!(
                "{rows} rows of {} values with room for {} of {}",
                table.columns, state.rows, state.hidden
            )
        })?;
        check(OP, options.softcap >= 0.0 && options.softcap.is_finite(), || {
            format!("a soft cap of {}", options.softcap)
        })?;
        let groups = table.groups();
        let packed_groups = self.holds_packed(OP, table.columns, rows, packed, sums)?;
        let stream = Launch::with_args(
            &self.head_kernel(device, table.format, "stream_head")?,
            &[
                Arg::F32(1.0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::U32(0),
                Arg::I32(1),
                Arg::I32(0),
                Arg::I32(i32::from(state.has_soft)),
                Arg::Buffer(&table.buffer),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::Buffer(&state.barred),
                Arg::Buffer(&state.parts),
                Arg::Buffer(&state.softs),
                Arg::F32(options.softcap),
                Arg::I32(int(OP, "the vocabulary", options.vocabulary)?),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "groups", packed_groups)?),
                Arg::I32(int(OP, "rows", rows)?),
            ],
            &[rows.div_ceil(ROW_BLOCK), SLICES],
            Some(&[1, 1]),
        )?
        .doing(table.work(if state.has_soft { 2 * rows } else { rows }));
        let merge = Launch::with_args(
            &self.head_kernel(device, table.format, "merge_head")?,
            &[
                Arg::I32(1),
                Arg::I32(i32::from(state.has_soft)),
                Arg::Buffer(&state.parts),
                Arg::Buffer(&state.softs),
                Arg::Buffer(&state.results),
                Arg::Buffer(&state.soft),
                Arg::I32(int(OP, "groups", groups)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(int(OP, "stride", state.stride)?),
                Arg::F32(options.scale),
            ],
            &[rows],
            Some(&[1]),
        )?;
        Ok(vec![stream, merge])
    }

    /// Soft-capped logits of `rows` packed rows, not divided by a temperature: f32 `[rows][stride]`, the very numbers
    /// that [`streaming_head`](Self::streaming_head) goes by. Columns from the table's last row on mean nothing.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn plain_logits(
        &self,
        device: &Device,
        table: &Matrix,
        packed: &Buffer,
        sums: &Buffer,
        rows: usize,
        softcap: f32,
        logits: &Buffer,
        stride: usize,
    ) -> Result<Vec<Launch>, OpsError> {
        const OP: &str = "plain_logits";
        let output = Output { rows: logits, at: 0, stride };
        check(OP, rows > 0 && stride >= table.pairs() * ROW_MULTIPLE, || {
            format!("{rows} rows of {} logits with a stride of {stride}", table.rows)
        })?;
        let mut launches = vec![self.matmul(device, table, packed, sums, rows, Finish::Store, &output)?];
        if softcap > 0.0 {
            launches.push(Launch::with_args(
                &self.head_kernel(device, table.format, "cap_logits")?,
                &[Arg::Buffer(logits), Arg::I32(int(OP, "stride", stride)?), Arg::F32(softcap)],
                &[table.rows.div_ceil(TILE), rows],
                Some(&[1, 1]),
            )?);
        }
        Ok(launches)
    }

    /// Soft embeddings of given processed logits, f32 `[rows][from_stride]`, which become probabilities in place:
    /// `out`, f32 `[rows][stride]`, is `options.scale` times the mean of the table's rows, zero past its columns.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn soft_embedding(
        &self,
        device: &Device,
        table: &Matrix,
        logits: &Buffer,
        from_stride: usize,
        rows: usize,
        options: &HeadOptions,
        out: &Buffer,
        stride: usize,
    ) -> Result<Vec<Launch>, OpsError> {
        const OP: &str = "soft_embedding";
        check_table(OP, table, options.vocabulary)?;
        check(OP, rows > 0 && from_stride >= round_up(options.vocabulary, TILE), || {
            format!("{rows} rows of {} logits with a stride of {from_stride}", options.vocabulary)
        })?;
        check(OP, stride >= table.groups() * 32 && stride.is_multiple_of(32), || {
            format!("soft embeddings of {} values with a stride of {stride}", table.columns)
        })?;
        holds_floats(OP, "the logits", logits, rows * from_stride)?;
        holds_floats(OP, "the output", out, rows * stride)?;
        let vocabulary = Arg::I32(int(OP, "the vocabulary", options.vocabulary)?);
        let from = Arg::I32(int(OP, "stride", from_stride)?);
        let softmax = Launch::with_args(
            &self.head_kernel(device, table.format, "softmax_rows")?,
            &[Arg::Buffer(logits), vocabulary, from],
            &[rows],
            Some(&[1]),
        )?;
        let mean = Launch::with_args(
            &self.head_kernel(device, table.format, "mean_rows")?,
            &[
                Arg::Buffer(&table.buffer),
                Arg::Buffer(logits),
                Arg::Buffer(out),
                vocabulary,
                Arg::I32(int(OP, "groups", table.groups())?),
                Arg::I32(int(OP, "rows", rows)?),
                from,
                Arg::I32(int(OP, "stride", stride)?),
                Arg::F32(options.scale),
            ],
            &[stride / 32, rows.div_ceil(MEAN_ROWS)],
            Some(&[1, 1]),
        )?
        .doing(table.work(rows));
        Ok(vec![softmax, mean])
    }
}

fn check_table(op: &'static str, table: &Matrix, vocabulary: usize) -> Result<(), OpsError> {
    check(op, table.family == Family::Vector, || "the table is for the xmx family".to_owned())?;
    check(op, table.buffer.size() >= table.bytes(), || {
        format!("the table has {} bytes, its shape needs {}", table.buffer.size(), table.bytes())
    })?;
    // The padding of a block that has a scale is not zero there, as rows of a table must be.
    let whole = table.format != Format::W4 || table.columns.is_multiple_of(table.format.block_codes());
    check(op, whole, || format!("a W4 table of {} columns, not whole blocks", table.columns))?;
    check(op, vocabulary > 0 && vocabulary <= table.rows, || {
        format!("a vocabulary of {vocabulary} and a table of {} rows", table.rows)
    })
}

/// CPU reference of the noise that a token gets at a row of a canvas in a step.
pub fn head_noise(seed: u64, canvas: u32, step: u32, row: u32, token: u32) -> f64 {
    let mut key = [seed as u32, (seed >> 32) as u32];
    let mut c = [token / 4, row, step, canvas];
    for _ in 0..10 {
        let a = 0xD251_1F53 * u64::from(c[0]);
        let b = 0xCD9E_8D57 * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    // The uniform number in f32, as the device has it; it is part of the noise's definition.
    let uniform = ((c[token as usize % 4] as f32 + 0.5) / 4_294_967_296.0).min(1.0 - f32::EPSILON / 2.0);
    -(-(-f64::from(uniform)).ln_1p()).ln()
}

/// CPU reference of a row: what is wanted of the distribution of its processed logits.
#[derive(Debug, Clone)]
pub struct HeadReference {
    /// Probability of each token.
    pub probabilities: Vec<f64>,
    /// Entropy in nats.
    pub entropy: f64,
    /// Largest processed logit.
    pub peak: f64,
    /// The mean of the table's rows, without a factor.
    pub soft: Vec<f64>,
}

/// CPU reference of the head for one row of processed logits (capped, divided by the temperature); `weight(token, i)` is
/// the table's value.
pub fn head_reference(
    processed: &[f64],
    hidden: usize,
    weight: impl Fn(usize, usize) -> f64,
) -> HeadReference {
    let peak = processed.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = processed.iter().map(|l| (l - peak).exp()).sum();
    let probabilities: Vec<f64> = processed.iter().map(|l| (l - peak).exp() / total).collect();
    let entropy = probabilities.iter().zip(processed).map(|(p, l)| p * (total.ln() - (l - peak))).sum();
    let mut soft = vec![0.0; hidden];
    for (token, p) in probabilities.iter().enumerate().filter(|(_, p)| **p > 0.0) {
        for (i, sum) in soft.iter_mut().enumerate() {
            *sum += p * weight(token, i);
        }
    }
    HeadReference { probabilities, entropy, peak, soft }
}

/// CPU reference of [`Kernels::embed`]: row `id` of a table's tiles times `scale`.
pub fn embed_reference(format: Format, tiles: &[u8], columns: usize, id: usize, scale: f32) -> Vec<f32> {
    let size = format.tile_bytes(columns);
    let tile = &tiles[id / TILE * size..][..size];
    (0..columns).map(|column| format.weight(tile, id % TILE, column) * scale).collect()
}
