//! Norms and rotation of heads, the cache, and attention over it.

use super::{Sequence, compare, download, poisoned, upload};
use crate::device::{Arg, Buffer, Device};
use crate::ops::attention::{
    ATTENTION_START, Attention, Pairing, ROTATE_START, Rotation, attention_reference,
};
use crate::ops::cache::{Cache, CacheKind};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::matmul::prepare_reference;
use crate::ops::{STRIDE_MULTIPLE, round_up, xmx_queries};

/// What a model does with its heads, for [`self_test`](super::self_test) to do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heads {
    /// Values a head.
    pub size: usize,
    /// Number type of the cache.
    pub cache: CacheKind,
    /// A bias is added to queries, keys and values.
    pub bias: bool,
    /// Which values turn together.
    pub pairing: Pairing,
    /// Pairs of a head that turn.
    pub rotated_pairs: usize,
    /// Query and key heads are normed.
    pub norms: bool,
    /// Value heads are.
    pub value_norms: bool,
    /// The raw keys are the values.
    pub keys_are_values: bool,
    /// A row sees a window only.
    pub window: bool,
    /// The last rows are a canvas; with a window, the cache is a ring.
    pub canvas: bool,
    /// Scores are soft-capped.
    pub softcap: bool,
}

impl Heads {
    /// Heads that turn in halves, all of them, with nothing else done to them, and see a window.
    pub fn plain(size: usize, cache: CacheKind) -> Self {
        Self {
            size,
            cache,
            bias: false,
            pairing: Pairing::RotatedHalves,
            rotated_pairs: size / 2,
            norms: false,
            value_norms: false,
            keys_are_values: false,
            window: true,
            canvas: false,
            softcap: false,
        }
    }
}

const ROWS: usize = 70; // crosses a tile of the running softmax, ends inside a row block
const CANVAS: usize = 21;
const Q_HEADS: usize = 2;
const WINDOW: usize = 37;
const EPSILON: f32 = 1e-5;
const SOFTCAP: f32 = 0.25; // near the scores, so that it bends them

/// Rows and weights of a test.
struct Case {
    heads: Heads,
    qkv: Vec<f32>,
    bias: Vec<f32>,
    stride: usize,
    k_at: usize,
    v_at: usize,
    /// `[row][pair][cos, sin]`.
    angles: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    scale: f32,
}

/// What the kernels make of it, by row.
struct Found {
    queries: Vec<Vec<f32>>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    attended: Vec<Vec<f32>>,
}

pub(super) fn attention(device: &Device, kernels: &Kernels, heads: &Heads) -> Result<(), OpsError> {
    let case = Case::new(heads);
    let before = ROWS - case.canvas();
    let together = case.run(device, kernels, &[before], ROWS)?;
    case.check(device, &together)?;
    let ring = heads.canvas && heads.window;
    let widths: &[usize] = match (heads.canvas, ring) {
        (false, _) => &[65, 1, 1, 1, 1, 1],
        (true, false) => &[44, 1, 1, 1, 1, 1],
        (true, true) => &[24, 20, 1, 1, 1, 1, 1],
    };
    let positions = if ring { WINDOW - 1 + 24 } else { ROWS };
    let apart = case.run(device, kernels, widths, positions)?;
    for (row, (one, other)) in together.attended.iter().zip(&apart.attended).enumerate() {
        if let Some(i) = (0..one.len()).find(|&i| one[i].to_bits() != other[i].to_bits()) {
            return Err(OpsError::SelfTest {
                kernel: case.name("attention"),
                device: device.info().name.clone(),
                what: format!("value {i} of row {row} is {} in one pass, {} in several", one[i], other[i]),
            });
        }
    }
    Ok(())
}

