//! How long passes take of themselves, whatever else the machine does meanwhile.

use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// What this program has had of the machine so far.
#[derive(Debug, Clone, Copy)]
struct Had {
    at: Instant,
    /// Seconds of all processors together, and how often one was taken away for something else; none where the system does
    /// not say.
    processors: Option<(f64, i64)>,
}

impl Had {
    fn now() -> Self {
        let processors = getrusage(UsageWho::RUSAGE_SELF).ok().map(|used| {
            let micros = used.user_time().num_microseconds() + used.system_time().num_microseconds();
            (micros as f64 / 1e6, used.involuntary_context_switches())
        });
        Self { at: Instant::now(), processors }
    }
}

/// The fastest of several passes of one width.
///
/// A processor that is taken away in mid-pass makes it longer by as much as others work, which says nothing of the pass. So
/// passes that kept their processors count by the clock. Where none did, and the device is made of processors, what these
/// worked on a pass tells how long it would have taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fastest {
    /// Processors that the device is made of, if it is.
    processors: Option<usize>,
    clock: f64,
    undisturbed: f64,
    worked: f64,
}

impl Fastest {
    pub(super) fn new(processors: Option<usize>) -> Self {
        let [clock, undisturbed, worked] = [f64::INFINITY; 3];
        Self { processors, clock, undisturbed, worked }
    }

    /// Runs a pass.
    pub(super) fn time<E>(&mut self, pass: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let before = Had::now();
        pass()?;
        let after = Had::now();
        let took = (after.at - before.at).as_secs_f64();
        self.clock = self.clock.min(took);
        if let (Some((before, taken_before)), Some((after, taken_after))) =
            (before.processors, after.processors)
        {
            if taken_after == taken_before {
                self.undisturbed = self.undisturbed.min(took);
            }
            if let Some(processors) = self.processors.filter(|&processors| processors > 0) {
                self.worked = self.worked.min((after - before) / processors as f64);
            }
        }
        Ok(())
    }

    /// Seconds, as far as one width can tell.
    pub(super) fn seconds(&self) -> f64 {
        let known = if self.undisturbed.is_finite() { self.undisturbed } else { self.worked };
        if known.is_finite() && known > 0.0 { known.min(self.clock) } else { self.clock }
    }

    /// Seconds of each width, all measured in the same way.
    pub(super) fn all(widths: &[Self]) -> Vec<f64> {
        let of = |seconds: fn(&Self) -> f64| -> Vec<f64> { widths.iter().map(seconds).collect() };
        let ways = [of(|one| one.undisturbed), of(|one| one.worked)];
        let sound = |seconds: &Vec<f64>| seconds.iter().all(|&s| s.is_finite() && s > 0.0);
        ways.into_iter().find(sound).unwrap_or_else(|| of(|one| one.clock))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn fastest(clock: f64, undisturbed: f64, worked: f64) -> Fastest {
        Fastest { processors: Some(2), clock, undisturbed, worked }
    }

    #[test]
    fn widths_are_measured_in_one_way_the_least_disturbed_that_all_of_them_have() {
        let never = f64::INFINITY;
        let quiet = [fastest(1.0, 1.1, 0.9), fastest(2.0, 2.0, 1.8)];
        assert_eq!(Fastest::all(&quiet), [1.1, 2.0]);
        // One was never left alone.
        let busy = [fastest(9.0, never, 0.9), fastest(2.0, 2.0, 1.8)];
        assert_eq!(Fastest::all(&busy), [0.9, 1.8]);
        assert_eq!(busy[0].seconds(), 0.9);
        let card = [fastest(9.0, never, never), fastest(2.0, 2.0, never)];
        assert_eq!(Fastest::all(&card), [9.0, 2.0]);
        assert_eq!(card[0].seconds(), 9.0);
    }

    /// Waiting is no work: a pass that only waits for a processor is not long.
    #[test]
    fn what_processors_worked_is_told_from_time_that_went_by() {
        let mut waits = Fastest::new(Some(1));
        waits
            .time(|| {
                std::thread::sleep(std::time::Duration::from_millis(80));
                Ok::<_, ()>(())
            })
            .unwrap();
        assert!(waits.clock >= 0.08);
        let mut works = Fastest::new(Some(1));
        works
            .time(|| {
                let used = || getrusage(UsageWho::RUSAGE_SELF).unwrap().user_time().num_microseconds();
                let begin = used();
                while used() < begin + 30_000 {
                    std::hint::spin_loop();
                }
                Ok::<_, ()>(())
            })
            .unwrap();
        assert!(works.worked >= 0.03, "{works:?}");
    }
}
