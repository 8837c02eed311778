//! The accelerator and its host, as the kernel shows them.

use serde::{Deserialize, Serialize};

use super::Memory;

/// Answer to `GET /gpu`. Every figure is optional: kernels, drivers and permissions differ in what they show.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Gpu {
    /// The device's own name.
    pub name: Option<String>,
    /// PCI address such as `0000:03:00.0`; `null` for CPUs.
    pub pci: Option<String>,
    /// Kernel driver, `xe` or `i915`.
    pub driver: Option<String>,
    /// Version of the OpenCL driver.
    pub opencl_driver: Option<String>,
    /// Version of the running kernel.
    pub kernel: Option<String>,
    /// GuC firmware of the card.
    pub guc: Option<Firmware>,
    /// Memory of the card as this process uses it.
    pub vram: Option<Vram>,
    /// System memory this process has mapped for the card (GTT), in bytes.
    pub gtt_bytes: Option<u64>,
    /// How busy this process keeps the card's engines.
    pub engines: Vec<EngineLoad>,
    /// Clock of the main graphics tile.
    pub frequency: Option<Frequency>,
    /// Electric power.
    pub power: Option<Power>,
    /// Temperatures.
    pub temperatures: Vec<Temperature>,
    /// Fans.
    pub fans: Vec<Fan>,
    /// The window through which the host sees the card's memory.
    pub bar: Option<Bar>,
    /// Device memory the daemon allocated, by purpose.
    pub memory: Option<Memory>,
    /// The machine the daemon runs on.
    pub host: Host,
    /// What the operator should look at, with the cure in each text.
    pub warnings: Vec<String>,
}

/// A firmware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Firmware {
    /// The file the kernel loaded, e.g. `xe/bmg_guc_70.bin`.
    pub file: Option<String>,
    /// The version, e.g. `70.49.4`.
    pub version: String,
}

/// Memory of the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vram {
    /// Memory the card has.
    pub size_bytes: Option<u64>,
    /// Memory this process has allocated.
    pub allocated_bytes: Option<u64>,
    /// The part of it that is on the card now (the rest was evicted).
    pub resident_bytes: Option<u64>,
}

/// Load of one class of engines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// The kernel's name of the class: `ccs`, `bcs`, `rcs` … (xe), `compute`, `copy`, `render` … (i915).
    pub name: String,
    /// Share of the time the class was busy for this process, 0 to 100; `null` until two samples are taken.
    pub busy_percent: Option<f64>,
}

/// Clocks in MHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Frequency {
    /// What the hardware runs at; 0 while it sleeps.
    pub actual_mhz: Option<u64>,
    /// What the driver asked for.
    pub requested_mhz: Option<u64>,
    /// The lowest allowed.
    pub min_mhz: Option<u64>,
    /// The highest allowed.
    pub max_mhz: Option<u64>,
    /// Whether the hardware is being slowed down (heat, power).
    pub throttled: Option<bool>,
}

/// Electric power of the card.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Power {
    /// Mean power between the last two samples.
    pub watts: Option<f64>,
    /// The limit.
    pub limit_watts: Option<f64>,
    /// Energy used since the driver was loaded.
    pub energy_joules: Option<f64>,
}

/// One temperature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Temperature {
    /// Where it is measured: `pkg`, `vram` …
    pub label: String,
    /// Degrees.
    pub celsius: f64,
}

/// One fan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fan {
    /// Its name, e.g. `fan1`.
    pub label: String,
    /// Revolutions per minute.
    pub rpm: u64,
}

/// The PCI window into the card's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// Its size.
    pub size_bytes: u64,
    /// Whether it spans the whole memory (resizable BAR is on); `null` where the memory's size is unknown.
    pub whole: Option<bool>,
}

/// The machine and this process on it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Host {
    /// Memory the machine has.
    pub memory_total_bytes: Option<u64>,
    /// Memory it could give to programs.
    pub memory_available_bytes: Option<u64>,
    /// Memory of this process, files it mapped included.
    pub rss_bytes: Option<u64>,
    /// The part of it that belongs to no file.
    pub rss_anon_bytes: Option<u64>,
    /// Mean number of running tasks over 1, 5 and 15 minutes.
    pub load: Option<[f64; 3]>,
    /// Temperature of the processor.
    pub cpu_celsius: Option<f64>,
    /// Clock of the first processor.
    #[serde(default)]
    pub cpu_mhz: Option<u64>,
    /// Processors that this process kept busy between the last two samples, e.g. 1.8.
    #[serde(default)]
    pub busy_processors: Option<f64>,
}

impl Gpu {
    /// Whether figures are missing that need a second sample: load of the engines, power.
    pub fn lacks_rates(&self) -> bool {
        self.engines.iter().any(|engine| engine.busy_percent.is_none())
            || self.power.is_some_and(|power| power.energy_joules.is_some() && power.watts.is_none())
    }
}
