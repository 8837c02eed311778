//! The threads that own devices: the first one, and those that take over from it.

use std::sync::Arc;
use std::time::Duration;

use super::fault;
use super::handle::EngineHandle;
use super::loader::{LoadProgress, Loader, Occasion, Once, fetch};
use super::model::Loaded;
use super::shared::Shared;
use super::status::State;
use super::tenant::{Tenant, end};
use crate::decode::BackendError;

/// How the engine works. All of it can be changed while it does, see [`EngineHandle::set_options`].
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Jobs that may wait, besides the one that runs.
    pub queue_capacity: usize,
    /// Longest time of one step of a generation; a device that takes longer counts as lost.
    pub pass_limit: Duration,
    /// So many faults within [`Options::fault_window`] are the end of the engine; 0: it is rebuilt every time.
    pub most_faults: usize,
    /// How long a fault counts.
    pub fault_window: Duration,
    /// A model without work for so long is put away, and fetched again when a request comes.
    pub idle_unload: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queue_capacity: 64,
            pass_limit: Duration::from_secs(120),
            most_faults: 3,
            fault_window: Duration::from_secs(600),
            idle_unload: None,
        }
    }
}

/// The running engine.
pub struct Engine {
    handle: EngineHandle,
}

impl Engine {
    /// Starts an engine whose model is loaded once: a fault of its device is the end of it. `load` runs on the engine's
    /// thread and reports its progress; until it returns, requests are refused as
    /// [`SubmitError::NotReady`](super::SubmitError::NotReady).
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn spawn(
        load: impl FnOnce(&LoadProgress) -> Result<Loaded, BackendError> + Send + 'static,
        options: Options,
    ) -> std::io::Result<Self> {
        Self::with(Box::new(Once(Some(load))), options)
    }

    /// Starts an engine that can have its model loaded again.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn with(loader: Box<dyn Loader>, options: Options) -> std::io::Result<Self> {
        let engine = Self::new(options);
        engine.start(loader)?;
        Ok(engine)
    }

    /// An engine that has to be started yet: until then it loads nothing.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { handle: EngineHandle { shared: Arc::new(Shared::new(options)) } }
    }

    /// Starts it, once.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(&self, loader: Box<dyn Loader>) -> std::io::Result<()> {
        let shared = &self.handle.shared;
        start(shared, "engine", move |shared, me| live(&shared, me, loader))?;
        fault::watch(shared)
    }

    /// A share for others.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Waits for the thread's end; call [`EngineHandle::drain`] or [`EngineHandle::shutdown`] before.
    pub fn join(self) {
        let tenant = {
            let mut inner = self.handle.shared.lock();
            let tenant = inner.tenant;
            inner.threads.remove(&tenant)
        };
        // The thread catches its own panics, so there is nothing in the result.
        let _ended = tenant.map(std::thread::JoinHandle::join);
    }
}

/// Starts a thread that may become the tenant, with the number it goes by.
pub(super) fn start(
    shared: &Arc<Shared>,
    name: &str,
    body: impl FnOnce(Arc<Shared>, u64) + Send + 'static,
) -> std::io::Result<()> {
    let me = {
        let mut inner = shared.lock();
        inner.threads.retain(|_, thread| !thread.is_finished());
        let me = inner.next_thread;
        inner.next_thread += 1;
        me
    };
    let for_thread = Arc::clone(shared);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(for_thread, me))?;
    shared.lock().threads.insert(me, thread);
    Ok(())
}

/// The life of the first thread.
fn live(shared: &Arc<Shared>, me: u64, mut loader: Box<dyn Loader>) {
    match fetch(&mut *loader, shared, Occasion::Start) {
        Ok(Some(loaded)) => {
            let tenant = Tenant::new(shared, me, loader, loaded);
            tenant.move_in();
            shared.set_state(State::Ready, |now| matches!(now, State::Loading { .. }));
            tenant.serve();
        }
        Ok(None) => end(shared, Ok(())),
        Err(error) => end(shared, Err(error)),
    }
}
