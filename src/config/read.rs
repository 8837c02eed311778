//! Each section of the configuration, from its settings.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::source::{Sources, without_password};
use super::{
    ConfigError, DeviceConfig, DeviceKind, KernelFamily, LogConfig, LogFormat, ModelConfig, RemoteConfig,
    SamplingConfig, Secret, ServerConfig, StudioConfig, ToolCalls, keys,
};
use crate::model::diffusion_gemma::{DenseWeights, ExpertWeights};
use crate::ops::CacheKind;
use crate::text::calls::Syntax;

/// The path of a setting, or one that depends on the environment.
pub(super) fn path_or(
    s: &mut Sources,
    key: &'static str,
    otherwise: PathBuf,
) -> Result<PathBuf, ConfigError> {
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

pub(super) fn tool_calls(s: &mut Sources) -> Result<ToolCalls, ConfigError> {
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

pub(super) fn model(s: &mut Sources) -> Result<ModelConfig, ConfigError> {
    Ok(ModelConfig {
        path: s.path("model.path")?,
        served_name: s.text("model.served_name")?,
        aliases: s.checked("model.aliases", Vec::new(), "a list of names, none of them empty", |names| {
            names.iter().all(|name: &String| !name.trim().is_empty())
        })?,
        chat_template: s.path("model.chat_template")?,
        thoughts_apart: s.any("model.thoughts_apart", true)?,
        tool_calls: tool_calls(s)?,
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

pub(super) fn device(s: &mut Sources, places: &Places) -> Result<DeviceConfig, ConfigError> {
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
        kernels: match s
            .checked("device.kernels", "auto".to_owned(), "auto, vector or xmx", |family| {
                matches!(&**family, "auto" | "vector" | "xmx")
            })?
            .as_str()
        {
            "vector" => KernelFamily::Vector,
            "xmx" => KernelFamily::Xmx,
            _ => KernelFamily::Auto,
        },
        matrix_unit: s.any("device.matrix_unit", true)?,
        join_launches: s.any("device.join_launches", true)?,
        profiling: s.any("device.profiling", false)?,
        pass_timeout: at_least(s, "device.pass_timeout_s", Duration::from_secs(120), 0.05)?,
        max_faults: size(s.integer("device.max_faults", 3, 0, 1000)?),
        fault_window: at_least(s, "device.fault_window_s", Duration::from_secs(600), 1.0)?,
    })
}

pub(super) fn server(s: &mut Sources, warnings: &mut Vec<String>) -> Result<ServerConfig, ConfigError> {
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
        cors_origins: s.checked("server.cors_origins", vec!["*".to_owned()], ORIGINS, |origins| {
            origins.iter().all(|origin: &String| is_origin(origin))
        })?,
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

pub(super) fn log(s: &mut Sources) -> Result<LogConfig, ConfigError> {
    let format = s.checked("log.format", "auto".to_owned(), "auto, text or json", |format| {
        ["auto", "text", "json"].contains(&format.as_str())
    })?;
    Ok(LogConfig {
        level: s.checked(
            "log.level",
            "info".to_owned(),
            "error, warn, info, debug or trace, or one of them and levels of modules as in \"info,axe::http=debug\"",
            |level| level.split(',').all(is_directive) && level.split(',').any(|word| !word.contains('=')),
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

pub(super) fn sampling(s: &mut Sources) -> Result<SamplingConfig, ConfigError> {
    Ok(SamplingConfig {
        temperature: s.number("sampling.temperature", 0.8, 0.0, 2.0)? as f32,
        top_k: size(s.integer("sampling.top_k", 40, 0, MOST_TOKENS)?),
        top_p: s.number("sampling.top_p", 0.95, 0.0, 1.0)? as f32,
        min_p: s.number("sampling.min_p", 0.05, 0.0, 1.0)? as f32,
        repetition_penalty: s.number("sampling.repetition_penalty", 1.0, 0.01, 10.0)? as f32,
    })
}

const ORIGINS: &str = "a list of origins as browsers send them (https://host, http://localhost:3000; no path, no capitals), \"*\" or \"null\"";

/// Whether a browser may send this as a page's origin.
fn is_origin(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_graphic() && !b.is_ascii_uppercase())
    };
    ["*", "null"].contains(&text)
        || text.split_once("://").is_some_and(|(scheme, host)| {
            plain(scheme) && plain(host) && !host.contains(['/', '?', '#', '@', '*', ','])
        })
}

pub(super) fn studio(s: &mut Sources) -> Result<StudioConfig, ConfigError> {
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
            let remote = RemoteConfig { url: Secret::new(url.trim_end_matches('/')), model, key };
            return Ok(StudioConfig { remote: Some(remote), ignored: None });
        }
        Some(_) => format!("{:?}", without_password(&url)),
        None => format!("{:?} and no model", without_password(&url)),
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
pub(super) struct Places {
    pub(super) cache: PathBuf,
    pub(super) socket: PathBuf,
}

impl Places {
    pub(super) fn from_env(env: &BTreeMap<String, String>) -> Self {
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
