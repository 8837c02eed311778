//! Sizes and switches of a DiffusionGemma, from `config.json` or from a GGUF's metadata.

mod gguf;
mod json;
mod object;

pub use gguf::GGUF_ARCHITECTURE;

use crate::model::error::ModelError;
use crate::ops::MOST_HEAD_SIZE;

/// A model's sizes and switches.
#[derive(Debug, Clone, PartialEq)]
pub struct DiffusionConfig {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Values of the residual stream.
    pub hidden: usize,
    /// Query heads of every layer.
    pub heads: usize,
    /// Inner values of the dense network and of self-conditioning.
    pub feed_forward: usize,
    /// Inner values of an expert.
    pub expert_feed_forward: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token goes to.
    pub experts_used: usize,
    /// Positions that are denoised together.
    pub canvas: usize,
    /// Positions that a sliding layer sees, the query's own included.
    pub window: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Added to the mean of squares in norms.
    pub epsilon: f32,
    /// Logits are `softcap * tanh(logit / softcap)`.
    pub softcap: f32,
    /// The layers in order.
    pub layers: Vec<LayerConfig>,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    /// It sees a window only; otherwise everything, and its values are its raw keys.
    pub sliding: bool,
    /// Values a head.
    pub head_size: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Rotary embedding.
    pub rope: HeadRope,
}

impl LayerConfig {
    /// What its table of angles depends on.
    pub(super) fn table(&self) -> (HeadRope, usize) {
        (self.rope, self.head_size)
    }
}

/// Rotary embedding of whole heads: pair i is (i, i + head size / 2), its frequency base^(-2i / head size) / factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadRope {
    /// Base of the geometric series of frequencies.
    pub base: f32,
    /// Divides all frequencies.
    pub factor: f32,
    /// Pairs that turn, from the first on; the rest stays as it is.
    pub pairs: usize,
}

impl DiffusionConfig {
    /// What must hold whatever the file was.
    fn check(&self, fault: impl Fn(String) -> ModelError) -> Result<(), ModelError> {
        if self.experts_used > self.experts {
            return Err(fault(format!("{} experts a token of only {}", self.experts_used, self.experts)));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let LayerConfig { head_size, kv_heads, rope, .. } = layer;
            if head_size % 16 != 0 || *head_size > MOST_HEAD_SIZE {
                return Err(fault(format!(
                    "layer {index} has heads of {head_size}; multiples of 16 up to {MOST_HEAD_SIZE} are supported"
                )));
            }
            if !self.heads.is_multiple_of(*kv_heads) {
                let heads = self.heads;
                return Err(fault(format!(
                    "layer {index}: {heads} query heads cannot share {kv_heads} key-value heads evenly"
                )));
            }
            if rope.pairs > head_size / 2 {
                return Err(fault(format!(
                    "layer {index} turns {} pairs in heads of {head_size}",
                    rope.pairs
                )));
            }
        }
        Ok(())
    }
}
