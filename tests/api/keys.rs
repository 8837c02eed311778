//! API keys with names, and how much may be asked for with each.

use crate::stage::{Script, Server};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A server with a key file of these lines, and its folder.
async fn server(keys: &str, toml: &str) -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, keys).unwrap();
    let toml = format!("[server]\napi_key_file = {:?}\n{toml}", file.display().to_string());
    (Server::configured(Script::saying("hello"), &toml).await, folder)
}

async fn ask(server: &Server, key: &str) -> reqwest::Response {
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    server.client.post(server.url(CHAT)).bearer_auth(key).json(&body).send().await.unwrap()
}

async fn metrics(server: &Server, key: &str) -> String {
    let asked = server.client.get(server.url("/metrics")).bearer_auth(key).send().await.unwrap();
    asked.text().await.unwrap()
}

#[tokio::test]
async fn each_key_is_counted_under_its_name_and_never_shown() {
    let (server, _folder) = server("alice:a-secret\nbob:b-secret\n", "").await;
    for key in ["a-secret", "a-secret", "b-secret"] {
        let response = ask(&server, key).await;
        assert_eq!(response.status(), 200);
        // Without limits nothing is told of them.
        assert!(response.headers().keys().all(|name| !name.as_str().starts_with("x-ratelimit")));
    }
    assert_eq!(ask(&server, "nobody").await.status(), 401);
    let page = metrics(&server, "b-secret").await;
    for line in [
        "axe_key_requests_total{key=\"alice\"} 2\n",
        "axe_key_requests_total{key=\"bob\"} 1\n",
        "axe_key_rate_limited_total{key=\"alice\"} 0\n",
        "axe_unauthorized_requests_total 1\n",
    ] {
        assert!(page.contains(line), "{line} is missing in {page}");
    }
    // Six tokens an answer: five letters and the end.
    assert!(page.contains("axe_key_completion_tokens_total{key=\"alice\"} 12\n"), "{page}");
    assert!(!page.contains("secret"), "{page}");
}

#[tokio::test]
async fn too_many_requests_of_one_key_are_429_and_another_key_is_served() {
    let keys = "alice:a-secret\nbob:b-secret requests_per_minute=50";
    let (server, _folder) = server(keys, "requests_per_minute = 2").await;
    for left in ["1", "0"] {
        let response = ask(&server, "a-secret").await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["x-ratelimit-limit-requests"], "2");
        assert_eq!(response.headers()["x-ratelimit-remaining-requests"], left);
    }
    let refused = ask(&server, "a-secret").await;
    assert_eq!(refused.status(), 429);
    let wait: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=30).contains(&wait), "{wait}");
    assert_eq!(refused.headers()["x-ratelimit-remaining-requests"], "0");
    let error: Value = refused.json().await.unwrap();
    assert_eq!(error["error"]["code"], "rate_limit_exceeded");
    assert_eq!(error["error"]["type"], "rate_limit_error");
    assert!(error["error"]["message"].as_str().unwrap().contains("2 requests a minute"), "{error}");
    // What generates nothing is free.
    let models = server.client.get(server.url("/v1/models")).bearer_auth("a-secret").send().await.unwrap();
    assert_eq!(models.status(), 200);
    assert_eq!(ask(&server, "b-secret").await.headers()["x-ratelimit-limit-requests"], "50");
    let page = metrics(&server, "a-secret").await;
    assert!(page.contains("axe_key_rate_limited_total{key=\"alice\"} 1\n"), "{page}");
}

