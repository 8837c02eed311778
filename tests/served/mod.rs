//! The built daemon with the miniature, over HTTP.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::{Client, Response, StatusCode};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::cache_dir;

/// Longest wait for anything; far more than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A daemon with the miniature, on its defaults; it ends with this.
pub struct Daemon {
    child: Child,
    port: u16,
    client: Client,
    _folder: TempDir,
}

impl Daemon {
    pub async fn start(model: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = folder.path().join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
        for name in ["AXE_CONFIG", "AXE_API_KEY", "AXE_HOST", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        let child = command
            .args(["serve", "--port", &port.to_string(), "--model"])
            .arg(model)
            .arg("--admin-socket")
            .arg(folder.path().join("admin.sock"))
            .env("AXE_DEVICE_CACHE_DIR", cache_dir())
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let client = Client::builder().timeout(PATIENCE).build().unwrap();
        let mut daemon = Self { child, port, client, _folder: folder };
        let started = Instant::now();
        loop {
            let answer = daemon.client.get(daemon.url("/ready")).send().await;
            if answer.is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return daemon;
            }
            let ended = daemon.child.try_wait().unwrap().is_some();
            let told = || std::fs::read_to_string(&log).unwrap();
            assert!(!ended && started.elapsed() < PATIENCE, "not ready: {}", told());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// The answer to a request that must succeed.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let (status, text) = (response.status(), response.text().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{body}: {text}");
        serde_json::from_str(&text).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
