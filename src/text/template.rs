//! Chat templates: messages to one prompt, by the Jinja source that came with the model.
//!
//! Templates are written for Python's Jinja as Hugging Face's libraries set it up, so the environment here is made
//! to behave like theirs. A message can hold text that looks like a special token. Before a template sees them,
//! such texts are broken by a mark, a Unicode noncharacter that occurs nowhere else; the tokenizer takes the marks
//! out again after it has found the special tokens. So only what the template itself writes becomes one.

mod abilities;
mod adapt;
mod marks;
mod source;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use minijinja::{Environment, UndefinedBehavior, Value as Jinja};
use serde_json::{Map, Value};

use super::calls::Syntax;
use super::limits::{self, Limited, with_large_stack};
use super::python;
use super::special::without;
use super::{TextError, Tokenizer};
use abilities::Abilities;
use marks::Marks;

/// Steps of the template engine that one rendering may take; a long conversation with tools takes ten thousands.
const FUEL: u64 = 2_000_000;

/// Deepest nesting of macros and includes.
const MAX_RECURSION: usize = 128;

/// Name under which the template engine knows the template, shown in its messages.
const NAME: &str = "chat_template";

/// The variable that switches thinking.
const ENABLE_THINKING: &str = "enable_thinking";

/// Variables that the request may not set by its own arguments, since the prompt depends on them being right.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
];

/// What a prompt is made of.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// The conversation: an array of objects with at least `role` and, but for tool calls, `content`.
    pub messages: Value,
    /// Tools that the model may call, an array as the OpenAI API takes it.
    pub tools: Option<Value>,
    /// Documents to answer from, for templates that know them.
    pub documents: Option<Value>,
    /// Whether the prompt ends with the beginning of the model's turn.
    pub add_generation_prompt: bool,
    /// More variables for the template (`chat_template_kwargs`).
    pub extra: Map<String, Value>,
}

/// A prompt as the template wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    marked: String,
    mark: char,
}

impl Rendered {
    /// The prompt's text. Special tokens of the template and the same characters in a message look alike here.
    pub fn text(&self) -> Cow<'_, str> {
        without(&self.marked, Some(self.mark))
    }

    /// The text with marks where a message's text must not be read as a special token.
    pub(super) fn marked(&self) -> &str {
        &self.marked
    }

    /// The character that marks.
    pub(super) fn mark(&self) -> char {
        self.mark
    }
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    abilities: Abilities,
    /// Keeps messages from writing special tokens.
    marks: Marks,
    /// `bos_token` and its like.
    tokens: Vec<(&'static str, String)>,
    source: String,
    /// How the model writes calls of tools, and whether they are looked for.
    syntax: Syntax,
    calls: bool,
}

impl ChatTemplate {
    /// Reads the template `source` of the model that `tokenizer` belongs to.
    ///
    /// # Errors
    /// A source that does not parse, or that is longer than any real one.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        limits::check_source(source)?;
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        python::install(&mut environment);
        limits::install(&mut environment);
        with_large_stack(|| {
            environment
                .add_template_owned(NAME, source::rewritten(source))
                .map_err(|error| TextError::TemplateSyntax { message: error.to_string() })
        })?;

