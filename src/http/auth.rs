//! The API key.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use super::error::ApiError;
use super::{App, studio};
use crate::config::Secret;

/// What probes may ask without a key; so may browsers for the pages of the studio, which hold nothing of the model.
const OPEN: [&str; 2] = ["/health", "/ready"];

/// Lets a request pass that brings a key, if keys are configured.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let keys = &app.server.api_keys;
    let path = request.uri().path();
    if keys.is_empty() || OPEN.contains(&path) || studio::is_page(path) {
        return next.run(request).await;
    }
    let message = match bearer(request.headers()) {
        Some(key) if known(key, keys) => return next.run(request).await,
        Some(_) => "the API key is wrong",
        None => "an API key is needed: send it as `Authorization: Bearer <key>`",
    };
    ApiError::refused(StatusCode::UNAUTHORIZED, message)
        .code("invalid_api_key")
        .header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
        .into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Compares digests byte by byte without stopping early, so that the time tells nothing about the keys.
fn known(candidate: &str, keys: &[Secret]) -> bool {
    let candidate = Sha256::digest(candidate.as_bytes());
    keys.iter().fold(false, |found, key| {
        let key = Sha256::digest(key.expose().as_bytes());
        let difference = candidate.iter().zip(&key).fold(0, |sum, (a, b)| sum | (a ^ b));
        found | (std::hint::black_box(difference) == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_of_the_keys_is_known_and_nothing_else() {
        let keys = [Secret::new("one"), Secret::new("two")];
        assert!(known("one", &keys) && known("two", &keys));
        for wrong in ["", "on", "one ", "ONE", "onetwo"] {
            assert!(!known(wrong, &keys), "{wrong}");
        }
    }
}
