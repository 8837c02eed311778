//! Streamed answers: framing, chunks, usage, errors, pings, and clients that leave.

use std::time::Duration;

use crate::stage::{LOUD, PATIENCE, Script, Server, Trouble, bytes, eventually, say};
use crate::with;
use axe::decode::Step;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}], "stream": true}), more)
}

/// The events of a stream as it should be framed: `data:` lines and comments, each followed by one blank line.
fn events(body: &str) -> Vec<&str> {
    assert!(body.ends_with("\n\n"), "{body:?}");
    let events: Vec<&str> = body.trim_end_matches('\n').split("\n\n").collect();
    for event in &events {
        assert!(
            !event.contains('\n') && (event.starts_with("data: ") || event.starts_with(": ")),
            "{event:?}"
        );
    }
    events
}

/// The chunks of a stream that ends well.
fn chunks(body: &str) -> Vec<Value> {
    let mut events = events(body);
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.retain(|event| !event.starts_with(':'));
    events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect()
}

async fn stream(server: &Server, path: &str, body: &Value) -> String {
    let response = server.post(path, body).await;
    assert_eq!(response.status(), 200);
    let headers = response.headers();
    assert_eq!(headers["content-type"], "text/event-stream");
    assert_eq!(headers["cache-control"], "no-cache");
    assert_eq!(headers["x-accel-buffering"], "no");
    assert!(!headers.contains_key("content-encoding"), "gzip would hold chunks back");
    response.text().await.unwrap()
}

#[tokio::test]
async fn a_chat_stream_names_the_role_first_and_the_reason_last() {
    let server = Server::start(Script::saying("Hé\n\"")).await;
    let chunks = chunks(&stream(&server, CHAT, &chat(json!({}))).await);
    let deltas: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]["delta"]).collect();
    assert_eq!(*deltas[0], json!({"role": "assistant", "content": ""}));
    assert_eq!(**deltas.last().unwrap(), json!({}));
    let text: String = deltas[1..deltas.len() - 1].iter().map(|d| d["content"].as_str().unwrap()).collect();
    assert_eq!(text, "Hé\n\"");
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    for chunk in others {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
    }
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for same in ["id", "created", "model", "system_fingerprint"] {
            assert_eq!(chunk[same], chunks[0][same]);
        }
        assert!(chunk.get("usage").is_none(), "usage was not asked for");
    }
}

#[tokio::test]
async fn a_text_stream_sends_pieces_of_text() {
    let server = Server::start(Script::saying("ab")).await;
    let chunks = chunks(&stream(&server, TEXT, &json!({"prompt": "go", "stream": true})).await);
    let texts: Vec<&str> = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "ab");
    assert_eq!(texts.last(), Some(&""));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert!(chunks.iter().all(|c| c["object"] == "text_completion" && c.get("usage").is_none()));
}

