//! Guesses from prompt and output: what followed the longest suffix that occurred before.

use super::automaton::{Automaton, Match};
use super::proposer::{Context, Guess, Proposer, Seen};
use super::trust::{Calibration, bucket};

/// Lengths of matches that are trusted alike, by the least of each.
const LENGTHS: [usize; 10] = [2, 3, 4, 5, 7, 9, 13, 17, 25, 33];

/// First estimates for matches of each length where several tokens followed.
const PRIORS: [f32; 11] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.75, 0.8, 0.85];

/// What is missing to certainty is so much less where only one token ever followed.
const ONLY: f32 = 0.6;

/// Looks up what followed the end of the text before.
#[derive(Debug)]
pub struct Lookup {
    automaton: Automaton,
    /// The suffix that matches the text of the call before.
    found: Match,
    calibration: Calibration,
}

impl Default for Lookup {
    fn default() -> Self {
        let automaton = Automaton::default();
        let only = PRIORS.map(|prior| 1.0 - (1.0 - prior) * ONLY);
        Self {
            found: automaton.repeated(),
            automaton,
            calibration: Calibration::new(PRIORS.into_iter().chain(only)),
        }
    }
}

impl Lookup {
    /// Brings the automaton to a text.
    fn follow(&mut self, text: &[u32]) {
        if !text.starts_with(self.automaton.text()) {
            self.automaton = Automaton::default();
        }
        text[self.automaton.text().len()..].iter().for_each(|&token| self.automaton.push(token));
    }
}

impl Proposer for Lookup {
    fn name(&self) -> &'static str {
        "lookup"
    }

    fn begin(&mut self) {
        self.calibration.fade();
    }

    fn forget(&mut self) {
        self.automaton = Automaton::default();
        self.found = self.automaton.repeated();
    }

    fn read(&mut self, prompt: &[u32]) {
        self.follow(prompt);
    }

    fn observe(&mut self, seen: &Seen<'_>) {
        // Only what is new is looked at: comparing all of a text with each pass would take long.
        let known = self.automaton.text().len();
        if known == seen.start + 1 {
            seen.committed().iter().for_each(|&token| self.automaton.push(token));
        } else {
            self.follow(seen.text);
        }
    }

    fn propose(&mut self, context: &Context<'_>) -> Option<Guess> {
        self.found = match context.text.get(context.committed..).and_then(<[u32]>::last) {
            Some(&guess) => self.automaton.follow(self.found, guess),
            None => self.automaton.repeated(),
        };
        let (token, length, only) = self.automaton.next(self.found)?;
        let kind = bucket(length, &LENGTHS) + if only { PRIORS.len() } else { 0 };
        Some(Guess { token, trust: self.calibration.trust(kind), kind })
    }

    fn learn(&mut self, guess: &Guess, hit: bool) {
        self.calibration.learn(guess.kind, hit);
    }
}
