//! The choice of the next token: penalties, temperature, filters, and the argmax of logits plus Gumbel noise.
//!
//! Noise is keyed by seed, position and token, so that a choice depends on nothing that happened before.

use std::collections::{HashMap, HashSet};

use super::philox::gumbel;
use super::{Sampling, SamplingError};

/// A token this far below the best, in units of the temperature, cannot win: noise spans less than 26.1.
const HOPELESS: f64 = 26.1;

/// Chooses tokens for one generation.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    prompt: HashSet<u32>,
    output: HashMap<u32, u32>,
    penalised: Vec<f32>,
}

impl Sampler {
    /// A sampler for a generation over `prompt`.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let remembers = sampling.repetition_penalty != 1.0;
        Self {
            sampling: sampling.clone(),
            prompt: if remembers { prompt.iter().copied().collect() } else { HashSet::new() },
            output: HashMap::new(),
            penalised: Vec::new(),
        }
    }

    /// Chooses the token at `position` from its logits and remembers it for penalties.
    ///
    /// # Errors
    /// [`SamplingError`] when a logit is not finite or there is none.
    pub fn choose(&mut self, logits: &[f32], position: usize) -> Result<u32, SamplingError> {
        if let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(SamplingError::NotFinite { position, token, logit: logits[token] });
        }
        let token = if self.penalises() {
            let mut penalised = std::mem::take(&mut self.penalised);
            penalised.clear();
            penalised.extend_from_slice(logits);
            self.penalise(&mut penalised);
            let token = self.pick(&penalised, position);
            self.penalised = penalised;
            token
        } else {
            self.pick(logits, position)
        };
        let token = token.ok_or(SamplingError::NoLogits)?;
        *self.output.entry(token).or_insert(0) += 1;
        Ok(token)
    }

    fn penalises(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }

    fn penalise(&self, logits: &mut [f32]) {
        let s = &self.sampling;
        if s.repetition_penalty != 1.0 {
            let seen =
                self.prompt.iter().chain(self.output.keys().filter(|token| !self.prompt.contains(token)));
            for &token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 {
                        *logit / s.repetition_penalty
                    } else {
                        *logit * s.repetition_penalty
                    };
                }
            }
        }
        for (&token, &count) in &self.output {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= s.presence_penalty + s.frequency_penalty * count as f32;
            }
        }
    }

    fn pick(&self, logits: &[f32], position: usize) -> Option<u32> {
        let best = argmax(logits)?;
        let s = &self.sampling;
        if s.temperature <= 0.0 || s.top_k == 1 {
            return Some(best);
        }
        let (top, temperature) = (f64::from(logits[best as usize]), f64::from(s.temperature));
        // What stays has a chance to win; for top_p the rest weighs less than one in a million.
        let floor = top - HOPELESS * temperature;
        let mut candidates: Vec<(u32, f64)> = logits
            .iter()
            .enumerate()
            .filter(|&(_, &logit)| f64::from(logit) >= floor)
            .map(|(token, &logit)| (token as u32, (f64::from(logit) - top) / temperature))
            .collect();
        if s.top_k > 0 || s.top_p < 1.0 {
            // Ties go to the lower id, so that the cut is the same every time.
            candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            if s.top_k > 0 {
                candidates.truncate(s.top_k);
            }
            if s.top_p < 1.0 {
                let total: f64 = candidates.iter().map(|(_, scaled)| scaled.exp()).sum();
                let mut reached = 0.0;
                let keep = candidates.iter().position(|(_, scaled)| {
                    reached += scaled.exp() / total;
                    reached >= f64::from(s.top_p)
                });
                if let Some(last) = keep {
                    candidates.truncate(last + 1);
                }
            }
        }
        if s.min_p > 0.0 {
            let least = f64::from(s.min_p).ln();
            candidates.retain(|&(_, scaled)| scaled >= least);
        }
        candidates
            .into_iter()
            .map(|(token, scaled)| (token, scaled + gumbel(s.seed, position, token)))
            .max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
            .map(|(token, _)| token)
    }
}

