//! What a template can do, found out by giving it small conversations.

use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate, ENABLE_THINKING};
use crate::text::python;

/// What a template can do, found out by giving it small conversations.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Abilities {
    /// A system message at the front shows.
    pub system: bool,
    /// Several system messages show, wherever they are.
    pub several_systems: bool,
    /// The role `developer` is known.
    pub developer: bool,
    /// Content may be a list of parts.
    pub parts: bool,
    /// The variable that switches thinking: `enable_thinking`, or what the template calls it.
    pub thinking: Option<&'static str>,
    /// How calls of tools must be written to show.
    pub calls: Calls,
}

/// How a message with calls of tools is written where the assistant says nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Calls {
    /// The content is none, not an empty text.
    pub no_content: bool,
    /// Arguments are JSON in a text, not an object.
    pub text: bool,
}

impl Calls {
    /// In the order of preference.
    const ALL: [Calls; 4] = [
        Calls { no_content: false, text: false },
        Calls { no_content: false, text: true },
        Calls { no_content: true, text: false },
        Calls { no_content: true, text: true },
    ];

    /// Writes a message of the assistant's so.
    pub fn write(self, message: &mut Value) {
        let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else { return };
        if calls.is_empty() {
            return;
        }
        for arguments in calls.iter_mut().filter_map(|call| call.pointer_mut("/function/arguments")) {
            if self.text && arguments.is_object() {
                *arguments = Value::String(python::dumps(arguments));
            }
        }
        if self.no_content && message.get("content").is_some_and(|content| content == "") {
            message["content"] = Value::Null;
        }
    }
}

impl ChatTemplate {
    /// Finds out what the template can do.
    pub(super) fn probe(&self) -> Abilities {
        let shows = |messages: Value, wanted: &[&str]| {
            let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
            self.run(input).is_ok_and(|rendered| {
                let text = rendered.text();
                wanted.iter().all(|wanted| text.contains(wanted))
            })
        };
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let question = message("user", "probe question");
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "probe question"}]});
        let prompt = |name: &str, enabled: bool| {
            let messages = json!([question]);
            let extra = Map::from_iter([(name.to_owned(), Value::Bool(enabled))]);
            let input = ChatInput { messages, add_generation_prompt: true, extra, ..ChatInput::default() };
            self.run(input).ok().map(|rendered| rendered.text().into_owned())
        };
        // DeepSeek's own name for it is the second.
        let thinking = [ENABLE_THINKING, "thinking"].into_iter().find(|name| {
            self.source.contains(name)
                && prompt(name, true).is_some_and(|on| prompt(name, false).is_some_and(|off| on != off))
        });
        let calls = Calls::ALL.into_iter().find(|calls| {
            let function = json!({"name": "probe_call", "arguments": {"probe_key": "probe value"}});
            let call = json!({"id": "probe1234", "type": "function", "function": function});
            let mut called = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            calls.write(&mut called);
            let result = json!({"role": "tool", "content": "{}", "tool_call_id": "probe1234"});
            let messages = json!([question, called, result]);
            // Text that is written as JSON once more shows its quotes so.
            let twice = "\\\"probe_key";
            shows(messages.clone(), &["probe_call", "probe_key", "probe value"]) && !shows(messages, &[twice])
        });
        Abilities {
            thinking,
            calls: calls.unwrap_or_default(),
            system: shows(
                json!([message("system", "probe one"), question]),
                &["probe one", "probe question"],
            ),
            several_systems: shows(
                json!([
                    message("system", "probe one"),
                    message("system", "probe two"),
                    question,
                    message("assistant", "probe answer"),
                    message("system", "probe three"),
                    question,
                ]),
                &["probe one", "probe two", "probe three"],
            ),
            // Templates that print any role would print this one too; only a template that names it knows it.
            developer: self.source.contains("developer")
                && shows(json!([message("developer", "probe one"), question]), &["probe one"]),
            // A template that prints the list itself shows its keys too, quoted one way or the other.
            parts: shows(json!([parts]), &["probe question"])
                && !shows(json!([parts]), &["'type'"])
                && !shows(json!([parts]), &["\"type\""]),
        }
    }
}
