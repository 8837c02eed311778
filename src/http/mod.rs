//! The public face: the OpenAI API, health and metrics over HTTP/1.1.
//!
//! | route | what |
//! | --- | --- |
//! | `POST /v1/chat/completions` | a chat reply, whole or as server-sent events |
//! | `POST /v1/completions` | the continuation of a text or of token ids |
//! | `POST /edit` | a text with a part, or all of it, written anew, see `edit/` |
//! | `POST /tokenize`, `POST /detokenize` | texts or messages to token ids, and back |
//! | `POST /v1/responses` | OpenAI's newer API over the same core |
//! | `POST /v1/messages`, `…/count_tokens` | Anthropic's API over the same core |
//! | `GET /v1/models`, `GET /v1/models/{id}` | the served model |
//! | `GET /health` | the process lives |
//! | `GET /ready` | it takes requests; 503 with the state until then |
//! | `GET /metrics` | Prometheus text |
//! | `GET /`, `POST /chat`, `/studio/…` | the browser studio, see `studio/` |
//!
//! Everything that can be refused is refused with its status before the first byte of an answer; every error has
//! the shape `{"error": {"message", "type", "param", "code"}}`.

mod anthropic;
mod auth;
mod bias;
mod body;
mod calls;
mod chat;
mod completions;
mod connection;
mod constrained;
mod cors;
mod door;
mod edit;
mod error;
mod exchange;
mod face;
mod fields;
mod forced;
mod generation;
mod health;
mod infill;
mod logprobs;
mod messages;
mod metrics;
mod models;
mod rate;
mod reply;
mod responses;
mod router;
mod server;
mod sse;
mod studio;
mod telling;
mod tokens;
mod tools;
mod turn;
mod unread;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use crate::config::{Config, SamplingConfig, ServerConfig};
use crate::engine::{EngineHandle, Model};
use studio::Remote;

pub use face::Face;
pub use router::router;
pub use server::serve;

/// What the handlers of a request share; a reload makes another, see [`Face`].
pub struct App {
    engine: EngineHandle,
    server: ServerConfig,
    keys: Arc<auth::Keys>,
    sampling: SamplingConfig,
    /// Name in the API.
    name: String,
    /// Other names that requests may use.
    aliases: Vec<String>,
    /// Unix time of the start, the models' `created`.
    started: u64,
    turns: Arc<turn::Turns>,
    /// The other server that the studio may talk to.
    remote: Option<Remote>,
}

impl App {
    /// The face of `engine` as `config` wants it.
    #[must_use]
    pub fn new(engine: EngineHandle, config: &Config) -> Arc<Self> {
        Arc::new(Self {
            engine,
            server: config.server.clone(),
            keys: Arc::new(auth::Keys::new(&config.server)),
            sampling: config.sampling.clone(),
            name: config.model.name(),
            aliases: config.model.aliases.clone(),
            started: unix_time(),
            turns: Arc::new(turn::Turns::new()),
            remote: config.studio.remote.clone().map(Remote::new),
        })
    }

    /// The same face as another configuration wants it.
    fn changed(&self, config: &Config) -> Arc<Self> {
        Arc::new(Self {
            engine: self.engine.clone(),
            server: config.server.clone(),
            // What was counted for a name stays.
            keys: Arc::new(self.keys.renewed(&config.server)),
            sampling: config.sampling.clone(),
            name: config.model.name(),
            aliases: config.model.aliases.clone(),
            started: self.started,
            turns: Arc::clone(&self.turns),
            remote: config.studio.remote.clone().map(Remote::new),
        })
    }

    /// The keys in force.
    fn keys(&self) -> Arc<auth::Keys> {
        Arc::clone(&self.keys)
    }

    /// Whether requests for the model `name` are meant for ours.
    fn serves(&self, name: &str) -> bool {
        name == self.name || self.aliases.iter().any(|alias| alias == name || alias == "*")
    }
}

/// Seconds since 1970.
fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Changes when anything changes that could change replies: the program, the checkpoint, the device.
fn fingerprint(model: &Model) -> String {
    let facts = [env!("CARGO_PKG_VERSION"), &model.identity, &model.device].join("\n");
    let digest = Sha256::digest(facts.as_bytes());
    format!("fp_{}", hex(&digest[..5]))
}

/// Random bytes for identifiers and seeds.
fn random<const N: usize>() -> Result<[u8; N], error::ApiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| error::ApiError::internal(format!("the system gives no random numbers: {e}")))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _written = write!(text, "{byte:02x}");
        text
    })
}
