//! Which tensors of a file make which matrices, and what they take.

use std::collections::HashSet;

use super::LoadOptions;
use super::layer::angle_bytes;
use super::scratch::{QkvPlaces, Scratch, ScratchRows, Strides};
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::model::config::{CausalConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::plan::MemoryPlan;
use crate::model::repack::{Arrangement, Blueprint};
use crate::ops::{Cache, STRIDE_MULTIPLE, round_up};

/// The matrices and vectors that a file gives, and which of them belong where.
pub(super) struct Parts {
    pub(super) blueprints: Vec<Blueprint>,
    pub(super) layers: Vec<LayerParts>,
    pub(super) head: usize,
    pub(super) head_norm: TensorInfo,
    pub(super) embedding: TensorInfo,
    /// Divides the frequencies of rotary embeddings that say so: Llama 3's slower low frequencies.
    pub(super) rope_divisors: Option<TensorInfo>,
}

/// A layer's matrices as indices of their blueprints, and its norms.
pub(super) struct LayerParts {
    /// Each with its first value in the qkv row.
    pub(super) qkv: Vec<(usize, usize)>,
    pub(super) output: usize,
    pub(super) gate_up: GateUp<usize>,
    pub(super) down: usize,
    pub(super) attention_norm: TensorInfo,
    pub(super) feed_forward_norm: TensorInfo,
    /// Of attention and of the feed-forward network.
    pub(super) branch_norms: Option<(TensorInfo, TensorInfo)>,
    /// Of queries and of keys.
    pub(super) head_norms: Option<(TensorInfo, TensorInfo)>,
}

impl Parts {
    fn add(&mut self, gguf: &Gguf, name: String, tensors: &[TensorInfo], arrangement: Arrangement) -> usize {
        let parts = tensors.iter().map(|tensor| gguf.rows(tensor)).collect();
        self.blueprints.push(Blueprint { name, parts, arrangement });
        self.blueprints.len() - 1
    }

    pub(super) fn find(gguf: &Gguf, config: &CausalConfig) -> Result<Self, ModelError> {
        let (hidden, vocabulary) = (config.hidden as u64, config.vocabulary as u64);
        let embedding = gguf.require_tensor("token_embd.weight", &[hidden, vocabulary])?.clone();
        let head = match gguf.tensor("output.weight") {
            Some(_) => gguf.require_tensor("output.weight", &[hidden, vocabulary])?.clone(),
            None => embedding.clone(),
        };
        let divided = config.ropes.iter().find(|rope| rope.divided);
        let rope_divisors = match (gguf.tensor("rope_freqs.weight"), divided) {
            (Some(_), Some(rope)) => {
                Some(gguf.require_tensor("rope_freqs.weight", &[rope.pairs as u64])?.clone())
            }
            _ => None,
        };
        let mut parts = Self {
            blueprints: Vec::new(),
            layers: Vec::new(),
            head: 0,
            head_norm: gguf.require_tensor("output_norm.weight", &[hidden])?.clone(),
            embedding,
            rope_divisors,
        };
        for index in 0..config.layers.len() {
            let layer = parts.layer(gguf, config, index)?;
            parts.layers.push(layer);
        }
        parts.head = parts.add(gguf, "output".to_owned(), &[head], Arrangement::Stacked);
        parts.refuse_the_rest(gguf)?;
        Ok(parts)
    }

    /// A tensor that nothing uses means a model that is not what it is taken for.
    fn refuse_the_rest(&self, gguf: &Gguf) -> Result<(), ModelError> {
        const SHOWN: usize = 4;
        let layers = self.layers.iter().flat_map(|layer| {
            [&layer.attention_norm, &layer.feed_forward_norm].into_iter().chain(
                [&layer.branch_norms, &layer.head_norms].into_iter().flatten().flat_map(|(a, b)| [a, b]),
            )
        });
        let used: HashSet<&str> = self
            .blueprints
            .iter()
            .flat_map(|blueprint| blueprint.parts.iter().map(|part| part.name.as_str()))
            .chain(
                [&self.head_norm, &self.embedding]
                    .into_iter()
                    .chain(&self.rope_divisors)
                    .chain(layers)
                    .map(|tensor| tensor.name.as_str()),
            )
            .collect();
        let unused: Vec<&str> = gguf
            .tensors()
            .iter()
            .map(|tensor| tensor.name.as_str())
            .filter(|name| !used.contains(name))
            .collect();
        if unused.is_empty() {
            return Ok(());
        }
        let more = match unused.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = unused.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
        let what = format!(
            "this version has no use for the tensors {names}{more}; without them the model would not be the one in \
             the file"
        );
        Err(ModelError::Unsupported { path: gguf.path().to_owned(), what })
    }

    fn layer(&mut self, gguf: &Gguf, config: &CausalConfig, index: usize) -> Result<LayerParts, ModelError> {
        let layer = &config.layers[index];
        let (hidden, inner) = (config.hidden as u64, layer.feed_forward.inner() as u64);
        let [q, k, v, attended] =
            [layer.q_width(), layer.k_width(), layer.v_width(), layer.attended_width()].map(|n| n as u64);
        let places = QkvPlaces::new(layer);
        let name = |part: &str| format!("blk.{index}.{part}");
        let tensor = |part: &str, shape: [u64; 2]| -> Result<TensorInfo, ModelError> {
            Ok(gguf.require_tensor(&name(&format!("{part}.weight")), &shape)?.clone())
        };
        let vector = |part: &str, n: usize| -> Result<TensorInfo, ModelError> {
            Ok(gguf.require_tensor(&name(&format!("{part}.weight")), &[n as u64])?.clone())
        };
        let pair = |wanted: bool, first: &str, second: &str, n| -> Result<_, ModelError> {
            Ok(if wanted { Some((vector(first, n)?, vector(second, n)?)) } else { None })
        };
        let mut joined: Vec<(Vec<TensorInfo>, usize)> = Vec::new();
        for (part, rows, at) in [("attn_q", q, 0), ("attn_k", k, places.k_at), ("attn_v", v, places.v_at)] {
            let tensor = tensor(part, [hidden, rows])?;
            match joined.last_mut() {
                Some((tensors, _)) if tensors[0].ty == tensor.ty => tensors.push(tensor),
                _ => joined.push((vec![tensor], at)),
            }
        }
        let stacked = Arrangement::Stacked;
        let qkv = joined
            .into_iter()
            .map(|(tensors, at)| (self.add(gguf, name(&format!("qkv from {at}")), &tensors, stacked), at))
            .collect();
        let output =
            self.add(gguf, name("attn_output"), &[tensor("attn_output", [attended, hidden])?], stacked);
        let (gate, up) = (tensor("ffn_gate", [hidden, inner])?, tensor("ffn_up", [hidden, inner])?);
        let gate_up = if gate.ty == up.ty {
            GateUp::Joined(self.add(gguf, name("ffn_gate_up"), &[gate, up], Arrangement::Paired))
        } else {
            let gate = self.add(gguf, name("ffn_gate"), &[gate], stacked);
            GateUp::Apart(gate, self.add(gguf, name("ffn_up"), &[up], stacked))
        };
        let down = self.add(gguf, name("ffn_down"), &[tensor("ffn_down", [inner, hidden])?], stacked);
        Ok(LayerParts {
            qkv,
            output,
            gate_up,
            down,
            attention_norm: vector("attn_norm", config.hidden)?,
            feed_forward_norm: vector("ffn_norm", config.hidden)?,
            branch_norms: pair(
                config.family.branch_norms,
                "post_attention_norm",
                "post_ffw_norm",
                config.hidden,
            )?,
            head_norms: pair(config.family.head_norms, "attn_q_norm", "attn_k_norm", layer.key_size)?,
        })
    }

    /// Rows of the scratch buffers: only what these layers use.
    pub(super) fn scratch_rows(&self, config: &CausalConfig, pass: usize, logits: usize) -> ScratchRows {
        let apart = self.layers.iter().any(|layer| matches!(layer.gate_up, GateUp::Apart(..)));
        ScratchRows {
            pass,
            branch: if config.family.branch_norms { pass } else { 1 },
            gate: if apart { pass } else { 1 },
            logits,
        }
    }

    pub(super) fn plan(
        &self,
        config: &CausalConfig,
        strides: &Strides,
        options: &LoadOptions,
        rows: ScratchRows,
    ) -> MemoryPlan {
        let context = options.context;
        let family = config.family;
        let norms = |layer: &LayerConfig| {
            let streams = if family.branch_norms { 4 } else { 2 };
            let heads = if family.head_norms { 2 * round_up(layer.key_size, STRIDE_MULTIPLE) } else { 0 };
            streams * strides.hidden + heads
        };
        let cache = |layer: &LayerConfig| match layer.kv_from {
            Some(_) => 0,
            None => Cache::bytes(options.cache, layer.kv_heads, layer.key_size, context),
        };
        MemoryPlan {
            weights: self.blueprints.iter().map(Blueprint::bytes).sum::<usize>()
                + (config.layers.iter().map(norms).sum::<usize>() + strides.hidden) * 4,
            kv_cache: config.layers.iter().map(cache).sum(),
            scratch: Scratch::bytes(strides, rows) + angle_bytes(config, context) + 64,
        }
    }
}
