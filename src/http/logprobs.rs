//! Log-probabilities: how each API asks for them, and how it shows them.
//!
//! They are those of the model's own distribution, at temperature 1, before biases, penalties, constraints and filters.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::reply::Dialect;
use crate::engine::{ContentToken, Model};
use crate::text::TokenKind;

/// Most alternatives a token in chats.
const MOST_CHAT: i64 = 20;

/// Most alternatives a token in completions of texts.
const MOST_TEXT: i64 = 5;

/// How many alternatives a token are wanted; none if log-probabilities are not.
pub(super) fn read(fields: &mut Fields, dialect: Dialect) -> Result<Option<usize>, ApiError> {
    if dialect == Dialect::Text {
        fields.refuse("top_logprobs", "`logprobs` is the number of alternatives here", |v| {
            v.as_f64() == Some(0.0)
        })?;
        return match fields.take("logprobs") {
            None | Some(Value::Bool(false)) => Ok(None),
            Some(value) => {
                fields.put("logprobs", value);
                let most = fields.integer("logprobs", 0, MOST_TEXT)?;
                Ok(most.and_then(|most| usize::try_from(most).ok()))
            }
        };
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let most = fields.integer("top_logprobs", 0, MOST_CHAT)?.and_then(|most| usize::try_from(most).ok());
    match most {
        Some(1..) if !wanted => {
            Err(ApiError::field("top_logprobs", "`top_logprobs` is only allowed with `logprobs`: true"))
        }
        most => Ok(wanted.then_some(most.unwrap_or(0))),
    }
}

/// Shows the log-probabilities of one choice, chunk by chunk or all together.
pub(super) struct Logged {
    dialect: Dialect,
    model: Arc<Model>,
}

/// How far a choice's text has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reached {
    bytes: usize,
    characters: usize,
}

impl Reached {
    /// Text has been added.
    pub(super) fn add(&mut self, text: &str) {
        self.bytes += text.len();
        self.characters += text.chars().count();
    }
}

impl Logged {
    pub(super) fn new(dialect: Dialect, model: Arc<Model>) -> Self {
        Self { dialect, model }
    }

    /// Tokens of a text that goes on from `reached`.
    pub(super) fn show(&self, tokens: &[ContentToken], text: &str, reached: Reached) -> Value {
        match self.dialect {
            Dialect::Chat => {
                let content: Vec<Value> = tokens.iter().map(|token| self.entry(token)).collect();
                json!({ "content": content, "refusal": null })
            }
            Dialect::Text => self.columns(tokens, text, reached),
        }
    }

    fn entry(&self, token: &ContentToken) -> Value {
        let told = &token.logprobs;
        let mut entry = self.token(told.token, told.logprob);
        entry["top_logprobs"] = told.top.iter().map(|&(token, logprob)| self.token(token, logprob)).collect();
        entry
    }

    fn token(&self, id: u32, logprob: f64) -> Value {
        let bytes = match self.model.tokenizer.kind(id) {
            // It prints nothing; its name is not what it stands for.
            Some(TokenKind::Control) => Value::Null,
            _ => self.model.tokenizer.piece(id).into(),
        };
        json!({ "token": self.name(id), "logprob": logprob, "bytes": bytes })
    }

    fn columns(&self, tokens: &[ContentToken], text: &str, reached: Reached) -> Value {
        let mut top = Vec::with_capacity(tokens.len());
        for ContentToken { logprobs, .. } in tokens {
            // Of tokens with the same text the more probable one stays; the chosen one is always there.
            let mut alternatives = Map::new();
            for &(id, logprob) in &logprobs.top {
                alternatives.entry(self.name(id)).or_insert_with(|| logprob.into());
            }
            alternatives.insert(self.name(logprobs.token), logprobs.logprob.into());
            top.push(alternatives);
        }
        let offset = |token: &ContentToken| {
            let within = token.start.saturating_sub(reached.bytes);
            let before =
                text.char_indices().take_while(|(place, letter)| place + letter.len_utf8() <= within);
            reached.characters + before.count()
        };
        json!({
            "tokens": tokens.iter().map(|token| self.name(token.logprobs.token)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.logprobs.logprob).collect::<Vec<_>>(),
            "top_logprobs": top,
            "text_offset": tokens.iter().map(offset).collect::<Vec<_>>(),
        })
    }

    /// A token's text; where it is only part of a character, its bytes.
    fn name(&self, id: u32) -> String {
        let text = self.model.tokenizer.text(id);
        match std::str::from_utf8(text) {
            Ok(text) => text.to_owned(),
            Err(_) => text.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(body: Value, dialect: Dialect) -> Result<Option<usize>, Value> {
        let Value::Object(map) = body else { panic!("no object") };
        read(&mut Fields::new(map), dialect).map_err(|error| error.to_json()["error"]["param"].clone())
    }

    #[test]
    fn each_api_asks_in_its_way() {
        for (body, expected) in [
            (json!({}), Ok(None)),
            (json!({"logprobs": false, "top_logprobs": 0}), Ok(None)),
            (json!({"logprobs": true}), Ok(Some(0))),
            (json!({"logprobs": true, "top_logprobs": 20}), Ok(Some(20))),
            (json!({"logprobs": true, "top_logprobs": 21}), Err("top_logprobs".into())),
            (json!({"top_logprobs": 2}), Err("top_logprobs".into())),
            (json!({"logprobs": 2}), Err("logprobs".into())),
        ] {
            assert_eq!(read_of(body.clone(), Dialect::Chat), expected, "{body}");
        }
        for (body, expected) in [
            (json!({}), Ok(None)),
            (json!({"logprobs": null}), Ok(None)),
            (json!({"logprobs": false}), Ok(None)),
            (json!({"logprobs": 0}), Ok(Some(0))),
            (json!({"logprobs": 5}), Ok(Some(5))),
            (json!({"logprobs": 6}), Err("logprobs".into())),
            (json!({"logprobs": true}), Err("logprobs".into())),
            (json!({"top_logprobs": 2}), Err("top_logprobs".into())),
        ] {
            assert_eq!(read_of(body.clone(), Dialect::Text), expected, "{body}");
        }
    }
}
