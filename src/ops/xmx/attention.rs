//! Attention over a cache of keys and values in f16.

use super::cost::XmxWork;
use super::kernels::Xmx;
use super::matmul::LANES;
use super::programs::Which;
use crate::device::{Arg, Buffer, Device, Launch, Purpose};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::{OpsError, round_up};

/// Head sizes that there are programs for.
pub(super) const HEAD_SIZES: [usize; 4] = [64, 128, 256, 512];
/// Looks of a work-group; see `cl/xmx/attention.cl`.
const LOOKS: usize = 64;

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub struct XmxCache {
    /// f16 `[heads][capacity][head size]`.
    keys: Buffer,
    /// f16 `[heads][head size][capacity]`.
    values: Buffer,
    heads: usize,
    head_size: usize,
    capacity: usize,
}

impl XmxCache {
    /// Room for `positions` positions of `heads` key-value heads. It holds zeros: positions that nothing was stored at are
    /// multiplied by zero, so they must be numbers.
    ///
    /// # Errors
    /// A head size without kernels, or no memory.
    pub fn new(device: &Device, heads: usize, head_size: usize, positions: usize) -> Result<Self, OpsError> {
        const OP: &str = "xmx cache";
        check(OP, HEAD_SIZES.contains(&head_size), || {
            format!("heads of {head_size}, there are kernels for {HEAD_SIZES:?}")
        })?;
        check(OP, heads > 0 && positions > 0, || format!("{heads} heads of {positions} positions"))?;
        let capacity = round_up(positions, 32);
        let buffer = || -> Result<Buffer, OpsError> {
            let buffer = device.alloc(Purpose::KvCache, heads * capacity * head_size * 2)?;
            device.fill(&buffer, 0)?;
            Ok(buffer)
        };
        Ok(Self { keys: buffer()?, values: buffer()?, heads, head_size, capacity })
    }
}

/// The looks of a pass at a cache.
#[derive(Debug, Clone, Copy)]
pub struct XmxAttention {
    /// Query heads, a multiple of the cache's.
    pub heads: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// Position of the first.
    pub position: usize,
    /// Positions that the cache holds, those of the pass among them.
    pub count: usize,
    /// A row sees only positions up to its own.
    pub causal: bool,
    /// A row sees only so many positions up to its own, itself among them; 0 for all.
    pub window: usize,
    /// Factor of the scores.
    pub scale: f32,
}

