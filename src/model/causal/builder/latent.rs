//! Heads that see one latent: their queries on the way to it, and what they make of it on the way back.

use super::Builder;
use crate::device::Buffer;
use crate::model::causal::layer::Layer;
use crate::model::causal::layer_weights::LatentWeights;
use crate::model::causal::scratch::LatentScratch;
use crate::model::config::LatentConfig;
use crate::model::error::ModelError;
use crate::ops::{
    Finish, HeadMatrices, HeadRows, LATENT_START, LatentRotation, Matrix, OpsError, Output, RowInput,
};

impl<'a> Builder<'a> {
    fn latent_scratch(&self, layer: &Layer) -> Result<(&'a LatentScratch, LatentConfig), ModelError> {
        let missing = || OpsError::Shape { op: "latent", what: "no rows were set aside for it".to_owned() };
        let scratch = self.model.scratch.latent.as_ref().ok_or_else(missing)?;
        Ok((scratch, layer.config.latent.ok_or_else(missing)?))
    }

    /// Queries that meet latents, and the rows' own latents in the cache.
    pub(super) fn latent_inputs(
        &mut self,
        layer: &'a Layer,
        weights: &'a LatentWeights<Matrix, Buffer>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, sizes) = self.latent_scratch(layer)?;
        let queries = Output { rows: &scratch.queries, at: 0, stride: scratch.queries_stride };
        let latent = Output { rows: &scratch.query_latent, at: 0, stride: scratch.query_latent_stride };
        let key = Output { rows: &model.scratch.qkv, at: layer.places.k_at, stride: model.strides.qkv };
        let first = if weights.query_latent.is_some() { latent } else { queries };
        let input = self.normed(&layer.weights.attention_norm);
        self.products(input, &[(&weights.query, Finish::Store, first), (&weights.key, Finish::Store, key)])?;
        self.joined();
        if let (Some((norm, product)), Some(n)) = (&weights.query_latent, sizes.query) {
            let input = RowInput {
                norm: Some(norm),
                ..self.plain(&scratch.query_latent, n, scratch.query_latent_stride)
            };
            self.products(input, &[(product, Finish::Store, queries)])?;
        }
        let heads = layer.config.heads;
        let plain = HeadRows {
            rows: &scratch.queries,
            stride: scratch.queries_stride,
            at: 0,
            step: sizes.query_head(),
        };
        let meeting = HeadRows {
            rows: &model.scratch.qkv,
            stride: model.strides.qkv,
            at: 0,
            step: layer.config.key_size,
        };
        let outputs = sizes.size;
        self.head_products(
            HeadMatrices { matrix: weights.to_latent.clone(), heads, outputs },
            plain,
            meeting,
        )?;
        let rotation = LatentRotation {
            rows: &model.scratch.qkv,
            stride: model.strides.qkv,
            q_heads: heads,
            k_at: layer.places.k_at,
            turning: &scratch.queries,
            turning_stride: scratch.queries_stride,
            turning_step: sizes.query_head(),
            turning_at: sizes.plain,
            angles: &layer.angles,
            pairing: layer.rope.pairing,
            norm: &weights.norm,
            epsilon: model.config.epsilon,
        };
        let launch =
            model.kernels.rotate_and_cache_latent(&model.device, &rotation, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, LATENT_START);
        Ok(())
    }

    /// The values of heads, made out of the sums of latents that attention left.
    pub(super) fn values_of_heads(
        &mut self,
        layer: &'a Layer,
        weights: &'a LatentWeights<Matrix, Buffer>,
        attended: &'a Buffer,
        stride: usize,
    ) -> Result<RowInput<'a>, ModelError> {
        let model = self.model;
        let (_, sizes) = self.latent_scratch(layer)?;
        let width = layer.config.output_width();
        let (values, values_stride) = model.scratch.values.rows(width)?;
        let sums = HeadRows { rows: attended, stride, at: 0, step: sizes.size };
        let out = HeadRows { rows: values, stride: values_stride, at: 0, step: sizes.value };
        let (heads, outputs) = (layer.config.heads, sizes.value);
        self.head_products(HeadMatrices { matrix: weights.from_latent.clone(), heads, outputs }, sums, out)?;
        Ok(self.plain(values, width, values_stride))
    }

    fn head_products(
        &mut self,
        matrices: HeadMatrices,
        input: HeadRows<'_>,
        output: HeadRows<'_>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let Some(LatentScratch { packed, sums, .. }) = &model.scratch.latent else { return Ok(()) };
        let (device, kernels, rows) = (&model.device, &model.kernels, self.rows);
        self.pass.push(kernels.pack_heads(device, &matrices, &input, rows, packed, sums)?);
        self.pass.push(kernels.head_products(device, &matrices, packed, sums, rows, &output)?);
        Ok(())
    }
}
