//! What the handles and the threads share.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::door::Door;
use super::fault::{Busy, Outage, Recent};
use super::loader::Occasion;
use super::mailbox::Sender;
use super::status::{Counters, Loading, Phase, RunningJob, State};
use super::succession::Succession;
use super::thread::Options;
use super::{Account, Cause, Event, FinishReason, Model, Request, Stats, Usage};
use crate::decode::Memory;

pub(super) struct Queued {
    pub(super) ticket: u64,
    pub(super) request: Request,
    pub(super) sender: Sender,
    pub(super) accepted: Instant,
    pub(super) account: Option<Arc<Account>>,
    /// The other choices of the same request: each goes to the end of the queue when the one before it begins, so that
    /// whoever waits comes between them.
    pub(super) others: VecDeque<Queued>,
    /// A choice of the same request has run before: its turn comes, but it takes nobody's place, and the prompt, which
    /// they share, is counted.
    pub(super) continues: bool,
    /// What counts the request once, however many choices it has.
    pub(super) tally: Arc<Tally>,
}

/// How the choices of one request end. The request counts as the first of them that went wrong, or as the last.
pub(super) struct Tally {
    left: AtomicUsize,
    counted: AtomicBool,
}

impl Tally {
    pub(super) fn new(choices: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(choices), counted: AtomicBool::new(false) })
    }

    /// Notes that a choice has ended; whether the request counts by it.
    fn ends(&self, well: bool) -> bool {
        let last = self.left.fetch_sub(1, Ordering::Relaxed) == 1;
        (last || !well) && !self.counted.swap(true, Ordering::Relaxed)
    }
}

impl Queued {
    /// The next choice, which takes the others along.
    fn next(&mut self) -> Option<Self> {
        let mut next = self.others.pop_front()?;
        next.others = std::mem::take(&mut self.others);
        next.continues = true;
        Some(next)
    }

    /// What of a choice's usage was not counted before: of the prompt, which all choices share, nothing but the first time.
    pub(super) fn charged(&self, usage: Usage) -> Usage {
        match self.continues {
            true => Usage { prompt_tokens: 0, cached_tokens: 0, ..usage },
            false => usage,
        }
    }

    /// This one and the other choices.
    pub(super) fn all(mut self) -> impl Iterator<Item = Self> {
        let others = std::mem::take(&mut self.others);
        std::iter::once(self).chain(others)
    }
}

pub(super) struct Running {
    pub(super) job: RunningJob,
    pub(super) started: Instant,
    pub(super) cancel: Arc<AtomicBool>,
    /// For whoever has to tell its listener when the thread cannot.
    pub(super) queued: Arc<Queued>,
}

pub(super) struct Inner {
    pub(super) state: State,
    pub(super) options: Options,
    /// What the tenant serves, whether or not it is on the device.
    pub(super) model: Option<Arc<Model>>,
    pub(super) memory: Memory,
    /// Whether the model is on the device.
    pub(super) resident: bool,
    pub(super) queue: VecDeque<Queued>,
    pub(super) running: Option<Running>,
    pub(super) counters: Counters,
    /// Set once the thread should end without finishing anything.
    pub(super) halt: bool,
    /// The thread that runs the jobs.
    pub(super) tenant: u64,
    pub(super) threads: HashMap<u64, JoinHandle<()>>,
    pub(super) door: Door,
    pub(super) succession: Option<Succession>,
    /// The model is to be fetched although nobody waits for it.
    pub(super) wanted: bool,
    /// What the tenant loads.
    pub(super) loading: Option<Loading>,
    /// What is loaded to take its place.
    pub(super) successor: Option<Loading>,
    /// When loading again last said anything.
    pub(super) silent_since: Option<Instant>,
    /// The step that the device has at present.
    pub(super) busy: Option<Busy>,
    /// That step has taken too long, and its request been told.
    pub(super) overdue: bool,
    pub(super) outage: Option<Outage>,
    pub(super) recent_faults: Recent,
    /// When the last job ended.
    pub(super) idle_since: Instant,
    pub(super) next_ticket: u64,
    pub(super) next_thread: u64,
    /// Running mean of how long a job occupies the slot, for Retry-After.
    pub(super) mean_job_s: f64,
}

