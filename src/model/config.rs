//! What a GGUF's metadata says about a causal model: a family is data plus a few switches over one forward pass.

use super::error::ModelError;
use super::keys;
use crate::checkpoint::gguf::{Gguf, Value};
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
    /// Every n-th layer of a model with sliding layers sees everything; with 0 none does.
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
    /// Missing keys, values out of range, architectures, scalings and keys that are not supported, each by name.
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
        let rope = Rope {
            // Llama 2 files predate the key; their base is the paper's.
            base: base("rope.freq_base", (family == Family::Llama).then_some(10_000.0))?,
            linear_factor: Self::linear_factor(gguf, architecture)?,
        };
        let vocabulary = gguf
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.shape.get(1))
            .map_or(0, |&rows| rows as usize);
        let sliding = match family {
            // Mistral 7B of 2023: every layer has the window.
            Family::Llama => match metadata.u32(&key("attention.sliding_window"))? {
                None | Some(0) => None,
                Some(_) => Some((size("attention.sliding_window", 1 << 24)?, rope)),
            },
            Family::Gemma3 => {
                let window = size("attention.sliding_window", 1 << 24)?;
                Some((window, Rope { base: base("rope.freq_base_swa", Some(10_000.0))?, linear_factor: 1.0 }))
            }
        };
        let gemma = family == Family::Gemma3;
        // The 27B model alone scales by the width per head rather than by the head size.
        let scaled_by = if gemma && layers == 62 { hidden / heads } else { head_size };
        let config = Self {
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
            rope,
            sliding,
            full_every: match family {
                Family::Llama => 0,
                Family::Gemma3 => Self::full_every(gguf, architecture, layers)?,
            },
            attention_scale: 1.0 / (scaled_by as f32).sqrt(),
            embedding_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            head_norms: gemma,
            branch_norms: gemma,
        };
        keys::check(gguf, &config)?;
        Ok(config)
    }

    /// Which layers of a model with sliding layers see everything: every n-th. The file may say n, or for each layer
    /// whether it slides.
    fn full_every(gguf: &Gguf, architecture: &str, layers: usize) -> Result<usize, ModelError> {
        let metadata = gguf.metadata();
        let key = format!("{architecture}.attention.sliding_window_pattern");
        match metadata.get(&key) {
            None => Ok(6),
            Some(Value::Array(_)) => {
                let list: Vec<bool> = metadata.require_array_bool(&key)?.iter().collect();
                let every = list.iter().position(|slides| !slides).map_or(0, |first| first + 1);
                let regular = list
                    .iter()
                    .enumerate()
                    .all(|(index, slides)| *slides != (index + 1).is_multiple_of(every));
                if list.len() == layers && regular {
                    return Ok(every);
                }
                let what = format!(
                    "{key} is {list:?}; expected one value for each of {layers} layers, false for every n-th and no \
                     other"
                );
                Err(ModelError::Unsupported { path: gguf.path().to_owned(), what })
            }
            Some(_) => Ok(metadata.require_u32(&key)? as usize),
        }
    }

    fn linear_factor(gguf: &Gguf, architecture: &str) -> Result<f32, ModelError> {
        let metadata = gguf.metadata();
        let kind_key = format!("{architecture}.rope.scaling.type");
        let factor_key = format!("{architecture}.rope.scaling.factor");
        let factor = metadata.f32(&factor_key)?;
        let what = match (metadata.str(&kind_key)?, factor) {
            (Some("none"), _) | (None, None) => return Ok(1.0),
            // Converters write 0 or 1 where nothing is scaled.
            (None, Some(0.0 | 1.0)) => return Ok(1.0),
            (kind @ (None | Some("linear")), factor) => {
                let factor = factor.map_or_else(|| metadata.require_f32(&factor_key), Ok)?;
                if factor.is_finite() && factor >= 1.0 {
                    if kind.is_none() {
                        tracing::info!("{factor_key} is {factor} and {kind_key} is missing: taken as linear");
                    }
                    return Ok(factor);
                }
                format!("{factor_key} is {factor}; expected a finite number of 1 or more")
            }
            (Some(other), _) => {
                format!("{kind_key} is '{other}'; this version knows none, linear and rope_freqs.weight")
            }
        };
        Err(ModelError::Unsupported { path: gguf.path().to_owned(), what })
    }

    /// Rotary embedding of sliding layers, where it is another than that of the rest.
    pub fn sliding_rope(&self) -> Option<Rope> {
        self.sliding.map(|(_, rope)| rope).filter(|rope| *rope != self.rope)
    }

    /// Window and rotary embedding of a layer.
    pub fn layer(&self, index: usize) -> (Option<usize>, Rope) {
        match self.sliding {
            Some((window, rope)) if !(index + 1).is_multiple_of(self.full_every) => (Some(window), rope),
            _ => (None, self.rope),
        }
    }
}
