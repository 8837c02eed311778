//! Answers as people read them: aligned, with units, `n/a` for what nobody knows.

mod bench;
mod config;
mod doctor;
mod reload;

use axectl::protocol::{
    CancelResult, Drain, Faults, Gpu, Job, JobState, Kernels, Level, LogLevel, LogLine, Memory, Profile,
    Queue, Status, Version,
};
use comfy_table::{CellAlignment, Table, presets::NOTHING};

pub use bench::bench;
pub use config::config;
pub use doctor::doctor;
pub use reload::reload;

use crate::units::{bytes, duration, known, plain, rate};

/// `axectl status`
pub fn status(status: &Status) -> String {
    let version = &status.version;
    let mut sheet = Sheet::new();
    let reason = status.reason.as_deref().map(|reason| format!(": {}", plain(reason))).unwrap_or_default();
    sheet.line("State", format!("{}{reason}", status.state));
    sheet.line(
        "Daemon",
        format!(
            "axed {} ({}), pid {}, up {}",
            plain(&version.version),
            plain(&version.build),
            status.pid,
            duration(status.uptime_s)
        ),
    );
    sheet.line("Listening", known(status.listen.as_deref(), plain));
    sheet.line(
        "Model",
        known(status.model.as_ref(), |model| {
            format!(
                "{} ({}, {}, context {} tokens, id {})",
                plain(&model.name),
                plain(&model.architecture),
                plain(&model.quantisation),
                model.context_length,
                plain(&model.identity)
            )
        }),
    );
    if let Some(model) = &status.model {
        sheet.line("", plain(&model.path));
    }
    sheet.line(
        "Device",
        known(status.device.as_ref(), |device| {
            let pci = device.pci.as_deref().map(|pci| format!(" at {}", plain(pci))).unwrap_or_default();
            format!(
                "{} ({}{pci}, {} compute units, {})",
                plain(&device.name),
                plain(&device.kind),
                device.compute_units,
                bytes(device.memory_bytes)
            )
        }),
    );
    if let Some(device) = &status.device {
        sheet.line("", format!("{}, driver {}", plain(&device.platform), plain(&device.driver)));
    }
    sheet.line("Kernels", known(status.kernels.as_ref(), kernels));
    let away = if status.unloaded { " (put away: the next request has it loaded again)" } else { "" };
    sheet.line("Memory", format!("{}{away}", known(status.memory.as_ref(), memory)));
    if let Some(loading) = &status.loading {
        sheet.line("Loading", reload::loading(loading));
    }
    if let Some(state) = &status.reload {
        sheet.line("Reload", reload::state(state));
    }
    sheet.line("Slot", status.running.as_ref().map_or_else(|| "idle".to_owned(), slot));
    sheet.line("Queue", format!("{} waiting, room for {}", status.waiting, status.capacity));
    let counters = &status.counters;
    sheet.line(
        "Requests",
        format!(
            "{} finished, {} cancelled, {} failed, {} refused",
            counters.finished, counters.cancelled, counters.failed, counters.rejected
        ),
    );
    let encoded = counters.prompt_tokens.saturating_sub(counters.cached_tokens);
    sheet.line(
        "Prompts",
        format!(
            "{} tokens, {} of them reused, encoded at {}",
            counters.prompt_tokens,
            counters.cached_tokens,
            rate(encoded, counters.prefill_s)
        ),
    );
    sheet.line(
        "Replies",
        format!(
            "{} tokens, generated at {}",
            counters.completion_tokens,
            rate(counters.completion_tokens, counters.decode_s)
        ),
    );
    if status.faults != Faults::default() {
        sheet.line("Faults", reload::faults(&status.faults));
    }
    sheet.finish(&status.warnings)
}

