//! A layer's weights, tables and cache on the device.

use super::LoadOptions;
use super::parts::LayerShape;
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, Rope};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::ops::{Cache, Matrix, STRIDE_MULTIPLE, round_up};

/// Matrices of a layer, and its norms.
pub(super) struct Layer {
    /// Query, key and value matrices, those of one type joined; each with its first value in the qkv row.
    pub(super) qkv: Vec<(Matrix, usize)>,
    pub(super) output: Matrix,
    pub(super) gate_up: GateUp<Matrix>,
    pub(super) down: Matrix,
    pub(super) attention_norm: Buffer,
    pub(super) feed_forward_norm: Buffer,
    pub(super) branch_norms: Option<(Buffer, Buffer)>,
    pub(super) head_norms: Option<(Buffer, Buffer)>,
    pub(super) window: Option<usize>,
    pub(super) scale: f32,
    pub(super) angles: Buffer,
    pub(super) cache: Cache,
}

/// Makes layers out of matrices and the file's vectors.
pub(super) struct Loader<'a> {
    pub(super) device: &'a Device,
    pub(super) gguf: &'a Gguf,
    pub(super) config: &'a CausalConfig,
    pub(super) options: &'a LoadOptions,
}

impl Loader<'_> {
    pub(super) fn layer(
        &self,
        index: usize,
        shape: &LayerShape,
        matrices: &[Matrix],
        angles: &Buffer,
    ) -> Result<Layer, ModelError> {
        let config = self.config;
        let pair = |norms: &Option<(TensorInfo, TensorInfo)>| -> Result<_, ModelError> {
            norms.as_ref().map(|(a, b)| Ok((self.vector(a)?, self.vector(b)?))).transpose()
        };
        Ok(Layer {
            qkv: shape.qkv.iter().map(|&(matrix, at)| (matrices[matrix].clone(), at)).collect(),
            output: matrices[shape.output].clone(),
            gate_up: shape.gate_up.map(|&matrix| matrices[matrix].clone()),
            down: matrices[shape.down].clone(),
            attention_norm: self.vector(&shape.attention_norm)?,
            feed_forward_norm: self.vector(&shape.feed_forward_norm)?,
            branch_norms: pair(&shape.branch_norms)?,
            head_norms: pair(&shape.head_norms)?,
            window: config.layer(index).0,
            scale: config.attention_scale,
            angles: angles.clone(),
            cache: Cache::new(
                self.device,
                self.options.cache,
                config.kv_heads,
                config.head_size,
                self.options.context,
            )?,
        })
    }

    /// A tensor of one row as f32, zero-padded to the row stride.
    pub(super) fn vector(&self, tensor: &TensorInfo) -> Result<Buffer, ModelError> {
        let mut values = self.values(tensor)?;
        values.resize(round_up(values.len(), STRIDE_MULTIPLE), 0.0);
        let buffer = self.device.alloc(Purpose::Weights, values.len() * 4)?;
        self.device.write(&buffer, 0, bytemuck::cast_slice(&values))?;
        Ok(buffer)
    }

    fn values(&self, tensor: &TensorInfo) -> Result<Vec<f32>, ModelError> {
        let mut values = vec![0f32; tensor.values() as usize];
        dequantize(tensor.ty, self.gguf.bytes(tensor), &mut values)?;
        Ok(values)
    }

    /// Cosine and sine of every position's angles, `[position][half rotated][2]`. Angles are products in f32 of
    /// position and frequency, as in the reference implementations.
    pub(super) fn angles(&self, rope: &Rope, divisors: Option<&TensorInfo>) -> Result<Buffer, ModelError> {
        let config = self.config;
        let half = config.rotated / 2;
        let divisors = match divisors {
            Some(tensor) => self.values(tensor)?,
            None => vec![1.0; half],
        };
        let frequencies: Vec<f32> = (0..half)
            .zip(&divisors)
            .map(|(i, divisor)| {
                let exponent = 2.0 * i as f32 / config.rotated as f32;
                1.0 / rope.base.powf(exponent) / (divisor * rope.linear_factor)
            })
            .collect();
        let table: Vec<f32> = (0..self.options.context)
            .flat_map(|position| {
                frequencies.iter().flat_map(move |frequency| {
                    let angle = f64::from(position as f32 * frequency);
                    [angle.cos() as f32, angle.sin() as f32]
                })
            })
            .collect();
        let buffer = self.device.alloc(Purpose::Scratch, table.len().max(1) * 4)?;
        self.device.write(&buffer, 0, bytemuck::cast_slice(&table))?;
        Ok(buffer)
    }
}
