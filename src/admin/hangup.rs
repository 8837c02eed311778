//! Notices that a client has gone while its answer is being made.
//!
//! The end of what a client sends is no sign of that: `printf … | nc -U` closes its side before it reads. A socket that
//! is closed on both sides is.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::UnixStream;

/// The client of a connection, as far as its going can be seen.
#[derive(Debug, Clone)]
pub(super) struct Hangup(Arc<UnixStream>);

impl Hangup {
    /// Of the client at the other end of `stream`.
    ///
    /// # Errors
    /// When there are no more file descriptors.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let again = std::os::unix::net::UnixStream::from(stream.as_fd().try_clone_to_owned()?);
        Ok(Self(Arc::new(UnixStream::from_std(again)?)))
    }

    /// Waits until the client has gone.
    pub(super) async fn happened(&self) {
        loop {
            match self.0.ready(Interest::WRITABLE).await {
                Ok(ready) if !ready.is_write_closed() => {}
                _ => return,
            }
            // To be writable is no news: wait for the next.
            let _would_block =
                self.0.try_io(Interest::WRITABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncWriteExt;
    use tokio::time::timeout;

    #[tokio::test]
    async fn half_closed_is_not_gone() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let hangup = Hangup::of(&ours).unwrap();
        theirs.write_all(b"hello").await.unwrap();
        theirs.shutdown().await.unwrap();
        let short = Duration::from_millis(50);
        assert!(timeout(short, hangup.happened()).await.is_err(), "still there");
        drop(theirs);
        timeout(Duration::from_secs(5), hangup.happened()).await.expect("gone");
    }
}
