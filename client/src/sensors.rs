//! What the kernel shows of the card and of the host, read from `/proc` and `/sys`.
//!
//! Tools made for other drivers show N/A for the xe driver, so the daemon reads the sources itself:
//!
//! | figure | xe | i915 |
//! | --- | --- | --- |
//! | memory, load | `/proc/self/fdinfo`: `drm-total-vram0`, `drm-resident-vram0`, `drm-cycles-ccs` … | `drm-total-local0`, `drm-engine-compute` … |
//! | clocks | `tile0/gt0/freq0/act_freq` … | `drm/card0/gt/gt0/rps_act_freq_mhz` … |
//! | energy, limits, temperatures, fans | `hwmon` of the PCI device | the same |
//! | window into the card's memory | `resource` of the PCI device, line 2 | the same |
//! | GuC firmware | `/sys/kernel/debug/dri/*/gt0/uc/guc_info`, for root only; else the copy below `/run/axed` that the systemd unit makes | the same |
//!
//! Every figure is optional. All paths start at a root that tests replace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use crate::protocol::{Bar, EngineLoad, Fan, Firmware, Frequency, Gpu, Host, Power, Temperature, Vram};

/// The first GuC firmware without the engine resets under sustained load.
const GOOD_GUC: [u64; 3] = [70, 65, 0];
/// The window of a card without resizable BAR.
const SMALL_BAR: u64 = 256 << 20;
/// Intel's cards show their memory in the third base address register.
const MEMORY_BAR: usize = 2;

/// Reads the sensors; keeps the last counters, since load and power are differences.
#[derive(Debug)]
pub struct Sampler {
    root: PathBuf,
    pci: Option<String>,
    vram_bytes: Option<u64>,
    before: Option<Counters>,
}

impl Default for Sampler {
    fn default() -> Self {
        Self::new()
    }
}

/// What counts up, and when it was read.
#[derive(Debug)]
struct Counters {
    at: Instant,
    energy_uj: Option<u64>,
    engines: BTreeMap<String, Engine>,
    /// Time on processors, in hundredths of a second.
    ticks: Option<u64>,
}

impl Sampler {
    /// Samples this machine, without a card at first.
    pub fn new() -> Self {
        Self::at(Path::new("/"))
    }

