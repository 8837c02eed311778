//! The configuration read anew: live settings, other models, requests under way, and everything that can be wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod operated;
mod stage;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axe::config::Config;
use axe::decode::{BackendError, Step};
use axe::engine::{
    Cause, EngineHandle, FinishReason, LoadProgress, Loaded, Loader, Options, Request, State, Stop,
    SubmitError,
};
use axe::http::{App, Face};
use axectl::client::ClientError;
use axectl::protocol::{Change, Config as Shown, Drain, Reload};
use nix::sys::signal::Signal;
use operated::{Axed, causal, completion, diffusion, until};
use serde_json::{Value, json};
use stage::troupe::{Troupe, engine, named, troupe};
use stage::{PATIENCE, Script, Scripted, bytes, eventually, listen, say};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

fn request(prompt: &str) -> Request {
    Request {
        id: prompt.to_owned(),
        prompt: bytes(prompt),
        stop: Stop { max_tokens: 100, ..Stop::default() },
        ..Request::default()
    }
}

/// A model that says its name to every prompt.
fn saying(name: &'static str) -> impl FnMut(&LoadProgress) -> Result<Loaded, BackendError> + Send {
    move |_| Ok(named(name, Scripted(Script::saying(name).into())))
}

fn nothing() -> Box<dyn FnOnce() + Send> {
    Box::new(|| {})
}

