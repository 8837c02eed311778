//! Products of random matrices and attention over random heads against f64, on whatever device is there: odd sizes,
//! every format and finish, values of any size. Every output lies among poison that must survive.
//!
//! Bounds are those of f32 arithmetic on the operands at hand, not constants: an error of a few units in the last
//! place of what was added up fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use ops_support::*;

use axe::device::{Arg, Buffer, Device, Purpose};
use axe::ops::{
    ATTENTION_START, Activation, Attention, Cache, CacheKind, Family, Finish, Format, Kernels,
    MOST_HEAD_SIZE, Matrix, Output, Pairing, Products, ROTATE_START, ROW_MULTIPLE, Rotation, RowInput,
    STRIDE_MULTIPLE, TILE, attention_reference, prepare_reference, round_up,
};
use half::f16;
use std::ops::RangeInclusive;

use proptest::prelude::*;

/// Bits of a cache read back, NaN where nothing was written.
fn same_cache(a: &[Vec<Vec<f32>>], b: &[Vec<Vec<f32>>]) -> bool {
    a.iter().flatten().zip(b.iter().flatten()).all(|(a, b)| same_bits(a, b))
}

/// A product of rows and a matrix.
#[derive(Debug, Clone)]
struct Product {
    outputs: usize,
    columns: usize,
    rows: usize,
    /// Values that an output row is wider than it must be.
    gap: usize,
    /// First value of the output.
    at: usize,
    size: Size,
    norm: bool,
    branch: bool,
    /// Number of the finish.
    finish: usize,
    /// The finish's other operand is the output itself.
    in_place: bool,
    seed: u64,
}

const FINISHES: usize = 6;

