//! What kernels took, of a real model on the device that is there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use axe::admin::{Board, shown};
use axe::config::Config;
use axe::device::telemetry::Sampler;
use axe::engine::{Engine, Options, State};
use axectl::protocol::{Bench, BenchRequest, Profile, Status};

use crate::support::Face;

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_is_of_the_last_request_with_bytes_and_shares_of_limits() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-diffusion");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache");
    let env = [("AXE_DEVICE_PROFILING", "true"), ("AXE_DEVICE_CACHE_DIR", cache.to_str().unwrap())];
    let env: BTreeMap<_, _> = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let config = Config::from_sources(None, env, Vec::new()).unwrap();
    let (send_board, board) = mpsc::channel::<Arc<Board>>();
    let wanted = config.clone();
    let engine = Engine::spawn(
        move |progress| axe::load::load(&wanted, &model, progress, &board.recv().unwrap()),
        Options { queue_capacity: 4, ..Options::default() },
    )
    .unwrap();
    let handle = engine.handle();
    let board = Arc::new(Board::new(handle.clone(), shown(&config), Sampler::new()));
    send_board.send(Arc::clone(&board)).unwrap();
    let mut state = handle.watch();
    state.wait_for(|state| *state == State::Ready).await.unwrap();

    let face = Face::over(board).await;
    let asked = BenchRequest { prompt_tokens: 40, completion_tokens: 32, rounds: 1 };
    let bench: Bench = face.patient().post("/bench", Some(&asked)).await.unwrap();
    let passes = bench.rounds[0].passes as u64;
    assert!(passes > 0 && bench.decode_tokens_per_s > 0.0, "{bench:?}");
    // It is shown once the job is put away, which its listener may be ahead of. The round before is no part of it.
    let start = Instant::now();
    let profile = loop {
        let profile: Profile = face.patient().get("/profile").await.unwrap();
        if profile.request.as_deref().is_some_and(|id| id.starts_with("bench-") && id.ends_with("-1")) {
            break profile;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", profile.request);
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(profile.enabled);
    let limits = profile.limits.unwrap();
    assert!(limits.read_bytes_per_s > 1e8 && limits.operations_per_s > 1e8, "{limits:?}");
    let head = profile.kernels.iter().find(|kernel| kernel.kernel.ends_with("stream_head")).unwrap();
    assert_eq!(head.launches, passes);
    assert!(head.bytes > 0 && head.operations > 0, "{head:?}");
    let products: Vec<_> = profile.kernels.iter().filter(|kernel| kernel.bytes > 0).collect();
    assert!(products.len() >= 3, "{products:?}");
    for kernel in products {
        let share = kernel.share_of(&limits).unwrap();
        // Small matrices stay in caches, which read faster than memory.
        assert!(share > 0.0 && share < 20.0, "{share} in {kernel:?}");
    }
    let status: Status = face.patient().get("/status").await.unwrap();
    let kernels = status.kernels.unwrap();
    assert_eq!(kernels.family, "vector");
    assert!(
        kernels.self_tests.len() > 10 && kernels.self_tests.iter().all(|test| test.passed),
        "{kernels:?}"
    );
    assert!(kernels.self_tests.iter().any(|test| test.worst > 0.0 && test.worst <= 1.0));
    drop(face);
    handle.shutdown();
    tokio::task::spawn_blocking(move || engine.join()).await.unwrap();
}
