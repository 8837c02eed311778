//! Which tensors make which matrices, and what they take.

use std::collections::BTreeSet;
use std::fmt;

use super::DiffusionOptions;
use super::config::DiffusionConfig;
use super::scratch::{Scratch, Strides};
use super::source::{Name, Source};
use crate::checkpoint::rows::Rows;
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::plan::MemoryPlan;
use crate::model::repack::{Arrangement, Blueprint, format_in_tiles, of_one_family};
use crate::model::workload::{AttentionShape, ExpertsShape, Workload};
use crate::ops::{Cache, Family, Format, HeadState, Products, Routing, STRIDE_MULTIPLE, round_up};

/// The matrices and vectors of a checkpoint, and which of them belong where.
pub(super) struct Parts {
    pub(super) blueprints: Vec<Blueprint>,
    pub(super) layers: Vec<LayerParts>,
    /// Embedding of encoder and decoder, and the head.
    pub(super) table: usize,
    pub(super) head_norm: Vec<f32>,
    pub(super) conditioning: ConditioningParts,
}

/// Self-conditioning: a gated network over the soft embedding of the step before.
pub(super) struct ConditioningParts {
    pub(super) norm: Vec<f32>,
    pub(super) gate_up: GateUp<usize>,
    pub(super) down: usize,
}

/// A layer's matrices as indices of their blueprints, and its vectors.
pub(super) struct LayerParts {
    /// Each with its first value in the qkv row.
    pub(super) qkv: Vec<(usize, usize)>,
    pub(super) output: usize,
    pub(super) gate_up: GateUp<usize>,
    pub(super) down: usize,
    pub(super) router: usize,
    pub(super) experts_gate_up: usize,
    pub(super) experts_down: usize,
    pub(super) norms: LayerNorms<Vec<f32>>,
    /// The router's scale, divided by the square root of the row's length.
    pub(super) router_norm: Vec<f32>,
    pub(super) per_expert_scale: Vec<f32>,
    pub(super) encoder_scalar: f32,
    pub(super) decoder_scalar: f32,
}

/// Norm weights of a layer.
pub(super) struct LayerNorms<T> {
    pub(super) attention: T,
    pub(super) attention_branch: T,
    pub(super) dense: T,
    pub(super) dense_branch: T,
    pub(super) experts: T,
    pub(super) experts_branch: T,
    pub(super) feed_forward_branch: T,
    pub(super) q: T,
    pub(super) k: T,
}

impl<T> LayerNorms<T> {
    /// All of them, each made into something else.
    pub(super) fn map<U, E>(&self, mut make: impl FnMut(&T) -> Result<U, E>) -> Result<LayerNorms<U>, E> {
        Ok(LayerNorms {
            attention: make(&self.attention)?,
            attention_branch: make(&self.attention_branch)?,
            dense: make(&self.dense)?,
            dense_branch: make(&self.dense_branch)?,
            experts: make(&self.experts)?,
            experts_branch: make(&self.experts_branch)?,
            feed_forward_branch: make(&self.feed_forward_branch)?,
            q: make(&self.q)?,
            k: make(&self.k)?,
        })
    }
}

/// Vectors of a layer that are as long as a row of the stream: its norms but those of heads, and the router's.
const STREAM_VECTORS: usize = 8;

impl Parts {
    pub(super) fn find(source: &mut Source<'_>, config: &DiffusionConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden, config.feed_forward);
        let mut blueprints = Blueprints(Vec::new());
        let table = source.matrix(
            &Name::new("embed_tokens.weight", "token_embd.weight"),
            config.vocabulary,
            hidden,
        )?;
        let conditioning = |part: &str, gguf: &str| {
            Name::new(&format!("self_conditioning.{part}.weight"), &format!("self_cond_{gguf}.weight"))
        };
        let gate = source.matrix(&conditioning("gate_proj", "gate"), inner, hidden)?;
        let up = source.matrix(&conditioning("up_proj", "up"), inner, hidden)?;
        let down = source.matrix(&conditioning("down_proj", "down"), hidden, inner)?;
        let conditioning = ConditioningParts {
            norm: source.vector(&conditioning("pre_norm", "pre_norm"), hidden)?,
            gate_up: blueprints.gate_up("self_conditioning.gate_up", gate, up)?,
            down: blueprints.stacked("self_conditioning.down", vec![down])?,
        };
        let layers = (0..config.layers.len())
            .map(|index| Self::layer(source, config, index, &mut blueprints))
            .collect::<Result<_, _>>()?;
        let head_norm = source.vector(&Name::new("norm.weight", "output_norm.weight"), hidden)?;
        let table = blueprints.stacked("embed_tokens", vec![table])?;
        source.check_the_rest()?;
        Ok(Self { blueprints: blueprints.0, layers, table, head_norm, conditioning })
    }

