//! The log over the socket: kept lines, followers, and what happens to slow and gone ones.

use std::time::Duration;

use axe::admin::{LogRing, Policy};
use axectl::{
    client::{ClientError, Lines},
    protocol::{Level, Status},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

use crate::support::Daemon;

async fn messages(lines: &mut Lines, count: usize) -> Vec<String> {
    let mut messages = Vec::new();
    for _ in 0..count {
        let line = timeout(Duration::from_secs(5), lines.next()).await.expect("a line comes").unwrap();
        messages.push(line.expect("the log goes on").message);
    }
    messages
}

#[tokio::test]
async fn kept_lines_end_and_are_chosen_by_number_and_level() {
    let daemon = Daemon::start().await;
    daemon.log(|| {
        for number in 0..4 {
            tracing::info!(number, "line {number}");
        }
        tracing::error!("bad");
    });
    let mut lines = daemon.client().lines("/logs?lines=2").await.unwrap();
    assert_eq!(messages(&mut lines, 2).await, ["line 3", "bad"]);
    assert_eq!(lines.next().await.unwrap(), None);
    let mut lines = daemon.client().lines("/logs?level=warn").await.unwrap();
    let line = lines.next().await.unwrap().unwrap();
    assert_eq!((line.level, line.message.as_str()), (Level::Error, "bad"));
    assert_eq!(lines.next().await.unwrap(), None);
}

#[tokio::test]
async fn lines_of_one_request_are_kept_and_followed() {
    let daemon = Daemon::start().await;
    let write = |id: &str, text: &str| daemon.log(|| tracing::info!(id, "{text}"));
    write("chatcmpl-aaaaaaaaaaaaaaaaaaaaaaaa", "kept");
    write("chatcmpl-aaaaaaaaaaaaaaaaaaaaaaab", "another's");
    let mut lines =
        daemon.client().lines("/logs?request=req-aaaaaaaaaaaaaaaaaaaaaaaa&follow=1").await.unwrap();
    assert_eq!(messages(&mut lines, 1).await, ["kept"]);
    write("chatcmpl-aaaaaaaaaaaaaaaaaaaaaaab", "another's");
    write("chatcmpl-aaaaaaaaaaaaaaaaaaaaaaaa", "new");
    assert_eq!(messages(&mut lines, 1).await, ["new"]);
}

#[tokio::test]
async fn followers_get_kept_lines_then_new_ones_and_are_let_go_at_the_end() {
    let mut daemon = Daemon::start().await;
    daemon.log(|| tracing::info!("old"));
    let mut lines = daemon.client().lines("/logs?follow=1&lines=5&level=info").await.unwrap();
    assert_eq!(messages(&mut lines, 1).await, ["old"]);
    daemon.log(|| {
        tracing::info!("new");
        tracing::warn!("newer");
    });
    assert_eq!(messages(&mut lines, 2).await, ["new", "newer"]);
    daemon.stop().await;
    assert_eq!(lines.next().await.unwrap(), None, "a clean end, no broken connection");
    assert!(!daemon.socket.exists());
}

#[tokio::test]
async fn a_reader_that_sleeps_loses_lines_and_costs_no_memory() {
    let daemon = Daemon::start_with(Policy::new(None).unwrap(), LogRing::new(10)).await;
    let mut lines = daemon.client().lines("/logs?follow=1&lines=0").await.unwrap();
    let text = "x".repeat(4000);
    // More than the daemon holds for a follower and more than the kernel and both ends buffer.
    daemon.log(|| {
        for number in 0..2000 {
            tracing::info!(number, "{text}");
        }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    daemon.log(|| tracing::info!(number = 2000, "last"));
    let (mut seen, mut lost) = (0, 0);
    loop {
        let line = timeout(Duration::from_secs(5), lines.next()).await.unwrap().unwrap().unwrap();
        match line.fields.get("lost") {
            Some(count) => lost += count.as_u64().unwrap(),
            None => seen += 1,
        }
        if line.message == "last" {
            break;
        }
    }
    assert!(lost > 1000, "{lost} lost, {seen} seen");
    assert_eq!(seen + lost, 2001, "every line is either seen or accounted for");
}

#[tokio::test]
async fn followers_are_bounded_and_their_places_come_back() {
    let daemon = Daemon::start().await;
    let mut followers = Vec::new();
    for _ in 0..16 {
        followers.push(daemon.client().lines("/logs?follow=1").await.unwrap());
    }
    let Err(ClientError::Refused { status, body }) = daemon.client().lines("/logs?follow=1").await else {
        panic!("a 17th follower was let in")
    };
    assert_eq!((status.as_u16(), body.error.code.as_str()), (503, "busy"));
    let _: Status = daemon.client().get("/status").await.unwrap();
    drop(followers);
    // Each line written shows the daemon that a follower has gone.
    for attempt in 0.. {
        daemon.log(|| tracing::info!("anyone there?"));
        if daemon.client().lines("/logs?follow=1").await.is_ok() {
            break;
        }
        assert!(attempt < 200, "the places do not come back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn the_answer_is_chunked_lines_as_curl_sees_them() {
    let daemon = Daemon::start().await;
    daemon.log(|| tracing::info!("hello"));
    let mut stream = UnixStream::connect(&daemon.socket).await.unwrap();
    stream.write_all(b"GET /logs?follow=1 HTTP/1.1\r\nhost: axed\r\n\r\n").await.unwrap();
    let mut head = vec![0; 4096];
    let mut text = String::new();
    while !text.contains("hello") {
        let read = timeout(Duration::from_secs(5), stream.read(&mut head)).await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&head[..read]).unwrap());
    }
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("transfer-encoding: chunked"), "{text}");
    assert!(text.contains("content-type: application/x-ndjson"), "{text}");
}
