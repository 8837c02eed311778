//! What tests of the `xmx` family share: the family on the device, and its rounding of activations.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use axe::device::{Arg, Device, Launch, Purpose};
use axe::ops::{Family, Format, Matrix, Xmx, XmxRows, XmxTerms, xmx_arrange};
use half::f16;

use crate::ops_support::{Bounded, DENORMAL, POISON, ULP, Weights};

/// All formats that the family takes.
pub const FORMATS: [Format; 17] = [
    Format::W4,
    Format::Q2K,
    Format::Q3K,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q4K,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q5K,
    Format::Q6K,
    Format::Q8_0,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Mxfp4,
    Format::Tq2,
    Format::F16,
    Format::Bf16,
];

/// A device with the family.
pub struct Bench {
    pub device: Device,
    pub xmx: Xmx,
}

/// None, with a word, where the device cannot run it: PoCL and the simulator have no loads of blocks by sub-groups.
pub fn bench() -> Option<Bench> {
    let device = crate::support::device();
    let xmx = Xmx::new(&device).unwrap();
    if xmx.is_none() {
        println!("no sub-groups with loads of blocks here: the xmx family cannot run");
        assert_ne!(std::env::var("AXE_TEST_PLATFORM").as_deref(), Ok("intel"), "Intel's runtime has them");
    }
    Some(Bench { device, xmx: xmx? })
}

impl Bench {
    /// Room for rows, full of NaN.
    pub fn rows(&self, rows: usize, columns: usize, terms: XmxTerms) -> XmxRows {
        let room = XmxRows::new(&self.device, rows, columns, terms).unwrap();
        for buffer in room.buffers() {
            self.device.fill(buffer, POISON).unwrap();
        }
        room
    }

    pub fn run(&self, launches: impl IntoIterator<Item = Launch>) {
        for launch in launches {
            self.device.enqueue(&launch).unwrap();
        }
    }

    /// A matrix of repacked tiles, put in the family's order.
    pub fn matrix(&self, format: Format, tiles: &[u8], rows: usize, columns: usize) -> Matrix {
        let mut tiles = tiles.to_vec();
        let format = xmx_arrange(format, &mut tiles, columns).unwrap();
        let buffer = self.device.alloc(Purpose::Weights, tiles.len()).unwrap();
        self.device.write(&buffer, 0, &tiles).unwrap();
        Matrix { buffer, format, rows, columns, family: Family::Xmx }
    }
}

/// The cost model counts the bytes of the buffers that a launch is given, but for what is little beside them.
pub fn counts_what_is_touched(what: &str, counted: u64, launch: &Launch) {
    let buffers = launch.args().filter_map(|arg| match arg {
        Some(Arg::Buffer(buffer)) => Some(buffer.size() as u64),
        _ => None,
    });
    let touched: u64 = buffers.sum();
    let off = touched.abs_diff(counted) as f64 / touched as f64;
    println!("{what}: {counted} bytes counted, {touched} touched, {:.2} % off", off * 100.0);
    assert!(off < 0.02, "{what}: {counted} bytes counted, {touched} touched");
}

/// A row as `prepare` rounds it: terms of f16 after scaling by a power of two, added up and scaled back.
pub fn round_row(row: &[f64], terms: XmxTerms) -> Vec<f64> {
    let largest = row.iter().fold(0f32, |largest, &x| largest.max((x as f32).abs()));
    let exponent = ((largest.to_bits() >> 23) as i32 - 127).clamp(-100, 127);
    let up = 2f64.powi(14 - exponent);
    let round = |x: f64| f16::from_f32(x as f32).to_f64();
    let rounded = |x: f64| match terms {
        XmxTerms::One => round(x),
        XmxTerms::Two => round(x) + round(x - round(x)),
    };
    row.iter().map(|&x| rounded(f64::from(x as f32) * up) / up).collect()
}

/// Output `n` of a rounded row, and how far f32 may be off; `slack`: how far a rounded activation may be.
pub fn product(
    format: Format,
    weights: &Weights,
    n: usize,
    columns: usize,
    row: &[f64],
    slack: f64,
) -> Bounded {
    let values = &weights.values[n * columns..][..columns];
    let sizes = &weights.sizes[n * columns..][..columns];
    let largest_x = row.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    let (mut sum, mut off) = (0.0, 0.0);
    for ((values, sizes), x) in values.chunks(32).zip(sizes.chunks(32)).zip(row.chunks(32)) {
        // A biased code is at most twice the largest code, which most spans have; offsets make up for the bias.
        let largest = 3.0 * sizes.iter().fold(0f64, |largest, size| largest.max(*size));
        for (value, x) in values.iter().zip(x) {
            sum += value * x;
            // Sums of a span, of spans and of slices: as many roundings as there are numbers, at worst.
            off += (columns + 40) as f64 * ULP * largest * x.abs() + slack * value.abs() * x.abs();
            if matches!(format, Format::Bf16) {
                off += 2f64.powi(-25) * x.abs();
            }
            // A branch may cancel most of a number, and leave the error of what it was.
            off += slack.min(2f64.powi(-20)) * value.abs() * largest_x;
        }
    }
    (sum, off + DENORMAL * columns as f64)
}
