//! What a template can do, found out by giving it small conversations.

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

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
    /// How calls of tools must be written to show; none if they never do, nor do their results.
    pub calls: Option<Calls>,
    /// What tools return shows.
    pub results: bool,
    /// Declarations of tools show.
    pub tools: bool,
}

/// How a message with calls of tools is written where the assistant says nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Calls {
    /// The content is none, not an empty text.
    pub no_content: bool,
    /// Arguments are JSON in a text, not an object.
    pub text: bool,
    /// A message has one call only.
    pub single: bool,
    /// Identifiers have nine letters, all of them letters or digits.
    pub short_ids: bool,
}

/// Letters of a short identifier.
const SHORT: usize = 9;

impl Calls {
    /// In the order of preference.
    const ALL: [Calls; 4] = [
        Calls { no_content: false, text: false, single: false, short_ids: false },
        Calls { no_content: false, text: true, single: false, short_ids: false },
        Calls { no_content: true, text: false, single: false, short_ids: false },
        Calls { no_content: true, text: true, single: false, short_ids: false },
    ];

    /// Writes a message of the assistant's so, or what answers its calls.
    pub fn write(self, message: &mut Value) {
        if self.short_ids {
            shorten(message.get_mut("tool_call_id"));
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            calls.into_iter().flatten().for_each(|call| shorten(call.get_mut("id")));
        }
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

/// Makes an identifier short; the same one always becomes the same.
fn shorten(id: Option<&mut Value>) {
    let Some(Value::String(id)) = id else { return };
    if id.len() != SHORT || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
        let letter = |byte: &u8| char::from(LETTERS[usize::from(*byte) % LETTERS.len()]);
        *id = Sha256::digest(id.as_bytes()).iter().take(SHORT).map(letter).collect();
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
        let function = json!({"name": "probe_call", "arguments": {"probe_key": "probe value"}});
        let other = json!({"name": "probe_other", "arguments": {}});
        let call = |id: &str, function: &Value| json!({"id": id, "type": "function", "function": function});
        // A conversation with these calls, written so, and what was returned.
        let called = |calls: Calls, made: &[Value]| {
            let mut messages = vec![question.clone()];
            messages.push(json!({"role": "assistant", "content": "", "tool_calls": made}));
            for (place, call) in made.iter().enumerate() {
                let content = format!("probe result {place}");
                messages.push(json!({"role": "tool", "content": content, "tool_call_id": call["id"]}));
            }
            messages.iter_mut().for_each(|message| calls.write(message));
            Value::Array(messages)
        };
        let one = [call("probe1234", &function)];
        let shown = ["probe_call", "probe_key", "probe value"];
        let calls = Calls::ALL.into_iter().find(|calls| {
            let messages = called(*calls, &one);
            // Text that is written as JSON once more shows its quotes so.
            let twice = "\\\"probe_key";
            shows(messages.clone(), &shown) && !shows(messages, &[twice])
        });
        let calls = calls.map(|calls| {
            let two = [call("probe1234", &function), call("probe5678", &other)];
            Calls {
                single: !shows(called(calls, &two), &["probe_call", "probe_other"]),
                short_ids: !shows(called(calls, &[call("call_probe_12345678", &function)]), &shown),
                ..calls
            }
        });
        let results = calls.is_some_and(|calls| shows(called(calls, &one), &["probe result 0"]));
        let tool = json!({"type": "function", "function": {
            "name": "probe_tool",
            "description": "probe tool",
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
        }});
        let declares = ChatInput {
            messages: json!([question]),
            tools: Some(json!([tool])),
            add_generation_prompt: true,
            ..ChatInput::default()
        };
        let tools = self.run(declares).is_ok_and(|rendered| rendered.text().contains("probe_tool"));
        Abilities {
            thinking,
            calls,
            results,
            tools,
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
