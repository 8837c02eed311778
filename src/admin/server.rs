//! Accepts connections, asks the kernel who they are, and serves those who may.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axectl::protocol;
use axum::{http::StatusCode, response::IntoResponse};
use futures::future::BoxFuture;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::UnixStream,
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::ServiceExt;

use super::{
    Board, Listener, LogControl, LogRing, Peer, Policy,
    hangup::Hangup,
    peer::groups_of,
    routes::{self, failure},
};

/// Connections served at the same time.
const CONNECTIONS: usize = 64;
/// Followers of the log served at the same time.
const FOLLOWERS: usize = 16;
/// Time a client has to send the head of a request, and how long a connection may be idle.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes the head of a request may have.
const LARGEST_HEAD: usize = 32 << 10;
/// Time the name services have to tell the groups of a user.
const LOOKUP: Duration = Duration::from_secs(5);
/// Time connections have to end when the daemon stops.
const FAREWELL: Duration = Duration::from_secs(2);

/// What the routes answer from.
pub(super) struct Admin {
    pub(super) board: Arc<Board>,
    pub(super) ring: LogRing,
    pub(super) control: LogControl,
    pub(super) followers: Arc<Semaphore>,
    pub(super) stopping: watch::Receiver<bool>,
    pub(super) reload: Option<Reload>,
}

/// Has the daemon read its configuration anew; the error says why nothing changed. What was begun is finished, whether
/// or not the future is.
pub type Reload = Arc<dyn Fn() -> BoxFuture<'static, Result<protocol::Reload, String>> + Send + Sync>;

/// The admin server.
pub struct Server {
    admin: Admin,
    policy: Arc<Policy>,
    stop: watch::Sender<bool>,
}

impl Server {
    /// A server that lets in whom `policy` admits.
    pub fn new(board: Arc<Board>, policy: Policy, ring: LogRing, control: LogControl) -> Self {
        let (stop, stopping) = watch::channel(false);
        let followers = Arc::new(Semaphore::new(FOLLOWERS));
        let admin = Admin { board, ring, control, followers, stopping, reload: None };
        Self { admin, policy: Arc::new(policy), stop }
    }

    /// The same server, which can have the daemon reload.
    #[must_use]
    pub fn with_reload(mut self, reload: Reload) -> Self {
        self.admin.reload = Some(reload);
        self
    }

    /// Serves `listener` until `shutdown` is done; then followers are let go and the socket is removed.
    pub async fn serve(self, listener: Listener, shutdown: impl Future<Output = ()>) {
        let Self { admin, policy, stop } = self;
        let stopping = admin.stopping.clone();
        let router = routes::router(Arc::new(admin));
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let mut connections = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                accepted = async {
                    // A place first: while none is free, clients wait in the kernel's queue.
                    let place = Arc::clone(&places).acquire_owned().await;
                    (place, listener.socket.accept().await)
                } => accepted,
            };
            match accepted {
                (Ok(place), Ok((stream, _))) => {
                    let (router, policy) = (router.clone(), Arc::clone(&policy));
                    let stopping = stopping.clone();
                    connections.spawn(async move {
                        converse(stream, router, &policy, stopping).await;
                        drop(place);
                    });
                }
                (_, Err(error)) => {
                    tracing::warn!(%error, "accepting a connection on the admin socket failed");
                    // Out of file descriptors, most likely: trying again at once would spin.
                    sleep(Duration::from_millis(100)).await;
                }
                (Err(_closed), _) => break,
            }
            while connections.try_join_next().is_some() {}
        }
        stop.send_replace(true);
        let ended = timeout(FAREWELL, async { while connections.join_next().await.is_some() {} }).await;
        if ended.is_err() {
            tracing::debug!("admin connections that did not end in time are cut");
        }
        drop(listener);
    }
}

/// One connection, from its first byte to its last.
async fn converse(
    stream: UnixStream,
    router: axum::Router,
    policy: &Policy,
    mut stopping: watch::Receiver<bool>,
) {
    let refusal = match admission(&stream, policy).await {
        Ok(()) => None,
        Err(text) => {
            tracing::warn!(reason = text, "a connection to the admin socket was refused");
            Some(text)
        }
    };
    let keep_alive = refusal.is_none();
    let hangup = Hangup::of(&stream).ok();
    let service = hyper::service::service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        if let Some(hangup) = &hangup {
            request.extensions_mut().insert(hangup.clone());
        }
        let (router, refusal) = (router.clone(), refusal.clone());
        async move {
            Ok::<_, Infallible>(match refusal {
                Some(text) => failure(StatusCode::FORBIDDEN, "forbidden", text).into_response(),
                None => match router.oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                },
            })
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(LARGEST_HEAD)
        .keep_alive(keep_alive)
        // `printf … | nc -U` closes its side before it reads the answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let stopped = async {
        // Its value, a lock guard, must not be held across the next await. The sender outlives this task.
        let _ = stopping.wait_for(|stopping| *stopping).await.is_ok();
    };
    let outcome = tokio::select! {
        outcome = connection.as_mut() => Some(outcome),
        () = stopped => None,
    };
    let outcome = match outcome {
        Some(outcome) => outcome,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "an admin connection ended early");
    }
}

/// `Err` with the reason when the process at the other end may not speak.
async fn admission(stream: &UnixStream, policy: &Policy) -> Result<(), String> {
    let credentials = stream.peer_cred().map_err(|error| {
        format!("the kernel did not say who is at the other end of the connection: {error}")
    })?;
    let peer = Peer { uid: credentials.uid(), gid: credentials.gid() };
    let decide = {
        let policy = policy.clone();
        // The name services may ask a network.
        move || if policy.admits(peer, groups_of) { Ok(()) } else { Err(policy.refusal(peer)) }
    };
    match timeout(LOOKUP, tokio::task::spawn_blocking(decide)).await {
        Ok(Ok(decision)) => decision,
        Ok(Err(error)) => Err(format!("looking up the groups of user {} failed: {error}", peer.uid)),
        Err(_) => Err(format!(
            "looking up the groups of user {} took longer than {} s; check the machine's name services",
            peer.uid,
            LOOKUP.as_secs()
        )),
    }
}
