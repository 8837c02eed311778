//! When a canvas is done before its last step.

/// Watches the steps of one canvas: it is done when its most probable tokens stay and their mean entropy is low.
#[derive(Debug, Clone)]
pub struct StopTest {
    /// Steps before that must have the same tokens, and what the mean entropy must stay below. `None`: never done.
    thresholds: Option<(usize, f32)>,
    last: Vec<u32>,
    /// Steps before the present one, without a gap, that had the same tokens.
    unchanged: usize,
}

impl StopTest {
    /// A test for a new canvas. Without either threshold it never is done.
    pub fn new(stability: Option<usize>, confidence: Option<f32>) -> Self {
        Self { thresholds: stability.zip(confidence), last: Vec::new(), unchanged: 0 }
    }

    /// Takes the most probable tokens of a step and the entropies (nats) of their rows; true if the canvas is done.
    pub fn done(&mut self, argmax: &[u32], entropies: &[f32]) -> bool {
        let Some((stability, confidence)) = self.thresholds else { return false };
        if self.last == argmax {
            self.unchanged = self.unchanged.saturating_add(1);
        } else {
            self.unchanged = 0;
            self.last.clear();
            self.last.extend_from_slice(argmax);
        }
        self.unchanged >= stability && mean(entropies) < confidence
    }
}

/// The mean, rounded once.
fn mean(values: &[f32]) -> f32 {
    let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
    (sum / values.len() as f64) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const SURE: [f32; 2] = [0.001, 0.002];

    #[test]
    fn needs_as_many_unchanged_steps_as_it_is_told() {
        for threshold in 0..4 {
            let mut stop = StopTest::new(Some(threshold), Some(0.005));
            let seen: Vec<bool> = (0..5).map(|_| stop.done(&[7, 8], &SURE)).collect();
            let wanted: Vec<bool> = (0..5).map(|step| step >= threshold).collect();
            assert_eq!(seen, wanted, "threshold {threshold}");
        }
    }

    #[test]
    fn a_change_begins_the_count_again() {
        let mut stop = StopTest::new(Some(2), Some(0.005));
        let seen: Vec<bool> = [1, 1, 2, 1, 1, 1, 1].map(|token| stop.done(&[token, 5], &SURE)).to_vec();
        assert_eq!(seen, [false, false, false, false, false, true, true]);
    }

    #[test]
    fn the_mean_must_be_below_the_threshold_and_not_at_it() {
        let mut stop = StopTest::new(Some(0), Some(0.25));
        assert!(!stop.done(&[1, 1], &[0.25, 0.25]));
        assert!(!stop.done(&[1, 1], &[0.0, 0.5]));
        assert!(stop.done(&[1, 1], &[0.0, 0.49]));
        assert!(!stop.done(&[1, 1], &[0.0, f32::NAN]));
    }

    #[test]
    fn without_a_threshold_every_step_runs() {
        for (stability, confidence) in [(None, Some(9.0)), (Some(0), None), (None, None)] {
            let mut stop = StopTest::new(stability, confidence);
            assert!((0..9).all(|_| !stop.done(&[1, 1], &SURE)));
        }
    }
}
