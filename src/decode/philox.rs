//! Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as
//! 1, 2, 3", 2011): the same key and counter give the same four words, whatever came before.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Four random words for a counter under a key.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut key, mut c) = (key, counter);
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// Standard Gumbel noise of one token at one position, from -3.2 to 22.9: depends on seed, position and token only.
pub fn gumbel(seed: u64, position: usize, token: u32) -> f64 {
    gumbel_of(words(seed, position, token / 4)[token as usize % 4])
}

/// The random words of the four tokens from `4 * group` on at one position.
pub fn words(seed: u64, position: usize, group: u32) -> [u32; 4] {
    let position = position as u64;
    philox([seed as u32, (seed >> 32) as u32], [position as u32, (position >> 32) as u32, group, 0])
}

/// The Gumbel noise that a random word stands for; the larger the word, the larger the noise.
pub fn gumbel_of(word: u32) -> f64 {
    let uniform = (f64::from(word) + 0.5) / f64::from(u32::MAX).mul_add(1.0, 1.0);
    -(-uniform.ln()).ln()
}

/// The seed of one of several replies to the same request: that of the first is the request's own.
pub fn choice_seed(seed: u64, choice: usize) -> u64 {
    if choice == 0 {
        return seed;
    }
    let choice = choice as u64;
    // Noise has 0 for the last word.
    let words =
        philox([seed as u32, (seed >> 32) as u32], [choice as u32, (choice >> 32) as u32, 0, u32::MAX]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the generator.
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn each_choice_has_a_seed_of_its_own() {
        let seeds: Vec<u64> = (0..100).map(|choice| choice_seed(7, choice)).collect();
        assert_eq!(seeds[0], 7);
        let different: std::collections::HashSet<&u64> = seeds.iter().collect();
        assert_eq!(different.len(), 100);
        assert_eq!(choice_seed(7, 3), seeds[3]);
        assert_ne!(choice_seed(8, 3), seeds[3]);
    }

    #[test]
    fn noise_stays_in_its_bounds_and_has_the_mean_of_a_gumbel() {
        let noise: Vec<f64> = (0..100_000).map(|token| gumbel(7, 3, token)).collect();
        assert!(noise.iter().all(|g| (-3.2..22.9).contains(g)));
        let mean = noise.iter().sum::<f64>() / noise.len() as f64;
        assert!((mean - 0.5772).abs() < 0.02, "mean {mean}"); // Euler's constant
    }
}
