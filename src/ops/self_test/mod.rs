//! Every kernel once on a small input against its CPU reference, before a model relies on it.

mod attention;
mod choice;
mod experts;
mod fused;
mod head;
mod latent;
mod products;
mod stream;

use super::kernels::{Family, Kernels, OpsError};
use super::{Format, Matrix, Scales, TILE, xmx_arrange};
use crate::device::{Buffer, Device, Purpose};

pub use attention::Heads;
pub use choice::self_test_choice;
pub use experts::{self_test_moe, self_test_router};
pub use fused::self_test_fused;
pub use head::self_test_head;
pub use latent::{LatentHeads, self_test_latent};
pub use stream::self_test_stream;

/// Numbers in [-1, 1) that are the same every time.
struct Sequence(u32);

impl Sequence {
    fn bits(&mut self) -> u32 {
        // Linear congruential generator with the constants of Numerical Recipes; any spread will do here.
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 >> 8
    }

    fn next(&mut self) -> f32 {
        self.bits() as f32 / (1 << 23) as f32 - 1.0
    }

    fn take(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn upload(device: &Device, values: &[f32]) -> Result<Buffer, OpsError> {
    let buffer = device.alloc(Purpose::Scratch, values.len() * 4)?;
    device.write(&buffer, 0, bytes(values))?;
    Ok(buffer)
}

fn download(device: &Device, buffer: &Buffer) -> Result<Vec<f32>, OpsError> {
    let mut values = vec![0f32; buffer.size() / 4];
    device.read(buffer, 0, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// A buffer of NaN: a kernel that forgets to write a value is found out.
fn poisoned(device: &Device, values: usize) -> Result<Buffer, OpsError> {
    let buffer = device.alloc(Purpose::Scratch, values * 4)?;
    device.fill(&buffer, f32::NAN.to_bits())?;
    Ok(buffer)
}

/// Such buffers for packed rows and their sums.
fn poisoned_packed(
    device: &Device,
    kernels: &Kernels,
    rows: usize,
    stride: usize,
) -> Result<[Buffer; 2], OpsError> {
    let products = kernels.products();
    Ok([
        poisoned(device, products.packed_values(rows, stride))?,
        poisoned(device, products.sums_values(rows, stride))?,
    ])
}

/// Runs the kernels for these weight formats and these heads.
///
/// # Errors
/// [`OpsError::SelfTest`] with the kernel, the device and the first wrong number; or what the device says.
pub fn self_test(
    device: &Device,
    kernels: &Kernels,
    formats: &[Format],
    heads: &Heads,
) -> Result<(), OpsError> {
    self_test_products(device, kernels, formats)?;
    attention::attention(device, kernels, heads)
}

/// Runs the kernels of products for these weight formats.
///
/// # Errors
/// As [`self_test`].
pub fn self_test_products(device: &Device, kernels: &Kernels, formats: &[Format]) -> Result<(), OpsError> {
    formats.iter().try_for_each(|&format| products::products(device, kernels, format))
}

fn compare(
    device: &Device,
    kernel: &str,
    found: &[f32],
    expected: &[f64],
    tolerance: f64,
) -> Result<(), OpsError> {
    let largest = expected.iter().fold(1e-3f64, |top, v| top.max(v.abs()));
    let allowed = tolerance * largest;
    let mut worst = 0f64;
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(f) - e).abs();
        // Where nothing is allowed, nothing is a share of it.
        worst = worst.max(if off == 0.0 { 0.0 } else { off / allowed });
        if off.is_nan() || off > allowed {
            device.note_check(kernel, worst, false);
            return Err(OpsError::SelfTest {
                kernel: kernel.to_owned(),
                device: device.info().name.clone(),
                what: format!("value {i} is {f}, the reference says {e}"),
            });
        }
    }
    device.note_check(kernel, worst, true);
    Ok(())
}

/// A matrix of these tiles, for the family that makes the products of `kernels`.
fn matrix(
    device: &Device,
    kernels: &Kernels,
    format: Format,
    mut tiles: Vec<u8>,
    rows: usize,
    columns: usize,
) -> Result<Matrix, OpsError> {
    let family = kernels.products().family(format);
    let format = match family {
        Family::Vector => format,
        Family::Xmx => xmx_arrange(format, &mut tiles, columns).unwrap_or(format),
    };
    let buffer = device.alloc(Purpose::Scratch, tiles.len())?;
    device.write(&buffer, 0, &tiles)?;
    Ok(Matrix { buffer, format, rows, columns, family })
}

/// A matrix of pseudo-random codes and scales, as tiles.
fn random_tiles(format: Format, rows: usize, columns: usize, sequence: &mut Sequence) -> Vec<u8> {
    let mut tiles = vec![0u8; format.matrix_bytes(rows, columns)];
    let block = format.block_codes();
    for row in 0..rows {
        let size = format.tile_bytes(columns);
        let tile = &mut tiles[row / TILE * size..][..size];
        if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
            let elements: Vec<u8> = (0..columns)
                .flat_map(|_| {
                    let value = sequence.next();
                    match format {
                        Format::F32 => value.to_le_bytes().to_vec(),
                        Format::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
                        _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
                    }
                })
                .collect();
            format.put_numbers(tile, row % TILE, &elements);
            continue;
        }
        for first in (0..columns).step_by(block) {
            let codes: Vec<u8> = (first..columns.min(first + block))
                .map(|_| (sequence.bits() % format.codes_below()) as u8)
                .collect();
            let offset = match format {
                Format::W4 => (sequence.bits() % 16) as f32,
                _ => sequence.next() * 0.3,
            };
            let scale = match format {
                Format::Mxfp4 => 120 + (sequence.bits() % 8) as u16,
                _ => half::f16::from_f32(sequence.next() * 0.05).to_bits(),
            };
            let small: Vec<u8> = (0..32).map(|_| (sequence.bits() % 64) as u8).collect();
            format.put_codes(
                tile,
                row % TILE,
                first,
                &codes,
                Scales {
                    scale,
                    offset: half::f16::from_f32(offset).to_bits(),
                    scales: &small[..16],
                    offsets: &small[16..],
                },
            );
        }
    }
    tiles
}
