//! Weights on the device and one forward pass.

mod causal;
mod config;
pub mod diffusion_gemma;
mod error;
mod gate_up;
mod keys;
mod pass;
mod plan;
mod repack;
mod weights;

pub use causal::{Causal, LoadOptions, Logits};
pub use config::{CausalConfig, Family, FeedForward, LayerConfig, Rope, Windows};
pub use error::ModelError;
pub use plan::MemoryPlan;
pub use repack::RepackError;
