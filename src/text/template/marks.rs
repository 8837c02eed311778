//! Marks that keep what messages hold from being read as special tokens.
//!
//! A mark stands behind the first character of each special token's text. The markers of the thinking channel are no
//! exception, but in what the assistant has said: there they are what the model wrote, and templates look for them.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{TextError, bad};
use crate::text::special::Matcher;
use crate::text::{Tokenizer, python};

/// Roles that templates compare with; never marked.
const ROLES: &[&str] = &["system", "developer", "user", "assistant", "model", "tool", "function", "ipython"];

/// Roles whose messages the model wrote.
const SPOKEN: &[&str] = &["assistant", "model"];

/// Whose text it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Anyone,
    Model,
}

/// Special tokens by their texts.
#[derive(Debug)]
pub(super) struct Marks {
    control: Arc<Matcher>,
    /// Texts of control tokens, in order.
    all: Names,
    /// The same without the markers of the thinking channel.
    without_channel: Names,
    /// The markers of the thinking channel.
    channel: Vec<u32>,
}

#[derive(Debug)]
struct Names {
    sorted: Vec<Box<str>>,
    /// Bytes of the longest.
    longest: usize,
}

impl Names {
    fn new(names: impl Iterator<Item = String>) -> Self {
        let mut sorted: Vec<Box<str>> = names.map(String::into_boxed_str).collect();
        sorted.sort_unstable();
        Self { longest: sorted.iter().map(|name| name.len()).max().unwrap_or(0), sorted }
    }
}

impl Marks {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let control = Arc::clone(tokenizer.control());
        let channel = tokenizer.channel().map_or(Vec::new(), |channel| vec![channel.open, channel.close]);
        let name = |&id: &u32| String::from_utf8_lossy(tokenizer.text(id)).into_owned();
        let all = Names::new(control.ids.iter().map(name));
        let without_channel = Names::new(control.ids.iter().filter(|id| !channel.contains(id)).map(name));
        Self { all, without_channel, channel, control }
    }

    /// A noncharacter that occurs in none of the values and not in the template's `source`.
    ///
    /// # Errors
    /// There is none.
    pub fn pick(&self, source: &str, values: &[&mut Value]) -> Result<char, TextError> {
        let mut taken = BTreeSet::new();
        let mut note =
            |text: &str| taken.extend(text.chars().filter(|&letter| python::is_noncharacter(letter)));
        note(source);
        for value in values {
            for_each_string(value, &mut note);
        }
        ('\u{fdd0}'..='\u{fdef}').find(|mark| !taken.contains(mark)).ok_or_else(|| {
            bad("the messages hold every one of the noncharacters U+FDD0 to U+FDEF: leave one of them out".to_owned())
        })
    }

    /// Marks all strings in `messages`.
    pub fn mark_messages(&self, messages: &mut Value, mark: char) {
        for message in messages.as_array_mut().into_iter().flatten() {
            let spoken =
                message.get("role").and_then(Value::as_str).is_some_and(|role| SPOKEN.contains(&role));
            let writer = if spoken { Writer::Model } else { Writer::Anyone };
            self.mark_value(message, None, writer, mark);
        }
    }

    /// Marks all strings in `value`, keys of objects included.
    pub fn mark(&self, value: &mut Value, mark: char) {
        self.mark_value(value, None, Writer::Anyone, mark);
    }

    fn mark_value(&self, value: &mut Value, key: Option<&str>, writer: Writer, mark: char) {
        match value {
            Value::String(text) => {
                if key == Some("role") && ROLES.contains(&text.as_str()) {
                    return;
                }
                if let Some(marked) = self.mark_text(text, writer, mark) {
                    *text = marked;
                }
            }
            Value::Array(items) => {
                items.iter_mut().for_each(|item| self.mark_value(item, None, writer, mark));
            }
            Value::Object(fields) => {
                let marked = |key: &String| self.mark_text(key, Writer::Anyone, mark);
                if fields.keys().any(|key| marked(key).is_some()) {
                    let renamed = std::mem::take(fields).into_iter();
                    *fields =
                        renamed
                            .map(|(key, field)| (marked(&key).unwrap_or(key), field))
                            .collect::<Map<String, Value>>();
                }
                fields.iter_mut().for_each(|(key, field)| self.mark_value(field, Some(key), writer, mark));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// `text` with a mark after the first character of each special token's text in it, and of each beginning of
    /// one at its end, which the text that follows in the prompt could complete. `None` if there is none.
    fn mark_text(&self, text: &str, writer: Writer, mark: char) -> Option<String> {
        let names = if writer == Writer::Model { &self.without_channel } else { &self.all };
        let mut places = Vec::new();
        let after_first = |start: usize| start + text[start..].chars().next().map_or(1, char::len_utf8);
        let mut from = 0;
        // Special texts can overlap, so the search goes on right behind the first character.
        while let Some((start, id)) = self.control.find(text, from) {
            from = after_first(start);
            if writer == Writer::Anyone || !self.channel.contains(&id) {
                places.push(from);
            }
        }
        let tail = text.len().saturating_sub(names.longest.saturating_sub(1));
        for (start, _) in text.char_indices().rev().take_while(|&(start, _)| start >= tail) {
            let suffix = &text[start..];
            let next = names.sorted.partition_point(|special| **special < *suffix);
            if names.sorted.get(next).is_some_and(|special| special.starts_with(suffix)) {
                places.push(after_first(start));
            }
        }
        if places.is_empty() {
            return None;
        }
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut at = 0;
        for place in places {
            marked.push_str(&text[at..place]);
            marked.push(mark);
            at = place;
        }
        marked.push_str(&text[at..]);
        Some(marked)
    }
}

/// Hands out every string in `value`, keys of objects included.
fn for_each_string(value: &Value, note: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => note(text),
        Value::Array(items) => items.iter().for_each(|item| for_each_string(item, note)),
        Value::Object(fields) => {
            for (key, field) in fields {
                note(key);
                for_each_string(field, note);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
