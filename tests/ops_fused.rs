//! Launches that do what others do one after the other, over odd shapes: what they write, poison around it included, must be
//! the same bits. The others are held to f64 by `ops_properties` and `ops_moe`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod ops_support;
mod support;

use axe::device::{Buffer, Device, Launch, Purpose};
use axe::ops::{
    Activation, Attention, Cache, CacheKind, CombineInput, ExpertChoice, Family, Finish, Format, Kernels,
    Matrix, Output, PackedRows, Products, ROW_MULTIPLE, Router, Routing, RowInput, STRIDE_MULTIPLE, TILE,
    round_up,
};
use ops_support::*;
use proptest::prelude::*;

/// Rows and what they go through.
#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    columns: usize,
    inner: usize,
    experts: usize,
    top: usize,
    gelu: bool,
    branch: bool,
    seed: u64,
}

fn cases(format: Format) -> impl Strategy<Value = Case> {
    let step = format.block_codes().max(1);
    let (rows, columns): (usize, usize) = if simulated() { (70, 40) } else { (200, 400) };
    let most = (columns / step).max(1);
    let shape = (1..=rows, 1..=most, 1..=100usize, 1..=70usize, 1..=9usize);
    (shape, any::<(bool, bool)>(), any::<u64>()).prop_map(
        move |((rows, columns, inner, experts, top), (gelu, branch), seed)| Case {
            rows,
            columns: columns * step,
            inner,
            experts,
            top: top.min(experts),
            gelu,
            branch,
            seed,
        },
    )
}

/// A case on a device.
struct Bench<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    case: Case,
    stride: usize,
    x: Buffer,
    branch: Buffer,
    norms: [Buffer; 3],
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, kernels: &'a Kernels, case: &Case, random: &mut Random) -> Self {
        let stride = round_up(case.columns, STRIDE_MULTIPLE);
        let mut rows = |count: usize| {
            let value = |i: usize| if i % stride < case.columns { random.unit() * 3.0 } else { 0.0 };
            upload(device, &(0..count * stride).map(value).collect::<Vec<f32>>())
        };
        let (x, branch) = (rows(case.rows), rows(case.rows));
        let norms = [rows(1), rows(1), rows(1)];
        Self { device, kernels, case: case.clone(), stride, x, branch, norms }
    }

    fn run(&self, launches: impl IntoIterator<Item = Launch>) {
        launches.into_iter().for_each(|launch| self.device.enqueue(&launch).unwrap());
    }

    fn matrix(&self, format: Format, outputs: usize, random: &mut Random) -> Matrix {
        let tiles = Weights::new(format, outputs, self.case.columns, random).tiles;
        let buffer = self.device.alloc(Purpose::Weights, tiles.len()).unwrap();
        self.device.write(&buffer, 0, &tiles).unwrap();
        Matrix { buffer, format, rows: outputs, columns: self.case.columns, family: Family::Vector }
    }

    fn packed(&self, stride: usize) -> [Buffer; 2] {
        poisoned_packed(self.device, self.kernels, self.case.rows, stride).map(|(buffer, _)| buffer)
    }

    fn rows(&self, stride: usize) -> Buffer {
        poisoned(self.device, self.case.rows * stride + GUARD)
    }

    fn input<'b>(&'b self, new_rows: &'b Buffer) -> RowInput<'b> {
        RowInput {
            rows: &self.x,
            at: 0,
            branch: self.case.branch.then_some((&self.branch, &self.norms[0], new_rows)),
            norm: Some(&self.norms[1]),
            n: self.case.columns,
            stride: self.stride,
            epsilon: EPSILON,
        }
    }

    fn same(&self, name: &str, one: &Buffer, other: &Buffer) -> Result<(), TestCaseError> {
        let same = same_bits(&download(self.device, one), &download(self.device, other));
        prop_assert!(same, "{} differs", name);
        Ok(())
    }
}

fn of([packed, sums]: &[Buffer; 2]) -> PackedRows<'_> {
    PackedRows { packed, sums }
}

