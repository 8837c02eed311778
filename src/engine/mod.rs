//! The single slot: a bounded queue of jobs, the thread that owns the device, and the one event stream.
//!
//! Requests come in as [`Request`], leave as [`Event`]s over one channel a job. Dropping the receiving end
//! cancels the job, wherever it is: queued, in prefill or generating.
//!
//! [`Engine::with`] starts the thread, which has a [`Loader`] bring the model, since device handles need not be `Send`.
//! Everyone else talks to it through [`EngineHandle`].
//!
//! The thread that runs the jobs is the *tenant* (`tenant.rs`). It puts its model away when it idles, and makes it anew
//! when the device was lost (`fault.rs`). To change the model, a second thread brings the new one and takes over
//! (`succession.rs`); meanwhile the door (`door.rs`) keeps prompts from being encoded for the wrong one.

mod account;
mod constraints;
mod door;
mod event;
mod fault;
mod handle;
mod loader;
mod logprobs;
mod mailbox;
mod model;
mod request;
mod run;
mod shared;
mod status;
mod succession;
mod tenant;
mod thread;

pub use account::Account;
pub use constraints::Constraints;
pub use door::Pass;
pub use event::{Cause, ContentToken, Event, FinishReason, Stats, Usage};
pub use fault::Faults;
pub use handle::{EngineHandle, Job, SubmitError};
pub use loader::{LoadProgress, Loader, Occasion};
pub use mailbox::Events;
pub use model::{Loaded, Model, ModelKind};
pub use request::{Request, Stop};
pub use status::{
    Counters, Guesses, Histogram, Loading, Outcomes, Phase, QueueStatus, QueuedJob, RunningJob, State, Status,
};
pub use succession::{Replaced, Switch};
pub use thread::{Engine, Options};
