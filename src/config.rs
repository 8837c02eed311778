//! `daemon.toml`, the environment and the command line, made into one validated [`Config`].
//!
//! Every key is explained in `daemon.toml`. A flag wins over the environment, which wins over the file. An unknown
//! key or a value of the wrong type is an error that names the place, the key, what was found and what was expected.

mod change;
mod keys;
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
        /// Line, column and complaint.
        message: String,
    },
    /// The file has a key that means nothing.
    #[error("{origin}: unknown key `{key}` (found {found}); expected one of: {expected}")]
    UnknownKey {
        /// The file.
        origin: Origin,
        /// The dotted key.
        key: String,
        /// Its value.
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
    /// Where its routes begin, e.g. `https://host/v1`.
    pub url: String,
    /// The model to ask for.
    pub model: String,
    /// The key to send.
    pub key: Option<Secret>,
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
        let places = Places::from_env(&env);
        let mut s = Sources::read(file, env, flags)?;
        let mut warnings = Vec::new();
        let mut config = Self {
            file: file.map(Path::to_owned),
            model: read_model(&mut s)?,
            device: read_device(&mut s, &places)?,
            server: read_server(&mut s, &mut warnings)?,
            admin: AdminConfig {
                socket: path_or(&mut s, "admin.socket", places.socket)?,
                group: s.text("admin.group")?,
            },
            log: read_log(&mut s)?,
            sampling: read_sampling(&mut s)?,
            denoising: DenoisingConfig { bar_immediate_end: s.any("denoising.bar_immediate_end", true)? },
            decode: BlockOptions {
                size: s.any("decode.block_size", BlockSize::Auto)?,
                pool: s.any("decode.ngram_pool", false)?,
            },
            studio: read_studio(&mut s)?,
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

/// The path of a setting, or one that depends on the environment.
fn path_or(s: &mut Sources, key: &'static str, otherwise: PathBuf) -> Result<PathBuf, ConfigError> {
    let path = s.path(key)?;
    s.settle(key, otherwise.display().to_string().into(), None);
    Ok(path.unwrap_or(otherwise))
}

fn size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn nonzero(n: u64) -> Option<usize> {
    (n != 0).then(|| size(n))
}

/// No cache or reply is longer than this many tokens.
const MOST_TOKENS: u64 = 16 << 20;

fn read_tool_calls(s: &mut Sources) -> Result<ToolCalls, ConfigError> {
    let known = |name: &String| ["auto", "off"].contains(&name.as_str()) || Syntax::from_name(name).is_some();
    let names = Syntax::ALL.map(Syntax::name).join(", ");
    let expected = format!("auto, off, {names}");
    let name = s.checked("model.tool_calls", "auto".to_owned(), &expected, known)?;
    Ok(match Syntax::from_name(&name) {
        Some(syntax) => ToolCalls::As(syntax),
        None if name == "off" => ToolCalls::Off,
        None => ToolCalls::Auto,
    })
}

fn read_model(s: &mut Sources) -> Result<ModelConfig, ConfigError> {
    Ok(ModelConfig {
        path: s.path("model.path")?,
        served_name: s.text("model.served_name")?,
        aliases: s.any("model.aliases", Vec::new())?,
        chat_template: s.path("model.chat_template")?,
        thoughts_apart: s.any("model.thoughts_apart", true)?,
        tool_calls: read_tool_calls(s)?,
        // One position for the prompt and one for the output are the least.
        context_length: nonzero(s.checked(
            "model.context_length",
            0,
            &format!("0 (the model decides) or an integer from 2 to {MOST_TOKENS}"),
            |n| *n == 0 || (2..=MOST_TOKENS).contains(n),
        )?),
        experts: match s
            .checked("model.experts", "w4".to_owned(), "w4 or as-stored", |kind| {
                ["w4", "as-stored"].contains(&kind.as_str())
            })?
            .as_str()
        {
            "as-stored" => ExpertWeights::AsStored,
            _ => ExpertWeights::Quantised,
        },
        dense: match s
            .checked("model.dense", "as-stored".to_owned(), "as-stored or q8", |kind| {
                ["as-stored", "q8"].contains(&kind.as_str())
            })?
            .as_str()
        {
            "q8" => DenseWeights::Quantised,
            _ => DenseWeights::AsStored,
        },
        idle_unload: Some(s.any("model.idle_unload_s", Duration::ZERO)?).filter(|time| !time.is_zero()),
    })
}

fn read_device(s: &mut Sources, places: &Places) -> Result<DeviceConfig, ConfigError> {
    let kinds = ["auto", "cpu", "gpu", "accelerator"];
    let kind = s.checked("device.kind", "auto".to_owned(), "auto, cpu, gpu or accelerator", |k| {
        kinds.contains(&k.as_str())
    })?;
    Ok(DeviceConfig {
        kind: match kind.as_str() {
            "cpu" => DeviceKind::Cpu,
            "gpu" => DeviceKind::Gpu,
            "accelerator" => DeviceKind::Accelerator,
            _ => DeviceKind::Auto,
        },
        name: s.text("device.name")?,
        pci: s.text("device.pci")?,
        platform: s.text("device.platform")?,
        memory_limit: Some(s.integer("device.memory_limit_mib", 0, 0, 1 << 30)? << 20).filter(|n| *n != 0),
        cache_dir: path_or(s, "device.cache_dir", places.cache.clone())?,
        zero_copy: s.any("device.zero_copy", true)?,
        prefill_chunk: nonzero(s.integer("device.prefill_chunk", 0, 0, 4096)?),
        kv_cache: match s
            .checked("device.kv_cache", "f16".to_owned(), "f16 or f32", |kind| {
                kind.parse::<CacheKind>().is_ok()
            })?
            .as_str()
        {
            "f32" => CacheKind::F32,
            _ => CacheKind::F16,
        },
        threads: nonzero(s.integer("device.threads", 0, 0, 4096)?),
        matrix_unit: s.any("device.matrix_unit", true)?,
        join_launches: s.any("device.join_launches", true)?,
        profiling: s.any("device.profiling", false)?,
        pass_timeout: at_least(s, "device.pass_timeout_s", Duration::from_secs(120), 0.05)?,
        max_faults: size(s.integer("device.max_faults", 3, 0, 1000)?),
        fault_window: at_least(s, "device.fault_window_s", Duration::from_secs(600), 1.0)?,
    })
}

fn read_server(s: &mut Sources, warnings: &mut Vec<String>) -> Result<ServerConfig, ConfigError> {
    let host =
        s.checked("server.host", "127.0.0.1".to_owned(), "an IP address, e.g. \"127.0.0.1\"", |h| {
            h.parse::<IpAddr>().is_ok()
        })?;
    let second = Duration::from_secs(1);
    let port = u16::try_from(s.integer("server.port", 8080, 0, 65_535)?).unwrap_or(8080);
    let keys::Keys { keys: api_keys, limits, warnings: exposed } = keys::read(s)?;
    warnings.extend(exposed);
    Ok(ServerConfig {
        host: host.parse().unwrap_or(IpAddr::from([127, 0, 0, 1])),
        port,
        api_keys,
        limits,
        max_body: size(s.integer("server.max_body_kib", 8192, 1, 1 << 20)? << 10),
        // The least that the HTTP library takes is 8 KiB.
        max_head: size(s.integer("server.max_head_kib", 64, 8, 1 << 10)? << 10),
        queue_capacity: size(s.integer("server.queue_capacity", 64, 1, 65_536)?),
        max_connections: size(s.integer("server.max_connections", 512, 1, 65_536)?),
        ping_interval: at_least(s, "server.ping_interval_s", 10 * second, 0.05)?,
        default_max_tokens: nonzero(s.integer("server.default_max_tokens", 0, 0, MOST_TOKENS)?),
        max_tokens_cap: size(s.integer("server.max_tokens_cap", 131_072, 1, MOST_TOKENS)?),
        max_messages: size(s.integer("server.max_messages", 4096, 1, 65_536)?),
        max_choices: size(s.integer("server.max_choices", 8, 1, 128)?),
        request_timeout: Some(s.any("server.request_timeout_s", Duration::ZERO)?).filter(|t| !t.is_zero()),
        header_timeout: at_least(s, "server.header_timeout_s", 30 * second, 0.05)?,
        body_timeout: at_least(s, "server.body_timeout_s", 30 * second, 0.05)?,
        write_timeout: at_least(s, "server.write_timeout_s", 60 * second, 0.05)?,
        drain_grace: s.any("server.drain_grace_s", 30 * second)?,
        cors_origins: s.any("server.cors_origins", vec!["*".to_owned()])?,
    })
}

fn at_least(
    s: &mut Sources,
    key: &'static str,
    default: Duration,
    least: f64,
) -> Result<Duration, ConfigError> {
    let expected = format!("a number of seconds, {least} or more, up to a year");
    s.checked(key, default, &expected, |time| time.as_secs_f64() >= least)
}

fn read_log(s: &mut Sources) -> Result<LogConfig, ConfigError> {
    let format = s.checked("log.format", "auto".to_owned(), "auto, text or json", |format| {
        ["auto", "text", "json"].contains(&format.as_str())
    })?;
    Ok(LogConfig {
        level: s.checked(
            "log.level",
            "info".to_owned(),
            "error, warn, info, debug, trace, or directives as in \"info,axe::http=debug\"",
            |level| level.split(',').all(is_directive),
        )?,
        format: match format.as_str() {
            "json" => LogFormat::Json,
            "text" => LogFormat::Text,
            _ => LogFormat::Auto,
        },
        ring_size: size(s.integer("log.ring_size", 2000, 1, 1_000_000)?),
    })
}

/// `info` or `axe::http=debug`. A lone word must be a level: the filter would take any other for a module's name.
fn is_directive(text: &str) -> bool {
    let level = text.rsplit_once('=').map_or(text, |(_, level)| level);
    level.trim().parse::<tracing::level_filters::LevelFilter>().is_ok()
}

fn read_sampling(s: &mut Sources) -> Result<SamplingConfig, ConfigError> {
    Ok(SamplingConfig {
        temperature: s.number("sampling.temperature", 0.8, 0.0, 2.0)? as f32,
        top_k: size(s.integer("sampling.top_k", 40, 0, MOST_TOKENS)?),
        top_p: s.number("sampling.top_p", 0.95, 0.0, 1.0)? as f32,
        min_p: s.number("sampling.min_p", 0.05, 0.0, 1.0)? as f32,
        repetition_penalty: s.number("sampling.repetition_penalty", 1.0, 0.01, 10.0)? as f32,
    })
}

fn read_studio(s: &mut Sources) -> Result<StudioConfig, ConfigError> {
    let is_url = |url: &str| {
        let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
        host.is_some_and(|host| !host.is_empty() && !host.starts_with('/'))
    };
    let url = s.optional::<String>("studio.remote_url", "", |_| true)?;
    let (model, key) = (s.text("studio.remote_model")?, s.text("studio.remote_key")?.map(Secret));
    let Some((url, origin)) = url.filter(|(url, _)| !url.is_empty()) else {
        return Ok(StudioConfig::default());
    };
    let found = match model {
        Some(model) if is_url(&url) => {
            let remote = RemoteConfig { url: url.trim_end_matches('/').to_owned(), model, key };
            return Ok(StudioConfig { remote: Some(remote), ignored: None });
        }
        Some(_) => format!("\"{url}\""),
        None => format!("\"{url}\" and no model"),
    };
    let foreign = origin.is_foreign();
    let error = ConfigError::Invalid {
        origin,
        key: "studio.remote_url".to_owned(),
        found,
        expected:
            "a URL as in https://host/v1, with `studio.remote_model` (or NVIDIA_MODEL) naming a model there"
                .to_owned(),
    };
    // It may be set for others: no reason not to start.
    if foreign {
        let ignored = Some(format!("the studio has no second backend: {error}"));
        return Ok(StudioConfig { remote: None, ignored });
    }
    Err(error)
}

/// Default folders, by what systemd or the desktop say.
struct Places {
    cache: PathBuf,
    socket: PathBuf,
}

impl Places {
    fn from_env(env: &BTreeMap<String, String>) -> Self {
        let dir = |name: &str| {
            // systemd joins several directories with colons; the first is the daemon's own.
            let first = env.get(name)?.split(':').next()?;
            (!first.is_empty()).then(|| PathBuf::from(first))
        };
        let uid = nix::unistd::geteuid();
        let cache = dir("CACHE_DIRECTORY")
            .or_else(|| dir("XDG_CACHE_HOME").map(|d| d.join("axed")))
            .or_else(|| dir("HOME").map(|d| d.join(".cache/axed")))
            .unwrap_or_else(|| std::env::temp_dir().join(format!("axed-cache-{uid}")));
        let run = Path::new("/run/axed");
        let writable = |path: &Path| nix::unistd::access(path, nix::unistd::AccessFlags::W_OK).is_ok();
        let system =
            (writable(run) || (!run.exists() && writable(Path::new("/run")))).then(|| run.to_owned());
        let folder = dir("RUNTIME_DIRECTORY")
            .or(system)
            .or_else(|| dir("XDG_RUNTIME_DIR").map(|d| d.join("axed")))
            .unwrap_or_else(|| std::env::temp_dir().join(format!("axed-{uid}")));
        Self { cache, socket: folder.join("admin.sock") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(toml: &str, env: &[(&str, &str)], flags: Vec<Override>) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.toml");
        std::fs::write(&file, toml).unwrap();
        let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Config::from_sources(Some(&file), env, flags)
            .map_err(|e| e.to_string().replace(&file.display().to_string(), "FILE"))
    }

    #[test]
    fn flag_beats_environment_beats_file_beats_default() {
        let flag = Override { flag: "--port", key: "server.port", value: "4".into() };
        let file = "[server]\nport = 2";
        assert_eq!(read("", &[], vec![]).unwrap().server.port, 8080);
        assert_eq!(read(file, &[], vec![]).unwrap().server.port, 2);
        assert_eq!(read(file, &[("AXE_PORT", "3")], vec![]).unwrap().server.port, 3);
        assert_eq!(read(file, &[("AXE_SERVER_PORT", "3")], vec![]).unwrap().server.port, 3);
        assert_eq!(read(file, &[("AXE_PORT", "")], vec![]).unwrap().server.port, 2);
        assert_eq!(read(file, &[("AXE_PORT", "3")], vec![flag]).unwrap().server.port, 4);
    }

    #[test]
    fn wrong_values_name_place_key_found_and_expected() {
        let cases = [
            (
                "[server]\nport = \"a\"",
                "FILE: key `server.port`: found string \"a\", expected an integer from 0 to 65535",
            ),
            (
                "[server]\nport = 70000",
                "FILE: key `server.port`: found integer 70000, expected an integer from 0 to 65535",
            ),
            (
                "[server]\nhost = \"localhost\"",
                "FILE: key `server.host`: found string \"localhost\", expected an IP address, e.g. \"127.0.0.1\"",
            ),
            (
                "[device]\nkind = \"tpu\"",
                "FILE: key `device.kind`: found string \"tpu\", expected auto, cpu, gpu or accelerator",
            ),
            (
                "[model]\naliases = [1]",
                "FILE: key `model.aliases`: found array [1], expected a list of strings (in the environment: separated by commas)",
            ),
            (
                "[sampling]\ntemperature = 3.0",
                "FILE: key `sampling.temperature`: found float 3.0, expected a number from 0 to 2",
            ),
            (
                "[server]\nping_interval_s = 0",
                "FILE: key `server.ping_interval_s`: found integer 0, expected a number of seconds, 0.05 or more, up to a year",
            ),
        ];
        for (toml, message) in cases {
            assert_eq!(read(toml, &[], vec![]).unwrap_err(), message);
        }
        assert_eq!(
            read("", &[("AXE_PORT", "x")], vec![]).unwrap_err(),
            "environment variable AXE_PORT: key `server.port`: found \"x\", expected an integer from 0 to 65535"
        );
    }

    #[test]
    fn unknown_keys_and_sections_are_errors_that_list_the_known_ones() {
        let error = read("[admin]\nsockte = \"/a\"", &[], vec![]).unwrap_err();
        assert_eq!(
            error,
            "FILE: unknown key `admin.sockte` (found string \"/a\"); expected one of: admin.socket, admin.group"
        );
        let error = read("[srever]\nport = 1", &[], vec![]).unwrap_err();
        assert_eq!(
            error,
            "FILE: unknown key `srever.port` (found integer 1); expected one of: model, device, server, admin, log, sampling, \
             denoising, decode, studio"
        );
        let error = read("port = 1", &[], vec![]).unwrap_err();
        assert!(error.starts_with("FILE: unknown key `port` (found integer 1)"), "{error}");
        let error = read("[srever]", &[], vec![]).unwrap_err();
        assert!(error.starts_with("FILE: unknown key `srever` (found table {})"), "{error}");
        assert!(read("[server]", &[], vec![]).is_ok());
        assert!(read("[server\n", &[], vec![]).unwrap_err().starts_with("FILE: not valid TOML: "));
    }

    #[test]
    fn a_variable_of_a_section_must_be_a_setting() {
        let error = read("", &[("AXE_SERVER_PROT", "1")], vec![]).unwrap_err();
        assert!(error.contains("unknown key `AXE_SERVER_PROT` (found 1 characters)"), "{error}");
        assert!(error.contains("AXE_SERVER_PORT"), "{error}");
        for others in ["AXE_MODELS", "AXE_TEST_MODELS", "AXE_OPENCL", "AXE_MODEL", "SERVER_PROT"] {
            assert!(read("", &[(others, "1")], vec![]).is_ok(), "{others}");
        }
    }

    #[test]
    fn a_network_address_needs_a_key() {
        let error = read("[server]\nhost = \"0.0.0.0\"", &[], vec![]).unwrap_err();
        assert!(error.starts_with("refusing to listen on 0.0.0.0 without an API key"), "{error}");
        let config = read("[server]\nhost = \"0.0.0.0\"", &[("AXE_API_KEY", "k")], vec![]).unwrap();
        assert_eq!(config.server.api_keys[0].secret, Secret::new("k"));
        assert!(read("[server]\nhost = \"::1\"", &[], vec![]).is_ok());
    }

    #[test]
    fn keys_come_from_a_file_and_never_show() {
        let dir = tempfile::tempdir().unwrap();
        let keys = dir.path().join("keys");
        std::fs::write(&keys, "# ours\nalpha-key\n\n beta-key \n").unwrap();
        let toml = format!("[server]\napi_key_file = {:?}", keys.display().to_string());
        let config = read(&toml, &[], vec![]).unwrap();
        let secrets: Vec<_> = config.server.api_keys.iter().map(|key| key.secret.expose()).collect();
        assert_eq!(secrets, ["alpha-key", "beta-key"]);
        let shown = format!("{config:?} {}", serde_json::to_string(&config).unwrap());
        assert!(!shown.contains("alpha-key") && !shown.contains("beta-key"), "{shown}");
        std::fs::write(&keys, "\n").unwrap();
        assert!(read(&toml, &[], vec![]).unwrap_err().contains("it holds no key; write one key a line"));
    }

    #[test]
    fn keys_come_from_a_credential_where_no_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("api_keys"), "alice:one").unwrap();
        let folder = dir.path().display().to_string();
        let credentials = [("CREDENTIALS_DIRECTORY", folder.as_str())];
        let config = read("", &credentials, vec![]).unwrap();
        assert_eq!(config.server.api_keys[0].name, "alice");
        let file = config.settings.iter().find(|s| s.key == "server.api_key_file").unwrap();
        assert_eq!(file.origin, Origin::Credential(dir.path().join("api_keys")));
        std::fs::write(dir.path().join("other"), "bob:two").unwrap();
        let toml = format!("[server]\napi_key_file = {:?}", dir.path().join("other"));
        let config = read(&toml, &credentials, vec![]).unwrap();
        assert_eq!((config.server.api_keys.len(), &*config.server.api_keys[0].name), (1, "bob"));
    }

    #[test]
    fn every_setting_tells_its_value_and_where_it_comes_from() {
        let flag = Override { flag: "--port", key: "server.port", value: "4".into() };
        let toml = "[server]\nqueue_capacity = 3\napi_key = \"hidden\"\n[model]\naliases = [\"a\"]";
        let env =
            [("AXE_SERVER_PING_INTERVAL_S", "1.5"), ("XDG_CACHE_HOME", "/x"), ("AXE_DECODE_BLOCK_SIZE", "4")];
        let config = read(toml, &env, vec![flag]).unwrap();
        let shown = |key: &str| {
            let setting = config.settings.iter().find(|setting| setting.key == key).unwrap();
            let kind = match &setting.origin {
                Origin::File(_) => "file",
                Origin::Env(name) => name,
                Origin::Flag(name) => name,
                Origin::Credential(_) => "credential",
                Origin::Default => "default",
            };
            format!("{} {kind}", setting.value)
        };
        for (key, expected) in [
            ("server.port", "4 --port"),
            ("server.queue_capacity", "3 file"),
            ("server.api_key", "\"(secret)\" file"),
            ("server.ping_interval_s", "1.5 AXE_SERVER_PING_INTERVAL_S"),
            ("server.host", "\"127.0.0.1\" default"),
            ("decode.block_size", "4 AXE_DECODE_BLOCK_SIZE"),
            ("model.aliases", "[\"a\"] file"),
            ("model.path", "null default"),
            ("device.cache_dir", "\"/x/axed\" default"),
        ] {
            assert_eq!(shown(key), expected, "{key}");
        }
        assert!(!format!("{:?}", config.settings).contains("hidden"));
        let mut keys: Vec<_> = config.settings.iter().map(|setting| setting.key).collect();
        let all = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), all, "each setting is told once");
    }

    #[test]
    fn two_variables_for_one_setting_must_agree() {
        for (short, full) in [
            ("AXE_MODEL", "AXE_MODEL_PATH"),
            ("AXE_SERVED_NAME", "AXE_MODEL_SERVED_NAME"),
            ("AXE_HOST", "AXE_SERVER_HOST"),
            ("AXE_PORT", "AXE_SERVER_PORT"),
            ("AXE_API_KEY", "AXE_SERVER_API_KEY"),
        ] {
            let error = read("", &[(short, "127.0.0.1"), (full, "127.0.0.2")], vec![]).unwrap_err();
            assert!(error.contains(short) && error.contains(full), "{error}");
            assert!(!error.contains("127.0"), "it may be a secret: {error}");
        }
        let same = [("AXE_PORT", "9"), ("AXE_SERVER_PORT", "9")];
        assert_eq!(read("", &same, vec![]).unwrap().server.port, 9);
        let unset = [("AXE_PORT", ""), ("AXE_SERVER_PORT", "9")];
        assert_eq!(read("", &unset, vec![]).unwrap().server.port, 9);
        let flag = Override { flag: "--port", key: "server.port", value: "7".to_owned() };
        let differ = [("AXE_PORT", "8"), ("AXE_SERVER_PORT", "9")];
        assert_eq!(read("", &differ, vec![flag]).unwrap().server.port, 7);
    }

    #[test]
    fn variables_of_other_programs_are_no_reason_not_to_start() {
        let url = ("NVIDIA_BASE_URL", "https://host/v1/");
        let studio = |toml: &str, env: &[(&str, &str)]| Ok::<_, String>(read(toml, env, vec![])?.studio);
        let ignored = studio("", &[url]).unwrap();
        assert!(ignored.remote.is_none());
        assert_eq!(
            ignored.ignored.unwrap(),
            "the studio has no second backend: environment variable NVIDIA_BASE_URL: key `studio.remote_url`: found \
             \"https://host/v1/\" and no model, expected a URL as in https://host/v1, with `studio.remote_model` (or \
             NVIDIA_MODEL) naming a model there"
        );
        let ignored = studio("", &[("NVIDIA_BASE_URL", "host"), ("NVIDIA_MODEL", "m")]).unwrap();
        assert!(ignored.remote.is_none() && ignored.ignored.unwrap().contains("found \"host\", expected"));
        for env in [&[][..], &[("NVIDIA_MODEL", "m"), ("NVIDIA_API_KEY", "k")]] {
            let studio = studio("", env).unwrap();
            assert!(studio.remote.is_none() && studio.ignored.is_none());
        }
        let whole = studio("", &[url, ("NVIDIA_MODEL", "m"), ("NVIDIA_API_KEY", "k")]).unwrap();
        let remote = whole.remote.unwrap();
        assert_eq!((&*remote.url, &*remote.model), ("https://host/v1", "m"));
        assert!(remote.key.is_some() && whole.ignored.is_none());
        // Who says it to this program meant it, and is believed before what others were told.
        let own = [url, ("AXE_STUDIO_REMOTE_URL", "http://other"), ("AXE_STUDIO_REMOTE_MODEL", "n")];
        assert_eq!(studio("", &own).unwrap().remote.unwrap().url, "http://other");
        for wrong in ["remote_url = \"https://host/v1\"", "remote_url = \"host\"\nremote_model = \"m\""] {
            let error = studio(&format!("[studio]\n{wrong}"), &[]).unwrap_err();
            assert!(error.starts_with("FILE: key `studio.remote_url`: found "), "{error}");
        }
        let error = studio("", &[("AXE_STUDIO_REMOTE_URL", "https://host")]).unwrap_err();
        assert!(error.contains("AXE_STUDIO_REMOTE_URL"), "{error}");
    }

    #[test]
    fn a_context_has_room_for_prompt_and_output() {
        assert!(read("[model]\ncontext_length = 1", &[], vec![]).unwrap_err().contains("from 2 to"));
        assert_eq!(read("[model]\ncontext_length = 2", &[], vec![]).unwrap().model.context_length, Some(2));
        assert_eq!(read("[model]\ncontext_length = 0", &[], vec![]).unwrap().model.context_length, None);
    }

    #[test]
    fn a_block_size_is_auto_or_a_number_of_rows() {
        let size = |toml: &str, env: &[(&str, &str)]| Ok(read(toml, env, vec![])?.decode.size);
        assert_eq!(size("", &[]), Ok(BlockSize::Auto));
        assert_eq!(size("[decode]\nblock_size = 4", &[]), Ok(BlockSize::Fixed(4)));
        assert_eq!(size("[decode]\nblock_size = \"16\"", &[]), Ok(BlockSize::Fixed(16)));
        assert_eq!(
            size("[decode]\nblock_size = 4", &[("AXE_DECODE_BLOCK_SIZE", "auto")]),
            Ok(BlockSize::Auto)
        );
        for wrong in ["0", "17", "-1", "\"wide\"", "1.5", "true"] {
            let error: String = size(&format!("[decode]\nblock_size = {wrong}"), &[]).unwrap_err();
            assert!(error.ends_with("expected \"auto\" or an integer from 1 to 16"), "{error}");
        }
        assert!(read("[decode]\nngram_pool = true", &[], vec![]).unwrap().decode.pool);
    }

    #[test]
    fn relative_paths_of_the_file_count_from_its_folder() {
        let config = read("[model]\npath = \"m.gguf\"", &[], vec![]).unwrap();
        let path = config.model.path.clone().unwrap();
        assert!(path.is_absolute() && path.ends_with("m.gguf"), "{}", path.display());
        assert_eq!(config.model.name(), "m");
        let config = read("[model]\npath = \"m.gguf\"", &[("AXE_MODEL", "n.gguf")], vec![]).unwrap();
        assert_eq!(config.model.path.unwrap(), Path::new("n.gguf"));
    }

    #[test]
    fn default_folders_follow_systemd_then_the_desktop() {
        let systemd = [("CACHE_DIRECTORY", "/c/axed:/c/other"), ("RUNTIME_DIRECTORY", "/r/axed")];
        let config = read("", &systemd, vec![]).unwrap();
        assert_eq!(config.device.cache_dir, Path::new("/c/axed"));
        assert_eq!(config.admin.socket, Path::new("/r/axed/admin.sock"));
        let config = read("", &[("XDG_CACHE_HOME", "/x")], vec![]).unwrap();
        assert_eq!(config.device.cache_dir, Path::new("/x/axed"));
        let config = read("", &[("HOME", "/h")], vec![]).unwrap();
        assert_eq!(config.device.cache_dir, Path::new("/h/.cache/axed"));
    }

    #[test]
    fn the_shipped_file_is_valid_says_the_defaults_and_explains_every_key() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("daemon.toml");
        let bare = Config::from_sources(None, BTreeMap::new(), vec![]).unwrap();
        let mut config = Config::from_sources(Some(&shipped), BTreeMap::new(), vec![]).unwrap();
        config.file = None;
        assert_eq!(serde_json::to_value(&config).unwrap(), serde_json::to_value(&bare).unwrap());
        let text = std::fs::read_to_string(shipped).unwrap();
        let mut above = "";
        for line in text.lines() {
            let is_key = line.contains(" = ") && !line.starts_with("# ");
            assert!(!is_key || above.starts_with("# "), "`{line}` has no explanation above it");
            above = line;
        }
    }
}
