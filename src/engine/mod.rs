//! The single slot: a bounded queue of jobs, the thread that owns the device, and the one event stream.
//!
//! Requests come in as [`Request`], leave as [`Event`]s over one channel a job. Dropping the receiving end
//! cancels the job, wherever it is: queued, in prefill or generating.
//!
//! [`Engine::spawn`] starts the thread, which loads the model itself, since device handles need not be `Send`.
//! Everyone else talks to it through [`EngineHandle`].

mod account;
mod event;
mod handle;
mod mailbox;
mod model;
mod request;
mod run;
mod status;
mod thread;

pub use account::Account;
pub use event::{Cause, Event, FinishReason, Stats, Usage};
pub use handle::{EngineHandle, Job, SubmitError};
pub use mailbox::Events;
pub use model::{LoadProgress, Loaded, Model, ModelKind};
pub use request::{Request, Stop};
pub use status::{
    Counters, Guesses, Histogram, Outcomes, Phase, QueueStatus, QueuedJob, RunningJob, State, Status,
};
pub use thread::{Engine, Options};