    fn layer(
        source: &mut Source<'_>,
        config: &DiffusionConfig,
        index: usize,
        blueprints: &mut Blueprints,
    ) -> Result<LayerParts, ModelError> {
        let (hidden, inner) = (config.hidden, config.feed_forward);
        let layer = &config.layers[index];
        let (q, kv) = (config.heads * layer.head_size, layer.kv_heads * layer.head_size);
        let strides = Strides::new(config);
        let name = |hugging_face: &str, gguf: &str| {
            Name::of_layer(index, &format!("{hugging_face}.weight"), &format!("{gguf}.weight"))
        };
        let called = |part: &str| format!("layer {index}: {part}");
        let (k_at, v_at) = strides.kv_at(config, layer);
        let mut joined: Vec<(Vec<Rows>, usize)> = Vec::new();
        for (hugging_face, gguf, rows, at) in [
            ("self_attn.q_proj", "attn_q", q, 0),
            ("self_attn.k_proj", "attn_k", kv, k_at),
            ("self_attn.v_proj", "attn_v", kv, v_at),
        ] {
            // Where everything is seen, the raw keys are the values.
            if gguf == "attn_v" && !layer.sliding {
                continue;
            }
            let rows = source.matrix(&name(hugging_face, gguf), rows, hidden)?;
            match joined.last_mut() {
                Some((parts, _)) if same_format(&parts[0], &rows) => parts.push(rows),
                _ => joined.push((vec![rows], at)),
            }
        }
        let qkv = joined
            .into_iter()
            .map(|(parts, at)| Ok((blueprints.stacked(&called(&format!("qkv from {at}")), parts)?, at)))
            .collect::<Result<_, ModelError>>()?;
        let output = source.matrix(&name("self_attn.o_proj", "attn_output"), hidden, q)?;
        let gate = source.matrix(&name("mlp.gate_proj", "ffn_gate"), inner, hidden)?;
        let up = source.matrix(&name("mlp.up_proj", "ffn_up"), inner, hidden)?;
        let down = source.matrix(&name("mlp.down_proj", "ffn_down"), hidden, inner)?;
        let router = source.plain_matrix(&name("router.proj", "ffn_gate_inp"), config.experts, hidden)?;
        let experts = source.experts(index)?;
        let mut vector = |hugging_face: &str, gguf: &str, n| source.vector(&name(hugging_face, gguf), n);
        let norms = LayerNorms {
            attention: vector("input_layernorm", "attn_norm", hidden)?,
            attention_branch: vector("post_attention_layernorm", "post_attention_norm", hidden)?,
            dense: vector("pre_feedforward_layernorm", "ffn_norm", hidden)?,
            dense_branch: vector("post_feedforward_layernorm_1", "post_ffw_norm_1", hidden)?,
            experts: vector("pre_feedforward_layernorm_2", "pre_ffw_norm_2", hidden)?,
            experts_branch: vector("post_feedforward_layernorm_2", "post_ffw_norm_2", hidden)?,
            feed_forward_branch: vector("post_feedforward_layernorm", "post_ffw_norm", hidden)?,
            q: vector("self_attn.q_norm", "attn_q_norm", layer.head_size)?,
            k: vector("self_attn.k_norm", "attn_k_norm", layer.head_size)?,
        };
        let mut router_norm =
            source.vector(&Name::of_layer(index, "router.scale", "ffn_gate_inp.scale"), hidden)?;
        let root = (hidden as f32).sqrt();
        router_norm.iter_mut().for_each(|scale| *scale /= root);
        Ok(LayerParts {
            qkv,
            output: blueprints.stacked(&called("attention output"), vec![output])?,
            gate_up: blueprints.gate_up(&called("dense gate_up"), gate, up)?,
            down: blueprints.stacked(&called("dense down"), vec![down])?,
            router: blueprints.stacked(&called("router"), vec![router])?,
            experts_gate_up: blueprints.paired(&called("experts gate_up"), experts.gate_up)?,
            experts_down: blueprints.stacked(&called("experts down"), experts.down)?,
            norms,
            router_norm,
            per_expert_scale: source.vector(
                &Name::of_layer(index, "router.per_expert_scale", "ffn_down_exps.scale"),
                config.experts,
            )?,
            encoder_scalar: source.scalar(&Name::encoder_scalar(index))?,
            decoder_scalar: source.scalar(&Name::of_layer(
                index,
                "layer_scalar",
                "layer_output_scale.weight",
            ))?,
        })
    }

