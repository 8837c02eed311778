//! Acceptance against the rule as it is written, on entropies of every kind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use axe::decode::diffusion::accept;
use proptest::prelude::*;

/// The rule, row by row: the sum of all that are surer, or as sure and earlier.
fn naive(entropies: &[f32], bound: f32) -> Vec<bool> {
    let before = |row: usize| {
        let own = entropies[row];
        let earlier = |&(other, &h): &(usize, &f32)| h < own || (h == own && other < row);
        entropies.iter().enumerate().filter(earlier).map(|(_, &h)| f64::from(h)).sum::<f64>()
    };
    (0..entropies.len()).map(|row| before(row) <= f64::from(bound)).collect()
}

/// Whole 1024ths, many of them equal: sums are exact in f32, so that sums at the bound are at the bound.
fn exact() -> impl Strategy<Value = f32> {
    prop_oneof![0u32..4, 0u32..64, 0u32..12_000].prop_map(|n| n as f32 / 1024.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn is_the_rule_where_sums_are_exact(
        entropies in proptest::collection::vec(exact(), 0..64),
        bound in (0u32..2048).prop_map(|n| n as f32 / 1024.0),
    ) {
        prop_assert_eq!(accept(&entropies, bound), naive(&entropies, bound));
    }

    #[test]
    fn takes_the_surest_rows_as_far_as_the_bound_reaches(
        entropies in proptest::collection::vec(0f32..12.0, 1..256),
        bound in 1e-3f32..20.0,
    ) {
        let accepted = accept(&entropies, bound);
        let mut kept: Vec<f32> =
            entropies.iter().zip(&accepted).filter(|(_, kept)| **kept).map(|(&h, _)| h).collect();
        let lost = entropies.iter().zip(&accepted).filter(|(_, kept)| !**kept).map(|(&h, _)| h);
        kept.sort_by(f32::total_cmp);
        let (last, before) = kept.split_last().expect("one at least is accepted");
        prop_assert!(lost.clone().all(|h| h >= *last));
        let sum: f64 = before.iter().map(|&h| f64::from(h)).sum();
        prop_assert!(sum <= f64::from(bound) * (1.0 + 1e-5) + 1e-5);
        // One more would have been too many.
        if lost.clone().next().is_some() {
            prop_assert!(sum + f64::from(*last) > f64::from(bound) * (1.0 - 1e-5) - 1e-5);
        }
    }

    #[test]
    fn moves_with_the_rows(entropies in proptest::collection::hash_set(0u32..100_000, 2..64), turn in 0usize..64) {
        let entropies: Vec<f32> = entropies.into_iter().map(|n| n as f32 / 65_536.0).collect();
        let turn = turn % entropies.len();
        let mut turned = entropies.clone();
        turned.rotate_left(turn);
        let mut wanted = accept(&entropies, 0.3);
        wanted.rotate_left(turn);
        prop_assert_eq!(accept(&turned, 0.3), wanted);
    }
}
