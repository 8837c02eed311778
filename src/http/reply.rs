//! What both completion routes do once their prompt is known: submit, then answer whole or as a stream.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::auth::account;
use super::error::{ApiError, OUTAGE_RETRY};
use super::generation::Generation;
use super::hear::{Committed, End, hear_out};
use super::logprobs::{Logged, Reached};
use super::{App, calls, exchange, fingerprint, sse, unix_time};
use crate::decode::ProposerStats;
use crate::engine::{Cause, Events, FinishReason, Job, Model, Request, Stats, SubmitError, Usage};
use crate::text::Parts;

/// Which of the two APIs is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

impl Dialect {
    /// The field that holds what is continued.
    fn prompt(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Text => "prompt",
        }
    }
}

/// What all parts of one answer have in common.
pub(super) struct Head {
    pub(super) dialect: Dialect,
    pub(super) id: String,
    created: u64,
    model: String,
    fingerprint: String,
    device: String,
    seed: u64,
    /// Text before the reply that is part of the answer.
    pub(super) echo: String,
}

impl Head {
    fn new(dialect: Dialect, app: &App, model: &Model, seed: u64) -> Result<Self, ApiError> {
        let prefix = match dialect {
            Dialect::Chat => "chatcmpl-",
            Dialect::Text => "cmpl-",
        };
        Ok(Self {
            dialect,
            id: exchange::named(prefix)?,
            created: unix_time(),
            model: app.name.clone(),
            fingerprint: fingerprint(model),
            device: model.device.clone(),
            seed,
            echo: String::new(),
        })
    }

    /// An answer, or a chunk of a streamed one.
    pub(super) fn object(&self, chunk: bool, choices: Value) -> Value {
        let object = match (self.dialect, chunk) {
            (Dialect::Chat, false) => "chat.completion",
            (Dialect::Chat, true) => "chat.completion.chunk",
            (Dialect::Text, _) => "text_completion",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        })
    }

    /// All choices together.
    fn whole(&self, choices: Vec<Value>, usage: Usage, stats: &Stats) -> Value {
        let mut answer = self.object(false, choices.into());
        answer["usage"] = usage_json(usage);
        answer["axe"] = figures(&self.device, self.seed, stats);
        answer
    }

    /// One whole reply.
    fn choice(&self, index: usize, parts: Parts, logprobs: Value, reason: &str) -> Value {
        let Parts { content, reasoning, calls: called } = parts;
        let mut choice = json!({ "index": index });
        match self.dialect {
            Dialect::Chat => {
                choice["message"] = json!({ "role": "assistant", "content": content, "refusal": null });
                if !reasoning.is_empty() {
                    choice["message"]["reasoning_content"] = reasoning.into();
                }
                if !called.is_empty() {
                    let content = &mut choice["message"]["content"];
                    *content = Some(content.take()).filter(|content| content != "").into();
                    choice["message"]["tool_calls"] = calls::whole(&self.id, index, &called);
                }
            }
            Dialect::Text => choice["text"] = format!("{}{content}", self.echo).into(),
        }
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = reason.into();
        choice
    }
}

/// What a generation took, where it ran, and the seed that repeats it: the answer's `axe` block.
pub(super) fn figures(device: &str, seed: u64, stats: &Stats) -> Value {
    let mut figures = json!({
        "elapsed_s": stats.elapsed_s,
        "queue_s": stats.queue_s,
        "prefill_s": stats.prefill_s,
        "first_token_s": stats.first_token_s,
        "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass,
        "tokens_per_s": stats.tokens_per_s,
        "device": device,
        "seed": seed,
    });
    if let Some(denoising) = &stats.denoising {
        figures["first_draft_s"] = stats.first_token_s.into();
        figures["denoising_steps"] = denoising.steps.into();
        figures["canvases"] = denoising.canvases.into();
        figures["steps_per_canvas"] = stats.canvas_steps.clone().into();
        figures["accepted_per_step"] = denoising.accepted.clone().into();
    }
    if let Some(blocks) = &stats.blocks {
        figures["rows"] = blocks.evaluated.into();
        let guesses = |made: &ProposerStats| {
            (made.name.to_owned(), json!({ "offered": made.offered, "accepted": made.accepted }))
        };
        figures["guesses"] = blocks.proposers.iter().map(guesses).collect();
    }
    figures
}

