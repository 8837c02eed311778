//! The operator's face: HTTP/1.1 and JSON on a Unix socket.
//!
//! | route | answer |
//! | --- | --- |
//! | `GET /status` | [`axectl::protocol::Status`]: state, device, model, memory, counters, warnings |
//! | `GET /gpu` | [`axectl::protocol::Gpu`]: what the kernel shows of card and host |
//! | `GET /queue` | [`axectl::protocol::Queue`]: the running job and those that wait |
//! | `GET /logs?lines=N&level=L&request=ID&follow=1` | [`axectl::protocol::LogLine`]s, one a line: the last N at level L or more severe, of the request ID only if one is named, then, with `follow=1`, those to come |
//! | `GET /profile` | [`axectl::protocol::Profile`]: time per kernel |
//! | `GET /config` | [`axectl::protocol::Config`]: every setting in force and where it comes from, secrets hidden |
//! | `GET /version` | [`axectl::protocol::Version`] |
//! | `POST /bench` | [`axectl::protocol::Bench`]: a short measurement, as [`axectl::protocol::BenchRequest`] asks |
//! | `POST /cancel/{id}` | [`axectl::protocol::CancelResult`], or 404 |
//! | `POST /reload` | [`axectl::protocol::Reload`]: the configuration is read anew; 422 with the reason if nothing changed for it |
//! | `POST /drain` | [`axectl::protocol::Drain`]: no new jobs, the daemon ends when those at hand are done |
//! | `POST /log-level` | sets and returns [`axectl::protocol::LogLevel`] |
//!
//! Whatever fails answers with [`axectl::protocol::ErrorBody`]. Only root, the daemon's own user and members of
//! the configured group are served; the kernel says who is at the other end of a connection.

mod bench;
mod board;
mod hangup;
mod listener;
pub mod logs;
mod peer;
mod routes;
mod server;
mod shown;

use axectl::protocol::Version;
pub use board::{Board, Reloading};
pub use listener::{BindError, Listener};
pub use logs::{LogControl, LogRing};
pub use peer::{Peer, Policy, PolicyError};
pub use server::{Reload, Server};
pub use shown::{in_force, shown};

/// The version of this build.
pub fn version() -> Version {
    let kind = if cfg!(debug_assertions) { "debug" } else { "release" };
    Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: format!("{kind} {}-{}", std::env::consts::ARCH, std::env::consts::OS),
        protocol: axectl::protocol::PROTOCOL,
    }
}