pub(super) struct Shared {
    inner: Mutex<Inner>,
    pub(super) work: Condvar,
    pub(super) state: watch::Sender<State>,
    /// Whether the door is closed.
    pub(super) closed: watch::Sender<bool>,
    pub(super) started: Instant,
}

/// What a thread is to do next.
pub(super) enum Next {
    /// Run a job.
    Job(Arc<Queued>, Arc<AtomicBool>),
    /// Bring the model back onto the device.
    Load,
    /// Put the model away.
    Vacate,
    /// Another thread has taken over.
    Leave,
    /// End.
    End,
}

impl Shared {
    pub(super) fn new(options: Options) -> Self {
        let state = State::Loading { progress: 0.0, what: "starting".to_owned() };
        Self {
            inner: Mutex::new(Inner {
                state: state.clone(),
                options,
                model: None,
                memory: Memory::default(),
                resident: false,
                queue: VecDeque::new(),
                running: None,
                counters: Counters::default(),
                halt: false,
                tenant: 0,
                threads: HashMap::new(),
                door: Door::default(),
                succession: None,
                wanted: false,
                loading: None,
                successor: None,
                silent_since: None,
                busy: None,
                overdue: false,
                outage: None,
                recent_faults: Recent::new(),
                idle_since: Instant::now(),
                next_ticket: 0,
                next_thread: 0,
                mean_job_s: 1.0,
            }),
            work: Condvar::new(),
            state: watch::Sender::new(state),
            closed: watch::Sender::new(false),
            started: Instant::now(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves counters at worst a step behind; refusing to go on would turn it into a hang.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for news, or for as long as `most`.
    pub(super) fn wait<'a>(
        &self,
        inner: MutexGuard<'a, Inner>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, Inner> {
        match most {
            Some(most) => self.work.wait_timeout(inner, most).unwrap_or_else(PoisonError::into_inner).0,
            None => self.work.wait(inner).unwrap_or_else(PoisonError::into_inner),
        }
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

    /// Notes how far loading is; false if nobody wants the model any more.
    pub(super) fn report(&self, occasion: Occasion, progress: f64, what: String) -> bool {
        let now = Instant::now();
        let state = State::Loading { progress, what: what.clone() };
        let shows = {
            let mut inner = self.lock();
            let ending = inner.state == State::Draining || inner.state.is_over();
            if inner.halt || (occasion == Occasion::Reload && ending) {
                return false;
            }
            let loading = Some(Loading { occasion, progress, what });
            match occasion {
                Occasion::Reload => inner.successor = loading,
                _ => inner.loading = loading,
            }
            if occasion != Occasion::Start {
                inner.silent_since = Some(now);
            }
            occasion != Occasion::Reload || inner.succession == Some(Succession::Clear { vacated: true })
        };
        // A drain that was asked for while loading stays asked for. What is loaded on demand is no reason to send
        // requests elsewhere, and what is loaded beside a model neither.
        if shows {
            self.set_state(state, |now| matches!(now, State::Loading { .. }));
        }
        true
    }

    /// What thread `me` is to do next; `resident` says whether its model is on the device.
    pub(super) fn next(&self, me: u64, resident: bool) -> Next {
        loop {
            self.expire();
            let mut inner = self.lock();
            if inner.halt {
                return Next::End;
            }
            if inner.tenant != me {
                return Next::Leave;
            }
            if !resident && (inner.wanted || !inner.queue.is_empty()) {
                inner.wanted = false;
                return Next::Load;
            }
            if let Some(queued) = inner.queue.pop_front() {
                let (queued, cancel) = begin(&mut inner, queued);
                return Next::Job(queued, cancel);
            }
            if inner.state == State::Draining {
                return Next::End;
            }
            if let Some(Succession::Clearing { vacate }) = inner.succession
                && inner.door.inside == 0
            {
                if vacate && resident {
                    return Next::Vacate;
                }
                inner.succession = Some(Succession::Clear { vacated: vacate });
                self.work.notify_all();
            }
            let idle = inner.options.idle_unload.filter(|_| resident && inner.succession.is_none());
            let left = idle.map(|most| most.saturating_sub(inner.idle_since.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return Next::Vacate;
            }
            drop(self.wait(inner, left));
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
        for first in over {
            // The choice before has begun: if it has come to anything, the request ends with that.
            let reason = match first.continues {
                true => FinishReason::Length,
                false => FinishReason::Cancelled(Cause::Deadline),
            };
            for queued in first.all() {
                self.end_waiting(&queued, reason.clone());
            }
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
    pub(super) fn finished(
        &self,
        queued: &Queued,
        reason: &FinishReason,
        usage: Usage,
        stats: &Stats,
        decode_s: f64,
    ) {
        self.lock().finished(queued, reason, usage, stats, decode_s);
    }

    /// Ends every waiting job with `reason`.
    pub(super) fn clear_queue(&self, reason: &FinishReason) {
        let waiting = std::mem::take(&mut self.lock().queue);
        for queued in waiting.into_iter().flat_map(Queued::all) {
            self.end_waiting(&queued, reason.clone());
        }
    }

    pub(super) fn end_waiting(&self, queued: &Queued, reason: FinishReason) {
        self.lock().ended(queued, &reason);
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
        let mut left = Vec::new();
        if let Some(place) = inner.queue.iter().position(|q| q.ticket == ticket) {
            left.push(Arc::clone(&inner.queue[place].tally));
            // The other choices, if anybody listens to them, keep the place.
            let continues = inner.queue[place].continues;
            match inner.queue[place].next() {
                Some(next) => inner.queue[place] = Queued { continues, ..next },
                None => drop(inner.queue.remove(place)),
            }
        } else {
            for queued in &mut inner.queue {
                let gone = queued.others.iter().filter(|other| other.ticket == ticket);
                left.extend(gone.map(|other| Arc::clone(&other.tally)));
                queued.others.retain(|other| other.ticket != ticket);
            }
        }
        let counted = left.iter().filter(|tally| tally.ends(false)).count();
        inner.counters.requests.cancelled += counted as u64;
    }
}

impl Inner {
    /// Requests that wait for their first turn.
    pub(super) fn waiting(&self) -> usize {
        self.queue.iter().filter(|queued| !queued.continues).count() + self.door.waiting
    }

    /// Empties the slot and counts how its job ended.
    pub(super) fn finished(
        &mut self,
        queued: &Queued,
        reason: &FinishReason,
        usage: Usage,
        stats: &Stats,
        decode_s: f64,
    ) {
        self.running = None;
        self.idle_since = Instant::now();
        let ran_s = stats.elapsed_s - stats.queue_s;
        self.mean_job_s = 0.8 * self.mean_job_s + 0.2 * ran_s;
        self.counters.add(queued.charged(usage), stats, decode_s);
        self.ended(queued, reason);
    }

    /// Counts how a request ended, once.
    fn ended(&mut self, queued: &Queued, reason: &FinishReason) {
        let well = matches!(reason, FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Length);
        if queued.tally.ends(well) {
            self.counters.count(reason);
        }
    }
}

/// Puts a job into the slot.
fn begin(inner: &mut Inner, mut queued: Queued) -> (Arc<Queued>, Arc<AtomicBool>) {
    let next = queued.next();
    inner.queue.extend(next);
    let cancel = Arc::new(AtomicBool::new(false));
    let queued = Arc::new(queued);
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
        queued: Arc::clone(&queued),
    });
    (queued, cancel)
}