impl Product {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let (outputs, rows, blocks): (usize, usize, usize) =
            if simulated() { (40, 9, 3) } else { (150, 70, 12) };
        let columns = match format {
            _ if format.block_codes() == 256 => {
                (1..=if simulated() { 1usize } else { 3 }).prop_map(|n| n * 256).boxed()
            }
            Format::F32 | Format::F16 | Format::Bf16 => (1..=blocks * 32).boxed(),
            _ => (1..=blocks).prop_map(|n| n * 32).boxed(),
        };
        let shape = (1..=outputs, columns, 1..=rows, 0..5usize, 0..40usize);
        let sizes = prop_oneof![Just(Size::Plain), Just(Size::Wide), Just(Size::Sparse)];
        let how = (sizes, any::<bool>(), any::<bool>(), 0..FINISHES, any::<bool>(), any::<u64>());
        (shape, how).prop_map(
            |(
                (outputs, columns, rows, gap, at),
                (size, mut norm, mut branch, mut finish, in_place, seed),
            )| {
                if size == Size::Wide {
                    // Squares of 1e30 and products of two such results are not finite in f32.
                    (norm, branch) = (false, false);
                    finish = [0, 1, 4, 5][finish % 4];
                }
                Self { outputs, columns, rows, gap, at, size, norm, branch, finish, in_place, seed }
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

    /// Values written to an output row: whole pairs of tiles.
    fn width(&self) -> usize {
        round_up(self.outputs, ROW_MULTIPLE) / if self.gated() { 2 } else { 1 }
    }

    fn out_stride(&self) -> usize {
        self.width() + self.gap
    }
}

/// Everything a product needs on the device, and the same in f64.
struct Operands {
    case: Product,
    weights: Weights,
    stride: usize,
    x: Vec<f32>,
    branch: Vec<f32>,
    branch_weight: Vec<f32>,
    norm: Vec<f32>,
    other: Vec<f32>,
    matrix: Matrix,
}

impl Operands {
    fn new(device: &Device, format: Format, case: &Product) -> Self {
        let mut random = Random(case.seed);
        let weights = Weights::new(format, case.outputs, case.columns, &mut random);
        let stride = round_up(case.columns, STRIDE_MULTIPLE) + STRIDE_MULTIPLE * random.below(2);
        let mut padded_rows = |size: Size| -> Vec<f32> {
            (0..case.rows * stride)
                .map(|i| if i % stride < case.columns { size.take(&mut random, 30.0) } else { 0.0 })
                .collect()
        };
        let (x, branch) = (padded_rows(case.size), padded_rows(case.size));
        let mut weight = || -> Vec<f32> {
            (0..stride).map(|i| if i < case.columns { random.unit() * 2.0 } else { 0.0 }).collect()
        };
        let (branch_weight, norm) = (weight(), weight());
        let other = (0..case.rows * case.out_stride() + 2 * GUARD + case.at)
            .map(|_| if case.finish == 1 { case.size.take(&mut random, 30.0) } else { random.unit() * 6.0 })
            .collect();
        let buffer = device.alloc(Purpose::Weights, weights.tiles.len()).unwrap();
        device.write(&buffer, 0, &weights.tiles).unwrap();
        let matrix =
            Matrix { buffer, format, rows: case.outputs, columns: case.columns, family: Family::Vector };
        Self { case: case.clone(), weights, stride, x, branch, branch_weight, norm, other, matrix }
    }

    /// The row with its branch, and each prepared value with its bound.
    fn prepared(&self, row: usize) -> (Vec<Bounded>, Vec<Bounded>) {
        let n = self.case.columns;
        let slice = |values: &[f32]| f64s(&values[row * self.stride..][..n]);
        let (x, branch) = (slice(&self.x), slice(&self.branch));
        let (branch_weight, norm) = (f64s(&self.branch_weight[..n]), f64s(&self.norm[..n]));
        let with_branch = self.case.branch.then_some((&branch[..], &branch_weight[..]));
        let norm_weight = self.case.norm.then_some(&norm[..]);
        let (sum, prepared) = prepare_reference(&x, with_branch, norm_weight, f64::from(EPSILON));
        // Terms of a sum of squares, then a root, a quotient and two products.
        let norm_off = (8.0 + n as f64 / 32.0) * ULP;
        let sum_off: Vec<f64> = sum
            .iter()
            .zip(&x)
            .map(|(sum, x)| if self.case.branch { (sum - x).abs() * norm_off + ULP * sum.abs() } else { 0.0 })
            .collect();
        let length = |values: &[f64]| (values.iter().map(|v| v * v).sum::<f64>() / n as f64 + 1e-5).sqrt();
        let mean_off = length(&sum_off.iter().map(|off| off + 0.0).collect::<Vec<_>>()) - 1e-5f64.sqrt();
        let prepared_off: Vec<f64> = (0..n)
            .map(|i| {
                if self.case.norm {
                    let inverse = norm[i].abs() / length(&sum);
                    sum_off[i] * inverse
                        + prepared[i].abs() * (norm_off + mean_off.max(0.0) / length(&sum))
                        + FLUSHED
                } else {
                    sum_off[i] + FLUSHED
                }
            })
            .collect();
        (sum.into_iter().zip(sum_off).collect(), prepared.into_iter().zip(prepared_off).collect())
    }

    /// The product's values of one output row, padding included.
    ///
    /// The bound is one rounding of everything added up for each step of the longest chain of additions: 32 in a group, or
    /// by tiles 16 fused, one to join even and odd columns and one for each of at most 12 products of the activations'
    /// high terms that one adds up from zero (the other terms' come before and are 2^-8 of these); a scale and an offset;
    /// and one a group.
    fn expected(&self, row: usize, prepared: &[Bounded]) -> Vec<Bounded> {
        let n = self.case.columns;
        let steps = (40 + self.matrix.format.padded_columns(n) / 32) as f64;
        let dot = |output: usize| -> Bounded {
            if output >= self.case.outputs {
                return (0.0, 0.0);
            }
            let values = &self.weights.values[output * n..][..n];
            let sizes = &self.weights.sizes[output * n..][..n];
            let (mut sum, mut size, mut off) = (0.0, 0.0, 0.0);
            for (&(x, x_off), (w, s)) in prepared.iter().zip(values.iter().zip(sizes)) {
                sum += w * x;
                size += s * x.abs();
                off += s * x_off + 64.0 * DENORMAL * (1.0 + s);
            }
            (sum, off + steps * ULP * size)
        };
        let start = GUARD + self.case.at + row * self.case.out_stride();
        (0..self.case.width())
            .map(|i| {
                let other = (f64::from(self.other[start + i]), 0.0);
                let gate = i / TILE * ROW_MULTIPLE + i % TILE;
                match self.case.finish {
                    0 => dot(i),
                    1 => {
                        let (sum, off) = (other.0 + dot(i).0, dot(i).1);
                        (sum, off + ULP * sum.abs())
                    }
                    2 => times(activated(Activation::Silu, dot(gate)), dot(gate + TILE)),
                    3 => times(activated(Activation::GeluTanh, dot(gate)), dot(gate + TILE)),
                    4 => times(activated(Activation::Silu, other), dot(i)),
                    _ => times(activated(Activation::GeluTanh, other), dot(i)),
                }
            })
            .collect()
    }

    /// Results of rows `first..first + rows`, by `narrow` where `few` and by `matmul` otherwise: output rows without
    /// gaps, and rows with their branch. Whatever must not be written is checked here.
    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        first: usize,
        rows: usize,
        few: bool,
    ) -> Result<(Vec<f32>, Vec<f32>), TestCaseError> {
        let case = &self.case;
        let (width, out_stride) = (case.width(), case.out_stride());
        // A few rows are read in the midst of all; many start at 0.
        let (from, read, at) = if few {
            (0, self.x.len(), first * self.stride)
        } else {
            (first * self.stride, rows * self.stride, 0)
        };
        let x = upload(device, &self.x[from..from + read]);
        let branch = upload(device, &self.branch[from..from + read]);
        let (branch_weight, norm) = (upload(device, &self.branch_weight), upload(device, &self.norm));
        let new_rows = poisoned(device, read + GUARD);
        let start = GUARD + case.at;
        let out_len = start + (rows - 1) * out_stride + width + GUARD;
        let others = &self.other[first * out_stride..][..out_len];
        let other = upload(device, others);
        let fresh = poisoned(device, out_len);
        let takes_other = matches!(case.finish, 1 | 4 | 5);
        let in_place = case.in_place && takes_other;
        let out = if in_place { &other } else { &fresh };
        let input = RowInput {
            rows: &x,
            at,
            branch: case.branch.then_some((&branch, &branch_weight, &new_rows)),
            norm: case.norm.then_some(&norm),
            n: case.columns,
            stride: self.stride,
            epsilon: EPSILON,
        };
        let output = Output { rows: out, at: start, stride: out_stride };
        let finish = case.finish(&other);
        let padded;
        if few {
            padded = self.matrix.format.padded_columns(case.columns);
            let launch = kernels.narrow(device, &self.matrix, &input, rows, finish, &output).unwrap();
            device.enqueue(&launch).unwrap();
        } else {
            padded = round_up(case.columns, STRIDE_MULTIPLE);
            let [(packed, values), (sums, of_sums)] = poisoned_packed(device, kernels, rows, padded);
            device
                .enqueue(&kernels.pack_rows(device, &input, rows, Family::Vector, &packed, &sums).unwrap())
                .unwrap();
            let launch = kernels.matmul(device, &self.matrix, &packed, &sums, rows, finish, &output).unwrap();
            device.enqueue(&launch).unwrap();
            let (packed, sums) = (download(device, &packed), download(device, &sums));
            prop_assert!(is_poison(&packed[values..]), "values behind the packed rows are written");
            prop_assert!(is_poison(&sums[of_sums..]), "values behind the sums are written");
            self.check_packed(kernels.products(), first, rows, padded, &packed[..values], &sums)?;
        }
        let found = download(device, out);
        let mut results = Vec::with_capacity(rows * width);
        let kept = |range: std::ops::Range<usize>| {
            if in_place { same_bits(&found[range.clone()], &others[range]) } else { is_poison(&found[range]) }
        };
        prop_assert!(kept(0..start), "values before the output are written");
        for row in 0..rows {
            let at = start + row * out_stride;
            results.extend_from_slice(&found[at..at + width]);
            let end = if row + 1 < rows { at + out_stride } else { out_len };
            prop_assert!(kept(at + width..end), "values behind output row {} are written", row);
        }
        let new_rows = download(device, &new_rows);
        let mut sums = Vec::new();
        if case.branch {
            for row in 0..rows {
                let at = at + row * self.stride;
                sums.extend_from_slice(&new_rows[at..at + case.columns]);
                prop_assert!(
                    new_rows[at + case.columns..at + padded].iter().all(|&v| v == 0.0),
                    "the new row's padding is not zero"
                );
                let end = if row + 1 < rows { at + self.stride } else { new_rows.len() };
                prop_assert!(
                    is_poison(&new_rows[at + padded..end]),
                    "values behind new row {} are written",
                    row
                );
            }
            prop_assert!(is_poison(&new_rows[..at]), "values before the new row are written");
        } else {
            prop_assert!(is_poison(&new_rows), "new rows are written although there is no branch");
        }
        prop_assert!(same_bits(&download(device, &x), &self.x[from..from + read]), "the input is written");
        if !in_place {
            prop_assert!(same_bits(&download(device, &other), others), "the other operand is written");
        }
        Ok((results, sums))
    }

    /// What `pack_rows` leaves of each block of rows: `[groups][rows][32]`, and its sums over 32 and 16 columns.
    fn check_packed(
        &self,
        products: Products,
        first: usize,
        rows: usize,
        padded: usize,
        packed: &[f32],
        sums: &[f32],
    ) -> Result<(), TestCaseError> {
        const BLOCK: usize = 64;
        let groups = padded / 32;
        for row in 0..rows {
            let (_, prepared) = self.prepared(first + row);
            let (start, size) = (row / BLOCK * BLOCK, BLOCK.min(rows - row / BLOCK * BLOCK));
            let packed = &packed[packed.len() / rows * start..][..packed.len() / rows * size];
            let sums = &sums[start * groups * 3..];
            for group in 0..groups {
                let at = row - start;
                let found = match products {
                    Products::Vector | Products::Xmx => packed[(group * size + at) * 32..][..32].to_vec(),
                    Products::MatrixUnit => joined_terms(packed, group, at, size)?,
                };
                for (i, &found) in found.iter().enumerate() {
                    let (expected, off) = prepared.get(group * 32 + i).copied().unwrap_or((0.0, 0.0));
                    prop_assert!(
                        (f64::from(found) - expected).abs() <= off,
                        "packed value {} of row {}: {} for {} (within {})",
                        group * 32 + i,
                        row,
                        found,
                        expected,
                        off
                    );
                }
                let at = [group, groups + 2 * group, groups + 2 * group + 1]
                    .map(|at| sums[at * size + row - start]);
                for (sum, part) in at.iter().zip([&found[..], &found[..16], &found[16..]]) {
                    let (exact, size) =
                        part.iter().fold((0.0, 0.0), |(e, s), &v| (e + f64::from(v), s + f64::from(v).abs()));
                    prop_assert!(
                        (f64::from(*sum) - exact).abs() <= 5.0 * ULP * size,
                        "a sum of group {}",
                        group
                    );
                }
            }
        }
        Ok(())
    }
}

/// The values whose three bf16 terms, `[groups][low, middle, high][rows][32]`, pair a word's columns i and i + 4.
fn joined_terms(packed: &[f32], group: usize, row: usize, rows: usize) -> Result<Vec<f32>, TestCaseError> {
    let halves: &[u16] = bytemuck::cast_slice(packed);
    let term = |term: usize, i: usize| {
        let at = i / 8 * 8 + i % 4 * 2 + i / 4 % 2;
        let bits = halves[((group * 3 + term) * rows + row) * 32 + at];
        f32::from_bits(u32::from(bits) << 16)
    };
    let joined = (0..32).map(|i| (term(2, i) + term(1, i)) + term(0, i)).collect();
    for i in 0..32 {
        let (low, middle, high) = (term(0, i), term(1, i), term(2, i));
        // Each is what rounding the one before left over.
        prop_assert!(middle.abs() <= high.abs() / 256.0 && low.abs() <= middle.abs() / 256.0);
    }
    Ok(joined)
}

fn product_holds(
    device: &Device,
    kernels: &Kernels,
    format: Format,
    case: &Product,
) -> Result<(), TestCaseError> {
    let operands = Operands::new(device, format, case);
    let (width, n) = (case.width(), case.columns);
    let (all, new_rows) = operands.run(device, kernels, 0, case.rows, false)?;
    for row in 0..case.rows {
        let (sum, prepared) = operands.prepared(row);
        agree("matmul", row, &all[row * width..][..width], &operands.expected(row, &prepared))?;
        if case.branch {
            agree("the row with its branch", row, &new_rows[row * n..][..n], &sum)?;
        }
    }
    let mut random = Random(!case.seed);
    let mut first = 0;
    while first < case.rows {
        let rows = 1 + random.below(case.rows - first).min(random.below(24));
        let (part, sums) = operands.run(device, kernels, first, rows, false)?;
        prop_assert!(
            same_bits(&part, &all[first * width..][..rows * width]),
            "rows {}+{} differ",
            first,
            rows
        );
        if case.branch {
            prop_assert!(same_bits(&sums, &new_rows[first * n..][..rows * n]), "new rows {}+{}", first, rows);
        }
        first += rows;
    }
    for row in [0, random.below(case.rows), case.rows - 1] {
        let (one, _) = operands.run(device, kernels, row, 1, false)?;
        prop_assert!(same_bits(&one, &all[row * width..][..width]), "row {} alone differs", row);
    }
    let most = kernels.narrow_rows(&operands.matrix);
    let expected = if kernels.products() == Products::MatrixUnit { 16 } else { 8 };
    prop_assert!(most == expected, "narrow takes {} rows of {} columns", most, case.columns);
    for rows in 1..=most.min(case.rows) {
        let first = random.below(case.rows - rows + 1);
        let (few, sums) = operands.run(device, kernels, first, rows, true)?;
        prop_assert!(
            same_bits(&few, &all[first * width..][..rows * width]),
            "narrow differs from matmul at rows {}+{}",
            first,
            rows
        );
        if case.branch {
            prop_assert!(
                same_bits(&sums, &new_rows[first * n..][..rows * n]),
                "narrow's new rows {}+{} differ",
                first,
                rows
            );
        }
    }
    Ok(())
}

#[test]
fn products_are_right_whatever_their_shape_and_the_same_however_rows_are_grouped() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            println!("{}", format.name());
            check(if simulated() { 8 } else { 40 }, &Product::strategy(format), |case| {
                product_holds(&device, &kernels, format, &case)
            });
        }
    }
}

