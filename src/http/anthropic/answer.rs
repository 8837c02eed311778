//! A message, whole or as events.

use serde_json::{Value, json};

use super::errors::shape;
use crate::engine::Usage;
use crate::http::calls::call_id;
use crate::http::error::ApiError;
use crate::http::telling::{Begun, Block, Ended, Teller, event};

/// Tells a message.
pub(super) struct Message {
    begun: Begun,
    /// The model's name.
    name: String,
    /// Blocks that were opened.
    blocks: usize,
    /// The name that the text of the open block has.
    delta: (&'static str, &'static str),
    calls: usize,
}

impl Message {
    pub(super) fn new(begun: Begun, name: String) -> Self {
        Self { begun, name, blocks: 0, delta: TEXT, calls: 0 }
    }

    fn object(&self, content: Vec<Value>, reason: Value, stop: Value, usage: Value) -> Value {
        json!({
            "id": self.begun.id,
            "type": "message",
            "role": "assistant",
            "model": self.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        })
    }

    fn block(&mut self, block: &Block, whole: bool) -> Value {
        match block {
            Block::Thought(text) => json!({ "type": "thinking", "thinking": text, "signature": "" }),
            Block::Said(text) => json!({ "type": "text", "text": text }),
            Block::Called(call) => {
                let id = call_id("toolu", &self.begun.id, 0, self.calls);
                self.calls += 1;
                let input = if whole { serde_json::from_str(&call.arguments).ok() } else { None };
                let input: Value = input.unwrap_or_else(|| json!({}));
                json!({ "type": "tool_use", "id": id, "name": call.name, "input": input })
            }
        }
    }
}

const TEXT: (&str, &str) = ("text_delta", "text");

fn reason(ended: &Ended) -> &'static str {
    match ended.reason {
        "tool_calls" => "tool_use",
        "length" => "max_tokens",
        _ if ended.stop.is_some() => "stop_sequence",
        _ => "end_turn",
    }
}

/// The stop sequence that is why the message ended.
fn stop(ended: &Ended) -> Option<&str> {
    ended.stop.as_deref().filter(|_| reason(ended) == "stop_sequence")
}

/// What was read from the cache is not counted as input there.
fn usage(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}

impl Teller for Message {
    fn whole(&mut self, blocks: Vec<Block>, ended: &Ended) -> Value {
        let content = blocks.iter().map(|block| self.block(block, true)).collect();
        self.object(content, reason(ended).into(), stop(ended).into(), usage(ended.usage))
    }

    fn begin(&mut self) -> String {
        let so_far = Usage { prompt_tokens: self.begun.prompt_tokens, ..Usage::default() };
        let message = self.object(Vec::new(), Value::Null, Value::Null, usage(so_far));
        event("message_start", &json!({ "type": "message_start", "message": message })) + &self.ping()
    }

    fn open(&mut self, block: &Block) -> String {
        self.delta = match block {
            Block::Thought(_) => ("thinking_delta", "thinking"),
            Block::Said(_) => TEXT,
            Block::Called(_) => ("input_json_delta", "partial_json"),
        };
        let block = self.block(block, false);
        let data = json!({ "type": "content_block_start", "index": self.blocks, "content_block": block });
        self.blocks += 1;
        event("content_block_start", &data)
    }

    fn more(&mut self, text: &str) -> String {
        let (kind, member) = self.delta;
        let delta = json!({ "type": kind, member: text });
        let index = self.blocks.saturating_sub(1);
        event(
            "content_block_delta",
            &json!({ "type": "content_block_delta", "index": index, "delta": delta }),
        )
    }

    fn close(&mut self) -> String {
        let index = self.blocks.saturating_sub(1);
        event("content_block_stop", &json!({ "type": "content_block_stop", "index": index }))
    }

    fn end(&mut self, ended: &Ended) -> String {
        let delta = json!({ "stop_reason": reason(ended), "stop_sequence": stop(ended) });
        let data = json!({ "type": "message_delta", "delta": delta, "usage": usage(ended.usage) });
        event("message_delta", &data) + &event("message_stop", &json!({ "type": "message_stop" }))
    }

    fn fail(&mut self, error: &ApiError) -> String {
        event("error", &shape(error.status(), error))
    }

    fn ping(&self) -> String {
        event("ping", &json!({ "type": "ping" }))
    }
}
