//! What is answered to whom has been let in.

use std::{sync::Arc, time::Duration};

use axectl::protocol::{Bench, CancelResult, ErrorBody, ErrorDetail, Gpu, Level, LogLevel, LogLine, Reload};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Request, State, rejection::PathRejection},
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use tokio::time::{sleep, timeout};

use super::hangup::Hangup;
use super::logs::Wanted;
use super::server::Admin;

/// Bytes the body of a request may have.
const LARGEST_BODY: usize = 16 << 10;
/// Time a client has to send it.
const BODY: Duration = Duration::from_secs(5);
/// Lines `GET /logs` returns unless asked otherwise.
const LINES: usize = 100;
/// A follower that has gone is noticed by writing to it, at the latest after this time.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Time between the two samples that rates need.
const SAMPLE: Duration = Duration::from_millis(200);

type Shared = State<Arc<Admin>>;

/// An answer that is not 200.
pub(super) type Failure = (StatusCode, Json<ErrorBody>);

pub(super) fn failure(status: StatusCode, code: &str, message: impl Into<String>) -> Failure {
    let error = ErrorDetail { code: code.to_owned(), message: message.into() };
    (status, Json(ErrorBody { error }))
}

pub(super) fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/status", get(async |State(admin): Shared| Json(admin.board.status())))
        .route("/queue", get(async |State(admin): Shared| Json(admin.board.queue())))
        .route("/profile", get(async |State(admin): Shared| Json(admin.board.profile())))
        .route("/config", get(async |State(admin): Shared| Json(admin.board.config())))
        .route("/version", get(async || Json(super::version())))
        .route("/gpu", get(gpu))
        .route("/logs", get(logs))
        .route("/bench", post(bench))
        .route("/cancel/{id}", post(cancel))
        .route("/reload", post(reload))
        .route("/drain", post(async |State(admin): Shared| Json(admin.board.drain())))
        .route("/log-level", post(log_level))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(admin)
}