/// `axectl gpu`
pub fn gpu(gpu: &Gpu) -> String {
    let mut sheet = Sheet::new();
    sheet.line("Device", known(gpu.name.as_deref(), plain));
    sheet.line("OpenCL driver", known(gpu.opencl_driver.as_deref(), plain));
    sheet.line("Kernel", known(gpu.kernel.as_deref(), plain));
    if let Some(pci) = &gpu.pci {
        card(gpu, pci, &mut sheet);
    }
    sheet.line("Allocated", known(gpu.memory.as_ref(), memory));
    let host = &gpu.host;
    sheet.line(
        "Host memory",
        format!(
            "{} available of {}",
            known(host.memory_available_bytes, bytes),
            known(host.memory_total_bytes, bytes)
        ),
    );
    sheet.line(
        "axed memory",
        format!(
            "{} resident, {} of it private",
            known(host.rss_bytes, bytes),
            known(host.rss_anon_bytes, bytes)
        ),
    );
    sheet.line(
        "Host load",
        known(host.load, |[one, five, fifteen]| format!("{one:.2} {five:.2} {fifteen:.2} (1, 5, 15 min)")),
    );
    sheet.line(
        "CPU",
        format!(
            "{}, {}, {} kept busy by axed",
            known(host.cpu_celsius, celsius),
            known(host.cpu_mhz, |mhz| format!("{mhz} MHz")),
            known(host.busy_processors, |busy| format!("{busy:.1} processors"))
        ),
    );
    sheet.finish(&gpu.warnings)
}

fn card(gpu: &Gpu, pci: &str, sheet: &mut Sheet) {
    sheet.line("PCI address", plain(pci));
    sheet.line("Kernel driver", known(gpu.driver.as_deref(), plain));
    sheet.line(
        "GuC firmware",
        known(gpu.guc.as_ref(), |guc| {
            let file = guc.file.as_deref().map(|file| format!(" ({})", plain(file))).unwrap_or_default();
            format!("{}{file}", plain(&guc.version))
        }),
    );
    sheet.line(
        "VRAM",
        known(gpu.vram, |vram| {
            format!(
                "{} allocated, {} resident, of {}",
                known(vram.allocated_bytes, bytes),
                known(vram.resident_bytes, bytes),
                known(vram.size_bytes, bytes)
            )
        }),
    );
    sheet.line("GTT", known(gpu.gtt_bytes, bytes));
    sheet.line(
        "BAR",
        known(gpu.bar, |bar| {
            let resizable = match bar.whole {
                Some(true) => " (resizable BAR on)",
                Some(false) => " (resizable BAR off)",
                None => "",
            };
            format!("{}{resizable}", bytes(bar.size_bytes))
        }),
    );
    let engines: Vec<String> = gpu
        .engines
        .iter()
        .map(|engine| {
            format!("{} {}", plain(&engine.name), known(engine.busy_percent, |busy| format!("{busy:.0} %")))
        })
        .collect();
    sheet.line("Load", some(&engines));
    sheet.line(
        "Clock",
        known(gpu.frequency, |clock| {
            let megahertz = |value: Option<u64>| known(value, |value| format!("{value} MHz"));
            let throttled = if clock.throttled == Some(true) { ", throttled" } else { "" };
            format!(
                "{} (asked for {}, from {} to {}){throttled}",
                megahertz(clock.actual_mhz),
                megahertz(clock.requested_mhz),
                megahertz(clock.min_mhz),
                megahertz(clock.max_mhz)
            )
        }),
    );
    sheet.line(
        "Power",
        known(gpu.power, |power| {
            let watts = |value: Option<f64>| known(value, |value| format!("{value:.1} W"));
            let energy = known(power.energy_joules, |joules| format!("{:.1} Wh", joules / 3600.0));
            format!("{} (limit {}, used {energy})", watts(power.watts), watts(power.limit_watts))
        }),
    );
    let temperatures: Vec<String> =
        gpu.temperatures.iter().map(|at| format!("{} {}", plain(&at.label), celsius(at.celsius))).collect();
    sheet.line("Temperature", some(&temperatures));
    let fans: Vec<String> =
        gpu.fans.iter().map(|fan| format!("{} {} rpm", plain(&fan.label), fan.rpm)).collect();
    sheet.line("Fans", some(&fans));
}

