//! The thread whose model serves: it runs one job after the other, puts the model away when it idles, fetches it again
//! when it is needed, and rebuilds everything when the device is lost.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::fault::Fault;
use super::loader::{Loader, Occasion, fetch, guarded};
use super::model::{Loaded, Model};
use super::run::run;
use super::shared::{Next, Queued, Shared};
use super::status::State;
use super::{Cause, Event, FinishReason, Stats, Usage};
use crate::decode::{Backend, Memory};

/// Time before a model that could not be loaded again is tried once more; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// And is no longer than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A thread with a model.
pub(super) struct Tenant {
    shared: Arc<Shared>,
    me: u64,
    loader: Box<dyn Loader>,
    model: Arc<Model>,
    /// None while the model is put away.
    backend: Option<Box<dyn Backend>>,
}

impl Tenant {
    pub(super) fn new(shared: &Arc<Shared>, me: u64, loader: Box<dyn Loader>, loaded: Loaded) -> Self {
        let Loaded { backend, model } = loaded;
        Self { shared: Arc::clone(shared), me, loader, model: Arc::new(model), backend: Some(backend) }
    }

    /// Shows everyone the model.
    pub(super) fn move_in(&self) {
        let memory = self.backend.as_ref().map(|backend| backend.memory()).unwrap_or_default();
        let mut inner = self.shared.lock();
        inner.tenant = self.me;
        inner.model = Some(Arc::clone(&self.model));
        inner.memory = memory;
        inner.resident = true;
        inner.loading = None;
        inner.silent_since = None;
        // Whatever befell the model before is past.
        inner.outage = None;
        inner.recent_faults.clear();
        inner.idle_since = std::time::Instant::now();
    }

    /// Runs jobs until told to end, or until another thread is the tenant.
    pub(super) fn serve(mut self) {
        let ended = loop {
            let done = match self.shared.next(self.me, self.backend.is_some()) {
                Next::Job(queued, cancel) => self.run(&queued, &cancel),
                Next::Load => self.fetch_again(),
                Next::Vacate => {
                    self.vacate();
                    Ok(())
                }
                Next::Leave => {
                    if let Err(error) = self.release() {
                        tracing::warn!(error, "the old model");
                    }
                    return;
                }
                Next::End => break Ok(()),
            };
            if let Err(error) = done {
                break Err(error);
            }
        };
        let released = self.release();
        end(&self.shared, ended.and(released));
    }

    /// `Err` if the engine cannot go on.
    fn run(&mut self, queued: &Queued, cancel: &AtomicBool) -> Result<(), String> {
        let Some(backend) = &mut self.backend else { return Ok(()) };
        let (shared, model) = (&*self.shared, &*self.model);
        let broken = match guarded("generating", || run(shared, backend.as_mut(), model, queued, cancel)) {
            Ok(None) => {
                let memory = backend.memory();
                self.shared.lock().memory = memory;
                return Ok(());
            }
            Ok(Some(error)) => error,
            Err(error) => {
                self.tell_of_panic(queued, &error);
                error
            }
        };
        self.rebuild(broken, Duration::ZERO)
    }

    fn tell_of_panic(&self, queued: &Queued, error: &str) {
        // The state first: who hears of the error must not find the engine ready.
        self.shared.fault(Fault::Panic, error);
        if !self.loader.again() {
            self.shared.set_state(State::Failed { error: error.to_owned() }, |_| true);
        }
        if self.shared.forget_pass() {
            return;
        }
        let usage = Usage { prompt_tokens: queued.request.prompt.len(), ..Usage::default() };
        let reason = FinishReason::Error(error.to_owned());
        self.shared.finished(queued, &reason, usage, &Stats::default(), 0.0);
        queued.sender.send(Event::Finish { reason, usage, stats: Stats::default() });
    }

