//! Embedding rows and the streaming head against f64, on whatever device is there: odd sizes, every format, ties, barred
//! ids, rows that are not numbers. Outputs lie in poison, and so do the table's rows past the vocabulary.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use axe::device::{Buffer, Device, DeviceOptions, DeviceSelector, Launch, Purpose};
use axe::ops::{
    Family, Format, HeadOptions, HeadRow, HeadRun, HeadState, Kernels, Matrix, ROW_MULTIPLE, RowInput,
    STRIDE_MULTIPLE, Scales, TILE, embed_reference, head_noise, head_reference, round_up, self_test_head,
};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Half a unit in the last place of f32, relative.
const ULP: f64 = f32::EPSILON as f64 / 2.0;
/// A NaN that no kernel makes.
const POISON: u32 = 0x7fc0_dead;

/// The simulator runs a few million instructions a second: fewer and smaller cases there.
fn simulated() -> bool {
    std::env::var("AXE_TEST_PLATFORM").is_ok_and(|platform| platform == "oclgrind")
}

fn flavours() -> Vec<(Device, Kernels)> {
    let device = if simulated() {
        Device::open(&DeviceSelector::default(), &DeviceOptions::default()).unwrap()
    } else {
        support::device()
    };
    support::flavours(&device)
}

/// Runs `test` on the same cases every time.
fn check<S: Strategy>(cases: u32, strategy: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 60, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    if let Err(error) = runner.run(strategy, test) {
        panic!("{error}");
    }
}

/// Numbers for one case, all from its seed (SplitMix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// In [-1, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn upload<T: bytemuck::Pod>(device: &Device, values: &[T]) -> Buffer {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let buffer = device.alloc(Purpose::Scratch, bytes.len()).unwrap();
    device.write(&buffer, 0, bytes).unwrap();
    buffer
}

fn download(device: &Device, buffer: &Buffer) -> Vec<f32> {
    let mut values = vec![0f32; buffer.size() / 4];
    device.read(buffer, 0, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn poisoned(device: &Device, values: usize) -> Buffer {
    let buffer = device.alloc(Purpose::Scratch, values * 4).unwrap();
    device.fill(&buffer, POISON).unwrap();
    buffer
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn is_poison(values: &[f32]) -> bool {
    values.iter().all(|value| value.to_bits() == POISON)
}

fn run(device: &Device, launches: &[Launch]) {
    for launch in launches {
        device.enqueue(launch).unwrap();
    }
    device.finish().unwrap();
}

/// One row of a table, the same for the same seed; a NaN in every weight where `bad`.
fn put_row(format: Format, tile: &mut [u8], lane: usize, columns: usize, seed: u64, bad: bool) {
    let mut random = Random(seed);
    if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
        let elements: Vec<u8> = (0..columns)
            .flat_map(|_| {
                let value = if bad { f32::NAN } else { random.unit() };
                match format {
                    Format::F32 => value.to_le_bytes().to_vec(),
                    Format::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
                    _ => bf16::from_f32(value).to_le_bytes().to_vec(),
                }
            })
            .collect();
        format.put_numbers(tile, lane, &elements);
        return;
    }
    let block = format.block_codes();
    let below = format.codes_below() as usize;
    let small = match format {
        // Numbers up to 127, whose scales are up to 31 where they have any.
        Format::Iq4Xs => 0.0001,
        Format::Iq4Nl => 0.003,
        _ if format.block_groups() == 8 => 0.001,
        _ => 0.02,
    } * 16.0
        / below as f32;
    for first in (0..columns).step_by(block) {
        let codes: Vec<u8> = (0..block).map(|_| random.below(below) as u8).collect();
        let groups: Vec<u8> = (0..16).map(|_| random.below(64) as u8).collect();
        let scale = if bad { f32::NAN } else { random.unit() * small * 4.0 };
        // An exponent is always a number: infinite weights, in place of NaN, by the largest.
        let exponent = if bad { 255 } else { 122 + random.below(4) as u16 };
        format.put_codes(
            tile,
            lane,
            first,
            &codes,
            Scales {
                scale: if format == Format::Mxfp4 { exponent } else { f16::from_f32(scale).to_bits() },
                offset: f16::from_f32(random.unit() * small * 8.0).to_bits(),
                scales: &groups,
                offsets: &groups,
            },
        );
    }
}

#[derive(Debug, Clone)]
struct Case {
    vocabulary: usize,
    /// Rows of the table past the vocabulary; no weight of theirs is a number.
    beyond: usize,
    hidden: usize,
    rows: usize,
    softcap: f32,
    temperature: f32,
    /// Size of what goes in.
    reach: f32,
    /// Every so many tokens one is the same as the first.
    ties: usize,
    seed: u64,
}

impl Case {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let (vocabulary, blocks, rows): (usize, usize, usize) =
            if simulated() { (90, 2, 9) } else { (1000, 9, 70) };
        let hidden = match format {
            Format::F32 | Format::F16 | Format::Bf16 => (1..=blocks * 32).boxed(),
            _ if format.block_codes() == 256 => {
                (1..=if simulated() { 1usize } else { 2 }).prop_map(|n| n * 256).boxed()
            }
            Format::W4 => (1..=blocks / 2).prop_map(|n| n * 64).boxed(),
            _ => (1..=blocks).prop_map(|n| n * 32).boxed(),
        };
        let shape = (17..=vocabulary, 0..40usize, hidden, 1..=rows);
        let how = (
            prop_oneof![Just(0f32), Just(30.0), Just(2.5)],
            prop_oneof![0.05f32..2.0, Just(1.0)],
            prop_oneof![Just(0.1f32), Just(1.0), Just(30.0), Just(1e6), Just(1e30)],
            prop_oneof![Just(usize::MAX), 2..60usize],
            any::<u64>(),
        );
        (shape, how).prop_map(
            |((vocabulary, beyond, hidden, rows), (softcap, temperature, reach, ties, seed))| Self {
                vocabulary,
                beyond,
                hidden,
                rows,
                softcap,
                temperature,
                reach,
                ties,
                seed,
            },
        )
    }
}

/// A table and rows for it on the device.
struct Setup<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    case: Case,
    tiles: Vec<u8>,
    table: Matrix,
    stride: usize,
    x: Vec<f32>,
}

