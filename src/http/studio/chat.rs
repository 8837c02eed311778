//! `POST /chat`: one answer as the studio shows it.
//!
//! The body: every field of `/v1/chat/completions` but `stream`, `n`, `logprobs` and those for tools, and optional `backend` (`local`, or `remote` if
//! one is configured), `thinking` (true or false) and `steps` (the most denoising steps of a canvas). The remote backend
//! takes what OpenAI's API has for it: `messages`, `temperature`, `top_p`, the penalties for presence and frequency,
//! `max_tokens` or `max_completion_tokens`, `seed` and `stop`; the local one's other fields are refused there. The
//! answer is an event stream:
//!
//! | event | data |
//! | --- | --- |
//! | `prefill` | `{"done", "total"}`: prompt tokens read |
//! | `draft` | `{"canvas", "step", "tokens", "entropy"}`: the present guess for what is not committed; texts (null: structure) and nats, one a token. The next draft replaces it |
//! | `commit` | `{"text", "reasoning", "tokens"}`: what will never change, and how many tokens it is |
//! | `done` | `{"finish_reason", "usage", "stats", "seed"}` |
//! | `error` | `{"error": {…}}` |

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::backends::{LOCAL, REMOTE};
use super::pieces::pieces;
use crate::engine::{self, Events, Model};
use crate::http::body::{json_object, read};
use crate::http::chat::{ENABLE_THINKING, Prepared, prepare};
use crate::http::completions::check_model;
use crate::http::door::enter;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, quoted};
use crate::http::generation::one_answer;
use crate::http::hear::{Committed, End, Heard, hear};
use crate::http::reply::{figures, submit, usage_json};
use crate::http::sse::{Frames, respond_with};
use crate::http::{App, Face, exchange, random};
use crate::text::{ChatTemplate, Tokenizer};

/// What the API calls `steps`.
pub(in crate::http) const MAX_STEPS: &str = "max_denoising_steps";

pub(super) async fn answer(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let whole = read(request, &face.now()).await?;
    let another = face.now().remote.is_some() && is_for_another_server(&whole.bytes);
    let (app, pass) = match another {
        true => (face.now(), None),
        false => enter(&face).await.map(|(app, pass)| (app, Some(pass)))?,
    };
    let (turn, body) = json_object(whole, &app).await?;
    let steps = body.contains_key("steps");
    let mut fields = Fields::new(body);
    for fixed in ["stream", "stream_options"] {
        fields.refuse(fixed, "this route always streams", |_| false)?;
    }
    for (name, asks_nothing) in [
        ("tools", (|tools| tools.as_array().is_some_and(Vec::is_empty)) as fn(&Value) -> bool),
        ("functions", |tools| tools.as_array().is_some_and(Vec::is_empty)),
        ("tool_choice", |choice| choice == "none" || choice == "auto"),
        ("function_call", |choice| choice == "none" || choice == "auto"),
    ] {
        fields.refuse(name, "the studio shows no calls of tools; /v1/chat/completions does", asks_nothing)?;
    }
    one_answer(&mut fields, "the studio shows one answer, without figures of its tokens")?;
    match (fields.string("backend")?.as_deref(), &app.remote) {
        (None | Some(LOCAL), _) => {
            check_model(&mut fields, &app)?;
            translate(&mut fields, &app)?;
        }
        (Some(REMOTE), Some(remote)) => {
            // Nobody waits for another server.
            drop((turn, pass));
            return remote.answer(fields, &app).await;
        }
        (Some(other), _) => {
            let message =
                format!("`backend`: there is no backend {}; GET /studio/backends lists them", quoted(other));
            return Err(ApiError::refused(StatusCode::NOT_FOUND, message).param("backend"));
        }
    }
    let prepared = prepare(&app, turn, fields).await;
    let Prepared { model, prompt, generation } =
        prepared.map_err(|error| if steps { error.renamed(MAX_STEPS, "steps") } else { error })?;
    let request = engine::Request {
        id: exchange::named("studio-")?,
        prompt,
        sampling: generation.sampling,
        stop: generation.stop,
        channels: true,
        drafts: true,
        calls: generation.calls,
        ..engine::Request::default()
    };
    let seed = request.sampling.seed;
    let events = submit(&app, request, "messages")?.events;
    drop(pass);
    let frames = Answer { events, model, seed };
    Ok(respond_with(frames, app.server.ping_interval))
}

