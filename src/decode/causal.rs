//! One token a pass: prefill in chunks, then sample and feed back.

use super::prompt::{check_prompt, common_prefix};
use super::sample::Sampler;
use super::{Backend, BackendError, Generation, Memory, Sampling, Step};
use crate::model::{Causal, Logits, ModelError};

/// A causal model that generates one token a pass. What it has read stays in the key-value cache: a prompt that starts
/// the same way is read from where it differs. Results do not depend on how a prompt was cut into passes, so reuse
/// changes no bit of what follows.
pub struct CausalBackend {
    model: Causal,
    /// Ids from here on are padding: neither taken nor generated.
    vocabulary: usize,
    /// Tokens that have run and whose keys and values the cache holds, from position 0 on.
    cached: Vec<u32>,
}

impl CausalBackend {
    /// Generates with `model`.
    pub fn new(model: Causal) -> Self {
        let vocabulary = model.config().vocabulary;
        Self { model, vocabulary, cached: Vec::new() }
    }

    /// Keeps to ids below `tokens`: models may have more rows than their tokenizers have tokens.
    pub fn with_vocabulary(self, tokens: usize) -> Self {
        Self { vocabulary: self.vocabulary.min(tokens), ..self }
    }

    /// The model.
    pub fn model(&self) -> &Causal {
        &self.model
    }

    /// Runs tokens at `start` and waits for them with `wait`; only then the cache ends with them.
    fn forward<T>(
        &mut self,
        tokens: &[u32],
        start: usize,
        logits: Logits,
        wait: impl FnOnce(&Causal) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        self.cached.truncate(start);
        self.model.forward(tokens, start, logits)?;
        let seen = wait(&self.model)?;
        self.cached.extend_from_slice(tokens);
        Ok(seen)
    }
}

impl Backend for CausalBackend {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        check_prompt(prompt, self.model.context(), self.vocabulary)?;
        let common = common_prefix(&self.cached, prompt);
        // The last token is always run: its logits are not kept.
        let reused = common.min(prompt.len() - 1);
        Ok(Box::new(CausalGeneration {
            backend: self,
            prompt: prompt.to_vec(),
            sampler: Sampler::new(sampling, prompt),
            reused,
            done: reused,
            last: None,
        }))
    }

    fn context_length(&self) -> usize {
        self.model.context()
    }

    fn memory(&self) -> Memory {
        Memory::of(self.model.device())
    }
}

struct CausalGeneration<'a> {
    backend: &'a mut CausalBackend,
    prompt: Vec<u32>,
    sampler: Sampler,
    reused: usize,
    /// Positions in the cache.
    done: usize,
    /// The token chosen last, not yet run.
    last: Option<u32>,
}

impl CausalGeneration<'_> {
    fn advance(&mut self) -> Result<Step, BackendError> {
        let (total, start) = (self.prompt.len(), self.done);
        if start < total {
            let end = total.min(start + self.backend.model.rows());
            let logits = if end == total { Logits::Last } else { Logits::None };
            // Progress and cancellation mean what they say: the chunk has run.
            let wait = |model: &Causal| Ok(model.device().finish()?);
            self.backend.forward(&self.prompt[start..end], start, logits, wait)?;
            self.done = end;
            return Ok(Step::Prefill { done: end, total });
        }
        let end = start + usize::from(self.last.is_some());
        let (sampler, vocabulary) = (&mut self.sampler, self.backend.vocabulary);
        let mut choose =
            |model: &Causal| model.with_logits(0, |logits| sampler.choose(&logits[..vocabulary], end));
        let token = match self.last {
            Some(token) => self.backend.forward(&[token], start, Logits::Last, choose)??,
            None => choose(&self.backend.model)??,
        };
        self.done = end;
        self.last = Some(token);
        Ok(Step::Commit(vec![token]))
    }
}

impl Generation for CausalGeneration<'_> {
    fn step(&mut self) -> Result<Step, BackendError> {
        // After a failure nobody knows what ran, nor whether its numbers are sound.
        self.advance().inspect_err(|_| self.backend.cached.clear())
    }

    fn cached_tokens(&self) -> usize {
        self.reused
    }
}
