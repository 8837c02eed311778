//! Weights on the device and one forward pass.

mod causal;
mod config;
pub mod diffusion_gemma;
mod error;
mod keys;
mod pass;
mod repack;
mod weights;

pub use causal::{Causal, LoadOptions, Logits, MemoryPlan};
pub use config::{CausalConfig, Family, Rope};
pub use error::ModelError;
