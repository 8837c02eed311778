//! Streamed answers: one chunk for what each step committed, framed as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};

use super::calls;
use super::error::ApiError;
use super::hear::{Committed, End, Heard, hear};
use super::logprobs::{Logged, Reached};
use super::reply::{Dialect, Head, outcome, usage_json};
use crate::engine::{Events, Usage};
use crate::text::Parts;

/// A stream that answers with chunks of the events as they come, one choice after the other.
pub(super) async fn respond(
    head: Head,
    mut choices: VecDeque<Events>,
    logged: Option<Logged>,
    include_usage: bool,
    ping: Duration,
) -> Result<Response, ApiError> {
    if let Some(first) = choices.front_mut() {
        hold_back(first, ping).await?;
    }
    let choice = Choice::default();
    let chunks = Chunks { head, choices, logged, include_usage, choice, usage: None };
    Ok(respond_with(chunks, ping))
}

/// Waits with the status line until there is something to say, so that what fails before has a status of its own, and a
/// router may still ask another server; but no longer than `patience`, since silence looks like a dead socket.
pub(super) async fn hold_back(events: &mut Events, patience: Duration) -> Result<(), ApiError> {
    match tokio::time::timeout(patience, events.begun()).await {
        Ok(Some(reason)) => outcome(reason).map(drop),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// What makes the frames of an event stream.
pub(super) trait Frames: Send + 'static {
    /// The next frames, and whether they are the last. Must lose nothing when dropped while it waits.
    fn next(&mut self) -> impl Future<Output = (String, bool)> + Send;

    /// What is sent while there is nothing to say: a comment.
    fn ping(&self) -> String {
        ": ping\n\n".to_owned()
    }
}

/// An event stream; a comment is sent whenever nothing else was for as long as `ping`.
pub(super) fn respond_with(frames: impl Frames, ping: Duration) -> Response {
    let frames = stream::unfold(Some(frames), move |frames| async move {
        let mut frames = frames?;
        // Dropping the body drops `frames`, and with it the job.
        let (frame, over) = match tokio::time::timeout(ping, frames.next()).await {
            Ok(next) => next,
            Err(_silence) => (frames.ping(), false),
        };
        Some((Ok::<_, Infallible>(frame), (!over).then_some(frames)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Tells nginx and its like not to hold chunks back.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(frames)).into_response()
}

struct Chunks {
    head: Head,
    /// Those whose end was not sent; the first of them is being sent.
    choices: VecDeque<Events>,
    logged: Option<Logged>,
    include_usage: bool,
    choice: Choice,
    /// Of the choices that were sent.
    usage: Option<Usage>,
}

/// What was sent of a choice.
#[derive(Default)]
struct Choice {
    index: usize,
    /// Whether its first chunk, which names the role or repeats the prompt, was sent.
    begun: bool,
    /// Calls of tools that were sent.
    called: usize,
    /// How far its text is.
    reached: Reached,
}

impl Frames for Chunks {
    async fn next(&mut self) -> (String, bool) {
        loop {
            let Some(events) = self.choices.front_mut() else {
                return (self.close(), true);
            };
            match hear(events).await {
                Ok(Heard::Prefill { .. } | Heard::Draft { .. }) => {}
                Ok(Heard::Commit(Committed { parts, .. })) if parts.is_empty() => {}
                Ok(Heard::Commit(Committed { parts, logprobs, .. })) => {
                    let Parts { content: text, reasoning, calls } = parts;
                    let mut frames = self.begin();
                    if !reasoning.is_empty() {
                        frames.push_str(&self.delta("reasoning_content", &reasoning, Value::Null));
                    }
                    if !text.is_empty() {
                        let reached = self.choice.reached;
                        let logprobs =
                            self.logged.as_ref().map(|logged| logged.show(&logprobs, &text, reached));
                        self.choice.reached.add(&text);
                        frames.push_str(&self.delta("content", &text, logprobs.unwrap_or_default()));
                    }
                    for call in calls {
                        let Choice { index, called, .. } = self.choice;
                        for delta in calls::deltas(&self.head.id, index, called, &call) {
                            frames.push_str(&self.chunk(delta, Value::Null, Value::Null));
                        }
                        self.choice.called += 1;
                    }
                    return (frames, false);
                }
                Ok(Heard::End(End { reason, usage, .. })) => {
                    let frames = self.end(reason, usage);
                    return match self.choices.is_empty() {
                        true => (frames + &self.close(), true),
                        false => (frames, false),
                    };
                }
                Err(error) => return (failure(&error), true),
            }
        }
    }
}

impl Chunks {
    fn begin(&mut self) -> String {
        if std::mem::replace(&mut self.choice.begun, true) {
            return String::new();
        }
        let first = match self.head.dialect {
            Dialect::Chat => json!({ "role": "assistant", "content": "" }),
            Dialect::Text if self.head.echo.is_empty() => return String::new(),
            Dialect::Text => self.head.echo.as_str().into(),
        };
        self.chunk(first, Value::Null, Value::Null)
    }

    fn delta(&self, member: &str, text: &str, logprobs: Value) -> String {
        match self.head.dialect {
            Dialect::Chat => self.chunk(json!({ member: text }), logprobs, Value::Null),
            Dialect::Text => self.chunk(text.into(), logprobs, Value::Null),
        }
    }

    /// Ends the present choice and turns to the next.
    fn end(&mut self, reason: &str, usage: Usage) -> String {
        let mut frames = self.begin();
        let nothing = match self.head.dialect {
            Dialect::Chat => json!({}),
            Dialect::Text => "".into(),
        };
        frames.push_str(&self.chunk(nothing, Value::Null, reason.into()));
        self.usage = Some(self.usage.map_or(usage, |all| all.with_choice(usage)));
        self.choices.pop_front();
        self.choice = Choice { index: self.choice.index + 1, ..Choice::default() };
        frames
    }

    /// What comes behind the last choice.
    fn close(&self) -> String {
        let mut frames = String::new();
        if self.include_usage {
            let mut chunk = self.head.object(true, json!([]));
            chunk["usage"] = usage_json(self.usage.unwrap_or_default());
            frames.push_str(&frame(&chunk));
        }
        frames.push_str("data: [DONE]\n\n");
        frames
    }

    /// `content` is a chat delta or a piece of text.
    fn chunk(&self, content: Value, logprobs: Value, finish_reason: Value) -> String {
        let member = match self.head.dialect {
            Dialect::Chat => "delta",
            Dialect::Text => "text",
        };
        let mut choice = json!({ "index": self.choice.index });
        choice[member] = content;
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = finish_reason;
        let mut chunk = self.head.object(true, json!([choice]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        frame(&chunk)
    }
}

/// After the stream has begun there is no status to send: the error is the last event, without `[DONE]`.
fn failure(error: &ApiError) -> String {
    frame(&error.to_json())
}

fn frame(value: &Value) -> String {
    // JSON has no raw line breaks, so one `data:` line holds it.
    format!("data: {value}\n\n")
}
