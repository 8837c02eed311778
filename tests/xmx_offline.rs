//! The `xmx` kernels, compiled for the cards by Intel's offline compiler: registers, spills, sub-groups, matrix instructions
//! and loads of blocks as the launches count on, and from that the time that an op should take on a card. Prints tables, and
//! keeps them in the folder that AXE_OFFLINE_TABLES names.
//!
//! Run by `scripts/test.sh offline`, which fetches the compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod offline_support;

use std::collections::HashMap;
use std::fmt::Write;

use axe::ops::{Format, XmxExpected, XmxLoop, XmxTerms, xmx_programs};
use offline_support::steps::{self, Step};
use offline_support::{DEVICES, Found, compile, compiler};

/// Compiles every program for a device, and says what is wrong with any kernel.
fn every_kernel_is_as_meant(device: &str) {
    let (mut table, mut faults, mut kernels) = (heading(device), Vec::new(), 0);
    for program in xmx_programs() {
        let found = compile(&program.label, &program.source, &program.options, device);
        for expected in &program.kernels {
            match found.iter().find(|kernel| kernel.name == expected.name) {
                Some(kernel) => {
                    faults.extend(
                        kernel
                            .faults(expected)
                            .into_iter()
                            .map(|fault| format!("{}, {fault}", program.label)),
                    );
                    line(&mut table, &program.label, kernel);
                }
                None => faults.push(format!("{} has no kernel {}", program.label, expected.name)),
            }
        }
        for kernel in found {
            if !program.kernels.iter().any(|expected| expected.name == kernel.name) {
                faults.push(format!(
                    "{} has a kernel that nothing is expected of: {}",
                    program.label, kernel.name
                ));
            }
            kernels += 1;
        }
    }
    keep(&format!("kernels-{device}.txt"), &table);
    assert!(faults.is_empty(), "for {device}:\n{}", faults.join("\n"));
    assert!(kernels > 0);
}

fn heading(device: &str) -> String {
    format!(
        "{device}, compiler {}; loop: the innermost one with products\n\n{:<28}{:<16}{:>5}{:>8}{:>7}{:>13}{:>7}{:>6}{:>7}{:>8}{:>11}\n",
        compiler(),
        "program",
        "kernel",
        "GRF",
        "threads",
        "SLM",
        "instructions",
        "slots",
        "dpas",
        "loads",
        "bytes",
        "dpas/load"
    )
}

fn line(table: &mut String, label: &str, kernel: &Found) {
    write!(
        table,
        "{label:<28}{:<16}{:>5}{:>8}{:>7}",
        kernel.name, kernel.registers, kernel.threads, kernel.local
    )
    .unwrap();
    match kernel.code.products() {
        Some(inner) => {
            let each = f64::from(inner.multiply_adds) / f64::from(inner.loads);
            writeln!(
                table,
                "{:>13}{:>7}{:>6}{:>7}{:>8}{each:>11.2}",
                inner.instructions, inner.slots, inner.multiply_adds, inner.loads, inner.load_bytes
            )
            .unwrap();
        }
        None => writeln!(table, "{:>13}{:>7}{:>6}{:>7}{:>8}{:>11}", "-", "-", "-", "-", "-", "-").unwrap(),
    }
}

fn keep(name: &str, table: &str) {
    println!("{table}");
    if let Some(folder) = std::env::var_os("AXE_OFFLINE_TABLES") {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(std::path::Path::new(&folder).join(name), table).unwrap();
    }
}

#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn every_kernel_is_as_meant_on_bmg_g31() {
    every_kernel_is_as_meant(DEVICES[0]);
}

#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn every_kernel_is_as_meant_on_bmg_g21() {
    every_kernel_is_as_meant(DEVICES[1]);
}

#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn every_kernel_is_as_meant_on_lnl_m() {
    every_kernel_is_as_meant(DEVICES[2]);
}

