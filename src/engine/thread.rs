//! The thread that owns the device: load, then one job after the other, then end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::handle::{EngineHandle, Shared};
use super::model::{LoadProgress, Loaded, Stopped};
use super::run::run;
use super::status::State;
use super::{Cause, FinishReason, Stats, Usage};
use crate::decode::BackendError;

/// How the engine works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Jobs that may wait, besides the one that runs.
    pub queue_capacity: usize,
}

/// The running thread.
pub struct Engine {
    handle: EngineHandle,
    thread: JoinHandle<()>,
}

impl Engine {
    /// Starts the thread. `load` runs on it and reports its progress; until it returns, requests are refused as
    /// [`SubmitError::NotReady`](super::SubmitError::NotReady).
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn spawn(
        load: impl FnOnce(&LoadProgress) -> Result<Loaded, BackendError> + Send + 'static,
        options: Options,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::new(options.queue_capacity));
        let handle = EngineHandle { shared: Arc::clone(&shared) };
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            live(&shared, load);
        })?;
        Ok(Self { handle, thread })
    }

    /// A share for others.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Waits for the thread's end; call [`EngineHandle::drain`] or [`EngineHandle::shutdown`] before.
    pub fn join(self) {
        // The thread catches its own panics, so there is nothing in the result.
        let _ended = self.thread.join();
    }
}

fn live(shared: &Arc<Shared>, load: impl FnOnce(&LoadProgress) -> Result<Loaded, BackendError>) {
    let progress = LoadProgress(Arc::clone(shared));
    let loaded = guarded("loading the model", || match catch_unwind(AssertUnwindSafe(|| load(&progress))) {
        Ok(loaded) => loaded.map(Some).map_err(|e| chain(&*e)),
        Err(panic) if panic.is::<Stopped>() => Ok(None),
        Err(panic) => resume_unwind(panic),
    });
    let ended = loaded.and_then(|loaded| loaded).and_then(|loaded| match loaded {
        Some(loaded) => serve(shared, loaded),
        None => Ok(()),
    });
    let (state, reason) = match ended {
        Ok(()) => (State::Stopped, FinishReason::Cancelled(Cause::Shutdown)),
        Err(error) => {
            tracing::error!(error, "the engine has failed");
            (State::Failed { error: error.clone() }, FinishReason::Error(error))
        }
    };
    shared.set_state(state, |_| true);
    shared.clear_queue(&reason);
}

/// Runs jobs until told to end. An `Err` is a panic's message.
fn serve(shared: &Arc<Shared>, loaded: Loaded) -> Result<(), String> {
    let Loaded { mut backend, model } = loaded;
    let model = Arc::new(model);
    {
        let mut inner = shared.lock();
        inner.memory = backend.memory();
        inner.model = Some(Arc::clone(&model));
    }
    shared.set_state(State::Ready, |now| matches!(now, State::Loading { .. }));
    let mut served = Ok(());
    while served.is_ok()
        && let Some((queued, cancel)) = shared.next_job()
    {
        served = guarded("generating", || run(shared, backend.as_mut(), &model, &queued, &cancel));
        if let Err(error) = &served {
            let usage = Usage { prompt_tokens: queued.request.prompt.len(), ..Usage::default() };
            let reason = FinishReason::Error(error.clone());
            // The state first: who hears of the error must not find the engine ready.
            shared.set_state(State::Failed { error: error.clone() }, |_| true);
            shared.finished(&reason, usage, &Stats::default(), 0.0);
            queued.sender.send(super::Event::Finish { reason, usage, stats: Stats::default() });
        } else {
            shared.lock().memory = backend.memory();
        }
    }
    // Whatever panicked once may do so again when its device handles are released.
    guarded("releasing the device", move || drop(backend)).and(served)
}

/// Runs `body`; a panic becomes an error that says what was going on.
fn guarded<T>(what: &str, body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        format!("internal error while {what}: {}; restart the daemon and report this", message(&*panic))
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message")
}

/// The message of an error and of its causes, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Messages that already embed their cause need it no second time.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
