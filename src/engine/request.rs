//! What a job is asked to do, already validated by the face that accepted it.

use std::time::Instant;

use crate::decode::Sampling;
use crate::text::calls::Calling;

/// One generation.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Identifier shown in logs, status and `axectl cancel`, e.g. `chatcmpl-…`.
    pub id: String,
    /// Prompt token ids, template and BOS included.
    pub prompt: Vec<u32>,
    /// What is to stand behind the reply, of models that denoise; empty: nothing is known of it.
    pub suffix: Vec<u32>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// When to end.
    pub stop: Stop,
    /// Whether the model's thinking channel, if it has one, is told apart from the reply. Otherwise all text is the
    /// reply.
    pub channels: bool,
    /// Whether the listener looks at guesses that are not evaluated yet. Drafts of models that denoise come anyway.
    pub drafts: bool,
    /// How to find calls of tools in the reply; without it they are text.
    pub calls: Option<Calling>,
    /// Tell the log-probability of each token of the reply, and those of so many alternatives.
    pub logprobs: Option<usize>,
}

/// When a generation ends, besides the model's end tokens and the context limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stop {
    /// Most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// Strings that end the reply; none of them shows in it. What the model thinks may hold them.
    pub strings: Vec<String>,
    /// Generate on past the model's end tokens (benchmarks).
    pub ignore_eos: bool,
    /// When to end with what there is by then.
    pub deadline: Option<Instant>,
}
