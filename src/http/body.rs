//! The JSON body of a request: its type, size, time and syntax.

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use futures::StreamExt;
use serde_json::{Map, Value};

use super::App;
use super::completions::off_thread;
use super::error::ApiError;
use super::fields::quoted;
use super::turn::{Place, Turn, Turns};

/// So many times the limit is read of bodies that are too large.
const DISCARDED: usize = 8;

/// Most values of a body: each takes far more memory than it has bytes.
const MOST_VALUES: usize = 1 << 20;

/// How deeply a body may be nested, itself included: the parser's limit.
const DEEPEST: usize = 127;

/// A body, and the place that it has if it is large.
pub(super) struct Whole {
    pub(super) bytes: Vec<u8>,
    place: Place,
}

/// Reads a body that must be JSON, within the configured size and time.
pub(super) async fn read(request: Request, app: &App) -> Result<Whole, ApiError> {
    let (limit, time) = (app.server.max_body, app.server.body_timeout);
    let (parts, body) = request.into_parts();
    check_type(&parts.headers)?;
    let declared = declared_length(&parts.headers);
    let waits = parts.headers.contains_key(header::EXPECT);
    let reading = async {
        if declared.is_some_and(|length| length > limit as u64) {
            if !waits {
                discard(body, DISCARDED * limit).await;
            }
            return Err(too_large(limit));
        }
        collect(body, limit, &app.turns).await
    };
    tokio::time::timeout(time, reading).await.map_err(|_elapsed| {
        ApiError::refused(
            StatusCode::REQUEST_TIMEOUT,
            format!("the request's body did not arrive within {} s", time.as_secs_f64()),
        )
        .header(header::CONNECTION, HeaderValue::from_static("close"))
    })?
}

/// Makes a body the JSON object that it must be. What is made of it is to be dropped before the turn.
pub(super) async fn json_object(whole: Whole, app: &App) -> Result<(Turn, Map<String, Value>), ApiError> {
    let Whole { bytes, place } = whole;
    let turn = app.turns.take(bytes.len()).await;
    drop(place);
    let map = if turn.is_large() { off_thread(move || parse(&bytes)).await? } else { parse(&bytes)? };
    Ok((turn, map))
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let unsupported = |message: String| Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return unsupported(format!(
            "Content-Encoding {} is not supported; send the body as it is",
            shown(encoding)
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
    unsupported(format!("Content-Type {} is not supported; send application/json", shown(found)))
}

fn shown(value: &HeaderValue) -> String {
    quoted(&String::from_utf8_lossy(value.as_bytes()))
}

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

async fn collect(body: Body, limit: usize, turns: &Turns) -> Result<Whole, ApiError> {
    let mut stream = body.into_data_stream();
    let (mut bytes, mut place) = (Vec::new(), Place::none());
    while let Some(chunk) = stream.next().await {
        let chunk: Bytes = chunk.map_err(|error| {
            ApiError::refused(StatusCode::BAD_REQUEST, format!("the request's body broke off: {error}"))
        })?;
        if bytes.len() + chunk.len() > limit {
            discard(Body::from_stream(stream), DISCARDED * limit).await;
            return Err(too_large(limit));
        }
        turns.hold(bytes.len() + chunk.len(), &mut place).await;
        bytes.extend_from_slice(&chunk);
    }
    Ok(Whole { bytes, place })
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

/// About how many values a JSON text holds; each but the first follows a comma or an opening bracket.
fn count_values(json: &[u8]) -> usize {
    let (mut values, mut in_string, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message: String| ApiError::refused(StatusCode::BAD_REQUEST, message);
    let values = count_values(bytes);
    if values > MOST_VALUES {
        return Err(bad(format!(
            "the request's body holds about {values} JSON values, expected at most {MOST_VALUES}"
        )));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(bad(format!(
            "the request's body must be a JSON object, found {}",
            super::fields::kind(&other)
        ))),
        // The parser has no other mark for it.
        Err(error) if error.to_string().starts_with("recursion limit exceeded") => Err(bad(format!(
            "the request's body is nested too deeply, expected at most {DEEPEST} levels: {error}"
        ))),
        Err(error) => Err(bad(format!("the request's body is not valid JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        for (json, values) in [("{}", 2), ("[1,2,3]", 4), (r#"{"a\",[{": [1,"x,y"]}"#, 4), ("\"[[\\\\\"", 1)]
        {
            assert_eq!(count_values(json.as_bytes()), values, "{json}");
        }
        let many = format!("{{\"prompt\": [{}1]}}", "1,".repeat(MOST_VALUES));
        assert!(parse(many.as_bytes()).is_err());
        let commas = format!("{{\"prompt\": \"{}\"}}", ",".repeat(2 * MOST_VALUES));
        assert!(parse(commas.as_bytes()).is_ok());
    }

    #[test]
    fn bodies_are_nested_to_a_limit_that_is_told() {
        let nested = |levels: usize| {
            let inner = levels - 1;
            parse(format!("{{\"a\": {}{}}}", "[".repeat(inner), "]".repeat(inner)).as_bytes())
        };
        assert!(nested(DEEPEST).is_ok());
        let error = nested(DEEPEST + 1).unwrap_err().to_json().to_string();
        assert!(error.contains("nested too deeply, expected at most 127 levels"), "{error}");
        assert!(parse(b"{").unwrap_err().to_json().to_string().contains("is not valid JSON"));
    }
}