    /// Makes matrices for the products that `products` has for them. The table is for the head's kernels.
    pub(super) fn made_for(&mut self, products: Products) {
        let table = self.table;
        let others = self.blueprints.iter_mut().enumerate().filter(|(matrix, _)| *matrix != table);
        others.for_each(|(_, blueprint)| blueprint.made_for(products));
        for layer in &self.layers {
            of_one_family(&mut self.blueprints, [layer.experts_gate_up, layer.experts_down]);
        }
    }

    /// The formats that the fused launches of the `vector` family meet: gated networks', and routers'.
    pub(super) fn fused(&self) -> [Vec<Format>; 2] {
        let format = |matrix: usize| self.blueprints[matrix].format();
        let networks = self.layers.iter().map(|layer| &layer.gate_up);
        let gated = networks.chain([&self.conditioning.gate_up]).filter_map(|gate_up| match *gate_up {
            GateUp::Joined(both) => Some(format(both)),
            GateUp::Apart(..) => None,
        });
        let routers = self.layers.iter().map(|layer| format(layer.router));
        [gated.collect(), routers.collect()].map(|mut formats: Vec<Format>| {
            formats.sort_unstable();
            formats.dedup();
            formats
        })
    }

    /// The formats of experts and table.
    pub(super) fn formats(&self) -> WeightFormats {
        let name = |matrix: usize| self.blueprints[matrix].format().name();
        let experts = self.layers.iter().flat_map(|layer| [layer.experts_gate_up, layer.experts_down]);
        WeightFormats { experts: experts.map(name).collect(), table: name(self.table) }
    }

    /// What passes have to do.
    pub(super) fn workload(&self, config: &DiffusionConfig) -> Workload {
        let shape = |matrix: usize| self.blueprints[matrix].shape();
        let both = |gate_up: &GateUp<usize>| match *gate_up {
            GateUp::Joined(both) => vec![shape(both)],
            GateUp::Apart(gate, up) => vec![shape(gate), shape(up)],
        };
        let products = self.layers.iter().flat_map(|layer| {
            let alone = [layer.output, layer.down, layer.router].map(shape);
            layer.qkv.iter().map(|&(matrix, _)| shape(matrix)).chain(alone).chain(both(&layer.gate_up))
        });
        let of_each = |matrix: usize| self.blueprints[matrix].shape_of_each(config.experts);
        Workload {
            products: products.collect(),
            conditioning: both(&self.conditioning.gate_up)
                .into_iter()
                .chain([shape(self.conditioning.down)])
                .collect(),
            experts: self
                .layers
                .iter()
                .map(|layer| ExpertsShape {
                    count: config.experts,
                    used: config.experts_used,
                    gate_up: of_each(layer.experts_gate_up),
                    down: of_each(layer.experts_down),
                })
                .collect(),
            attention: config
                .layers
                .iter()
                .map(|layer| AttentionShape {
                    heads: config.heads,
                    kv_heads: layer.kv_heads,
                    head_size: layer.head_size,
                    window: layer.sliding.then_some(config.window),
                    latent: false,
                    capped: false,
                })
                .collect(),
            head: shape(self.table),
            canvas: Some(config.canvas),
        }
    }