/// The token with the largest logit, the first of several; none if there are no logits.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == top).map(|token| token as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(change: impl FnOnce(&mut Sampling)) -> Sampler {
        let mut sampling = Sampling { temperature: 1.0, seed: 11, ..Sampling::default() };
        change(&mut sampling);
        Sampler::new(&sampling, &[])
    }

    /// Share of draws that chose each token, over many positions.
    fn shares(logits: &[f32], change: impl Fn(&mut Sampling)) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..DRAWS {
            let token = sampler(&change).choose(logits, position).unwrap();
            counts[token as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn draws_follow_the_softmax_at_the_temperature() {
        let logits = [1.0f32, 0.0, 2.0, -1.0];
        for temperature in [0.5f32, 1.0, 2.0] {
            let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            let found = shares(&logits, |s| s.temperature = temperature);
            for (f, w) in found.iter().zip(&weights) {
                assert!((f - w / total).abs() < 0.015, "{found:?} at {temperature}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 0.6439, 0.2369, 0.0871, 0.0321.
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let kept = |change: &dyn Fn(&mut Sampling)| -> Vec<usize> {
            let found = shares(&logits, change);
            (0..4).filter(|&i| found[i] > 0.0).collect()
        };
        assert_eq!(kept(&|s| s.top_k = 2), [0, 1]);
        assert_eq!(kept(&|s| s.top_p = 0.6), [0]);
        assert_eq!(kept(&|s| s.top_p = 0.65), [0, 1]);
        assert_eq!(kept(&|s| s.min_p = 0.1), [0, 1, 2]);
        assert_eq!(kept(&|s| s.temperature = 0.0), [0]);
        assert_eq!(kept(&|_| ()), [0, 1, 2, 3]);
    }

    #[test]
    fn a_choice_depends_on_seed_and_position_only() {
        let logits: Vec<f32> = (0..1000).map(|i| (i % 7) as f32 * 0.1).collect();
        let choose = |seed, position| sampler(|s| s.seed = seed).choose(&logits, position).unwrap();
        assert_eq!(choose(1, 5), choose(1, 5));
        assert!((0..20).any(|p| choose(1, p) != choose(2, p)));
        assert!((0..20).any(|p| choose(1, p) != choose(1, p + 1)));
        let mut with_history = sampler(|s| s.seed = 1);
        with_history.choose(&logits, 4).unwrap();
        assert_eq!(with_history.choose(&logits, 5).unwrap(), choose(1, 5));
    }

    #[test]
    fn penalties_count_prompt_and_output_as_documented() {
        let logits = [2.0f32, 1.5, -1.0];
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(Sampler::new(&sampling, &[0]).choose(&logits, 0).unwrap(), 1);
        let mut twice = Sampler::new(&Sampling { frequency_penalty: 0.3, ..Sampling::default() }, &[0]);
        let chosen: Vec<u32> = (0..4).map(|p| twice.choose(&logits, p).unwrap()).collect();
        assert_eq!(chosen, [0, 0, 1, 0], "2.0, 1.7, then 1.4 under 1.5, then 1.4 over 1.2");
        let mut once = Sampler::new(&Sampling { presence_penalty: 0.6, ..Sampling::default() }, &[0]);
        let chosen: Vec<u32> = (0..3).map(|p| once.choose(&logits, p).unwrap()).collect();
        assert_eq!(chosen, [0, 1, 0], "the prompt does not count; each is lowered once");
    }

    #[test]
    fn numbers_that_are_none_end_the_generation() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = sampler(|_| ()).choose(&[0.0, bad], 9).unwrap_err();
            assert!(error.to_string().contains("position 9"), "{error}");
        }
        assert!(sampler(|_| ()).choose(&[], 0).is_err());
    }
}
