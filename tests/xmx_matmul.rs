//! Products of the `xmx` family against f64: every format and finish, odd sizes, values of any size, outputs among poison
//! that must survive, and the same bits of a row whatever else is in a launch. Where the device has no matrix engine, its
//! instruction is made of plain code, which is slow: shapes are small.
//!
//! The reference rounds activations as `prepare` does; bounds are then those of f32 arithmetic. Another test says what the
//! rounding costs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;
mod xmx_support;

use axe::device::Buffer;
use axe::ops::{
    Activation, Finish, Format, Output, ROW_MULTIPLE, RowInput, STRIDE_MULTIPLE, TILE, XmxTerms,
    prepare_reference, round_up, xmx_matmul_work, xmx_slices,
};
use ops_support::*;
use proptest::prelude::*;
use xmx_support::*;

/// A product of rows and a matrix.
#[derive(Debug, Clone)]
struct Product {
    outputs: usize,
    columns: usize,
    rows: usize,
    gap: usize,
    at: usize,
    size: Size,
    norm: bool,
    branch: bool,
    finish: usize,
    seed: u64,
}

const FINISHES: usize = 6;

impl Product {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let step = if format.block_codes() == 1 { 1 } else { format.block_codes().max(32) };
        let blocks = (if step == 256 { 2 } else { 320 / step }).max(1);
        let rows = prop_oneof![1..=8usize, 9..=16usize, 17..=32usize, 33..=70usize];
        let shape = (1..=90usize, 1..=blocks, rows, 0..=2usize, 0..=2usize);
        let sizes = prop_oneof![Just(Size::Plain), Just(Size::Wide), Just(Size::Sparse)];
        (shape, sizes, any::<(bool, bool)>(), 0..FINISHES, any::<u64>()).prop_map(
            move |((outputs, blocks, rows, gap, at), size, (norm, branch), finish, seed)| Self {
                outputs,
                columns: blocks * step,
                rows,
                gap: gap * 4,
                at: at * 4,
                size,
                norm,
                branch,
                finish,
                seed,
            },
        )
    }

    fn finish<'a>(&self, other: &'a Buffer) -> Finish<'a> {
        match self.finish {
            0 => Finish::Store,
            1 => Finish::Add(other),
            2 => Finish::Gated(Activation::Silu),
            3 => Finish::Gated(Activation::GeluTanh),
            4 => Finish::GatedWith(Activation::Silu, other),
            _ => Finish::GatedWith(Activation::GeluTanh, other),
        }
    }

    fn gated(&self) -> bool {
        matches!(self.finish, 2 | 3)
    }
}

