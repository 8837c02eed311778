//! Products of random matrices and attention over random heads against f64, on whatever device is there: odd sizes,
//! every format and finish, values of any size. Every output lies among poison that must survive.
//!
//! Bounds are those of f32 arithmetic on the operands at hand, not constants: an error of a few units in the last
//! place of what was added up fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod heads_support;
mod ops_support;
mod support;

use heads_support::Heads;
use ops_support::*;

use axe::device::{Buffer, Device, Purpose};
use axe::ops::{
    Activation, Attention, Cache, CacheKind, Family, Finish, Format, Kernels, MOST_HEAD_SIZE, Matrix, Output,
    Pairing, Products, ROW_MULTIPLE, Rotation, RowInput, STRIDE_MULTIPLE, TILE, prepare_reference, round_up,
};

use proptest::prelude::*;

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
                    Products::Integer => {
                        let values = &packed[(group * size + at) * 32..][..32];
                        digits_hold(packed, [group, groups], [at, size], values)?;
                        values.to_vec()
                    }
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

/// What products by integers lose of a row: half a unit of each value, of which a group's largest has 2^22 at least.
fn made_integers(row: &mut [Bounded]) {
    for group in row.chunks_mut(32) {
        let largest = group.iter().fold(0.0f64, |most, (x, off)| most.max(x.abs() + off));
        group.iter_mut().for_each(|(_, off)| *off += 1.005 * largest * 2f64.powi(-23));
    }
}

/// Whether the digits of a group, `[groups][3][rows][32]` behind the values, and what they are worth behind those, make the
/// group's values but for half a unit of the last digit.
fn digits_hold(
    packed: &[f32],
    [group, groups]: [usize; 2],
    [row, rows]: [usize; 2],
    values: &[f32],
) -> Result<(), TestCaseError> {
    let digits: &[i8] = bytemuck::cast_slice(&packed[groups * rows * 32..groups * rows * 56]);
    let unit = f64::from(packed[groups * rows * 56 + group * rows + row]);
    let largest = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    // A digit holds 127, not 128: what is largest must be that much below a power of two.
    let most = f64::from(largest) * 1.005 * 2f64.powi(-22);
    prop_assert!(unit <= most || largest < 2f32.powi(-90), "{unit} for {largest}");
    for (i, &value) in values.iter().enumerate() {
        // Of eight columns the even ones, then the odd ones.
        let at = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
        let digit = |k: usize| f64::from(digits[((group * 3 + k) * rows + row) * 32 + at]);
        let made = (digit(2) * 65536.0 + digit(1) * 256.0 + digit(0)) * unit;
        prop_assert!((made - f64::from(value)).abs() <= unit / 2.0, "{} made of {}", made, value);
    }
    Ok(())
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
        let (sum, mut prepared) = operands.prepared(row);
        if kernels.products().by_integers(format) {
            made_integers(&mut prepared);
        }
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
    let by_unit = kernels.products() == Products::MatrixUnit || kernels.products().by_integers(format);
    let expected = if by_unit { 16 } else { 8 };
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

#[test]
fn what_is_no_number_spoils_its_own_row_and_no_other() {
    let formats: &[Format] = if simulated() { &[Format::Q4_1, Format::Iq4Nl] } else { &Format::ALL };
    for (device, kernels) in flavours() {
        for &format in formats {
            let case = Product {
                outputs: 33,
                columns: if format.block_groups() == 8 { 256 } else { 96 },
                rows: 3,
                gap: 0,
                at: 0,
                size: Size::Plain,
                norm: false,
                branch: false,
                finish: 0,
                in_place: false,
                seed: 7,
            };
            let mut operands = Operands::new(&device, format, &case);
            let width = case.width();
            let (sound, _) = operands.run(&device, &kernels, 0, 3, true).unwrap();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                operands.x[operands.stride + 40] = bad;
                for rows in [1, 3] {
                    let first = usize::from(rows == 1);
                    let (found, _) = operands.run(&device, &kernels, first, rows, true).unwrap();
                    for (row, found) in (first..).zip(found.chunks(width)) {
                        let spoilt = found[..case.outputs].iter().all(|v| !v.is_finite());
                        let same = same_bits(found, &sound[row * width..][..width]);
                        assert!(if row == 1 { spoilt } else { same }, "{}: {bad}, row {row}", format.name());
                    }
                }
            }
        }
    }
}

#[test]
fn heads_are_normed_rotated_kept_and_attended_to() {
    let (device, kernels) = open();
    check(if simulated() { 40 } else { 120 }, &Heads::strategy(), |case| {
        heads_support::holds(&device, &kernels, &case)
    });
}

#[test]
fn a_long_context_crosses_several_tiles() {
    let (device, kernels) = open();
    if simulated() {
        return;
    }
    for kind in [CacheKind::F16, CacheKind::F32] {
        heads_support::holds_over_a_long_context(&device, &kernels, 64, kind);
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
            queries: None,
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