/// What a run of the head leaves.
struct Found {
    rows: Vec<HeadRow>,
    soft: Vec<f32>,
}

impl<'a> Setup<'a> {
    fn new(device: &'a Device, kernels: &'a Kernels, format: Format, case: &Case) -> Self {
        let all = case.vocabulary + case.beyond;
        let size = format.tile_bytes(case.hidden);
        let mut tiles = vec![0u8; format.matrix_bytes(all, case.hidden)];
        for row in 0..all {
            let source = if row % case.ties == case.ties - 1 { 0 } else { row };
            let tile = &mut tiles[row / TILE * size..][..size];
            let seed = case.seed.wrapping_add(source as u64 * 7919);
            put_row(format, tile, row % TILE, case.hidden, seed, row >= case.vocabulary);
        }
        let buffer = device.alloc(Purpose::Weights, tiles.len()).unwrap();
        device.write(&buffer, 0, &tiles).unwrap();
        let table = Matrix { buffer, format, rows: all, columns: case.hidden, family: Family::Vector };
        let stride = round_up(case.hidden, STRIDE_MULTIPLE);
        let mut random = Random(!case.seed);
        let x = (0..case.rows * stride)
            .map(|i| if i % stride < case.hidden { random.unit() * case.reach } else { 0.0 })
            .collect();
        Self { device, kernels, case: case.clone(), tiles, table, stride, x }
    }

    fn options(&self) -> HeadOptions {
        HeadOptions {
            softcap: self.case.softcap,
            vocabulary: self.case.vocabulary,
            scale: (self.case.hidden as f32).sqrt(),
        }
    }

