//! The keys of a model's architecture: each is understood, says what is true anyway, or keeps the model from loading.
//! A key passed over in silence would make a model that answers, and answers wrongly.

use super::config::{CausalConfig, Keys};
use super::error::ModelError;
use crate::checkpoint::gguf::Value;

/// Keys that tell of training or of the conversion: the forward pass is the same whatever they say.
const HARMLESS: &[&str] =
    &["rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"];
/// Keys of what this version does not do, with the values that ask for nothing.
const NEUTRAL: &[(&str, Neutral)] = &[
    ("attention.causal", Neutral::True),
    ("attention.clamp_kqv", Neutral::Number(0.0)),
    ("attention.max_alibi_bias", Neutral::Number(0.0)),
    ("attention.scale", Neutral::Number(0.0)),
    ("attn_logit_softcapping", Neutral::Number(0.0)),
    ("embedding_scale", Neutral::Number(1.0)),
    ("expert_count", Neutral::Number(0.0)),
    ("expert_used_count", Neutral::Number(0.0)),
    ("final_logit_softcapping", Neutral::Number(0.0)),
    ("logit_scale", Neutral::Number(1.0)),
    ("residual_scale", Neutral::Number(1.0)),
    ("rope.scale_linear", Neutral::Number(1.0)),
    ("rope.scaling.attn_factor", Neutral::Number(1.0)),
];

/// A value that changes nothing.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    True,
    Number(f64),
}

impl Neutral {
    fn is(self, value: &Value<'_>) -> bool {
        match (self, value) {
            (Neutral::True, Value::Bool(truth)) => *truth,
            (Neutral::Number(neutral), Value::F32(number)) => f64::from(*number) == neutral,
            (Neutral::Number(neutral), Value::F64(number)) => *number == neutral,
            (Neutral::Number(neutral), other) => {
                other.integer().is_some_and(|number| number as f64 == neutral)
            }
            _ => false,
        }
    }
}

/// Checks that no key of the architecture that has not been read asks for what this version does not do.
///
/// # Errors
/// The first such key, with its value.
pub fn check(keys: &Keys<'_>, config: &CausalConfig) -> Result<(), ModelError> {
    let metadata = keys.gguf().metadata();
    let prefix = format!("{}.", keys.architecture());
    let refuse = |what: String| Err(keys.unsupported(what));
    for key in metadata.keys() {
        let (Some(name), Some(value)) = (key.strip_prefix(&prefix), metadata.get(key)) else { continue };
        if keys.asked_for(name) || HARMLESS.contains(&name) {
            continue;
        }
        if name == "vocab_size" {
            let rows = config.vocabulary;
            if metadata.u32(key)?.is_some_and(|size| size as usize != rows) {
                return refuse(format!(
                    "{key} is {value}, token_embd.weight has {rows} rows; one of them is wrong"
                ));
            }
            continue;
        }
        match NEUTRAL.iter().find(|(known, _)| *known == name) {
            Some((_, neutral)) if neutral.is(&value) => {}
            Some((_, Neutral::True)) => {
                return refuse(format!(
                    "{key} is {value}; this version runs models where it is true or absent"
                ));
            }
            Some((_, Neutral::Number(neutral))) => {
                return refuse(format!(
                    "{key} is {value}; this version runs models where it is {neutral} or absent"
                ));
            }
            None => {
                return refuse(format!(
                    "{key} is {value}; this version does not know the key, and the model may need it"
                ));
            }
        }
    }
    Ok(())
}
