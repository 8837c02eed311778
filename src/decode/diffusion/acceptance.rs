//! Which positions of a canvas keep what was drawn for them.

use std::cmp::Ordering;

/// Which positions are accepted: in the order of rising entropy (nats; equal ones in their own order) all before which
/// the entropies add up to no more than `bound`. So the surest one always is, and every position of entropy 0.
///
/// The running sum is kept in f64 and rounded to f32 at each position, the position's own entropy is subtracted
/// again in f32, and `bound` is compared in f32: that is what the reference does, and decides what lies on the edge.
/// A position whose entropy is not a number is never accepted.
pub fn accept(entropies: &[f32], bound: f32) -> Vec<bool> {
    let mut order: Vec<usize> = (0..entropies.len()).collect();
    order.sort_by(|&a, &b| rising(entropies[a], entropies[b]));
    let mut accepted = vec![false; entropies.len()];
    let mut sum = 0f64;
    for place in order {
        let own = entropies[place];
        sum += f64::from(own);
        accepted[place] = sum as f32 - own <= bound;
    }
    accepted
}

/// Numbers rising, what is none behind them.
fn rising(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_surest_is_accepted_whatever_its_entropy() {
        assert_eq!(accept(&[3.0, 2.0, 4.0], 0.1), [false, true, false]);
        assert_eq!(accept(&[3.0], 0.1), [true]);
        assert_eq!(accept(&[], 0.1), Vec::<bool>::new());
    }

    #[test]
    fn the_sum_before_a_position_counts_and_not_its_own() {
        assert_eq!(accept(&[0.5, 0.0625, 0.7, 0.0625], 0.124), [false, true, false, true]);
        assert_eq!(accept(&[0.5, 0.0625, 0.7, 0.0625], 0.125), [true, true, false, true]);
    }

    #[test]
    fn the_edge_is_where_the_reference_rounds_it_to() {
        // PyTorch says so: 0.04 + 0.06 + 0.5, rounded, less 0.5 is a little more than 0.1.
        assert_eq!(accept(&[0.5, 0.06, 0.7, 0.04], 0.1), [false, true, false, true]);
    }

    #[test]
    fn certain_positions_are_all_accepted() {
        assert_eq!(accept(&[0.0, 9.0, 0.0, 9.0], 0.1), [true, true, true, false]);
    }

    #[test]
    fn of_equal_entropies_the_first_come_first() {
        assert_eq!(accept(&[1.0; 4], 1.5), [true, true, false, false]);
    }

    #[test]
    fn what_is_no_number_is_never_accepted_and_hides_nothing() {
        let nan = f32::NAN;
        assert_eq!(accept(&[nan, 0.2, -nan, 0.1], 0.5), [false, true, false, true]);
        assert_eq!(accept(&[nan; 2], 0.5), [false; 2]);
        assert_eq!(accept(&[f32::INFINITY, 0.1], 0.5), [false, true]);
    }
}
