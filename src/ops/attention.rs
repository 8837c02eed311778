//! Rotary embedding, the key-value cache of a layer, and attention over it.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

use super::check::{check, holds_floats, int};
use super::kernels::{Family, Kernels, OpsError};
use super::matmul::{Matrix, PackedRows};
use super::round_up;
use crate::device::{Arg, Buffer, Device, DeviceError, Launch, Purpose, Work};

/// Positions per step of the kernel's running softmax; the cache is padded to whole steps.
const TILE: usize = 64;
/// Most values of a key or of a value head: a work-item of `attention` keeps the sums of all its looks beside each other,
/// `LOOKS` times the values of a head.
pub const MOST_HEAD_SIZE: usize = 1024;
/// Columns of a group of packed rows; `GROUP` in `cl/include/common.h`.
const GROUP: usize = 32;
/// Query heads of rows that one work-item of `attention` takes at most.
const LOOKS: usize = 8;

/// Index of the argument of [`Kernels::rotate_and_cache`] that holds the position of the first row.
pub const ROTATE_START: usize = 12;
/// Index of the argument of [`Kernels::attention`] that holds the position of the first row.
pub const ATTENTION_START: usize = 7;

/// Flags of `cl/attention.cl`.
const HEAD_NORMS: i32 = 1;
const VALUE_NORMS: i32 = 2;
const BIAS: i32 = 4;

/// Number type of a key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Half the memory; keys and values are rounded to 11 bits.
    #[default]
    F16,
    /// Nothing is rounded.
    F32,
}

impl CacheKind {
    fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

impl FromStr for CacheKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            other => Err(format!("'{other}' is no type of key-value cache: f16 or f32")),
        }
    }
}

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Type of its numbers.
    pub kind: CacheKind,
    /// `[kv head][position / 16][head size][16]`.
    pub keys: Buffer,
    /// `[kv head][position][value size]`; the keys' buffer where the values are parts of the keys.
    pub values: Buffer,
    /// Positions it holds, a multiple of 64. Position p lies in slot p % capacity: with a window, what is out of sight
    /// may be written over.
    pub capacity: usize,
    /// Key-value heads.
    pub heads: usize,
    /// Values of a key, and of a query.
    pub head_size: usize,
    /// Values of a value head.
    pub value_size: usize,
    latent: bool,
}

impl Cache {
    /// Memory for at least `positions` positions. It is not cleared: what has not been written is not looked at, so that
    /// the system need not give pages for it.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn new(
        device: &Device,
        kind: CacheKind,
        heads: usize,
        head_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        Self::with_value_size(device, kind, heads, head_size, head_size, positions)
    }

    /// The same for value heads of another size than keys.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn with_value_size(
        device: &Device,
        kind: CacheKind,
        heads: usize,
        head_size: usize,
        value_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        let capacity = round_up(positions, TILE);
        let buffer = |size: usize| device.alloc(Purpose::KvCache, capacity * heads * size * kind.bytes());
        let (keys, values) = (buffer(head_size)?, buffer(value_size)?);
        Ok(Self { kind, keys, values, capacity, heads, head_size, value_size, latent: false })
    }

    /// One key head, whose first `value_size` values are the value of the position, too.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn latent(
        device: &Device,
        kind: CacheKind,
        head_size: usize,
        value_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        let capacity = round_up(positions, TILE);
        let keys = device.alloc(Purpose::KvCache, capacity * head_size * kind.bytes())?;
        let values = keys.clone();
        Ok(Self { kind, keys, values, capacity, heads: 1, head_size, value_size, latent: true })
    }

    /// Makes all its numbers 1/16, for measuring: memory that nobody has written may be one page, seen again and again.
    ///
    /// # Errors
    /// What the device says.
    pub fn fill(&self, device: &Device) -> Result<(), DeviceError> {
        let pattern = match self.kind {
            CacheKind::F16 => 0x2c00_2c00,
            CacheKind::F32 => 0x3d80_0000,
        };
        device.fill(&self.keys, pattern)?;
        if self.latent { Ok(()) } else { device.fill(&self.values, pattern) }
    }

    /// Whether a value is the first part of its key, rather than stored by itself.
    pub fn values_in_keys(&self) -> bool {
        self.latent
    }

    /// Keys and values of the positions `from..to`, each `[head][position][values of it]`, as numbers. For tests and tools:
    /// it waits for the device and copies much more than it shows.
    ///
    /// # Errors
    /// [`DeviceError`] when the device refuses.
    pub fn read(&self, device: &Device, from: usize, to: usize) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
        let numbers = |buffer: &Buffer| -> Result<Vec<f32>, DeviceError> {
            let mut bytes = vec![0u8; buffer.size()];
            device.read(buffer, 0, &mut bytes)?;
            Ok(match self.kind {
                CacheKind::F16 => {
                    bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
                }
                CacheKind::F32 => {
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
                }
            })
        };
        let (keys, values) = (numbers(&self.keys)?, numbers(&self.values)?);
        let capacity = self.capacity;
        let of = |size: usize, value: &dyn Fn(usize, usize, usize) -> f32| {
            (0..self.heads)
                .flat_map(|head| (from..to).map(move |position| (head, position % capacity)))
                .flat_map(|(head, slot)| (0..size).map(move |i| value(head, slot, i)))
                .collect()
        };
        let (key, value) = (self.head_size, self.value_size);
        let key_at = |head, slot, i| keys[head * capacity * key + slot / 16 * key * 16 + i * 16 + slot % 16];
        Ok((
            of(key, &key_at),
            if self.latent {
                of(value, &key_at)
            } else {
                of(value, &|head, slot, i| values[(head * capacity + slot) * value + i])
            },
        ))
    }

    pub(super) fn check(&self, op: &'static str) -> Result<(), OpsError> {
        let (key, value) = (self.head_size, self.value_size);
        check(op, key > 0 && value > 0 && key.is_multiple_of(16) && value.is_multiple_of(16), || {
            format!("head sizes of {key} and {value} are not multiples of 16")
        })?;
        check(op, key.max(value) <= MOST_HEAD_SIZE, || {
            format!("head sizes of {key} and {value}, {MOST_HEAD_SIZE} at most")
        })?;
        check(op, !self.latent || value <= key, || format!("values of {value} in keys of {key}"))
    }

    /// Bytes of a cache of latents.
    pub fn latent_bytes(kind: CacheKind, head_size: usize, positions: usize) -> usize {
        kind.bytes() * head_size * round_up(positions, TILE)
    }

    /// Bytes of a cache of that size, value heads being as large as keys.
    pub fn bytes(kind: CacheKind, heads: usize, head_size: usize, positions: usize) -> usize {
        2 * kind.bytes() * heads * head_size * round_up(positions, TILE)
    }
}

