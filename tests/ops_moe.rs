//! A mixture of experts, whole and by parts: odd numbers of experts, rows and columns, every format. Its products are
//! held bit for bit against those of `matmul`, expert by expert; choice and combination against f64. Every output lies
//! before poison that must survive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use axe::device::{Arg, Buffer, Device, Purpose};
use axe::ops::{
    Activation, COMBINE_SCALAR, CombineInput, ExpertChoice, ExpertGroups, Experts, Family, Finish, Format,
    Kernels, Matrix, OpsError, Output, ROW_MULTIPLE, Router, Routing, RowInput, STRIDE_MULTIPLE, Scoring,
    TILE, combine_reference, round_up, route_reference, router_reference, self_test_moe,
};
use ops_support::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    experts: usize,
    top: usize,
    rows: usize,
    hidden: usize,
    inner: usize,
    activation: Activation,
    /// The rows get a branch and a norm before they go to their experts.
    prepared: bool,
    /// Scores are few, so that many are equal.
    ties: bool,
    seed: u64,
}

impl Case {
    fn strategy(format: Format) -> impl Strategy<Value = Self> {
        let step = match format {
            Format::F32 | Format::F16 | Format::Bf16 => 1,
            _ if format.block_codes() == 256 => 256,
            _ => 32,
        };
        let (experts, rows, columns): (usize, usize, usize) =
            if simulated() { (4, 5, 40.max(step)) } else { (17, 300, 130.max(step)) };
        let shape = (
            1..=experts,
            1..=8usize,
            prop_oneof![1..=rows.min(20), 1..=rows],
            1..=columns / step,
            1..=columns / step,
        );
        (shape, any::<(bool, bool, bool)>(), any::<u64>()).prop_map(
            move |((experts, top, rows, hidden, inner), (gelu, prepared, ties), seed)| Self {
                experts,
                top: top.min(experts),
                rows,
                hidden: hidden * step,
                inner: inner * step,
                activation: if gelu { Activation::GeluTanh } else { Activation::Silu },
                prepared,
                ties,
                seed,
            },
        )
    }

    fn stride(&self) -> usize {
        round_up(self.hidden, STRIDE_MULTIPLE)
    }
}

/// Weights and rows of a case.
struct Mixture {
    case: Case,
    gate_up: Experts,
    down: Experts,
    /// Each expert's gate and up, and down, in buffers of their own.
    single: Vec<(Matrix, Matrix)>,
    scores: Vec<f32>,
    scores_stride: usize,
    scales: Vec<f32>,
    x: Vec<f32>,
    branch: Vec<f32>,
    mlp: Vec<f32>,
    /// Weights of the branch's norm, the rows' norm, and those of `combine`.
    norms: [Vec<f32>; 5],
    scalar: f32,
}

/// What a pass made, by row and choice.
struct Passed {
    chosen: Vec<u32>,
    weights: Vec<f32>,
    /// `[rows][top][hidden]`.
    out: Vec<f32>,
    new_rows: Vec<f32>,
    /// `[rows][hidden]`.
    result: Vec<f32>,
}

impl Mixture {
    fn new(device: &Device, format: Format, case: &Case) -> Self {
        let mut random = Random(case.seed);
        let (hidden, inner, stride) = (case.hidden, case.inner, case.stride());
        let matrix = |tiles: &[u8], rows: usize, columns: usize| {
            assert_eq!(tiles.len(), format.matrix_bytes(rows, columns));
            let buffer = device.alloc(Purpose::Weights, tiles.len()).unwrap();
            device.write(&buffer, 0, tiles).unwrap();
            Matrix { buffer, format, rows, columns, family: Family::Vector }
        };
        let (gate_up_rows, down_rows) = (2 * round_up(inner, TILE), round_up(hidden, ROW_MULTIPLE));
        let (mut all_gate_up, mut all_down, mut single) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..case.experts {
            let gate = Weights::new(format, inner, hidden, &mut random).tiles;
            let up = Weights::new(format, inner, hidden, &mut random).tiles;
            let mut tiles = Vec::new();
            let size = format.tile_bytes(hidden);
            for (gate, up) in gate.chunks(size).zip(up.chunks(size)).take(inner.div_ceil(TILE)) {
                tiles.extend(gate);
                tiles.extend(up);
            }
            let down = Weights::new(format, hidden, inner, &mut random).tiles;
            single.push((matrix(&tiles, gate_up_rows, hidden), matrix(&down, down_rows, inner)));
            all_gate_up.extend(tiles);
            all_down.extend(down);
        }
        let experts = case.experts;
        let gate_up = matrix(&all_gate_up, experts * gate_up_rows, hidden);
        let down = matrix(&all_down, experts * down_rows, inner);
        let scores_stride = experts + random.below(9);
        let scores = (0..case.rows * scores_stride)
            .map(|_| if case.ties { random.below(3) as f32 } else { random.unit() * 12.0 })
            .collect();
        let mut rows = || -> Vec<f32> {
            (0..case.rows * stride)
                .map(|i| if i % stride < hidden { random.unit() * 3.0 } else { 0.0 })
                .collect()
        };
        let (x, branch, mlp) = (rows(), rows(), rows());
        let norms = [(); 5]
            .map(|()| (0..stride).map(|i| if i < hidden { random.unit() * 2.0 } else { 0.0 }).collect());
        Self {
            case: case.clone(),
            gate_up: Experts { matrix: gate_up, experts, outputs: inner },
            down: Experts { matrix: down, experts, outputs: hidden },
            single,
            scores,
            scores_stride,
            scales: (0..experts).map(|_| random.unit() + 1.5).collect(),
            x,
            branch,
            mlp,
            norms,
            scalar: random.unit() * 2.0,
        }
    }

