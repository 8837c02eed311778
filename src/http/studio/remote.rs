//! The studio's second backend: any server that speaks OpenAI's API. Its stream becomes the studio's events; it has no
//! drafts, so each piece of text is a commit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{StatusCode, header};
use axum::response::Response;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use serde_json::{Map, Value, json};

use super::chat::frame;
use crate::config::RemoteConfig;
use crate::http::App;
use crate::http::completions::log_rest;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, quoted};
use crate::http::generation::Asked;
use crate::http::messages;
use crate::http::reply::Dialect;
use crate::http::sse::{Frames, respond_with};

/// Most time to reach the server.
const CONNECT: Duration = Duration::from_secs(10);

/// A server that says nothing for so long has failed; before its first token it may read a long prompt.
const SILENCE: Duration = Duration::from_secs(120);

/// No line of an event stream is longer.
const LONGEST_LINE: usize = 1 << 20;

/// So many bytes of an error's body are read.
const ERROR_BODY: usize = 64 << 10;

/// So many characters of an error's text are passed on.
const ERROR_TEXT: usize = 500;

/// What OpenAI's API knows of the ways to generate; passed on as it came, once it is known to be well-formed.
const PASSED_ON: [&str; 8] = [
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
];

/// What our own models know and that API does not.
const OURS: [&str; 12] = [
    "top_k",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "ignore_eos",
    "steps",
    "max_denoising_steps",
    "entropy_bound",
    "confidence_threshold",
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
];

/// A server to pass requests on to.
pub(in crate::http) struct Remote {
    config: RemoteConfig,
    /// Or what was wrong when it was made, with the certificates for one. The daemon serves its own model all the same.
    client: Result<reqwest::Client, String>,
}

impl Remote {
    pub(in crate::http) fn new(config: RemoteConfig) -> Self {
        Self { config, client: client(SILENCE) }
    }

    pub(super) fn model(&self) -> &str {
        &self.config.model
    }

    /// Passes a request on and answers with the studio's events.
    pub(super) async fn answer(&self, fields: Fields, app: &App) -> Result<Response, ApiError> {
        let body = self.body(fields, app)?;
        let seed = body.get("seed").cloned().unwrap_or_default();
        let started = Instant::now();
        let response = self.ask(&body).await?;
        let bytes = response.bytes_stream().map_err(told).boxed();
        Ok(respond_with(Relay::new(bytes, started, seed), app.server.ping_interval))
    }

    /// The request to send for the one that came, whose fields are checked as for our own model.
    fn body(&self, mut fields: Fields, app: &App) -> Result<Map<String, Value>, ApiError> {
        if let Some(name) = fields.string("model")?.filter(|name| name != self.model()) {
            let message = format!(
                "the model {} does not exist here; this backend has {:?}",
                quoted(&name),
                self.model()
            );
            let error = ApiError::refused(StatusCode::NOT_FOUND, message);
            return Err(error.param("model").code("model_not_found"));
        }
        let messages = messages::read(fields.take("messages"), app.server.max_messages)?;
        fields.refuse("thinking", "this backend cannot be told whether to think", |v| {
            *v == Value::Bool(false)
        })?;
        for name in OURS {
            let asks_nothing =
                |v: &Value| *v == Value::Bool(false) || v.as_object().is_some_and(Map::is_empty);
            fields.refuse(name, "this backend's API has no such field", asks_nothing)?;
        }
        for name in ["logit_bias", "response_format", "grammar", "json_schema"] {
            let asks_nothing = |v: &Value| {
                v.as_str() == Some("") || v.get("type").map_or(v == &json!({}), |kind| kind == "text")
            };
            fields.refuse(name, "this backend is not asked for it", asks_nothing)?;
        }
        let mut body = Map::new();
        body.insert("model".to_owned(), self.model().into());
        body.insert("messages".to_owned(), messages::in_the_apis_shape(messages));
        let mut given = fields.clone();
        Asked::read(&mut fields, app, Dialect::Chat)?;
        log_rest(&fields);
        let given = PASSED_ON.iter().filter_map(|name| Some(((*name).to_owned(), given.take(name)?)));
        body.extend(given);
        body.insert("stream".to_owned(), true.into());
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
        Ok(body)
    }

