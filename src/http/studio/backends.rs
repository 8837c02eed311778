//! `GET /studio/backends`: what the page can talk to.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::engine::ModelKind;
use crate::http::App;
use crate::http::completions::model;
use crate::http::error::ApiError;
use crate::text::ChatTemplate;

/// The backend that is this daemon's own model.
pub(super) const LOCAL: &str = "local";

/// The other server.
pub(super) const REMOTE: &str = "remote";

/// Tokens of an answer when the reader has not said otherwise.
const USUAL_TOKENS: usize = 1024;

pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let mut backends = vec![local(&app)?];
    backends.extend(app.remote.as_ref().map(|remote| {
        json!({
            "id": REMOTE,
            "name": remote.model(),
            "kind": "remote",
            "chat": true,
            "thinking": false,
            "defaults": { "max_tokens": USUAL_TOKENS, "temperature": 0.7 },
            "about": format!("{} on another server: finished text only, no drafts.", remote.model()),
        })
    }));
    Ok(Json(json!({ "backends": backends })))
}

fn local(app: &App) -> Result<Value, ApiError> {
    let model = model(app)?;
    let mut defaults = json!({
        "max_tokens": app.server.default_max_tokens.unwrap_or(USUAL_TOKENS).min(model.context_length),
        "temperature": app.sampling.temperature,
    });
    let (kind, ways) = match model.kind {
        ModelKind::Causal => ("causal", "tokens one after the other".to_owned()),
        ModelKind::BlockDiffusion { canvas, max_steps } => {
            defaults["temperature"] = 1.0.into();
            defaults["steps"] = max_steps.into();
            ("diffusion", format!("canvases of {canvas} tokens"))
        }
    };
    let about = format!("{} on {}: {ways}, context {}.", model.name, model.device, model.context_length);
    Ok(json!({
        "id": LOCAL,
        "name": model.name,
        "kind": kind,
        "device": model.device,
        "context_length": model.context_length,
        "chat": model.template.is_some(),
        "thinking": model.template.as_ref().is_some_and(ChatTemplate::knows_thinking),
        "defaults": defaults,
        "about": about,
    }))
}
