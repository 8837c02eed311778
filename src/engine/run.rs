//! One job, from the queue to its finish: steps of the backend, and everything that can end a reply.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::fault::Fault;
use super::loader::chain;
use super::logprobs::HeldBack;
use super::shared::{Queued, Shared};
use super::status::Phase;
use super::{Cause, Event, FinishReason, Model, Request, Stats, Usage};
use crate::decode::{Backend, BlockStats, DenoisingStats, Generation, Step, Texts, TokenLogprobs, Wanted};
use crate::text::{Parts, ReplyText, TokenKind, Tokenizer};

/// Which draft comes next.
#[derive(Clone, Copy)]
struct Place {
    canvas: usize,
    step: usize,
}

/// Runs the job and sends its events, [`Event::Finish`] included. What went wrong if the engine has to be rebuilt.
pub(super) fn run(
    shared: &Shared,
    backend: &mut dyn Backend,
    model: &Model,
    queued: &Queued,
    cancel: &AtomicBool,
) -> Option<String> {
    let mut clock = Clock::start(queued.accepted);
    let mut reply = Reply::new(model, &queued.request);
    let mut cached_tokens = 0;
    let mut denoising = Denoised::default();
    let mut blocks = None;
    let mut draft = Place { canvas: 0, step: 0 };
    let mut fault = None;
    let interrupted = || {
        if queued.sender.abandoned() {
            Some(FinishReason::Cancelled(Cause::Listener))
        } else if cancel.load(Ordering::Acquire) {
            Some(FinishReason::Cancelled(Cause::Operator))
        } else if shared.halted() {
            Some(FinishReason::Cancelled(Cause::Shutdown))
        } else if queued.request.stop.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            Some(FinishReason::Length)
        } else {
            None
        }
    };
    let Request { prompt, suffix, sampling, .. } = &queued.request;
    let started = match suffix.is_empty() {
        true => backend.start(prompt, sampling),
        false => {
            let plain = prompt.iter().rev().take_while(|&&id| is_plain(&model.tokenizer, id)).count();
            backend.infill(Texts { prompt, plain, suffix }, sampling)
        }
    };
    let reason = match started {
        Err(error) => {
            fault = Fault::of(&error);
            FinishReason::Error(chain(&*error))
        }
        Ok(mut generation) => {
            generation.want(reply.wanted(&queued.request));
            let reason = loop {
                // Nobody else is awake when the time of a waiting job is over.
                shared.expire();
                match interrupted() {
                    // An empty reply that was "cut" would hide what happened, unless choices before it tell.
                    Some(FinishReason::Length) if reply.completion_tokens == 0 && !queued.continues => {
                        break FinishReason::Cancelled(Cause::Deadline);
                    }
                    Some(reason) => break reason,
                    None => {}
                }
                let step = match shared.watched(|| generation.step()) {
                    Ok(step) => step,
                    Err(error) => {
                        fault = Fault::of(&error);
                        break FinishReason::Error(chain(&*error));
                    }
                };
                cached_tokens = generation.cached_tokens();
                denoising.look(&*generation, matches!(step, Step::Commit(_)));
                match step {
                    Step::Prefill { done, total } => {
                        shared.show(|job| job.prefilled = done);
                        if done >= total {
                            clock.prefilled();
                        }
                        queued.sender.send(Event::Prefill { done, total });
                    }
                    Step::Draft { tokens, entropy } => {
                        // Guesses are shown before the pass that evaluates them; a canvas after the one that made it.
                        if generation.blocks().is_none() {
                            clock.passed();
                        }
                        shared.show(|job| job.phase = Phase::Generate);
                        draft.step += 1;
                        let Place { canvas, step } = draft;
                        queued.sender.send(Event::Draft { tokens, entropy, canvas, step });
                    }
                    Step::Commit(tokens) => {
                        clock.passed();
                        draft = Place { canvas: draft.canvas + 1, step: 0 };
                        let before = reply.completion_tokens;
                        let (parts, ended) = reply.take(&tokens, generation.logprobs());
                        let kept = reply.completion_tokens - before;
                        generation.kept(kept);
                        clock.committed(kept);
                        shared.show(|job| {
                            job.phase = Phase::Generate;
                            job.prefilled = job.prompt_tokens;
                            job.committed = reply.completion_tokens;
                        });
                        let tokens = tokens.into_iter().take(kept).collect();
                        queued.sender.send(reply.commit(tokens, parts));
                        if let Some(reason) = ended {
                            break reason;
                        }
                        if generation.complete() {
                            break FinishReason::Stop;
                        }
                    }
                }
            };
            blocks = generation.blocks();
            reason
        }
    };
    let broken = match (fault, &reason) {
        // Whoever noticed it has told the listener.
        (Some(Fault::Overdue), FinishReason::Error(error)) => return Some(error.clone()),
        // The state first: who hears of the error must not find the engine ready.
        (Some(fault), FinishReason::Error(error)) => {
            shared.fault(fault, error);
            Some(error.clone())
        }
        _ => None,
    };
    let usage = Usage {
        prompt_tokens: prompt.len() + suffix.len(),
        completion_tokens: reply.completion_tokens,
        cached_tokens,
        reasoning_tokens: reply.text.reasoning_tokens(),
    };
    // A reply that was cut from outside still gets what was held back for a stop string; a stopped or full one has it.
    let rest = if matches!(reason, FinishReason::Error(_)) { Parts::default() } else { reply.flush() };
    if !rest.is_empty() {
        queued.sender.send(reply.commit(Vec::new(), rest));
    }
    // What was held back as a call, and was none, is content: a stop string in it cuts it like any other.
    let reason = match reason {
        FinishReason::Length if reply.text.stopped().is_some() => reply.stopped(),
        reason => reason,
    };
    let (mut stats, decode_s) = clock.stop(usage.completion_tokens, denoising, blocks);
    stats.stopped_by = reply.text.stopped();
    let key = queued.account.as_ref().and_then(|account| account.name());
    log(&queued.request.id, key, &reason, usage, &stats);
    if let Some(account) = &queued.account {
        account.add(queued.charged(usage));
    }
    // The slot is free before the listener knows, so that its next request does not find it taken.
    shared.finished(queued, &reason, usage, &stats, decode_s);
    queued.sender.send(Event::Finish { reason, usage, stats });
    broken
}

