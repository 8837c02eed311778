//! How a checkpoint wants to be sampled: generation_config.json, or the keys of a GGUF file that say the same.

use std::path::Path;

use serde_json::{Map, Value};

use crate::checkpoint::gguf::Gguf;
use crate::model::ModelError;

/// The one sampler there is.
const SAMPLER: &str = "EntropyBoundSamplerConfig";
/// Keys of generation_config.json that say nothing about what is generated here: lengths are the request's, the rest
/// is about the program that wrote the file.
const HARMLESS: &[&str] = &[
    "_commit_hash",
    "_from_model_config",
    "cache_config",
    "cache_implementation",
    "disable_compile",
    "return_dict_in_generate",
    "transformers_version",
];

/// How a checkpoint wants to be sampled. [`GenerationConfig::default`] is what holds where it says nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationConfig {
    /// Most denoising steps of a canvas, at least 1.
    pub max_denoising_steps: usize,
    /// Temperature towards which the schedule falls; at least 0, below `t_max`.
    pub t_min: f64,
    /// Temperature of the first step.
    pub t_max: f64,
    /// Positions are accepted, the surest first, while the entropies before them add up to no more than this (nats);
    /// above 0.
    pub entropy_bound: f64,
    /// A canvas is stable when its most probable tokens are those of as many steps before. `None`: all steps run.
    pub stability_threshold: Option<usize>,
    /// A stable canvas is done when its mean entropy (nats) is below this; above 0. `None`: all steps run.
    pub confidence_threshold: Option<f64>,
    /// Tokens that end a reply.
    pub eos: Vec<u32>,
    /// What fills a canvas behind its end in the reference's output.
    pub pad: Option<u32>,
    /// What a prompt begins with.
    pub bos: Option<u32>,
    /// New tokens that the checkpoint's authors generate; for information, requests say their own.
    pub max_new_tokens: usize,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self {
            max_denoising_steps: 48,
            t_min: 0.4,
            t_max: 0.8,
            entropy_bound: 0.1,
            stability_threshold: Some(1),
            confidence_threshold: Some(0.005),
            eos: Vec::new(),
            pad: None,
            bos: None,
            max_new_tokens: 256,
        }
    }
}

impl GenerationConfig {
    /// More steps of a canvas than anyone waits for; a larger number is damage.
    pub const MOST_STEPS: usize = 65_536;

    /// Reads the parsed generation_config.json that lies at `path`. A key that is null is as one that is absent: the
    /// default holds.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] with file and key: values of another type or out of range, another sampler, keys
    /// that are not known.
    pub fn from_json(path: &Path, value: &Value) -> Result<Self, ModelError> {
        let refuse = |what: String| ModelError::Unsupported { path: path.to_owned(), what };
        let Some(map) = value.as_object() else {
            return Err(refuse(format!("found {}, expected an object", kind(value))));
        };
        read_json(map).and_then(Self::checked).map_err(refuse)
    }

    /// Reads the keys of a GGUF file: `diffusion.eb_*`, with or without the architecture's name before them, and the
    /// tokenizer's special tokens.
    ///
    /// # Errors
    /// Values of another type, out of range, or given twice and not the same, with file and key.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, ModelError> {
        let metadata = gguf.metadata();
        let unlike = |key: String| ModelError::Unsupported {
            path: gguf.path().to_owned(),
            what: format!("diffusion-gemma.{key} and {key} differ; one of them is wrong"),
        };
        let whole = |name: &str| -> Result<Option<u32>, ModelError> {
            let key = format!("diffusion.{name}");
            match (metadata.u32(&format!("diffusion-gemma.{key}"))?, metadata.u32(&key)?) {
                (Some(a), Some(b)) if a != b => Err(unlike(key)),
                (a, b) => Ok(a.or(b)),
            }
        };
        let number = |name: &str| -> Result<Option<f64>, ModelError> {
            let key = format!("diffusion.{name}");
            match (metadata.f32(&format!("diffusion-gemma.{key}"))?, metadata.f32(&key)?) {
                (Some(a), Some(b)) if a != b => Err(unlike(key)),
                (a, b) => Ok(a.or(b).map(decimal)),
            }
        };
        let defaults = Self::default();
        let mut config = Self {
            max_denoising_steps: whole("eb_max_steps")?
                .map_or(defaults.max_denoising_steps, |steps| steps as usize),
            t_min: number("eb_t_min")?.unwrap_or(defaults.t_min),
            t_max: number("eb_t_max")?.unwrap_or(defaults.t_max),
            entropy_bound: number("eb_entropy_bound")?.unwrap_or(defaults.entropy_bound),
            stability_threshold: whole("eb_stability_threshold")?
                .map(|steps| steps as usize)
                .or(defaults.stability_threshold),
            confidence_threshold: number("eb_confidence_threshold")?.or(defaults.confidence_threshold),
            pad: metadata.u32("tokenizer.ggml.padding_token_id")?,
            bos: metadata.u32("tokenizer.ggml.bos_token_id")?,
            ..defaults
        };
        for name in ["eos", "eot", "eom"] {
            if let Some(id) = metadata.u32(&format!("tokenizer.ggml.{name}_token_id"))?
                && !config.eos.contains(&id)
            {
                config.eos.push(id);
            }
        }
        config.checked().map_err(|what| ModelError::Unsupported { path: gguf.path().to_owned(), what })
    }

    /// The same, if its values are in their ranges.
    ///
    /// # Errors
    /// The key that is not, with its value.
    pub fn checked(self) -> Result<Self, String> {
        let range = |key: &str, value: f64, fits: bool, expected: &str| {
            if fits { Ok(()) } else { Err(format!("{key} is {value}, expected {expected}")) }
        };
        let (steps, bound) = (self.max_denoising_steps, self.entropy_bound);
        range(
            "max_denoising_steps",
            steps as f64,
            (1..=Self::MOST_STEPS).contains(&steps),
            &format!("a whole number from 1 to {}", Self::MOST_STEPS),
        )?;
        // What is compared and divided by are f32: what would be 0 or infinite there is refused here.
        let positive = |value: f64| value as f32 > 0.0 && (value as f32).is_finite();
        range("sampler_config.entropy_bound", bound, positive(bound), "a number above 0")?;
        range("t_max", self.t_max, positive(self.t_max), "a number above 0")?;
        if let Some(threshold) = self.confidence_threshold {
            range("confidence_threshold", threshold, positive(threshold), "a number above 0")?;
        }
        if let Some(threshold) = self.stability_threshold {
            let fits = threshold <= Self::MOST_STEPS;
            range(
                "stability_threshold",
                threshold as f64,
                fits,
                &format!("a whole number from 0 to {}", Self::MOST_STEPS),
            )?;
        }
        if !(self.t_min >= 0.0 && self.t_min < self.t_max) {
            return Err(format!(
                "t_min is {} and t_max is {}, expected 0 <= t_min < t_max",
                self.t_min, self.t_max
            ));
        }
        Ok(self)
    }
}