    fn plan(&self) -> HeadRun<'static> {
        HeadRun {
            temperature: self.case.temperature,
            seed: self.case.seed,
            canvas: 3,
            step: 11,
            greedy: false,
            barred: &[],
            soft: true,
        }
    }

    fn packed(&self, first: usize, rows: usize) -> (Buffer, Buffer) {
        let x = upload(self.device, &self.x[first * self.stride..][..rows * self.stride]);
        let products = self.kernels.products();
        let packed = poisoned(self.device, products.packed_values(rows, self.stride));
        let sums = poisoned(self.device, products.sums_values(rows, self.stride));
        let input = RowInput {
            rows: &x,
            at: 0,
            branch: None,
            norm: None,
            n: self.case.hidden,
            stride: self.stride,
            epsilon: 0.0,
        };
        let pack = self.kernels.pack_rows(self.device, &input, rows, Family::Vector, &packed, &sums).unwrap();
        run(self.device, &[pack]);
        (packed, sums)
    }

    /// Rows `first..first + rows` through the head, which has room for some more.
    fn head(&self, first: usize, rows: usize, plan: &HeadRun<'_>, soft: bool) -> Found {
        let (packed, sums) = self.packed(first, rows);
        let state = HeadState::new(self.device, rows + 2, self.case.hidden, soft).unwrap();
        for buffer in [&state.results, &state.soft] {
            self.device.fill(buffer, POISON).unwrap();
        }
        let mut launches = self
            .kernels
            .streaming_head(self.device, &self.table, &packed, &sums, rows, &self.options(), &state)
            .unwrap();
        plan.set(self.device, &mut launches, &state).unwrap();
        run(self.device, &launches);
        let mut soft_rows = download(self.device, &state.soft);
        let results = download(self.device, &state.results);
        assert!(is_poison(&results[rows * 5..]), "results behind the last row are written");
        if soft && plan.soft {
            assert!(is_poison(&soft_rows[rows * self.stride..]), "soft rows behind the last are written");
            soft_rows.truncate(rows * self.stride);
        } else {
            assert!(is_poison(&soft_rows), "soft rows that nobody wants are written");
            soft_rows.clear();
        }
        Found { rows: state.read(self.device, rows).unwrap(), soft: soft_rows }
    }

    /// Soft-capped logits, as the plain kernels make them.
    fn logits(&self, softcap: f32) -> Vec<Vec<f32>> {
        let (packed, sums) = self.packed(0, self.case.rows);
        let stride = round_up(self.table.rows, ROW_MULTIPLE);
        let logits = poisoned(self.device, self.case.rows * stride);
        let launches = self
            .kernels
            .plain_logits(self.device, &self.table, &packed, &sums, self.case.rows, softcap, &logits, stride)
            .unwrap();
        run(self.device, &launches);
        download(self.device, &logits)
            .chunks_exact(stride)
            .map(|row| row[..self.case.vocabulary].to_vec())
            .collect()
    }

    fn weight(&self, token: usize, column: usize) -> f64 {
        let size = self.table.format.tile_bytes(self.case.hidden);
        let tile = &self.tiles[token / TILE * size..][..size];
        f64::from(self.table.format.weight(tile, token % TILE, column))
    }

    /// The soft row against the reference, and whatever else must hold of one.
    fn check_soft(&self, row: usize, processed: &[f64], found: &[f32]) -> Result<(), TestCaseError> {
        let hidden = self.case.hidden;
        let expected = head_reference(processed, hidden, |token, column| self.weight(token, column));
        let scale = f64::from(self.options().scale);
        // Steps of the longest chain of additions, and what rounding a logit's distance does to its weight.
        let steps = (self.case.vocabulary + 120) as f64;
        for (column, &found) in found[..hidden].iter().enumerate() {
            let off: f64 = (0..self.case.vocabulary)
                .map(|token| {
                    let p = expected.probabilities[token];
                    let distance = (expected.peak - processed[token]).min(100.0);
                    p * self.weight(token, column).abs() * (steps + distance) * ULP
                })
                .sum();
            let mean = expected.soft[column];
            prop_assert!(
                (f64::from(found) - mean * scale).abs() <= scale * (off + 1e-12),
                "soft value {} of row {} is {}, the reference says {} (within {})",
                column,
                row,
                found,
                mean * scale,
                off * scale
            );
        }
        prop_assert!(found[hidden..].iter().all(|v| v.to_bits() == 0), "a soft row's padding is not zero");
        Ok(())
    }
}

fn row_bits(row: &HeadRow) -> [i32; 5] {
    bytemuck::cast(*row)
}

/// The first of the largest that may be chosen.
fn argmax(processed: &[f32], barred: &[u32]) -> i32 {
    let mut best = None;
    for (token, &l) in processed.iter().enumerate() {
        if !barred.contains(&(token as u32)) && best.is_none_or(|(_, top)| l > top) {
            best = Some((token, l));
        }
    }
    best.map_or(0, |(token, _)| token as i32)
}

