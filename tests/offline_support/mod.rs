//! Intel's offline compiler, and what its binaries say of a kernel.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod compiler;
pub mod disassembly;
pub mod steps;

use axe::ops::XmxExpected;
pub use disassembly::Code;

/// What a compiler made of a kernel. Numbers that the compiler leaves out are zero, and it always tells `simd` and `registers`.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: String,
    pub simd: u32,
    pub registers: u32,
    pub threads: u32,
    pub spilled: u32,
    pub private: u32,
    /// Bytes of memory that each thread has beside its registers, whatever for.
    pub scratch: u32,
    pub local: u32,
    pub code: Code,
    /// The disassembly, or rather a number that stands for it.
    pub fingerprint: u64,
}

impl Found {
    /// Reads what .ze_info says of one kernel, and its disassembly.
    pub fn read(name: &str, info: &str, assembly: &str) -> Self {
        let number = |field| number_in(info, field);
        let scratch =
            info.split_once("type:            scratch").map_or(0, |(_, rest)| number_in(rest, "size"));
        Self {
            name: name.to_owned(),
            simd: number("simd_size"),
            registers: number("grf_count"),
            threads: number("eu_thread_count"),
            spilled: number("spill_size"),
            private: number("private_size"),
            scratch,
            local: number("slm_size"),
            code: Code::of(assembly),
            fingerprint: fingerprint(assembly),
        }
    }

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
        unless(self.scratch == 0, format!("{} bytes of memory for each thread", self.scratch));
        unless(
            (1..=expected.registers).contains(&self.registers),
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

/// The parts of .ze_info that tell of one kernel each.
pub fn kernels_of(info: &str) -> Vec<(&str, &str)> {
    let info = info.split("\nkernels_misc_info").next().unwrap();
    info.split("\n  - name:").skip(1).map(|part| (part.lines().next().unwrap().trim(), part)).collect()
}

fn number_in(text: &str, field: &str) -> u32 {
    let line = text.lines().map(str::trim).find(|line| line.starts_with(&format!("{field}:")));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

fn fingerprint(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
