//! The studio's second backend: any server that speaks OpenAI's API. Its stream becomes the studio's events; it has no
//! drafts, so each piece of text is a commit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::response::Response;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use serde_json::{Map, Value, json};

use super::chat::frame;
use crate::config::RemoteConfig;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::http::messages;
use crate::http::sse::{Frames, respond_with};

/// Most time to reach the server.
const CONNECT: Duration = Duration::from_secs(10);

/// No line of an event stream is longer.
const LONGEST_LINE: usize = 1 << 20;

/// So much of an error's text is passed on.
const ERROR_TEXT: usize = 500;

/// A server to pass requests on to.
pub(in crate::http) struct Remote {
    config: RemoteConfig,
    client: reqwest::Client,
}

impl Remote {
    pub(in crate::http) fn new(config: RemoteConfig) -> Self {
        // With a bad certificate store the client is the plain one, whose requests say what is wrong.
        let client = reqwest::Client::builder().connect_timeout(CONNECT).build().unwrap_or_default();
        Self { config, client }
    }

    pub(super) fn model(&self) -> &str {
        &self.config.model
    }

    /// Passes a request on and answers with the studio's events.
    pub(super) async fn answer(&self, mut fields: Fields, ping: Duration) -> Result<Response, ApiError> {
        let mut body = Map::new();
        body.insert("model".to_owned(), self.config.model.clone().into());
        body.insert("messages".to_owned(), messages::read(fields.take("messages"))?);
        for name in ["temperature", "max_tokens", "seed"] {
            if let Some(value) = fields.take(name) {
                body.insert(name.to_owned(), value);
            }
        }
        body.insert("stream".to_owned(), true.into());
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
        let seed = body.get("seed").cloned().unwrap_or_default();
        let started = Instant::now();
        let mut request = self.client.post(format!("{}/chat/completions", self.config.url)).json(&body);
        if let Some(key) = &self.config.key {
            request = request.bearer_auth(key.expose());
        }
        let response = request.send().await.map_err(|error| {
            unreachable(&format!("`studio.remote_url` cannot be reached: {}", error.without_url()))
        })?;
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            let told = serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|body| Some(body["error"]["message"].as_str()?.to_owned()))
                .unwrap_or(text);
            let told: String = told.chars().take(ERROR_TEXT).collect();
            return Err(unreachable(&format!("the server at `studio.remote_url` answered {status}: {told}")));
        }
        let bytes = response.bytes_stream().map_err(|error| error.without_url().to_string()).boxed();
        let relay = Relay {
            bytes,
            held: Vec::new(),
            ready: VecDeque::new(),
            over: false,
            finish: None,
            usage: Value::Null,
            pieces: 0,
            first: None,
            started,
            seed,
        };
        Ok(respond_with(relay, ping))
    }
}

fn unreachable(message: &str) -> ApiError {
    ApiError::bad_gateway(message).code("remote_failed")
}

/// A stream of OpenAI's chunks on its way to become the studio's events.
struct Relay {
    bytes: BoxStream<'static, Result<Bytes, String>>,
    held: Vec<u8>,
    ready: VecDeque<String>,
    over: bool,
    finish: Option<String>,
    usage: Value,
    /// Chunks with text: about as many as tokens, where the server does not count.
    pieces: usize,
    first: Option<Instant>,
    started: Instant,
    seed: Value,
}

impl Frames for Relay {
    async fn next(&mut self) -> (String, bool) {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return (frame, self.over && self.ready.is_empty());
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => self.take(&bytes),
                Some(Err(error)) => self.fail(&format!("the other server's stream broke off: {error}")),
                None if self.finish.is_some() => self.done(),
                None => self.fail("the other server's stream ended before the reply was complete"),
            }
        }
    }
}