    /// Rows `first..first + rows` in one pass, with a routing made for up to `room` rows.
    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        first: usize,
        rows: usize,
        room: usize,
    ) -> Result<Passed, TestCaseError> {
        let case = &self.case;
        let (hidden, stride, top, slots) = (case.hidden, case.stride(), case.top, rows * case.top);
        let slice = |values: &[f32]| upload(device, &values[first * stride..(first + rows) * stride]);
        let routing = Routing::new(device, case.experts, top, room).unwrap();
        device.fill(&routing.weights, POISON).unwrap();
        let scores = &self.scores[first * self.scores_stride..(first + rows) * self.scores_stride];
        let scores = upload(device, scores);
        let chosen = poisoned(device, slots + GUARD);
        let scales = upload(device, &self.scales);
        let launch =
            kernels.route(device, &scores, self.scores_stride, &scales, &chosen, &routing, rows).unwrap();
        device.enqueue(&launch).unwrap();

        let (x, branch) = (slice(&self.x), slice(&self.branch));
        let [branch_norm, norm, moe_norm, mlp_norm, join_norm] =
            self.norms.each_ref().map(|norm| upload(device, norm));
        let new_rows = poisoned(device, rows * stride + GUARD);
        let input = self.input(&x, &branch, &branch_norm, &norm, &new_rows);
        let inner_stride = round_up(case.inner, STRIDE_MULTIPLE);
        let [packed, sums] = poisoned_packed(device, kernels, slots, stride);
        let [inner, inner_sums] = poisoned_packed(device, kernels, slots, inner_stride);
        let (width, out_stride) = (round_up(hidden, ROW_MULTIPLE), round_up(hidden, ROW_MULTIPLE) + 3);
        let out = poisoned(device, slots * out_stride + GUARD);
        let launches = [
            kernels
                .pack_for_experts(device, &input, &chosen, &routing, rows, Family::Vector, &packed.0, &sums.0)
                .unwrap(),
            kernels
                .expert_gate_up(
                    device,
                    &self.gate_up,
                    case.activation,
                    &routing,
                    rows,
                    &packed.0,
                    &sums.0,
                    &inner.0,
                    &inner_sums.0,
                )
                .unwrap(),
            kernels
                .expert_down(device, &self.down, &routing, rows, &inner.0, &inner_sums.0, &out, out_stride)
                .unwrap(),
        ];
        for launch in &launches {
            device.enqueue(launch).unwrap();
        }
        let (residual, mlp) = (slice(&self.x), slice(&self.mlp));
        let result = poisoned(device, rows * stride + GUARD);
        let join = CombineInput {
            out: &out,
            out_stride,
            mlp: &mlp,
            residual: &residual,
            moe_norm: &moe_norm,
            mlp_norm: &mlp_norm,
            join_norm: &join_norm,
            scalar: f32::NAN,
            n: hidden,
            stride,
            epsilon: EPSILON,
            next: None,
        };
        let mut combine = kernels.combine(device, &join, &routing, rows, &result).unwrap();
        combine.set(COMBINE_SCALAR, Arg::F32(self.scalar)).unwrap();
        device.enqueue(&combine).unwrap();

        let chosen = download(device, &chosen);
        prop_assert!(is_poison(&chosen[slots..]), "values behind the choices are written");
        let chosen: Vec<u32> = chosen[..slots].iter().map(|v| v.to_bits()).collect();
        let weights = download(device, &routing.weights);
        prop_assert!(is_poison(&weights[slots..]), "values behind the weights are written");
        for (name, (buffer, values)) in
            [("packed", packed), ("sums", sums), ("inner", inner), ("inner sums", inner_sums)]
        {
            let found = download(device, &buffer);
            prop_assert!(is_poison(&found[values..]), "values behind {} are written", name);
            prop_assert!(!found[..values].iter().any(|v| v.to_bits() == POISON), "{} has gaps", name);
        }
        let by_slot = download(device, &out);
        for slot in 0..=slots {
            let from = if slot == slots { slot * out_stride } else { slot * out_stride + width };
            let end = if slot == slots { by_slot.len() } else { (slot + 1) * out_stride };
            prop_assert!(is_poison(&by_slot[from..end]), "values behind slot {} are written", slot);
        }
        // The stable sort by expert, told anew.
        let mut order: Vec<usize> = (0..slots).collect();
        order.sort_by_key(|&i| chosen[i]);
        let mut by_row = vec![0f32; slots * hidden];
        for (slot, &i) in order.iter().enumerate() {
            by_row[i * hidden..][..hidden].copy_from_slice(&by_slot[slot * out_stride..][..hidden]);
        }
        let rows_of = |name: &str, buffer: &Buffer| -> Result<Vec<f32>, TestCaseError> {
            let found = download(device, buffer);
            prop_assert!(is_poison(&found[rows * stride..]), "values behind {} are written", name);
            let rows = found[..rows * stride].chunks(stride);
            for (row, values) in rows.clone().enumerate() {
                // The padding of a spoiled row is spoiled with it.
                let padding = |v: &f32| *v == 0.0 || (values[0].is_nan() && v.is_nan());
                prop_assert!(values[hidden..].iter().all(padding), "{}: padding of row {}", name, row);
            }
            Ok(rows.flat_map(|values| values[..hidden].to_vec()).collect())
        };
        let result = rows_of("the result", &result)?;
        let new_rows = if case.prepared { rows_of("the new rows", &new_rows)? } else { Vec::new() };
        Ok(Passed { chosen, weights: weights[..slots].to_vec(), out: by_row, new_rows, result })
    }

    fn input<'a>(
        &self,
        rows: &'a Buffer,
        branch: &'a Buffer,
        branch_norm: &'a Buffer,
        norm: &'a Buffer,
        new_rows: &'a Buffer,
    ) -> RowInput<'a> {
        RowInput {
            rows,
            at: 0,
            branch: self.case.prepared.then_some((branch, branch_norm, new_rows)),
            norm: self.case.prepared.then_some(norm),
            n: self.case.hidden,
            stride: self.case.stride(),
            epsilon: EPSILON,
        }
    }

    fn check_choice(&self, passed: &Passed) -> Result<(), TestCaseError> {
        let case = &self.case;
        for row in 0..case.rows {
            let scores = &self.scores[row * self.scores_stride..][..case.experts];
            let (expected, weights) = route_reference(scores, &self.scales, case.top);
            let at = row * case.top..(row + 1) * case.top;
            let chosen: Vec<usize> = passed.chosen[at.clone()].iter().map(|&e| e as usize).collect();
            prop_assert_eq!(&chosen, &expected, "row {}", row);
            let spread = scores.iter().fold(0f64, |top, s| top.max(f64::from(scores[chosen[0]] - s)));
            // An exponent's rounding, three units of exp, twice a sum, and a few quotients.
            let off = (2.0 * spread + 16.0 + case.experts as f64 + case.top as f64) * ULP;
            for (found, expected) in passed.weights[at].iter().zip(weights) {
                prop_assert!(
                    (f64::from(*found) - expected).abs() <= off * expected + DENORMAL,
                    "a weight of row {} is {}, the reference says {}",
                    row,
                    found,
                    expected
                );
            }
        }
        Ok(())
    }

    /// Every expert by itself, with all rows.
    fn check_products(
        &self,
        device: &Device,
        kernels: &Kernels,
        passed: &Passed,
    ) -> Result<(), TestCaseError> {
        let case = &self.case;
        let (rows, hidden, stride) = (case.rows, case.hidden, case.stride());
        let (x, branch) = (upload(device, &self.x), upload(device, &self.branch));
        let (branch_norm, norm) = (upload(device, &self.norms[0]), upload(device, &self.norms[1]));
        let new_rows = poisoned(device, rows * stride);
        let input = self.input(&x, &branch, &branch_norm, &norm, &new_rows);
        let [(packed, _), (sums, _)] = poisoned_packed(device, kernels, rows, stride);
        device
            .enqueue(&kernels.pack_rows(device, &input, rows, Family::Vector, &packed, &sums).unwrap())
            .unwrap();
        let inner_stride = round_up(case.inner, STRIDE_MULTIPLE);
        let [(inner_packed, _), (inner_sums, _)] = poisoned_packed(device, kernels, rows, inner_stride);
        for (expert, (gate_up, down)) in self.single.iter().enumerate() {
            if !passed.chosen.contains(&(expert as u32)) {
                continue;
            }
            let inner = upload(device, &vec![0.0; rows * inner_stride]);
            let output = Output { rows: &inner, at: 0, stride: inner_stride };
            let finish = Finish::Gated(case.activation);
            let input = RowInput {
                rows: &inner,
                at: 0,
                branch: None,
                norm: None,
                n: case.inner,
                stride: inner_stride,
                epsilon: EPSILON,
            };
            let out = poisoned(device, rows * stride);
            let store = Output { rows: &out, at: 0, stride };
            let launches = [
                kernels.matmul(device, gate_up, &packed, &sums, rows, finish, &output).unwrap(),
                kernels.pack_rows(device, &input, rows, Family::Vector, &inner_packed, &inner_sums).unwrap(),
                kernels
                    .matmul(device, down, &inner_packed, &inner_sums, rows, Finish::Store, &store)
                    .unwrap(),
            ];
            for launch in &launches {
                device.enqueue(launch).unwrap();
            }
            let out = download(device, &out);
            for i in (0..rows * case.top).filter(|&i| passed.chosen[i] == expert as u32) {
                let row = i / case.top;
                prop_assert!(
                    same_bits(&passed.out[i * hidden..][..hidden], &out[row * stride..][..hidden]),
                    "expert {} and matmul differ for row {}",
                    expert,
                    row
                );
            }
        }
        if case.prepared {
            let expected = download(device, &new_rows);
            for (found, expected) in passed.new_rows.chunks(hidden).zip(expected.chunks(stride)) {
                prop_assert!(same_bits(found, &expected[..hidden]), "new rows differ");
            }
        }
        Ok(())
    }

    fn check_combined(&self, passed: &Passed) -> Result<(), TestCaseError> {
        let case = &self.case;
        let n = case.hidden;
        let weights = self.norms.each_ref().map(|norm| f64s(&norm[..n]));
        for row in 0..case.rows {
            let choices: Vec<(f64, Vec<f64>)> = (row * case.top..(row + 1) * case.top)
                .map(|i| (f64::from(passed.weights[i]), f64s(&passed.out[i * n..][..n])))
                .collect();
            let slice = |values: &[f32]| f64s(&values[row * case.stride()..][..n]);
            let (mlp, residual) = (slice(&self.mlp), slice(&self.x));
            let parts: Vec<(f64, &[f64])> = choices.iter().map(|(w, out)| (*w, &out[..])).collect();
            let expected = combine_reference(
                &parts,
                &mlp,
                &residual,
                [&weights[2], &weights[3], &weights[4]],
                f64::from(self.scalar),
                f64::from(EPSILON),
            );
            let mixed: Vec<Bounded> = (0..n)
                .map(|i| {
                    let terms = parts.iter().map(|(w, out)| w * out[i]);
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    (terms.sum(), (case.top as f64 + 1.0) * (ULP * size + DENORMAL))
                })
                .collect();
            let mlp: Vec<Bounded> = mlp.into_iter().map(|v| (v, 0.0)).collect();
            let both: Vec<Bounded> = normed(&mixed, &weights[2])
                .into_iter()
                .zip(normed(&mlp, &weights[3]))
                .map(|((a, a_off), (b, b_off))| (a + b, a_off + b_off + ULP * (a + b).abs()))
                .collect();
            let bounds: Vec<Bounded> = normed(&both, &weights[4])
                .into_iter()
                .zip(&residual)
                .zip(&expected)
                .map(|(((branch, off), x), &expected)| {
                    let off = off + ULP * (branch + x).abs();
                    (expected, off * f64::from(self.scalar.abs()) + ULP * expected.abs() + DENORMAL)
                })
                .collect();
            agree("combine", row, &passed.result[row * n..][..n], &bounds)?;
        }
        Ok(())
    }

    fn check_row_alone(
        &self,
        device: &Device,
        kernels: &Kernels,
        whole: &Passed,
        first: usize,
        rows: usize,
    ) -> Result<(), TestCaseError> {
        let (n, top) = (self.case.hidden, self.case.top);
        let part = self.run(device, kernels, first, rows, rows)?;
        prop_assert!(part.chosen == whole.chosen[first * top..][..rows * top], "choices differ");
        let same = |name: &str, part: &[f32], whole: &[f32], each: usize| -> Result<(), TestCaseError> {
            prop_assert!(
                same_bits(part, &whole[first * each..][..rows * each]),
                "{} of rows {}+{} differ from those of a pass of {}",
                name,
                first,
                rows,
                self.case.rows
            );
            Ok(())
        };
        same("weights", &part.weights, &whole.weights, top)?;
        same("products", &part.out, &whole.out, top * n)?;
        same("results", &part.result, &whole.result, n)?;
        if self.case.prepared { same("new rows", &part.new_rows, &whole.new_rows, n) } else { Ok(()) }
    }
}