    /// The same, with `/proc` and `/sys` below `root`.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), pci: None, vram_bytes: None, before: None }
    }

    /// From now on samples also the card at `pci` (such as `0000:03:00.0`), whose memory has `vram_bytes` where that
    /// is known.
    pub fn look_at(&mut self, pci: &str, vram_bytes: Option<u64>) {
        self.pci = Some(pci.to_ascii_lowercase());
        self.vram_bytes = vram_bytes;
        self.before = None;
    }

    /// Reads everything that can be read now. Rates cover the time since the sample before; the first sample has
    /// none ([`Gpu::lacks_rates`]).
    pub fn sample(&mut self) -> Gpu {
        let mut now = Counters {
            at: Instant::now(),
            energy_uj: None,
            engines: BTreeMap::new(),
            ticks: text(&self.root.join("proc/self/stat")).and_then(|stat| ticks(&stat)),
        };
        let mut gpu = Gpu {
            kernel: text(&self.root.join("proc/sys/kernel/osrelease")),
            host: self.host(),
            ..Gpu::default()
        };
        if let Some(pci) = self.pci.clone() {
            self.card(&pci, &mut gpu, &mut now);
        }
        gpu.host.busy_processors = self.before.as_ref().and_then(|before| {
            let seconds = (now.at - before.at).as_secs_f64();
            let busy = now.ticks?.checked_sub(before.ticks?)? as f64 / 100.0;
            (seconds > 0.0).then(|| busy / seconds)
        });
        self.before = Some(now);
        gpu
    }

    /// Addresses of Intel's graphics cards, whatever drives them, sorted.
    pub fn cards(&self) -> Vec<String> {
        entries(&self.root.join("sys/bus/pci/devices"))
            .into_iter()
            .filter(|device| {
                let word = |name: &str| text(&device.join(name)).unwrap_or_default();
                // Display controllers: VGA, 3D and others.
                word("vendor") == "0x8086" && word("class").starts_with("0x03")
            })
            .filter_map(|device| Some(device.file_name()?.to_str()?.to_owned()))
            .collect()
    }

    fn card(&self, pci: &str, gpu: &mut Gpu, now: &mut Counters) {
        let card = self.root.join("sys/bus/pci/devices").join(pci);
        gpu.pci = Some(pci.to_owned());
        gpu.driver = fs::read_link(card.join("driver"))
            .ok()
            .and_then(|link| link.file_name().and_then(|name| name.to_str()).map(str::to_owned));
        gpu.frequency = frequency(&card);
        gpu.guc = self.guc(pci);

        let clients = self.clients(pci);
        let memory = |kind: &str, regions: &[&str]| {
            let keys: Vec<String> = regions.iter().map(|region| format!("drm-{kind}-{region}")).collect();
            let values: Vec<u64> =
                clients.iter().flat_map(|client| keys.iter().filter_map(|key| bytes(client, key))).collect();
            (!values.is_empty()).then(|| values.iter().sum::<u64>())
        };
        let allocated = memory("total", &["vram0", "vram1", "local0", "local1"]);
        let resident = memory("resident", &["vram0", "vram1", "local0", "local1"]);
        if self.vram_bytes.or(allocated).or(resident).is_some() {
            gpu.vram = Some(Vram {
                size_bytes: self.vram_bytes,
                allocated_bytes: allocated,
                resident_bytes: resident,
            });
        }
        gpu.gtt_bytes = memory("resident", &["gtt", "system", "system0"]);

        let hwmon = hwmons(&card.join("hwmon")).into_iter().next();
        // The whole card where the driver tells it, else the package.
        let energy_uj = hwmon.as_deref().and_then(|hwmon| {
            ["energy1_input", "energy2_input"].iter().find_map(|name| number(&hwmon.join(name)))
        });
        now.energy_uj = energy_uj;
        now.engines = engines(&clients);
        gpu.engines = now
            .engines
            .iter()
            .map(|(name, engine)| EngineLoad {
                name: name.clone(),
                busy_percent: self.before.as_ref().and_then(|before| {
                    engine.busy_since(before.engines.get(name)?, (now.at - before.at).as_nanos())
                }),
            })
            .collect();
        if let Some(hwmon) = hwmon {
            let watts = self.before.as_ref().and_then(|before| {
                let joules = energy_uj?.checked_sub(before.energy_uj?)? as f64 / 1e6;
                let seconds = (now.at - before.at).as_secs_f64();
                (seconds > 0.0).then(|| joules / seconds)
            });
            let limit = ["power1_cap", "power1_max", "power2_max", "power1_rated_max", "power2_rated_max"]
                .iter()
                .find_map(|name| number(&hwmon.join(name)).filter(|limit| *limit > 0));
            let power = Power {
                watts,
                limit_watts: limit.map(|microwatts| microwatts as f64 / 1e6),
                energy_joules: energy_uj.map(|energy| energy as f64 / 1e6),
            };
            gpu.power = (power != Power::default()).then_some(power);
            gpu.temperatures = temperatures(&hwmon);
            gpu.fans = fans(&hwmon);
        }
        gpu.bar = bar(&card, self.vram_bytes);
        gpu.warnings = warnings(gpu);
    }

    /// Key-value pairs of this process's open files of the card, each client once however many files it has.
    fn clients(&self, pci: &str) -> Vec<BTreeMap<String, String>> {
        let mut seen = BTreeSet::new();
        let mut clients = Vec::new();
        for path in entries(&self.root.join("proc/self/fdinfo")) {
            let Some(text) = text(&path).filter(|text| text.contains("drm-pdev")) else { continue };
            let pairs: BTreeMap<String, String> = text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned()))
                .collect();
            let ours = pairs.get("drm-pdev").is_some_and(|address| address.eq_ignore_ascii_case(pci));
            let client = pairs.get("drm-client-id").cloned().unwrap_or_else(|| path.display().to_string());
            if ours && seen.insert(client) {
                clients.push(pairs);
            }
        }
        clients
    }

    fn guc(&self, pci: &str) -> Option<Firmware> {
        // Only root may read the kernel's own files; the service's start leaves copies for its user.
        let places = ["sys/kernel/debug/dri", "run/axed/firmware", &format!("run/axed/{pci}/firmware")]
            .map(|p| self.root.join(p));
        // The directory is named by the PCI address on newer kernels, by a number on others; then `name` in it
        // tells the card: `xe dev=0000:03:00.0 unique=0000:03:00.0`.
        let directory = places.iter().flat_map(|place| entries(place)).find(|directory| {
            directory.file_name().is_some_and(|name| name == pci)
                || text(&directory.join("name"))
                    .is_some_and(|name| name.split_whitespace().any(|word| word == format!("dev={pci}")))
        })?;
        // xe moved the file below the tile in newer kernels.
        ["gt0/uc/guc_info", "tile0/gt0/uc/guc_info"]
            .iter()
            .find_map(|file| text(&directory.join(file)))
            .and_then(|text| firmware(&text))
    }

    fn host(&self) -> Host {
        let memory = text(&self.root.join("proc/meminfo")).unwrap_or_default();
        let status = text(&self.root.join("proc/self/status")).unwrap_or_default();
        let load = text(&self.root.join("proc/loadavg")).and_then(|text| {
            let mut numbers = text.split_whitespace().map(str::parse::<f64>);
            Some([numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?])
        });
        Host {
            memory_total_bytes: kibibytes(&memory, "MemTotal"),
            memory_available_bytes: kibibytes(&memory, "MemAvailable"),
            rss_bytes: kibibytes(&status, "VmRSS"),
            rss_anon_bytes: kibibytes(&status, "RssAnon"),
            load,
            cpu_celsius: self.cpu_celsius(),
            cpu_mhz: self.cpu_mhz(),
            busy_processors: None,
        }
    }

    fn cpu_mhz(&self) -> Option<u64> {
        let scaled = number(&self.root.join("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"));
        scaled.map(|khz| khz / 1000).or_else(|| {
            let info = text(&self.root.join("proc/cpuinfo"))?;
            let line = info.lines().find(|line| line.starts_with("cpu MHz"))?;
            line.split_once(':')?.1.trim().parse::<f64>().ok().map(|mhz| mhz as u64)
        })
    }

    fn cpu_celsius(&self) -> Option<f64> {
        let sensors = ["coretemp", "k10temp", "zenpower", "cpu_thermal"];
        let hwmon = hwmons(&self.root.join("sys/class/hwmon"))
            .into_iter()
            .find(|hwmon| text(&hwmon.join("name")).is_some_and(|name| sensors.contains(&name.as_str())))
            .and_then(|hwmon| number(&hwmon.join("temp1_input")));
        let zones = ["x86_pkg_temp", "cpu-thermal", "cpu_thermal"];
        let milli = hwmon.or_else(|| {
            entries(&self.root.join("sys/class/thermal"))
                .into_iter()
                .find(|zone| text(&zone.join("type")).is_some_and(|kind| zones.contains(&kind.as_str())))
                .and_then(|zone| number(&zone.join("temp")))
        });
        milli.map(|milli| milli as f64 / 1000.0)
    }
}

