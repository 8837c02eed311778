//! `POST /v1/responses`: OpenAI's newer API over the same core. Nothing is kept between requests.

mod answer;
mod items;
mod request;

use axum::extract::{Request, State};
use axum::response::Response;

use super::Face;
use super::completions::for_our_model;
use super::door::Inside;
use super::error::ApiError;
use super::telling;
use answer::Reply;
use request::Translated;

pub(super) async fn respond(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let Inside { app, turn, fields, pass: _pass } = for_our_model(request, &face).await?;
    let Translated { fields, places, repeated } = request::translate(fields)?;
    let name = app.name.clone();
    let told = telling::answer(&app, turn, fields, "resp_", |begun| Reply::new(begun, name, repeated)).await;
    told.map_err(|error| request::in_our_words(error, &places))
}
