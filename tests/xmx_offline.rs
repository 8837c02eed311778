//! The `xmx` kernels, compiled for the cards by Intel's offline compiler: registers, spills, sub-groups, matrix instructions
//! and loads of blocks as the launches count on, and from that the time that an op should take on a card. Prints tables, and
//! keeps them in the folder that AXE_OFFLINE names.
//!
//! Run by `scripts/test.sh offline`, which fetches the compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod offline_support;

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::LazyLock;

use axe::ops::{Format, XmxExpected, XmxLoop, XmxTerms, xmx_loops_line, xmx_programs, xmx_recorded_loops};
use offline_support::compiler::{self, Job};
use offline_support::steps::{self, Step};
use offline_support::{Code, Found};

/// What the compiler calls the cards: Arc Pro B70; Arc B580 and B570; Lunar Lake's.
const B70: &str = "bmg-g31";
const OTHERS: [&str; 2] = ["bmg-g21", "lnl-m"];

/// Programs that are compiled for the other cards, too: one of each file, since they turn out the same.
const SAMPLES: [&str; 5] = [
    "xmx/prepare.cl",
    "xmx/matmul.cl (Q4_K)",
    "xmx/experts.cl (W4, 2 terms)",
    "xmx/head.cl (Q8_0)",
    "xmx/attention.cl (256)",
];

/// What became of each program, by device and label. Everything that the tests need is compiled together, once.
static COMPILED: LazyLock<HashMap<(&str, String), Vec<Found>>> = LazyLock::new(|| {
    let all = xmx_programs();
    let jobs = [B70].into_iter().chain(OTHERS).flat_map(|device| {
        let wanted = all.iter().filter(move |program| device == B70 || SAMPLES.contains(&&*program.label));
        wanted.map(move |program| Job {
            label: program.label.clone(),
            source: program.source.clone(),
            options: program.options.clone(),
            device,
        })
    });
    let jobs: Vec<Job> = jobs.collect();
    let found = compiler::compile_all(&jobs);
    jobs.into_iter().zip(found).map(|(job, found)| ((job.device, job.label), found)).collect()
});

fn compiled(device: &'static str, label: &str) -> &'static [Found] {
    COMPILED.get(&(device, label.to_owned())).unwrap_or_else(|| panic!("no {label} for {device}"))
}

#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn every_kernel_is_as_meant_on_a_b70() {
    let (mut table, mut faults) = (heading(B70), Vec::new());
    for program in xmx_programs() {
        let found = compiled(B70, &program.label);
        for expected in &program.kernels {
            match found.iter().find(|kernel| kernel.name == expected.name) {
                Some(kernel) => {
                    let wrong = kernel.faults(expected);
                    faults.extend(wrong.into_iter().map(|fault| format!("{}, {fault}", program.label)));
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
        }
    }
    keep("kernels-b70.txt", &table);
    assert!(faults.is_empty(), "for {B70}:\n{}", faults.join("\n"));
}

/// The other cards have the same engines and registers, and the compiler makes the very same code for them. So what is proven of
/// all kernels on a B70 holds there; where one of these samples ever differs, all programs are to be compiled for that card.
#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn other_cards_have_the_same_code() {
    for device in OTHERS {
        for label in SAMPLES {
            let (found, of_b70) = (compiled(device, label), compiled(B70, label));
            assert_eq!(found.len(), of_b70.len(), "kernels of {label} for {device}");
            for (kernel, same) in found.iter().zip(of_b70) {
                let numbers = |of: &Found| (of.simd, of.registers, of.threads, of.scratch, of.local);
                assert_eq!(
                    numbers(kernel),
                    numbers(same),
                    "{label}, {}, for {device} and {B70}",
                    kernel.name
                );
                assert_eq!(
                    (&kernel.name, kernel.fingerprint),
                    (&same.name, same.fingerprint),
                    "{label} has other code for {device} than for {B70}"
                );
            }
        }
        println!("{device}: {} programs, one of each file, have the code of {B70}", SAMPLES.len());
    }
}

fn heading(device: &str) -> String {
    format!(
        "{device}, compiler {}; loop: the innermost one with products\n\n{:<33}{:<16}{:>5}{:>8}{:>7}{:>13}{:>7}{:>6}{:>7}{:>8}{:>11}\n",
        *compiler::VERSION,
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
        "{label:<33}{:<16}{:>5}{:>8}{:>7}",
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
    if let Some(folder) = compiler::folder() {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), table).unwrap();
    }
}