/// The number that was meant when it was written as an f32: the shortest decimal that rounds to it. So a GGUF file
/// and the JSON file that it was made of give the same schedule to the bit.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn read_json(map: &Map<String, Value>) -> Result<GenerationConfig, String> {
    const MOST_STEPS: u64 = GenerationConfig::MOST_STEPS as u64;
    let mut config = GenerationConfig::default();
    for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
        match key.as_str() {
            "max_denoising_steps" => config.max_denoising_steps = whole(key, value, 1, MOST_STEPS)?,
            "t_min" => config.t_min = number(key, value)?,
            "t_max" => config.t_max = number(key, value)?,
            "sampler_config" => config.entropy_bound = sampler(value, config.entropy_bound)?,
            "stability_threshold" => {
                config.stability_threshold = Some(whole(key, value, 0, MOST_STEPS)?);
            }
            "confidence_threshold" => config.confidence_threshold = Some(number(key, value)?),
            "eos_token_id" => config.eos = tokens(key, value)?,
            "pad_token_id" => config.pad = Some(token(key, value)?),
            "bos_token_id" => config.bos = Some(token(key, value)?),
            "max_new_tokens" => config.max_new_tokens = whole(key, value, 1, u64::from(u32::MAX))?,
            "max_length" => drop(whole(key, value, 1, u64::from(u32::MAX))?),
            known if HARMLESS.contains(&known) => {}
            _ => {
                return Err(format!(
                    "{key} is {value}; this version does not know the key, and the model may need it"
                ));
            }
        }
    }
    Ok(config)
}

/// The entropy bound of a `sampler_config`.
fn sampler(value: &Value, default: f64) -> Result<f64, String> {
    let Some(map) = value.as_object() else {
        return Err(format!("sampler_config is {value}, expected an object"));
    };
    let mut bound = default;
    let mut named = false;
    for (key, value) in map {
        match key.as_str() {
            "_cls_name" if value == SAMPLER => named = true,
            "_cls_name" => {
                return Err(format!(
                    "sampler_config._cls_name is {value}; this version has \"{SAMPLER}\" only"
                ));
            }
            "entropy_bound" if value.is_null() => {}
            "entropy_bound" => bound = number("sampler_config.entropy_bound", value)?,
            _ => {
                return Err(format!(
                    "sampler_config.{key} is {value}; this version does not know the key, and the model may need it"
                ));
            }
        }
    }
    if named {
        Ok(bound)
    } else {
        Err(format!("sampler_config._cls_name is missing, expected \"{SAMPLER}\""))
    }
}

fn whole(key: &str, value: &Value, least: u64, most: u64) -> Result<usize, String> {
    value
        .as_u64()
        .filter(|number| (least..=most).contains(number))
        .and_then(|number| usize::try_from(number).ok())
        .ok_or_else(|| format!("{key} is {value}, expected a whole number from {least} to {most}"))
}

fn number(key: &str, value: &Value) -> Result<f64, String> {
    value.as_f64().ok_or_else(|| format!("{key} is {value}, expected a number"))
}

fn token(key: &str, value: &Value) -> Result<u32, String> {
    value
        .as_u64()
        .and_then(|id| u32::try_from(id).ok())
        .ok_or_else(|| format!("{key} is {value}, expected a token id"))
}

/// One id or a list of them.
fn tokens(key: &str, value: &Value) -> Result<Vec<u32>, String> {
    match value {
        Value::Array(list) => list.iter().map(|value| token(key, value)).collect(),
        one => Ok(vec![token(key, one)?]),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
