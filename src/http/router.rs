//! Which handler answers what.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use tower_http::compression::CompressionLayer;

use super::error::ApiError;
use super::fields::quoted;
use super::{App, auth, chat, completions, cors, exchange, health, metrics, models, studio, tokens};

/// All routes of the public face.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", posts(post(chat::complete)))
        .route("/v1/completions", posts(post(completions::complete)))
        .route("/tokenize", posts(post(tokens::tokenize)))
        .route("/detokenize", posts(post(tokens::detokenize)))
        .route("/v1/models", gets(get(models::list)))
        // Names of models may contain slashes.
        .route("/v1/models/{*name}", gets(get(models::one)))
        .route("/health", gets(get(health::health)))
        .route("/ready", gets(get(health::ready)))
        .route("/metrics", gets(get(metrics::show)))
        .merge(studio::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(CompressionLayer::new())
        .layer(from_fn_with_state(Arc::clone(&app), auth::check))
        .layer(from_fn_with_state(Arc::clone(&app), cors::allow))
        .layer(from_fn(exchange::follow))
        .with_state(app)
}

pub(super) fn posts(route: MethodRouter<Arc<App>>) -> MethodRouter<Arc<App>> {
    route.options(|| async { options("OPTIONS, POST") })
}

pub(super) fn gets(route: MethodRouter<Arc<App>>) -> MethodRouter<Arc<App>> {
    route.options(|| async { options("GET, HEAD, OPTIONS") })
}

/// What `OPTIONS` gets when it is not a browser's preflight.
fn options(allow: &'static str) -> Response {
    (StatusCode::NO_CONTENT, [(header::ALLOW, HeaderValue::from_static(allow))]).into_response()
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    let message =
        format!("there is no {} {} here; the API is under /v1", quoted(method.as_str()), quoted(uri.path()));
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
