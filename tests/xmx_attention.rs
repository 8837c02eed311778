//! Attention of the `xmx` family against f64: every head size, shared heads, causal rows, windows, canvases that see all, odd
//! lengths, outputs among poison that must survive; and the same bits of a row whatever other rows there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;
mod xmx_support;

use axe::device::Purpose;
use axe::ops::{CacheKind, Xmx, XmxAttention, XmxCache, attention_reference};
use half::f16;
use ops_support::*;
use proptest::prelude::*;
use xmx_support::*;

#[derive(Debug, Clone)]
struct Case {
    head_size: usize,
    kv_heads: usize,
    group: usize,
    before: usize,
    rows: usize,
    causal: bool,
    window: usize,
    seed: u64,
}

impl Case {
    fn strategy(head_size: usize) -> impl Strategy<Value = Self> {
        let windows = prop_oneof![Just(0usize), 1..=9usize, 20..=200usize];
        let shape = (1..=2usize, 1..=3usize, 0..=300usize, 1..=40usize);
        (shape, any::<bool>(), windows, any::<u64>()).prop_map(
            move |((kv_heads, group, before, rows), causal, window, seed)| Self {
                head_size,
                kv_heads,
                group,
                before,
                rows,
                causal,
                // A canvas sees all that there is.
                window: if causal { window } else { 0 },
                seed,
            },
        )
    }
}

/// Results of rows `first..first + rows`; the cache holds all positions.
fn attend(
    bench: &Bench,
    case: &Case,
    [q, k, v]: [&[f32]; 3],
    first: usize,
    rows: usize,
) -> Result<Vec<f32>, TestCaseError> {
    let device = &bench.device;
    let count = case.before + case.rows;
    let (width, kv_width) = (case.kv_heads * case.group * case.head_size, case.kv_heads * case.head_size);
    let cache = XmxCache::new(device, case.kv_heads, case.head_size, count + 5).unwrap();
    let (keys, values) = (upload(device, k), upload(device, v));
    // What stands at positions past the last row is from another time.
    let stale = upload(device, &vec![30.0; 5 * kv_width]);
    bench.run([
        bench.xmx.store_keys(device, &cache, &stale, &stale, 5, count, [kv_width; 2]).unwrap(),
        bench.xmx.store_keys(device, &cache, &keys, &values, count, 0, [kv_width; 2]).unwrap(),
    ]);
    let heads = case.kv_heads * case.group;
    let looks = XmxAttention {
        heads,
        rows,
        position: case.before + first,
        count: if case.causal { case.before + first + rows } else { count },
        causal: case.causal,
        window: case.window,
        scale: 0.5,
    };
    let queries = upload(device, &q[first * width..][..rows * width]);
    let packed = device.alloc(Purpose::Scratch, Xmx::query_bytes(&cache, heads, rows)).unwrap();
    device.fill(&packed, POISON).unwrap();
    let stride = width + 3;
    let out = poisoned(device, rows * stride + GUARD);
    bench.run(bench.xmx.attend(device, &cache, &looks, &queries, width, &packed, &out, stride).unwrap());
    let found = download(device, &out);
    prop_assert!(is_poison(&found[rows * stride..]), "values behind the output are written");
    for line in found[..rows * stride].chunks(stride) {
        prop_assert!(is_poison(&line[width..]), "the gap behind a row is written");
    }
    Ok(found[..rows * stride].chunks(stride).flat_map(|line| line[..width].to_vec()).collect())
}

fn holds(bench: &Bench, case: &Case) -> Result<(), TestCaseError> {
    let mut random = Random(case.seed);
    let count = case.before + case.rows;
    let (size, kv_width) = (case.head_size, case.kv_heads * case.head_size);
    let width = kv_width * case.group;
    let mut take = |n: usize, factor: f32| -> Vec<f32> { (0..n).map(|_| random.unit() * factor).collect() };
    let (q, k, v) = (take(case.rows * width, 1.0), take(count * kv_width, 1.0), take(count * kv_width, 4.0));
    let all = [&q[..], &k[..], &v[..]];
    let found = attend(bench, case, all, 0, case.rows)?;
    let by_position = |values: &[f32], kv: usize| -> Vec<Vec<f32>> {
        values.chunks(kv_width).map(|row| row[kv * size..][..size].to_vec()).collect()
    };
    for kv in 0..case.kv_heads {
        let (keys, values) = (by_position(&k, kv), by_position(&v, kv));
        for r in 0..case.rows {
            let at = case.before + r;
            let first = if case.window > 0 { (at + 1).saturating_sub(case.window) } else { 0 };
            let seen = first..=if case.causal { at } else { count - 1 };
            for g in 0..case.group {
                let head = (kv * case.group + g) * size;
                // Queries are rounded after the scale, a power of two here.
                let query: Vec<f32> =
                    q[r * width + head..][..size].iter().map(|&x| f16::from_f32(x).to_f32()).collect();
                let expected =
                    attention_reference(CacheKind::F16, &query, &keys, &values, seen.clone(), 0.5, 0.0);
                for (i, expected) in expected.iter().enumerate() {
                    let found = f64::from(found[r * width + head + i]);
                    // Weights are rounded to f16: half a bit in the eleventh of what is at most 4 in size.
                    prop_assert!(
                        (found - expected).abs() <= 4.0 * 2f64.powi(-11) + 1e-4,
                        "{case:?}, row {r}, head {kv}/{g}, value {i}: {found}, {expected} expected"
                    );
                }
            }
        }
    }
    let (first, rows) = (case.rows / 3, case.rows.div_ceil(4));
    let alone = attend(bench, case, all, first, rows)?;
    prop_assert!(
        same_bits(&alone, &found[first * width..][..rows * width]),
        "{case:?}: other bits among fewer rows"
    );
    Ok(())
}

fn every_case(head_size: usize) {
    let Some(bench) = bench() else { return };
    check(8, &Case::strategy(head_size), |case| holds(&bench, &case));
}

#[test]
fn heads_of_64() {
    every_case(64);
}

#[test]
fn heads_of_128() {
    every_case(128);
}

#[test]
fn heads_of_256() {
    every_case(256);
}

#[test]
fn heads_of_512() {
    every_case(512);
}
