//! What is read of recorded machines: the figures of `axectl gpu`, the findings of `axectl doctor`.

use std::path::PathBuf;
use std::process::Command;

use axectl::protocol::{Bar, Device, Gpu};
use axectl::sensors::Sampler;
use serde_json::Value;

use crate::axectl::binary;
use crate::support::Daemon;

const PCI: &str = "0000:03:00.0";

fn machine(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/machines").join(name)
}

fn sample(name: &str, card: bool) -> Gpu {
    let mut sampler = Sampler::at(&machine(name));
    if card {
        sampler.look_at(PCI, None);
    }
    sampler.sample();
    sampler.sample()
}

#[test]
fn a_card_of_xe_shows_every_figure() {
    let gpu = sample("xe", true);
    assert_eq!((gpu.driver.as_deref(), gpu.kernel.as_deref()), (Some("xe"), Some("6.14.0-arc")));
    let vram = gpu.vram.unwrap();
    // One client with two files counts once.
    assert_eq!((vram.allocated_bytes, vram.resident_bytes), (Some(17_216 << 20), Some(17_216 << 20)));
    assert_eq!(gpu.gtt_bytes, Some(192 << 10));
    assert_eq!(gpu.frequency.unwrap().actual_mhz, Some(2350));
    assert_eq!(gpu.frequency.unwrap().throttled, Some(false));
    let power = gpu.power.unwrap();
    assert_eq!((power.limit_watts, power.energy_joules), (Some(230.0), Some(90_123.456_789)));
    assert_eq!(power.watts, Some(0.0));
    assert_eq!((gpu.temperatures.len(), gpu.fans.len(), gpu.engines.len()), (2, 2, 3));
    assert_eq!(gpu.guc.unwrap().version, "70.65.0");
    assert_eq!(gpu.bar, Some(Bar { size_bytes: 32 << 30, whole: None }));
    assert_eq!((gpu.host.cpu_celsius, gpu.host.rss_bytes), (Some(47.0), Some(421_904 << 10)));
    assert_eq!(gpu.warnings, Vec::<String>::new());
}

#[test]
fn a_card_of_i915_warns_of_firmware_window_and_heat() {
    let gpu = sample("i915", true);
    assert_eq!(gpu.driver.as_deref(), Some("i915"));
    assert_eq!(gpu.vram.unwrap().resident_bytes, Some(7040 << 20));
    assert_eq!(gpu.frequency.unwrap().max_mhz, Some(2450));
    assert_eq!(gpu.power.unwrap().limit_watts, Some(190.0));
    assert!(gpu.temperatures.is_empty() && gpu.fans.is_empty(), "this kernel tells neither");
    let parts = ["GuC firmware 70.58.0 is older than 70.65", "the host sees 256 MiB", "slows itself down"];
    assert_eq!(gpu.warnings.len(), parts.len());
    for (warning, part) in gpu.warnings.iter().zip(parts) {
        assert!(warning.contains(part), "{warning}");
    }
    assert!(gpu.warnings[0].contains("install a newer linux-firmware"));
}

