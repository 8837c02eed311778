//! What a card should take for the passes of a model, by the cost model of the `xmx` kernels.

use crate::model::{AttentionShape, ExpertsShape, ProductShape, Workload};
use crate::ops::{
    Format, XmxCard, XmxTerms, XmxTime, XmxWork, xmx_attention_work, xmx_experts_work, xmx_head_work,
    xmx_loop, xmx_matmul_work, xmx_takes,
};

/// Rows of an example of a block pass beside that of one token: the most there are.
const BLOCK_ROWS: usize = 16;

/// A pass, and what it should take.
#[derive(Debug, Clone, PartialEq)]
pub struct PredictedPass {
    /// What it is.
    pub what: &'static str,
    /// Its rows.
    pub rows: usize,
    /// Positions that are in the cache before it.
    pub context: usize,
    /// What it is made of.
    pub parts: Vec<PredictedPart>,
}

/// Ops of one sort in a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictedPart {
    /// The sort.
    pub what: &'static str,
    /// Bytes that must come from memory or go there, with activations in two terms.
    pub bytes: u64,
    /// Seconds by the card's data sheet.
    pub floor: f64,
    /// Seconds with the kernels as they are compiled, activations in one term and in two.
    pub predicted: [f64; 2],
    /// Whether there are kernels for all of it. Ops without are counted at what memory and engines can reach.
    pub kernels: bool,
}

impl PredictedPass {
    /// Seconds by the card's data sheet.
    pub fn floor(&self) -> f64 {
        self.parts.iter().map(|part| part.floor).sum()
    }

    /// Seconds with the kernels as they are, activations in one term and in two.
    pub fn predicted(&self) -> [f64; 2] {
        [0, 1].map(|terms| self.parts.iter().map(|part| part.predicted[terms]).sum())
    }
}

/// The passes of a model on a B70: with nothing in the cache and with `context` positions; encoding takes `chunk` rows at a time.
///
/// Ops come one after the other. Every expert is as likely as the others. Encoding is counted without what its last layer
/// leaves out, and what a row does not see because it comes later is counted for all of a pass's own rows.
pub fn predicted_passes(workload: &Workload, context: usize, chunk: usize) -> Vec<PredictedPass> {
    let passes: Vec<(&str, usize)> = match workload.canvas {
        Some(canvas) => vec![("encoding", chunk), (STEP, canvas)],
        None => vec![("prefill", chunk), ("a token", 1), ("a block", BLOCK_ROWS)],
    };
    let both = passes.into_iter().flat_map(|pass| [(pass, 0), (pass, context)]);
    both.map(|((what, rows), context)| {
        let parts = parts(workload, what, rows, context);
        PredictedPass { what, rows, context, parts }
    })
    .collect()
}

const STEP: &str = "denoising step";

fn parts(workload: &Workload, what: &str, rows: usize, context: usize) -> Vec<PredictedPart> {
    let products = |shapes: &[ProductShape]| -> Vec<Op> {
        shapes.iter().map(|shape| Op::both(|terms| product(shape, terms, rows))).collect()
    };
    // Queries and weights are always cut into two terms.
    let looks = workload.attention.iter().map(|shape| {
        let op = attention(shape, rows, context);
        Op { terms: [op, op] }
    });
    let experts = workload.experts.iter().flat_map(|shape| {
        [(shape.gate_up, true), (shape.down, false)]
            .map(|(each, gate_up)| Op::both(|terms| expert(shape, &each, gate_up, terms, rows)))
    });
    // Of a prompt, the last row's token is wanted, and of an encoder nothing.
    let head = |rows: usize| Op::both(|terms| head(&workload.head, terms, rows));
    let mut all = vec![
        ("products", products(&workload.products)),
        ("attention", looks.collect()),
        ("experts", experts.collect()),
    ];
    match (workload.canvas, what) {
        (Some(_), STEP) => {
            all.push(("head", vec![head(rows)]));
            all.push(("soft embeddings", vec![soft_embeddings(&workload.head, rows)]));
            all.push(("conditioning", products(&workload.conditioning)));
        }
        (Some(_), _) => {}
        (None, "prefill") => all.push(("head", vec![Op::both(|terms| product(&workload.head, terms, 1))])),
        (None, _) => all.push(("head", products(&[workload.head]))),
    }
    all.retain(|(_, ops)| !ops.is_empty());
    all.into_iter().map(|(what, ops)| part(what, &ops)).collect()
}

/// What an op has to do, and what it should take.
#[derive(Debug, Clone, Copy)]
struct Timed {
    work: XmxWork,
    predicted: f64,
    kernels: bool,
}

/// An op with activations in one term and in two.
#[derive(Debug, Clone, Copy)]
struct Op {
    terms: [Timed; 2],
}

impl Op {
    fn both(make: impl Fn(XmxTerms) -> Timed) -> Self {
        Self { terms: [XmxTerms::One, XmxTerms::Two].map(make) }
    }
}

