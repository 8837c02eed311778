//! The built daemon with the trained miniature, over HTTP: limits, stops, thoughts, streams, leaving, damage, long runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod safetensors_support;
mod support;

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use half::bf16;
use reqwest::{Client, Response, StatusCode};
use safetensors_support::{directory, tiny};
use serde_json::{Value, json};
use support::{cache_dir, fixture};
use tempfile::TempDir;
use tokio::sync::Mutex;

/// Longest wait for anything; far more than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(120);
const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// What the miniature was trained for, and the width of its canvas.
const CONTEXT: usize = 2048;
const CANVAS: usize = 32;
const MONTHS: &str =
    "January, February, March, April, May, June, July, August, September, October, November, December.";

/// One daemon at a time: they share two processors, and times are measured.
static TURN: Mutex<()> = Mutex::const_new(());

/// A running daemon, which ends with this.
struct Daemon {
    child: Child,
    folder: TempDir,
    port: u16,
    client: Client,
}

fn spawn(folder: &Path, model: &Path, port: u16, environment: &[(&str, &str)]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    for name in ["AXE_CONFIG", "AXE_API_KEY", "AXE_HOST", "NOTIFY_SOCKET"] {
        command.env_remove(name);
    }
    command
        .args(["serve", "--served-name", "tested", "--port", &port.to_string(), "--model"])
        .arg(model)
        .arg("--admin-socket")
        .arg(folder.join("admin.sock"))
        .env("AXE_DEVICE_CACHE_DIR", cache_dir())
        .envs(environment.iter().copied())
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.join("log")).unwrap())
        .spawn()
        .unwrap()
}

impl Daemon {
    async fn ready() -> Self {
        Self::with(&fixture("tiny-diffusiongemma"), &[]).await
    }

