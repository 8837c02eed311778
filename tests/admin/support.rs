//! A daemon without a device: the real engine over a scripted backend, and the admin server on a temporary socket.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use axe::{
    admin::{Board, Listener, LogControl, LogRing, Policy, Server},
    decode::{Backend, BackendError, Generation, Memory, Sampling, Step},
    device::telemetry::Sampler,
    engine::{Engine, EngineHandle, LoadProgress, Loaded, Loader, Model, ModelKind, Request, Stop},
    text::{Strings, Tokenizer, Vocabulary},
};
use axectl::{client::Client, protocol};
use tokio::sync::oneshot;
use tracing_subscriber::layer::SubscriberExt;

/// Memory the scripted backend says it has.
pub const MEMORY: Memory =
    Memory { weights: 90 << 20, kv_cache: 40 << 20, scratch: 2 << 20, budget: 1 << 30 };

/// Everything a test needs of the daemon.
pub struct Daemon {
    pub socket: PathBuf,
    pub engine: EngineHandle,
    pub board: Arc<Board>,
    pub ring: LogRing,
    /// Each step sent here is what the running generation does next; without one it makes empty drafts.
    pub steps: mpsc::Sender<Step>,
    pub directory: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    log: tracing::Dispatch,
}

impl Daemon {
    /// A daemon that is ready.
    pub async fn start() -> Self {
        let daemon = Self::start_with(Policy::new(None).unwrap(), LogRing::new(50)).await;
        let mut state = daemon.engine.watch();
        state.wait_for(|state| *state == axe::engine::State::Ready).await.unwrap();
        daemon
    }

    /// A daemon that takes `root` for its machine.
    pub async fn on_machine(root: &Path) -> Self {
        Self::built(Policy::new(None).unwrap(), LogRing::new(50), Some(root)).await
    }

    pub async fn start_with(policy: Policy, ring: LogRing) -> Self {
        Self::built(policy, ring, None).await
    }

    async fn built(policy: Policy, ring: LogRing, machine: Option<&Path>) -> Self {
        let (steps, script) = mpsc::channel();
        let engine = Engine::spawn(
            move |_| Ok(Loaded { backend: Box::new(Scripted(script)), model: model() }),
            axe::engine::Options { queue_capacity: 2, ..Default::default() },
        )
        .unwrap()
        .handle();
        let directory = tempfile::tempdir().unwrap();
        let setting = |key: &str, value: serde_json::Value, source, place: Option<&str>| protocol::Setting {
            key: key.to_owned(),
            value,
            after_restart: None,
            source,
            place: place.map(str::to_owned),
        };
        let config = protocol::Config {
            file: Some("/etc/axed/daemon.toml".to_owned()),
            settings: vec![
                setting("server.port", 8080.into(), protocol::Source::Environment, Some("AXE_PORT")),
                setting(
                    "server.api_key",
                    "(secret)".into(),
                    protocol::Source::File,
                    Some("/etc/axed/daemon.toml"),
                ),
                setting("log.level", "info".into(), protocol::Source::Default, None),
            ],
        };
        let empty = directory.path().join("machine");
        let sampler = Sampler::at(machine.unwrap_or(&empty));
        let board = Arc::new(Board::new(engine.clone(), config, sampler));
        board.pin_address("http://127.0.0.1:8080");
        let (filter, control) = LogControl::new("info").unwrap();
        // A subscriber of the test's own, since the global one is shared with tests that run at the same time.
        let log = tracing::Dispatch::new(tracing_subscriber::registry().with(filter).with(ring.clone()));
        let socket = directory.path().join("admin.sock");
        let listener = Listener::bind(&socket, policy.gid()).await.unwrap();
        let server = Server::new(Arc::clone(&board), policy, ring.clone(), control);
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            server
                .serve(listener, async {
                    stopped.await.ok();
                })
                .await;
        });
        Self { socket, engine, board, ring, steps, directory, stop: Some(stop), served: Some(served), log }
    }

    pub fn client(&self) -> Client {
        Client::new(&self.socket, Duration::from_secs(5))
    }

    /// Writes to the daemon's log.
    pub fn log(&self, write: impl FnOnce()) {
        tracing::dispatcher::with_default(&self.log, write);
    }

    pub fn submit(&self, id: &str) -> axe::engine::Job {
        self.engine.submit(Self::request(id)).unwrap()
    }

    pub fn request(id: &str) -> Request {
        Request {
            id: id.to_owned(),
            prompt: vec![0; 7],
            sampling: Sampling::default(),
            stop: Stop { max_tokens: 5, ..Stop::default() },
            channels: true,
            drafts: false,
            ..Request::default()
        }
    }

    /// Waits until the queue looks as `wanted`.
    pub async fn queue_until(&self, wanted: impl Fn(&protocol::Queue) -> bool) -> protocol::Queue {
        let begin = Instant::now();
        loop {
            let queue: protocol::Queue = self.client().get("/queue").await.unwrap();
            if wanted(&queue) {
                return queue;
            }
            assert!(begin.elapsed() < Duration::from_secs(10), "the queue stays {queue:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the server as a daemon's shutdown does.
    pub async fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.served.take().unwrap().await.unwrap();
    }

    /// Writes `bytes` on a fresh connection, optionally closes that side, and reads until the daemon closes or
    /// `patience` is over.
    pub async fn raw(&self, bytes: &[u8], half_close: bool, patience: Duration) -> String {
        let (socket, bytes) = (self.socket.clone(), bytes.to_vec());
        tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.set_read_timeout(Some(patience)).unwrap();
            // The daemon may close before it has taken everything.
            let _ = stream.write_all(&bytes);
            if half_close {
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            }
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        })
        .await
        .unwrap()
    }
}

