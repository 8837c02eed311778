//! The launches of a pass, one op after the other. Encoder and decoder are one sequence: they differ in their input, in
//! what a row may see, in a factor a layer, and in where they end.

use super::DiffusionGemma;
use super::config::LayerConfig;
use super::layer::Layer;
use crate::device::Buffer;
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::pass::Pass;
use crate::ops::{
    ATTENTION_START, Activation, Attention, CacheKind, CombineInput, Family, Finish, Heads, Matrix, Output,
    Pairing, ROTATE_START, Rotation, RowInput,
};

/// The gate's activation, in all gated networks of the model.
const ACTIVATION: Activation = Activation::GeluTanh;

/// Which pass over the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mode {
    /// Rows append to the cache, each seeing what is before it. Ends with the last layer's keys and values.
    Encode,
    /// Rows are a canvas. Ends with the normed rows packed for the head.
    Decode {
        /// Their input is conditioned on the step before.
        conditioned: bool,
    },
}

/// A pass of `rows` rows through `model`.
///
/// # Errors
/// What the device says.
pub(super) fn pass(model: &DiffusionGemma, rows: usize, mode: Mode) -> Result<Pass, ModelError> {
    let mut builder = Builder { model, rows, mode, pass: Pass::default(), input: None, packed_for: None };
    builder.inputs()?;
    let last = model.layers.len() - 1;
    for (index, layer) in model.layers.iter().enumerate() {
        builder.attention_inputs(layer)?;
        if index == last && mode == Mode::Encode {
            return Ok(builder.pass);
        }
        builder.attention(layer)?;
        builder.dense(layer)?;
        builder.experts(layer)?;
        builder.pass.end_layer();
    }
    builder.take(builder.stream(&model.head_norm));
    builder.pack(Family::Vector)?;
    Ok(builder.pass)
}

/// What [`Builder`] does with the heads of a layer, for the self-test to do the same.
pub(super) fn heads(layer: &LayerConfig, cache: CacheKind) -> Heads {
    Heads {
        size: layer.head_size,
        cache,
        bias: false,
        pairing: Pairing::HeadHalves,
        rotated_pairs: layer.rope.pairs,
        norms: true,
        value_norms: true,
        keys_are_values: !layer.sliding,
        window: layer.sliding,
        canvas: true,
        softcap: false,
    }
}

/// Adds the launches of a pass one op after the other. Between layers the stream is in `residual[0]`; inside a layer, once
/// the attention branch has joined, it is in `residual[1]`.
struct Builder<'a> {
    model: &'a DiffusionGemma,
    rows: usize,
    mode: Mode,
    pass: Pass,
    /// What the next products are of.
    input: Option<RowInput<'a>>,
    /// The matrices that it is packed for.
    packed_for: Option<Family>,
}

impl<'a> Builder<'a> {
    /// The stream between layers, as an input with this norm.
    fn stream(&self, norm: &'a Buffer) -> RowInput<'a> {
        self.normed(&self.model.scratch.residual[0], Some(norm))
    }

    fn normed(&self, rows: &'a Buffer, norm: Option<&'a Buffer>) -> RowInput<'a> {
        let model = self.model;
        RowInput {
            rows,
            at: 0,
            branch: None,
            norm,
            n: model.config.hidden,
            stride: model.strides.hidden,
            epsilon: model.config.epsilon,
        }
    }

    fn plain(&self, rows: &'a Buffer, n: usize, stride: usize) -> RowInput<'a> {
        RowInput { rows, at: 0, branch: None, norm: None, n, stride, epsilon: self.model.config.epsilon }
    }

    /// The products that follow are of these rows.
    fn take(&mut self, input: RowInput<'a>) {
        (self.input, self.packed_for) = (Some(input), None);
    }

    /// Packs the rows for matrices of a family, if they are not yet.
    fn pack(&mut self, family: Family) -> Result<(), ModelError> {
        let model = self.model;
        let (packed, sums) = (&model.scratch.packed, &model.scratch.sums);
        let Some(input) = &mut self.input else { return Ok(()) };
        if self.packed_for.replace(family) != Some(family) {
            self.pass.push(model.kernels.pack_rows(&model.device, input, self.rows, family, packed, sums)?);
            // The branch has been added: who packs again finds the sum.
            if let Some((_, _, sum)) = input.branch.take() {
                input.rows = sum;
            }
        }
        Ok(())
    }

    /// The rows through a matrix.
    fn product(
        &mut self,
        matrix: &Matrix,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<(), ModelError> {
        self.pack(matrix.family)?;
        let model = self.model;
        let (packed, sums) = (&model.scratch.packed, &model.scratch.sums);
        self.pass.push(model.kernels.matmul(
            &model.device,
            matrix,
            packed,
            sums,
            self.rows,
            finish,
            output,
        )?);
        Ok(())
    }

    /// The rows through the first half of a gated network, to its inner values.
    fn gated(&mut self, gate_up: &GateUp<Matrix>) -> Result<(), ModelError> {
        let model = self.model;
        let values = &model.scratch.inner;
        let inner = Output { rows: values, at: 0, stride: model.strides.inner };
        match gate_up {
            GateUp::Joined(matrix) => self.product(matrix, Finish::Gated(ACTIVATION), &inner),
            GateUp::Apart(gate, up) => {
                self.product(gate, Finish::Store, &inner)?;
                self.product(up, Finish::GatedWith(ACTIVATION, values), &inner)
            }
        }
    }

    /// Embeddings; for a canvas with the signal of the step before, and normed.
    fn inputs(&mut self) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, strides, config) = (&model.scratch, &model.strides, &model.config);
        let stream = &scratch.residual[0];
        self.pass.push(model.kernels.embed(
            &model.device,
            &model.table,
            &scratch.ids,
            self.rows,
            model.embedding_scale(),
            stream,
            strides.hidden,
        )?);
        let Mode::Decode { conditioned } = self.mode else { return Ok(()) };
        if conditioned {
            let conditioning = &model.conditioning;
            let soft = self.normed(&model.head.soft, Some(&conditioning.norm));
            self.take(soft);
            self.gated(&conditioning.gate_up)?;
            self.take(self.plain(&scratch.inner, config.feed_forward, strides.inner));
            let output = Output { rows: stream, at: 0, stride: strides.hidden };
            self.product(&conditioning.down, Finish::Add(stream), &output)?;
        }
        self.pass.push(model.kernels.norm_rows(
            &model.device,
            stream,
            self.rows,
            config.hidden,
            strides.hidden,
            config.epsilon,
        )?);
        Ok(())
    }

