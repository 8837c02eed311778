//! `POST /v1/messages` and `POST /v1/messages/count_tokens`, as Anthropic's clients know them.

mod answer;
mod blocks;
mod errors;
mod request;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::Face;
use super::chat::prepare;
use super::completions::{for_our_model, model};
use super::door::Inside;
use super::error::ApiError;
use super::telling;
use answer::Message;

pub(super) use errors::dress;

pub(super) async fn messages(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let Inside { app, turn, fields, pass: _pass } = for_our_model(request, &face).await?;
    if fields.peek("max_tokens").is_none() {
        let message = "`max_tokens` is missing; expected the most tokens to generate";
        return Err(ApiError::field("max_tokens", message));
    }
    let (fields, places) = request::translate(fields, &app)?;
    let name = app.name.clone();
    let told = telling::answer(&app, turn, fields, "msg_", |begun| Message::new(begun, name)).await;
    told.map_err(|error| request::in_our_words(error, &places))
}

pub(super) async fn count_tokens(
    State(face): State<Face>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let Inside { app, turn, fields, pass: _pass } = for_our_model(request, &face).await?;
    // Who only counts is not counted among the requests.
    model(&app)?;
    let (fields, places) = request::translate(fields, &app)?;
    let prepared = prepare(&app, turn, fields).await;
    let prepared = prepared.map_err(|error| request::in_our_words(error, &places))?;
    Ok(Json(json!({ "input_tokens": prepared.prompt.len() })))
}
