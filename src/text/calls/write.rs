//! Calls as text: for templates that know no tools, and to begin a call for a model.

use serde_json::Value;

use super::{GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE, Syntax};
use crate::text::python;

/// What tells a model of tools whose template does not; with `results`, how [`results`] come back, too.
#[must_use]
pub fn declared(syntax: Syntax, tools: &[Value], results: bool) -> String {
    let example = call(syntax, "NAME", &Value::from("{…}"));
    let list: Vec<String> =
        tools.iter().map(|tool| python::dumps(tool.get("function").unwrap_or(tool))).collect();
    let back = match results {
        true => "\nWhat it returns comes back between <tool_response> and </tool_response>.",
        false => "",
    };
    format!(
        "These functions can be called, each with arguments as its JSON schema says:\n<tools>\n{}\n</tools>\n\
         To call one, write nothing but its name and its arguments like this, once for each call:\n{example}{back}",
        list.join("\n")
    )
}

/// A call as a model of this syntax would write it. `arguments` are an object, or text that is written as it is.
#[must_use]
pub fn call(syntax: Syntax, name: &str, arguments: &Value) -> String {
    let text = match (syntax, arguments) {
        (_, Value::String(text)) => text.clone(),
        (Syntax::Gemma, Value::Object(members)) => {
            let mut text = String::new();
            object(members, &mut text);
            text
        }
        (_, other) => python::dumps(other),
    };
    let end = match syntax {
        Syntax::Gemma => {
            let text = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or(&text);
            return format!("{}{text}}}{GEMMA_CLOSE}", begun(syntax, name));
        }
        Syntax::Hermes => "}\n</tool_call>",
        Syntax::Llama => "}",
        Syntax::Mistral => "}]",
        Syntax::DeepSeek => "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    };
    format!("{}{text}{end}", begun(syntax, name))
}

/// The beginning of a call, up to where its arguments stand.
#[must_use]
pub fn begun(syntax: Syntax, name: &str) -> String {
    let quoted = Value::from(name);
    match syntax {
        Syntax::Gemma => format!("{GEMMA_OPEN}call:{name}{{"),
        Syntax::Hermes => format!("<tool_call>\n{{\"name\": {quoted}, \"arguments\": "),
        Syntax::Llama => format!("{{\"name\": {quoted}, \"parameters\": "),
        Syntax::Mistral => format!("[TOOL_CALLS] [{{\"name\": {quoted}, \"arguments\": "),
        Syntax::DeepSeek => {
            format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n")
        }
    }
}

/// What tools returned, as the text of one message.
#[must_use]
pub fn results<'t>(texts: impl IntoIterator<Item = &'t str>) -> String {
    let blocks: Vec<String> =
        texts.into_iter().map(|text| format!("<tool_response>\n{text}\n</tool_response>")).collect();
    blocks.join("\n")
}

/// A value as Gemma writes it.
fn gemma(value: &Value, out: &mut String) {
    match value {
        Value::String(text) => out.extend([GEMMA_QUOTE, text, GEMMA_QUOTE]),
        Value::Array(items) => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    out.push(',');
                }
                gemma(item, out);
            }
            out.push(']');
        }
        Value::Object(members) => object(members, out),
        Value::Null | Value::Bool(_) | Value::Number(_) => out.push_str(&value.to_string()),
    }
}

fn object(members: &serde_json::Map<String, Value>, out: &mut String) {
    out.push('{');
    for (place, (key, member)) in members.iter().enumerate() {
        if place > 0 {
            out.push(',');
        }
        out.push_str(key);
        out.push(':');
        gemma(member, out);
    }
    out.push('}');
}
