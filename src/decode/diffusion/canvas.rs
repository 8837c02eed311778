//! One canvas on its way from noise to text.

use super::acceptance::accept;
use super::noise;
use super::plan::Plan;
use super::stop::StopTest;
use crate::model::diffusion_gemma::{DenoiseStep, RowChoice};

/// What the noise of a generation is keyed by, and where it is drawn from.
#[derive(Debug, Clone, Copy)]
pub struct Noise {
    /// The request's seed.
    pub seed: u64,
    /// Ids are drawn below this.
    pub vocabulary: usize,
}

/// A canvas that is being denoised.
#[derive(Debug)]
pub struct Canvas {
    /// Canvases of the generation before it.
    index: u32,
    /// What the next step starts from.
    tokens: Vec<u32>,
    /// Steps done.
    steps: usize,
    stop: StopTest,
}

/// What a step made of a canvas.
#[derive(Debug, Clone, PartialEq)]
pub struct Denoised {
    /// The most probable token of each row.
    pub argmax: Vec<u32>,
    /// Entropy of each row in nats.
    pub entropies: Vec<f32>,
    /// Positions accepted.
    pub accepted: usize,
    /// No step is to follow: `argmax` is what the canvas says.
    pub done: bool,
}

impl Canvas {
    /// Noise.
    pub fn new(index: u32, rows: usize, plan: &Plan, noise: Noise) -> Self {
        let tokens = (0..rows).map(|row| noise::initial(noise.seed, index, row, noise.vocabulary)).collect();
        Self { index, tokens, steps: 0, stop: plan.stop_test() }
    }

    /// What the next step starts from.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What the model is told of the next step.
    pub fn step(&self, plan: &Plan, noise: Noise, barred: &[u32]) -> DenoiseStep {
        DenoiseStep {
            first: self.steps == 0,
            temperature: plan.schedule.temperature(self.steps),
            seed: noise.seed,
            canvas: self.index,
            step: self.steps as u32,
            greedy: plan.greedy,
            barred: barred.to_vec(),
        }
    }

    /// Takes what the model said, one choice a row: what is accepted stays, the rest becomes noise again.
    pub fn take(&mut self, choices: &[RowChoice], plan: &Plan, noise: Noise) -> Denoised {
        let entropies: Vec<f32> = choices.iter().map(|choice| choice.entropy).collect();
        let argmax: Vec<u32> = choices.iter().map(|choice| choice.argmax).collect();
        let accepted = accept(&entropies, plan.entropy_bound);
        let step = self.steps as u32;
        for (row, (token, choice)) in self.tokens.iter_mut().zip(choices).enumerate() {
            *token = if accepted[row] {
                choice.sampled
            } else {
                noise::renoise(noise.seed, self.index, step, row, noise.vocabulary)
            };
        }
        self.steps += 1;
        let done = self.stop.done(&argmax, &entropies) || self.steps >= plan.schedule.steps();
        Denoised { argmax, entropies, accepted: accepted.into_iter().filter(|&kept| kept).count(), done }
    }
}
