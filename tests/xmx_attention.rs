//! Attention of the `xmx` family against f64: heads of every size on their way into the cache and looks at it, shared heads, causal
//! rows, windows and rings, canvases, caps, odd lengths, outputs among poison that must survive; and the same bits of a row
//! whatever other rows there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod heads_support;
mod ops_support;
mod support;
mod xmx_support;

use axe::device::Device;
use axe::ops::{CacheKind, Family, Kernels};
use heads_support::{Heads, holds, holds_over_a_long_context};
use ops_support::check;

fn kernels() -> Option<(Device, Kernels)> {
    let device = xmx_support::bench()?.device;
    let kernels = Kernels::with_xmx(&device).unwrap()?;
    Some((device, kernels))
}

fn every_case(cases: u32, most_rows: usize, sizes: &[usize]) {
    let Some((device, kernels)) = kernels() else { return };
    check(cases, &Heads::of_sizes(sizes), |mut case| {
        // What the family has kernels for.
        (case.kind, case.value) = (CacheKind::F16, case.head);
        case.rows = 1 + (case.rows - 1) % most_rows;
        case.canvas = case.canvas.min(case.rows);
        assert_eq!(kernels.products().attention(case.kind, case.head), Family::Xmx);
        holds(&device, &kernels, &case)
    });
}

#[test]
fn small_heads() {
    every_case(60, 150, &[16, 32]);
}

#[test]
fn heads_of_64_and_128() {
    every_case(40, 100, &[64, 128]);
}

#[test]
fn heads_of_256() {
    every_case(16, 60, &[256]);
}

#[test]
fn heads_of_512() {
    every_case(12, 40, &[512]);
}

#[test]
fn a_long_context_crosses_several_blocks() {
    let Some((device, kernels)) = kernels() else { return };
    for head in [32, 64, 256] {
        holds_over_a_long_context(&device, &kernels, head, CacheKind::F16);
    }
}

#[test]
fn what_has_no_kernels_is_the_vector_familys() {
    let Some((_, kernels)) = kernels() else { return };
    let products = kernels.products();
    for size in [48, 80, 1024] {
        assert_eq!(products.attention(CacheKind::F16, size), Family::Vector);
    }
    assert_eq!(products.attention(CacheKind::F32, 64), Family::Vector);
    assert_eq!(products.query_bytes(CacheKind::F32, [4, 2, 64], 3), 0);
    // 6 looks of each of 2 heads, 16 at least, in two terms, with a factor each.
    assert_eq!(products.query_bytes(CacheKind::F16, [4, 2, 64], 3), 2 * 16 * (64 * 4 + 4));
}
