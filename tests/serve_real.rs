//! The built daemon with a real model, over its sockets: answers, seeds, cancellation, resources, start and end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use support::{cache_dir, fixture, real_model};
use tempfile::TempDir;
use tokio::sync::Mutex;

/// Longest wait for anything; far more than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(120);
const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "What is the capital of Australia?";
const CONTEXT: usize = 4096;

/// One daemon at a time: they share two processors, and times are measured.
static TURN: Mutex<()> = Mutex::const_new(());

fn model() -> PathBuf {
    real_model("smollm2-135m-instruct-q4_1.gguf")
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A running daemon, which ends with this.
struct Daemon {
    child: Child,
    folder: TempDir,
    port: u16,
    client: Client,
    started: Instant,
}

fn spawn(folder: &Path, port: u16, log: &str, more: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    for name in ["AXE_CONFIG", "AXE_API_KEY", "AXE_HOST", "NOTIFY_SOCKET"] {
        command.env_remove(name);
    }
    command
        .args(["serve", "--model"])
        .arg(model())
        .args([
            "--served-name",
            "tested",
            "--port",
            &port.to_string(),
            "--context-length",
            &CONTEXT.to_string(),
        ])
        .arg("--admin-socket")
        .arg(folder.join("admin.sock"))
        .args(more)
        .env("AXE_DEVICE_CACHE_DIR", cache_dir())
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.join(log)).unwrap())
        .spawn()
        .unwrap()
}

impl Daemon {
    fn start_in(folder: TempDir) -> Self {
        let (port, started) = (free_port(), Instant::now());
        let child = spawn(folder.path(), port, "log", &[]);
        Self { child, folder, port, client: Client::builder().timeout(PATIENCE).build().unwrap(), started }
    }

    /// Started, and ready after the time that is told, too.
    async fn ready() -> (Self, Duration) {
        Self::ready_in(tempfile::tempdir().unwrap()).await
    }

