//! `daemon.toml`, the environment and the command line, made into one validated [`Config`].
//!
//! Every key is explained in `daemon.toml`. A flag wins over the environment, which wins over the file. An unknown
//! key or a value of the wrong type is an error that names the place, the key, what was found and what was expected.

mod change;
mod keys;
mod read;
mod source;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::decode::{BlockOptions, BlockSize};
use crate::model::diffusion_gemma::{DenseWeights, ExpertWeights};
use crate::ops::CacheKind;
use crate::text::calls::Syntax;
pub use change::{Change, Effect, changes};
pub use keys::{ApiKey, RateLimits};
use source::Sources;
pub use source::{Effective, Origin, Override};

/// What is wrong with the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{}: not valid TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and what was expected there; not what stands there.
        message: String,
    },
    /// The file has a key that means nothing.
    #[error("{origin}: unknown key `{key}` (found {found}); expected one of: {expected}")]
    UnknownKey {
        /// The file.
        origin: Origin,
        /// The dotted key.
        key: String,
        /// What sort of value it has.
        found: String,
        /// The keys that exist there.
        expected: String,
    },
    /// A value has the wrong type or is out of range.
    #[error("{origin}: key `{key}`: found {found}, expected {expected}")]
    Invalid {
        /// Where the value was written.
        origin: Origin,
        /// The dotted key.
        key: String,
        /// The value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// Two variables for one setting differ.
    #[error("environment variables {short} and {full} both set `{key}`, and differ: unset one of them")]
    Contradiction {
        /// The short variable.
        short: String,
        /// The one named after the key.
        full: String,
        /// The dotted key.
        key: &'static str,
    },
    /// The key file cannot be used.
    #[error("key `server.api_key_file`: cannot use {}: {reason}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The server would be open to the network without a key.
    #[error(
        "refusing to listen on {host} without an API key: set `server.api_key`, `server.api_key_file` or AXE_API_KEY, \
         or listen on 127.0.0.1 (`server.host`)"
    )]
    OpenToTheNetwork {
        /// The address asked for.
        host: IpAddr,
    },
}

/// A string that never shows in logs, status or debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }
    /// The secret itself, for comparing.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("(secret)")
    }
}

/// The whole configuration.
#[derive(Debug, Clone, Serialize)]
pub struct Config {
    /// The file it was read from, if any.
    pub file: Option<PathBuf>,
    /// The model and the names it is served under.
    pub model: ModelConfig,
    /// The device and how it is used.
    pub device: DeviceConfig,
    /// The public HTTP face.
    pub server: ServerConfig,
    /// The operator's socket.
    pub admin: AdminConfig,
    /// Logging.
    pub log: LogConfig,
    /// Sampling of requests that do not say.
    pub sampling: SamplingConfig,
    /// How canvases are denoised.
    pub denoising: DenoisingConfig,
    /// How causal models are decoded.
    pub decode: BlockOptions,
    /// The page in the browser.
    pub studio: StudioConfig,
    /// Every setting by its key, with the place that named it.
    #[serde(skip)]
    pub settings: Vec<Effective>,
    /// What the operator should know, though it is no reason not to start.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

/// `[model]`
#[derive(Debug, Clone, Serialize)]
pub struct ModelConfig {
    /// The checkpoint; commands that need one refuse to run without.
    pub path: Option<PathBuf>,
    /// Name in the API; the file's stem when unset.
    pub served_name: Option<String>,
    /// Other names requests may use; `*` allows any.
    pub aliases: Vec<String>,
    /// A Jinja file that replaces the checkpoint's chat template.
    pub chat_template: Option<PathBuf>,
    /// Whether what the model thinks, between the tokens for it, is told apart from the reply.
    pub thoughts_apart: bool,
    /// How calls of tools are looked for.
    pub tool_calls: ToolCalls,
    /// Positions of the cache (prompt and output); chosen at start when unset.
    pub context_length: Option<usize>,
    /// What becomes of plain expert weights of a Hugging Face directory.
    pub experts: ExpertWeights,
    /// What becomes of its other plain matrices.
    pub dense: DenseWeights,
    /// Time without a request after which the model is put away; never when unset.
    pub idle_unload: Option<Duration>,
}

impl ModelConfig {
    /// The name in the API: the configured one, or the checkpoint's file stem.
    #[must_use]
    pub fn name(&self) -> String {
        let stem =
            || self.path.as_deref().and_then(Path::file_stem).map(|s| s.to_string_lossy().into_owned());
        self.served_name.clone().or_else(stem).unwrap_or_else(|| "model".to_owned())
    }
}

/// How calls of tools are looked for in what a model writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolCalls {
    /// As the chat template shows that the model writes them.
    Auto,
    /// Tools are refused.
    Off,
    /// So, whatever the template says.
    #[serde(untagged)]
    As(Syntax),
}

