//! The head of the `xmx` family against f64: odd sizes, ties, barred ids, numbers that are not finite, and the same bits of a
//! row whatever other rows there are. The table has rows past the vocabulary, which take no part.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;
mod xmx_support;

use axe::ops::{
    Format, HeadOptions, HeadRow, HeadRun, Matrix, RowInput, STRIDE_MULTIPLE, XmxHeadState, XmxTerms,
    head_noise, head_reference, round_up, xmx_head_work,
};
use ops_support::*;
use proptest::prelude::*;
use xmx_support::*;

const SEED: u64 = 0x0123_4567_89ab_cdef;

#[derive(Debug, Clone)]
struct Case {
    vocabulary: usize,
    /// Rows of the table that are no tokens.
    beyond: usize,
    hidden: usize,
    rows: usize,
    softcap: f32,
    temperature: f32,
    greedy: bool,
    /// Every row of the table stands there several times.
    ties: bool,
    seed: u64,
}

impl Case {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let step: usize = if format.block_codes() == 1 { 1 } else { 32 };
        // Above 8192 tokens, sub-groups have more than one pair of tiles.
        let vocabulary = prop_oneof![1..=70usize, 200..=900usize, 8300..=9000usize];
        let shape = (vocabulary, 0..=40usize, 1..=(64 / step), 1..=70usize);
        (shape, prop_oneof![Just(0.0f32), Just(30.0)], 0.3..1.5f32, any::<(bool, bool)>(), any::<u64>())
            .prop_map(
                move |((vocabulary, beyond, hidden, rows), softcap, temperature, (greedy, ties), seed)| {
                    Self {
                        vocabulary,
                        beyond,
                        hidden: hidden * step,
                        rows: if vocabulary > 1000 { rows.min(34) } else { rows },
                        softcap,
                        temperature,
                        greedy,
                        ties,
                        seed,
                    }
                },
            )
    }

    fn run<'a>(&self, barred: &'a [u32]) -> HeadRun<'a> {
        let (temperature, greedy) = (self.temperature, self.greedy);
        HeadRun { temperature, seed: SEED, canvas: 3, step: 5, greedy, barred, soft: false }
    }
}

struct Head {
    case: Case,
    terms: XmxTerms,
    table: Matrix,
    /// `[vocabulary][hidden]`.
    values: Vec<f64>,
    x: Vec<f32>,
}

impl Head {
    fn new(bench: &Bench, format: Format, terms: XmxTerms, case: &Case) -> Self {
        let mut random = Random(case.seed);
        let rows = case.vocabulary + case.beyond;
        let mut weights = Weights::new(format, rows, case.hidden, &mut random);
        if case.ties {
            // The first tile again and again.
            let size = format.tile_bytes(case.hidden);
            let (first, rest) = weights.tiles.split_at_mut(size);
            for tile in rest.chunks_mut(size) {
                tile.copy_from_slice(first);
            }
            for row in 16..rows {
                weights
                    .values
                    .copy_within(row % 16 * case.hidden..(row % 16 + 1) * case.hidden, row * case.hidden);
            }
        }
        let stride = round_up(case.hidden, STRIDE_MULTIPLE);
        let x = (0..case.rows * stride)
            .map(|i| if i % stride < case.hidden { random.unit() * 2.0 } else { 0.0 })
            .collect();
        let table = bench.matrix(format, &weights.tiles, rows, case.hidden);
        Self { case: case.clone(), terms, table, values: weights.values, x }
    }

    fn passed(&self, bench: &Bench, rows: usize, run: &HeadRun<'_>) -> Vec<HeadRow> {
        let (case, device) = (&self.case, &bench.device);
        let stride = round_up(case.hidden, STRIDE_MULTIPLE);
        let x = upload(device, &self.x[..rows * stride]);
        let input =
            RowInput { rows: &x, at: 0, branch: None, norm: None, n: case.hidden, stride, epsilon: EPSILON };
        let ready = bench.rows(rows, case.hidden, self.terms);
        let state = XmxHeadState::new(device, rows, case.hidden).unwrap();
        device.fill(&state.state.results, POISON).unwrap();
        let options = HeadOptions { softcap: case.softcap, vocabulary: case.vocabulary, scale: 1.0 };
        let mut launches =
            bench.xmx.streaming_head(device, &self.table, &ready, rows, &options, &state).unwrap();
        run.set(device, &mut launches, &state.state).unwrap();
        bench.run([bench.xmx.prepare(device, &input, rows, &ready).unwrap()]);
        bench.run(launches);
        state.state.read(device, rows).unwrap()
    }

    /// Processed logits of a row.
    fn logits(&self, r: usize) -> Vec<f64> {
        let (hidden, stride) = (self.case.hidden, round_up(self.case.hidden, STRIDE_MULTIPLE));
        let row = round_row(&f64s(&self.x[r * stride..][..hidden]), self.terms);
        let cap = f64::from(self.case.softcap);
        self.values
            .chunks(hidden)
            .take(self.case.vocabulary)
            .map(|weights| {
                let x: f64 = weights.iter().zip(&row).map(|(w, x)| w * x).sum();
                (if cap > 0.0 { cap * (x / cap).tanh() } else { x }) / f64::from(self.case.temperature)
            })
            .collect()
    }
}

