//! Calls that must be made, as grammars: what a reply may be that calls one of some tools.
//!
//! The notation is llguidance's Lark: control tokens by their ids, JSON schemas in place.

use std::fmt::Write;

use serde_json::Value;

use super::{GEMMA_CLOSE, GEMMA_OPEN, Syntax, notation};
use crate::text::Tokenizer;

/// The grammar of a reply that calls one of `tools`, or with `several` any number of them, but one at least. Tools are
/// declarations as the API takes them; the schemas of their arguments are of objects.
#[must_use]
pub fn grammar(syntax: Syntax, tools: &[Value], several: bool, tokenizer: &Tokenizer) -> String {
    let mut lark = Lark { tokenizer, text: String::new(), made: 0 };
    let calls: Vec<String> = (0..tools.len()).map(|place| format!("call{place}")).collect();
    let calls = calls.join(" | ");
    let (before, between, behind) = match syntax {
        Syntax::Gemma => (String::new(), String::new(), String::new()),
        Syntax::Hermes => (String::new(), lark.text("\n"), String::new()),
        Syntax::Llama => (String::new(), lark.text("; "), String::new()),
        Syntax::Mistral => {
            (format!("{} {}", lark.marker("[TOOL_CALLS]"), lark.text(" [")), lark.text(", "), lark.text("]"))
        }
        Syntax::DeepSeek => {
            (lark.marker("<｜tool▁calls▁begin｜>"), lark.text("\n"), lark.marker("<｜tool▁calls▁end｜>"))
        }
    };
    let more = if several { format!("({between} call)*") } else { String::new() };
    lark.rule("start", &format!("{before} call {more} {behind}"));
    lark.rule("call", &calls);
    for (place, tool) in tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
        let schema = function.get("parameters").unwrap_or(&Value::Null);
        let mut arguments = format!("%json {schema}");
        let (open, close) = match syntax {
            Syntax::Gemma => {
                // What its notation cannot be held to is written as JSON, which is read as well.
                if let Some(rule) = notation::object(&mut lark, schema) {
                    arguments = rule;
                }
                let name = lark.text(&format!("call:{name}"));
                (format!("{} {name}", lark.marker(GEMMA_OPEN)), lark.marker(GEMMA_CLOSE))
            }
            Syntax::Hermes => (
                format!(
                    "{} {}",
                    lark.marker("<tool_call>"),
                    lark.text(&format!("\n{{\"name\": {name:?}, \"arguments\": "))
                ),
                format!("{} {}", lark.text("}\n"), lark.marker("</tool_call>")),
            ),
            Syntax::Llama => (lark.text(&format!("{{\"name\": {name:?}, \"parameters\": ")), lark.text("}")),
            Syntax::Mistral => (lark.text(&format!("{{\"name\": {name:?}, \"arguments\": ")), lark.text("}")),
            Syntax::DeepSeek => {
                let [begin, sep, end] = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
                    .map(|name| lark.marker(name));
                let kind = lark.text("function");
                let name = lark.text(&format!("{name}\n```json\n"));
                (format!("{begin} {kind} {sep} {name}"), format!("{} {end}", lark.text("\n```")))
            }
        };
        lark.rule(&format!("call{place}"), &format!("{open} arguments{place} {close}"));
        lark.rule(&format!("arguments{place}"), &arguments);
    }
    if syntax == Syntax::Gemma {
        notation::rules(&mut lark);
    }
    lark.text
}

/// A grammar that is being written.
pub(super) struct Lark<'a> {
    tokenizer: &'a Tokenizer,
    text: String,
    /// Rules that were named by number.
    made: usize,
}

impl Lark<'_> {
    pub(super) fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _written = writeln!(self.text, "{name}: {}", body.trim());
    }

    /// A name that no other rule has.
    pub(super) fn name(&mut self) -> String {
        self.made += 1;
        format!("r{}", self.made)
    }

    /// A literal text.
    pub(super) fn text(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { Value::from(text).to_string() }
    }

    /// A marker: a token by its id, or what it is written with.
    pub(super) fn marker(&self, name: &str) -> String {
        self.tokenizer.special(name).map_or_else(|| self.text(name), |id| format!("<[{id}]>"))
    }

    /// What is written from here on counts only if `write` gives something.
    pub(super) fn try_to<T>(&mut self, write: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let before = self.text.len();
        let made = write(self);
        if made.is_none() {
            self.text.truncate(before);
        }
        made
    }
}
