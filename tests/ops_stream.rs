//! What is done to whole rows between products, against f64: odd sizes, values of any size, outputs among poison, and the
//! same bits however many rows there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use ops_support::*;

use axe::device::{Buffer, Device};
use axe::ops::{
    Activation, Join, Parts, STRIDE_MULTIPLE, TILE, cap_reference, gate_reference, join_reference,
    mix_reference, round_up,
};
use proptest::prelude::*;

/// Rows among poison: `rows` of `stride` values, of which a launch may write the first `width`.
struct Rows {
    buffer: Buffer,
    before: Vec<f32>,
    stride: usize,
    width: usize,
}

impl Rows {
    /// Rows with these values at their starts, and poison everywhere else.
    fn new(device: &Device, rows: &[Vec<f32>], stride: usize, width: usize) -> Self {
        let poison = f32::from_bits(POISON);
        let mut before: Vec<f32> = Vec::new();
        for row in rows {
            before.extend(row.iter().copied().chain(std::iter::repeat(poison)).take(stride));
        }
        before.extend([poison; GUARD]);
        Self { buffer: upload(device, &before), before, stride, width }
    }

    /// The first `n` values of each row; what lies behind the width must be as it was.
    fn read(&self, device: &Device, n: usize) -> Result<Vec<Vec<f32>>, TestCaseError> {
        let after = download(device, &self.buffer);
        let rows = (after.len() - GUARD) / self.stride;
        for row in 0..rows {
            let (from, to) = (row * self.stride + self.width, (row + 1) * self.stride);
            prop_assert!(
                same_bits(&after[from..to], &self.before[from..to]),
                "row {} wrote past its end",
                row
            );
        }
        prop_assert!(is_poison(&after[rows * self.stride..]), "written past the last row");
        Ok((0..rows).map(|row| after[row * self.stride..][..n].to_vec()).collect())
    }
}

fn random_rows(random: &mut Random, size: Size, rows: usize, n: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|_| (0..n).map(|_| size.take(random, 3.0)).collect()).collect()
}

fn sizes() -> impl Strategy<Value = Size> {
    prop_oneof![Just(Size::Plain), Just(Size::Wide), Just(Size::Sparse)]
}

fn close(
    what: &str,
    found: &[f32],
    expected: &[f64],
    off: impl Fn(usize) -> f64,
) -> Result<(), TestCaseError> {
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let bound = off(i);
        prop_assert!(
            (f64::from(found) - expected).abs() <= bound,
            "{}: value {} is {}, expected {} within {:e}",
            what,
            i,
            found,
            expected,
            bound
        );
    }
    Ok(())
}

/// By how much the RMS norm of a row may be off, relative to its values.
fn norm_off(n: usize) -> f64 {
    (10.0 + n as f64 / 32.0) * ULP
}

/// How many cases of each kind are tried.
fn cases() -> u32 {
    if simulated() { 4 } else { 60 }
}

/// One row by itself.
fn alone_of(rows: &[Vec<f32>], row: usize) -> Vec<Vec<f32>> {
    vec![rows[row].clone()]
}

#[test]
fn logits_are_capped() {
    let (device, kernels) = open();
    let shape = (1..=5usize, 1..=200usize, 0..40usize, sizes(), 0.5..40f32, any::<u64>());
    check(cases(), &shape, |(rows, n, gap, size, cap, seed)| {
        let mut random = Random(seed);
        let width = round_up(n, TILE);
        let logits = random_rows(&mut random, size, rows, width);
        let run = |logits: &[Vec<f32>]| -> Result<Vec<Vec<f32>>, TestCaseError> {
            let all = Rows::new(&device, logits, width + gap, width);
            let launch = kernels.cap_rows(&device, &all.buffer, logits.len(), n, width + gap, cap).unwrap();
            device.enqueue(&launch).unwrap();
            all.read(&device, n)
        };
        let found = run(&logits)?;
        for (row, (found, mine)) in found.iter().zip(&logits).enumerate() {
            let cap = f64::from(cap);
            let expected: Vec<f64> = mine[..n].iter().map(|&v| cap_reference(f64::from(v), cap)).collect();
            // A quotient, tanh to a few units, a product.
            close("cap_rows", found, &expected, |i| 16.0 * ULP * expected[i].abs() + DENORMAL)?;
            let alone = run(&alone_of(&logits, row))?;
            prop_assert!(same_bits(&alone[0], found), "row {} alone differs", row);
        }
        Ok(())
    });
}

