//! Runs the compiler, for many programs at a time, and keeps what it made: a binary is compiled again only when its source, its
//! options, its device or the compiler have changed. The binary is what is kept, not what was read in it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use sha2::{Digest, Sha256};

use super::{Found, kernels_of};

/// Not a kernel: the compiler puts the addresses of a program's tables of constants there, such as those of log().
const SYMBOLS: &str = "Intel_Symbol_Table_Void_Program";

/// One source with its options, for one device.
#[derive(Debug, Clone)]
pub struct Job {
    pub label: String,
    pub source: String,
    pub options: String,
    pub device: &'static str,
}

/// The compiler's version.
pub static VERSION: LazyLock<String> = LazyLock::new(|| run(&["--version"]).trim().to_owned());

/// The folder that tables and binaries are kept in, which AXE_OFFLINE names.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("AXE_OFFLINE").map(PathBuf::from)
}

/// Compiles all jobs, as many at a time as there are processors, and tells of each what was found, in their order. Binaries that
/// are kept of anything else are removed: they are of sources that are no more.
pub fn compile_all(jobs: &[Job]) -> Vec<Vec<Found>> {
    let kept = folder().map(|folder| folder.join("binaries"));
    if let Some(kept) = &kept {
        std::fs::create_dir_all(kept).unwrap();
        let wanted: Vec<String> = jobs.iter().map(Job::key).collect();
        for entry in std::fs::read_dir(kept).unwrap() {
            let entry = entry.unwrap();
            if !wanted.iter().any(|key| entry.file_name() == **key) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<Vec<Found>>> = Mutex::new(vec![Vec::new(); jobs.len()]);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { break };
            let kernels = compile(job, kept.as_deref());
            found.lock().unwrap()[at] = kernels;
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    found.into_inner().unwrap()
}

/// Compiles a job, or takes the binary that is kept, and reads its kernels.
pub fn compile(job: &Job, kept: Option<&Path>) -> Vec<Found> {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let kept = kept.map(|folder| folder.join(job.key()));
    let binary = match kept.as_deref().filter(|kept| kept.exists()) {
        Some(kept) => kept.to_path_buf(),
        None => {
            let made = job.build(scratch.path());
            if let Some(kept) = &kept {
                // Under another name until it is whole: the run may be cut off.
                let part = kept.with_extension("part");
                std::fs::copy(&made, &part).unwrap();
                std::fs::rename(&part, kept).unwrap();
            }
            made
        }
    };
    run(&["disasm", "-file", binary.to_str().unwrap(), "-device", job.device, "-dump", &at("dump")]);
    let info = std::fs::read_to_string(at("dump/.ze_info")).unwrap();
    let found: Vec<Found> = kernels_of(&info)
        .into_iter()
        .filter(|(name, _)| *name != SYMBOLS)
        .map(|(name, text)| {
            let assembly = std::fs::read_to_string(at(&format!("dump/.text.{name}.asm"))).unwrap();
            Found::read(name, text, &assembly)
        })
        .collect();
    assert!(!found.is_empty(), "{}: no kernels for {}", job.label, job.device);
    found
}

impl Job {
    fn key(&self) -> String {
        let mut hash = Sha256::new();
        for part in [&self.source, &self.options, self.device, &VERSION] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        format!("{:x}", hash.finalize())
    }

    fn build(&self, folder: &Path) -> PathBuf {
        let source = folder.join("program.cl");
        std::fs::write(&source, &self.source).unwrap();
        let out = folder.join("out");
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        run(&[
            "compile",
            "-q",
            "-file",
            &path(&source),
            "-device",
            self.device,
            "-options",
            &self.options,
            "-output",
            "program",
            "-output_no_suffix",
            "-out_dir",
            &path(&out),
        ]);
        let binary = out.join("program.bin");
        assert!(binary.exists(), "{}: no binary for {}", self.label, self.device);
        binary
    }
}

fn run(arguments: &[&str]) -> String {
    let compiler =
        std::env::var("AXE_OCLOC").expect("AXE_OCLOC names the compiler: run scripts/test.sh offline");
    let done = Command::new(&compiler)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"));
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{compiler} {}:\n{text}", arguments.join(" "));
    text
}