fn head_holds(device: &Device, kernels: &Kernels, format: Format, case: &Case) -> Result<(), TestCaseError> {
    let setup = Setup::new(device, kernels, format, case);
    let plan = setup.plan();
    let found = setup.head(0, case.rows, &plan, true);
    let logits = setup.logits(case.softcap);
    if case.softcap > 0.0 {
        for (raw, capped) in setup.logits(0.0).iter().flatten().zip(logits.iter().flatten()) {
            let cap = f64::from(case.softcap);
            let expected = cap * (f64::from(*raw) / cap).tanh();
            prop_assert!(
                (f64::from(*capped) - expected).abs() <= 12.0 * ULP * expected.abs(),
                "{raw} is capped to {capped}"
            );
        }
    }
    for (row, logits) in logits.iter().enumerate() {
        let processed: Vec<f32> = logits.iter().map(|l| l / case.temperature).collect();
        let result = &found.rows[row];
        prop_assert_eq!(result.bad, 0, "row {}", row);
        prop_assert_eq!(result.argmax, argmax(&processed, &[]), "argmax of row {}", row);
        prop_assert_eq!(result.peak, processed[result.argmax as usize], "peak of row {}", row);

        let wide: Vec<f64> = processed.iter().map(|&l| f64::from(l)).collect();
        let noisy: Vec<f64> = (0..case.vocabulary)
            .map(|token| wide[token] + head_noise(case.seed, 3, 11, row as u32, token as u32))
            .collect();
        let top = noisy.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sampled = noisy.get(result.sampled as usize).copied().unwrap_or(f64::NAN);
        // Noise is up to 23; a sum is rounded once.
        let off = 8.0 * ULP * (top.abs() + 23.0);
        prop_assert!(
            sampled >= top - off,
            "row {}: token {} has {}, not {}",
            row,
            result.sampled,
            sampled,
            top
        );

        let reference = head_reference(&wide, 0, |_, _| 0.0);
        let spread = |power: i32| -> f64 {
            let distance = |l: f64| (reference.peak - l).min(200.0);
            reference.probabilities.iter().zip(&wide).map(|(p, &l)| p * distance(l).powi(power)).sum()
        };
        let steps = (case.vocabulary / 32 + 100) as f64;
        let off = steps * ULP * (1.0 + reference.entropy + spread(1)) + 2.0 * ULP * spread(2);
        prop_assert!(
            (f64::from(result.entropy) - reference.entropy).abs() <= off,
            "entropy of row {} is {}, the reference says {} (within {})",
            row,
            result.entropy,
            reference.entropy,
            off
        );
        prop_assert!(result.entropy >= 0.0);
        if row < 3 || row + 1 == case.rows {
            setup.check_soft(row, &wide, &found.soft[row * setup.stride..][..setup.stride])?;
        }
    }

    // The same bits again, for the first rows alone, without soft rows; other rows keep all but their noise.
    let mut random = Random(case.seed ^ 1);
    let first = 1 + random.below(case.rows);
    let part = setup.head(0, first, &plan, true);
    for row in 0..first {
        prop_assert_eq!(row_bits(&part.rows[row]), row_bits(&found.rows[row]), "{} rows alone", first);
    }
    prop_assert!(same_bits(&part.soft, &found.soft[..first * setup.stride]), "soft of {} rows alone", first);
    let row = random.below(case.rows);
    let one = setup.head(row, 1, &HeadRun { greedy: true, ..plan }, true);
    let expected = HeadRow { sampled: found.rows[row].argmax, ..found.rows[row] };
    prop_assert_eq!(row_bits(&one.rows[0]), row_bits(&expected), "row {} alone", row);
    prop_assert!(
        same_bits(&one.soft, &found.soft[row * setup.stride..][..setup.stride]),
        "row {} alone",
        row
    );
    for (wanted, room) in [(false, true), (true, false)] {
        let without = setup.head(0, case.rows, &HeadRun { soft: wanted, ..plan }, room);
        for (a, b) in without.rows.iter().zip(&found.rows) {
            prop_assert_eq!(row_bits(a), row_bits(b), "without soft rows");
        }
    }

    // The best tokens of row 0 barred.
    let processed: Vec<f32> = logits[0].iter().map(|l| l / case.temperature).collect();
    let mut barred = vec![argmax(&processed, &[]) as u32, found.rows[0].sampled as u32];
    barred.push(argmax(&processed, &barred) as u32);
    let kept = setup.head(0, case.rows, &HeadRun { barred: &barred, ..plan }, true);
    prop_assert_eq!(kept.rows[0].argmax, argmax(&processed, &barred));
    let best = (0..case.vocabulary)
        .filter(|&token| !barred.contains(&(token as u32)))
        .map(|token| f64::from(processed[token]) + head_noise(case.seed, 3, 11, 0, token as u32))
        .fold(f64::NEG_INFINITY, f64::max);
    let sampled = kept.rows[0].sampled;
    prop_assert!(!barred.contains(&(sampled as u32)));
    let value = f64::from(processed[sampled as usize]) + head_noise(case.seed, 3, 11, 0, sampled as u32);
    prop_assert!(value >= best - 8.0 * ULP * (best.abs() + 23.0), "{} for {}", value, best);
    let others = HeadRow { argmax: found.rows[0].argmax, sampled: found.rows[0].sampled, ..kept.rows[0] };
    prop_assert_eq!(row_bits(&others), row_bits(&found.rows[0]), "barring changes the distribution");
    for row in 1..case.rows {
        prop_assert_eq!(
            row_bits(&kept.rows[row]),
            row_bits(&found.rows[row]),
            "row 0's bars reach row {}",
            row
        );
    }
    prop_assert!(same_bits(&kept.soft, &found.soft), "barring changes soft rows");

    // A row that is not a number, and one that is not finite, are told apart from the others.
    let mut setup = setup;
    let wrong = random.below(case.rows);
    setup.x[wrong * setup.stride + random.below(case.hidden)] =
        if random.below(2) == 0 { f32::NAN } else { f32::INFINITY };
    let bad = setup.head(0, case.rows, &plan, true);
    for row in 0..case.rows {
        if row == wrong {
            prop_assert!(bad.rows[row].bad > 0, "a bad row is not seen");
            let known = 0..case.vocabulary as i32;
            prop_assert!(known.contains(&bad.rows[row].argmax) && known.contains(&bad.rows[row].sampled));
        } else {
            prop_assert_eq!(
                row_bits(&bad.rows[row]),
                row_bits(&found.rows[row]),
                "a bad row reaches {}",
                row
            );
        }
    }
    Ok(())
}

