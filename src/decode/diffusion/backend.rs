//! The loop over canvases: encode what is not encoded yet, denoise, commit, again.

use super::canvas::{Canvas, Denoised, Noise};
use super::gap::{Around, Gap};
use super::model::CanvasModel;
use super::plan::Plan;
use crate::decode::prompt::{check_prompt, common_prefix};
use crate::decode::{
    Backend, BackendError, DenoisingStats, Generation, Memory, Sampling, Step, Texts, Wanted,
};
use crate::model::ModelError;
use crate::model::diffusion_gemma::{GenerationConfig, RowChoice};

/// Steps whose accepted positions are told; a generation with more has told enough.
const MOST_TOLD: usize = 4096;

/// What a server decides about denoising.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoisingRules {
    /// No reply ends before its first token: the end tokens are barred at row 0 of a generation's first canvas, as its
    /// most probable and as its sampled token. Terse prompts often denoise to an immediate end otherwise.
    pub bar_immediate_end: bool,
}

impl Default for DenoisingRules {
    fn default() -> Self {
        Self { bar_immediate_end: true }
    }
}

/// A block diffusion model. What it has encoded stays in the key-value cache: a prompt that starts the same way is
/// encoded from where it differs, as long as the model still has what stands before. Results do not depend on how a
/// prompt was cut into passes, so reuse changes no bit of what follows.
pub struct DiffusionBackend<M> {
    model: M,
    config: GenerationConfig,
    rules: DenoisingRules,
    /// Ids from here on are padding: neither taken nor drawn.
    vocabulary: usize,
    /// Tokens that were encoded and whose keys and values the cache holds, from position 0 on. A canvas that is being
    /// denoised lies behind them and is no part of them.
    cached: Vec<u32>,
}

impl<M: CanvasModel> DiffusionBackend<M> {
    /// Generates with `model` as `config` says.
    pub fn new(model: M, config: GenerationConfig, rules: DenoisingRules) -> Self {
        let vocabulary = model.vocabulary();
        Self { model, config, rules, vocabulary, cached: Vec::new() }
    }

    /// Keeps to ids below `tokens`: models may have more rows than their tokenizers have tokens.
    #[must_use]
    pub fn with_vocabulary(self, tokens: usize) -> Self {
        Self { vocabulary: self.vocabulary.min(tokens), ..self }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// How the checkpoint wants to be sampled.
    pub fn config(&self) -> &GenerationConfig {
        &self.config
    }

    /// Encodes up to a pass of tokens at `start` and waits for them; only then the cache ends with them.
    fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError> {
        self.cached.truncate(start);
        self.model.encode(tokens, start)?;
        self.model.finish()?;
        self.cached.extend_from_slice(tokens);
        Ok(())
    }

    /// Checks what the model said: one sound choice for each row.
    fn check(&self, choices: &[RowChoice], start: usize) -> Result<(), BackendError> {
        let rows = self.model.canvas();
        if choices.len() != rows {
            return Err(format!("the model answered {} rows of a canvas of {rows}", choices.len()).into());
        }
        for (row, choice) in choices.iter().enumerate() {
            if !choice.entropy.is_finite() {
                return Err(format!(
                    "the entropy at position {} is {}: the pass that made it overflowed or the weights are damaged",
                    start + row,
                    choice.entropy
                )
                .into());
            }
            let vocabulary = self.vocabulary;
            if let Some(id) =
                [choice.argmax, choice.sampled].into_iter().find(|&id| id as usize >= vocabulary)
            {
                return Err(ModelError::UnknownToken { id, vocabulary }.into());
            }
        }
        Ok(())
    }
}

impl<M: CanvasModel> Backend for DiffusionBackend<M> {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        Ok(Box::new(self.generation(prompt, sampling)?))
    }

