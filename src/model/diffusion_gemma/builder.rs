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
    ATTENTION_START, Activation, Attention, CacheKind, CombineInput, ExpertChoice, Family, Finish, Heads,
    Matrix, Output, PackedRows, Pairing, ROTATE_START, Rotation, Router, RowInput,
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
    if let Some(first) = model.layers.first() {
        builder.take(builder.stream(&first.norms.attention));
    }
    for (index, layer) in model.layers.iter().enumerate() {
        builder.attention_inputs(layer)?;
        if index == last && mode == Mode::Encode {
            return Ok(builder.pass);
        }
        builder.attention(layer)?;
        builder.dense(layer)?;
        // The head is the vector family's.
        let (norm, family) = model.layers.get(index + 1).map_or((&model.head_norm, Family::Vector), |next| {
            let family = next.qkv.first().map_or(Family::Vector, |(matrix, _)| matrix.family);
            (&next.norms.attention, family)
        });
        builder.experts(layer, norm, family)?;
        builder.pass.end_layer();
    }
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
///
/// Where matrices are of the `vector` family, whatever makes rows packs them for the product that follows; the `xmx` family needs
/// a row's largest number first, and packs by a launch of its own.
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

    /// The products that follow are of these rows, and something has packed them for the vector family.
    fn take_packed(&mut self, input: RowInput<'a>) {
        (self.input, self.packed_for) = (Some(input), Some(Family::Vector));
    }

    fn packed(&self) -> PackedRows<'a> {
        PackedRows { packed: &self.model.scratch.packed, sums: &self.model.scratch.sums }
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
        self.product_of(self.packed(), matrix, finish, output)
    }

    /// Packed rows through a matrix of their family.
    fn product_of(
        &mut self,
        input: PackedRows<'_>,
        matrix: &Matrix,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let PackedRows { packed, sums } = input;
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

    /// The rows through a gated network.
    fn network(
        &mut self,
        gate_up: &GateUp<Matrix>,
        down: &Matrix,
        finish: Finish<'_>,
        output: &Output<'_>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, width) = (&model.scratch, model.config.feed_forward);
        let values = &scratch.inner;
        let inner = Output { rows: values, at: 0, stride: model.strides.inner };
        match gate_up {
            GateUp::Joined(matrix) if matrix.family == Family::Vector && down.family == Family::Vector => {
                self.pack(matrix.family)?;
                let (device, rows, input) = (&model.device, self.rows, self.packed());
                let inner = PackedRows { packed: values, sums: &scratch.inner_sums };
                self.pass
                    .push(model.kernels.matmul_gated(device, matrix, ACTIVATION, rows, input, width, inner)?);
                return self.product_of(inner, down, finish, output);
            }
            GateUp::Joined(matrix) => self.product(matrix, Finish::Gated(ACTIVATION), &inner)?,
            GateUp::Apart(gate, up) => {
                self.product(gate, Finish::Store, &inner)?;
                self.product(up, Finish::GatedWith(ACTIVATION, values), &inner)?;
            }
        }
        self.take(self.plain(values, width, model.strides.inner));
        self.product(down, finish, output)
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
            let output = Output { rows: stream, at: 0, stride: strides.hidden };
            self.network(&conditioning.gate_up, &conditioning.down, Finish::Add(stream), &output)?;
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
            epsilon: model.config.epsilon,
        };
        let launch = model.kernels.rotate_and_cache(&model.device, &rotation, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ROTATE_START);
        Ok(())
    }

    fn attention(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let width = model.config.heads * layer.cache.head_size;
        let attention = Attention {
            q: &model.scratch.qkv,
            stride: model.strides.qkv,
            out: &layer.attended,
            out_stride: layer.attended_stride,
            q_heads: model.config.heads,
            window: layer.window,
            canvas: self.mode != Mode::Encode,
            scale: 1.0,
            softcap: 0.0,
        };
        let (device, kernels, cache, rows) = (&model.device, &model.kernels, &layer.cache, self.rows);
        let attended = self.plain(&layer.attended, width, layer.attended_stride);
        let launch = if kernels.attention_packs(cache, &layer.output) {
            self.take_packed(attended);
            kernels.attention_and_pack(device, &attention, cache, rows, self.packed())?
        } else {
            self.take(attended);
            kernels.attention(device, &attention, cache, rows)?
        };
        self.pass.push_positioned(launch, ATTENTION_START);
        let output = Output { rows: &model.scratch.branch, at: 0, stride: model.strides.hidden };
        self.product(&layer.output, Finish::Store, &output)
    }

    /// The dense network; on the way in, the attention branch joins the stream, which is packed for the router, too.
    fn dense(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, strides) = (&model.scratch, &model.strides);
        let mut input = self.stream(&layer.norms.dense);
        input.branch = Some((&scratch.branch, &layer.norms.attention_branch, &scratch.residual[1]));
        self.take(input);
        if self.routed_beside(layer) {
            let router = PackedRows { packed: &scratch.router_packed, sums: &scratch.router_sums };
            let (norm, packed) = (&layer.router_norm, self.packed());
            let launch =
                model.kernels.pack_rows_twice(&model.device, &input, self.rows, packed, norm, router)?;
            self.pass.push(launch);
            self.take_packed(input);
        }
        let dense = Output { rows: &scratch.dense, at: 0, stride: strides.hidden };
        self.network(&layer.gate_up, &layer.down, Finish::Store, &dense)
    }

    /// Whether the router's rows can be packed along with those of the dense network.
    fn routed_beside(&self, layer: &Layer) -> bool {
        let (GateUp::Joined(first) | GateUp::Apart(first, _)) = &layer.gate_up;
        first.family == Family::Vector && layer.router.family == Family::Vector
    }

    /// Which experts the rows go to.
    fn route(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let (device, kernels, routing, rows) = (&model.device, &model.kernels, &model.routing, self.rows);
        let (scratch, stride) = (&model.scratch, model.strides.scores);
        let (scales, chosen) = (&layer.per_expert_scale, &layer.chosen);
        if self.routed_beside(layer) {
            let router = Router {
                logits: &scratch.scores,
                stride,
                choice: ExpertChoice::default(),
                bias: None,
                expert_scales: Some(scales),
            };
            let input = PackedRows { packed: &scratch.router_packed, sums: &scratch.router_sums };
            let launch = kernels.route_rows(device, &layer.router, input, &router, chosen, routing, rows)?;
            self.pass.push(launch);
            return Ok(());
        }
        self.take(self.normed(&scratch.residual[1], Some(&layer.router_norm)));
        let scores = Output { rows: &scratch.scores, at: 0, stride };
        self.product(&layer.router, Finish::Store, &scores)?;
        self.pass.push(kernels.route(device, &scratch.scores, stride, scales, chosen, routing, rows)?);
        Ok(())
    }

    /// The experts beside it, and the join of both, whose rows then get a norm for matrices of a family.
    fn experts(&mut self, layer: &'a Layer, next: &'a Buffer, family: Family) -> Result<(), ModelError> {
        self.route(layer)?;
        let model = self.model;
        let (device, kernels, routing, rows) = (&model.device, &model.kernels, &model.routing, self.rows);
        let (scratch, strides, chosen) = (&model.scratch, &model.strides, &layer.chosen);
        let stream = &scratch.residual[1];
        let packed = (family == kernels.family()).then(|| (next, self.packed()));
        let input = self.normed(stream, Some(&layer.norms.experts));
        let (slots, sums) = (&scratch.slots, &scratch.slot_sums);
        let gate_up = &layer.experts_gate_up;
        let family = gate_up.matrix.family;
        self.pass.push(kernels.pack_for_experts(device, &input, chosen, routing, rows, family, slots, sums)?);
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
            next: packed,
        };
        self.pass.push(kernels.combine(device, &combine, routing, rows, &scratch.residual[0])?);
        self.take(self.stream(next));
        self.packed_for = packed.map(|_| family);
        Ok(())
    }
}
