//! What a layer is made of, whatever stands for its matrices and vectors: their places in a file, or the device's buffers.

use crate::model::gate_up::GateUp;

/// Matrices `M` and vectors `V` of a layer.
pub(super) struct LayerWeights<M, V> {
    /// Query, key and value matrices, those of one format joined; each with its first value in the qkv row. None where
    /// heads see a latent.
    pub(super) qkv: Vec<(M, usize)>,
    /// Laid out as a qkv row.
    pub(super) qkv_bias: Option<V>,
    pub(super) latent: Option<LatentWeights<M, V>>,
    pub(super) output: M,
    pub(super) attention_norm: V,
    /// Of queries and of keys.
    pub(super) head_norms: Option<(V, V)>,
    /// Of attention and of the feed-forward network.
    pub(super) branch_norms: Option<(V, V)>,
    pub(super) feed_forward_norm: V,
    /// The network that all rows go to.
    pub(super) dense: Option<DenseWeights<M>>,
    pub(super) experts: Option<ExpertWeights<M, V>>,
    pub(super) input: Option<InputWeights<M, V>>,
    /// Factor of what the layer leaves.
    pub(super) scale: f32,
}

/// Heads that see one latent.
pub(super) struct LatentWeights<M, V> {
    /// From the stream to the queries, or to the latent that they are made out of.
    pub(super) query: M,
    /// Norm of that latent, and from there to the queries.
    pub(super) query_latent: Option<(V, M)>,
    /// From the stream to the latent of keys and values, and to what turns of the keys.
    pub(super) key: M,
    /// Norm of the latent.
    pub(super) norm: V,
    /// For each head, from a query's plain values to what meets the latent.
    pub(super) to_latent: M,
    /// For each head, from a sum of latents to values.
    pub(super) from_latent: M,
}

/// A gated network.
pub(super) struct DenseWeights<M> {
    pub(super) gate_up: GateUp<M>,
    pub(super) down: M,
}

/// Experts, and their router.
pub(super) struct ExpertWeights<M, V> {
    pub(super) router: M,
    /// Added to scores for the choice.
    pub(super) choice_bias: Option<V>,
    pub(super) gate_up: M,
    pub(super) down: M,
    /// What they have beside a dense network that gets a branch of its own.
    pub(super) beside: Option<BesideWeights<V>>,
}

/// Norms of experts and of the dense network beside them.
pub(super) struct BesideWeights<V> {
    /// Norm of the router's input, with all its factors.
    pub(super) router_norm: V,
    /// Factor of each expert's result.
    pub(super) scales: V,
    /// Norm of the experts' input.
    pub(super) norm: V,
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
            latent: self.latent.as_ref().map(|latent| LatentWeights {
                query: matrix(&latent.query),
                query_latent: latent
                    .query_latent
                    .as_ref()
                    .map(|(norm, product)| (vector(norm), matrix(product))),
                key: matrix(&latent.key),
                norm: vector(&latent.norm),
                to_latent: matrix(&latent.to_latent),
                from_latent: matrix(&latent.from_latent),
            }),
            dense: self
                .dense
                .as_ref()
                .map(|dense| DenseWeights { gate_up: dense.gate_up.map(&matrix), down: matrix(&dense.down) }),
            experts: self.experts.as_ref().map(|experts| ExpertWeights {
                router: matrix(&experts.router),
                choice_bias: experts.choice_bias.as_ref().map(&vector),
                gate_up: matrix(&experts.gate_up),
                down: matrix(&experts.down),
                beside: experts.beside.as_ref().map(|beside| BesideWeights {
                    router_norm: vector(&beside.router_norm),
                    scales: vector(&beside.scales),
                    norm: vector(&beside.norm),
                    dense_branch_norm: vector(&beside.dense_branch_norm),
                    branch_norm: vector(&beside.branch_norm),
                }),
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
