//! What guesses, and what it is told.

use crate::decode::Sampler;
use crate::ops::RowTop;

/// A token that may be what the model chooses next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// The token.
    pub token: u32,
    /// Estimated probability that the model chooses it, from 0 to 1, if all tokens before it are right.
    pub trust: f32,
    /// How the proposer came to it; comes back with the outcome.
    pub kind: usize,
}

/// What a guess is for: the position behind a text.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Prompt, committed tokens, and the guesses so far.
    pub text: &'a [u32],
    /// How many of these are certain.
    pub committed: usize,
    /// How the model chooses; its noise is known beforehand.
    pub sampler: &'a Sampler,
}

/// What a pass said.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// Prompt and committed tokens, those that this pass committed included.
    pub text: &'a [u32],
    /// Position of the first row.
    pub start: usize,
    /// Token of each row: the one committed last, then guesses.
    pub input: &'a [u32],
    /// Best tokens of each row.
    pub tops: &'a [RowTop],
    /// Guesses that were right; the rows behind them followed a wrong token.
    pub accepted: usize,
    /// How the model chooses.
    pub sampler: &'a Sampler,
}

impl Seen<'_> {
    /// The token at `back` places before a row's own, as that row saw it.
    pub fn before(&self, row: usize, back: usize) -> Option<u32> {
        match row.checked_sub(back) {
            Some(row) => self.input.get(row).copied(),
            None => self.start.checked_sub(back - row).and_then(|at| self.text.get(at)).copied(),
        }
    }

    /// What this pass committed.
    pub fn committed(&self) -> &[u32] {
        self.text.get(self.start + 1..).unwrap_or_default()
    }
}

/// A source of guesses. What it guesses changes how fast a text is made, never the text.
pub trait Proposer {
    /// Its name in figures.
    fn name(&self) -> &'static str;
    /// A generation begins.
    fn begin(&mut self);
    /// What follows has nothing to do with what was shown before: nothing that was said then may be guessed. How often
    /// guesses came true may stay.
    fn forget(&mut self) {}
    /// A prompt's tokens up to some position are known; called while the prompt is encoded, with more of it each time.
    fn read(&mut self, _prompt: &[u32]) {}
    /// A pass is over.
    fn observe(&mut self, seen: &Seen<'_>);
    /// A guess at the token behind a text. The text of a call is that of the call before with one guess more, or has no
    /// guesses.
    fn propose(&mut self, context: &Context<'_>) -> Option<Guess>;
    /// The model's choice behind the text of a guess is known.
    fn learn(&mut self, guess: &Guess, hit: bool);
}
