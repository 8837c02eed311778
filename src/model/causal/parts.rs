//! Which tensors of a file make which matrices, and what they take.

use super::LoadOptions;
use super::finder::{Finder, same_format};
use super::layer_weights::{
    BesideWeights, DenseWeights, ExpertWeights, InputWeights, LatentWeights, LayerWeights,
};
use super::scratch::{QkvPlaces, Scratch, ScratchRows, Strides};
use super::tables::{self, angle_bytes};
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::rows::Rows;
use crate::model::config::{CausalConfig, ExpertsConfig, FeedForward, LatentConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::plan::MemoryPlan;
use crate::model::repack::{Arrangement, Blueprint, of_one_family};
use crate::model::workload::{AttentionShape, ExpertsShape, Workload};
use crate::ops::{Cache, Format, Products, STRIDE_MULTIPLE, Scoring, round_up};

/// The matrices and vectors that a file gives, and which of them belong where.
pub(super) struct Parts {
    pub(super) blueprints: Vec<Blueprint>,
    pub(super) vectors: Vec<Vec<f32>>,
    pub(super) layers: Vec<LayerWeights<usize, usize>>,
    pub(super) head: usize,
    pub(super) head_norm: usize,
    pub(super) embedding: TensorInfo,
    /// Cosines and sines of each rotary embedding: by what its frequencies are divided.
    pub(super) divisors: Vec<Option<Vec<f32>>>,
    /// What the inputs of layers are made of.
    pub(super) inputs: Option<LayerInputParts>,
}

/// What the inputs that each layer has of its own are made of.
pub(super) struct LayerInputParts {
    /// A row for each token, with a part for each layer.
    pub(super) embedding: TensorInfo,
    /// From the embedded token to the parts of all layers.
    pub(super) projection: usize,
    /// Norm of each part.
    pub(super) norm: usize,
}

impl Parts {
    /// The parts of the model, for a context of so many positions.
    pub(super) fn find(gguf: &Gguf, config: &CausalConfig, context: usize) -> Result<Self, ModelError> {
        let (hidden, vocabulary) = (config.hidden, config.vocabulary);
        let mut finder = Finder::new(gguf);
        let embedding = finder.tensor("token_embd.weight", &[hidden, vocabulary])?.clone();
        let head = match finder.has("output.weight") {
            true => finder.rows("output.weight", hidden, vocabulary)?,
            false => gguf.rows(&embedding),
        };
        let divisors = tables::divisors(&mut finder, config, context)?;
        let inputs = match config.layer_input {
            0 => None,
            size => {
                let width = size * config.layers.len();
                let embedding = finder.tensor("per_layer_token_embd.weight", &[width, vocabulary])?.clone();
                let projection = finder.plain("per_layer_model_proj.weight", hidden, width)?;
                let norm = finder.vector("per_layer_proj_norm.weight", size)?;
                Some(LayerInputParts { embedding, projection, norm })
            }
        };
        let layers = (0..config.layers.len())
            .map(|index| Layer { finder: &mut finder, config, index }.weights())
            .collect::<Result<_, _>>()?;
        let head_norm = finder.vector("output_norm.weight", hidden)?;
        let head = finder.matrix("output".to_owned(), vec![head], Arrangement::Stacked)?;
        let (blueprints, vectors) = finder.finish()?;
        Ok(Self { blueprints, vectors, layers, head, head_norm, embedding, divisors, inputs })
    }

    /// The kernels' formats of experts.
    pub(super) fn expert_formats(&self) -> Vec<Format> {
        let experts = self.layers.iter().filter_map(|layer| layer.experts.as_ref());
        let matrices = experts.flat_map(|experts| [experts.gate_up, experts.down]);
        let mut formats: Vec<Format> = matrices.map(|matrix| self.blueprints[matrix].format()).collect();
        formats.sort_unstable();
        formats.dedup();
        formats
    }

    /// Makes matrices for the products that `products` has for them. Those of heads are for kernels of their own.
    pub(super) fn made_for(&mut self, products: Products) {
        let of_heads = self.head_matrices();
        let others = self.blueprints.iter_mut().enumerate().filter(|(matrix, _)| !of_heads.contains(matrix));
        others.for_each(|(_, blueprint)| blueprint.made_for(products));
        let experts = self.layers.iter().filter_map(|layer| layer.experts.as_ref());
        experts.for_each(|experts| of_one_family(&mut self.blueprints, [experts.gate_up, experts.down]));
    }

    /// Heads' own matrices.
    fn head_matrices(&self) -> Vec<usize> {
        let latents = self.layers.iter().filter_map(|layer| layer.latent.as_ref());
        latents.flat_map(|latent| [latent.to_latent, latent.from_latent]).collect()
    }

    /// The kernels' formats of heads' own matrices.
    pub(super) fn head_formats(&self) -> Vec<Format> {
        let matrices = self.head_matrices().into_iter();
        let mut formats: Vec<Format> = matrices.map(|matrix| self.blueprints[matrix].format()).collect();
        formats.sort_unstable();
        formats.dedup();
        formats
    }

    /// Rows of the scratch buffers: only what these layers use.
    pub(super) fn scratch_rows(
        &self,
        config: &CausalConfig,
        options: &LoadOptions,
        products: Products,
    ) -> ScratchRows {
        let (pass, logits) = options.pass_rows();
        let apart = self
            .layers
            .iter()
            .filter_map(|layer| layer.dense.as_ref())
            .any(|dense| matches!(dense.gate_up, GateUp::Apart(..)));
        ScratchRows {
            pass,
            branch: if config.family.branch_norms { pass } else { 1 },
            gate: if apart { pass } else { 1 },
            logits,
            products,
            cache: options.cache,
        }
    }

    /// What passes have to do.
    pub(super) fn workload(&self, config: &CausalConfig) -> Workload {
        let layers = || self.layers.iter().zip(&config.layers);
        let experts = layers()
            .filter_map(|(weights, layer)| {
                let (weights, ExpertsConfig { count, used, .. }) =
                    (weights.experts.as_ref()?, layer.feed_forward.experts()?);
                let of_each = |matrix: usize| self.blueprints[matrix].shape_of_each(*count);
                let (gate_up, down) = (of_each(weights.gate_up), of_each(weights.down));
                Some(ExpertsShape { count: *count, used: *used, gate_up, down })
            })
            .collect();
        let of_experts: Vec<usize> = layers()
            .filter_map(|(weights, _)| weights.experts.as_ref())
            .flat_map(|experts| [experts.gate_up, experts.down])
            .collect();
        let products = self.blueprints.iter().enumerate();
        Workload {
            products: products
                .filter(|(matrix, _)| *matrix != self.head && !of_experts.contains(matrix))
                .map(|(_, blueprint)| blueprint.shape())
                .collect(),
            conditioning: Vec::new(),
            experts,
            attention: config
                .layers
                .iter()
                .map(|layer| AttentionShape {
                    heads: layer.heads,
                    kv_heads: layer.kv_heads,
                    head_size: layer.key_size,
                    window: layer.window,
                    latent: layer.latent.is_some(),
                    capped: layer.softcap > 0.0,
                })
                .collect(),
            head: self.blueprints[self.head].shape(),
            canvas: None,
        }
    }

    pub(super) fn plan(
        &self,
        config: &CausalConfig,
        strides: &Strides,
        options: &LoadOptions,
        rows: ScratchRows,
    ) -> MemoryPlan {
        let vector = |values: &Vec<f32>| round_up(values.len(), STRIDE_MULTIPLE) * 4;
        let cache = |layer: &LayerConfig| match layer.kv_from {
            Some(_) => 0,
            None if layer.latent.is_some() => {
                Cache::latent_bytes(options.cache, layer.key_size, options.context)
            }
            None => {
                let (heads, size) = (layer.kv_heads, layer.key_size);
                let family = rows.products.attention(options.cache, size);
                Cache::bytes(family, options.cache, heads, size, options.context)
            }
        };
        MemoryPlan {
            weights: self.blueprints.iter().map(Blueprint::bytes).sum::<usize>()
                + self.vectors.iter().map(vector).sum::<usize>(),
            kv_cache: config.layers.iter().map(cache).sum(),
            scratch: Scratch::bytes(strides, rows)
                + angle_bytes(config, options.context)
                + rows.products.unused_bytes(),
        }
    }
}

/// Looks for the tensors of a layer.
struct Layer<'a, 'b> {
    finder: &'a mut Finder<'b>,
    config: &'a CausalConfig,
    index: usize,
}

impl Layer<'_, '_> {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.index)
    }

    fn rows(&mut self, part: &str, columns: usize, rows: usize) -> Result<Rows, ModelError> {
        self.finder.rows(&self.name(&format!("{part}.weight")), columns, rows)
    }

    fn matrix(&mut self, part: &str, columns: usize, rows: usize) -> Result<usize, ModelError> {
        self.finder.plain(&self.name(&format!("{part}.weight")), columns, rows)
    }

    fn vector(&mut self, part: &str, n: usize) -> Result<usize, ModelError> {
        self.finder.vector(&self.name(&format!("{part}.weight")), n)
    }

    fn weights(mut self) -> Result<LayerWeights<usize, usize>, ModelError> {
        let family = self.config.family;
        let layer = &self.config.layers[self.index];
        let hidden = self.config.hidden;
        let latent = layer.latent.as_ref().map(|latent| self.latent(layer, latent)).transpose()?;
        let qkv = if latent.is_some() { Vec::new() } else { self.qkv(layer)? };
        let qkv_bias = if family.qkv_biases { Some(self.qkv_bias(layer)?) } else { None };
        let output = self.matrix("attn_output", layer.output_width(), hidden)?;
        let attention_norm = self.vector("attn_norm", hidden)?;
        let head_norms = match (family.head_norms, layer.kv_from) {
            (false, _) => None,
            (true, None) => Some((
                self.vector("attn_q_norm", layer.key_size)?,
                self.vector("attn_k_norm", layer.key_size)?,
            )),
            (true, Some(_)) => {
                let queries = self.vector("attn_q_norm", layer.key_size)?;
                Some((queries, queries)) // there are no keys to be normed
            }
        };
        let branch_norms = match family.branch_norms {
            true => {
                Some((self.vector("post_attention_norm", hidden)?, self.vector("post_ffw_norm", hidden)?))
            }
            false => None,
        };
        let feed_forward_norm = self.vector("ffn_norm", hidden)?;
        let dense = match layer.feed_forward {
            FeedForward::Experts { shared: 0, .. } => None,
            FeedForward::Experts { shared, .. } => Some(self.dense("_shexp", shared)?),
            FeedForward::Dense { inner } | FeedForward::Both { inner, .. } => Some(self.dense("", inner)?),
        };
        let experts = match layer.feed_forward {
            FeedForward::Dense { .. } => None,
            FeedForward::Both { experts, .. } => {
                let mut weights = self.experts(&experts)?;
                weights.beside = Some(self.beside(&experts)?);
                Some(weights)
            }
            FeedForward::Experts { experts, .. } => Some(self.experts(&experts)?),
        };
        let input = match self.config.layer_input {
            0 => None,
            size => Some(InputWeights {
                gate: self.matrix("inp_gate", hidden, size)?,
                projection: self.matrix("proj", size, hidden)?,
                branch_norm: self.vector("post_norm", hidden)?,
            }),
        };
        let scale = if family.layer_scales { self.scale()? } else { 1.0 };
        Ok(LayerWeights {
            qkv,
            qkv_bias,
            latent,
            output,
            attention_norm,
            head_norms,
            branch_norms,
            feed_forward_norm,
            dense,
            experts,
            input,
            scale,
        })
    }

    /// Factor of what the layer leaves; 1 where the file says nothing.
    fn scale(&mut self) -> Result<f32, ModelError> {
        let name = self.name("layer_output_scale.weight");
        if !self.finder.has(&name) {
            return Ok(1.0);
        }
        let scale = self.finder.values(&name, 1)?[0];
        if scale.is_finite() {
            return Ok(scale);
        }
        Err(self.finder.unsupported(format!(
            "{name} is {scale}, which is no factor; copy the file again from its source"
        )))
    }

    /// The parts of a qkv row: name, values, and where they start.
    fn qkv_parts(layer: &LayerConfig) -> Vec<(&'static str, usize, usize)> {
        let places = QkvPlaces::new(layer);
        let mut parts = vec![("attn_q", layer.q_width(), 0)];
        if layer.kv_from.is_none() {
            parts.push(("attn_k", layer.k_width(), places.k_at));
            if !layer.keys_are_values {
                parts.push(("attn_v", layer.v_width(), places.v_at));
            }
        }
        parts
    }

    fn qkv(&mut self, layer: &LayerConfig) -> Result<Vec<(usize, usize)>, ModelError> {
        if layer.kv_from.is_some() {
            // Training keeps them, and nothing reads them.
            for part in ["attn_k", "attn_v", "attn_k_norm"] {
                let name = self.name(&format!("{part}.weight"));
                self.finder.pass_over(&name);
            }
        }
        let mut joined: Vec<(Vec<Rows>, usize)> = Vec::new();
        for (part, width, at) in Self::qkv_parts(layer) {
            let rows = self.rows(part, self.config.hidden, width)?;
            match joined.last_mut() {
                Some((parts, _)) if same_format(&parts[0], &rows) => parts.push(rows),
                _ => joined.push((vec![rows], at)),
            }
        }
        let stacked = |(parts, at)| {
            let name = self.name(&format!("qkv from {at}"));
            Ok((self.finder.matrix(name, parts, Arrangement::Stacked)?, at))
        };
        joined.into_iter().map(stacked).collect()
    }

    fn qkv_bias(&mut self, layer: &LayerConfig) -> Result<usize, ModelError> {
        let mut bias = vec![0f32; QkvPlaces::new(layer).end];
        for (part, width, at) in Self::qkv_parts(layer) {
            let values = self.finder.values(&self.name(&format!("{part}.bias")), width)?;
            bias[at..at + width].copy_from_slice(&values);
        }
        Ok(self.finder.keep(bias))
    }

    /// The heads' matrices. Older files have one for keys and values of all heads; what makes keys is turned then, so that
    /// it can be applied to queries.
    fn latent(
        &mut self,
        layer: &LayerConfig,
        latent: &LatentConfig,
    ) -> Result<LatentWeights<usize, usize>, ModelError> {
        let (hidden, heads) = (self.config.hidden, layer.heads);
        let queries = heads * latent.query_head();
        let (query, query_latent) = match latent.query {
            None => (self.matrix("attn_q", hidden, queries)?, None),
            Some(size) => {
                let norm = self.vector("attn_q_a_norm", size)?;
                (
                    self.matrix("attn_q_a", hidden, size)?,
                    Some((norm, self.matrix("attn_q_b", size, queries)?)),
                )
            }
        };
        let key = self.matrix("attn_kv_a_mqa", hidden, latent.size + latent.turns)?;
        let norm = self.vector("attn_kv_a_norm", latent.size)?;
        let joined = self.name("attn_kv_b.weight");
        let (to_latent, from_latent) = if self.finder.has(&joined) {
            let each = latent.plain + latent.value;
            let all = self.finder.rows(&joined, latent.size, heads * each)?;
            let part = |first, count| all.part(first, count);
            let parts = (0..heads)
                .map(|head| {
                    let keys = part(head * each, latent.plain)?.turned()?;
                    Some((keys, part(head * each + latent.plain, latent.value)?))
                })
                .collect::<Option<Vec<_>>>();
            parts.map(|parts| parts.into_iter().unzip()).ok_or_else(|| {
                self.finder.unsupported(format!("tensor {joined} is shorter than its shape says"))
            })?
        } else {
            let (keys, values) = (self.name("attn_k_b.weight"), self.name("attn_v_b.weight"));
            (
                self.finder.matrices(&keys, latent.plain, latent.size, heads)?,
                self.finder.matrices(&values, latent.size, latent.value, heads)?,
            )
        };
        Ok(LatentWeights {
            query,
            query_latent,
            key,
            norm,
            to_latent: self.finder.matrix(self.name("heads to latent"), to_latent, Arrangement::Stacked)?,
            from_latent: self.finder.matrix(
                self.name("heads from latent"),
                from_latent,
                Arrangement::Stacked,
            )?,
        })
    }

    /// A gated network, whose tensors' names end in `suffix`.
    fn dense(&mut self, suffix: &str, inner: usize) -> Result<DenseWeights<usize>, ModelError> {
        let hidden = self.config.hidden;
        let gate = self.rows(&format!("ffn_gate{suffix}"), hidden, inner)?;
        let up = self.rows(&format!("ffn_up{suffix}"), hidden, inner)?;
        let gate_up = self.finder.gate_up(&self.name(&format!("ffn_gate_up{suffix}")), gate, up)?;
        Ok(DenseWeights { gate_up, down: self.matrix(&format!("ffn_down{suffix}"), inner, hidden)? })
    }

    fn experts(&mut self, experts: &ExpertsConfig) -> Result<ExpertWeights<usize, usize>, ModelError> {
        let hidden = self.config.hidden;
        let ExpertsConfig { count, inner, .. } = *experts;
        let named = |layer: &Self, part: &str| layer.name(&format!("{part}.weight"));
        let both = named(self, "ffn_gate_up_exps");
        let gate_up = if self.finder.has(&both) {
            // An expert's gate, then its up; then those of the next.
            self.finder
                .matrices(&both, hidden, 2 * inner, count)?
                .iter()
                .flat_map(|expert| [expert.part(0, inner), expert.part(inner, inner)])
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| {
                    self.finder.unsupported(format!("tensor {both} is shorter than its shape says"))
                })?
        } else {
            let gate = self.finder.matrices(&named(self, "ffn_gate_exps"), hidden, inner, count)?;
            let up = self.finder.matrices(&named(self, "ffn_up_exps"), hidden, inner, count)?;
            gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect()
        };
        let gate_up = self.finder.matrix(self.name("experts gate_up"), gate_up, Arrangement::Paired)?;
        let down = self.finder.matrices(&named(self, "ffn_down_exps"), inner, hidden, count)?;
        let down = self.finder.matrix(self.name("experts down"), down, Arrangement::Stacked)?;
        let bias = self.name("exp_probs_b.bias");
        let choice_bias = match self.finder.has(&bias) && experts.choice.scoring == Scoring::Sigmoid {
            true => Some(self.finder.finite_vector(&bias, count)?),
            false => None,
        };
        let router = self.matrix("ffn_gate_inp", hidden, count)?;
        Ok(ExpertWeights { router, choice_bias, gate_up, down, beside: None })
    }

    fn beside(&mut self, experts: &ExpertsConfig) -> Result<BesideWeights<usize>, ModelError> {
        let hidden = self.config.hidden;
        let mut router_norm = self.finder.values(&self.name("ffn_gate_inp.scale"), hidden)?;
        let root = (hidden as f32).sqrt();
        router_norm.iter_mut().for_each(|scale| *scale /= root);
        Ok(BesideWeights {
            router_norm: self.finder.keep(router_norm),
            scales: self.finder.vector(&self.name("ffn_down_exps.scale"), experts.count)?,
            norm: self.vector("pre_ffw_norm_2", hidden)?,
            dense_branch_norm: self.vector("post_ffw_norm_1", hidden)?,
            branch_norm: self.vector("post_ffw_norm_2", hidden)?,
        })
    }
}
