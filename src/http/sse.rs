//! Streamed answers: one chunk for what each step committed, framed as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};

use super::calls;
use super::error::ApiError;
use super::reply::{Dialect, Head, broke_off, outcome, usage_json};
use crate::engine::{Event, Events, Usage};

/// A stream that answers with chunks of the events as they come.
pub(super) async fn respond(
    head: Head,
    mut events: Events,
    include_usage: bool,
    ping: Duration,
) -> Result<Response, ApiError> {
    hold_back(&mut events, ping).await?;
    let chunks = Chunks { head, events, include_usage, begun: false, called: 0 };
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
}

/// An event stream; a comment is sent whenever nothing else was for as long as `ping`.
pub(super) fn respond_with(frames: impl Frames, ping: Duration) -> Response {
    let frames = stream::unfold(Some(frames), move |frames| async move {
        let mut frames = frames?;
        // Dropping the body drops `frames`, and with it the job.
        let (frame, over) = match tokio::time::timeout(ping, frames.next()).await {
            Ok(next) => next,
            Err(_silence) => (": ping\n\n".to_owned(), false),
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
    events: Events,
    include_usage: bool,
    /// Whether the first chunk, which names the role or repeats the prompt, was sent.
    begun: bool,
    /// Calls of tools that were sent.
    called: usize,
}

impl Frames for Chunks {
    async fn next(&mut self) -> (String, bool) {
        loop {
            match self.events.recv().await {
                Some(Event::Prefill { .. } | Event::Draft { .. }) => {}
                Some(Event::Commit { text, reasoning, calls, .. })
                    if text.is_empty() && reasoning.is_empty() && calls.is_empty() => {}
                Some(Event::Commit { text, reasoning, calls, .. }) => {
                    let mut frames = self.begin();
                    for (member, text) in [("reasoning_content", reasoning), ("content", text)] {
                        if !text.is_empty() {
                            frames.push_str(&self.delta(member, &text));
                        }
                    }
                    for call in calls {
                        for delta in calls::deltas(&self.head.id, 0, self.called, &call) {
                            frames.push_str(&self.chunk(delta, Value::Null));
                        }
                        self.called += 1;
                    }
                    return (frames, false);
                }
                Some(Event::Finish { reason, usage, .. }) => {
                    return match outcome(reason) {
                        Ok(reason) => (self.end(reason, usage), true),
                        Err(error) => (failure(&error), true),
                    };
                }
                None => return (failure(&broke_off()), true),
            }
        }
    }
}

impl Chunks {
    fn begin(&mut self) -> String {
        if std::mem::replace(&mut self.begun, true) {
            return String::new();
        }
        match self.head.dialect {
            Dialect::Chat => self.chunk(json!({ "role": "assistant", "content": "" }), Value::Null),
            Dialect::Text if self.head.echo.is_empty() => String::new(),
            Dialect::Text => self.chunk(self.head.echo.as_str().into(), Value::Null),
        }
    }

    fn delta(&self, member: &str, text: &str) -> String {
        match self.head.dialect {
            Dialect::Chat => self.chunk(json!({ member: text }), Value::Null),
            Dialect::Text => self.chunk(text.into(), Value::Null),
        }
    }

    fn end(&mut self, reason: &str, usage: Usage) -> String {
        let mut frames = self.begin();
        let nothing = match self.head.dialect {
            Dialect::Chat => json!({}),
            Dialect::Text => "".into(),
        };
        frames.push_str(&self.chunk(nothing, reason.into()));
        if self.include_usage {
            let mut chunk = self.head.object(true, json!([]));
            chunk["usage"] = usage_json(usage);
            frames.push_str(&frame(&chunk));
        }
        frames.push_str("data: [DONE]\n\n");
        frames
    }

    /// `content` is a chat delta or a piece of text.
    fn chunk(&self, content: Value, finish_reason: Value) -> String {
        let member = match self.head.dialect {
            Dialect::Chat => "delta",
            Dialect::Text => "text",
        };
        let mut choice = json!({ "index": 0 });
        choice[member] = content;
        choice["logprobs"] = Value::Null;
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