async fn answer(engine: &EngineHandle) -> String {
    let _pass = engine.enter().await.unwrap();
    listen(engine.submit(request("who?")).unwrap().events).await.text
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_accepted_runs_on_the_old_model_and_what_comes_later_on_the_new_one() {
    for fits in [true, false] {
        let script = Arc::new(Script::new(|_| say("old")).gated());
        let old = Arc::clone(&script);
        let make = move |_: &_| Ok(named("old", Scripted(Arc::clone(&old))));
        let engine = engine(troupe(make), Options::default());
        let jobs = ["a", "b"].map(|prompt| engine.submit(request(prompt)).unwrap());
        let inside = engine.enter().await.unwrap();
        let switched = Arc::new(AtomicBool::new(false));
        let replacing = tokio::spawn({
            let (engine, switched) = (engine.clone(), Arc::clone(&switched));
            let loader = Box::new(Troupe { make: saying("new"), fits });
            let switch = Box::new(move || switched.store(true, Ordering::SeqCst));
            async move { engine.replace(loader, switch).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The door is closed: who comes now waits, unread.
        let late = tokio::spawn({
            let engine = engine.clone();
            async move { answer(&engine).await }
        });
        eventually("the wait at the door", || engine.status().queue.depth == 2).await;
        script.permit(1000);
        for job in jobs {
            assert_eq!(listen(job.events).await.text, "old");
        }
        // A request that is being read for the old model still counts for it.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!switched.load(Ordering::SeqCst) && engine.model().unwrap().name == "old");
        let job = engine.submit(request("c")).unwrap();
        drop(inside);
        assert_eq!(listen(job.events).await.text, "old");
        assert_eq!(late.await.unwrap(), "new");
        let replaced = replacing.await.unwrap().unwrap();
        assert_eq!((replaced.beside, replaced.closed_s > 0.1), (fits, true), "{replaced:?}");
        assert!(switched.load(Ordering::SeqCst));
        let status = engine.status();
        assert_eq!((status.model.as_deref(), status.state), (Some("new"), State::Ready));
        assert_eq!((status.counters.requests.stop, status.counters.requests.error), (4, 0));
        assert_eq!(status.counters.unloads, u64::from(!fits));
        engine.shutdown();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_does_not_work_never_takes_over() {
    let broken = |_: &_| Err("tensor `x` is missing".into());
    let mute = |_: &_| Ok(named("mute", Scripted(Script::new(|_| Vec::<Step>::new()).into())));
    let panics = |_: &LoadProgress| panic!("no such layout");
    for fits in [true, false] {
        let engine = engine(troupe(saying("old")), Options::default());
        for (loader, words) in [
            (Box::new(Troupe { make: broken, fits }) as Box<dyn Loader>, "tensor `x` is missing"),
            (Box::new(Troupe { make: mute, fits }), "its first pass fails: the script is at its end"),
            (Box::new(Troupe { make: panics, fits }), "while loading the model: no such layout"),
        ] {
            let error = engine.replace(loader, Box::new(|| panic!("switched"))).await.unwrap_err();
            assert!(error.contains(words), "{error}");
            assert_eq!(answer(&engine).await, "old");
            let status = engine.status();
            assert_eq!((status.model.as_deref(), status.resident), (Some("old"), true));
            assert_eq!((status.state, status.counters.requests.error), (State::Ready, 0));
        }
        assert_eq!(engine.status().counters.loads, if fits { 0 } else { 3 });
        let loader = Box::new(Troupe { make: saying("new"), fits });
        engine.replace(loader, nothing()).await.unwrap();
        assert_eq!(answer(&engine).await, "new");
        engine.shutdown();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_change_at_a_time_and_none_while_the_engine_ends() {
    let engine = engine(troupe(saying("old")), Options::default());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let slow = move |_: &_| {
        wait.recv()?;
        Ok(named("slow", Scripted(Script::saying("slow").into())))
    };
    let replacing = tokio::spawn({
        let engine = engine.clone();
        async move { engine.replace(troupe(slow), nothing()).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let second = engine.replace(troupe(saying("third")), nothing()).await.unwrap_err();
    assert!(second.contains("already"), "{second}");
    engine.drain();
    go.send(()).unwrap();
    let error = replacing.await.unwrap().unwrap_err();
    assert!(error.contains("about to end"), "{error}");
    assert_eq!(engine.over().await, State::Stopped);
    assert!(engine.replace(troupe(saying("late")), nothing()).await.is_err());
    assert!(engine.enter().await.is_ok(), "an open door is no promise");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_wait_at_the_door_than_in_the_queue() {
    let script = Arc::new(Script::endless().gated());
    let old = Arc::clone(&script);
    let make = move |_: &_| Ok(named("old", Scripted(Arc::clone(&old))));
    let engine = engine(troupe(make), Options { queue_capacity: 2, ..Options::default() });
    let running = engine.submit(request("a")).unwrap();
    let replacing = tokio::spawn({
        let engine = engine.clone();
        async move { engine.replace(troupe(saying("new")), nothing()).await }
    });
    let outside = Arc::new(Mutex::new(Vec::new()));
    eventually("a closed door", || {
        // Whoever enters an open door is let go at once.
        let waits = futures::FutureExt::now_or_never(engine.enter()).is_none();
        waits && engine.status().running.is_some()
    })
    .await;
    for _ in 0..2 {
        let engine = engine.clone();
        outside.lock().unwrap().push(tokio::spawn(async move { answer(&engine).await }));
    }
    eventually("two outside", || engine.status().queue.depth == 2).await;
    assert!(matches!(engine.enter().await, Err(SubmitError::QueueFull { capacity: 2, .. })));
    drop(running);
    script.permit(1000);
    let waiting = std::mem::take(&mut *outside.lock().unwrap());
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap(), "new");
    }
    replacing.await.unwrap().unwrap();
    engine.shutdown();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_model_is_put_away_fetched_again_and_replaced_while_it_is_away() {
    let options = Options { idle_unload: Some(Duration::from_millis(50)), ..Options::default() };
    let engine = engine(troupe(saying("old")), options);
    for round in 1..=2 {
        eventually("putting away", || !engine.status().resident).await;
        let status = engine.status();
        assert_eq!((status.state, status.memory.weights, status.counters.unloads), (State::Ready, 0, round));
        assert_eq!(answer(&engine).await, "old");
        assert_eq!(engine.status().counters.loads, round);
    }
    eventually("putting away", || !engine.status().resident).await;
    engine.replace(troupe(saying("new")), nothing()).await.unwrap();
    assert_eq!(answer(&engine).await, "new");
    engine.set_options(Options::default());
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(engine.status().resident, "it stays from now on");
    engine.shutdown();
}

/// The public face over an engine whose model changes together with the configuration.
struct House {
    engine: EngineHandle,
    face: Face,
    address: SocketAddr,
    client: reqwest::Client,
    _stop: oneshot::Sender<()>,
}

/// A configuration that serves a model under this name, with more settings from the environment.
fn named_as(name: &str, more: &[(&str, &str)]) -> Config {
    let own = [("AXE_SERVED_NAME", name)];
    let all = more.iter().chain(&own);
    let env = all.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Config::from_sources(None, env, Vec::new()).unwrap()
}

impl House {
    async fn open(script: &Arc<Script>, config: &Config) -> Self {
        let old = Arc::clone(script);
        let make = move |_: &_| Ok(named("old", Scripted(Arc::clone(&old))));
        let options = Options { queue_capacity: 2, ..Options::default() };
        let engine = tokio::task::spawn_blocking(move || engine(troupe(make), options)).await.unwrap();
        let face = Face::from(App::new(engine.clone(), config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { drop(stopped.await) };
        tokio::spawn(axe::http::serve(listener, face.clone(), stopped, Duration::from_millis(100)));
        let client = reqwest::Client::builder().timeout(PATIENCE).build().unwrap();
        Self { engine, face, address, client, _stop: stop }
    }

    /// Has another model take over, with its configuration.
    fn change(&self, name: &'static str) -> tokio::task::JoinHandle<()> {
        let (engine, face) = (self.engine.clone(), self.face.clone());
        let switch = Box::new(move || face.change(&named_as(name, &[])));
        tokio::spawn(
            async move { assert!(engine.replace(troupe(saying(name)), switch).await.unwrap().beside) },
        )
    }

    fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(format!("http://{}{path}", self.address)).json(body)
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_to_another_server_holds_no_model() {
    // It takes connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", silent.local_addr().unwrap());
    let remote = [("AXE_STUDIO_REMOTE_URL", url.as_str()), ("AXE_STUDIO_REMOTE_MODEL", "m")];
    let script = Arc::new(Script::new(|_| say("old")).gated());
    let house = House::open(&script, &named_as("old", &remote)).await;
    let mut body = chat("hi");
    body["backend"] = "remote".into();
    let asking = tokio::spawn(house.post("/chat", &body).send());
    let (asked, _) = tokio::time::timeout(PATIENCE, silent.accept()).await.expect("asked").unwrap();
    tokio::time::timeout(PATIENCE, house.change("new")).await.expect("nobody is waited for").unwrap();
    assert!(!asking.is_finished());
    let answer: Value =
        house.post("/v1/chat/completions", &chat("hi")).send().await.unwrap().json().await.unwrap();
    assert_eq!(
        (&answer["model"], &answer["choices"][0]["message"]["content"]),
        (&json!("new"), &json!("new"))
    );
    drop(asked);
    asking.abort();

    // Nor does one wait at a closed door.
    let script = Arc::new(Script::endless().gated());
    let house = House::open(&script, &named_as("old", &remote)).await;
    let running = house.engine.submit(request("a")).unwrap();
    let changing = house.change("new");
    eventually("a closed door", || futures::FutureExt::now_or_never(house.engine.enter()).is_none()).await;
    let asking = tokio::spawn(house.post("/chat", &body).send());
    let asked = tokio::time::timeout(PATIENCE, silent.accept()).await;
    assert!(asked.is_ok(), "it waits for a model that it does not need");
    asking.abort();
    drop(running);
    script.permit(1000);
    changing.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_was_on_its_way_is_read_for_the_model_that_is_there_when_it_is_whole() {
    let script = Arc::new(Script::new(|_| say("old")));
    let house = House::open(&script, &named_as("old", &[])).await;
    for (name, status) in [("old", "404"), ("new", "200")] {
        let mut body = chat("hi");
        body["model"] = name.into();
        let body = body.to_string();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{}",
            body.len(),
            &body[..10]
        );
        let mut stream = TcpStream::connect(house.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        // It is being read.
        tokio::time::sleep(Duration::from_millis(100)).await;
        tokio::time::timeout(PATIENCE, house.change("new")).await.expect("nobody is waited for").unwrap();
        stream.write_all(&body.as_bytes()[10..]).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(!answer.contains("\"content\":\"old\""), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_needs_no_model_or_may_not_ask_waits_at_no_door() {
    let script = Arc::new(Script::endless().gated());
    let house = House::open(&script, &named_as("old", &[("AXE_API_KEY", "k")])).await;
    let running = house.engine.submit(request("a")).unwrap();
    let changing = house.change("new");
    eventually("a closed door", || futures::FutureExt::now_or_never(house.engine.enter()).is_none()).await;
    for (path, key, status) in [
        ("/health", "", 405),
        ("/ready", "", 405),
        ("/", "", 405),
        ("/studio/main.js", "", 405),
        ("/nope", "k", 404),
        ("/v1/models", "k", 405),
        ("/v1/chat/completions", "", 401),
        ("/v1/chat/completions/", "k", 404),
    ] {
        let answer = house.post(path, &chat("hi")).bearer_auth(key).send().await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
    }
    assert_eq!(house.engine.status().queue.depth, 0);
    let waiting = tokio::spawn(house.post("/v1/chat/completions", &chat("hi")).bearer_auth("k").send());
    eventually("one waits", || house.engine.status().queue.depth == 1).await;
    drop(running);
    script.permit(1000);
    changing.await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_takes_the_place_of_one_that_cannot_be_brought_back() {
    for most_faults in [0, 3] {
        let mut loads = 0;
        let make = move |_: &LoadProgress| {
            loads += 1;
            match loads {
                1 => Ok(named("old", Scripted(Script::saying("old").into()))),
                _ => Err("its file is gone".into()),
            }
        };
        let options =
            Options { idle_unload: Some(Duration::from_millis(20)), most_faults, ..Options::default() };
        let engine = engine(troupe(make), options.clone());
        eventually("putting away", || !engine.status().resident).await;
        let job = engine.submit(request("who?")).unwrap();
        assert_eq!(listen(job.events).await.reason, FinishReason::Cancelled(Cause::Outage));
        engine.set_options(Options { idle_unload: None, ..options });
        let replacing = engine.replace(troupe(saying("new")), nothing());
        tokio::time::timeout(stage::PATIENCE, replacing).await.expect("it ends").unwrap();
        assert_eq!(answer(&engine).await, "new");
        assert_eq!(engine.status().state, State::Ready);
        engine.shutdown();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_fails_leaves_a_model_away_that_was_away() {
    let options = Options { idle_unload: Some(Duration::from_millis(20)), ..Options::default() };
    let engine = engine(troupe(saying("old")), options);
    for fits in [true, false] {
        eventually("putting away", || !engine.status().resident).await;
        let loads = engine.status().counters.loads;
        let broken = |_: &LoadProgress| Err("no such file".into());
        engine.replace(Box::new(Troupe { make: broken, fits }), nothing()).await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(engine.status().counters.loads, loads, "nobody has asked for it");
        assert_eq!(answer(&engine).await, "old");
    }
    engine.shutdown();
}

/// The keys of changed settings.
fn keys(changes: &[Change]) -> Vec<&str> {
    changes.iter().map(|change| change.key.as_str()).collect()
}

fn refusal(outcome: Result<Reload, ClientError>) -> String {
    match outcome {
        Err(ClientError::Refused { status, body }) => {
            assert_eq!((status.as_u16(), body.error.code.as_str()), (422, "reload_failed"));
            body.error.message
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn live_settings_change_at_once_and_a_broken_file_changes_nothing() {
    let daemon = Axed::start(|folder| causal(folder, "llama"), "").await;
    let model = daemon.folder.path().join("llama.gguf");
    let nothing = daemon.reload().await.unwrap();
    assert_eq!((nothing.changed, nothing.restart, nothing.model), (vec![], vec![], None));

    daemon.configure(
        &model,
        "server.api_key = \"k\"\nserver.max_tokens_cap = 3\nmodel.aliases = [\"other\"]\nlog.level = \"debug\"\n\
         log.ring_size = 7\ndevice.threads = 1\nserver.queue_capacity = 5",
    );
    let reload = daemon.reload().await.unwrap();
    let changed = keys(&reload.changed);
    assert_eq!(keys(&reload.restart), ["device.threads", "log.ring_size"]);
    for key in
        ["server.api_key", "server.max_tokens_cap", "model.aliases", "log.level", "server.queue_capacity"]
    {
        assert!(changed.contains(&key), "{key} in {changed:?}");
    }
    assert_eq!((changed.len(), &reload.model), (5, &None));
    assert_eq!(daemon.complete(9).await.0, 401);
    let mut body = completion(9);
    body["model"] = "other".into();
    let answer = daemon.client.post(daemon.url("/v1/completions")).bearer_auth("k").json(&body).send().await;
    let answer: Value = answer.unwrap().json().await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    let status = daemon.status().await;
    assert_eq!((status.capacity, status.reload.unwrap().succeeded), (5, Some(true)));
    assert!(daemon.log().contains("DEBUG"), "the log level");
    assert!(daemon.was_told("RELOADING=1\nMONOTONIC_USEC="));

    for (toml, words) in [
        ("server.queue_capacity = \"many\"", "queue_capacity"),
        ("server.prot = 1", "server.prot"),
        ("model.context_length = 1", "model.context_length"),
    ] {
        daemon.configure(&model, toml);
        let error = refusal(daemon.reload().await);
        assert!(error.contains(words), "{error}");
        assert_eq!(daemon.complete(1).await.0, 401, "the key is still asked for");
    }
    let last = daemon.status().await.reload.unwrap();
    assert!(last.succeeded == Some(false) && last.message.contains("model.context_length"), "{last:?}");
    // What needs a restart is told again until there was one.
    daemon.configure(&model, "device.threads = 1");
    assert_eq!(keys(&daemon.reload().await.unwrap().restart), ["device.threads"]);
    // What is shown is what is in force, and what will be.
    daemon.configure(&model, "log.ring_size = 9\nlog.format = \"json\"\nserver.queue_capacity = 6");
    daemon.reload().await.unwrap();
    let shown: Shown = daemon.operator().get("/config").await.unwrap();
    let of = |key: &str| {
        let setting = shown.settings.iter().find(|setting| setting.key == key).unwrap();
        (setting.value.clone(), setting.after_restart.clone())
    };
    assert_eq!(of("log.ring_size"), (2000.into(), Some(9.into())));
    assert_eq!(of("log.format"), ("auto".into(), Some("json".into())));
    assert_eq!(of("server.queue_capacity"), (6.into(), None));
    assert_eq!(of("device.threads").1, None);
    // Of a key file that a reload brings, too, it is told that everybody may read it; until it is closed.
    let keys = daemon.folder.path().join("keys");
    std::fs::write(&keys, "alice:one\n").unwrap();
    let mode = |mode| std::fs::set_permissions(&keys, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o644);
    daemon.configure(&model, "server.api_key_file = \"keys\"");
    daemon.reload().await.unwrap();
    assert!(daemon.status().await.warnings.iter().any(|warning| warning.contains("mode 644")));
    assert!(daemon.log().contains("mode 644"));
    mode(0o600);
    daemon.reload().await.unwrap();
    assert!(daemon.status().await.warnings.iter().all(|warning| !warning.contains("mode 6")));
    // A secret in a file that is wrong stays there.
    daemon.configure(&model, "server.apikey = \"HIDDEN\"");
    assert!(!refusal(daemon.reload().await).contains("HIDDEN"));
    assert!(!daemon.log().contains("HIDDEN"));
    daemon.configure(&model, "");
    daemon.reload().await.unwrap();
    assert_eq!(daemon.complete(1).await.0, 200);
}

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": 8, "seed": 1})
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_both_kinds_take_turns_and_no_request_is_lost() {
    let daemon = Arc::new(Axed::start(|folder| causal(folder, "llama"), "").await);
    let model = daemon.folder.path().join("llama.gguf");
    let (_, expected) = daemon.complete(6).await;

    // Requests keep coming from two clients all the time; each is answered by one model or the other, whole.
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..2)
        .map(|_| {
            let (daemon, over) = (Arc::clone(&daemon), Arc::clone(&over));
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    let body = json!({"prompt": [5, 6, 7], "max_tokens": 6});
                    let response = daemon.post("/v1/completions", &body).await;
                    let (status, answer) = (response.status(), response.json::<Value>().await.unwrap());
                    assert_eq!(status, 200, "{answer}");
                    seen.push(answer["system_fingerprint"].as_str().unwrap().to_owned());
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                seen
            })
        })
        .collect();
    let change = async |path: &Path, toml: &str, signal: bool| {
        let mut stream = completion(300);
        stream["stream"] = true.into();
        // Neither model can be asked for both fields: the request is of the model that is there now.
        let kind = daemon.status().await.model.unwrap().architecture;
        let under_way = (kind == "llama").then(|| daemon.post("/v1/completions", &stream));
        let under_way = match under_way {
            Some(request) => Some(request.await),
            None => None,
        };
        daemon.configure(path, toml);
        if signal {
            daemon.signal(Signal::SIGHUP);
            until("the reload", async || daemon.status().await.model.unwrap().architecture != kind).await;
        } else {
            let reload = daemon.reload().await.unwrap();
            assert!(reload.model.is_some_and(|model| model.beside), "there is room for two such models");
        }
        if let Some(stream) = under_way {
            assert_eq!(stream.status(), 200);
            let text = stream.text().await.unwrap();
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            assert_eq!(text.matches("\"finish_reason\":\"length\"").count(), 1, "{text}");
        }
    };
    change(&diffusion(), "", false).await;
    let answer = daemon.post("/v1/chat/completions", &chat("What is 2 plus 3?")).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.json::<Value>().await.unwrap()["model"], "tiny-diffusion");
    change(&model, "", true).await;
    over.store(true, Ordering::SeqCst);
    let mut seen = Vec::new();
    for client in clients {
        seen.extend(client.await.unwrap());
    }
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 2, "one fingerprint a model: {seen:?}");
    assert_eq!(daemon.complete(6).await.1["choices"], expected["choices"], "the first model, as it was");
    let failed = daemon.metric("axe_requests_total{outcome=\"error\"}").await;
    assert_eq!((failed, daemon.metric("axe_requests_total{outcome=\"rejected\"}").await), (0.0, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_is_broken_leaves_the_old_one_serving_and_says_why() {
    let daemon = Axed::start(|folder| causal(folder, "llama"), "").await;
    let folder = daemon.folder.path();
    let model = folder.join("llama.gguf");
    let (_, expected) = daemon.complete(6).await;
    let whole = std::fs::read(&model).unwrap();
    let cut = folder.join("cut.gguf");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(folder.join("chat.jinja"), template).unwrap();
    for (path, toml, words) in [
        (folder.join("none.gguf"), "", "cannot open the model"),
        (cut, "", "cut.gguf"),
        (model.clone(), "model.chat_template = \"none.jinja\"", "none.jinja"),
        (
            model.clone(),
            "model.chat_template = \"chat.jinja\"\nmodel.tool_calls = \"gemma\"",
            "has no token `<|tool_call>`",
        ),
        (model.clone(), "device.memory_limit_mib = 1", "MiB"),
    ] {
        daemon.configure(&path, toml);
        let error = refusal(daemon.reload().await);
        assert!(error.contains(words), "{error}");
        let (status, body) = daemon.complete(6).await;
        assert_eq!((status, &body["choices"]), (200, &expected["choices"]));
    }
    // Where there is no room for both, the old one goes first, and comes back.
    daemon.configure(&model, "device.memory_limit_mib = 3\ndevice.kv_cache = \"f32\"");
    let reload = daemon.reload().await.unwrap();
    assert!(!reload.model.unwrap().beside, "there is no room for two");
    assert_eq!(daemon.complete(6).await.0, 200);
    // The same path, and another file there.
    std::fs::write(folder.join("new"), &whole).unwrap();
    std::fs::rename(folder.join("new"), &model).unwrap();
    assert!(daemon.reload().await.unwrap().model.is_some(), "the file is another one");
    assert!(daemon.reload().await.unwrap().model.is_none());
    assert!(daemon.status().await.warnings.is_empty(), "{:?}", daemon.status().await.warnings);
    assert_eq!(listen_reason(&daemon).await, "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_about_to_end_takes_up_nothing() {
    let daemon = Axed::start(|folder| causal(folder, "llama"), "").await;
    daemon.order("hang 1 60");
    let (client, url) = (daemon.client.clone(), daemon.url("/v1/completions"));
    let _running = tokio::spawn(async move { client.post(url).json(&completion(1)).send().await });
    until("the request", async || daemon.status().await.running.is_some()).await;
    daemon.operator().post::<Drain>("/drain", None::<&()>).await.unwrap();
    daemon.signal(Signal::SIGHUP);
    until("the reason", async || daemon.status().await.reload.is_some()).await;
    let last = daemon.status().await.reload.unwrap();
    assert!(last.succeeded == Some(false) && last.message.contains("about to end"), "{last:?}");
    assert!(daemon.log().contains("about to end"));
    let error = refusal(daemon.reload().await);
    assert!(error.contains("about to end"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_during_a_reload_is_one_more_reload_after_it() {
    let daemon = Arc::new(Axed::start(|folder| causal(folder, "llama"), "").await);
    let [second, third] = ["mistral", "qwen2"].map(|family| causal(daemon.folder.path(), family));
    // A request keeps the door closed for a while.
    daemon.order("hang 1 5");
    let asking = Arc::clone(&daemon);
    let running = tokio::spawn(async move { asking.complete(1).await });
    until("the request", async || daemon.status().await.running.is_some()).await;
    daemon.configure(&second, "");
    let reloading = Arc::clone(&daemon);
    let reloading = tokio::spawn(async move { reloading.reload().await });
    until("the reload", async || daemon.status().await.reload.is_some()).await;
    daemon.configure(&third, "");
    daemon.signal(Signal::SIGHUP);
    assert_eq!(reloading.await.unwrap().unwrap().model.unwrap().to.as_deref(), Some("mistral"));
    until("the other reload", async || daemon.status().await.model.unwrap().name == "qwen2").await;
    assert_eq!(running.await.unwrap().0, 200);
}

async fn listen_reason(daemon: &Axed) -> String {
    let (_, body) = daemon.complete(2).await;
    body["choices"][0]["finish_reason"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_after_a_reload_rebuild_the_model_that_serves() {
    let daemon = Axed::start(|folder| causal(folder, "llama"), "").await;
    let model = causal(daemon.folder.path(), "mistral");
    daemon.configure(&model, "");
    assert!(daemon.reload().await.unwrap().model.is_some());
    let (_, expected) = daemon.complete(12).await;
    daemon.order("error 5");
    assert_eq!(daemon.complete(12).await.0, 500);
    let (status, body) = daemon.complete(12).await;
    assert_eq!((status, &body["choices"]), (200, &expected["choices"]));
    let status = daemon.status().await;
    assert_eq!((status.model.unwrap().name.as_str(), status.faults.resets), ("mistral", 1));
}
