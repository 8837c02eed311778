//! Guesses from the rows that followed a wrong guess: what the model chose there may be right all the same.
//!
//! Such rows saw a wrong token, but the right tokens before it, and the noise of their own position. Repeating passes
//! over what they chose is how a fixed point of the model is found, which is what it generates.

use super::proposer::{Context, Guess, Proposer, Seen};
use super::trust::{Calibration, bucket};

/// Distances from the wrong guess that are trusted alike.
const DEPTHS: [usize; 3] = [1, 2, 4];

/// Margins of choices that are trusted alike.
const MARGINS: [f32; 4] = [0.5, 1.0, 2.0, 4.0];

/// First estimates by margin, for choices behind a token that is now another one.
const PRIORS: [f32; 5] = [0.05, 0.08, 0.12, 0.2, 0.35];

/// First estimates by margin, for choices behind the very token that is now before them.
const ALIGNED: [f32; 5] = [0.2, 0.3, 0.4, 0.5, 0.7];

/// Keeps what passes chose behind wrong guesses.
#[derive(Debug)]
pub struct FixedPoint {
    /// Choices by position, rising.
    tail: Vec<Choice>,
    calibration: Calibration,
}

#[derive(Debug)]
struct Choice {
    position: usize,
    token: u32,
    margin: f32,
    /// The token that was before it.
    before: u32,
    /// Rows between it and the first wrong guess.
    depth: usize,
}

impl Default for FixedPoint {
    fn default() -> Self {
        let by_depth = |priors: [f32; 5]| (0..=DEPTHS.len()).flat_map(move |_| priors);
        Self { tail: Vec::new(), calibration: Calibration::new(by_depth(PRIORS).chain(by_depth(ALIGNED))) }
    }
}

impl Proposer for FixedPoint {
    fn name(&self) -> &'static str {
        "fixed_point"
    }

    fn begin(&mut self) {
        self.tail.clear();
        self.calibration.fade();
    }

    fn observe(&mut self, seen: &Seen<'_>) {
        let first = seen.accepted + 1;
        let last = seen.start + seen.input.len();
        // What an earlier pass chose further on stays until a pass gets there.
        self.tail.retain(|choice| choice.position > last);
        let rows = seen.input.iter().zip(seen.tops).enumerate().skip(first);
        let choices: Vec<Choice> = rows
            .filter_map(|(row, (&before, top))| {
                let position = seen.start + row + 1;
                let (token, margin) = seen.sampler.likely(top.pairs(), position)?;
                Some(Choice { position, token, margin, before, depth: row - first })
            })
            .collect();
        self.tail.splice(0..0, choices);
    }

    fn propose(&mut self, context: &Context<'_>) -> Option<Guess> {
        let position = context.text.len();
        let choice = self.tail.iter().find(|choice| choice.position == position)?;
        let aligned = usize::from(context.text.last() == Some(&choice.before));
        let depth = bucket(choice.depth, &DEPTHS);
        let kind = (aligned * (DEPTHS.len() + 1) + depth) * PRIORS.len() + bucket(choice.margin, &MARGINS);
        Some(Guess { token: choice.token, trust: self.calibration.trust(kind), kind })
    }

    fn learn(&mut self, guess: &Guess, hit: bool) {
        self.calibration.learn(guess.kind, hit);
    }
}