    async fn with(model: &Path, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = spawn(folder.path(), model, port, environment);
        let client = Client::builder().timeout(PATIENCE).build().unwrap();
        let mut daemon = Self { child, folder, port, client };
        let start = Instant::now();
        loop {
            let answer = daemon.client.get(daemon.url("/ready")).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return daemon;
            }
            assert!(daemon.child.try_wait().unwrap().is_none(), "ended: {}", daemon.log());
            assert!(start.elapsed() < PATIENCE, "not ready: {}", daemon.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// The answer to a request that must succeed.
    async fn ask(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let (status, text) = (response.status(), response.text().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{body}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The one choice of an answer, and the tokens it took.
    async fn choice(&self, body: &Value) -> (Value, u64) {
        let mut answer = self.ask(CHAT, body).await;
        let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
        (answer["choices"][0].take(), tokens)
    }

    async fn reply(&self, body: &Value) -> String {
        self.choice(body).await.0["message"]["content"].as_str().unwrap().to_owned()
    }

    /// The error of a request that must fail so.
    async fn refusal(&self, path: &str, body: &Value, code: u16) -> Value {
        let response = self.post(path, body).await;
        let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
        assert_eq!(status, code, "{body}: {text}");
        serde_json::from_str::<Value>(&text).unwrap()["error"].take()
    }

    /// The chunks of a stream, which must end as streams do.
    async fn stream(&self, body: &Value) -> Vec<Value> {
        let response = self.post(CHAT, &with(body.clone(), json!({"stream": true}))).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = response.text().await.unwrap();
        let mut events: Vec<&str> = text.split("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(events.pop(), Some(""), "the last event is complete");
        assert_eq!(events.pop(), Some("data: [DONE]"));
        events
            .iter()
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    }

    /// A figure of `/metrics`.
    async fn metric(&self, name: &str) -> f64 {
        let page = self.client.get(self.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }

    /// Waits until a figure has this value; how long it took.
    async fn until(&self, name: &str, value: f64) -> Duration {
        let start = Instant::now();
        while self.metric(name).await != value {
            assert!(start.elapsed() < PATIENCE, "{name} never was {value}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        start.elapsed()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let log = self.log();
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
        if !std::thread::panicking() {
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

fn chat(content: &str, more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": content}], "seed": 1}), more)
}

/// `body` with more fields.
fn with(body: Value, more: Value) -> Value {
    let Value::Object(mut fields) = body else { panic!("a request is an object") };
    fields.extend(more.as_object().unwrap().clone());
    Value::Object(fields)
}

/// All of a member of a stream's deltas.
fn joined(chunks: &[Value], member: &str) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][member].as_str()).collect()
}

/// That a stream says what the whole answer says.
async fn streams_the_same(daemon: &Daemon, body: &Value) {
    let (choice, _) = daemon.choice(body).await;
    let chunks = daemon.stream(body).await;
    let message = &choice["message"];
    assert_eq!(joined(&chunks, "content"), message["content"].as_str().unwrap(), "{body}");
    let reasoning = message["reasoning_content"].as_str().unwrap_or_default();
    assert_eq!(joined(&chunks, "reasoning_content"), reasoning, "{body}");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"], "{body}");
}

fn thinking(more: Value) -> Value {
    with(chat("What is 9 minus 4?", json!({"chat_template_kwargs": {"enable_thinking": true}})), more)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_their_limits_and_their_thoughts() {
    let _turn = TURN.lock().await;
    let daemon = Daemon::ready().await;
    assert!(daemon.log().contains("skipping the vision tower"), "{}", daemon.log());
    let (choice, tokens) = daemon.choice(&chat("Name the months.", json!({}))).await;
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(MONTHS), &json!("stop")));
    assert_eq!(tokens, 25, "24 and the end");

    // A canvas is 32 wide; what is asked for is not exceeded by a token.
    for most in [1, 2, 24, 25, 26, 31, 32, 33, 63, 64, 65] {
        let body = chat("Name the months.", json!({"max_tokens": most}));
        let (choice, tokens) = daemon.choice(&body).await;
        assert_eq!(tokens, most.min(25));
        assert_eq!(choice["finish_reason"], if most >= 25 { "stop" } else { "length" }, "{most}");
        assert!(MONTHS.starts_with(choice["message"]["content"].as_str().unwrap()));
        streams_the_same(&daemon, &body).await;
        let (choice, tokens) = daemon.choice(&with(body, json!({"ignore_eos": true}))).await;
        assert_eq!((tokens, &choice["finish_reason"]), (most, &json!("length")));
    }

    // Without a limit, what the context holds is the limit, and not what the checkpoint's authors generate (128).
    let body = chat("Name the months.", json!({"ignore_eos": true, "max_denoising_steps": 1}));
    let answer = daemon.ask(CHAT, &body).await;
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");

    // Thinking: on, off, and out of tokens inside.
    let (choice, _) = daemon.choice(&thinking(json!({}))).await;
    assert_eq!(choice["message"]["reasoning_content"], "I need 9 - 4.");
    assert_eq!(choice["message"]["content"], "9 - 4 = 5");
    streams_the_same(&daemon, &thinking(json!({}))).await;
    let off = daemon.choice(&chat("What is 9 minus 4?", json!({}))).await.0;
    assert!(off["message"].get("reasoning_content").is_none(), "{off}");
    assert!(!off["message"]["content"].as_str().unwrap().is_empty());
    for most in [1, 3, 5, 8, 12] {
        let body = thinking(json!({"max_tokens": most}));
        let (choice, tokens) = daemon.choice(&body).await;
        assert_eq!((tokens, &choice["finish_reason"]), (most, &json!("length")));
        assert_eq!(choice["message"]["content"], "");
        let thought = choice["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert!("I need 9 - 4.".starts_with(thought), "{thought}");
        streams_the_same(&daemon, &body).await;
    }

    // A text without a template.
    let prompt = "<bos><|turn>user\nName the months.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>";
    let answer = daemon.ask(TEXT, &json!({"prompt": prompt, "seed": 1})).await;
    assert_eq!(answer["choices"][0]["text"], MONTHS);
    let axe = &answer["axe"];
    let (steps, canvases) = (axe["denoising_steps"].as_u64().unwrap(), axe["canvases"].as_u64().unwrap());
    assert!(canvases == 1 && (1..=48).contains(&steps), "{axe}");
    assert_eq!(axe["accepted_per_step"].as_array().unwrap().len() as u64, steps);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_an_answer_inside_a_canvas_and_across_two() {
    let _turn = TURN.lock().await;
    let daemon = Daemon::ready().await;
    for (stop, expected) in [
        (json!(", March"), "January, February"),
        (json!(["nothing", "uary, M"]), "January, Febr"),
        (json!("J"), ""),
        (json!("nothing"), MONTHS),
    ] {
        let body = chat("Name the months.", json!({"stop": stop}));
        let (choice, _) = daemon.choice(&body).await;
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(expected), &json!("stop"))
        );
        streams_the_same(&daemon, &body).await;
    }
    // One step a canvas makes words without end; a seed whose text crosses the first canvas's end is soon found.
    let thinks = json!({"chat_template_kwargs": {"enable_thinking": true}});
    let bodies = [
        (TEXT, json!({"prompt": "<bos><|turn>user\nRecite the alphabet"})),
        (CHAT, chat("Name the months.", thinks.clone())),
        (CHAT, chat("Recite the alphabet.", thinks)),
    ];
    for (path, body) in bodies {
        let mut crossed = 0;
        for seed in 1..60 {
            let wild = json!({"seed": seed, "max_denoising_steps": 1, "ignore_eos": true});
            let body = with(body.clone(), wild);
            let reply = |more: Value| {
                let (daemon, body) = (&daemon, with(body.clone(), more));
                async move { daemon.ask(path, &body).await["choices"][0].take() }
            };
            let text = |choice: &Value| {
                let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
                text.as_str().unwrap().to_owned()
            };
            let whole = text(&reply(json!({"max_tokens": 3 * CANVAS})).await);
            let first = text(&reply(json!({"max_tokens": CANVAS})).await);
            let before: Vec<char> = first.chars().collect();
            let after: Vec<char> = whole.strip_prefix(&first).unwrap().chars().collect();
            if before.len() < 2 || after.len() < 2 {
                continue;
            }
            let stop: String = before[before.len() - 2..].iter().chain(&after[..2]).collect();
            let expected = &whole[..whole.find(&stop).unwrap()];
            let stopping = json!({"max_tokens": 3 * CANVAS, "stop": stop});
            let choice = reply(stopping.clone()).await;
            assert_eq!((&*text(&choice), &choice["finish_reason"]), (expected, &json!("stop")));
            if path == CHAT {
                streams_the_same(&daemon, &with(body, stopping)).await;
            }
            crossed += 1;
            if crossed == 2 {
                break;
            }
        }
        assert!(crossed > 0, "no text crossed a canvas's end");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn seeds_temperatures_and_wishes() {
    let _turn = TURN.lock().await;
    let wild = |more: Value| {
        let hot = json!({"temperature": 2, "max_denoising_steps": 2, "entropy_bound": 5, "max_tokens": 32,
            "ignore_eos": true});
        with(chat("Explain the theory of relativity", hot), more)
    };
    let daemon = Daemon::ready().await;
    let mut replies = Vec::new();
    for seed in 1..=6 {
        let reply = daemon.reply(&wild(json!({"seed": seed}))).await;
        assert_eq!(daemon.reply(&wild(json!({"seed": seed}))).await, reply, "seed {seed} again");
        replies.push(reply);
    }
    assert!(replies.iter().any(|reply| *reply != replies[0]), "{replies:?}");
    let cold = daemon.reply(&wild(json!({"temperature": 0}))).await;
    assert_eq!(daemon.reply(&wild(json!({"temperature": 0}))).await, cold);
    // Wishes are heard: what a request takes says so.
    let steps = |body: Value| {
        let daemon = &daemon;
        async move { daemon.ask(CHAT, &body).await["axe"]["denoising_steps"].as_u64().unwrap() }
    };
    let body = |more: Value| with(chat("Explain the theory of relativity", json!({"max_tokens": 32})), more);
    assert_eq!(steps(body(json!({"max_denoising_steps": 1}))).await, 1);
    let unsure = json!({"confidence_threshold": 1e-6, "temperature": 2, "max_denoising_steps": 20});
    assert_eq!(steps(body(unsure)).await, 20, "never sure");
    assert!(
        steps(body(json!({"confidence_threshold": 5, "temperature": 2, "max_denoising_steps": 20}))).await
            < 20
    );
    let accepted = |bound: f64| {
        let (daemon, body) = (&daemon, body(json!({"entropy_bound": bound, "max_denoising_steps": 1})));
        async move { daemon.ask(CHAT, &body).await["axe"]["accepted_per_step"][0].as_u64().unwrap() }
    };
    let (few, all) = (accepted(0.001).await, accepted(9.0).await);
    assert!(few < all, "{few} {all}");
    drop(daemon);
    let daemon = Daemon::ready().await;
    for (seed, reply) in replies.iter().enumerate().take(3) {
        assert_eq!(daemon.reply(&wild(json!({"seed": seed + 1}))).await, *reply, "after a restart");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_before_anything_runs() {
    let _turn = TURN.lock().await;
    let daemon = Daemon::ready().await;
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    for (more, words) in [
        (json!({"max_denoising_steps": 0}), "max_denoising_steps"),
        (json!({"max_denoising_steps": 257}), "max_denoising_steps"),
        (json!({"entropy_bound": -0.1}), "entropy_bound"),
        (json!({"confidence_threshold": 1e9}), "confidence_threshold"),
        (json!({"temperature": 2.1}), "temperature"),
        (json!({"top_k": 5}), "top_k"),
        (json!({"top_p": 0.5}), "top_p"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"messages": [{"role": "user", "content": [picture]}]}), "text only"),
    ] {
        for stream in [false, true] {
            let body = with(chat("Name the months.", more.clone()), json!({"stream": stream}));
            let error = daemon.refusal(CHAT, &body, 400).await;
            assert!(error["message"].as_str().unwrap().contains(words), "{error}");
        }
    }
    assert_eq!(daemon.metric("axe_canvases_total").await, 0.0, "nothing ran");

    // The context: what fits to the token runs to its end.
    let words = "river ".repeat(1900);
    let probe = daemon.ask(CHAT, &chat(&words, json!({"max_tokens": 1, "max_denoising_steps": 1}))).await;
    let prompt = probe["usage"]["prompt_tokens"].as_u64().unwrap();
    let left = CONTEXT as u64 - prompt;
    assert!(left > 3 * CANVAS as u64, "{prompt}");
    let fits = chat(&words, json!({"max_tokens": left, "ignore_eos": true, "max_denoising_steps": 2}));
    let (choice, tokens) = daemon.choice(&fits).await;
    assert_eq!((tokens, &choice["finish_reason"]), (left, &json!("length")));
    // A wish for more is cut to what is left.
    let (choice, tokens) = daemon.choice(&with(fits, json!({"max_tokens": left + 1}))).await;
    assert_eq!((tokens, &choice["finish_reason"]), (left, &json!("length")));
    // A prompt that leaves room for one token, and one that leaves none.
    let more = left - 1;
    let full = format!("{words}{}", "river ".repeat(more as usize));
    let body = |text: &str| chat(text, json!({"max_tokens": 1, "max_denoising_steps": 1}));
    let answer = daemon.ask(CHAT, &body(&full)).await;
    assert_eq!(answer["usage"]["prompt_tokens"], CONTEXT - 1);
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    for stream in [false, true] {
        let body = with(body(&format!("{full}river ")), json!({"stream": stream}));
        let error = daemon.refusal(CHAT, &body, 400).await;
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(CONTEXT), &json!(CONTEXT)));
    }
    assert_eq!(daemon.reply(&chat("Name the months.", json!({}))).await, MONTHS);
}

/// A request of many steps: hot and never sure.
fn endless(more: Value) -> Value {
    let wild = json!({"temperature": 2, "confidence_threshold": 1e-6, "ignore_eos": true, "max_tokens": 1900,
        "max_denoising_steps": 256});
    with(chat("Explain the theory of relativity", wild), more)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_the_slot_within_a_step() {
    let _turn = TURN.lock().await;
    // Prompts go in token by token: there is time to leave.
    let daemon = Daemon::with(&fixture("tiny-diffusiongemma"), &[("AXE_DEVICE_PREFILL_CHUNK", "1")]).await;
    let prefill = chat(&"river ".repeat(1900), json!({"max_tokens": 1}));
    // Every second step ends a canvas.
    let hasty = endless(json!({"max_denoising_steps": 1}));
    let leave = |body: Value, after: Duration| {
        let daemon = &daemon;
        async move {
            let request = daemon.client.post(daemon.url(CHAT)).json(&body);
            let leaving = tokio::spawn(async move {
                let mut response = request.send().await.unwrap();
                while response.chunk().await.unwrap().is_some() {}
                panic!("the request was to be cancelled");
            });
            daemon.until("axe_running", 1.0).await;
            tokio::time::sleep(after).await;
            assert_eq!(daemon.metric("axe_running").await, 1.0, "it ended too soon for this test");
            let left = Instant::now();
            leaving.abort();
            assert!(leaving.await.unwrap_err().is_cancelled());
            daemon.until("axe_running", 0.0).await;
            left.elapsed()
        }
    };
    let bound = Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 500 });
    let mut rounds = 0.0;
    for (phase, body, times) in
        [("prefill", prefill, 2), ("a canvas", endless(json!({})), 4), ("many canvases", hasty, 6)]
    {
        for round in 0..times {
            let body = with(body.clone(), json!({"stream": round % 2 == 0, "seed": round}));
            let freed = leave(body, Duration::from_millis(7 * round)).await;
            assert!(freed < bound, "{phase}, round {round}: freed after {freed:?}");
            rounds += 1.0;
        }
    }
    assert_eq!(daemon.metric("axe_requests_total{outcome=\"cancelled\"}").await, rounds);
    // One that leaves while it waits.
    let mut running = daemon.post(CHAT, &endless(json!({"stream": true}))).await;
    daemon.until("axe_running", 1.0).await;
    let waiting = tokio::spawn({
        let request = daemon.client.post(daemon.url(CHAT)).json(&endless(json!({})));
        async move { request.send().await.map(drop) }
    });
    daemon.until("axe_queue_depth", 1.0).await;
    waiting.abort();
    assert!(daemon.until("axe_queue_depth", 0.0).await < bound);
    assert_eq!(daemon.metric("axe_running").await, 1.0);
    assert!(running.chunk().await.unwrap().is_some());
    drop(running);
    daemon.until("axe_running", 0.0).await;
    assert_eq!(daemon.reply(&chat("Name the months.", json!({}))).await, MONTHS);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_requests_slow_nothing_down() {
    let _turn = TURN.lock().await;
    let daemon = Daemon::ready().await;
    let questions =
        ["Name the months.", "Recite the alphabet.", "What is 7 plus 5?", "Repeat: river moon cake"];
    let (mut times, mut resident) = (Vec::new(), Vec::new());
    for round in 0..210 {
        let start = Instant::now();
        let more = json!({"seed": round, "max_tokens": 1 + round % 70, "ignore_eos": round % 3 == 0});
        // Prompts of more widths than passes are kept prepared.
        let words = format!("{}{}", "river ".repeat(round % 50), questions[round % 4]);
        daemon.ask(CHAT, &chat(&words, more)).await;
        if round >= 10 {
            times.push(start.elapsed());
            resident.push(daemon.metric("process_resident_memory_bytes").await);
        }
    }
    let (first, last): (Duration, Duration) = (times[..20].iter().sum(), times[180..].iter().sum());
    println!("20 requests: first {first:?}, last {last:?}; resident {} -> {}", resident[19], resident[199]);
    assert!(last < 3 * first + Duration::from_millis(200), "{first:?} at first, {last:?} in the end");
    assert!(resident[199] < resident[99] + f64::from(8 << 20), "{} -> {}", resident[99], resident[199]);
}

/// The miniature with one number of a tensor replaced.
fn damaged(folder: &Path, name: &str, value: f32) -> PathBuf {
    let mut tensors = tiny();
    let raw = tensors.get_mut(name).unwrap();
    raw.bytes[..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    let path = folder.join(name.rsplit('.').nth(1).unwrap());
    directory(&path, &tensors);
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_are_none_end_a_request_and_nothing_else() {
    let _turn = TURN.lock().await;
    let folder = tempfile::tempdir().unwrap();
    // Shows in the second step of a canvas only: one step is sound.
    let path = damaged(folder.path(), "model.decoder.self_conditioning.down_proj.weight", f32::NAN);
    let daemon = Daemon::with(&path, &[]).await;
    for round in 0..3 {
        let error = daemon.refusal(CHAT, &chat("Name the months.", json!({})), 500).await;
        assert!(error["message"].as_str().unwrap().contains("not finite"), "{error}");
        assert_eq!(error["type"], "server_error");
        let sound = daemon.ask(CHAT, &chat("Name the months.", json!({"max_denoising_steps": 1}))).await;
        assert_eq!(sound["choices"][0]["finish_reason"], "stop", "round {round}");
        let stream = daemon.post(CHAT, &chat("Name the months.", json!({"stream": true}))).await;
        let text = stream.text().await.unwrap();
        assert!(text.contains("not finite") && !text.contains("[DONE]") && !text.contains("Jan"), "{text}");
    }
    drop(daemon);
    let path = damaged(folder.path(), "model.decoder.norm.weight", f32::INFINITY);
    let daemon = Daemon::with(&path, &[]).await;
    for _ in 0..2 {
        daemon.refusal(CHAT, &chat("Name the months.", json!({})), 500).await;
    }
    assert_eq!(daemon.metric("axe_requests_total{outcome=\"error\"}").await, 2.0);
    assert_eq!(daemon.metric("axe_running").await, 0.0);
}

/// What a daemon says that cannot start.
fn refused(model: &Path) -> String {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut child = spawn(folder.path(), model, port, &[]);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            let _killed = child.kill();
            panic!("the daemon starts");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    log
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_without_its_text_side_is_refused_by_name() {
    let _turn = TURN.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    directory(&path, &tiny());
    std::fs::remove_file(path.join("tokenizer.json")).unwrap();
    let log = refused(&path);
    assert!(log.contains("tokenizer.json"), "{log}");
    directory(&path, &tiny());
    std::fs::write(path.join("generation_config.json"), "{\"t_min\": 0.9}").unwrap();
    let log = refused(&path);
    assert!(log.contains("generation_config.json") && log.contains("t_min is 0.9"), "{log}");
    // The random model has no text side at all.
    let log = refused(&fixture("diffusion-random/model"));
    assert!(log.contains("tokenizer.json"), "{log}");
}

/// Each API tells the same reply in its own words.
#[tokio::test]
async fn all_dialects_tell_what_the_miniature_says_and_thinks() {
    let _turn = TURN.lock().await;
    let daemon = Daemon::ready().await;
    let (capital, sum) = ("What is the capital of France?", "What is 9 - 4?");
    let said = "The capital of France is Paris.";
    let user = |text: &str| json!([{"role": "user", "content": text}]);
    let message = daemon.ask("/v1/messages", &json!({"max_tokens": 100, "messages": user(capital)})).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": said}]));
    let response = daemon.ask("/v1/responses", &json!({ "input": capital })).await;
    assert_eq!(response["output"][0]["content"][0]["text"], said);
    assert_eq!(response["usage"]["output_tokens"], message["usage"]["output_tokens"]);
    let on = json!({"type": "enabled", "budget_tokens": 1024});
    let body = json!({"max_tokens": 200, "messages": user(sum), "thinking": on, "seed": 1});
    let message = daemon.ask("/v1/messages", &body).await;
    assert_eq!(message["content"][0]["type"], "thinking");
    let body = json!({"input": sum, "reasoning": {"effort": "high"}, "seed": 1});
    let response = daemon.ask("/v1/responses", &body).await;
    assert_eq!(response["output"][0]["summary"][0]["text"], message["content"][0]["thinking"]);
    assert_eq!(response["output"][1]["content"][0]["text"], message["content"][1]["text"]);
    assert!(message["content"][1]["text"].as_str().unwrap().contains('5'), "{message}");
}
