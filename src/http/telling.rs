//! Answers that are a row of blocks: what was thought, what was said, and calls of tools, in this order.
//!
//! The Responses and the Messages API both tell a reply so. What they share is here: they put their requests into the
//! words of chat completions, and say in their own words what comes of them ([`Teller`]).

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::chat::{Prepared, prepare};
use super::error::ApiError;
use super::fields::Fields;
use super::hear::{Committed, End, Heard, hear, hear_out};
use super::reply::{figures, submit};
use super::sse::{Frames, hold_back, respond_with};
use super::turn::Turn;
use super::{App, exchange};
use crate::engine::{Events, Request, Stats, Usage};
use crate::text::Parts;
use crate::text::calls::Call;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Block {
    /// What the model thought.
    Thought(String),
    /// What it said.
    Said(String),
    /// A call of a tool.
    Called(Call),
}

/// How an answer ended.
pub(super) struct Ended {
    /// `stop`, `length` or `tool_calls`.
    pub reason: &'static str,
    /// The stop string that ended it.
    pub stop: Option<String>,
    pub usage: Usage,
}

/// What is known of an answer before it begins.
pub(super) struct Begun {
    /// Its identifier.
    pub id: String,
    pub prompt_tokens: usize,
}

/// Tells an answer in the words of an API.
pub(super) trait Teller: Send + 'static {
    /// The whole answer.
    fn whole(&mut self, blocks: Vec<Block>, ended: &Ended) -> Value;
    /// The first events of a stream.
    fn begin(&mut self) -> String;
    /// A block begins. Its text follows, but that of a call comes whole.
    fn open(&mut self, block: &Block) -> String;
    /// More text of the block that is open.
    fn more(&mut self, text: &str) -> String;
    /// The block that is open ends.
    fn close(&mut self) -> String;
    /// The last events.
    fn end(&mut self, ended: &Ended) -> String;
    /// The last events of a stream that failed.
    fn fail(&mut self, error: &ApiError) -> String;
    /// What is sent so that the connection does not look dead.
    fn ping(&self) -> String {
        ": ping\n\n".to_owned()
    }
}

/// Answers a request whose `fields` were brought into the words of chat completions.
pub(super) async fn answer<T: Teller>(
    app: &App,
    turn: Turn,
    fields: Fields,
    prefix: &str,
    teller: impl FnOnce(Begun) -> T,
) -> Result<Response, ApiError> {
    let Prepared { model, prompt, generation } = prepare(app, turn, fields).await?;
    let id = exchange::named(prefix)?;
    let mut teller = teller(Begun { id: id.clone(), prompt_tokens: prompt.len() });
    let (stream, seed) = (generation.stream, generation.sampling.seed);
    let stops = generation.stop.strings.clone();
    let request = Request {
        id,
        prompt,
        sampling: generation.sampling,
        stop: generation.stop,
        channels: true,
        calls: generation.calls,
        ..Request::default()
    };
    let mut events = submit(app, request, "messages")?.events;
    if stream {
        hold_back(&mut events, app.server.ping_interval).await?;
        let told = Told { events, stops, teller, begun: false, open: None, silent: true, calls: Vec::new() };
        return Ok(respond_with(told, app.server.ping_interval));
    }
    let (Committed { parts, .. }, End { reason, usage, stats }) = hear_out(&mut events).await?;
    let Parts { content, reasoning, calls } = parts;
    let mut blocks = Vec::new();
    if !reasoning.is_empty() {
        blocks.push(Block::Thought(reasoning));
    }
    if !content.is_empty() || calls.is_empty() {
        blocks.push(Block::Said(content));
    }
    blocks.extend(calls.into_iter().map(Block::Called));
    let mut whole = teller.whole(blocks, &Ended { reason, stop: stop(&stops, &stats), usage });
    whole["axe"] = figures(&model.device, seed, &stats);
    Ok(Json(whole).into_response())
}

/// The stop string that ended a reply.
fn stop(stops: &[String], stats: &Stats) -> Option<String> {
    stats.stopped_by.and_then(|which| stops.get(which)).cloned()
}

/// A reply as the frames of a stream.
struct Told<T> {
    events: Events,
    stops: Vec<String>,
    teller: T,
    /// Whether the first events were sent.
    begun: bool,
    /// The sort of block that is open.
    open: Option<Sort>,
    /// Nothing was said.
    silent: bool,
    /// Calls come last, wherever the reply has them: the order of blocks must not depend on how it was cut.
    calls: Vec<Call>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Thought,
    Said,
}

impl<T: Teller> Frames for Told<T> {
    async fn next(&mut self) -> (String, bool) {
        if !std::mem::replace(&mut self.begun, true) {
            return (self.teller.begin(), false);
        }
        loop {
            match hear(&mut self.events).await {
                Ok(Heard::Prefill { .. } | Heard::Draft { .. }) => {}
                Ok(Heard::Commit(Committed { parts, .. })) => {
                    let Parts { content: text, reasoning, calls } = parts;
                    self.calls.extend(calls);
                    let frames = self.say(Sort::Thought, &reasoning) + &self.say(Sort::Said, &text);
                    if !frames.is_empty() {
                        return (frames, false);
                    }
                }
                Ok(Heard::End(End { reason, usage, stats })) => {
                    let ended = Ended { reason, stop: stop(&self.stops, &stats), usage };
                    return (self.end(&ended), true);
                }
                Err(error) => return (self.teller.fail(&error), true),
            }
        }
    }

    fn ping(&self) -> String {
        self.teller.ping()
    }
}

impl<T: Teller> Told<T> {
    fn say(&mut self, sort: Sort, text: &str) -> String {
        if text.is_empty() {
            return String::new();
        }
        self.open(sort) + &self.teller.more(text)
    }

    /// Opens a block of this sort unless one is open.
    fn open(&mut self, sort: Sort) -> String {
        if self.open == Some(sort) {
            return String::new();
        }
        let frames = self.close();
        self.open = Some(sort);
        self.silent &= sort == Sort::Thought;
        let block = match sort {
            Sort::Thought => Block::Thought(String::new()),
            Sort::Said => Block::Said(String::new()),
        };
        frames + &self.teller.open(&block)
    }

    fn close(&mut self) -> String {
        match self.open.take() {
            Some(_) => self.teller.close(),
            None => String::new(),
        }
    }

    fn end(&mut self, ended: &Ended) -> String {
        let calls = std::mem::take(&mut self.calls);
        let mut frames = String::new();
        if self.silent && calls.is_empty() {
            frames += &self.open(Sort::Said);
        }
        frames += &self.close();
        for call in calls {
            let arguments = call.arguments.clone();
            frames += &self.teller.open(&Block::Called(call));
            frames += &self.teller.more(&arguments);
            frames += &self.teller.close();
        }
        frames + &self.teller.end(ended)
    }
}

/// An event with a name.
pub(super) fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}