fn holds(bench: &Bench, format: Format, terms: XmxTerms, case: &Product) -> Result<(), TestCaseError> {
    let mut random = Random(case.seed);
    let weights = Weights::new(format, case.outputs, case.columns, &mut random);
    let matrix = bench.matrix(format, &weights.tiles, case.outputs, case.columns);
    let stride = round_up(case.columns, STRIDE_MULTIPLE);
    let mut rows = |largest: f32| -> Vec<f32> {
        let mut values = vec![0.0; case.rows * stride];
        for row in values.chunks_exact_mut(stride) {
            row[..case.columns].fill_with(|| case.size.take(&mut random, largest));
        }
        values
    };
    let (x, branch) = (rows(8.0), rows(8.0));
    let mut norm = || {
        let mut weight = vec![0.0; stride];
        weight[..case.columns].fill_with(|| random.unit() + 1.5);
        weight
    };
    let (branch_norm, input_norm) = (norm(), norm());
    let buffers = [&x, &branch, &branch_norm, &input_norm].map(|values| upload(&bench.device, values));
    let new_rows = poisoned(&bench.device, case.rows * stride);
    let input = RowInput {
        rows: &buffers[0],
        at: 0,
        branch: case.branch.then_some((&buffers[1], &buffers[2], &new_rows)),
        norm: case.norm.then_some(&buffers[3]),
        n: case.columns,
        stride,
        epsilon: EPSILON,
    };
    let width = round_up(case.outputs, ROW_MULTIPLE) / if case.gated() { 2 } else { 1 };
    let out_stride = width + case.gap;
    let values = case.at + case.rows * out_stride + GUARD;
    let y = poisoned(&bench.device, values);
    let other: Vec<f32> = (0..values).map(|_| random.unit()).collect();
    let other_buffer = upload(&bench.device, &other);
    let ready = bench.rows(case.rows, case.columns, terms);
    let output = Output { rows: &y, at: case.at, stride: out_stride };
    for launch in [
        bench.xmx.prepare(&bench.device, &input, case.rows, &ready).unwrap(),
        bench
            .xmx
            .matmul(&bench.device, &matrix, &ready, case.rows, case.finish(&other_buffer), &output)
            .unwrap(),
    ] {
        bench.device.enqueue(&launch).unwrap();
    }
    let found = download(&bench.device, &y);
    prop_assert!(is_poison(&found[..case.at]), "what stands before the output was overwritten");
    prop_assert!(is_poison(&found[case.at + case.rows * out_stride..]), "what stands behind was overwritten");
    let stored = if case.branch { download(&bench.device, &new_rows) } else { x.clone() };
    for r in 0..case.rows {
        let at = case.at + r * out_stride;
        let line = &found[at..at + out_stride];
        prop_assert!(is_poison(&line[width..]), "the gap behind row {r} was overwritten");
        // The row as the kernel has it: its norm is f32's, so what is rounded is rebuilt from what it stored.
        let row = &x[r * stride..][..case.columns];
        let (sum, prepared) = prepare_reference(
            &f64s(row),
            case.branch.then_some((
                &f64s(&branch[r * stride..][..case.columns])[..],
                &f64s(&branch_norm[..case.columns])[..],
            )),
            case.norm.then_some(&f64s(&input_norm[..case.columns])[..]),
            f64::from(EPSILON),
        );
        if case.branch {
            for (k, (&found, &expected)) in stored[r * stride..].iter().zip(&sum).enumerate() {
                let size = expected.abs() + f64::from(row[k].abs());
                prop_assert!(
                    (f64::from(found) - expected).abs() <= 2e-6 * size + DENORMAL,
                    "new row {r}, column {k}: {found}, {expected} expected"
                );
            }
        }
        let rounded = round_row(&prepared, terms);
        // Norms and branches are of f32: a few units of the row's largest, then perhaps another f16.
        let rough = if terms == XmxTerms::One { 2f64.powi(-10) } else { 2f64.powi(-20) };
        let slack = if case.norm || case.branch { rough } else { 0.0 };
        let products: Vec<Bounded> =
            (0..case.outputs).map(|n| product(format, &weights, n, case.columns, &rounded, slack)).collect();
        let lane = |tile: usize, lane: usize| products.get(tile * TILE + lane).copied().unwrap_or((0.0, 0.0));
        let kind = |silu: bool| if silu { Activation::Silu } else { Activation::GeluTanh };
        let expected: Vec<Bounded> = (0..width)
            .map(|i| {
                let beside = || (f64::from(other[at + i]), 0.0);
                match case.finish {
                    0 => lane(i / TILE, i % TILE),
                    1 => {
                        let (value, off) = lane(i / TILE, i % TILE);
                        (value + beside().0, off + 2.0 * ULP * (value + beside().0).abs())
                    }
                    2 | 3 => {
                        let gate = activated(kind(case.finish == 2), lane(i / TILE * 2, i % TILE));
                        times(gate, lane(i / TILE * 2 + 1, i % TILE))
                    }
                    _ => times(activated(kind(case.finish == 4), beside()), lane(i / TILE, i % TILE)),
                }
            })
            .collect();
        agree(&format!("{} {:?}", format.name(), case), r, &line[..width], &expected)?;
    }
    Ok(())
}

