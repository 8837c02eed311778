//! How often the log hears of something that takes long: soon after it began, and ever more rarely.

use std::time::{Duration, Instant};

/// Nothing is said of what takes less.
const FIRST: Duration = Duration::from_secs(2);

/// Says when there is something to be said.
#[derive(Debug)]
pub(super) struct Pace {
    began: Instant,
    next: Duration,
}

impl Pace {
    pub(super) fn new(began: Instant) -> Self {
        Self { began, next: FIRST }
    }

    /// Whether it is time again: after 2 seconds, 4, 8, and every 16 from then on.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.began);
        let due = elapsed >= self.next;
        if due {
            self.next = elapsed + elapsed.clamp(FIRST, 8 * FIRST);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_loads_say_nothing_and_long_ones_some_lines() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let told: Vec<u64> =
            (0..64).filter(|&second| pace.is_due(began + Duration::from_secs(second))).collect();
        assert_eq!(told, [2, 4, 8, 16, 32, 48]);
        assert!(!Pace::new(began).is_due(began + FIRST - Duration::from_millis(1)));
    }
}