/// `axectl queue`
pub fn queue(queue: &Queue) -> String {
    let mut text = format!("{} waiting, room for {}", queue.waiting.len(), queue.capacity);
    if queue.draining {
        text.push_str("; draining: no new jobs are accepted");
    }
    if queue.running.is_none() && queue.waiting.is_empty() {
        return format!("no jobs; {text}");
    }
    let mut table = table(["ID", "STATE", "PROMPT", "ENCODED", "GENERATED", "FOR"], 2..6);
    for job in queue.running.iter().chain(&queue.waiting) {
        table.add_row([
            plain(&job.id),
            job.state.to_string(),
            job.prompt_tokens.to_string(),
            job.prefilled_tokens.to_string(),
            job.completion_tokens.to_string(),
            duration(job.elapsed_s),
        ]);
    }
    format!("{}\n\n{text}", lines_of(&table))
}

/// `axectl profile`
pub fn profile(profile: &Profile) -> String {
    if !profile.enabled {
        return "kernels are not measured; set `device.profiling = true` in daemon.toml, then `axectl reload` (it \
                costs a few per cent of speed)"
            .to_owned();
    }
    let total: u64 = profile.kernels.iter().map(|kernel| kernel.total_ns).sum();
    let mut table = table(["KERNEL", "LAUNCHES", "TOTAL", "MEAN", "SHARE", "READ", "OF LIMIT"], 1..7);
    for kernel in &profile.kernels {
        let mean = kernel.total_ns as f64 / kernel.launches.max(1) as f64;
        table.add_row([
            plain(&kernel.kernel),
            kernel.launches.to_string(),
            format!("{:.1} ms", kernel.total_ns as f64 / 1e6),
            format!("{:.1} us", mean / 1e3),
            format!("{:.1} %", 100.0 * kernel.total_ns as f64 / total.max(1) as f64),
            if kernel.bytes == 0 { "-".to_owned() } else { bytes(kernel.bytes) },
            profile
                .limits
                .and_then(|limits| kernel.share_of(&limits))
                .map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        ]);
    }
    let mut sheet = Sheet::new();
    sheet.line("Request", known(profile.request.as_deref(), plain));
    sheet.line(
        "Limits",
        known(profile.limits, |limits| {
            format!(
                "reading {:.1} GB/s, computing {:.0} GFLOP/s, measured on this device",
                limits.read_bytes_per_s / 1e9,
                limits.operations_per_s / 1e9
            )
        }),
    );
    format!("{}\n\n{}", lines_of(&table), sheet.finish(&[]))
}

/// `axectl cancel`
pub fn cancelled(result: &CancelResult) -> String {
    let was = match result.was {
        JobState::Waiting => "waiting",
        JobState::Prefill => "encoding its prompt",
        JobState::Generating => "generating",
    };
    format!("cancelled {}, which was {was}", plain(&result.id))
}

/// `axectl drain`
pub fn drain(drain: &Drain) -> String {
    format!(
        "no new jobs are accepted; the daemon ends when those at hand are done ({} running, {} waiting)",
        drain.running, drain.waiting
    )
}

/// `axectl log-level`
pub fn log_level(level: &LogLevel) -> String {
    format!("logging at {} until the next start", plain(&level.level))
}

/// `axectl version`
pub fn versions(axectl: &str, axed: Option<&Version>) -> String {
    let mut sheet = Sheet::new();
    sheet.line("axectl", axectl.to_owned());
    sheet.line(
        "axed",
        known(axed, |axed| {
            format!("{} ({}), admin protocol {}", plain(&axed.version), plain(&axed.build), axed.protocol)
        }),
    );
    sheet.finish(&[])
}