fn every_case(format: Format, terms: XmxTerms) {
    let Some(bench) = bench() else { return };
    check(12, &Product::strategy(format), |case| holds(&bench, format, terms, &case));
}

#[test]
fn products_of_w4() {
    every_case(Format::W4, XmxTerms::One);
}

#[test]
fn products_of_q4_0() {
    every_case(Format::Q4_0, XmxTerms::One);
}

#[test]
fn products_of_q4_1() {
    every_case(Format::Q4_1, XmxTerms::One);
}

#[test]
fn products_of_q4_k() {
    every_case(Format::Q4K, XmxTerms::One);
}

#[test]
fn products_of_q8_0() {
    every_case(Format::Q8_0, XmxTerms::One);
}

#[test]
fn products_of_q2_k() {
    every_case(Format::Q2K, XmxTerms::One);
}

#[test]
fn products_of_q3_k() {
    every_case(Format::Q3K, XmxTerms::One);
}

#[test]
fn products_of_q5_0() {
    every_case(Format::Q5_0, XmxTerms::One);
}

#[test]
fn products_of_q5_1() {
    every_case(Format::Q5_1, XmxTerms::One);
}

#[test]
fn products_of_q5_k() {
    every_case(Format::Q5K, XmxTerms::One);
}

#[test]
fn products_of_q6_k() {
    every_case(Format::Q6K, XmxTerms::One);
}

#[test]
fn products_of_iq4_nl() {
    every_case(Format::Iq4Nl, XmxTerms::One);
}

#[test]
fn products_of_iq4_xs() {
    every_case(Format::Iq4Xs, XmxTerms::One);
}

#[test]
fn products_of_mxfp4() {
    every_case(Format::Mxfp4, XmxTerms::One);
}

#[test]
fn products_of_tq2_0() {
    every_case(Format::Tq2, XmxTerms::One);
}

#[test]
fn products_of_f16() {
    every_case(Format::F16, XmxTerms::One);
}

#[test]
fn products_of_bf16() {
    every_case(Format::Bf16, XmxTerms::One);
}

#[test]
fn products_of_two_terms() {
    for format in [Format::Q4K, Format::F16] {
        every_case(format, XmxTerms::Two);
    }
}

/// The same rows alone, a few at a time and all together: `narrow` of each size and `wide`, with several slices.
#[test]
fn a_rows_bits_do_not_depend_on_the_rows_of_a_launch() {
    let Some(bench) = bench() else { return };
    let one = FORMATS.map(|format| (format, XmxTerms::One));
    for (format, terms) in one.into_iter().chain([(Format::Q4K, XmxTerms::Two)]) {
        let (outputs, columns, most) = (70, 768, 67);
        assert!(xmx_slices(format, outputs, columns) > 1, "{}: one slice proves nothing", format.name());
        let mut random = Random(7);
        let weights = Weights::new(format, outputs, columns, &mut random);
        let matrix = bench.matrix(format, &weights.tiles, outputs, columns);
        let stride = round_up(columns, STRIDE_MULTIPLE);
        let x: Vec<f32> = (0..most * stride).map(|_| random.wide(-3.0, 1.0)).collect();
        let width = round_up(outputs, ROW_MULTIPLE);
        let run = |first: usize, rows: usize| -> Vec<f32> {
            let buffer = upload(&bench.device, &x[first * stride..][..rows * stride]);
            let input = RowInput {
                rows: &buffer,
                at: 0,
                branch: None,
                norm: None,
                n: columns,
                stride,
                epsilon: EPSILON,
            };
            let y = poisoned(&bench.device, rows * width);
            let ready = bench.rows(rows, columns, terms);
            let output = Output { rows: &y, at: 0, stride: width };
            bench.device.enqueue(&bench.xmx.prepare(&bench.device, &input, rows, &ready).unwrap()).unwrap();
            let launch =
                bench.xmx.matmul(&bench.device, &matrix, &ready, rows, Finish::Store, &output).unwrap();
            bench.device.enqueue(&launch).unwrap();
            download(&bench.device, &y)
        };
        let all = run(0, most);
        for (first, rows) in
            [(0, 1), (66, 1), (5, 2), (3, 8), (10, 9), (20, 16), (30, 17), (1, 32), (34, 33), (0, 65)]
        {
            assert!(
                same_bits(&run(first, rows), &all[first * width..][..rows * width]),
                "{}: rows {first} to {} alone have other bits than among {most}",
                format.name(),
                first + rows
            );
        }
    }
}

