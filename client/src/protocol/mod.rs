//! What the daemon and its operators tell each other.
//!
//! Times are seconds, sizes bytes, temperatures degrees Celsius and powers watts, as the names of the fields say.
//! What the daemon could not find out is `null`. Fields may be added in later versions, so readers ignore what
//! they do not know; a change that breaks readers raises [`PROTOCOL`].

mod actions;
mod bench;
mod config;
mod error;
mod gpu;
mod logs;
mod queue;
mod status;
mod upkeep;

pub use actions::{CancelResult, Change, Drain, LogLevel, ModelChange, Reload};
pub use bench::{Bench, BenchRequest, Round};
pub use config::{Config, Setting, Source};
pub use error::{ErrorBody, ErrorDetail};
pub use gpu::{Bar, EngineLoad, Fan, Firmware, Frequency, Gpu, Host, Power, Temperature, Vram};
pub use logs::{Level, LogLine};
pub use queue::{Job, JobState, Queue};
pub use status::{
    Counters, Device, KernelTime, Kernels, Limits, Memory, Model, Profile, SelfTest, State, Status, Version,
};
pub use upkeep::{Faults, Loading, ReloadState};

/// Version of this protocol, part of [`Version`].
pub const PROTOCOL: u32 = 1;