#[test]
fn the_head_is_right_whatever_its_shape_and_the_same_however_rows_are_grouped() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            println!("{}", format.name());
            check(if simulated() { 3 } else { 25 }, &Case::strategy(format), |case| {
                head_holds(&device, &kernels, format, &case)
            });
        }
    }
}

#[test]
fn the_heads_self_test_passes_for_every_format() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            self_test_head(&device, &kernels, format).unwrap();
        }
    }
}

fn plain_case(vocabulary: usize, hidden: usize, rows: usize) -> Case {
    Case {
        vocabulary,
        beyond: 7,
        hidden,
        rows,
        softcap: 30.0,
        temperature: 1.0,
        reach: 1.0,
        ties: usize::MAX,
        seed: 5,
    }
}

#[test]
fn a_row_is_the_same_alone_and_in_a_whole_canvas() {
    for (device, kernels) in flavours() {
        let rows = if simulated() { 66 } else { 256 };
        let setup = Setup::new(&device, &kernels, Format::Bf16, &plain_case(333, 70, rows));
        let plan = HeadRun { greedy: true, ..setup.plan() };
        let all = setup.head(0, rows, &plan, true);
        for row in [0, 63, 64, rows - 1] {
            let one = setup.head(row, 1, &plan, true);
            assert_eq!(row_bits(&one.rows[0]), row_bits(&all.rows[row]), "row {row}");
            assert!(same_bits(&one.soft, &all.soft[row * setup.stride..][..setup.stride]), "soft row {row}");
        }
    }
}

