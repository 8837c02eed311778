//! Each route with its answer and its refusals.

use std::time::{Duration, Instant};

use axe::admin::Reloading;
use axe::decode::Step;
use axectl::{
    client::ClientError,
    protocol::{
        Bench, BenchRequest, CancelResult, Config, Device, Drain, Gpu, JobState, KernelTime, Kernels,
        LogLevel, Model, Profile, Queue, SelfTest, Source, State, Status, Version,
    },
};

use futures::FutureExt;

use crate::support::{Another, Daemon, MEMORY};

const NOTHING: Option<&()> = None;

#[tokio::test]
async fn status_tells_everything_that_is_pinned() {
    let daemon = Daemon::start().await;
    let device = Device {
        name: "card".to_owned(),
        kind: "gpu".to_owned(),
        platform: "OpenCL".to_owned(),
        driver: "1.2".to_owned(),
        pci: None,
        compute_units: 32,
        memory_bytes: 1 << 30,
    };
    let model = Model {
        name: "m".to_owned(),
        path: "/m.gguf".to_owned(),
        architecture: "llama".to_owned(),
        quantisation: "Q4_1".to_owned(),
        identity: "0123".to_owned(),
        context_length: 64,
    };
    daemon.board.pin_device(device.clone());
    daemon.board.pin_model(model.clone());
    let self_test = SelfTest { kernel: "narrow".to_owned(), passed: true, worst: 0.25 };
    let kernels =
        Kernels { family: "vector".to_owned(), products: "vectors".to_owned(), self_tests: vec![self_test] };
    daemon.board.pin_kernels(kernels.clone());
    daemon.board.warn("look here");
    daemon.board.warn("look here");
    let status: Status = daemon.client().get("/status").await.unwrap();
    assert_eq!(status.state, State::Ready);
    assert_eq!((status.device, status.model), (Some(device), Some(model)));
    assert_eq!(status.kernels, Some(kernels));
    assert_eq!(status.listen.as_deref(), Some("http://127.0.0.1:8080"));
    assert_eq!(status.pid, std::process::id());
    assert_eq!(status.warnings, ["look here"]);
    assert_eq!((status.waiting, status.capacity, status.running), (0, 2, None));
    let memory = status.memory.unwrap();
    assert_eq!(memory.weights_bytes, MEMORY.weights);
    assert_eq!(memory.total_bytes, MEMORY.weights + MEMORY.kv_cache + MEMORY.scratch);
}

#[tokio::test]
async fn queue_follows_a_job_and_counters_remember_it() {
    let daemon = Daemon::start().await;
    let mut first = daemon.submit("first");
    let second = daemon.submit("second");
    let queue = daemon.queue_until(|queue| queue.running.is_some()).await;
    let running = queue.running.unwrap();
    assert_eq!((running.id.as_str(), running.state), ("first", JobState::Prefill));
    assert_eq!((running.prompt_tokens, running.prefilled_tokens), (7, 0));
    assert_eq!(queue.waiting.len(), 1);
    assert_eq!((queue.waiting[0].id.as_str(), queue.waiting[0].state), ("second", JobState::Waiting));

    daemon.steps.send(Step::Prefill { done: 7, total: 7 }).unwrap();
    daemon.steps.send(Step::Commit(vec![0, 0])).unwrap();
    let committed = |queue: &Queue| queue.running.as_ref().is_some_and(|job| job.completion_tokens == 2);
    let queue = daemon.queue_until(committed).await;
    assert_eq!(queue.running.unwrap().state, JobState::Generating);

    daemon.steps.send(Step::Commit(vec![0, 0, 0])).unwrap();
    while !matches!(first.events.recv().await, Some(axe::engine::Event::Finish { .. })) {}
    drop(second);
    daemon.queue_until(|queue| queue.running.is_none() && queue.waiting.is_empty()).await;
    let status: Status = daemon.client().get("/status").await.unwrap();
    assert_eq!((status.counters.finished, status.counters.cancelled), (1, 1));
    assert_eq!(status.counters.completion_tokens, 5);
    assert_eq!(status.counters.cached_tokens % 3, 0);
}