/// Whether a body names the other server, for which nothing of the model is needed. What cannot be read is not told here.
fn is_for_another_server(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Named {
        backend: Option<String>,
    }
    serde_json::from_slice(body).is_ok_and(|Named { backend }| backend.as_deref() == Some(REMOTE))
}

/// The most denoising steps, by the short name. Who sends both names must mean the same.
pub(in crate::http) fn steps(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(steps) = fields.take("steps") {
        if let Some(other) = fields.take(MAX_STEPS)
            && other != steps
            && (other.as_f64().is_none() || other.as_f64() != steps.as_f64())
        {
            return Err(contradiction("steps", MAX_STEPS));
        }
        fields.put(MAX_STEPS, steps);
    }
    Ok(())
}

/// A seed of the server's choice must survive the numbers of JavaScript, to be asked for again.
pub(in crate::http) fn seed_for_browsers(fields: &mut Fields) -> Result<(), ApiError> {
    let seed = match fields.take("seed") {
        Some(seed) => seed,
        None => u32::from_le_bytes(random::<4>()?).into(),
    };
    fields.put("seed", seed);
    Ok(())
}

/// From the studio's words to those of the API. Who sends both must mean the same.
fn translate(fields: &mut Fields, app: &App) -> Result<(), ApiError> {
    steps(fields)?;
    if let Some(thinking) = fields.boolean("thinking")? {
        let knows = |model: Arc<Model>| model.template.as_ref().is_some_and(ChatTemplate::knows_thinking);
        if thinking && app.engine.model().is_some_and(|model| !knows(model)) {
            return Err(ApiError::unsupported("thinking", "this model cannot be told whether to think"));
        }
        let mut extra = fields.object("chat_template_kwargs")?.unwrap_or_default();
        let other = extra.insert(ENABLE_THINKING.to_owned(), thinking.into());
        if other.is_some_and(|other| !other.is_null() && other != Value::Bool(thinking)) {
            return Err(contradiction("thinking", "chat_template_kwargs.enable_thinking"));
        }
        fields.put("chat_template_kwargs", extra);
    }
    seed_for_browsers(fields)
}

fn contradiction(ours: &str, name: &str) -> ApiError {
    ApiError::field(ours, format!("`{ours}` and `{name}` differ; send one of them"))
}

struct Answer {
    events: Events,
    model: Arc<Model>,
    seed: u64,
}

impl Frames for Answer {
    async fn next(&mut self) -> (String, bool) {
        match hear(&mut self.events).await {
            Ok(Heard::Prefill { done, total }) => (prefill(done, total), false),
            Ok(Heard::Draft { tokens, entropy, canvas, step }) => {
                let draft = draft(&self.model.tokenizer, &tokens, &entropy, canvas, step);
                (frame("draft", &draft), false)
            }
            Ok(Heard::Commit(Committed { parts, tokens, .. })) => {
                let commit = json!({ "text": parts.content, "reasoning": parts.reasoning, "tokens": tokens });
                (frame("commit", &commit), false)
            }
            Ok(Heard::End(End { reason, usage, stats })) => {
                let done = json!({
                    "finish_reason": reason,
                    "usage": usage_json(usage),
                    "stats": figures(&self.model.device, self.seed, &stats),
                    "seed": self.seed,
                });
                (frame("done", &done), true)
            }
            Err(error) => (frame("error", &error.to_json()), true),
        }
    }
}

/// Prompt tokens read, as an event.
pub(in crate::http) fn prefill(done: usize, total: usize) -> String {
    frame("prefill", &json!({ "done": done, "total": total }))
}

/// A draft as pages read it: texts (null: structure) and nats, one a token.
pub(in crate::http) fn draft(
    tokenizer: &Tokenizer,
    tokens: &[u32],
    entropy: &[f32],
    canvas: usize,
    step: usize,
) -> Value {
    json!({
        "canvas": canvas,
        "step": step,
        "tokens": pieces(tokenizer, tokens),
        "entropy": entropy.iter().map(|nats| (f64::from(*nats) * 1e4).round() / 1e4).collect::<Vec<_>>(),
    })
}

/// A named event with its data.
pub(in crate::http) fn frame(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}