/// A gated product that packs its results, beside the product, and then the packing of what it made.
fn gated_holds(device: &Device, kernels: &Kernels, format: Format, case: &Case) -> Result<(), TestCaseError> {
    let mut random = Random(case.seed);
    let bench = Bench::new(device, kernels, case, &mut random);
    let (rows, inner) = (case.rows, case.inner);
    let matrix = bench.matrix(format, 2 * round_up(inner, TILE), &mut random);
    let activation = if case.gelu { Activation::GeluTanh } else { Activation::Silu };
    let inner_stride = round_up(inner, STRIDE_MULTIPLE);
    let (packed, new_rows) = (bench.packed(bench.stride), bench.rows(bench.stride));
    let [fused, apart] = [bench.packed(inner_stride), bench.packed(inner_stride)];
    let between = device.alloc(Purpose::Scratch, rows * inner_stride * 4).unwrap();
    device.fill(&between, 0).unwrap();
    let plain = RowInput {
        rows: &between,
        at: 0,
        branch: None,
        norm: None,
        n: inner,
        stride: inner_stride,
        epsilon: EPSILON,
    };
    let output = Output { rows: &between, at: 0, stride: inner_stride };
    let (finish, family) = (Finish::Gated(activation), Family::Vector);
    bench.run([
        kernels.pack_rows(device, &bench.input(&new_rows), rows, family, &packed[0], &packed[1]).unwrap(),
        kernels.matmul(device, &matrix, &packed[0], &packed[1], rows, finish, &output).unwrap(),
        kernels.pack_rows(device, &plain, rows, family, &apart[0], &apart[1]).unwrap(),
        kernels.matmul_gated(device, &matrix, activation, rows, of(&packed), inner, of(&fused)).unwrap(),
    ]);
    bench.same("inner", &fused[0], &apart[0])?;
    bench.same("inner sums", &fused[1], &apart[1])
}

/// What a routed layer makes, by fused launches or by others.
struct Routed {
    named: Vec<(&'static str, Buffer)>,
}

fn routed(bench: &Bench<'_>, matrix: &Matrix, scales: &Buffer, out: &Buffer, fused: bool) -> Routed {
    let Bench { device, kernels, case, stride, .. } = bench;
    let (stride, rows, top) = (*stride, case.rows, case.top);
    let [first, second, next] = [(); 3].map(|()| bench.packed(stride));
    let [new_rows, result] = [(); 2].map(|()| bench.rows(stride));
    let scores_stride = round_up(case.experts, ROW_MULTIPLE);
    let (scores, chosen) = (bench.rows(scores_stride), bench.rows(top));
    let routing = Routing::new(device, case.experts, top, rows).unwrap();
    let input = bench.input(&new_rows);
    let sum = if case.branch { &new_rows } else { &bench.x };
    let [_, norm, second_norm] = &bench.norms;
    let beside = RowInput { rows: sum, branch: None, norm: Some(second_norm), ..input };
    let behind = RowInput { rows: &result, branch: None, norm: Some(norm), ..input };
    let router = Router {
        logits: &scores,
        stride: scores_stride,
        choice: ExpertChoice::default(),
        bias: None,
        expert_scales: Some(scales),
    };
    let family = Family::Vector;
    if fused {
        bench.run([
            kernels.pack_rows_twice(device, &input, rows, of(&first), second_norm, of(&second)).unwrap(),
            kernels.route_rows(device, matrix, of(&second), &router, &chosen, &routing, rows).unwrap(),
        ]);
    } else {
        let output = Output { rows: &scores, at: 0, stride: scores_stride };
        bench.run([
            kernels.pack_rows(device, &input, rows, family, &first[0], &first[1]).unwrap(),
            kernels.pack_rows(device, &beside, rows, family, &second[0], &second[1]).unwrap(),
            kernels.matmul(device, matrix, &second[0], &second[1], rows, Finish::Store, &output).unwrap(),
            kernels.choose_experts(device, &router, &chosen, &routing, rows).unwrap(),
        ]);
    }
    let slots = bench.packed_slots();
    let pack =
        kernels.pack_for_experts(device, &beside, &chosen, &routing, rows, family, &slots[0], &slots[1]);
    bench.run([pack.unwrap()]);
    let join = CombineInput {
        out,
        out_stride: stride,
        mlp: &bench.branch,
        residual: sum,
        moe_norm: &bench.norms[0],
        mlp_norm: norm,
        join_norm: second_norm,
        scalar: 0.75,
        n: case.columns,
        stride,
        epsilon: EPSILON,
        next: fused.then_some((norm, of(&next))),
    };
    bench.run([kernels.combine(device, &join, &routing, rows, &result).unwrap()]);
    if !fused {
        bench.run([kernels.pack_rows(device, &behind, rows, family, &next[0], &next[1]).unwrap()]);
    }
    let ([first, first_sums], [second, second_sums], [next, next_sums]) = (first, second, next);
    Routed {
        named: vec![
            ("rows", first),
            ("sums", first_sums),
            ("rows for the router", second),
            ("their sums", second_sums),
            ("scores", scores),
            ("chosen experts", chosen),
            ("weights", routing.weights.clone()),
            ("result", result),
            ("next rows", next),
            ("their sums", next_sums),
        ],
    }
}

impl Bench<'_> {
    fn packed_slots(&self) -> [Buffer; 2] {
        poisoned_packed(self.device, self.kernels, self.case.rows * self.case.top, self.stride)
            .map(|(buffer, _)| buffer)
    }
}

