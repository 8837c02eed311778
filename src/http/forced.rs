//! Calls that a request forces.
//!
//! A causal model is held to a grammar of calls. A model that denoises has its call begun for it: the beginning, up to the arguments, is put behind the prompt and
//! counts as the reply's. That fixes which tool is called, so one must be named, or be the only one.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::chat::ENABLE_THINKING;
use super::constrained::compile;
use super::error::{ApiError, UNSUPPORTED};
use super::tools::{Choice, Tools};
use crate::decode::{Constraint, Format, spaced};
use crate::engine::{Model, ModelKind};
use crate::text::calls::{self, Calling};
use crate::text::{Specials, Tokenizer};

/// The beginning of a forced call.
pub(super) struct Begun(String);

impl Tools {
    /// How to find the calls of a reply; none if there are no tools.
    pub(super) fn calling(&self, model: &Model) -> Result<Option<Calling>, ApiError> {
        if self.list.is_empty() {
            return Ok(None);
        }
        // Without a template rendering fails, which says more.
        let Some(template) = &model.template else { return Ok(None) };
        if !template.calls_tools() {
            let why =
                "tools are not offered here (`model.tool_calls` is \"off\" in the server's configuration)";
            return Err(ApiError::unsupported("tools", why));
        }
        // Who names a tool wants that call and no other.
        let one = self.one || matches!(self.choice, Choice::Named(_));
        Ok(Some(Calling { syntax: template.syntax(), tools: self.names.as_slice().into(), one, begun: 0 }))
    }

    /// What the reply of a causal model is held to, if the request forces a call.
    pub(super) async fn form(&self, model: &Arc<Model>) -> Result<Option<Constraint>, ApiError> {
        let is_forced = |name: &String| match &self.choice {
            Choice::Auto => false,
            Choice::Required => true,
            Choice::Named(named) => named == name,
        };
        let mut forced = Vec::new();
        for (place, (tool, name)) in self.list.iter().zip(&self.names).enumerate() {
            if is_forced(name) {
                forced.push(Forced::new(place, name, tool)?);
            }
        }
        if forced.is_empty() {
            return Ok(None);
        }
        let Some(template) = model.template.as_ref().filter(|_| model.kind == ModelKind::Causal) else {
            return Ok(None);
        };
        let several = !self.one && self.choice == Choice::Required;
        let tools: Vec<Value> = forced.iter().map(Forced::declared).collect();
        let text = calls::grammar(template.syntax(), &tools, several, &model.tokenizer);
        match compile(model, Format::Lark(text), "tool_choice", true).await {
            Ok(form) => Ok(Some(form)),
            Err(error) => Err(blamed(model, forced, error).await),
        }
    }

    /// The beginning of the call that the request forces, if it forces one. Thinking is switched off with it.
    pub(super) fn begun(
        &self,
        model: &Model,
        extra: &mut Map<String, Value>,
    ) -> Result<Option<Begun>, ApiError> {
        if model.kind == ModelKind::Causal {
            return Ok(None);
        }
        let name = match (&self.choice, self.names.as_slice()) {
            (Choice::Auto, _) => return Ok(None),
            (Choice::Named(name), _) | (Choice::Required, [name]) => name,
            (Choice::Required, _) => {
                let why = "\"required\" with several tools cannot be enforced on this model; name the one to call, or send \
                           \"auto\"";
                return Err(ApiError::unsupported("tool_choice", why));
            }
        };
        let Some(template) = &model.template else { return Ok(None) };
        if template.knows_thinking() {
            if extra.get(ENABLE_THINKING) == Some(&Value::Bool(true)) {
                return Err(no_thoughts());
            }
            extra.insert(ENABLE_THINKING.to_owned(), false.into());
        }
        Ok(Some(Begun(calls::begun(template.syntax(), name))))
    }
}

/// A tool that must be called, or may be instead of others that must.
struct Forced {
    /// The field with the schema of its arguments.
    param: String,
    name: String,
    /// The schema, which is of objects.
    schema: Value,
}

impl Forced {
    /// The tool that a request has at `place`. Refuses a schema of other things than objects, which arguments are.
    fn new(place: usize, name: &str, tool: &Value) -> Result<Self, ApiError> {
        let param = format!("tools[{place}].function.parameters");
        let mut schema = tool["function"]["parameters"].as_object().cloned().unwrap_or_default();
        let kind = schema.entry("type").or_insert(Value::Null);
        if kind.is_null() {
            *kind = "object".into();
        }
        if kind != "object" {
            let message = format!(
                "`{param}`: found the type {kind}, expected \"object\": arguments are one, and `tool_choice` asks for \
                 a call"
            );
            return Err(ApiError::field(param, message));
        }
        Ok(Self { param, name: name.to_owned(), schema: spaced(schema) })
    }

    fn declared(&self) -> Value {
        json!({ "function": { "name": self.name, "parameters": self.schema } })
    }
}

/// Which schema it is for which calls of these tools cannot be compiled; `error` tells of a grammar that the client never
/// wrote.
async fn blamed(model: &Arc<Model>, forced: Vec<Forced>, error: ApiError) -> ApiError {
    if error.is(UNSUPPORTED) || error.status() != StatusCode::BAD_REQUEST {
        return error;
    }
    for Forced { param, schema, .. } in forced {
        if let Err(error) = compile(model, Format::JsonSchema(schema), &param, true).await {
            return error;
        }
    }
    let message = "`tools`: calls of all that `tool_choice` allows take more than is supported together; send fewer tools, \
                   or simpler schemas";
    ApiError::field("tools", message)
}

impl Begun {
    /// The prompt with the call begun, and how many tokens that took.
    pub(super) fn append(
        self,
        mut prompt: Vec<u32>,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<u32>, usize), ApiError> {
        if let Some(channel) = tokenizer.channel() {
            let marker = prompt.iter().rev().find(|id| [channel.open, channel.close].contains(*id));
            if marker == Some(&channel.open) {
                return Err(no_thoughts());
            }
        }
        let begun = tokenizer.encode(&self.0, Specials::Parse);
        let count = begun.len();
        prompt.extend(begun);
        Ok((prompt, count))
    }
}

fn no_thoughts() -> ApiError {
    let why = "a call that is forced leaves no room for thinking on this model; switch thinking off, or send \"auto\"";
    ApiError::unsupported("tool_choice", why)
}
