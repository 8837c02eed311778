//! `POST /v1/chat/completions`

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

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
    let (turn, body) = json_object(request, &app).await?;
    let mut fields = Fields::new(body);
    check_model(&mut fields, &app)?;
    let messages = messages::read(fields.take("messages"))?;
    let generation = Generation::read(&mut fields, &app)?;
    let extra = fields.object("chat_template_kwargs")?.unwrap_or_default();
    log_rest(&fields);
    drop(fields);
    let model = model(&app)?;
    let input = ChatInput { messages, add_generation_prompt: true, extra, ..ChatInput::default() };
    let prompt = {
        let model = Arc::clone(&model);
        off_thread(move || {
            // Moved here, so that it lasts until the work is done even if the client leaves.
            let _turn = turn;
            let input = input;
            let template = model.template.as_ref().ok_or(TextError::NoChatTemplate)?;
            Ok(model.tokenizer.encode_prompt(&template.render(&input)?))
        })
        .await?
    };
    answer(&app, &model, Dialect::Chat, prompt, generation).await
}
