//! One look over a row of logits: its best tokens, and whether all of it is sound.

/// Tokens that [`RowTop`] names.
pub const TOP: usize = 8;

/// Logits that share one largest value; only groups whose largest counts are looked at again.
pub(super) const GROUP: usize = 128;

/// The best tokens of a row, and whether its numbers can be trusted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowTop {
    /// A logit is not finite.
    pub bad: bool,
    /// Tokens with the largest logits, best first, of equals the lower one first. Places past the vocabulary's size hold
    /// `u32::MAX`.
    pub ids: [u32; TOP],
    /// Their logits; minus infinity past the vocabulary's size.
    pub logits: [f32; TOP],
}

impl RowTop {
    /// Tokens and logits, best first.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, f32)> + '_ {
        let known = |(_, logit): &(u32, f32)| *logit > f32::NEG_INFINITY;
        self.ids.iter().copied().zip(self.logits.iter().copied()).take_while(known)
    }
}

/// The best tokens of a row.
pub fn top_of(logits: &[f32]) -> RowTop {
    let mut top = RowTop { bad: false, ids: [u32::MAX; TOP], logits: [f32::NEG_INFINITY; TOP] };
    for (group, values) in logits.chunks(GROUP).enumerate() {
        let (largest, sound) = survey(values);
        top.bad |= !sound;
        if largest <= top.logits[TOP - 1] {
            continue;
        }
        for (place, &logit) in values.iter().enumerate() {
            if logit > top.logits[TOP - 1] {
                // Behind its equals, which came earlier and so have lower ids.
                let at = top.logits.partition_point(|&other| other >= logit);
                top.ids.copy_within(at..TOP - 1, at + 1);
                top.logits.copy_within(at..TOP - 1, at + 1);
                top.ids[at] = (group * GROUP + place) as u32;
                top.logits[at] = logit;
            }
        }
    }
    top
}

/// The largest of some logits, and whether all of them are finite.
pub(super) fn survey(values: &[f32]) -> (f32, bool) {
    const LANES: usize = 16;
    let (blocks, rest) = values.as_chunks::<LANES>();
    let mut largest = [f32::NEG_INFINITY; LANES];
    let mut zeros = [0f32; LANES]; // not a number as soon as one is not finite
    for block in blocks {
        for lane in 0..LANES {
            largest[lane] = if block[lane] > largest[lane] { block[lane] } else { largest[lane] };
            zeros[lane] += block[lane] * 0.0;
        }
    }
    let most = largest.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &v| if v > most { v } else { most });
    (most, zeros.iter().all(|zero| *zero == 0.0) && rest.iter().all(|v| v.is_finite()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(logits: &[f32]) -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(TOP);
        all
    }

    #[test]
    fn the_best_are_those_of_a_sort_and_ties_go_to_the_lower_id() {
        for length in [1, 7, 8, 9, 127, 128, 129, 1000, 5003] {
            for steps in [3u32, 50, 100_000] {
                let logits: Vec<f32> = (0..length as u32)
                    .map(|i| ((i.wrapping_mul(2_654_435_761) >> 7) % steps) as f32 * 0.25 - 5.0)
                    .collect();
                let top = top_of(&logits);
                assert!(!top.bad);
                assert_eq!(top.pairs().collect::<Vec<_>>(), sorted(&logits), "{length} of {steps}");
            }
        }
        assert_eq!(top_of(&[]).pairs().count(), 0);
    }

    #[test]
    fn a_number_that_is_none_shows_wherever_it_is() {
        for length in [1, 15, 16, 17, 300] {
            for place in 0..length {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut logits = vec![1.0; length];
                    assert!(!top_of(&logits).bad);
                    logits[place] = bad;
                    assert!(top_of(&logits).bad, "{bad} at {place} of {length}");
                }
            }
        }
    }
}
