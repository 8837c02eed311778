//! What is done to whole rows between products.

use super::{Sequence, compare, download, poisoned, upload};
use crate::device::Device;
use crate::ops::kernels::{Kernels, OpsError};
use crate::ops::matmul::Activation;
use crate::ops::stream::{Join, Parts, cap_reference, gate_reference, join_reference, mix_reference};
use crate::ops::{STRIDE_MULTIPLE, round_up};

const ROWS: usize = 5;
const N: usize = 90;
const EPSILON: f32 = 1e-5;

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Runs the kernels for whole rows.
///
/// # Errors
/// As [`self_test`](super::self_test).
pub fn self_test_stream(device: &Device, kernels: &Kernels, activation: Activation) -> Result<(), OpsError> {
    let mut sequence = Sequence(23);
    cap(device, kernels, &mut sequence)?;
    join(device, kernels, &mut sequence)?;
    gate(device, kernels, activation, &mut sequence)?;
    mix(device, kernels, &mut sequence)
}

fn cap(device: &Device, kernels: &Kernels, sequence: &mut Sequence) -> Result<(), OpsError> {
    const CAP: f32 = 0.5;
    let stride = round_up(N, 32);
    let logits = sequence.take(ROWS * stride);
    let buffer = upload(device, &logits)?;
    device.enqueue(&kernels.cap_rows(device, &buffer, ROWS, N, stride, CAP)?)?;
    let found = download(device, &buffer)?;
    for (found, logits) in found.chunks_exact(stride).zip(logits.chunks_exact(stride)) {
        let expected: Vec<f64> =
            logits[..N].iter().map(|&v| cap_reference(f64::from(v), f64::from(CAP))).collect();
        compare(device, "cap_rows", found, &expected, 1e-5)?;
    }
    Ok(())
}

fn join(device: &Device, kernels: &Kernels, sequence: &mut Sequence) -> Result<(), OpsError> {
    const SCALAR: f32 = 0.75;
    let stride = round_up(N, STRIDE_MULTIPLE);
    let mut rows = |rows: usize| -> Vec<f32> {
        (0..rows * stride).map(|i| if i % stride < N { sequence.next() } else { 0.0 }).collect()
    };
    let (x, branch, weight) = (rows(ROWS), rows(ROWS), rows(1));
    let result = poisoned(device, ROWS * stride)?;
    let join = Join {
        rows: &upload(device, &x)?,
        branch: &upload(device, &branch)?,
        weight: &upload(device, &weight)?,
        scalar: SCALAR,
        n: N,
        stride,
        epsilon: EPSILON,
    };
    device.enqueue(&kernels.join_rows(device, &join, ROWS, &result)?)?;
    let found = download(device, &result)?;
    for (row, found) in found.chunks_exact(stride).enumerate() {
        let of = |values: &[f32]| doubles(&values[row * stride..][..N]);
        let (x, branch, weight) = (of(&x), of(&branch), doubles(&weight[..N]));
        let mut expected = join_reference(&x, &branch, &weight, f64::from(SCALAR), f64::from(EPSILON));
        expected.resize(stride, 0.0);
        compare(device, "join_rows", found, &expected, 1e-5)?;
    }
    Ok(())
}

fn gate(
    device: &Device,
    kernels: &Kernels,
    activation: Activation,
    sequence: &mut Sequence,
) -> Result<(), OpsError> {
    let (stride, at, other_stride) = (round_up(N, 32), 32, 32 + round_up(N, 32));
    let (gates, other) = (sequence.take(ROWS * stride), sequence.take(ROWS * other_stride));
    let (buffer, side) = (upload(device, &gates)?, upload(device, &other)?);
    let other_rows = (&side, other_stride);
    device.enqueue(&kernels.gate_rows(device, activation, &buffer, stride, other_rows, at, ROWS, N)?)?;
    let found = download(device, &buffer)?;
    for (row, found) in found.chunks_exact(stride).enumerate() {
        let (gates, other) = (&gates[row * stride..][..N], &other[row * other_stride + at..][..N]);
        let pairs = gates.iter().zip(other);
        let expected: Vec<f64> =
            pairs.map(|(&g, &o)| gate_reference(activation, f64::from(g), f64::from(o))).collect();
        compare(device, "gate_rows", found, &expected, 1e-5)?;
    }
    Ok(())
}

fn mix(device: &Device, kernels: &Kernels, sequence: &mut Sequence) -> Result<(), OpsError> {
    const COUNT: usize = 3;
    const SIZE: usize = 48;
    let width = COUNT * SIZE;
    let (parts, embedded) = (sequence.take(ROWS * width), sequence.take(ROWS * width));
    let weight = sequence.take(SIZE);
    let buffer = upload(device, &parts)?;
    let (scale, share) = (0.3, 0.7);
    let mixing = Parts {
        parts: &buffer,
        embedded: &upload(device, &embedded)?,
        weight: &upload(device, &weight)?,
        scale,
        share,
        count: COUNT,
        size: SIZE,
        stride: width,
        epsilon: EPSILON,
    };
    device.enqueue(&kernels.mix_parts(device, &mixing, ROWS)?)?;
    let found = download(device, &buffer)?;
    let weight = doubles(&weight);
    for ((found, part), embedded) in
        found.chunks_exact(SIZE).zip(parts.chunks_exact(SIZE)).zip(embedded.chunks_exact(SIZE))
    {
        let (part, embedded) = (doubles(part), doubles(embedded));
        let (scale, share, epsilon) = (f64::from(scale), f64::from(share), f64::from(EPSILON));
        let expected = mix_reference(&part, &embedded, &weight, scale, share, epsilon);
        compare(device, "mix_parts", found, &expected, 1e-5)?;
    }
    Ok(())
}