fn holds(bench: &Bench, format: Format, terms: XmxTerms, case: &Case) -> Result<(), TestCaseError> {
    let head = Head::new(bench, format, terms, case);
    let barred = [0, case.vocabulary as u32 / 2];
    let barred = if case.vocabulary > 2 { &barred[..] } else { &[] };
    let run = case.run(barred);
    let found = head.passed(bench, case.rows, &run);
    for (r, found) in found.iter().enumerate() {
        let logits = head.logits(r);
        let reference = head_reference(&logits, 0, |_, _| 0.0);
        let largest = logits.iter().fold(1f64, |largest, l| largest.max(l.abs()));
        let off = 1e-5 * largest;
        prop_assert_eq!(found.bad, 0, "{:?}, row {}", case, r);
        prop_assert!(
            (f64::from(found.peak) - reference.peak).abs() <= off,
            "{case:?}, row {r}: {found:?}, {}",
            reference.peak
        );
        let entropy = (f64::from(found.entropy) - reference.entropy).abs();
        prop_assert!(
            entropy <= 20.0 * off,
            "{case:?}, row {r}: {found:?}, an entropy of {}",
            reference.entropy
        );
        let choose = |noise: &dyn Fn(usize) -> f64| -> (usize, Vec<f64>) {
            let scores: Vec<f64> =
                logits
                    .iter()
                    .enumerate()
                    .map(|(t, l)| {
                        if r == 0 && barred.contains(&(t as u32)) { f64::NEG_INFINITY } else { l + noise(t) }
                    })
                    .collect();
            let mut best = 0;
            for (t, &score) in scores.iter().enumerate() {
                if score > scores[best] {
                    best = t;
                }
            }
            (best, scores)
        };
        let near = |what: &str, token: i32, (best, scores): (usize, Vec<f64>), off: f64| {
            let score = scores.get(token as usize).copied().unwrap_or(f64::NAN);
            prop_assert!(
                scores[best] - score <= off,
                "{case:?}, row {r}: {what} is token {token} with {score}, token {best} has {}",
                scores[best]
            );
            // Of equals the first.
            if case.ties && what == "argmax" && (r != 0 || barred.is_empty()) {
                prop_assert!(
                    token < 16,
                    "{case:?}, row {r}: {what} is token {token}, a copy of {}",
                    token % 16
                );
            }
            Ok(())
        };
        near("argmax", found.argmax, choose(&|_| 0.0), off)?;
        if case.greedy {
            prop_assert_eq!(found.sampled, found.argmax);
        } else {
            let noise = |t: usize| head_noise(SEED, 3, 5, r as u32, t as u32);
            near("sampled", found.sampled, choose(&noise), off + 1e-4)?;
        }
    }
    // Rows alone have the same bits; a row's number is part of its noise, so these are the first ones.
    let alone = head.passed(bench, case.rows.div_ceil(3), &run);
    prop_assert_eq!(&found[..alone.len()], &alone[..], "{:?}: other bits among fewer rows", case);
    Ok(())
}

fn every_case(format: Format, terms: XmxTerms) {
    let Some(bench) = bench() else { return };
    check(10, &Case::strategy(format), |case| holds(&bench, format, terms, &case));
}

#[test]
fn a_head_over_f16() {
    every_case(Format::F16, XmxTerms::One);
}

#[test]
fn a_head_over_q8_0() {
    every_case(Format::Q8_0, XmxTerms::Two);
}

#[test]
fn a_token_that_is_no_number_is_named() {
    let Some(bench) = bench() else { return };
    let case = Case {
        vocabulary: 700,
        beyond: 3,
        hidden: 32,
        rows: 40,
        softcap: 30.0,
        temperature: 1.0,
        greedy: false,
        ties: false,
        seed: 5,
    };
    let mut head = Head::new(&bench, Format::F16, XmxTerms::One, &case);
    let run = case.run(&[]);
    assert!(head.passed(&bench, 40, &run).iter().all(|row| row.bad == 0));
    let stride = round_up(case.hidden, STRIDE_MULTIPLE);
    head.x[35 * stride] = f32::NAN;
    head.x[7 * stride + 3] = f32::INFINITY;
    for (r, row) in head.passed(&bench, 40, &run).iter().enumerate() {
        assert_eq!(row.bad, i32::from(r == 35 || r == 7), "row {r}");
    }
    head.x[35 * stride] = 0.0;
    head.x[7 * stride + 3] = 0.0;
    // Token 450, and one past the vocabulary that is nobody's.
    let mut tiles = vec![0u8; Format::F16.matrix_bytes(703, 32)];
    for token in [450, 640, 701] {
        let tile = &mut tiles[token / 16 * Format::F16.tile_bytes(32)..][..Format::F16.tile_bytes(32)];
        Format::F16.put_numbers(tile, token % 16, &half::f16::NAN.to_le_bytes().repeat(32));
    }
    head.table = bench.matrix(Format::F16, &tiles, 703, 32);
    assert!(head.passed(&bench, 40, &run).iter().all(|row| row.bad == 451));
}

#[test]
fn counted_bytes_are_those_of_the_buffers() {
    let Some(bench) = bench() else { return };
    let (vocabulary, hidden, rows) = (16_384, 1024, 256);
    for (format, terms) in
        [(Format::Q8_0, XmxTerms::One), (Format::F16, XmxTerms::Two), (Format::Q6K, XmxTerms::Two)]
    {
        let table =
            bench.matrix(format, &vec![0; format.matrix_bytes(vocabulary, hidden)], vocabulary, hidden);
        let ready = bench.rows(rows, hidden, terms);
        let state = XmxHeadState::new(&bench.device, rows, hidden).unwrap();
        let options = HeadOptions { softcap: 30.0, vocabulary, scale: 1.0 };
        let launches =
            bench.xmx.streaming_head(&bench.device, &table, &ready, rows, &options, &state).unwrap();
        let work = xmx_head_work(format, terms, vocabulary, hidden, rows);
        counts_what_is_touched(format.name(), work.bytes, &launches[0]);
        assert_eq!(work.operations, (2 * rows * vocabulary * hidden) as u64);
    }
}
