//! What everyone but the engine's thread holds of the engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::mailbox::{Events, mailbox};
use super::shared::{Inner, Queued, Shared, Tally};
use super::status::{QueueStatus, QueuedJob, RunningJob, State, Status};
use super::thread::Options;
use super::{Account, Cause, FinishReason, Model, Request};

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
    /// The model is not on the device, and getting it back takes long.
    #[error("the model is not on the device, and getting it back takes long ({what}); try again in a while")]
    Outage {
        /// What is being done.
        what: String,
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
        "the prompt of {n_prompt_tokens} tokens with an answer of at least one exceeds the available context size of {n_ctx}; \
         shorten the prompt, begin the conversation anew, or raise `model.context_length`, up to what the model was trained for"
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
        let jobs = self.submit_all(vec![request], account.as_ref())?;
        jobs.into_iter().next().ok_or(SubmitError::EmptyPrompt)
    }

    /// Puts several requests for the same prompt into the queue, where they take one place together. They run one after
    /// the other, in order; who waits when one begins comes before the next.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was queued then.
    pub fn submit_all(
        &self,
        requests: Vec<Request>,
        account: Option<&Arc<Account>>,
    ) -> Result<Vec<Job>, SubmitError> {
        let mut inner = self.shared.lock();
        if let Some(error) = requests.iter().find_map(|request| check(&inner, request).err()) {
            inner.counters.requests.rejected += 1;
            return Err(error);
        }
        let accepted = Instant::now();
        let mut jobs = Vec::with_capacity(requests.len());
        let mut all = VecDeque::with_capacity(requests.len());
        let tally = Tally::new(requests.len());
        for request in requests {
            let ticket = inner.next_ticket;
            inner.next_ticket += 1;
            let (sender, events) = mailbox(&self.shared, ticket);
            jobs.push(Job { id: request.id.clone(), events });
            let (account, others, tally) = (account.cloned(), VecDeque::new(), Arc::clone(&tally));
            all.push_back(Queued {
                ticket,
                request,
                sender,
                accepted,
                account,
                others,
                continues: false,
                tally,
            });
        }
        if let Some(mut first) = all.pop_front() {
            first.others = all;
            inner.queue.push_back(first);
        }
        drop(inner);
        self.shared.work.notify_all();
        Ok(jobs)
    }

    /// Cancels the jobs with this identifier, waiting or running; their listeners get a `Finish`. False if there is none.
    #[must_use]
    pub fn cancel(&self, id: &str) -> bool {
        let mut inner = self.shared.lock();
        let running = inner.running.as_ref().filter(|r| r.job.id == id);
        if let Some(running) = running {
            running.cancel.store(true, Ordering::Release);
        }
        let runs = running.is_some();
        let waiting = std::mem::take(&mut inner.queue);
        let (cancelled, others): (VecDeque<_>, _) = waiting.into_iter().partition(|q| q.request.id == id);
        inner.queue = others;
        drop(inner);
        let found = runs || !cancelled.is_empty();
        for queued in cancelled.into_iter().flat_map(Queued::all) {
            self.shared.end_waiting(&queued, FinishReason::Cancelled(Cause::Operator));
        }
        found
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
            resident: inner.resident,
            loading: inner.loading.clone(),
            successor: inner.succession.is_some().then(|| inner.successor.clone()).flatten(),
            queue: QueueStatus {
                depth: inner.waiting(),
                capacity: inner.options.queue_capacity,
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
        check_state(&self.shared.lock())
    }

    /// The same of a request to generate, which counts among those that were rejected if it is.
    ///
    /// # Errors
    /// As [`EngineHandle::accepting`].
    pub fn accepting_one(&self) -> Result<(), SubmitError> {
        let mut inner = self.shared.lock();
        check_state(&inner).inspect_err(|_| inner.counters.requests.rejected += 1)
    }

    /// Has the engine work by these options from now on.
    pub fn set_options(&self, options: Options) {
        self.shared.lock().options = options;
        self.shared.work.notify_all();
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

pub(super) fn check_state(inner: &Inner) -> Result<(), SubmitError> {
    match &inner.state {
        State::Ready => Ok(()),
        State::Loading { progress, what } if inner.model.is_none() => Err(SubmitError::NotReady {
            what: what.clone(),
            percent: (progress.clamp(0.0, 1.0) * 100.0) as u8,
        }),
        // The model's text side is there: requests can be read, and wait.
        State::Loading { what, .. } | State::Hung { error: what } if inner.is_refusing() => {
            Err(SubmitError::Outage { what: what.clone() })
        }
        State::Loading { .. } | State::Hung { .. } => Ok(()),
        State::Draining | State::Stopped => Err(SubmitError::Draining),
        State::Failed { error } => Err(SubmitError::Failed { error: error.clone() }),
    }
}

fn check(inner: &Inner, request: &Request) -> Result<(), SubmitError> {
    check_state(inner)?;
    let n_prompt_tokens = request.prompt.len();
    if n_prompt_tokens == 0 {
        return Err(SubmitError::EmptyPrompt);
    }
    if let Some(model) = &inner.model
        && n_prompt_tokens >= model.context_length
    {
        return Err(SubmitError::ContextTooLong { n_prompt_tokens, n_ctx: model.context_length });
    }
    check_room(inner)
}

/// Whether one more may wait.
pub(super) fn check_room(inner: &Inner) -> Result<(), SubmitError> {
    let capacity = inner.options.queue_capacity;
    // While nothing runs, the first in the queue is about to: it does not wait.
    let about_to_run = usize::from(inner.running.is_none());
    if inner.waiting() >= capacity + about_to_run {
        let seconds = inner.mean_job_s.ceil().clamp(1.0, 60.0);
        return Err(SubmitError::QueueFull { capacity, retry_after: Duration::from_secs_f64(seconds) });
    }
    Ok(())
}
