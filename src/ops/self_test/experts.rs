//! A mixture of experts.

use super::{Sequence, compare, download, matrix, poisoned, poisoned_packed, random_tiles, upload};
use crate::device::Device;
use crate::ops::kernels::{Family, Kernels, OpsError};
use crate::ops::matmul::{Activation, RowInput, prepare_reference};
use crate::ops::moe::{
    CombineInput, ExpertChoice, Experts, Router, Routing, combine_reference, expert_reference,
    route_reference, router_reference,
};
use crate::ops::{Format, ROW_MULTIPLE, STRIDE_MULTIPLE, TILE, round_up};

/// Runs the kernels of a mixture of experts for these weight formats.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_moe(device: &Device, kernels: &Kernels, formats: &[Format]) -> Result<(), OpsError> {
    formats.iter().try_for_each(|&format| Mixture::new(format).test(device, kernels))
}

/// Runs a router that chooses `top` of `experts` so, with a bias for the choice or without, and the sum of what experts make.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_router(
    device: &Device,
    kernels: &Kernels,
    choice: &ExpertChoice,
    experts: usize,
    top: usize,
    biased: bool,
) -> Result<(), OpsError> {
    const ROWS: usize = 7;
    const N: usize = 80;
    const STRIDE: usize = STRIDE_MULTIPLE;
    let wrong = |kernel: &str, what: String| OpsError::SelfTest {
        kernel: kernel.to_owned(),
        device: device.info().name.clone(),
        what,
    };
    let mut sequence = Sequence(31);
    let logits: Vec<f32> = sequence.take(ROWS * experts).iter().map(|v| v * 4.0).collect();
    let bias: Vec<f32> = sequence.take(experts).iter().map(|v| v / 4.0).collect();
    let (out, stream) = (sequence.take(ROWS * top * N), sequence.take(ROWS * STRIDE));
    let routing = Routing::new(device, experts, top, ROWS)?;
    let chosen = poisoned(device, ROWS * top)?;
    let (logits_buffer, bias_buffer) = (upload(device, &logits)?, upload(device, &bias)?);
    let router = Router {
        logits: &logits_buffer,
        stride: experts,
        choice: *choice,
        bias: biased.then_some(&bias_buffer),
        expert_scales: None,
    };
    let (out_buffer, result) = (upload(device, &out)?, upload(device, &stream)?);
    device.enqueue(&kernels.choose_experts(device, &router, &chosen, &routing, ROWS)?)?;
    // What is packed does not matter, where it goes does.
    let input =
        RowInput { rows: &result, at: 0, branch: None, norm: None, n: N, stride: STRIDE, epsilon: 0.0 };
    let [packed, sums] = poisoned_packed(device, kernels, ROWS * top, STRIDE)?;
    let family = Family::Vector;
    device.enqueue(
        &kernels.pack_for_experts(device, &input, &chosen, &routing, ROWS, family, &packed, &sums)?,
    )?;
    device.enqueue(&kernels.add_experts(device, &out_buffer, N, &routing, ROWS, &result, N, STRIDE)?)?;
    let (chosen, weights) = (download(device, &chosen)?, download(device, &routing.weights)?);
    let found: Vec<usize> = chosen.iter().map(|expert| expert.to_bits() as usize).collect();
    // The stable sort by expert, told anew.
    let mut order: Vec<usize> = (0..ROWS * top).collect();
    order.sort_by_key(|&i| found[i]);
    let result = download(device, &result)?;
    for row in 0..ROWS {
        let at = row * top..(row + 1) * top;
        let known = if biased { &bias[..] } else { &[] };
        let (expected, shares) = router_reference(&logits[row * experts..][..experts], choice, known, top);
        if found[at.clone()] != expected {
            return Err(wrong("route", format!("row {row} goes to {:?}, not {expected:?}", &found[at])));
        }
        compare(device, "route", &weights[at.clone()], &shares, 1e-5)?;
        let mut sum: Vec<f64> = stream[row * STRIDE..][..N].iter().map(|&v| f64::from(v)).collect();
        for (i, share) in at.zip(shares) {
            let slot = order.iter().position(|&other| other == i).unwrap_or(0);
            sum.iter_mut().zip(&out[slot * N..]).for_each(|(sum, &out)| *sum += share * f64::from(out));
        }
        compare(device, "add_experts", &result[row * STRIDE..][..N], &sum, 1e-5)?;
    }
    Ok(())
}

