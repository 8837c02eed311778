//! Calls that must be made, as grammars: what a reply may be that calls one of some tools.
//!
//! The notation is llguidance's Lark: control tokens by their ids, JSON schemas in place.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::{GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, Syntax};
use crate::text::{TokenKind, Tokenizer};

/// The grammar of a reply that calls one of `tools`, which are declarations as the API takes them, or with `several` any
/// number of them, but one at least.
#[must_use]
pub fn grammar(syntax: Syntax, tools: &[Value], several: bool, tokenizer: &Tokenizer) -> String {
    let mut lark = Lark { tokenizer, text: String::new() };
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
        let anything = json!({ "type": "object" });
        let schema = function.get("parameters").unwrap_or(&anything);
        let (open, close) = match syntax {
            Syntax::Gemma => {
                let open = format!("{} {}", lark.marker(GEMMA_OPEN), lark.text(&format!("call:{name}{{")));
                let close = format!("{} {}", lark.text("}"), lark.marker(GEMMA_CLOSE));
                lark.rule(&format!("call{place}"), &format!("{open} arguments{place} {close}"));
                lark.members(&format!("arguments{place}"), schema, 0);
                continue;
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
        lark.rule(&format!("arguments{place}"), &format!("%json {}", object_schema(schema)));
    }
    if syntax == Syntax::Gemma {
        let quote = lark.marker(GEMMA_QUOTE);
        lark.rule("string", &format!("{quote} TEXT {quote}"));
        lark.rule("TEXT", "/(.|\\n)*/");
        lark.rule("number", "/-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,10})?/");
        lark.rule("integer", "/-?(0|[1-9][0-9]{0,15})/");
        lark.rule("boolean", "\"true\" | \"false\"");
        lark.rule("value", "string | number | boolean | \"null\" | list | object");
        lark.rule("list", "\"[\" (value (\",\" value)*)? \"]\"");
        lark.rule("object", "\"{\" (pair (\",\" pair)*)? \"}\"");
        lark.rule("pair", "/[A-Za-z_][A-Za-z0-9_]*/ \":\" value");
    }
    lark.text
}

/// A schema of arguments, which are an object whatever it says.
fn object_schema(schema: &Value) -> Value {
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.entry("type").or_insert_with(|| "object".into());
    schema.into()
}

struct Lark<'a> {
    tokenizer: &'a Tokenizer,
    text: String,
}

/// Deeper objects of Gemma's may hold anything.
const MAX_DEPTH: usize = 8;

impl Lark<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _written = writeln!(self.text, "{name}: {}", body.trim());
    }

    /// A literal text.
    fn text(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { Value::from(text).to_string() }
    }

    /// A marker: a control token by its id, or what it is written with.
    fn marker(&self, name: &str) -> String {
        match self.tokenizer.special(name) {
            Some(id) if self.tokenizer.kind(id) == Some(TokenKind::Control) => format!("<[{id}]>"),
            _ => self.text(name),
        }
    }

    /// What stands between the braces of an object as Gemma writes it: keys in order, those that are required always.
    fn members(&mut self, rule: &str, schema: &Value, depth: usize) {
        let none = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        if properties.is_empty() || depth > MAX_DEPTH {
            self.rule(rule, "(pair (\",\" pair)*)?");
            return;
        }
        let required =
            schema.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let mut keys: Vec<&String> = properties.keys().collect();
        keys.sort_by_key(|key| key.to_lowercase());
        // `…f3` is what may stand from the third key on if nothing stands before it, `…r3` if something does.
        for (place, key) in keys.iter().enumerate() {
            let value = format!("{rule}v{place}");
            self.value(&value, &properties[*key], depth);
            let pair = format!("{} {value}", self.text(&format!("{key}:")));
            let next = place + 1;
            let optional = !required.iter().any(|name| name == key.as_str());
            let [mut first, mut later] =
                [format!("{pair} {rule}r{next}"), format!("\",\" {pair} {rule}r{next}")];
            if optional {
                first += &format!(" | {rule}f{next}");
                later += &format!(" | {rule}r{next}");
            }
            self.rule(&format!("{rule}f{place}"), &first);
            self.rule(&format!("{rule}r{place}"), &later);
        }
        let end = keys.len();
        self.rule(&format!("{rule}f{end}"), "\"\"");
        self.rule(&format!("{rule}r{end}"), "\"\"");
        self.rule(rule, &format!("{rule}f0"));
    }

    /// A value of the type that its schema names, where that is plain.
    fn value(&mut self, rule: &str, schema: &Value, depth: usize) {
        let listed = schema.get("enum").and_then(Value::as_array).filter(|list| !list.is_empty());
        if let Some(list) = listed {
            let quote = self.marker(GEMMA_QUOTE);
            let one = |value: &Value| match value {
                Value::String(text) => format!("{quote} {} {quote}", self.text(text)),
                other => self.text(&other.to_string()),
            };
            let body = list.iter().map(one).collect::<Vec<_>>().join(" | ");
            self.rule(rule, &body);
            return;
        }
        match schema.get("type").and_then(Value::as_str) {
            Some(kind @ ("string" | "number" | "integer" | "boolean")) => self.rule(rule, kind),
            Some("null") => self.rule(rule, "\"null\""),
            Some("array") => {
                let item = format!("{rule}i");
                match schema.get("items").filter(|_| depth < MAX_DEPTH) {
                    Some(items) => self.value(&item, items, depth + 1),
                    None => self.rule(&item, "value"),
                }
                self.rule(rule, &format!("\"[\" ({item} (\",\" {item})*)? \"]\""));
            }
            Some("object") => {
                self.rule(rule, &format!("\"{{\" {rule}o \"}}\""));
                self.members(&format!("{rule}o"), schema, depth + 1);
            }
            _ => self.rule(rule, "value"),
        }
    }
}
