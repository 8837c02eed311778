//! Requests that need the model wait at the engine's door while a reload changes it. They come there known, routed and
//! whole: who is slow keeps nobody, and who has no key takes nobody's place. Behind the door a request sees one
//! configuration and the one model that belongs to it.

use std::sync::Arc;

use super::error::ApiError;
use super::fields::Fields;
use super::turn::Turn;
use super::{App, Face};
use crate::engine::Pass;

/// A request behind the door.
pub(super) struct Inside {
    /// What it is read by.
    pub(super) app: Arc<App>,
    pub(super) turn: Turn,
    pub(super) fields: Fields,
    /// Holds the model in place; to be kept until the prompt is in the queue.
    pub(super) pass: Pass,
}

/// Lets a request in: the configuration that is in force then, and what holds the model in place.
pub(super) async fn enter(face: &Face) -> Result<(Arc<App>, Pass), ApiError> {
    let app = face.now();
    let entered = match app.server.request_timeout {
        Some(most) => tokio::time::timeout(most, app.engine.enter()).await,
        None => Ok(app.engine.enter().await),
    };
    match entered {
        // Looked up behind the door: configuration and model change together, while nobody is inside.
        Ok(Ok(pass)) => Ok((face.now(), pass)),
        Ok(Err(error)) => Err(error.into()),
        Err(_elapsed) => {
            let message =
                "the time for a request (`server.request_timeout_s`) was over before the model was changed";
            Err(ApiError::timeout(message).code("request_timeout"))
        }
    }
}