fn routed_holds(
    device: &Device,
    kernels: &Kernels,
    format: Format,
    case: &Case,
) -> Result<(), TestCaseError> {
    let mut random = Random(case.seed);
    let bench = Bench::new(device, kernels, case, &mut random);
    let matrix = bench.matrix(format, case.experts, &mut random);
    let mut values = |count: usize| (0..count).map(|_| random.unit() + 1.5).collect::<Vec<f32>>();
    let scales = upload(device, &values(case.experts));
    let out = upload(device, &values(case.rows * case.top * bench.stride));
    let [fused, apart] = [true, false].map(|fused| routed(&bench, &matrix, &scales, &out, fused));
    for ((name, fused), (_, apart)) in fused.named.iter().zip(&apart.named) {
        bench.same(name, fused, apart)?;
    }
    Ok(())
}

#[test]
fn fused_launches_make_the_bits_of_those_they_stand_for() {
    for (device, kernels) in flavours() {
        for format in [Format::Bf16, Format::F32, Format::Q8_0, Format::W4, Format::Q6K] {
            if simulated() && format != Format::Bf16 {
                continue;
            }
            println!("{}", format.name());
            let count = if simulated() { 2 } else { 12 };
            check(count, &cases(format), |case| gated_holds(&device, &kernels, format, &case));
            check(count, &cases(format), |case| routed_holds(&device, &kernels, format, &case));
        }
    }
}

