//! A layer's weights, tables and cache on the device.

use super::LoadOptions;
use super::parts::LayerShape;
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, Rope};
use crate::model::error::ModelError;
use crate::ops::{Cache, Matrix, STRIDE_MULTIPLE, round_up};

/// Matrices of a layer, and its norms.
pub(super) struct Layer {
    /// Query, key and value matrices, those of one type joined; each with its first value in the qkv row.
    pub(super) qkv: Vec<(Matrix, usize)>,
    pub(super) output: Matrix,
    pub(super) gate_up: GateUp,
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

pub(super) enum GateUp {
    /// Tiles of both alternate in one matrix.
    Joined(Matrix),
    /// Two types: gate, then up.
    Apart(Matrix, Matrix),
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
        let vector = |part: &str, n| self.vector(&format!("blk.{index}.{part}.weight"), n);
        let pair = |wanted: bool, first: &str, second: &str, n| -> Result<_, ModelError> {
            Ok(if wanted { Some((vector(first, n)?, vector(second, n)?)) } else { None })
        };
        Ok(Layer {
            qkv: shape.qkv.iter().map(|&(matrix, at)| (matrices[matrix].clone(), at)).collect(),
            output: matrices[shape.output].clone(),
            gate_up: match shape.gate_up {
                (both, None) => GateUp::Joined(matrices[both].clone()),
                (gate, Some(up)) => GateUp::Apart(matrices[gate].clone(), matrices[up].clone()),
            },
            down: matrices[shape.down].clone(),
            attention_norm: vector("attn_norm", config.hidden)?,
            feed_forward_norm: vector("ffn_norm", config.hidden)?,
            branch_norms: pair(config.branch_norms, "post_attention_norm", "post_ffw_norm", config.hidden)?,
            head_norms: pair(config.head_norms, "attn_q_norm", "attn_k_norm", config.head_size)?,
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

    /// A tensor of `n` values as f32, zero-padded to the row stride.
    pub(super) fn vector(&self, name: &str, n: usize) -> Result<Buffer, ModelError> {
        let values = self.values(name, n)?;
        let mut padded = vec![0f32; round_up(n, STRIDE_MULTIPLE)];
        padded[..n].copy_from_slice(&values);
        let buffer = self.device.alloc(Purpose::Weights, padded.len() * 4)?;
        self.device.write(&buffer, 0, bytemuck::cast_slice(&padded))?;
        Ok(buffer)
    }

    fn values(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.require_tensor(name, &[n as u64])?;
        let mut values = vec![0f32; n];
        dequantize(tensor.ty, self.gguf.bytes(tensor), &mut values)?;
        Ok(values)
    }

    /// Cosine and sine of every position's angles, `[position][half rotated][2]`. Angles are products in f32 of
    /// position and frequency, as in the reference implementations.
    pub(super) fn angles(&self, rope: &Rope) -> Result<Buffer, ModelError> {
        let config = self.config;
        let half = config.rotated / 2;
        // Llama 3's slower low frequencies, as divisors; only layers that see everything have them.
        let divisors = match self.gguf.tensor("rope_freqs.weight") {
            Some(_) if *rope == config.rope => self.values("rope_freqs.weight", half)?,
            _ => vec![1.0; half],
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
