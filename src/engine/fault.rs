//! Devices that are lost, passes that do not come back, threads that panic: counted, told to whom they concern, and at
//! some number the end of the process, which its supervisor starts again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use super::loader::chain;
use super::shared::{Inner, Shared};
use super::status::State;
use super::{Cause, Event, FinishReason, Stats, Usage};
use crate::decode::{BackendError, is_lost};

/// Waiting requests are told to go elsewhere when the engine has been away for so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A model that is loaded again and has said nothing for so long never will.
const SILENCE: Duration = Duration::from_secs(600);

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The device, its driver or its queue was lost.
    Lost,
    /// A pass took longer than it may.
    Overdue,
    /// The engine's thread panicked.
    Panic,
    /// The model could not be loaded again.
    Rebuild,
}

/// Faults since the start, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Faults {
    /// The device, its driver or its queue was lost.
    pub lost: u64,
    /// A pass took longer than it may.
    pub overdue: u64,
    /// The engine's thread panicked.
    pub panics: u64,
    /// The model could not be loaded again.
    pub rebuilds: u64,
}

/// A pass that took longer than it may. Its request has been told.
#[derive(Debug, Error)]
#[error(
    "the device did not finish a pass within {} s (`device.pass_timeout_s`); see the kernel log for the driver's reason",
    .0.as_secs_f64()
)]
pub(super) struct Overdue(pub(super) Duration);

impl Fault {
    /// What an error of the backend means for the engine; `None` if it concerns its request alone.
    pub(super) fn of(error: &BackendError) -> Option<Self> {
        if error.is::<Overdue>() {
            return Some(Self::Overdue);
        }
        is_lost(error).then_some(Self::Lost)
    }
}

/// The time in which nothing can be served.
pub(super) struct Outage {
    since: Instant,
    /// Nobody is asked to wait any longer.
    pub(super) refusing: bool,
}

/// What may take long and must not take for ever.
pub(super) struct Busy {
    pub(super) since: Instant,
    pub(super) most: Duration,
}

/// When faults happened that count.
pub(super) type Recent = VecDeque<Instant>;

impl Inner {
    /// Notes a fault, and that nothing can be served until the engine is rebuilt.
    fn count_fault(&mut self, fault: Fault) {
        let now = Instant::now();
        let faults = &mut self.counters.faults;
        match fault {
            Fault::Lost => faults.lost += 1,
            Fault::Overdue => faults.overdue += 1,
            Fault::Panic => faults.panics += 1,
            Fault::Rebuild => faults.rebuilds += 1,
        }
        self.recent_faults.push_back(now);
        self.outage.get_or_insert(Outage { since: now, refusing: false });
    }

    /// Whether the engine cannot serve now, and nobody is to wait until it can.
    pub(super) fn is_refusing(&self) -> bool {
        self.outage.as_ref().is_some_and(|outage| outage.refusing)
    }
}

impl Shared {
    /// Notes a fault of the present tenant.
    pub(super) fn fault(&self, fault: Fault, error: &str) {
        self.lock().count_fault(fault);
        let what = format!("rebuilding the engine after a fault: {error}");
        tracing::error!(error, ?fault, "the engine has to be rebuilt");
        self.set_state(State::Loading { progress: 0.0, what }, |now| {
            matches!(now, State::Ready | State::Loading { .. } | State::Hung { .. })
        });
    }

    /// Why the engine is not to be rebuilt once more, if so.
    pub(super) fn too_many_faults(&self, last: &str) -> Option<String> {
        let mut inner = self.lock();
        let (most, window) = (inner.options.most_faults, inner.options.fault_window);
        while inner.recent_faults.front().is_some_and(|at| at.elapsed() > window) {
            inner.recent_faults.pop_front();
        }
        let count = inner.recent_faults.len();
        (most != 0 && count >= most).then(|| {
            format!(
                "{count} faults within {} s (`device.max_faults`, `device.fault_window_s`), the last one: {last}",
                window.as_secs_f64()
            )
        })
    }

