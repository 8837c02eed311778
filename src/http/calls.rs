//! Calls of tools as the chat API shows them.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::hex;
use crate::text::calls::Call;

/// The identifier of the call at `index` of a reply: another one in each reply.
pub(super) fn call_id(prefix: &str, reply: &str, choice: usize, index: usize) -> String {
    let digest = Sha256::digest(format!("{reply} {choice} {index}").as_bytes());
    format!("{prefix}_{}", hex(&digest[..12]))
}

/// The member `tool_calls` of a message.
pub(super) fn whole(reply: &str, choice: usize, calls: &[Call]) -> Value {
    let entry = |(index, Call { name, arguments }): (usize, &Call)| {
        json!({
            "id": call_id("call", reply, choice, index),
            "type": "function",
            "function": { "name": name, "arguments": arguments },
        })
    };
    calls.iter().enumerate().map(entry).collect()
}

/// The deltas that stream the call at `index`: name and identifier once, then the arguments.
pub(super) fn deltas(reply: &str, choice: usize, index: usize, call: &Call) -> [Value; 2] {
    let delta = |entry: Value| json!({ "tool_calls": [entry] });
    [
        delta(json!({
            "index": index,
            "id": call_id("call", reply, choice, index),
            "type": "function",
            "function": { "name": call.name, "arguments": "" },
        })),
        delta(json!({ "index": index, "function": { "arguments": call.arguments } })),
    ]
}