/// Which two values of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pairing {
    /// Neighbours: (2i, 2i + 1).
    Neighbours,
    /// Halves of what is rotated: (i, i + rotated / 2).
    RotatedHalves,
    /// Halves of the head, of which only the first pairs turn: (i, i + head size / 2).
    HeadHalves,
}

/// What [`Kernels::rotate_and_cache`] does to rows of queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// f32 rows: query heads from 0 on, keys and values from `k_at` and `v_at` on.
    pub qkv: &'a Buffer,
    /// Values from row to row.
    pub stride: usize,
    /// Query heads.
    pub q_heads: usize,
    /// First value of the keys in a row.
    pub k_at: usize,
    /// First value of the values in a row; the same as `k_at` where the raw keys are the values.
    pub v_at: usize,
    /// Added to all heads before anything else is done to them: f32, laid out as a row of `qkv`.
    pub bias: Option<&'a Buffer>,
    /// f32 `[position][half_rotated][cos, sin]`.
    pub angles: &'a Buffer,
    /// Pairs of a head that are rotated.
    pub half_rotated: usize,
    /// Which values are a pair.
    pub pairing: Pairing,
    /// Weights of the RMS norms of query and key heads.
    pub norms: Option<(&'a Buffer, &'a Buffer)>,
    /// Value heads get an RMS norm without a weight.
    pub value_norms: bool,
    /// The cache is another layer's, which has filled it: the row has query heads only, and the cache stays as it is.
    pub queries_only: bool,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
}

/// What [`Kernels::attention`] looks at.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// f32 rows with rotated query heads from 0 on.
    pub q: &'a Buffer,
    /// Values from row to row of `q`.
    pub stride: usize,
    /// f32 rows of results, one head after the other. It may be `q`, whose queries they replace: a work-item reads those
    /// of its rows and head before it writes them.
    pub out: &'a Buffer,
    /// Values from row to row of `out`.
    pub out_stride: usize,
    /// Query heads, a multiple of the cache's heads.
    pub q_heads: usize,
    /// Positions a row sees, itself included; none: all up to itself.
    pub window: Option<usize>,
    /// The rows are a canvas: each sees all of them, and as much of what is before the canvas as its first row does.
    pub canvas: bool,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// Then they become `softcap * tanh(score / softcap)`; 0 leaves them.
    pub softcap: f32,
}

