//! Heads that see one latent: their products, the way of latents into the cache, attention over them.

use super::{Sequence, compare, download, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::{Arg, Device, Purpose};
use crate::ops::attention::{ATTENTION_START, Attention, Pairing, attention_reference};
use crate::ops::cache::{Cache, CacheKind};
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::latent::{HeadMatrices, HeadRows, LATENT_START, LatentRotation};
use crate::ops::matmul::{Matrix, prepare_reference};
use crate::ops::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};

/// What a model does with heads that see one latent, for [`self_test_latent`] to do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// Values of the latent.
    pub size: usize,
    /// Values of a head that turn.
    pub turns: usize,
    /// Which of them turn together.
    pub pairing: Pairing,
    /// Number type of the cache.
    pub cache: CacheKind,
}

const ROWS: usize = 70; // crosses a row block and a tile of the running softmax
const HEADS: usize = 3;
const OUTPUTS: usize = 48;
const EPSILON: f32 = 1e-5;
const SCALE: f32 = 0.2;

/// Runs the kernels of heads over a latent, with matrices of these formats.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_latent(
    device: &Device,
    kernels: &Kernels,
    formats: &[Format],
    heads: &LatentHeads,
) -> Result<(), OpsError> {
    formats.iter().try_for_each(|&format| products(device, kernels, format))?;
    let case = Case::new(heads);
    let together = case.run(device, kernels, &[ROWS])?;
    case.check(device, &together)?;
    let apart = case.run(device, kernels, &[63, 2, 1, 4])?;
    same(device, "attention over latents", &together.attended, &apart.attended)
}

fn same(device: &Device, kernel: &str, whole: &[f32], parts: &[f32]) -> Result<(), OpsError> {
    match (0..whole.len()).find(|&i| whole[i].to_bits() != parts[i].to_bits()) {
        None => Ok(()),
        Some(i) => Err(OpsError::SelfTest {
            kernel: kernel.to_owned(),
            device: device.info().name.clone(),
            what: format!("value {i} is {} in one pass, {} in several", whole[i], parts[i]),
        }),
    }
}

fn products(device: &Device, kernels: &Kernels, format: Format) -> Result<(), OpsError> {
    let name = format!("head_products {}", format.name());
    let inputs = format.block_codes().max(TILE);
    let each = round_up(OUTPUTS, ROW_MULTIPLE);
    let mut sequence = Sequence(format as u32 + 301);
    let tiles = random_tiles(format, HEADS * each, inputs, &mut sequence);
    let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
    device.write(&buffer, 0, &tiles)?;
    let matrix = Matrix { buffer, format, rows: HEADS * each, columns: inputs, family: Family::Vector };
    let matrices = HeadMatrices { matrix, heads: HEADS, outputs: OUTPUTS };
    let (stride, out_stride) = (HEADS * inputs, HEADS * OUTPUTS);
    let x = sequence.take(ROWS * stride);
    let run = |first: usize, rows: usize| -> Result<Vec<f32>, OpsError> {
        let [packed, sums] =
            poisoned_packed(device, kernels, HEADS * rows, round_up(inputs, STRIDE_MULTIPLE))?;
        let (input, out) = (
            upload(device, &x[first * stride..(first + rows) * stride])?,
            poisoned(device, rows * out_stride)?,
        );
        let input = HeadRows { rows: &input, stride, at: 0, step: inputs };
        let output = HeadRows { rows: &out, stride: out_stride, at: 0, step: OUTPUTS };
        device.enqueue(&kernels.pack_heads(device, &matrices, &input, rows, &packed, &sums)?)?;
        device.enqueue(&kernels.head_products(device, &matrices, &packed, &sums, rows, &output)?)?;
        download(device, &out)
    };
    let whole = run(0, ROWS)?;
    let size = format.tile_bytes(inputs);
    for row in [0, ROWS - 1] {
        let found = &whole[row * out_stride..][..out_stride];
        let expected: Vec<f64> = (0..out_stride)
            .map(|i| {
                let (head, output) = (i / OUTPUTS, i / OUTPUTS * each + i % OUTPUTS);
                let tile = &tiles[output / TILE * size..][..size];
                let x = &x[row * stride + head * inputs..][..inputs];
                let weight = |column| f64::from(format.weight(tile, output % TILE, column));
                x.iter().enumerate().map(|(column, x)| f64::from(*x) * weight(column)).sum()
            })
            .collect();
        compare(device, &name, found, &expected, 2e-5)?;
        same(device, &name, found, &run(row, 1)?)?;
    }
    Ok(())
}

/// Rows of a test: queries with their latent part, then the key.
struct Case {
    heads: LatentHeads,
    rows: Vec<f32>,
    turning: Vec<f32>,
    /// `[row][pair][cos, sin]`.
    angles: Vec<f32>,
    norm: Vec<f32>,
}

struct Found {
    rows: Vec<f32>,
    keys: Vec<f32>,
    attended: Vec<f32>,
}

