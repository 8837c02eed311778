//! A short measurement through the daemon's own queue.

use serde::{Deserialize, Serialize};

/// Body of `POST /bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchRequest {
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens to generate after each.
    pub completion_tokens: usize,
    /// How often.
    pub rounds: usize,
}

impl Default for BenchRequest {
    fn default() -> Self {
        Self { prompt_tokens: 512, completion_tokens: 64, rounds: 3 }
    }
}

/// Answer to `POST /bench`. It carries what its figures depend on, so that they can be compared with those of others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bench {
    /// The daemon's version and build.
    pub version: super::Version,
    /// The device and its driver.
    pub device: Option<super::Device>,
    /// The model and its quantisation.
    pub model: Option<super::Model>,
    /// Each round, in order, after one that does not count.
    pub rounds: Vec<Round>,
    /// Median of prompt tokens encoded a second.
    pub prefill_tokens_per_s: f64,
    /// Median of tokens generated a second.
    pub decode_tokens_per_s: f64,
    /// What made the figures worse than they could be, such as other requests.
    pub warnings: Vec<String>,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Tokens of the prompt that were encoded, none of them reused.
    pub prompt_tokens: usize,
    /// Seconds that took.
    pub prefill_s: f64,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// Forward passes, or denoising steps, that they took.
    pub passes: usize,
    /// Tokens a second after the first.
    pub tokens_per_s: f64,
    /// Seconds it waited for the slot.
    pub queue_s: f64,
}