impl Kernels {
    /// Norms and rotates query and key heads of `rows` rows and stores keys and values; set argument
    /// [`ROTATE_START`] to the position of the first row before each run.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn rotate_and_cache(
        &self,
        device: &Device,
        rotation: &Rotation<'_>,
        cache: &Cache,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "rotate_and_cache";
        let head = cache.head_size;
        cache.check(OP)?;
        check(OP, !cache.latent, || "a latent cache has another kernel".to_owned())?;
        check(OP, 2 * rotation.half_rotated <= head, || {
            format!("{} rotated values in a head of {head}", 2 * rotation.half_rotated)
        })?;
        let kv_heads = if rotation.queries_only { 0 } else { cache.heads };
        let mut width = rotation.q_heads * head;
        if kv_heads > 0 {
            width =
                width.max(rotation.k_at + kv_heads * head).max(rotation.v_at + kv_heads * cache.value_size);
        }
        check(OP, rotation.stride >= width && rotation.qkv.size() >= rows * rotation.stride * 4, || {
            format!(
                "{rows} rows of {width} values in {} bytes, stride {}",
                rotation.qkv.size(),
                rotation.stride
            )
        })?;
        if let Some(bias) = rotation.bias {
            holds_floats(OP, "the bias", bias, width)?;
        }
        let (q_norm, k_norm) = rotation.norms.unwrap_or((self.unused(), self.unused()));
        let gap = match rotation.pairing {
            Pairing::Neighbours => 1,
            Pairing::RotatedHalves => rotation.half_rotated,
            Pairing::HeadHalves => head / 2,
        };
        let norms = rotation.norms.map_or(0, |_| HEAD_NORMS)
            | if rotation.value_norms { VALUE_NORMS } else { 0 }
            | rotation.bias.map_or(0, |_| BIAS);
        Ok(Launch::with_args(
            &self.attention_kernel(device, cache, OP)?,
            &[
                Arg::Buffer(rotation.qkv),
                Arg::Buffer(rotation.angles),
                Arg::Buffer(q_norm),
                Arg::Buffer(k_norm),
                Arg::Buffer(rotation.bias.unwrap_or(self.unused())),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::I32(int(OP, "stride", rotation.stride)?),
                Arg::I32(int(OP, "query heads", rotation.q_heads)?),
                Arg::I32(int(OP, "key-value heads", kv_heads)?),
                Arg::I32(int(OP, "the keys' start", rotation.k_at)?),
                Arg::I32(int(OP, "the values' start", rotation.v_at)?),
                Arg::I32(0),
                Arg::I32(int(OP, "capacity", cache.capacity)?),
                Arg::I32(int(OP, "rotated pairs", rotation.half_rotated)?),
                Arg::I32(int(OP, "pairs' gap", gap)?),
                Arg::I32(norms),
                Arg::F32(rotation.epsilon),
            ],
            &[rows],
            Some(&[1]),
        )?)
    }

    /// Heads of a group and rows that one work-item of `attention` takes. A look costs less the more of them share what is
    /// read and unpacked, as long as every compute unit has something to do; results are the same bits whatever is chosen.
    fn looks(&self, kv_heads: usize, group: usize, rows: usize) -> (usize, usize) {
        let time = |heads: usize, together: usize| {
            let items = kv_heads * group.div_ceil(heads) * rows.div_ceil(together);
            // Measured: what is shared is worth about two looks.
            items.div_ceil(self.compute_units()) * (2 + heads * together)
        };
        let ways = (1..=group.min(LOOKS))
            .rev()
            .flat_map(|heads| (1..=rows.min(LOOKS / heads)).rev().map(move |together| (heads, together)));
        ways.min_by_key(|&(heads, together)| time(heads, together)).unwrap_or((1, 1))
    }

    /// Attention of `rows` consecutive rows over the cache; set argument [`ATTENTION_START`] to the position of the
    /// first row before each run.
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn attention(
        &self,
        device: &Device,
        attention: &Attention<'_>,
        cache: &Cache,
        rows: usize,
    ) -> Result<Launch, OpsError> {
        self.attention_with(device, attention, cache, rows, None)
    }

    /// Whether [`attention_and_pack`](Self::attention_and_pack) can pack what comes of these heads for this matrix: whole
    /// groups of columns for each head, and none behind the last.
    pub fn attention_packs(&self, cache: &Cache, matrix: &Matrix) -> bool {
        matrix.family == Family::Vector
            && cache.value_size.is_multiple_of(GROUP)
            && matrix.groups() * GROUP == matrix.columns
    }

    /// The same; packs its results for products of the `vector` family as well, with the bits of
    /// [`pack_rows`](Self::pack_rows).
    ///
    /// # Errors
    /// As [`attention`](Self::attention), and heads that [`attention_packs`](Self::attention_packs) is false for.
    pub fn attention_and_pack(
        &self,
        device: &Device,
        attention: &Attention<'_>,
        cache: &Cache,
        rows: usize,
        packed: PackedRows<'_>,
    ) -> Result<Launch, OpsError> {
        self.attention_with(device, attention, cache, rows, Some(packed))
    }

    fn attention_with(
        &self,
        device: &Device,
        attention: &Attention<'_>,
        cache: &Cache,
        rows: usize,
        packed: Option<PackedRows<'_>>,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "attention";
        cache.check(OP)?;
        let (width, out_width) = (attention.q_heads * cache.head_size, attention.q_heads * cache.value_size);
        check(OP, cache.heads > 0 && attention.q_heads.is_multiple_of(cache.heads), || {
            format!("{} query heads over {} key-value heads", attention.q_heads, cache.heads)
        })?;
        check(
            OP,
            attention.q.size() >= rows * attention.stride * 4
                && attention.out.size() >= rows * attention.out_stride * 4
                && attention.stride >= width
                && attention.out_stride >= out_width,
            || {
                format!(
                    "{rows} rows of {width} values to {out_width}, strides {} and {}",
                    attention.stride, attention.out_stride
                )
            },
        )?;
        check(OP, attention.softcap >= 0.0 && attention.softcap.is_finite(), || {
            format!("a soft cap of {}", attention.softcap)
        })?;
        let groups = match packed {
            Some(PackedRows { packed, sums }) => {
                check(OP, cache.value_size.is_multiple_of(GROUP), || {
                    format!("heads of {} values are not whole groups of {GROUP}", cache.value_size)
                })?;
                self.holds_packed(OP, out_width, rows, packed, sums)?
            }
            None => 0,
        };
        let unused = self.unused();
        let PackedRows { packed, sums } = packed.unwrap_or(PackedRows { packed: unused, sums: unused });
        let group = attention.q_heads / cache.heads;
        let (heads, rows_each) = self.looks(cache.heads, group, rows);
        let window = attention.window.unwrap_or(cache.capacity).min(cache.capacity);
        // A position's key and value, which all rows share, and what each query head does with them.
        let bytes = (cache.heads * (cache.head_size + cache.value_size) * cache.kind.bytes()) as u64;
        let operations = 2 * (rows * attention.q_heads * (cache.head_size + cache.value_size)) as u64;
        let work = Work {
            bytes: rows as u64 * bytes,
            operations: rows as u64 * operations,
            bytes_a_position: bytes,
            operations_a_position: operations,
            most_positions: window as u64,
        };
        Ok(Launch::with_args(
            &self.attention_kernel(device, cache, OP)?,
            &[
                Arg::Buffer(attention.q),
                Arg::Buffer(&cache.keys),
                Arg::Buffer(&cache.values),
                Arg::Buffer(attention.out),
                Arg::I32(int(OP, "stride", attention.stride)?),
                Arg::I32(int(OP, "the output's stride", attention.out_stride)?),
                Arg::I32(int(OP, "rows", rows)?),
                Arg::I32(0),
                Arg::I32(int(OP, "window", window)?),
                Arg::I32(int(OP, "capacity", cache.capacity)?),
                Arg::I32(int(OP, "heads of a group", group)?),
                Arg::I32(if attention.canvas { int(OP, "rows", rows)? } else { 0 }),
                Arg::F32(attention.scale),
                Arg::F32(attention.softcap),
                Arg::I32(int(OP, "heads at once", heads)?),
                Arg::I32(int(OP, "rows at once", rows_each)?),
                Arg::Buffer(packed),
                Arg::Buffer(sums),
                Arg::I32(int(OP, "groups", groups)?),
            ],
            &[cache.heads * group.div_ceil(heads), rows.div_ceil(rows_each)],
            Some(&[1, 1]),
        )?
        .doing(work))
    }
}

/// CPU reference: one query head that sees the positions `seen` of the keys and values, by position, of its cache head, which are rounded as the cache does.
pub fn attention_reference(
    kind: CacheKind,
    q: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    seen: RangeInclusive<usize>,
    scale: f32,
    softcap: f32,
) -> Vec<f64> {
    let rounded = |v: f32| {
        f64::from(match kind {
            CacheKind::F16 => f16::from_f32(v).to_f32(),
            CacheKind::F32 => v,
        })
    };
    let scores: Vec<f64> = seen
        .clone()
        .map(|p| {
            let dot: f64 = q.iter().zip(&keys[p]).map(|(a, &b)| f64::from(*a) * rounded(b)).sum();
            let (score, cap) = (dot * f64::from(scale), f64::from(softcap));
            if cap > 0.0 { cap * (score / cap).tanh() } else { score }
        })
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    let size = values.get(*seen.start()).map_or(0, Vec::len);
    (0..size)
        .map(|i| seen.clone().zip(&weights).map(|(p, w)| w * rounded(values[p][i])).sum::<f64>() / total)
        .collect()
}