impl Case {
    fn new(heads: &LatentHeads) -> Self {
        let mut sequence = Sequence(17);
        let rows = sequence.take(ROWS * (HEADS + 1) * (heads.size + heads.turns));
        let turning = sequence.take(ROWS * HEADS * heads.turns);
        let angles = sequence.take(ROWS * heads.turns / 2);
        let angles = angles.iter().flat_map(|v| [(v * 3.0).cos(), (v * 3.0).sin()]).collect();
        Self { heads: *heads, rows, turning, angles, norm: sequence.take(heads.size) }
    }

    fn key_size(&self) -> usize {
        self.heads.size + self.heads.turns
    }

    fn run(&self, device: &Device, kernels: &Kernels, widths: &[usize]) -> Result<Found, OpsError> {
        let (size, latent, turns) = (self.key_size(), self.heads.size, self.heads.turns);
        let stride = (HEADS + 1) * size;
        let cache = Cache::latent(device, self.heads.cache, size, latent, ROWS)?;
        let nan = match self.heads.cache {
            CacheKind::F16 => 0x7e00_7e00,
            CacheKind::F32 => f32::NAN.to_bits(),
        };
        device.fill(&cache.keys, nan)?;
        let (angles, norm) = (upload(device, &self.angles)?, upload(device, &self.norm)?);
        let mut found = Found { rows: vec![], keys: vec![], attended: vec![] };
        let mut start = 0;
        for &width in widths {
            let part = |values: &[f32], each: usize| upload(device, &values[start * each..][..width * each]);
            let (rows, turning) = (part(&self.rows, stride)?, part(&self.turning, HEADS * turns)?);
            let out = poisoned(device, width * HEADS * latent)?;
            let rotation = LatentRotation {
                rows: &rows,
                stride,
                q_heads: HEADS,
                k_at: HEADS * size,
                turning: &turning,
                turning_stride: HEADS * turns,
                turning_step: turns,
                turning_at: 0,
                angles: &angles,
                pairing: self.heads.pairing,
                norm: &norm,
                epsilon: EPSILON,
            };
            let looks = Attention {
                q: &rows,
                stride,
                out: &out,
                out_stride: HEADS * latent,
                q_heads: HEADS,
                window: None,
                canvas: false,
                scale: SCALE,
                softcap: 0.0,
            };
            let mut rotate = kernels.rotate_and_cache_latent(device, &rotation, &cache, width)?;
            rotate.set(LATENT_START, Arg::I32(start as i32))?;
            device.enqueue(&rotate)?;
            let mut attend = kernels.attention(device, &looks, &cache, width)?;
            attend.set(ATTENTION_START, Arg::I32(start as i32))?;
            device.enqueue(&attend)?;
            found.rows.extend(download(device, &rows)?);
            found.attended.extend(download(device, &out)?);
            start += width;
        }
        found.keys = cache.read(device, 0, ROWS)?.0;
        Ok(found)
    }

    fn turned(&self, row: usize, x: &[f32]) -> Vec<f64> {
        let turns = self.heads.turns;
        let mut x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        for pair in 0..turns / 2 {
            let (first, second) = match self.heads.pairing {
                Pairing::Neighbours => (2 * pair, 2 * pair + 1),
                Pairing::RotatedHalves | Pairing::HeadHalves => (pair, pair + turns / 2),
            };
            let angle = &self.angles[row * turns + 2 * pair..];
            let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
            (x[first], x[second]) = (x[first] * cos - x[second] * sin, x[first] * sin + x[second] * cos);
        }
        x
    }

    fn check(&self, device: &Device, found: &Found) -> Result<(), OpsError> {
        let (size, latent, turns) = (self.key_size(), self.heads.size, self.heads.turns);
        let stride = (HEADS + 1) * size;
        let kept = match self.heads.cache {
            CacheKind::F16 => 5e-4,
            CacheKind::F32 => 1e-5,
        };
        let name =
            format!("rotate_and_cache_latent (latent {latent}, {turns} turn, cache {})", self.heads.cache);
        let keys: Vec<Vec<f32>> = found.keys.chunks_exact(size).map(<[f32]>::to_vec).collect();
        let values: Vec<Vec<f32>> = keys.iter().map(|key| key[..latent].to_vec()).collect();
        for row in [0, 1, ROWS / 2, ROWS - 1] {
            let before = &self.rows[row * stride..][..stride];
            let as_f64 = |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(v)).collect() };
            let key = &before[HEADS * size..];
            let norm = as_f64(&self.norm);
            let (_, mut expected) =
                prepare_reference(&as_f64(&key[..latent]), None, Some(&norm), f64::from(EPSILON));
            expected.extend(self.turned(row, &key[latent..]));
            compare(device, &format!("{name}, keys"), &keys[row], &expected, kept)?;
            for head in 0..HEADS {
                let query = &found.rows[row * stride + head * size..][..size];
                let mut expected = as_f64(&before[head * size..][..latent]);
                expected.extend(self.turned(row, &self.turning[(row * HEADS + head) * turns..][..turns]));
                compare(device, &format!("{name}, queries"), query, &expected, 1e-5)?;
                let expected =
                    attention_reference(self.heads.cache, query, &keys, &values, 0..=row, SCALE, 0.0);
                let attended = &found.attended[(row * HEADS + head) * latent..][..latent];
                compare(device, "attention over latents", attended, &expected, 1e-5)?;
            }
        }
        Ok(())
    }
}
