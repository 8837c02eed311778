//! `axectl` as a real process: tables, JSON, exit codes.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use axe::decode::Step;
use serde_json::Value;

use crate::support::Daemon;

/// The program, freshly built: cargo builds a package's own programs for its tests, and this one is a neighbour's.
pub fn binary() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let tests = std::env::current_exe().unwrap();
            let folder = tests.parent().and_then(Path::parent).unwrap();
            let mut build = Command::new(env!("CARGO"));
            build.args(["build", "--quiet", "--package", "axectl"]).current_dir(env!("CARGO_MANIFEST_DIR"));
            if folder.ends_with("release") {
                build.arg("--release");
            }
            build.arg("--target-dir").arg(folder.parent().unwrap());
            assert!(build.status().unwrap().success(), "building axectl failed");
            folder.join("axectl")
        })
        .clone()
}

/// Runs `axectl ARGUMENTS` against `socket` without holding up the daemon, which lives in this process.
async fn run_at(socket: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(binary());
    command.args(arguments).env("AXED_SOCKET", socket).stdin(Stdio::null());
    let output: Output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn run(daemon: &Daemon, arguments: &[&str]) -> (i32, String, String) {
    run_at(&daemon.socket, arguments).await
}

#[tokio::test(flavor = "multi_thread")]
async fn status_and_queue_as_tables_and_json() {
    let daemon = Daemon::start().await;
    let (code, out, _) = run(&daemon, &["status"]).await;
    assert_eq!(code, 0);
    assert!(out.starts_with("State      ready\nDaemon     axed 0.1.0 ("), "{out}");
    assert!(out.contains("Memory     132 MiB of 1.0 GiB: weights 90.0 MiB, KV cache 40.0 MiB"), "{out}");
    assert!(out.contains("Slot       idle\n"), "{out}");

    let (code, out, _) = run(&daemon, &["--json", "status"]).await;
    let status: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, status["state"].as_str(), out.lines().count()), (0, Some("ready"), 1));

    let _job = daemon.submit("job-1");
    daemon.queue_until(|queue| queue.running.is_some()).await;
    let (_, out, _) = run(&daemon, &["queue"]).await;
    assert!(out.starts_with("ID     STATE    PROMPT  ENCODED  GENERATED"), "{out}");
    assert!(out.contains("\njob-1  prefill       7        0          0"), "{out}");
    let (_, out, _) = run(&daemon, &["queue", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["running"]["id"], "job-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_several_choices_is_one_job() {
    let daemon = Daemon::start().await;
    let _jobs = daemon.engine.submit_all(vec![Daemon::request("job-1"); 3], None).unwrap();
    let queue = daemon.queue_until(|queue| queue.running.is_some()).await;
    assert!(queue.waiting.is_empty(), "{queue:?}");
    let _other = daemon.submit("job-2");
    let queue = daemon.queue_until(|queue| !queue.waiting.is_empty()).await;
    assert_eq!(queue.waiting.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["job-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_tells_and_an_unknown_job_is_code_4() {
    let daemon = Daemon::start().await;
    let _job = daemon.submit("job 1");
    daemon.queue_until(|queue| queue.running.is_some()).await;
    let (code, out, _) = run(&daemon, &["cancel", "job 1"]).await;
    assert_eq!((code, out.as_str()), (0, "cancelled job 1, which was encoding its prompt\n"));
    let (code, out, told) = run(&daemon, &["cancel", "nobody"]).await;
    assert_eq!((code, out.as_str()), (4, ""));
    assert!(told.starts_with("axectl: there is no job `nobody`"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_filter_and_follow() {
    let daemon = Daemon::start().await;
    daemon.log(|| {
        tracing::info!(target: "axe::one", n = 1, "first");
        tracing::warn!(target: "axe::two", "second");
    });
    let (code, out, _) = run(&daemon, &["logs", "-n", "1"]).await;
    assert_eq!(code, 0);
    assert!(out.ends_with("  WARN axe::two: second\n") && out.lines().count() == 1, "{out}");
    let (_, out, _) = run(&daemon, &["logs", "--json", "--level", "info"]).await;
    let first: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    assert_eq!((first["message"].as_str(), first["fields"]["n"].as_u64()), (Some("first"), Some(1)));

    // A reader that goes away after one line ends it quietly.
    let mut following = Command::new(binary())
        .args(["logs", "-f", "-n", "1"])
        .env("AXED_SOCKET", &daemon.socket)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = std::io::BufReader::new(following.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
    assert!(line.contains("second"), "{line}");
    drop(reader);
    let begin = Instant::now();
    while following.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(10), "axectl goes on without a reader");
        daemon.log(|| tracing::info!("more"));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let output = following.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_ends_well_when_the_daemon_does() {
    let mut daemon = Daemon::start().await;
    let following = Command::new(binary())
        .args(["logs", "-f"])
        .env("AXED_SOCKET", &daemon.socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    daemon.stop().await;
    let output = tokio::task::spawn_blocking(|| following.wait_with_output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_other_commands() {
    let daemon = Daemon::start().await;
    let (code, out, _) = run(&daemon, &["profile"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("device.profiling = true"), "{out}");
    let (_, out, _) = run(&daemon, &["gpu"]).await;
    assert!(
        out.contains("Allocated      132 MiB of 1.0 GiB") && out.contains("CPU            n/a, n/a"),
        "{out}"
    );
    let (_, out, _) = run(&daemon, &["version"]).await;
    assert!(out.starts_with("axectl  0.1.0\naxed    0.1.0 ("), "{out}");
    let (code, out, _) = run(&daemon, &["log-level", "axe::engine=debug,warn"]).await;
    assert_eq!((code, out.as_str()), (0, "logging at axe::engine=debug,warn until the next start\n"));
    let (code, _, told) = run(&daemon, &["log-level", "loud"]).await;
    assert_eq!(code, 1);
    assert!(told.contains("log level `loud` is not understood"), "{told}");

    let _job = daemon.submit("last");
    daemon.queue_until(|queue| queue.running.is_some()).await;
    let (code, out, _) = run(&daemon, &["drain"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("(1 running, 0 waiting)"), "{out}");
    daemon.steps.send(Step::Commit(vec![0; 5])).unwrap();
    daemon.engine.over().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn config_bench_and_logs_of_a_request() {
    let daemon = Daemon::start().await;
    let (code, out, _) = run(&daemon, &["config"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("server.port     8080        environment AXE_PORT"), "{out}");
    assert!(out.contains("log.level       \"info\"      default"), "{out}");
    let (_, out, _) = run(&daemon, &["config", "--set"]).await;
    assert!(out.contains("(secret)") && !out.contains("log.level"), "{out}");
    let (_, out, _) = run(&daemon, &["config", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["settings"][0]["place"], "AXE_PORT");

    for _ in 0..2 {
        daemon.steps.send(Step::Prefill { done: 7, total: 7 }).unwrap();
        daemon.steps.send(Step::Commit(vec![0])).unwrap();
        daemon.steps.send(Step::Commit(vec![0; 4])).unwrap();
    }
    let (code, out, told) = run(&daemon, &["bench", "-p", "7", "-n", "5", "--rounds", "1"]).await;
    assert_eq!(code, 0, "{told}");
    assert!(
        out.starts_with("ROUND  PROMPT") && out.contains("Decode   ") && out.contains("Build    axed"),
        "{out}"
    );
    let (code, _, told) = run(&daemon, &["bench", "-p", "4000"]).await;
    assert_eq!(code, 1);
    assert!(told.contains("the context's 64 tokens"), "{told}");

    daemon.log(|| {
        tracing::info!(id = "chatcmpl-aa", "ours");
        tracing::info!(id = "chatcmpl-bb", "theirs");
    });
    let (_, out, _) = run(&daemon, &["logs", "--request", "chatcmpl-aa"]).await;
    assert!(out.lines().count() == 1 && out.contains("ours"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn watching_shows_again_and_again() {
    let daemon = Daemon::start().await;
    let mut watching = Command::new(binary())
        .args(["gpu", "-w", "0.1", "--json"])
        .env("AXED_SOCKET", &daemon.socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = std::io::BufReader::new(watching.stdout.take().unwrap());
    for _ in 0..3 {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
        assert!(serde_json::from_str::<Value>(&line).unwrap()["host"].is_object(), "{line}");
    }
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_daemon_is_code_3_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let nothing = directory.path().join("nothing.sock");
    let (code, out, told) = run_at(&nothing, &["status"]).await;
    assert_eq!((code, out.as_str()), (3, ""));
    assert!(told.contains("nothing.sock") && told.contains("systemctl start axed"), "{told}");

    let stale = directory.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let (code, _, told) = run_at(&stale, &["queue"]).await;
    assert_eq!(code, 3);
    assert!(told.contains("left this socket behind"), "{told}");

    // What is there is something else.
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    for other in [file.as_path(), directory.path()] {
        let (code, _, told) = run_at(other, &["queue"]).await;
        assert!(code == 3 && told.contains("this is no socket"), "{code}: {told}");
    }

    // Its own version is told even so.
    let (code, out, _) = run_at(&nothing, &["version"]).await;
    assert_eq!((code, out.as_str()), (3, "axectl  0.1.0\naxed    n/a\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_hangs_costs_five_seconds_at_most() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("hung.sock");
    // Accepts through the kernel's queue and never answers.
    let _hung = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    // Built before the clock runs.
    binary();
    let begin = Instant::now();
    let (code, _, told) = run_at(&socket, &["status"]).await;
    assert_eq!(code, 3);
    assert!(told.contains("did not answer within 5 s"), "{told}");
    assert!(begin.elapsed() < Duration::from_secs(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_in_another_tongue_is_code_1() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("other.sock");
    let other = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"220 mail ready\r\n").unwrap();
    });
    let (code, _, told) = run_at(&socket, &["status"]).await;
    server.join().unwrap();
    assert_eq!(code, 1, "{told}");
    assert!(told.contains("other.sock"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_errors_are_code_2_and_help_lists_the_codes() {
    let nowhere = Path::new("/nowhere");
    for wrong in [
        &["frobnicate"][..],
        &["cancel"],
        &["cancel", ""],
        &["doctor", "--root", "/nowhere/at/all"],
        &["doctor", "--root", "/proc/self/status"],
        &["logs", "-n", "x"],
        &["logs", "--level", "loud"],
        &["gpu", "--watch", "0"],
        &["logs", "--request", "a&b"],
        &["bench", "--rounds", "many"],
        &[],
    ] {
        let (code, _, told) = run_at(nowhere, wrong).await;
        assert_eq!(code, 2, "{wrong:?}: {told}");
    }
    let (code, out, _) = run_at(nowhere, &["--help"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("Exit codes:") && out.contains("4  not found"), "{out}");
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = run_at(nowhere, &["completions", shell]).await;
        assert!(code == 0 && out.contains("log-level"), "{shell}");
    }
}
