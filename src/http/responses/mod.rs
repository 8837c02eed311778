//! `POST /v1/responses`: OpenAI's newer API over the same core. Nothing is kept between requests.

mod answer;
mod items;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::App;
use super::completions::for_our_model;
use super::error::ApiError;
use super::telling;
use answer::Reply;
use request::Translated;

pub(super) async fn respond(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (turn, fields) = for_our_model(request, &app).await?;
    let Translated { fields, places, repeated } = request::translate(fields)?;
    let name = app.name.clone();
    let told = telling::answer(&app, turn, fields, "resp", |begun| Reply::new(begun, name, repeated)).await;
    told.map_err(|error| request::in_our_words(error, &places))
}
