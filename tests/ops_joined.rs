//! Launches as one against the launches one by one: the same bits of everything they write, whoever takes the work.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use ops_support::*;

use axe::device::{Arg, Buffer, Device, Launch, Purpose};
use axe::ops::{
    ATTENTION_START, Activation, Attention, Cache, CacheKind, Family, Finish, Format, Joiner, Kernels,
    Matrix, Output, Pairing, ROTATE_START, Rotation, RowInput, STRIDE_MULTIPLE, choice_values, round_up,
};
use proptest::prelude::*;

const HEADS: usize = 4;
const HEAD: usize = 32;
/// Positions of the cache.
const CAPACITY: usize = 128;
/// Values of a row of queries, keys and values of two heads.
const QKV: usize = 256;
const ATTENDED: usize = HEADS * HEAD;

/// A stack of layers of odd sizes.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    /// Values of a row of the stream, in blocks of 256.
    blocks: usize,
    inner: usize,
    layers: usize,
    outputs: usize,
    /// First value of the output, and values that its rows are wider than they must be.
    at: usize,
    gap: usize,
    start: usize,
    formats: (Format, Format),
    seed: u64,
}

const FORMATS: [Format; 3] = [Format::Q4_1, Format::Q6K, Format::F16];

impl Case {
    fn strategy() -> impl Strategy<Value = Self> {
        let shape = (1..=20usize, 1..=3usize, 1..=9usize, 1..=6usize, 1..=150usize);
        let place = (0..40usize, 0..5usize, 0..100usize);
        let formats = (prop::sample::select(&FORMATS[..]), prop::sample::select(&FORMATS[..]));
        (shape, place, formats, any::<u64>()).prop_map(
            |((rows, blocks, inner, layers, outputs), (at, gap, start), formats, seed)| Self {
                rows,
                blocks,
                inner: 32 * inner,
                layers,
                outputs,
                at,
                gap,
                start,
                formats,
                seed,
            },
        )
    }

    fn hidden(&self) -> usize {
        self.blocks * 256
    }
}

/// The launches of a case, each with the index of its position, and all that they write.
struct Stack {
    launches: Vec<(Launch, Option<usize>)>,
    x: Vec<f32>,
    stream: [Buffer; 2],
    /// Poison before every run.
    written: Vec<Buffer>,
    /// Zeros before every run: what is read behind their rows must be zero.
    padded: Vec<Buffer>,
}

