//! A request for a message in the words of chat completions.

use serde_json::{Map, Value, json};

use super::blocks;
use crate::http::App;
use crate::http::error::ApiError;
use crate::http::fields::{Fields, kind, quoted, wrong};
use crate::http::generation::SHARED;
use crate::text::ChatTemplate;

/// Other fields that mean the same in both.
const SAME: [&str; 1] = ["max_tokens"];

/// What chat completions call what is called otherwise here.
const NAMES: [(&str, &str); 10] = [
    (".function.parameters", ".input_schema"),
    (".function.name", ".name"),
    (".function.description", ".description"),
    ("`stop`", "`stop_sequences`"),
    ("`parallel_tool_calls`", "`tool_choice.disable_parallel_tool_use`"),
    ("`reasoning_effort`", "`thinking`"),
    (".tool_call_id", ".tool_use_id"),
    ("the `id` of a call in an assistant message before it", "the `id` of a `tool_use` block before it"),
    ("`response_format", "`output_config.format"),
    ("\"required\"", "\"any\""),
];

/// An error about a translated request, in the words of the request itself, whose messages come from `places`.
pub(super) fn in_our_words(error: ApiError, places: &[String]) -> ApiError {
    error.placed("messages", places).reworded(&NAMES)
}

/// Brings the fields into the words of chat completions. Also tells from where in the request each message comes.
pub(super) fn translate(mut fields: Fields, app: &App) -> Result<(Fields, Vec<String>), ApiError> {
    let mut chat = Map::new();
    let mut messages = blocks::system(fields.take("system"))?;
    messages.extend(blocks::messages(fields.take("messages"))?);
    let most = app.server.max_messages;
    if messages.len() > most {
        let message = format!(
            "`messages`: found {} messages, each result of a tool counted as one, expected at most {most}",
            messages.len()
        );
        return Err(ApiError::field("messages", message));
    }
    let (places, messages): (Vec<String>, Vec<Value>) = messages.into_iter().unzip();
    chat.insert("messages".to_owned(), messages.into());
    for name in SHARED.into_iter().chain(SAME) {
        if let Some(value) = fields.take(name) {
            chat.insert(name.to_owned(), value);
        }
    }
    if let Some(stops) = fields.take("stop_sequences") {
        if !stops.is_array() {
            return Err(wrong("stop_sequences", &stops, "a list of strings"));
        }
        chat.insert("stop".to_owned(), stops);
    }
    if let Some(tools) = fields.take("tools") {
        chat.insert("tools".to_owned(), declarations(tools)?);
    }
    choice(fields.object("tool_choice")?, &mut chat)?;
    if let Some(effort) = thinking(fields.object("thinking")?, &chat, app)? {
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    output(fields.object("output_config")?, &mut chat)?;
    let unsupported = "nothing of the kind is here; leave it out";
    for name in ["container", "mcp_servers", "context_management"] {
        let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        fields.refuse(name, unsupported, empty)?;
    }
    for no_effect in ["metadata", "service_tier", "cache_control", "inference_geo"] {
        fields.take(no_effect);
    }
    crate::http::completions::log_rest(&fields);
    Ok((Fields::new(chat), places))
}

fn declarations(tools: Value) -> Result<Value, ApiError> {
    let Value::Array(list) = tools else { return Err(wrong("tools", &tools, "a list of tools")) };
    let one = |(place, tool): (usize, Value)| {
        let param = format!("tools[{place}]");
        let Value::Object(mut tool) = tool else {
            let message = format!(
                "`{param}`: found {}, expected an object with `name` and `input_schema`",
                kind(&tool)
            );
            return Err(ApiError::field(param, message));
        };
        match tool.get("type").and_then(Value::as_str) {
            None | Some("custom") => {}
            Some(other) => {
                let why =
                    format!("{} runs at Anthropic's; only tools of your own are supported", quoted(other));
                return Err(ApiError::unsupported(format!("{param}.type"), &why));
            }
        }
        let mut function = Map::new();
        for (from, to) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
            if let Some(value) = tool.remove(from) {
                function.insert(to.to_owned(), value);
            }
        }
        Ok(json!({ "type": "function", "function": function }))
    };
    list.into_iter().enumerate().map(one).collect()
}