impl Case {
    fn new(heads: &Heads) -> Self {
        let mut sequence = Sequence(7);
        let size = heads.size;
        let k_at = Q_HEADS * size;
        let v_at = if heads.keys_are_values { k_at } else { k_at + size };
        let stride = round_up(v_at + size, STRIDE_MULTIPLE);
        let qkv = sequence.take(ROWS * stride);
        let bias = sequence.take(stride);
        let angles = sequence
            .take(ROWS * heads.rotated_pairs)
            .iter()
            .flat_map(|v| {
                let (sin, cos) = (f64::from(*v) * std::f64::consts::PI).sin_cos();
                [cos as f32, sin as f32]
            })
            .collect();
        let (q_norm, k_norm) = (sequence.take(size), sequence.take(size));
        let scale = 1.0 / (size as f32).sqrt();
        Self { heads: *heads, qkv, bias, stride, k_at, v_at, angles, q_norm, k_norm, scale }
    }

    fn canvas(&self) -> usize {
        if self.heads.canvas { CANVAS } else { 0 }
    }

    fn softcap(&self) -> f32 {
        if self.heads.softcap { SOFTCAP } else { 0.0 }
    }

    fn name(&self, kernel: &str) -> String {
        let heads = &self.heads;
        let (size, cache, pairs) = (heads.size, heads.cache, heads.rotated_pairs);
        let looks = if heads.canvas { "canvas" } else { "causal" };
        let bias = if heads.bias { ", bias" } else { "" };
        let cap = if heads.softcap { ", soft cap" } else { "" };
        format!("{kernel} (head size {size}, {pairs} rotated, cache {cache}, {looks}{bias}{cap})")
    }