impl Relay {
    fn take(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        while let Some(end) = self.held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.held.drain(..=end).collect();
            if !self.over {
                self.line(&String::from_utf8_lossy(&line));
            }
        }
        if self.held.len() > LONGEST_LINE {
            self.fail("the other server sent a line that is too long");
        }
    }

    fn line(&mut self, line: &str) {
        let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim_start) else { return };
        if data == "[DONE]" {
            return self.done();
        }
        let Ok(chunk) = serde_json::from_str::<Value>(data) else {
            return self.fail("the other server sent an event that is not JSON");
        };
        if let Some(message) = chunk["error"]["message"].as_str() {
            return self.fail(message);
        }
        if chunk["usage"].is_object() {
            self.usage = chunk["usage"].clone();
        }
        let choice = &chunk["choices"][0];
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        let reasoning = choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
        if !text.is_empty() || !reasoning.is_empty() {
            self.first.get_or_insert_with(Instant::now);
            self.pieces += 1;
            self.ready
                .push_back(frame("commit", &json!({ "text": text, "reasoning": reasoning, "tokens": 1 })));
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(reason.to_owned());
        }
    }

    fn done(&mut self) {
        let elapsed = self.started.elapsed().as_secs_f64();
        let first = self.first.map_or(elapsed, |first| (first - self.started).as_secs_f64());
        let tokens = self.usage["completion_tokens"].as_u64().unwrap_or(self.pieces as u64);
        let writing = elapsed - first;
        let rate = if writing > 0.0 { tokens.saturating_sub(1) as f64 / writing } else { 0.0 };
        let done = json!({
            "finish_reason": self.finish.take().unwrap_or_else(|| "stop".to_owned()),
            "usage": if self.usage.is_null() { json!({ "completion_tokens": tokens }) } else { self.usage.take() },
            "stats": { "elapsed_s": elapsed, "first_token_s": first, "first_draft_s": first, "tokens_per_s": rate },
            "seed": self.seed,
        });
        self.end(frame("done", &done));
    }

    fn fail(&mut self, message: &str) {
        self.end(frame("error", &unreachable(message).to_json()));
    }

    fn end(&mut self, last: String) {
        if !self.over {
            self.over = true;
            self.held.clear();
            self.ready.push_back(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn relayed(parts: &[&str]) -> String {
        let parts: Vec<Result<Bytes, String>> =
            parts.iter().map(|part| Ok(Bytes::copy_from_slice(part.as_bytes()))).collect();
        let mut relay = Relay {
            bytes: futures::stream::iter(parts).boxed(),
            held: Vec::new(),
            ready: VecDeque::new(),
            over: false,
            finish: None,
            usage: Value::Null,
            pieces: 0,
            first: None,
            started: Instant::now(),
            seed: Value::Null,
        };
        let mut said = String::new();
        loop {
            let (frame, over) = relay.next().await;
            said.push_str(&frame);
            if over {
                return said;
            }
        }
    }

    #[tokio::test]
    async fn chunks_become_commits_wherever_they_are_cut() {
        let text = "data: {\"choices\":[{\"delta\":{\"content\":\"Grüß\"}}]}\n\n: ping\n\n\
                    data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"},\"finish_reason\":\"length\"}]}\n\n\
                    data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\ndata: [DONE]\n\n";
        for cut in (1..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            let said = relayed(&[&text[..cut], &text[cut..]]).await;
            assert!(said.starts_with("event: commit\ndata: {\"text\":\"Grüß\""), "{said}");
            assert!(said.contains("\"reasoning\":\"hm\""), "{said}");
            assert!(said.contains("event: done") && said.contains("\"finish_reason\":\"length\""), "{said}");
            assert!(said.contains("\"completion_tokens\":7"), "{said}");
        }
    }

    #[tokio::test]
    async fn what_breaks_off_is_an_error() {
        for (text, wanted) in [
            ("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n", "before the reply was complete"),
            ("data: nonsense\n\n", "not JSON"),
            ("data: {\"error\":{\"message\":\"too busy\"}}\n\n", "too busy"),
            ("", "before the reply was complete"),
        ] {
            let said = relayed(&[text]).await;
            assert!(said.contains("event: error") && said.contains(wanted), "{said}");
        }
    }
}
