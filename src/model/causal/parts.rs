//! Which tensors of a file make which matrices, and what they take.

use super::scratch::{Scratch, Strides};
use super::{LoadOptions, MemoryPlan};
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::model::config::CausalConfig;
use crate::model::error::ModelError;
use crate::model::repack::Blueprint;
use crate::ops::{Cache, STRIDE_MULTIPLE, round_up};

/// The matrices that a file gives, and which of them belong where.
pub(super) struct Parts {
    pub(super) blueprints: Vec<Blueprint>,
    pub(super) layers: Vec<LayerShape>,
    pub(super) head: usize,
}

/// A layer's matrices as indices of their blueprints.
pub(super) struct LayerShape {
    /// Each with its first value in the qkv row.
    pub(super) qkv: Vec<(usize, usize)>,
    pub(super) output: usize,
    /// One where both have one type, else gate and up.
    pub(super) gate_up: (usize, Option<usize>),
    pub(super) down: usize,
}

impl Parts {
    fn add(&mut self, name: String, tensors: Vec<TensorInfo>, alternating: bool) -> usize {
        self.blueprints.push(Blueprint { name, tensors, alternating });
        self.blueprints.len() - 1
    }

    pub(super) fn find(gguf: &Gguf, config: &CausalConfig) -> Result<Self, ModelError> {
        let mut parts = Self { blueprints: Vec::new(), layers: Vec::new(), head: 0 };
        for index in 0..config.layers {
            let layer = parts.layer(gguf, config, index)?;
            parts.layers.push(layer);
        }
        let head = match gguf.tensor("output.weight") {
            Some(_) => "output.weight",
            None => "token_embd.weight",
        };
        let head = gguf.require_tensor(head, &[config.hidden as u64, config.vocabulary as u64])?.clone();
        parts.head = parts.add("output".to_owned(), vec![head], false);
        Ok(parts)
    }

    fn layer(&mut self, gguf: &Gguf, config: &CausalConfig, index: usize) -> Result<LayerShape, ModelError> {
        let (hidden, inner) = (config.hidden as u64, config.feed_forward as u64);
        let q = (config.heads * config.head_size) as u64;
        let kv = (config.kv_heads * config.head_size) as u64;
        let strides = Strides::new(config);
        let name = |part: &str| format!("blk.{index}.{part}");
        let tensor = |part: &str, shape: [u64; 2]| -> Result<TensorInfo, ModelError> {
            Ok(gguf.require_tensor(&name(&format!("{part}.weight")), &shape)?.clone())
        };
        if let Some(bias) = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
            .map(|part| name(&format!("{part}.bias")))
            .iter()
            .find(|name| gguf.tensor(name).is_some())
        {
            let what = format!("tensor {bias}: this version runs models without biases");
            return Err(ModelError::Unsupported { path: gguf.path().to_owned(), what });
        }
        let mut joined: Vec<(Vec<TensorInfo>, usize)> = Vec::new();
        for (part, rows, at) in [("attn_q", q, 0), ("attn_k", kv, strides.k_at), ("attn_v", kv, strides.v_at)]
        {
            let tensor = tensor(part, [hidden, rows])?;
            match joined.last_mut() {
                Some((tensors, _)) if tensors[0].ty == tensor.ty => tensors.push(tensor),
                _ => joined.push((vec![tensor], at)),
            }
        }
        let qkv = joined
            .into_iter()
            .map(|(tensors, at)| (self.add(name(&format!("qkv from {at}")), tensors, false), at))
            .collect();
        let output = self.add(name("attn_output"), vec![tensor("attn_output", [q, hidden])?], false);
        let (gate, up) = (tensor("ffn_gate", [hidden, inner])?, tensor("ffn_up", [hidden, inner])?);
        let gate_up = if gate.ty == up.ty {
            (self.add(name("ffn_gate_up"), vec![gate, up], true), None)
        } else {
            let gate = self.add(name("ffn_gate"), vec![gate], false);
            (gate, Some(self.add(name("ffn_up"), vec![up], false)))
        };
        let down = self.add(name("ffn_down"), vec![tensor("ffn_down", [inner, hidden])?], false);
        Ok(LayerShape { qkv, output, gate_up, down })
    }

    pub(super) fn plan(
        &self,
        config: &CausalConfig,
        strides: &Strides,
        options: &LoadOptions,
        rows: usize,
        logit_rows: usize,
    ) -> MemoryPlan {
        let context = options.context;
        let norms = if config.branch_norms { 4 } else { 2 } * strides.hidden
            + if config.head_norms { 2 * round_up(config.head_size, STRIDE_MULTIPLE) } else { 0 };
        let tables = if config.sliding.is_some() { 2 } else { 1 } * context * config.rotated * 4;
        MemoryPlan {
            weights: self.blueprints.iter().map(Blueprint::bytes).sum::<usize>()
                + (norms * config.layers + strides.hidden) * 4,
            kv_cache: config.layers * Cache::bytes(options.cache, config.kv_heads, config.head_size, context),
            scratch: Scratch::bytes(strides, rows, logit_rows).iter().sum::<usize>() + tables + 64,
        }
    }
}