    /// Passes of these widths, then the canvas, over a cache of so many positions.
    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        widths: &[usize],
        positions: usize,
    ) -> Result<Found, OpsError> {
        let (heads, stride, size) = (&self.heads, self.stride, self.heads.size);
        let family = kernels.products().attention(heads.cache, size);
        let cache = Cache::of_family(device, family, heads.cache, 1, size, positions)?;
        let nan = match heads.cache {
            CacheKind::F16 => 0x7e00_7e00,
            CacheKind::F32 => f32::NAN.to_bits(),
        };
        device.fill(&cache.keys, nan)?;
        // The largest number of f16, where values must be numbers.
        device.fill(&cache.values, if family == Family::Xmx { 0x7bff_7bff } else { nan })?;
        let some = |values: &[f32]| -> Result<Buffer, OpsError> {
            if values.is_empty() { poisoned(device, 1) } else { upload(device, values) }
        };
        let (angles, q_norm, k_norm) =
            (some(&self.angles)?, upload(device, &self.q_norm)?, upload(device, &self.k_norm)?);
        let bias = upload(device, &self.bias)?;
        let mut found = Found { queries: vec![], keys: vec![], values: vec![], attended: vec![] };
        let mut start = 0;
        let canvas = heads.canvas.then_some((CANVAS, true));
        for (rows, canvas) in widths.iter().map(|&rows| (rows, false)).chain(canvas) {
            let qkv = upload(device, &self.qkv[start * stride..(start + rows) * stride])?;
            let out = poisoned(device, rows * stride)?;
            let queries = match family {
                Family::Vector => qkv.clone(),
                Family::Xmx => poisoned(device, cache.query_bytes(Q_HEADS, rows) / 4)?,
            };
            let rotation = Rotation {
                qkv: &qkv,
                stride,
                q_heads: Q_HEADS,
                k_at: self.k_at,
                v_at: self.v_at,
                bias: heads.bias.then_some(&bias),
                angles: &angles,
                half_rotated: heads.rotated_pairs,
                pairing: heads.pairing,
                norms: heads.norms.then_some((&q_norm, &k_norm)),
                value_norms: heads.value_norms,
                queries_only: false,
                queries: Some(&queries),
                epsilon: EPSILON,
            };
            let looks = Attention {
                q: &queries,
                stride,
                out: &out,
                out_stride: stride,
                q_heads: Q_HEADS,
                window: heads.window.then_some(WINDOW),
                canvas,
                scale: self.scale,
                softcap: self.softcap(),
            };
            let mut rotate = kernels.rotate_and_cache(device, &rotation, &cache, rows)?;
            rotate.set(ROTATE_START, Arg::I32(start as i32))?;
            device.enqueue(&rotate)?;
            let mut attend = kernels.attention(device, &looks, &cache, rows)?;
            attend.set(ATTENTION_START, Arg::I32(start as i32))?;
            device.enqueue(&attend)?;
            let part = |values: Vec<f32>| -> Vec<Vec<f32>> {
                values.chunks_exact(stride).map(|row| row[..Q_HEADS * size].to_vec()).collect()
            };
            match family {
                Family::Vector => found.queries.extend(part(download(device, &qkv)?)),
                Family::Xmx => {
                    let rotated = xmx_queries(device, &cache, &queries, Q_HEADS, rows)?;
                    found.queries.extend(rotated.chunks_exact(Q_HEADS * size).map(<[f32]>::to_vec));
                }
            }
            found.attended.extend(part(download(device, &out)?));
            let (keys, values) = cache.read(device, start, start + rows)?;
            found.keys.extend(keys.chunks_exact(size).map(<[f32]>::to_vec));
            found.values.extend(values.chunks_exact(size).map(<[f32]>::to_vec));
            start += rows;
        }
        Ok(found)
    }

    /// A head of a row after its norm and its turn.
    fn turned(&self, row: usize, at: usize, norm: &[f32]) -> Vec<f64> {
        let heads = &self.heads;
        let mut x = self.normed(row, at, heads.norms.then_some(norm));
        for pair in 0..heads.rotated_pairs {
            let (first, second) = match heads.pairing {
                Pairing::Neighbours => (2 * pair, 2 * pair + 1),
                Pairing::RotatedHalves => (pair, pair + heads.rotated_pairs),
                Pairing::HeadHalves => (pair, pair + heads.size / 2),
            };
            let angle = &self.angles[2 * (row * heads.rotated_pairs + pair)..];
            let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
            (x[first], x[second]) = (x[first] * cos - x[second] * sin, x[first] * sin + x[second] * cos);
        }
        x
    }

    fn normed(&self, row: usize, at: usize, norm: Option<&[f32]>) -> Vec<f64> {
        let as_f64 = |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(v)).collect() };
        let mut head = as_f64(&self.qkv[row * self.stride + at..][..self.heads.size]);
        if self.heads.bias {
            head.iter_mut().zip(as_f64(&self.bias[at..])).for_each(|(value, bias)| *value += bias);
        }
        let norm = norm.map(as_f64);
        prepare_reference(&head, None, norm.as_deref(), f64::from(EPSILON)).1
    }

    fn check(&self, device: &Device, found: &Found) -> Result<(), OpsError> {
        let (heads, size) = (&self.heads, self.heads.size);
        // Numbers of 11 bits, rounded once.
        let kept = match heads.cache {
            CacheKind::F16 => 5e-4,
            CacheKind::F32 => 1e-5,
        };
        let anchor = ROWS - self.canvas();
        let ones = vec![1.0; size];
        for row in [0, WINDOW - 1, WINDOW, anchor - 1, anchor.min(ROWS - 2), ROWS - 1] {
            let name = self.name("rotate_and_cache");
            let key = self.turned(row, self.k_at, &self.k_norm);
            compare(device, &format!("{name}, keys"), &found.keys[row], &key, kept)?;
            let value = self.normed(row, self.v_at, heads.value_norms.then_some(&ones));
            compare(device, &format!("{name}, values"), &found.values[row], &value, kept)?;
            // Most positions of a window before the row, or before the canvas.
            let (at, last) = if row < anchor { (row, row) } else { (anchor, ROWS - 1) };
            let first = if heads.window { (at + 1).saturating_sub(WINDOW) } else { 0 };
            for head in 0..Q_HEADS {
                let q = &found.queries[row][head * size..][..size];
                let query = self.turned(row, head * size, &self.q_norm);
                compare(device, &format!("{name}, queries"), q, &query, 1e-5)?;
                // By the device's own numbers, which are right: what f16 keeps may fall to either side.
                let (keys, values) = (&found.keys, &found.values);
                let (seen, scale, softcap) = (first..=last, self.scale, self.softcap());
                let expected = attention_reference(heads.cache, q, keys, values, seen, scale, softcap);
                let attended = &found.attended[row][head * size..][..size];
                compare(device, &self.name("attention"), attended, &expected, 1e-5)?;
            }
        }
        Ok(())
    }
}