/// What sort of device to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A GPU when there is one, else an accelerator, else a CPU.
    Auto,
    /// A CPU.
    Cpu,
    /// A GPU.
    Gpu,
    /// Anything else that computes.
    Accelerator,
}

/// `[device]`
#[derive(Debug, Clone, Serialize)]
pub struct DeviceConfig {
    /// Sort of device.
    pub kind: DeviceKind,
    /// Part of the device's name, any case.
    pub name: Option<String>,
    /// PCI address, e.g. `0000:03:00.0`.
    pub pci: Option<String>,
    /// Part of the platform's name, any case.
    pub platform: Option<String>,
    /// Most bytes to allocate on the device; what the device has when unset.
    pub memory_limit: Option<u64>,
    /// Programs and repacked weights are kept here.
    pub cache_dir: PathBuf,
    /// Use mapped files in place where the device shares the host's memory.
    pub zero_copy: bool,
    /// Prompt tokens in one pass; chosen by device when unset.
    pub prefill_chunk: Option<usize>,
    /// Number type of the key-value cache.
    pub kv_cache: CacheKind,
    /// Threads of a CPU device; all processors when unset.
    pub threads: Option<usize>,
    /// Which kernels make products.
    pub kernels: KernelFamily,
    /// Use the matrix unit of the host's processor where a model's kernels can.
    pub matrix_unit: bool,
    /// Make one launch of a causal model's pass of a few rows where the device can.
    pub join_launches: bool,
    /// Time every kernel (costs a few per cent).
    pub profiling: bool,
    /// Longest time of one pass; a device that takes longer counts as lost.
    pub pass_timeout: Duration,
    /// So many faults within [`DeviceConfig::fault_window`] end the process; 0: it never ends for them.
    pub max_faults: usize,
    /// How long a fault counts.
    pub fault_window: Duration,
}

/// `[server]`
#[derive(Debug, Clone, Serialize)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port; 0 takes any free one.
    pub port: u16,
    /// Keys that clients may use; none means no key is asked for.
    pub api_keys: Vec<ApiKey>,
    /// How much may be asked for where no key is asked for; of all callers together.
    pub limits: RateLimits,
    /// Largest request body in bytes.
    pub max_body: usize,
    /// Largest head of a request in bytes: its line and its headers.
    pub max_head: usize,
    /// Requests that may wait.
    pub queue_capacity: usize,
    /// Connections open at one time.
    pub max_connections: usize,
    /// Silence in a stream before a comment is sent.
    pub ping_interval: Duration,
    /// Output tokens of a request that does not say; the rest of the context when unset.
    pub default_max_tokens: Option<usize>,
    /// Most output tokens of any request; larger wishes are cut to it.
    pub max_tokens_cap: usize,
    /// Most messages of a chat request.
    pub max_messages: usize,
    /// Most replies to one request.
    pub max_choices: usize,
    /// Most time a request may take from acceptance to its end; unlimited when unset.
    pub request_timeout: Option<Duration>,
    /// Most time for a request's head to arrive, and for a kept-alive connection to be idle.
    pub header_timeout: Duration,
    /// Most time for a request's body to arrive.
    pub body_timeout: Duration,
    /// Most time a client may refuse to take bytes of an answer.
    pub write_timeout: Duration,
    /// Most time running and waiting requests get after SIGTERM.
    pub drain_grace: Duration,
    /// Origins of web pages that may call; `*` allows all.
    pub cors_origins: Vec<String>,
}

