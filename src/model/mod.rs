//! Weights on the device and one forward pass.

mod causal;
mod config;
pub mod diffusion_gemma;
mod error;
mod gate_up;
mod kernels;
mod keys;
mod pass;
mod pieces;
mod plan;
mod repack;
mod sums;
mod weights;
mod workload;

pub use causal::{Causal, LoadOptions, Logits};
pub use config::{
    CausalConfig, Divisors, ExpertsConfig, Family, FeedForward, LatentConfig, LayerConfig, Rope, Routed,
    Scaling, Scores, SoftCaps, Windows,
};
pub use error::ModelError;
pub use plan::MemoryPlan;
pub use repack::RepackError;
pub use workload::{AttentionShape, ExpertsShape, ProductShape, Workload};