    /// The other server's answer, once it is a success.
    async fn ask(&self, body: &Map<String, Value>) -> Result<reqwest::Response, ApiError> {
        let client = self.client.as_ref().map_err(|error| {
            failed(&format!("`studio.remote_url` cannot be asked: no HTTP client could be made: {error}"))
        })?;
        let mut request = client.post(format!("{}/chat/completions", self.config.url.expose())).json(body);
        if let Some(key) = &self.config.key {
            request = request.bearer_auth(key.expose());
        }
        let response = request.send().await.map_err(|error| {
            let what = match (error.is_connect(), error.is_timeout()) {
                (true, _) => "cannot be reached",
                (false, true) => "was reached and did not answer in time",
                (false, false) => "was reached and did not answer",
            };
            failed(&format!("`studio.remote_url` {what}: {}", told(error)))
        })?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }
}

fn client(silence: Duration) -> Result<reqwest::Client, String> {
    reqwest::Client::builder().connect_timeout(CONNECT).read_timeout(silence).build().map_err(told)
}

/// An error with its causes, without the address, which is the operator's.
fn told(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn failed(message: &str) -> ApiError {
    ApiError::bad_gateway(message).code("remote_failed")
}

/// What the other server said no with. What it blames on the request keeps its status, the rest is 502.
async fn refusal(response: reqwest::Response) -> ApiError {
    let status = response.status();
    let wait = response.headers().get(header::RETRY_AFTER).cloned();
    let text = beginning(response).await;
    let told = serde_json::from_str::<Value>(&text)
        .ok()
        .and_then(|body| Some(body["error"]["message"].as_str()?.to_owned()))
        .unwrap_or(text);
    let told: String = told.chars().take(ERROR_TEXT).collect();
    let message = format!("the server at `studio.remote_url` answered {status}: {told}");
    let error = match status {
        StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY => {
            ApiError::refused(status, message).code("remote_failed")
        }
        StatusCode::TOO_MANY_REQUESTS => ApiError::too_many(message).code("remote_failed"),
        _ => failed(&message),
    };
    match wait {
        Some(wait) => error.header(header::RETRY_AFTER, wait),
        None => error,
    }
}

/// The beginning of a body; the rest is not read.
async fn beginning(mut response: reqwest::Response) -> String {
    let mut bytes = Vec::new();
    while bytes.len() < ERROR_BODY
        && let Ok(Some(more)) = response.chunk().await
    {
        bytes.extend_from_slice(&more);
    }
    bytes.truncate(ERROR_BODY);
    String::from_utf8_lossy(&bytes).into_owned()
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
    fn new(bytes: BoxStream<'static, Result<Bytes, String>>, started: Instant, seed: Value) -> Self {
        Self {
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
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let mut held = std::mem::take(&mut self.held);
        // What was held already has no end of a line.
        let (mut begin, mut from) = (0, held.len());
        held.extend_from_slice(bytes);
        while !self.over
            && let Some(length) = held[from..].iter().position(|byte| *byte == b'\n')
        {
            self.line(&String::from_utf8_lossy(&held[begin..from + length]));
            begin = from + length + 1;
            from = begin;
        }
        if self.over {
            return;
        }
        held.drain(..begin);
        self.held = held;
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
            "stats": { "elapsed_s": elapsed, "first_token_s": first, "tokens_per_s": rate },
            "seed": self.seed,
        });
        self.end(frame("done", &done));
    }

    fn fail(&mut self, message: &str) {
        self.end(frame("error", &failed(message).to_json()));
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
    use crate::config::Secret;

    async fn relayed(parts: &[&str]) -> String {
        let parts: Vec<Result<Bytes, String>> =
            parts.iter().map(|part| Ok(Bytes::copy_from_slice(part.as_bytes()))).collect();
        let bytes = futures::stream::iter(parts).boxed();
        let mut relay = Relay::new(bytes, Instant::now(), Value::Null);
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
    fn remote(url: String, client: Result<reqwest::Client, String>) -> Remote {
        Remote { config: RemoteConfig { url: Secret::new(url), model: "m".to_owned(), key: None }, client }
    }

    #[tokio::test]
    async fn without_a_client_requests_say_why() {
        let remote = remote("http://127.0.0.1:9".to_owned(), Err("no certificates".to_owned()));
        let error = remote.ask(&Map::new()).await.unwrap_err().to_json().to_string();
        assert!(error.contains("no certificates") && error.contains("remote_failed"), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_says_nothing_is_given_up() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap());
        // Nobody accepts; the system does, and takes the request.
        let remote = remote(url, client(Duration::from_millis(50)));
        let asked = tokio::time::timeout(Duration::from_secs(20), remote.ask(&Map::new())).await;
        let error = asked.expect("it waits for ever").unwrap_err().to_json().to_string();
        assert!(error.contains("timed out") && error.contains("did not answer in time"), "{error}");
        drop(silent);
        let error = remote.ask(&Map::new()).await.unwrap_err().to_json().to_string();
        assert!(error.contains("cannot be reached"), "{error}");
    }
}