    async fn ready_in(folder: TempDir) -> (Self, Duration) {
        let mut daemon = Self::start_in(folder);
        loop {
            let answer = daemon.client.get(daemon.url("/ready")).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                let took = daemon.started.elapsed();
                return (daemon, took);
            }
            assert!(daemon.child.try_wait().unwrap().is_none(), "ended: {}", daemon.log());
            assert!(daemon.started.elapsed() < PATIENCE, "not ready: {}", daemon.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    async fn post(&self, body: &Value) -> Response {
        self.client.post(self.url(CHAT)).json(body).send().await.unwrap()
    }

    /// The answer to a request that must succeed.
    async fn ask(&self, body: &Value) -> Value {
        let response = self.post(body).await;
        let (status, text) = (response.status(), response.text().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    async fn reply(&self, body: &Value) -> String {
        self.ask(body).await["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }

    /// The chunks of a stream, which must end as streams do.
    async fn stream(&self, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.post(&body).await;
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
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        start.elapsed()
    }

    fn axectl(&self, arguments: &[&str]) -> (i32, String) {
        let mut command = Command::new(axectl());
        let output = command.args(arguments).arg("--socket").arg(self.socket()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    }

    fn status(&self) -> Value {
        let (code, out) = self.axectl(&["status", "--json"]);
        assert_eq!(code, 0, "{out}");
        serde_json::from_str(&out).unwrap()
    }

    fn proc(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    /// Processor time used so far, in user and system mode.
    fn processor_time(&self) -> Duration {
        let stat = self.proc("stat");
        // The name before may hold blanks; utime and stime are the 14th and 15th field of all.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let hertz = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap() as u64;
        Duration::from_millis(ticks * 1000 / hertz)
    }

    fn terminate(&self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    }

    /// Waits for the end; the exit status and the log.
    async fn end(&mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.log());
            }
            assert!(start.elapsed() < PATIENCE, "the daemon does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
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

/// The operator's program, freshly built: cargo builds a package's own programs for its tests only.
fn axectl() -> PathBuf {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_BIN_EXE_axed")).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "axectl"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if folder.ends_with("release") {
            build.arg("--release");
        }
        build.arg("--target-dir").arg(folder.parent().unwrap());
        assert!(build.status().unwrap().success(), "building axectl failed");
        folder.join("axectl")
    };
    BUILT.get_or_init(build).clone()
}

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 48})
}

/// `body` with more fields.
fn with(body: Value, more: Value) -> Value {
    let Value::Object(mut fields) = body else { panic!("a request is an object") };
    fields.extend(more.as_object().unwrap().clone());
    Value::Object(fields)
}

/// A request that runs until somebody ends it.
fn endless() -> Value {
    with(
        chat("Tell me a long story."),
        json!({"ignore_eos": true, "max_tokens": 4000, "temperature": 1, "seed": 1}),
    )
}

/// The text of a stream's chunks.
fn joined(chunks: &[Value]) -> String {
    let content = |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    chunks.iter().filter_map(content).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_answers_are_the_references_streamed_or_not() {
    let _turn = TURN.lock().await;
    let (daemon, _) = Daemon::ready().await;
    let golden = std::fs::read(fixture("real-models/smollm2-135m-instruct-q4_1.greedy.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let case = &golden[0];
    assert_eq!(case["prompt"]["messages"][0]["content"], QUESTION);
    let answer = daemon.ask(&chat(QUESTION)).await;
    assert_eq!(answer["choices"][0]["message"]["content"], case["reply"]);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["model"], "tested");
    assert_eq!(answer["usage"]["prompt_tokens"], case["prompt_ids"].as_array().unwrap().len());
    assert_eq!(answer["usage"]["completion_tokens"], case["tokens"].as_array().unwrap().len());
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let axe = &answer["axe"];
    for figure in ["elapsed_s", "queue_s", "prefill_s", "first_token_s", "tokens_per_pass", "passes"] {
        assert!(axe[figure].as_f64().is_some_and(|figure| figure >= 0.0), "{figure} in {axe}");
    }
    assert!(axe["first_token_s"].as_f64() <= axe["elapsed_s"].as_f64(), "{axe}");
    assert!(axe["device"].as_str().is_some_and(|device| !device.is_empty()), "{axe}");

    // The same again is read from the cache but for its last token, and says the same.
    let again = daemon.ask(&chat(QUESTION)).await;
    assert_eq!(again["choices"], answer["choices"]);
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], prompt_tokens - 1);
    // Another question shares the beginning of the template.
    let other = daemon.ask(&chat("Name a colour.")).await;
    let cached = other["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 10 && cached < prompt_tokens, "{cached}");

    for body in [
        chat(QUESTION),
        chat("Schreibe ein Gedicht über Käse — mit Emoji 🧀."),
        with(chat("Count to ten."), json!({"temperature": 1.2, "seed": 7})),
    ] {
        let chunks =
            daemon.stream(&with(body.clone(), json!({"stream_options": {"include_usage": true}}))).await;
        let whole = daemon.ask(&body).await;
        assert_eq!(whole["choices"][0]["message"]["content"], joined(&chunks));
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        let (usage, text) = chunks.split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
        let (last, before) = text.split_last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert!(before.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
        assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    }

    // Stop strings: across tokens, in a stream, and none that shows.
    let full = case["reply"].as_str().unwrap();
    for (stop, expected) in [
        (json!(" of Austra"), "The capital"),
        (json!(["zebra", "is Can"]), "The capital of Australia "),
        (json!("The"), ""),
        (json!("nowhere"), full),
    ] {
        let body = with(chat(QUESTION), json!({"stop": stop}));
        let answer = daemon.ask(&body).await;
        assert_eq!(answer["choices"][0]["message"]["content"], expected, "{stop}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(joined(&daemon.stream(&body).await), expected, "{stop} in a stream");
    }
    // A limit is one, to the token.
    for most in [1, 2, 5] {
        let answer = daemon.ask(&with(chat(QUESTION), json!({"max_tokens": most}))).await;
        assert_eq!(answer["usage"]["completion_tokens"], most);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert!(full.starts_with(answer["choices"][0]["message"]["content"].as_str().unwrap()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_says_the_same_after_a_restart_and_another_one_does_not() {
    let _turn = TURN.lock().await;
    let ask =
        |seed: u64| with(chat("Tell me a story."), json!({"temperature": 1.0, "top_p": 0.95, "seed": seed}));
    let (daemon, _) = Daemon::ready().await;
    let first = daemon.reply(&ask(7)).await;
    assert_eq!(daemon.reply(&ask(7)).await, first, "the same, now from the cache");
    assert_ne!(daemon.reply(&ask(8)).await, first);
    assert_ne!(daemon.reply(&with(ask(7), json!({"temperature": 0}))).await, first);
    drop(daemon);
    let (daemon, _) = Daemon::ready().await;
    assert_eq!(daemon.reply(&ask(8)).await, daemon.reply(&ask(8)).await);
    assert_eq!(daemon.reply(&ask(7)).await, first, "after a restart");
    // Without a seed it is drawn, and told, so that the answer can be had again.
    let mut random = with(chat("Tell me a story."), json!({"temperature": 1.0, "top_p": 0.95}));
    let (one, two) = (daemon.ask(&random).await, daemon.ask(&random).await);
    assert_ne!(one["axe"]["seed"], two["axe"]["seed"]);
    random["seed"] = one["axe"]["seed"].clone();
    assert_eq!(daemon.ask(&random).await["choices"], one["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_the_slot_for_the_one_that_waits() {
    let _turn = TURN.lock().await;
    let (daemon, _) = Daemon::ready().await;
    let long_prompt = with(chat(&"word ".repeat(3500)), json!({"max_tokens": 8}));
    let left = with(endless(), json!({"stream": true}));
    for (round, body) in [&left, &long_prompt].into_iter().enumerate() {
        // Generating and streaming first, then in the midst of a prompt, not streaming.
        let leaving = tokio::spawn({
            let (client, url, body) = (daemon.client.clone(), daemon.url(CHAT), body.clone());
            async move {
                let mut response = client.post(url).json(&body).send().await.unwrap();
                while response.chunk().await.unwrap().is_some() {}
                panic!("the request was to be cancelled");
            }
        });
        daemon.until("axe_running", 1.0).await;
        if round == 0 {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        let waiting = tokio::spawn({
            let request =
                daemon.client.post(daemon.url(CHAT)).json(&with(chat(QUESTION), json!({"max_tokens": 2})));
            async move { request.send().await.unwrap().status() }
        });
        daemon.until("axe_queue_depth", 1.0).await;
        assert_eq!(daemon.metric("axe_running").await, 1.0);
        let left_at = Instant::now();
        leaving.abort();
        assert!(leaving.await.unwrap_err().is_cancelled());
        daemon.until("axe_queue_depth", 0.0).await;
        let freed = left_at.elapsed();
        assert_eq!(waiting.await.unwrap(), StatusCode::OK);
        // A step is a token, or a chunk of the prompt: much less than the rest of either request.
        let bound = if cfg!(debug_assertions) { 10.0 } else { 1.5 };
        assert!(freed.as_secs_f64() < bound, "round {round}: the slot was freed after {freed:?}");
        assert_eq!(daemon.metric("axe_requests_total{outcome=\"cancelled\"}").await, (round + 1) as f64);
    }
    // One that leaves while it waits does not hold up anybody either.
    let mut running = daemon.post(&left).await;
    assert!(running.chunk().await.unwrap().is_some());
    let waiting = tokio::spawn({
        let request = daemon.client.post(daemon.url(CHAT)).json(&endless());
        async move { request.send().await.map(drop) }
    });
    daemon.until("axe_queue_depth", 1.0).await;
    waiting.abort();
    daemon.until("axe_queue_depth", 0.0).await;
    assert_eq!(daemon.metric("axe_running").await, 1.0);
    drop(running);
    daemon.until("axe_running", 0.0).await;
    assert_eq!(daemon.reply(&chat(QUESTION)).await, "The capital of Australia is Canberra.");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_start_is_quick_and_a_daemon_modest() {
    let _turn = TURN.lock().await;
    drop(Daemon::ready().await);
    let (daemon, took) = Daemon::ready().await;
    println!("second start: {took:?}");
    assert!(cfg!(debug_assertions) || took < Duration::from_secs(2), "a second start took {took:?}");

    daemon.reply(&chat(QUESTION)).await;
    daemon.reply(&with(chat(&"word ".repeat(1000)), json!({"max_tokens": 8}))).await;
    let status = daemon.status();
    let bytes = |key: &str| status["memory"][key].as_u64().unwrap();
    let (weights, kv_cache) = (bytes("weights_bytes"), bytes("kv_cache_bytes"));
    assert!(weights > 90 << 20, "{weights}");
    // Keys and values of 30 layers, 3 heads of 64 values, f16.
    assert_eq!(kv_cache, 2 * 30 * 3 * 64 * 2 * CONTEXT as u64);
    assert_eq!(bytes("total_bytes"), weights + kv_cache + bytes("scratch_bytes"));
    let resident = daemon.proc("status");
    let resident = resident.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident = resident.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10;
    println!("resident {} MiB, weights {} MiB, KV {} MiB", resident >> 20, weights >> 20, kv_cache >> 20);
    assert!(resident < weights + kv_cache + (150 << 20), "{} MiB resident", resident >> 20);

    tokio::time::sleep(Duration::from_secs(1)).await;
    let (before, start) = (daemon.processor_time(), Instant::now());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let share = (daemon.processor_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    println!("idle: {:.2} % of a processor", share * 100.0);
    assert!(share < 0.01, "{share} of a processor while idle");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_requests_are_refused_and_the_next_one_works() {
    let _turn = TURN.lock().await;
    let (daemon, _) = Daemon::ready().await;
    let post = |body: &'static str| {
        daemon.client.post(daemon.url(CHAT)).header("content-type", "application/json").body(body)
    };
    let long = serde_json::to_string(&chat(&"word ".repeat(CONTEXT + 10))).unwrap();
    let long: &'static str = Box::leak(long.into_boxed_str());
    let cases = [
        (daemon.client.get(daemon.url("/v1/nothing")), 404, "/v1/nothing"),
        (daemon.client.get(daemon.url(CHAT)), 405, "Allow"),
        (post("{\"messages\": ["), 400, "JSON"),
        (post("[]"), 400, "object"),
        (post("{}"), 400, "messages"),
        (post(r#"{"messages": "hi"}"#), 400, "messages"),
        (
            post(r#"{"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}"#),
            400,
            "temperature",
        ),
        (post(r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}"#), 400, "max_tokens"),
        (post(r#"{"messages": [{"role": "user", "content": "hi"}], "model": "gpt-4"}"#), 404, "gpt-4"),
        (post(r#"{"messages": [{"role": "user", "content": "\ud800"}]}"#), 400, ""),
        (post(long), 400, "4096"),
    ];
    for (request, code, word) in cases {
        let response = request.send().await.unwrap();
        let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
        assert_eq!(status, code, "{text}");
        let error: Value = serde_json::from_str(&text).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(word), "no '{word}' in {text}");
        for key in ["type", "param", "code"] {
            assert!(error["error"].get(key).is_some(), "no {key} in {text}");
        }
        let reply = daemon.reply(&with(chat(QUESTION), json!({"max_tokens": 3}))).await;
        assert_eq!(reply, "The capital of", "after {text}");
    }
}

/// What a daemon says that cannot start.
async fn refused(folder: &Path, port: u16, more: &[&str]) -> String {
    let mut child = spawn(folder, port, "refused", more);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            let _killed = child.kill();
            panic!("the daemon starts");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let mut log = String::new();
    File::open(folder.join("refused")).unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    log
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_and_sockets_in_use_are_refused_and_stale_sockets_taken_over() {
    let _turn = TURN.lock().await;
    let folder = tempfile::tempdir().unwrap();
    // A daemon that was killed leaves its socket behind.
    drop(UnixListener::bind(folder.path().join("admin.sock")).unwrap());
    let (daemon, _) = Daemon::ready_in(folder).await;
    assert_eq!(daemon.status()["state"], "ready");

    let elsewhere = tempfile::tempdir().unwrap();
    let log = refused(elsewhere.path(), daemon.port, &[]).await;
    assert!(log.contains(&daemon.port.to_string()) && log.contains("another port"), "{log}");
    let log = refused(daemon.folder.path(), free_port(), &[]).await;
    assert!(log.contains("admin.sock"), "{log}");
    // Whoever was first is not harmed.
    assert_eq!(daemon.status()["state"], "ready");
    assert_eq!(daemon.reply(&chat(QUESTION)).await, "The capital of Australia is Canberra.");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_daemon_finishes_what_it_has_begun() {
    let _turn = TURN.lock().await;
    let (mut daemon, _) = Daemon::ready().await;
    let body = with(chat("Count to ten."), json!({"ignore_eos": true, "max_tokens": 150}));
    let expected = daemon.reply(&body).await;
    let ask = |body: &Value| {
        let request = daemon.client.post(daemon.url(CHAT)).json(body);
        tokio::spawn(async move { request.send().await.unwrap().json::<Value>().await.unwrap() })
    };
    let (running, waiting) = (ask(&body), ask(&chat(QUESTION)));
    daemon.until("axe_queue_depth", 1.0).await;
    let client = Client::new();
    daemon.terminate();
    let start = Instant::now();
    // Nothing new is taken: refused, or not even connected to.
    loop {
        match client.post(daemon.url(CHAT)).json(&chat(QUESTION)).timeout(PATIENCE).send().await {
            Err(error) if error.is_connect() => break,
            Ok(answer) if answer.status() == StatusCode::SERVICE_UNAVAILABLE => break,
            // The signal may not have been seen yet.
            Ok(answer) => {
                assert!(answer.status() == StatusCode::OK && start.elapsed() < PATIENCE, "{answer:?}")
            }
            Err(error) => panic!("{error}"),
        }
    }
    let replies = [running.await.unwrap(), waiting.await.unwrap()];
    let replies = replies.map(|reply| reply["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
    assert!(
        replies.contains(&expected) && replies.contains(&"The capital of Australia is Canberra.".to_owned()),
        "{replies:?}"
    );
    let (code, log) = daemon.end().await;
    assert_eq!(code, Some(0), "{log}");
    assert!(!daemon.socket().exists(), "the socket is removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn axectl_shows_and_steers_the_daemon() {
    let _turn = TURN.lock().await;
    let (mut daemon, _) = Daemon::ready().await;
    daemon.reply(&chat(QUESTION)).await;
    let status = daemon.status();
    assert_eq!(status["state"], "ready");
    assert_eq!(status["pid"], daemon.child.id());
    assert_eq!(status["listen"], daemon.url(""));
    assert_eq!(status["model"]["name"], "tested");
    assert_eq!(status["model"]["architecture"], "llama");
    assert_eq!(status["model"]["quantisation"], "Q4_1");
    assert_eq!(status["model"]["context_length"], CONTEXT);
    assert_eq!(status["counters"]["finished"], 1);
    assert_eq!(status["counters"]["completion_tokens"], 8);
    let (code, table) = daemon.axectl(&["status"]);
    assert!(code == 0 && table.contains("tested") && table.contains("Q4_1"), "{table}");
    let (code, version) = daemon.axectl(&["version"]);
    assert!(code == 0 && version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    let (code, lines) = daemon.axectl(&["logs"]);
    assert!(code == 0 && lines.contains("memory plan"), "{lines}");
    let (code, card) = daemon.axectl(&["gpu", "--json"]);
    assert_eq!(code, 0, "{card}");
    assert!(serde_json::from_str::<Value>(&card).unwrap().is_object());

    assert_eq!(daemon.axectl(&["cancel", "nobody"]).0, 4);
    let mut running = daemon.post(&with(endless(), json!({"stream": true}))).await;
    assert!(running.chunk().await.unwrap().is_some());
    let (code, queue) = daemon.axectl(&["queue", "--json"]);
    let queue: Value = serde_json::from_str(&queue).unwrap();
    assert_eq!(code, 0);
    let id = queue["running"]["id"].as_str().unwrap().to_owned();
    let (code, said) = daemon.axectl(&["cancel", &id]);
    assert_eq!(code, 0, "{said}");
    let mut rest = Vec::new();
    while let Some(chunk) = running.chunk().await.unwrap() {
        rest.extend(chunk);
    }
    let rest = String::from_utf8(rest).unwrap();
    assert!(rest.contains("\"error\"") && rest.contains("cancelled") && !rest.contains("[DONE]"), "{rest}");
    assert_eq!(daemon.status()["counters"]["cancelled"], 1);
    assert_eq!(daemon.reply(&chat(QUESTION)).await, "The capital of Australia is Canberra.");

    let (code, said) = daemon.axectl(&["drain"]);
    assert_eq!(code, 0, "{said}");
    assert_eq!(daemon.end().await.0, Some(0));
    assert_eq!(daemon.axectl(&["status"]).0, 3, "nobody is there any more");
}