/// A small mixture of experts: weights, rows and what goes with them.
struct Mixture {
    format: Format,
    /// Both the hidden size and the inner width.
    columns: usize,
    stride: usize,
    gate_up: Vec<u8>,
    down: Vec<u8>,
    scores: Vec<f32>,
    scales: Vec<f32>,
    x: Vec<f32>,
    mlp: Vec<f32>,
    /// Weights of the rows' norm, and of those of the experts' sum, of the dense branch and of both.
    norms: [Vec<f32>; 4],
}

impl Mixture {
    const EXPERTS: usize = 4;
    const TOP: usize = 2;
    const ROWS: usize = 132; // the favoured expert's rows need two blocks
    const SCALAR: f32 = 0.75;
    const EPSILON: f32 = 1e-5;

    fn new(format: Format) -> Self {
        let columns = if format.block_groups() == 8 { 256 } else { 96 };
        let stride = round_up(columns, STRIDE_MULTIPLE);
        let mut sequence = Sequence(format as u32 + 101);
        let gate_up = random_tiles(format, Self::EXPERTS * 2 * columns, columns, &mut sequence);
        let down = random_tiles(format, Self::EXPERTS * columns, columns, &mut sequence);
        let mut scores = sequence.take(Self::ROWS * Self::EXPERTS);
        for favoured in scores.iter_mut().skip(1).step_by(Self::EXPERTS) {
            *favoured += 2.5;
        }
        let mut rows = |rows: usize| -> Vec<f32> {
            (0..rows * stride).map(|i| if i % stride < columns { sequence.next() } else { 0.0 }).collect()
        };
        let (x, mlp) = (rows(Self::ROWS), rows(Self::ROWS));
        let norms = [(); 4].map(|()| rows(1));
        let scales = sequence.take(Self::EXPERTS).iter().map(|v| v + 1.5).collect();
        Self { format, columns, stride, gate_up, down, scores, scales, x, mlp, norms }
    }

    fn test(&self, device: &Device, kernels: &Kernels) -> Result<(), OpsError> {
        let whole = self.run(device, kernels, 0, Self::ROWS)?;
        for row in [0, Self::ROWS / 2, Self::ROWS - 1] {
            let name = format!("expert products {}", self.format.name());
            compare(device, &name, &whole[row * self.stride..][..self.columns], &self.expected(row), 2e-5)?;
            let alone = self.run(device, kernels, row, 1)?;
            let differs =
                (0..self.columns).find(|&i| alone[i].to_bits() != whole[row * self.stride + i].to_bits());
            if let Some(i) = differs {
                return Err(OpsError::SelfTest {
                    kernel: name,
                    device: device.info().name.clone(),
                    what: format!(
                        "value {i} is {}, many rows at once give {}",
                        alone[i],
                        whole[row * self.stride + i]
                    ),
                });
            }
        }
        Ok(())
    }

    fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        first: usize,
        rows: usize,
    ) -> Result<Vec<f32>, OpsError> {
        let (columns, stride, slots) = (self.columns, self.stride, rows * Self::TOP);
        let experts = |tiles: &[u8], rows_each: usize| -> Result<Experts, OpsError> {
            let rows = Self::EXPERTS * rows_each;
            let matrix = matrix(device, kernels, self.format, tiles.to_vec(), rows, columns)?;
            Ok(Experts { matrix, experts: Self::EXPERTS, outputs: columns })
        };
        let (gate_up, down) = (experts(&self.gate_up, 2 * columns)?, experts(&self.down, columns)?);
        let part = |values: &[f32], each: usize| upload(device, &values[first * each..][..rows * each]);
        let scores = part(&self.scores, Self::EXPERTS)?;
        let (x, mlp) = (part(&self.x, stride)?, part(&self.mlp, stride)?);
        let scales = upload(device, &self.scales)?;
        let norms = self.norms.iter().map(|norm| upload(device, norm)).collect::<Result<Vec<_>, _>>()?;
        let routing = Routing::new(device, Self::EXPERTS, Self::TOP, rows)?;
        let chosen = poisoned(device, slots)?;
        let input = RowInput {
            rows: &x,
            at: 0,
            branch: None,
            norm: norms.first(),
            n: columns,
            stride,
            epsilon: Self::EPSILON,
        };
        let [packed, sums] = poisoned_packed(device, kernels, slots, stride)?;
        let [inner, inner_sums] = poisoned_packed(device, kernels, slots, stride)?;
        let (out, result) = (poisoned(device, slots * stride)?, poisoned(device, rows * stride)?);
        let join = CombineInput {
            out: &out,
            out_stride: stride,
            mlp: &mlp,
            residual: &x,
            moe_norm: &norms[1],
            mlp_norm: &norms[2],
            join_norm: &norms[3],
            scalar: Self::SCALAR,
            n: columns,
            stride,
            epsilon: Self::EPSILON,
            next: None,
        };
        let activation = Activation::GeluTanh;
        let sums_inside = kernels.sum_inner(device, &down, &routing, rows, &inner, &inner_sums)?;
        let before = [
            kernels.route(device, &scores, Self::EXPERTS, &scales, &chosen, &routing, rows)?,
            kernels.pack_for_experts(
                device,
                &input,
                &chosen,
                &routing,
                rows,
                gate_up.matrix.family,
                &packed,
                &sums,
            )?,
            kernels.expert_gate_up(
                device,
                &gate_up,
                activation,
                &routing,
                rows,
                &packed,
                &sums,
                &inner,
                &inner_sums,
            )?,
        ];
        let behind = [
            kernels.expert_down(device, &down, &routing, rows, &inner, &inner_sums, &out, stride)?,
            kernels.combine(device, &join, &routing, rows, &result)?,
        ];
        for launch in before.iter().chain(&sums_inside).chain(&behind) {
            device.enqueue(launch)?;
        }
        download(device, &result)
    }

    /// The reference's row.
    fn expected(&self, row: usize) -> Vec<f64> {
        let columns = self.columns;
        let as_f64 = |values: &[f32]| -> Vec<f64> { values.iter().map(|&v| f64::from(v)).collect() };
        let slice = |values: &[f32]| as_f64(&values[row * self.stride..][..columns]);
        let norms: Vec<Vec<f64>> = self.norms.iter().map(|norm| as_f64(&norm[..columns])).collect();
        let size = self.format.tile_bytes(columns);
        let weights = |tiles: &[u8], output: usize| -> Vec<f64> {
            let tile = &tiles[output / TILE * size..][..size];
            (0..columns).map(|i| f64::from(self.format.weight(tile, output % TILE, i))).collect()
        };
        let x = slice(&self.x);
        let (_, prepared) = prepare_reference(&x, None, Some(&norms[0]), f64::from(Self::EPSILON));
        let scores = &self.scores[row * Self::EXPERTS..][..Self::EXPERTS];
        let (chosen, shares) = route_reference(scores, &self.scales, Self::TOP);
        let results: Vec<(f64, Vec<f64>)> = chosen
            .into_iter()
            .zip(shares)
            .map(|(expert, share)| {
                let inner: Vec<f64> = (0..columns)
                    .map(|i| {
                        let gate = expert * 2 * columns + i / TILE * ROW_MULTIPLE + i % TILE;
                        let (gate, up) = (weights(&self.gate_up, gate), weights(&self.gate_up, gate + TILE));
                        expert_reference(&gate, &up, &prepared, Activation::GeluTanh)
                    })
                    .collect();
                let dot = |output: usize| -> f64 {
                    weights(&self.down, output).iter().zip(&inner).map(|(w, v)| w * v).sum()
                };
                (share, (0..columns).map(|i| dot(expert * columns + i)).collect())
            })
            .collect();
        let results: Vec<(f64, &[f64])> = results.iter().map(|(share, out)| (*share, &out[..])).collect();
        combine_reference(
            &results,
            &slice(&self.mlp),
            &x,
            [&norms[1], &norms[2], &norms[3]],
            f64::from(Self::SCALAR),
            f64::from(Self::EPSILON),
        )
    }
}