/// RMS norm with bounds.
fn normed(x: &[Bounded], weight: &[f64]) -> Vec<Bounded> {
    let n = x.len() as f64;
    let length = (x.iter().map(|(v, _)| v * v).sum::<f64>() / n + f64::from(EPSILON)).sqrt();
    let length_off = (x.iter().map(|(_, off)| off * off).sum::<f64>() / n).sqrt();
    // Terms of a sum of squares, then a root, a quotient and two products.
    let relative = (8.0 + n / 32.0) * ULP + length_off / length;
    x.iter()
        .zip(weight)
        .map(|(&(v, off), w)| {
            let value = v / length * w;
            (value, off * w.abs() / length + value.abs() * relative + DENORMAL)
        })
        .collect()
}

fn mixture_holds(
    device: &Device,
    kernels: &Kernels,
    format: Format,
    case: &Case,
) -> Result<(), TestCaseError> {
    let mixture = Mixture::new(device, format, case);
    let whole = mixture.run(device, kernels, 0, case.rows, case.rows + 3)?;
    mixture.check_choice(&whole)?;
    mixture.check_products(device, kernels, &whole)?;
    mixture.check_combined(&whole)?;
    let mut random = Random(!case.seed);
    for row in [0, random.below(case.rows), case.rows - 1] {
        mixture.check_row_alone(device, kernels, &whole, row, 1)?;
    }
    let first = random.below(case.rows);
    let rows = 1 + random.below(case.rows - first);
    mixture.check_row_alone(device, kernels, &whole, first, rows)
}

