//! The operator's face: HTTP/1.1 and JSON on a Unix socket.
//!
//! | route | answer |
//! | --- | --- |
//! | `GET /status` | [`Status`]: state, device, model, memory, counters, warnings |
//! | `GET /gpu` | [`axectl::protocol::Gpu`]: what the kernel shows of card and host |
//! | `GET /queue` | [`Queue`]: the running job and those that wait |
//! | `GET /logs?lines=N&level=L&follow=1` | [`axectl::protocol::LogLine`]s, one a line: the last N at level L or more severe, then, with `follow=1`, those to come |
//! | `GET /profile` | [`Profile`]: time per kernel |
//! | `GET /config` | the configuration in force, secrets hidden |
//! | `GET /version` | [`axectl::protocol::Version`] |
//! | `POST /cancel/{id}` | [`axectl::protocol::CancelResult`], or 404 |
//! | `POST /drain` | [`axectl::protocol::Drain`]: no new jobs, the daemon ends when those at hand are done |
//! | `POST /log-level` | sets and returns [`axectl::protocol::LogLevel`] |
//!
//! Whatever fails answers with [`axectl::protocol::ErrorBody`]. Only root, the daemon's own user and members of
//! the configured group are served; the kernel says who is at the other end of a connection.

mod listener;
pub mod logs;
mod peer;
mod redact;
mod routes;
mod server;

use axectl::protocol::{Drain, JobState, Profile, Queue, Status, Version};
pub use listener::{BindError, Listener};
pub use logs::{LogControl, LogRing};
pub use peer::{Peer, Policy, PolicyError};
pub use redact::redacted;
pub use server::{Admin, Server};

/// What the operator looks at and acts on: the daemon, seen from this room.
///
/// Every method answers from what is at hand; none waits for the device.
pub trait Operated: Send + Sync + 'static {
    /// The daemon as a whole.
    fn status(&self) -> Status;
    /// The jobs it holds.
    fn queue(&self) -> Queue;
    /// Time per kernel.
    fn profile(&self) -> Profile;
    /// The configuration in force. Secrets in it are hidden before it leaves.
    fn config(&self) -> serde_json::Value;
    /// Cancels the job `id`; `None` when there is no such job.
    fn cancel(&self, id: &str) -> Option<JobState>;
    /// Accepts no job from now on and ends the daemon when those at hand are done. Calling it again is harmless.
    fn drain(&self) -> Drain;
}

/// The version of this build.
pub fn version() -> Version {
    let kind = if cfg!(debug_assertions) { "debug" } else { "release" };
    Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        build: format!("{kind} {}-{}", std::env::consts::ARCH, std::env::consts::OS),
        protocol: axectl::protocol::PROTOCOL,
    }
}