/// Counters of one class of engines, summed over this process's clients.
#[derive(Debug, Default, Clone, Copy)]
struct Engine {
    /// Busy time: cycles (xe) or nanoseconds (i915).
    busy: u64,
    /// The card's clock in the same cycles; `None` when `busy` is in nanoseconds.
    clock: Option<u64>,
    /// Engines in the class.
    count: u64,
}

impl Engine {
    /// Share of the time since `before`, `elapsed_ns` ago, in per cent.
    fn busy_since(&self, before: &Self, elapsed_ns: u128) -> Option<f64> {
        let busy = self.busy.checked_sub(before.busy)? as f64;
        let span = match (self.clock, before.clock) {
            (Some(now), Some(then)) => now.checked_sub(then)? as f64,
            _ => elapsed_ns as f64,
        };
        (span > 0.0).then(|| (100.0 * busy / (span * self.count.max(1) as f64)).min(100.0))
    }
}

fn engines(clients: &[BTreeMap<String, String>]) -> BTreeMap<String, Engine> {
    let mut engines: BTreeMap<String, Engine> = BTreeMap::new();
    for client in clients {
        for (key, value) in client {
            let Some(first) = value.split_whitespace().next().and_then(|first| first.parse::<u64>().ok())
            else {
                continue;
            };
            if let Some(name) = key.strip_prefix("drm-total-cycles-") {
                let clock = &mut engines.entry(name.to_owned()).or_default().clock;
                *clock = (*clock).max(Some(first));
            } else if let Some(name) = key.strip_prefix("drm-engine-capacity-") {
                let count = &mut engines.entry(name.to_owned()).or_default().count;
                *count = (*count).max(first);
            } else if let Some(name) = key.strip_prefix("drm-cycles-") {
                engines.entry(name.to_owned()).or_default().busy += first;
            } else if let Some(name) = key.strip_prefix("drm-engine-") {
                // A driver that tells cycles and nanoseconds is read by its cycles.
                if !client.contains_key(&format!("drm-cycles-{name}")) {
                    engines.entry(name.to_owned()).or_default().busy += first;
                }
            }
        }
    }
    engines
}

