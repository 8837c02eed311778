//! One request and its answer: the number both go by, and the line that the log gets.

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

use super::error::ApiError;
use super::{hex, random};

/// Tells the client the request's identifier; OpenAI's clients show it.
pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

tokio::task_local! {
    /// The number of the request that the task serves.
    static NUMBER: String;
}

/// The number that identifiers of the request at hand end with, so that each of them finds all its lines in the log.
pub(super) fn number() -> Result<String, ApiError> {
    NUMBER.try_with(String::clone).or_else(|_outside| fresh())
}

/// The identifier of what is made for the request at hand: its number behind a word and a sign, e.g. `cmpl-`.
pub(super) fn named(prefix: &str) -> Result<String, ApiError> {
    Ok(format!("{prefix}{}", number()?))
}

/// What a client gets to know of a number.
pub(super) fn id(number: &str) -> String {
    format!("req-{number}")
}

fn fresh() -> Result<String, ApiError> {
    Ok(hex(&random::<12>()?))
}

/// Gives the request its number. One line for each request that was answered or begun to be; headers and bodies are not
/// logged: they hold keys and what people write.
pub(super) async fn follow(request: Request, next: Next) -> Response {
    // Without random numbers there are no completions either, which tell it.
    let Ok(number) = fresh() else { return next.run(request).await };
    let started = std::time::Instant::now();
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = route.unwrap_or_else(|| request.uri().path().to_owned());
    let id = id(&number);
    let span = tracing::info_span!("http", request = id, key = tracing::field::Empty);
    let answered = NUMBER.scope(number, next.run(request));
    async {
        let mut response = answered.await;
        let status = response.status().as_u16();
        tracing::debug!(%method, path, status, elapsed_s = started.elapsed().as_secs_f64(), "answered");
        if let Ok(id) = HeaderValue::from_str(&id) {
            response.headers_mut().insert(X_REQUEST_ID, id);
        }
        response
    }
    .instrument(span)
    .await
}
