//! The daemon as a process: what it refuses to start with, and how it ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod stage;
mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axe::admin::Board;
use axe::config::Config;
use axe::daemon::Source;
use axe::decode::{BackendError, Memory};
use axe::engine::{LoadProgress, Loaded, Loader};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use stage::{PATIENCE, Script, Scripted, TEMPLATE, config, loaded};

/// Not a test: the daemon over a scripted backend, run as a process of its own by the tests below.
#[test]
#[ignore = "run by other tests, as a child process"]
fn scripted_daemon() {
    let toml = std::env::var("TEST_CONFIG").expect("set by the parent");
    if let Err(error) = axe::daemon::run(config(&toml), Theatre(toml)) {
        eprintln!("axed: {error}");
        std::process::exit(error.status().into());
    }
    std::process::exit(0);
}

/// Where the scripted daemon's configuration and model come from.
struct Theatre(String);

impl Source for Theatre {
    fn config(&self) -> Result<Config, BackendError> {
        Ok(config(&self.0))
    }

    fn loader(&self, _config: &Config, _board: &Arc<Board>) -> Result<Box<dyn Loader>, BackendError> {
        Ok(Box::new(Stagehand))
    }
}

/// Loads the scripted model.
struct Stagehand;

impl Loader for Stagehand {
    fn load(&mut self, progress: &LoadProgress) -> Result<Loaded, BackendError> {
        progress.report(0.5, "raising the curtain");
        std::thread::sleep(Duration::from_millis(200));
        let script = Script::endless().pace(Duration::from_millis(10));
        Ok(loaded(Scripted(Arc::new(script)), Some(TEMPLATE)))
    }

    fn fits_beside(&mut self, _held: Memory) -> Result<bool, BackendError> {
        Ok(true)
    }
}

/// A running scripted daemon that speaks to a supervisor.
struct Daemon {
    child: Child,
    /// What the supervisor was told.
    heard: Arc<Mutex<Vec<String>>>,
    folder: tempfile::TempDir,
    url: String,
}

impl Daemon {
    fn start(server: &str) -> Self {
        Self::start_on(server, None)
    }

    /// As [`start`](Self::start), with a socket handed over as systemd does it.
    fn start_on(server: &str, public: Option<TcpListener>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let notify = folder.path().join("notify");
        let supervisor = UnixDatagram::bind(&notify).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        // Read at all times, as a real supervisor does: its socket holds few messages, and senders wait.
        std::thread::spawn({
            let heard = Arc::clone(&heard);
            move || {
                let mut buffer = [0; 4096];
                while let Ok(n) = supervisor.recv(&mut buffer) {
                    heard.lock().unwrap().push(String::from_utf8(buffer[..n].to_vec()).unwrap());
                }
            }
        });
        let socket = folder.path().join("run/admin.sock");
        let toml = format!("[server]\nport = 0\n{server}\n[admin]\nsocket = {socket:?}");
        let hand_over = if public.is_some() { "LISTEN_PID=$$ LISTEN_FDS=1" } else { "" };
        let stdin = public.map_or_else(Stdio::null, |socket| Stdio::from(OwnedFd::from(socket)));
        let child = Command::new("sh")
            // The watchdog is meant for the process whose id it names; so are sockets, of which the first is number 3.
            .args(["-c", &format!("WATCHDOG_PID=$$ {hand_over} exec \"$0\" \"$@\" 3<&0 </dev/null")])
            .stdin(stdin)
            .arg(std::env::current_exe().unwrap())
            .args(["scripted_daemon", "--exact", "--ignored", "--nocapture"])
            .env("TEST_CONFIG", toml)
            .env("NOTIFY_SOCKET", &notify)
            .env("WATCHDOG_USEC", "200000")
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut daemon = Self { child, heard, folder, url: String::new() };
        daemon.hear("READY=1");
        daemon.url = daemon.told("ready on ").unwrap();
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("run/admin.sock")
    }

