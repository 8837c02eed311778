//! The order of start and stop.
//!
//! Start: logging, then both sockets, so that a busy port is known before seconds go into loading, then the engine's
//! thread, then serving; `/ready` and systemd hear when the model is loaded. Stop, on SIGTERM or SIGINT or a drain
//! by the operator: new requests are refused, accepted ones finish within the configured grace, then the sockets
//! close. A second signal ends everything at once.

mod journal;
mod logging;
mod supervisor;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::admin::{self, BindError, Board, LogControl, LogRing, Policy, PolicyError};
use crate::config::Config;
use crate::decode::BackendError;
use crate::device::telemetry::Sampler;
use crate::engine::{Engine, EngineHandle, LoadProgress, Loaded, Options, State};
use crate::http;

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
    /// A second signal came while draining.
    #[error("ended at once by a second signal; requests were cut off")]
    Interrupted,
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

/// Runs the daemon until it is told to end. `load` runs on the engine's thread; it also pins what it finds out about
/// device and model to the operator's board.
///
/// Threads may be left behind that still use OpenCL: end the process with
/// [`leave`](crate::device::process::leave) afterwards.
///
/// # Errors
/// Everything in [`DaemonError`]; an end by signal or drain is none.
pub fn run(
    config: Config,
    load: impl FnOnce(&LoadProgress, &Arc<Board>) -> Result<Loaded, BackendError> + Send + 'static,
) -> Result<(), DaemonError> {
    let ring = LogRing::new(config.log.ring_size);
    let control = logging::start(&config.log, ring.clone()).map_err(DaemonError::LogLevel)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(system("start the network threads"))?;
    let outcome = runtime.block_on(serve(config, load, ring, control));
    // Whoever is still encoding a prompt need not be waited for.
    runtime.shutdown_background();
    outcome
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
    move |source| DaemonError::System { what, source }
}

async fn serve(
    config: Config,
    load: impl FnOnce(&LoadProgress, &Arc<Board>) -> Result<Loaded, BackendError> + Send + 'static,
    ring: LogRing,
    control: LogControl,
) -> Result<(), DaemonError> {
    let mut signals = Signals::new().map_err(system("listen for signals"))?;
    let address = SocketAddr::new(config.server.host, config.server.port);
    let listener =
        TcpListener::bind(address).await.map_err(|source| DaemonError::Bind { address, source })?;
    let address = listener.local_addr().map_err(|source| DaemonError::Bind { address, source })?;
    let policy = Policy::new(config.admin.group.as_deref())?;
    let socket = bind_admin(&config, &policy).await?;

    let (send_board, board_for_engine) = mpsc::channel::<Arc<Board>>();
    let options = Options { queue_capacity: config.server.queue_capacity, ..Options::default() };
    let engine = Engine::spawn(
        move |progress| {
            let board = board_for_engine.recv()?;
            load(progress, &board)
        },
        options,
    )
    .map_err(system("start the engine's thread"))?;
    let handle = engine.handle();
    let board = Arc::new(Board::new(handle.clone(), admin::shown(&config), Sampler::new()));
    board.pin_address(format!("http://{address}"));
    config.warnings.iter().for_each(|warning| board.warn(warning));
    // The thread waits for it, so there is a receiver.
    let _sent = send_board.send(Arc::clone(&board));
    tracing::info!(%address, admin = %socket.path().display(), "listening; loading the model");

    let (stop, stopped) = watch::channel(false);
    let when_stopped = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the sender is gone, which is a stop, too.
        drop(stopped.wait_for(|stop| *stop).await);
    };
    let app = http::App::new(handle.clone(), &config);
    let public = tokio::spawn(http::serve(listener, app, when_stopped(stopped.clone()), FAREWELL));
    let admin = admin::Server::new(board, policy, ring, control);
    let admin = tokio::spawn(admin.serve(socket, when_stopped(stopped)));
    let reporter = tokio::spawn(supervisor::report(handle.clone(), address));

    let outcome = attend(&handle, &mut signals, config.server.drain_grace).await;
    reporter.abort();
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
async fn attend(handle: &EngineHandle, signals: &mut Signals, grace: Duration) -> Result<Ended, DaemonError> {
    let mut state = handle.watch();
    let mut was_ready = false;
    // Until somebody wants an end.
    loop {
        let now = state.borrow_and_update().clone();
        match now {
            State::Loading { .. } => {}
            State::Ready => was_ready = true,
            State::Draining => break,
            State::Stopped => return Ok(Ended::Joinable),
            // A daemon that fails after it was ready stays, so that the operator can look at it; systemd's watchdog
            // restarts it where there is one.
            State::Hung { .. } => {}
            State::Failed { .. } if was_ready => {}
            State::Failed { error } => return Err(DaemonError::Load(error)),
        }
        tokio::select! {
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
