//! What a GGUF's metadata says about a causal model: a family is data plus a few switches over one forward pass.

use super::error::ModelError;
use crate::checkpoint::gguf::Gguf;
use crate::ops::Activation;

/// Models that share tensor names and switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `llama`: Llama 2 and 3, SmolLM, Mistral.
    Llama,
    /// `gemma3`: text models of Gemma 3.
    Gemma3,
}

impl Family {
    /// Architectures this program runs, as `general.architecture` spells them.
    pub const SUPPORTED: &'static str = "llama, gemma3";

    /// The family of an architecture.
    pub fn from_architecture(name: &str) -> Option<Self> {
        match name {
            "llama" => Some(Self::Llama),
            "gemma3" => Some(Self::Gemma3),
            _ => None,
        }
    }

    /// The prefix of its metadata keys.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Gemma3 => "gemma3",
        }
    }
}

/// Rotary embedding of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub base: f32,
    /// Positions are divided by it.
    pub linear_factor: f32,
}

/// A causal model's sizes and switches.
#[derive(Debug, Clone, PartialEq)]
pub struct CausalConfig {
    /// The family.
    pub family: Family,
    /// Layers.
    pub layers: usize,
    /// Values of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values a head.
    pub head_size: usize,
    /// Inner values of the feed-forward network.
    pub feed_forward: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
    /// Values of a head that are rotated.
    pub rotated: usize,
    /// Rotated pairs are neighbours (2i, 2i + 1) rather than halves (i, i + rotated / 2).
    pub interleaved: bool,
    /// Rotary embedding of layers that see everything.
    pub rope: Rope,
    /// Window and rotary embedding of sliding layers.
    pub sliding: Option<(usize, Rope)>,
    /// Every n-th layer of a model with sliding layers sees everything.
    pub full_every: usize,
    /// Scores are multiplied by it.
    pub attention_scale: f32,
    /// Embeddings are multiplied by it.
    pub embedding_scale: f32,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Query and key heads are normed.
    pub head_norms: bool,
    /// Branches are normed before they join the residual stream.
    pub branch_norms: bool,
}

