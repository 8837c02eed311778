//! Messages made of blocks, as messages of chat completions.

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{kind, quoted};

/// A block, and where it stands.
type Block = (String, Map<String, Value>);

/// A message, and the part of the request that it comes from.
type Placed = (String, Value);

/// The system text, as messages.
pub(super) fn system(value: Option<Value>) -> Result<Vec<Placed>, ApiError> {
    match value {
        None => Ok(Vec::new()),
        Some(value) => {
            let message = json!({ "role": "system", "content": texts("system", value)? });
            Ok(vec![("system".to_owned(), message)])
        }
    }
}

/// The conversation.
pub(super) fn messages(value: Option<Value>) -> Result<Vec<Placed>, ApiError> {
    let expected = "a list with at least one message";
    let list = match value {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(fault("messages", "found none, expected at least one")),
        other => return Err(wrong("messages", &other.unwrap_or_default(), expected)),
    };
    let last = list.len() - 1;
    let mut messages = Vec::with_capacity(list.len());
    for (place, message) in list.into_iter().enumerate() {
        let path = format!("messages[{place}]");
        let Value::Object(mut message) = message else {
            return Err(wrong(&path, &message, "an object with `role` and `content`"));
        };
        let content = message.remove("content").unwrap_or_default();
        match message.get("role").and_then(Value::as_str) {
            Some("user") => user(&path, content, &mut messages)?,
            Some("assistant") if place == last => {
                let why = "a reply cannot be begun for the model; let the conversation end with a message of the user's";
                return Err(ApiError::unsupported(path, why));
            }
            Some("assistant") => {
                let message = assistant(&path, content)?;
                messages.push((path, message));
            }
            // Some clients put what the system says in between.
            Some("system") => {
                let text = texts(&format!("{path}.content"), content)?;
                messages.push((path, json!({ "role": "system", "content": text })));
            }
            Some(other) => {
                return Err(fault(
                    &format!("{path}.role"),
                    &format!("found {}, expected user or assistant", quoted(other)),
                ));
            }
            None => return Err(wrong(&format!("{path}.role"), &Value::Null, "a string")),
        }
    }
    Ok(messages)
}

/// What the user says and what tools returned, in the order in which they stand.
fn user(path: &str, content: Value, messages: &mut Vec<Placed>) -> Result<(), ApiError> {
    let text_of = |said: String| (path.to_owned(), json!({ "role": "user", "content": said }));
    let mut said: Option<String> = None;
    let blocks = blocks(path, content)?;
    if blocks.is_empty() {
        return Err(fault(&format!("{path}.content"), "found no blocks, expected at least one"));
    }
    for (place, block) in blocks {
        let kind = block.get("type").and_then(Value::as_str);
        match kind {
            Some("text") => said.get_or_insert_default().push_str(&text(&place, &block, "text")?),
            Some("tool_result") => {
                messages.extend(said.take().map(text_of));
                let id = text(&place, &block, "tool_use_id")?;
                let content = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(content) => texts(&format!("{place}.content"), content.clone())?,
                };
                let message = json!({ "role": "tool", "tool_call_id": id, "content": content });
                messages.push((place, message));
            }
            Some(other @ ("tool_use" | "thinking" | "redacted_thinking")) => {
                return Err(misplaced(&place, other, "an assistant's"));
            }
            other => return Err(unsupported(&place, other)),
        }
    }
    messages.extend(said.map(text_of));
    Ok(())
}

/// What the model said, thought and called.
fn assistant(path: &str, content: Value) -> Result<Value, ApiError> {
    let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for (place, block) in blocks(path, content)? {
        match block.get("type").and_then(Value::as_str) {
            Some("text") => said.push_str(&text(&place, &block, "text")?),
            Some("thinking") => thought.push_str(&text(&place, &block, "thinking")?),
            // Nobody here can read it.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let (id, name) = (text(&place, &block, "id")?, text(&place, &block, "name")?);
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                if !input.is_object() {
                    return Err(wrong(&format!("{place}.input"), &input, "an object"));
                }
                let function = json!({ "name": name, "arguments": input });
                calls.push(json!({ "id": id, "type": "function", "function": function }));
            }
            Some(other @ "tool_result") => return Err(misplaced(&place, other, "a user's")),
            other => return Err(unsupported(&place, other)),
        }
    }
    let mut message = json!({ "role": "assistant", "content": said });
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

/// The blocks of a content with their paths; a text alone is one.
fn blocks(path: &str, content: Value) -> Result<Vec<Block>, ApiError> {
    let path = format!("{path}.content");
    let list = match content {
        Value::String(text) => vec![json!({ "type": "text", "text": text })],
        Value::Array(list) => list,
        other => return Err(wrong(&path, &other, "a string or a list of blocks")),
    };
    let block = |(place, block): (usize, Value)| {
        let path = format!("{path}[{place}]");
        match block {
            Value::Object(block) => Ok((path, block)),
            other => Err(wrong(&path, &other, "an object with `type`")),
        }
    };
    list.into_iter().enumerate().map(block).collect()
}

/// A text, or blocks of text only.
fn texts(path: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(list) => {
            let mut all = Vec::with_capacity(list.len());
            for (place, block) in list.into_iter().enumerate() {
                let path = format!("{path}[{place}]");
                let Value::Object(block) = block else {
                    return Err(wrong(&path, &block, "an object with `type`"));
                };
                match block.get("type").and_then(Value::as_str) {
                    Some("text") => all.push(text(&path, &block, "text")?),
                    other => return Err(unsupported(&path, other)),
                }
            }
            Ok(all.join("\n"))
        }
        other => Err(wrong(path, &other, "a string or a list of blocks of text")),
    }
}

fn text(path: &str, block: &Map<String, Value>, member: &str) -> Result<String, ApiError> {
    match block.get(member) {
        Some(Value::String(text)) => Ok(text.clone()),
        other => Err(wrong(&format!("{path}.{member}"), other.unwrap_or(&Value::Null), "a string")),
    }
}

fn unsupported(path: &str, kind: Option<&str>) -> ApiError {
    let param = format!("{path}.type");
    match kind {
        Some(kind) => {
            let why = format!("{} blocks are not supported here; this model takes text only", quoted(kind));
            ApiError::unsupported(param, &why)
        }
        None => wrong(&param, &Value::Null, "a string"),
    }
}

/// A block that stands in messages of another role only.
fn misplaced(path: &str, kind: &str, whose: &str) -> ApiError {
    fault(&format!("{path}.type"), &format!("found {}, which stands in {whose} message only", quoted(kind)))
}

fn wrong(param: &str, found: &Value, expected: &str) -> ApiError {
    fault(param, &format!("found {}, expected {expected}", kind(found)))
}

fn fault(param: &str, what: &str) -> ApiError {
    ApiError::field(param, format!("`{param}`: {what}"))
}
