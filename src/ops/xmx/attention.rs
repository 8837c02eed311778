//! Attention over a cache of keys and values in f16: rows' heads on their way into it, and looks at it.

use half::f16;

use super::cost::XmxWork;
use super::kernels::Xmx;
use super::matmul::LANES;
use super::programs::Which;
use crate::device::{Arg, Buffer, Device, DeviceError, Launch};
use crate::ops::check::{check, holds_floats, int};
use crate::ops::{Attention, Cache, CacheKind, OpsError, Rotation, round_up};

/// Head sizes that there are programs for.
pub(super) const HEAD_SIZES: [usize; 6] = [16, 32, 64, 128, 256, 512];
/// Terms of f16 that a query and a weight are cut into; `QUERY_TERMS` in `cl/xmx/heads.h`.
const TERMS: usize = 2;

/// Whether there are kernels for a cache of that type with heads of that size.
pub(in crate::ops) fn attends(cache: CacheKind, head_size: usize) -> bool {
    cache == CacheKind::F16 && HEAD_SIZES.contains(&head_size)
}

/// Values of a key in the cache; `KEY` in `cl/xmx/heads.h`.
pub(in crate::ops) fn key_values(head_size: usize) -> usize {
    head_size.max(32)
}

/// Sub-groups of a work-group of `attend`; `TEAM` in `cl/xmx/heads.h`.
pub(super) fn team(head_size: usize) -> usize {
    (head_size / 32).max(2)
}

/// Positions that such a work-group takes at a time; `BLOCK` in `cl/xmx/heads.h`.
pub(in crate::ops) fn block(head_size: usize) -> usize {
    16 * team(head_size)
}

/// Most sixteens of looks that a work-group takes: local memory has no room for the weights of more of them at 256 positions,
/// nor have registers where scores of heads of 64 are capped.
pub(super) fn most_tiles(head_size: usize, capped: bool) -> usize {
    if head_size > 256 || capped && head_size == 64 { 2 } else { 4 }
}

/// Sixteens of looks that a work-group takes where a key-value head has so many looks.
fn tiles_for(head_size: usize, capped: bool, looks: usize) -> usize {
    match looks.div_ceil(LANES) {
        0 | 1 => 1,
        2 => 2,
        _ => most_tiles(head_size, capped),
    }
}

/// The kernel for so many sixteens of looks at a time.
fn kernel_for(tiles: usize) -> &'static str {
    match tiles {
        1 => "attend_1",
        2 => "attend_2",
        _ => "attend_4",
    }
}

/// Looks of a key-value head, whole sixteens of them.
fn padded_looks(heads: usize, kv_heads: usize, rows: usize) -> usize {
    round_up(rows * heads / kv_heads.max(1), LANES)
}

/// Bytes of the queries of `rows` rows as `cl/xmx/heads.h` has them, with their factors.
pub(in crate::ops) fn query_bytes(heads: usize, kv_heads: usize, head_size: usize, rows: usize) -> usize {
    padded_looks(heads, kv_heads, rows) * kv_heads * (key_values(head_size) * TERMS * 2 + 4)
}

impl Xmx {
    /// [`Kernels::rotate_and_cache`](crate::ops::Kernels::rotate_and_cache), which has looked at all but the queries; `how` are
    /// the kernel's flags and the gap of a pair.
    pub(in crate::ops) fn rotate_and_cache(
        &self,
        device: &Device,
        rotation: &Rotation<'_>,
        cache: &Cache,
        rows: usize,
        [flags, gap]: [i32; 2],
    ) -> Result<Launch, OpsError> {
        const OP: &str = "rotate_and_cache";
        let (heads, kv_heads) = (rotation.q_heads, cache.heads);
        check(OP, kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads over {kv_heads} key-value heads")
        })?;
        let queries = rotation.queries.ok_or_else(|| OpsError::Shape {
            op: OP,
            what: "the queries have no place to go to".to_owned(),
        })?;
        holds_floats(OP, "the queries", queries, cache.query_bytes(heads, rows) / 4)?;
        let (q_norm, k_norm) = rotation.norms.unwrap_or((self.unused(), self.unused()));
        let groups = heads + if rotation.queries_only { 0 } else { kv_heads };
        Ok(Launch::with_args(
            &self.kernel(device, Which::Rotate(cache.head_size), OP)?,
            &[
                Arg::Buffer(rotation.qkv),
                Arg::Buffer(rotation.angles),
                Arg::Buffer(q_norm),
                Arg::Buffer(k_norm),
                Arg::Buffer(rotation.bias.unwrap_or(self.unused())),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::Buffer(queries),
                Arg::I32(int(OP, "stride", rotation.stride)?),
                Arg::I32(int(OP, "query heads", heads)?),
                Arg::I32(int(OP, "the keys' start", rotation.k_at)?),
                Arg::I32(int(OP, "the values' start", rotation.v_at)?),
                Arg::I32(0),
                Arg::I32(int(OP, "capacity", cache.capacity)?),
                Arg::I32(int(OP, "heads of a group", heads / kv_heads)?),
                Arg::I32(int(OP, "rotated pairs", rotation.half_rotated)?),
                Arg::I32(gap),
                Arg::I32(flags),
                Arg::F32(rotation.epsilon),
            ],
            &[groups * LANES, rows],
            Some(&[LANES, 1]),
        )?)
    }

    /// [`Kernels::attention`](crate::ops::Kernels::attention), which has looked at everything.
    pub(in crate::ops) fn attend(
        &self,
        device: &Device,
        attention: &Attention<'_>,
        cache: &Cache,
        rows: usize,
        window: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "attention";
        let group = attention.q_heads / cache.heads;
        let (looks, size) = (rows * group, cache.head_size);
        let capped = attention.softcap > 0.0;
        let tiles = tiles_for(size, capped, looks);
        let which = Which::Attention { head_size: size, capped };
        let items = team(size) * LANES;
        Ok(Launch::with_args(
            &self.kernel(device, which, kernel_for(tiles))?,
            &[
                Arg::Buffer(attention.q),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::Buffer(attention.out),
                Arg::I32(int(OP, "looks", looks)?),
                Arg::I32(int(OP, "heads of a group", group)?),
                Arg::I32(int(OP, "the output's stride", attention.out_stride)?),
                Arg::I32(0),
                Arg::I32(int(OP, "window", window)?),
                Arg::I32(int(OP, "capacity", cache.capacity)?),
                Arg::I32(i32::from(attention.canvas)),
                Arg::F32(attention.scale),
                Arg::F32(attention.softcap),
            ],
            &[looks.div_ceil(tiles * LANES) * items, cache.heads],
            Some(&[items, 1]),
        )?)
    }
}

