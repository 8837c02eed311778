//! The largest logits of random rows against a plain sort: odd sizes, many equal values, and numbers that are none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod ops_support;
mod support;

use axe::ops::{RowTop, TOP, choice_reference, choice_values, read_choices};
use ops_support::*;
use proptest::prelude::*;

/// Rows of logits.
#[derive(Debug, Clone)]
struct Rows {
    limit: usize,
    /// Values behind those that count.
    gap: usize,
    rows: usize,
    /// Different values there are about.
    values: usize,
    /// One in so many logits is not finite; none for 0.
    odd: usize,
    seed: u64,
}

impl Rows {
    fn strategy() -> impl Strategy<Value = Self> {
        let most = if simulated() { 300 } else { 5000 };
        let limit = prop_oneof![1..=40usize, 1..=most];
        let values = prop_oneof![Just(1usize), Just(5), Just(100), Just(1 << 20)];
        let odd = prop_oneof![3 => Just(0usize), 1 => Just(3), 2 => Just(400)];
        (limit, 0..70usize, 1..=17usize, values, odd, any::<u64>())
            .prop_map(|(limit, gap, rows, values, odd, seed)| Self { limit, gap, rows, values, odd, seed })
    }

    fn logits(&self) -> (usize, Vec<f32>) {
        let mut random = Random(self.seed);
        let stride = self.limit.next_multiple_of(16) + self.gap;
        let logits = (0..self.rows * stride).map(|i| {
            // What does not count is anything, and mostly larger.
            if i % stride >= self.limit {
                return [f32::NAN, f32::INFINITY, 1e30][random.below(3)];
            }
            if self.odd > 0 && random.below(self.odd) == 0 {
                return [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random.below(3)];
            }
            (random.below(self.values) as f32 - self.values as f32 / 2.0) * 0.25
        });
        (stride, logits.collect())
    }
}

fn same(found: &RowTop, expected: &RowTop) -> bool {
    found.bad == expected.bad
        && found.ids == expected.ids
        && same_bits(&found.logits.map(|logit| logit + 0.0), &expected.logits.map(|logit| logit + 0.0))
}

#[test]
fn the_largest_logits_are_found_in_their_order() {
    let (device, kernels) = open();
    check(if simulated() { 30 } else { 300 }, &Rows::strategy(), |case| {
        let (stride, logits) = case.logits();
        let buffer = upload(&device, &logits);
        let values = choice_values(case.rows);
        let choices = poisoned(&device, values + GUARD);
        let launch = kernels.choose(&device, &buffer, stride, case.limit, case.rows, &choices).unwrap();
        device.enqueue(&launch).unwrap();
        let found = read_choices(&device, &choices, case.rows).unwrap();
        prop_assert!(
            is_poison(&download(&device, &choices)[values..]),
            "values behind the choices are written"
        );
        prop_assert!(same_bits(&download(&device, &buffer), &logits), "the logits are written");
        prop_assert_eq!(found.len(), case.rows);
        for (row, found) in found.iter().enumerate() {
            let expected = choice_reference(&logits[row * stride..][..case.limit]);
            prop_assert!(same(found, &expected), "row {}: {:?} for {:?}", row, found, expected);
        }
        Ok(())
    });
}

#[test]
fn the_reference_puts_lower_ids_first() {
    let top = choice_reference(&[1.0, 3.0, f32::NAN, 3.0, 2.0]);
    assert!(top.bad);
    assert_eq!(top.ids[..5], [1, 3, 4, 0, u32::MAX]);
    assert_eq!(top.logits[..4], [3.0, 3.0, 2.0, 1.0]);
    assert!(top.logits[4..].iter().all(|&logit| logit == f32::NEG_INFINITY));
    let top = choice_reference(&[0.0; 3 * TOP]);
    assert!(!top.bad);
    assert_eq!(top.ids, [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (device, kernels) = open();
    let (logits, choices) = (upload(&device, &[0.0; 64]), poisoned(&device, choice_values(2)));
    assert!(kernels.choose(&device, &logits, 32, 20, 2, &choices).is_ok());
    for (stride, limit, rows) in [(32, 0, 1), (32, 20, 0), (16, 20, 2), (40, 40, 2), (16, 16, 3)] {
        let refused = kernels.choose(&device, &logits, stride, limit, rows, &choices);
        assert!(refused.is_err(), "{limit} logits in {rows} rows, {stride} apart");
    }
}
