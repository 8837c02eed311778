//! What a template can do, found out by giving it small conversations.

use serde_json::{Map, Value, json};

use super::{ChatInput, ChatTemplate, ENABLE_THINKING};

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
        Abilities {
            thinking,
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