/// The queries of `rows` rows as numbers, `[row][head][head size]`, out of the form that attention takes them in. For tests: it
/// waits for the device.
///
/// # Errors
/// [`DeviceError`] when the device refuses.
pub fn xmx_queries(
    device: &Device,
    cache: &Cache,
    queries: &Buffer,
    q_heads: usize,
    rows: usize,
) -> Result<Vec<f32>, DeviceError> {
    let mut words = vec![0u32; cache.query_bytes(q_heads, rows) / 4];
    device.read(queries, 0, bytemuck::cast_slice_mut(&mut words))?;
    let (size, group) = (cache.head_size, q_heads / cache.heads);
    let looks = padded_looks(q_heads, cache.heads, rows);
    let (packed, factors) = words.split_at(looks * cache.heads * key_values(size));
    let number = |row: usize, head: usize, i: usize| {
        let look = head / group * looks + row * group + head % group;
        let (tile, lane) = (look / LANES * key_values(size) * LANES, look % LANES);
        let half = |term: usize| {
            let word = packed[tile + (i / 16 * TERMS + term) * 128 + i % 16 / 2 * LANES + lane];
            f16::from_bits((word >> (i % 2 * 16)) as u16).to_f32()
        };
        (half(0) + half(1)) * f32::from_bits(factors[look])
    };
    let all = (0..rows).flat_map(|row| (0..q_heads).map(move |head| (row, head)));
    Ok(all.flat_map(|(row, head)| (0..size).map(move |i| number(row, head, i))).collect())
}

/// The kernel of the attention of `rows` rows, with heads of that size and scores that may be capped, over `count` positions,
/// without a mask, and what it has to do: of each loop, its
/// matrix instructions and its share. What is done between both loops, once a block of positions, is counted to the first.
pub fn xmx_attention_work(
    (head_size, capped): (usize, bool),
    heads: usize,
    kv_heads: usize,
    rows: usize,
    count: usize,
) -> (&'static str, Vec<(u32, XmxWork)>) {
    let (looks, team) = (rows * heads / kv_heads, team(head_size));
    let tiles = tiles_for(head_size, capped, looks);
    let groups = looks.div_ceil(tiles * LANES) * kv_heads;
    let rounds = groups * count.div_ceil(block(head_size)) * team;
    let own = head_size / team;
    // Turns a round of the loops over 32 values of a key and over 32 positions, and the matrix instructions of a turn.
    let (key_turns, value_turns) = (key_values(head_size) / 32, team / 2);
    let (of_keys, of_values) = (8 * tiles, 4 * tiles * own / 8);
    let all = XmxWork {
        bytes: (2 * kv_heads * count * head_size * 2 + rows * heads * head_size * (2 * TERMS + 4)) as u64,
        operations: 4 * (rows * heads * count * head_size) as u64,
        ..XmxWork::default()
    };
    let work = |instructions: usize, turns: usize, rounds: usize| XmxWork {
        multiply_adds: (rounds * instructions) as u64,
        turns: (rounds * turns) as u64,
        ..XmxWork::default()
    };
    // A loop of one turn is none.
    let parts = match (key_turns, value_turns) {
        (1, _) => vec![(of_keys + of_values, XmxWork { ..work(of_keys + of_values, 1, rounds).and(all) })],
        (_, 1) => {
            let instructions = of_keys * key_turns + of_values;
            let both = XmxWork { rounds: rounds as u64, ..work(instructions, key_turns, rounds).and(all) };
            vec![(of_keys, both)]
        }
        _ => {
            let values = work(of_values * value_turns, value_turns, rounds).and(all);
            let keys = work(of_keys * key_turns, key_turns, rounds);
            vec![(of_values, XmxWork { rounds: rounds as u64, ..values }), (of_keys, keys)]
        }
    };
    (kernel_for(tiles), parts.into_iter().map(|(loops, work)| (loops as u32, work)).collect())
}