#[tokio::test]
async fn cancel_reaches_waiting_and_running_jobs_and_refuses_strangers() {
    let daemon = Daemon::start().await;
    let client = daemon.client();
    let _first = daemon.submit("first job/1");
    daemon.queue_until(|queue| queue.running.is_some()).await;
    let _second = daemon.submit("second");

    let cancelled: CancelResult = client.post("/cancel/second", NOTHING).await.unwrap();
    assert_eq!((cancelled.id.as_str(), cancelled.was), ("second", JobState::Waiting));
    let cancelled: CancelResult = client.post("/cancel/first%20job%2F1", NOTHING).await.unwrap();
    assert_eq!((cancelled.id.as_str(), cancelled.was), ("first job/1", JobState::Prefill));
    daemon.queue_until(|queue| queue.running.is_none()).await;

    let error = client.post::<CancelResult>("/cancel/second", NOTHING).await.unwrap_err();
    let ClientError::Refused { status, body } = error else { panic!("{error}") };
    assert_eq!((status.as_u16(), body.error.code.as_str()), (404, "not_found"));
    assert!(body.error.message.contains("no job `second`"), "{}", body.error.message);
}

#[tokio::test]
async fn drain_lets_jobs_finish_and_ends_the_engine() {
    let daemon = Daemon::start().await;
    let _job = daemon.submit("last");
    daemon.queue_until(|queue| queue.running.is_some()).await;
    for _ in 0..2 {
        let drain: Drain = daemon.client().post("/drain", NOTHING).await.unwrap();
        assert_eq!(drain, Drain { running: 1, waiting: 0 });
    }
    assert!(daemon.queue_until(|queue| queue.draining).await.running.is_some());
    daemon.steps.send(Step::Commit(vec![0; 5])).unwrap();
    assert_eq!(daemon.engine.over().await, axe::engine::State::Stopped);
    let status: Status = daemon.client().get("/status").await.unwrap();
    assert_eq!((status.state, status.counters.finished), (State::Stopped, 1));
}

#[tokio::test]
async fn profile_lists_the_costliest_kernel_first() {
    let daemon = Daemon::start().await;
    let profile: Profile = daemon.client().get("/profile").await.unwrap();
    assert_eq!(profile, Profile::default());
    let kernel = |name: &str, total_ns| KernelTime {
        kernel: name.to_owned(),
        launches: 1,
        total_ns,
        ..KernelTime::default()
    };
    daemon.board.pin_profile(Profile {
        enabled: true,
        kernels: vec![kernel("a", 1), kernel("b", 9)],
        ..Profile::default()
    });
    let profile: Profile = daemon.client().get("/profile").await.unwrap();
    assert_eq!(profile.kernels, [kernel("b", 9), kernel("a", 1)]);
}

