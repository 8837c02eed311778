//! A request for a response in the words of chat completions.

use serde_json::{Map, Value, json};

use super::items;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, kind, quoted, wrong};
use crate::http::generation::SHARED;

/// Other fields that mean the same in both.
const SAME: [&str; 3] = ["parallel_tool_calls", "stop", "modalities"];

/// Fields that have no effect.
const NO_EFFECT: [&str; 9] = [
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "store",
    "include",
    "stream_options",
    "truncation",
];

/// What chat completions call what is called otherwise here.
const NAMES: [(&str, &str); 8] = [
    (".function.", "."),
    (".tool_call_id", ".call_id"),
    ("the `id` of a call in an assistant message before it", "the `call_id` of a `function_call` before it"),
    ("`messages`", "`input`"),
    ("`max_completion_tokens`", "`max_output_tokens`"),
    ("`reasoning_effort`", "`reasoning.effort`"),
    ("`response_format", "`text.format"),
    ("\"function\": {\"name\": …}", "\"name\": …"),
];

/// An error about a translated request, in the words of the request itself, whose messages come from `places`.
pub(super) fn in_our_words(error: ApiError, places: &[String]) -> ApiError {
    error.placed("messages", places).reworded(&NAMES)
}

/// What a response repeats of its request.
pub(super) struct Repeated(pub Map<String, Value>);

/// Fields that a response repeats, and what they are where the request does not say.
fn repeated(fields: &Fields) -> Repeated {
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("temperature", Value::Null),
        ("text", json!({ "format": { "type": "text" } })),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("truncation", "disabled".into()),
        ("user", Value::Null),
    ];
    let member =
        |(name, default): (&str, Value)| (name.to_owned(), fields.peek(name).cloned().unwrap_or(default));
    let mut members: Map<String, Value> = defaults.map(member).into_iter().collect();
    let effort = fields.peek("reasoning").and_then(|reasoning| reasoning.get("effort")).cloned();
    members.insert("reasoning".to_owned(), json!({ "effort": effort, "summary": null }));
    for (name, value) in
        [("background", json!(false)), ("store", json!(false)), ("previous_response_id", Value::Null)]
    {
        members.insert(name.to_owned(), value);
    }
    Repeated(members)
}

/// A request in the words of chat completions.
pub(super) struct Translated {
    pub fields: Fields,
    /// Where in the request each message comes from.
    pub places: Vec<String>,
    pub repeated: Repeated,
}

/// Brings the fields into the words of chat completions.
pub(super) fn translate(mut fields: Fields) -> Result<Translated, ApiError> {
    let stateless = "nothing is kept between requests here; send the whole conversation as `input`";
    for name in ["previous_response_id", "conversation"] {
        fields.refuse(name, stateless, |_| false)?;
    }
    fields.refuse("background", "responses are made while the client waits", |value| *value == false)?;
    fields
        .refuse("prompt", "stored prompts are not supported; send `instructions` and `input`", |_| false)?;
    fields.refuse("context_management", "inputs are not made shorter", |value| {
        value.as_array().is_some_and(Vec::is_empty)
    })?;
    fields.refuse("moderation", "nothing here judges texts", |_| false)?;
    fields.refuse("max_tool_calls", "tools are called by the client, who can count", |_| false)?;
    fields.refuse("top_logprobs", "log-probabilities are not supported here", |value| {
        value.as_f64() == Some(0.0)
    })?;
    fields.refuse("truncation", "inputs are not cut; only \"disabled\" is supported", |value| {
        value == "disabled"
    })?;
    let repeated = repeated(&fields);
    let mut chat = Map::new();
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(("instructions".to_owned(), json!({ "role": "system", "content": instructions })));
    }
    messages.extend(items::messages(fields.take("input"))?);
    let (places, messages): (Vec<String>, Vec<Value>) = messages.into_iter().unzip();
    chat.insert("messages".to_owned(), messages.into());
    for name in SHARED.into_iter().chain(SAME) {
        if let Some(value) = fields.take(name) {
            chat.insert(name.to_owned(), value);
        }
    }
    if let Some(most) = fields.take("max_output_tokens") {
        chat.insert("max_completion_tokens".to_owned(), most);
    }
    if let Some(tools) = fields.take("tools") {
        chat.insert("tools".to_owned(), declarations(tools)?);
    }
    if let Some(choice) = fields.take("tool_choice") {
        chat.insert("tool_choice".to_owned(), nested(choice));
    }
    if let Some(reasoning) = fields.object("reasoning")? {
        let mut reasoning = Fields::new(reasoning);
        if let Some(effort) = reasoning.take("effort") {
            chat.insert("reasoning_effort".to_owned(), effort);
        }
    }
    if let Some(text) = fields.object("text")? {
        let mut text = Fields::new(text);
        if let Some(format) = text.object("format").map_err(|error| error.within("text"))? {
            let named = ["schema", "json_schema"].iter().any(|name| format.contains_key(*name));
            if !named && format.get("type").is_some_and(|kind| kind == "json_schema") {
                return Err(wrong("text.format.schema", &Value::Null, "an object with a JSON schema"));
            }
            chat.insert("response_format".to_owned(), format.into());
        }
        let medium = |value: &Value| value == "medium";
        text.refuse("verbosity", "only \"medium\" is supported", medium)
            .map_err(|error| error.within("text"))?;
    }
    if let Some(metadata) = fields.take("metadata").filter(|metadata| !metadata.is_object()) {
        return Err(wrong("metadata", &metadata, "an object"));
    }
    for name in NO_EFFECT {
        fields.take(name);
    }
    crate::http::completions::log_rest(&fields);
    Ok(Translated { fields: Fields::new(chat), places, repeated })
}

fn declarations(tools: Value) -> Result<Value, ApiError> {
    let Value::Array(list) = tools else { return Err(wrong("tools", &tools, "a list of tools")) };
    let one = |(place, tool): (usize, Value)| {
        let param = format!("tools[{place}]");
        if !tool.is_object() {
            return Err(wrong(&param, &tool, "an object with `type` and `name`"));
        }
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => Ok(nested(tool)),
            Some(other) => {
                let why = format!("{} tools are not supported, only functions are", quoted(other));
                Err(ApiError::unsupported(format!("{param}.type"), &why))
            }
            None => {
                let message = format!("`{param}.type`: found {}, expected \"function\"", kind(&Value::Null));
                Err(ApiError::field(format!("{param}.type"), message))
            }
        }
    };
    list.into_iter().enumerate().map(one).collect()
}

/// `{"type": "function", …}` with what belongs to the function one level deeper, as chat completions have it.
fn nested(value: Value) -> Value {
    match value {
        Value::Object(mut function)
            if function.get("type").is_some_and(|kind| kind == "function")
                && !function.contains_key("function") =>
        {
            function.remove("type");
            json!({ "type": "function", "function": function })
        }
        other => other,
    }
}
