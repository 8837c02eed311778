//! Products of experts of the `xmx` family against f64: every format, odd numbers of experts, rows and columns, outputs among
//! poison that must survive; and the same bits of a row whatever other rows go to its experts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;
mod xmx_support;

use axe::device::Purpose;
use axe::ops::{
    Activation, Experts, Format, Kernels, Matrix, ROW_MULTIPLE, Routing, RowInput, STRIDE_MULTIPLE, TILE,
    XmxTerms, round_up, xmx_expert_work, xmx_experts_work,
};
use ops_support::*;
use proptest::prelude::*;
use xmx_support::*;

#[derive(Debug, Clone)]
struct Case {
    experts: usize,
    top: usize,
    rows: usize,
    hidden: usize,
    inner: usize,
    silu: bool,
    /// Most rows go to the first experts, more of them than a sub-group takes at once.
    skewed: bool,
    seed: u64,
}

impl Case {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let step = if format.block_codes() == 1 { 1 } else { format.block_codes().max(32) };
        let most = (160 / step).max(1);
        let shape = (1..=6usize, 1..=3usize, 1..=48usize, 1..=most, 1..=most);
        (shape, any::<(bool, bool)>(), any::<u64>()).prop_map(
            move |((experts, top, rows, hidden, inner), (silu, skewed), seed)| Self {
                experts,
                top: top.min(experts),
                rows,
                hidden: hidden * step,
                inner: inner * step,
                silu,
                skewed,
                seed,
            },
        )
    }

    fn activation(&self) -> Activation {
        if self.silu { Activation::Silu } else { Activation::GeluTanh }
    }
}

struct Mixture {
    case: Case,
    format: Format,
    terms: XmxTerms,
    gate_up: Experts,
    down: Experts,
    /// Gate, up and down of each expert.
    weights: Vec<[Weights; 3]>,
    scores: Vec<f32>,
    x: Vec<f32>,
}

/// What a pass made: the experts of each row, and `[rows][top][hidden]`.
struct Passed {
    chosen: Vec<usize>,
    out: Vec<f32>,
}

