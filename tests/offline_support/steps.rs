//! The ops of a denoising step of the 26B, and what the cost model says of them.

use std::fmt::Write;

use axe::ops::{
    Format, XmxCard, XmxLoop, XmxTerms, XmxTime, XmxWork, xmx_attention_work, xmx_experts_work,
    xmx_head_work, xmx_matmul_work,
};

/// Hidden size of the 26B.
const HIDDEN: usize = 2816;
/// Rows of its canvas.
const CANVAS: usize = 256;
/// Its layers; every sixth sees the whole context.
const FULL: u64 = 5;
const SLIDING: u64 = 25;
const LAYERS: u64 = FULL + SLIDING;

/// An op of a pass.
pub struct Step {
    pub what: String,
    /// Program and kernel.
    pub label: String,
    pub kernel: &'static str,
    /// All of them in a pass, by the matrix instructions of the loop that they go through; 0 where there is one loop only.
    pub parts: Vec<(u32, XmxWork)>,
}

impl Step {
    fn work(&self) -> XmxWork {
        self.parts.iter().fold(XmxWork::default(), |sum, &(_, work)| sum.and(work))
    }
}

fn label(file: &str, format: Format, terms: XmxTerms) -> String {
    let terms = if terms == XmxTerms::Two { ", 2 terms" } else { "" };
    format!("xmx/{file}.cl ({}{terms})", format.name())
}

fn product(
    what: &str,
    format: Format,
    terms: XmxTerms,
    outputs: usize,
    columns: usize,
    rows: usize,
    times: u64,
) -> Step {
    let (kernel, work) = xmx_matmul_work(format, terms, outputs, columns, rows);
    let label = label("matmul", format, terms);
    let what = format!("{what}, {outputs} x {columns}, {rows} rows");
    Step { what, label, kernel, parts: vec![(0, work.times(times))] }
}

/// The dense products of a pass of `rows` rows.
fn dense(format: Format, terms: XmxTerms, rows: usize) -> [Step; 8] {
    [
        ("q, sliding", 4096, HIDDEN, SLIDING),
        ("k and v, sliding", 2048, HIDDEN, 2 * SLIDING),
        ("o, sliding", HIDDEN, 4096, SLIDING),
        ("q, full", 8192, HIDDEN, FULL),
        ("k, full", 1024, HIDDEN, FULL),
        ("o, full", HIDDEN, 8192, FULL),
        ("gate and up", 2 * 2112, HIDDEN, LAYERS),
        ("down", HIDDEN, 2112, LAYERS),
    ]
    .map(|(what, outputs, columns, times)| product(what, format, terms, outputs, columns, rows, times))
}

/// All dense products of a denoising step.
pub fn canvas(format: Format, terms: XmxTerms) -> [Step; 8] {
    dense(format, terms, CANVAS)
}

/// The same for a pass of a few rows, as one.
pub fn few_rows(format: Format, terms: XmxTerms, rows: usize) -> Step {
    together(&format!("{rows} rows"), &dense(format, terms, rows))
}

/// Steps of the same kernel as one.
pub fn together(what: &str, steps: &[Step]) -> Step {
    let work = steps.iter().map(Step::work).reduce(XmxWork::and).unwrap();
    Step {
        what: what.to_owned(),
        label: steps[0].label.clone(),
        kernel: steps[0].kernel,
        parts: vec![(0, work)],
    }
}

/// Experts of the 26B, how many of them a row goes to, and their inner size.
const EXPERTS: usize = 128;
const TOP: usize = 8;
const INNER: usize = 704;

