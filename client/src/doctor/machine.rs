//! The machine: OpenCL runtimes, memory, groups of device nodes.

use std::path::{Path, PathBuf};

use axectl::sensors::Sampler;

use super::daemon::Asked;
use super::{Finding, text};
use crate::units::bytes;

/// Where OpenCL runtimes are named: by the system, and by an installed axed.
const VENDORS: [&str; 3] = ["etc/OpenCL/vendors", "usr/lib/axe/opencl/vendors", "opt/axe/opencl/vendors"];

/// Looks at what programs on this machine can rely on.
pub(super) fn look(root: &Path, asked: &Asked, findings: &mut Vec<Finding>) {
    if !asked.told_devices() {
        findings.push(runtimes(root));
    }
    findings.push(memory(root, asked));
}

/// OpenCL runtimes by their files, where nobody could be asked who loads them.
fn runtimes(root: &Path) -> Finding {
    let mut named: Vec<(PathBuf, String)> = Vec::new();
    for folder in VENDORS {
        let entries = std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "icd"))
            .collect();
        files.sort();
        named.extend(files.into_iter().filter_map(|file| {
            let library = text(&file)?.lines().next().unwrap_or_default().trim().to_owned();
            Some((file, library))
        }));
    }
    // A name without a folder is the linker's to find.
    let missing =
        |library: &str| library.starts_with('/') && !root.join(library.trim_start_matches('/')).exists();
    let (gone, there): (Vec<_>, Vec<_>) = named.into_iter().partition(|(_, library)| missing(library));
    let install = "install one: intel-opencl-icd for Intel's cards, pocl-opencl-icd for processors";
    match (there.as_slice(), gone.as_slice()) {
        ([], []) => Finding::fail("OpenCL", "no runtime is installed (no .icd file)", install),
        ([], [(file, library), ..]) => Finding::fail(
            "OpenCL",
            format!("{} names {library}, which is not there", file.display()),
            install,
        ),
        (there, _) => {
            let libraries: Vec<&str> = there.iter().map(|(_, library)| library.as_str()).collect();
            Finding::ok("OpenCL", format!("runtimes are named: {}", libraries.join(", ")))
        }
    }
}

fn memory(root: &Path, asked: &Asked) -> Finding {
    let host = Sampler::at(root).sample().host;
    let (Some(available), Some(total)) = (host.memory_available_bytes, host.memory_total_bytes) else {
        return Finding::skipped("memory", "/proc/meminfo cannot be read");
    };
    let found = format!("{} available of {}", bytes(available), bytes(total));
    match asked.model_bytes().filter(|_| !asked.is_running()) {
        Some(model) if model > available => Finding::warn(
            "memory",
            format!("{found}; the model has {}", bytes(model)),
            "on a processor, or to quantise it while loading, that is too little: end other programs or choose a \
             smaller model",
        ),
        _ => Finding::ok("memory", found),
    }
}
