//! What a layer is made of, whatever stands for its matrices and vectors: their places in a file, or the device's buffers.

use crate::model::gate_up::GateUp;

/// Matrices `M` and vectors `V` of a layer.
pub(super) struct LayerWeights<M, V> {
    /// Query, key and value matrices, those of one format joined; each with its first value in the qkv row.
    pub(super) qkv: Vec<(M, usize)>,
    /// Laid out as a qkv row.
    pub(super) qkv_bias: Option<V>,
    pub(super) output: M,
    pub(super) attention_norm: V,
    /// Of queries and of keys.
    pub(super) head_norms: Option<(V, V)>,
    /// Of attention and of the feed-forward network.
    pub(super) branch_norms: Option<(V, V)>,
    pub(super) feed_forward_norm: V,
    pub(super) gate_up: GateUp<M>,
    pub(super) down: M,
    pub(super) experts: Option<ExpertWeights<M, V>>,
    pub(super) input: Option<InputWeights<M, V>>,
    /// Factor of what the layer leaves.
    pub(super) scale: f32,
}

/// Experts beside a dense network.
pub(super) struct ExpertWeights<M, V> {
    /// Norm of the router's input, with all its factors.
    pub(super) router_norm: V,
    pub(super) router: M,
    /// Factor of each expert's result.
    pub(super) scales: V,
    /// Norm of the experts' input.
    pub(super) norm: V,
    pub(super) gate_up: M,
    pub(super) down: M,
    /// Norm of what the dense network makes.
    pub(super) dense_branch_norm: V,
    /// Norm of what the experts make together.
    pub(super) branch_norm: V,
}

/// A layer's own input for each token.
pub(super) struct InputWeights<M, V> {
    /// From the stream to what gates the input.
    pub(super) gate: M,
    /// From the gated input to the stream.
    pub(super) projection: M,
    pub(super) branch_norm: V,
}

impl<M, V> LayerWeights<M, V> {
    /// The same of something else.
    pub(super) fn map<N, W>(&self, matrix: impl Fn(&M) -> N, vector: impl Fn(&V) -> W) -> LayerWeights<N, W> {
        let pair = |pair: &Option<(V, V)>| pair.as_ref().map(|(a, b)| (vector(a), vector(b)));
        LayerWeights {
            qkv: self.qkv.iter().map(|(part, at)| (matrix(part), *at)).collect(),
            qkv_bias: self.qkv_bias.as_ref().map(&vector),
            output: matrix(&self.output),
            attention_norm: vector(&self.attention_norm),
            head_norms: pair(&self.head_norms),
            branch_norms: pair(&self.branch_norms),
            feed_forward_norm: vector(&self.feed_forward_norm),
            gate_up: self.gate_up.map(&matrix),
            down: matrix(&self.down),
            experts: self.experts.as_ref().map(|experts| ExpertWeights {
                router_norm: vector(&experts.router_norm),
                router: matrix(&experts.router),
                scales: vector(&experts.scales),
                norm: vector(&experts.norm),
                gate_up: matrix(&experts.gate_up),
                down: matrix(&experts.down),
                dense_branch_norm: vector(&experts.dense_branch_norm),
                branch_norm: vector(&experts.branch_norm),
            }),
            input: self.input.as_ref().map(|input| InputWeights {
                gate: matrix(&input.gate),
                projection: matrix(&input.projection),
                branch_norm: vector(&input.branch_norm),
            }),
            scale: self.scale,
        }
    }
}
