//! Heads that are rotated, kept and attended to, in passes of any width, against f64 within the bounds of f32 arithmetic; whatever
//! family's kernels do it.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::ops::RangeInclusive;

use axe::device::{Arg, Device};
use axe::ops::{
    ATTENTION_START, Attention, Cache, CacheKind, Family, Kernels, Pairing, ROTATE_START, Rotation,
    attention_reference, prepare_reference, xmx_queries,
};
use proptest::prelude::*;

use crate::ops_support::*;

/// Bits of a cache read back, NaN where nothing was written.
fn same_cache(a: &[Vec<Vec<f32>>], b: &[Vec<Vec<f32>>]) -> bool {
    a.iter().flatten().zip(b.iter().flatten()).all(|(a, b)| same_bits(a, b))
}

/// Heads that are rotated, kept and attended to.
#[derive(Debug, Clone)]
pub struct Heads {
    pub head: usize,
    /// Values of a value head.
    pub value: usize,
    pub kind: CacheKind,
    pub kv_heads: usize,
    pub group: usize,
    pub rows: usize,
    /// Widths of passes are up to this.
    pub widest: usize,
    pub window: Option<usize>,
    pub half_rotated: usize,
    pub pairing: Pairing,
    pub normed: bool,
    pub value_norms: bool,
    /// The raw keys are the values.
    pub shared: bool,
    pub bias: bool,
    pub softcap: f32,
    /// The last rows, which are a canvas.
    pub canvas: usize,
    /// Queries and keys are up to this large.
    pub reach: f32,
    pub seed: u64,
}

impl Heads {
    /// Any heads.
    pub fn strategy() -> impl Strategy<Value = Self> {
        let heads: &[usize] =
            if simulated() { &[16, 48, 64] } else { &[16, 32, 48, 64, 80, 96, 128, 160, 192, 256] };
        Self::of_sizes(heads)
    }

    /// Heads of these sizes.
    pub fn of_sizes(heads: &[usize]) -> impl Strategy<Value = Self> + use<> {
        let most_rows: usize = if simulated() { 20 } else { 150 };
        let shape = (
            prop::sample::select(heads.to_vec()),
            prop_oneof![Just(CacheKind::F16), Just(CacheKind::F32)],
            1..=if simulated() { 1usize } else { 3 },
            1..=if simulated() { 2usize } else { 8 },
            1..=most_rows,
            1..=most_rows,
        );
        let how = (
            any::<bool>(),
            any::<prop::sample::Index>(),
            0..4usize,
            prop_oneof![Just(Pairing::Neighbours), Just(Pairing::RotatedHalves), Just(Pairing::HeadHalves)],
            any::<bool>(),
            prop_oneof![Just(1f32), Just(1e-30), Just(20.0), Just(3e4), Just(1e15)],
            any::<u64>(),
        );
        let new = (
            any::<bool>(),
            any::<bool>(),
            prop_oneof![Just(None), any::<prop::sample::Index>().prop_map(Some)],
            any::<bool>(),
            prop_oneof![Just(0f32), Just(0.5), Just(50.0)],
            prop_oneof![3 => Just(None), 1 => prop::sample::select(&[16usize, 32, 48, 128][..]).prop_map(Some)],
        );
        (shape, how, new).prop_map(
            |(
                (head, kind, kv_heads, group, rows, widest),
                (full, window, part, pairing, normed, reach, seed),
                (value_norms, shared, canvas, bias, softcap, value),
            )| Self {
                head,
                value: value.filter(|_| !shared).unwrap_or(head),
                kind,
                kv_heads,
                group,
                rows,
                widest,
                window: (!full).then(|| 1 + window.index(2 * rows)),
                half_rotated: [head / 2, head / 4, 1, 0][part],
                pairing,
                normed,
                value_norms,
                shared,
                bias,
                softcap,
                canvas: canvas.map_or(0, |canvas| 1 + canvas.index(rows)),
                reach,
                seed,
            },
        )
    }
}

/// Rows after rotation, the cache's keys and values by kv head and position, and the results of attention.
pub struct Attended {
    pub family: Family,
    pub rows: Vec<f32>,
    pub keys: Vec<Vec<Vec<f32>>>,
    pub values: Vec<Vec<Vec<f32>>>,
    pub out: Vec<f32>,
}

pub struct HeadRows {
    case: Heads,
    qkv: Vec<f32>,
    /// The same with the bias added.
    biased: Vec<f32>,
    /// No numbers between heads.
    bias: Vec<f32>,
    stride: usize,
    k_at: usize,
    v_at: usize,
    angles: Vec<f32>,
    norms: [Vec<f32>; 2],
    scale: f32,
}

