//! What tests of kernels share: random numbers and matrices of every format, guarded buffers, bounds of f32 arithmetic.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use axe::device::{Buffer, Device, DeviceOptions, DeviceSelector, Purpose};
use axe::ops::{Activation, Format, Kernels, Products, Scales, TILE, activate};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Half a unit in the last place of f32, relative.
pub const ULP: f64 = f32::EPSILON as f64 / 2.0;
/// Activations below 2^-90 count as zero in a product.
pub const FLUSHED: f64 = 1.0 / (1u128 << 90) as f64;
/// What f32 may lose below its range, per term.
pub const DENORMAL: f64 = 1.2e-38;
/// A NaN that no kernel makes.
pub const POISON: u32 = 0x7fc0_dead;
/// Values of poison before and behind an output.
pub const GUARD: usize = 48;
pub const EPSILON: f32 = 1e-5;

/// The simulator runs a few million instructions a second: fewer and smaller cases there.
pub fn simulated() -> bool {
    std::env::var("AXE_TEST_PLATFORM").is_ok_and(|platform| platform == "oclgrind")
}

fn device() -> Device {
    if simulated() {
        Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap()
    } else {
        crate::support::device()
    }
}

pub fn open() -> (Device, Kernels) {
    let device = device();
    let kernels = Kernels::new(&device).unwrap();
    (device, kernels)
}

/// See [`support::flavours`](crate::support::flavours).
pub fn flavours() -> Vec<(Device, Kernels)> {
    crate::support::flavours(&device())
}

/// Poisoned buffers for packed rows and their sums, with a guard behind, and how many values of each are to be written.
pub fn poisoned_packed(
    device: &Device,
    kernels: &Kernels,
    rows: usize,
    stride: usize,
) -> [(Buffer, usize); 2] {
    let products = kernels.products();
    let written = match products {
        Products::Vector | Products::Xmx => rows * stride,
        Products::MatrixUnit => rows * stride / 2 * 3,
        // 32 values, three digits of 32 bytes, and what a digit is worth.
        Products::Integer => rows * stride / 32 * 57,
    };
    [
        (poisoned(device, products.packed_values(rows, stride) + GUARD), written),
        (poisoned(device, products.sums_values(rows, stride) + GUARD), rows * stride / 32 * 3),
    ]
}

/// Runs `test` on the same cases every time.
pub fn check<S: Strategy>(cases: u32, strategy: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 100, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    if let Err(error) = runner.run(strategy, test) {
        panic!("{error}");
    }
}

/// Numbers for one case, all from its seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// In [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Of either sign, sizes from 10^low to 10^high alike; now and then zero.
    pub fn wide(&mut self, low: f32, high: f32) -> f32 {
        if self.below(16) == 0 {
            return 0.0;
        }
        let exponent = low + (high - low) * (self.unit() + 1.0) / 2.0;
        10f32.powf(exponent) * self.unit().signum()
    }
}

/// How large the numbers of a case are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Size {
    /// Up to 1.
    Plain,
    /// 1e-30 to 1e30.
    Wide,
    /// Zeros but for a few.
    Sparse,
}

impl Size {
    pub fn take(self, random: &mut Random, largest: f32) -> f32 {
        match self {
            Self::Plain => random.unit(),
            Self::Wide => random.wide(-30.0, largest),
            Self::Sparse => {
                if random.below(20) == 0 {
                    random.unit() * 100.0
                } else {
                    0.0
                }
            }
        }
    }
}

/// A buffer with these values.
pub fn upload(device: &Device, values: &[f32]) -> Buffer {
    let buffer = device.alloc(Purpose::Scratch, values.len().max(1) * 4).unwrap();
    if !values.is_empty() {
        device.write(&buffer, 0, bytemuck::cast_slice(values)).unwrap();
    }
    buffer
}

