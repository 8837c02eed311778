//! Answers to what an operator asks the daemon to do.

use serde::{Deserialize, Serialize};

use super::JobState;

/// Answer to `POST /reload`: what the configuration, read anew, has changed. A reload that is refused or fails changes
/// nothing and answers with an error.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Reload {
    /// Settings that are in force now.
    pub changed: Vec<Change>,
    /// Settings that need a restart: the old value is in force until then.
    pub restart: Vec<Change>,
    /// What became of the model; `null` where it did not have to be loaded.
    pub model: Option<ModelChange>,
    /// Seconds that all of it took.
    pub elapsed_s: f64,
}

/// A setting with another value than before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The key in `daemon.toml`, e.g. `server.queue_capacity`.
    pub key: String,
    /// The value before; `null` where there was none. Secrets show as `(secret)`.
    pub from: serde_json::Value,
    /// The value now.
    pub to: serde_json::Value,
}

/// How one model came into another's place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelChange {
    /// The name of the model before.
    pub from: Option<String>,
    /// The name of the model now.
    pub to: Option<String>,
    /// It was loaded while the other one served; otherwise the other one had to go first.
    pub beside: bool,
    /// Seconds that loading and trying it took.
    pub load_s: f64,
    /// Seconds for which requests waited: those at hand were finished, and the models changed.
    pub waited_s: f64,
}

/// Answer to `POST /cancel/{id}`; an id nobody knows is a 404 instead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CancelResult {
    /// The job.
    pub id: String,
    /// What the job was doing when it was cancelled.
    pub was: JobState,
}

/// Answer to `POST /drain`: no new job is accepted from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Jobs still running, which are finished: 0 or 1.
    pub running: usize,
    /// Jobs still waiting, which are served too.
    pub waiting: usize,
}

/// Body of `POST /log-level` and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLevel {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`), or directives such as `info,axe::engine=debug`.
    pub level: String,
}
