//! The public face, through real sockets: one theme a file. One program, since each costs half a minute to build.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "../block_support/mod.rs"]
mod block_support;
#[path = "../served/mod.rs"]
mod served;
#[path = "../stage/mod.rs"]
mod stage;
#[path = "../support/mod.rs"]
mod support;

/// A request with the members of `more` in it.
fn with(mut body: serde_json::Value, more: serde_json::Value) -> serde_json::Value {
    if let (Some(body), serde_json::Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

mod choices;
mod constrained;
mod diffusion;
mod edit;
mod forced;
mod http;
mod infill;
mod keys;
mod logprobs;
mod messages;
mod requests;
mod responses;
mod streams;
mod studio;
mod tokenize;
mod tools;
