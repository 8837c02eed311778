//! What the engine tells about itself.

use serde::Serialize;

use super::fault::Faults;
use super::loader::Occasion;
use super::{Cause, FinishReason, Stats, Usage};
use crate::decode::{BlockStats, Memory};

/// Where the engine is in its life.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum State {
    /// The model is on its way to the device: for the first time, or, after a fault or a change of models, once more.
    /// Requests that come then are refused the first time, and wait later.
    Loading {
        /// From 0 to 1.
        progress: f64,
        /// What is being done, e.g. `repacking weights`.
        what: String,
    },
    /// Takes requests.
    Ready,
    /// The device has kept the engine's thread for longer than a pass may take. It may come back; then everything on
    /// the device is made anew.
    Hung {
        /// What does not come back.
        error: String,
    },
    /// Finishes what it has and takes nothing new.
    Draining,
    /// Has ended in good order.
    Stopped,
    /// Cannot work any more.
    Failed {
        /// What was tried, on what, and what went wrong.
        error: String,
    },
}

impl State {
    /// One word for it, e.g. `loading`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Loading { .. } => "loading",
            Self::Ready => "ready",
            Self::Hung { .. } => "hung",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed { .. } => "failed",
        }
    }

    /// Whether the engine's thread has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Stopped | Self::Failed { .. })
    }
}

/// A snapshot of the engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// Where the engine is in its life.
    pub state: State,
    /// Seconds since the engine was started.
    pub uptime_s: f64,
    /// Name the model is served under, once loaded.
    pub model: Option<String>,
    /// The device in words, once loaded.
    pub device: Option<String>,
    /// Most positions of a request, prompt and output together, once loaded.
    pub context_length: Option<usize>,
    /// Bytes on the device.
    pub memory: Memory,
    /// Whether the model is on the device; not while it is put away for want of work.
    pub resident: bool,
    /// How far loading the model is, if it is being loaded.
    pub loading: Option<Loading>,
    /// How far loading another model is that is to take its place.
    pub successor: Option<Loading>,
    /// The jobs that wait.
    pub queue: QueueStatus,
    /// The job in the slot.
    pub running: Option<RunningJob>,
    /// What has been done since the start.
    pub counters: Counters,
}

/// A model on its way to the device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loading {
    /// Why it is loaded.
    pub occasion: Occasion,
    /// From 0 to 1.
    pub progress: f64,
    /// What is being done, e.g. `repacking weights`.
    pub what: String,
}

/// The jobs that wait.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QueueStatus {
    /// How many wait, those included that wait for a reload to be read at all.
    pub depth: usize,
    /// How many may wait.
    pub capacity: usize,
    /// They, next one first.
    pub jobs: Vec<QueuedJob>,
}

/// A job that waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QueuedJob {
    /// The request's identifier.
    pub id: String,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Seconds since it was accepted.
    pub waited_s: f64,
}

/// What the slot is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Encoding the prompt.
    Prefill,
    /// Making tokens.
    Generate,
}

impl Phase {
    /// One word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Generate => "generate",
        }
    }
}

/// The job in the slot.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunningJob {
    /// The request's identifier.
    pub id: String,
    /// What it is doing.
    pub phase: Phase,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens encoded so far, reused ones included.
    pub prefilled: usize,
    /// Tokens committed so far.
    pub committed: usize,
    /// Seconds since it left the queue.
    pub elapsed_s: f64,
}

/// Finished requests by how they ended; one with several choices as the first of them that went wrong, or as the last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Outcomes {
    /// End token or stop string.
    pub stop: u64,
    /// Token, context or time limit.
    pub length: u64,
    /// The client left or the operator cancelled.
    pub cancelled: u64,
    /// Something failed, or the time was over before the first token.
    pub error: u64,
    /// Never accepted: queue full, no model ready, about to end, or too long.
    pub rejected: u64,
}