impl CausalConfig {
    /// Reads and checks the metadata of `gguf`.
    ///
    /// # Errors
    /// Missing keys, values out of range, architectures and scalings that are not supported, each by name.
    pub fn read(gguf: &Gguf) -> Result<Self, ModelError> {
        let metadata = gguf.metadata();
        let unsupported = |what: String| ModelError::Unsupported { path: gguf.path().to_owned(), what };
        let architecture = metadata.require_str("general.architecture")?;
        let family = Family::from_architecture(architecture).ok_or_else(|| {
            unsupported(format!(
                "general.architecture is '{architecture}'; this version runs {}",
                Family::SUPPORTED
            ))
        })?;
        let key = |name: &str| format!("{architecture}.{name}");
        let size = |name: &str, most: u32| -> Result<usize, ModelError> {
            let name = key(name);
            let value = metadata.require_u32(&name)?;
            if value == 0 || value > most {
                return Err(unsupported(format!("{name} is {value}; expected 1 to {most}")));
            }
            Ok(value as usize)
        };
        let layers = size("block_count", 4096)?;
        let hidden = size("embedding_length", 1 << 20)?;
        let heads = size("attention.head_count", 4096)?;
        let kv_heads = match metadata.u32(&key("attention.head_count_kv"))? {
            Some(_) => size("attention.head_count_kv", 4096)?,
            None => heads,
        };
        if heads % kv_heads != 0 {
            return Err(unsupported(format!(
                "{} query heads cannot share {kv_heads} key-value heads evenly ({})",
                heads,
                key("attention.head_count_kv")
            )));
        }
        let head_size = match metadata.u32(&key("attention.key_length"))? {
            Some(_) => size("attention.key_length", 4096)?,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(unsupported(format!(
                    "{} is missing and {hidden} values do not divide into {heads} heads",
                    key("attention.key_length")
                )));
            }
        };
        if head_size % 16 != 0 {
            return Err(unsupported(format!("a head size of {head_size}; multiples of 16 are supported")));
        }
        if let Some(value_size) = metadata.u32(&key("attention.value_length"))?
            && value_size as usize != head_size
        {
            return Err(unsupported(format!(
                "{} is {value_size}, keys have {head_size} values; equal sizes are supported",
                key("attention.value_length")
            )));
        }
        let epsilon = metadata.require_f32(&key("attention.layer_norm_rms_epsilon"))?;
        if !(epsilon > 0.0 && epsilon < 1.0) {
            return Err(unsupported(format!(
                "{} is {epsilon}; expected a small positive number",
                key("attention.layer_norm_rms_epsilon")
            )));
        }
        let rotated = match metadata.u32(&key("rope.dimension_count"))? {
            Some(count) => count as usize,
            None => head_size,
        };
        if rotated % 2 != 0 || rotated > head_size {
            return Err(unsupported(format!(
                "{} is {rotated}; expected an even number up to the head size {head_size}",
                key("rope.dimension_count")
            )));
        }
        for name in ["expert_count", "attn_logit_softcapping", "final_logit_softcapping"] {
            if metadata.f32(&key(name)).ok().flatten().is_some_and(|v| v != 0.0)
                || metadata.u32(&key(name)).ok().flatten().is_some_and(|v| v != 0)
            {
                return Err(unsupported(format!(
                    "{} is set; this version does not run such models",
                    key(name)
                )));
            }
        }
        let base = |name: &str, default: Option<f32>| -> Result<f32, ModelError> {
            let name = key(name);
            let value = match (metadata.f32(&name)?, default) {
                (Some(value), _) => value,
                (None, Some(default)) => default,
                (None, None) => metadata.require_f32(&name)?,
            };
            if value.is_finite() && value >= 1.0 {
                Ok(value)
            } else {
                Err(unsupported(format!("{name} is {value}; expected a finite number of 1 or more")))
            }
        };
        let linear_factor = Self::linear_factor(gguf, architecture)?;
        let vocabulary = gguf
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.shape.get(1))
            .map_or(0, |&rows| rows as usize);
        let sliding = match family {
            Family::Llama => None,
            Family::Gemma3 => {
                let window = size("attention.sliding_window", 1 << 24)?;
                Some((window, Rope { base: base("rope.freq_base_swa", Some(10_000.0))?, linear_factor: 1.0 }))
            }
        };
        let gemma = family == Family::Gemma3;
        // The 27B model alone scales by the width per head rather than by the head size.
        let scaled_by = if gemma && layers == 62 { hidden / heads } else { head_size };
        Ok(Self {
            family,
            layers,
            hidden,
            heads,
            kv_heads,
            head_size,
            feed_forward: size("feed_forward_length", 1 << 22)?,
            vocabulary,
            context: size("context_length", 1 << 28)?,
            epsilon,
            rotated,
            interleaved: family == Family::Llama,
            rope: Rope {
                // Llama 2 files predate the key; their base is the paper's.
                base: base("rope.freq_base", (family == Family::Llama).then_some(10_000.0))?,
                linear_factor,
            },
            sliding,
            full_every: 6,
            attention_scale: 1.0 / (scaled_by as f32).sqrt(),
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            head_norms: gemma,
            branch_norms: gemma,
        })
    }

    fn linear_factor(gguf: &Gguf, architecture: &str) -> Result<f32, ModelError> {
        let metadata = gguf.metadata();
        let kind_key = format!("{architecture}.rope.scaling.type");
        let factor_key = format!("{architecture}.rope.scaling.factor");
        let kind = metadata.str(&kind_key)?.unwrap_or("none");
        let what = match kind {
            "none" => return Ok(1.0),
            "linear" => {
                let factor = metadata.require_f32(&factor_key)?;
                if factor.is_finite() && factor >= 1.0 {
                    return Ok(factor);
                }
                format!("{factor_key} is {factor}; expected a finite number of 1 or more")
            }
            other => {
                format!("{kind_key} is '{other}'; this version knows none, linear and rope_freqs.weight")
            }
        };
        Err(ModelError::Unsupported { path: gguf.path().to_owned(), what })
    }

    /// Window and rotary embedding of a layer.
    pub fn layer(&self, index: usize) -> (Option<usize>, Rope) {
        match self.sliding {
            Some((window, rope)) if !(index + 1).is_multiple_of(self.full_every) => (Some(window), rope),
            _ => (None, self.rope),
        }
    }
}