#[tokio::test]
async fn tokens_are_counted_when_a_request_ends_streamed_or_not() {
    let (server, _folder) = server("alice:a-secret", "tokens_per_minute = 20").await;
    let body = json!({"stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let streamed =
        server.client.post(server.url(CHAT)).bearer_auth("a-secret").json(&body).send().await.unwrap();
    // A short reply may be over when its first token is on the way.
    let left = streamed.headers()["x-ratelimit-remaining-tokens"].to_str().unwrap();
    assert!(["20", "0"].contains(&left), "{left}");
    assert!(streamed.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    // Prompt and answer together had more than 20.
    let refused = ask(&server, "a-secret").await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["x-ratelimit-remaining-tokens"], "0");
    assert!(refused.text().await.unwrap().contains("20 tokens a minute"));
}

#[tokio::test]
async fn limits_hold_for_all_together_where_no_key_is_asked_for() {
    let server = Server::configured(Script::saying("x"), "[server]\nrequests_per_minute = 1").await;
    let body = json!({"prompt": "a"});
    assert_eq!(server.post("/v1/completions", &body).await.status(), 200);
    assert_eq!(server.post("/v1/completions", &body).await.status(), 429);
    assert_eq!(server.get("/ready").await.status(), 200);
    let page = server.get("/metrics").await.text().await.unwrap();
    assert!(!page.contains("axe_key_"), "{page}");
}

#[tokio::test]
async fn answers_carry_one_number_in_header_and_body() {
    let server = Server::start(Script::saying("x")).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body, prefix) in [
        ("/v1/completions", json!({"prompt": "a"}), "cmpl-"),
        (CHAT, json!({"messages": messages}), "chatcmpl-"),
        ("/v1/responses", json!({"input": "hi"}), "resp_"),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 5}), "msg_"),
        ("/edit", json!({"code": "a", "instruction": "b", "stream": false}), "edit-"),
    ] {
        let response = server.post(path, &body).await;
        let header = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        let answer: Value = response.json().await.unwrap();
        let id = answer["id"].as_str().unwrap_or_else(|| panic!("{path}: {answer}"));
        let number = id.strip_prefix(prefix);
        assert!(number.is_some() && header.strip_prefix("req-") == number, "{path}: {header}, {id}");
    }
    let refused = server.get("/nowhere").await;
    assert!(refused.headers()["x-request-id"].to_str().unwrap().starts_with("req-"));
}

#[tokio::test]
async fn only_what_goes_to_a_route_that_generates_counts() {
    let (server, _folder) = server("alice:a-secret", "requests_per_minute = 2").await;
    let post = async |path: &str, body: &Value| {
        server.client.post(server.url(path)).bearer_auth("a-secret").json(body).send().await.unwrap()
    };
    for path in
        ["/nope", "/v1/models", "/v1/messages/count_tokens/", "/health", "/studio/backends", "/metrics"]
    {
        assert!(matches!(post(path, &json!({})).await.status().as_u16(), 404 | 405), "{path}");
    }
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (path, body) in [
        ("/tokenize", json!({"content": "a"})),
        ("/detokenize", json!({"tokens": [5.0]})),
        ("/v1/messages/count_tokens", messages.clone()),
    ] {
        assert_eq!(post(path, &body).await.status(), 200, "{path}");
    }
    let page = metrics(&server, "a-secret").await;
    assert!(page.contains("axe_key_requests_total{key=\"alice\"} 0\n"), "{page}");
    // One that is refused has come all the same.
    assert_eq!(post("/chat", &json!({})).await.headers()["x-ratelimit-remaining-requests"], "1");
    assert_eq!(post(CHAT, &messages).await.headers()["x-ratelimit-remaining-requests"], "0");
    assert_eq!(post("/edit", &json!({})).await.status(), 429);
}

#[tokio::test]
async fn heads_have_a_limit() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_head_kib = 8").await;
    let asked = |bytes| server.client.get(server.url("/health")).header("x-long", "y".repeat(bytes)).send();
    assert_eq!(asked(4 << 10).await.unwrap().status(), 200);
    assert_eq!(asked(16 << 10).await.unwrap().status(), 431);
}

#[tokio::test]
async fn messages_have_a_limit() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_messages = 2").await;
    let body = |count| json!({"messages": vec![json!({"role": "user", "content": "hi"}); count]});
    assert_eq!(server.post(CHAT, &body(2)).await.status(), 200);
    let error = server.refusal(CHAT, &body(3), 400).await;
    assert_eq!(error["param"], "messages");
    // What a message becomes several of is told.
    let uses: Vec<Value> =
        ["a", "b"].map(|id| json!({"type": "tool_use", "id": id, "name": "f", "input": {}})).to_vec();
    let results: Vec<Value> =
        ["a", "b"].map(|id| json!({"type": "tool_result", "tool_use_id": id, "content": "x"})).to_vec();
    let messages = json!([{"role": "assistant", "content": uses}, {"role": "user", "content": results}]);
    let body = json!({"messages": messages, "max_tokens": 5});
    let response = server.post("/v1/messages", &body).await;
    assert_eq!(response.status(), 400);
    let error: Value = response.json().await.unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("found 3 messages, each result of a tool counted as one"), "{error}");
}
