//! Which handler answers what.

use axum::Router;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use tower_http::compression::CompressionLayer;

use super::error::ApiError;
use super::fields::quoted;
use super::{
    Face, anthropic, auth, chat, completions, cors, edit, exchange, health, metrics, models, responses,
    studio, tokens,
};

/// All routes of the public face.
pub fn router(face: impl Into<Face>) -> Router {
    let face = face.into();
    Router::new()
        .route("/v1/chat/completions", posts(generates(post(chat::complete))))
        .route("/v1/completions", posts(generates(post(completions::complete))))
        .route("/v1/responses", posts(generates(post(responses::respond))))
        .route("/v1/messages", posts(generates(post(anthropic::messages))))
        .route("/v1/messages/count_tokens", posts(post(anthropic::count_tokens)))
        .route("/tokenize", posts(post(tokens::tokenize)))
        .route("/detokenize", posts(post(tokens::detokenize)))
        .route("/v1/models", gets(get(models::list)))
        // Names of models may contain slashes.
        .route("/v1/models/{*name}", gets(get(models::one)))
        .route("/health", gets(get(health::health)))
        .route("/ready", gets(get(health::ready)))
        .route("/metrics", gets(get(metrics::show)))
        .route("/edit", both(generates(post(edit::edit)).get(studio::editor)))
        .merge(studio::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(CompressionLayer::new())
        .layer(from_fn_with_state(face.clone(), auth::check))
        .layer(from_fn(anthropic::dress))
        .layer(from_fn_with_state(face.clone(), cors::allow))
        .layer(from_fn(exchange::follow))
        .with_state(face)
}

pub(super) fn posts(route: MethodRouter<Face>) -> MethodRouter<Face> {
    route.options(|| async { options("OPTIONS, POST") })
}

/// A route whose requests count, and are limited, as requests to generate; others are free.
pub(super) fn generates(route: MethodRouter<Face>) -> MethodRouter<Face> {
    route.route_layer(from_fn(auth::spend))
}

pub(super) fn gets(route: MethodRouter<Face>) -> MethodRouter<Face> {
    route.options(|| async { options("GET, HEAD, OPTIONS") })
}

fn both(route: MethodRouter<Face>) -> MethodRouter<Face> {
    route.options(|| async { options("GET, HEAD, OPTIONS, POST") })
}

/// What `OPTIONS` gets when it is not a browser's preflight.
fn options(allow: &'static str) -> Response {
    (StatusCode::NO_CONTENT, [(header::ALLOW, HeaderValue::from_static(allow))]).into_response()
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    // CONNECT names a host and no path.
    let whole = uri.to_string();
    let path = if uri.path().is_empty() { &whole } else { uri.path() };
    let message =
        format!("there is no {} {} here; the API is under /v1", quoted(method.as_str()), quoted(path));
    ApiError::refused(StatusCode::NOT_FOUND, message).code("unknown_url")
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!(
        "{} is not allowed on {}; the Allow header says what is",
        quoted(method.as_str()),
        uri.path()
    );
    ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, message).code("method_not_allowed")
}
