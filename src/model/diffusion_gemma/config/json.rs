//! What `config.json` says, in either of the two spellings of the full layers' shape.

use std::path::Path;

use serde_json::Value;

use super::object::Object;
use super::{DiffusionConfig, HeadRope, LayerConfig};
use crate::checkpoint::diffusion_gemma::{EXPERT_WIDTH, EXPERTS, HIDDEN, LAYERS, MODEL_TYPE, Size};
use crate::model::error::ModelError;

impl DiffusionConfig {
    /// Reads and checks `config.json`, which lies at `path`.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] with file, key, what was found and what is supported.
    pub fn from_json(path: &Path, config: &Value) -> Result<Self, ModelError> {
        let top = Object::new(path, "", config)?;
        top.known("model_type", &[MODEL_TYPE])?;
        top.flag("tie_word_embeddings", true)?;
        let text = top.object("text_config")?;
        text.known("hidden_activation", &["gelu_pytorch_tanh"])?;
        text.flag("attention_bias", false)?;
        text.none_or("use_bidirectional_attention", "vision")?;
        text.flag("tie_word_embeddings", true)?;
        for absent in ["hidden_size_per_layer_input", "num_kv_shared_layers"] {
            if text.optional_size(absent, usize::MAX)?.unwrap_or(0) != 0 {
                return Err(text.fault(absent, "0 or null"));
            }
        }
        let size = |size: Size| text.size_or(size.key, size.default, size.most);
        let count = size(LAYERS)?;
        let heads = text.size_or("num_attention_heads", Some(8), 4096)?;
        let kv_heads = text.size_or("num_key_value_heads", Some(4), 4096)?;
        let head_size = text.size_or("head_dim", Some(256), 4096)?;
        let full_head_size = text.size_or("global_head_dim", Some(512), 4096)?;
        let full_kv_heads = text.optional_size("num_global_key_value_heads", 4096)?.unwrap_or(kv_heads);
        let overrides = text.optional_object("per_layer_config")?;
        let ropes = text.optional_object("rope_parameters")?;
        let rope =
            |kind: &str, default_base: f32, proportional: bool| -> Result<(f32, f32, f32), ModelError> {
                let keys = match &ropes {
                    Some(ropes) => ropes.optional_object(kind)?,
                    None => None,
                };
                let Some(keys) = keys else {
                    return Ok((default_base, 1.0, if proportional { 0.25 } else { 1.0 }));
                };
                keys.known("rope_type", &[if proportional { "proportional" } else { "default" }])?;
                let base = keys.number_or("rope_theta", default_base, 1.0, f32::MAX)?;
                let factor = keys.number_or("factor", 1.0, 1e-3, 1e6)?;
                let share = keys.number_or("partial_rotary_factor", 1.0, 0.0, 1.0)?;
                for (key, value) in [("factor", factor), ("partial_rotary_factor", share)] {
                    if !proportional && value != 1.0 {
                        return Err(keys.fault(key, "1, or nothing, where the type is default"));
                    }
                }
                Ok((base, factor, share))
            };
        let sliding_rope = rope("sliding_attention", 1e4, false)?;
        let full_rope = rope("full_attention", 1e6, true)?;
        let slides = text.layer_types(count)?;
        let layers = slides
            .iter()
            .enumerate()
            .map(|(index, &sliding)| {
                let own = match &overrides {
                    Some(overrides) => overrides.optional_object(&index.to_string())?,
                    None => None,
                };
                let (mut size, mut kv) =
                    if sliding { (head_size, kv_heads) } else { (full_head_size, full_kv_heads) };
                // Files saved anew say only how a layer deviates from the plain sizes.
                if overrides.is_some() && text.is_absent("global_head_dim") && !sliding {
                    (size, kv) = (head_size, kv_heads);
                }
                if let Some(own) = own {
                    size = own.size_or("head_dim", Some(size), 4096)?;
                    kv = own.size_or("num_key_value_heads", Some(kv), 4096)?;
                }
                let (base, factor, share) = if sliding { sliding_rope } else { full_rope };
                let pairs = (share * size as f32 / 2.0).floor() as usize;
                Ok(LayerConfig {
                    sliding,
                    head_size: size,
                    kv_heads: kv,
                    rope: HeadRope { base, factor, pairs },
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let config = Self {
            vocabulary: text.size_or("vocab_size", Some(262_144), 1 << 24)?,
            hidden: size(HIDDEN)?,
            heads,
            feed_forward: text.size_or("intermediate_size", Some(9216), 1 << 22)?,
            expert_feed_forward: size(EXPERT_WIDTH)?,
            experts: size(EXPERTS)?,
            experts_used: text.size_or("top_k_experts", None, 64)?,
            canvas: top.size_or("canvas_length", Some(256), 4096)?,
            window: text.size_or("sliding_window", Some(512), 1 << 24)?,
            context: text.size_or("max_position_embeddings", Some(131_072), 1 << 28)?,
            epsilon: text.number_or("rms_norm_eps", 1e-6, 1e-12, 0.1)?,
            softcap: text.number_or("final_logit_softcapping", 30.0, 1e-3, 1e6)?,
            layers,
        };
        config.check(|what| ModelError::Unsupported { path: path.to_owned(), what })?;
        Ok(config)
    }
}
