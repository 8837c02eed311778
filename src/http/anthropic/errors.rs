//! Errors in the shape that Anthropic's clients know.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::http::error::ApiError;

/// Where errors have this shape.
const ROOT: &str = "/v1/messages";

/// What is said of the body that is replaced.
const OF_BODY: [HeaderName; 4] =
    [header::CONTENT_LENGTH, header::CONTENT_TYPE, header::CONTENT_ENCODING, header::TRANSFER_ENCODING];

/// Gives errors of these routes their shape, whoever has made them.
pub(in crate::http) async fn dress(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let ours = path.strip_prefix(ROOT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let response = next.run(request).await;
    match response.extensions().get::<ApiError>() {
        Some(error) if ours => {
            let status = response.status();
            let mut dressed = (status, Json(shape(status, error))).into_response();
            for (name, value) in response.headers() {
                if !OF_BODY.contains(name) {
                    dressed.headers_mut().append(name, value.clone());
                }
            }
            dressed
        }
        _ => response,
    }
}

/// An error as a body, or as the data of an event.
pub(super) fn shape(status: StatusCode, error: &ApiError) -> Value {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.message() } })
}
