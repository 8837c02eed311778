//! HTTP itself: methods, types, sizes, times, keys, compression, connections.

use crate::stage;
use std::time::{Duration, Instant};

use crate::stage::{PATIENCE, Script, Server, Stage, eventually, loaded};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

async fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.address).await.unwrap()
}

/// Sends bytes and reads until the server closes.
async fn exchange(server: &Server, request: &[u8]) -> String {
    let mut socket = connect(server).await;
    socket.write_all(request).await.unwrap();
    until_closed(&mut socket).await
}

async fn until_closed(socket: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, socket.read_to_end(&mut answer)).await.expect("never closed").unwrap();
    String::from_utf8(answer).unwrap()
}

/// Reads until `end` has come.
async fn until(socket: &mut TcpStream, end: &str) -> String {
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.contains(end) {
        let n = tokio::time::timeout(PATIENCE, socket.read(&mut buffer)).await.unwrap().unwrap();
        assert!(n > 0, "closed after {seen:?}");
        seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
    seen
}

#[tokio::test]
async fn unknown_routes_are_404_in_the_apis_shape() {
    let server = Server::start(Script::saying("x")).await;
    for path in ["/edit/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/v2/models", "/%00"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        let error = response.json::<Value>().await.unwrap();
        assert_eq!(error["error"]["code"], "unknown_url");
    }
    assert_eq!(server.get("/health").await.status(), 200);
    // A host and no path.
    let answer = exchange(&server, b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\nconnection: close\r\n\r\n").await;
    assert!(
        answer.starts_with("HTTP/1.1 404 ") && answer.contains(r#"\"CONNECT\" \"a:1\" here"#),
        "{answer}"
    );
}

#[tokio::test]
async fn wrong_methods_are_405_and_name_the_right_ones() {
    let server = Server::start(Script::saying("x")).await;
    for (method, path, allowed) in [
        ("GET", CHAT, vec!["POST", "OPTIONS"]),
        ("HEAD", CHAT, vec!["POST", "OPTIONS"]),
        ("DELETE", "/v1/completions", vec!["POST", "OPTIONS"]),
        ("POST", "/v1/models", vec!["GET", "HEAD", "OPTIONS"]),
        ("PUT", "/v1/models/scripted", vec!["GET", "HEAD", "OPTIONS"]),
        ("POST", "/health", vec!["GET", "HEAD", "OPTIONS"]),
    ] {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let response = server.client.request(method.clone(), server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 405, "{method} {path}");
        let mut allow: Vec<_> =
            response.headers()["allow"].to_str().unwrap().split(',').map(str::trim).collect();
        allow.sort_unstable();
        let mut allowed = allowed;
        allowed.sort_unstable();
        assert_eq!(allow, allowed, "{method} {path}");
        if method != "HEAD" {
            assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "method_not_allowed");
        }
    }
}

#[tokio::test]
async fn head_is_get_without_a_body() {
    let server = Server::start(Script::saying("x")).await;
    for path in ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/scripted"] {
        let response = server.client.head(server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert!(response.bytes().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn options_says_what_is_allowed_and_preflights_need_no_key() {
    let server = Server::configured(Script::saying("x"), "[server]\napi_key = \"k\"").await;
    let options = |path: &str| server.client.request(reqwest::Method::OPTIONS, server.url(path));
    for path in [CHAT, "/v1/completions", "/v1/models", "/v1/models/scripted", "/metrics"] {
        let plain = options(path).bearer_auth("k").send().await.unwrap();
        assert_eq!(plain.status(), 204, "{path}");
        assert!(plain.headers()["allow"].to_str().unwrap().contains("OPTIONS"));
        let preflight = options(path)
            .header("Origin", "http://page.example")
            .header("Access-Control-Request-Method", "POST")
            .header("Access-Control-Request-Headers", "authorization,x-stainless-os")
            .send()
            .await
            .unwrap();
        assert_eq!(preflight.status(), 204);
        let headers = preflight.headers();
        assert_eq!(headers["access-control-allow-origin"], "*");
        assert_eq!(headers["access-control-allow-headers"], "authorization,x-stainless-os");
        assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
    }
}

#[tokio::test]
async fn only_configured_origins_may_read_answers() {
    let toml = "[server]\ncors_origins = [\"http://good.example\"]";
    let server = Server::configured(Script::saying("x"), toml).await;
    for (origin, allowed) in [("http://good.example", true), ("http://bad.example", false)] {
        let response =
            server.client.get(server.url("/v1/models")).header("Origin", origin).send().await.unwrap();
        let found = response.headers().get("access-control-allow-origin").map(|v| v.to_str().unwrap());
        assert_eq!(found, allowed.then_some(origin));
        assert!(response.headers().get_all("vary").iter().any(|v| v == "origin"));
    }
    // Errors are readable, too, with the headers that clients wait by; what comes from no page is not marked.
    let response = server.client.get(server.url("/x")).header("Origin", "http://good.example").send().await;
    let headers = response.unwrap().headers().clone();
    assert!(headers.contains_key("access-control-allow-origin"));
    let told = headers["access-control-expose-headers"].to_str().unwrap();
    for name in ["x-request-id", "retry-after", "x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens"]
    {
        assert!(told.split(", ").any(|each| each == name), "{told}");
    }
    assert!(!server.get("/v1/models").await.headers().contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn a_key_is_asked_for_where_one_is_configured() {
    let server = Server::configured(Script::saying("x"), "[server]\napi_key = \"sesame\"").await;
    for path in ["/v1/models", "/metrics", "/nowhere"] {
        for header in [None, Some("Bearer wrong"), Some("Basic sesame"), Some("sesame"), Some("Bearer ")] {
            let mut request = server.client.get(server.url(path));
            if let Some(header) = header {
                request = request.header("Authorization", header);
            }
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 401, "{path} {header:?}");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            let text = response.text().await.unwrap();
            assert!(text.contains("invalid_api_key") && !text.contains("sesame"), "{text}");
        }
    }
    assert_eq!(server.post(CHAT, &chat()).await.status(), 401);
    // As Anthropic's clients send it.
    let ours =
        server.client.get(server.url("/v1/models")).header("x-api-key", "sesame").send().await.unwrap();
    assert_eq!(ours.status(), 200);
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).await.status(), 200, "{path}");
    }
    for scheme in ["Bearer", "bearer"] {
        let request =
            server.client.post(server.url(CHAT)).header("Authorization", format!("{scheme} sesame"));
        assert_eq!(request.json(&chat()).send().await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn bodies_must_be_json_and_say_so() {
    let server = Server::start(Script::saying("x")).await;
    let post = |kind: Option<&'static str>, body: &'static str| {
        let mut request = server.client.post(server.url(CHAT)).body(body);
        if let Some(kind) = kind {
            request = request.header("Content-Type", kind);
        }
        async move {
            let response = request.send().await.unwrap();
            let status = response.status().as_u16();
            let error: Value = response.json().await.unwrap();
            (status, error["error"]["message"].as_str().unwrap_or_default().to_owned())
        }
    };
    for kind in
        [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("multipart/form-data")]
    {
        assert_eq!(post(kind, "{}").await.0, 415, "{kind:?}");
    }
    let json = Some("application/json; charset=utf-8");
    for body in ["", "{", "nonsense", "{\"messages\": [}", "{\"a\": \"\\ud800\"}", "{\"a\": \"\\udc00x\"}"] {
        let (status, message) = post(json, body).await;
        assert_eq!(status, 400, "{body}");
        assert!(message.contains("not valid JSON"), "{message}");
    }
    for body in ["[]", "3", "null", "\"x\""] {
        let (status, message) = post(json, body).await;
        assert_eq!(status, 400);
        assert!(message.contains("must be a JSON object"), "{message}");
    }
    // Deeper than any honest request; the parser must not run out of stack.
    let deep = Box::leak(format!("{{\"x\": {}", "[".repeat(100_000)).into_boxed_str());
    assert_eq!(post(json, deep).await.0, 400);
    let invalid = server.client.post(server.url(CHAT)).header("Content-Type", "application/json");
    assert_eq!(invalid.body(&b"{\"a\": \"\xff\"}"[..]).send().await.unwrap().status(), 400);
    let packed = server.client.post(server.url(CHAT)).header("Content-Type", "application/json");
    assert_eq!(packed.header("Content-Encoding", "gzip").body("x").send().await.unwrap().status(), 415);
    server.ask(CHAT, &chat()).await;
}

#[tokio::test]
async fn large_bodies_are_413_whether_declared_or_chunked() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_body_kib = 16").await;
    let padded = |bytes: usize| {
        let mut body = chat();
        body["user"] = "u".repeat(bytes).into();
        body.to_string()
    };
    let post = || server.client.post(server.url(CHAT)).header("Content-Type", "application/json");
    let response = post().body(padded(16 << 10)).send().await.unwrap();
    assert_eq!(response.status(), 413);
    assert!(response.text().await.unwrap().contains("max_body_kib"));
    // A client that has not sent all of a far too large body hears why, too.
    let response = post().body(padded(7 * (16 << 10))).send().await.unwrap();
    assert_eq!(response.status(), 413);
    let chunked = |text: String| {
        let parts: Vec<Result<Vec<u8>, std::io::Error>> =
            text.as_bytes().chunks(1000).map(|c| Ok(c.to_vec())).collect();
        reqwest::Body::wrap_stream(futures::stream::iter(parts))
    };
    assert_eq!(post().body(chunked(padded(16 << 10))).send().await.unwrap().status(), 413);
    assert_eq!(post().body(chunked(padded(10 << 10))).send().await.unwrap().status(), 200);
    assert_eq!(post().body(padded(10 << 10)).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn expect_100_continue_is_honoured_and_a_refusal_comes_without_it() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_body_kib = 16").await;
    let body = chat().to_string();
    let head = |length: usize| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n"
        )
    };
    let mut socket = connect(&server).await;
    socket.write_all(head(body.len()).as_bytes()).await.unwrap();
    assert_eq!(until(&mut socket, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    socket.write_all(body.as_bytes()).await.unwrap();
    assert!(until_closed(&mut socket).await.starts_with("HTTP/1.1 200 OK\r\n"));
    let refused = exchange(&server, head(1 << 20).as_bytes()).await;
    assert!(refused.starts_with("HTTP/1.1 413 "), "{refused}");
}

#[tokio::test]
async fn slow_heads_and_idle_connections_are_closed() {
    let server = Server::configured(Script::saying("x"), "[server]\nheader_timeout_s = 0.3").await;
    let start = Instant::now();
    let mut drip = connect(&server).await;
    // A byte now and then must not extend the time.
    let dripping = async {
        for byte in format!("GET /health HTTP/1.1\r\nX: {}", "y".repeat(1000)).bytes() {
            if drip.write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, dripping).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "cut after {:?}", start.elapsed());

    let mut idle = connect(&server).await;
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let start = Instant::now();
    assert!(until_closed(&mut idle).await.starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(start.elapsed() >= Duration::from_millis(250));
}

#[tokio::test]
async fn slow_bodies_are_408() {
    let server = Server::configured(Script::saying("x"), "[server]\nbody_timeout_s = 0.2").await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{\"mess"
    );
    let answer = exchange(&server, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{answer}");
    assert!(answer.contains("\"invalid_request_error\""), "{answer}");
}

#[tokio::test]
async fn a_slow_generation_outlives_every_timeout_of_the_request() {
    let toml = "[server]\nheader_timeout_s = 0.1\nbody_timeout_s = 0.1\nwrite_timeout_s = 0.1";
    let server = Server::configured(Script::saying("x").gated(), toml).await;
    let (client, url) = (server.client.clone(), server.url(CHAT));
    let asked = tokio::spawn(async move { client.post(url).json(&chat()).send().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(500)).await;
    server.stage.script.permit(100);
    assert_eq!(asked.await.unwrap().status(), 200);
}

#[tokio::test]
async fn several_requests_share_a_connection_even_after_an_error() {
    let server = Server::start(Script::saying("x")).await;
    let mut socket = connect(&server).await;
    let good = chat().to_string();
    for (body, status) in [(good.as_str(), "200"), ("{", "400"), (good.as_str(), "200")] {
        let request = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(request.as_bytes()).await.unwrap();
        let seen = until(&mut socket, "}}").await;
        assert!(seen.starts_with(&format!("HTTP/1.1 {status} ")), "{seen}");
    }
}

#[tokio::test]
async fn hostile_bytes_get_an_error_and_the_next_client_is_served() {
    let server = Server::configured(Script::saying("x"), "[server]\nheader_timeout_s = 0.3").await;
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(200_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(5000));
    for bytes in [
        &b"\x16\x03\x01\x02\x00"[..],
        b"\0\0\0\0\r\n\r\n",
        b"nonsense\r\n\r\n",
        long.as_bytes(),
        many.as_bytes(),
    ] {
        let mut socket = connect(&server).await;
        let _sent = socket.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut answer)).await.unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    assert_eq!(server.get("/health").await.status(), 200);
}

#[tokio::test]
async fn what_cannot_be_read_gets_an_error_like_all_others() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_head_kib = 8").await;
    let begun = "GET / HTTP/1.1\r\nX: ";
    let large = format!("{begun}{}", "a".repeat((8 << 10) - begun.len()));
    let behind = "GET /health HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n";
    for (bytes, status, word) in [
        (large.as_str(), 431, "`server.max_head_kib`"),
        ("nonsense\r\n\r\n", 400, "HTTP"),
        (behind, 400, "HTTP"),
    ] {
        let answer = exchange(&server, bytes.as_bytes()).await;
        let last = &answer[answer.rfind("HTTP/1.1 ").unwrap()..];
        let (head, body) = last.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(head.contains("\r\nx-request-id: req-"), "{answer}");
        assert!(head.contains("\r\ncontent-type: application/json"), "{answer}");
        assert!(head.contains(&format!("\r\ncontent-length: {}\r\n", body.len())), "{answer}");
        let error = &serde_json::from_str::<Value>(body).unwrap()["error"];
        assert_eq!((&error["type"], &error["param"]), (&"invalid_request_error".into(), &Value::Null));
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    assert_eq!(server.get("/health").await.status(), 200);
}

#[tokio::test]
async fn json_is_compressed_for_those_who_ask() {
    let server = Server::start(Script::saying(&"many words ".repeat(100))).await;
    let ask = |accept: &'static str| {
        let request = server.client.post(server.url(CHAT)).header("Accept-Encoding", accept);
        request.json(&chat()).send()
    };
    let packed = ask("gzip").await.unwrap();
    assert_eq!(packed.headers()["content-encoding"], "gzip");
    assert!(packed.bytes().await.unwrap().len() < 900);
    assert!(!ask("identity").await.unwrap().headers().contains_key("content-encoding"));
    let mut streamed = chat();
    streamed["stream"] = true.into();
    let streamed = server.client.post(server.url(CHAT)).header("Accept-Encoding", "gzip").json(&streamed);
    assert!(!streamed.send().await.unwrap().headers().contains_key("content-encoding"));
}

#[tokio::test]
async fn connections_over_the_limit_wait_their_turn() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_connections = 2").await;
    let taken = [connect(&server).await, connect(&server).await];
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut third = connect(&server).await;
    third.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(200), third.readable()).await;
    assert!(early.is_err(), "served over the limit");
    drop(taken);
    assert!(until_closed(&mut third).await.starts_with("HTTP/1.1 200 OK\r\n"));
}

#[tokio::test]
async fn readiness_follows_the_engine_and_health_does_not() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let script = std::sync::Arc::new(Script::saying("x"));
    let backend = stage::Scripted(std::sync::Arc::clone(&script));
    let engine = axe::engine::Engine::spawn(
        move |progress| {
            progress.report(0.5, "repacking weights");
            wait.recv()?;
            Ok(loaded(backend, None))
        },
        axe::engine::Options { queue_capacity: 1, ..Default::default() },
    )
    .unwrap()
    .handle();
    eventually(
        "the report",
        || matches!(engine.status().state, axe::engine::State::Loading { progress, .. } if progress > 0.0),
    )
    .await;
    let server = Server::over(Stage { engine, script }, &stage::config("")).await;

    assert_eq!(server.get("/health").await.status(), 200);
    let response = server.get("/ready").await;
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    let body: Value = response.json().await.unwrap();
    let loading =
        json!({"status": "loading", "model": "scripted", "progress": 0.5, "what": "repacking weights"});
    assert_eq!(body, loading);
    let response = server.post("/v1/completions", &json!({"prompt": "a"})).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "model_loading");
    assert_eq!(server.get("/v1/models").await.status(), 200);
    // What was to generate counts as rejected, whatever says so; what was not is no such request.
    server.refusal("/tokenize", &json!({"content": "a"}), 503).await;
    assert_eq!(server.stage.engine.status().counters.requests.rejected, 1);

    go.send(()).unwrap();
    eventually("readiness", || server.stage.engine.status().state == axe::engine::State::Ready).await;
    assert_eq!(server.get("/ready").await.status(), 200);
    server.ask("/v1/completions", &json!({"prompt": "a"})).await;
    server.stage.engine.drain();
    server.stage.engine.over().await;
    assert_eq!(server.get("/ready").await.json::<Value>().await.unwrap()["status"], "stopped");
    assert_eq!(server.get("/health").await.status(), 200);
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = Server::start(Script::saying("ab")).await;
    server.ask(CHAT, &chat()).await;
    let response = server.get("/metrics").await;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let page = response.text().await.unwrap();
    for line in [
        "axe_requests_total{outcome=\"stop\"} 1",
        "axe_requests_total{outcome=\"error\"} 0",
        "axe_prompt_tokens_total 21",
        "axe_cached_tokens_total 1",
        "axe_completion_tokens_total 3",
        "axe_passes_total 3",
        "axe_first_token_seconds_bucket{le=\"+Inf\"} 1",
        "axe_first_token_seconds_count 1",
        "axe_queue_depth 0",
        "axe_queue_capacity 64",
        "axe_ready 1",
        "axe_device_memory_bytes{purpose=\"weights\"} 3000",
        "axe_device_memory_budget_bytes 9000",
    ] {
        assert!(page.lines().any(|l| l == line), "no `{line}` in:\n{page}");
    }
    let samples = page.lines().filter(|l| !l.starts_with('#'));
    for sample in samples {
        let (name, value) = sample.rsplit_once(' ').unwrap();
        value.parse::<f64>().unwrap();
        let family = name.split('{').next().unwrap();
        let family =
            ["_bucket", "_sum", "_count"].iter().find_map(|s| family.strip_suffix(s)).unwrap_or(family);
        assert!(page.contains(&format!("# TYPE {family} ")), "{family} has no type");
    }
}