fn part(what: &'static str, ops: &[Op]) -> PredictedPart {
    PredictedPart {
        what,
        bytes: ops.iter().map(|op| op.terms[1].work.bytes).sum(),
        // What must be done does not depend on how activations are rounded.
        floor: ops.iter().map(|op| XmxCard::B70.floor(&op.terms[0].work)).sum(),
        predicted: [0, 1].map(|terms| ops.iter().map(|op| op.terms[terms].predicted).sum()),
        kernels: ops.iter().all(|op| op.terms[1].kernels),
    }
}

/// An op of a kernel: by the loops of it that rows go through, which are told by their matrix instructions.
fn timed(label: &str, kernel: &str, parts: &[(u32, XmxWork)]) -> Timed {
    let work = parts.iter().fold(XmxWork::default(), |sum, (_, work)| sum.and(*work));
    let times = parts
        .iter()
        .filter(|(_, work)| *work != XmxWork::default())
        .map(|(loops, work)| Some(XmxCard::B70.time(work, &xmx_loop(label, kernel, *loops)?)));
    match times.sum_of_all() {
        Some(time) => Timed { work, predicted: time.predicted(), kernels: true },
        None => without_kernel(work),
    }
}

trait SumOfAll {
    fn sum_of_all(self) -> Option<XmxTime>;
}

impl<I: Iterator<Item = Option<XmxTime>>> SumOfAll for I {
    fn sum_of_all(mut self) -> Option<XmxTime> {
        let first = self.next()??;
        self.try_fold(first, |sum, time| Some(sum.and(time?)))
    }
}

/// What no kernel is there for: at what memory can reach, and what engines could do.
fn without_kernel(work: XmxWork) -> Timed {
    let card = XmxCard::B70;
    let memory = work.bytes as f64 / (card.bandwidth * card.reached);
    Timed { work, predicted: memory.max(work.operations as f64 / card.peak), kernels: false }
}

fn label(file: &str, format: Format, terms: XmxTerms) -> String {
    let terms = if terms == XmxTerms::Two { ", 2 terms" } else { "" };
    // BF16 becomes F16.
    let format = if format == Format::Bf16 { Format::F16 } else { format };
    format!("xmx/{file}.cl ({}{terms})", format.name())
}

fn product(shape: &ProductShape, terms: XmxTerms, rows: usize) -> Timed {
    let ProductShape { format, outputs, columns } = *shape;
    let (kernel, work) = xmx_matmul_work(format, terms, outputs, columns, rows);
    match xmx_takes(format) {
        true => timed(&label("matmul", format, terms), kernel, &[(0, work)]),
        false => without_kernel(work),
    }
}

fn expert(shape: &ExpertsShape, each: &ProductShape, gate_up: bool, terms: XmxTerms, rows: usize) -> Timed {
    let ProductShape { format, outputs, columns } = *each;
    // Columns that share a scale in dg-w4a16-v1.
    let scale_columns = if gate_up { 128 } else { 64 };
    let passes = [shape.count, shape.used, rows];
    let work = xmx_experts_work(format, terms, [outputs, columns], scale_columns, gate_up, passes);
    let (kernel, groups) = (
        if gate_up { "expert_gate_up" } else { "expert_down" },
        if format == Format::W4 { 2 } else { 1 } * if format == Format::Q2K { 2 } else { 1 },
    );
    let parts: Vec<(u32, XmxWork)> =
        (1..).zip(work).map(|(blocks, work)| (blocks * 4 * groups * terms as u32, work)).collect();
    match xmx_takes(format) {
        true => timed(&label("experts", format, terms), kernel, &parts),
        false => without_kernel(work.into_iter().fold(XmxWork::default(), XmxWork::and)),
    }
}

fn attention(shape: &AttentionShape, rows: usize, context: usize) -> Timed {
    let AttentionShape { heads, kv_heads, head_size, window, latent, capped } = *shape;
    let seen = window.map_or(context, |window| context.min(window.saturating_sub(1)));
    let (kernel, parts) = xmx_attention_work((head_size, capped), heads, kv_heads, rows, seen + rows);
    if latent {
        let mut work = parts.into_iter().fold(XmxWork::default(), |sum, (_, work)| sum.and(work));
        // A latent is key and value.
        work.bytes -= (kv_heads * (seen + rows) * head_size * 2) as u64;
        return without_kernel(work);
    }
    let capped = if capped { ", capped" } else { "" };
    timed(&format!("xmx/attention.cl ({head_size}{capped})"), kernel, &parts)
}

fn head(table: &ProductShape, terms: XmxTerms, rows: usize) -> Timed {
    let ProductShape { format, outputs, columns } = *table;
    let work = xmx_head_work(format, terms, outputs, columns, rows);
    match xmx_takes(format) {
        true => timed(&label("head", format, terms), "stream_head", &[(0, work)]),
        false => without_kernel(work),
    }
}

