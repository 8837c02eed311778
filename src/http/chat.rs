//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};

use super::completions::{for_our_model, log_rest, model_to_generate, off_thread};
use super::door::Inside;
use super::error::ApiError;
use super::fields::{Fields, wrong};
use super::generation::{Asked, Generation};
use super::messages;
use super::reply::{Dialect, answer};
use super::tools::{Choice, Tools};
use super::turn::Turn;
use super::{App, Face};
use crate::engine::Model;
use crate::text::calls::Calling;
use crate::text::{ChatInput, ChatTemplate, TextError};

/// The template's variable that switches thinking.
pub(super) const ENABLE_THINKING: &str = "enable_thinking";

/// The levels of `reasoning_effort`, the first of which switches thinking off. Templates know on and off only.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

pub(super) async fn complete(State(face): State<Face>, request: Request) -> Result<Response, ApiError> {
    let Inside { app, turn, fields, pass: _pass } = for_our_model(request, &face).await?;
    let Prepared { model, prompt, generation } = prepare(&app, turn, fields).await?;
    answer(&app, &model, Dialect::Chat, prompt, generation).await
}

/// A conversation as the model reads it, and how to continue it.
pub(super) struct Prepared {
    pub(super) model: Arc<Model>,
    pub(super) prompt: Vec<u32>,
    pub(super) generation: Generation,
}

/// Reads the fields of a chat request, renders its messages and encodes them.
pub(super) async fn prepare(app: &App, turn: Turn, mut fields: Fields) -> Result<Prepared, ApiError> {
    let (messages, most) = (fields.take("messages"), app.server.max_messages);
    let messages = match turn.is_large() {
        true => off_thread(move || messages::read(messages, most)).await?,
        false => messages::read(messages, most)?,
    };
    let tools = Tools::read(&mut fields)?;
    let asked = Asked::read(&mut fields, app, Dialect::Chat)?;
    let mut extra = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let effort = fields.take("reasoning_effort");
    let elsewhere = "send it in `chat_template_kwargs`: {\"enable_thinking\": …}";
    fields.refuse(ENABLE_THINKING, elsewhere, |_| false)?;
    log_rest(&fields);
    drop(fields);
    let model = model_to_generate(app)?;
    let mut generation = asked.of(app, &model).await?;
    set_thinking(&model, effort, &mut extra)?;
    let calling = tools.calling(&model)?;
    let begun = tools.begun(&model, &mut extra)?;
    if tools.choice != Choice::Auto && generation.sampling.constraint.is_some() {
        let why = "a call is forced, and another form of the reply is asked for; send one of them";
        return Err(ApiError::unsupported("tool_choice", why));
    }
    if let Some(form) = tools.form(&model).await? {
        generation.sampling.constraint = Some(form);
    }
    let input = ChatInput {
        messages,
        tools: calling.as_ref().map(|_| Value::Array(tools.list)),
        add_generation_prompt: true,
        extra,
        ..ChatInput::default()
    };
    let (prompt, begun) = {
        let model = Arc::clone(&model);
        off_thread(move || {
            // Moved here, so that it lasts until the work is done even if the client leaves.
            let _turn = turn;
            let input = input;
            let template = model.template.as_ref().ok_or(TextError::NoChatTemplate)?;
            let prompt = model.tokenizer.encode_prompt(&template.render(&input)?);
            match begun {
                Some(begun) => begun.append(prompt, &model.tokenizer),
                None => Ok((prompt, 0)),
            }
        })
        .await?
    };
    generation.calls = calling.map(|calling| Calling { begun, ..calling });
    Ok(Prepared { model, prompt, generation })
}

/// Brings `reasoning_effort` into the one variable that templates know, and checks that variable.
fn set_thinking(
    model: &Model,
    effort: Option<Value>,
    extra: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    if !model.template.as_ref().is_some_and(ChatTemplate::knows_thinking) {
        return match effort {
            Some(_) => {
                Err(ApiError::unsupported("reasoning_effort", "this model cannot be told whether to think"))
            }
            None => Ok(()),
        };
    }
    let variable = match extra.get(ENABLE_THINKING) {
        None | Some(Value::Null) => None,
        Some(Value::Bool(enabled)) => Some(*enabled),
        Some(other) => {
            return Err(wrong("chat_template_kwargs.enable_thinking", other, "true or false"));
        }
    };
    let Some(effort) = effort else { return Ok(()) };
    let level = effort.as_str().and_then(|effort| EFFORTS.iter().position(|known| *known == effort));
    let Some(level) = level else {
        return Err(wrong("reasoning_effort", &effort, &format!("one of {}", EFFORTS.join(", "))));
    };
    let enabled = level > 0;
    if variable.is_some_and(|variable| variable != enabled) {
        let message =
            "`reasoning_effort` and `chat_template_kwargs.enable_thinking` differ; send one of them";
        return Err(ApiError::field("reasoning_effort", message));
    }
    extra.insert(ENABLE_THINKING.to_owned(), enabled.into());
    Ok(())
}