impl Xmx {
    /// Stores keys and values of `rows` rows, f32 `[rows][stride]` each, at positions from `position` on.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn store_keys(
        &self,
        device: &Device,
        cache: &XmxCache,
        keys: &Buffer,
        values: &Buffer,
        rows: usize,
        position: usize,
        [keys_stride, values_stride]: [usize; 2],
    ) -> Result<Launch, OpsError> {
        const OP: &str = "store_keys";
        let width = cache.heads * cache.head_size;
        check(OP, rows > 0 && position + rows <= cache.capacity, || {
            format!("{rows} rows from position {position} on, the cache has {}", cache.capacity)
        })?;
        check(OP, keys_stride >= width && values_stride >= width, || {
            format!("{width} values a row with strides of {keys_stride} and {values_stride}")
        })?;
        holds_floats(OP, "the keys", keys, (rows - 1) * keys_stride + width)?;
        holds_floats(OP, "the values", values, (rows - 1) * values_stride + width)?;
        Ok(Launch::with_args(
            &self.kernel(device, Which::Attention(cache.head_size), OP)?,
            &[
                Arg::Buffer(keys),
                Arg::Buffer(values),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::I32(int(OP, "the position", position)?),
                Arg::I32(int(OP, "positions", cache.capacity)?),
                Arg::I32(int(OP, "the keys' stride", keys_stride)?),
                Arg::I32(int(OP, "the values' stride", values_stride)?),
            ],
            &[cache.head_size, rows, cache.heads],
            None,
        )?)
    }

    /// Bytes of the packed queries that [`attend`](Self::attend) needs.
    pub fn query_bytes(cache: &XmxCache, heads: usize, rows: usize) -> usize {
        round_up(rows * heads / cache.heads, LOOKS) * cache.heads * cache.head_size * 2
    }

    /// Attention of `queries`, f32 `[rows][queries_stride]`, rotated already: two launches, to be enqueued in their order.
    /// `packed` has [`query_bytes`](Self::query_bytes); `out` is f32 `[rows][stride]`. Queries are rounded to f16 after the
    /// scale, and so are weights, whose largest is 1. A row's bits are the same whatever other rows there are.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    #[allow(clippy::too_many_arguments)] // each is one operand
    pub fn attend(
        &self,
        device: &Device,
        cache: &XmxCache,
        looks: &XmxAttention,
        queries: &Buffer,
        queries_stride: usize,
        packed: &Buffer,
        out: &Buffer,
        stride: usize,
    ) -> Result<[Launch; 2], OpsError> {
        const OP: &str = "attend";
        let XmxAttention { heads, rows, position, count, causal, window, scale } = *looks;
        let width = heads * cache.head_size;
        check(OP, heads > 0 && heads.is_multiple_of(cache.heads), || {
            format!("{heads} query heads share {} key-value heads", cache.heads)
        })?;
        // Each row sees itself at least.
        check(OP, rows > 0 && position + rows <= count && count <= cache.capacity, || {
            format!("{rows} rows from position {position} on, {count} positions of {}", cache.capacity)
        })?;
        check(OP, queries_stride >= width && stride >= width, || {
            format!("{width} values a row with strides of {queries_stride} and {stride}")
        })?;
        holds_floats(OP, "the queries", queries, (rows - 1) * queries_stride + width)?;
        holds_floats(OP, "the output", out, (rows - 1) * stride + width)?;
        holds_floats(OP, "the packed queries", packed, Self::query_bytes(cache, heads, rows) / 4)?;
        let group = heads / cache.heads;
        let padded = round_up(rows * group, LOOKS);
        let which = Which::Attention(cache.head_size);
        let (looks, padded_looks) =
            (Arg::I32(int(OP, "looks", rows * group)?), Arg::I32(int(OP, "looks", padded)?));
        let group = Arg::I32(int(OP, "heads", group)?);
        let pack = Launch::with_args(
            &self.kernel(device, which, "pack_queries")?,
            &[
                Arg::Buffer(queries),
                Arg::Buffer(packed),
                looks,
                padded_looks,
                group,
                Arg::I32(int(OP, "the queries' stride", queries_stride)?),
                Arg::F32(scale),
            ],
            &[padded, cache.head_size / 2, cache.heads],
            None,
        )?;
        let items = cache.head_size / 32 * LANES;
        let attend = Launch::with_args(
            &self.kernel(device, which, OP)?,
            &[
                Arg::Buffer(packed),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::Buffer(out),
                looks,
                padded_looks,
                group,
                Arg::I32(int(OP, "positions", count)?),
                Arg::I32(int(OP, "positions", cache.capacity)?),
                Arg::I32(int(OP, "the position", position)?),
                Arg::I32(int(OP, "the window", window)?),
                Arg::I32(i32::from(causal)),
                Arg::I32(int(OP, "the output's stride", stride)?),
            ],
            &[padded / LOOKS * items, cache.heads],
            Some(&[items, 1]),
        )?;
        Ok([pack, attend])
    }
}

/// What a canvas's attention over `count` positions has to do, without a mask: in the loop over values, which has 32 matrix
/// instructions a turn, and in that over keys, which has 16. What is done between them, once a block of keys, is counted to
/// the first.
pub fn xmx_attention_work(
    head_size: usize,
    heads: usize,
    kv_heads: usize,
    rows: usize,
    count: usize,
) -> [XmxWork; 2] {
    let teams = head_size / 32;
    let groups = (rows * heads / kv_heads).div_ceil(LOOKS) * kv_heads;
    let rounds = groups * count.div_ceil(16 * teams) * teams;
    let (value_turns, key_turns) = (rounds * teams.div_ceil(2), rounds * teams);
    let values = XmxWork {
        bytes: (2 * kv_heads * count * head_size * 2 + rows * heads * head_size * (2 + 4)) as u64,
        operations: 4 * (rows * heads * count * head_size) as u64,
        multiply_adds: (value_turns * 32) as u64,
        turns: value_turns as u64,
        rounds: rounds as u64,
    };
    let keys =
        XmxWork { multiply_adds: (key_turns * 16) as u64, turns: key_turns as u64, ..XmxWork::default() };
    [values, keys]
}
