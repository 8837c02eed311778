//! Answers to what an operator asks the daemon to do.

use serde::{Deserialize, Serialize};

use super::JobState;

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