#[test]
fn every_finish_crosses_the_row_block() {
    for (device, kernels) in flavours() {
        for finish in 0..FINISHES {
            for (index, format) in Format::ALL.into_iter().enumerate() {
                // In the simulator one format a finish, and one row past the block.
                if simulated() && index != finish {
                    continue;
                }
                let case = Product {
                    outputs: if simulated() { 17 } else { 81 },
                    columns: if format.block_groups() == 8 { 256 } else { 96 },
                    rows: 65,
                    gap: 3,
                    at: 5,
                    size: Size::Plain,
                    norm: finish % 2 == 0,
                    branch: finish % 3 == 0,
                    finish,
                    in_place: finish == 1,
                    seed: 1 + finish as u64,
                };
                if let Err(error) = product_holds(&device, &kernels, format, &case) {
                    panic!("{} {case:?}: {error}", format.name());
                }
            }
        }
    }
}

/// Heads that are rotated, kept and attended to.
#[derive(Debug, Clone)]
struct Heads {
    head: usize,
    /// Values of a value head.
    value: usize,
    kind: CacheKind,
    kv_heads: usize,
    group: usize,
    rows: usize,
    /// Widths of passes are up to this.
    widest: usize,
    window: Option<usize>,
    half_rotated: usize,
    pairing: Pairing,
    normed: bool,
    value_norms: bool,
    /// The raw keys are the values.
    shared: bool,
    bias: bool,
    softcap: f32,
    /// The last rows, which are a canvas.
    canvas: usize,
    /// Queries and keys are up to this large.
    reach: f32,
    seed: u64,
}

