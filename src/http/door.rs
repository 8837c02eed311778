//! Requests that bring work wait at the engine's door while a reload changes the model: first unread, so that they see
//! one configuration and one model, then once more with their body, from where on the model stays until they are queued.

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Request, State};
use axum::http::{Extensions, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::App;
use super::error::ApiError;
use crate::engine::Pass;

/// Where a request keeps its pass.
#[derive(Clone, Default)]
struct Pocket(Arc<Mutex<Option<Pass>>>);

/// Lets a request in, and takes back its pass when its answer begins.
pub(super) async fn keep(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let entered = match app.server.request_timeout {
        Some(most) => tokio::time::timeout(most, app.engine.enter()).await,
        None => Ok(app.engine.enter().await),
    };
    match entered {
        // Whoever has not sent its body yet is not waited for.
        Ok(Ok(pass)) => drop(pass),
        Ok(Err(error)) => return ApiError::from(error).into_response(),
        Err(_elapsed) => {
            let message =
                "the time for a request (`server.request_timeout_s`) was over before the model was changed";
            return ApiError::timeout(message).code("request_timeout").into_response();
        }
    }
    let pocket = Pocket::default();
    request.extensions_mut().insert(pocket.clone());
    let response = next.run(request).await;
    drop(pocket.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    response
}

/// Holds the model in place for the request with these extensions.
pub(super) async fn enter(extensions: &Extensions, app: &App) -> Result<(), ApiError> {
    if let Some(Pocket(pass)) = extensions.get() {
        let entered = app.engine.enter().await?;
        *pass.lock().unwrap_or_else(PoisonError::into_inner) = Some(entered);
    }
    Ok(())
}