#[test]
fn mixtures_are_right_whatever_their_shape_and_rows_the_same_in_any_company() {
    for (device, kernels) in flavours() {
        for format in Format::ALL {
            println!("{}", format.name());
            // In the simulator the formats that experts are stored in.
            if simulated() && !matches!(format, Format::W4 | Format::Bf16 | Format::Q6K) {
                continue;
            }
            check(if simulated() { 2 } else { 12 }, &Case::strategy(format), |case| {
                mixture_holds(&device, &kernels, format, &case)
            });
        }
    }
}

#[test]
fn runs_of_an_expert_are_cut_into_blocks() {
    for (device, kernels) in flavours() {
        // One expert for all, on and around the size of a block; and few experts with long runs.
        let shapes: &[(usize, usize, usize)] = if simulated() {
            &[(1, 1, 129)]
        } else {
            &[(1, 1, 64), (1, 1, 127), (1, 1, 128), (1, 1, 129), (2, 2, 190), (3, 2, 256), (17, 8, 256)]
        };
        for &(experts, top, rows) in shapes {
            for format in [Format::W4, Format::Q6K, Format::Bf16] {
                if simulated() && format != Format::W4 {
                    continue;
                }
                let case = Case {
                    experts,
                    top,
                    rows,
                    hidden: if format == Format::Q6K { 256 } else { 64 },
                    inner: if format == Format::Q6K { 256 } else { 96 },
                    activation: Activation::GeluTanh,
                    prepared: false,
                    ties: false,
                    seed: rows as u64,
                };
                if let Err(error) = mixture_holds(&device, &kernels, format, &case) {
                    panic!("{} {case:?}: {error}", format.name());
                }
            }
        }
    }
}