/// Whether a token is text, and not structure.
fn is_plain(tokenizer: &Tokenizer, id: u32) -> bool {
    let channel = tokenizer.channel().is_some_and(|channel| [channel.open, channel.close].contains(&id));
    !channel && tokenizer.kind(id) != Some(TokenKind::Control)
}

fn log(id: &str, key: Option<&str>, reason: &FinishReason, usage: Usage, stats: &Stats) {
    let reason = match reason {
        FinishReason::Stop => "stop",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Length => "length",
        FinishReason::Cancelled(Cause::Deadline) => "out of time",
        FinishReason::Cancelled(_) => "cancelled",
        FinishReason::Error(error) => {
            tracing::error!(id, error, "request failed");
            "error"
        }
    };
    tracing::info!(
        id,
        key,
        reason,
        prompt_tokens = usage.prompt_tokens,
        cached_tokens = usage.cached_tokens,
        completion_tokens = usage.completion_tokens,
        reasoning_tokens = usage.reasoning_tokens,
        passes = stats.passes,
        canvases = stats.denoising.as_ref().map(|denoising| denoising.canvases),
        rows = stats.blocks.as_ref().map(|blocks| blocks.evaluated),
        queue_s = stats.queue_s,
        prefill_s = stats.prefill_s,
        elapsed_s = stats.elapsed_s,
        tokens_per_s = stats.tokens_per_s,
        "request finished"
    );
}

/// The reply so far, and the rules that end it.
struct Reply<'a> {
    tokenizer: &'a Tokenizer,
    text: ReplyText,
    ignore_eos: bool,
    /// Most tokens, by the request and by what the prompt left of the context.
    most: usize,
    completion_tokens: usize,
    held_back: HeldBack,
}

impl<'a> Reply<'a> {
    fn new(model: &'a Model, request: &Request) -> Self {
        let left = model.context_length.saturating_sub(request.prompt.len());
        let tokenizer = &model.tokenizer;
        let channel = tokenizer.channel().filter(|_| request.channels);
        let calls = request.calls.as_ref();
        let begun = request.prompt.len().saturating_sub(calls.map_or(0, |calls| calls.begun));
        let (prompt, begun) = request.prompt.split_at(begun);
        let piece = |id| tokenizer.piece(id);
        Self {
            tokenizer,
            text: ReplyText::new(channel, &request.stop.strings)
                .calling(calls, tokenizer)
                .following(prompt, tokenizer.eos_ids(), piece)
                .begun(begun, piece),
            ignore_eos: request.stop.ignore_eos,
            most: request.stop.max_tokens.min(left),
            completion_tokens: 0,
            held_back: HeldBack::default(),
        }
    }

    /// What a generation is to make for this reply.
    fn wanted(&self, request: &Request) -> Wanted {
        let ends = if self.ignore_eos { Vec::new() } else { self.tokenizer.eos_ids().to_vec() };
        Wanted { most: self.most, ends, drafts: request.drafts, logprobs: request.logprobs }
    }

    /// The event that tokens were committed which have released some text.
    fn commit(&mut self, tokens: Vec<u32>, parts: Parts) -> Event {
        let Parts { content: text, reasoning, calls } = parts;
        let logprobs = self.held_back.release(&text);
        Event::Commit { tokens, text, reasoning, calls, logprobs }
    }

