//! What everyone but the engine's thread holds of the engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::mailbox::{Events, Sender, mailbox};
use super::status::{Counters, Phase, QueueStatus, QueuedJob, RunningJob, State, Status};
use super::{Account, Cause, Event, FinishReason, Model, Request, Stats, Usage};
use crate::decode::Memory;

/// Why a request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too many wait already.
    #[error("the queue is full ({capacity} requests wait); try again in about {} s", retry_after.as_secs())]
    QueueFull {
        /// How many may wait.
        capacity: usize,
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// The model is still loading.
    #[error("the model is still loading ({what}, {percent} %); try again in a moment")]
    NotReady {
        /// What is being done.
        what: String,
        /// How much of the loading is done.
        percent: u8,
    },
    /// The daemon is about to end.
    #[error("the server is shutting down and takes no new requests")]
    Draining,
    /// The engine cannot work any more.
    #[error("the engine has failed and needs a restart: {error}")]
    Failed {
        /// What went wrong.
        error: String,
    },
    /// There is nothing to continue.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The prompt leaves no room for output. LiteLLM's router knows the words "exceeds the available context size".
    #[error(
        "the prompt has {n_prompt_tokens} tokens, which exceeds the available context size of {n_ctx} (prompt and output \
         together); shorten the prompt or raise `model.context_length`"
    )]
    ContextTooLong {
        /// Tokens of the prompt.
        n_prompt_tokens: usize,
        /// Positions of the context.
        n_ctx: usize,
    },
}

/// An accepted request.
pub struct Job {
    /// The request's identifier.
    pub id: String,
    /// Its events; dropping them cancels the job.
    pub events: Events,
}

pub(super) struct Queued {
    pub(super) ticket: u64,
    pub(super) request: Request,
    pub(super) sender: Sender,
    pub(super) accepted: Instant,
    pub(super) account: Option<Arc<Account>>,
}

pub(super) struct Running {
    pub(super) job: RunningJob,
    pub(super) started: Instant,
    pub(super) cancel: Arc<AtomicBool>,
}

pub(super) struct Inner {
    pub(super) state: State,
    pub(super) model: Option<Arc<Model>>,
    pub(super) memory: Memory,
    pub(super) queue: VecDeque<Queued>,
    pub(super) running: Option<Running>,
    pub(super) counters: Counters,
    /// Set once the thread should end without finishing anything.
    pub(super) halt: bool,
    next_ticket: u64,
    /// Running mean of how long a job occupies the slot, for Retry-After.
    mean_job_s: f64,
}

/// What the handles and the thread share.
pub(super) struct Shared {
    inner: Mutex<Inner>,
    work: Condvar,
    state: watch::Sender<State>,
    capacity: usize,
    started: Instant,
}