    /// The rest of the line in which the supervisor was told `words`.
    fn told(&self, words: &str) -> Option<String> {
        let heard = self.heard.lock().unwrap();
        heard
            .iter()
            .flat_map(|m| m.lines())
            .find_map(|l| l.split_once(words))
            .map(|(_, rest)| rest.to_owned())
    }

    /// Waits until the supervisor was told `words`.
    fn hear(&self, words: &str) {
        let start = Instant::now();
        while self.told(words).is_none() {
            assert!(start.elapsed() < PATIENCE, "never heard {words}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Waits for the end; the exit status and what it wrote to standard error.
    fn end(&mut self) -> (i32, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < PATIENCE, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (status.code().unwrap_or(-1), log)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn chat(max_tokens: usize, stream: bool) -> serde_json::Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": stream})
}

async fn post(url: &str, body: serde_json::Value) -> reqwest::Response {
    let client = reqwest::Client::builder().timeout(PATIENCE).build().unwrap();
    client.post(format!("{url}/v1/chat/completions")).json(&body).send().await.unwrap()
}

#[tokio::test]
async fn sigterm_finishes_what_runs_and_waits_refuses_what_is_new_and_exits_0() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut daemon = Daemon::start("");
        assert!(daemon.socket().exists());
        daemon.hear("STATUS=loading: raising the curtain, 50 %");
        daemon.hear("WATCHDOG=1");
        let running = post(&daemon.url, chat(60, true)).await;
        let waiting = tokio::spawn({
            let url = daemon.url.clone();
            async move { post(&url, chat(20, false)).await }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        daemon.signal(signal);
        daemon.hear("STOPPING=1");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let refused = post(&daemon.url, chat(1, false)).await;
        assert_eq!(refused.status(), 503);
        assert!(refused.text().await.unwrap().contains("shutting_down"));
        let stream = running.text().await.unwrap();
        assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
        let answer: serde_json::Value = waiting.await.unwrap().json().await.unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 20);
        let (status, log) = daemon.end();
        assert_eq!(status, 0, "{log}");
        assert!(!daemon.socket().exists(), "the admin socket was left behind");
    }
}

#[tokio::test]
async fn after_the_grace_requests_are_cancelled_and_the_exit_is_still_0() {
    let mut daemon = Daemon::start("drain_grace_s = 0.3");
    let running = post(&daemon.url, chat(4000, true)).await;
    let start = Instant::now();
    daemon.signal(Signal::SIGTERM);
    let stream = running.text().await.unwrap();
    assert!(stream.contains("\"code\":\"shutting_down\"") && !stream.contains("[DONE]"), "{stream}");
    let (status, log) = daemon.end();
    assert_eq!(status, 0, "{log}");
    assert!(start.elapsed() >= Duration::from_millis(300) && start.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let mut daemon = Daemon::start("drain_grace_s = 600");
    let _running = post(&daemon.url, chat(4000, true)).await;
    daemon.signal(Signal::SIGTERM);
    daemon.hear("STOPPING=1");
    tokio::time::sleep(Duration::from_millis(100)).await;
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.end();
    assert_eq!(status, 1);
    assert!(log.contains("second signal"), "{log}");
}

#[tokio::test]
async fn a_drain_by_the_operator_ends_the_daemon() {
    let mut daemon = Daemon::start("");
    let mut socket = std::os::unix::net::UnixStream::connect(daemon.socket()).unwrap();
    std::io::Write::write_all(&mut socket, b"POST /drain HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        .unwrap();
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line).unwrap();
    assert!(line.starts_with("HTTP/1.1 200"), "{line}");
    let (status, log) = daemon.end();
    assert_eq!(status, 0, "{log}");
}

#[test]
fn a_signal_while_the_model_loads_ends_the_daemon_in_good_order() {
    for cached in [false, true] {
        let cache = tempfile::tempdir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        for delay in [60, 100, 150, 250, 400, 600, 800, 1200, 1800, 2200] {
            let cache = if cached { support::cache_dir() } else { cache.path().join(delay.to_string()) };
            let socket = folder.path().join("admin.sock");
            let mut child = Command::new(env!("CARGO_BIN_EXE_axed"))
                .arg("--model")
                .arg(support::real_model("smollm2-135m-instruct-q4_1.gguf"))
                .args(["--port", "0", "--admin-socket"])
                .arg(&socket)
                .env("AXE_DEVICE_CACHE_DIR", &cache)
                .current_dir(folder.path())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let started = Instant::now();
            // Before it listens for signals, the system ends it.
            while !socket.exists() {
                assert!(started.elapsed() < PATIENCE, "no socket");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(delay).saturating_sub(started.elapsed()));
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
            let told = Instant::now();
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if told.elapsed() > PATIENCE => {
                        child.kill().unwrap();
                        panic!("{delay} ms: does not end");
                    }
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            assert_eq!(status.code(), Some(0), "{delay} ms, cached {cached}: {status}");
            assert!(!socket.exists(), "{delay} ms: the admin socket was left behind");
        }
    }
}

/// Runs `axed` in an empty folder until it ends by itself.
fn axed(args: &[&str], folder: &Path) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.args(args).current_dir(folder).env("AXE_ADMIN_SOCKET", folder.join("admin.sock"));
    for name in ["AXE_MODEL", "AXE_CONFIG", "AXE_PORT", "AXE_HOST", "AXE_API_KEY"] {
        command.env_remove(name);
    }
    let Output { status, stderr, .. } = command.output().unwrap();
    (status.code().unwrap_or(-1), String::from_utf8(stderr).unwrap())
}

#[test]
fn what_cannot_start_says_why_and_exits_1_or_2_for_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    std::fs::write(dir.join("cut.gguf"), b"GGUF\x03\0\0\0").unwrap();
    std::fs::write(dir.join("odd.toml"), "[server]\nprot = 1").unwrap();
    std::fs::write(dir.join("bad.toml"), "[server]\nport = \"http\"").unwrap();
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port().to_string();
    let cases: [(&[&str], i32, &[&str]); 9] = [
        (&["--nonsense"], 2, &["--nonsense"]),
        (&["tokenize", "--nonsense"], 2, &["--nonsense"]),
        (&["logits", "-m", "x", "-o", "y"], 2, &["--ids"]),
        (&[], 1, &["no model", "--model", "AXE_MODEL"]),
        (&["--config", "odd.toml"], 1, &["odd.toml", "server.prot", "server.port"]),
        (&["--config", "bad.toml"], 1, &["bad.toml", "server.port", "\"http\"", "0 to 65535"]),
        (&["--model", "missing.gguf"], 1, &["missing.gguf", "No such file"]),
        (&["--model", "cut.gguf", "--port", "0"], 1, &["cut.gguf"]),
        (&["--model", "cut.gguf", "--port", &port], 1, &[&port, "another program", "--port", "AXE_PORT"]),
    ];
    for (args, status, words) in cases {
        let (found, text) = axed(args, dir);
        assert_eq!(found, status, "{args:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{args:?}: no {word:?} in {text}");
        }
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[tokio::test]
async fn a_socket_that_was_handed_over_is_served_and_outlives_the_daemon() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    // Waits in the kernel's queue until there is a daemon, which need not listen where its configuration says.
    let early = std::net::TcpStream::connect(address).unwrap();
    let mut daemon = Daemon::start_on("", Some(socket.try_clone().unwrap()));
    assert_eq!(daemon.url, format!("http://{address}"));
    let answer = reqwest::get(format!("{}/ready", daemon.url)).await.unwrap();
    assert_eq!(answer.status(), 200);
    drop(early);
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.end();
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("the public socket was handed over"), "{log}");
    // Whoever comes now waits for the next daemon.
    let waiting = std::net::TcpStream::connect(address).unwrap();
    let daemon = Daemon::start_on("", Some(socket));
    drop(waiting);
    assert_eq!(reqwest::get(format!("{}/health", daemon.url)).await.unwrap().status(), 200);
}
