//! The public socket: systemd's, if it opened one for this process, or one of our own.

use std::io;
use std::net::{SocketAddr, TcpListener};

use super::DaemonError;
use crate::config::ServerConfig;
use crate::device::process;

/// A socket that listens, and where.
pub(super) fn public(server: &ServerConfig) -> Result<(tokio::net::TcpListener, SocketAddr), DaemonError> {
    let wanted = SocketAddr::new(server.host, server.port);
    let failed = |source| DaemonError::Bind { address: wanted, source };
    let listener = match given(server)? {
        Some(listener) => listener,
        None => own(wanted).map_err(failed)?,
    };
    let address = listener.local_addr().map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((tokio::net::TcpListener::from_std(listener).map_err(failed)?, address))
}

fn own(address: SocketAddr) -> io::Result<TcpListener> {
    // Sets SO_REUSEADDR, so that a restart need not wait for the last one's connections.
    TcpListener::bind(address)
}

/// The socket that was opened for this process. It listens wherever its unit says, so the rule that a network needs a
/// key is applied to it once more.
fn given(server: &ServerConfig) -> Result<Option<TcpListener>, DaemonError> {
    let mut listeners = process::inherited_sockets().into_iter().map(TcpListener::from).filter(|listener| {
        let is_ip = listener.local_addr().is_ok();
        if !is_ip {
            tracing::warn!("a socket that was handed over is none of the Internet and is left alone");
        }
        is_ip
    });
    let Some(listener) = listeners.next() else { return Ok(None) };
    let more = listeners.count();
    if more > 0 {
        tracing::warn!(more, "only the first of the sockets that were handed over is served");
    }
    let address = listener.local_addr().map_err(|source| DaemonError::System {
        what: "ask where the socket that was handed over listens",
        source,
    })?;
    if !address.ip().is_loopback() && server.api_keys.is_empty() {
        return Err(DaemonError::Exposed { address });
    }
    tracing::info!(%address, "the public socket was handed over; `server.host` and `server.port` have no effect");
    Ok(Some(listener))
}