    /// The engine serves again.
    pub(super) fn recovered(&self) {
        let mut inner = self.lock();
        inner.outage = None;
        inner.counters.resets += 1;
    }

    /// Tells everyone who waits to go elsewhere, and everyone who comes until the engine serves again.
    pub(super) fn refuse(&self) {
        if let Some(outage) = &mut self.lock().outage {
            outage.refusing = true;
        }
        self.clear_queue(&FinishReason::Cancelled(Cause::Outage));
    }

    /// Runs what the device may keep for too long. `Err` with [`Overdue`] if it did, whatever came of it.
    pub(super) fn watched<T>(
        &self,
        work: impl FnOnce() -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let most = {
            let mut inner = self.lock();
            let most = inner.options.pass_limit;
            inner.busy = Some(Busy { since: Instant::now(), most });
            most
        };
        let done = work();
        let mut inner = self.lock();
        inner.busy = None;
        if std::mem::take(&mut inner.overdue) { Err(Box::new(Overdue(most))) } else { done }
    }

    /// Forgets a pass that was left by a panic; whether it had been told of as overdue.
    pub(super) fn forget_pass(&self) -> bool {
        let mut inner = self.lock();
        inner.busy = None;
        std::mem::take(&mut inner.overdue)
    }

    /// Waits before the next try, unless another model is to take this one's place; false if there is to be none.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut inner = self.lock();
        loop {
            if inner.halt || (inner.state == State::Draining && inner.queue.is_empty()) {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || inner.is_succeeded() {
                return true;
            }
            inner = self.wait(inner, Some(left));
        }
    }

    /// Looks after the engine's thread, which cannot look after itself while the device has it.
    fn look(&self) {
        let inner = self.lock();
        let waiting = inner.outage.as_ref().filter(|outage| !outage.refusing);
        let impatient = waiting.is_some_and(|outage| outage.since.elapsed() > PATIENCE);
        let late = inner.busy.as_ref().filter(|busy| busy.since.elapsed() > busy.most).map(|busy| busy.most);
        let late = late.filter(|_| !inner.overdue);
        let silent = inner.silent_since.is_some_and(|since| since.elapsed() > SILENCE);
        drop(inner);
        if impatient {
            self.refuse();
        }
        if let Some(most) = late {
            self.declare_overdue(most);
        } else if silent {
            let error = format!("loading the model again has said nothing for {} s", SILENCE.as_secs());
            self.set_state(State::Hung { error }, |now| matches!(now, State::Ready | State::Loading { .. }));
        }
    }

    /// Tells the running request what its thread cannot.
    fn declare_overdue(&self, most: Duration) {
        let error = chain(&Overdue(most));
        let mut inner = self.lock();
        // The pass may have come back in this moment. Until all is told it must not.
        if inner.busy.is_none() {
            return;
        }
        tracing::error!(error, "the device does not answer");
        inner.overdue = true;
        inner.count_fault(Fault::Overdue);
        if matches!(inner.state, State::Ready | State::Loading { .. }) {
            inner.state = State::Hung { error: error.clone() };
            self.state.send_replace(inner.state.clone());
        }
        let Some(running) = inner.running.take() else { return };
        let usage = Usage {
            prompt_tokens: running.job.prompt_tokens,
            completion_tokens: running.job.committed,
            ..Usage::default()
        };
        let reason = FinishReason::Error(error);
        inner.finished(&running.queued, &reason, usage, &Stats::default(), 0.0);
        running.queued.sender.send(Event::Finish { reason, usage, stats: Stats::default() });
    }

    /// How often to look.
    fn look_interval(&self) -> Duration {
        (self.lock().options.pass_limit / 8).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }
}

/// Starts the thread that looks after the engine's, until the engine has ended.
pub(super) fn watch(shared: &Arc<Shared>) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
        while !shared.lock().state.is_over() {
            std::thread::sleep(shared.look_interval());
            shared.look();
        }
    })?;
    Ok(())
}