/// Attention that packs its results, beside attention, and then the packing of what it made.
#[test]
fn attention_packs_what_it_makes() {
    for (device, kernels) in flavours() {
        for (size, kv_heads, group, rows) in [(32, 2, 2, 70), (64, 1, 3, 5), (96, 2, 1, 65), (256, 1, 1, 3)] {
            if simulated() && size > 32 {
                continue;
            }
            let heads = kv_heads * group;
            let (width, stride) = (heads * size, round_up(heads * size, STRIDE_MULTIPLE));
            let mut random = Random(size as u64);
            let cache = Cache::new(&device, CacheKind::F16, kv_heads, size, rows).unwrap();
            cache.fill(&device).unwrap();
            let q: Vec<f32> =
                (0..rows * stride).map(|i| if i % stride < width { random.unit() } else { 0.0 }).collect();
            let q = upload(&device, &q);
            let [fused, apart] = [(); 2].map(|()| device.alloc(Purpose::Scratch, rows * stride * 4).unwrap());
            device.fill(&fused, 0).unwrap();
            device.fill(&apart, 0).unwrap();
            let looks = |out| Attention {
                q: &q,
                stride,
                out,
                out_stride: stride,
                q_heads: heads,
                window: None,
                canvas: true,
                scale: 0.3,
                softcap: 0.0,
            };
            let [one, other] =
                [(); 2].map(|()| poisoned_packed(&device, &kernels, rows, stride).map(|(b, _)| b));
            let plain = RowInput {
                rows: &apart,
                at: 0,
                branch: None,
                norm: None,
                n: width,
                stride,
                epsilon: EPSILON,
            };
            let family = Family::Vector;
            for launch in [
                kernels.attention_and_pack(&device, &looks(&fused), &cache, rows, of(&one)).unwrap(),
                kernels.attention(&device, &looks(&apart), &cache, rows).unwrap(),
                kernels.pack_rows(&device, &plain, rows, family, &other[0], &other[1]).unwrap(),
            ] {
                device.enqueue(&launch).unwrap();
            }
            assert!(same_bits(&download(&device, &fused), &download(&device, &apart)), "{size}: rows");
            // Columns behind the last head are nobody's.
            let groups = width / 32;
            let [one, other] =
                [one, other].map(|[packed, sums]| [download(&device, &packed), download(&device, &sums)]);
            if stride == width {
                assert!(same_bits(&one[0], &other[0]) && same_bits(&one[1], &other[1]), "{size}: packed");
                continue;
            }
            let (block, all) = (rows.min(64), stride / 32);
            // Where parts of a block begin, and what a row takes in each group.
            let parts: &[(usize, usize)] = match kernels.products() {
                Products::MatrixUnit => &[(0, 48)],
                Products::Integer => &[(0, 32), (32, 24), (56, 1)],
                _ => &[(0, 32)],
            };
            for (at, each) in parts {
                let part = block * all * at..block * all * at + block * groups * each;
                assert!(same_bits(&one[0][part.clone()], &other[0][part]), "{size}: packed");
            }
            let whole = rows.min(64) * groups;
            assert!(same_bits(&one[1][..whole], &other[1][..whole]), "{size}: sums");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (device, kernels) = open();
    let case =
        Case { rows: 3, columns: 64, inner: 40, experts: 5, top: 2, gelu: true, branch: false, seed: 1 };
    let mut random = Random(1);
    let bench = Bench::new(&device, &kernels, &case, &mut random);
    let matrix = bench.matrix(Format::Bf16, 2 * round_up(case.inner, TILE), &mut random);
    let [input, inner] = [bench.packed(bench.stride), bench.packed(STRIDE_MULTIPLE)];
    let small = [upload(&device, &[0.0; 8]), upload(&device, &[0.0; 8])];
    let gated = |matrix: &Matrix, rows: usize, columns: usize, inner: &[Buffer; 2]| {
        let activation = Activation::Silu;
        kernels.matmul_gated(&device, matrix, activation, rows, of(&input), columns, of(inner)).map(|_| ())
    };
    assert!(gated(&matrix, 3, 40, &inner).is_ok());
    assert!(gated(&matrix, 0, 40, &inner).is_err());
    assert!(gated(&matrix, 3, 64, &inner).is_err(), "as many pairs of gate and up as columns ask for");
    assert!(gated(&matrix, 3, 40, &small).is_err());
    assert!(gated(&Matrix { family: Family::Xmx, ..matrix.clone() }, 3, 40, &inner).is_err());
    let twice = |second: &[Buffer; 2], norm: &Buffer| {
        let (x, first) = (bench.input(&bench.x), of(&input));
        kernels.pack_rows_twice(&device, &x, 3, first, norm, of(second)).map(|_| ())
    };
    assert!(twice(&inner, &bench.norms[0]).is_ok());
    assert!(twice(&small, &bench.norms[0]).is_err() && twice(&inner, &small[0]).is_err());
    let scores = bench.rows(ROW_MULTIPLE);
    let routing = Routing::new(&device, 5, 2, 3).unwrap();
    let chosen = bench.rows(2);
    let route = |experts: usize, stride: usize| {
        let router = Router {
            logits: &scores,
            stride,
            choice: ExpertChoice::default(),
            bias: None,
            expert_scales: None,
        };
        let matrix = bench.matrix(Format::Bf16, experts, &mut Random(2));
        kernels.route_rows(&device, &matrix, of(&input), &router, &chosen, &routing, 3).map(|_| ())
    };
    assert!(route(5, ROW_MULTIPLE).is_ok());
    assert!(route(40, ROW_MULTIPLE).is_err(), "a matrix for other experts");
    assert!(route(5, 8).is_err(), "whole pairs of tiles are stored");
}
