//! The door that requests come in by. While a reload changes the model it is closed: whoever comes waits outside, and
//! whoever is inside keeps the model until its request is in the queue.

use std::sync::Arc;

use super::handle::{EngineHandle, SubmitError, check_room, check_state};
use super::shared::Shared;
use super::status::State;

/// Who is where.
#[derive(Default)]
pub(super) struct Door {
    pub(super) closed: bool,
    pub(super) inside: usize,
    pub(super) waiting: usize,
}

/// Holds the present model in place until it is dropped, so that what was encoded for it runs on it.
pub struct Pass(Arc<Shared>);

impl Drop for Pass {
    fn drop(&mut self) {
        let closed = {
            let mut inner = self.0.lock();
            inner.door.inside -= 1;
            inner.door.closed
        };
        if closed {
            self.0.work.notify_all();
        }
    }
}

/// A place among those who wait outside.
struct Place<'a>(&'a Shared);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.lock().door.waiting -= 1;
    }
}

impl EngineHandle {
    /// Waits for as long as a reload changes the model, then holds the present one in place.
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`] if too many wait already, [`SubmitError::Draining`] or [`SubmitError::Failed`] if the
    /// engine ends meanwhile.
    pub async fn enter(&self) -> Result<Pass, SubmitError> {
        let shared = &self.shared;
        let mut closed = shared.closed.subscribe();
        let mut state = shared.state.subscribe();
        let mut place = None;
        loop {
            // Before the look, so that no change after it is missed.
            closed.mark_unchanged();
            state.mark_unchanged();
            {
                let mut inner = shared.lock();
                if !inner.door.closed {
                    inner.door.inside += 1;
                    return Ok(Pass(Arc::clone(shared)));
                }
                let over = match &inner.state {
                    State::Draining | State::Stopped => Some(SubmitError::Draining),
                    State::Failed { error } => Some(SubmitError::Failed { error: error.clone() }),
                    // Whether the next model comes to anything is not known yet.
                    _ if inner.is_refusing() => check_state(&inner).err(),
                    State::Loading { .. } | State::Ready | State::Hung { .. } => None,
                };
                if let Some(error) = over {
                    inner.counters.requests.rejected += 1;
                    return Err(error);
                }
                if place.is_none() {
                    if let Err(error) = check_room(&inner) {
                        inner.counters.requests.rejected += 1;
                        return Err(error);
                    }
                    inner.door.waiting += 1;
                    place = Some(Place(shared));
                }
            }
            // The senders live as long as `shared`.
            tokio::select! {
                _ = closed.changed() => {}
                _ = state.changed() => {}
            }
        }
    }
}
