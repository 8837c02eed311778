//! The field `logit_bias`: token ids and what is added to their logits.

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, wrong};

/// Most tokens that may be biased.
const MOST: usize = 1024;

/// Largest bias: enough to rule a token out, or all others.
const LARGEST: f64 = 100.0;

/// Token ids by rising number, with their biases.
pub(super) fn read(fields: &mut Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if map.len() > MOST {
        let message = format!("`logit_bias`: found {} tokens, expected at most {MOST}", map.len());
        return Err(ApiError::field("logit_bias", message));
    }
    let mut biases = map.into_iter().map(|(id, bias)| one(&id, &bias)).collect::<Result<Vec<_>, _>>()?;
    biases.sort_unstable_by_key(|&(id, _)| id);
    if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let message = format!("`logit_bias`: found the token id {} twice", pair[0].0);
        return Err(ApiError::field("logit_bias", message));
    }
    Ok(biases)
}

fn one(id: &str, bias: &Value) -> Result<(u32, f32), ApiError> {
    let Ok(token) = id.parse() else {
        return Err(wrong("logit_bias", &id.into(), "token ids as the names of its members"));
    };
    match bias.as_f64().filter(|bias| bias.abs() <= LARGEST) {
        Some(bias) => Ok((token, bias as f32)),
        None => Err(wrong(&format!("logit_bias.{token}"), bias, "a number from -100 to 100")),
    }
}

/// Refuses ids that the vocabulary does not have.
pub(super) fn check(biases: &[(u32, f32)], vocabulary: usize) -> Result<(), ApiError> {
    match biases.last().filter(|(id, _)| *id as usize >= vocabulary) {
        Some((id, _)) => {
            let expected = format!("a token id from 0 to {}", vocabulary.saturating_sub(1));
            Err(wrong(&format!("logit_bias.{id}"), &(*id).into(), &expected))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_of(bias: Value) -> Result<Vec<(u32, f32)>, Value> {
        let Value::Object(map) = json!({ "logit_bias": bias }) else { panic!("no object") };
        read(&mut Fields::new(map)).map_err(|error| error.to_json()["error"]["param"].clone())
    }

    #[test]
    fn ids_and_biases_are_read_and_what_is_wrong_is_named() {
        assert_eq!(read_of(json!(null)), Ok(vec![]));
        assert_eq!(read_of(json!({})), Ok(vec![]));
        assert_eq!(read_of(json!({"7": -100, "3": 0.5})), Ok(vec![(3, 0.5), (7, -100.0)]));
        for (bias, param) in [
            (json!([]), "logit_bias"),
            (json!({"x": 1}), "logit_bias"),
            (json!({"-1": 1}), "logit_bias"),
            (json!({"1": 101}), "logit_bias.1"),
            (json!({"1": false}), "logit_bias.1"),
            (json!({"1": 1, "01": 2}), "logit_bias"),
        ] {
            assert_eq!(read_of(bias.clone()), Err(param.into()), "{bias}");
        }
        let error = check(&[(3, 1.0), (40, 1.0)], 40).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], "logit_bias.40");
        assert!(check(&[(3, 1.0), (39, 1.0)], 40).is_ok() && check(&[], 0).is_ok());
    }
}
