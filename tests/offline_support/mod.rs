//! Intel's offline compiler, and what its binaries say of a kernel.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod disassembly;
pub mod steps;

use std::path::{Path, PathBuf};
use std::process::Command;

use axe::ops::XmxExpected;
pub use disassembly::Code;

/// The cards, and what the compiler calls them: Arc Pro B70, Arc B580 and B570, Lunar Lake.
pub const DEVICES: [&str; 3] = ["bmg-g31", "bmg-g21", "lnl-m"];

/// What a compiler made of a kernel.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: String,
    pub simd: u32,
    pub registers: u32,
    pub threads: u32,
    pub spilled: u32,
    pub private: u32,
    pub local: u32,
    pub code: Code,
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

/// The compiler's version.
pub fn compiler() -> String {
    run(&["--version"]).trim().to_owned()
}

/// Compiles a program for a device.
pub fn compile(label: &str, source: &str, options: &str, device: &str) -> Vec<Found> {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("program.cl"), source).unwrap();
    run(&[
        "compile",
        "-q",
        "-file",
        &at("program.cl"),
        "-device",
        device,
        "-options",
        options,
        "-output",
        "program",
        "-output_no_suffix",
        "-out_dir",
        &at("out"),
    ]);
    let binary =
        binary_in(&folder.path().join("out")).unwrap_or_else(|| panic!("{label}: no binary for {device}"));
    run(&["disasm", "-file", binary.to_str().unwrap(), "-device", device, "-dump", &at("dump")]);
    let info = std::fs::read_to_string(at("dump/.ze_info")).unwrap();
    let found: Vec<Found> = kernels_of(&info)
        .into_iter()
        .map(|(name, text)| {
            let assembly = std::fs::read_to_string(at(&format!("dump/.text.{name}.asm"))).unwrap();
            let number = |field| number_in(text, field);
            Found {
                simd: number("simd_size"),
                registers: number("grf_count"),
                threads: number("eu_thread_count"),
                spilled: number("spill_size"),
                private: number("private_size"),
                local: number("slm_size"),
                code: Code::of(&assembly),
                name,
            }
        })
        .collect();
    assert!(!found.is_empty(), "{label}: no kernels for {device}");
    found
}

fn binary_in(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| {
        path.file_stem().is_some_and(|stem| stem == "program") && path.extension().is_none_or(|e| e == "bin")
    })
}

/// The parts of .ze_info that tell of one kernel each.
fn kernels_of(info: &str) -> Vec<(String, &str)> {
    let info = info.split("\nkernels_misc_info").next().unwrap();
    info.split("\n  - name:")
        .skip(1)
        .map(|part| (part.lines().next().unwrap().trim().to_owned(), part))
        .collect()
}

fn number_in(text: &str, field: &str) -> u32 {
    let line = text.lines().map(str::trim).find(|line| line.starts_with(&format!("{field}:")));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

impl Found {
    /// What is not as it is meant to be.
    pub fn faults(&self, expected: &XmxExpected) -> Vec<String> {
        let mut faults = Vec::new();
        let mut unless = |holds: bool, fault: String| {
            if !holds {
                faults.push(format!("{}: {fault}", self.name));
            }
        };
        unless(self.simd == 16, format!("{} work-items a sub-group instead of 16", self.simd));
        unless(self.spilled == 0, format!("{} bytes of registers are spilled", self.spilled));
        unless(self.private == 0, format!("{} bytes of private memory", self.private));
        unless(
            self.registers <= expected.registers,
            format!("{} registers a thread, the launch expects {}", self.registers, expected.registers),
        );
        unless(
            self.local == expected.local,
            format!("{} bytes of local memory, the launch expects {}", self.local, expected.local),
        );
        unless(
            self.code.scattered <= expected.scattered_loads,
            format!("{} scattered loads, {} are meant", self.code.scattered, expected.scattered_loads),
        );
        if expected.multiply_adds > 0 {
            let inner = self.code.products();
            let found = inner.map_or(0, |inner| inner.multiply_adds);
            unless(
                found == expected.multiply_adds,
                format!(
                    "{found} matrix instructions in the innermost loop, {} are meant",
                    expected.multiply_adds
                ),
            );
            unless(
                inner.is_some_and(|inner| inner.blocks > 0),
                "no loads of two-dimensional blocks in the loop".to_owned(),
            );
        }
        faults
    }
}
