//! One model takes another's place: loaded beside it while it serves, or after it has gone where there is no room for
//! both; tried before the switch. Whatever fails, the one that was there goes on.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use super::handle::EngineHandle;
use super::loader::{Loader, Occasion, chain, fetch, guarded};
use super::model::Loaded;
use super::shared::{Inner, Shared};
use super::status::State;
use super::tenant::Tenant;
use super::thread::start;

/// How far a succession is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Succession {
    /// The successor looks whether there is room, and loads if there is.
    Preparing,
    /// The door is closed; the tenant finishes what was accepted, and with `vacate` puts its model away then.
    Clearing {
        /// There is no room for both.
        vacate: bool,
    },
    /// Nothing is left that was meant for the old model.
    Clear {
        /// The old model is not on the device any more.
        vacated: bool,
    },
}

/// How a model came into another's place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replaced {
    /// It was loaded while the other one served.
    pub beside: bool,
    /// Seconds that loading and trying it took.
    pub load_s: f64,
    /// Seconds for which requests waited at the door.
    pub closed_s: f64,
}

/// What is to be done between two models, when nothing is encoded for either.
pub type Switch = Box<dyn FnOnce() + Send>;

const ENDING: &str = "the daemon is about to end";

impl EngineHandle {
    /// Has the model of `loader` take the present one's place. `switch` is called when it does: nothing runs then, and
    /// whoever comes waits. Requests that were accepted before run on the old model.
    ///
    /// # Errors
    /// Why the old model goes on.
    pub async fn replace(&self, loader: Box<dyn Loader>, switch: Switch) -> Result<Replaced, String> {
        {
            let mut inner = self.shared.lock();
            if inner.state == State::Draining || inner.state.is_over() {
                return Err(ENDING.to_owned());
            }
            if inner.model.is_none() {
                return Err("the first model is still being loaded".to_owned());
            }
            if let State::Hung { error } = &inner.state {
                return Err(format!("the old model cannot be let go: {error}"));
            }
            if inner.succession.is_some() {
                return Err("the model is being replaced already".to_owned());
            }
            inner.succession = Some(Succession::Preparing);
        }
        let (tell, told) = oneshot::channel();
        let started =
            start(&self.shared, "engine", move |shared, me| succeed(&shared, me, loader, switch, tell));
        if let Err(error) = started {
            give_up(&self.shared, false);
            return Err(format!("the system gives no thread for the new model: {error}"));
        }
        told.await.unwrap_or_else(|_gone| Err("the new model's thread ended".to_owned()))
    }
}

/// The life of a thread that is to take over.
fn succeed(
    shared: &Arc<Shared>,
    me: u64,
    mut loader: Box<dyn Loader>,
    switch: Switch,
    tell: oneshot::Sender<Result<Replaced, String>>,
) {
    // Nobody may listen any more; the switch was asked for all the same.
    let was_resident = shared.lock().resident;
    match prepare(shared, &mut *loader) {
        Err(error) => {
            give_up(shared, was_resident);
            let _told = tell.send(Err(error));
        }
        Ok((loaded, replaced, closed)) => {
            let tenant = take_over(shared, me, loader, loaded, switch);
            let closed_s = closed.elapsed().as_secs_f64();
            let _told = tell.send(Ok(Replaced { closed_s, ..replaced }));
            tenant.serve();
        }
    }
}

/// Loads and tries the new model, and waits until nobody needs the old one; also since when the door is closed.
fn prepare(shared: &Arc<Shared>, loader: &mut dyn Loader) -> Result<(Loaded, Replaced, Instant), String> {
    let held = shared.lock().memory;
    let beside = guarded("looking for room", || loader.fits_beside(held))?.map_err(|e| chain(&*e))?;
    let mut load_s = 0.0;
    let mut obtain = || {
        let began = Instant::now();
        let loaded = fetch(loader, shared, Occasion::Reload);
        load_s += began.elapsed().as_secs_f64();
        loaded?.ok_or_else(|| ENDING.to_owned())
    };
    let early = if beside { Some(obtain()?) } else { None };
    let closed = Instant::now();
    clear(shared, !beside)?;
    let loaded = match early {
        Some(loaded) => loaded,
        None => obtain()?,
    };
    Ok((loaded, Replaced { beside, load_s, closed_s: 0.0 }, closed))
}

/// Closes the door and waits until the tenant has run everything that was accepted.
fn clear(shared: &Shared, vacate: bool) -> Result<(), String> {
    let mut inner = shared.lock();
    inner.succession = Some(Succession::Clearing { vacate });
    inner.door.closed = true;
    shared.closed.send_replace(true);
    shared.work.notify_all();
    loop {
        if inner.halt || inner.state == State::Draining || inner.state.is_over() {
            return Err(ENDING.to_owned());
        }
        if matches!(inner.succession, Some(Succession::Clear { .. })) {
            break;
        }
        inner = shared.wait(inner, None);
    }
    drop(inner);
    if vacate {
        let what = "loading the new model".to_owned();
        shared.set_state(State::Loading { progress: 0.0, what }, |now| *now == State::Ready);
    }
    Ok(())
}

/// Makes this thread the tenant.
fn take_over(
    shared: &Arc<Shared>,
    me: u64,
    loader: Box<dyn Loader>,
    loaded: Loaded,
    switch: Switch,
) -> Tenant {
    let tenant = Tenant::new(shared, me, loader, loaded);
    tenant.move_in();
    if let Err(error) = guarded("taking over the new settings", switch) {
        tracing::error!(error, "the new model serves, with settings of the old one");
    }
    open(shared);
    shared.set_state(State::Ready, |now| matches!(now, State::Loading { .. } | State::Hung { .. }));
    tenant
}

/// The old model goes on; it is fetched again if it `was_resident` and had to go.
fn give_up(shared: &Shared, was_resident: bool) {
    {
        let mut inner = shared.lock();
        inner.wanted = was_resident && !inner.resident;
    }
    open(shared);
}

impl Inner {
    /// Whether another model is ready to take this one's place.
    pub(super) fn is_succeeded(&self) -> bool {
        matches!(self.succession, Some(Succession::Clearing { .. }))
    }
}

impl Shared {
    /// Lets a successor take over from a tenant that cannot get its model back: once nobody waits for that any more, or at
    /// once, also from one that is still loading, if it is `the_end` of trying. Whether it has taken over.
    pub(super) fn give_way(&self, me: u64, the_end: bool) -> bool {
        let mut inner = self.lock();
        loop {
            if inner.tenant != me {
                return true;
            }
            if inner.halt || inner.state == State::Draining || inner.state.is_over() {
                return false;
            }
            match inner.succession {
                None => return false,
                Some(Succession::Preparing) if !the_end => return false,
                Some(Succession::Clearing { .. }) if !the_end && !inner.is_refusing() => return false,
                Some(Succession::Clearing { .. }) if !inner.queue.is_empty() => {
                    drop(inner);
                    self.refuse();
                    inner = self.lock();
                    continue;
                }
                Some(Succession::Clearing { .. }) if inner.door.inside == 0 => {
                    inner.succession = Some(Succession::Clear { vacated: true });
                    self.work.notify_all();
                }
                Some(_) => {}
            }
            inner = self.wait(inner, None);
        }
    }
}

fn open(shared: &Shared) {
    let mut inner = shared.lock();
    inner.succession = None;
    inner.successor = None;
    inner.door.closed = false;
    shared.closed.send_replace(false);
    drop(inner);
    shared.work.notify_all();
}