pub fn download(device: &Device, buffer: &Buffer) -> Vec<f32> {
    let mut values = vec![0f32; buffer.size() / 4];
    device.read(buffer, 0, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

pub fn poisoned(device: &Device, values: usize) -> Buffer {
    let buffer = device.alloc(Purpose::Scratch, values * 4).unwrap();
    device.fill(&buffer, POISON).unwrap();
    buffer
}

pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

pub fn is_poison(values: &[f32]) -> bool {
    values.iter().all(|value| value.to_bits() == POISON)
}

pub fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// What the codes of IQ4_NL and IQ4_XS stand for.
const IQ4: [f64; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
/// What those of FP4 (E2M1) stand for.
const FP4: [f64; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., 0., -0.5, -1., -1.5, -2., -3., -4., -6.];

/// A random matrix: its tiles, its weights, and for each weight the size of what is added up to make its product.
pub struct Weights {
    /// As the kernels read them.
    pub tiles: Vec<u8>,
    /// By row and column, padding left out.
    pub values: Vec<f64>,
    /// |code| and |offset| instead of their sum.
    pub sizes: Vec<f64>,
}

impl Weights {
    pub fn new(format: Format, rows: usize, columns: usize, random: &mut Random) -> Self {
        let tile_bytes = format.tile_bytes(columns);
        let mut tiles = vec![0u8; format.matrix_bytes(rows, columns)];
        let (mut values, mut sizes) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let tile = &mut tiles[row / TILE * tile_bytes..][..tile_bytes];
            if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
                Self::numbers(format, tile, row % TILE, columns, random, &mut values);
                sizes.extend(values[values.len() - columns..].iter().map(|value| value.abs()));
            } else {
                Self::codes(format, tile, row % TILE, columns, random, &mut values, &mut sizes);
            }
        }
        Self { tiles, values, sizes }
    }

    fn numbers(
        format: Format,
        tile: &mut [u8],
        lane: usize,
        columns: usize,
        random: &mut Random,
        values: &mut Vec<f64>,
    ) {
        let mut elements = Vec::new();
        for _ in 0..columns {
            // Down to numbers that f16 holds as denormals.
            let number = random.wide(-7.0, 0.5);
            match format {
                Format::F32 => {
                    elements.extend(number.to_le_bytes());
                    values.push(f64::from(number));
                }
                Format::F16 => {
                    elements.extend(f16::from_f32(number).to_le_bytes());
                    values.push(f16::from_f32(number).to_f64());
                }
                _ => {
                    elements.extend(bf16::from_f32(number).to_le_bytes());
                    values.push(bf16::from_f32(number).to_f64());
                }
            }
        }
        format.put_numbers(tile, lane, &elements);
    }

    /// Weights by the definition of the format in its files, not by the code under test.
    fn codes(
        format: Format,
        tile: &mut [u8],
        lane: usize,
        columns: usize,
        random: &mut Random,
        values: &mut Vec<f64>,
        sizes: &mut Vec<f64>,
    ) {
        let block = format.block_codes();
        let (codes_below, centre) = match format {
            Format::Q4_0 => (16, 8.0),
            Format::Q5_0 => (32, 16.0),
            Format::Q8_0 => (256, 128.0),
            Format::Q6K => (64, 32.0),
            Format::Q5_1 | Format::Q5K => (32, 0.0),
            Format::Q2K => (4, 0.0),
            Format::Q3K => (8, 4.0),
            Format::Tq2 => (4, 1.0),
            _ => (16, 0.0),
        };
        let codebook: Option<[f64; 16]> = match format {
            Format::Iq4Nl | Format::Iq4Xs => Some(IQ4),
            Format::Mxfp4 => Some(FP4),
            _ => None,
        };
        for first in (0..columns).step_by(block) {
            let codes: Vec<u8> = (first..columns.min(first + block))
                .map(|_| match random.below(8) {
                    0 => 0,
                    1 => (codes_below - 1) as u8,
                    _ => random.below(codes_below) as u8,
                })
                .collect();
            let d = f16::from_f32(random.wide(-7.0, -0.5));
            let m = match format {
                Format::W4 => f16::from_f32(random.below(16) as f32),
                _ => f16::from_f32(random.wide(-7.0, 0.0)),
            };
            // Of MXFP4, now and then one of the two that make a denormal.
            let exponent = if random.below(16) == 0 { random.below(2) } else { 100 + random.below(30) };
            let (number, below, signed) = match format {
                Format::Q4K | Format::Q5K => (8, 64, false),
                Format::Q6K => (16, 256, true),
                Format::Q3K => (16, 64, true),
                Format::Iq4Xs => (8, 64, true),
                Format::Q2K => (16, 16, false),
                _ => (0, 1, false),
            };
            let groups: Vec<u8> = (0..number)
                .map(|_| random.below(below).wrapping_sub(if signed { below / 2 } else { 0 }) as u8)
                .collect();
            let offsets: Vec<u8> = (0..number).map(|_| random.below(below) as u8).collect();
            let has_offsets = matches!(format, Format::Q4K | Format::Q5K | Format::Q2K);
            let has_offset = has_offsets || matches!(format, Format::Q4_1 | Format::Q5_1 | Format::W4);
            format.put_codes(
                tile,
                lane,
                first,
                &codes,
                Scales {
                    scale: if format == Format::Mxfp4 { exponent as u16 } else { d.to_bits() },
                    offset: if has_offset { m.to_bits() } else { 0 },
                    scales: &groups,
                    offsets: if has_offsets { &offsets } else { &[] },
                },
            );
            for (i, &code) in codes.iter().enumerate() {
                let (d, m) = (d.to_f64(), m.to_f64());
                let centre = if format == Format::W4 { m } else { centre };
                let (value, size) = match codebook {
                    Some(numbers) => (numbers[usize::from(code)], numbers[usize::from(code)].abs()),
                    None => (f64::from(code) - centre, f64::from(code) + centre),
                };
                let (scale, offset) = match format {
                    Format::Q4_1 | Format::Q5_1 => (d, m),
                    Format::Q4K | Format::Q5K => {
                        (d * f64::from(groups[i / 32]), -m * f64::from(offsets[i / 32]))
                    }
                    Format::Q2K => (d * f64::from(groups[i / 16]), -m * f64::from(offsets[i / 16])),
                    Format::Q3K | Format::Q6K => (d * f64::from(groups[i / 16] as i8), 0.0),
                    Format::Iq4Xs => (d * f64::from(groups[i / 32] as i8), 0.0),
                    Format::Mxfp4 => (2f64.powi(exponent as i32 - 127), 0.0),
                    _ => (d, 0.0),
                };
                values.push(scale * value + offset);
                sizes.push(scale.abs() * size + offset.abs());
            }
        }
    }
}

/// The result at one place and how far f32 may be off.
pub type Bounded = (f64, f64);

pub fn activated(activation: Activation, (x, off): Bounded) -> Bounded {
    // Neither activation is steeper than 1.2.
    (activate(activation, x), 1.2 * off + 16.0 * ULP * x.abs() + DENORMAL)
}

pub fn times((a, a_off): Bounded, (b, b_off): Bounded) -> Bounded {
    (a * b, a.abs() * b_off + b.abs() * a_off + a_off * b_off + 2.0 * ULP * (a * b).abs() + DENORMAL)
}

pub fn agree(what: &str, row: usize, found: &[f32], expected: &[Bounded]) -> Result<(), TestCaseError> {
    for (i, (&found, &(expected, off))) in found.iter().zip(expected).enumerate() {
        prop_assert!(
            (f64::from(found) - expected).abs() <= off,
            "{}: value {} of row {} is {}, the reference says {} (within {})",
            what,
            i,
            row,
            found,
            expected,
            off
        );
    }
    Ok(())
}
