//! Calls from web pages of other origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;

/// Answers preflights, which carry no key, and marks other answers as readable for the page's origin.
pub(super) async fn allow(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).cloned();
    let preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = match origin {
        Some(_) if preflight => StatusCode::NO_CONTENT.into_response(),
        _ => next.run(request).await,
    };
    if let Some(origin) = origin {
        mark(response.headers_mut(), origin, &app.server.cors_origins, preflight.then_some(wanted));
    }
    response
}

/// Headers of answers that pages may read besides the usual ones.
const TOLD: &str = "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
                    x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, \
                    x-ratelimit-reset-tokens";

/// `preflight` holds the headers a preflight asked for.
fn mark(
    headers: &mut HeaderMap,
    origin: HeaderValue,
    allowed: &[String],
    preflight: Option<Option<HeaderValue>>,
) {
    if allowed.iter().any(|a| a == "*") {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    } else {
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        if !allowed.iter().any(|a| a.as_bytes() == origin.as_bytes()) {
            return;
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
    if preflight.is_none() {
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(TOLD));
    }
    if let Some(wanted) = preflight {
        let usual = HeaderValue::from_static("authorization, content-type");
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(usual));
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, HEAD, POST, OPTIONS"),
        );
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
}
