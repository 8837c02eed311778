//! A layer's second half: its network, experts beside it, its own input, and the factor of what it leaves.

use super::Builder;
use crate::device::Buffer;
use crate::model::causal::layer::Layer;
use crate::model::causal::layer_weights::{BesideWeights, DenseWeights, ExpertWeights, InputWeights};
use crate::model::causal::scratch::{ExpertScratch, InputScratch};
use crate::model::config::ExpertsConfig;
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::ops::{CombineInput, Experts, Finish, Join, Matrix, OpsError, Output, Router, RowInput};

/// A layer has experts that nothing was set aside for: a fault of this program.
fn missing() -> OpsError {
    OpsError::Shape { op: "experts", what: "no rows were set aside for them".to_owned() }
}

impl<'a> Builder<'a> {
    /// Everything behind the layer's attention, whose branch waits to be added.
    pub(super) fn second_half(&mut self, index: usize, layer: &'a Layer) -> Result<(), ModelError> {
        let weights = &layer.weights;
        // The factor belongs to what is added last.
        let before_input = if weights.input.is_some() { 1.0 } else { weights.scale };
        match (&weights.dense, &weights.experts) {
            (Some(dense), None) => {
                let input = self.gated(layer, dense, None)?;
                self.branch(input, &dense.down, weights.branch_norms.as_ref().map(|(_, norm)| norm))?;
                self.scale(before_input)?;
            }
            (Some(dense), Some(ExpertWeights { beside: Some(beside), .. })) => {
                let input = self.gated(layer, dense, None)?;
                let branch = self.stream_rows(&self.model.scratch.branch);
                self.products(input, &[(&dense.down, Finish::Store, branch)])?;
                self.experts_beside(layer, beside, before_input)?;
            }
            (dense, Some(experts)) => self.experts_of_stream(layer, dense.as_ref(), experts)?,
            (None, None) => {}
        }
        if let Some(input) = &weights.input {
            self.input(index, input)?;
            self.scale(weights.scale)?;
        }
        Ok(())
    }

    /// The gated inner values of the dense network. A router may look at the same input.
    fn gated(
        &mut self,
        layer: &'a Layer,
        weights: &'a DenseWeights<Matrix>,
        router: Option<(&Matrix, Output<'_>)>,
    ) -> Result<RowInput<'a>, ModelError> {
        let model = self.model;
        let activation = model.config.family.activation;
        let width = layer.config.feed_forward.inner();
        let (gate, _) = model.scratch.gate.rows(width)?;
        let (inner, stride) = model.scratch.inner.rows(width)?;
        let rows = |rows| Output { rows, at: 0, stride };
        let input = self.normed(&layer.weights.feed_forward_norm);
        let mut products = Vec::with_capacity(3);
        products.extend(router.map(|(matrix, scores)| (matrix, Finish::Store, scores)));
        match &weights.gate_up {
            GateUp::Joined(matrix) => products.push((matrix, Finish::Gated(activation), rows(inner))),
            GateUp::Apart(first, up) => products.extend([
                (first, Finish::Store, rows(gate)),
                (up, Finish::GatedWith(activation, gate), rows(inner)),
            ]),
        }
        self.products(input, &products)?;
        self.joined();
        Ok(self.plain(inner, width, stride))
    }

