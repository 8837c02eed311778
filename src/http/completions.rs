//! `POST /v1/completions`

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::Value;

use super::body::{json_object, read};
use super::door::{Inside, enter};
use super::error::ApiError;
use super::fields::{Fields, quoted, wrong};
use super::generation::Asked;
use super::infill::{Gapped, gapped};
use super::reply::{Dialect, answer};
use super::tokens::{named, read_ids};
use super::{App, Face};
use crate::engine::Model;
use crate::text::Specials;

pub(super) async fn complete(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let Inside { app, turn, mut fields, pass: _pass } = for_our_model(request, &face).await?;
    let prompt = Prompt::read(fields.take("prompt"))?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let suffix = fields.string("suffix")?.filter(|suffix| !suffix.is_empty());
    let asked = Asked::read(&mut fields, &app, Dialect::Text)?;
    fields.refuse("reasoning_effort", "texts are continued as they are", |_| false)?;
    fields.refuse("enable_thinking", "texts are continued as they are", |_| false)?;
    log_rest(&fields);
    drop(fields);
    let model = model_to_generate(&app)?;
    let mut generation = asked.of(&app, &model).await?;
    if echo && generation.logprobs.is_some() {
        let why = "those of a prompt are not known; leave out `logprobs`, or `echo`";
        return Err(ApiError::unsupported("logprobs", why));
    }
    if suffix.is_some() && generation.stop.ignore_eos {
        let why = "with a `suffix` the text ends where that begins; leave it out";
        return Err(ApiError::unsupported("ignore_eos", why));
    }
    let (gapped, echo) = {
        let model = Arc::clone(&model);
        off_thread(move || {
            let _turn = turn;
            let (prompt, text) = prompt.tokens(&model)?;
            let gapped = match suffix {
                Some(suffix) => gapped(&model, prompt, &suffix)?,
                None => Gapped { prompt, suffix: Vec::new() },
            };
            Ok((gapped, if echo { text } else { String::new() }))
        })
        .await?
    };
    let Gapped { prompt, suffix } = gapped;
    (generation.suffix, generation.echo) = (suffix, echo);
    answer(&app, &model, Dialect::Text, prompt, generation).await
}

/// Reads a request that names our model, or none, and lets it in.
pub(super) async fn for_our_model(request: Request, face: &Face) -> Result<Inside, ApiError> {
    let whole = read(request, &face.now()).await?;
    let (app, pass) = enter(face).await?;
    let (turn, body) = json_object(whole, &app).await?;
    let mut fields = Fields::new(body);
    check_model(&mut fields, &app)?;
    Ok(Inside { app, turn, fields, pass })
}

/// 404 when the request is meant for another model. A request that names none means ours.
pub(super) fn check_model(fields: &mut Fields, app: &App) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(name) if !app.serves(&name) => Err(model_not_found(app, &name)),
        _ => Ok(()),
    }
}

pub(super) fn model_not_found(app: &App, name: &str) -> ApiError {
    let message = format!("the model {} does not exist here; this server has {:?}", quoted(name), app.name);
    ApiError::refused(StatusCode::NOT_FOUND, message).param("model").code("model_not_found")
}

/// The loaded model, or why there is none to use.
pub(super) fn model(app: &App) -> Result<Arc<Model>, ApiError> {
    app.engine.accepting()?;
    loaded(app)
}

/// The same for a request to generate, which is counted if there is none.
pub(super) fn model_to_generate(app: &App) -> Result<Arc<Model>, ApiError> {
    app.engine.accepting_one()?;
    loaded(app)
}

fn loaded(app: &App) -> Result<Arc<Model>, ApiError> {
    app.engine.model().ok_or_else(|| ApiError::internal("the engine is ready without a model"))
}

/// Notes fields that nothing here knows; clients of other servers send many.
pub(super) fn log_rest(fields: &Fields) {
    let unknown = fields.rest();
    if !unknown.is_empty() {
        tracing::debug!(?unknown, "unknown request fields have no effect");
    }
}

/// Runs work that takes long for long texts where it does not hold up other connections.
pub(super) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(ApiError::internal(format!("reading the request failed: {error}"))))
}

const EXPECTED: &str = "a string or a list of token ids";

#[derive(Debug, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<Value>),
}

impl Prompt {
    /// A string or a list of token ids, or a list with one of these.
    fn read(value: Option<Value>) -> Result<Self, ApiError> {
        let Some(value) = value else {
            return Err(ApiError::field("prompt", format!("`prompt` is missing; expected {EXPECTED}")));
        };
        match value {
            Value::Array(list) if list.len() > 1 && list.iter().all(|v| v.is_string() || v.is_array()) => {
                Err(ApiError::unsupported("prompt", "only one prompt a request is supported"))
            }
            Value::Array(mut list) if list.len() == 1 && !list[0].is_number() => Self::one(list.remove(0)),
            other => Self::one(other),
        }
    }

    /// Its token ids, and its text.
    fn tokens(self, model: &Model) -> Result<(Vec<u32>, String), ApiError> {
        let tokenizer = &model.tokenizer;
        match self {
            Self::Tokens(ids) => {
                let ids = read_ids("prompt", ids, tokenizer.vocab_size())?;
                let text = named(tokenizer, &ids);
                Ok((ids, text))
            }
            Self::Text(text) => Ok((tokenizer.with_bos(tokenizer.encode(&text, Specials::Parse)), text)),
        }
    }

    fn one(value: Value) -> Result<Self, ApiError> {
        match value {
            Value::String(text) => Ok(Self::Text(text)),
            Value::Array(list) if list.iter().all(Value::is_number) => Ok(Self::Tokens(list)),
            Value::Array(_) => Err(ApiError::field(
                "prompt",
                format!("`prompt`: found a list of other things, expected {EXPECTED}"),
            )),
            other => Err(wrong("prompt", &other, EXPECTED)),
        }
    }
}
