//! The JSON body of a request: its type, size, time and syntax.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use futures::StreamExt;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Reads a body that must be one JSON object of at most `limit` bytes, arriving within `time`.
pub(super) async fn json_object(
    request: Request,
    limit: usize,
    time: Duration,
) -> Result<Map<String, Value>, ApiError> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers)?;
    let declared = declared_length(&parts.headers);
    let waits = parts.headers.contains_key(header::EXPECT);
    let reading = async {
        if declared.is_some_and(|length| length > limit as u64) {
            if !waits {
                discard(body, 2 * limit).await;
            }
            return Err(too_large(limit));
        }
        collect(body, limit).await
    };
    let bytes = tokio::time::timeout(time, reading).await.map_err(|_elapsed| {
        ApiError::refused(
            StatusCode::REQUEST_TIMEOUT,
            format!("the request's body did not arrive within {} s", time.as_secs_f64()),
        )
        .header(header::CONNECTION, HeaderValue::from_static("close"))
    })??;
    parse(&bytes)
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let unsupported = |message: String| Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return unsupported(format!(
            "Content-Encoding {encoding:?} is not supported; send the body as it is"
        ));
    }
    let Some(found) = headers.get(header::CONTENT_TYPE) else {
        return unsupported("Content-Type is missing; send application/json".to_owned());
    };
    let essence = found.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    unsupported(format!("Content-Type {found:?} is not supported; send application/json"))
}

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn collect(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk: Bytes = chunk.map_err(|error| {
            ApiError::refused(StatusCode::BAD_REQUEST, format!("the request's body broke off: {error}"))
        })?;
        if bytes.len() + chunk.len() > limit {
            discard(Body::from_stream(stream), 2 * limit).await;
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Reads on for a while: a client that is still sending would otherwise see a reset connection, not the answer.
async fn discard(body: Body, most: usize) {
    let mut stream = body.into_data_stream();
    let mut seen = 0;
    while seen <= most
        && let Some(Ok(chunk)) = stream.next().await
    {
        seen += chunk.len();
    }
}

fn too_large(limit: usize) -> ApiError {
    ApiError::refused(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the request's body is larger than {limit} bytes (`server.max_body_kib`)"),
    )
    .header(header::CONNECTION, HeaderValue::from_static("close"))
}

fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message: String| ApiError::refused(StatusCode::BAD_REQUEST, message);
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(bad(format!(
            "the request's body must be a JSON object, found {}",
            super::fields::kind(&other)
        ))),
        Err(error) => Err(bad(format!("the request's body is not valid JSON: {error}"))),
    }
}
