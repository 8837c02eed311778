//! Block decoding of causal models: a pass evaluates the token that was committed last and some guesses behind it.
//!
//! At each of these positions the model makes its own choice, as it would one token a pass. Guesses are committed as
//! long as they are what the model chose, and one choice more. So guesses decide how many tokens a pass gives, never
//! which: a choice depends on the tokens before it, the seed and its position, and a row's logits do not depend on the
//! width of the pass. Keys and values of refused guesses are forgotten by length; the next pass overwrites them.
//!
//! [`Proposer`]s guess, a chain joins their guesses best first, [`Costs`] says how many of them pay.

mod automaton;
mod backend;
mod chain;
mod cost;
mod fixed_point;
mod lookup;
mod model;
mod pace;
mod pool;
mod proposer;
mod recycled;
mod trust;

pub use automaton::Automaton;
pub use backend::CausalBackend;
pub use cost::{Costs, Measured};
pub use fixed_point::FixedPoint;
pub use lookup::Lookup;
pub use model::BlockModel;
pub use pool::Pool;
pub use proposer::{Context, Guess, Proposer, Seen};
pub use recycled::Recycled;
pub use trust::Calibration;

use serde::{Serialize, Serializer};

/// Most rows of a block: the token that was committed last, and guesses.
pub const MOST_ROWS: usize = 16;

/// How many rows a pass has after the prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BlockSize {
    /// As many as pay, by what passes cost and guesses are worth.
    #[default]
    Auto,
    /// Up to this many, from 1 to [`MOST_ROWS`], whatever the guesses are worth.
    Fixed(usize),
}

impl Serialize for BlockSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Fixed(rows) => serializer.serialize_u64(*rows as u64),
        }
    }
}

impl std::str::FromStr for BlockSize {
    type Err = String;

    /// `auto`, or a number from 1 to [`MOST_ROWS`].
    fn from_str(text: &str) -> Result<Self, String> {
        let fixed = |rows: &usize| (1..=MOST_ROWS).contains(rows);
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().ok().filter(fixed).map(Self::Fixed).ok_or_else(|| {
                format!("found \"{text}\" for a block size, expected auto or a number from 1 to {MOST_ROWS}")
            }),
        }
    }
}

/// How a causal model is decoded: the `[decode]` table of the configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BlockOptions {
    /// Rows of a pass.
    #[serde(rename = "block_size")]
    pub size: BlockSize,
    /// Guess from what earlier generations said, too, whoever asked for them. Without it a generation is guessed from its own
    /// text and, where its prompt goes on from prompt and answer of the generation before, from what that saw.
    #[serde(rename = "ngram_pool")]
    pub pool: bool,
}

/// What block decoding took in one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct BlockStats {
    /// Passes that committed tokens; the last one of the prompt is the first of them.
    pub passes: usize,
    /// Rows of these passes.
    pub evaluated: usize,
    /// Tokens that were committed.
    pub committed: usize,
    /// Guesses by where they came from; nothing where none are made.
    pub proposers: Vec<ProposerStats>,
}

impl BlockStats {
    /// Adds what another generation took.
    pub fn add(&mut self, other: &Self) {
        self.passes += other.passes;
        self.evaluated += other.evaluated;
        self.committed += other.committed;
        for more in &other.proposers {
            match self.proposers.iter_mut().find(|made| made.name == more.name) {
                Some(made) => {
                    made.offered += more.offered;
                    made.accepted += more.accepted;
                }
                None => self.proposers.push(more.clone()),
            }
        }
    }
}

/// Guesses of one proposer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProposerStats {
    /// Which proposer.
    pub name: &'static str,
    /// Guesses of it that were evaluated.
    pub offered: usize,
    /// Those that were committed.
    pub accepted: usize,
}
