//! The temperature of each step of a canvas.

/// No step is colder: logits divided by less could leave the range of f32, and nothing would change any more.
const COLDEST: f64 = 1e-4;

/// Temperatures that fall in a line from the first step of a canvas to its last.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    t_min: f64,
    t_max: f64,
    steps: usize,
}

impl Schedule {
    /// From `t_max` at the first of `steps` steps towards `t_min`, which a step after the last would have.
    pub fn new(t_min: f64, t_max: f64, steps: usize) -> Self {
        Self { t_min, t_max, steps: steps.max(1) }
    }

    /// The same schedule, hotter or colder by `factor`.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        Self { t_min: self.t_min * factor, t_max: self.t_max * factor, ..self }
    }

    /// Most steps of a canvas.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The temperature of a step, counted from 0. The reference computes in f64 and divides f32 logits by the rounded
    /// result; so it is here.
    pub fn temperature(&self, step: usize) -> f32 {
        let remaining = self.steps.saturating_sub(step);
        let temperature = self.t_min + (self.t_max - self.t_min) * (remaining as f64 / self.steps as f64);
        temperature.max(COLDEST) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn falls_in_a_line_from_the_hottest_and_never_reaches_the_coldest() {
        let schedule = Schedule::new(0.4, 0.8, 4);
        let seen: Vec<f32> = (0..4).map(|step| schedule.temperature(step)).collect();
        assert_eq!(seen, [0.8, 0.7, 0.6, 0.5]);
        assert_eq!(Schedule::new(0.4, 0.8, 1).temperature(0), 0.8);
    }

    #[test]
    fn rounds_once_as_the_reference_does() {
        // The same formula in f32 gives other numbers at twelve of these steps.
        let schedule = Schedule::new(0.4, 0.8, 48);
        let in_f32 = |step: usize| 0.4f32 + (0.8f32 - 0.4f32) * ((48 - step) as f32 / 48.0);
        let unlike: Vec<usize> = (0..48).filter(|&step| schedule.temperature(step) != in_f32(step)).collect();
        assert_eq!(unlike, [2, 10, 11, 12, 13, 17, 25, 26, 38, 39, 42, 46]);
    }

    #[test]
    fn scaling_keeps_the_shape_and_stays_above_zero() {
        let schedule = Schedule::new(0.4, 0.8, 2).scaled(0.5);
        assert_eq!([schedule.temperature(0), schedule.temperature(1)], [0.4, 0.3]);
        assert_eq!(Schedule::new(0.0, 0.8, 4).scaled(1e-30).temperature(3), 1e-4);
    }
}