    fn infill<'a>(
        &'a mut self,
        texts: Texts<'_>,
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        let Texts { prompt, plain, suffix } = texts;
        check_prompt(prompt, self.model.context(), self.vocabulary)?;
        let vocabulary = self.vocabulary;
        if let Some(&id) = suffix.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(ModelError::UnknownToken { id, vocabulary }.into());
        }
        // Something must be encoded before a canvas.
        let held = Gap::held(self.model.canvas(), plain).min(prompt.len() - 1);
        let (encoded, before) = prompt.split_at(prompt.len() - held);
        let GenerationConfig { eos, pad, .. } = &self.config;
        let around = Around {
            before: before.to_vec(),
            suffix: suffix.to_vec(),
            fill: eos.first().or(pad.as_ref()).copied().unwrap_or_default(),
            ends: eos.iter().chain(pad).copied().collect(),
        };
        let generation = self.generation(encoded, sampling)?;
        Ok(Box::new(DiffusionGeneration { around: Some(around), ..generation }))
    }

    fn context_length(&self) -> usize {
        self.model.context()
    }

    fn memory(&self) -> Memory {
        self.model.memory()
    }
}

impl<M: CanvasModel> DiffusionBackend<M> {
    fn generation(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<DiffusionGeneration<'_, M>, BackendError> {
        let vocabulary = self.vocabulary;
        check_prompt(prompt, self.model.context(), vocabulary)?;
        if sampling.constraint.is_some() || !sampling.logit_bias.is_empty() {
            return Err("a model that denoises knows neither constraints nor biases on tokens".into());
        }
        let plan = Plan::for_request(&self.config, sampling)?;
        // Keys and values are all that a canvas needs of what stands before it: not even the last token runs again.
        let common = common_prefix(&self.cached, prompt);
        let reused = if self.model.reusable(common) { common } else { 0 };
        Ok(DiffusionGeneration {
            noise: Noise { seed: sampling.seed, vocabulary },
            backend: self,
            prompt: prompt.to_vec(),
            around: None,
            gap: None,
            most: usize::MAX,
            plan,
            reused,
            done: reused,
            canvases: 0,
            phase: Phase::Prefill,
            stats: DenoisingStats::default(),
        })
    }
}

/// What the next step of a generation does.
enum Phase {
    /// Encodes a chunk of the prompt.
    Prefill,
    /// Encodes these committed tokens and denoises the canvas behind them for the first time.
    Begin(Vec<u32>),
    /// Denoises a canvas once more.
    Denoise(Canvas),
    /// Hands a finished canvas over.
    Commit(Vec<u32>),
    /// Nothing: the gap is filled.
    Filled,
    /// Nothing: a step failed.
    Over,
}

struct DiffusionGeneration<'a, M> {
    backend: &'a mut DiffusionBackend<M>,
    prompt: Vec<u32>,
    /// What stands around the gap that is to be filled, until it is begun. Otherwise canvases follow each other.
    around: Option<Around>,
    /// That gap.
    gap: Option<Gap>,
    /// Most tokens that are wanted.
    most: usize,
    plan: Plan,
    noise: Noise,
    reused: usize,
    /// Positions in the cache.
    done: usize,
    /// Canvases begun.
    canvases: u32,
    phase: Phase,
    stats: DenoisingStats,
}