#[test]
fn bad_scores_choose_valid_experts_and_spoil_only_their_row() {
    for (device, kernels) in flavours() {
        let case = Case {
            experts: 5,
            top: 3,
            rows: 6,
            hidden: 40,
            inner: 24,
            activation: Activation::Silu,
            prepared: true,
            ties: false,
            seed: 3,
        };
        let clean = Mixture::new(&device, Format::F32, &case);
        let expected = clean.run(&device, &kernels, 0, 6, 6).unwrap();
        let mut bad = Mixture::new(&device, Format::F32, &case);
        let stride = bad.scores_stride;
        bad.scores[stride] = f32::NAN;
        bad.scores[2 * stride..][..5].fill(f32::NAN);
        bad.scores[3 * stride + 4] = f32::INFINITY;
        bad.scores[4 * stride..][..5].fill(f32::NEG_INFINITY);
        let found = bad.run(&device, &kernels, 0, 6, 6).unwrap();
        for row in 0..6 {
            let mut chosen = found.chosen[row * 3..][..3].to_vec();
            chosen.sort_unstable();
            chosen.dedup();
            assert!(chosen.len() == 3 && chosen[2] < 5, "row {row}: {chosen:?}");
            let (weights, result) = (&found.weights[row * 3..][..3], &found.result[row * 40..][..40]);
            if (1..5).contains(&row) {
                assert!(weights.iter().all(|w| w.is_nan()), "row {row}: {weights:?}");
                assert!(result.iter().all(|v| v.is_nan()), "row {row}: {result:?}");
            } else {
                assert!(same_bits(result, &expected.result[row * 40..][..40]), "row {row}");
            }
        }
        // A NaN is the last to be chosen.
        assert!(!found.chosen[3..6].contains(&0));
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    for (device, kernels) in flavours() {
        for (experts, top, rows) in [(4, 5, 1), (4, 0, 1), (0, 0, 1), (4, 2, 0), (4, 2, usize::MAX)] {
            let refused = Routing::new(&device, experts, top, rows);
            assert!(matches!(refused, Err(OpsError::Shape { .. })), "{experts} {top} {rows}");
        }
        let routing = Routing::new(&device, 4, 2, 8).unwrap();
        let small = upload(&device, &[0.0; 16]);
        let wide = upload(&device, &[0.0; 8 * STRIDE_MULTIPLE]);
        let [packed, sums] = poisoned_packed(&device, &kernels, 16, STRIDE_MULTIPLE);
        let pack = |chosen: &Buffer, rows: usize| {
            let (n, stride) = (40, STRIDE_MULTIPLE);
            let input =
                RowInput { rows: &wide, at: 0, branch: None, norm: None, n, stride, epsilon: EPSILON };
            let (family, packed, sums) = (Family::Vector, &packed.0, &sums.0);
            kernels
                .pack_for_experts(&device, &input, chosen, &routing, rows, family, packed, sums)
                .map(|_| ())
        };
        assert!(pack(&small, 8).is_ok());
        assert!(pack(&small, 9).is_err() && pack(&small, 0).is_err());
        assert!(pack(&upload(&device, &[0.0; 15]), 8).is_err());
        assert!(kernels.route(&device, &small, 4, &small, &small, &routing, 5).is_err());
        assert!(kernels.route(&device, &small, 3, &small, &small, &routing, 1).is_err());
        let buffer = device.alloc(Purpose::Weights, Format::W4.matrix_bytes(4 * 64, 64)).unwrap();
        let matrix = Matrix { buffer, format: Format::W4, rows: 4 * 64, columns: 64, family: Family::Vector };
        let big = upload(&device, &vec![0.0; kernels.products().packed_values(4, 256)]);
        let down = |experts: usize, outputs: usize, stride: usize| {
            let experts = Experts { matrix: matrix.clone(), experts, outputs };
            kernels.expert_down(&device, &experts, &routing, 1, &big, &big, &big, stride).map(|_| ())
        };
        assert!(down(4, 64, 64).is_ok() && down(4, 33, 64).is_ok());
        for (experts, outputs, stride) in [(4, 64, 63), (2, 128, 128), (4, 32, 64), (4, 65, 128)] {
            assert!(down(experts, outputs, stride).is_err(), "{experts} {outputs} {stride}");
        }
    }
}

#[test]
fn the_self_test_runs_every_format() {
    for (device, kernels) in flavours() {
        let formats: &[Format] = if simulated() { &[Format::W4] } else { &Format::ALL };
        self_test_moe(&device, &kernels, formats).unwrap();
    }
}

/// Rows of logits and a router of whatever kind.
#[derive(Debug, Clone)]
struct RouterCase {
    experts: usize,
    top: usize,
    rows: usize,
    choice: ExpertChoice,
    biased: bool,
    scaled: bool,
    ties: bool,
    seed: u64,
}

impl RouterCase {
    fn strategy() -> impl Strategy<Value = Self> {
        let shape =
            (1..=6usize, 1..=9usize, any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1..=9usize);
        let how = (any::<[bool; 6]>(), prop_oneof![Just(1f32), Just(2.5)], any::<u64>());
        (shape, how).prop_map(
            |(
                (groups, size, used, top, rows),
                ([sigmoid, grouped, renormalised, biased, scaled, ties], scale, seed),
            )| {
                // A group of two at least, of which two count together.
                let (size, used) = (size + 1, 1 + used.index(groups));
                let open = if grouped { used * size } else { groups * size };
                Self {
                    experts: groups * size,
                    top: 1 + top.index(open),
                    rows,
                    choice: ExpertChoice {
                        scoring: if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax },
                        groups: grouped.then_some(ExpertGroups { count: groups, used }),
                        renormalised,
                        scale,
                    },
                    biased: biased && sigmoid,
                    scaled,
                    ties,
                    seed,
                }
            },
        )
    }
}

