//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;

use super::App;
use super::body::json_object;
use super::completions::{check_model, log_rest, model, off_thread};
use super::error::ApiError;
use super::fields::Fields;
use super::generation::Generation;
use super::messages;
use super::reply::{Dialect, answer};
use crate::text::{ChatInput, TextError};

pub(super) async fn complete(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = json_object(request, app.server.max_body, app.server.body_timeout).await?;
    let mut fields = Fields::new(body);
    check_model(&mut fields, &app)?;
    let messages = messages::read(fields.take("messages"))?;
    refuse_unsupported(&mut fields)?;
    let generation = Generation::read(&mut fields, &app)?;
    let extra = fields.object("chat_template_kwargs")?.unwrap_or_default();
    log_rest(&fields);
    let model = model(&app)?;
    let input = ChatInput { messages, add_generation_prompt: true, extra, ..ChatInput::default() };
    let prompt = {
        let model = Arc::clone(&model);
        off_thread(move || {
            let template = model.template.as_ref().ok_or(TextError::NoChatTemplate)?;
            Ok(model.tokenizer.encode_prompt(&template.render(&input)?))
        })
        .await?
    };
    answer(&app, &model, Dialect::Chat, prompt, generation).await
}

/// Fields of the chat API that are not here, unless they ask for nothing.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let no_tools = "tool calls are not supported";
    fields.refuse("tools", no_tools, empty)?;
    fields.refuse("functions", no_tools, empty)?;
    fields.refuse("tool_choice", no_tools, |v| v == "none" || v == "auto")?;
    fields.refuse("function_call", no_tools, |v| v == "none" || v == "auto")?;
    fields.refuse("parallel_tool_calls", no_tools, Value::is_boolean)?;
    fields.refuse("response_format", "only {\"type\": \"text\"} is supported", |v| {
        v.get("type").is_some_and(|kind| kind == "text")
    })?;
    let text_only = |v: &Value| v.as_array().is_some_and(|list| list.iter().all(|m| m == "text"));
    fields.refuse("modalities", "only [\"text\"] is supported", text_only)?;
    fields.refuse("audio", "audio is not supported", |_| false)?;
    fields.refuse("prediction", "predicted output is not supported", |_| false)?;
    fields.refuse("reasoning_effort", "reasoning effort is not supported", |_| false)?;
    fields.refuse("verbosity", "verbosity is not supported", |_| false)?;
    fields.refuse("web_search_options", "web search is not supported", |_| false)
}