/// The loops with products of a kernel, by their matrix instructions.
fn loops_of(code: &Code) -> Vec<(u32, XmxLoop)> {
    let mut loops: Vec<(u32, XmxLoop)> = Vec::new();
    for inner in code.innermost() {
        if !loops.iter().any(|(multiply_adds, _)| *multiply_adds == inner.multiply_adds) {
            let around = code.around(inner).map_or(0, |around| around.slots - inner.slots);
            loops.push((inner.multiply_adds, XmxLoop { slots: inner.slots, around }));
        }
    }
    loops.sort_by_key(|(multiply_adds, _)| *multiply_adds);
    loops
}

/// What the cost model counts with is what the compiler makes. Another version of the compiler may do a little better or worse.
#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn recorded_loops_are_those_of_the_compiler() {
    let (mut text, mut faults) = (String::new(), Vec::new());
    for program in xmx_programs() {
        for kernel in compiled(B70, &program.label) {
            let loops = loops_of(&kernel.code);
            if loops.is_empty() {
                continue;
            }
            text += &xmx_loops_line(&program.label, &kernel.name, &loops);
            let close = |a: u32, b: u32| a.abs_diff(b) <= a / 20 + 2;
            let recorded = xmx_recorded_loops().get(&(&*program.label, &*kernel.name));
            let same = recorded.is_some_and(|recorded| {
                recorded.len() == loops.len()
                    && recorded.iter().zip(&loops).all(|((a, one), (b, other))| {
                        a == b && close(one.slots, other.slots) && close(one.around, other.around)
                    })
            });
            if !same {
                faults.push(format!("{}, {}: {loops:?}, recorded: {recorded:?}", program.label, kernel.name));
            }
        }
    }
    if let Some(folder) = compiler::folder() {
        std::fs::write(folder.join("loops.txt"), &text).unwrap();
    }
    assert!(
        faults.is_empty(),
        "the cost model counts with other loops than the compiler's; .axe/test/offline/loops.txt belongs in src/ops/xmx:\n{}",
        faults.join("\n")
    );
    assert_eq!(xmx_recorded_loops().len(), text.lines().count(), "kernels that are no more are recorded");
}

/// What the ops of a denoising step of the 26B should take on a B70, and that none falls far behind what the card's memory
/// and engines allow.
#[test]
#[ignore = "needs Intel's offline compiler: scripts/test.sh offline"]
fn predicted_times_of_a_step_on_a_b70() {
    let inner = |label: &str, kernel: &str, multiply_adds: u32| {
        let code = &compiled(B70, label).iter().find(|found| found.name == kernel).unwrap().code;
        let wanted = if multiply_adds > 0 { multiply_adds } else { code.products().unwrap().multiply_adds };
        let found = loops_of(code).into_iter().find(|(multiply_adds, _)| *multiply_adds == wanted).unwrap();
        (found.1, found.0)
    };
    let mut table = String::new();
    let mut tell = |title: &str, steps: &[Step], least: f64| {
        table += &steps::heading(title);
        let share = steps::lines(&mut table, steps, inner);
        assert!(share > least, "{title}: {share} of what the card could do, {least} is asked for\n{table}");
    };
    // Where a block of scales is for eight groups, what is done once a block is counted for each group.
    for (format, least) in [
        (Format::F16, 0.8),
        (Format::Q8_0, 0.7),
        (Format::Q4_0, 0.7),
        (Format::Q4K, 0.5),
        (Format::Q5_0, 0.5),
        (Format::Q6K, 0.4),
        (Format::Iq4Xs, 0.4),
        (Format::Mxfp4, 0.5),
    ] {
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
    let formats = [
        Format::F16,
        Format::Q8_0,
        Format::Q6K,
        Format::Q5K,
        Format::Q4_0,
        Format::Q4K,
        Format::Iq4Xs,
        Format::Mxfp4,
        Format::Q3K,
        Format::Q2K,
    ];
    let few: Vec<Step> = formats
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
        let options = format!("-cl-std=CL3.0 {options}");
        let found = compiler::compile(&Job { label: "bad".to_owned(), source, options, device: B70 }, None);
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
