//! What the daemon does to keep a model at hand: loads, reloads, and what it recovered from.

use serde::{Deserialize, Serialize};

/// A model on its way to the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Loading {
    /// Why: `start`, `fault`, `demand` or `reload`.
    pub occasion: String,
    /// What is being done, e.g. `repacking weights`.
    pub what: String,
    /// From 0 to 1.
    pub progress: f64,
}

/// A reload of the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReloadState {
    /// It is going on.
    pub running: bool,
    /// Seconds since it began; since it ended where it is over.
    pub since_s: f64,
    /// Whether it ended well; `null` while it is going on.
    pub succeeded: Option<bool>,
    /// What it changed, or why it changed nothing; empty while it is going on.
    pub message: String,
}

/// What the engine recovered from since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Faults {
    /// Times the device, its driver or its queue was lost.
    pub lost: u64,
    /// Passes that took longer than they may.
    pub overdue: u64,
    /// Panics of the engine's thread.
    pub panics: u64,
    /// Failures to load the model again.
    pub rebuilds: u64,
    /// Times everything on the device was made anew.
    pub resets: u64,
}
