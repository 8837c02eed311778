//! A layer's weights, tables and cache on the device.

use super::config::HeadRope;
use super::parts::LayerNorms;
use crate::device::{Buffer, Device, Purpose};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::ops::{Cache, Experts, Matrix, STRIDE_MULTIPLE, round_up};

/// A layer on the device.
pub(super) struct Layer {
    /// Query, key and value matrices, those of one type joined; each with its first value in the qkv row.
    pub(super) qkv: Vec<(Matrix, usize)>,
    pub(super) output: Matrix,
    pub(super) gate_up: GateUp<Matrix>,
    pub(super) down: Matrix,
    pub(super) router: Matrix,
    pub(super) experts_gate_up: Experts,
    pub(super) experts_down: Experts,
    pub(super) norms: LayerNorms<Buffer>,
    pub(super) router_norm: Buffer,
    pub(super) per_expert_scale: Buffer,
    /// Factor of the layer's result in encoder and decoder.
    pub(super) scalars: Scalars,
    /// Positions seen, the row's own included; none: all.
    pub(super) window: Option<usize>,
    pub(super) rotated_pairs: usize,
    /// First value of keys and of values in a qkv row.
    pub(super) kv_at: (usize, usize),
    /// What attention sees, f32 rows. It takes the place of the queries in the qkv rows: a work-item reads those of its
    /// rows and head, and nobody else does. Where rows need padding, layers with query rows of other lengths have their
    /// own buffer, whose padding stays zero.
    pub(super) attended: Buffer,
    pub(super) attended_stride: usize,
    pub(super) angles: Buffer,
    pub(super) cache: Cache,
    /// i32 `[rows][experts used]`: the experts that the rows of the last pass went to.
    pub(super) chosen: Buffer,
}

/// The one thing besides attention and input in which encoder and decoder differ.
#[derive(Clone, Copy)]
pub(super) struct Scalars {
    pub(super) encoder: f32,
    pub(super) decoder: f32,
}

/// A vector on the device, zero-padded to the row stride.
pub(super) fn vector(device: &Device, values: &[f32]) -> Result<Buffer, ModelError> {
    let mut padded = values.to_vec();
    padded.resize(round_up(values.len(), STRIDE_MULTIPLE), 0.0);
    let buffer = device.alloc(Purpose::Weights, padded.len() * 4)?;
    device.write(&buffer, 0, bytemuck::cast_slice(&padded))?;
    Ok(buffer)
}

/// Cosine and sine of every position's angles, `[position][pair][2]`. Frequencies are f32 and angles products in f32 of
/// position and frequency, as in the reference implementation.
pub(super) fn angles(
    device: &Device,
    rope: &HeadRope,
    head_size: usize,
    positions: usize,
) -> Result<Buffer, ModelError> {
    let frequencies: Vec<f32> = (0..rope.pairs)
        .map(|i| {
            let exponent = 2.0 * i as f64 / head_size as f64;
            (f64::from(rope.base).powf(-exponent) / f64::from(rope.factor)) as f32
        })
        .collect();
    let table: Vec<f32> = (0..positions)
        .flat_map(|position| {
            frequencies.iter().flat_map(move |frequency| {
                let angle = f64::from(position as f32 * frequency);
                [angle.cos() as f32, angle.sin() as f32]
            })
        })
        .collect();
    let buffer = device.alloc(Purpose::Scratch, table.len().max(1) * 4)?;
    device.write(&buffer, 0, bytemuck::cast_slice(&table))?;
    Ok(buffer)
}
