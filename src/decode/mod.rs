//! The loops that turn a model's passes into tokens, and the choice of the next one.
//!
//! The engine sees this room only through [`Backend`] and [`Generation`]; it owns both on its one thread, so
//! neither need be `Send`.

pub mod block;
mod constraint;
pub mod diffusion;
mod logprobs;
mod lost;
mod philox;
mod prompt;
mod sample;
mod scan;

pub use block::{BlockOptions, BlockSize, BlockStats, CausalBackend, ProposerStats};
pub use constraint::{
    Allowed, Constraint, ConstraintError, Encode, Format, Grammars, Mask, Thoughts, Word, Words, spaced,
};
pub use diffusion::DiffusionBackend;
pub use logprobs::TokenLogprobs;
pub use lost::is_lost;
pub use philox::choice_seed;
pub use sample::{Sampler, argmax};
pub use scan::top_of;

use thiserror::Error;

use crate::device::Device;

/// A failure inside the model or the device; its text is for the operator and the caller.
pub type BackendError = Box<dyn std::error::Error + Send + Sync>;

/// A model resident on a device, ready to run one generation at a time.
pub trait Backend {
    /// Starts a generation over `prompt` (token ids, at least one, shorter than [`Backend::context_length`]).
    /// Nothing heavy runs here: prefill happens inside [`Generation::step`].
    ///
    /// # Errors
    /// A prompt that does not fit, or an id outside the vocabulary.
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError>;
    /// Starts a generation of what stands between two texts; it is complete by itself. [`Wanted::most`] bounds it.
    ///
    /// # Errors
    /// A model that cannot look at what comes behind; else as for [`Backend::start`].
    fn infill<'a>(
        &'a mut self,
        _texts: Texts<'_>,
        _sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        Err("this model continues texts; it cannot fill a gap in one".into())
    }
    /// Most positions (prompt and output together) the cache holds.
    fn context_length(&self) -> usize;
    /// What is allocated on the device at present.
    fn memory(&self) -> Memory;
}

/// The texts before and behind a gap, as token ids.
#[derive(Debug, Clone, Copy)]
pub struct Texts<'t> {
    /// What stands before, at least one token, shorter than [`Backend::context_length`].
    pub prompt: &'t [u32],
    /// How many tokens at its end are plain text: they may be read together with the gap.
    pub plain: usize,
    /// What stands behind, at least one token.
    pub suffix: &'t [u32],
}

/// Bytes allocated on the device, by purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Weights, mapped ones included.
    pub weights: u64,
    /// Keys and values.
    pub kv_cache: u64,
    /// Everything else.
    pub scratch: u64,
    /// Most that may be allocated.
    pub budget: u64,
}

impl Memory {
    /// What is allocated on `device`.
    pub fn of(device: &Device) -> Self {
        let report = device.memory();
        Self {
            weights: report.weights,
            kv_cache: report.kv_cache,
            scratch: report.scratch,
            budget: report.budget,
        }
    }
}

/// A running generation.
pub trait Generation {
    /// Runs one prefill chunk or one decoding pass (tens of milliseconds on a CPU).
    ///
    /// # Errors
    /// Device failures, or numbers that are not finite; the generation is over then.
    fn step(&mut self) -> Result<Step, BackendError>;
    /// Tells what is wanted of it, before the first step. It changes no token, only what is not computed for nothing.
    fn want(&mut self, _wanted: Wanted) {}
    /// Of the tokens that the last step committed only the first `tokens` are part of the reply; what it took counts
    /// accordingly.
    fn kept(&mut self, _tokens: usize) {}
    /// Log-probabilities of the tokens that the last step committed, in order, if they are wanted and the model has any.
    fn logprobs(&mut self) -> Vec<TokenLogprobs> {
        Vec::new()
    }
    /// Prompt tokens taken over from the cache of the generation before; known after the first step.
    fn cached_tokens(&self) -> usize;
    /// Whether everything is made that was to be: no step may follow. Most generations go on until somebody ends them.
    fn complete(&self) -> bool {
        false
    }
    /// What denoising took so far, for models that denoise.
    fn denoising(&self) -> Option<DenoisingStats> {
        None
    }
    /// What blocks took so far, for models that generate in blocks.
    fn blocks(&self) -> Option<BlockStats> {
        None
    }
}

/// What is wanted of a generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Most tokens; whatever lies behind them is not worth computing.
    pub most: usize,
    /// Tokens that end it.
    pub ends: Vec<u32>,
    /// Show guesses, as [`Step::Draft`], before they are evaluated. Models that denoise always show theirs.
    pub drafts: bool,
    /// Tell the log-probability of each token, and those of so many of the most probable ones.
    pub logprobs: Option<usize>,
}

impl Default for Wanted {
    /// Everything, and no drafts.
    fn default() -> Self {
        Self { most: usize::MAX, ends: Vec::new(), drafts: false, logprobs: None }
    }
}

/// What denoising took in one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct DenoisingStats {
    /// Denoising steps, all canvases together.
    pub steps: usize,
    /// Canvases that were begun.
    pub canvases: usize,
    /// Positions that were accepted in each step.
    pub accepted: Vec<u32>,
}

/// What one step did.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// `done` of `total` prompt tokens are in the cache.
    Prefill {
        /// Tokens encoded so far.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A guess that may still change.
    Draft {
        /// Guessed token ids.
        tokens: Vec<u32>,
        /// Entropy in nats per token; empty where there is none.
        entropy: Vec<f32>,
    },
    /// Tokens that are final, at least one, in order. The engine decides what ends the reply; tokens it does not
    /// want are dropped together with the generation.
    Commit(Vec<u32>),
}

/// How the next token is chosen. [`Sampling::default`] is greedy without penalties.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; otherwise logits are divided by it. A model that denoises follows the schedule of its checkpoint,
    /// whose temperatures are multiplied by this: 1 is the schedule itself, 0 takes the most probable token.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less probable than this times the most probable; 0 drops none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens seen in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens once for every time seen in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, before penalties.
    pub logit_bias: Vec<(u32, f32)>,
    /// What the reply must match; causal models only. What it does not allow is out before filters look at a row.
    pub constraint: Option<Constraint>,
    /// Keys the counter-based generator; the draw at a position depends on seed and position only.
    pub seed: u64,
    /// How a canvas is denoised; without effect on causal models.
    pub denoising: Denoising,
}

/// What a request may change about denoising; `None` leaves what the checkpoint says.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Denoising {
    /// Most steps for a canvas.
    pub max_steps: Option<usize>,
    /// Entropy in nats that the positions accepted in one step may have together.
    pub entropy_bound: Option<f32>,
    /// Mean entropy in nats below which a stable canvas is done.
    pub confidence_threshold: Option<f32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            constraint: None,
            seed: 0,
            denoising: Denoising::default(),
        }
    }
}

/// Why no token could be chosen.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SamplingError {
    /// The model's numbers are broken; nothing after them can be trusted.
    #[error(
        "logit of token {token} at position {position} is {logit}: the pass that made it overflowed or the weights \
         are damaged"
    )]
    NotFinite {
        /// Position of the token to be chosen.
        position: usize,
        /// Token whose logit it is.
        token: usize,
        /// The logit.
        logit: f32,
    },
    /// The model gave no logits.
    #[error("the model has an empty vocabulary")]
    NoLogits,
    /// No token of the model can follow.
    #[error("the constraint of the reply allows no token at position {position}")]
    NothingAllowed {
        /// Position of the token to be chosen.
        position: usize,
    },
}
