//! `POST /tokenize` and `POST /detokenize`: what the model's tokenizer makes of a text, and back.
//!
//! Both speak llama.cpp's and vLLM's words. A text is `content` (`add_special` off unless asked for) or `prompt`
//! (`add_special_tokens` on unless told otherwise); `messages` are tokenized as `/v1/chat/completions` would read them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};

use super::Face;
use super::chat::{Prepared, prepare};
use super::completions::{for_our_model, log_rest, model, off_thread};
use super::door::Inside;
use super::error::ApiError;
use super::fields::{Fields, integer, wrong};
use crate::text::{Specials, TokenKind, Tokenizer};

/// What a text to be tokenized is called, and whether special tokens are put around it when the request does not say.
const TEXTS: [(&str, bool); 2] = [("content", false), ("prompt", true)];

const MESSAGES: &str = "messages";

pub(super) async fn tokenize(State(face): State<Face>, request: Request) -> Result<Json<Value>, ApiError> {
    let Inside { app, turn, mut fields, pass: _pass } = for_our_model(request, &face).await?;
    let pieces = fields.boolean("with_pieces")?.unwrap_or(false);
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let add_special = add_special(&mut fields)?;
    let parse_special = fields.boolean("parse_special")?.unwrap_or(true);
    let messages = fields.take(MESSAGES);
    let mut texts = TEXTS.iter().filter_map(|&(name, special)| Some((name, special, fields.take(name)?)));
    let text = match (texts.next(), texts.next(), messages) {
        (Some((name, _, _)), Some(_), _) | (Some((name, _, _)), _, Some(_)) => {
            let message =
                "`content`, `prompt` and `messages` are three ways to say what is meant; send one of them";
            return Err(ApiError::field(name, message));
        }
        (None, _, None) => {
            let message = "`content` is missing; expected a text (`prompt` will do), or `messages`";
            return Err(ApiError::field("content", message));
        }
        (None, _, Some(messages)) => {
            fields.put(MESSAGES, messages);
            None
        }
        (Some((_, special, Value::String(text))), ..) => Some((text, special)),
        (Some((name, _, other)), ..) => return Err(wrong(name, &other, "a string")),
    };
    let (model, tokens) = match text {
        None => {
            fields.refuse("add_generation_prompt", "the prompt always ends where the reply begins", |v| {
                *v == Value::Bool(true)
            })?;
            // Who only counts is not counted among the requests.
            model(&app)?;
            let Prepared { model, prompt, .. } = prepare(&app, turn, fields).await?;
            (model, prompt)
        }
        Some((text, special)) => {
            log_rest(&fields);
            drop(fields);
            let model = model(&app)?;
            let parse = if parse_special { Specials::Parse } else { Specials::Text };
            let add = add_special.unwrap_or(special);
            let of = Arc::clone(&model);
            let tokens = off_thread(move || {
                let _turn = turn;
                let text = text;
                let ids = of.tokenizer.encode(&text, parse);
                Ok(if add { of.tokenizer.with_bos(ids) } else { ids })
            });
            (model, tokens.await?)
        }
    };
    let tokenizer = &model.tokenizer;
    let count = tokens.len();
    let mut answer = json!({ "count": count, "max_model_len": model.context_length });
    if strings {
        let text = |&id: &u32| String::from_utf8_lossy(tokenizer.text(id)).into_owned();
        answer["token_strs"] = tokens.iter().map(text).collect();
    }
    answer["tokens"] = if pieces {
        tokens.iter().map(|&id| json!({ "id": id, "piece": piece(tokenizer.text(id)) })).collect()
    } else {
        tokens.into()
    };
    Ok(Json(answer))
}

/// What a token stands for: its text, or its bytes where they are no text by themselves.
fn piece(bytes: &[u8]) -> Value {
    std::str::from_utf8(bytes).map_or_else(|_| bytes.into(), Value::from)
}

pub(super) async fn detokenize(State(face): State<Face>, request: Request) -> Result<Json<Value>, ApiError> {
    let Inside { app, turn, mut fields, pass: _pass } = for_our_model(request, &face).await?;
    let ids = match fields.take("tokens") {
        None => return Err(ApiError::field("tokens", "`tokens` is missing; expected a list of token ids")),
        Some(Value::Array(ids)) => ids,
        Some(other) => return Err(wrong("tokens", &other, "a list of token ids")),
    };
    let skip = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    log_rest(&fields);
    drop(fields);
    let model = model(&app)?;
    let text = off_thread(move || {
        let _turn = turn;
        let ids = read_ids("tokens", ids, model.tokenizer.vocab_size())?;
        Ok(if skip { model.tokenizer.decode(&ids) } else { named(&model.tokenizer, &ids) })
    });
    let text = text.await?;
    // What either convention looks for.
    Ok(Json(json!({ "content": text, "prompt": text })))
}

/// The text of `ids` with the names of control tokens in it, which tokenizing finds again.
pub(super) fn named(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut bytes = Vec::new();
    // A space that the tokenizer puts before text, at its start and behind special tokens, is no part of the text.
    let mut spaced = tokenizer.strips_leading_space();
    for &id in ids {
        let text = tokenizer.text(id);
        let special = matches!(tokenizer.kind(id), Some(TokenKind::Control | TokenKind::Unknown));
        let strip = spaced && !special && text.first() == Some(&b' ');
        bytes.extend_from_slice(if strip { &text[1..] } else { text });
        spaced = special && tokenizer.strips_leading_space();
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether special tokens are put around the text; llama.cpp and vLLM call it differently.
fn add_special(fields: &mut Fields) -> Result<Option<bool>, ApiError> {
    let [short, long] = ["add_special", "add_special_tokens"];
    match (fields.boolean(short)?, fields.boolean(long)?) {
        (Some(a), Some(b)) if a != b => {
            Err(ApiError::field(long, format!("`{short}` and `{long}` differ; send one of them")))
        }
        (a, b) => Ok(a.or(b)),
    }
}

/// The token ids of the list `field`, all below `vocab_size`.
pub(super) fn read_ids(field: &str, ids: Vec<Value>, vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let check = |(i, value): (usize, Value)| {
        let id = integer(&value).and_then(|id| u32::try_from(id).ok());
        id.filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            let param = format!("{field}[{i}]");
            let last = vocab_size.saturating_sub(1);
            let message = format!("`{param}`: found {value}, expected a token id from 0 to {last}");
            ApiError::field(param, message)
        })
    };
    ids.into_iter().enumerate().map(check).collect()
}
