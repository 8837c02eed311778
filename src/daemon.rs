//! The order of start and stop.
//!
//! Start: logging, then both sockets, so that a busy port is known before seconds go into loading, then the engine's
//! thread, then serving; `/ready` and systemd hear when the model is loaded. Stop, on SIGTERM or SIGINT or a drain
//! by the operator: new requests are refused, accepted ones finish within the configured grace, then the sockets
//! close. A second signal ends everything at once.

mod journal;
mod listen;
mod logging;
mod reload;
mod supervisor;

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::admin::{self, BindError, Board, LogControl, LogRing, Policy, PolicyError};
use crate::config::Config;
use crate::decode::BackendError;
use crate::device::telemetry::Sampler;
use crate::engine::{Engine, EngineHandle, Loader, Options, State};
use crate::http;
use reload::Reloader;

/// Where the daemon's configurations and models come from.
pub trait Source: Send + Sync + 'static {
    /// Reads the configuration once more, from where it was read at the start.
    ///
    /// # Errors
    /// What is wrong with it.
    fn config(&self) -> Result<Config, BackendError>;

    /// What loads the model of `config`, and pins what it finds out about device and model to `board`.
    ///
    /// # Errors
    /// What shows at once, such as a file that is not there.
    fn loader(&self, config: &Config, board: &Arc<Board>) -> Result<Box<dyn Loader>, BackendError>;
}

/// Why the daemon could not start, or did not end in good order.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The log level is not understood.
    #[error("key `log.level`: {0}")]
    LogLevel(String),
    /// Somebody else has the port, or the address is not ours.
    #[error("cannot listen on {address}: {source}; {}", advice(source))]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The socket that was handed over is open to the network.
    #[error(
        "refusing to serve {address} without an API key: set `server.api_key`, `server.api_key_file` or AXE_API_KEY, or \
         let the socket's unit listen on 127.0.0.1"
    )]
    Exposed {
        /// Where it listens.
        address: SocketAddr,
    },
    /// The admin socket cannot be bound.
    #[error(transparent)]
    Admin(#[from] BindError),
    /// The folder of the admin socket cannot be made.
    #[error("cannot make the folder {} of the admin socket (`admin.socket`)", path.display())]
    AdminFolder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The group of the admin socket is not known.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The system gives no threads, signals or the like.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The model could not be loaded.
    #[error("{0}")]
    Load(String),
    /// The engine has failed while it served.
    #[error("the engine has failed: {0}")]
    Failed(String),
    /// The device keeps the engine's thread.
    #[error("the device does not answer, and the engine could not end it: {0}")]
    Hung(String),
    /// A second signal came while draining.
    #[error("ended at once by a second signal; requests were cut off")]
    Interrupted,
}

impl DaemonError {
    /// The exit status that tells a supervisor what happened: 1 for what keeps a daemon from starting, and for requests
    /// that were cut off; 3 for a device that failed too often; 4 for one that never answered.
    #[must_use]
    pub fn status(&self) -> u8 {
        match self {
            Self::Failed(_) => 3,
            Self::Hung(_) => 4,
            _ => 1,
        }
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has this port: stop it, or choose another port with --port, AXE_PORT or `server.port`"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need privileges: choose another with --port, AXE_PORT or `server.port`"
        }
        _ => "check --host, AXE_HOST or `server.host`",
    }
}

/// Time connections get to take the last bytes of their answers once the engine has ended, and time a step of loading
/// gets to end.
const FAREWELL: Duration = Duration::from_secs(2);

/// Time that a hanging engine gets to come back; systemd's watchdog, where there is one, has less patience.
const HUNG: Duration = Duration::from_secs(300);

/// Runs the daemon until it is told to end. The model of `config` is loaded by what `source` gives.
///
/// Threads may be left behind that still use OpenCL: end the process with
/// [`leave`](crate::device::process::leave) afterwards.
///
/// # Errors
/// Everything in [`DaemonError`]; an end by signal or drain is none.
pub fn run(config: Config, source: impl Source) -> Result<(), DaemonError> {
    let ring = LogRing::new(config.log.ring_size);
    let control = logging::start(&config.log, ring.clone()).map_err(DaemonError::LogLevel)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(system("start the network threads"))?;
    let outcome = runtime.block_on(serve(config, Arc::new(source), ring, control));
    // Whoever is still encoding a prompt need not be waited for.
    runtime.shutdown_background();
    outcome
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
    move |source| DaemonError::System { what, source }
}

