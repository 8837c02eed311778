//! `POST /edit`: a text with a part of it, or all of it, written anew.
//!
//! The body: `code`, the text; `instruction`; `mode`, `selection` (with `selection`: `{"start", "end"}` in Unicode code
//! points) or `whole`; optional `language`, `steps`, and the fields of `/v1/completions` that say how to sample, how long
//! and whether to stream (`stream` is true unless told otherwise). The answer is an event stream:
//!
//! | event | data |
//! | --- | --- |
//! | `prefill` | `{"done", "total"}`: prompt tokens read |
//! | `draft` | `{"canvas", "step", "tokens", "entropy"}`: the present guess at what is not committed of the new part |
//! | `commit` | `{"text", "tokens"}`: what of the new part will never change |
//! | `done` | the new `document`, `start` and `end` of the new part in it, `replaced`, `text`, `finish_reason`, counts |
//! | `error` | `{"error": {…}}` |
//!
//! or, with `stream: false`, what `done` tells. What is not to be edited never passes through the model's tokens: the
//! document is the text that came with the new part put in, byte for byte.

mod answer;
mod document;
mod prompt;
mod reply;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;

use super::Face;
use super::chat::ENABLE_THINKING;
use super::completions::{for_our_model, log_rest, model_to_generate, off_thread};
use super::constrained::Form;
use super::door::Inside;
use super::error::ApiError;
use super::exchange;
use super::generation::{Asked, one_answer};
use super::reply::{Dialect, submit};
use super::studio::{MAX_STEPS, seed_for_browsers, steps};
use crate::engine;
use answer::Answer;
use document::Wish;
use prompt::{Prepared, prepare};

pub(super) async fn edit(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let Inside { app, turn, mut fields, pass: _pass } = for_our_model(request, &face).await?;
    let by_steps = fields.has("steps");
    let renamed = |error: ApiError| if by_steps { error.renamed(MAX_STEPS, "steps") } else { error };
    let wish = Wish::read(&mut fields)?;
    let stream = fields.boolean("stream")?.unwrap_or(true);
    for (name, why) in [
        ("stop", "an edit ends by itself"),
        ("ignore_eos", "an edit ends by itself"),
        ("stream_options", "the last event always has the counts"),
    ] {
        fields.refuse(name, why, |value| *value == false)?;
    }
    let unthinking = "an edit is made without thinking";
    fields.refuse("reasoning_effort", unthinking, |effort| effort == "none")?;
    fields.refuse(ENABLE_THINKING, unthinking, |enabled| *enabled == false)?;
    fields.refuse("chat_template_kwargs", unthinking, |variables| {
        let off = |(name, value): (&String, &Value)| name == ENABLE_THINKING && *value == false;
        variables.as_object().is_some_and(|variables| variables.iter().all(off))
    })?;
    steps(&mut fields)?;
    seed_for_browsers(&mut fields)?;
    one_answer(&mut fields, "an edit has one result, without figures of its tokens")?;
    if let Some(form) = Form::read(&mut fields)? {
        return Err(ApiError::unsupported(form.param, "an edit cannot be held to a form"));
    }
    let asked = Asked::read(&mut fields, &app, Dialect::Text).map_err(renamed)?;
    log_rest(&fields);
    drop(fields);
    let model = model_to_generate(&app)?;
    let mut generation = asked.of(&app, &model).await.map_err(renamed)?;
    let (wish, prepared) = {
        let model = Arc::clone(&model);
        off_thread(move || {
            let _turn = turn;
            let prepared = prepare(&model, &wish)?;
            Ok((wish, prepared))
        })
        .await?
    };
    let Prepared { prompt, suffix, stops, form } = prepared;
    generation.stop.strings = stops;
    let request = engine::Request {
        id: exchange::named("edit-")?,
        prompt,
        suffix,
        sampling: generation.sampling,
        stop: generation.stop,
        channels: true,
        drafts: stream,
        ..engine::Request::default()
    };
    let seed = request.sampling.seed;
    let job = submit(&app, request, "code")?;
    let answer = Answer::new(job, model, &app.name, wish.document, form, seed);
    if stream {
        return Ok(answer.streamed(app.server.ping_interval));
    }
    answer.whole().await
}
