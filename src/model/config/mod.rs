//! What a GGUF's metadata says about a causal model: a family is data plus a few switches over one forward pass, and
//! what differs from layer to layer is said for each.

mod attention;
mod families;
mod reader;
mod rope;

pub use families::{Family, Windows};
pub use reader::Keys;
pub use rope::Rope;

use super::error::ModelError;
use super::keys;
use crate::checkpoint::gguf::Gguf;

/// A causal model's sizes and switches.
#[derive(Debug, Clone, PartialEq)]
pub struct CausalConfig {
    /// The family.
    pub family: &'static Family,
    /// The layers in order.
    pub layers: Vec<LayerConfig>,
    /// The rotary embeddings that layers use, each once.
    pub ropes: Vec<Rope>,
    /// Values of the residual stream.
    pub hidden: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
    /// Embeddings are multiplied by it.
    pub embedding_scale: f32,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values of a query or key head.
    pub key_size: usize,
    /// Values of a value head.
    pub value_size: usize,
    /// Positions that a row sees, its own included; none: all up to itself.
    pub window: Option<usize>,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// Index of the rotary embedding in [`CausalConfig::ropes`].
    pub rope: usize,
    /// The earlier layer whose keys and values this one sees; none: its own.
    pub kv_from: Option<usize>,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
}

/// A layer's feed-forward network.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One gated network.
    Dense {
        /// Its inner values.
        inner: usize,
    },
}

impl FeedForward {
    /// Inner values of the dense network.
    pub fn inner(&self) -> usize {
        match self {
            Self::Dense { inner } => *inner,
        }
    }
}

impl LayerConfig {
    /// Values of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.key_size
    }

    /// Values of all key heads.
    pub fn k_width(&self) -> usize {
        self.kv_heads * self.key_size
    }

    /// Values of all value heads.
    pub fn v_width(&self) -> usize {
        self.kv_heads * self.value_size
    }

    /// Values that attention leaves: those of a value head for each query head.
    pub fn attended_width(&self) -> usize {
        self.heads * self.value_size
    }
}

impl CausalConfig {
    /// Reads and checks the metadata of `gguf`.
    ///
    /// # Errors
    /// Missing keys, values out of range, architectures, scalings and keys that are not supported, each by name.
    pub fn read(gguf: &Gguf) -> Result<Self, ModelError> {
        let architecture = gguf.metadata().require_str("general.architecture")?;
        let Some(family) = Family::of(architecture) else {
            return Err(ModelError::Unsupported {
                path: gguf.path().to_owned(),
                what: format!(
                    "general.architecture is '{architecture}'; this version runs {}",
                    Family::supported()
                ),
            });
        };
        let keys = Keys::new(gguf, family.architecture);
        let count = keys.size("block_count", 4096)?;
        let hidden = keys.size("embedding_length", 1 << 20)?;
        let heads = attention::heads(&keys, count)?;
        let head_size = attention::head_size(&keys, hidden, heads[0].heads)?;
        let windows = attention::windows(&keys, family, count)?;
        let full = rope::full(&keys, family, head_size)?;
        let sliding = match family.windows {
            Windows::Everywhere => full,
            Windows::Alternating { .. } => rope::sliding(&keys, &full)?,
        };
        // The 27B model of Gemma 3 alone scales by the width per head rather than by the head size.
        let scaled_by =
            if family.architecture == "gemma3" && count == 62 { hidden / heads[0].heads } else { head_size };
        let inner = keys.sizes("feed_forward_length", count, 1 << 22)?;
        let mut ropes = Vec::new();
        let layers = heads
            .iter()
            .zip(windows)
            .zip(inner)
            .map(|((counts, window), inner)| LayerConfig {
                heads: counts.heads,
                kv_heads: counts.kv_heads,
                key_size: head_size,
                value_size: head_size,
                window,
                scale: 1.0 / (scaled_by as f32).sqrt(),
                rope: index_of(&mut ropes, if window.is_some() { sliding } else { full }),
                kv_from: None,
                feed_forward: FeedForward::Dense { inner },
            })
            .collect();
        let vocabulary = gguf
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.shape.get(1))
            .map_or(0, |&rows| rows as usize);
        let config = Self {
            family,
            layers,
            ropes,
            hidden,
            vocabulary,
            context: keys.size("context_length", 1 << 28)?,
            epsilon: keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)?,
            embedding_scale: if family.scaled_embeddings { (hidden as f32).sqrt() } else { 1.0 },
        };
        keys::check(&keys, &config)?;
        Ok(config)
    }

    /// Where the layer's keys and values are: its own index, or that of the layer it shares them with.
    pub fn cache_of(&self, layer: usize) -> usize {
        self.layers[layer].kv_from.unwrap_or(layer)
    }
}

/// The place of a rotary embedding among those in use, which it joins if it is new.
fn index_of(ropes: &mut Vec<Rope>, rope: Rope) -> usize {
    match ropes.iter().position(|known| *known == rope) {
        Some(index) => index,
        None => {
            ropes.push(rope);
            ropes.len() - 1
        }
    }
}
