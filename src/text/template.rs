//! Chat templates: messages to one prompt, by the Jinja source that came with the model.
//!
//! Templates are written for Python's Jinja as Hugging Face's libraries set it up, so the environment here is made
//! to behave like theirs. A message can hold text that looks like a special token. Before a template sees them,
//! such texts are broken by a mark, a Unicode noncharacter that occurs nowhere else; the tokenizer takes the marks
//! out again after it has found the special tokens. So only what the template itself writes becomes one.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use minijinja::{Environment, UndefinedBehavior, Value as Jinja};
use serde_json::{Map, Value, json};

use super::limits::{self, Limited, with_large_stack};
use super::python;
use super::tokenizer::{Matcher, without};
use super::{TextError, Tokenizer};

/// Steps of the template engine that one rendering may take; a long conversation with tools takes ten thousands.
const FUEL: u64 = 2_000_000;

/// Deepest nesting of macros and includes.
const MAX_RECURSION: usize = 128;

/// Name under which the template engine knows the template, shown in its messages.
const NAME: &str = "chat_template";

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

/// Roles that templates compare with; never marked.
const ROLES: &[&str] = &["system", "developer", "user", "assistant", "model", "tool", "function", "ipython"];

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

/// What a template can do, found out by giving it small conversations.
#[derive(Debug, Clone, Copy, Default)]
struct Abilities {
    /// A system message at the front shows.
    system: bool,
    /// Several system messages show, wherever they are.
    several_systems: bool,
    /// The role `developer` is known.
    developer: bool,
    /// Content may be a list of parts.
    parts: bool,
    /// The variable `enable_thinking` makes a difference.
    thinking: bool,
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    abilities: Abilities,
    /// Texts of control tokens, in order.
    specials: Vec<Box<str>>,
    /// Bytes of the longest of them.
    longest: usize,
    /// Finds them.
    control: Arc<Matcher>,
    /// `bos_token` and its like.
    tokens: Vec<(&'static str, String)>,
    source: String,
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
                .add_template_owned(NAME, without_generation_blocks(source))
                .map_err(|error| TextError::TemplateSyntax { message: error.to_string() })
        })?;

        let name = |id: u32| String::from_utf8_lossy(tokenizer.text(id)).into_owned();
        let tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("unk_token", tokenizer.unk()),
            ("pad_token", tokenizer.pad()),
        ];
        let control = tokenizer.control().clone();
        let mut specials: Vec<Box<str>> = control.ids.iter().map(|&id| name(id).into_boxed_str()).collect();
        specials.sort_unstable();
        let mut template = Self {
            environment,
            abilities: Abilities::default(),
            longest: specials.iter().map(|special| special.len()).max().unwrap_or(0),
            specials,
            control,
            tokens: tokens.into_iter().filter_map(|(key, id)| Some((key, name(id?)))).collect(),
            source: source.to_owned(),
        };
        template.abilities = template.probe();
        Ok(template)
    }

    /// The template's source as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the variable `enable_thinking` makes a difference to the prompt.
    pub fn knows_thinking(&self) -> bool {
        self.abilities.thinking
    }

    /// Writes the prompt.
    ///
    /// A template that knows no system role gets the system text at the front of the first user message; the role
    /// `developer` becomes `system` where the template does not know it; several system messages become one where
    /// the template cannot take them; text parts become one string where it takes strings only.
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
            return Err(bad(format!(
                "`chat_template_kwargs.{key}` cannot be set: the server sets `{key}` itself"
            )));
        }
        let adapted = ChatInput { messages: Value::Array(self.adapt(messages)?), ..input.clone() };
        self.run(adapted)
    }

    /// Marks and renders, without changing the conversation.
    fn run(&self, input: ChatInput) -> Result<Rendered, TextError> {
        let ChatInput { mut messages, mut tools, mut documents, add_generation_prompt, extra } = input;
        let mut extra = Value::Object(extra);
        let mut values: Vec<&mut Value> = vec![&mut messages, &mut extra];
        values.extend(tools.as_mut());
        values.extend(documents.as_mut());
        let mark = self.pick_mark(&values)?;
        for value in values {
            self.mark_value(value, None, mark);
        }
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

    /// A noncharacter that occurs in none of the values and not in the template.
    fn pick_mark(&self, values: &[&mut Value]) -> Result<char, TextError> {
        let mut taken = BTreeSet::new();
        let mut note =
            |text: &str| taken.extend(text.chars().filter(|&letter| python::is_noncharacter(letter)));
        note(&self.source);
        for value in values {
            for_each_string(value, &mut note);
        }
        ('\u{fdd0}'..='\u{fdef}').find(|mark| !taken.contains(mark)).ok_or_else(|| {
            bad("the messages hold every one of the noncharacters U+FDD0 to U+FDEF: leave one of them out".to_owned())
        })
    }

    /// Marks all strings in `value`, keys of objects included.
    fn mark_value(&self, value: &mut Value, key: Option<&str>, mark: char) {
        match value {
            Value::String(text) => {
                if key == Some("role") && ROLES.contains(&text.as_str()) {
                    return;
                }
                if let Some(marked) = self.mark_text(text, mark) {
                    *text = marked;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.mark_value(item, None, mark)),
            Value::Object(fields) => {
                if fields.keys().any(|key| self.mark_text(key, mark).is_some()) {
                    let renamed = std::mem::take(fields).into_iter();
                    *fields = renamed
                        .map(|(key, field)| (self.mark_text(&key, mark).unwrap_or(key), field))
                        .collect();
                }
                fields.iter_mut().for_each(|(key, field)| self.mark_value(field, Some(key), mark));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// `text` with a mark after the first character of each special token's text in it, and of each beginning of
    /// one at its end, which the text that follows in the prompt could complete. `None` if there is none.
    fn mark_text(&self, text: &str, mark: char) -> Option<String> {
        let mut places = Vec::new();
        let after_first = |start: usize| start + text[start..].chars().next().map_or(1, char::len_utf8);
        let mut from = 0;
        // Special texts can overlap, so the search goes on right behind the first character.
        while let Some(start) = self.control.find(text, from) {
            from = after_first(start);
            places.push(from);
        }
        let tail = text.len().saturating_sub(self.longest.saturating_sub(1));
        for (start, _) in text.char_indices().rev().take_while(|&(start, _)| start >= tail) {
            let suffix = &text[start..];
            let next = self.specials.partition_point(|special| **special < *suffix);
            if self.specials.get(next).is_some_and(|special| special.starts_with(suffix)) {
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

    /// Finds out what the template can do.
    fn probe(&self) -> Abilities {
        let shows = |messages: Value, wanted: &[&str]| {
            let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
            self.run(input).is_ok_and(|rendered| {
                let text = rendered.text();
                wanted.iter().all(|wanted| text.contains(wanted))
            })
        };
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let question = message("user", "probe question");
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "probe question"}]});
        let thinking = |enabled: bool| {
            let messages = json!([question]);
            let extra = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(enabled))]);
            let input = ChatInput { messages, add_generation_prompt: true, extra, ..ChatInput::default() };
            self.run(input).ok().map(|rendered| rendered.text().into_owned())
        };
        let thinking = match (thinking(true), thinking(false)) {
            (Some(on), Some(off)) => on != off,
            _ => false,
        };
        Abilities {
            thinking,
            system: shows(
                json!([message("system", "probe one"), question]),
                &["probe one", "probe question"],
            ),
            several_systems: shows(
                json!([
                    message("system", "probe one"),
                    message("system", "probe two"),
                    question,
                    message("assistant", "probe answer"),
                    message("system", "probe three"),
                    question,
                ]),
                &["probe one", "probe two", "probe three"],
            ),
            // Templates that print any role would print this one too; only a template that names it knows it.
            developer: self.source.contains("developer")
                && shows(json!([message("developer", "probe one"), question]), &["probe one"]),
            // A template that prints the list itself shows its keys too, quoted one way or the other.
            parts: shows(json!([parts]), &["probe question"])
                && !shows(json!([parts]), &["'type'"])
                && !shows(json!([parts]), &["\"type\""]),
        }
    }

    /// The conversation as this template can take it.
    fn adapt(&self, messages: &[Value]) -> Result<Vec<Value>, TextError> {
        let mut adapted = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let mut message = message.clone();
            if !self.abilities.developer && role(&message) == "developer" {
                message["role"] = Value::from("system");
            }
            if !self.abilities.parts && message.get("content").is_some_and(Value::is_array) {
                message["content"] = Value::String(text_of(index, &message)?);
            }
            adapted.push(message);
        }
        let systems = adapted.iter().filter(|message| role(message) == "system").count();
        let leading = systems == 1 && adapted.first().is_some_and(|first| role(first) == "system");
        if systems == 0 || (leading && self.abilities.system) || (!leading && self.abilities.several_systems)
        {
            return Ok(adapted);
        }
        let mut texts = Vec::with_capacity(systems);
        let mut rest = Vec::with_capacity(adapted.len());
        for (index, message) in adapted.into_iter().enumerate() {
            if role(&message) == "system" {
                texts.push(text_of(index, &message)?);
            } else {
                rest.push(message);
            }
        }
        let system = texts.join("\n\n");
        if self.abilities.system {
            rest.insert(0, json!({"role": "system", "content": system}));
        } else if let Some(user) = rest.iter_mut().find(|message| role(message) == "user") {
            match user.get_mut("content") {
                Some(Value::String(text)) => text.insert_str(0, &format!("{system}\n\n")),
                Some(Value::Array(parts)) => {
                    parts.insert(0, json!({"type": "text", "text": format!("{system}\n\n")}));
                }
                _ => user["content"] = Value::String(system),
            }
        } else {
            rest.insert(0, json!({"role": "user", "content": system}));
        }
        Ok(rest)
    }
}

