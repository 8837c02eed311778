//! Lost devices, passes that do not come back, panics: over scripted backends, and in built daemons with faults to order.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod operated;
mod stage;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axe::decode::{Backend, BackendError, Generation, Memory, Sampling, Step};
use axe::device::{ClCode, DeviceError};
use axe::engine::{
    Cause, EngineHandle, Faults, FinishReason, Loaded, Options, Request, State, Stop, SubmitError,
};
use operated::{Axed, causal, completion, until};
use serde_json::Value;
use stage::troupe::{engine, named, troupe};
use stage::{Outcome, bytes, eventually, listen, say};

/// What goes wrong in a pass.
#[derive(Clone, Copy)]
enum Trouble {
    Lost,
    Ordinary,
    Panic,
    Late(Duration),
}

/// Says its prompt; at the prompt `!`, something goes wrong once the prompt is read.
struct Frail(Trouble);

impl Backend for Frail {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        _: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        let trouble = (*prompt == bytes("!")).then_some(self.0);
        let mut steps = say(&stage::text_of(prompt));
        steps.insert(0, Step::Prefill { done: prompt.len(), total: prompt.len() });
        Ok(Box::new(Playing { steps: steps.into_iter(), trouble, begun: false }))
    }

    fn context_length(&self) -> usize {
        stage::CONTEXT
    }

    fn memory(&self) -> Memory {
        Memory { weights: 7, ..Memory::default() }
    }
}

struct Playing {
    steps: std::vec::IntoIter<Step>,
    trouble: Option<Trouble>,
    begun: bool,
}

impl Generation for Playing {
    fn step(&mut self) -> Result<Step, BackendError> {
        if std::mem::replace(&mut self.begun, true) {
            match self.trouble {
                Some(Trouble::Lost) => {
                    // Time for others to come.
                    std::thread::sleep(Duration::from_millis(100));
                    let operation = "reading a buffer".to_owned();
                    return Err(DeviceError::Lost { operation, code: ClCode(-5) }.into());
                }
                Some(Trouble::Ordinary) => return Err("NaN in layer 3".into()),
                Some(Trouble::Panic) => panic!("the device fell over"),
                Some(Trouble::Late(time)) => std::thread::sleep(time),
                None => {}
            }
        }
        self.steps.next().ok_or_else(|| "the script is at its end".into())
    }

    fn cached_tokens(&self) -> usize {
        0
    }
}

fn request(prompt: &str) -> Request {
    Request {
        id: prompt.to_owned(),
        prompt: bytes(prompt),
        stop: Stop { max_tokens: 100, ..Stop::default() },
        ..Request::default()
    }
}

fn frail(trouble: Trouble, options: Options) -> EngineHandle {
    engine(troupe(move |_| Ok(named("frail", Frail(trouble)))), options)
}

async fn run(engine: &EngineHandle, prompt: &str) -> Outcome {
    listen(engine.submit(request(prompt)).unwrap().events).await
}

fn error_of(outcome: Outcome) -> String {
    match outcome.reason {
        FinishReason::Error(error) => error,
        other => panic!("no error: {other:?}"),
    }
}

/// That a fault costs the running request alone, and what is counted for it.
async fn costs_one_request(trouble: Trouble, words: &str, counted: Faults) {
    let mut options = Options::default();
    if let Trouble::Late(_) = trouble {
        options.pass_limit = Duration::from_millis(100);
    }
    let engine = frail(trouble, options);
    let [running, waiting] = ["!", "next"].map(|prompt| engine.submit(request(prompt)).unwrap());
    let error = error_of(listen(running.events).await);
    assert!(error.contains(words), "{error}");
    let waiting = listen(waiting.events).await;
    assert_eq!((waiting.text.as_str(), waiting.reason), ("next", FinishReason::Stop));
    let status = engine.status();
    assert_eq!((status.state, status.resident, status.memory.weights), (State::Ready, true, 7));
    assert_eq!((status.counters.faults, status.counters.resets), (counted, 1));
    assert_eq!((status.counters.requests.error, status.counters.requests.stop), (1, 1));
    engine.shutdown();
}

#[tokio::test]
async fn a_lost_device_costs_the_running_request_alone() {
    let counted = Faults { lost: 1, ..Faults::default() };
    costs_one_request(Trouble::Lost, "CL_OUT_OF_RESOURCES", counted).await;
}

#[tokio::test]
async fn a_panic_costs_the_running_request_alone() {
    let counted = Faults { panics: 1, ..Faults::default() };
    costs_one_request(Trouble::Panic, "the device fell over", counted).await;
}

#[tokio::test]
async fn a_pass_that_takes_too_long_costs_the_running_request_alone() {
    let counted = Faults { overdue: 1, ..Faults::default() };
    let late = Trouble::Late(Duration::from_millis(600));
    costs_one_request(late, "did not finish a pass within 0.1 s", counted).await;
}