/// Both products of all experts, rows spread over them by chance.
pub fn experts(format: Format, terms: XmxTerms) -> [Step; 2] {
    let made = |what: &str, kernel, shape: [usize; 2], scale_columns, gate_up| {
        let each = xmx_experts_work(format, terms, shape, scale_columns, gate_up, [EXPERTS, TOP, CANVAS]);
        let parts = each.map(|work| work.times(LAYERS));
        let groups = if format == Format::W4 { 2 } else { 1 };
        let parts =
            (1..).zip(parts).map(|(blocks, work)| (blocks * 4 * groups * terms as u32, work)).collect();
        let what = format!("{what}, {EXPERTS} x {} x {}, {CANVAS} rows to {TOP}", shape[0], shape[1]);
        Step { what, label: label("experts", format, terms), kernel, parts }
    };
    [
        made("gate, up", "expert_gate_up", [2 * INNER, HIDDEN], 128, true),
        made("down", "expert_down", [HIDDEN, INNER], 64, false),
    ]
}

/// Attention of a canvas behind `context` positions: sliding layers keep 1023 of them.
pub fn attention(context: usize) -> [Step; 2] {
    [("sliding", 256, 8, context.min(1023), SLIDING), ("full", 512, 2, context, FULL)].map(
        |(what, head_size, kv_heads, context, times)| {
            let count = context + CANVAS;
            let (kernel, parts) = xmx_attention_work((head_size, false), 16, kv_heads, CANVAS, count);
            Step {
                what: format!("attention, {what}, {CANVAS} rows, {count} positions"),
                label: format!("xmx/attention.cl ({head_size})"),
                kernel,
                parts: parts.into_iter().map(|(loops, work)| (loops, work.times(times))).collect(),
            }
        },
    )
}

/// The head over the vocabulary of the 26B.
pub fn head(format: Format, terms: XmxTerms) -> Step {
    let vocabulary = 262_144;
    let work = xmx_head_work(format, terms, vocabulary, HIDDEN, CANVAS);
    Step {
        what: format!("head, {vocabulary} x {HIDDEN}, {CANVAS} rows"),
        label: label("head", format, terms),
        kernel: "stream_head",
        parts: vec![(0, work)],
    }
}

/// The table's head.
pub fn heading(what: &str) -> String {
    format!(
        "{what}\n{:<50}{:<31}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}  {:<8}{:>7}\n",
        "op, all of a step", "kernel", "dpas", "MB", "memory", "engine", "issue", "ms", "bound", "floor"
    )
}

/// A line for each step, and their sum; the share of the floor in it. `inner` finds the loop of a program's kernel, and its matrix instructions.
pub fn lines(table: &mut String, steps: &[Step], inner: impl Fn(&str, &str, u32) -> (XmxLoop, u32)) -> f64 {
    let (mut sum, mut floor) = (0.0, 0.0);
    for step in steps {
        let of = |&(multiply_adds, work): &(u32, XmxWork)| {
            XmxCard::B70.time(&work, &inner(&step.label, step.kernel, multiply_adds).0)
        };
        let mut time = step.parts.iter().map(of).reduce(XmxTime::and).unwrap();
        time.floor = XmxCard::B70.floor(&step.work());
        let (_, multiply_adds) = inner(&step.label, step.kernel, 0);
        let kernel = format!("{} {}", step.label.trim_start_matches("xmx/").replace(".cl", ""), step.kernel);
        writeln!(
            table,
            "{:<50}{kernel:<31}{multiply_adds:>6}{:>9.1}{:>9.3}{:>9.3}{:>9.3}{:>9.3}  {:<8}{:>6.0}%",
            step.what,
            step.work().bytes as f64 / 1e6,
            time.memory * 1e3,
            time.engine * 1e3,
            time.issue * 1e3,
            time.predicted() * 1e3,
            time.bound(),
            100.0 * time.floor / time.predicted()
        )
        .unwrap();
        sum += time.predicted();
        floor += time.floor;
    }
    writeln!(
        table,
        "{:<50}{:<73}{:>9.3}  {:<8}{:>6.0}%\n",
        "together",
        "",
        sum * 1e3,
        "",
        100.0 * floor / sum
    )
    .unwrap();
    floor / sum
}
