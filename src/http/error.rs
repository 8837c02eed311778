//! Refusals and failures in the shape that OpenAI's clients know.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::SubmitError;
use crate::text::TextError;

/// Code of a refusal of what the API has and this server has not.
pub(super) const UNSUPPORTED: &str = "unsupported_parameter";

/// An answer other than success. Boxed, since it travels through every `Result` of this room.
#[derive(Debug, Clone)]
pub(super) struct ApiError(Box<Refusal>);

#[derive(Debug, Clone)]
struct Refusal {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    /// More members of the error object.
    facts: Vec<(&'static str, Value)>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Refusal {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            facts: Vec::new(),
            headers: Vec::new(),
        }))
    }

    /// The request itself is wrong.
    pub(super) fn refused(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// 400 about one field of the body.
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::refused(StatusCode::BAD_REQUEST, message);
        error.0.param = Some(param.into());
        error
    }

    /// 400 for a field that exists in the API but not here.
    pub(super) fn unsupported(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let message = format!("`{param}`: {why}");
        Self::field(param, message).code(UNSUPPORTED)
    }

    /// 500: it is our fault.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 429: more than is served at once.
    pub(super) fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    /// 503: not now.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// 502: another server that was asked failed.
    pub(super) fn bad_gateway(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", message)
    }

    /// 504: it took too long.
    pub(super) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message)
    }

    pub(super) fn code(mut self, code: &'static str) -> Self {
        self.0.code = Some(code);
        self
    }

    pub(super) fn param(mut self, param: impl Into<String>) -> Self {
        self.0.param = Some(param.into());
        self
    }

    /// The same about a field that the client knows by another name.
    pub(super) fn renamed(mut self, name: &str, told: &str) -> Self {
        if self.0.param.as_deref() == Some(name) {
            self.0.message = self.0.message.replace(&format!("`{name}`"), &format!("`{told}`"));
            self.0.param = Some(told.to_owned());
        }
        self
    }

    /// The same about a field inside of the object `field`.
    pub(super) fn within(mut self, field: &str) -> Self {
        self.0.message = self.0.message.replacen('`', &format!("`{field}."), 1);
        self.0.param = self.0.param.map(|param| format!("{field}.{param}"));
        self
    }

    /// The same about a list that was made of other parts of the request: where each of its elements comes from.
    pub(super) fn placed(mut self, list: &str, places: &[String]) -> Self {
        let moved = self.0.param.as_deref().and_then(|param| {
            let (index, rest) = param.strip_prefix(list)?.strip_prefix('[')?.split_once(']')?;
            let place = places.get(index.parse::<usize>().ok()?)?;
            Some((param.to_owned(), format!("{place}{rest}")))
        });
        if let Some((param, told)) = moved {
            self.0.message = self.0.message.replace(&format!("`{param}`"), &format!("`{told}`"));
            self.0.param = Some(told);
        }
        self
    }

    /// The same about a request that was brought into other words: parts of the text, and what they are told as. A name
    /// between quotes is a whole one, a name behind a quote or a dot the beginning or the middle of longer ones.
    pub(super) fn reworded(mut self, names: &[(&str, &str)]) -> Self {
        for (name, told) in names {
            self.0.message = self.0.message.replace(name, told);
            self.0.param = self.0.param.map(|param| {
                // Quotes stand around names in messages only.
                let quoted = format!("`{param}`");
                match name.starts_with(['`', '.']) {
                    true => quoted.replace(name, told).trim_matches('`').to_owned(),
                    false => param,
                }
            });
        }
        self
    }

    /// Whether it has this code.
    pub(super) fn is(&self, code: &str) -> bool {
        self.0.code == Some(code)
    }

    /// What is wrong.
    pub(super) fn message(&self) -> &str {
        &self.0.message
    }

    /// The status that it is answered with.
    pub(super) fn status(&self) -> StatusCode {
        self.0.status
    }

    pub(super) fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.0.headers.push((name, value));
        self
    }

    pub(super) fn retry_after(self, time: Duration) -> Self {
        self.header(header::RETRY_AFTER, HeaderValue::from(time.as_secs().max(1)))
    }

    fn fact(mut self, name: &'static str, value: usize) -> Self {
        self.0.facts.push((name, value.into()));
        self
    }

    /// `{"error": {…}}`
    pub(super) fn to_json(&self) -> Value {
        let mut error = json!({
            "message": self.0.message,
            "type": self.0.kind,
            "param": self.0.param,
            "code": self.0.code,
        });
        for (name, value) in &self.0.facts {
            error[*name] = value.clone();
        }
        json!({ "error": error })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.0.status, Json(self.to_json())).into_response();
        response.headers_mut().extend(self.0.headers.iter().cloned());
        // For faces that tell errors in another shape.
        response.extensions_mut().insert(self);
        response
    }
}

/// How long to wait for a model that loads: loading takes seconds, and asking is cheap.
const LOADING_RETRY: Duration = Duration::from_secs(1);

/// How long to wait for an engine that is rebuilt after a fault and has not come back soon.
pub(super) const OUTAGE_RETRY: Duration = Duration::from_secs(10);

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { retry_after, .. } => {
                Self::too_many(message).code("queue_full").retry_after(retry_after)
            }
            SubmitError::NotReady { .. } => {
                Self::unavailable(message).code("model_loading").retry_after(LOADING_RETRY)
            }
            SubmitError::Outage { .. } => {
                Self::unavailable(message).code("engine_rebuilding").retry_after(OUTAGE_RETRY)
            }
            SubmitError::Draining => Self::unavailable(message).code("shutting_down"),
            SubmitError::Failed { .. } => Self::unavailable(message).code("engine_failed"),
            SubmitError::EmptyPrompt => Self::refused(StatusCode::BAD_REQUEST, message),
            SubmitError::ContextTooLong { n_prompt_tokens, n_ctx } => {
                Self::refused(StatusCode::BAD_REQUEST, message)
                    .code("context_length_exceeded")
                    .fact("n_prompt_tokens", n_prompt_tokens)
                    .fact("n_ctx", n_ctx)
            }
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        // The vocabulary was accepted at load, so what is left concerns the messages and the model's template, which may
        // repeat what the messages say.
        const MOST: usize = 1000;
        let mut message = error.to_string();
        if let Some((end, _)) = message.char_indices().nth(MOST) {
            message.truncate(end);
            message.push('…');
        }
        match &error {
            TextError::ReservedVariable { key } => {
                Self::field(format!("chat_template_kwargs.{key}"), message)
            }
            _ => Self::field("messages", message),
        }
    }
}