/// What has been done since the start.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Counters {
    /// Requests by outcome.
    pub requests: Outcomes,
    /// What went wrong with the device or the engine itself.
    pub faults: Faults,
    /// How often the engine was rebuilt after a fault.
    pub resets: u64,
    /// How often the model was loaded again, after a fault or because it was needed.
    pub loads: u64,
    /// How often the model was put away, for want of work or to make room.
    pub unloads: u64,
    /// Prompt tokens of started requests, reused ones included, once for all choices.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens taken over from the request before.
    pub cached_tokens: u64,
    /// Forward passes after prefill.
    pub passes: u64,
    /// Denoising steps, those of unfinished canvases included.
    pub denoising_steps: u64,
    /// Canvases that were begun.
    pub canvases: u64,
    /// Rows of passes that generate in blocks.
    pub rows: u64,
    /// Guesses that were evaluated in blocks, and those that were committed, by what made them.
    pub guesses: Vec<Guesses>,
    /// Seconds spent encoding prompts.
    pub prefill_s: f64,
    /// Seconds spent generating.
    pub decode_s: f64,
    /// Denoising steps of each canvas that was committed.
    pub canvas_steps: Histogram,
    /// Seconds from acceptance to the first draft or commit.
    pub first_token_s: Histogram,
    /// Tokens a second after the first commit.
    pub tokens_per_s: Histogram,
}

/// Guesses of one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Guesses {
    /// What made them.
    pub by: &'static str,
    /// How many were evaluated.
    pub offered: u64,
    /// How many were committed.
    pub accepted: u64,
}

impl Counters {
    /// Counts how a request ended.
    pub(super) fn count(&mut self, reason: &FinishReason) {
        let requests = &mut self.requests;
        match reason {
            FinishReason::Stop | FinishReason::ToolCalls => requests.stop += 1,
            FinishReason::Length => requests.length += 1,
            FinishReason::Cancelled(Cause::Deadline | Cause::Outage) | FinishReason::Error(_) => {
                requests.error += 1;
            }
            FinishReason::Cancelled(_) => requests.cancelled += 1,
        }
    }

    /// Counts what a job took that ran.
    pub(super) fn add(&mut self, usage: Usage, stats: &Stats, decode_s: f64) {
        self.prompt_tokens += usage.prompt_tokens as u64;
        self.completion_tokens += usage.completion_tokens as u64;
        self.cached_tokens += usage.cached_tokens as u64;
        self.passes += stats.passes as u64;
        if let Some(denoising) = &stats.denoising {
            self.denoising_steps += denoising.steps as u64;
            self.canvases += denoising.canvases as u64;
        }
        if let Some(blocks) = &stats.blocks {
            self.add_blocks(blocks);
        }
        stats.canvas_steps.iter().for_each(|&steps| self.canvas_steps.record(steps as f64));
        self.prefill_s += stats.prefill_s;
        self.decode_s += decode_s;
        if usage.completion_tokens > 0 {
            self.first_token_s.record(stats.queue_s + stats.first_token_s);
        }
        if stats.tokens_per_s > 0.0 {
            self.tokens_per_s.record(stats.tokens_per_s);
        }
    }

    /// Adds what the blocks of a generation took.
    pub fn add_blocks(&mut self, blocks: &BlockStats) {
        self.rows += blocks.evaluated as u64;
        for made in &blocks.proposers {
            let place = self.guesses.iter().position(|guesses| guesses.by == made.name);
            let place = place.unwrap_or_else(|| {
                self.guesses.push(Guesses { by: made.name, offered: 0, accepted: 0 });
                self.guesses.len() - 1
            });
            self.guesses[place].offered += made.offered as u64;
            self.guesses[place].accepted += made.accepted as u64;
        }
    }
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            requests: Outcomes::default(),
            faults: Faults::default(),
            resets: 0,
            loads: 0,
            unloads: 0,
            prompt_tokens: 0,
            completion_tokens: 0,
            cached_tokens: 0,
            passes: 0,
            denoising_steps: 0,
            canvases: 0,
            rows: 0,
            guesses: Vec::new(),
            prefill_s: 0.0,
            decode_s: 0.0,
            canvas_steps: Histogram::new(&[
                1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0,
            ]),
            first_token_s: Histogram::new(&[
                0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
            ]),
            tokens_per_s: Histogram::new(&[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]),
        }
    }
}

/// How often a measure fell below each of some bounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Upper bounds, rising.
    pub bounds: &'static [f64],
    /// Measures at or below each bound (but above the one before); the last entry counts those above all.
    pub counts: Vec<u64>,
    /// Sum of all measures.
    pub sum: f64,
}

impl Histogram {
    /// An empty one.
    #[must_use]
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Adds a measure.
    pub fn record(&mut self, value: f64) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(place) {
            *count += 1;
            self.sum += value;
        }
    }

    /// How many measures there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}
