//! `GET /health` and `/ready`

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use crate::engine;

/// The process lives.
pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Requests are taken; 503 with the state otherwise.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let status = app.engine.status();
    let mut body = json!({ "status": status.state.name(), "model": app.name });
    match status.state {
        engine::State::Ready => return Json(body).into_response(),
        engine::State::Loading { progress, what } => {
            body["progress"] = progress.into();
            body["what"] = what.into();
        }
        engine::State::Failed { error } | engine::State::Hung { error } => body["error"] = error.into(),
        engine::State::Draining | engine::State::Stopped => {}
    }
    let retry = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
    (StatusCode::SERVICE_UNAVAILABLE, retry, Json(body)).into_response()
}
