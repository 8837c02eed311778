//! A response, whole or as events.

use serde_json::{Value, json};

use super::request::Repeated;
use crate::engine::Usage;
use crate::http::calls::call_id;
use crate::http::error::ApiError;
use crate::http::telling::{Begun, Block, Ended, Teller, event};
use crate::http::unix_time;
use crate::text::calls::Call;

/// Tells a response.
pub(super) struct Reply {
    begun: Begun,
    /// The model's name.
    name: String,
    created: u64,
    repeated: Repeated,
    /// Items that are done.
    output: Vec<Value>,
    /// The block whose item is open, with its text so far.
    open: Option<Block>,
    calls: usize,
    /// Number of the next event.
    sequence: usize,
}

impl Reply {
    pub(super) fn new(begun: Begun, name: String, repeated: Repeated) -> Self {
        let created = unix_time();
        Self { begun, name, created, repeated, output: Vec::new(), open: None, calls: 0, sequence: 0 }
    }

    fn object(&self, status: &str, ended: Option<&Ended>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut response = json!({
            "id": self.begun.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": (status == "completed").then(unix_time),
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "model": self.name,
            "output": self.output,
            "usage": ended.map(|ended| usage(ended.usage)),
        });
        for (name, value) in &self.repeated.0 {
            response[name] = value.clone();
        }
        response
    }

    /// An item of the output. Text and arguments are left out while it is in progress.
    fn item(&self, block: &Block, status: &str) -> Value {
        let id = |prefix: &str| call_id(prefix, &self.begun.id, 0, self.output.len());
        let done = status != "in_progress";
        match block {
            Block::Thought(text) => {
                let summary = if done { json!([summary(text)]) } else { json!([]) };
                json!({ "id": id("rs"), "type": "reasoning", "summary": summary, "status": status })
            }
            Block::Said(text) => {
                let content = if done { json!([said(text)]) } else { json!([]) };
                json!({ "id": id("msg"), "type": "message", "role": "assistant", "status": status, "content": content })
            }
            Block::Called(Call { name, arguments }) => json!({
                "id": id("fc"),
                "type": "function_call",
                "call_id": call_id("call", &self.begun.id, 1, self.calls),
                "name": name,
                "arguments": if done { arguments.as_str() } else { "" },
                "status": status,
            }),
        }
    }

    /// An event of the item that is open, or of the response.
    fn event(&mut self, name: &str, members: Value) -> String {
        let mut data = json!({ "type": name, "sequence_number": self.sequence });
        self.sequence += 1;
        if let (Value::Object(data), Value::Object(members)) = (&mut data, members) {
            data.extend(members);
        }
        event(name, &data)
    }

    /// An event about the text of the item that is open.
    fn part_event(&mut self, name: &str, members: Value) -> String {
        let (item, index) = match &self.open {
            Some(block) => (self.item(block, "in_progress")["id"].take(), self.output.len()),
            None => (Value::Null, self.output.len()),
        };
        let mut about = json!({ "item_id": item, "output_index": index });
        match &self.open {
            Some(Block::Thought(_)) => about["summary_index"] = 0.into(),
            Some(Block::Said(_)) => about["content_index"] = 0.into(),
            _ => {}
        }
        if let (Value::Object(about), Value::Object(members)) = (&mut about, members) {
            about.extend(members);
        }
        self.event(name, about)
    }

    /// The item that is open is done.
    fn done(&mut self, item: Value) {
        self.calls += usize::from(item["type"] == "function_call");
        self.output.push(item);
    }
}

fn summary(text: &str) -> Value {
    json!({ "type": "summary_text", "text": text })
}

fn said(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn status(ended: &Ended) -> &'static str {
    if ended.reason == "length" { "incomplete" } else { "completed" }
}

fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.reasoning_tokens },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl Teller for Reply {
    fn whole(&mut self, blocks: Vec<Block>, ended: &Ended) -> Value {
        let last = blocks.len().saturating_sub(1);
        for (place, block) in blocks.iter().enumerate() {
            let cut = place == last && matches!(block, Block::Said(_));
            let item = self.item(block, if cut { status(ended) } else { "completed" });
            self.done(item);
        }
        self.object(status(ended), Some(ended))
    }

    fn begin(&mut self) -> String {
        let response = self.object("in_progress", None);
        self.event("response.created", json!({ "response": response }))
            + &self.event("response.in_progress", json!({ "response": response }))
    }

    fn open(&mut self, block: &Block) -> String {
        let item = self.item(block, "in_progress");
        // Arguments come as text, too.
        self.open = Some(match block {
            Block::Called(call) => Block::Called(Call { name: call.name.clone(), arguments: String::new() }),
            block => block.clone(),
        });
        let added = json!({ "output_index": self.output.len(), "item": item });
        let frames = self.event("response.output_item.added", added);
        let part = match block {
            Block::Thought(_) => ("response.reasoning_summary_part.added", summary("")),
            Block::Said(_) => ("response.content_part.added", said("")),
            Block::Called(_) => return frames,
        };
        frames + &self.part_event(part.0, json!({ "part": part.1 }))
    }

    fn more(&mut self, text: &str) -> String {
        let mut members = json!({ "delta": text });
        let name = match &mut self.open {
            Some(Block::Thought(so_far)) => {
                so_far.push_str(text);
                "response.reasoning_summary_text.delta"
            }
            Some(Block::Called(call)) => {
                call.arguments.push_str(text);
                "response.function_call_arguments.delta"
            }
            Some(Block::Said(so_far)) => {
                so_far.push_str(text);
                members["logprobs"] = json!([]);
                "response.output_text.delta"
            }
            None => return String::new(),
        };
        self.part_event(name, members)
    }

    fn close(&mut self) -> String {
        let Some(block) = self.open.clone() else { return String::new() };
        let mut frames = match &block {
            Block::Thought(text) => {
                self.part_event("response.reasoning_summary_text.done", json!({ "text": text }))
                    + &self
                        .part_event("response.reasoning_summary_part.done", json!({ "part": summary(text) }))
            }
            Block::Said(text) => {
                self.part_event("response.output_text.done", json!({ "text": text, "logprobs": [] }))
                    + &self.part_event("response.content_part.done", json!({ "part": said(text) }))
            }
            Block::Called(Call { name, arguments }) => {
                let members = json!({ "name": name, "arguments": arguments });
                self.part_event("response.function_call_arguments.done", members)
            }
        };
        self.open = None;
        let item = self.item(&block, "completed");
        let done = json!({ "output_index": self.output.len(), "item": item });
        frames += &self.event("response.output_item.done", done);
        self.done(item);
        frames
    }

    fn end(&mut self, ended: &Ended) -> String {
        let status = status(ended);
        // A message that was cut is known as such only now.
        if let Some(last) = self.output.last_mut().filter(|last| last["type"] == "message") {
            last["status"] = status.into();
        }
        let response = self.object(status, Some(ended));
        self.event(&format!("response.{status}"), json!({ "response": response }))
    }

    fn fail(&mut self, error: &ApiError) -> String {
        let mut response = self.object("failed", None);
        response["error"] = json!({ "code": "server_error", "message": error.message() });
        self.event("response.failed", json!({ "response": response }))
    }
}
