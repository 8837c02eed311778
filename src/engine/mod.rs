//! The single slot: a bounded queue of jobs, the thread that owns the device, and the one event stream.
//!
//! Requests come in as [`Request`], leave as [`Event`]s over one channel a job. Dropping the receiving end
//! cancels the job, wherever it is: queued, in prefill or generating.

mod event;
mod request;
pub use event::{Event, FinishReason, Stats, Usage};
pub use request::{Request, Stop};
