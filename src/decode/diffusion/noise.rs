//! The random ids that fill a canvas at first, and those that replace what was not accepted.
//!
//! Both come from Philox under the seed as key. A counter is (stream, row, step, canvas). The samples of the head use
//! (token / 4, row, step, canvas) under the same key, whose first word is always below 2^30: the streams here start at
//! 2^31, so that no draw is ever used twice.

use crate::decode::philox::philox;

/// The first canvas.
const INITIAL: u32 = 1 << 31;
/// What replaces tokens that were not accepted.
const RENOISE: u32 = (1 << 31) + 1;

/// The id at a row of a new canvas, counted from 0 within its generation: uniform below `vocabulary`.
pub fn initial(seed: u64, canvas: u32, row: usize, vocabulary: usize) -> u32 {
    uniform(seed, [INITIAL, row as u32, 0, canvas], vocabulary)
}

/// The id that replaces what a step of a canvas did not accept at a row: uniform below `vocabulary`.
pub fn renoise(seed: u64, canvas: u32, step: u32, row: usize, vocabulary: usize) -> u32 {
    uniform(seed, [RENOISE, row as u32, step, canvas], vocabulary)
}

/// A whole number below `bound` (0 if there is none): the high half of 64 random bits times the bound. Some numbers
/// are likelier than others by at most `bound` / 2^64, 1.4e-14 of a probability for a vocabulary of 262,144.
fn uniform(seed: u64, counter: [u32; 4], bound: usize) -> u32 {
    let words = philox([seed as u32, (seed >> 32) as u32], counter);
    let bits = (u64::from(words[1]) << 32) | u64::from(words[0]);
    ((u128::from(bits) * bound as u128) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_spread_evenly_over_the_vocabulary() {
        let mut counts = [0usize; 100];
        for canvas in 0..10 {
            for row in 0..10_000 {
                counts[initial(3, canvas, row, 100) as usize] += 1;
                counts[renoise(3, canvas, 1, row, 100) as usize] += 1;
            }
        }
        // Chi-squared with 99 degrees of freedom: over 160 once in 10,000 seeds.
        let expected = 2000.0;
        let chi: f64 = counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum();
        assert!(chi < 160.0, "chi-squared {chi}");
    }

    #[test]
    fn every_part_of_the_key_changes_the_draws() {
        let draw = |seed, canvas, step| -> Vec<u32> {
            (0..32).map(|row| renoise(seed, canvas, step, row, 1 << 18)).collect()
        };
        let base = draw(1, 0, 0);
        assert_eq!(base, draw(1, 0, 0));
        for other in [draw(2, 0, 0), draw(1 << 32, 0, 0), draw(1, 1, 0), draw(1, 0, 1)] {
            assert!(base.iter().zip(&other).filter(|(a, b)| a == b).count() < 3);
        }
        let first: Vec<u32> = (0..32).map(|row| initial(1, 0, row, 1 << 18)).collect();
        assert!(base.iter().zip(&first).filter(|(a, b)| a == b).count() < 3);
    }

    #[test]
    fn known_draws_stay_what_they_are() {
        let first: Vec<u32> = (0..4).map(|row| initial(42, 0, row, 262_144)).collect();
        let again: Vec<u32> = (0..4).map(|row| renoise(42, 1, 3, row, 262_144)).collect();
        // Worked out from the published definition of the generator, apart from this program.
        assert_eq!(first, [49_279, 166_222, 176_297, 25_960]);
        assert_eq!(again, [31_629, 244_576, 123_607, 211_790]);
    }
}
