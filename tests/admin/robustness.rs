//! Clients that misbehave, and what the next one finds.

use std::time::Duration;

use axe::admin::{BindError, Listener};
use axectl::protocol::{State, Status};

use crate::support::Daemon;

const SOON: Duration = Duration::from_secs(5);

async fn still_answers(daemon: &Daemon) {
    let status: Status = daemon.client().get("/status").await.unwrap();
    assert_eq!(status.state, State::Ready);
}

#[tokio::test]
async fn garbage_is_refused_and_the_connection_closed() {
    let daemon = Daemon::start().await;
    for garbage in
        [&b"\x00\xff\xfe\r\n\r\n"[..], b"hello\n\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
    {
        let answer = daemon.raw(garbage, true, SOON).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
        still_answers(&daemon).await;
    }
}

#[tokio::test]
async fn oversized_heads_and_bodies_are_refused() {
    let daemon = Daemon::start().await;
    let head = format!("GET /status HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(200 << 10));
    let answer = daemon.raw(head.as_bytes(), true, SOON).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "y".repeat(200 << 10));
    let answer = daemon.raw(long.as_bytes(), true, SOON).await;
    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");

    let body = "y".repeat(64 << 10);
    let request = format!("POST /log-level HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let answer = daemon.raw(request.as_bytes(), true, SOON).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("too_large"), "{answer}");
    still_answers(&daemon).await;
}

#[tokio::test]
async fn a_client_that_closes_its_side_still_gets_its_answer() {
    let daemon = Daemon::start().await;
    let answer = daemon.raw(b"GET /version HTTP/1.1\r\n\r\n", true, SOON).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"protocol\":1"), "{answer}");
    let answer = daemon.raw(b"GET /version HTTP/1.0\r\n\r\n", false, SOON).await;
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
}

#[tokio::test]
async fn bodies_that_never_come_time_out() {
    let daemon = Daemon::start().await;
    let request = b"POST /log-level HTTP/1.1\r\ncontent-length: 10\r\n\r\n{";
    let answer = daemon.raw(request, false, Duration::from_secs(8)).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    still_answers(&daemon).await;
}

#[tokio::test]
async fn silent_connections_are_closed_and_do_not_take_all_places() {
    let daemon = Daemon::start().await;
    let mut silent = Vec::new();
    for _ in 0..60 {
        silent.push(tokio::net::UnixStream::connect(&daemon.socket).await.unwrap());
    }
    still_answers(&daemon).await;
    let begin = std::time::Instant::now();
    let answer = daemon.raw(b"GET /st", false, Duration::from_secs(15)).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(begin.elapsed() < Duration::from_secs(14), "the connection stayed open");
}

#[tokio::test]
async fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let daemon = Daemon::start().await;
    let error = Listener::bind(&daemon.socket, None).await.unwrap_err();
    assert!(matches!(error, BindError::Alive(_)), "{error}");
    still_answers(&daemon).await;
}

#[tokio::test]
async fn stopping_does_not_wait_for_silent_clients() {
    let mut daemon = Daemon::start().await;
    let _silent = tokio::net::UnixStream::connect(&daemon.socket).await.unwrap();
    still_answers(&daemon).await;
    let begin = std::time::Instant::now();
    daemon.stop().await;
    assert!(begin.elapsed() < Duration::from_secs(4));
    assert!(!daemon.socket.exists());
}