impl Shared {
    pub(super) fn new(capacity: usize) -> Self {
        let state = State::Loading { progress: 0.0, what: "starting".to_owned() };
        Self {
            inner: Mutex::new(Inner {
                state: state.clone(),
                model: None,
                memory: Memory::default(),
                queue: VecDeque::new(),
                running: None,
                counters: Counters::default(),
                halt: false,
                next_ticket: 0,
                mean_job_s: 1.0,
            }),
            work: Condvar::new(),
            state: watch::Sender::new(state),
            capacity,
            started: Instant::now(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves counters at worst a step behind; refusing to go on would turn it into a hang.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves to `state` if `allowed` says so of the present one.
    pub(super) fn set_state(&self, state: State, allowed: impl FnOnce(&State) -> bool) {
        let mut inner = self.lock();
        if allowed(&inner.state) {
            inner.state = state.clone();
            self.state.send_replace(state);
        }
        drop(inner);
        self.work.notify_all();
    }

    /// Waits for the next job; `None` when the thread should end.
    pub(super) fn next_job(&self) -> Option<(Queued, Arc<AtomicBool>)> {
        loop {
            self.expire();
            let mut inner = self.lock();
            if inner.halt {
                return None;
            }
            if let Some(queued) = inner.queue.pop_front() {
                let cancel = Arc::new(AtomicBool::new(false));
                inner.running = Some(Running {
                    job: RunningJob {
                        id: queued.request.id.clone(),
                        phase: Phase::Prefill,
                        prompt_tokens: queued.request.prompt.len(),
                        prefilled: 0,
                        committed: 0,
                        elapsed_s: 0.0,
                    },
                    started: Instant::now(),
                    cancel: Arc::clone(&cancel),
                });
                return Some((queued, cancel));
            }
            if inner.state == State::Draining {
                return None;
            }
            drop(self.work.wait(inner).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Ends the waiting jobs whose time is over.
    pub(super) fn expire(&self) {
        let now = Instant::now();
        let late = |queued: &Queued| queued.request.stop.deadline.is_some_and(|deadline| now >= deadline);
        let mut over = VecDeque::new();
        {
            let mut inner = self.lock();
            if inner.queue.iter().any(late) {
                let (late, in_time) = std::mem::take(&mut inner.queue).into_iter().partition(late);
                over = late;
                inner.queue = in_time;
            }
        }
        for queued in over {
            self.end_waiting(&queued, FinishReason::Cancelled(Cause::Deadline));
        }
    }

    /// Lets the running job's place show `update`.
    pub(super) fn show(&self, update: impl FnOnce(&mut RunningJob)) {
        if let Some(running) = &mut self.lock().running {
            update(&mut running.job);
        }
    }

    /// Whether everything must end now.
    pub(super) fn halted(&self) -> bool {
        self.lock().halt
    }

    /// Empties the slot and counts how its job ended.
    pub(super) fn finished(&self, reason: &FinishReason, usage: Usage, stats: &Stats, decode_s: f64) {
        let mut inner = self.lock();
        inner.running = None;
        let ran_s = stats.elapsed_s - stats.queue_s;
        inner.mean_job_s = 0.8 * inner.mean_job_s + 0.2 * ran_s;
        let counters = &mut inner.counters;
        count(counters, reason);
        counters.prompt_tokens += usage.prompt_tokens as u64;
        counters.completion_tokens += usage.completion_tokens as u64;
        counters.cached_tokens += usage.cached_tokens as u64;
        counters.passes += stats.passes as u64;
        if let Some(denoising) = &stats.denoising {
            counters.denoising_steps += denoising.steps as u64;
            counters.canvases += denoising.canvases as u64;
        }
        if let Some(blocks) = &stats.blocks {
            counters.add_blocks(blocks);
        }
        stats.canvas_steps.iter().for_each(|&steps| counters.canvas_steps.record(steps as f64));
        counters.prefill_s += stats.prefill_s;
        counters.decode_s += decode_s;
        if usage.completion_tokens > 0 {
            counters.first_token_s.record(stats.queue_s + stats.first_token_s);
        }
        if stats.tokens_per_s > 0.0 {
            counters.tokens_per_s.record(stats.tokens_per_s);
        }
    }

    /// Ends every waiting job with `reason`.
    pub(super) fn clear_queue(&self, reason: &FinishReason) {
        let waiting = std::mem::take(&mut self.lock().queue);
        for queued in waiting {
            self.end_waiting(&queued, reason.clone());
        }
    }

    fn end_waiting(&self, queued: &Queued, reason: FinishReason) {
        count(&mut self.lock().counters, &reason);
        let waited = queued.accepted.elapsed().as_secs_f64();
        queued.sender.send(Event::Finish {
            reason,
            usage: Usage { prompt_tokens: queued.request.prompt.len(), ..Usage::default() },
            stats: Stats { queue_s: waited, elapsed_s: waited, ..Stats::default() },
        });
    }

    /// The listener of `ticket` has gone: a waiting job frees its place at once; a running one is noticed by the
    /// thread after its present step.
    pub(super) fn abandon(&self, ticket: u64) {
        let mut inner = self.lock();
        if let Some(place) = inner.queue.iter().position(|q| q.ticket == ticket) {
            let _left = inner.queue.remove(place);
            inner.counters.requests.cancelled += 1;
        }
    }
}

fn count(counters: &mut Counters, reason: &FinishReason) {
    let requests = &mut counters.requests;
    match reason {
        FinishReason::Stop => requests.stop += 1,
        FinishReason::Length => requests.length += 1,
        FinishReason::Cancelled(Cause::Deadline) | FinishReason::Error(_) => requests.error += 1,
        FinishReason::Cancelled(_) => requests.cancelled += 1,
    }
}

/// A share in the engine; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl EngineHandle {
    /// Puts a request into the queue.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was queued then.
    pub fn submit(&self, request: Request) -> Result<Job, SubmitError> {
        self.submit_for(request, None)
    }

    /// The same in somebody's name, whose account hears what was used.
    ///
    /// # Errors
    /// As [`EngineHandle::submit`].
    pub fn submit_for(&self, request: Request, account: Option<Arc<Account>>) -> Result<Job, SubmitError> {
        let mut inner = self.shared.lock();
        if let Err(error) = check(&inner, &request, self.shared.capacity) {
            inner.counters.requests.rejected += 1;
            return Err(error);
        }
        let ticket = inner.next_ticket;
        inner.next_ticket += 1;
        let id = request.id.clone();
        let (sender, events) = mailbox(&self.shared, ticket);
        inner.queue.push_back(Queued { ticket, request, sender, accepted: Instant::now(), account });
        drop(inner);
        self.shared.work.notify_all();
        Ok(Job { id, events })
    }

    /// Cancels the job with this identifier, waiting or running; its listener gets a `Finish`. False if there is none.
    #[must_use]
    pub fn cancel(&self, id: &str) -> bool {
        let mut inner = self.shared.lock();
        if let Some(running) = inner.running.as_ref().filter(|r| r.job.id == id) {
            running.cancel.store(true, Ordering::Release);
            return true;
        }
        let Some(place) = inner.queue.iter().position(|q| q.request.id == id) else { return false };
        let queued = inner.queue.remove(place);
        drop(inner);
        if let Some(queued) = queued {
            self.shared.end_waiting(&queued, FinishReason::Cancelled(Cause::Operator));
        }
        true
    }

    /// A snapshot of everything worth knowing.
    #[must_use]
    pub fn status(&self) -> Status {
        let inner = self.shared.lock();
        let model = inner.model.as_deref();
        Status {
            state: inner.state.clone(),
            uptime_s: self.shared.started.elapsed().as_secs_f64(),
            model: model.map(|m| m.name.clone()),
            device: model.map(|m| m.device.clone()),
            context_length: model.map(|m| m.context_length),
            memory: inner.memory,
            queue: QueueStatus {
                depth: inner.queue.len(),
                capacity: self.shared.capacity,
                jobs: inner
                    .queue
                    .iter()
                    .map(|q| QueuedJob {
                        id: q.request.id.clone(),
                        prompt_tokens: q.request.prompt.len(),
                        waited_s: q.accepted.elapsed().as_secs_f64(),
                    })
                    .collect(),
            },
            running: inner
                .running
                .as_ref()
                .map(|r| RunningJob { elapsed_s: r.started.elapsed().as_secs_f64(), ..r.job.clone() }),
            counters: inner.counters.clone(),
        }
    }

    /// The model, once it is loaded.
    #[must_use]
    pub fn model(&self) -> Option<Arc<Model>> {
        self.shared.lock().model.clone()
    }

    /// Why a request would not be accepted now, whatever it is.
    ///
    /// # Errors
    /// The same as [`EngineHandle::submit`], as far as the state decides it.
    pub fn accepting(&self) -> Result<(), SubmitError> {
        check_state(&self.shared.lock().state)
    }

    /// A receiver that sees every change of the state.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<State> {
        self.shared.state.subscribe()
    }

    /// Takes nothing new, finishes what was accepted, then ends the thread.
    pub fn drain(&self) {
        self.shared.set_state(State::Draining, |state| !state.is_over());
    }

    /// Ends the thread after its present step; all jobs are cancelled.
    pub fn shutdown(&self) {
        self.shared.lock().halt = true;
        self.drain();
    }

    /// Waits until the thread has ended; says how.
    pub async fn over(&self) -> State {
        let mut watch = self.watch();
        let state = watch.wait_for(State::is_over).await.map(|state| state.clone());
        state.unwrap_or(State::Stopped)
    }
}

fn check_state(state: &State) -> Result<(), SubmitError> {
    match state {
        State::Ready => Ok(()),
        State::Loading { progress, what } => Err(SubmitError::NotReady {
            what: what.clone(),
            percent: (progress.clamp(0.0, 1.0) * 100.0) as u8,
        }),
        State::Draining | State::Stopped => Err(SubmitError::Draining),
        State::Failed { error } => Err(SubmitError::Failed { error: error.clone() }),
    }
}

fn check(inner: &Inner, request: &Request, capacity: usize) -> Result<(), SubmitError> {
    check_state(&inner.state)?;
    let n_prompt_tokens = request.prompt.len();
    if n_prompt_tokens == 0 {
        return Err(SubmitError::EmptyPrompt);
    }
    if let Some(model) = &inner.model
        && n_prompt_tokens >= model.context_length
    {
        return Err(SubmitError::ContextTooLong { n_prompt_tokens, n_ctx: model.context_length });
    }
    // While nothing runs, the first in the queue is about to: it does not wait.
    let about_to_run = usize::from(inner.running.is_none());
    if inner.queue.len() >= capacity + about_to_run {
        let seconds = inner.mean_job_s.ceil().clamp(1.0, 60.0);
        return Err(SubmitError::QueueFull { capacity, retry_after: Duration::from_secs_f64(seconds) });
    }
    Ok(())
}