#[tokio::test]
async fn an_ordinary_error_is_no_fault() {
    let engine = frail(Trouble::Ordinary, Options::default());
    assert_eq!(error_of(run(&engine, "!").await), "NaN in layer 3");
    assert_eq!(run(&engine, "next").await.text, "next");
    let counters = engine.status().counters;
    assert_eq!((counters.faults, counters.resets), (Faults::default(), 0));
    engine.shutdown();
}

#[tokio::test]
async fn the_request_hears_of_a_hanging_device_before_the_device_comes_back() {
    let options = Options { pass_limit: Duration::from_millis(50), ..Options::default() };
    let engine = frail(Trouble::Late(Duration::from_secs(3)), options);
    let begun = Instant::now();
    error_of(run(&engine, "!").await);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let state = engine.status().state;
    assert!(matches!(&state, State::Hung { error } if error.contains("device.pass_timeout_s")), "{state:?}");
    assert_eq!(engine.status().running, None);
    // Whoever comes now waits for the rebuilt engine.
    assert_eq!(run(&engine, "next").await.text, "next");
    assert!(begun.elapsed() >= Duration::from_secs(3));
    assert_eq!(engine.status().state, State::Ready);
    engine.shutdown();
}

#[tokio::test]
async fn too_many_faults_in_a_while_are_the_end() {
    let engine = frail(Trouble::Lost, Options { most_faults: 2, ..Options::default() });
    error_of(run(&engine, "!").await);
    let [running, waiting] = ["!", "next"].map(|prompt| engine.submit(request(prompt)).unwrap());
    error_of(listen(running.events).await);
    assert_eq!(listen(waiting.events).await.reason, FinishReason::Cancelled(Cause::Outage));
    let State::Failed { error } = engine.over().await else { panic!("not failed") };
    assert!(error.contains("2 faults within 600 s") && error.contains("device.max_faults"), "{error}");
    assert!(matches!(engine.submit(request("x")), Err(SubmitError::Failed { .. })));
}

#[tokio::test]
async fn faults_that_are_long_past_do_not_count() {
    let options = Options { most_faults: 2, fault_window: Duration::from_millis(200), ..Options::default() };
    let engine = frail(Trouble::Lost, options);
    for _ in 0..3 {
        error_of(run(&engine, "!").await);
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(run(&engine, "next").await.text, "next");
    assert_eq!(engine.status().counters.resets, 3);
    engine.shutdown();
}

#[tokio::test]
async fn while_the_engine_cannot_be_rebuilt_nobody_is_kept_waiting() {
    let loads = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&loads);
    let make = move |_: &_| match count.fetch_add(1, Ordering::SeqCst) {
        1 => Err("no device".into()),
        _ => Ok(named("frail", Frail(Trouble::Lost))),
    };
    let engine = engine(troupe(make), Options::default());
    let [running, waiting] = ["!", "next"].map(|prompt| engine.submit(request(prompt)).unwrap());
    error_of(listen(running.events).await);
    assert_eq!(listen(waiting.events).await.reason, FinishReason::Cancelled(Cause::Outage));
    let refused = engine.submit(request("x")).err();
    assert!(
        matches!(&refused, Some(SubmitError::Outage { what }) if what.contains("no device")),
        "{refused:?}"
    );
    eventually("the rebuild", || engine.status().state == State::Ready).await;
    assert_eq!(run(&engine, "next").await.text, "next");
    let counters = engine.status().counters;
    assert_eq!((counters.faults.lost, counters.faults.rebuilds, counters.resets), (1, 1, 1));
    engine.shutdown();
}

#[tokio::test]
async fn another_checkpoint_in_the_old_ones_place_is_not_taken_for_it() {
    let mut loads = 0;
    let make = move |_: &_| {
        loads += 1;
        let Loaded { backend, mut model } = named("frail", Frail(Trouble::Lost));
        model.identity = format!("checkpoint {loads}");
        Ok(Loaded { backend, model })
    };
    let engine = engine(troupe(make), Options { most_faults: 2, ..Options::default() });
    error_of(run(&engine, "!").await);
    let State::Failed { error } = engine.over().await else { panic!("not failed") };
    assert!(error.contains("it was checkpoint 1, it is checkpoint 2"), "{error}");
    assert!(error.contains("restart the daemon") && error.contains("`axectl reload`"), "{error}");
}

/// The same with files.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_exchanged_is_told_of_and_never_served_unasked() {
    let told = "restart the daemon to serve the new one, or put the old one back";
    // Put back in time, the old one serves on; else the daemon ends, and says what to do.
    for most in [0, 2] {
        let toml = format!("device.max_faults = {most}");
        let mut daemon = Axed::start(|folder| causal(folder, "llama"), &toml).await;
        let (_, expected) = daemon.complete(12).await;
        let folder = daemon.folder.path();
        let (served, kept) = (folder.join("llama.gguf"), folder.join("kept.gguf"));
        std::fs::rename(&served, &kept).unwrap();
        std::fs::rename(causal(folder, "mistral"), &served).unwrap();
        daemon.order("error 5");
        assert_eq!(daemon.complete(12).await.0, 500);
        until("the refusal", async || daemon.log().contains(told)).await;
        if most == 0 {
            std::fs::rename(&kept, &served).unwrap();
            until("the old model", async || daemon.readiness().await == 200).await;
            let (status, body) = daemon.complete(12).await;
            assert_eq!((status, &body["choices"]), (200, &expected["choices"]));
        } else {
            assert_eq!(daemon.end().await, 3, "{}", daemon.log());
        }
    }
}

