//! A client of the admin protocol: one connection a request, bounded answers, errors that say what to do.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;
use tokio::{net::UnixStream, time::timeout};

use crate::protocol::{ErrorBody, LogLine};

/// Most bytes of an answer that is read whole.
const LARGEST_ANSWER: usize = 16 << 20;
/// Most bytes of one line of the log.
const LONGEST_LINE: usize = 1 << 20;

/// Why a request failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// No connection to the socket.
    #[error("cannot reach axed at {}: {source}", socket.display())]
    Unreachable {
        /// The socket that was tried.
        socket: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The daemon took too long.
    #[error("axed at {} did not answer within {} s", socket.display(), after.as_secs_f32())]
    TooSlow {
        /// The socket that was tried.
        socket: PathBuf,
        /// How long it was given.
        after: Duration,
    },
    /// The daemon refused.
    #[error("{}", body.error.message)]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// What the daemon said.
        body: ErrorBody,
    },
    /// Whatever answers there does not speak this protocol, or the connection broke.
    #[error("{} on {}: {what}", path, socket.display())]
    Protocol {
        /// The socket.
        socket: PathBuf,
        /// The request's path.
        path: String,
        /// What was wrong.
        what: String,
    },
}

/// Speaks to one daemon.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
}

impl Client {
    /// A client of the daemon at `socket` which waits at most `patience` for a whole answer.
    pub fn new(socket: impl Into<PathBuf>, patience: Duration) -> Self {
        Self { socket: socket.into(), patience }
    }

    /// The same, of the daemon at another socket.
    #[must_use]
    pub fn at(&self, socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), ..*self }
    }

    /// The socket it connects to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET path`, the answer as JSON.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.whole(Method::GET, path, Bytes::new()).await
    }

    /// `POST path` with `body` as JSON (`None`: no body), the answer as JSON.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let bytes = match body {
            Some(body) => serde_json::to_vec(body).map_err(|error| self.protocol(path, error))?,
            None => Vec::new(),
        };
        self.whole(Method::POST, path, bytes.into()).await
    }

    /// `GET path` whose answer is one [`LogLine`] a line. Only the connection and the head of the answer are
    /// subject to the client's patience.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn lines(&self, path: &str) -> Result<Lines, ClientError> {
        let response = self.in_time(self.send(Method::GET, path, Bytes::new())).await?;
        let lines = Lines { client: self.clone(), path: path.to_owned(), body: response, buffer: Vec::new() };
        Ok(lines)
    }

    async fn whole<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, ClientError> {
        self.in_time(async {
            let body = self.send(method, path, body).await?;
            let bytes = self.collect(path, body).await?;
            serde_json::from_slice(&bytes).map_err(|error| self.protocol(path, error))
        })
        .await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<hyper::body::Incoming, ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ClientError::Unreachable { socket: self.socket.clone(), source })?;
        let broken = |error: hyper::Error| self.protocol(path, error);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // The connection ends with the last of `sender` and the body; its error is reported through them.
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", "axed");
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Full::new(body)).map_err(|error| self.protocol(path, error))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response.into_body());
        }
        let bytes = self.collect(path, response.into_body()).await?;
        match serde_json::from_slice(&bytes) {
            Ok(body) => Err(ClientError::Refused { status, body }),
            Err(_) => Err(self.protocol(path, format!("status {status} without an explanation"))),
        }
    }

    async fn collect(&self, path: &str, body: hyper::body::Incoming) -> Result<Bytes, ClientError> {
        match Limited::new(body, LARGEST_ANSWER).collect().await {
            Ok(collected) => Ok(collected.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => {
                Err(self.protocol(path, format!("the answer has more than {LARGEST_ANSWER} bytes")))
            }
            Err(error) => Err(self.protocol(path, error)),
        }
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        match timeout(self.patience, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(ClientError::TooSlow { socket: self.socket.clone(), after: self.patience }),
        }
    }

    fn protocol(&self, path: &str, what: impl ToString) -> ClientError {
        ClientError::Protocol { socket: self.socket.clone(), path: path.to_owned(), what: what.to_string() }
    }
}

/// Log lines as they arrive.
#[derive(Debug)]
pub struct Lines {
    client: Client,
    path: String,
    body: hyper::body::Incoming,
    buffer: Vec<u8>,
}

impl Lines {
    /// The next line; `None` when the daemon ended the answer. Cancel safe.
    ///
    /// # Errors
    /// [`ClientError::Protocol`] when the connection breaks or a line is no [`LogLine`].
    pub async fn next(&mut self) -> Result<Option<LogLine>, ClientError> {
        loop {
            while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                // Empty lines only show that the connection lives.
                if !line.trim_ascii().is_empty() {
                    let parsed = serde_json::from_slice(&line);
                    return parsed.map(Some).map_err(|error| self.client.protocol(&self.path, error));
                }
            }
            if self.buffer.len() > LONGEST_LINE {
                return Err(self.client.protocol(&self.path, "a log line without end"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.buffer.extend(frame.data_ref().map_or(&[][..], |data| data)),
                Some(Err(error)) => return Err(self.client.protocol(&self.path, error)),
                None => return Ok(None),
            }
        }
    }
}
