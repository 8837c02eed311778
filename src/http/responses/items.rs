//! Input items, as messages of chat completions.

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{kind, quoted};

/// A message, and the part of the request that it comes from.
type Placed = (String, Value);

/// The conversation: a text is what the user says.
pub(super) fn messages(input: Option<Value>) -> Result<Vec<Placed>, ApiError> {
    let expected = "a string or a list with at least one item";
    let list = match input {
        Some(Value::String(text)) => {
            return Ok(vec![("input".to_owned(), json!({ "role": "user", "content": text }))]);
        }
        Some(Value::Array(list)) if !list.is_empty() => list,
        other => return Err(wrong("input", &other.unwrap_or_default(), expected)),
    };
    let mut messages = Messages::default();
    for (place, item) in list.into_iter().enumerate() {
        let path = format!("input[{place}]");
        match item {
            Value::Object(item) => messages.take(&path, item)?,
            other => return Err(wrong(&path, &other, "an object")),
        }
    }
    messages.assistant_ends();
    Ok(messages.list)
}

/// Messages so far. Items of the assistant's that stand together are one message.
#[derive(Default)]
struct Messages {
    list: Vec<Placed>,
    /// The last item of the assistant's.
    place: String,
    said: Option<String>,
    thought: String,
    calls: Vec<Value>,
}

impl Messages {
    fn take(&mut self, path: &str, item: Map<String, Value>) -> Result<(), ApiError> {
        match item.get("type").and_then(Value::as_str).unwrap_or("message") {
            "message" => self.message(path, &item),
            "function_call" => {
                let (id, name) = (text(path, &item, "call_id")?, text(path, &item, "name")?);
                let function = json!({ "name": name, "arguments": text(path, &item, "arguments")? });
                path.clone_into(&mut self.place);
                self.calls.push(json!({ "id": id, "type": "function", "function": function }));
                Ok(())
            }
            "function_call_output" => {
                self.assistant_ends();
                let id = text(path, &item, "call_id")?;
                let content = parts(&format!("{path}.output"), item.get("output"))?;
                let message = json!({ "role": "tool", "tool_call_id": id, "content": content });
                self.list.push((path.to_owned(), message));
                Ok(())
            }
            "reasoning" => {
                if !self.calls.is_empty() {
                    self.assistant_ends();
                }
                // What was thought in full is better than what was told of it.
                let full =
                    item.get("content").filter(|content| content.as_array().is_some_and(|c| !c.is_empty()));
                let (member, told) = match full {
                    Some(content) => ("content", Some(content)),
                    None => ("summary", item.get("summary")),
                };
                self.thought.push_str(&parts(&format!("{path}.{member}"), told)?);
                Ok(())
            }
            other => {
                let why = format!("{} items are not supported", quoted(other));
                Err(ApiError::unsupported(format!("{path}.type"), &why))
            }
        }
    }

    fn message(&mut self, path: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let content = parts(&format!("{path}.content"), item.get("content"))?;
        match item.get("role").and_then(Value::as_str) {
            Some("assistant") => {
                if self.said.is_some() || !self.calls.is_empty() {
                    self.assistant_ends();
                }
                path.clone_into(&mut self.place);
                self.said = Some(content);
            }
            Some(role @ ("user" | "system" | "developer")) => {
                self.assistant_ends();
                self.list.push((path.to_owned(), json!({ "role": role, "content": content })));
            }
            Some(other) => {
                let param = format!("{path}.role");
                let message = format!(
                    "`{param}`: found {}, expected user, assistant, system or developer",
                    quoted(other)
                );
                return Err(ApiError::field(param, message));
            }
            None => return Err(wrong(&format!("{path}.role"), &Value::Null, "a string")),
        }
        Ok(())
    }

    /// What the assistant said, thought and called becomes one message.
    fn assistant_ends(&mut self) {
        let (said, thought) = (self.said.take(), std::mem::take(&mut self.thought));
        let calls = std::mem::take(&mut self.calls);
        if said.is_none() && calls.is_empty() {
            return;
        }
        let mut message = json!({ "role": "assistant", "content": said.unwrap_or_default() });
        if !thought.is_empty() {
            message["reasoning_content"] = thought.into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        self.list.push((std::mem::take(&mut self.place), message));
    }
}

/// A text, or parts of text only.
fn parts(path: &str, content: Option<&Value>) -> Result<String, ApiError> {
    let list = match content {
        None | Some(Value::Null) => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong(path, other, "a string or a list of text parts")),
    };
    let mut all = String::new();
    for (place, part) in list.iter().enumerate() {
        let path = format!("{path}[{place}]");
        let Some(part) = part.as_object() else { return Err(wrong(&path, part, "an object with `type`")) };
        let member = match part.get("type").and_then(Value::as_str) {
            Some("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                let why = format!("{} parts are not supported, this model takes text only", quoted(other));
                return Err(ApiError::unsupported(format!("{path}.type"), &why));
            }
            None => return Err(wrong(&format!("{path}.type"), &Value::Null, "a string")),
        };
        all.push_str(&text(&path, part, member)?);
    }
    Ok(all)
}

fn text(path: &str, item: &Map<String, Value>, member: &str) -> Result<String, ApiError> {
    match item.get(member) {
        Some(Value::String(text)) => Ok(text.clone()),
        other => Err(wrong(&format!("{path}.{member}"), other.unwrap_or(&Value::Null), "a string")),
    }
}

fn wrong(param: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::field(param, format!("`{param}`: found {}, expected {expected}", kind(found)))
}
