//! The units, as far as they can be judged without booting a system; scripts/test-systemd.sh does the rest.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use std::{path::Path, process::Command};

/// The services.
const UNITS: [&str; 2] = ["axed.service", "axed@.service"];

fn text(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd").join(name)).unwrap()
}

/// Copies of the units whose programs exist here, since a unit with a missing program does not verify.
fn units() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in UNITS.into_iter().chain(["axed.socket"]) {
        let here = text(name).replace("/usr/bin/axed", "/bin/true").replace("/usr/bin/axectl", "/bin/true");
        std::fs::write(directory.path().join(name), here).unwrap();
    }
    directory
}

fn analyze(arguments: &[&str], directory: &Path) -> Option<std::process::Output> {
    match Command::new("systemd-analyze").args(arguments).current_dir(directory).output() {
        Ok(output) => Some(output),
        Err(error) => {
            eprintln!("skipped: systemd-analyze cannot be run: {error}");
            None
        }
    }
}

#[test]
fn units_verify_without_a_word() {
    let directory = units();
    for name in UNITS.into_iter().chain(["axed.socket"]) {
        let Some(output) = analyze(&["verify", "--man=no", &format!("./{name}")], directory.path()) else {
            return;
        };
        let told = String::from_utf8_lossy(&output.stderr);
        let ours: Vec<_> = told.lines().filter(|line| line.contains("axed")).collect();
        assert!(output.status.success() && ours.is_empty(), "{name}: {told}");
    }
}

#[test]
fn exposure_is_low() {
    let directory = units();
    for name in UNITS {
        // The threshold is in tenths.
        let arguments = ["security", "--offline=true", "--threshold=25", "--no-pager", &format!("./{name}")];
        let Some(output) = analyze(&arguments, directory.path()) else { return };
        let report = String::from_utf8_lossy(&output.stdout);
        let verdict = report.lines().last().unwrap_or_default().to_owned();
        assert!(output.status.success(), "{name}: {verdict}{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_template_differs_only_in_its_places() {
    let settings = |name: &str| -> Vec<String> {
        let places = [
            "Description",
            "ExecStart=",
            "ExecStartPre=",
            "ExecReload=",
            "Environment",
            "RuntimeDirectory=",
            "CacheDirectory=",
            "AssertPath",
        ];
        text(name)
            .lines()
            .filter(|line| !line.starts_with('#') && !places.iter().any(|place| line.starts_with(place)))
            .map(str::to_owned)
            .collect()
    };
    let [plain, template] = UNITS.map(settings);
    let without_blanks =
        |lines: Vec<String>| lines.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>();
    assert_eq!(without_blanks(plain), without_blanks(template));
    assert!(text("axed@.service").contains("AXE_DEVICE_PCI=%i"));
}
