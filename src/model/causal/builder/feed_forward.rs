//! A layer's second half: its network, experts beside it, its own input, and the factor of what it leaves.

use super::Builder;
use crate::device::Buffer;
use crate::model::causal::layer::Layer;
use crate::model::causal::layer_weights::{ExpertWeights, InputWeights};
use crate::model::causal::scratch::{ExpertScratch, InputScratch};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::ops::{CombineInput, Experts, Finish, Join, Matrix, OpsError, Output, RowInput};

impl<'a> Builder<'a> {
    /// Everything behind the layer's attention, whose branch waits to be added.
    pub(super) fn second_half(&mut self, index: usize, layer: &'a Layer) -> Result<(), ModelError> {
        let weights = &layer.weights;
        let (inner, width, stride) = self.gated(layer)?;
        let input = self.plain(inner, width, stride);
        // The factor belongs to what is added last.
        let before_input = if weights.input.is_some() { 1.0 } else { weights.scale };
        match &weights.experts {
            None => {
                self.branch(input, &weights.down, weights.branch_norms.as_ref().map(|(_, norm)| norm))?;
                self.scale(before_input)?;
            }
            Some(experts) => {
                let dense = self.stream_rows(&self.model.scratch.branch);
                self.products(input, &[(&weights.down, Finish::Store, dense)])?;
                self.experts(layer, experts, before_input)?;
            }
        }
        if let Some(input) = &weights.input {
            self.input(index, input)?;
            self.scale(weights.scale)?;
        }
        Ok(())
    }

    /// The gated inner values of the dense network, how many there are, and their stride.
    fn gated(&mut self, layer: &'a Layer) -> Result<(&'a Buffer, usize, usize), ModelError> {
        let model = self.model;
        let activation = model.config.family.activation;
        let width = layer.config.feed_forward.inner();
        let (gate, _) = model.scratch.gate.rows(width)?;
        let (inner, stride) = model.scratch.inner.rows(width)?;
        let rows = |rows| Output { rows, at: 0, stride };
        let input = self.normed(&layer.weights.feed_forward_norm);
        match &layer.weights.gate_up {
            GateUp::Joined(matrix) => {
                self.products(input, &[(matrix, Finish::Gated(activation), rows(inner))])?;
            }
            GateUp::Apart(first, up) => self.products(
                input,
                &[(first, Finish::Store, rows(gate)), (up, Finish::GatedWith(activation, gate), rows(inner))],
            )?,
        }
        self.joined();
        Ok((inner, width, stride))
    }

    /// The experts; what they make, and what the dense network has left as branch, joins the stream.
    fn experts(
        &mut self,
        layer: &'a Layer,
        weights: &'a ExpertWeights<Matrix, Buffer>,
        scalar: f32,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let missing =
            || OpsError::Shape { op: "experts", what: "no rows were set aside for them".to_owned() };
        let scratch: &ExpertScratch = model.scratch.experts.as_ref().ok_or_else(missing)?;
        let sizes = layer.config.feed_forward.experts().ok_or_else(missing)?;
        let (_, join_norm) = layer.weights.branch_norms.as_ref().ok_or_else(missing)?;
        let (device, kernels, routing) = (&model.device, &model.kernels, &scratch.routing);
        let (hidden, rows, activation) = (model.config.hidden, self.rows, model.config.family.activation);
        let stride = model.strides.hidden;
        let experts =
            |matrix: &Matrix, outputs| Experts { matrix: matrix.clone(), experts: sizes.count, outputs };

        let scores = Output { rows: &scratch.scores, at: 0, stride: scratch.scores_stride };
        self.products(self.normed(&weights.router_norm), &[(&weights.router, Finish::Store, scores)])?;
        let chosen = &scratch.chosen;
        self.pass.push(kernels.route(
            device,
            &scratch.scores,
            scratch.scores_stride,
            &weights.scales,
            chosen,
            routing,
            rows,
        )?);
        self.pass.push(kernels.sort_rows(device, chosen, routing, rows)?);
        let input = self.normed(&weights.norm);
        let (slots, sums) = (&scratch.slots, &scratch.slot_sums);
        self.pass.push(kernels.pack_for_experts(device, &input, routing, rows, slots, sums)?);
        let gate_up = experts(&weights.gate_up, sizes.inner);
        let (inner, inner_sums) = (&scratch.inner, &scratch.inner_sums);
        self.pass.push(
            kernels.expert_gate_up(
                device, &gate_up, activation, routing, rows, slots, sums, inner, inner_sums,
            )?,
        );
        let (down, out) = (experts(&weights.down, hidden), &scratch.out);
        self.pass.push(kernels.expert_down(device, &down, routing, rows, inner, inner_sums, out, stride)?);
        let combine = CombineInput {
            out,
            out_stride: stride,
            mlp: &model.scratch.branch,
            residual: self.residual(),
            moe_norm: &weights.branch_norm,
            mlp_norm: &weights.dense_branch_norm,
            join_norm,
            scalar,
            n: hidden,
            stride,
            epsilon: model.config.epsilon,
        };
        self.pass.push(kernels.combine(device, &combine, routing, rows, self.other_residual())?);
        self.at = 1 - self.at;
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