/// `[admin]`
#[derive(Debug, Clone, Serialize)]
pub struct AdminConfig {
    /// The Unix socket.
    pub socket: PathBuf,
    /// Group whose members may speak, besides root and the daemon's own user.
    pub group: Option<String>,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Entries of the journal, with fields and priorities, where standard error goes there; text elsewhere.
    Auto,
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `[log]`
#[derive(Debug, Clone, Serialize)]
pub struct LogConfig {
    /// A level, or filter directives as in `info,axe::http=debug`.
    pub level: String,
    /// How lines look on standard error.
    pub format: LogFormat,
    /// Lines kept in memory for `axectl logs`.
    pub ring_size: usize,
}

/// `[sampling]`: what a request gets that does not say.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SamplingConfig {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 drops none.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
}

/// `[denoising]`: models that denoise canvases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DenoisingConfig {
    /// No reply ends before its first token.
    pub bar_immediate_end: bool,
}

/// `[studio]`
#[derive(Debug, Clone, Default, Serialize)]
pub struct StudioConfig {
    /// Another server that the page may talk to.
    pub remote: Option<RemoteConfig>,
    /// Why there is none though a variable of other programs (`NVIDIA_BASE_URL`) names one; something to warn of.
    #[serde(skip)]
    pub ignored: Option<String>,
}

/// A server that speaks OpenAI's API.
#[derive(Debug, Clone, Serialize)]
pub struct RemoteConfig {
    /// Where its routes begin, e.g. `https://host/v1`; there may be a name and a password in it.
    pub url: Secret,
    /// The model to ask for.
    pub model: String,
    /// The key to send.
    pub key: Option<Secret>,
}

/// Which kernels make products: `device.kernels`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelFamily {
    /// Those for the device's matrix engine, if it has one.
    #[default]
    Auto,
    /// Those of the `vector` family, by vectors or by the processor's matrix unit.
    Vector,
    /// Those of the `xmx` family, where there is no engine with plain code in its place.
    Xmx,
}

impl DeviceConfig {
    /// Whether passes of a few rows may be one launch: not where each kernel is to be timed.
    #[must_use]
    pub fn joins(&self) -> bool {
        self.join_launches && !self.profiling
    }
}

impl Config {
    /// Reads `file` (or, when `None`, `$AXE_CONFIG`, else the first of `daemon.toml` in the working directory and
    /// `/etc/axed/daemon.toml` that exists, else no file), the process environment and `flags`.
    ///
    /// # Errors
    /// Everything in [`ConfigError`].
    pub fn load(file: Option<&Path>, flags: Vec<Override>) -> Result<Self, ConfigError> {
        let env: BTreeMap<String, String> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        let named = env.get("AXE_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
        let usual = || {
            ["daemon.toml", "/etc/axed/daemon.toml"]
                .into_iter()
                .map(PathBuf::from)
                .find(|path| path.is_file())
        };
        let file = file.map(Path::to_owned).or(named).or_else(usual);
        Self::from_sources(file.as_deref(), env, flags)
    }

    /// Like [`Config::load`], from exactly the file and the environment given.
    ///
    /// # Errors
    /// Everything in [`ConfigError`].
    pub fn from_sources(
        file: Option<&Path>,
        env: BTreeMap<String, String>,
        flags: Vec<Override>,
    ) -> Result<Self, ConfigError> {
        let places = read::Places::from_env(&env);
        let mut s = Sources::read(file, env, flags)?;
        let mut warnings = Vec::new();
        let mut config = Self {
            file: file.map(Path::to_owned),
            model: read::model(&mut s)?,
            device: read::device(&mut s, &places)?,
            server: read::server(&mut s, &mut warnings)?,
            admin: AdminConfig {
                socket: read::path_or(&mut s, "admin.socket", places.socket)?,
                group: s.text("admin.group")?,
            },
            log: read::log(&mut s)?,
            sampling: read::sampling(&mut s)?,
            denoising: DenoisingConfig { bar_immediate_end: s.any("denoising.bar_immediate_end", true)? },
            decode: BlockOptions {
                size: s.any("decode.block_size", BlockSize::Auto)?,
                pool: s.any("decode.ngram_pool", false)?,
            },
            studio: read::studio(&mut s)?,
            settings: Vec::new(),
            warnings,
        };
        config.warnings.extend(config.studio.ignored.clone());
        config.settings = s.finish()?;
        if !config.server.host.is_loopback() && config.server.api_keys.is_empty() {
            return Err(ConfigError::OpenToTheNetwork { host: config.server.host });
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests;
