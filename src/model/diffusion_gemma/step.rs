//! What one denoising step is told, and what it tells of each row of the canvas.

/// How to run one denoising step.
#[derive(Debug, Clone, PartialEq)]
pub struct DenoiseStep {
    /// The first step of a canvas: nothing conditions it yet.
    pub first: bool,
    /// Logits are divided by it; above 0.
    pub temperature: f32,
    /// Keys the noise of the samples, together with canvas, step, row and token.
    pub seed: u64,
    /// Canvases of this generation before this one.
    pub canvas: u32,
    /// Steps of this canvas before this one.
    pub step: u32,
    /// Sample without noise: the sampled token is the most probable one.
    pub greedy: bool,
    /// Tokens that row 0 may neither have as its most probable nor as its sampled one. What the next step is
    /// conditioned on is not touched by it.
    pub barred: Vec<u32>,
}

/// What a step says of one row of the canvas.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowChoice {
    /// The most probable token; of equals the one with the lower id.
    pub argmax: u32,
    /// A token drawn from the tempered distribution.
    pub sampled: u32,
    /// Entropy of the tempered distribution in nats.
    pub entropy: f32,
}