/// One line of `axectl logs`.
pub fn log_line(line: &LogLine, colours: bool) -> String {
    let level = line.level.name().to_uppercase();
    let level = match (colours, line.level) {
        (false, _) => format!("{level:>5}"),
        (true, Level::Error) => format!("\x1b[31m{level:>5}\x1b[0m"),
        (true, Level::Warn) => format!("\x1b[33m{level:>5}\x1b[0m"),
        (true, Level::Info) => format!("\x1b[32m{level:>5}\x1b[0m"),
        (true, Level::Debug | Level::Trace) => format!("\x1b[2m{level:>5}\x1b[0m"),
    };
    let mut text = format!("{} {level} {}: {}", plain(&line.time), plain(&line.target), plain(&line.message));
    for (key, value) in &line.fields {
        let value = value.as_str().map_or_else(|| value.to_string(), |text| format!("{text:?}"));
        text.push_str(&format!(" {}={}", plain(key), plain(&value)));
    }
    text
}

fn kernels(kernels: &Kernels) -> String {
    let tests = &kernels.self_tests;
    let wrong: Vec<String> =
        tests.iter().filter(|test| !test.passed).map(|test| plain(&test.kernel)).collect();
    let worst = tests.iter().filter(|test| test.passed).map(|test| test.worst).fold(0.0, f64::max);
    let verdict = match wrong.as_slice() {
        [] if tests.is_empty() => "no self-test".to_owned(),
        [] => format!(
            "self-test: {} right, the worst at {:.0} % of what is allowed",
            tests.len(),
            100.0 * worst
        ),
        wrong => format!("self-test: wrong and not used: {}", wrong.join(", ")),
    };
    format!("{}, many rows by {}; {verdict}", plain(&kernels.family), plain(&kernels.products))
}

fn memory(memory: &Memory) -> String {
    format!(
        "{} of {}: weights {}, KV cache {}, scratch {}",
        bytes(memory.total_bytes),
        bytes(memory.budget_bytes),
        bytes(memory.weights_bytes),
        bytes(memory.kv_cache_bytes),
        bytes(memory.scratch_bytes)
    )
}

fn slot(job: &Job) -> String {
    let progress = match job.state {
        JobState::Generating => format!("{} tokens generated", job.completion_tokens),
        JobState::Waiting | JobState::Prefill => {
            format!("{} of {} prompt tokens encoded", job.prefilled_tokens, job.prompt_tokens)
        }
    };
    format!("{} {}: {progress} in {}", plain(&job.id), job.state, duration(job.elapsed_s))
}

fn celsius(degrees: f64) -> String {
    format!("{degrees:.0} °C")
}

fn some(items: &[String]) -> String {
    if items.is_empty() { "n/a".to_owned() } else { items.join(", ") }
}

/// Names on the left, values on the right, warnings below.
struct Sheet {
    table: Table,
}

impl Sheet {
    fn new() -> Self {
        Self { table: bare() }
    }

    fn line(&mut self, name: &str, value: String) {
        self.table.add_row([name.to_owned(), value]);
    }

    fn finish(self, warnings: &[String]) -> String {
        let mut text = lines_of(&self.table);
        for warning in warnings {
            text.push_str(&format!("\nWarning: {}", plain(warning)));
        }
        text
    }
}

