//! A layer's weights, tables and cache on the device.

use super::LoadOptions;
use super::layer_weights::LayerWeights;
use super::scratch::QkvPlaces;
use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, LayerConfig, Rope};
use crate::model::error::ModelError;
use crate::ops::{Cache, Matrix, Products, STRIDE_MULTIPLE, round_up};

/// A layer on the device.
pub(super) struct Layer {
    /// Its sizes and switches.
    pub(super) config: LayerConfig,
    pub(super) weights: LayerWeights<Matrix, Buffer>,
    /// Where keys and values start in a qkv row.
    pub(super) places: QkvPlaces,
    pub(super) rope: Rope,
    pub(super) angles: Buffer,
    /// Its own, or that of the layer it shares keys and values with.
    pub(super) cache: Cache,
}

/// Makes layers out of matrices and vectors.
pub(super) struct Loader<'a> {
    pub(super) device: &'a Device,
    pub(super) config: &'a CausalConfig,
    pub(super) options: &'a LoadOptions,
    /// How the kernels that are there make products.
    pub(super) products: Products,
    pub(super) matrices: &'a [Matrix],
    pub(super) vectors: &'a [Buffer],
    /// The table of each rotary embedding of the model.
    pub(super) angles: &'a [Buffer],
}

impl Loader<'_> {
    /// Layer `index`; `before` are those before it, one of which may share its cache.
    pub(super) fn layer(
        &self,
        index: usize,
        weights: &LayerWeights<usize, usize>,
        before: &[Layer],
    ) -> Result<Layer, ModelError> {
        let config = &self.config.layers[index];
        let shared = config.kv_from.and_then(|from| before.get(from)).map(|layer| layer.cache.clone());
        let (kind, positions) = (self.options.cache, self.options.context);
        Ok(Layer {
            weights: weights
                .map(|&matrix| self.matrices[matrix].clone(), |&vector| self.vectors[vector].clone()),
            places: QkvPlaces::new(config),
            rope: self.config.ropes[config.rope],
            angles: self.angles[config.rope].clone(),
            cache: match shared {
                Some(cache) => cache,
                None if config.latent.is_some() => {
                    Cache::latent(self.device, kind, config.key_size, config.value_size, positions)?
                }
                None => {
                    let (heads, size) = (config.kv_heads, config.key_size);
                    let family = self.products.attention(kind, size);
                    Cache::of_family(self.device, family, kind, heads, size, positions)?
                }
            },
            config: config.clone(),
        })
    }
}

/// A vector on the device, zero-padded to the row stride.
pub(super) fn vector(device: &Device, values: &[f32]) -> Result<Buffer, ModelError> {
    let mut padded = values.to_vec();
    padded.resize(round_up(values.len(), STRIDE_MULTIPLE), 0.0);
    let buffer = device.alloc(Purpose::Weights, padded.len() * 4)?;
    device.write(&buffer, 0, bytemuck::cast_slice(&padded))?;
    Ok(buffer)
}