#[tokio::test]
async fn usage_comes_in_one_extra_chunk_when_asked() {
    let server = Server::start(Script::saying("ab")).await;
    for (path, prompt_tokens) in [(CHAT, 21), (TEXT, 3)] {
        let mut body = chat(json!({"prompt": "go", "stream_options": {"include_usage": true}}));
        body.as_object_mut().unwrap().remove(if path == CHAT { "prompt" } else { "messages" });
        let chunks = chunks(&stream(&server, path, &body).await);
        let (usage, others) = chunks.split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["prompt_tokens"], prompt_tokens);
        assert_eq!(usage["usage"]["completion_tokens"], 3);
        assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
        assert_eq!(usage["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
        assert!(others.iter().all(|c| c["usage"].is_null() && !c["choices"].as_array().unwrap().is_empty()));
        assert_eq!(usage["id"], others[0]["id"]);
    }
    let plain = chat(json!({"stream_options": {"include_usage": false}}));
    assert!(chunks(&stream(&server, CHAT, &plain).await).iter().all(|c| c.get("usage").is_none()));
}

#[tokio::test]
async fn an_empty_reply_still_has_its_role_and_reason() {
    let server = Server::start(Script::saying("")).await;
    let chunks = chunks(&stream(&server, CHAT, &chat(json!({}))).await);
    assert_eq!(chunks.len(), 2);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks[1]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn the_deltas_are_the_answer_in_one_piece_with_wide_commits_stops_and_split_characters() {
    let steps = || -> Vec<Step> {
        let tokens = bytes("naïve 😀 STO STOP hidden");
        tokens.chunks(5).map(|c| Step::Commit(c.to_vec())).chain(say("")).collect()
    };
    let server = Server::start(Script::new(move |_| steps())).await;
    let body = json!({"stop": ["STOP"]});
    let chunks = chunks(&stream(&server, CHAT, &chat(body.clone())).await);
    let deltas = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    let mut whole = chat(body);
    whole["stream"] = false.into();
    let whole = server.ask(CHAT, &whole).await;
    assert_eq!(deltas.collect::<String>(), "naïve 😀 STO ");
    assert_eq!(whole["choices"][0]["message"]["content"], "naïve 😀 STO ");
}

#[tokio::test]
async fn a_character_that_the_limit_cuts_is_dropped() {
    let server = Server::start(Script::saying("né")).await;
    for (limit, text) in [(1, "n"), (2, "n"), (3, "né")] {
        let body = chat(json!({"max_tokens": limit}));
        let chunks = chunks(&stream(&server, CHAT, &body).await);
        let told: String =
            chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(told, text, "{limit}");
        let mut body = body;
        body["stream"] = false.into();
        let answer = server.ask(CHAT, &body).await;
        assert_eq!(answer["choices"][0]["message"]["content"], text, "{limit}");
        assert_eq!(answer["usage"]["completion_tokens"], limit);
    }
}

#[tokio::test]
async fn drafts_are_not_deltas() {
    let draft = Step::Draft { tokens: bytes("draft"), entropy: vec![] };
    let steps = [draft.clone(), Step::Commit(bytes("final")), draft];
    let server = Server::start(Script::new(move |_| steps.iter().cloned().chain(say("")).collect())).await;
    let chunks = chunks(&stream(&server, CHAT, &chat(json!({}))).await);
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "final");
}

#[tokio::test]
async fn a_failure_after_the_start_is_an_error_event_without_done_or_stop() {
    let server = Server::start(Script::saying("hello").trouble(3, Trouble::Error)).await;
    let body = stream(&server, CHAT, &chat(json!({}))).await;
    let events = events(&body);
    let last: Value = serde_json::from_str(&events.last().unwrap()["data: ".len()..]).unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("NaN in layer 3"));
    assert_eq!(last["error"]["code"], "generation_failed");
    assert!(!body.contains("[DONE]") && !body.contains("\"finish_reason\":\"stop\""), "{body}");
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_its_status() {
    let server = Server::start(Script::saying("hello").trouble(1, Trouble::Error)).await;
    let error = server.refusal(CHAT, &chat(json!({})), 500).await;
    assert_eq!(error["code"], "generation_failed");

    let server = Server::start(Script::endless().gated()).await;
    let (client, url) = (server.client.clone(), server.url(CHAT));
    let asked = tokio::spawn(async move { client.post(url).json(&chat(json!({}))).send().await.unwrap() });
    eventually("the start", || server.stage.engine.status().running.is_some()).await;
    server.stage.engine.shutdown();
    server.stage.script.permit(1);
    let response = asked.await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "shutting_down");
}

#[tokio::test]
async fn everything_refused_is_refused_before_the_stream() {
    let server = Server::start(Script::saying("x")).await;
    for (body, status) in [
        (chat(json!({"temperature": 9})), 400),
        (chat(json!({"model": "other"})), 404),
        (chat(json!({"messages": [{"role": "user", "content": "y".repeat(5000)}]})), 400),
    ] {
        let response = server.post(CHAT, &body).await;
        assert_eq!(response.status(), status);
        assert_eq!(response.headers()["content-type"], "application/json");
    }
}