#[tokio::test]
async fn config_and_version_are_told() {
    let daemon = Daemon::start().await;
    let config: Config = daemon.client().get("/config").await.unwrap();
    assert_eq!(config.text("server.api_key").as_deref(), Some("(secret)"));
    assert_eq!(config.settings[0].source, Source::Environment);
    daemon.board.pin_config(Config::default());
    assert_eq!(daemon.client().get::<Config>("/config").await.unwrap(), Config::default());
    let version: Version = daemon.client().get("/version").await.unwrap();
    assert_eq!(version.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(version.protocol, axectl::protocol::PROTOCOL);
}

#[tokio::test]
async fn gpu_samples_twice_when_rates_need_it() {
    let daemon = Daemon::start().await;
    let root = daemon.directory.path().join("machine");
    let card = root.join("sys/bus/pci/devices/0000:03:00.0");
    let hwmon = card.join("hwmon/hwmon4");
    std::fs::create_dir_all(&hwmon).unwrap();
    std::fs::write(hwmon.join("energy1_input"), "5000000\n").unwrap();
    daemon.board.pin_device(Device {
        name: "card".to_owned(),
        kind: "gpu".to_owned(),
        platform: "OpenCL".to_owned(),
        driver: "25.1".to_owned(),
        pci: Some("0000:03:00.0".to_owned()),
        compute_units: 32,
        memory_bytes: 1 << 30,
    });
    let gpu: Gpu = daemon.client().get("/gpu").await.unwrap();
    assert_eq!((gpu.name.as_deref(), gpu.opencl_driver.as_deref()), (Some("card"), Some("25.1")));
    assert_eq!(gpu.power.unwrap().watts, Some(0.0));
    assert_eq!(gpu.memory.unwrap().weights_bytes, MEMORY.weights);
}

#[tokio::test]
async fn bench_measures_rounds_through_the_queue() {
    let daemon = Daemon::start().await;
    let asked = BenchRequest { prompt_tokens: 7, completion_tokens: 5, rounds: 2 };
    // Each round encodes 7 tokens, of which the scripted backend says that it had 3 already, and makes 5.
    for _ in 0..3 {
        daemon.steps.send(Step::Prefill { done: 7, total: 7 }).unwrap();
        daemon.steps.send(Step::Commit(vec![0])).unwrap();
        daemon.steps.send(Step::Commit(vec![0; 4])).unwrap();
    }
    let bench: Bench = daemon.client().post("/bench", Some(&asked)).await.unwrap();
    assert_eq!(bench.rounds.len(), 2);
    for round in &bench.rounds {
        assert_eq!((round.prompt_tokens, round.completion_tokens, round.passes), (4, 5, 2));
        assert!(round.prefill_s > 0.0 && round.tokens_per_s > 0.0);
    }
    assert!(bench.prefill_tokens_per_s > 0.0 && bench.decode_tokens_per_s > 0.0);
    assert_eq!(bench.version.version, env!("CARGO_PKG_VERSION"));

    let refused = [
        (BenchRequest { prompt_tokens: 60, completion_tokens: 5, rounds: 1 }, "the context's 64 tokens"),
        (
            BenchRequest { prompt_tokens: usize::MAX, completion_tokens: usize::MAX, rounds: 1 },
            "prompt_tokens",
        ),
        (BenchRequest { prompt_tokens: 7, completion_tokens: 1, rounds: 1 }, "at least 2"),
        (BenchRequest { prompt_tokens: 7, completion_tokens: 5, rounds: 21 }, "rounds 21: expected 1 to 20"),
    ];
    for (asked, part) in refused {
        let Err(ClientError::Refused { status, body }) =
            daemon.client().post::<Bench>("/bench", Some(&asked)).await
        else {
            panic!("{part}: not refused")
        };
        assert_eq!(status.as_u16(), 400);
        assert!(body.error.message.contains(part), "{part}: {}", body.error.message);
    }
}

#[tokio::test]
async fn a_bench_and_a_reload_do_not_mix() {
    let asked = BenchRequest { prompt_tokens: 7, completion_tokens: 5, rounds: 1 };
    let refusal = |outcome: Result<Bench, ClientError>| match outcome {
        Err(ClientError::Refused { status, body }) => {
            assert_eq!(status.as_u16(), 409);
            (body.error.code, body.error.message)
        }
        other => panic!("not refused: {other:?}"),
    };
    let daemon = Daemon::start().await;
    let round = || {
        daemon.steps.send(Step::Prefill { done: 7, total: 7 }).unwrap();
        daemon.steps.send(Step::Commit(vec![0; 5])).unwrap();
    };
    // While a reload is at hand none begins.
    daemon.board.pin_reload(Reloading::Since(Instant::now()));
    let (code, message) = refusal(daemon.client().post("/bench", Some(&asked)).await);
    assert!(code == "reloading" && message.contains("axectl status"), "{code}: {message}");
    assert_eq!(daemon.engine.status().counters.requests.length, 0);
    // One that changed something, but no model, is told of; one that was refused or changed nothing is not.
    daemon.board.pin_reload(Reloading::Ended(Instant::now(), Ok(String::new())));
    daemon.board.pin_change();
    for meanwhile in [false, true] {
        let client = daemon.client();
        let reload = async {
            daemon.queue_until(|queue| queue.running.is_some()).await;
            daemon.board.pin_reload(Reloading::Since(Instant::now()));
            if meanwhile {
                daemon.board.pin_change();
            }
            daemon.board.pin_reload(Reloading::Ended(Instant::now(), Ok(String::new())));
            round();
            round();
        };
        let (bench, ()) = tokio::join!(client.post::<Bench>("/bench", Some(&asked)), reload);
        let warned = bench.unwrap().warnings.iter().any(|warning| warning.contains("reloaded meanwhile"));
        assert_eq!(warned, meanwhile);
    }
    // Another model ends it: what it would measure is not what it says.
    let client = daemon.client();
    let replacing = async {
        daemon.queue_until(|queue| queue.running.is_some()).await;
        let engine = daemon.engine.clone();
        let replacing = tokio::spawn(async move { engine.replace(Box::new(Another), Box::new(|| {})).await });
        // The new model is loaded, and waits for this round to end.
        while daemon.engine.enter().now_or_never().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        round();
        replacing.await.unwrap().unwrap();
    };
    let (bench, ()) = tokio::join!(client.post::<Bench>("/bench", Some(&asked)), replacing);
    let (code, message) = refusal(bench);
    assert!(code == "reloaded" && message.contains("measure again"), "{code}: {message}");
}

#[tokio::test]
async fn a_bench_ends_with_the_client_that_asked() {
    let daemon = Daemon::start().await;
    let asked = BenchRequest { prompt_tokens: 7, completion_tokens: 5, rounds: 1 };
    let body = serde_json::to_string(&asked).unwrap();
    let request = format!("POST /bench HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    // Leaves without an answer after a second.
    let leaving = daemon.raw(request.as_bytes(), true, std::time::Duration::from_secs(1));
    let (answer, _) = tokio::join!(
        leaving,
        daemon.queue_until(|queue| queue.running.as_ref().is_some_and(|job| job.id.ends_with("-0")))
    );
    assert_eq!(answer, "");
    daemon.queue_until(|queue| queue.running.is_none()).await;
}

#[tokio::test]
async fn what_is_unknown_is_refused_in_json() {
    let daemon = Daemon::start().await;
    let client = daemon.client();
    let cases = [
        (client.get::<Status>("/nowhere").await.map(drop), 404, "GET /status"),
        (client.get::<Status>("/nothing").await.map(drop), 404, "there is no /nothing"),
        (client.post::<Status>("/status", NOTHING).await.map(drop), 405, "does not take POST; use GET"),
        (client.get::<Bench>("/bench").await.map(drop), 405, "does not take GET; use POST"),
        (client.post::<Bench>("/bench", Some(&7)).await.map(drop), 400, "must be JSON such as"),
        (client.get::<Drain>("/drain").await.map(drop), 405, "does not take GET; use POST"),
        (client.get::<Status>("/logs?tail=1").await.map(drop), 400, "`tail` is not understood"),
        (client.get::<Status>("/logs?lines=x").await.map(drop), 400, "lines=x is no number"),
        (client.post::<LogLevel>("/log-level", NOTHING).await.map(drop), 400, "{\"level\":\"debug\"}"),
        (client.post::<LogLevel>("/log-level", Some(&level("inof"))).await.map(drop), 400, "`inof`"),
        (client.post::<LogLevel>("/log-level", Some(&7)).await.map(drop), 400, "must be JSON"),
    ];
    for (outcome, expected, part) in cases {
        let Err(ClientError::Refused { status, body }) = outcome else { panic!("{part}: {outcome:?}") };
        assert_eq!(status.as_u16(), expected, "{part}");
        assert!(body.error.message.contains(part), "{part}: {}", body.error.message);
    }
    // After all of that the daemon still answers.
    assert_eq!(client.get::<Status>("/status").await.unwrap().state, State::Ready);
}

#[tokio::test]
async fn log_level_changes_what_is_kept() {
    let daemon = Daemon::start().await;
    daemon.log(|| tracing::debug!("before"));
    let level: LogLevel = daemon.client().post("/log-level", Some(&level("debug"))).await.unwrap();
    assert_eq!(level.level, "debug");
    daemon.log(|| tracing::debug!("after"));
    let kept = daemon.ring.last(10, axectl::protocol::Level::Trace);
    let messages: Vec<_> = kept.iter().map(|line| line.message.as_str()).collect();
    assert_eq!(messages, ["after"]);
    // It is the level in force, whatever the configuration says.
    let config: Config = daemon.client().get("/config").await.unwrap();
    let shown = config.settings.iter().find(|setting| setting.key == "log.level").unwrap();
    assert_eq!((shown.value.as_str(), shown.source), (Some("debug"), Source::Operator));
    daemon.board.pin_level(None);
    let config: Config = daemon.client().get("/config").await.unwrap();
    assert_eq!(config.text("log.level").as_deref(), Some("info"));
}

#[tokio::test]
async fn the_jobs_of_a_bench_are_those_of_no_other() {
    let daemon = Daemon::start().await;
    let asked = BenchRequest { prompt_tokens: 7, completion_tokens: 5, rounds: 1 };
    let client = daemon.client();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let cancelling = async {
            daemon.queue_until(|queue| queue.running.is_some()).await;
            let id = daemon.board.running_id().unwrap();
            daemon.client().post::<CancelResult>(&format!("/cancel/{id}"), NOTHING).await.unwrap().id
        };
        let (bench, id) = tokio::join!(client.post::<Bench>("/bench", Some(&asked)), cancelling);
        let Err(ClientError::Refused { body, .. }) = bench else { panic!("not ended: {bench:?}") };
        assert!(body.error.message.contains("it was ended"), "{}", body.error.message);
        seen.push(id);
    }
    assert_ne!(seen[0], seen[1]);
}

fn level(level: &str) -> LogLevel {
    LogLevel { level: level.to_owned() }
}
