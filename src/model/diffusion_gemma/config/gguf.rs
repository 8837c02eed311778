//! What the metadata of a GGUF file says.

use super::{DiffusionConfig, HeadRope, LayerConfig};
use crate::checkpoint::gguf::{Gguf, Value, quoted};
use crate::checkpoint::quant::dequantize;
use crate::model::error::ModelError;

/// Rows of a canvas; written with and without the architecture before it.
const CANVAS: &str = "diffusion.canvas_length";

/// The architecture's name in GGUF files; also the prefix of its keys.
pub const GGUF_ARCHITECTURE: &str = "diffusion-gemma";

impl DiffusionConfig {
    /// Reads and checks the metadata of a GGUF of this architecture.
    ///
    /// # Errors
    /// Missing keys, values out of range and keys that are not understood, each by name.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let metadata = gguf.metadata();
        let unsupported = |what: String| ModelError::Unsupported { path: gguf.path().to_owned(), what };
        let architecture = metadata.require_str("general.architecture")?;
        if architecture != GGUF_ARCHITECTURE {
            return Err(unsupported(format!(
                "general.architecture is {}; expected `{GGUF_ARCHITECTURE}`, a model that denoises",
                quoted(architecture)
            )));
        }
        refuse_unknown_keys(gguf)?;
        let key = |name: &str| format!("{GGUF_ARCHITECTURE}.{name}");
        let size = |name: &str, most: u32| -> Result<usize, ModelError> {
            let value = metadata.require_u32(name)?;
            if value == 0 || value > most {
                return Err(unsupported(format!("{name} is {value}; expected 1 to {most}")));
            }
            Ok(value as usize)
        };
        let own = |name: &str, most: u32| size(&key(name), most);
        let count = own("block_count", 4096)?;
        let pattern = key("attention.sliding_window_pattern");
        let slides: Vec<bool> = metadata.require_array_bool(&pattern)?.iter().collect();
        if slides.len() != count {
            return Err(unsupported(format!("{pattern} has {} values for {count} layers", slides.len())));
        }
        let kv_key = key("attention.head_count_kv");
        let kv_heads: Vec<usize> = match metadata.get(&kv_key) {
            Some(Value::Array(_)) => {
                let list: Vec<i64> =
                    metadata.array_i64(&kv_key)?.map(|list| list.iter().collect()).unwrap_or_default();
                if list.len() != count || list.iter().any(|&heads| !(1..=4096).contains(&heads)) {
                    return Err(unsupported(format!(
                        "{kv_key} is {list:?}; expected 1 to 4096 for each of {count} layers"
                    )));
                }
                list.iter().map(|&heads| heads as usize).collect()
            }
            _ => vec![size(&kv_key, 4096)?; count],
        };
        for (name, expected) in [("attention.shared_kv_layers", 0), ("embedding_length_per_layer_input", 0)] {
            let name = key(name);
            if let Some(value) = metadata.u32(&name)?
                && value != expected
            {
                return Err(unsupported(format!("{name} is {value}; only {expected} is supported")));
            }
        }
        if metadata.bool(&key("attention.causal"))? == Some(true) {
            return Err(unsupported(format!(
                "{} is true; a canvas is denoised without a causal mask",
                key("attention.causal")
            )));
        }
        let number = |name: &str, default: Option<f32>, least: f32, most: f32| -> Result<f32, ModelError> {
            let name = key(name);
            let value = match (metadata.f32(&name)?, default) {
                (Some(value), _) => value,
                (None, Some(default)) => default,
                (None, None) => metadata.require_f32(&name)?,
            };
            if value >= least && value <= most {
                Ok(value)
            } else {
                Err(unsupported(format!("{name} is {value}; expected {least} to {most}")))
            }
        };
        let (full_size, sliding_size) =
            (own("attention.key_length", 4096)?, own("attention.key_length_swa", 4096)?);
        for (values, keys) in
            [("attention.value_length", full_size), ("attention.value_length_swa", sliding_size)]
        {
            let name = key(values);
            if let Some(value) = metadata.u32(&name)?
                && value as usize != keys
            {
                return Err(unsupported(format!(
                    "{name} is {value}, keys have {keys} values; equal sizes are supported"
                )));
            }
        }
        for (name, head) in [("rope.dimension_count", full_size), ("rope.dimension_count_swa", sliding_size)]
        {
            let name = key(name);
            if let Some(value) = metadata.u32(&name)?
                && value as usize != head
            {
                return Err(unsupported(format!("{name} is {value}; expected the head size {head}")));
            }
        }
        let full_pairs = rotated_pairs(gguf, full_size)?;
        let bases = (
            number("rope.freq_base", Some(1e6), 1.0, f32::MAX)?,
            number("rope.freq_base_swa", Some(1e4), 1.0, f32::MAX)?,
        );
        let layers = slides
            .iter()
            .zip(kv_heads)
            .map(|(&sliding, kv_heads)| {
                let (base, head_size, pairs) = if sliding {
                    (bases.1, sliding_size, sliding_size / 2)
                } else {
                    (bases.0, full_size, full_pairs)
                };
                LayerConfig { sliding, head_size, kv_heads, rope: HeadRope { base, factor: 1.0, pairs } }
            })
            .collect();
        let vocabulary = gguf
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.shape.get(1))
            .map_or(0, |&rows| rows as usize);
        let config = Self {
            vocabulary,
            hidden: own("embedding_length", 1 << 20)?,
            heads: own("attention.head_count", 4096)?,
            feed_forward: own("feed_forward_length", 1 << 22)?,
            expert_feed_forward: own("expert_feed_forward_length", 1 << 22)?,
            experts: own("expert_count", 4096)?,
            experts_used: own("expert_used_count", 64)?,
            canvas: match metadata.u32(&key(CANVAS))? {
                Some(_) => size(&key(CANVAS), 4096)?,
                None => size(CANVAS, 4096)?,
            },
            window: own("attention.sliding_window", 1 << 24)?,
            context: own("context_length", 1 << 28)?,
            epsilon: number("attention.layer_norm_rms_epsilon", None, 1e-12, 0.1)?,
            softcap: number("final_logit_softcapping", None, 1e-3, 1e6)?,
            layers,
        };
        config.check(unsupported)?;
        Ok(config)
    }
}

