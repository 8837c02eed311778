//! What the listeners of a job hear, whatever words they tell it in: how it ended is an end or an error here.

use super::error::ApiError;
use super::reply::{broke_off, outcome};
use crate::engine::{ContentToken, Event, Events, Stats, Usage};
use crate::text::Parts;

/// The next of a job's events.
pub(super) enum Heard {
    /// Prompt tokens encoded so far, of how many.
    Prefill { done: usize, total: usize },
    /// The present guess at what is not committed, see [`Event::Draft`].
    Draft { tokens: Vec<u32>, entropy: Vec<f32>, canvas: usize, step: usize },
    /// What will never change.
    Commit(Committed),
    /// It ended, and well.
    End(End),
}

/// Text, thoughts and calls that will never change.
#[derive(Default)]
pub(super) struct Committed {
    pub(super) parts: Parts,
    /// How many tokens were committed.
    pub(super) tokens: usize,
    /// Of the tokens that the content is made of, if they were asked for.
    pub(super) logprobs: Vec<ContentToken>,
}

/// How a reply ended.
pub(super) struct End {
    /// `stop`, `length` or `tool_calls`.
    pub(super) reason: &'static str,
    pub(super) usage: Usage,
    pub(super) stats: Stats,
}

/// Waits for the next event; loses nothing when dropped while it waits.
///
/// # Errors
/// Why there is no whole reply.
pub(super) async fn hear(events: &mut Events) -> Result<Heard, ApiError> {
    match events.recv().await {
        Some(Event::Prefill { done, total }) => Ok(Heard::Prefill { done, total }),
        Some(Event::Draft { tokens, entropy, canvas, step }) => {
            Ok(Heard::Draft { tokens, entropy, canvas, step })
        }
        Some(Event::Commit { tokens, text, reasoning, calls, logprobs }) => {
            let parts = Parts { content: text, reasoning, calls };
            Ok(Heard::Commit(Committed { parts, tokens: tokens.len(), logprobs }))
        }
        Some(Event::Finish { reason, usage, stats }) => {
            Ok(Heard::End(End { reason: outcome(reason)?, usage, stats }))
        }
        None => Err(broke_off()),
    }
}

/// Waits for all of a reply, and how it ended.
///
/// # Errors
/// Why there is no whole reply.
pub(super) async fn hear_out(events: &mut Events) -> Result<(Committed, End), ApiError> {
    let mut all = Committed::default();
    loop {
        match hear(events).await? {
            Heard::Prefill { .. } | Heard::Draft { .. } => {}
            Heard::Commit(Committed { parts, tokens, logprobs }) => {
                all.parts.content.push_str(&parts.content);
                all.parts.reasoning.push_str(&parts.reasoning);
                all.parts.calls.extend(parts.calls);
                all.tokens += tokens;
                all.logprobs.extend(logprobs);
            }
            Heard::End(end) => return Ok((all, end)),
        }
    }
}