/// Token counts in OpenAI's words.
pub(super) fn usage_json(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
        "completion_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
    })
}

/// The word for how a job ended, or the error that it ended with.
pub(super) fn outcome(reason: FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::ToolCalls => Ok("tool_calls"),
        FinishReason::Length => Ok("length"),
        FinishReason::Cancelled(Cause::Operator | Cause::Listener) => {
            Err(ApiError::unavailable("the request was cancelled by the operator").code("cancelled"))
        }
        FinishReason::Cancelled(Cause::Shutdown) => {
            Err(ApiError::unavailable("the server shut down before the reply was complete").code("shutting_down"))
        }
        FinishReason::Cancelled(Cause::Outage) => Err(ApiError::unavailable(
            "the model is not on the device, and could not be brought back yet; try again in a while",
        )
        .code("engine_rebuilding")
        .retry_after(OUTAGE_RETRY)),
        FinishReason::Cancelled(Cause::Deadline) => Err(ApiError::timeout(
            "the time for a request (`server.request_timeout_s`) was over before its first token; try again when the \
             server is less busy",
        )
        .code("request_timeout")),
        FinishReason::Error(message) => Err(ApiError::internal(message).code("generation_failed")),
    }
}

/// Puts a prompt into the queue.
pub(super) fn submit(app: &App, request: Request, field: &'static str) -> Result<Job, ApiError> {
    tracing::debug!(id = request.id, prompt_tokens = request.prompt.len(), "submitted");
    app.engine.submit_for(request, account()).map_err(|error| refusal(error, field))
}

/// Why a prompt, which `field` holds, was not taken.
fn refusal(error: SubmitError, field: &'static str) -> ApiError {
    match error {
        SubmitError::EmptyPrompt | SubmitError::ContextTooLong { .. } => ApiError::from(error).param(field),
        error => error.into(),
    }
}

/// Submits the prompt, once for each choice, and answers.
pub(super) async fn answer(
    app: &Arc<App>,
    model: &Arc<Model>,
    dialect: Dialect,
    prompt: Vec<u32>,
    generation: Generation,
) -> Result<Response, ApiError> {
    let mut generation = generation;
    let echo = std::mem::take(&mut generation.echo);
    let head = Head { echo, ..Head::new(dialect, app, model, generation.sampling.seed)? };
    let (stream, include_usage) = (generation.stream, generation.include_usage);
    let logged = generation.logprobs.map(|_| Logged::new(dialect, Arc::clone(model)));
    let requests = generation.requests(&head.id, prompt, dialect == Dialect::Chat);
    let prompt_tokens = requests.first().map(|request| request.prompt.len());
    tracing::debug!(id = head.id, prompt_tokens, choices = requests.len(), "submitted");
    let jobs = app.engine.submit_all(requests, account().as_ref());
    let jobs = jobs.map_err(|error| refusal(error, dialect.prompt()))?;
    let choices = jobs.into_iter().map(|job| job.events).collect();
    if stream {
        return sse::respond(head, choices, logged, include_usage, app.server.ping_interval).await;
    }
    collect(&head, choices, logged).await
}

/// Waits for all choices, which come one after the other.
async fn collect(
    head: &Head,
    choices: VecDeque<Events>,
    logged: Option<Logged>,
) -> Result<Response, ApiError> {
    let mut whole = Vec::with_capacity(choices.len());
    let mut total: Option<(Usage, Stats)> = None;
    for (index, mut events) in choices.into_iter().enumerate() {
        let (Committed { parts, logprobs, .. }, End { reason, usage, stats }) = hear_out(&mut events).await?;
        let logprobs =
            logged.as_ref().map(|logged| logged.show(&logprobs, &parts.content, Reached::default()));
        whole.push(head.choice(index, parts, logprobs.unwrap_or_default(), reason));
        total = Some(match total {
            Some((all, took)) => (all.with_choice(usage), took.with_choice(stats)),
            None => (usage, stats),
        });
    }
    let (usage, stats) = total.unwrap_or_default();
    Ok(Json(head.whole(whole, usage, &stats)).into_response())
}

/// The engine let go of a job without finishing it.
pub(super) fn broke_off() -> ApiError {
    ApiError::internal("the engine ended before the reply was complete")
}