fn frequency(card: &Path) -> Option<Frequency> {
    let graphics = entries(&card.join("drm")).into_iter().find(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("card"))
    });
    let xe = card.join("tile0/gt0/freq0");
    let read = |directory: &Path, names: [&str; 4], throttle: &str| {
        let [actual_mhz, requested_mhz, min_mhz, max_mhz] = names.map(|name| number(&directory.join(name)));
        let throttled = number(&directory.join(throttle)).map(|status| status != 0);
        let frequency = Frequency { actual_mhz, requested_mhz, min_mhz, max_mhz, throttled };
        (frequency != Frequency::default()).then_some(frequency)
    };
    read(&xe, ["act_freq", "cur_freq", "min_freq", "max_freq"], "throttle/status")
        .or_else(|| {
            read(
                &graphics.as_ref()?.join("gt/gt0"),
                ["rps_act_freq_mhz", "rps_cur_freq_mhz", "rps_min_freq_mhz", "rps_max_freq_mhz"],
                "throttle_reason_status",
            )
        })
        .or_else(|| {
            // Before Linux 5.18 there was one set of files a card.
            read(
                graphics.as_ref()?,
                ["gt_act_freq_mhz", "gt_cur_freq_mhz", "gt_min_freq_mhz", "gt_max_freq_mhz"],
                "throttle_reason_status",
            )
        })
}

fn temperatures(hwmon: &Path) -> Vec<Temperature> {
    numbered(hwmon, "temp")
        .into_iter()
        .filter_map(|name| {
            let milli = text(&hwmon.join(format!("{name}_input")))?.parse::<i64>().ok()?;
            let label = text(&hwmon.join(format!("{name}_label"))).unwrap_or(name);
            Some(Temperature { label, celsius: milli as f64 / 1000.0 })
        })
        .collect()
}

fn fans(hwmon: &Path) -> Vec<Fan> {
    numbered(hwmon, "fan")
        .into_iter()
        .filter_map(|name| {
            let rpm = number(&hwmon.join(format!("{name}_input")))?;
            let label = text(&hwmon.join(format!("{name}_label"))).unwrap_or(name);
            Some(Fan { label, rpm })
        })
        .collect()
}

/// The sensors `kind`N that have an input, in numeric order.
fn numbered(hwmon: &Path, kind: &str) -> Vec<String> {
    let mut numbers: Vec<u32> = entries(hwmon)
        .iter()
        .filter_map(|path| {
            path.file_name()?.to_str()?.strip_prefix(kind)?.strip_suffix("_input")?.parse().ok()
        })
        .collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| format!("{kind}{number}")).collect()
}