impl HeadRows {
    pub fn new(case: &Heads) -> Self {
        let mut random = Random(case.seed);
        let q_heads = case.kv_heads * case.group;
        // Odd places, with values between that are nobody's.
        let k_at = q_heads * case.head + random.below(3) * 8;
        let v_at = if case.shared { k_at } else { k_at + case.kv_heads * case.head + random.below(3) * 8 };
        let stride = v_at + case.kv_heads * case.value + random.below(7);
        let mut qkv: Vec<f32> = (0..case.rows * stride)
            .map(|i| random.unit() * if i % stride < v_at { case.reach } else { 1.0 })
            .collect();
        if case.reach > 1e4 {
            // Values that f16 cannot hold, too.
            for row in 0..case.rows {
                qkv[row * stride + v_at + random.below(case.value)] = random.wide(4.0, 6.0);
            }
        }
        let heads: Vec<usize> = (0..q_heads * case.head)
            .chain((k_at..k_at + case.kv_heads * case.head).chain(v_at..v_at + case.kv_heads * case.value))
            .collect();
        let mut bias = vec![f32::NAN; stride];
        for &i in &heads {
            bias[i] = random.unit() * if i < v_at { case.reach } else { 1.0 };
        }
        let mut biased = qkv.clone();
        if case.bias {
            for row in biased.chunks_exact_mut(stride) {
                for (value, bias) in row.iter_mut().zip(&bias).filter(|(_, bias)| !bias.is_nan()) {
                    *value += bias;
                }
            }
        }
        let angles = (0..case.rows * case.half_rotated)
            .flat_map(|_| {
                let angle = f64::from(random.unit()) * 1000.0;
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect();
        let mut weight = || (0..case.head).map(|_| random.unit() * 2.0).collect();
        let norms = [weight(), weight()];
        let scale = 1.0 / (case.head as f32).sqrt();
        Self { case: case.clone(), qkv, biased, bias, stride, k_at, v_at, angles, norms, scale }
    }

    /// One head after norm and rotation, with bounds.
    fn rotated(&self, row: usize, at: usize, norm: &[f32]) -> Vec<Bounded> {
        let case = &self.case;
        let mut x = f64s(&self.biased[row * self.stride + at..][..case.head]);
        let mut off = vec![0.0; case.head];
        if case.normed {
            (_, x) = prepare_reference(&x, None, Some(&f64s(norm)), f64::from(EPSILON));
            off = x.iter().map(|v| v.abs() * (8.0 + case.head as f64 / 32.0) * ULP + DENORMAL).collect();
        }
        let angles = &self.angles[row * 2 * case.half_rotated..];
        for i in 0..case.half_rotated {
            let (first, second) = match case.pairing {
                Pairing::Neighbours => (2 * i, 2 * i + 1),
                Pairing::RotatedHalves => (i, i + case.half_rotated),
                Pairing::HeadHalves => (i, i + case.head / 2),
            };
            let (c, s) = (f64::from(angles[2 * i]), f64::from(angles[2 * i + 1]));
            let (a, b) = (x[first], x[second]);
            let spread = |p: f64, q: f64| {
                p.abs() * off[first]
                    + q.abs() * off[second]
                    + 2.0 * ULP * ((a * p).abs() + (b * q).abs())
                    + 2.0 * DENORMAL
            };
            let (off_first, off_second) = (spread(c, s), spread(s, c));
            (x[first], x[second]) = (a * c - b * s, a * s + b * c);
            (off[first], off[second]) = (off_first, off_second);
        }
        x.into_iter().zip(off).collect()
    }

    /// A query as the kernels keep it: the `xmx` family in two terms of f16 beside the largest number of its head, 22 bits.
    fn cut(&self, family: Family, head: Vec<Bounded>) -> Vec<Bounded> {
        if family == Family::Vector {
            return head;
        }
        let largest = head.iter().fold(0f64, |largest, (value, _)| largest.max(value.abs()));
        let steps = largest / 2f64.powi(38) + DENORMAL;
        head.into_iter().map(|(value, off)| (value, off + value.abs() / f64::from(1 << 22) + steps)).collect()
    }

    /// A bounded value once the cache has kept it.
    fn kept(&self, (value, off): Bounded) -> Bounded {
        match self.case.kind {
            CacheKind::F32 => (value, off),
            // 11 bits, and what is below the range of f16 in steps of 2^-24.
            CacheKind::F16 => {
                let clamped = value.clamp(-65504.0, 65504.0);
                (clamped, off + clamped.abs() / 2048.0 + 1.0 / f64::from(1 << 25))
            }
        }
    }

    /// A value head after its norm, with bounds.
    fn value(&self, row: usize, kv: usize) -> Vec<Bounded> {
        let case = &self.case;
        let x = f64s(&self.biased[row * self.stride + self.v_at + kv * case.value..][..case.value]);
        if !case.value_norms {
            return x.into_iter().map(|v| (v, 0.0)).collect();
        }
        let (_, x) = prepare_reference(&x, None, Some(&vec![1.0; case.value]), f64::from(EPSILON));
        x.into_iter().map(|v| (v, v.abs() * (8.0 + case.value as f64 / 32.0) * ULP + DENORMAL)).collect()
    }

    /// The positions that a row sees.
    fn seen(&self, row: usize) -> RangeInclusive<usize> {
        let (window, anchor) = (self.case.window.unwrap_or(usize::MAX), self.case.rows - self.case.canvas);
        if row < anchor {
            (row + 1).saturating_sub(window)..=row
        } else {
            (anchor + 1).saturating_sub(window)..=self.case.rows - 1
        }
    }

    /// Rotates, keeps and attends in passes of these widths, then the canvas. With `ring`, the cache holds what a window
    /// and a pass need and no more.
    pub fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        widths: &[usize],
        ring: bool,
    ) -> Result<Attended, TestCaseError> {
        let case = &self.case;
        let (head, size, q_heads) = (case.head, case.value, case.kv_heads * case.group);
        let mut passes: Vec<(usize, bool)> = widths.iter().map(|&width| (width, false)).collect();
        if case.canvas > 0 {
            passes.push((case.canvas, true));
        }
        let widest = passes.iter().map(|(width, _)| *width).max().unwrap();
        let positions = match case.window {
            Some(window) if ring => case.rows.min(window - 1 + widest),
            _ => case.rows,
        };
        let family = match size == head {
            true => kernels.products().attention(case.kind, head),
            false => Family::Vector,
        };
        let cache = match family {
            Family::Vector => {
                Cache::with_value_size(device, case.kind, case.kv_heads, head, size, positions).unwrap()
            }
            Family::Xmx => {
                Cache::of_family(device, family, case.kind, case.kv_heads, head, positions).unwrap()
            }
        };
        // Positions not written yet hold whatever the memory held: here a NaN, which would spread, or, where values must be
        // numbers, the largest.
        let unwritten = match case.kind {
            CacheKind::F16 => 0x7fff_7fff,
            CacheKind::F32 => POISON,
        };
        device.fill(&cache.keys, unwritten).unwrap();
        device.fill(&cache.values, if family == Family::Xmx { 0x7bff_7bff } else { unwritten }).unwrap();
        let angles = upload(device, &self.angles);
        let [q_norm, k_norm] = self.norms.each_ref().map(|norm| upload(device, norm));
        let bias = upload(device, &self.bias);
        let out_stride = q_heads * size + 5;
        let (mut all_rows, mut all_out) = (Vec::new(), Vec::new());
        let mut start = 0;
        for (rows, canvas) in passes {
            let mut guarded = self.qkv[start * self.stride..(start + rows) * self.stride].to_vec();
            guarded.extend([f32::from_bits(POISON); GUARD]);
            let qkv = upload(device, &guarded);
            let out = poisoned(device, rows * out_stride + GUARD);
            let packed = cache.query_bytes(q_heads, rows) / 4;
            let queries = match family {
                Family::Vector => qkv.clone(),
                Family::Xmx => poisoned(device, packed + GUARD),
            };
            let rotation = Rotation {
                qkv: &qkv,
                stride: self.stride,
                q_heads,
                k_at: self.k_at,
                v_at: self.v_at,
                bias: case.bias.then_some(&bias),
                angles: &angles,
                half_rotated: case.half_rotated,
                pairing: case.pairing,
                norms: case.normed.then_some((&q_norm, &k_norm)),
                value_norms: case.value_norms,
                queries_only: false,
                queries: Some(&queries),
                epsilon: EPSILON,
            };
            let mut launch = kernels.rotate_and_cache(device, &rotation, &cache, rows).unwrap();
            launch.set(ROTATE_START, Arg::I32(start as i32)).unwrap();
            device.enqueue(&launch).unwrap();
            let looks = Attention {
                q: &queries,
                stride: self.stride,
                out: &out,
                out_stride,
                q_heads,
                window: case.window,
                canvas,
                scale: self.scale,
                softcap: case.softcap,
            };
            let mut launch = kernels.attention(device, &looks, &cache, rows).unwrap();
            launch.set(ATTENTION_START, Arg::I32(start as i32)).unwrap();
            device.enqueue(&launch).unwrap();
            let rotated = download(device, &qkv);
            prop_assert!(is_poison(&rotated[rows * self.stride..]), "values behind the rows are written");
            match family {
                Family::Vector => all_rows.extend_from_slice(&rotated[..rows * self.stride]),
                Family::Xmx => {
                    prop_assert!(same_bits(&rotated, &guarded), "rows are written");
                    prop_assert!(
                        is_poison(&download(device, &queries)[packed..]),
                        "values behind the queries are written"
                    );
                    let found = xmx_queries(device, &cache, &queries, q_heads, rows).unwrap();
                    let mut as_rows = self.biased[start * self.stride..(start + rows) * self.stride].to_vec();
                    for (row, found) in
                        as_rows.chunks_exact_mut(self.stride).zip(found.chunks_exact(q_heads * head))
                    {
                        row[..q_heads * head].copy_from_slice(found);
                    }
                    all_rows.extend(as_rows);
                }
            }
            let out = download(device, &out);
            for row in out[..rows * out_stride].chunks_exact(out_stride) {
                all_out.extend_from_slice(&row[..q_heads * size]);
                prop_assert!(is_poison(&row[q_heads * size..]), "values between output rows are written");
            }
            prop_assert!(is_poison(&out[rows * out_stride..]), "values behind the output are written");
            start += rows;
        }
        let (keys, values) = cache.read(device, 0, cache.capacity).unwrap();
        let by_head = |numbers: &[f32], size: usize| -> Vec<Vec<Vec<f32>>> {
            let heads = numbers.chunks_exact(cache.capacity * size);
            heads.map(|head| head.chunks_exact(size).map(<[f32]>::to_vec).collect()).collect()
        };
        let (keys, values) = (by_head(&keys, head), by_head(&values, size));
        let end = case.rows.min(cache.capacity);
        let behind = |heads: &[Vec<Vec<f32>>], untouched: &dyn Fn(f32) -> bool| {
            heads.iter().all(|head| head[end..].iter().flatten().all(|&value| untouched(value)))
        };
        let as_filled = |value: f32| if family == Family::Xmx { value == 65504.0 } else { value.is_nan() };
        prop_assert!(
            behind(&keys, &|key| key.is_nan()) && behind(&values, &as_filled),
            "positions past the rows are written"
        );
        Ok(Attended { family, rows: all_rows, keys, values, out: all_out })
    }

    pub fn check_rotation(&self, found: &Attended) -> Result<(), TestCaseError> {
        let (case, head) = (&self.case, self.case.head);
        for row in 0..case.rows {
            let at = |start: usize| &found.rows[row * self.stride + start..][..head];
            for q in 0..case.kv_heads * case.group {
                let query = self.cut(found.family, self.rotated(row, q * head, &self.norms[0]));
                agree("a query", row, at(q * head), &query)?;
            }
            for kv in 0..case.kv_heads {
                let key = self.rotated(row, self.k_at + kv * head, &self.norms[1]);
                let key: Vec<Bounded> = key.into_iter().map(|bounded| self.kept(bounded)).collect();
                agree("a key", row, &found.keys[kv][row], &key)?;
                let value: Vec<Bounded> =
                    self.value(row, kv).into_iter().map(|bounded| self.kept(bounded)).collect();
                agree("a value", row, &found.values[kv][row], &value)?;
            }
            // What lies between and behind the heads, and the values themselves, stays.
            let others = (case.kv_heads * case.group * head..self.k_at)
                .chain(self.k_at + case.kv_heads * head..self.stride)
                .map(|i| row * self.stride + i);
            for i in others {
                prop_assert!(
                    found.rows[i].to_bits() == self.biased[i].to_bits(),
                    "value {} of the rows is written",
                    i
                );
            }
        }
        Ok(())
    }

    pub fn check_attention(&self, found: &Attended) -> Result<(), TestCaseError> {
        let (case, head, size) = (&self.case, self.case.head, self.case.value);
        let q_heads = case.kv_heads * case.group;
        for row in 0..case.rows {
            for q_head in 0..q_heads {
                let kv = q_head / case.group;
                let q = &found.rows[row * self.stride + q_head * head..][..head];
                let out = &found.out[(row * q_heads + q_head) * size..][..size];
                let seen = self.seen(row);
                let (mut largest_score, mut terms) = (0f64, 0.0);
                for position in seen.clone() {
                    let key = &found.keys[kv][position];
                    let score: f64 =
                        q.iter().zip(key).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
                    largest_score = largest_score.max(score * f64::from(self.scale));
                    terms += 1.0;
                }
                // An error of a score is a relative error of its weight.
                let mut score_off = (head as f64 + 4.0) * ULP * largest_score;
                if case.softcap > 0.0 {
                    score_off += 8.0 * ULP * largest_score.min(f64::from(case.softcap)); // the device's tanh
                }
                let (keys, values) = (&found.keys[kv], &found.values[kv]);
                let (scale, softcap) = (self.scale, case.softcap);
                let expected = attention_reference(case.kind, q, keys, values, seen.clone(), scale, softcap);
                for (i, (&found, &expected)) in out.iter().zip(&expected).enumerate() {
                    let column = seen.clone().map(|p| f64::from(values[p][i]));
                    let (low, high) = column
                        .clone()
                        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
                    let largest = low.abs().max(high.abs());
                    let rounding = (terms + 32.0) * ULP * largest + DENORMAL;
                    let found = f64::from(found);
                    // A mean of values lies among them, however coarse the scores are.
                    prop_assert!(
                        found >= low - rounding && found <= high + rounding,
                        "value {} of head {} in row {}: {} is outside of {}..{}",
                        i,
                        q_head,
                        row,
                        found,
                        low,
                        high
                    );
                    let off = rounding + (high - low) * 2.0 * score_off.min(1.0).exp_m1();
                    prop_assert!(
                        (found - expected).abs() <= off,
                        "value {} of head {} in row {}: {} for {} (within {})",
                        i,
                        q_head,
                        row,
                        found,
                        expected,
                        off
                    );
                }
            }
        }
        Ok(())
    }
}

/// Rotation, what is kept, and attention are right, and have the same bits in passes of any widths and over a ring.
pub fn holds(device: &Device, kernels: &Kernels, case: &Heads) -> Result<(), TestCaseError> {
    let heads = HeadRows::new(case);
    let before = case.rows - case.canvas;
    let whole: Vec<usize> = if before > 0 { vec![before] } else { Vec::new() };
    let together = heads.run(device, kernels, &whole, false)?;
    heads.check_rotation(&together)?;
    heads.check_attention(&together)?;
    let mut random = Random(!case.seed);
    let mut widths = Vec::new();
    let mut left = before;
    while left > 0 {
        let width = 1 + random.below(left.min(case.widest));
        widths.push(width);
        left -= width;
    }
    let apart = heads.run(device, kernels, &widths, false)?;
    prop_assert!(same_bits(&together.rows, &apart.rows), "rows differ in passes of {:?}", widths);
    prop_assert!(same_bits(&together.out, &apart.out), "attention differs in passes of {:?}", widths);
    prop_assert!(
        same_cache(&together.keys, &apart.keys) && same_cache(&together.values, &apart.values),
        "the cache differs"
    );
    let ring = heads.run(device, kernels, &widths, true)?;
    prop_assert!(same_bits(&together.out, &ring.out), "a ring differs in passes of {:?}", widths);
    Ok(())
}

/// The same where a context crosses several tiles and blocks, for windows that end at their borders or do not.
pub fn holds_over_a_long_context(device: &Device, kernels: &Kernels, head: usize, kind: CacheKind) {
    for window in [None, Some(1), Some(63), Some(64), Some(65), Some(300)] {
        let case = Heads {
            head,
            value: head,
            kind,
            kv_heads: 1,
            group: 3,
            rows: 330,
            widest: 330,
            window,
            half_rotated: head / 2,
            pairing: Pairing::Neighbours,
            normed: true,
            value_norms: false,
            shared: false,
            bias: false,
            softcap: if window.is_none() { 2.0 } else { 0.0 },
            canvas: 0,
            reach: 3.0,
            seed: 5,
        };
        let heads = HeadRows::new(&case);
        let together = heads.run(device, kernels, &[330], false).unwrap();
        heads.check_attention(&together).unwrap();
        for ring in [false, true] {
            let apart = heads.run(device, kernels, &[129, 1, 63, 64, 65, 8], ring).unwrap();
            assert!(same_bits(&together.out, &apart.out), "{case:?} ring {ring}");
        }
    }
}