#[test]
fn one_bad_weight_is_named_by_its_token() {
    for (device, kernels) in flavours() {
        for (bad_token, value) in [(5usize, f32::NAN), (78, f32::INFINITY), (99, f32::NEG_INFINITY)] {
            let case = plain_case(100, 40, 3);
            let mut setup = Setup::new(&device, &kernels, Format::F32, &case);
            let size = Format::F32.tile_bytes(case.hidden);
            let row = value.to_le_bytes();
            let tile = &mut setup.tiles[bad_token / TILE * size..][..size];
            Format::F32.put_numbers(tile, bad_token % TILE, &row);
            device.write(&setup.table.buffer, 0, &setup.tiles).unwrap();
            for row in setup.head(0, case.rows, &setup.plan(), true).rows {
                assert_eq!(row.bad, 1 + bad_token as i32, "{value}");
            }
        }
    }
}

/// The words of the generator's published test vector, by the reference.
#[test]
fn noise_comes_from_philox() {
    for (i, word) in [0xd16c_fe09u32, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1].into_iter().enumerate() {
        let token = 0x243f_6a88 * 4 + i as u32;
        let found = head_noise(0x299f_31d0_a409_3822, 0x0370_7344, 0x1319_8a2e, 0x85a3_08d3, token);
        let expected = -(-(-(f64::from(word) + 0.5) / 2f64.powi(32)).ln_1p()).ln();
        assert!((found - expected).abs() < 1e-5, "word {i}: {found} for {expected}");
    }
}

/// Tokens drawn over many seeds, canvases, steps and rows come as often as the softmax says.
#[test]
fn samples_follow_the_softmax() {
    const BINS: usize = 20;
    for (device, kernels) in flavours() {
        let rows = if simulated() { 8 } else { 64 };
        let mut case = plain_case(300, 16, rows);
        case.temperature = 0.7;
        let mut setup = Setup::new(&device, &kernels, Format::F32, &case);
        let first = setup.x[..setup.stride].to_vec();
        setup.x = first.repeat(rows);
        let processed: Vec<f64> =
            setup.logits(case.softcap)[0].iter().map(|&l| f64::from(l / case.temperature)).collect();
        let reference = head_reference(&processed, 0, |_, _| 0.0);
        let mut counts = vec![0f64; BINS];
        let mut expected = vec![0f64; BINS];
        let runs = if simulated() { 4 } else { 100 };
        for (token, p) in reference.probabilities.iter().enumerate() {
            expected[token % BINS] += p * (runs * rows) as f64;
        }
        let (packed, sums) = setup.packed(0, rows);
        let state = HeadState::new(&device, rows, case.hidden, false).unwrap();
        let mut launches = kernels
            .streaming_head(&device, &setup.table, &packed, &sums, rows, &setup.options(), &state)
            .unwrap();
        let mut seen = std::collections::HashSet::new();
        for at in 0..runs {
            let plan = HeadRun {
                seed: if at % 3 == 0 { at as u64 } else { (at as u64) << 32 },
                canvas: (at % 5) as u32,
                step: (at % 7) as u32,
                ..setup.plan()
            };
            plan.set(&device, &mut launches, &state).unwrap();
            run(&device, &launches);
            let drawn: Vec<i32> = state.read(&device, rows).unwrap().iter().map(|row| row.sampled).collect();
            for &token in &drawn {
                counts[token as usize % BINS] += 1.0;
            }
            assert!(seen.insert(drawn), "two runs with other counters draw the same");
        }
        let chi: f64 = counts.iter().zip(&expected).map(|(c, e)| (c - e) * (c - e) / e).sum();
        // 19 degrees of freedom: above 60 once in two hundred thousand.
        assert!(chi < 60.0, "chi-square {chi}: {counts:?} for {expected:?}");
    }
}

#[test]
fn embedding_rows_are_the_tables_own() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            let hidden = match format.block_groups() {
                8 => 256,
                _ if format == Format::W4 => 64,
                _ => 96,
            };
            let setup = Setup::new(&device, &kernels, format, &plain_case(75, hidden, 1));
            let ids: Vec<i32> = vec![0, 74, 16, 15, 3, 3, 47, -1, i32::MAX, i32::MIN];
            let (good, stride) = (7, setup.stride);
            let out = poisoned(&device, (ids.len() + 1) * stride);
            let launch = kernels
                .embed(&device, &setup.table, &upload(&device, &ids), ids.len(), 53.0, &out, stride)
                .unwrap();
            run(&device, &[launch]);
            let found = download(&device, &out);
            for (row, &id) in ids[..good].iter().enumerate() {
                let expected = embed_reference(format, &setup.tiles, hidden, id as usize, 53.0);
                assert!(same_bits(&found[row * stride..][..hidden], &expected), "{} id {id}", format.name());
                assert!(found[row * stride + hidden..(row + 1) * stride].iter().all(|&v| v == 0.0));
            }
            assert!(is_poison(&found[ids.len() * stride..]), "rows behind the last are written");
        }
    }
}

