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

/// Time after which what a turn has made is submitted or refused, and freed.
const SETTLED: Duration = Duration::from_millis(500);

/// The turns of one server.
pub(super) struct Turns(Arc<Semaphore>);

/// A large request's turn, from parsing to the encoded prompt. Soon after its end the memory goes back to the system;
/// drop it after what was made in it.
pub(super) struct Turn(Option<OwnedSemaphorePermit>);

impl Turns {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONE_TIME)))
    }

    /// Waits for a turn, if a body of this many bytes needs one.
    pub(super) async fn take(&self, bytes: usize) -> Turn {
        if bytes < LARGE {
            return Turn(None);
        }
        // A semaphore that is never closed always gives its permit.
        Turn(Arc::clone(&self.0).acquire_owned().await.ok())
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
