//! Block diffusion: a canvas of tokens starts as noise and is denoised as a whole, step by step, until it is stable
//! and sure; then it is committed, encoded, and the next one begins behind it.
//!
//! What decides is on the host and small: [`Schedule`], [`accept`], [`StopTest`] and the noise of [`noise`]. The model
//! itself is seen through [`CanvasModel`]. [`Trajectory`] and [`replay`] compare it with a recorded run.

mod acceptance;
mod backend;
mod canvas;
mod distribution;
mod gap;
mod gemma;
mod manifest;
mod model;
pub mod noise;
mod plan;
pub mod replay;
mod schedule;
mod stop;
mod trajectory;

pub use acceptance::accept;
pub use backend::{DenoisingRules, DiffusionBackend};
pub use distribution::Distribution;
pub use manifest::{ManifestError, manifest_entry};
pub use model::CanvasModel;
pub use plan::Plan;
pub use schedule::Schedule;
pub use stop::StopTest;
pub use trajectory::{CanvasRecord, StepRecord, Trajectory, TrajectoryError};