async fn serve(
    config: Config,
    source: Arc<dyn Source>,
    ring: LogRing,
    control: LogControl,
) -> Result<(), DaemonError> {
    let mut signals = Signals::new().map_err(system("listen for signals"))?;
    // Where there is a terminal, this signal says that it is gone, and ends the program as it ends others.
    let hangups = (!io::stdin().is_terminal()).then(|| signal(SignalKind::hangup())).transpose();
    let hangups = hangups.map_err(system("listen for signals"))?;
    let (listener, address) = listen::public(&config.server)?;
    let policy = Policy::new(config.admin.group.as_deref())?;
    let socket = bind_admin(&config, &policy).await?;

    let engine = Engine::new(options(&config));
    let handle = engine.handle();
    let board = Arc::new(Board::new(handle.clone(), admin::shown(&config), Sampler::new()));
    board.pin_address(format!("http://{address}"));
    board.pin_config_warnings(&config.warnings);
    let loader = source.loader(&config, &board).map_err(|error| DaemonError::Load(error.to_string()))?;
    engine.start(loader).map_err(system("start the engine's thread"))?;
    tracing::info!(%address, admin = %socket.path().display(), "listening; loading the model");

    let (stop, stopped) = watch::channel(false);
    let when_stopped = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the sender is gone, which is a stop, too.
        drop(stopped.wait_for(|stop| *stop).await);
    };
    let face = http::Face::from(http::App::new(handle.clone(), &config));
    let reloader = Arc::new(Reloader::new(source, config, &handle, &board, &face, &control));
    let public = tokio::spawn(http::serve(listener, face, when_stopped(stopped.clone()), FAREWELL));
    let admin = admin::Server::new(board, policy, ring, control).with_reload(reloader.hook());
    let admin = tokio::spawn(admin.serve(socket, when_stopped(stopped)));
    let reporter = tokio::spawn(supervisor::report(handle.clone(), address));
    let listening = hangups.map(|hangups| tokio::spawn(Arc::clone(&reloader).listen(hangups)));

    let outcome = attend(&handle, &mut signals, &reloader).await;
    reporter.abort();
    if let Some(listening) = listening {
        listening.abort();
    }
    stop.send_replace(true);
    // Neither task panics or is aborted, so there is nothing in their results.
    let _ended = tokio::join!(public, admin);
    if let Ended::Joinable = outcome? {
        tokio::task::spawn_blocking(move || engine.join())
            .await
            .map_err(|error| system("wait for the engine's thread")(error.into()))?;
    }
    tracing::info!("ended in good order");
    Ok(())
}

/// What the engine is to know of a configuration.
fn options(config: &Config) -> Options {
    Options {
        queue_capacity: config.server.queue_capacity,
        pass_limit: config.device.pass_timeout,
        most_faults: config.device.max_faults,
        fault_window: config.device.fault_window,
        idle_unload: config.model.idle_unload,
    }
}

async fn bind_admin(config: &Config, policy: &Policy) -> Result<admin::Listener, DaemonError> {
    let path = &config.admin.socket;
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)
            .map_err(|source| DaemonError::AdminFolder { path: folder.to_owned(), source })?;
    }
    Ok(admin::Listener::bind(path, policy.gid()).await?)
}

/// SIGTERM and SIGINT mean the same.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// How the engine stands when the daemon may end.
enum Ended {
    /// Its thread has ended or is about to.
    Joinable,
    /// Its thread is busy with a step of loading and will be left behind.
    Loading,
}

/// Waits until the engine has ended: by itself, or after a signal.
async fn attend(
    handle: &EngineHandle,
    signals: &mut Signals,
    reloader: &Reloader,
) -> Result<Ended, DaemonError> {
    let mut state = handle.watch();
    let mut was_ready = false;
    // Until somebody wants an end.
    loop {
        let now = state.borrow_and_update().clone();
        match now.clone() {
            State::Loading { .. } => {}
            State::Ready => was_ready = true,
            State::Draining => break,
            State::Stopped => return Ok(Ended::Joinable),
            State::Hung { .. } => {}
            State::Failed { error } if was_ready => return Err(DaemonError::Failed(error)),
            State::Failed { error } => return Err(DaemonError::Load(error)),
        }
        let hung = async {
            match now {
                State::Hung { error } => {
                    tokio::time::sleep(HUNG).await;
                    error
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            error = hung => return Err(DaemonError::Hung(error)),
            changed = state.changed() => if changed.is_err() { return Ok(Ended::Joinable) },
            () = signals.next() => break,
        }
    }
    supervisor::stopping();
    let status = handle.status();
    if status.state.is_over() {
        return Ok(Ended::Joinable);
    }
    if status.model.is_none() {
        // Nobody waits for an answer. Loading ends at its next report, but a step between two, such as compiling
        // kernels, cannot be interrupted.
        handle.shutdown();
        return Ok(match tokio::time::timeout(FAREWELL, handle.over()).await {
            Ok(_state) => Ended::Joinable,
            Err(_busy) => Ended::Loading,
        });
    }
    let left = status.queue.depth + usize::from(status.running.is_some());
    let grace = reloader.drain_grace();
    tracing::info!(requests = left, grace_s = grace.as_secs_f64(), "draining: taking nothing new");
    handle.drain();
    let mut over = pin!(handle.over());
    tokio::select! {
        _ = &mut over => return Ok(Ended::Joinable),
        () = signals.next() => {
            handle.shutdown();
            return Err(DaemonError::Interrupted);
        }
        () = tokio::time::sleep(grace) => {
            tracing::warn!("the grace is over; cancelling what is left");
            handle.shutdown();
        }
    }
    tokio::select! {
        _ = over => Ok(Ended::Joinable),
        () = signals.next() => Err(DaemonError::Interrupted),
    }
}