/// The admin server alone, over somebody's board.
pub struct Face {
    socket: PathBuf,
    _directory: tempfile::TempDir,
    _stop: oneshot::Sender<()>,
}

impl Face {
    pub async fn over(board: Arc<Board>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("admin.sock");
        let policy = Policy::new(None).unwrap();
        let listener = Listener::bind(&socket, policy.gid()).await.unwrap();
        let (_, control) = LogControl::new::<tracing_subscriber::Registry>("info").unwrap();
        let server = Server::new(board, policy, LogRing::new(10), control);
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(async move { server.serve(listener, async { drop(stopped.await) }).await });
        Self { socket, _directory: directory, _stop: stop }
    }

    /// A client for answers that take long.
    pub fn patient(&self) -> Client {
        Client::new(&self.socket, Duration::from_secs(120))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

fn model() -> Model {
    let mut tokens = Strings::default();
    tokens.push(b"a");
    tokens.push(b"</s>");
    let vocabulary = Vocabulary {
        model: "llama".to_owned(),
        tokens,
        scores: vec![0.0; 2],
        kinds: vec![axe::text::TokenKind::Normal, axe::text::TokenKind::Control],
        eos: Some(1),
        ..Vocabulary::default()
    };
    Model {
        name: "scripted".to_owned(),
        identity: "0123".to_owned(),
        device: "none".to_owned(),
        kind: ModelKind::Causal,
        context_length: 64,
        tokenizer: Tokenizer::new(vocabulary).unwrap().into(),
        template: None,
        constraints: axe::engine::Constraints::default(),
    }
}

/// Loads a model that can say one token.
pub struct Another;

impl Loader for Another {
    fn load(&mut self, _: &LoadProgress) -> Result<Loaded, BackendError> {
        let (steps, script) = mpsc::channel();
        steps.send(Step::Commit(vec![0]))?;
        Ok(Loaded { backend: Box::new(Scripted(script)), model: model() })
    }

    fn fits_beside(&mut self, _: Memory) -> Result<bool, BackendError> {
        Ok(true)
    }
}

struct Scripted(mpsc::Receiver<Step>);

impl Backend for Scripted {
    fn start<'a>(&'a mut self, _: &[u32], _: &Sampling) -> Result<Box<dyn Generation + 'a>, BackendError> {
        Ok(Box::new(Play(&self.0)))
    }
    fn context_length(&self) -> usize {
        64
    }
    fn memory(&self) -> Memory {
        MEMORY
    }
}

struct Play<'a>(&'a mpsc::Receiver<Step>);

impl Generation for Play<'_> {
    fn step(&mut self) -> Result<Step, BackendError> {
        let nothing = Step::Prefill { done: 0, total: 7 };
        Ok(self.0.recv_timeout(Duration::from_millis(5)).unwrap_or(nothing))
    }
    fn cached_tokens(&self) -> usize {
        3
    }
}