    /// Experts; what they make, and what the dense network has left as branch, joins the stream.
    fn experts_beside(
        &mut self,
        layer: &'a Layer,
        weights: &'a BesideWeights<Buffer>,
        scalar: f32,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, experts, _) = self.expert_parts(layer)?;
        let (_, join_norm) = layer.weights.branch_norms.as_ref().ok_or_else(missing)?;
        let scores = Output { rows: &scratch.scores, at: 0, stride: scratch.scores_stride };
        self.products(self.normed(&weights.router_norm), &[(&experts.router, Finish::Store, scores)])?;
        self.expert_products(layer, &weights.norm, Some(&weights.scales))?;
        let combine = CombineInput {
            out: &scratch.out,
            out_stride: model.strides.hidden,
            mlp: &model.scratch.branch,
            residual: self.residual(),
            moe_norm: &weights.branch_norm,
            mlp_norm: &weights.dense_branch_norm,
            join_norm,
            scalar,
            n: model.config.hidden,
            stride: model.strides.hidden,
            epsilon: model.config.epsilon,
            next: None,
        };
        let (routing, to) = (&scratch.routing, self.other_residual());
        self.pass.push(model.kernels.combine(&model.device, &combine, routing, self.rows, to)?);
        self.at = 1 - self.at;
        Ok(())
    }

    /// Experts that are added to the stream, and a network for all rows, if there is one.
    fn experts_of_stream(
        &mut self,
        layer: &'a Layer,
        dense: Option<&'a DenseWeights<Matrix>>,
        weights: &'a ExpertWeights<Matrix, Buffer>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, ..) = self.expert_parts(layer)?;
        let norm = &layer.weights.feed_forward_norm;
        let scores = Output { rows: &scratch.scores, at: 0, stride: scratch.scores_stride };
        let gated = match dense {
            Some(dense) => Some((self.gated(layer, dense, Some((&weights.router, scores)))?, dense)),
            None => {
                self.products(self.normed(norm), &[(&weights.router, Finish::Store, scores)])?;
                self.joined();
                None
            }
        };
        self.expert_products(layer, norm, None)?;
        if let Some((input, dense)) = gated {
            self.branch(input, &dense.down, None)?;
        }
        let (hidden, stride) = (model.config.hidden, model.strides.hidden);
        let (out, routing, stream) = (&scratch.out, &scratch.routing, self.residual());
        let device = &model.device;
        let launch =
            model.kernels.add_experts(device, out, stride, routing, self.rows, stream, hidden, stride)?;
        self.pass.push(launch);
        Ok(())
    }

    /// Where experts are, and what belongs to them.
    fn expert_parts(
        &self,
        layer: &'a Layer,
    ) -> Result<(&'a ExpertScratch, &'a ExpertWeights<Matrix, Buffer>, ExpertsConfig), ModelError> {
        let scratch = self.model.scratch.experts.as_ref().ok_or_else(missing)?;
        let weights = layer.weights.experts.as_ref().ok_or_else(missing)?;
        Ok((scratch, weights, *layer.config.feed_forward.experts().ok_or_else(missing)?))
    }

    /// What the experts make of the stream, normed by `norm`, once the router has made its scores.
    fn expert_products(
        &mut self,
        layer: &'a Layer,
        norm: &'a Buffer,
        scales: Option<&Buffer>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (scratch, weights, sizes) = self.expert_parts(layer)?;
        let (device, kernels, routing) = (&model.device, &model.kernels, &scratch.routing);
        let (hidden, rows, activation) = (model.config.hidden, self.rows, model.config.family.activation);
        let stride = model.strides.hidden;
        let experts =
            |matrix: &Matrix, outputs| Experts { matrix: matrix.clone(), experts: sizes.count, outputs };
        let router = Router {
            logits: &scratch.scores,
            stride: scratch.scores_stride,
            choice: sizes.choice,
            bias: weights.choice_bias.as_ref(),
            expert_scales: scales,
        };
        let chosen = &scratch.chosen;
        self.pass.push(kernels.choose_experts(device, &router, chosen, routing, rows)?);
        let input = self.normed(norm);
        let (slots, sums) = (&scratch.slots, &scratch.slot_sums);
        let gate_up = experts(&weights.gate_up, sizes.inner);
        let family = gate_up.matrix.family;
        self.pass.push(kernels.pack_for_experts(device, &input, chosen, routing, rows, family, slots, sums)?);
        let (inner, inner_sums) = (&scratch.inner, &scratch.inner_sums);
        self.pass.push(
            kernels.expert_gate_up(
                device, &gate_up, activation, routing, rows, slots, sums, inner, inner_sums,
            )?,
        );
        let (down, out) = (experts(&weights.down, hidden), &scratch.out);
        let between = kernels.sum_inner(device, &down, routing, rows, inner, inner_sums)?;
        between.into_iter().for_each(|launch| self.pass.push(launch));
        self.pass.push(kernels.expert_down(device, &down, routing, rows, inner, inner_sums, out, stride)?);
        Ok(())
    }

    /// The layer's own input: gated by the stream, it is one more branch.
    fn input(&mut self, index: usize, weights: &'a InputWeights<Matrix, Buffer>) -> Result<(), ModelError> {
        let model = self.model;
        let Some(scratch): Option<&InputScratch> = model.scratch.inputs.as_ref() else { return Ok(()) };
        let (size, stride) = (model.config.layer_input, scratch.gate_stride);
        let gate = Output { rows: &scratch.gate, at: 0, stride };
        let stream = RowInput { norm: None, ..self.normed(&weights.branch_norm) };
        self.products(stream, &[(&weights.gate, Finish::Store, gate)])?;
        self.joined();
        self.pass.push(model.kernels.gate_rows(
            &model.device,
            model.config.family.activation,
            &scratch.gate,
            stride,
            (&scratch.parts, scratch.stride),
            index * size,
            self.rows,
            size,
        )?);
        let input = self.plain(&scratch.gate, size, stride);
        self.branch(input, &weights.projection, Some(&weights.branch_norm))
    }

    /// Adds the branch that waits, and multiplies the sum; without a factor it may go on waiting.
    fn scale(&mut self, scalar: f32) -> Result<(), ModelError> {
        let Some(weight) = self.branch_norm.filter(|_| scalar != 1.0) else { return Ok(()) };
        let model = self.model;
        let join = Join {
            rows: self.residual(),
            branch: &model.scratch.branch,
            weight,
            scalar,
            n: model.config.hidden,
            stride: model.strides.hidden,
            epsilon: model.config.epsilon,
        };
        let launch = model.kernels.join_rows(&model.device, &join, self.rows, self.other_residual())?;
        self.pass.push(launch);
        self.joined();
        Ok(())
    }
}