/// How many pairs of a full layer's heads turn: `rope_freqs.weight` divides the frequencies, by 1 for those that do and by
/// something huge for the rest.
fn rotated_pairs(gguf: &Gguf, head_size: usize) -> Result<usize, ModelError> {
    const NAME: &str = "rope_freqs.weight";
    /// Angles of no context turn anything at frequencies divided by this.
    const STILL: f32 = 1e20;
    let tensor = gguf.require_tensor(NAME, &[head_size as u64 / 2])?;
    let mut divisors = vec![0f32; head_size / 2];
    dequantize(tensor.ty, gguf.bytes(tensor), &mut divisors)?;
    let pairs = divisors.iter().take_while(|&&divisor| divisor == 1.0).count();
    match divisors.iter().skip(pairs).position(|&divisor| divisor < STILL || divisor.is_nan()) {
        None => Ok(pairs),
        Some(at) => Err(ModelError::Unsupported {
            path: gguf.path().to_owned(),
            what: format!(
                "{NAME} divides frequency {} by {}; expected 1 for the first pairs and more than {STILL} for the rest",
                pairs + at,
                divisors[pairs + at]
            ),
        }),
    }
}

/// A key passed over in silence would make a model that answers, and answers wrongly.
fn refuse_unknown_keys(gguf: &Gguf) -> Result<(), ModelError> {
    const KNOWN: &[&str] = &[
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "expert_feed_forward_length",
        "expert_count",
        "expert_used_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_swa",
        "attention.value_length_swa",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.shared_kv_layers",
        "attention.causal",
        "embedding_length_per_layer_input",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.dimension_count_swa",
        "final_logit_softcapping",
        "vocab_size",
    ];
    const DIFFUSION: &[&str] = &[
        "canvas_length",
        "eb_max_steps",
        "eb_t_min",
        "eb_t_max",
        "eb_entropy_bound",
        "eb_stability_threshold",
        "eb_confidence_threshold",
    ];
    for name in gguf.metadata().keys() {
        let own = name.strip_prefix(GGUF_ARCHITECTURE).and_then(|name| name.strip_prefix('.'));
        // Keys of denoising are written with and without the architecture before them.
        let unknown = match own.unwrap_or(name).strip_prefix("diffusion.") {
            Some(denoising) => !DIFFUSION.contains(&denoising),
            None => own.is_some_and(|own| !KNOWN.contains(&own)),
        };
        if unknown {
            return Err(ModelError::Unsupported {
                path: gguf.path().to_owned(),
                what: format!(
                    "this version does not know the key {name}, which may change what the model says"
                ),
            });
        }
    }
    Ok(())
}