#[tokio::test]
async fn a_shutdown_ends_an_engine_that_is_being_rebuilt() {
    let mut loads = 0;
    let make = move |_: &_| {
        loads += 1;
        if loads == 1 { Ok(named("frail", Frail(Trouble::Lost))) } else { Err("no device".into()) }
    };
    let engine = engine(troupe(make), Options { most_faults: 0, ..Options::default() });
    error_of(run(&engine, "!").await);
    engine.drain();
    assert_eq!(engine.over().await, State::Stopped);
}

/// Every fault to order, in one daemon after the other.
#[tokio::test(flavor = "multi_thread")]
async fn faults_of_a_real_device_cost_one_request_each_and_are_counted() {
    let toml = "device.pass_timeout_s = 5\ndevice.max_faults = 4";
    let mut daemon = Axed::start(|folder| causal(folder, "llama"), toml).await;
    let (status, expected) = daemon.complete(20).await;
    assert_eq!(status, 200, "{expected}");

    daemon.order("error 5");
    let (status, body) = daemon.complete(20).await;
    assert_eq!((status, &body["error"]["code"]), (500, &"generation_failed".into()));
    assert!(body["error"]["message"].as_str().unwrap().contains("CL_OUT_OF_RESOURCES"), "{body}");
    assert_eq!(daemon.complete(20).await.1["choices"], expected["choices"], "after a lost device");

    daemon.order("panic 5");
    let (status, body) = daemon.complete(20).await;
    assert_eq!(status, 500, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("a fault to order"), "{body}");
    assert_eq!(daemon.complete(20).await.1["choices"], expected["choices"], "after a panic");

    daemon.order("hang 5 8");
    let begun = Instant::now();
    let (status, body) = daemon.complete(20).await;
    assert_eq!(status, 500, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("within 5 s"), "{body}");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert_eq!(daemon.readiness().await, 503, "while the device hangs");
    assert!(daemon.was_told("STATUS=hung: "));
    daemon.forget();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!daemon.was_told("WATCHDOG=1"), "a hanging engine is not told to live");
    assert_eq!(daemon.complete(20).await.1["choices"], expected["choices"], "after a hang");

    until("the beat", async || daemon.was_told("WATCHDOG=1")).await;
    assert_eq!(daemon.readiness().await, 200);
    for (name, value) in [
        ("axe_faults_total{kind=\"lost\"}", 1.0),
        ("axe_faults_total{kind=\"panic\"}", 1.0),
        ("axe_faults_total{kind=\"overdue\"}", 1.0),
        ("axe_faults_total{kind=\"rebuild\"}", 0.0),
        ("axe_engine_resets_total", 3.0),
    ] {
        assert_eq!(daemon.metric(name).await, value, "{name}");
    }
    let status = daemon.status().await;
    assert_eq!((status.faults.lost, status.faults.overdue, status.faults.resets), (1, 1, 3));

    // A stream that has begun ends with an error in it, and this fault is one too many.
    let mut body = completion(400);
    body["stream"] = true.into();
    let stream = daemon.post("/v1/completions", &body).await;
    assert_eq!(stream.status(), 200);
    daemon.order("error 5");
    let text = stream.text().await.unwrap();
    let last = text.trim_end().rsplit("\n\n").next().unwrap().strip_prefix("data: ").unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "generation_failed", "{text}");
    assert_eq!(daemon.end().await, 3, "{}", daemon.log());
    assert!(daemon.log().contains("4 faults within 600 s"), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_idles_is_put_away_and_comes_back_for_a_request() {
    let daemon = Axed::start(|folder| causal(folder, "llama"), "model.idle_unload_s = 0.3").await;
    let (status, expected) = daemon.complete(8).await;
    assert_eq!(status, 200, "{expected}");
    until("the model to be put away", async || daemon.status().await.unloaded).await;
    let status = daemon.status().await;
    assert_eq!((status.memory, status.model.unwrap().architecture.as_str()), (None, "llama"));
    assert_eq!(daemon.metric("axe_model_loaded").await, 0.0);
    assert_eq!(daemon.readiness().await, 200);
    let (status, body) = daemon.complete(8).await;
    assert_eq!((status, &body["choices"]), (200, &expected["choices"]));
    assert!(daemon.metric("axe_model_loads_total").await >= 1.0);
    assert!(daemon.status().await.faults.resets == 0);
}