    /// Brings back a model that was put away.
    fn fetch_again(&mut self) -> Result<(), String> {
        let Err(error) = self.load(Occasion::Demand) else { return Ok(()) };
        self.shared.fault(Fault::Rebuild, &error);
        self.shared.refuse();
        self.rebuild(error, FIRST_PAUSE)
    }

    /// Makes everything on the device anew, until it works or has failed too often.
    fn rebuild(&mut self, mut error: String, mut pause: Duration) -> Result<(), String> {
        // Whatever was lost or panicked may do so again when its handles are released; they are gone all the same.
        if let Err(error) = self.release() {
            tracing::warn!(error, "the old device handles");
        }
        loop {
            if !self.loader.again() {
                return Err(error);
            }
            let too_many = self.shared.too_many_faults(&error);
            if self.shared.give_way(self.me, too_many.is_some()) {
                return Ok(());
            }
            if let Some(error) = too_many {
                return Err(error);
            }
            if !self.shared.pause(pause) || self.shared.give_way(self.me, false) {
                return Ok(());
            }
            tracing::warn!(error, "rebuilding the engine");
            let what = format!("rebuilding the engine after a fault: {error}");
            self.shared
                .set_state(State::Loading { progress: 0.0, what }, |now| matches!(now, State::Hung { .. }));
            match self.load(Occasion::Fault) {
                Ok(()) => {
                    self.shared.recovered();
                    return Ok(());
                }
                Err(again) => {
                    self.shared.fault(Fault::Rebuild, &again);
                    self.shared.refuse();
                    error = again;
                    pause = (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                }
            }
        }
    }

    /// Loads the model once more. Its text side stays the one that waiting prompts were encoded with.
    fn load(&mut self, occasion: Occasion) -> Result<(), String> {
        let loaded = fetch(&mut *self.loader, &self.shared, occasion);
        {
            let mut inner = self.shared.lock();
            inner.loading = None;
            inner.silent_since = None;
        }
        // Where nobody wants it any more, the next look says what to do.
        let Some(Loaded { backend, model }) = loaded? else { return Ok(()) };
        if model.identity != self.model.identity {
            return Err(format!(
                "the checkpoint of {} was exchanged since it was loaded (it was {}, it is {}): restart the daemon to \
                 serve the new one, or put the old one back; after the next exchange, `axectl reload` takes the new one up",
                model.name, self.model.identity, model.identity
            ));
        }
        let memory = backend.memory();
        self.backend = Some(backend);
        {
            let mut inner = self.shared.lock();
            inner.memory = memory;
            inner.resident = true;
            inner.idle_since = std::time::Instant::now();
            inner.counters.loads += 1;
        }
        self.shared.set_state(State::Ready, |now| matches!(now, State::Loading { .. } | State::Hung { .. }));
        Ok(())
    }

    /// Puts the model away.
    fn vacate(&mut self) {
        tracing::info!(model = self.model.name, "putting the model away");
        if let Err(error) = self.release() {
            tracing::warn!(error, "putting the model away");
        }
        self.shared.lock().counters.unloads += 1;
    }

    /// Lets go of the device.
    fn release(&mut self) -> Result<(), String> {
        let backend = self.backend.take();
        let released = guarded("releasing the device", || drop(backend));
        let mut inner = self.shared.lock();
        if inner.tenant == self.me {
            inner.resident = false;
            inner.memory = Memory { budget: inner.memory.budget, ..Memory::default() };
        }
        released
    }
}

/// The engine has ended.
pub(super) fn end(shared: &Shared, ended: Result<(), String>) {
    let (state, reason) = match ended {
        Ok(()) => (State::Stopped, FinishReason::Cancelled(Cause::Shutdown)),
        Err(error) => {
            tracing::error!(error, "the engine has failed");
            (State::Failed { error }, FinishReason::Cancelled(Cause::Outage))
        }
    };
    shared.set_state(state, |_| true);
    shared.clear_queue(&reason);
}
