//! What an edit's listener is told.

use std::time::Duration;

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::document::Document;
use super::reply::{Form, Part};
use crate::engine::{Events, Job, Model, Stats, Usage};
use crate::http::error::ApiError;
use crate::http::hear::{Committed, End, Heard, hear, hear_out};
use crate::http::reply::{figures, usage_json};
use crate::http::sse::{Frames, respond_with};
use crate::http::studio::{draft, frame, prefill};
use crate::http::unix_time;

pub(super) struct Answer {
    id: String,
    events: Events,
    model: Arc<Model>,
    /// The model's name in the API.
    name: String,
    created: u64,
    document: Document,
    part: Part,
    /// The new part so far.
    text: String,
    seed: u64,
}

impl Answer {
    pub(super) fn new(
        job: Job,
        model: Arc<Model>,
        name: &str,
        document: Document,
        form: Form,
        seed: u64,
    ) -> Self {
        Self {
            id: job.id,
            events: job.events,
            model,
            name: name.to_owned(),
            created: unix_time(),
            document,
            part: Part::new(form),
            text: String::new(),
            seed,
        }
    }

    pub(super) fn streamed(self, ping: Duration) -> Response {
        respond_with(self, ping)
    }

    /// Waits for the end.
    pub(super) async fn whole(mut self) -> Result<Response, ApiError> {
        let (Committed { parts, .. }, End { reason, usage, stats }) = hear_out(&mut self.events).await?;
        self.take(&parts.content);
        self.finish(reason);
        Ok(Json(self.done(reason, usage, &stats)).into_response())
    }

    /// Takes text of the reply; returns what of the new part came with it.
    fn take(&mut self, text: &str) -> String {
        let new = self.part.push(text);
        self.text.push_str(&new);
        new
    }

    /// Ends the part; returns what came with that.
    fn finish(&mut self, reason: &str) -> String {
        let rest = self.part.finish(reason == "stop");
        self.text.push_str(&rest);
        rest
    }

    fn done(&self, reason: &str, usage: Usage, stats: &Stats) -> Value {
        let points = self.document.points();
        json!({
            "id": self.id,
            "object": "edit",
            "created": self.created,
            "model": self.name,
            "document": self.document.with(&self.text),
            "start": points.start,
            "end": points.start + self.text.chars().count(),
            "replaced": { "start": points.start, "end": points.end },
            "text": self.text,
            "finish_reason": reason,
            "usage": usage_json(usage),
            "stats": figures(&self.model.device, self.seed, stats),
            "seed": self.seed,
        })
    }
}

impl Frames for Answer {
    async fn next(&mut self) -> (String, bool) {
        match hear(&mut self.events).await {
            Ok(Heard::Prefill { done, total }) => (prefill(done, total), false),
            Ok(Heard::Draft { tokens, entropy, canvas, step }) => {
                let mut draft = draft(&self.model.tokenizer, &tokens, &entropy, canvas, step);
                if self.part.spaced()
                    && let Some(Value::String(first)) = draft["tokens"].get_mut(0)
                    && first.starts_with(' ')
                {
                    first.remove(0);
                }
                (frame("draft", &draft), false)
            }
            Ok(Heard::Commit(Committed { parts, tokens, .. })) => {
                let text = self.take(&parts.content);
                (frame("commit", &json!({ "text": text, "tokens": tokens })), false)
            }
            Ok(Heard::End(End { reason, usage, stats })) => {
                let rest = self.finish(reason);
                let mut frames = String::new();
                if !rest.is_empty() {
                    frames.push_str(&frame("commit", &json!({ "text": rest, "tokens": 0 })));
                }
                frames.push_str(&frame("done", &self.done(reason, usage, &stats)));
                (frames, true)
            }
            Err(error) => (frame("error", &error.to_json()), true),
        }
    }
}
