//! The studio's pages and its stream of drafts, over a scripted engine.

use crate::stage;
use crate::with;
use std::time::Duration;

use crate::stage::{CANVAS, CONTEXT, Script, Server, canvases, eventually, marked};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A request with the members of `more` in it.
fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}]}), more)
}

/// The events of an answer: name and data.
async fn events(server: &Server, body: &Value) -> Vec<(String, Value)> {
    let response = server.post("/chat", body).await;
    assert_eq!(response.status(), 200, "{body}");
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    text.trim_end()
        .split("\n\n")
        .filter(|event| !event.starts_with(':'))
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap();
            let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), data)
        })
        .collect()
}

async fn denoiser(reply: &str) -> Server {
    let tokens = marked(reply);
    // At a pace at which a listener sees every draft.
    let script =
        Script::new(move |_| canvases(&tokens, CANVAS, &[3])).denoises().pace(Duration::from_millis(20));
    Server::thinking(script, "").await
}

#[tokio::test]
async fn pages_come_with_a_strict_policy_and_without_a_key() {
    let server = Server::configured(Script::saying("x"), "[server]\napi_key = \"secret\"\n").await;
    for (path, kind) in [
        ("/", "text/html"),
        ("/studio/main.js", "text/javascript"),
        ("/studio/studio.css", "text/css"),
        ("/studio/icon.svg", "image/svg+xml"),
    ] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 200, "{path}");
        let headers = response.headers().clone();
        assert!(headers["content-type"].to_str().unwrap().starts_with(kind), "{path}");
        let policy = headers["content-security-policy"].to_str().unwrap();
        for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(part), "{policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        let tag = headers["etag"].clone();
        let again = server.client.get(server.url(path)).header("if-none-match", tag).send().await.unwrap();
        assert_eq!(again.status(), 304, "{path}");
    }
    assert_eq!(server.get("/studio/backends").await.status(), 401);
    assert_eq!(server.post("/chat", &chat(json!({}))).await.status(), 401);
    let asked = server.client.get(server.url("/studio/backends")).bearer_auth("secret").send().await.unwrap();
    assert_eq!(asked.status(), 200);
}

#[tokio::test]
async fn files_that_are_not_there_are_404() {
    let server = Server::start(Script::saying("x")).await;
    for path in ["/studio/", "/studio/nothing.js", "/studio/..%2fmod.rs", "/studio/index.html/x"] {
        assert_eq!(server.get(path).await.status(), 404, "{path}");
    }
    assert_eq!(server.post("/studio/main.js", &json!({})).await.status(), 405);
}

#[tokio::test]
async fn every_step_is_a_draft_with_entropies_and_a_canvas_is_a_commit() {
    let server = denoiser(&"a".repeat(300)).await;
    let events = events(&server, &chat(json!({"seed": 5}))).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let first = names.iter().position(|name| *name != "prefill").unwrap();
    assert_eq!(
        names[first..],
        ["draft", "draft", "draft", "commit", "draft", "draft", "draft", "commit", "done"]
    );
    let drafts: Vec<&Value> = events.iter().filter(|(n, _)| n == "draft").map(|(_, d)| d).collect();
    let places: Vec<(u64, u64)> =
        drafts.iter().map(|d| (d["canvas"].as_u64().unwrap(), d["step"].as_u64().unwrap())).collect();
    assert_eq!(places, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]);
    assert_eq!(drafts[0]["tokens"].as_array().unwrap().len(), CANVAS);
    assert_eq!(drafts[0]["entropy"].as_array().unwrap().len(), CANVAS);
    assert_eq!(drafts[1]["tokens"][0], "\u{1}", "the script's second draft");
    let text: String =
        events.iter().filter(|(n, _)| n == "commit").map(|(_, d)| d["text"].as_str().unwrap()).collect();
    assert_eq!(text, "a".repeat(300));
    let (_, done) = events.last().unwrap();
    assert_eq!(done["finish_reason"], "stop");
    assert_eq!(done["seed"], 5);
    assert_eq!(done["stats"]["denoising_steps"], 6);
    assert!(done["usage"]["completion_tokens"].as_u64().unwrap() > 300);
}

