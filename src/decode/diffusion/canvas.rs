//! One canvas on its way from noise to text.

use std::ops::Range;

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
///
/// Its first and last rows may be pinned: they hold the text that is to stand there from the first step to the last, nothing
/// is drawn for them, and their entropies neither count for what is accepted nor for the canvas's end. The model sees them
/// as it sees any other row, and what it takes them for conditions the next step, as with rows that have come out right.
#[derive(Debug)]
pub struct Canvas {
    /// Canvases of the generation before it.
    index: u32,
    /// What the next step starts from.
    tokens: Vec<u32>,
    /// The rows that are not pinned.
    free: Range<usize>,
    /// Steps done.
    steps: usize,
    stop: StopTest,
}

/// What a step made of the rows of a canvas that are not pinned.
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
        Self::between(index, &[], rows, &[], plan, noise)
    }

    /// So many rows of noise between two runs of pinned ones.
    pub fn between(
        index: u32,
        before: &[u32],
        rows: usize,
        behind: &[u32],
        plan: &Plan,
        noise: Noise,
    ) -> Self {
        let free = before.len()..before.len() + rows;
        let drawn = free.clone().map(|row| noise::initial(noise.seed, index, row, noise.vocabulary));
        let tokens = before.iter().copied().chain(drawn).chain(behind.iter().copied()).collect();
        Self { index, tokens, free, steps: 0, stop: plan.stop_test() }
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

    /// Takes what the model said, one choice for each row of the canvas: what is accepted stays, the rest becomes noise again.
    pub fn take(&mut self, choices: &[RowChoice], plan: &Plan, noise: Noise) -> Denoised {
        let free = self.free.clone();
        let choices = &choices[free.clone()];
        let entropies: Vec<f32> = choices.iter().map(|choice| choice.entropy).collect();
        let argmax: Vec<u32> = choices.iter().map(|choice| choice.argmax).collect();
        let accepted = accept(&entropies, plan.entropy_bound);
        let step = self.steps as u32;
        let tokens = self.tokens[free.clone()].iter_mut().zip(free);
        for ((token, row), (choice, &kept)) in tokens.zip(choices.iter().zip(&accepted)) {
            *token = if kept {
                choice.sampled
            } else {
                noise::renoise(noise.seed, self.index, step, row, noise.vocabulary)
            };
        }
        self.steps += 1;
        let done = self.stop.done(&argmax, &entropies) || self.steps >= plan.schedule.steps();
        Denoised { argmax, entropies, accepted: accepted.into_iter().filter(|&kept| kept).count(), done }
    }

    /// Steps done.
    pub fn steps(&self) -> usize {
        self.steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::diffusion_gemma::GenerationConfig;

    const NOISE: Noise = Noise { seed: 3, vocabulary: 50 };

    /// Choices that want other tokens everywhere: sure of the two rows between, not of the pinned ones.
    fn said(canvas: &Canvas, sure: f32, elsewhere: f32) -> Vec<RowChoice> {
        let free = canvas.free.clone();
        let entropy = |row| if free.contains(&row) { sure } else { elsewhere };
        (0..canvas.tokens.len())
            .map(|row| RowChoice { argmax: 9, sampled: 30 + row as u32, entropy: entropy(row) })
            .collect()
    }

    #[test]
    fn pinned_rows_stay_and_count_for_nothing() {
        let plan = Plan::new(&GenerationConfig::default());
        let mut canvas = Canvas::between(0, &[1, 2], 2, &[4, 5, 6], &plan, NOISE);
        for step in 0..2 {
            let choices = said(&canvas, 0.001, 3.0);
            let told = canvas.take(&choices, &plan, NOISE);
            assert_eq!((&told.argmax[..], &told.entropies[..]), (&[9, 9][..], &[0.001, 0.001][..]));
            assert_eq!((told.accepted, told.done), (2, step == 1), "the pinned rows are not sure");
            assert_eq!(canvas.tokens, [1, 2, 32, 33, 4, 5, 6]);
        }
        // And the other way round.
        let mut canvas = Canvas::between(0, &[1, 2], 2, &[4, 5, 6], &plan, NOISE);
        let choices = said(&canvas, 3.0, 0.0);
        let told = canvas.take(&choices, &plan, NOISE);
        assert_eq!((told.accepted, told.done), (1, false));
        let renoised = noise::renoise(3, 0, 0, 3, 50);
        assert_eq!(canvas.tokens, [1, 2, 32, renoised, 4, 5, 6]);
    }
}
