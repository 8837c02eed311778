//! How often guesses of a kind came true lately.

/// What a test counts for after the next one of its kind: about the last 50 matter.
const DECAY: f32 = 0.98;

/// Tests that the first estimate counts for.
const PRIOR_WEIGHT: f32 = 3.0;

/// What is left of a count when another generation begins: the text is another one.
const CARRIED: f32 = 0.25;

/// Counts by kind of guess, the older the less they matter.
#[derive(Debug, Clone)]
pub struct Calibration {
    kinds: Vec<Kind>,
}

#[derive(Debug, Clone, Copy)]
struct Kind {
    /// The share of guesses that come true before there is any experience.
    prior: f32,
    hits: f32,
    tests: f32,
}

impl Calibration {
    /// No experience yet; `priors` are first estimates by kind, from 0 to 1.
    pub fn new(priors: impl IntoIterator<Item = f32>) -> Self {
        let kind = |prior| Kind { prior, hits: 0.0, tests: 0.0 };
        Self { kinds: priors.into_iter().map(kind).collect() }
    }

    /// The probability that a guess of a kind is what the model chooses; 0 for a kind there is not.
    pub fn trust(&self, kind: usize) -> f32 {
        self.kinds
            .get(kind)
            .map_or(0.0, |kind| (kind.hits + kind.prior * PRIOR_WEIGHT) / (kind.tests + PRIOR_WEIGHT))
    }

    /// A guess of a kind was or was not what the model chose.
    pub fn learn(&mut self, kind: usize, hit: bool) {
        if let Some(kind) = self.kinds.get_mut(kind) {
            kind.hits = kind.hits * DECAY + f32::from(u8::from(hit));
            kind.tests = kind.tests * DECAY + 1.0;
        }
    }

    /// Another generation begins.
    pub fn fade(&mut self) {
        for kind in &mut self.kinds {
            kind.hits *= CARRIED;
            kind.tests *= CARRIED;
        }
    }
}

/// The place of a value among rising bounds: how many of them it reaches.
pub(super) fn bucket<T: PartialOrd>(value: T, bounds: &[T]) -> usize {
    bounds.iter().take_while(|bound| value >= **bound).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trust_follows_what_came_true_and_forgets() {
        let mut calibration = Calibration::new([0.5, 0.75]);
        assert_eq!((calibration.trust(0), calibration.trust(1), calibration.trust(2)), (0.5, 0.75, 0.0));
        (0..200).for_each(|_| calibration.learn(0, true));
        assert!(calibration.trust(0) > 0.95);
        assert_eq!(calibration.trust(1), 0.75);
        (0..200).for_each(|_| calibration.learn(0, false));
        assert!(calibration.trust(0) < 0.05, "{}", calibration.trust(0));
        (0..200).for_each(|i| calibration.learn(0, i % 4 == 0));
        assert!((calibration.trust(0) - 0.25).abs() < 0.05, "{}", calibration.trust(0));
        calibration.learn(9, true);
    }

    #[test]
    fn a_new_generation_is_believed_sooner() {
        let mut stale = Calibration::new([0.5]);
        (0..100).for_each(|_| stale.learn(0, true));
        let mut faded = stale.clone();
        faded.fade();
        (0..10).for_each(|_| (stale.learn(0, false), faded.learn(0, false)).0);
        assert!(faded.trust(0) < stale.trust(0) - 0.1);
    }

    #[test]
    fn buckets_count_the_bounds_that_are_reached() {
        let found: Vec<usize> = [0, 1, 2, 5, 99].map(|value| bucket(value, &[1, 2, 4])).to_vec();
        assert_eq!(found, [0, 1, 2, 3, 3]);
    }
}