#[tokio::test]
async fn pings_fill_silence_while_queued_in_prefill_and_between_tokens() {
    let server = Server::configured(Script::saying("ab").gated(), "[server]\nping_interval_s = 0.05").await;
    let mut first = server.post(CHAT, &chat(json!({}))).await;
    let mut queued = server.post(CHAT, &chat(json!({}))).await;
    for response in [&mut first, &mut queued] {
        for _ in 0..2 {
            let chunk = tokio::time::timeout(PATIENCE, response.chunk()).await.unwrap().unwrap().unwrap();
            assert_eq!(&chunk[..], b": ping\n\n");
        }
    }
    server.stage.script.permit(2);
    let mut seen = String::new();
    while !seen.ends_with("}\n\n: ping\n\n") {
        seen.push_str(std::str::from_utf8(&first.chunk().await.unwrap().unwrap()).unwrap());
    }
    server.stage.script.permit(100);
    let rest = first.text().await.unwrap();
    assert_eq!(chunks(&(seen + &rest)).len(), 4);
    assert_eq!(chunks(&queued.text().await.unwrap()).len(), 4);
}

/// Posts a request on a bare socket.
async fn raw(server: &Server, body: &Value) -> TcpStream {
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_the_slot_within_one_step() {
    for streamed in [true, false] {
        // In prefill, then between tokens.
        for steps in [2, 30] {
            let server = Server::start(Script::endless().prefill_chunk(4).gated()).await;
            let socket = raw(&server, &chat(json!({"stream": streamed}))).await;
            server.stage.script.permit(steps);
            eventually("the steps", || server.stage.script.steps_done() == steps).await;
            drop(socket);
            // The engine is inside a step; give the hang-up time to arrive before that step ends.
            tokio::time::sleep(Duration::from_millis(300)).await;
            server.stage.script.permit(1);
            eventually("the free slot", || server.stage.engine.status().running.is_none()).await;
            assert!(server.stage.script.steps_done() <= steps + 1, "streamed {streamed}");
            assert_eq!(server.stage.engine.status().counters.requests.cancelled, 1);
        }
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_in_the_queue_frees_its_place() {
    for streamed in [true, false] {
        let server = Server::start(Script::endless().gated()).await;
        let _running = raw(&server, &chat(json!({}))).await;
        eventually("the start", || server.stage.engine.status().running.is_some()).await;
        let waiting = raw(&server, &chat(json!({"stream": streamed}))).await;
        eventually("the wait", || server.stage.engine.status().queue.depth == 1).await;
        drop(waiting);
        eventually("the free place", || server.stage.engine.status().queue.depth == 0).await;
        assert_eq!(server.stage.script.steps_done(), 0);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off_and_does_not_hold_up_others() {
    // 24 MB of text: more than the system buffers for a connection.
    let loud = || std::iter::repeat_with(|| Step::Commit(vec![LOUD])).take(3000).collect();
    let server = Server::configured(Script::new(move |_| loud()), "[server]\nwrite_timeout_s = 0.3").await;
    let mut deaf = raw(&server, &chat(json!({"max_tokens": 3000}))).await;
    let answer = server.ask(CHAT, &chat(json!({"stream": false, "max_tokens": 1}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    tokio::time::sleep(Duration::from_millis(1000)).await;
    let mut seen = Vec::new();
    // Whether the end is an orderly close or a reset depends on what was on the way.
    let _ended = tokio::time::timeout(PATIENCE, deaf.read_to_end(&mut seen)).await.unwrap();
    let seen = String::from_utf8_lossy(&seen);
    assert!(seen.starts_with("HTTP/1.1 200 OK") && !seen.contains("[DONE]"), "{} bytes came", seen.len());
}

#[tokio::test]
async fn a_stream_is_chunked_and_leaves_the_connection_open() {
    let server = Server::start(Script::saying("ab")).await;
    let mut socket = raw(&server, &chat(json!({}))).await;
    for _ in 0..2 {
        let mut seen = String::new();
        let mut buffer = [0; 4096];
        while !seen.ends_with("\r\n0\r\n\r\n") {
            let n = tokio::time::timeout(PATIENCE, socket.read(&mut buffer)).await.unwrap().unwrap();
            assert!(n > 0, "closed after {seen:?}");
            seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
        }
        assert!(seen.starts_with("HTTP/1.1 200 OK\r\n"), "{seen}");
        assert!(seen.to_lowercase().contains("transfer-encoding: chunked"), "{seen}");
        let body = chat(json!({})).to_string();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all((head + &body).as_bytes()).await.unwrap();
    }
}
