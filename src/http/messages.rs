//! The conversation of a chat request, brought into the one shape that templates get.

mod answers;

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{kind, quoted};

/// Roles of the API.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Members of a message that templates may know, besides role and content.
const KEPT: [&str; 3] = ["name", "tool_call_id", "reasoning_content"];

/// What kinds of parts are called that are no text: `image_url`, `input_audio` and so on.
const MEDIA: [&str; 4] = ["image", "audio", "video", "file"];

/// Most parts of a message's content.
const MOST_PARTS: usize = 4096;

/// Checks the messages; contents become plain strings, arguments of tool calls become objects.
pub(super) fn read(messages: Option<Value>, most: usize) -> Result<Value, ApiError> {
    let list = match messages {
        Some(Value::Array(list)) if list.len() > most => {
            return Err(too_many("messages", list.len(), most, "messages"));
        }
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) | None => {
            return Err(ApiError::field("messages", "`messages`: expected a list with at least one message"));
        }
        Some(other) => {
            let message = format!("`messages`: found {}, expected a list of messages", kind(&other));
            return Err(ApiError::field("messages", message));
        }
    };
    let list = list.into_iter().enumerate();
    let list: Result<Vec<Value>, _> = list.map(|(i, m)| message(&format!("messages[{i}]"), m)).collect();
    answers::link(list?).map(Value::Array)
}

/// The messages as the API itself writes them, for another server: arguments are JSON in a string, what tools returned has
/// no name, and thoughts are not sent back.
pub(super) fn in_the_apis_shape(mut messages: Value) -> Value {
    for message in messages.as_array_mut().into_iter().flatten() {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let arguments = &mut call["function"]["arguments"];
            if !arguments.is_string() {
                *arguments = if arguments.is_null() { "{}".into() } else { arguments.to_string().into() };
            }
        }
        if let Some(message) = message.as_object_mut() {
            message.remove("reasoning_content");
            if message.get("role").is_some_and(|role| role == "tool") {
                message.remove("name");
            }
        }
    }
    messages
}

fn message(path: &str, value: Value) -> Result<Value, ApiError> {
    let mut from = match value {
        Value::Object(map) => map,
        other => return Err(wrong(path, "", &other, "an object with `role` and `content`")),
    };
    let role = match from.remove("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role,
        Some(Value::String(role)) => {
            let message =
                format!("`{path}.role`: found {}, expected one of {}", quoted(&role), ROLES.join(", "));
            return Err(ApiError::field(format!("{path}.role"), message));
        }
        other => return Err(wrong(path, ".role", &other.unwrap_or_default(), "a string")),
    };
    let mut to = Map::new();
    to.insert("content".to_owned(), content(path, from.remove("content"))?.into());
    for name in KEPT {
        match from.remove(name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => drop(to.insert(name.to_owned(), text.into())),
            Some(other) => return Err(wrong(path, &format!(".{name}"), &other, "a string")),
        }
    }
    match from.remove("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) if role == "assistant" => {
            if !calls.is_empty() {
                let calls = calls.into_iter().enumerate();
                let calls: Result<Value, _> =
                    calls.map(|(i, call)| tool_call(&format!("{path}.tool_calls[{i}]"), call)).collect();
                to.insert("tool_calls".to_owned(), calls?);
            }
        }
        Some(other) => return Err(wrong(path, ".tool_calls", &other, "a list, on assistant messages only")),
    }
    if from.remove("function_call").is_some_and(|call| !call.is_null()) {
        let why = "is the older form; send `tool_calls`";
        return Err(ApiError::unsupported(format!("{path}.function_call"), why));
    }
    to.insert("role".to_owned(), role.into());
    let unknown: Vec<&String> = from.keys().collect();
    if !unknown.is_empty() {
        tracing::debug!(?unknown, path, "unknown members of a message have no effect");
    }
    Ok(Value::Object(to))
}

/// A string, a list of text parts, or nothing at all.
fn content(path: &str, value: Option<Value>) -> Result<String, ApiError> {
    let parts = match value {
        None | Some(Value::Null) => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) if parts.len() > MOST_PARTS => {
            return Err(too_many(&format!("{path}.content"), parts.len(), MOST_PARTS, "parts"));
        }
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong(path, ".content", &other, "a string or a list of text parts")),
    };
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let here = format!(".content[{i}]");
        let kind = match part {
            Value::String(plain) => {
                text.push_str(plain);
                continue;
            }
            Value::Object(map) => map.get("type").and_then(Value::as_str),
            other => return Err(wrong(path, &here, other, "an object with `type` and `text`")),
        };
        // A refusal is what the assistant said, too.
        let member = match kind {
            Some("text" | "input_text" | "output_text") => "text",
            Some("refusal") => "refusal",
            Some(other) => {
                let param = format!("{path}{here}.type");
                let why = if MEDIA.iter().any(|media| other.contains(media)) {
                    "this model takes text only (no vision or audio tower is loaded)"
                } else {
                    "text only"
                };
                let why = format!("{} parts are not supported, {why}", quoted(other));
                return Err(ApiError::unsupported(param, &why));
            }
            None => return Err(wrong(path, &format!("{here}.type"), &Value::Null, "a string")),
        };
        match part.get(member) {
            Some(Value::String(more)) => text.push_str(more),
            other => {
                let found = other.cloned().unwrap_or_default();
                return Err(wrong(path, &format!("{here}.{member}"), &found, "a string"));
            }
        }
    }
    Ok(text)
}

