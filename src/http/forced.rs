//! Calls that a request forces.
//!
//! A causal model is held to a grammar of calls. A model that denoises has its call begun for it: the beginning, up to the arguments, is put behind the prompt and
//! counts as the reply's. That fixes which tool is called, so one must be named, or be the only one.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::chat::ENABLE_THINKING;
use super::constrained::compile;
use super::error::ApiError;
use super::tools::{Choice, Tools};
use crate::decode::{Constraint, Format};
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
        for (place, (tool, _)) in
            self.list.iter().zip(&self.names).enumerate().filter(|(_, (_, name))| is_forced(name))
        {
            makes_objects(place, tool)?;
            forced.push(tool.clone());
        }
        if forced.is_empty() {
            return Ok(None);
        }
        let Some(template) = model.template.as_ref().filter(|_| model.kind == ModelKind::Causal) else {
            return Ok(None);
        };
        let several = !self.one && self.choice == Choice::Required;
        let text = calls::grammar(template.syntax(), &forced, several, &model.tokenizer);
        compile(model, Format::Lark(text), "tool_choice", true).await.map(Some)
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

/// Refuses a schema of other things than objects, which arguments are.
fn makes_objects(place: usize, tool: &Value) -> Result<(), ApiError> {
    let kind = &tool["function"]["parameters"]["type"];
    if kind.is_null() || kind == "object" {
        return Ok(());
    }
    let param = format!("tools[{place}].function.parameters");
    let message = format!(
        "`{param}`: found the type {kind}, expected \"object\": arguments are one, and `tool_choice` asks for a call"
    );
    Err(ApiError::field(param, message))
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
