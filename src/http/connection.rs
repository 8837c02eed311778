//! A socket whose other side may not refuse to take bytes for ever.
//!
//! The time a request's head and body may take is limited elsewhere; this limits answers. Without it a client that
//! stops reading a stream would keep its connection, and what is buffered for it, as long as it likes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::unread;

pub(super) struct Connection {
    io: TokioIo<TcpStream>,
    patience: Duration,
    /// Runs while a write is stuck.
    stuck: Option<Pin<Box<Sleep>>>,
    /// What is being written instead of what was asked for, and how much of it has been.
    instead: Option<(Vec<u8>, usize)>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { io: TokioIo::new(stream), patience, stuck: None, instead: None }
    }

    /// Passes the outcome of a write on, or an error when none has gone through for too long.
    fn watch<T>(&mut self, outcome: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stuck = None;
            return outcome;
        }
        let deadline = Instant::now() + self.patience;
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        ready!(stuck.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not take the answer")))
    }
}

impl Read for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl Write for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.instead.is_none() {
            self.instead = unread::answer(bytes).map(|answer| (answer, 0));
        }
        while let Some((answer, written)) = self.instead.take() {
            let outcome = Pin::new(&mut self.io).poll_write(cx, &answer[written..]);
            let more = match self.watch(outcome, cx) {
                Poll::Ready(more) => more?,
                Poll::Pending => {
                    self.instead = Some((answer, written));
                    return Poll::Pending;
                }
            };
            if more == 0 || written + more == answer.len() {
                // Nothing at all is what a closed socket takes.
                return Poll::Ready(Ok(if more == 0 { 0 } else { bytes.len() }));
            }
            self.instead = Some((answer, written + more));
        }
        let outcome = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.watch(outcome, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut filled = slices.iter().filter(|slice| !slice.is_empty());
        if let (Some(only), None) = (filled.next(), filled.next()) {
            return self.poll_write(cx, only);
        }
        let outcome = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.watch(outcome, cx)
    }
}