/// Chosen experts and weights, by row.
fn choose(
    device: &Device,
    kernels: &Kernels,
    case: &RouterCase,
    logits: &[f32],
    bias: &[f32],
    scales: &[f32],
) -> (Vec<usize>, Vec<f32>) {
    let rows = logits.len() / case.experts;
    let routing = Routing::new(device, case.experts, case.top, rows).unwrap();
    let chosen = poisoned(device, rows * case.top);
    let (bias, scales) = (upload(device, bias), upload(device, scales));
    let router = Router {
        logits: &upload(device, logits),
        stride: case.experts,
        choice: case.choice,
        bias: case.biased.then_some(&bias),
        expert_scales: case.scaled.then_some(&scales),
    };
    device.enqueue(&kernels.choose_experts(device, &router, &chosen, &routing, rows).unwrap()).unwrap();
    let chosen = download(device, &chosen).iter().map(|v| v.to_bits() as usize).collect();
    (chosen, download(device, &routing.weights))
}

#[test]
fn routers_of_every_kind_choose_as_their_reference() {
    let (device, kernels) = open();
    routers_choose_as_their_reference(&device, &kernels);
}

#[test]
fn routers_by_sub_groups_choose_as_their_reference() {
    let (device, _) = open();
    match Kernels::with_xmx(&device).unwrap() {
        Some(kernels) => routers_choose_as_their_reference(&device, &kernels),
        None => println!("no sub-groups with loads of blocks here: the xmx family cannot run"),
    }
}

