//! The launches of a pass, one op after the other.

use super::layer::Layer;
use super::{Causal, Logits};
use crate::device::Buffer;
use crate::model::config::{CausalConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::pass::Pass;
use crate::ops::{
    ATTENTION_START, Attention, CacheKind, Finish, Heads, Matrix, Output, ROTATE_START, Rotation, RowInput,
};

/// A pass of `rows` rows through `model`.
///
/// # Errors
/// What the device says.
pub(super) fn pass(model: &Causal, rows: usize, logits: Logits) -> Result<Pass, ModelError> {
    let mut builder = Builder { model, rows, pass: Pass::default(), at: 0, branch_norm: None };
    let last = model.layers.len() - 1;
    for (index, layer) in model.layers.iter().enumerate() {
        builder.attention_inputs(layer)?;
        if index == last && logits == Logits::None {
            return Ok(builder.pass); // keys and values of the last layer are all that is wanted of it
        }
        builder.attention(layer)?;
        builder.feed_forward(layer)?;
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
            ..Heads::plain(layer.key_size, cache)
        }
    };
    let mut all: Vec<Heads> = config.layers.iter().map(of).collect();
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

    /// The residual stream as an input, with what waits to be added to it.
    fn normed(&self, norm: &'a Buffer) -> RowInput<'a> {
        let model = self.model;
        RowInput {
            rows: self.residual(),
            at: 0,
            branch: self
                .branch_norm
                .map(|weight| (&model.scratch.branch, weight, &model.scratch.residual[1 - self.at])),
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
        if self.rows > 1 {
            self.pass.push(kernels.pack_rows(device, &input, self.rows, &scratch.packed, &scratch.sums)?);
        }
        for (matrix, finish, output) in products {
            self.pass.push(if self.rows > 1 {
                kernels.matmul(device, matrix, &scratch.packed, &scratch.sums, self.rows, *finish, output)?
            } else {
                kernels.matvec(device, matrix, &input, *finish, output)?
            });
            // The first product has added the branch; the others find the sum.
            if let Some((_, _, sum)) = input.branch.take() {
                input.rows = sum;
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
        let products: Vec<_> = layer
            .qkv
            .iter()
            .map(|(matrix, at)| {
                let output = Output { rows: &model.scratch.qkv, at: *at, stride: model.strides.qkv };
                (matrix, Finish::Store, output)
            })
            .collect();
        self.products(self.normed(&layer.attention_norm), &products)?;
        self.joined();
        let rotation = Rotation {
            qkv: &model.scratch.qkv,
            stride: model.strides.qkv,
            q_heads: layer.config.heads,
            k_at: layer.places.k_at,
            v_at: layer.places.v_at,
            bias: None,
            angles: &layer.angles,
            half_rotated: layer.rope.pairs,
            pairing: layer.rope.pairing,
            norms: layer.head_norms.as_ref().map(|(q, k)| (q, k)),
            value_norms: false,
            queries_only: false,
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
        let attention = Attention {
            q: &model.scratch.qkv,
            stride: model.strides.qkv,
            out: attended,
            out_stride: stride,
            q_heads: layer.config.heads,
            window: layer.config.window,
            canvas: false,
            scale: layer.config.scale,
            softcap: 0.0,
        };
        let launch = model.kernels.attention(&model.device, &attention, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ATTENTION_START);
        let input = self.plain(attended, width, stride);
        self.branch(input, &layer.output, layer.branch_norms.as_ref().map(|(norm, _)| norm))
    }

    fn feed_forward(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let activation = model.config.family.activation;
        let width = layer.config.feed_forward.inner();
        let (gate, _) = model.scratch.gate.rows(width)?;
        let (inner, stride) = model.scratch.inner.rows(width)?;
        let rows = |rows| Output { rows, at: 0, stride };
        let input = self.normed(&layer.feed_forward_norm);
        match &layer.gate_up {
            GateUp::Joined(matrix) => {
                self.products(input, &[(matrix, Finish::Gated(activation), rows(inner))])?;
            }
            GateUp::Apart(first, up) => self.products(
                input,
                &[(first, Finish::Store, rows(gate)), (up, Finish::GatedWith(activation, gate), rows(inner))],
            )?,
        }
        self.joined();
        let input = self.plain(inner, width, stride);
        self.branch(input, &layer.down, layer.branch_norms.as_ref().map(|(_, norm)| norm))
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
        self.products(input, &[(&model.head, Finish::Store, output)])
    }
}
