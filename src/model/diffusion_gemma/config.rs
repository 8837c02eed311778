//! Sizes and switches of a DiffusionGemma, from `config.json` or from a GGUF's metadata.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::super::error::ModelError;
use crate::checkpoint::gguf::{self, Gguf};

/// The architecture's name in GGUF files; also the prefix of its keys.
pub const GGUF_ARCHITECTURE: &str = "diffusion-gemma";
/// `model_type` in `config.json`.
pub const MODEL_TYPE: &str = "diffusion_gemma";

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
    /// Reads and checks `config.json`, which lies at `path`.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] with file, key, what was found and what is supported.
    pub fn from_json(path: &Path, config: &Value) -> Result<Self, ModelError> {
        let top = Keys::new(path, "", config)?;
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
        let count = text.size_or("num_hidden_layers", Some(30), 4096)?;
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
                let share =
                    if proportional { keys.number_or("partial_rotary_factor", 1.0, 0.0, 1.0)? } else { 1.0 };
                Ok((base, if proportional { factor } else { 1.0 }, share))
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
            hidden: text.size_or("hidden_size", Some(2304), 1 << 20)?,
            heads,
            feed_forward: text.size_or("intermediate_size", Some(9216), 1 << 22)?,
            expert_feed_forward: text.size_or("moe_intermediate_size", None, 1 << 22)?,
            experts: text.size_or("num_experts", None, 4096)?,
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
                "general.architecture is '{architecture}'; expected '{GGUF_ARCHITECTURE}', a model that denoises"
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
            Some(gguf::Value::Array(_)) => {
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
            canvas: size("diffusion.canvas_length", 4096)?,
            window: own("attention.sliding_window", 1 << 24)?,
            context: own("context_length", 1 << 28)?,
            epsilon: number("attention.layer_norm_rms_epsilon", None, 1e-12, 0.1)?,
            softcap: number("final_logit_softcapping", None, 1e-3, 1e6)?,
            layers,
        };
        config.check(unsupported)?;
        Ok(config)
    }

    /// What must hold whatever the file was.
    fn check(&self, fault: impl Fn(String) -> ModelError) -> Result<(), ModelError> {
        if self.experts_used > self.experts {
            return Err(fault(format!("{} experts a token of only {}", self.experts_used, self.experts)));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let LayerConfig { head_size, kv_heads, rope, .. } = layer;
            if !head_size.is_multiple_of(16) {
                return Err(fault(format!(
                    "layer {index} has heads of {head_size}; multiples of 16 are supported"
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

/// How many pairs of a full layer's heads turn: `rope_freqs.weight` divides the frequencies, by 1 for those that do and by
/// something huge for the rest.
fn rotated_pairs(gguf: &Gguf, head_size: usize) -> Result<usize, ModelError> {
    const NAME: &str = "rope_freqs.weight";
    /// Angles of no context turn anything at frequencies divided by this.
    const STILL: f32 = 1e20;
    let divisors = match gguf.tensor(NAME) {
        None => return Ok(head_size / 2),
        Some(_) => {
            let tensor = gguf.require_tensor(NAME, &[head_size as u64 / 2])?;
            let mut values = vec![0f32; head_size / 2];
            crate::checkpoint::quant::dequantize(tensor.ty, gguf.bytes(tensor), &mut values)?;
            values
        }
    };
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
        let unknown =
            if let Some(own) = name.strip_prefix(GGUF_ARCHITECTURE).and_then(|name| name.strip_prefix('.')) {
                !KNOWN.contains(&own)
            } else if let Some(own) = name.strip_prefix("diffusion.") {
                !DIFFUSION.contains(&own)
            } else {
                false
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

/// A JSON object of a file, read key by key with errors that name file and key.
struct Keys<'a> {
    path: PathBuf,
    /// The object's own place, with a dot at its end.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn new(path: &Path, prefix: &str, value: &'a Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Ok(Self { path: path.to_owned(), prefix: prefix.to_owned(), map }),
            other => Err(ModelError::Unsupported {
                path: path.to_owned(),
                what: format!("{} is {}; expected an object", prefix.trim_end_matches('.'), short(other)),
            }),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn is_absent(&self, key: &str) -> bool {
        self.get(key).is_none()
    }

    fn fault(&self, key: &str, expected: &str) -> ModelError {
        let found = match self.map.get(key) {
            Some(value) => format!("is {}", short(value)),
            None => "is missing".to_owned(),
        };
        ModelError::Unsupported {
            path: self.path.clone(),
            what: format!("{}{key} {found}; expected {expected}", self.prefix),
        }
    }

    fn optional_object(&self, key: &str) -> Result<Option<Keys<'a>>, ModelError> {
        self.get(key).map(|value| Self::new(&self.path, &format!("{}{key}.", self.prefix), value)).transpose()
    }

    fn object(&self, key: &str) -> Result<Keys<'a>, ModelError> {
        self.optional_object(key)?.ok_or_else(|| self.fault(key, "an object"))
    }

    /// A text that must be one of these, if it is there.
    fn known(&self, key: &str, texts: &[&str]) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value.as_str().is_some_and(|text| texts.contains(&text)) => Ok(()),
            Some(_) => Err(self.fault(key, &texts.join(" or "))),
        }
    }

    fn none_or(&self, key: &str, text: &str) -> Result<(), ModelError> {
        self.known(key, &[text])
    }

    fn flag(&self, key: &str, expected: bool) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value.as_bool() == Some(expected) => Ok(()),
            Some(_) => Err(self.fault(key, if expected { "true" } else { "false" })),
        }
    }

    fn optional_size(&self, key: &str, most: usize) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => {
                match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= most) {
                    Some(size) => Ok(Some(size)),
                    None => Err(self.fault(key, &format!("a whole number up to {most}"))),
                }
            }
        }
    }

    fn size_or(&self, key: &str, default: Option<usize>, most: usize) -> Result<usize, ModelError> {
        match self.optional_size(key, most)?.or(default) {
            Some(size) if size > 0 => Ok(size),
            _ => Err(self.fault(key, &format!("a whole number from 1 to {most}"))),
        }
    }

    fn number_or(&self, key: &str, default: f32, least: f32, most: f32) -> Result<f32, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number >= least && number <= most => Ok(number),
            _ => Err(self.fault(key, &format!("a number from {least} to {most}"))),
        }
    }

    /// Whether each layer slides; every sixth sees everything where nothing is said, and the last one always.
    fn layer_types(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "layer_types";
        let expected = || format!("sliding_attention or full_attention for each of {count} layers");
        let mut slides: Vec<bool> = match self.get(KEY) {
            None => (0..count).map(|index| !(index + 1).is_multiple_of(6)).collect(),
            Some(Value::Array(list)) => list
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("sliding_attention") => Some(true),
                    Some("full_attention") => Some(false),
                    _ => None,
                })
                .collect::<Option<Vec<bool>>>()
                .filter(|list| list.len() == count)
                .ok_or_else(|| self.fault(KEY, &expected()))?,
            Some(_) => return Err(self.fault(KEY, &expected())),
        };
        if let Some(last) = slides.last_mut() {
            *last = false;
        }
        Ok(slides)
    }
}

/// A value as errors show it.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}