impl Stack {
    fn new(device: &Device, kernels: &Kernels, case: &Case) -> Self {
        let mut random = Random(case.seed);
        let (rows, hidden) = (case.rows, case.hidden());
        let mut matrix = |format: Format, outputs: usize, columns: usize| {
            let weights = Weights::new(format, outputs, columns, &mut random);
            let buffer = device.alloc(Purpose::Weights, weights.tiles.len()).unwrap();
            device.write(&buffer, 0, &weights.tiles).unwrap();
            Matrix { buffer, format, rows: outputs, columns, family: Family::Vector }
        };
        // Columns of a K format come in blocks of 256; those of the others need not.
        let free = |format: Format| if format == Format::Q6K { Format::Q4_1 } else { format };
        let (first, second) = case.formats;
        let weights: Vec<[Matrix; 4]> = (0..case.layers)
            .map(|_| {
                [
                    matrix(first, QKV, hidden),
                    matrix(free(second), hidden, ATTENDED),
                    matrix(second, 2 * case.inner, hidden),
                    matrix(free(first), hidden, case.inner),
                ]
            })
            .collect();
        let head = matrix(second, case.outputs, hidden);
        let x: Vec<f32> = (0..rows * hidden).map(|_| random.unit()).collect();
        let norm = upload(device, &(0..hidden).map(|_| random.unit() * 2.0).collect::<Vec<_>>());
        let branch_norm = upload(device, &(0..hidden).map(|_| random.unit()).collect::<Vec<_>>());
        let angles = upload(device, &(0..CAPACITY * HEAD).map(|_| random.unit()).collect::<Vec<_>>());
        let inner_stride = round_up(case.inner, STRIDE_MULTIPLE);
        let out_stride = round_up(case.outputs, 32) + case.gap;
        let stream = [0, 1].map(|_| poisoned(device, rows * hidden));
        let (qkv, branch) = (poisoned(device, rows * QKV), poisoned(device, rows * hidden));
        let out = poisoned(device, rows * out_stride + case.at + GUARD);
        let choices = poisoned(device, choice_values(rows));
        let (attended, inner) = (poisoned(device, rows * 256), poisoned(device, rows * inner_stride));
        let widest = hidden.max(inner_stride);
        let [(packed, _), (sums, _)] = poisoned_packed(device, kernels, rows, widest);
        let cache = Cache::new(device, CacheKind::F16, 2, HEAD, CAPACITY).unwrap();
        device.fill(&cache.keys, 0x3c00_3c00).unwrap();
        device.fill(&cache.values, 0x3c00_3c00).unwrap();

        let mut launches: Vec<(Launch, Option<usize>)> = Vec::new();
        let product = |launches: &mut Vec<(Launch, Option<usize>)>,
                       matrix: &Matrix,
                       input: RowInput<'_>,
                       finish: Finish<'_>,
                       rows_out: &Buffer,
                       (at, stride): (usize, usize)| {
            let output = Output { rows: rows_out, at, stride };
            if rows <= kernels.narrow_rows(matrix) {
                launches.push((kernels.narrow(device, matrix, &input, rows, finish, &output).unwrap(), None));
            } else {
                launches.push((
                    kernels.pack_rows(device, &input, rows, Family::Vector, &packed, &sums).unwrap(),
                    None,
                ));
                let launch = kernels.matmul(device, matrix, &packed, &sums, rows, finish, &output).unwrap();
                launches.push((launch, None));
            }
        };
        let plain =
            |rows, n, stride| RowInput { rows, at: 0, branch: None, norm: None, n, stride, epsilon: EPSILON };
        let mut at = 0;
        for (index, [to_qkv, output, gate_up, down]) in weights.iter().enumerate() {
            // The branch of the layer before joins the stream on the way.
            let joining = (index > 0).then_some((&branch, &branch_norm, &stream[1 - at]));
            let input = RowInput { branch: joining, norm: Some(&norm), ..plain(&stream[at], hidden, hidden) };
            product(&mut launches, to_qkv, input, Finish::Store, &qkv, (0, QKV));
            at = if index > 0 { 1 - at } else { at };
            let rotation = Rotation {
                qkv: &qkv,
                stride: QKV,
                q_heads: HEADS,
                k_at: ATTENDED,
                v_at: ATTENDED + 2 * HEAD,
                bias: None,
                angles: &angles,
                half_rotated: HEAD / 2,
                pairing: Pairing::Neighbours,
                norms: None,
                value_norms: false,
                queries_only: false,
                queries: None,
                epsilon: EPSILON,
            };
            let launch = kernels.rotate_and_cache(device, &rotation, &cache, rows).unwrap();
            launches.push((launch, Some(ROTATE_START)));
            let attention = Attention {
                q: &qkv,
                stride: QKV,
                out: &attended,
                out_stride: 256,
                q_heads: HEADS,
                window: (index % 2 == 1).then_some(19),
                canvas: false,
                scale: 0.2,
                softcap: 0.0,
            };
            let launch = kernels.attention(device, &attention, &cache, rows).unwrap();
            launches.push((launch, Some(ATTENTION_START)));
            let input = plain(&attended, ATTENDED, 256);
            product(&mut launches, output, input, Finish::Add(&stream[at]), &stream[at], (0, hidden));
            let input = RowInput { norm: Some(&norm), ..plain(&stream[at], hidden, hidden) };
            let gated = Finish::Gated(Activation::Silu);
            product(&mut launches, gate_up, input, gated, &inner, (0, inner_stride));
            let input = plain(&inner, case.inner, inner_stride);
            product(&mut launches, down, input, Finish::Store, &branch, (0, hidden));
        }
        let input = RowInput {
            branch: Some((&branch, &branch_norm, &stream[1 - at])),
            norm: Some(&norm),
            ..plain(&stream[at], hidden, hidden)
        };
        product(&mut launches, &head, input, Finish::Store, &out, (case.at, out_stride));
        let launch = kernels.choose(device, &out, out_stride, case.outputs, rows, &choices).unwrap();
        launches.push((launch, None));
        Self {
            launches,
            x,
            stream,
            written: vec![qkv, branch, out, choices, packed, sums],
            padded: vec![attended, inner],
        }
    }

    fn positioned(&self) -> impl Iterator<Item = (&Launch, Option<usize>)> + Clone {
        self.launches.iter().map(|(launch, position)| (launch, *position))
    }

    fn clear(&self, device: &Device) {
        device.fill(&self.stream[1], POISON).unwrap();
        self.written.iter().for_each(|buffer| device.fill(buffer, POISON).unwrap());
        self.padded.iter().for_each(|buffer| device.fill(buffer, 0).unwrap());
        device.write(&self.stream[0], 0, bytemuck::cast_slice(&self.x)).unwrap();
    }

