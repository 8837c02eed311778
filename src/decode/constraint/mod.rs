//! What a reply must match: a JSON schema, a grammar or a regular expression, compiled for one vocabulary by the
//! `llguidance` crate, and the walk through it while the reply is made.
//!
//! What may come next depends on the tokens before it and on nothing else. So a choice under a constraint is a function
//! of the text so far, the logits, the seed and the position, as it is without: the width of a pass changes no token.

mod allowed;
mod grammars;
mod walk;

pub use allowed::{Allowed, Mask};
pub use grammars::{Encode, Grammars, Word, Words, spaced};
pub(super) use walk::Walk;

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;
use thiserror::Error;

/// A form that replies can be held to.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// JSON that is valid under this schema.
    JsonSchema(serde_json::Value),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// A regular expression that the whole reply matches.
    Regex(String),
}

/// Why a form cannot be asked for, or why a reply could not be held to it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConstraintError {
    /// What was sent is no such form, or one that is not supported, or takes more than is allowed.
    #[error("{0}")]
    Refused(String),
    /// The vocabulary is none that replies can be constrained with.
    #[error("replies of this model cannot be constrained: {0}")]
    Vocabulary(String),
    /// The walk broke off.
    #[error("the constraint of the reply failed: {0}; a simpler schema or grammar may help")]
    Walk(String),
}

/// The part of a reply that its constraint leaves alone: what stands in the thinking channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thoughts {
    /// Token that opens the channel.
    pub open: u32,
    /// Token that closes it.
    pub close: u32,
    /// Whether line breaks between the channel and what is said are layout.
    pub breaks: bool,
}

/// A compiled form, for one generation or several. Clones share it.
#[derive(Clone)]
pub struct Constraint {
    compiled: Arc<Compiled>,
    thoughts: Option<Thoughts>,
}

struct Compiled {
    /// At the beginning; never moves.
    matcher: Matcher,
    /// Tokens that end a reply.
    ends: Vec<u32>,
    /// Tokens that print one or two line breaks and nothing else, and how many.
    breaks: Vec<(u32, u8)>,
}

impl Constraint {
    /// Holds back until the thinking channel is closed, if the model opens it or its prompt has.
    #[must_use]
    pub fn behind(mut self, thoughts: Thoughts) -> Self {
        self.thoughts = Some(thoughts);
        self
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("thoughts", &self.thoughts).finish_non_exhaustive()
    }
}

impl PartialEq for Constraint {
    /// Whether it is the very same.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.compiled, &other.compiled) && self.thoughts == other.thoughts
    }
}

/// An error's text as people may read it: without the crate's notes to itself, and not too long.
fn told(error: &dyn fmt::Display) -> String {
    /// Bytes enough to say what is wrong.
    const MOST: usize = 500;
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    if text == "NoExtensionBias" {
        return "no reply can match it".to_owned();
    }
    if text.contains("oneOf constraints are not supported") {
        return "`oneOf` is not supported where its parts may overlap; `anyOf` is".to_owned();
    }
    if text.starts_with("panic") {
        return "it cannot be compiled".to_owned();
    }
    match text.char_indices().find(|(place, _)| *place >= MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