fn routers_choose_as_their_reference(device: &Device, kernels: &Kernels) {
    check(if simulated() { 40 } else { 300 }, &RouterCase::strategy(), |case| {
        let (experts, top) = (case.experts, case.top);
        let mut random = Random(case.seed);
        let mut values = |count: usize, reach: f32| -> Vec<f32> {
            (0..count)
                .map(|_| if case.ties { random.below(3) as f32 / 4.0 } else { random.unit() * reach })
                .collect()
        };
        let logits = values(case.rows * experts, 4.0);
        let (bias, scales) = (values(experts, 0.3), values(experts, 2.0));
        let (chosen, weights) = choose(device, kernels, &case, &logits, &bias, &scales);
        for row in 0..case.rows {
            let logits = &logits[row * experts..][..experts];
            let known = if case.biased { &bias[..] } else { &[] };
            let (expected, shares) = router_reference(logits, &case.choice, known, top);
            let at = row * top..(row + 1) * top;
            prop_assert_eq!(&chosen[at.clone()], &expected[..], "row {}", row);
            for ((&found, share), &expert) in weights[at].iter().zip(shares).zip(&expected) {
                let expected = if case.scaled { share * f64::from(scales[expert]) } else { share };
                let off = (40.0 + experts as f64 + top as f64) * ULP * expected.abs() + DENORMAL;
                prop_assert!(
                    (f64::from(found) - expected).abs() <= off,
                    "a weight of row {} is {}, the reference says {}",
                    row,
                    found,
                    expected
                );
            }
            let alone = choose(device, kernels, &case, logits, &bias, &scales);
            prop_assert_eq!(&alone.0, &chosen[row * top..(row + 1) * top]);
            prop_assert!(same_bits(&alone.1, &weights[row * top..(row + 1) * top]), "row {} alone", row);
        }
        // No number among the logits: indices stay valid and differ, no weight is a number.
        let mut spoilt = logits.clone();
        spoilt[random.below(experts)] = f32::NAN;
        let (chosen, weights) = choose(device, kernels, &case, &spoilt, &bias, &scales);
        let mut first = chosen[..top].to_vec();
        first.sort_unstable();
        first.dedup();
        prop_assert!(first.len() == top && first.iter().all(|&e| e < experts), "{:?}", chosen);
        prop_assert!(weights[..top].iter().all(|w| w.is_nan()) && weights[top..].iter().all(|w| !w.is_nan()));
        // None in the bias either: it would bar an expert for good, and nothing else would tell.
        if case.biased {
            let mut spoilt = bias.clone();
            spoilt[random.below(experts)] = f32::NAN;
            let (chosen, weights) = choose(device, kernels, &case, &logits, &spoilt, &scales);
            prop_assert!(chosen.iter().all(|&e| e < experts) && weights.iter().all(|w| w.is_nan()));
        }
        Ok(())
    });
}