#[test]
fn soft_embeddings_of_given_logits_are_those_of_the_head() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            let hidden = match format {
                Format::F32 | Format::F16 | Format::Bf16 => 77,
                _ if format.block_codes() == 256 => 256,
                Format::W4 => 64,
                _ => 96,
            };
            let rows = if simulated() { 5 } else { 9 };
            let mut case = plain_case(if simulated() { 50 } else { 211 }, hidden, rows);
            case.temperature = 0.6;
            let setup = Setup::new(&device, &kernels, format, &case);
            let processed: Vec<Vec<f32>> = setup
                .logits(case.softcap)
                .iter()
                .map(|row| row.iter().map(|l| l / case.temperature).collect())
                .collect();
            let from_stride = round_up(case.vocabulary, TILE);
            let soft = |rows: &[Vec<f32>]| -> Vec<f32> {
                let padded: Vec<f32> = rows
                    .iter()
                    .flat_map(|row| {
                        // Whatever lies past the vocabulary does not count.
                        row.iter().copied().chain(std::iter::repeat(f32::NAN)).take(from_stride)
                    })
                    .collect();
                let logits = upload(&device, &padded);
                let out = poisoned(&device, (rows.len() + 1) * setup.stride);
                let launches = kernels
                    .soft_embedding(
                        &device,
                        &setup.table,
                        &logits,
                        from_stride,
                        rows.len(),
                        &setup.options(),
                        &out,
                        setup.stride,
                    )
                    .unwrap();
                run(&device, &launches);
                let mut found = download(&device, &out);
                assert!(is_poison(&found[rows.len() * setup.stride..]));
                found.truncate(rows.len() * setup.stride);
                found
            };
            let all = soft(&processed);
            let streamed = setup.head(0, rows, &setup.plan(), true);
            for (row, processed) in processed.iter().enumerate() {
                let wide: Vec<f64> = processed.iter().map(|&l| f64::from(l)).collect();
                for found in [&all, &streamed.soft] {
                    setup.check_soft(row, &wide, &found[row * setup.stride..][..setup.stride]).unwrap();
                }
            }
            let one = soft(&processed[rows - 1..]);
            assert!(same_bits(&one, &all[(rows - 1) * setup.stride..]), "{}: a row alone", format.name());
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for (device, kernels) in flavours() {
        let case = plain_case(64, 64, 2);
        let setup = Setup::new(&device, &kernels, Format::F32, &case);
        let (packed, sums) = setup.packed(0, 2);
        let state = HeadState::new(&device, 2, 64, true).unwrap();
        let head = |rows: usize, options: &HeadOptions| {
            kernels.streaming_head(&device, &setup.table, &packed, &sums, rows, options, &state)
        };
        let options = setup.options();
        assert!(head(3, &options).is_err(), "more rows than room");
        assert!(
            head(2, &HeadOptions { vocabulary: 72, ..options }).is_err(),
            "more tokens than rows of the table"
        );
        assert!(head(2, &HeadOptions { softcap: f32::NAN, ..options }).is_err(), "a cap that is no number");
        let mut launches = head(2, &options).unwrap();
        for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let plan = HeadRun { temperature, ..setup.plan() };
            assert!(plan.set(&device, &mut launches, &state).is_err(), "temperature {temperature}");
        }
        let plan = HeadRun { barred: &[0; 65], ..setup.plan() };
        assert!(plan.set(&device, &mut launches, &state).is_err(), "too many barred ids");
        assert!(setup.plan().set(&device, &mut launches[..1], &state).is_err(), "one launch");
        assert!(HeadState::bytes(256, 2816, true) < 64 << 20);
    }
}