/// The mean embedding of each row under its distribution: the table once more, and as many products. Their weights are f16
/// in one term.
fn soft_embeddings(table: &ProductShape, rows: usize) -> Op {
    let ProductShape { format, outputs, columns } = *table;
    let work = XmxWork {
        bytes: (format.matrix_bytes(outputs, columns) + rows * columns * 4) as u64,
        operations: 2 * (rows * outputs * columns) as u64,
        ..XmxWork::default()
    };
    Op { terms: [without_kernel(work); 2] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 26B with experts in 4 bits, and everything else in 8.
    fn of_26b() -> Workload {
        let made = |format| move |outputs, columns| ProductShape { format, outputs, columns };
        let (q8, w4) = (made(Format::Q8_0), made(Format::W4));
        let layer = |index: usize| {
            let qkv = if index % 6 == 5 { 8192 + 1024 } else { 4096 + 2 * 2048 };
            let attended = if index % 6 == 5 { 8192 } else { 4096 };
            [q8(qkv, 2816), q8(2816, attended), q8(2 * 2112, 2816), q8(2816, 2112), q8(128, 2816)]
        };
        Workload {
            products: (0..30).flat_map(layer).collect(),
            conditioning: vec![q8(2 * 2112, 2816), q8(2816, 2112)],
            experts: vec![
                ExpertsShape {
                    count: 128,
                    used: 8,
                    gate_up: w4(2 * 704, 2816),
                    down: w4(2816, 704)
                };
                30
            ],
            attention: (0..30)
                .map(|index| match index % 6 {
                    5 => AttentionShape {
                        heads: 16,
                        kv_heads: 2,
                        head_size: 512,
                        window: None,
                        latent: false,
                        capped: false,
                    },
                    _ => AttentionShape {
                        heads: 16,
                        kv_heads: 8,
                        head_size: 256,
                        window: Some(1024),
                        latent: false,
                        capped: false,
                    },
                })
                .collect(),
            head: q8(262_144, 2816),
            canvas: Some(256),
        }
    }

    #[test]
    fn a_denoising_step_of_the_26b_is_near_what_the_card_could_do() {
        let passes = predicted_passes(&of_26b(), 8192, 512);
        let step = passes.iter().find(|pass| pass.what == STEP && pass.context == 0).unwrap();
        for part in &step.parts {
            let milliseconds = part.predicted.map(|seconds| seconds * 1e3);
            println!(
                "{}: {:.0} MB, floor {:.2} ms, {milliseconds:.2?}",
                part.what,
                part.bytes as f64 / 1e6,
                part.floor * 1e3
            );
        }
        let (floor, [one, two]) = (step.floor() * 1e3, step.predicted().map(|seconds| seconds * 1e3));
        println!("{floor:.1} ms, {one:.1} ms, {two:.1} ms");
        assert!((24.0..32.0).contains(&floor), "{floor} ms: {step:?}");
        assert!(one / floor < 1.35, "{one} ms in one term, {floor} at best: {step:?}");
        assert!(two / floor < 1.6, "{two} ms in two terms, {floor} at best: {step:?}");
        // Experts are read once, nearly all of them.
        let experts = step.parts.iter().find(|part| part.what == "experts").unwrap();
        assert!((13.0e9..14.5e9).contains(&(experts.bytes as f64)), "{experts:?}");
        assert!(step.parts.iter().all(|part| part.kernels == (part.what != "soft embeddings")), "{step:?}");
    }

    #[test]
    fn no_part_takes_less_than_its_floor_and_more_rows_or_context_take_longer() {
        for pass in predicted_passes(&of_26b(), 8192, 512) {
            for part in &pass.parts {
                assert!(part.floor > 0.0 && part.predicted[0] >= part.floor, "{pass:?}");
                assert!(part.predicted[1] >= part.predicted[0], "{pass:?}");
            }
        }
        let took = |context, chunk| predicted_passes(&of_26b(), context, chunk)[1].predicted()[1];
        assert!(took(8192, 512) > took(1024, 512) && took(8192, 512) > took(8192, 256));
    }

    /// Where nothing is known of a kernel, what memory and engines can do is told, and that it is no kernel's.
    #[test]
    fn what_has_no_kernels_is_told_apart() {
        let plain = ProductShape { format: Format::F32, outputs: 512, columns: 512 };
        let latent = AttentionShape {
            heads: 16,
            kv_heads: 1,
            head_size: 576,
            window: None,
            latent: true,
            capped: false,
        };
        let workload = Workload {
            products: vec![plain],
            conditioning: Vec::new(),
            experts: Vec::new(),
            attention: vec![latent],
            head: ProductShape { format: Format::Q6K, outputs: 32_000, columns: 512 },
            canvas: None,
        };
        let passes = predicted_passes(&workload, 100, 64);
        assert_eq!(
            passes.iter().map(|pass| (pass.rows, pass.context)).collect::<Vec<_>>(),
            [(64, 0), (64, 100), (1, 0), (1, 100), (16, 0), (16, 100)]
        );
        for pass in &passes {
            let kernels: Vec<_> = pass.parts.iter().map(|part| (part.what, part.kernels)).collect();
            assert_eq!(kernels, [("products", false), ("attention", false), ("head", true)]);
        }
    }
}
