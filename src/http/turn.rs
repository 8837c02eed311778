//! Large bodies take turns: parsed, a body can take many times its size.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::device::process::release_freed_memory;

/// Bodies from this many bytes on.
const LARGE: usize = 256 << 10;

/// Large requests that are read and encoded at one time.
const AT_ONE_TIME: usize = 2;

/// Large bodies that are held at one time, from their arrival to their turn.
const HELD: usize = 16;

/// Time after which what a turn has made is submitted or refused, and freed.
const SETTLED: Duration = Duration::from_millis(500);

/// The turns of one server, and the places in which large bodies wait for them.
pub(super) struct Turns {
    turns: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

/// A place for a large body that is on its way or waits for its turn.
pub(super) struct Place(Option<OwnedSemaphorePermit>);

/// A large request's turn, from parsing to the encoded prompt. Soon after its end the memory goes back to the system;
/// drop it after what was made in it.
pub(super) struct Turn(Option<OwnedSemaphorePermit>);

impl Turns {
    pub(super) fn new() -> Self {
        Self { turns: Arc::new(Semaphore::new(AT_ONE_TIME)), places: Arc::new(Semaphore::new(HELD)) }
    }

    /// Waits for a turn, if a body of this many bytes needs one.
    pub(super) async fn take(&self, bytes: usize) -> Turn {
        if bytes < LARGE {
            return Turn(None);
        }
        // A semaphore that is never closed always gives its permit.
        Turn(Arc::clone(&self.turns).acquire_owned().await.ok())
    }

    /// Waits for a place, if a body that has got this large needs one and has none.
    pub(super) async fn hold(&self, bytes: usize, place: &mut Place) {
        if bytes >= LARGE && place.0.is_none() {
            place.0 = Arc::clone(&self.places).acquire_owned().await.ok();
        }
    }
}

impl Place {
    /// That of a body that is small as yet.
    pub(super) fn none() -> Self {
        Self(None)
    }
}

impl Turn {
    /// Whether the request is large.
    pub(super) fn is_large(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Without a runtime the process is about to end.
        if self.is_large()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async {
                tokio::time::sleep(SETTLED).await;
                tokio::task::spawn_blocking(release_freed_memory);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn large_bodies_are_held_in_so_many_places() {
        let turns = Turns::new();
        let mut places: Vec<Place> = (0..=HELD).map(|_| Place::none()).collect();
        let (last, others) = places.split_last_mut().unwrap();
        for place in others.iter_mut() {
            // Held once, however large it gets.
            for bytes in [1, LARGE, 2 * LARGE] {
                assert!(turns.hold(bytes, place).now_or_never().is_some());
            }
        }
        assert!(turns.hold(LARGE - 1, last).now_or_never().is_some(), "small ones need none");
        assert!(turns.hold(LARGE, last).now_or_never().is_none());
        others[3] = Place::none();
        assert!(turns.hold(LARGE, last).now_or_never().is_some());
    }
}
