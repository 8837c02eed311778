//! The launches of a pass, one op after the other.

mod feed_forward;
mod latent;

use super::layer::Layer;
use super::scratch::Scratch;
use super::{Causal, Logits};
use crate::device::Buffer;
use crate::model::config::{CausalConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::model::pass::Pass;
use crate::ops::{
    ATTENTION_START, Attention, CacheKind, Family, Finish, Heads, Matrix, Output, Parts, ROTATE_START,
    Rotation, RowInput,
};

/// A pass of `rows` rows through `model`.
///
/// # Errors
/// What the device says.
pub(super) fn pass(model: &Causal, rows: usize, logits: Logits) -> Result<Pass, ModelError> {
    pass_of_layers(model, rows, logits, model.layers.len())
}

/// The same through the first `layers` layers, and what is behind the last one.
///
/// # Errors
/// What the device says.
pub(super) fn pass_of_layers(
    model: &Causal,
    rows: usize,
    logits: Logits,
    layers: usize,
) -> Result<Pass, ModelError> {
    let mut builder = Builder { model, rows, pass: Pass::default(), at: 0, branch_norm: None };
    builder.layer_inputs()?;
    // Where only keys and values are wanted, the last layer that has any of its own ends the pass.
    let last = model.layers.iter().rposition(|layer| layer.config.kv_from.is_none());
    for (index, layer) in model.layers.iter().enumerate().take(layers) {
        builder.attention_inputs(layer)?;
        if logits == Logits::None && Some(index) == last {
            return Ok(builder.pass);
        }
        builder.attention(layer)?;
        builder.second_half(index, layer)?;
        builder.pass.end_layer();
    }
    builder.head(logits)?;
    Ok(builder.pass)
}

/// What [`Builder`] does with the heads of each layer, for the self-test to do the same.
pub(super) fn heads(config: &CausalConfig, cache: CacheKind) -> Vec<Heads> {
    let of = |layer: &LayerConfig| {
        let rope = &config.ropes[layer.rope];
        Heads {
            pairing: rope.pairing,
            rotated_pairs: rope.pairs,
            norms: config.family.head_norms,
            value_norms: config.family.value_norms,
            keys_are_values: layer.keys_are_values,
            bias: config.family.qkv_biases,
            softcap: layer.softcap > 0.0,
            ..Heads::plain(layer.key_size, cache)
        }
    };
    let plain = config.layers.iter().filter(|layer| layer.latent.is_none());
    let mut all: Vec<Heads> = plain.map(of).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Adds the launches of a pass one op after the other, keeping track of where the residual stream is.
struct Builder<'a> {
    model: &'a Causal,
    rows: usize,
    pass: Pass,
    /// Which residual buffer holds the stream.
    at: usize,
    /// The branch buffer waits to be normed with this weight and added.
    branch_norm: Option<&'a Buffer>,
}

impl<'a> Builder<'a> {
    fn residual(&self) -> &'a Buffer {
        &self.model.scratch.residual[self.at]
    }

    /// Where the stream goes next.
    fn other_residual(&self) -> &'a Buffer {
        &self.model.scratch.residual[1 - self.at]
    }

    /// Rows as long as the stream's, to put something into.
    fn stream_rows(&self, rows: &'a Buffer) -> Output<'a> {
        Output { rows, at: 0, stride: self.model.strides.hidden }
    }

    /// The inputs that layers have of their own: what the host has embedded, and what the first rows make.
    fn layer_inputs(&mut self) -> Result<(), ModelError> {
        let model = self.model;
        let (Some(inputs), Some(scratch)) = (&model.inputs, &model.scratch.inputs) else { return Ok(()) };
        let rows = self.plain(self.residual(), model.config.hidden, model.strides.hidden);
        let output = Output { rows: &scratch.parts, at: 0, stride: scratch.stride };
        self.products(rows, &[(&inputs.projection, Finish::Store, output)])?;
        let parts = Parts {
            parts: &scratch.parts,
            embedded: &scratch.embedded,
            weight: &inputs.norm,
            scale: 1.0 / (model.config.hidden as f32).sqrt(),
            share: std::f32::consts::FRAC_1_SQRT_2,
            count: model.layers.len(),
            size: model.config.layer_input,
            stride: scratch.stride,
            epsilon: model.config.epsilon,
        };
        self.pass.push(model.kernels.mix_parts(&model.device, &parts, self.rows)?);
        Ok(())
    }

    /// The residual stream as an input, with what waits to be added to it.
    fn normed(&self, norm: &'a Buffer) -> RowInput<'a> {
        let model = self.model;
        RowInput {
            rows: self.residual(),
            at: 0,
            branch: self.branch_norm.map(|weight| (&model.scratch.branch, weight, self.other_residual())),
            norm: Some(norm),
            n: model.config.hidden,
            stride: model.strides.hidden,
            epsilon: model.config.epsilon,
        }
    }

    fn plain(&self, rows: &'a Buffer, n: usize, stride: usize) -> RowInput<'a> {
        RowInput { rows, at: 0, branch: None, norm: None, n, stride, epsilon: self.model.config.epsilon }
    }

    /// Multiplies one input with several matrices.
    fn products(
        &mut self,
        input: RowInput<'a>,
        products: &[(&Matrix, Finish<'_>, Output<'_>)],
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (device, kernels, scratch) = (&model.device, &model.kernels, &model.scratch);
        let mut input = input;
        let (packed, sums) = (&scratch.packed, &scratch.sums);
        let narrow = products.iter().all(|(matrix, ..)| self.rows <= kernels.narrow_rows(matrix));
        let mut packed_for = None;
        for (matrix, finish, output) in products {
            if narrow {
                self.pass.push(kernels.narrow(device, matrix, &input, self.rows, *finish, output)?);
            } else if packed_for.replace(matrix.family) != Some(matrix.family) {
                self.pass.push(kernels.pack_rows(device, &input, self.rows, matrix.family, packed, sums)?);
            }
            // What comes first has added the branch; the others find the sum.
            if let Some((_, _, sum)) = input.branch.take() {
                input.rows = sum;
            }
            if !narrow {
                self.pass.push(kernels.matmul(device, matrix, packed, sums, self.rows, *finish, output)?);
            }
        }
        Ok(())
    }

    /// A branch has been added on the way into a product: the stream is in the other buffer now.
    fn joined(&mut self) {
        if self.branch_norm.take().is_some() {
            self.at = 1 - self.at;
        }
    }

    fn attention_inputs(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let weights = &layer.weights;
        if let Some(latent) = &weights.latent {
            return self.latent_inputs(layer, latent);
        }
        let products: Vec<_> = weights
            .qkv
            .iter()
            .map(|(matrix, at)| {
                let output = Output { rows: &model.scratch.qkv, at: *at, stride: model.strides.qkv };
                (matrix, Finish::Store, output)
            })
            .collect();
        self.products(self.normed(&weights.attention_norm), &products)?;
        self.joined();
        let rotation = Rotation {
            qkv: &model.scratch.qkv,
            stride: model.strides.qkv,
            q_heads: layer.config.heads,
            k_at: layer.places.k_at,
            v_at: layer.places.v_at,
            bias: weights.qkv_bias.as_ref(),
            angles: &layer.angles,
            half_rotated: layer.rope.pairs,
            pairing: layer.rope.pairing,
            norms: weights.head_norms.as_ref().map(|(q, k)| (q, k)),
            value_norms: model.config.family.value_norms,
            queries_only: layer.config.kv_from.is_some(),
            queries: model.scratch.queries.as_ref(),
            epsilon: model.config.epsilon,
        };
        let launch = model.kernels.rotate_and_cache(&model.device, &rotation, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ROTATE_START);
        Ok(())
    }

    fn attention(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let width = layer.config.attended_width();
        let (attended, stride) = model.scratch.attended.rows(width)?;
        let q = match (layer.cache.family, &model.scratch.queries) {
            (Family::Xmx, Some(queries)) => queries,
            _ => &model.scratch.qkv,
        };
        let attention = Attention {
            q,
            stride: model.strides.qkv,
            out: attended,
            out_stride: stride,
            q_heads: layer.config.heads,
            window: layer.config.window,
            canvas: false,
            scale: layer.config.scale,
            softcap: layer.config.softcap,
        };
        let launch = model.kernels.attention(&model.device, &attention, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ATTENTION_START);
        let weights = &layer.weights;
        let input = match &weights.latent {
            Some(latent) => self.values_of_heads(layer, latent, attended, stride)?,
            None => self.plain(attended, width, stride),
        };
        self.branch(input, &weights.output, weights.branch_norms.as_ref().map(|(norm, _)| norm))
    }

    /// The last product of a branch: added to the stream at once, or left to be normed first.
    fn branch(
        &mut self,
        input: RowInput<'a>,
        matrix: &Matrix,
        norm: Option<&'a Buffer>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let stream = self.residual();
        let (finish, rows) = match norm {
            Some(_) => (Finish::Store, &model.scratch.branch),
            None => (Finish::Add(stream), stream),
        };
        self.branch_norm = norm;
        self.products(input, &[(matrix, finish, Output { rows, at: 0, stride: model.strides.hidden })])
    }

    fn head(&mut self, logits: Logits) -> Result<(), ModelError> {
        let model = self.model;
        let mut input = self.normed(&model.head_norm);
        if logits == Logits::Last {
            input.at = (self.rows - 1) * model.strides.hidden;
            self.rows = 1;
        }
        let output = Output { rows: &model.scratch.logits, at: 0, stride: model.strides.logits };
        self.products(input, &[(&model.head, Finish::Store, output)])?;
        if model.config.softcap > 0.0 {
            let (logits, n, cap) = (&model.scratch.logits, model.config.vocabulary, model.config.softcap);
            let stride = model.strides.logits;
            self.pass.push(model.kernels.cap_rows(&model.device, logits, self.rows, n, stride, cap)?);
        }
        let Scratch { logits, choices, .. } = &model.scratch;
        let (stride, limit) = (model.strides.logits, model.choice_limit);
        self.pass.push(model.kernels.choose(&model.device, logits, stride, limit, self.rows, choices)?);
        Ok(())
    }
}