/// What eleven bits of an activation cost a product, beside exact activations: about 2e-4 of its size, where bf16 would lose
/// eight times as much; and what is left of that with 22 bits.
#[test]
fn rounding_activations_costs_what_it_should() {
    let Some(bench) = bench() else { return };
    let one = FORMATS.map(|format| (format, XmxTerms::One, 5e-5..3e-4));
    let two = [Format::Q4K, Format::F16].map(|format| (format, XmxTerms::Two, 0.0..1e-6));
    for (format, terms, bounds) in one.into_iter().chain(two) {
        let (outputs, columns, rows) = (64, 1024, 4);
        let mut random = Random(11);
        let weights = Weights::new(format, outputs, columns, &mut random);
        let matrix = bench.matrix(format, &weights.tiles, outputs, columns);
        let x: Vec<f32> = (0..rows * columns).map(|_| (0..6).map(|_| random.unit()).sum()).collect();
        let buffer = upload(&bench.device, &x);
        let input = RowInput {
            rows: &buffer,
            at: 0,
            branch: None,
            norm: None,
            n: columns,
            stride: columns,
            epsilon: 0.0,
        };
        let y = poisoned(&bench.device, rows * outputs);
        let ready = bench.rows(rows, columns, terms);
        let output = Output { rows: &y, at: 0, stride: outputs };
        bench.device.enqueue(&bench.xmx.prepare(&bench.device, &input, rows, &ready).unwrap()).unwrap();
        let launch = bench.xmx.matmul(&bench.device, &matrix, &ready, rows, Finish::Store, &output).unwrap();
        bench.device.enqueue(&launch).unwrap();
        let (mut off, mut size) = (0.0, 0.0);
        for (i, &found) in download(&bench.device, &y).iter().enumerate() {
            let (r, n) = (i / outputs, i % outputs);
            let exact: f64 =
                (0..columns).map(|k| weights.values[n * columns + k] * f64::from(x[r * columns + k])).sum();
            off += (f64::from(found) - exact).powi(2);
            size += exact * exact;
        }
        let relative = (off / size).sqrt();
        println!("{}, {terms:?}: {relative:.2e}", format.name());
        assert!(bounds.contains(&relative), "{}: {relative:e}", format.name());
    }
}

/// The cost model counts the bytes of the buffers that a launch is given, and nothing else that matters.
#[test]
fn counted_bytes_are_those_of_the_buffers() {
    let Some(bench) = bench() else { return };
    let formats =
        FORMATS.map(|format| (format, XmxTerms::One)).into_iter().chain([(Format::Q4K, XmxTerms::Two)]);
    for (format, terms) in formats {
        for rows in [1, 16, 40, 256] {
            let (outputs, columns) = (96, 512);
            let tiles = vec![0; format.matrix_bytes(outputs, columns)];
            let matrix = bench.matrix(format, &tiles, outputs, columns);
            let ready = bench.rows(rows, columns, terms);
            let [values, sums, factors] = ready.buffers().map(|buffer| buffer.size());
            let touched = matrix.buffer.size() + values + rows * outputs * 4;
            let (_, work) = xmx_matmul_work(matrix.format, terms, outputs, columns, rows);
            assert_eq!(work.bytes, touched as u64, "{}, {rows} rows", format.name());
            // Sums and factors are left out, which are little where rows are many.
            assert!(rows < 32 || (sums + factors) * 8 < values, "{sums} and {factors} beside {values}");
            assert_eq!(work.operations, (2 * rows * outputs * columns) as u64);
        }
    }
}