/// A table whose columns `numbers` stand to the right.
fn table<const N: usize>(head: [&str; N], numbers: std::ops::Range<usize>) -> Table {
    let mut table = bare();
    table.set_header(head);
    for column in numbers {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn bare() -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    table
}

/// The table without the blanks around it.
fn lines_of(table: &Table) -> String {
    let lines: Vec<String> =
        table.lines().map(|line| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned()).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axectl::protocol::{Fan, Frequency, Host, KernelTime, Limits, Power, Temperature, Vram};

    fn job(id: &str, state: JobState) -> Job {
        Job {
            id: id.to_owned(),
            state,
            prompt_tokens: 40,
            prefilled_tokens: 8,
            completion_tokens: 0,
            elapsed_s: 1.5,
        }
    }

    #[test]
    fn the_queue_is_aligned() {
        let shown = queue(&Queue {
            running: Some(job("chatcmpl-1", JobState::Prefill)),
            waiting: vec![job("b", JobState::Waiting)],
            capacity: 64,
            draining: true,
        });
        let expected = "\
ID          STATE    PROMPT  ENCODED  GENERATED    FOR
chatcmpl-1  prefill      40        8          0  1.5 s
b           waiting      40        8          0  1.5 s

1 waiting, room for 64; draining: no new jobs are accepted";
        assert_eq!(shown, expected);
        let empty = Queue { capacity: 64, ..Queue::default() };
        assert_eq!(queue(&empty), "no jobs; 0 waiting, room for 64");
    }

    #[test]
    fn a_bare_host_shows_gaps_and_no_card() {
        let shown = gpu(&Gpu { kernel: Some("6.1.0".to_owned()), ..Gpu::default() });
        assert!(shown.contains("Kernel         6.1.0\n"), "{shown}");
        assert!(shown.contains("CPU            n/a, n/a, n/a kept busy"), "{shown}");
        assert!(!shown.contains("VRAM"), "{shown}");
    }

    #[test]
    fn a_card_shows_every_figure() {
        let shown = gpu(&Gpu {
            pci: Some("0000:03:00.0".to_owned()),
            vram: Some(Vram {
                size_bytes: Some(32 << 30),
                allocated_bytes: Some(5 << 30),
                resident_bytes: None,
            }),
            frequency: Some(Frequency {
                actual_mhz: Some(2400),
                throttled: Some(true),
                ..Frequency::default()
            }),
            power: Some(Power { watts: Some(190.25), limit_watts: Some(230.0), energy_joules: Some(7200.0) }),
            temperatures: vec![Temperature { label: "pkg".to_owned(), celsius: 71.4 }],
            fans: vec![Fan { label: "fan1".to_owned(), rpm: 1800 }],
            host: Host { load: Some([0.5, 1.0, 2.0]), ..Host::default() },
            warnings: vec!["hot".to_owned()],
            ..Gpu::default()
        });
        for part in [
            "5.0 GiB allocated, n/a resident, of 32.0 GiB",
            "2400 MHz (asked for n/a, from n/a to n/a), throttled",
            "190.2 W (limit 230.0 W, used 2.0 Wh)",
            "pkg 71 °C",
            "fan1 1800 rpm",
            "0.50 1.00 2.00 (1, 5, 15 min)",
            "\nWarning: hot",
        ] {
            assert!(shown.contains(part), "{part} is missing in\n{shown}");
        }
    }

    #[test]
    fn profiles_show_shares() {
        let kernel = |name: &str, total_ns, bytes, operations| KernelTime {
            kernel: name.to_owned(),
            launches: 2,
            total_ns,
            bytes,
            operations,
        };
        let shown = profile(&Profile {
            enabled: true,
            request: Some("chatcmpl-1".to_owned()),
            limits: Some(Limits { read_bytes_per_s: 20e9, operations_per_s: 100e9 }),
            // Reads 30 MB in 3 ms, at half the limit; computes at a tenth of it, which counts for less.
            kernels: vec![kernel("gemv", 3_000_000, 30_000_000, 30_000_000), kernel("norm", 1_000_000, 0, 0)],
        });
        assert_eq!(
            shown,
            "\
KERNEL  LAUNCHES   TOTAL       MEAN   SHARE      READ  OF LIMIT
gemv           2  3.0 ms  1500.0 us  75.0 %  28.6 MiB      50 %
norm           2  1.0 ms   500.0 us  25.0 %         -         -

Request  chatcmpl-1
Limits   reading 20.0 GB/s, computing 100 GFLOP/s, measured on this device"
        );
        assert!(profile(&Profile::default()).contains("device.profiling"));
    }

    #[test]
    fn log_lines_show_fields_and_hide_control_characters() {
        let line = LogLine {
            time: "2026-01-02T03:04:05.000006Z".to_owned(),
            level: Level::Warn,
            target: "axe::http".to_owned(),
            message: "odd\u{1b}[31m\nline".to_owned(),
            fields: serde_json::from_str(r#"{"id":"a b","n":3}"#).unwrap(),
        };
        assert_eq!(
            log_line(&line, false),
            r#"2026-01-02T03:04:05.000006Z  WARN axe::http: odd\u{1b}[31m\nline id="a b" n=3"#
        );
        assert!(log_line(&line, true).contains("\x1b[33m WARN\x1b[0m"));
    }
}