impl Heads {
    fn strategy() -> impl Strategy<Value = Self> {
        let heads: &[usize] =
            if simulated() { &[16, 48, 64] } else { &[16, 32, 48, 64, 80, 96, 128, 160, 192, 256] };
        let most_rows: usize = if simulated() { 20 } else { 150 };
        let shape = (
            prop::sample::select(heads),
            prop_oneof![Just(CacheKind::F16), Just(CacheKind::F32)],
            1..=if simulated() { 1usize } else { 3 },
            1..=if simulated() { 2usize } else { 8 },
            1..=most_rows,
            1..=most_rows,
        );
        let how = (
            any::<bool>(),
            any::<prop::sample::Index>(),
            0..4usize,
            prop_oneof![Just(Pairing::Neighbours), Just(Pairing::RotatedHalves), Just(Pairing::HeadHalves)],
            any::<bool>(),
            prop_oneof![Just(1f32), Just(1e-30), Just(20.0), Just(3e4), Just(1e15)],
            any::<u64>(),
        );
        let new = (
            any::<bool>(),
            any::<bool>(),
            prop_oneof![Just(None), any::<prop::sample::Index>().prop_map(Some)],
            any::<bool>(),
            prop_oneof![Just(0f32), Just(0.5), Just(50.0)],
            prop_oneof![3 => Just(None), 1 => prop::sample::select(&[16usize, 32, 48, 128][..]).prop_map(Some)],
        );
        (shape, how, new).prop_map(
            |(
                (head, kind, kv_heads, group, rows, widest),
                (full, window, part, pairing, normed, reach, seed),
                (value_norms, shared, canvas, bias, softcap, value),
            )| Self {
                head,
                value: value.filter(|_| !shared).unwrap_or(head),
                kind,
                kv_heads,
                group,
                rows,
                widest,
                window: (!full).then(|| 1 + window.index(2 * rows)),
                half_rotated: [head / 2, head / 4, 1, 0][part],
                pairing,
                normed,
                value_norms,
                shared,
                bias,
                softcap,
                canvas: canvas.map_or(0, |canvas| 1 + canvas.index(rows)),
                reach,
                seed,
            },
        )
    }
}

