//! The daemon as a whole.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Answer to `GET /version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Version of the daemon.
    pub version: String,
    /// How it was built: `release` or `debug`, and the target, e.g. `release x86_64-linux`.
    pub build: String,
    /// Version of the admin protocol, see [`super::PROTOCOL`].
    pub protocol: u32,
}

/// Answer to `GET /status`. It carries device, driver, build, model and quantisation, so that its figures can be
/// compared with those of others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What the daemon is doing.
    pub state: State,
    /// Why it is in this state, where that is not plain (the failure, the step of loading).
    pub reason: Option<String>,
    /// The daemon's version.
    pub version: Version,
    /// The daemon's process id.
    pub pid: u32,
    /// Seconds since the daemon started.
    pub uptime_s: f64,
    /// Where the public HTTP interface listens, e.g. `http://127.0.0.1:8080`.
    pub listen: Option<String>,
    /// The device in use.
    pub device: Option<Device>,
    /// The model that is loaded.
    pub model: Option<Model>,
    /// The kernels in use.
    #[serde(default)]
    pub kernels: Option<Kernels>,
    /// Device memory by purpose.
    pub memory: Option<Memory>,
    /// The job on the device, if any.
    pub running: Option<super::Job>,
    /// Jobs that wait.
    pub waiting: usize,
    /// Most jobs that may wait.
    pub capacity: usize,
    /// What happened since the start.
    pub counters: Counters,
    /// The model was put away for want of work; the next request has it loaded again.
    #[serde(default)]
    pub unloaded: bool,
    /// The model that is being loaded, if one is.
    #[serde(default)]
    pub loading: Option<super::Loading>,
    /// The reload that is going on, or the last one.
    #[serde(default)]
    pub reload: Option<super::ReloadState>,
    /// What the engine recovered from.
    #[serde(default)]
    pub faults: super::Faults,
    /// What the operator should look at, with the cure in each text.
    pub warnings: Vec<String>,
}

/// What the daemon is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The model is being loaded; requests get 503.
    Loading,
    /// Requests are served.
    Ready,
    /// The jobs at hand are finished, new ones are refused.
    Draining,
    /// The engine failed; requests get 503.
    Failed,
    /// The engine has ended in good order, and the daemon is about to.
    Stopped,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
        })
    }
}

/// The OpenCL device in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device's own name.
    pub name: String,
    /// `cpu`, `gpu` or `accelerator`.
    pub kind: String,
    /// The OpenCL platform's name and version.
    pub platform: String,
    /// The driver's version.
    pub driver: String,
    /// PCI address such as `0000:03:00.0`; `null` for CPUs.
    pub pci: Option<String>,
    /// Compute units.
    pub compute_units: u32,
    /// Memory of the device in bytes.
    pub memory_bytes: u64,
}

/// The loaded model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The name under which requests ask for it.
    pub name: String,
    /// The file it came from.
    pub path: String,
    /// The family, e.g. `llama` or `gemma3`.
    pub architecture: String,
    /// The quantisation most of its weights have, e.g. `Q4_1`.
    pub quantisation: String,
    /// Short fingerprint of the file.
    pub identity: String,
    /// Most tokens prompt and reply may have together.
    pub context_length: usize,
}

/// The kernels in use, and how they did against their references at start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kernels {
    /// Their family, e.g. `vector`.
    pub family: String,
    /// What makes products of many rows: `vectors` or `matrix unit`.
    pub products: String,
    /// Every comparison. One that failed belongs to kernels that are not used, since otherwise there is no start.
    pub self_tests: Vec<SelfTest>,
}

/// How a kernel did against its reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SelfTest {
    /// The kernel and its variant.
    pub kernel: String,
    /// Whether all its numbers were right.
    pub passed: bool,
    /// The largest deviation, as a share of what is allowed.
    pub worst: f64,
}

/// Device memory the daemon allocated, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Weights of the model.
    pub weights_bytes: u64,
    /// Keys and values of the sequence at hand.
    pub kv_cache_bytes: u64,
    /// Everything else: activations, tables, staging.
    pub scratch_bytes: u64,
    /// The sum of the above.
    pub total_bytes: u64,
    /// What the sum must not exceed.
    pub budget_bytes: u64,
}

/// What happened since the start of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Jobs that ended by themselves.
    pub finished: u64,
    /// Jobs that were cancelled by the client, the operator or a drain.
    pub cancelled: u64,
    /// Jobs that ended with an error.
    pub failed: u64,
    /// Requests refused: queue full, not ready, or too long.
    pub rejected: u64,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// The part of them that was taken over from the request before.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Seconds spent on encoding prompts.
    pub prefill_s: f64,
    /// Seconds spent on generating.
    pub decode_s: f64,
}

/// Answer to `GET /profile`: the last request's, or that of the one that runs, as far as it has come.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Whether the daemon measures kernels; the configuration switches it on.
    pub enabled: bool,
    /// The request.
    #[serde(default)]
    pub request: Option<String>,
    /// What the device can do at best, measured when it was opened.
    #[serde(default)]
    pub limits: Option<Limits>,
    /// Kernels, the costliest first; empty when not measured.
    pub kernels: Vec<KernelTime>,
}

/// What kernels reach that do nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes a second of one that only reads.
    pub read_bytes_per_s: f64,
    /// f32 operations a second of one that only multiplies and adds.
    pub operations_per_s: f64,
}

/// Time spent in one kernel.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct KernelTime {
    /// Its name.
    pub kernel: String,
    /// How often it was launched.
    pub launches: u64,
    /// Nanoseconds on the device, all launches together.
    pub total_ns: u64,
    /// Bytes that all launches had to read; 0 where that is not counted.
    #[serde(default)]
    pub bytes: u64,
    /// f32 operations of all launches; 0 where they are not counted.
    #[serde(default)]
    pub operations: u64,
    /// Nanoseconds before its launches in which they were on the queue and no other ran.
    #[serde(default)]
    pub waited_ns: u64,
}

impl KernelTime {
    /// Share of what the device can do, from 0 to about 1: of its reading or its computing, whichever the kernel uses
    /// more. `None` where its work is not counted.
    pub fn share_of(&self, limits: &Limits) -> Option<f64> {
        let seconds = self.total_ns as f64 / 1e9;
        let least = (self.bytes as f64 / limits.read_bytes_per_s)
            .max(self.operations as f64 / limits.operations_per_s);
        (least > 0.0 && least.is_finite() && seconds > 0.0).then(|| least / seconds)
    }
}