async fn not_found(uri: Uri) -> Failure {
    let known = "GET /status, /gpu, /queue, /logs, /profile, /config, /version; \
                 POST /bench, /cancel/{id}, /drain, /reload, /log-level";
    failure(StatusCode::NOT_FOUND, "not_found", format!("there is no {}; there are: {known}", uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> Failure {
    let other = if method == Method::POST { "GET" } else { "POST" };
    failure(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        format!("{} does not take {method}; use {other}", uri.path()),
    )
}

async fn cancel(
    State(admin): Shared,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<CancelResult>, Failure> {
    let Path(id) = id.map_err(|error| failure(StatusCode::BAD_REQUEST, "bad_request", error.body_text()))?;
    match admin.board.cancel(&id) {
        Some(was) => {
            tracing::info!(id, %was, "cancelled by the operator");
            Ok(Json(CancelResult { id, was }))
        }
        None => Err(failure(
            StatusCode::NOT_FOUND,
            "not_found",
            format!("there is no job `{id}`; it may have ended. `axectl queue` lists the jobs"),
        )),
    }
}

async fn reload(State(admin): Shared) -> Result<Json<Reload>, Failure> {
    let Some(reload) = &admin.reload else {
        let text = "this daemon has no configuration to read anew";
        return Err(failure(StatusCode::SERVICE_UNAVAILABLE, "unavailable", text));
    };
    reload().await.map(Json).map_err(|text| failure(StatusCode::UNPROCESSABLE_ENTITY, "reload_failed", text))
}

async fn log_level(State(admin): Shared, request: Request) -> Result<Json<LogLevel>, Failure> {
    let body = body_of(request).await?;
    let bad = |message| failure(StatusCode::BAD_REQUEST, "bad_request", message);
    let wanted: LogLevel = serde_json::from_slice(&body)
        .map_err(|error| bad(format!("the body must be JSON such as {{\"level\":\"debug\"}}: {error}")))?;
    let level = admin.control.set(&wanted.level).map_err(bad)?;
    admin.board.pin_level(Some(level.clone()));
    // Logged at a level that shows whenever anything does.
    tracing::error!(target: "axe::admin", level, "the operator changed the log level");
    Ok(Json(LogLevel { level }))
}

async fn bench(State(admin): Shared, request: Request) -> Result<Json<Bench>, Failure> {
    let hangup = request.extensions().get::<Hangup>().cloned();
    let body = body_of(request).await?;
    let asked = serde_json::from_slice(&body).map_err(|error| {
        let example = "{\"prompt_tokens\": 512, \"completion_tokens\": 64, \"rounds\": 3}";
        let text = format!("the body must be JSON such as {example}: {error}");
        failure(StatusCode::BAD_REQUEST, "bad_request", text)
    })?;
    let gone = async {
        match hangup {
            Some(hangup) => hangup.happened().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        measured = super::bench::run(&admin.board, asked) => Ok(Json(measured?)),
        () = gone => Err(failure(StatusCode::BAD_REQUEST, "bad_request", "nobody waits for the answer")),
    }
}

async fn body_of(request: Request) -> Result<Bytes, Failure> {
    match timeout(BODY, axum::body::to_bytes(request.into_body(), LARGEST_BODY)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) => {
            let text = format!("the body could not be read; it may have {LARGEST_BODY} bytes: {error}");
            Err(failure(StatusCode::PAYLOAD_TOO_LARGE, "too_large", text))
        }
        Err(_) => {
            let text = format!("the body did not arrive within {} s", BODY.as_secs());
            Err(failure(StatusCode::REQUEST_TIMEOUT, "timeout", text))
        }
    }
}

async fn gpu(State(admin): Shared) -> Result<Json<Gpu>, Failure> {
    let mut gpu = sample(&admin).await?;
    if gpu.lacks_rates() {
        sleep(SAMPLE).await;
        gpu = sample(&admin).await?;
    }
    Ok(Json(gpu))
}

async fn sample(admin: &Arc<Admin>) -> Result<Gpu, Failure> {
    let admin = Arc::clone(admin);
    // Reading a sensor can wake the card up, which takes a while.
    let sampled = tokio::task::spawn_blocking(move || admin.board.gpu());
    sampled.await.map_err(|error| {
        failure(
            StatusCode::INTERNAL_SERVER_ERROR,
            "unavailable",
            format!("reading the sensors failed: {error}"),
        )
    })
}

/// The query of `GET /logs`.
#[derive(Debug, PartialEq)]
struct Asked {
    lines: usize,
    wanted: Wanted,
    follow: bool,
}

impl Asked {
    fn parse(query: &str) -> Result<Self, String> {
        let mut asked = Self { lines: LINES, wanted: Level::Trace.into(), follow: false };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match (key, value) {
                ("lines", _) => {
                    asked.lines = value.parse().map_err(|_| format!("lines={value} is no number"))?;
                }
                ("level", _) => asked.wanted.least = value.parse()?,
                ("request", "") => return Err("request= names no request".to_owned()),
                // Identifiers are letters, digits, hyphens and underscores: nothing is written with a per cent sign.
                ("request", _) => asked.wanted.request = Some(value.to_owned()),
                ("follow", "1" | "true") => asked.follow = true,
                ("follow", "0" | "false") => asked.follow = false,
                ("follow", _) => return Err(format!("follow={value} is neither 1 nor 0")),
                _ => {
                    return Err(format!(
                        "`{key}` is not understood; there are lines, level, request and follow"
                    ));
                }
            }
        }
        Ok(asked)
    }
}

async fn logs(State(admin): Shared, uri: Uri) -> Result<Response, Failure> {
    let Asked { lines, wanted, follow } = Asked::parse(uri.query().unwrap_or_default())
        .map_err(|text| failure(StatusCode::BAD_REQUEST, "bad_request", text))?;
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    if !follow {
        let lines: Vec<_> = admin.ring.last(lines, wanted).iter().map(|line| encode(line)).collect();
        return Ok((kind, lines.concat()).into_response());
    }
    let place = Arc::clone(&admin.followers).try_acquire_owned().map_err(|_| {
        let text = "as many readers follow the log as are allowed; close one of them";
        failure(StatusCode::SERVICE_UNAVAILABLE, "busy", text)
    })?;
    let (kept, follower) = admin.ring.follow(lines, wanted);
    let kept = stream::iter(kept).map(|line| encode(&line));
    let rest = stream::unfold(
        (follower, admin.stopping.clone(), place),
        async |(mut follower, mut stopping, place)| {
            let text = tokio::select! {
                _ = stopping.wait_for(|stopping| *stopping) => return None,
                line = timeout(HEARTBEAT, follower.next()) => match line {
                    Ok(Some(line)) => encode(&line),
                    Ok(None) => return None,
                    Err(_) => "\n".to_owned(),
                },
            };
            Some((text, (follower, stopping, place)))
        },
    );
    let body = kept.chain(rest).map(Ok::<_, std::convert::Infallible>);
    Ok((kind, Body::from_stream(body)).into_response())
}

fn encode(line: &LogLine) -> String {
    // Strings, numbers and string keys only: nothing that JSON could not hold.
    let mut text = serde_json::to_string(line).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_of_logs() {
        let defaults = Asked { lines: LINES, wanted: Level::Trace.into(), follow: false };
        assert_eq!(Asked::parse(""), Ok(defaults));
        let wanted = Wanted { least: Level::Warn, request: Some("req-1".to_owned()) };
        let all = Asked { lines: 5, wanted, follow: true };
        assert_eq!(Asked::parse("follow=1&lines=5&level=WARN&request=req-1"), Ok(all));
        for wrong in ["lines=-1", "lines=", "level=loud", "follow=yes", "follow", "tail=5", "request="] {
            assert!(Asked::parse(wrong).is_err(), "{wrong}");
        }
    }
}