        let name = |id: u32| String::from_utf8_lossy(tokenizer.text(id)).into_owned();
        let tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("unk_token", tokenizer.unk()),
            ("pad_token", tokenizer.pad()),
        ];
        let mut template = Self {
            environment,
            abilities: Abilities::default(),
            marks: Marks::new(tokenizer),
            tokens: tokens.into_iter().filter_map(|(key, id)| Some((key, name(id?)))).collect(),
            source: source.to_owned(),
            syntax: Syntax::Hermes,
            calls: true,
        };
        template.abilities = template.probe();
        template.syntax = Syntax::of_template(source, tokenizer, template.abilities.tools);
        Ok(template)
    }

    /// The template's source as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the variable `enable_thinking` makes a difference to the prompt. Templates that know another one get it
    /// under that name.
    pub fn knows_thinking(&self) -> bool {
        self.abilities.thinking.is_some()
    }

    /// How the model writes calls of tools.
    pub fn syntax(&self) -> Syntax {
        self.syntax
    }

    /// Whether tools can be offered to the model.
    pub fn calls_tools(&self) -> bool {
        self.calls
    }

    /// From now on calls are written as `syntax` says; without one, tools are not offered at all.
    pub fn set_calls(&mut self, syntax: Option<Syntax>) {
        self.calls = syntax.is_some();
        self.syntax = syntax.unwrap_or(self.syntax);
    }

    /// Writes the prompt.
    ///
    /// A template that knows no system role gets the system text at the front of the first user message; the role
    /// `developer` becomes `system` where the template does not know it; several system messages become one where
    /// the template cannot take them; text parts become one string where it takes strings only. Calls of tools are
    /// written so that they show: with empty content or none, arguments as an object or as text, one a message, under
    /// short identifiers. A template that knows no tools gets them in the system text, calls as what the assistant said,
    /// and results as what the user said.
    ///
    /// # Errors
    /// Messages of the wrong shape, and whatever the template raises or stumbles over: the request's fault, with
    /// the template's words.
    pub fn render(&self, input: &ChatInput) -> Result<Rendered, TextError> {
        let Some(messages) = input.messages.as_array() else {
            return Err(bad("`messages` must be an array of objects".to_owned()));
        };
        for (index, message) in messages.iter().enumerate() {
            if message.get("role").and_then(Value::as_str).is_none() {
                return Err(bad(format!("`messages[{index}]` must be an object with a string `role`")));
            }
        }
        if let Some(key) = input.extra.keys().find(|key| RESERVED.contains(&key.as_str())) {
            return Err(TextError::ReservedVariable { key: key.clone() });
        }
        let declared = input.tools.as_ref().and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let messages = Value::Array(self.adapt(messages, declared)?);
        let mut adapted = ChatInput { messages, ..input.clone() };
        if let (Some(name), Some(enabled)) = (self.abilities.thinking, input.extra.get(ENABLE_THINKING)) {
            adapted.extra.entry(name).or_insert_with(|| enabled.clone());
        }
        self.run(adapted)
    }

    /// Marks and renders, without changing the conversation.
    fn run(&self, input: ChatInput) -> Result<Rendered, TextError> {
        let ChatInput { mut messages, mut tools, mut documents, add_generation_prompt, extra } = input;
        let mut extra = Value::Object(extra);
        let mut values: Vec<&mut Value> = vec![&mut messages, &mut extra];
        values.extend(tools.as_mut());
        values.extend(documents.as_mut());
        let mark = self.marks.pick(&self.source, &values)?;
        for value in values.into_iter().skip(1) {
            self.marks.mark(value, mark);
        }
        self.marks.mark_messages(&mut messages, mark);
        let mut context = match extra {
            Value::Object(extra) => extra,
            _ => Map::new(),
        };
        for (key, token) in &self.tokens {
            context.insert((*key).to_owned(), Value::String(token.clone()));
        }
        context.insert("messages".to_owned(), messages);
        context.insert("tools".to_owned(), tools.unwrap_or_default());
        context.insert("documents".to_owned(), documents.unwrap_or_default());
        context.insert("add_generation_prompt".to_owned(), Value::Bool(add_generation_prompt));

        let out = with_large_stack(|| {
            let mut out = Limited::default();
            self.environment
                .get_template(NAME)
                .and_then(|template| {
                    template.render_captured_to(Jinja::from_serialize(&context), &mut out).map(drop)
                })
                .map_err(|error| TextError::Template { message: python::message(&error) })?;
            Ok(out.0)
        })?;
        let marked = String::from_utf8(out)
            .map_err(|error| TextError::Template { message: format!("wrote no UTF-8: {error}") })?;
        Ok(Rendered { marked, mark })
    }
}

fn bad(what: String) -> TextError {
    TextError::BadMessages { what }
}