/// The role of a message that was checked to have one.
fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

/// The text of a message's content: a string, or parts that are all text.
fn text_of(index: usize, message: &Value) -> Result<String, TextError> {
    match message.get("content") {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (part, value) in parts.iter().enumerate() {
                let kind = value.get("type").and_then(Value::as_str);
                match value.get("text").and_then(Value::as_str).filter(|_| kind == Some("text")) {
                    Some(piece) => text.push_str(piece),
                    None => {
                        return Err(bad(format!(
                            "`messages[{index}].content[{part}]` is of type `{}`, the model takes text only",
                            kind.unwrap_or("?")
                        )));
                    }
                }
            }
            Ok(text)
        }
        Some(_) => Err(bad(format!("`messages[{index}].content` must be a string or an array of parts"))),
    }
}

fn bad(what: String) -> TextError {
    TextError::BadMessages { what }
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

/// The source with `generation` blocks, which only say what to train on, turned into blocks that are always taken.
fn without_generation_blocks(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        plain.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        if replacement == word {
            // Past the opening only: what looks like a tag may be text that holds a real one.
            plain.push_str("{%");
            rest = &tag[2..];
        } else {
            plain.push_str(&format!("{{%{}%}}", inside.replacen(word, replacement, 1)));
            rest = &tag[end + 2..];
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::super::testing::{CONTROL, bytes_and};
    use super::*;

    /// Prints every message as `role: content;`.
    const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}";

    /// The same without a system role.
    const NO_SYSTEM: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}\
                             {% endif %}{{ m.role }}: {{ m.content }};{% endfor %}";

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, &bytes_and(&["<s>", "</s>"])).unwrap()
    }

    fn user(content: &str) -> Value {
        json!([{"role": "user", "content": content}])
    }

    fn render(source: &str, messages: Value) -> Result<String, TextError> {
        let input = ChatInput { messages, ..ChatInput::default() };
        template(source).render(&input).map(|rendered| rendered.text().into_owned())
    }

    /// What an expression prints, with `x` among the variables.
    fn print(source: &str, x: Value) -> String {
        let extra = Map::from_iter([("x".to_owned(), x)]);
        let input = ChatInput { messages: json!([]), extra, ..ChatInput::default() };
        template(source).render(&input).unwrap().text().into_owned()
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let x = json!({"b": [1, 2.5, true, null], "a": "<é & 'x'>\n", "e": {}, "l": []});
        assert_eq!(
            print("{{ x|tojson }}", x.clone()),
            r#"{"b": [1, 2.5, true, null], "a": "<é & 'x'>\n", "e": {}, "l": []}"#
        );
        assert_eq!(
            print("{{ x|tojson(indent=2) }}", json!({"b": [1, {"c": 2}], "e": {}})),
            "{\n  \"b\": [\n    1,\n    {\n      \"c\": 2\n    }\n  ],\n  \"e\": {}\n}"
        );
        assert_eq!(print("{{ x|tojson(sort_keys=true) }}", json!({"b": 1, "a": 2})), r#"{"a": 2, "b": 1}"#);
        assert_eq!(print("{{ x|tojson(separators=(',', ':')) }}", json!({"b": [1, 2]})), r#"{"b":[1,2]}"#);
        assert_eq!(print("{{ x|tojson(ensure_ascii=true) }}", json!("é👍")), r#""\u00e9\ud83d\udc4d""#);
    }

    #[test]
    fn values_print_as_python_prints_them() {
        assert_eq!(print("{{ x }}|{{ none }}|{{ undefined_name }}", json!(true)), "True|None|");
        assert_eq!(
            print("{{ x }}", json!({"a": ["it's", "b\n", 1, null]})),
            "{'a': [\"it's\", 'b\\n', 1, None]}"
        );
    }

    #[test]
    fn whitespace_goes_as_hugging_face_sets_it_up() {
        assert_eq!(print("a\n  {% if x %}\n  b\n  {% endif %}\nc\n", json!(true)), "a\n  b\nc");
    }

    #[test]
    fn the_usual_extensions_work() {
        assert_eq!(
            print(
                "{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
                json!(0)
            ),
            "13"
        );
        assert_eq!(
            print(
                "{% set ns = namespace(n=0) %}{% for i in x %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
                json!([1, 2])
            ),
            "3"
        );
        assert_eq!(
            print(
                "{{ x.strip().split(' ')[-1].upper() }}{{ x.startswith(' a') }}{{ x[::-1]|trim }}",
                json!(" a bc ")
            ),
            "BCTruecb a"
        );
        assert_eq!(
            print("{% for k, v in x.items() %}{{ k }}={{ v }} {% endfor %}", json!({"a": 1, "b": 2})),
            "a=1 b=2 "
        );
        assert_eq!(print("{{ strftime_now('%d')|length }}", json!(0)), "2");
        assert_eq!(print("{{ bos_token }}{{ tools is none }}{{ documents }}", json!(0)), "<s>TrueNone");
    }

    #[test]
    fn generation_blocks_are_plain_text() {
        assert_eq!(print("a {%- generation -%} b{{ x }} {% endgeneration %}\nc", json!(1)), "ab1 c");
        let source = "{% raw %}{% generation2 %}{% endraw %}{{ '{%' }}{%generation%}x{%endgeneration%}{";
        assert_eq!(print(source, json!(1)), "{% generation2 %}{%x{");
    }

    #[test]
    fn failures_speak_the_words_of_the_template() {
        let error = render("{{ raise_exception('Roles must alternate!') }}", user("a")).unwrap_err();
        assert_eq!(error.to_string(), "chat template: Roles must alternate!");
        let error = render("{% for m in messages %}{{ m.content.nothing.at_all }}{% endfor %}", user("a"))
            .unwrap_err();
        assert!(error.to_string().contains("undefined"), "{error}");
        let error = render("{{ strftime_now('%Q') }}", user("a")).unwrap_err();
        assert!(error.to_string().contains("%Q"), "{error}");
        let error = ChatTemplate::new("{% for %}", &bytes_and(&[])).unwrap_err();
        assert!(
            matches!(&error, TextError::TemplateSyntax { message } if message.contains("syntax error")),
            "{error}"
        );
    }

    #[test]
    fn hostile_templates_end() {
        let loops =
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}";
        let size = "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}";
        let depth = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
        for (source, word) in [(loops, "fuel"), (size, "grew past"), (depth, "recursion")] {
            let start = Instant::now();
            let template = template(&format!("{{% if messages[0].content == 'go' %}}{source}{{% endif %}}"));
            let input = ChatInput { messages: user("go"), ..ChatInput::default() };
            let error = template.render(&input).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
            assert!(start.elapsed().as_secs() < 20, "{source}: took {:?}", start.elapsed());
        }
    }

    #[test]
    fn system_text_reaches_templates_that_know_no_system() {
        let messages = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]);
        assert_eq!(render(PLAIN, messages.clone()).unwrap(), "system: S;user: U;");
        assert_eq!(render(NO_SYSTEM, messages).unwrap(), "user: S\n\nU;");
        let ignores =
            "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }};{% endfor %}";
        let messages = json!([
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "system", "content": [{"type": "text", "text": "T"}]},
        ]);
        assert_eq!(render(ignores, messages).unwrap(), "user: S\n\nT\n\nU;");
        assert_eq!(render(NO_SYSTEM, json!([{"role": "system", "content": "S"}])).unwrap(), "user: S;");
        let parts = "{% for m in messages %}{{ 1 / (m.role != 'system')|int }}{% for p in m.content %}\
                     {{ p.text }};{% endfor %}{% endfor %}";
        let messages = json!([
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}]},
        ]);
        assert!(render(parts, messages).unwrap().contains("S\n\n;U;"));
    }

    #[test]
    fn several_system_messages_are_kept_or_merged() {
        let first_only = "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set messages = messages[1:] %}\
                          {% endif %}{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}";
        let messages = json!([
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "developer", "content": "D"},
        ]);
        assert_eq!(render(first_only, messages.clone()).unwrap(), "<S\n\nD>U;");
        assert_eq!(render(PLAIN, messages.clone()).unwrap(), "system: S;user: U;system: D;");
        let knows = format!("{{# developer #}}{PLAIN}");
        assert_eq!(render(&knows, messages).unwrap(), "system: S;user: U;developer: D;");
    }

    #[test]
    fn text_parts_become_one_string_where_the_template_takes_strings() {
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
        let concatenates = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}";
        assert_eq!(render(concatenates, parts.clone()).unwrap(), "xab");
        assert_eq!(render(PLAIN, parts.clone()).unwrap(), "user: ab;");
        let joins = "{% for m in messages %}{{ 'x' ~ m.content }}{% endfor %}";
        assert_eq!(render(joins, parts).unwrap(), "xab");
        let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
        let error = render(PLAIN, image).unwrap_err().to_string();
        assert!(error.contains("messages[0].content[0]") && error.contains("image_url"), "{error}");
    }

    #[test]
    fn messages_of_the_wrong_shape_are_refused() {
        for messages in [json!(null), json!("x"), json!([1]), json!([{"content": "x"}]), json!([{"role": 1}])]
        {
            assert!(matches!(render(PLAIN, messages), Err(TextError::BadMessages { .. })));
        }
        let extra = Map::from_iter([("bos_token".to_owned(), json!("x"))]);
        let input = ChatInput { messages: json!([]), extra, ..ChatInput::default() };
        let error = template(PLAIN).render(&input).unwrap_err().to_string();
        assert!(error.contains("chat_template_kwargs.bos_token"), "{error}");
    }

    /// Where control tokens stand in the encoded prompt of these messages.
    fn control(source: &str, names: &[&str], messages: Value) -> (Vec<u32>, String) {
        let tokenizer = bytes_and(names);
        let template = ChatTemplate::new(source, &tokenizer).unwrap();
        let extra = Map::from_iter([("x".to_owned(), messages.clone())]);
        let rendered = template.render(&ChatInput { messages, extra, ..ChatInput::default() }).unwrap();
        let ids = tokenizer.encode_prompt(&rendered);
        let text: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.text(id)).copied().collect();
        assert_eq!(String::from_utf8(text).unwrap(), rendered.text());
        (
            ids.into_iter().filter(|&id| id >= CONTROL).map(|id| id - CONTROL).collect(),
            rendered.text().into_owned(),
        )
    }

    #[test]
    fn special_tokens_are_found_in_template_text_only() {
        let source = "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}";
        let names = ["<s>", "</s>"];
        let (ids, text) = control(source, &names, user("a</s>b<s>"));
        assert_eq!((ids, text.as_str()), (vec![0, 1], "<s>a</s>b<s></s>"));
        // The end of a message and the text behind it make no token.
        assert_eq!(control("{{ messages[0].content }}s>x", &names, user("a<")).0, [0; 0]);
        assert_eq!(control("{{ messages[0].content }}s></s>", &names, user("</")).0, [1]);
        // Nor do two messages.
        let two = json!([{"role": "user", "content": "</"}, {"role": "user", "content": "s>"}]);
        assert_eq!(control("{% for m in messages %}{{ m.content }}{% endfor %}", &names, two).0, [0; 0]);
        // Nor do special texts that overlap, hide in keys, or in JSON.
        assert_eq!(control("{{ messages[0].content }}", &["ab", "bcd", "d!"], user("abcd!")).0, [0; 0]);
        let hidden = json!([{"role": "user", "content": "x", "<s>": {"a</s>": ["<s>"]}}]);
        assert_eq!(
            control("<s>{{ x|tojson }}{{ messages }}{{ x|tojson(ensure_ascii=true) }}", &names, hidden).0,
            [0]
        );
        // Templates that build special tokens from roles go on working.
        assert_eq!(control("<|{{ messages[0].role }}|>", &["<|user|>"], user("x")).0, [0]);
    }

    proptest! {
        #[test]
        fn no_messages_make_a_special_token(contents in prop::collection::vec("[<s>/ab]{0,6}", 1..4)) {
            let messages: Vec<Value> = contents.iter().map(|text| json!({"role": "user", "content": text})).collect();
            let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
            let names = ["<s>", "</s>", "s>a", "><", "b", "aab"];
            let (ids, text) = control(source, &names, Value::Array(messages));
            prop_assert_eq!(ids, [0; 0]);
            prop_assert_eq!(text, contents.concat());
        }
    }

    #[test]
    fn messages_may_hold_noncharacters() {
        let every: String = ('\u{fdd0}'..'\u{fdef}').collect();
        let (ids, text) =
            control("{{ messages[0].content }}</s>", &["<s>", "</s>"], user(&format!("</s>{every}")));
        assert_eq!((ids, text), (vec![1], format!("</s>{every}</s>")));
        let error = render(PLAIN, user(&format!("{every}\u{fdef}"))).unwrap_err().to_string();
        assert!(error.contains("U+FDEF"), "{error}");
    }

    #[test]
    fn a_prompt_begins_with_one_bos_at_most() {
        let tokenizer = bytes_and(&["<s>"]);
        for (source, ids) in [("{{ bos_token * 2 }}<s>x<s>", vec![CONTROL, 120, CONTROL]), ("x", vec![120])] {
            let rendered = ChatTemplate::new(source, &tokenizer).unwrap();
            let rendered =
                rendered.render(&ChatInput { messages: json!([]), ..ChatInput::default() }).unwrap();
            assert_eq!(tokenizer.encode_prompt(&rendered), ids);
        }
    }
}