/// What the ops of a denoising step of the 26B should take on a B70, and that none falls far behind what the card's memory
/// and engines allow.
#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn predicted_times_of_a_step_on_a_b70() {
    let compiled: HashMap<String, Vec<Found>> = xmx_programs()
        .into_iter()
        .map(|program| {
            let found = compile(&program.label, &program.source, &program.options, DEVICES[0]);
            (program.label, found)
        })
        .collect();
    let inner = |label: &str, kernel: &str, multiply_adds: u32| {
        let code = &compiled[label].iter().find(|found| found.name == kernel).unwrap().code;
        let inner = match multiply_adds {
            0 => code.products().unwrap(),
            _ => code.loops.iter().find(|inner| inner.multiply_adds == multiply_adds).unwrap(),
        };
        let around = code.around(inner).map_or(0, |around| around.slots - inner.slots);
        (XmxLoop { slots: inner.slots, around }, inner.multiply_adds)
    };
    let mut table = String::new();
    let mut tell = |title: &str, steps: &[Step], least: f64| {
        table += &steps::heading(title);
        let share = steps::lines(&mut table, steps, inner);
        assert!(share > least, "{title}: {share} of what the card could do, {least} is asked for\n{table}");
    };
    // Where a block of scales is for eight groups, what is done once a block is counted for each group.
    for (format, least) in [(Format::F16, 0.8), (Format::Q8_0, 0.7), (Format::Q4_0, 0.7), (Format::Q4K, 0.5)]
    {
        let title = format!("dense products of a canvas, {}", format.name());
        tell(&title, &steps::canvas(format, XmxTerms::One), least);
    }
    let two: Vec<Step> = [Format::F16, Format::Q8_0, Format::Q4K]
        .map(|format| steps::together("all of them", &steps::canvas(format, XmxTerms::Two)))
        .into();
    tell("dense products of a canvas, two terms", &two, 0.35);
    let heads: Vec<Step> = [XmxTerms::One, XmxTerms::Two]
        .into_iter()
        .flat_map(|terms| [Format::F16, Format::Q8_0].map(|format| steps::head(format, terms)))
        .collect();
    tell("heads, one term and two; no soft embeddings", &heads, 0.5);
    let looks: Vec<Step> = [0, 1024, 8192].into_iter().flat_map(steps::attention).collect();
    tell("attention", &looks, 0.3);
    tell("experts", &steps::experts(Format::W4, XmxTerms::One), 0.8);
    tell("experts, two terms", &steps::experts(Format::W4, XmxTerms::Two), 0.8);
    let few: Vec<Step> = [Format::F16, Format::Q8_0, Format::Q4_0, Format::Q4K]
        .iter()
        .flat_map(|&format| [1, 8, 16].map(|rows| steps::few_rows(format, XmxTerms::Two, rows)))
        .collect();
    tell("all dense products of a pass of a few rows, two terms", &few, 0.84);
    keep("predicted-b70.txt", &table);
}

/// A kernel with the faults that are looked for is found to have them.
#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn a_kernel_with_faults_is_found() {
    let expected =
        XmxExpected { name: "bad", registers: 128, local: 0, multiply_adds: 4, scattered_loads: 0 };
    let faults = |body: &str, attribute: &str, options: &str| -> String {
        let source = format!(
            "{attribute} kernel void bad(global const int* from, global float* to, int n) {{ int at = get_global_id(0); {body} }}"
        );
        let found = compile("bad", &source, &format!("-cl-std=CL3.0 {options}"), DEVICES[0]);
        found[0].faults(&expected).join("\n")
    };
    let sixteen = "__attribute__((intel_reqd_sub_group_size(16)))";
    let gathers = "to[at] = from[from[at] * 7];";
    assert!(faults(gathers, sixteen, "").contains("scattered loads"), "{}", faults(gathers, sixteen, ""));
    assert!(faults(gathers, sixteen, "").contains("0 matrix instructions"));
    let wide = "__attribute__((intel_reqd_sub_group_size(32)))";
    assert!(faults(gathers, wide, "").contains("32 work-items a sub-group"));
    let spills = "float all[256]; for (int i = 0; i < 256; i++) all[i] = to[at + i * n]; \
                  for (int i = 0; i < 256; i++) to[at + from[i] * n] = all[i] * all[(i * 7) & 255];";
    let found = faults(&spills.replace("for", "__attribute__((opencl_unroll_hint)) for"), sixteen, "");
    assert!(found.contains("spilled") || found.contains("private memory"), "{found}");
    let keeps = "float all[1024]; for (int i = 0; i < 1024; i++) all[i] = from[i + at]; \
                 for (int i = 0; i < n; i++) all[from[i] & 1023] += i; to[at] = all[from[at] & 1023];";
    assert!(faults(keeps, sixteen, "").contains("private memory"), "{}", faults(keeps, sixteen, ""));
    assert!(faults(gathers, sixteen, "-cl-intel-256-GRF-per-thread").contains("256 registers"));
    let shares = "local float shared[64]; shared[at & 63] = at; barrier(1); to[at] = shared[from[at] & 63];";
    assert!(faults(shares, sixteen, "").contains("256 bytes of local memory"));
}