/// Time on processors from `/proc/self/stat`, in the kernel's hundredths of a second: user and system. The program's
/// name, in brackets, may hold blanks.
fn ticks(stat: &str) -> Option<u64> {
    let mut numbers = stat.rsplit_once(')')?.1.split_whitespace().skip(11).map(str::parse::<u64>);
    numbers.next()?.ok()?.checked_add(numbers.next()?.ok()?)
}

fn bar(card: &Path, vram_bytes: Option<u64>) -> Option<Bar> {
    let resource = text(&card.join("resource"))?;
    let mut range = resource
        .lines()
        .nth(MEMORY_BAR)?
        .split_whitespace()
        .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let (start, end) = (range.next()?.ok()?, range.next()?.ok()?);
    let size_bytes = end.checked_sub(start)?.checked_add(1).filter(|_| end > 0)?;
    // OpenCL keeps some of the memory back, so what it tells is a little less than what the card has; without
    // resizable BAR the window has 256 MiB, far less than any card's memory.
    let whole = match vram_bytes {
        Some(vram) => Some(size_bytes >= vram),
        None => (size_bytes <= SMALL_BAR).then_some(false),
    };
    Some(Bar { size_bytes, whole })
}

/// `guc_info`: "GuC firmware: xe/bmg_guc_70.bin", then the version found, as in "wanted 70.29.2, found 70.44.1" or
/// "found release version 70.44.1"; "compatibility" is that of the interface, not of the firmware.
fn firmware(info: &str) -> Option<Firmware> {
    let file = info
        .lines()
        .find_map(|line| line.trim().strip_prefix("GuC firmware:"))
        .map(|file| file.trim().to_owned());
    let version = info
        .lines()
        .filter_map(|line| line.split_once("found "))
        .filter(|(_, found)| !found.contains("compatibility"))
        .flat_map(|(_, found)| found.split(|char: char| !char.is_ascii_digit() && char != '.'))
        .find(|word| word.starts_with(|char: char| char.is_ascii_digit()) && word.contains('.'))?;
    Some(Firmware { file, version: version.to_owned() })
}

fn warnings(gpu: &Gpu) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(guc) = &gpu.guc {
        let mut parts = guc.version.split('.').map(|part| part.parse::<u64>().unwrap_or(0));
        let version: [u64; 3] = std::array::from_fn(|_| parts.next().unwrap_or(0));
        if version < GOOD_GUC {
            warnings.push(format!(
                "GuC firmware {} is older than 70.65, and versions before it reset the engines under sustained \
                 load: install a newer linux-firmware (package firmware-intel-graphics or linux-firmware), rebuild \
                 the initramfs and reboot",
                guc.version
            ));
        }
    }
    if let Some(Bar { size_bytes, whole: Some(false) }) = gpu.bar {
        warnings.push(format!(
            "resizable BAR is off: the host sees {} MiB of the card's memory at a time, which slows loading; enable \
             \"Above 4G decoding\" and \"Resizable BAR\" in the firmware setup (BIOS)",
            size_bytes >> 20
        ));
    }
    if gpu.frequency.is_some_and(|frequency| frequency.throttled == Some(true)) {
        warnings.push(
            "the card slows itself down (heat or power limit): check its temperature, fans and power limit"
                .to_owned(),
        );
    }
    warnings
}

/// `"1234 KiB"` as bytes. Kernels print KiB or MiB, and no unit for plain bytes.
fn bytes(pairs: &BTreeMap<String, String>, key: &str) -> Option<u64> {
    let mut words = pairs.get(key)?.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    let shift = match words.next() {
        None => 0,
        Some("KiB") => 10,
        Some("MiB") => 20,
        Some("GiB") => 30,
        Some(_) => return None,
    };
    number.checked_mul(1 << shift)
}

/// `Key:   1234 kB` in the style of `/proc/meminfo`, as bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Directories `hwmonN` of `parent`, sorted.
fn hwmons(parent: &Path) -> Vec<PathBuf> {
    let mut found = entries(parent);
    found.retain(|path| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("hwmon"))
    });
    found
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests;