#[tokio::test]
async fn its_words_reach_the_model() {
    let server = denoiser("x").await;
    events(&server, &chat(json!({"steps": 9, "thinking": true, "temperature": 0.5}))).await;
    let (prompt, sampling) = server.stage.script.started.lock().unwrap().last().unwrap().clone();
    assert_eq!(sampling.denoising.max_steps, Some(9));
    assert!((sampling.temperature - 0.5).abs() < 1e-6);
    assert!(sampling.seed <= u64::from(u32::MAX), "JavaScript can write it down");
    let text = stage::text_of(&prompt.into_iter().filter(|t| (3..259).contains(t)).collect::<Vec<_>>());
    assert!(text.starts_with("[think]"), "{text}");
}

#[tokio::test]
async fn thoughts_are_told_apart() {
    let server = denoiser("{hm}yes").await;
    let events = events(&server, &chat(json!({}))).await;
    let (_, commit) = events.iter().find(|(name, _)| name == "commit").unwrap();
    assert_eq!((commit["text"].as_str(), commit["reasoning"].as_str()), (Some("yes"), Some("hm")));
}

#[tokio::test]
async fn bad_requests_are_refused_before_the_stream() {
    let server = denoiser("x").await;
    for (body, param) in [
        (json!({}), "messages"),
        (chat(json!({"backend": "elsewhere"})), "backend"),
        (chat(json!({"backend": "remote"})), "backend"),
        (chat(json!({"backend": 3})), "backend"),
        (chat(json!({"thinking": "yes"})), "thinking"),
        (chat(json!({"steps": 0})), "steps"),
        (chat(json!({"steps": 300})), "steps"),
        (chat(json!({"max_denoising_steps": 0})), "max_denoising_steps"),
        (chat(json!({"stream": true})), "stream"),
        (chat(json!({"temperature": 9})), "temperature"),
        (chat(json!({"model": "no-such"})), "model"),
        (chat(json!({"n": 2})), "n"),
        (chat(json!({"tools": [{"type": "function", "function": {"name": "f"}}]})), "tools"),
        (chat(json!({"tools": [], "tool_choice": "required"})), "tool_choice"),
        (chat(json!({"functions": [{"name": "f"}]})), "functions"),
        (chat(json!({"function_call": {"name": "f"}})), "function_call"),
        (chat(json!({"steps": 3, "max_denoising_steps": 4})), "steps"),
        (chat(json!({"steps": 3, "max_denoising_steps": "3"})), "steps"),
        (chat(json!({"thinking": true, "chat_template_kwargs": {"enable_thinking": false}})), "thinking"),
        (chat(json!({"thinking": false, "chat_template_kwargs": {"enable_thinking": "no"}})), "thinking"),
    ] {
        let response = server.post("/chat", &body).await;
        assert!(matches!(response.status().as_u16(), 400 | 404), "{body}");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["param"], param, "{body}");
    }
    assert_eq!(events(&server, &chat(json!({}))).await.last().unwrap().0, "done", "the next one works");
}

#[tokio::test]
async fn the_same_said_twice_is_no_contradiction() {
    let server = denoiser("x").await;
    let kwargs = json!({"enable_thinking": true});
    let body = json!({"model": "scripted", "steps": 3, "max_denoising_steps": 3.0, "thinking": true, "chat_template_kwargs": kwargs});
    assert_eq!(events(&server, &chat(body)).await.last().unwrap().0, "done");
    let sampling = server.stage.script.started.lock().unwrap().last().unwrap().1.clone();
    assert_eq!(sampling.denoising.max_steps, Some(3));
}