    pub(super) fn plan(
        &self,
        config: &DiffusionConfig,
        options: &DiffusionOptions,
        products: Products,
    ) -> MemoryPlan {
        let strides = Strides::new(config);
        let heads: usize =
            config.layers.iter().map(|layer| 2 * round_up(layer.head_size, STRIDE_MULTIPLE)).sum();
        let scales = config.layers.len() * round_up(config.experts, STRIDE_MULTIPLE);
        let vectors = (STREAM_VECTORS * config.layers.len() + 2) * strides.hidden + heads + scales;
        let kv_cache = config
            .layers
            .iter()
            .map(|layer| {
                let (heads, size) = (layer.kv_heads, layer.head_size);
                let family = products.attention(options.cache, size);
                Cache::bytes(family, options.cache, heads, size, options.positions(config, layer))
            })
            .sum();
        let rows = options.pass_rows(config);
        let chosen = config.layers.len() * rows * config.experts_used * 4;
        MemoryPlan {
            weights: self.blueprints.iter().map(Blueprint::bytes).sum::<usize>() + vectors * 4,
            kv_cache,
            scratch: Scratch::bytes(config, rows, products, options.cache)
                + Routing::bytes(config.experts, config.experts_used, rows)
                + HeadState::bytes(config.canvas, config.hidden, true)
                - HeadState::partial_bytes(config.canvas, config.hidden)
                + options.angle_bytes(config)
                + options.attended_bytes(config)
                + chosen
                + products.unused_bytes(),
        }
    }
}

/// The kernels' formats of the weights that there is a choice about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WeightFormats {
    /// Of experts, all that occur.
    experts: BTreeSet<&'static str>,
    /// Of the table of embeddings.
    table: &'static str,
}

impl WeightFormats {
    /// Whether all experts are 4-bit as in `dg-w4a16-v1`.
    pub(super) fn experts_are_w4(&self) -> bool {
        self.experts.iter().all(|name| *name == Format::W4.name())
    }
}

impl fmt::Display for WeightFormats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let experts: Vec<&str> = self.experts.iter().copied().collect();
        write!(f, "{}-experts-{}", experts.join("-"), self.table)
    }
}

/// Whether two tensors can lie in one matrix: those of one format once they are tiles, whatever they are in the file.
fn same_format(a: &Rows, b: &Rows) -> bool {
    format_in_tiles(&a.encoding) == format_in_tiles(&b.encoding)
}

/// The blueprints so far.
struct Blueprints(Vec<Blueprint>);

impl Blueprints {
    fn add(&mut self, name: &str, parts: Vec<Rows>, arrangement: Arrangement) -> Result<usize, ModelError> {
        if let Some(odd) = parts.iter().find(|part| !same_format(&parts[0], part)) {
            return Err(ModelError::Unsupported {
                path: odd.bytes.file().path().to_owned(),
                what: format!(
                    "tensors {} and {} are of different types; one type is supported for {name}",
                    parts[0].name, odd.name
                ),
            });
        }
        self.0.push(Blueprint { name: name.to_owned(), parts, arrangement, family: Family::Vector });
        Ok(self.0.len() - 1)
    }

    fn stacked(&mut self, name: &str, parts: Vec<Rows>) -> Result<usize, ModelError> {
        self.add(name, parts, Arrangement::Stacked)
    }

    fn paired(&mut self, name: &str, parts: Vec<Rows>) -> Result<usize, ModelError> {
        self.add(name, parts, Arrangement::Paired)
    }

    /// Gate and up in one matrix where they have one format, else in two.
    fn gate_up(&mut self, name: &str, gate: Rows, up: Rows) -> Result<GateUp<usize>, ModelError> {
        if same_format(&gate, &up) {
            return Ok(GateUp::Joined(self.paired(name, vec![gate, up])?));
        }
        let gate = self.stacked(&format!("{name}, gate"), vec![gate])?;
        Ok(GateUp::Apart(gate, self.stacked(&format!("{name}, up"), vec![up])?))
    }
}