impl<M: CanvasModel> DiffusionGeneration<'_, M> {
    fn advance(&mut self) -> Result<Step, BackendError> {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Over => Err("the generation has ended with an error".into()),
            Phase::Filled => Err("the gap is filled: nothing is left to generate".into()),
            Phase::Prefill => self.prefill(),
            Phase::Begin(committed) => {
                let canvas = self.begin(&committed)?;
                self.denoise(canvas)
            }
            Phase::Denoise(canvas) => self.denoise(canvas),
            Phase::Commit(mut tokens) if self.gap.is_some() => {
                self.phase = Phase::Filled;
                let config = &self.backend.config;
                let ends = |id: &u32| config.eos.contains(id) || config.pad == Some(*id);
                // Nothing was drawn to stand behind an end: the suffix does.
                tokens.truncate(tokens.iter().position(ends).map_or(usize::MAX, |end| end + 1));
                Ok(Step::Commit(tokens))
            }
            Phase::Commit(tokens) => {
                self.phase = Phase::Begin(tokens.clone());
                Ok(Step::Commit(tokens))
            }
        }
    }

    /// A prompt that is cached whole is told as such, and costs no pass.
    fn prefill(&mut self) -> Result<Step, BackendError> {
        let (total, start) = (self.prompt.len(), self.done);
        let end = total.min(start + self.backend.model.rows().max(1));
        if start < end {
            self.backend.encode(&self.prompt[start..end], start)?;
            self.done = end;
        }
        self.phase = if end == total { Phase::Begin(Vec::new()) } else { Phase::Prefill };
        Ok(Step::Prefill { done: end, total })
    }

    /// Encodes what the canvas before has committed and makes a new one. The engine ends a generation before the
    /// context is full; the last canvas may reach past it.
    fn begin(&mut self, committed: &[u32]) -> Result<Canvas, BackendError> {
        let context = self.backend.model.context();
        let start = self.done + committed.len();
        if start >= context {
            return Err(ModelError::PastContext { position: start, context }.into());
        }
        for tokens in committed.chunks(self.backend.model.rows().max(1)) {
            self.backend.encode(tokens, self.done)?;
            self.done += tokens.len();
        }
        let rows = self.backend.model.canvas();
        if let Some(around) = self.around.take() {
            let left = context.saturating_sub(start + around.before.len());
            self.gap = Some(Gap::new(rows, around, self.most.min(left), self.backend.vocabulary));
        }
        let canvas = self.canvas(rows);
        self.canvases += 1;
        self.stats.canvases += 1;
        Ok(canvas)
    }

    /// Noise, before whatever is to stand behind it.
    fn canvas(&self, rows: usize) -> Canvas {
        match &self.gap {
            None => Canvas::new(self.canvases, rows, &self.plan, self.noise),
            Some(gap) => {
                Canvas::between(0, gap.before(), gap.length(), &gap.behind(), &self.plan, self.noise)
            }
        }
    }

    fn denoise(&mut self, mut canvas: Canvas) -> Result<Step, BackendError> {
        let backend = &mut *self.backend;
        let first = self.canvases == 1 && backend.rules.bar_immediate_end;
        let step = canvas.step(&self.plan, self.noise, if first { &backend.config.eos } else { &[] });
        // The canvas overwrites what an earlier generation has left behind this place.
        backend.cached.truncate(self.done);
        let choices = backend.model.denoise(canvas.tokens(), self.done, &step)?;
        backend.check(&choices, self.done)?;
        let Denoised { argmax, entropies, accepted, done } = canvas.take(&choices, &self.plan, self.noise);
        self.stats.steps += 1;
        if self.stats.accepted.len() < MOST_TOLD {
            self.stats.accepted.push(accepted as u32);
        }
        let again = self.gap.as_mut().is_some_and(|gap| gap.look(&choices, canvas.steps(), done));
        self.phase = match (again, done) {
            (true, _) => Phase::Denoise(self.canvas(choices.len())),
            (false, true) => Phase::Commit(argmax.clone()),
            (false, false) => Phase::Denoise(canvas),
        };
        Ok(Step::Draft { tokens: argmax, entropy: entropies })
    }
}

impl<M: CanvasModel> Generation for DiffusionGeneration<'_, M> {
    fn step(&mut self) -> Result<Step, BackendError> {
        // After a failure nobody knows what ran, nor whether its numbers are sound.
        self.advance().inspect_err(|_| self.backend.cached.clear())
    }

    fn want(&mut self, wanted: Wanted) {
        self.most = wanted.most;
    }

    fn complete(&self) -> bool {
        matches!(self.phase, Phase::Filled)
    }

    fn cached_tokens(&self) -> usize {
        self.reused
    }

    fn denoising(&self) -> Option<DenoisingStats> {
        Some(self.stats.clone())
    }
}
