//! The end of a layer with experts by the `xmx` family: against f64, over odd shapes, with poison behind what is written; what
//! it rounds for the next products are the bits of `prepare`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod ops_support;
mod support;

use axe::device::{Buffer, Device, Purpose};
use axe::ops::{
    CombineInput, ExpertChoice, Family, Kernels, PackedRows, Router, Routing, RowInput, STRIDE_MULTIPLE,
    TILE, combine_reference, round_up,
};
use ops_support::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    n: usize,
    experts: usize,
    top: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    (1..=40usize, 1..=700usize, 1..=20usize, 1..=8usize, any::<u64>())
        .prop_map(|(rows, n, experts, top, seed)| Case { rows, n, experts, top: top.min(experts), seed })
}

/// What a launch made of rows `first..first + rows`.
struct Made {
    result: Vec<f32>,
    packed: Vec<f32>,
    sums: Vec<f32>,
}

struct Bench<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    case: Case,
    stride: usize,
    out_stride: usize,
    logits: Vec<f32>,
    /// `[rows][top][out_stride]`, by choice.
    out: Vec<f32>,
    mlp: Vec<f32>,
    residual: Vec<f32>,
    norms: [Vec<f32>; 4],
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, kernels: &'a Kernels, case: &Case) -> Self {
        let mut random = Random(case.seed);
        let stride = round_up(case.n, STRIDE_MULTIPLE);
        let out_stride = round_up(case.n, TILE) + 4;
        let mut rows = |count: usize, each: usize| -> Vec<f32> {
            (0..count * each).map(|i| if i % each < case.n { random.unit() * 3.0 } else { 0.0 }).collect()
        };
        Self {
            device,
            kernels,
            case: case.clone(),
            stride,
            out_stride,
            out: rows(case.rows * case.top, out_stride),
            mlp: rows(case.rows, stride),
            residual: rows(case.rows, stride),
            norms: [rows(1, stride), rows(1, stride), rows(1, stride), rows(1, stride)],
            logits: (0..case.rows * case.experts).map(|_| random.unit() * 4.0).collect(),
        }
    }

    /// The rows, and each one's weights.
    fn run(&self, first: usize, rows: usize, packs: bool) -> (Made, Vec<f32>) {
        let (device, kernels, case, stride) = (self.device, self.kernels, &self.case, self.stride);
        let slice =
            |values: &[f32], each: usize| upload(device, &values[first * each..(first + rows) * each]);
        let routing = Routing::new(device, case.experts, case.top, rows).unwrap();
        let chosen = poisoned(device, rows * case.top);
        let logits = slice(&self.logits, case.experts);
        let router = Router {
            logits: &logits,
            stride: case.experts,
            choice: ExpertChoice::default(),
            bias: None,
            expert_scales: None,
        };
        let residual = slice(&self.residual, stride);
        let input = RowInput {
            rows: &residual,
            at: 0,
            branch: None,
            norm: None,
            n: case.n,
            stride,
            epsilon: EPSILON,
        };
        let slots = self.packed(rows * case.top);
        device.enqueue(&kernels.choose_experts(device, &router, &chosen, &routing, rows).unwrap()).unwrap();
        let pack = kernels.pack_for_experts(
            device,
            &input,
            &chosen,
            &routing,
            rows,
            Family::Xmx,
            &slots[0],
            &slots[1],
        );
        device.enqueue(&pack.unwrap()).unwrap();
        // Results lie where the stable sort by expert puts them.
        let chosen: Vec<u32> = download(device, &chosen).iter().map(|v| v.to_bits()).collect();
        let mut order: Vec<usize> = (0..rows * case.top).collect();
        order.sort_by_key(|&i| chosen[i]);
        let mut sorted = vec![0f32; rows * case.top * self.out_stride];
        for (slot, &i) in order.iter().enumerate() {
            let from = &self.out[(first * case.top + i) * self.out_stride..][..self.out_stride];
            sorted[slot * self.out_stride..][..self.out_stride].copy_from_slice(from);
        }
        let (out, mlp) = (upload(device, &sorted), slice(&self.mlp, stride));
        let [moe_norm, mlp_norm, join_norm, next_norm] =
            self.norms.each_ref().map(|norm| upload(device, norm));
        let (result, ready) = (poisoned(device, rows * stride + GUARD), self.packed(rows));
        let next = PackedRows { packed: &ready[0], sums: &ready[1] };
        let join = CombineInput {
            out: &out,
            out_stride: self.out_stride,
            mlp: &mlp,
            residual: &residual,
            moe_norm: &moe_norm,
            mlp_norm: &mlp_norm,
            join_norm: &join_norm,
            scalar: 0.75,
            n: case.n,
            stride,
            epsilon: EPSILON,
            next: packs.then_some((&next_norm, next)),
        };
        device.enqueue(&kernels.combine(device, &join, &routing, rows, &result).unwrap()).unwrap();
        if !packs {
            let behind = RowInput { rows: &result, norm: Some(&next_norm), ..input };
            let launch = kernels.pack_rows(device, &behind, rows, Family::Xmx, &ready[0], &ready[1]);
            device.enqueue(&launch.unwrap()).unwrap();
        }
        let [packed, sums] = ready.map(|buffer| download(device, &buffer));
        (Made { result: download(device, &result), packed, sums }, download(device, &routing.weights))
    }

    fn packed(&self, rows: usize) -> [Buffer; 2] {
        let products = self.kernels.products();
        [products.packed_values(rows, self.stride), products.sums_values(rows, self.stride)].map(|values| {
            let buffer = self.device.alloc(Purpose::Scratch, values * 4).unwrap();
            self.device.fill(&buffer, POISON).unwrap();
            buffer
        })
    }

    fn holds(&self) -> Result<(), TestCaseError> {
        let Case { rows, n, top, .. } = self.case;
        let stride = self.stride;
        let (made, weights) = self.run(0, rows, true);
        prop_assert!(is_poison(&made.result[rows * stride..]), "values behind the result are written");
        let (apart, _) = self.run(0, rows, false);
        prop_assert!(same_bits(&made.result, &apart.result), "the result depends on what follows");
        prop_assert!(same_bits(&made.packed, &apart.packed), "rounded rows differ from those of prepare");
        prop_assert!(same_bits(&made.sums, &apart.sums), "sums or factors differ from those of prepare");
        let norms: Vec<Vec<f64>> = self.norms.iter().map(|norm| f64s(&norm[..n])).collect();
        for row in 0..rows {
            let values = |v: &[f32]| f64s(&v[row * stride..][..n]);
            let results: Vec<Vec<f64>> =
                (0..top).map(|k| f64s(&self.out[(row * top + k) * self.out_stride..][..n])).collect();
            let experts: Vec<(f64, &[f64])> = results
                .iter()
                .enumerate()
                .map(|(k, out)| (f64::from(weights[row * top + k]), &out[..]))
                .collect();
            let expected = combine_reference(
                &experts,
                &values(&self.mlp),
                &values(&self.residual),
                [&norms[0], &norms[1], &norms[2]],
                0.75,
                f64::from(EPSILON),
            );
            let line = &made.result[row * stride..][..stride];
            let largest = expected.iter().fold(1f64, |most, v| most.max(v.abs()));
            for (i, (&found, expected)) in line.iter().zip(&expected).enumerate() {
                let off = (f64::from(found) - expected).abs();
                prop_assert!(off <= 2e-5 * largest, "value {} of row {}: {} for {}", i, row, found, expected);
            }
            prop_assert!(line[n..].iter().all(|v| *v == 0.0), "row {} is not padded with zeros", row);
        }
        // A row alone makes the same bits.
        let (alone, _) = self.run(rows - 1, 1, true);
        prop_assert!(same_bits(&alone.result[..stride], &made.result[(rows - 1) * stride..][..stride]));
        Ok(())
    }
}

#[test]
fn layers_end_as_the_reference_says_and_rows_are_rounded_on_the_way() {
    let device = support::device();
    let Some(kernels) = Kernels::with_xmx(&device).unwrap() else {
        println!("no sub-groups with loads of blocks here: the xmx family cannot run");
        assert_ne!(std::env::var("AXE_TEST_PLATFORM").as_deref(), Ok("intel"), "Intel's runtime has them");
        return;
    };
    check(40, &cases(), |case| Bench::new(&device, &kernels, &case).holds());
}
