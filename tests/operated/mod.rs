//! A built daemon with a configuration file of its own, to be changed while it runs.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axectl::client::{Client as Operator, ClientError};
use axectl::protocol::{Reload, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::{Client, Response};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longest wait for anything; far more than a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A causal model that makes no sense and takes no time, in `folder`. The fixture's one merge makes no token; without it
/// its vocabulary is sound.
pub fn causal(folder: &Path, family: &str) -> PathBuf {
    let mut bytes = std::fs::read(fixture(&format!("causal-families/{family}.gguf"))).unwrap();
    let key = b"tokenizer.ggml.merges";
    if let Some(at) = bytes.windows(key.len()).position(|window| window == key) {
        bytes[at..at + key.len()].copy_from_slice(b"tokenizer.ggml.others");
    }
    let path = folder.join(format!("{family}.gguf"));
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A model that denoises.
pub fn diffusion() -> PathBuf {
    fixture("tiny-diffusion")
}

/// A running daemon.
pub struct Axed {
    child: Child,
    pub folder: TempDir,
    port: u16,
    pub client: Client,
    /// What systemd would have been told.
    heard: Arc<Mutex<Vec<String>>>,
}

impl Axed {
    /// A daemon that is ready, with `model` and more lines of its `daemon.toml`.
    pub async fn start(model: impl FnOnce(&Path) -> PathBuf, toml: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let heard = listen(&folder.path().join("notify"));
        std::fs::write(folder.path().join("daemon.toml"), configuration(port, &model, toml)).unwrap();
        let mut command = Command::new("sh");
        // The watchdog is meant for the process whose id it names.
        command.args(["-c", "WATCHDOG_PID=$$ exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_axed")]);
        for name in ["AXE_CONFIG", "AXE_API_KEY", "AXE_HOST", "AXE_MODEL"] {
            command.env_remove(name);
        }
        let child = command
            .args(["serve", "--config", "daemon.toml"])
            .env("AXE_DEVICE_CACHE_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
            .env("AXE_FAULTS", folder.path().join("fault"))
            .env("WATCHDOG_USEC", "100000")
            .env("NOTIFY_SOCKET", folder.path().join("notify"))
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let client = Client::builder().timeout(PATIENCE).build().unwrap();
        let mut daemon = Self { child, folder, port, client, heard };
        let begun = Instant::now();
        while daemon.readiness().await != 200 {
            assert!(daemon.child.try_wait().unwrap().is_none(), "ended: {}", daemon.log());
            assert!(begun.elapsed() < PATIENCE, "not ready: {}", daemon.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        daemon
    }

    /// Writes another `daemon.toml`.
    pub fn configure(&self, model: &Path, toml: &str) {
        let path = self.folder.path().join("daemon.toml");
        std::fs::write(path, configuration(self.port, model, toml)).unwrap();
    }

    /// Orders a fault, see src/device/fault.rs.
    pub fn order(&self, fault: &str) {
        let can = cfg!(any(debug_assertions, feature = "faults"));
        assert!(can, "release builds can only be told to fail if they are built with --features faults");
        std::fs::write(self.folder.path().join("fault"), format!("{fault}\n")).unwrap();
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Status of `/ready`; 0 where nobody answers.
    pub async fn readiness(&self) -> u16 {
        let answer = self.client.get(self.url("/ready")).send().await;
        answer.map_or(0, |answer| answer.status().as_u16())
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// The continuation of a few token ids, by `tokens` more.
    pub async fn complete(&self, tokens: usize) -> (u16, Value) {
        let response = self.post("/v1/completions", &completion(tokens)).await;
        (response.status().as_u16(), response.json().await.unwrap())
    }

    pub fn operator(&self) -> Operator {
        Operator::new(self.folder.path().join("admin.sock"), PATIENCE)
    }

    pub async fn status(&self) -> Status {
        self.operator().get("/status").await.unwrap()
    }

    pub async fn reload(&self) -> Result<Reload, ClientError> {
        self.operator().post("/reload", None::<&()>).await
    }

    /// A figure of `/metrics`.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = self.client.get(self.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Whether systemd would have been told `words`.
    pub fn was_told(&self, words: &str) -> bool {
        self.heard.lock().unwrap().iter().any(|message| message.contains(words))
    }

    /// Forgets what systemd would have been told.
    pub fn forget(&self) {
        self.heard.lock().unwrap().clear();
    }

    /// Waits for the end; the exit status.
    pub async fn end(&mut self) -> i32 {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(begun.elapsed() < PATIENCE, "does not end: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Axed {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

pub fn completion(tokens: usize) -> Value {
    json!({"prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

fn configuration(port: u16, model: &Path, toml: &str) -> String {
    // Sections may come once: what a test adds to a section goes behind its first line.
    let mut text = format!(
        "[server]\nport = {port}\n[admin]\nsocket = \"admin.sock\"\n[model]\npath = {:?}\n[device]\nkind = \"cpu\"\n",
        model.display().to_string()
    );
    for line in toml.lines().filter(|line| !line.trim().is_empty()) {
        let (section, setting) = line.trim().split_once('.').expect("section.key = value");
        let head = format!("[{section}]\n");
        if !text.contains(&head) {
            text.push_str(&head);
        }
        text = text.replace(&head, &format!("{head}{setting}\n"));
    }
    text
}

/// Reads what a supervisor is told, at all times, as a real one does.
fn listen(path: &Path) -> Arc<Mutex<Vec<String>>> {
    let socket = UnixDatagram::bind(path).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&heard);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n) = socket.recv(&mut buffer) {
            into.lock().unwrap().push(String::from_utf8_lossy(&buffer[..n]).into_owned());
        }
    });
    heard
}

/// Waits until `happened`.
pub async fn until<F: Future<Output = bool>>(what: &str, mut happened: impl FnMut() -> F) {
    let begun = Instant::now();
    while !happened().await {
        assert!(begun.elapsed() < PATIENCE, "{what} never happened");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