#[tokio::test]
async fn a_model_that_cannot_think_is_not_told_to() {
    let server = Server::start(Script::saying("x")).await;
    let error = server.refusal("/chat", &chat(json!({"thinking": true})), 400).await;
    assert_eq!(error["param"], "thinking");
    assert_eq!(events(&server, &chat(json!({"thinking": false}))).await.last().unwrap().0, "done");
}

#[tokio::test]
async fn who_leaves_frees_the_slot() {
    let server = Server::start(Script::endless().pace(Duration::from_millis(1))).await;
    let mut response = server.post("/chat", &chat(json!({}))).await;
    assert!(response.chunk().await.unwrap().is_some());
    drop(response);
    eventually("the end of the generation", || {
        server.stage.script.ended.load(std::sync::atomic::Ordering::Acquire) == 1
    })
    .await;
}

#[tokio::test]
async fn backends_say_what_they_can() {
    let server = denoiser("x").await;
    let body: Value = server.get("/studio/backends").await.json().await.unwrap();
    let backends = body["backends"].as_array().unwrap();
    assert_eq!(backends.len(), 1);
    assert_eq!(backends[0]["kind"], "diffusion");
    assert_eq!(backends[0]["thinking"], true);
    assert_eq!(backends[0]["defaults"]["steps"], 48);
    let server = Server::start(Script::saying("x")).await;
    let body: Value = server.get("/studio/backends").await.json().await.unwrap();
    assert_eq!(body["backends"][0]["kind"], "causal");
    assert_eq!(body["backends"][0]["context_length"], CONTEXT);
}

/// A server whose studio may also talk to `other`.
async fn with_remote(other: &Server) -> Server {
    let toml = format!(
        "[studio]\nremote_url = \"{}\"\nremote_model = \"scripted\"\nremote_key = \"secret\"\n",
        other.url("/v1")
    );
    Server::configured(Script::saying("here"), &toml).await
}

#[tokio::test]
async fn another_server_can_be_chosen() {
    let other = Server::configured(Script::saying("there <b>"), "[server]\napi_key = \"secret\"\n").await;
    let server = with_remote(&other).await;
    let body: Value = server.get("/studio/backends").await.json().await.unwrap();
    assert_eq!(body["backends"][1]["id"], "remote");
    assert!(!body.to_string().contains("secret"), "{body}");
    let events = events(&server, &chat(json!({"backend": "remote", "seed": 3}))).await;
    let text: String =
        events.iter().filter(|(n, _)| n == "commit").map(|(_, d)| d["text"].as_str().unwrap()).collect();
    assert_eq!(text, "there <b>");
    let (name, done) = events.last().unwrap();
    assert_eq!((name.as_str(), done["finish_reason"].as_str()), ("done", Some("stop")));
    assert_eq!(done["usage"]["completion_tokens"], 10);
    assert!(server.stage.script.started.lock().unwrap().is_empty(), "our own model had nothing to do");
    assert_eq!(other.stage.script.started.lock().unwrap()[0].1.seed, 3);
}

#[tokio::test]
async fn what_the_other_server_says_no_to_is_passed_on() {
    let other = Server::configured(Script::saying("x"), "[server]\napi_key = \"another\"\n").await;
    let server = with_remote(&other).await;
    let error = server.refusal("/chat", &chat(json!({"backend": "remote"})), 502).await;
    assert!(error["message"].as_str().unwrap().contains("the API key is wrong"), "{error}");
    let gone = other.url("/v1");
    drop(other);
    let error = server.refusal("/chat", &chat(json!({"backend": "remote"})), 502).await;
    let message = error["message"].as_str().unwrap();
    assert!(!message.contains(&gone), "{message}");
}

