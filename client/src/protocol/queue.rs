//! The jobs the daemon holds.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Answer to `GET /queue`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Queue {
    /// The job on the device, if any.
    pub running: Option<Job>,
    /// Jobs that wait, the next one first.
    pub waiting: Vec<Job>,
    /// Most jobs that may wait; one more is refused with status 429.
    pub capacity: usize,
    /// True when no new job is accepted because the daemon is about to stop.
    pub draining: bool,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The identifier to cancel it by.
    pub id: String,
    /// What it is doing.
    pub state: JobState,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens encoded so far.
    pub prefilled_tokens: usize,
    /// Tokens generated so far.
    pub completion_tokens: usize,
    /// Seconds it has been waiting, or, once it runs, has been on the device.
    pub elapsed_s: f64,
}

/// What a job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It waits for the slot.
    Waiting,
    /// Its prompt is being encoded.
    Prefill,
    /// It generates.
    Generating,
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Waiting => "waiting",
            Self::Prefill => "prefill",
            Self::Generating => "generating",
        })
    }
}