    /// Takes tokens up to the one that ends the reply, if one does; returns the text they release.
    fn take(&mut self, tokens: &[u32], logprobs: Vec<TokenLogprobs>) -> (Parts, Option<FinishReason>) {
        let mut parts = Parts::default();
        let mut logprobs = logprobs.into_iter();
        for token in tokens {
            let told = logprobs.next();
            self.completion_tokens += 1;
            if !self.ignore_eos && self.tokenizer.eos_ids().contains(token) {
                // What was held back because it could have become a stop string is part of the reply.
                self.end(&mut parts);
                return (parts, Some(self.stopped()));
            }
            let (written, thoughts) = (self.text.written(), self.text.reasoning_tokens());
            let stopped = self.text.push(*token, self.tokenizer.piece(*token), &mut parts);
            if let Some(told) = told.filter(|_| self.text.reasoning_tokens() == thoughts) {
                self.held_back.push(told, written..self.text.written());
            }
            self.settle();
            if stopped {
                return (parts, Some(self.stopped()));
            }
            if self.completion_tokens >= self.most {
                self.end(&mut parts);
                return (parts, Some(FinishReason::Length));
            }
        }
        (parts, None)
    }

    /// What it means that the model, or a stop string, has ended the reply.
    fn stopped(&self) -> FinishReason {
        match self.text.calls() {
            _ if self.text.broke_off() && self.text.stopped().is_none() => FinishReason::Length,
            0 => FinishReason::Stop,
            _ => FinishReason::ToolCalls,
        }
    }

    /// Ends the reply from outside: the text that was held back.
    fn flush(&mut self) -> Parts {
        let mut parts = Parts::default();
        self.end(&mut parts);
        parts
    }

    fn end(&mut self, parts: &mut Parts) {
        self.text.flush(parts);
        self.settle();
    }

    fn settle(&mut self) {
        for origin in self.text.origins() {
            self.held_back.settle(&origin);
        }
    }
}

/// What denoising took, canvas by canvas.
#[derive(Default)]
struct Denoised {
    stats: Option<DenoisingStats>,
    canvas_steps: Vec<usize>,
}

impl Denoised {
    /// Looks at the generation after a step that did or did not commit a canvas.
    fn look(&mut self, generation: &dyn Generation, committed: bool) {
        self.stats = generation.denoising();
        if let Some(stats) = self.stats.as_ref().filter(|_| committed) {
            let counted: usize = self.canvas_steps.iter().sum();
            self.canvas_steps.push(stats.steps.saturating_sub(counted));
        }
    }
}

/// Times of a job.
struct Clock {
    accepted: Instant,
    started: Instant,
    prefill_s: Option<f64>,
    first_s: Option<f64>,
    passes: usize,
    first_commit: Option<(Instant, usize)>,
    last_commit: Instant,
}

impl Clock {
    fn start(accepted: Instant) -> Self {
        let started = Instant::now();
        Self {
            accepted,
            started,
            prefill_s: None,
            first_s: None,
            passes: 0,
            first_commit: None,
            last_commit: started,
        }
    }

    fn since_start(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn prefilled(&mut self) {
        let now = self.since_start();
        self.prefill_s.get_or_insert(now);
    }

    fn passed(&mut self) {
        let now = self.since_start();
        self.passes += 1;
        self.prefill_s.get_or_insert(now);
        self.first_s.get_or_insert(now);
    }

    fn committed(&mut self, tokens: usize) {
        self.last_commit = Instant::now();
        self.first_commit.get_or_insert((self.last_commit, tokens));
    }

    /// The stats, and the seconds spent generating.
    fn stop(self, completion_tokens: usize, denoised: Denoised, blocks: Option<BlockStats>) -> (Stats, f64) {
        let ran_s = self.since_start();
        let prefill_s = self.prefill_s.unwrap_or(ran_s);
        let tokens_per_s = self.first_commit.map_or(0.0, |(first, tokens)| {
            let (seconds, later) = if denoised.stats.is_some() {
                let ended_s = self.last_commit.duration_since(self.started).as_secs_f64();
                (ended_s - prefill_s, completion_tokens as f64)
            } else {
                let seconds = self.last_commit.duration_since(first).as_secs_f64();
                (seconds, completion_tokens.saturating_sub(tokens) as f64)
            };
            if seconds > 0.0 { later / seconds } else { 0.0 }
        });
        let passes = denoised.stats.as_ref().map_or(self.passes, |stats| stats.steps);
        let stats = Stats {
            queue_s: self.started.duration_since(self.accepted).as_secs_f64(),
            prefill_s,
            first_token_s: self.first_s.unwrap_or(0.0),
            elapsed_s: self.accepted.elapsed().as_secs_f64(),
            passes,
            tokens_per_pass: if passes == 0 { 0.0 } else { completion_tokens as f64 / passes as f64 },
            tokens_per_s,
            denoising: denoised.stats,
            blocks,
            canvas_steps: denoised.canvas_steps,
            stopped_by: None,
        };
        (stats, ran_s - prefill_s)
    }
}