/// Rows after rotation, the cache's keys and values by kv head and position, and the results of attention.
struct Attended {
    rows: Vec<f32>,
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
    out: Vec<f32>,
}

struct HeadRows {
    case: Heads,
    qkv: Vec<f32>,
    /// The same with the bias added.
    biased: Vec<f32>,
    /// No numbers between heads.
    bias: Vec<f32>,
    stride: usize,
    k_at: usize,
    v_at: usize,
    angles: Vec<f32>,
    norms: [Vec<f32>; 2],
    scale: f32,
}

impl HeadRows {
    fn new(case: &Heads) -> Self {
        let mut random = Random(case.seed);
        let q_heads = case.kv_heads * case.group;
        // Odd places, with values between that are nobody's.
        let k_at = q_heads * case.head + random.below(3) * 8;
        let v_at = if case.shared { k_at } else { k_at + case.kv_heads * case.head + random.below(3) * 8 };
        let stride = v_at + case.kv_heads * case.value + random.below(7);
        let mut qkv: Vec<f32> = (0..case.rows * stride)
            .map(|i| random.unit() * if i % stride < v_at { case.reach } else { 1.0 })
            .collect();
        if case.reach > 1e4 {
            // Values that f16 cannot hold, too.
            for row in 0..case.rows {
                qkv[row * stride + v_at + random.below(case.value)] = random.wide(4.0, 6.0);
            }
        }
        let heads: Vec<usize> = (0..q_heads * case.head)
            .chain((k_at..k_at + case.kv_heads * case.head).chain(v_at..v_at + case.kv_heads * case.value))
            .collect();
        let mut bias = vec![f32::NAN; stride];
        for &i in &heads {
            bias[i] = random.unit() * if i < v_at { case.reach } else { 1.0 };
        }
        let mut biased = qkv.clone();
        if case.bias {
            for row in biased.chunks_exact_mut(stride) {
                for (value, bias) in row.iter_mut().zip(&bias).filter(|(_, bias)| !bias.is_nan()) {
                    *value += bias;
                }
            }
        }
        let angles = (0..case.rows * case.half_rotated)
            .flat_map(|_| {
                let angle = f64::from(random.unit()) * 1000.0;
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect();
        let mut weight = || (0..case.head).map(|_| random.unit() * 2.0).collect();
        let norms = [weight(), weight()];
        let scale = 1.0 / (case.head as f32).sqrt();
        Self { case: case.clone(), qkv, biased, bias, stride, k_at, v_at, angles, norms, scale }
    }

    /// One head after norm and rotation, with bounds.
    fn rotated(&self, row: usize, at: usize, norm: &[f32]) -> Vec<Bounded> {
        let case = &self.case;
        let mut x = f64s(&self.biased[row * self.stride + at..][..case.head]);
        let mut off = vec![0.0; case.head];
        if case.normed {
            (_, x) = prepare_reference(&x, None, Some(&f64s(norm)), f64::from(EPSILON));
            off = x.iter().map(|v| v.abs() * (8.0 + case.head as f64 / 32.0) * ULP + DENORMAL).collect();
        }
        let angles = &self.angles[row * 2 * case.half_rotated..];
        for i in 0..case.half_rotated {
            let (first, second) = match case.pairing {
                Pairing::Neighbours => (2 * i, 2 * i + 1),
                Pairing::RotatedHalves => (i, i + case.half_rotated),
                Pairing::HeadHalves => (i, i + case.head / 2),
            };
            let (c, s) = (f64::from(angles[2 * i]), f64::from(angles[2 * i + 1]));
            let (a, b) = (x[first], x[second]);
            let spread = |p: f64, q: f64| {
                p.abs() * off[first]
                    + q.abs() * off[second]
                    + 2.0 * ULP * ((a * p).abs() + (b * q).abs())
                    + 2.0 * DENORMAL
            };
            let (off_first, off_second) = (spread(c, s), spread(s, c));
            (x[first], x[second]) = (a * c - b * s, a * s + b * c);
            (off[first], off[second]) = (off_first, off_second);
        }
        x.into_iter().zip(off).collect()
    }

    /// A bounded value once the cache has kept it.
    fn kept(&self, (value, off): Bounded) -> Bounded {
        match self.case.kind {
            CacheKind::F32 => (value, off),
            // 11 bits, and what is below the range of f16 in steps of 2^-24.
            CacheKind::F16 => {
                let clamped = value.clamp(-65504.0, 65504.0);
                (clamped, off + clamped.abs() / 2048.0 + 1.0 / f64::from(1 << 25))
            }
        }
    }

    /// A value head after its norm, with bounds.
    fn value(&self, row: usize, kv: usize) -> Vec<Bounded> {
        let case = &self.case;
        let x = f64s(&self.biased[row * self.stride + self.v_at + kv * case.value..][..case.value]);
        if !case.value_norms {
            return x.into_iter().map(|v| (v, 0.0)).collect();
        }
        let (_, x) = prepare_reference(&x, None, Some(&vec![1.0; case.value]), f64::from(EPSILON));
        x.into_iter().map(|v| (v, v.abs() * (8.0 + case.value as f64 / 32.0) * ULP + DENORMAL)).collect()
    }

    /// The positions that a row sees.
    fn seen(&self, row: usize) -> RangeInclusive<usize> {
        let (window, anchor) = (self.case.window.unwrap_or(usize::MAX), self.case.rows - self.case.canvas);
        if row < anchor {
            (row + 1).saturating_sub(window)..=row
        } else {
            (anchor + 1).saturating_sub(window)..=self.case.rows - 1
        }
    }

    /// Rotates, keeps and attends in passes of these widths, then the canvas. With `ring`, the cache holds what a window
    /// and a pass need and no more.
    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        widths: &[usize],
        ring: bool,
    ) -> Result<Attended, TestCaseError> {
        let case = &self.case;
        let (head, size, q_heads) = (case.head, case.value, case.kv_heads * case.group);
        let mut passes: Vec<(usize, bool)> = widths.iter().map(|&width| (width, false)).collect();
        if case.canvas > 0 {
            passes.push((case.canvas, true));
        }
        let widest = passes.iter().map(|(width, _)| *width).max().unwrap();
        let positions = match case.window {
            Some(window) if ring => case.rows.min(window - 1 + widest),
            _ => case.rows,
        };
        let cache = Cache::with_value_size(device, case.kind, case.kv_heads, head, size, positions).unwrap();
        // Positions not written yet hold whatever the memory held: here a NaN, which would spread.
        let unwritten = match case.kind {
            CacheKind::F16 => 0x7fff_7fff,
            CacheKind::F32 => POISON,
        };
        device.fill(&cache.keys, unwritten).unwrap();
        device.fill(&cache.values, unwritten).unwrap();
        let angles = upload(device, &self.angles);
        let [q_norm, k_norm] = self.norms.each_ref().map(|norm| upload(device, norm));
        let bias = upload(device, &self.bias);
        let out_stride = q_heads * size + 5;
        let (mut all_rows, mut all_out) = (Vec::new(), Vec::new());
        let mut start = 0;
        for (rows, canvas) in passes {
            let mut guarded = self.qkv[start * self.stride..(start + rows) * self.stride].to_vec();
            guarded.extend([f32::from_bits(POISON); GUARD]);
            let qkv = upload(device, &guarded);
            let out = poisoned(device, rows * out_stride + GUARD);
            let rotation = Rotation {
                qkv: &qkv,
                stride: self.stride,
                q_heads,
                k_at: self.k_at,
                v_at: self.v_at,
                bias: case.bias.then_some(&bias),
                angles: &angles,
                half_rotated: case.half_rotated,
                pairing: case.pairing,
                norms: case.normed.then_some((&q_norm, &k_norm)),
                value_norms: case.value_norms,
                queries_only: false,
                epsilon: EPSILON,
            };
            let mut launch = kernels.rotate_and_cache(device, &rotation, &cache, rows).unwrap();
            launch.set(ROTATE_START, Arg::I32(start as i32)).unwrap();
            device.enqueue(&launch).unwrap();
            let looks = Attention {
                q: &qkv,
                stride: self.stride,
                out: &out,
                out_stride,
                q_heads,
                window: case.window,
                canvas,
                scale: self.scale,
                softcap: case.softcap,
            };
            let mut launch = kernels.attention(device, &looks, &cache, rows).unwrap();
            launch.set(ATTENTION_START, Arg::I32(start as i32)).unwrap();
            device.enqueue(&launch).unwrap();
            let rotated = download(device, &qkv);
            prop_assert!(is_poison(&rotated[rows * self.stride..]), "values behind the rows are written");
            all_rows.extend_from_slice(&rotated[..rows * self.stride]);
            let out = download(device, &out);
            for row in out[..rows * out_stride].chunks_exact(out_stride) {
                all_out.extend_from_slice(&row[..q_heads * size]);
                prop_assert!(is_poison(&row[q_heads * size..]), "values between output rows are written");
            }
            prop_assert!(is_poison(&out[rows * out_stride..]), "values behind the output are written");
            start += rows;
        }
        let (keys, values) = (self.cached(device, &cache.keys), self.cached(device, &cache.values));
        let mut by_head = (Vec::new(), Vec::new());
        for kv in 0..case.kv_heads {
            let base = kv * cache.capacity * head;
            let key =
                |p: usize| (0..head).map(|i| keys[base + p / 16 * head * 16 + i * 16 + p % 16]).collect();
            let value = |p: usize| values[(kv * cache.capacity + p) * size..][..size].to_vec();
            by_head.0.push((0..cache.capacity).map(key).collect::<Vec<Vec<f32>>>());
            by_head.1.push((0..cache.capacity).map(value).collect::<Vec<Vec<f32>>>());
            let end = case.rows.min(cache.capacity);
            let untouched = |lists: &[Vec<f32>]| lists[end..].iter().flatten().all(|v| v.is_nan());
            prop_assert!(
                untouched(&by_head.0[kv]) && untouched(&by_head.1[kv]),
                "positions past the rows are written"
            );
        }
        Ok(Attended { rows: all_rows, keys: by_head.0, values: by_head.1, out: all_out })
    }

    fn cached(&self, device: &Device, buffer: &Buffer) -> Vec<f32> {
        match self.case.kind {
            CacheKind::F32 => download(device, buffer),
            CacheKind::F16 => {
                let mut bytes = vec![0u8; buffer.size()];
                device.read(buffer, 0, &mut bytes).unwrap();
                bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        }
    }

    fn check_rotation(&self, found: &Attended) -> Result<(), TestCaseError> {
        let (case, head) = (&self.case, self.case.head);
        for row in 0..case.rows {
            let at = |start: usize| &found.rows[row * self.stride + start..][..head];
            for q in 0..case.kv_heads * case.group {
                agree("a query", row, at(q * head), &self.rotated(row, q * head, &self.norms[0]))?;
            }
            for kv in 0..case.kv_heads {
                let key = self.rotated(row, self.k_at + kv * head, &self.norms[1]);
                let key: Vec<Bounded> = key.into_iter().map(|bounded| self.kept(bounded)).collect();
                agree("a key", row, &found.keys[kv][row], &key)?;
                let value: Vec<Bounded> =
                    self.value(row, kv).into_iter().map(|bounded| self.kept(bounded)).collect();
                agree("a value", row, &found.values[kv][row], &value)?;
            }
            // What lies between and behind the heads, and the values themselves, stays.
            let others = (case.kv_heads * case.group * head..self.k_at)
                .chain(self.k_at + case.kv_heads * head..self.stride)
                .map(|i| row * self.stride + i);
            for i in others {
                prop_assert!(
                    found.rows[i].to_bits() == self.biased[i].to_bits(),
                    "value {} of the rows is written",
                    i
                );
            }
        }
        Ok(())
    }

    fn check_attention(&self, found: &Attended) -> Result<(), TestCaseError> {
        let (case, head, size) = (&self.case, self.case.head, self.case.value);
        let q_heads = case.kv_heads * case.group;
        for row in 0..case.rows {
            for q_head in 0..q_heads {
                let kv = q_head / case.group;
                let q = &found.rows[row * self.stride + q_head * head..][..head];
                let out = &found.out[(row * q_heads + q_head) * size..][..size];
                let seen = self.seen(row);
                let (mut largest_score, mut terms) = (0f64, 0.0);
                for position in seen.clone() {
                    let key = &found.keys[kv][position];
                    let score: f64 =
                        q.iter().zip(key).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
                    largest_score = largest_score.max(score * f64::from(self.scale));
                    terms += 1.0;
                }
                // An error of a score is a relative error of its weight.
                let mut score_off = (head as f64 + 4.0) * ULP * largest_score;
                if case.softcap > 0.0 {
                    score_off += 8.0 * ULP * largest_score.min(f64::from(case.softcap)); // the device's tanh
                }
                let (keys, values) = (&found.keys[kv], &found.values[kv]);
                let (scale, softcap) = (self.scale, case.softcap);
                let expected = attention_reference(case.kind, q, keys, values, seen.clone(), scale, softcap);
                for (i, (&found, &expected)) in out.iter().zip(&expected).enumerate() {
                    let column = seen.clone().map(|p| f64::from(values[p][i]));
                    let (low, high) = column
                        .clone()
                        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
                    let largest = low.abs().max(high.abs());
                    let rounding = (terms + 32.0) * ULP * largest + DENORMAL;
                    let found = f64::from(found);
                    // A mean of values lies among them, however coarse the scores are.
                    prop_assert!(
                        found >= low - rounding && found <= high + rounding,
                        "value {} of head {} in row {}: {} is outside of {}..{}",
                        i,
                        q_head,
                        row,
                        found,
                        low,
                        high
                    );
                    let off = rounding + (high - low) * 2.0 * score_off.min(1.0).exp_m1();
                    prop_assert!(
                        (found - expected).abs() <= off,
                        "value {} of head {} in row {}: {} for {} (within {})",
                        i,
                        q_head,
                        row,
                        found,
                        expected,
                        off
                    );
                }
            }
        }
        Ok(())
    }
}

#[test]
fn heads_are_normed_rotated_kept_and_attended_to() {
    let (device, kernels) = open();
    check(if simulated() { 40 } else { 120 }, &Heads::strategy(), |case| {
        let heads = HeadRows::new(&case);
        let before = case.rows - case.canvas;
        let whole: Vec<usize> = if before > 0 { vec![before] } else { Vec::new() };
        let together = heads.run(&device, &kernels, &whole, false)?;
        heads.check_rotation(&together)?;
        heads.check_attention(&together)?;
        let mut random = Random(!case.seed);
        let mut widths = Vec::new();
        let mut left = before;
        while left > 0 {
            let width = 1 + random.below(left.min(case.widest));
            widths.push(width);
            left -= width;
        }
        let apart = heads.run(&device, &kernels, &widths, false)?;
        prop_assert!(same_bits(&together.rows, &apart.rows), "rows differ in passes of {:?}", widths);
        prop_assert!(same_bits(&together.out, &apart.out), "attention differs in passes of {:?}", widths);
        prop_assert!(
            same_cache(&together.keys, &apart.keys) && same_cache(&together.values, &apart.values),
            "the cache differs"
        );
        let ring = heads.run(&device, &kernels, &widths, true)?;
        prop_assert!(same_bits(&together.out, &ring.out), "a ring differs in passes of {:?}", widths);
        Ok(())
    });
}

#[test]
fn a_long_context_crosses_several_tiles() {
    let (device, kernels) = open();
    if simulated() {
        return;
    }
    for kind in [CacheKind::F16, CacheKind::F32] {
        for window in [None, Some(1), Some(63), Some(64), Some(65), Some(300)] {
            let case = Heads {
                head: 64,
                value: 64,
                kind,
                kv_heads: 1,
                group: 3,
                rows: 330,
                widest: 330,
                window,
                half_rotated: 32,
                pairing: Pairing::Neighbours,
                normed: true,
                value_norms: false,
                shared: false,
                bias: false,
                softcap: if window.is_none() { 2.0 } else { 0.0 },
                canvas: 0,
                reach: 3.0,
                seed: 5,
            };
            let heads = HeadRows::new(&case);
            let together = heads.run(&device, &kernels, &[330], false).unwrap();
            heads.check_attention(&together).unwrap();
            for ring in [false, true] {
                let apart = heads.run(&device, &kernels, &[129, 1, 63, 64, 65, 8], ring).unwrap();
                assert!(same_bits(&together.out, &apart.out), "{case:?} ring {ring}");
            }
        }
    }
}

#[test]
fn queries_over_the_cache_of_another_layer_leave_it_as_it_is() {
    let (device, kernels) = open();
    const ROWS: usize = 3;
    let mut random = Random(11);
    let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit()).collect() };
    let (qkv, bias, angles) = (values(ROWS * 64), values(64), values(ROWS * 16));
    let norms = [upload(&device, &values(16)), upload(&device, &values(16))];
    let rotate = |queries_only: bool, cache: &Cache| {
        let rows = upload(&device, &qkv);
        let (bias, angles) = (upload(&device, &bias), upload(&device, &angles));
        let rotation = Rotation {
            qkv: &rows,
            stride: 64,
            q_heads: 2,
            k_at: 32,
            v_at: 48,
            bias: Some(&bias),
            angles: &angles,
            half_rotated: 8,
            pairing: Pairing::RotatedHalves,
            norms: Some((&norms[0], &norms[1])),
            value_norms: true,
            queries_only,
            epsilon: EPSILON,
        };
        device.enqueue(&kernels.rotate_and_cache(&device, &rotation, cache, ROWS).unwrap()).unwrap();
        download(&device, &rows)
    };
    let cache = Cache::new(&device, CacheKind::F32, 1, 16, 64).unwrap();
    device.fill(&cache.keys, POISON).unwrap();
    device.fill(&cache.values, POISON).unwrap();
    let queries = rotate(true, &cache);
    assert!(is_poison(&download(&device, &cache.keys)) && is_poison(&download(&device, &cache.values)));
    let whole = rotate(false, &cache);
    for row in 0..ROWS {
        let at = row * 64;
        assert!(same_bits(&queries[at..at + 32], &whole[at..at + 32]), "queries of row {row}");
        assert!(same_bits(&queries[at + 32..at + 64], &qkv[at + 32..at + 64]), "the rest of row {row}");
    }
}

#[test]
fn heads_larger_than_a_work_item_holds_are_refused() {
    let (device, kernels) = open();
    let rows = poisoned(&device, 1 << 13);
    let attend = |size: usize| {
        let cache = Cache::new(&device, CacheKind::F16, 1, size, 64).unwrap();
        let looks = Attention {
            q: &rows,
            stride: size,
            out: &rows,
            out_stride: size,
            q_heads: 1,
            window: None,
            canvas: false,
            scale: 1.0,
            softcap: 0.0,
        };
        kernels.attention(&device, &looks, &cache, 1)
    };
    assert!(attend(MOST_HEAD_SIZE).is_ok());
    let error = attend(MOST_HEAD_SIZE + 16).err().unwrap().to_string();
    assert!(error.contains("head sizes of 1040 and 1040, 1024 at most"), "{error}");
}