    fn attention_inputs(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        self.take(self.stream(&layer.norms.attention));
        for (matrix, at) in &layer.qkv {
            let output = Output { rows: &model.scratch.qkv, at: *at, stride: model.strides.qkv };
            self.product(matrix, Finish::Store, &output)?;
        }
        let (k_at, v_at) = layer.kv_at;
        let rotation = Rotation {
            qkv: &model.scratch.qkv,
            stride: model.strides.qkv,
            q_heads: model.config.heads,
            k_at,
            v_at,
            bias: None,
            angles: &layer.angles,
            half_rotated: layer.rotated_pairs,
            pairing: Pairing::HeadHalves,
            norms: Some((&layer.norms.q, &layer.norms.k)),
            value_norms: true,
            queries_only: false,
            queries: Some(&model.scratch.queries),
            epsilon: model.config.epsilon,
        };
        let launch = model.kernels.rotate_and_cache(&model.device, &rotation, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ROTATE_START);
        Ok(())
    }

    fn attention(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let width = model.config.heads * layer.cache.head_size;
        let q = match layer.cache.family {
            Family::Vector => &model.scratch.qkv,
            Family::Xmx => &model.scratch.queries,
        };
        let attention = Attention {
            q,
            stride: model.strides.qkv,
            out: &layer.attended,
            out_stride: layer.attended_stride,
            q_heads: model.config.heads,
            window: layer.window,
            canvas: self.mode != Mode::Encode,
            scale: 1.0,
            softcap: 0.0,
        };
        let launch = model.kernels.attention(&model.device, &attention, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ATTENTION_START);
        self.take(self.plain(&layer.attended, width, layer.attended_stride));
        let output = Output { rows: &model.scratch.branch, at: 0, stride: model.strides.hidden };
        self.product(&layer.output, Finish::Store, &output)
    }

    /// The dense network; on the way in, the attention branch joins the stream.
    fn dense(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, strides) = (&model.scratch, &model.strides);
        let mut input = self.stream(&layer.norms.dense);
        input.branch = Some((&scratch.branch, &layer.norms.attention_branch, &scratch.residual[1]));
        self.take(input);
        self.gated(&layer.gate_up)?;
        self.take(self.plain(&scratch.inner, model.config.feed_forward, strides.inner));
        let dense = Output { rows: &scratch.dense, at: 0, stride: strides.hidden };
        self.product(&layer.down, Finish::Store, &dense)
    }

    /// The experts beside it, and the join of both.
    fn experts(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let (device, kernels, routing, rows) = (&model.device, &model.kernels, &model.routing, self.rows);
        let (scratch, strides) = (&model.scratch, &model.strides);
        let stream = &scratch.residual[1];
        self.take(self.normed(stream, Some(&layer.router_norm)));
        let scores = Output { rows: &scratch.scores, at: 0, stride: strides.scores };
        self.product(&layer.router, Finish::Store, &scores)?;
        let (scales, chosen) = (&layer.per_expert_scale, &layer.chosen);
        self.pass.push(kernels.route(
            device,
            &scratch.scores,
            strides.scores,
            scales,
            chosen,
            routing,
            rows,
        )?);
        self.pass.push(kernels.sort_rows(device, chosen, routing, rows)?);
        let input = self.normed(stream, Some(&layer.norms.experts));
        let (slots, sums) = (&scratch.slots, &scratch.slot_sums);
        let gate_up = &layer.experts_gate_up;
        let family = gate_up.matrix.family;
        self.pass.push(kernels.pack_for_experts(device, &input, routing, rows, family, slots, sums)?);
        let (inner, inner_sums) = (&scratch.slot_inner, &scratch.slot_inner_sums);
        self.pass
            .push(kernels.expert_gate_up(
                device, gate_up, ACTIVATION, routing, rows, slots, sums, inner, inner_sums,
            )?);
        let (down, out) = (&layer.experts_down, &scratch.slot_out);
        let between = kernels.sum_inner(device, down, routing, rows, inner, inner_sums)?;
        between.into_iter().for_each(|launch| self.pass.push(launch));
        self.pass.push(kernels.expert_down(
            device,
            down,
            routing,
            rows,
            inner,
            inner_sums,
            out,
            strides.hidden,
        )?);
        let combine = CombineInput {
            out,
            out_stride: strides.hidden,
            mlp: &scratch.dense,
            residual: stream,
            moe_norm: &layer.norms.experts_branch,
            mlp_norm: &layer.norms.dense_branch,
            join_norm: &layer.norms.feed_forward_branch,
            scalar: match self.mode {
                Mode::Encode => layer.scalars.encoder,
                Mode::Decode { .. } => layer.scalars.decoder,
            },
            n: model.config.hidden,
            stride: strides.hidden,
            epsilon: model.config.epsilon,
        };
        self.pass.push(kernels.combine(device, &combine, routing, rows, &scratch.residual[0])?);
        Ok(())
    }
}
