//! Intel's cards: driver, device nodes, firmware, the window into their memory, sensors.

use std::path::Path;

use axectl::protocol::Gpu;
use axectl::sensors::Sampler;

use super::{Finding, Outcome};
use crate::units::bytes;

/// Looks at each card; `wanted` is the one that the configuration names.
pub(super) fn look(root: &Path, wanted: Option<&str>, findings: &mut Vec<Finding>) {
    let cards = Sampler::at(root).cards();
    let wanted = wanted.map(str::to_ascii_lowercase);
    match (&cards[..], &wanted) {
        ([], None) => {
            findings.push(Finding::skipped("card", "no Intel graphics card: the processor computes"));
            return;
        }
        (_, Some(wanted)) if !cards.iter().any(|card| card.ends_with(wanted.as_str())) => {
            let found = format!("device.pci is {wanted}, the cards are at: {}", list(&cards));
            findings.push(Finding::fail("card", found, "set device.pci to one of these, or unset it"));
        }
        ([_, _, ..], None) => findings.push(Finding::warn(
            "card",
            format!("several cards ({}), and none is named", list(&cards)),
            "name one with device.pci, or run a daemon for each: systemctl enable --now axed@ADDRESS",
        )),
        _ => {}
    }
    for card in
        cards.iter().filter(|card| wanted.as_ref().is_none_or(|wanted| card.ends_with(wanted.as_str())))
    {
        let mut sampler = Sampler::at(root);
        sampler.look_at(card, None);
        one(root, card, &sampler.sample(), findings);
    }
}

fn list(cards: &[String]) -> String {
    if cards.is_empty() { "none".to_owned() } else { cards.join(", ") }
}

fn one(root: &Path, card: &str, gpu: &Gpu, findings: &mut Vec<Finding>) {
    let kernel = gpu.kernel.as_deref().unwrap_or("of an unknown version");
    findings.push(match gpu.driver.as_deref() {
        Some(driver @ ("xe" | "i915")) => {
            Finding::ok("card driver", format!("{card}: {driver}, kernel {kernel}"))
        }
        Some(other) => Finding::fail(
            "card driver",
            format!("{card}: {other} has it"),
            "give the card back to the kernel's own driver, xe or i915 (it may be set aside for a virtual machine)",
        ),
        None => Finding::fail(
            "card driver",
            format!("{card}: no driver, kernel {kernel}"),
            "install a kernel that knows this card, and firmware-intel-graphics or linux-firmware; see `dmesg`",
        ),
    });
    findings.push(node(root, card));
    findings.push(firmware(card, gpu));
    findings.push(window(card, gpu));
    let missing: Vec<&str> = [
        ("clock", gpu.frequency.is_none()),
        ("power", gpu.power.is_none()),
        ("temperatures", gpu.temperatures.is_empty()),
        ("fans", gpu.fans.is_empty()),
    ]
    .into_iter()
    .filter_map(|(name, missing)| missing.then_some(name))
    .collect();
    findings.push(match missing.as_slice() {
        [] => Finding::ok("card sensors", format!("{card}: clock, power, temperatures and fans can be read")),
        missing => Finding::skipped(
            "card sensors",
            format!("{card}: this kernel does not tell {}", missing.join(", ")),
        ),
    });
    if gpu.frequency.is_some_and(|frequency| frequency.throttled == Some(true)) {
        let advice = "look at temperature, fans and power limit: axectl gpu";
        findings.push(Finding::warn("card clock", format!("{card}: it slows itself down"), advice));
    }
}

/// The node that programs open.
fn node(root: &Path, card: &str) -> Finding {
    let below = root.join("sys/bus/pci/devices").join(card).join("drm");
    let names = std::fs::read_dir(&below).into_iter().flatten().flatten();
    let name =
        names.filter_map(|entry| entry.file_name().into_string().ok()).find(|n| n.starts_with("renderD"));
    let Some(name) = name else {
        let advice = "the driver has not set the card up: see `dmesg`";
        return Finding::fail("card node", format!("{card}: there is no render node"), advice);
    };
    let path = root.join("dev/dri").join(&name);
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
    let shown = format!("{card}: /dev/dri/{name}");
    match opened {
        Ok(_) => Finding::ok("card node", shown),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Finding::warn(
            "card node",
            format!("{shown} may not be opened by this user"),
            "the service's user may, by its group; for your own programs: sudo usermod -aG render $USER, then log in \
             again",
        ),
        Err(error) => Finding::fail(
            "card node",
            format!("{shown}: {error}"),
            "in a container, pass the node on (--device /dev/dri); else see `dmesg`",
        ),
    }
}

/// Old versions reset the card under load.
fn firmware(card: &str, gpu: &Gpu) -> Finding {
    let Some(guc) = &gpu.guc else {
        let found = format!("{card}: the version of the GuC firmware cannot be read by this user");
        return Finding::new("card firmware", Outcome::Skipped, found)
            .advising("run as root, or start the service, which keeps a copy that others may read");
    };
    match gpu.warnings.iter().find(|warning| warning.starts_with("GuC firmware")) {
        Some(warning) => {
            let (found, advice) = warning.split_once(": ").unwrap_or((warning, ""));
            Finding::warn("card firmware", format!("{card}: {found}"), advice)
        }
        None => Finding::ok("card firmware", format!("{card}: GuC {}", guc.version)),
    }
}

fn window(card: &str, gpu: &Gpu) -> Finding {
    match gpu.bar {
        Some(bar) if bar.whole == Some(false) => Finding::warn(
            "resizable BAR",
            format!("{card}: off, the host sees {} of the card's memory at a time", bytes(bar.size_bytes)),
            "enable \"Above 4G decoding\" and \"Resizable BAR\" in the firmware setup (BIOS): loading gets faster",
        ),
        Some(bar) => {
            Finding::ok("resizable BAR", format!("{card}: on, a window of {}", bytes(bar.size_bytes)))
        }
        None => Finding::skipped("resizable BAR", format!("{card}: the size of its window cannot be read")),
    }
}

impl Finding {
    fn advising(self, advice: &str) -> Self {
        Self { advice: Some(advice.to_owned()), ..self }
    }
}
