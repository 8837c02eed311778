//! What a job tells its listener, in order: `Prefill`*, (`Draft`* `Commit`)*, `Finish`.

use serde::Serialize;

use crate::decode::{BlockStats, DenoisingStats, TokenLogprobs};
use crate::text::calls::Call;

/// One event of a job. The concatenation of all `Commit::text` is the reply, byte for byte, and that of all
/// `Commit::reasoning` what the model thought.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Prompt tokens encoded so far.
    Prefill {
        /// Tokens whose keys and values are in the cache (reused ones included).
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// The current guess for what is not committed yet; the next draft replaces it.
    Draft {
        /// Guessed token ids.
        tokens: Vec<u32>,
        /// Entropy in nats per guessed token, empty where the model kind has none.
        entropy: Vec<f32>,
        /// Commits before it: of a model that denoises, the canvas, from 0.
        canvas: usize,
        /// Drafts since the last commit, this one included; a listener who does not read at once misses some, but not the
        /// last one before a commit unless it is far behind.
        step: usize,
    },
    /// Final, will never change.
    Commit {
        /// Token ids committed since the last commit.
        tokens: Vec<u32>,
        /// Text released by them: whole UTF-8 characters, with what could still become a stop string held back.
        /// May be empty.
        text: String,
        /// Text of the thinking channel released by them; comes before `text`. Mostly empty.
        reasoning: String,
        /// Calls of tools that they completed. Mostly empty.
        calls: Vec<Call>,
        /// Log-probabilities of the tokens that `text` is made of, if they were asked for: a token comes with the first
        /// character of its own that is released.
        logprobs: Vec<ContentToken>,
    },
    /// The last event of every job that was started.
    Finish {
        /// Why it ended.
        reason: FinishReason,
        /// Token counts.
        usage: Usage,
        /// Timings.
        stats: Stats,
    },
}

/// A token of a reply's content.
#[derive(Debug, Clone, PartialEq)]
pub struct ContentToken {
    /// Byte of the content at which its text begins, or of the character that it is part of.
    pub start: usize,
    /// How probable it was.
    pub logprobs: TokenLogprobs,
}

/// Why a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token or stop string.
    Stop,
    /// The same, of a reply that calls tools.
    ToolCalls,
    /// `max_tokens` or the context limit was reached, or the model ended in the middle of a call.
    Length,
    /// Somebody or something ended it before it was done.
    Cancelled(Cause),
    /// Something failed; the text says what was tried, on what, and what to do.
    Error(String),
}

/// Who or what ended a job before it was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The listener went away.
    Listener,
    /// The operator wished it.
    Operator,
    /// The daemon ends.
    Shutdown,
    /// Its time was over before its first token, and before that of the request's other choices.
    Deadline,
    /// It waited, and the engine cannot be rebuilt, or not soon.
    Outage,
}

/// Token counts of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated (the end token included).
    pub completion_tokens: usize,
    /// Prompt tokens whose keys and values were reused from the request before.
    pub cached_tokens: usize,
    /// Generated tokens that belong to the thinking channel, its markers included.
    pub reasoning_tokens: usize,
}

impl Usage {
    /// Together with another reply to the same prompt, which counts once.
    #[must_use]
    pub fn with_choice(self, other: Self) -> Self {
        Self {
            completion_tokens: self.completion_tokens + other.completion_tokens,
            reasoning_tokens: self.reasoning_tokens + other.reasoning_tokens,
            ..self
        }
    }
}

/// Timings of a job; seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// From acceptance in the queue to the start of the job.
    pub queue_s: f64,
    /// From the start of the job to the end of prefill.
    pub prefill_s: f64,
    /// From the start of the job to the first draft or commit.
    pub first_token_s: f64,
    /// From acceptance in the queue to the finish.
    pub elapsed_s: f64,
    /// Forward passes after prefill; denoising steps of a model that denoises.
    pub passes: usize,
    /// Committed tokens over passes.
    pub tokens_per_pass: f64,
    /// Tokens after the first commit over the seconds they took; 0 where there were none. Of a model that denoises,
    /// whose first commit is a whole canvas: all tokens over the seconds from the end of prefill to the last commit.
    pub tokens_per_s: f64,
    /// What denoising took, for models that denoise.
    pub denoising: Option<DenoisingStats>,
    /// What blocks took, for models that generate in blocks.
    pub blocks: Option<BlockStats>,
    /// Denoising steps of each canvas that was committed, in order.
    pub canvas_steps: Vec<usize>,
    /// The stop string that ended the reply, by its place among the request's.
    pub stopped_by: Option<usize>,
}

impl Stats {
    /// Together with another reply to the same prompt, made after this one.
    #[must_use]
    pub fn with_choice(mut self, other: Self) -> Self {
        let tokens = |stats: &Self| stats.tokens_per_pass * stats.passes as f64;
        let seconds = |stats: &Self| match stats.tokens_per_s {
            rate if rate > 0.0 => tokens(stats) / rate,
            _ => 0.0,
        };
        let (made, took) = (tokens(&self) + tokens(&other), seconds(&self) + seconds(&other));
        self.prefill_s += other.prefill_s;
        self.elapsed_s = self.elapsed_s.max(other.elapsed_s);
        self.passes += other.passes;
        self.tokens_per_pass = if self.passes == 0 { 0.0 } else { made / self.passes as f64 };
        self.tokens_per_s = if took > 0.0 { made / took } else { 0.0 };
        if let (Some(all), Some(more)) = (&mut self.denoising, other.denoising) {
            all.steps += more.steps;
            all.canvases += more.canvases;
            all.accepted.extend(more.accepted);
        }
        if let (Some(all), Some(more)) = (&mut self.blocks, other.blocks) {
            all.add(&more);
        }
        self.canvas_steps.extend(other.canvas_steps);
        self
    }
}
