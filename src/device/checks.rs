//! What was found when kernels were compared with their references, for the operator.

use serde::Serialize;

/// How a kernel did in comparisons with its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// The kernel and its variant.
    pub kernel: String,
    /// Whether every number was as near to the reference's as it has to be.
    pub passed: bool,
    /// Comparisons.
    pub runs: usize,
    /// The largest deviation, as a share of what is allowed.
    pub worst: f64,
}

/// All comparisons on one device.
#[derive(Debug, Default)]
pub(super) struct Checks(Vec<Check>);

impl Checks {
    pub(super) fn note(&mut self, kernel: &str, worst: f64, passed: bool) {
        match self.0.iter_mut().find(|check| check.kernel == kernel) {
            Some(check) => {
                check.passed &= passed;
                check.runs += 1;
                check.worst = check.worst.max(worst);
            }
            None => self.0.push(Check { kernel: kernel.to_owned(), passed, runs: 1, worst }),
        }
    }

    pub(super) fn all(&self) -> Vec<Check> {
        self.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_is_not_forgotten() {
        let mut checks = Checks::default();
        for (kernel, worst, passed) in
            [("a", 0.2, true), ("a", 3.0, false), ("a", 0.1, true), ("b", 0.5, true)]
        {
            checks.note(kernel, worst, passed);
        }
        let [a, b] = checks.all().try_into().unwrap();
        assert_eq!((a.passed, a.runs, a.worst), (false, 3, 3.0));
        assert!(b.passed);
    }
}