#[test]
fn a_machine_without_a_card_shows_the_host() {
    let gpu = sample("cpu", false);
    assert_eq!((gpu.pci, gpu.vram, gpu.power), (None, None, None));
    assert_eq!(gpu.host.load, Some([1.42, 0.97, 0.61]));
    assert_eq!((gpu.host.cpu_mhz, gpu.host.busy_processors), (Some(2900), Some(0.0)));
    assert!(gpu.warnings.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_shows_its_card_and_repeats_its_warnings_in_the_status() {
    let daemon = Daemon::on_machine(&machine("i915")).await;
    daemon.board.pin_device(Device {
        name: "Arc A770".to_owned(),
        kind: "gpu".to_owned(),
        platform: "OpenCL".to_owned(),
        driver: "25.1".to_owned(),
        pci: Some(PCI.to_owned()),
        compute_units: 512,
        memory_bytes: 16 << 30,
    });
    let gpu: Gpu = daemon.client().get("/gpu").await.unwrap();
    assert_eq!(gpu.bar.unwrap().whole, Some(false));
    let status: axectl::protocol::Status = daemon.client().get("/status").await.unwrap();
    assert_eq!(status.warnings, gpu.warnings);
}

/// Exit status and findings of `axectl doctor` on a recorded machine.
fn doctor(name: &str) -> (i32, Vec<Value>) {
    let output = Command::new(binary())
        .args(["--json", "doctor", "--root"])
        .arg(machine(name))
        .env("AXED_SOCKET", "/nowhere")
        .output()
        .unwrap();
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let Value::Array(findings) = report["findings"].take() else { panic!("{report}") };
    let failed = findings.iter().filter(|finding| finding["outcome"] == "fail").count();
    assert_eq!(report["failed"], failed);
    (output.status.code().unwrap(), findings)
}

#[track_caller]
fn assert_found(findings: &[Value], check: &str, outcome: &str, part: &str) {
    let found = findings.iter().find(|finding| finding["check"] == check);
    let found = found.unwrap_or_else(|| panic!("{check} is missing in {findings:#?}"));
    let all = format!("{} {}", found["found"], found["advice"]);
    assert_eq!(found["outcome"], outcome, "{found}");
    assert!(all.contains(part), "`{part}` is missing in {found}");
    // Whoever is told that something is wrong is told what to do.
    assert_eq!(found["advice"].is_string(), outcome == "warn" || outcome == "fail", "{found}");
}

#[test]
fn the_doctor_finds_nothing_on_a_machine_that_is_well() {
    let (code, findings) = doctor("xe");
    assert_eq!(code, 0, "{findings:#?}");
    for (check, part) in [
        ("OpenCL", "libigdrcl.so"),
        ("memory", "39.3 GiB available of 62.7 GiB"),
        ("card driver", "0000:03:00.0: xe, kernel 6.14.0-arc"),
        ("card node", "/dev/dri/renderD128"),
        ("card firmware", "GuC 70.65.0"),
        ("resizable BAR", "on, a window of 32.0 GiB"),
        ("card sensors", "clock, power, temperatures and fans"),
        ("unit", "enabled: axed.service"),
        ("watchdog", "after 60 s"),
        ("user", "runs as axed"),
        ("groups", "render and video"),
    ] {
        assert_found(&findings, check, "ok", part);
    }
    assert!(findings.iter().all(|finding| finding["outcome"] == "ok"), "{findings:#?}");
}

#[test]
fn the_doctor_names_the_cure_for_each_fault() {
    let (code, findings) = doctor("i915");
    assert_eq!(code, 1);
    for (check, outcome, part) in [
        ("OpenCL", "fail", "pocl-opencl-icd"),
        ("card driver", "ok", "i915"),
        ("card node", "fail", "--device /dev/dri"),
        ("card firmware", "warn", "install a newer linux-firmware"),
        ("resizable BAR", "warn", "256 MiB of the card's memory at a time"),
        ("card clock", "warn", "slows itself down"),
        ("unit", "warn", "systemctl enable axed"),
        ("watchdog", "warn", "WatchdogSec=60"),
        ("user", "fail", "systemd-sysusers"),
        ("groups", "warn", "SupplementaryGroups=render video"),
    ] {
        assert_found(&findings, check, outcome, part);
    }
    let sensors = findings.iter().find(|finding| finding["check"] == "card sensors").unwrap();
    assert_eq!((sensors["outcome"].as_str(), sensors["advice"].as_str()), (Some("skipped"), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_asks_a_running_daemon_and_names_a_wrong_configuration() {
    let daemon = Daemon::start().await;
    daemon.board.warn("the card is odd: turn it round");
    daemon.board.pin_device(device("a card of its own"));
    let look = |arguments: Vec<String>, socket: PathBuf| async move {
        let mut command = Command::new(binary());
        command.args(["--json", "doctor"]).args(arguments).env("AXED_SOCKET", socket);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), report["findings"].as_array().unwrap().clone())
    };
    let (_, findings) = look(Vec::new(), daemon.socket.clone()).await;
    assert_found(&findings, "socket", "ok", "admin.sock answers");
    assert_found(&findings, "daemon", "ok", "ready, pid");
    assert_found(&findings, "warning", "warn", "turn it round");
    // What it would find in another environment is not what the daemon uses.
    assert_found(&findings, "devices", "ok", "the daemon uses a card of its own");
    // The test's daemon says that it listens where nobody does.
    assert_found(&findings, "port", "fail", "http://127.0.0.1:8080/health");

    let wrong = daemon.directory.path().join("wrong.toml");
    std::fs::write(&wrong, "[server]\nport = \"many\"\n").unwrap();
    let arguments = vec!["--config".to_owned(), wrong.display().to_string()];
    let (code, findings) = look(arguments, daemon.directory.path().join("nobody.sock")).await;
    assert_eq!(code, 1);
    assert_found(&findings, "daemon", "warn", "not running");
    assert_found(&findings, "configuration", "fail", "key `server.port`: found string");

    std::fs::write(&wrong, "[server]\nport = many\n").unwrap();
    let arguments = vec!["--config".to_owned(), wrong.display().to_string()];
    let (_, findings) = look(arguments, daemon.directory.path().join("nobody.sock")).await;
    assert_found(&findings, "configuration", "fail", "wrong.toml: not valid TOML: line 2, column 8: ");
    // What follows from that is not told again.
    assert!(findings.iter().all(|finding| finding["check"] != "devices"), "{findings:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_looks_where_the_configuration_puts_the_socket() {
    let daemon = Daemon::start().await;
    let folder = daemon.directory.path();
    assert_eq!(daemon.socket.parent(), Some(folder));
    let config = folder.join("daemon.toml");
    // From the file's folder, and by its whole path.
    for place in [PathBuf::from(daemon.socket.file_name().unwrap()), daemon.socket.clone()] {
        std::fs::write(&config, format!("[admin]\nsocket = {place:?}\n")).unwrap();
        let look = |arguments: &[&str]| {
            let mut command = Command::new(binary());
            command.args(["--json", "doctor", "--config"]).arg(&config).args(arguments);
            command.env_remove("AXE_ADMIN_SOCKET").env_remove("AXED_SOCKET");
            tokio::task::spawn_blocking(move || -> Value {
                serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
            })
        };
        let report = look(&[]).await.unwrap();
        let findings = report["findings"].as_array().unwrap();
        assert_found(findings, "socket", "ok", "admin.sock answers");
        assert_found(findings, "daemon", "ok", "ready, pid");
        // Who names another one means it.
        let report = look(&["--socket", "/nowhere"]).await.unwrap();
        assert_found(report["findings"].as_array().unwrap(), "daemon", "warn", "/nowhere");
    }
}

fn device(name: &str) -> Device {
    Device {
        name: name.to_owned(),
        kind: "gpu".to_owned(),
        platform: "OpenCL".to_owned(),
        driver: "1.2".to_owned(),
        pci: None,
        compute_units: 32,
        memory_bytes: 1 << 30,
    }
}

#[test]
fn the_doctor_finds_files_where_the_daemon_would() {
    let folder = tempfile::tempdir().unwrap();
    let conf = folder.path().join("conf");
    std::fs::create_dir_all(conf.join("c")).unwrap();
    std::fs::write(conf.join("keys"), "alice:one\n").unwrap();
    std::fs::set_permissions(conf.join("keys"), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    std::fs::write(conf.join("m.gguf"), "no model").unwrap();
    std::fs::write(folder.path().join("other.gguf"), "no model, and longer").unwrap();
    let toml = "[model]\npath = \"m.gguf\"\n[server]\napi_key_file = \"keys\"\n[device]\ncache_dir = \"c\"\n";
    std::fs::write(conf.join("daemon.toml"), toml).unwrap();
    let look = |model: &str| {
        let mut command = Command::new(binary());
        command.args(["--json", "doctor", "--config", "conf/daemon.toml"]).current_dir(folder.path());
        for name in ["AXE_DEVICE_CACHE_DIR", "AXE_API_KEY", "AXE_HOST"] {
            command.env_remove(name);
        }
        let output = command.env("AXED_SOCKET", "/nowhere").env("AXE_MODEL", model).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["findings"].as_array().unwrap().clone()
    };
    let findings = look("");
    assert_found(&findings, "model", "ok", "conf/m.gguf, 8");
    assert_found(&findings, "key file", "warn", "conf/keys (mode 644)");
    assert_found(&findings, "cache", "ok", "conf/c holds");
    // The program is asked for the same file.
    let fit = findings.iter().find(|finding| finding["check"] == "fit").unwrap();
    assert!(!fit["found"].as_str().unwrap().contains("No such file"), "{fit}");
    // A path in the environment counts from the working folder.
    assert_found(&look("other.gguf"), "model", "ok", "other.gguf, 20");
}

#[test]
fn the_doctor_wants_no_card() {
    let (code, findings) = doctor("cpu");
    assert_eq!(code, 0, "{findings:#?}");
    assert_found(&findings, "card", "skipped", "the processor computes");
    assert_found(&findings, "OpenCL", "ok", "libpocl.so.2");
    assert_found(&findings, "unit", "skipped", "not installed");
    let output = Command::new(binary()).args(["doctor", "--root"]).arg(machine("cpu")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("ok       OpenCL") && text.ends_with("\nall is well\n"), "{text}");
}
