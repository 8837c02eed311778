//! A layer's weights, tables and cache on the device.

use super::LoadOptions;
use super::parts::LayerParts;
use super::scratch::QkvPlaces;
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, LayerConfig, Rope};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::ops::{Cache, Matrix, STRIDE_MULTIPLE, round_up};

/// Matrices of a layer, and its norms.
pub(super) struct Layer {
    /// Its sizes and switches.
    pub(super) config: LayerConfig,
    /// Where keys and values start in a qkv row.
    pub(super) places: QkvPlaces,
    /// Query, key and value matrices, those of one type joined; each with its first value in the qkv row.
    pub(super) qkv: Vec<(Matrix, usize)>,
    pub(super) output: Matrix,
    pub(super) gate_up: GateUp<Matrix>,
    pub(super) down: Matrix,
    pub(super) attention_norm: Buffer,
    pub(super) feed_forward_norm: Buffer,
    pub(super) branch_norms: Option<(Buffer, Buffer)>,
    pub(super) head_norms: Option<(Buffer, Buffer)>,
    pub(super) rope: Rope,
    pub(super) angles: Buffer,
    /// Its own, or that of the layer it shares keys and values with.
    pub(super) cache: Cache,
}

/// Makes layers out of matrices and the file's vectors.
pub(super) struct Loader<'a> {
    pub(super) device: &'a Device,
    pub(super) gguf: &'a Gguf,
    pub(super) config: &'a CausalConfig,
    pub(super) options: &'a LoadOptions,
    /// The table of each rotary embedding of the model.
    pub(super) angles: &'a [Buffer],
}

impl Loader<'_> {
    /// Layer `index`; `before` are those before it, one of which may share its cache.
    pub(super) fn layer(
        &self,
        index: usize,
        parts: &LayerParts,
        matrices: &[Matrix],
        before: &[Layer],
    ) -> Result<Layer, ModelError> {
        let config = &self.config.layers[index];
        let vector = |tensor: &TensorInfo| vector(self.device, self.gguf, tensor);
        let pair = |norms: &Option<(TensorInfo, TensorInfo)>| -> Result<_, ModelError> {
            norms.as_ref().map(|(a, b)| Ok((vector(a)?, vector(b)?))).transpose()
        };
        let shared = config.kv_from.and_then(|from| before.get(from)).map(|layer| layer.cache.clone());
        let (kind, positions) = (self.options.cache, self.options.context);
        Ok(Layer {
            places: QkvPlaces::new(config),
            qkv: parts.qkv.iter().map(|&(matrix, at)| (matrices[matrix].clone(), at)).collect(),
            output: matrices[parts.output].clone(),
            gate_up: parts.gate_up.map(|&matrix| matrices[matrix].clone()),
            down: matrices[parts.down].clone(),
            attention_norm: vector(&parts.attention_norm)?,
            feed_forward_norm: vector(&parts.feed_forward_norm)?,
            branch_norms: pair(&parts.branch_norms)?,
            head_norms: pair(&parts.head_norms)?,
            rope: self.config.ropes[config.rope],
            angles: self.angles[config.rope].clone(),
            cache: match shared {
                Some(cache) => cache,
                None => Cache::new(self.device, kind, config.kv_heads, config.key_size, positions)?,
            },
            config: config.clone(),
        })
    }
}

/// A tensor of one row as f32, zero-padded to the row stride.
pub(super) fn vector(device: &Device, gguf: &Gguf, tensor: &TensorInfo) -> Result<Buffer, ModelError> {
    let mut values = values(gguf, tensor)?;
    values.resize(round_up(values.len(), STRIDE_MULTIPLE), 0.0);
    let buffer = device.alloc(Purpose::Weights, values.len() * 4)?;
    device.write(&buffer, 0, bytemuck::cast_slice(&values))?;
    Ok(buffer)
}

/// A tensor's values as f32.
fn values(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0f32; tensor.values() as usize];
    dequantize(tensor.ty, gguf.bytes(tensor), &mut values)?;
    Ok(values)
}

/// Cosine and sine of every position's angles, `[position][pair][2]`. Angles are products in f32 of position and
/// frequency, as in the reference implementations. `divisors` is the tensor that divides frequencies, if the file has one.
pub(super) fn angles(
    device: &Device,
    gguf: &Gguf,
    rope: &Rope,
    divisors: Option<&TensorInfo>,
    positions: usize,
) -> Result<Buffer, ModelError> {
    let divisors = divisors.filter(|_| rope.divided).map(|tensor| values(gguf, tensor)).transpose()?;
    let frequencies = rope.frequencies(divisors.as_deref());
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

/// Bytes of the tables of angles of all rotary embeddings.
pub(super) fn angle_bytes(config: &CausalConfig, positions: usize) -> usize {
    config.ropes.iter().map(|rope| (positions * rope.pairs * 8).max(4)).sum()
}