impl Mixture {
    fn new(bench: &Bench, format: Format, terms: XmxTerms, case: &Case) -> Self {
        let mut random = Random(case.seed);
        let (hidden, inner) = (case.hidden, case.inner);
        let (mut all_gate_up, mut all_down, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..case.experts {
            let mut made = |rows, columns| Weights::new(format, rows, columns, &mut random);
            let (gate, up, down) = (made(inner, hidden), made(inner, hidden), made(hidden, inner));
            let size = format.tile_bytes(hidden);
            for (gate, up) in gate.tiles.chunks(size).zip(up.tiles.chunks(size)).take(inner.div_ceil(TILE)) {
                all_gate_up.extend(gate);
                all_gate_up.extend(up);
            }
            all_down.extend(&down.tiles);
            weights.push([gate, up, down]);
        }
        let experts = case.experts;
        let gate_up = bench.matrix(format, &all_gate_up, experts * 2 * round_up(inner, TILE), hidden);
        let down = bench.matrix(format, &all_down, experts * round_up(hidden, ROW_MULTIPLE), inner);
        let scores = (0..case.rows * experts)
            .map(|i| random.unit() * 4.0 - if case.skewed { (i % experts) as f32 * 4.0 } else { 0.0 })
            .collect();
        let stride = round_up(hidden, STRIDE_MULTIPLE);
        let x = (0..case.rows * stride)
            .map(|i| if i % stride < hidden { random.unit() * 0.05 } else { 0.0 })
            .collect();
        let experts_of = |matrix: Matrix, outputs| Experts { matrix, experts, outputs };
        Self {
            case: case.clone(),
            format,
            terms,
            gate_up: experts_of(gate_up, inner),
            down: experts_of(down, hidden),
            weights,
            scores,
            x,
        }
    }

    /// Rows `first..first + rows` in one pass.
    fn run(&self, bench: &Bench, first: usize, rows: usize) -> Result<Passed, TestCaseError> {
        let (case, device) = (&self.case, &bench.device);
        let (hidden, slots) = (case.hidden, rows * case.top);
        let stride = round_up(hidden, STRIDE_MULTIPLE);
        // The choice is made by kernels of the other family, which any device runs.
        let kernels = Kernels::new(device).unwrap();
        let routing = Routing::new(device, case.experts, case.top, rows).unwrap();
        let scores = upload(device, &self.scores[first * case.experts..][..rows * case.experts]);
        let scales = upload(device, &vec![1.0; case.experts]);
        let chosen = device.alloc(Purpose::Scratch, slots * 4).unwrap();
        let x = upload(device, &self.x[first * stride..][..rows * stride]);
        let input =
            RowInput { rows: &x, at: 0, branch: None, norm: None, n: hidden, stride, epsilon: EPSILON };
        let (ready, inner) =
            (bench.rows(slots, hidden, self.terms), bench.rows(slots, case.inner, self.terms));
        let width = round_up(hidden, ROW_MULTIPLE);
        let out_stride = width + 4;
        let out = poisoned(device, slots * out_stride + GUARD);
        let (xmx, activation) = (&bench.xmx, case.activation());
        bench.run([
            kernels.route(device, &scores, case.experts, &scales, &chosen, &routing, rows).unwrap(),
            xmx.prepare_for_experts(device, &input, &chosen, &routing, rows, &ready).unwrap(),
            xmx.expert_gate_up(device, &self.gate_up, 64, activation, &routing, rows, &ready, &inner)
                .unwrap(),
        ]);
        bench.run(xmx.sum_inner(device, &self.down, &routing, rows, &inner).unwrap());
        bench.run([xmx.expert_down(device, &self.down, &routing, rows, &inner, &out, out_stride).unwrap()]);
        let by_slot = download(device, &out);
        prop_assert!(is_poison(&by_slot[slots * out_stride..]), "values behind the last slot are written");
        let chosen: Vec<usize> =
            download(device, &chosen)[..slots].iter().map(|v| v.to_bits() as usize).collect();
        // The stable sort by expert, told anew.
        let mut order: Vec<usize> = (0..slots).collect();
        order.sort_by_key(|&i| chosen[i]);
        let mut by_row = vec![0f32; slots * hidden];
        for (slot, &i) in order.iter().enumerate() {
            let line = &by_slot[slot * out_stride..][..out_stride];
            prop_assert!(is_poison(&line[width..]), "values behind slot {} are written", slot);
            by_row[i * hidden..][..hidden].copy_from_slice(&line[..hidden]);
        }
        Ok(Passed { chosen, out: by_row })
    }

    /// What expert `e` makes of row `r`, and how far it may be off.
    fn expected(&self, r: usize, e: usize) -> Vec<Bounded> {
        let case = &self.case;
        let stride = round_up(case.hidden, STRIDE_MULTIPLE);
        let row = round_row(&f64s(&self.x[r * stride..][..case.hidden]), self.terms);
        let [gate, up, down] = &self.weights[e];
        let inner: Vec<Bounded> = (0..case.inner)
            .map(|n| {
                let one = |weights| product(self.format, weights, n, case.hidden, &row, 0.0);
                let (value, off) = times(activated(case.activation(), one(gate)), one(up));
                // Rounded to f16 after a division by 16.
                let lost = if self.terms == XmxTerms::One { 2f64.powi(-11) } else { 2f64.powi(-22) };
                (value, off + value.abs() * lost + 2f64.powi(-21))
            })
            .collect();
        let values: Vec<f64> = inner.iter().map(|&(value, _)| value).collect();
        (0..case.hidden)
            .map(|n| {
                let (value, off) = product(self.format, down, n, case.inner, &values, 0.0);
                let carried: f64 =
                    (0..case.inner).map(|k| down.values[n * case.inner + k].abs() * inner[k].1).sum();
                (value, off + carried)
            })
            .collect()
    }
}

fn holds(bench: &Bench, format: Format, terms: XmxTerms, case: &Case) -> Result<(), TestCaseError> {
    let mixture = Mixture::new(bench, format, terms, case);
    let passed = mixture.run(bench, 0, case.rows)?;
    for (i, &e) in passed.chosen.iter().enumerate() {
        let what = format!("{} {case:?}, expert {e}", format.name());
        agree(
            &what,
            i / case.top,
            &passed.out[i * case.hidden..][..case.hidden],
            &mixture.expected(i / case.top, e),
        )?;
    }
    // A few rows alone: other slots, other blocks, fewer rows in each.
    let (first, rows) = (case.rows / 3, case.rows.div_ceil(4));
    let alone = mixture.run(bench, first, rows)?;
    let same = &passed.out[first * case.top * case.hidden..][..rows * case.top * case.hidden];
    prop_assert!(same_bits(&alone.out, same), "{:?}: rows alone have other bits", case);
    Ok(())
}

fn every_case(format: Format, terms: XmxTerms) {
    let Some(bench) = bench() else { return };
    check(8, &Case::strategy(format), |case| holds(&bench, format, terms, &case));
    // All numbers of blocks of 8 in one expert, and more than a sub-group takes at once.
    for rows in [7, 16, 24, 32, 57] {
        let columns = format.block_codes().max(32);
        let case = Case {
            experts: 1,
            top: 1,
            rows,
            hidden: columns,
            inner: columns,
            silu: false,
            skewed: false,
            seed: 3,
        };
        holds(&bench, format, terms, &case).unwrap();
    }
}

#[test]
fn experts_of_w4() {
    every_case(Format::W4, XmxTerms::One);
}

#[test]
fn experts_of_q4_0() {
    every_case(Format::Q4_0, XmxTerms::One);
}

#[test]
fn experts_of_q4_1() {
    every_case(Format::Q4_1, XmxTerms::One);
}

#[test]
fn experts_of_q4_k() {
    every_case(Format::Q4K, XmxTerms::One);
}

#[test]
fn experts_of_q5_k() {
    every_case(Format::Q5K, XmxTerms::One);
}

#[test]
fn experts_of_q6_k() {
    every_case(Format::Q6K, XmxTerms::One);
}

#[test]
fn experts_of_q8_0() {
    every_case(Format::Q8_0, XmxTerms::One);
}

#[test]
fn experts_of_f16() {
    every_case(Format::F16, XmxTerms::One);
}

#[test]
fn experts_of_two_terms() {
    for format in [Format::W4, Format::Q4_1] {
        every_case(format, XmxTerms::Two);
    }
}

/// Every expert has some rows here, so all of them are read.
#[test]
fn counted_bytes_are_those_of_the_buffers() {
    const EXPERTS: usize = 8;
    const TOP: usize = 2;
    let Some(bench) = bench() else { return };
    let (device, xmx) = (&bench.device, &bench.xmx);
    let (hidden, inner, rows) = (1024, 512, 128);
    let slots = rows * TOP;
    for (format, terms) in
        [(Format::W4, XmxTerms::One), (Format::Q4K, XmxTerms::Two), (Format::Q8_0, XmxTerms::Two)]
    {
        let made = |rows_each: usize, columns: usize, outputs: usize| {
            let all = EXPERTS * rows_each;
            let matrix = bench.matrix(format, &vec![0; format.matrix_bytes(all, columns)], all, columns);
            Experts { matrix, experts: EXPERTS, outputs }
        };
        let (gate_up, down) = (made(2 * inner, hidden, inner), made(hidden, inner, hidden));
        let routing = Routing::new(device, EXPERTS, TOP, rows).unwrap();
        let (ready, inside) = (bench.rows(slots, hidden, terms), bench.rows(slots, inner, terms));
        let out = poisoned(device, slots * hidden);
        let silu = Activation::Silu;
        let first = xmx.expert_gate_up(device, &gate_up, 64, silu, &routing, rows, &ready, &inside).unwrap();
        let second = xmx.expert_down(device, &down, &routing, rows, &inside, &out, hidden).unwrap();
        for (what, launch, shape) in
            [("gate and up", &first, [2 * inner, hidden]), ("down", &second, [hidden, inner])]
        {
            let gate_up = what != "down";
            let each = xmx_expert_work(format, terms, shape, 64, gate_up, slots / EXPERTS);
            let what = format!("{} {what}", format.name());
            counts_what_is_touched(&what, EXPERTS as u64 * each[0].bytes, launch);
            // By chance nearly all have some.
            let expected = xmx_experts_work(format, terms, shape, 64, gate_up, [EXPERTS, TOP, rows]);
            counts_what_is_touched(&what, expected[0].bytes, launch);
        }
    }
}
