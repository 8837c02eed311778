//! Calls of tools in what a model writes.
//!
//! Each family writes calls its own way ([`Syntax`]). A [`Reader`] stands between the tokens of a reply and its text: it
//! takes calls out, and what remains is content. A call is handed on once it is whole; until then nothing of it shows.
//! What begins like a call and turns out to be none, or names a tool that was not declared, is content after all, whole.
//! Results do not depend on how tokens are cut into runs. [`write`] is the other way: calls as text, for templates that
//! know none.

mod body;
mod framed;
mod gemma;
mod grammar;
mod lexer;
mod notation;
mod reader;
#[cfg(test)]
mod tests;
mod value;
mod write;

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use super::Tokenizer;

pub use grammar::grammar;
pub use reader::{Reader, Said, Segment};
pub use write::{begun, call, declared, results};

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// `<|tool_call>call:NAME{key:value}<tool_call|>`, where markers and the quotes around strings are tokens.
    Gemma,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes and Qwen write it.
    Hermes,
    /// `{"name": …, "parameters": …}` at the very beginning, or behind `<|python_tag|>`.
    Llama,
    /// `[TOOL_CALLS]` and a list of objects, or a name, `[ARGS]` and an object.
    Mistral,
    /// `<｜tool▁call▁begin｜>`, a name, `<｜tool▁sep｜>` and an object.
    DeepSeek,
}

/// The tokens of Gemma's syntax.
pub(super) const GEMMA_OPEN: &str = "<|tool_call>";
/// Ends a call.
pub(super) const GEMMA_CLOSE: &str = "<tool_call|>";
/// Stands on both sides of a string.
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";

impl Syntax {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Gemma, Self::Hermes, Self::Llama, Self::Mistral, Self::DeepSeek];

    /// The name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gemma => "gemma",
            Self::Hermes => "hermes",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::DeepSeek => "deepseek",
        }
    }

    /// The one with this name in the configuration.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|syntax| syntax.name() == name)
    }

    /// A token without which calls in this syntax are never found, and which the vocabulary lacks.
    #[must_use]
    pub fn missing(self, tokenizer: &Tokenizer) -> Option<&'static str> {
        let needed: &[_] = if self == Self::Gemma { &[GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE] } else { &[] };
        needed.iter().copied().find(|name| tokenizer.special(name).is_none())
    }

    /// What the source of a chat template tells. `shows_tools` is whether it writes declarations of tools: one that does
    /// so without any marker that is known here most likely asks for plain JSON; for one that does not, the syntax is
    /// the caller's choice, which is the most common one.
    #[must_use]
    pub fn of_template(source: &str, tokenizer: &Tokenizer, shows_tools: bool) -> Self {
        if source.contains(GEMMA_OPEN) && Self::Gemma.missing(tokenizer).is_none() {
            return Self::Gemma;
        }
        for (marker, syntax) in [
            ("<tool_call>", Self::Hermes),
            ("[TOOL_CALLS]", Self::Mistral),
            ("tool▁call▁begin", Self::DeepSeek),
            ("<|python_tag|>", Self::Llama),
        ] {
            if source.contains(marker) {
                return syntax;
            }
        }
        if shows_tools { Self::Llama } else { Self::Hermes }
    }
}

impl Serialize for Syntax {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for Syntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The tool's name, one of those that were declared.
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// How to look for calls in a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calling {
    /// How the model writes them.
    pub syntax: Syntax,
    /// Names of the tools that were declared.
    pub tools: Arc<[String]>,
    /// The reply ends with its first call.
    pub one: bool,
    /// So many tokens at the end of the prompt are the beginning of the reply: of a call that was begun for the model.
    pub begun: usize,
}
