//! A conversation brought into the shape that a template can take.

use serde_json::{Value, json};

use super::{ChatTemplate, TextError, bad};

impl ChatTemplate {
    /// The conversation as this template can take it.
    pub(super) fn adapt(&self, messages: &[Value]) -> Result<Vec<Value>, TextError> {
        let mut adapted = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let mut message = message.clone();
            if !self.abilities.developer && role(&message) == "developer" {
                message["role"] = Value::from("system");
            }
            if !self.abilities.parts && message.get("content").is_some_and(Value::is_array) {
                message["content"] = Value::String(text_of(index, &message)?);
            }
            self.abilities.calls.write(&mut message);
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
