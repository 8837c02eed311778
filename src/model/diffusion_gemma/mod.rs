//! DiffusionGemma: block diffusion over a canvas of tokens, on top of an encoded prefix.

mod generation;
mod step;

pub use generation::GenerationConfig;
pub use step::{DenoiseStep, RowChoice};
