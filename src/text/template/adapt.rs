//! A conversation brought into the shape that a template can take.

use serde_json::{Value, json};

use super::{ChatTemplate, TextError, bad};
use crate::text::calls;

impl ChatTemplate {
    /// The conversation as this template can take it, with declarations of `tools` if it writes none itself.
    pub(super) fn adapt(&self, messages: &[Value], tools: &[Value]) -> Result<Vec<Value>, TextError> {
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
        let mut adapted = self.adapt_calls(adapted);
        if !tools.is_empty() && !self.abilities.tools {
            let own = adapted.iter().take_while(|message| ["system", "developer"].contains(&role(message)));
            let (place, text) = (own.count(), calls::declared(self.syntax(), tools, !self.abilities.results));
            adapted.insert(place, json!({"role": "system", "content": text}));
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

impl ChatTemplate {
    /// Calls and what they returned, as this template can take them: as text where it knows none.
    fn adapt_calls(&self, messages: Vec<Value>) -> Vec<Value> {
        let Some(form) = self.abilities.calls.filter(|_| self.abilities.results) else {
            return self.without_calls(messages);
        };
        let mut adapted = if form.single { one_by_one(messages) } else { messages };
        adapted.iter_mut().for_each(|message| form.write(message));
        adapted
    }

    /// Calls as what the assistant said, and what they returned as what the user said.
    fn without_calls(&self, messages: Vec<Value>) -> Vec<Value> {
        let mut adapted: Vec<Value> = Vec::with_capacity(messages.len());
        // Results that stand together are one message, which goes on with what the user said next.
        let (mut results, mut user) = (Vec::new(), None);
        for mut message in messages {
            if role(&message) == "tool" {
                results.push(content(&message));
                continue;
            }
            if !results.is_empty() {
                let text = calls::results(results.iter().map(String::as_str));
                adapted.push(json!({"role": "user", "content": text}));
                results.clear();
                user = Some(adapted.len() - 1);
            }
            let text = message.get("content").is_some_and(Value::is_string);
            if let Some(place) = user.take().filter(|_| text && role(&message) == "user") {
                let text = format!("{}\n\n{}", content(&adapted[place]), content(&message));
                adapted[place]["content"] = text.into();
                continue;
            }
            if let Some(Value::Array(made)) = message.get_mut("tool_calls").map(Value::take) {
                let written = made.iter().map(|call| {
                    let name = call.pointer("/function/name").and_then(Value::as_str).unwrap_or_default();
                    let none = json!({});
                    calls::call(self.syntax(), name, call.pointer("/function/arguments").unwrap_or(&none))
                });
                let said = Some(content(&message)).filter(|said| !said.is_empty());
                let parts: Vec<String> = said.into_iter().chain(written).collect();
                message["content"] = parts.join("\n").into();
            }
            if let Some(fields) = message.as_object_mut() {
                fields.remove("tool_calls");
            }
            adapted.push(message);
        }
        if !results.is_empty() {
            let text = calls::results(results.iter().map(String::as_str));
            adapted.push(json!({"role": "user", "content": text}));
        }
        adapted
    }
}

/// Messages with one call each, what it returned behind it.
fn one_by_one(messages: Vec<Value>) -> Vec<Value> {
    let mut adapted = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        let several = message.get("tool_calls").and_then(Value::as_array).is_some_and(|made| made.len() > 1);
        let Some(Value::Array(made)) = message.get_mut("tool_calls").filter(|_| several).map(Value::take)
        else {
            adapted.push(message);
            continue;
        };
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|next| role(next) == "tool") {
            results.push(result);
        }
        for call in made {
            let result = results.iter().position(|result| result.get("tool_call_id") == call.get("id"));
            message["tool_calls"] = json!([call]);
            adapted.push(message.clone());
            message["content"] = "".into();
            adapted.extend(result.map(|place| results.remove(place)));
        }
        adapted.append(&mut results);
    }
    adapted
}

/// The text of a message's content, whatever else may be in it.
fn content(message: &Value) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)).collect()
        }
        _ => String::new(),
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