    /// What all buffers hold after a run.
    fn run(&mut self, device: &Device, start: usize) -> Vec<Vec<f32>> {
        self.clear(device);
        for (launch, position) in &mut self.launches {
            if let Some(index) = position {
                launch.set(*index, Arg::I32(start as i32)).unwrap();
            }
            device.enqueue(launch).unwrap();
        }
        self.found(device)
    }

    fn found(&self, device: &Device) -> Vec<Vec<f32>> {
        let all = self.stream.iter().chain(&self.written).chain(&self.padded);
        all.map(|buffer| download(device, buffer)).collect()
    }
}

/// A joiner for stacks of all formats; none where the device is not known to be fit for it.
fn joiner(device: &Device, kernels: &Kernels) -> Option<Joiner> {
    let case = |rows, formats| Case {
        rows,
        blocks: 1,
        inner: 32,
        layers: 1,
        outputs: 16,
        at: 0,
        gap: 0,
        start: 0,
        formats,
        seed: 1,
    };
    let stacks: Vec<Stack> =
        [(1, (FORMATS[0], FORMATS[1])), (9, (FORMATS[2], FORMATS[1])), (9, (FORMATS[0], FORMATS[2]))]
            .into_iter()
            .chain([(1, (FORMATS[2], FORMATS[2]))])
            .map(|(rows, formats)| Stack::new(device, kernels, &case(rows, formats)))
            .collect();
    let joiner = kernels.joiner(device, stacks.iter().flat_map(Stack::positioned)).unwrap();
    assert_eq!(joiner.is_some(), device.info().finds_by_address());
    if joiner.is_none() {
        println!("{} is not known to find memory by its address: nothing is joined", device.info());
    }
    joiner
}

#[test]
fn one_launch_makes_the_bits_of_many() {
    let (device, kernels) = open();
    let Some(mut joiner) = joiner(&device, &kernels) else { return };
    // One group, which does all; as many as there are threads; and more by far, most of which find nothing left.
    for groups in [1, 2, 300] {
        joiner = joiner.with_groups(groups);
        check(8, &Case::strategy(), |case| {
            let mut stack = Stack::new(&device, &kernels, &case);
            let mut joined = joiner.join(&device, stack.positioned()).unwrap().expect("a joined stack");
            // Twice, so that a second run does not live on what the first has left.
            for start in [case.start, CAPACITY - case.rows - case.start / 2] {
                let expected = stack.run(&device, start);
                prop_assert!(!expected.iter().flatten().all(|value| value.is_nan()));
                stack.clear(&device);
                joined.run(&device, start as i32).unwrap();
                for (buffer, (found, expected)) in stack.found(&device).iter().zip(&expected).enumerate() {
                    prop_assert!(same_bits(found, expected), "buffer {} differs, {} groups", buffer, groups);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn runs_may_go_on_for_ever() {
    let (device, kernels) = open();
    let Some(joiner) = joiner(&device, &kernels) else { return };
    let case = Case {
        rows: 1,
        blocks: 1,
        inner: 32,
        layers: 2,
        outputs: 40,
        at: 3,
        gap: 1,
        start: 5,
        formats: (Format::Q4_1, Format::F16),
        seed: 4,
    };
    let mut stack = Stack::new(&device, &kernels, &case);
    let expected = stack.run(&device, case.start);
    let mut joined = joiner.join(&device, stack.positioned()).unwrap().unwrap();
    // Runs are counted in 16 bits.
    for run in 0..70_000 {
        joined.run_hollow(&device).unwrap();
        if run % 1000 == 0 {
            device.finish().unwrap();
        }
    }
    stack.clear(&device);
    device.finish().unwrap();
    assert!(is_poison(&download(&device, &stack.written[2])), "a hollow run computes nothing");
    joined.run(&device, case.start as i32).unwrap();
    for (found, expected) in stack.found(&device).iter().zip(&expected) {
        assert!(same_bits(found, expected));
    }
}

#[test]
fn what_a_joiner_does_not_know_is_not_joined() {
    let (device, kernels) = open();
    let Some(joiner) = joiner(&device, &kernels) else { return };
    let logits = upload(&device, &[1.0; 64]);
    let known = kernels.choose(&device, &logits, 64, 64, 1, &poisoned(&device, choice_values(1))).unwrap();
    let other = kernels.cap_rows(&device, &logits, 1, 64, 64, 2.0).unwrap();
    assert!(joiner.join(&device, [(&known, None)].into_iter()).unwrap().is_some());
    assert!(joiner.join(&device, [(&known, None), (&other, None)].into_iter()).unwrap().is_none());
    // Nothing is no run.
    assert!(joiner.join(&device, std::iter::empty()).unwrap().is_none());
}
