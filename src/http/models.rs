//! `GET /v1/models` and `/v1/models/{id}`

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::App;
use super::completions::model_not_found;
use super::error::ApiError;

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.aliases.iter().filter(|alias| *alias != "*" && **alias != app.name);
    let data: Vec<Value> = std::iter::once(&app.name).chain(names).map(|name| describe(&app, name)).collect();
    Json(json!({ "object": "list", "data": data }))
}

pub(super) async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| {
        let message = format!("the model's name in the path cannot be read: {}", error.body_text());
        ApiError::refused(StatusCode::BAD_REQUEST, message).param("model")
    })?;
    if app.serves(&name) { Ok(Json(describe(&app, &name))) } else { Err(model_not_found(&app, &name)) }
}

fn describe(app: &App, name: &str) -> Value {
    let model = app.engine.model();
    json!({
        "id": name,
        "object": "model",
        "created": app.started,
        "owned_by": "axe",
        // Unknown until the model is loaded.
        "context_length": model.as_ref().map(|model| model.context_length),
        "kind": model.as_ref().map(|model| model.kind.name()),
    })
}