#[test]
fn a_cap_makes_no_numbers_of_what_is_none() {
    let (device, kernels) = open();
    let logits = vec![vec![1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -2.0]];
    let all = Rows::new(&device, &logits, 16, 16);
    device.enqueue(&kernels.cap_rows(&device, &all.buffer, 1, 5, 16, 30.0).unwrap()).unwrap();
    let found = all.read(&device, 5).unwrap().remove(0);
    assert_eq!(found.iter().map(|v| v.is_nan()).collect::<Vec<_>>(), [false, true, true, true, false]);
}

#[test]
fn branches_join_with_a_factor() {
    let (device, kernels) = open();
    let shape = (1..=5usize, 1..=300usize, 0..3usize, any::<bool>(), any::<u64>());
    check(cases(), &shape, |(rows, n, gap, in_place, seed)| {
        let mut random = Random(seed);
        let padded = round_up(n, STRIDE_MULTIPLE);
        let stride = padded + gap * 16;
        let pad = |mut row: Vec<f32>| {
            row.resize(padded, 0.0);
            row
        };
        let mut take = |rows: usize| -> Vec<Vec<f32>> {
            random_rows(&mut random, Size::Plain, rows, n).into_iter().map(pad).collect()
        };
        let (x, branch, weight) = (take(rows), take(rows), take(1).remove(0));
        let scalar = random.unit() * 2.0;
        let norm = upload(&device, &weight);
        let run = |x: &[Vec<f32>], branch: &[Vec<f32>]| -> Result<Vec<Vec<f32>>, TestCaseError> {
            let stream = Rows::new(&device, x, stride, if in_place { padded } else { 0 });
            let branches = Rows::new(&device, branch, stride, 0);
            let result = Rows::new(&device, &vec![vec![]; x.len()], stride, padded);
            let join = Join {
                rows: &stream.buffer,
                branch: &branches.buffer,
                weight: &norm,
                scalar,
                n,
                stride,
                epsilon: EPSILON,
            };
            let out = if in_place { &stream } else { &result };
            device.enqueue(&kernels.join_rows(&device, &join, x.len(), &out.buffer).unwrap()).unwrap();
            out.read(&device, padded)
        };
        let found = run(&x, &branch)?;
        for row in 0..rows {
            let (x64, branch64, weight64) = (f64s(&x[row][..n]), f64s(&branch[row][..n]), f64s(&weight[..n]));
            let (scalar64, epsilon) = (f64::from(scalar), f64::from(EPSILON));
            let expected = join_reference(&x64, &branch64, &weight64, scalar64, epsilon);
            close("join_rows", &found[row][..n], &expected, |i| {
                let branch = (expected[i] - x64[i] * scalar64).abs();
                norm_off(n) * branch
                    + 4.0 * ULP * (expected[i].abs() + x64[i].abs() * scalar64.abs())
                    + DENORMAL
            })?;
            prop_assert!(found[row][n..].iter().all(|&v| v == 0.0), "padding of row {}", row);
            let alone = run(&alone_of(&x, row), &alone_of(&branch, row))?;
            prop_assert!(same_bits(&alone[0], &found[row]), "row {} alone differs", row);
        }
        Ok(())
    });
}

#[test]
fn gates_open_for_what_is_no_product() {
    let (device, kernels) = open();
    let shape = (1..=5usize, 1..=100usize, 0..20usize, 0..40usize, any::<bool>(), sizes(), any::<u64>());
    check(cases(), &shape, |(rows, n, gap, at, silu, size, seed)| {
        let mut random = Random(seed);
        let activation = if silu { Activation::Silu } else { Activation::GeluTanh };
        let width = round_up(n, TILE);
        let (stride, other_stride) = (width + gap, at + width + gap);
        let gates = random_rows(&mut random, Size::Plain, rows, width);
        let other = random_rows(&mut random, size, rows, at + width);
        let run = |gates: &[Vec<f32>], other: &[Vec<f32>]| -> Result<Vec<Vec<f32>>, TestCaseError> {
            let all = Rows::new(&device, gates, stride, width);
            let side = Rows::new(&device, other, other_stride, 0);
            let other_rows = (&side.buffer, other_stride);
            let rows = gates.len();
            let launch =
                kernels.gate_rows(&device, activation, &all.buffer, stride, other_rows, at, rows, n).unwrap();
            device.enqueue(&launch).unwrap();
            side.read(&device, 0)?;
            all.read(&device, n)
        };
        let found = run(&gates, &other)?;
        for row in 0..rows {
            let pairs: Vec<(f64, f64)> =
                f64s(&gates[row][..n]).into_iter().zip(f64s(&other[row][at..][..n])).collect();
            let expected: Vec<f64> = pairs.iter().map(|&(g, o)| gate_reference(activation, g, o)).collect();
            close("gate_rows", &found[row], &expected, |i| {
                times(activated(activation, (pairs[i].0, 0.0)), (pairs[i].1, 0.0)).1
            })?;
            let alone = run(&alone_of(&gates, row), &alone_of(&other, row))?;
            prop_assert!(same_bits(&alone[0], &found[row]), "row {} alone differs", row);
        }
        Ok(())
    });
}