fn choice(choice: Option<Map<String, Value>>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(choice) = choice else { return Ok(()) };
    let mut choice = Fields::new(choice);
    let told = |error: ApiError| error.within("tool_choice");
    if let Some(one) = choice.boolean("disable_parallel_tool_use").map_err(told)? {
        chat.insert("parallel_tool_calls".to_owned(), (!one).into());
    }
    let kind = choice.string("type").map_err(told)?;
    let choice: Value = match kind.as_deref() {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => match choice.string("name").map_err(told)? {
            Some(name) => json!({ "type": "function", "function": { "name": name } }),
            None => {
                let message = "`tool_choice.name` is missing; expected the name of a tool";
                return Err(ApiError::field("tool_choice.name", message));
            }
        },
        other => {
            let found = other.map_or("nothing".to_owned(), quoted);
            let message = format!("`tool_choice.type`: found {found}, expected auto, any, tool or none");
            return Err(ApiError::field("tool_choice.type", message));
        }
    };
    chat.insert("tool_choice".to_owned(), choice);
    Ok(())
}

/// The effort of thinking. As with Anthropic's models, there is none unless it is asked for; what a model does that cannot
/// be told is its own matter, unless thoughts are wanted.
fn thinking(
    thinking: Option<Map<String, Value>>,
    chat: &Map<String, Value>,
    app: &App,
) -> Result<Option<&'static str>, ApiError> {
    let model = app.engine.model();
    let template = model.as_ref().and_then(|model| model.template.as_ref());
    let knows = template.is_some_and(ChatTemplate::knows_thinking);
    let Some(thinking) = thinking else {
        // Who uses the template's own variables has said it there.
        let said = chat.contains_key("chat_template_kwargs");
        return Ok((knows && !said).then_some("none"));
    };
    let mut thinking = Fields::new(thinking);
    let told = |error: ApiError| error.within("thinking");
    let budget = thinking.integer("budget_tokens", 1, i64::MAX).map_err(told)?;
    let kind = thinking.string("type").map_err(told)?;
    match kind.as_deref() {
        Some("enabled" | "adaptive") => {
            if budget.is_some() {
                tracing::debug!("`thinking.budget_tokens` has no effect");
            }
            match knows {
                true => Ok(Some("high")),
                // What adapts may come to nothing.
                false if kind.as_deref() == Some("adaptive") => Ok(None),
                false => {
                    let why = "this model cannot be told whether to think";
                    Err(ApiError::unsupported("thinking", why))
                }
            }
        }
        Some("disabled") => Ok(knows.then_some("none")),
        other => {
            let found = other.map_or("nothing".to_owned(), quoted);
            let message = format!("`thinking.type`: found {found}, expected enabled, adaptive or disabled");
            Err(ApiError::field("thinking.type", message))
        }
    }
}

/// `output_config`: a schema for the reply; the effort has no effect.
fn output(config: Option<Map<String, Value>>, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(config) = config else { return Ok(()) };
    let mut config = Fields::new(config);
    config.take("effort");
    let Some(format) = config.object("format").map_err(|error| error.within("output_config"))? else {
        return Ok(());
    };
    let schema = match (format.get("type").and_then(Value::as_str), format.get("schema")) {
        (Some("json_schema"), Some(schema)) => schema.clone(),
        _ => {
            let message = "`output_config.format`: expected {\"type\": \"json_schema\", \"schema\": …}";
            return Err(ApiError::field("output_config.format", message));
        }
    };
    chat.insert("response_format".to_owned(), json!({ "type": "json_schema", "schema": schema }));
    Ok(())
}
