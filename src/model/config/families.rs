//! Families: what their files leave unsaid, as data.

use crate::ops::Activation;

/// Models that share tensor names and switches.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `general.architecture` of its files, and the prefix of their keys.
    pub architecture: &'static str,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Embeddings are multiplied by the square root of their length.
    pub scaled_embeddings: bool,

    /// Rotated pairs are neighbours (2i, 2i + 1) rather than halves (i, i + rotated / 2).
    pub interleaved: bool,
    /// Base of the rotary embedding where the file says nothing; none: the file must say it.
    pub rope_base: Option<f32>,
    /// `rope_freqs.weight` must be there: it says which pairs of a head turn.
    pub proportional_rope: bool,

    /// Which layers see a window.
    pub windows: Windows,
    /// What scores are multiplied by.
    pub scores: Scores,
    /// The file says how scores and logits are soft-capped.
    pub soft_caps: SoftCaps,
    /// Queries, keys and values get a bias.
    pub qkv_biases: bool,
    /// Query and key heads are normed.
    pub head_norms: bool,
    /// Value heads are normed, without a weight.
    pub value_norms: bool,
    /// Layers that see everything may have no value matrix: their values are the raw keys.
    pub raw_key_values: bool,
    /// The last layers may look at keys and values of layers before them, as the file says.
    pub shared_caches: bool,

    /// Branches are normed before they join the residual stream.
    pub branch_norms: bool,
    /// Layers have experts in place of a network, all but the first few that the file may name.
    pub experts: Option<Routed>,
    /// Keys and values of all heads are made out of one latent.
    pub latent: bool,
    /// A layer may have experts beside its dense network, if the file has any.
    pub experts_beside: bool,
    /// What a layer leaves may have a factor.
    pub layer_scales: bool,
    /// The file says whether each layer has an input of its own for each token.
    pub layer_inputs: bool,
}

/// Which layers of a family see a window only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Windows {
    /// None.
    Nowhere,
    /// All, if the file has a window.
    Everywhere,
    /// All but every n-th. The file may say n, or which.
    Alternating {
        /// n where the file says nothing.
        full_every: usize,
        /// Base of their rotary embedding where the file says nothing; none: it is that of the other layers.
        rope_base: Option<f32>,
    },
    /// Those that the file names, with heads of another size.
    Listed {
        /// Base of their rotary embedding where the file says nothing.
        rope_base: f32,
    },
}

/// How a family's routers choose where the file says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routed {
    /// The weights of the chosen are divided by their sum.
    pub renormalised: bool,
}

/// What scores are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// 1 / sqrt(head size).
    ByHead,
    /// The same, but for the model of this many layers: 1 / sqrt(width / query heads).
    ByWidthAt {
        /// Layers of the one model that is different.
        layers: usize,
    },
    /// 1: queries are normed.
    Plain,
}

/// Which soft caps a family's files must name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SoftCaps {
    /// None.
    None,
    /// That of logits.
    Logits,
    /// Those of logits and of scores.
    LogitsAndScores,
}

/// A family without any of the switches.
const PLAIN: Family = Family {
    architecture: "",
    activation: Activation::Silu,
    scaled_embeddings: false,
    interleaved: false,
    rope_base: None,
    proportional_rope: false,
    windows: Windows::Nowhere,
    scores: Scores::ByHead,
    soft_caps: SoftCaps::None,
    qkv_biases: false,
    head_norms: false,
    value_norms: false,
    raw_key_values: false,
    shared_caches: false,
    branch_norms: false,
    experts: None,
    latent: false,
    experts_beside: false,
    layer_scales: false,
    layer_inputs: false,
};

/// What all Gemmas have.
const GEMMA: Family =
    Family { activation: Activation::GeluTanh, scaled_embeddings: true, branch_norms: true, ..PLAIN };

/// All families that [`Causal`](crate::model::Causal) runs.
static FAMILIES: &[Family] = &[
    // Llama 2 and 3, SmolLM, Mistral: 7B of 2023 has a window.
    Family {
        architecture: "llama",
        interleaved: true,
        // Llama 2 files predate the key; their base is the paper's.
        rope_base: Some(10_000.0),
        windows: Windows::Everywhere,
        ..PLAIN
    },
    // Qwen2 and Qwen2.5.
    Family { architecture: "qwen2", qkv_biases: true, ..PLAIN },
    Family { architecture: "qwen3", head_norms: true, ..PLAIN },
    Family {
        architecture: "qwen3moe",
        head_norms: true,
        experts: Some(Routed { renormalised: true }),
        ..PLAIN
    },
    // DeepSeek V2, V3, R1, and others of that shape.
    Family {
        architecture: "deepseek2",
        interleaved: true,
        latent: true,
        experts: Some(Routed { renormalised: false }),
        ..PLAIN
    },
    Family {
        architecture: "gemma2",
        // Its files do not have the key.
        rope_base: Some(10_000.0),
        windows: Windows::Alternating { full_every: 2, rope_base: None },
        scores: Scores::ByWidthAt { layers: 46 },
        soft_caps: SoftCaps::LogitsAndScores,
        ..GEMMA
    },
    Family {
        architecture: "gemma3",
        windows: Windows::Alternating { full_every: 6, rope_base: Some(10_000.0) },
        scores: Scores::ByWidthAt { layers: 62 },
        head_norms: true,
        ..GEMMA
    },
    // Dense (31B), with experts (26B-A4B), or with inputs for each layer (E2B, E4B).
    Family {
        architecture: "gemma4",
        proportional_rope: true,
        windows: Windows::Listed { rope_base: 10_000.0 },
        scores: Scores::Plain,
        soft_caps: SoftCaps::Logits,
        head_norms: true,
        value_norms: true,
        raw_key_values: true,
        shared_caches: true,
        experts_beside: true,
        layer_scales: true,
        layer_inputs: true,
        ..GEMMA
    },
];

impl Family {
    /// The family of an architecture.
    pub fn of(architecture: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.architecture == architecture)
    }

    /// Architectures this program runs, as `general.architecture` spells them.
    pub fn supported() -> String {
        FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ")
    }
}