#[tokio::test]
async fn fields_for_the_other_server_are_checked_and_none_is_lost() {
    let other = Server::configured(Script::saying("there"), "[server]\napi_key = \"secret\"\n").await;
    let server = with_remote(&other).await;
    let remote = |more: Value| {
        let mut body = chat(more);
        body["backend"] = "remote".into();
        body
    };
    for (more, param) in [
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_completion_tokens"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"stop": [""]}), "stop"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"messages": []}), "messages"),
        (json!({"tools": [{}]}), "tools"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"n": 2}), "n"),
        (json!({"stream": false}), "stream"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"thinking": true}), "thinking"),
        (json!({"steps": 4}), "steps"),
        (json!({"max_denoising_steps": 4}), "max_denoising_steps"),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), "chat_template_kwargs"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"),
        (json!({"top_k": 5}), "top_k"),
        (json!({"min_p": 0.5}), "min_p"),
        (json!({"repetition_penalty": 1.5}), "repetition_penalty"),
        (json!({"ignore_eos": true}), "ignore_eos"),
    ] {
        let error = server.refusal("/chat", &remote(more.clone()), 400).await;
        assert_eq!(error["param"], param, "{more}");
    }
    let error = server.refusal("/chat", &remote(json!({"model": "no-such"})), 404).await;
    assert_eq!((error["param"].as_str(), error["code"].as_str()), (Some("model"), Some("model_not_found")));
    assert!(other.stage.script.started.lock().unwrap().is_empty(), "nothing of that went out");

    let asks_nothing =
        json!({"thinking": false, "ignore_eos": false, "tools": [], "user": "me", "top_k": null});
    for more in [asks_nothing, json!({"model": "scripted", "unheard_of": 1})] {
        assert_eq!(events(&server, &remote(more)).await.last().unwrap().0, "done");
    }
    let more = json!({
        "temperature": 0.25, "top_p": 0.5, "presence_penalty": 0.125, "frequency_penalty": -0.5, "seed": 9,
        "stop": ["e"], "max_completion_tokens": 4,
    });
    let events = events(&server, &remote(more)).await;
    let text: String =
        events.iter().filter(|(n, _)| n == "commit").map(|(_, d)| d["text"].as_str().unwrap()).collect();
    assert_eq!(text, "th", "the stop string went along");
    let sampling = other.stage.script.started.lock().unwrap().last().unwrap().1.clone();
    assert_eq!((sampling.temperature, sampling.top_p), (0.25, 0.5));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty, sampling.seed), (0.125, -0.5, 9));
}

/// A server that answers every request with `head`, then with `more` again and again until the client leaves.
async fn canned(head: String, more: &'static [u8]) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // The whole of a small request is there at once.
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_err() || stream.write_all(head.as_bytes()).await.is_err() {
                continue;
            }
            while !more.is_empty() && stream.write_all(more).await.is_ok() {}
        }
    });
    address
}

async fn beside(address: std::net::SocketAddr) -> Server {
    let toml = format!("[studio]\nremote_url = \"http://{address}/v1\"\nremote_model = \"m\"\n");
    Server::configured(Script::saying("here"), &toml).await
}

#[tokio::test]
async fn what_the_other_server_blames_on_the_request_keeps_its_status() {
    for (status, wanted) in
        [(400, 400), (413, 413), (422, 422), (429, 429), (401, 502), (404, 502), (500, 502)]
    {
        let body = "{\"error\": {\"message\": \"not so\"}}";
        let head = format!(
            "HTTP/1.1 {status} No\r\nretry-after: 7\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let server = beside(canned(head, b"").await).await;
        let response = server.post("/chat", &chat(json!({"backend": "remote"}))).await;
        assert_eq!(response.status(), wanted, "{status}");
        assert_eq!(response.headers()["retry-after"], "7");
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["code"], "remote_failed");
        assert!(error["error"]["message"].as_str().unwrap().ends_with(": not so"), "{error}");
    }
}

#[tokio::test]
async fn an_error_without_end_is_read_to_a_limit() {
    let head = "HTTP/1.1 500 No\r\nconnection: close\r\n\r\n".to_owned();
    let server = beside(canned(head, &[b'x'; 1000]).await).await;
    let error = server.refusal("/chat", &chat(json!({"backend": "remote"})), 502).await;
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("xxx") && message.len() < 1000, "{message}");
}
