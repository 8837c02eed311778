//! Accepts connections and speaks HTTP/1.1 on them.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::connection::Connection;
use super::{App, Face, router};

/// How long to wait after the system refused a connection, e.g. for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How often to look for a raised limit while there are as many connections as may be.
const RECOUNT: Duration = Duration::from_secs(1);

/// Serves until `stop` is done. Connections then finish the answer they are at, which may take `grace`; what is left is
/// cut.
pub async fn serve(
    listener: TcpListener,
    face: impl Into<Face>,
    stop: impl Future<Output = ()>,
    grace: Duration,
) {
    let face = face.into();
    let service = router(face.clone());
    let (closing, _) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let has_room = connections.len() < face.now().server.max_connections;
        tokio::select! {
            () = &mut stop => break,
            Some(_ended) = connections.join_next() => {}
            // A limit that a reload has raised is seen when a connection ends, at the latest after a while.
            () = tokio::time::sleep(RECOUNT), if !has_room => {}
            accepted = listener.accept(), if has_room => match accepted {
                Ok((stream, _peer)) => {
                    connections.spawn(talk(stream, service.clone(), face.now(), closing.subscribe()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    closing.send_replace(true);
    let all_done = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, all_done).await.is_err() {
        tracing::warn!(left = connections.len(), "closing connections that are still busy");
        connections.shutdown().await;
    }
}

async fn talk(stream: TcpStream, service: Router, app: Arc<App>, mut closing: watch::Receiver<bool>) {
    // Small chunks must leave at once.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let service = service.map_request(|request: hyper::Request<Incoming>| request.map(Body::new));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Also bounds how long a kept-alive connection may be idle.
        .header_read_timeout(app.server.header_timeout)
        .max_buf_size(app.server.max_head)
        .serve_connection(
            Connection::new(stream, app.server.write_timeout),
            TowerToHyperService::new(service),
        );
    let mut connection = pin!(connection);
    let closed = async { drop(closing.wait_for(|closing| *closing).await) };
    let early = tokio::select! {
        outcome = &mut connection => Some(outcome),
        () = closed => None,
    };
    let outcome = match early {
        Some(outcome) => outcome,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "connection ended early");
    }
}