#[test]
fn experts_are_added_to_the_stream() {
    let (device, kernels) = open();
    let shape = (1..=6usize, 1..=4usize, 1..=20usize, 1..=600usize, any::<u64>());
    check(if simulated() { 10 } else { 60 }, &shape, |(experts, top, rows, n, seed)| {
        let top = top.min(experts);
        let mut random = Random(seed);
        let (slots, lanes) = (rows * top, round_up(n, TILE));
        let (out_stride, stride) = (lanes + random.below(9), lanes + random.below(9));
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit() * 3.0).collect() };
        let (logits, out, stream) =
            (values(rows * experts), values(slots * out_stride), values(rows * stride));
        let routing = Routing::new(&device, experts, top, rows).unwrap();
        let chosen = poisoned(&device, slots);
        let router = Router {
            logits: &upload(&device, &logits),
            stride: experts,
            choice: ExpertChoice::default(),
            bias: None,
            expert_scales: None,
        };
        let target = upload(&device, &stream);
        // What is packed does not matter, where it goes does.
        let any = upload(&device, &vec![0.0; rows * STRIDE_MULTIPLE]);
        let input = RowInput {
            rows: &any,
            at: 0,
            branch: None,
            norm: None,
            n: STRIDE_MULTIPLE,
            stride: STRIDE_MULTIPLE,
            epsilon: EPSILON,
        };
        let [packed, packed_sums] = poisoned_packed(&device, &kernels, slots, STRIDE_MULTIPLE);
        for launch in [
            kernels.choose_experts(&device, &router, &chosen, &routing, rows).unwrap(),
            kernels
                .pack_for_experts(
                    &device,
                    &input,
                    &chosen,
                    &routing,
                    rows,
                    Family::Vector,
                    &packed.0,
                    &packed_sums.0,
                )
                .unwrap(),
            kernels
                .add_experts(&device, &upload(&device, &out), out_stride, &routing, rows, &target, n, stride)
                .unwrap(),
        ] {
            device.enqueue(&launch).unwrap();
        }
        let chosen: Vec<u32> = download(&device, &chosen).iter().map(|v| v.to_bits()).collect();
        let weights = download(&device, &routing.weights);
        let mut order: Vec<usize> = (0..slots).collect();
        order.sort_by_key(|&i| chosen[i]);
        let mut place = vec![0; slots];
        order.iter().enumerate().for_each(|(slot, &i)| place[i] = slot);
        let found = download(&device, &target);
        for row in 0..rows {
            for i in 0..stride {
                let before = stream[row * stride + i];
                let mut sum = 0f32;
                for k in row * top..(row + 1) * top {
                    sum = weights[k].mul_add(out[place[k] * out_stride + i.min(lanes - 1)], sum);
                }
                let expected = if i < lanes { before + sum } else { before };
                let found = found[row * stride + i];
                prop_assert!(
                    found.to_bits() == expected.to_bits(),
                    "{} for {} in row {}",
                    found,
                    expected,
                    row
                );
            }
        }
        Ok(())
    });
}
