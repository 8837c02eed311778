//! What a GGUF's metadata says about a causal model: a family is data plus a few switches over one forward pass, and
//! what differs from layer to layer is said for each.

mod attention;
mod families;
mod feed_forward;
mod latent;
mod reader;
mod rope;

pub use families::{Family, Routed, Scores, SoftCaps, Windows};
pub use feed_forward::{ExpertsConfig, FeedForward};
pub use latent::LatentConfig;
pub use reader::Keys;
pub use rope::{Divisors, FREQS, LONG, Rope, SHORT, Scaling};

use super::error::ModelError;
use super::keys;
use crate::checkpoint::gguf::{Gguf, quoted};
use crate::model::diffusion_gemma::GGUF_ARCHITECTURE;

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
    /// Logits become `softcap * tanh(logit / softcap)`; 0 leaves them.
    pub softcap: f32,
    /// Values of the input that each layer has of its own; 0: none has any.
    pub layer_input: usize,
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
    /// Then they become `softcap * tanh(score / softcap)`; 0 leaves them.
    pub softcap: f32,
    /// There is no value matrix: the raw keys are the values.
    pub keys_are_values: bool,
    /// All heads see one latent, which `key_size` and `value_size` are about.
    pub latent: Option<LatentConfig>,
    /// Index of the rotary embedding in [`CausalConfig::ropes`].
    pub rope: usize,
    /// The earlier layer whose keys and values this one sees; none: its own.
    pub kv_from: Option<usize>,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
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

    /// Values that the output matrix takes: those that attention leaves, or what they make where heads see a latent.
    pub fn output_width(&self) -> usize {
        self.latent.map_or(self.attended_width(), |latent| self.heads * latent.value)
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
                    "general.architecture is {}; this version runs {} and {GGUF_ARCHITECTURE}",
                    quoted(architecture),
                    Family::supported()
                ),
            });
        };
        let keys = Keys::new(gguf, family.architecture);
        let count = keys.size("block_count", 4096)?;
        let hidden = keys.size("embedding_length", 1 << 20)?;
        let heads = attention::heads(&keys, count)?;
        let width = heads[0].heads;
        let latent = if family.latent { Some(latent::read(&keys)?) } else { None };
        let (full_size, sliding_size) = match &latent {
            Some(latent) => (latent.turns, latent.turns),
            None => attention::head_sizes(&keys, family, hidden, width)?,
        };
        let windows = attention::windows(&keys, family, count)?;
        let shared = attention::shared(&keys, family, &windows)?;
        attention::check_shared(&keys, &heads, &shared)?;
        let (softcap, logit_cap) = attention::soft_caps(&keys, family)?;
        let mut full = rope::full(&keys, family, full_size)?;
        let latent_scale = match &latent {
            Some(latent) => {
                full.strength = 1.0; // what YaRN would do to it is done to scores
                Some(latent::scale(&keys, latent, full.scaling)?)
            }
            None => None,
        };
        let sliding = match family.windows {
            Windows::Alternating { rope_base: Some(base), .. } => rope::sliding(&keys, &full, base, None)?,
            Windows::Listed { rope_base } => {
                rope::sliding(&keys, &full, rope_base, Some(("rope.dimension_count_swa", sliding_size)))?
            }
            _ => full,
        };
        let feed_forward = feed_forward::read(&keys, family, count)?;
        let mut ropes = Vec::new();
        let layers = (0..count)
            .map(|index| {
                let window = windows[index];
                let (head_size, rope) =
                    if window.is_some() { (sliding_size, sliding) } else { (full_size, full) };
                let value_matrix = format!("blk.{index}.attn_v.weight");
                let (kv_heads, key_size, value_size) = match &latent {
                    Some(latent) => (1, latent.size + latent.turns, latent.size),
                    None => (heads[index].kv_heads, head_size, head_size),
                };
                let scale = attention::scale(family, count, hidden, width, head_size);
                LayerConfig {
                    heads: heads[index].heads,
                    kv_heads,
                    key_size,
                    value_size,
                    window,
                    scale: latent_scale.unwrap_or(scale),
                    softcap,
                    keys_are_values: family.raw_key_values
                        && window.is_none()
                        && gguf.tensor(&value_matrix).is_none(),
                    latent,
                    rope: index_of(&mut ropes, rope),
                    kv_from: shared[index],
                    feed_forward: feed_forward[index].clone(),
                }
            })
            .collect();
        let layer_input = if family.layer_inputs { layer_input(&keys)? } else { 0 };
        const EMBEDDING: &str = "token_embd.weight";
        if gguf.tensor(EMBEDDING).is_none() {
            gguf.require_tensor(EMBEDDING, &[hidden as u64])?; // an error that names it
        }
        let vocabulary =
            gguf.tensor(EMBEDDING).and_then(|tensor| tensor.shape.get(1)).map_or(0, |&rows| rows as usize);
        let context = keys.size("context_length", 1 << 28)?;
        if context < 2 {
            return Err(keys.unsupported(format!(
                "{} is {context}; expected at least 2: a prompt and an answer take a position each",
                keys.full("context_length")
            )));
        }
        let config = Self {
            family,
            layers,
            ropes,
            hidden,
            vocabulary,
            context,
            epsilon: keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)?,
            embedding_scale: if family.scaled_embeddings { (hidden as f32).sqrt() } else { 1.0 },
            softcap: logit_cap,
            layer_input,
        };
        keys::check(&keys, &config)?;
        Ok(config)
    }

    /// Whether its passes need kernels for whole rows besides products and attention.
    pub fn needs_stream_kernels(&self) -> bool {
        self.softcap > 0.0 || self.layer_input > 0 || self.family.layer_scales
    }
}

/// Values of the input that each layer has of its own.
fn layer_input(keys: &Keys<'_>) -> Result<usize, ModelError> {
    const SIZE: &str = "embedding_length_per_layer_input";
    let size = keys.optional_count(SIZE)?.unwrap_or(0);
    if size.is_multiple_of(16) && size <= 1 << 16 {
        return Ok(size);
    }
    Err(keys.unsupported(format!(
        "{} is {size}; multiples of 16 up to {} are supported",
        keys.full(SIZE),
        1 << 16
    )))
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