fn tool_call(path: &str, mut call: Value) -> Result<Value, ApiError> {
    if let Some(id) = call.get("id").filter(|id| !id.is_null() && !id.is_string()) {
        return Err(wrong(path, ".id", id, "a string"));
    }
    if !call.get("function").and_then(|f| f.get("name")).is_some_and(Value::is_string) {
        return Err(wrong(path, "", &call, "an object with `function.name` and `function.arguments`"));
    }
    // The API writes arguments as JSON in a string; templates expect what it says. What is no JSON stays as it is.
    let parsed =
        call["function"]["arguments"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(arguments @ Value::Object(_)) = parsed {
        call["function"]["arguments"] = arguments;
    }
    call["type"] = "function".into();
    Ok(call)
}

fn too_many(param: &str, found: usize, most: usize, what: &str) -> ApiError {
    ApiError::field(param, format!("`{param}`: found {found} {what}, expected at most {most}"))
}

fn wrong(path: &str, member: &str, found: &Value, expected: &str) -> ApiError {
    let param = format!("{path}{member}");
    let message = format!("`{param}`: found {}, expected {expected}", kind(found));
    ApiError::field(param, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn contents(messages: Value) -> Vec<String> {
        let read = read(Some(messages), 9).unwrap();
        read.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_shape_of_content_is_one_string_for_every_role() {
        for role in ROLES {
            let mut messages = json!([
                {"role": role, "content": "plain"},
                {"role": role, "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]},
                {"role": role, "content": []},
                {"role": role, "content": null},
                {"role": role},
            ]);
            if role == "tool" {
                let call = json!({"function": {"name": "f", "arguments": "{}"}});
                let called = json!({"role": "assistant", "tool_calls": vec![call; 5]});
                messages.as_array_mut().unwrap().insert(0, called);
            }
            let found = contents(messages);
            assert_eq!(found[usize::from(role == "tool")..], ["plain", "two parts", "", "", ""], "{role}");
        }
    }

    #[test]
    fn our_own_tool_call_comes_back_with_its_arguments_as_an_object() {
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        let message = json!([{"role": "assistant", "content": null, "tool_calls": [call]}]);
        let read = read(Some(message), 9).unwrap();
        assert_eq!(read[0]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(read[0]["content"], "");
    }

    #[test]
    fn another_server_gets_what_the_api_knows() {
        let call = |arguments: Value| json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let said = json!([
            {"role": "user", "content": "hi", "name": "me"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call(json!("{\"a\":1}"))]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "assistant", "content": "", "tool_calls": [call(Value::Null), call(json!("no JSON"))]},
        ]);
        let told = in_the_apis_shape(read(Some(said), 9).unwrap());
        assert_eq!(
            told,
            json!([
                {"role": "user", "content": "hi", "name": "me"},
                {"role": "assistant", "content": "", "tool_calls": [call(json!("{\"a\":1}"))]},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
                {"role": "assistant", "content": "", "tool_calls": [call(json!("{}")), call(json!("no JSON"))]},
            ])
        );
    }

    #[test]
    fn pictures_and_sounds_are_refused_in_so_many_words() {
        for kind in ["image_url", "input_image", "input_audio", "video_url", "image"] {
            let parts = json!([{"type": "text", "text": "what is this?"}, {"type": kind}]);
            let error = read(Some(json!([{"role": "user", "content": parts}])), 9).unwrap_err().to_json();
            let error = &error["error"];
            assert_eq!(error["param"], "messages[0].content[1].type");
            assert_eq!(error["code"], "unsupported_parameter");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(kind) && message.contains("takes text only"), "{message}");
        }
    }

    #[test]
    fn wrong_messages_are_named() {
        let cases = [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!("hi"), "messages"),
            (json!(["hi"]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}, {"role": "robot"}]), "messages[1].role"),
            (json!([{"role": "user", "content": 3}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "user", "name": 3}]), "messages[0].name"),
            (json!(vec![json!({"role": "user"}); 10]), "messages"),
            (json!([{"role": "user", "content": vec![""; 4097]}]), "messages[0].content"),
            (json!([{"role": "user", "tool_calls": [1]}]), "messages[0].tool_calls"),
            (json!([{"role": "assistant", "tool_calls": [1]}]), "messages[0].tool_calls[0]"),
        ];
        for (messages, param) in cases {
            let error = read(Some(messages.clone()).filter(|m| !m.is_null()), 9).unwrap_err().to_json();
            assert_eq!(error["error"]["param"], param, "{messages}");
        }
    }
}