#[test]
fn parts_are_normed_each_by_itself() {
    let (device, kernels) = open();
    let shape = (1..=4usize, 1..=6usize, 1..=5usize, 0..20usize, any::<u64>());
    check(cases(), &shape, |(rows, parts, tiles, gap, seed)| {
        let mut random = Random(seed);
        let size = tiles * TILE;
        let width = parts * size;
        let stride = width + gap;
        let made = random_rows(&mut random, Size::Plain, rows, width);
        let embedded = random_rows(&mut random, Size::Plain, rows, width);
        let weight: Vec<f32> = (0..size).map(|_| random.unit()).collect();
        let (scale, share) = (random.unit() + 1.5, random.unit());
        let norm = upload(&device, &weight);
        let run = |made: &[Vec<f32>], embedded: &[Vec<f32>]| -> Result<Vec<Vec<f32>>, TestCaseError> {
            let all = Rows::new(&device, made, stride, width);
            let side = Rows::new(&device, embedded, stride, 0);
            let mixing = Parts {
                parts: &all.buffer,
                embedded: &side.buffer,
                weight: &norm,
                scale,
                share,
                count: parts,
                size,
                stride,
                epsilon: EPSILON,
            };
            device.enqueue(&kernels.mix_parts(&device, &mixing, made.len()).unwrap()).unwrap();
            side.read(&device, 0)?;
            all.read(&device, width)
        };
        let found = run(&made, &embedded)?;
        for row in 0..rows {
            for part in 0..parts {
                let of = |rows: &[Vec<f32>]| f64s(&rows[row][part * size..][..size]);
                let (made, embedded, weight) = (of(&made), of(&embedded), f64s(&weight));
                let (scale, share, epsilon) = (f64::from(scale), f64::from(share), f64::from(EPSILON));
                let expected = mix_reference(&made, &embedded, &weight, scale, share, epsilon);
                close("mix_parts", &found[row][part * size..][..size], &expected, |i| {
                    let normed = (expected[i] - embedded[i] * share).abs();
                    norm_off(size) * normed
                        + 4.0 * ULP * (expected[i].abs() + (embedded[i] * share).abs())
                        + DENORMAL
                })?;
            }
            let alone = run(&alone_of(&made, row), &alone_of(&embedded, row))?;
            prop_assert!(same_bits(&alone[0], &found[row]), "row {} alone differs", row);
        }
        Ok(())
    });
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (device, kernels) = open();
    let small = upload(&device, &[0.0; 64]);
    let refused = |launch: Result<_, axe::ops::OpsError>, what: &str| {
        let error = launch.err().expect(what).to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(kernels.cap_rows(&device, &small, 2, 33, 48, 30.0), "the logits");
    refused(kernels.cap_rows(&device, &small, 1, 33, 33, 30.0), "a stride of 33");
    refused(kernels.cap_rows(&device, &small, 1, 16, 16, 0.0), "a soft cap of 0");
    let join = Join {
        rows: &small,
        branch: &small,
        weight: &small,
        scalar: 1.0,
        n: 64,
        stride: 256,
        epsilon: EPSILON,
    };
    refused(kernels.join_rows(&device, &join, 1, &small), "the rows");
    let short = (&small, 48);
    refused(
        kernels.gate_rows(&device, Activation::Silu, &small, 32, short, 32, 2, 32),
        "strides of 32 and 48",
    );
    let parts = Parts {
        parts: &small,
        embedded: &small,
        weight: &small,
        scale: 1.0,
        share: 1.0,
        count: 2,
        size: 24,
        stride: 48,
        epsilon: EPSILON,
    };
    refused(kernels.mix_parts(&device, &parts, 1), "parts of 24 values");
}
