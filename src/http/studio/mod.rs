//! The studio: pages in the browser that show an answer, or an edit, as it is drafted and revised.
//!
//! | route | what |
//! | --- | --- |
//! | `GET /` | the chat page |
//! | `GET /edit` | the editor's page, whose API is `POST /edit` |
//! | `GET /studio/{file}` | its modules, style and icon, all part of the program |
//! | `GET /studio/backends` | the models it can talk to, and what each can do |
//! | `POST /chat` | one answer as server-sent events: `prefill`, `draft`, `commit`, then `done` or `error` |
//!
//! Pages are open to all; what costs the model's time needs the API key as everywhere.

mod assets;
mod backends;
mod chat;
mod pieces;
mod remote;

use axum::Router;
use axum::routing::{get, post};

use super::Face;
use super::router::{generates, gets, posts};

pub(super) use assets::{editor, is_page};
pub(super) use chat::{MAX_STEPS, draft, frame, prefill, seed_for_browsers, steps};
pub(super) use remote::Remote;

/// Routes of the studio.
pub(super) fn routes() -> Router<Face> {
    Router::new()
        .route("/", gets(get(assets::page)))
        .route("/studio/backends", gets(get(backends::list)))
        .route("/studio/{file}", gets(get(assets::file)))
        .route("/chat", posts(generates(post(chat::answer))))
}
