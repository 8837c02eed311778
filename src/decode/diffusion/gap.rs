//! How long the gap between two texts is, and what stands around it on the canvas.
//!
//! A canvas has a fixed number of rows, so a gap must have its length before it can be denoised. Nobody knows it, but the
//! model tells a wrong one: rows of the suffix then hold tokens that it would not put there. Often it even puts the suffix
//! where that belongs.

use std::iter::repeat_n;

use crate::model::diffusion_gemma::RowChoice;

/// Steps that a length is tried for.
const TRIAL: usize = 2;

/// Looks for the length of a gap. Lengths of 1, 2, 3, 4, 6, 8, 12, … tokens are denoised for some steps each, in between
/// those at which the model itself has written the suffix, then lengths between the one that fits best and its neighbours,
/// ever closer; the best of all is denoised to the end. One that is done while it is tried, with a suffix of which the model
/// takes every row for what it is, ends the search.
#[derive(Debug)]
pub struct Gap {
    /// Rows of a canvas behind the text before the gap.
    rows: usize,
    around: Around,
    /// Most tokens of the gap.
    most: usize,
    /// Rows of the suffix that are on the canvas at any length.
    judged: usize,
    /// What a row counts, in nats, at which the model takes the suffix for something else, or ends.
    surprise: f32,
    /// Lengths to be tried, the next one last.
    ladder: Vec<usize>,
    /// Lengths that were tried, in rising order, and their misfit.
    tried: Vec<(usize, f32)>,
    /// Most rows of the suffix that the model has put where some length has them.
    agreed: usize,
    length: usize,
    settled: bool,
}

/// What stands around a gap.
#[derive(Debug, Clone, Default)]
pub struct Around {
    /// The text before it, as far as it is on the canvas.
    pub before: Vec<u32>,
    /// The text behind it.
    pub suffix: Vec<u32>,
    /// Fills what the suffix leaves of the canvas.
    pub fill: u32,
    /// Tokens that end a text: in a gap, they say that nothing is missing.
    pub ends: Vec<u32>,
}

impl Gap {
    /// A gap of `most` tokens at most, on a canvas of `rows` whose ids are below `vocabulary`. The suffix has a quarter of
    /// the canvas, if it needs as much.
    pub fn new(rows: usize, around: Around, most: usize, vocabulary: usize) -> Self {
        let suffix = around.suffix.len();
        let kept = suffix.min(rows / 4);
        let rows = rows.saturating_sub(around.before.len());
        let most = most.min(rows.saturating_sub(kept)).max(1);
        let steps = (0..usize::BITS).flat_map(|power| [1usize << power, (1 << power) + (1 << power) / 2]);
        let mut ladder: Vec<usize> = steps.take_while(|&length| length < most).chain([most]).collect();
        ladder.dedup();
        ladder.reverse();
        let length = ladder.pop().unwrap_or(most);
        Self {
            rows,
            around,
            most,
            judged: suffix.min(rows.saturating_sub(most)),
            surprise: (vocabulary.max(1) as f32).ln(),
            settled: ladder.is_empty(),
            ladder,
            tried: Vec::new(),
            agreed: 0,
            length,
        }
    }

    /// How many tokens of the text before a gap, of which there are `text`, go on a canvas of `rows`: a quarter of it.
    pub fn held(rows: usize, text: usize) -> usize {
        text.min(rows / 4)
    }

    /// What stands before it on the canvas.
    pub fn before(&self) -> &[u32] {
        &self.around.before
    }

    /// Tokens of the gap at present.
    pub fn length(&self) -> usize {
        self.length
    }

    /// What stands behind it, to the end of the canvas: the suffix, as far as it goes.
    pub fn behind(&self) -> Vec<u32> {
        let rest = self.rows.saturating_sub(self.length);
        let Around { suffix, fill, .. } = &self.around;
        suffix.iter().copied().chain(repeat_n(*fill, rest)).take(rest).collect()
    }

    /// Takes what the model said of all rows in the last of `steps` steps, and whether the canvas is `done`. True if
    /// another canvas, of the length that is set now, is to be denoised from its beginning.
    pub fn look(&mut self, choices: &[RowChoice], steps: usize, done: bool) -> bool {
        if self.settled || (steps < TRIAL && !done) {
            return false;
        }
        let choices = choices.get(self.around.before.len()..).unwrap_or_default();
        let (gap, behind) = choices.split_at(self.length.min(choices.len()));
        let behind = &behind[..self.judged.min(behind.len())];
        let agreed = self.agreeing(choices, self.length);
        let ends = gap.iter().filter(|choice| self.around.ends.contains(&choice.argmax)).count();
        if done && agreed == self.judged && ends == 0 {
            self.settled = true;
            return false;
        }
        let share = |part: usize, of: usize| part as f32 / of.max(1) as f32;
        let strange = share(self.judged - agreed, self.judged) + share(ends, gap.len());
        let misfit = mean(gap) + mean(behind) + strange * self.surprise;
        let place = self.tried.partition_point(|&(length, _)| length < self.length);
        self.tried.insert(place, (self.length, misfit));
        self.agreed = self.agreed.max(agreed);
        let next = self.written(choices).or_else(|| self.rung()).or_else(|| self.closer());
        self.settled = next.is_none();
        let best = self.best().map_or(self.length, |place| self.tried[place].0);
        self.length = next.unwrap_or(best);
        true
    }

    /// Of how many rows of the suffix, had the gap this length, the model takes the suffix's token for the most probable.
    fn agreeing(&self, choices: &[RowChoice], length: usize) -> usize {
        let suffix = &self.around.suffix[..self.judged];
        choices.iter().skip(length).zip(suffix).filter(|(choice, token)| choice.argmax == **token).count()
    }

    fn is_new(&self, length: usize) -> bool {
        self.tried.iter().all(|&(tried, _)| tried != length)
    }

    /// The length at which the model has written more of the suffix than at any before; of equals the shortest.
    fn written(&mut self, choices: &[RowChoice]) -> Option<usize> {
        let (mut most, mut found) = (self.agreed, None);
        for length in (1..=self.most).filter(|&length| self.is_new(length)) {
            let agreed = self.agreeing(choices, length);
            if agreed > most {
                (most, found) = (agreed, Some(length));
            }
        }
        self.agreed = most;
        found
    }

    /// The next length of the ladder.
    fn rung(&mut self) -> Option<usize> {
        while let Some(length) = self.ladder.pop() {
            if self.is_new(length) {
                return Some(length);
            }
        }
        None
    }

    /// Where the best length stands among those that were tried; of equals the shortest.
    fn best(&self) -> Option<usize> {
        (0..self.tried.len()).min_by(|&a, &b| self.tried[a].1.total_cmp(&self.tried[b].1))
    }

    /// A length between the best one and a neighbour, shorter ones first, until there is none that was not tried.
    fn closer(&self) -> Option<usize> {
        let best = self.best()?;
        let (own, _) = self.tried[best];
        let beside = [best.checked_sub(1), Some(best + 1)].into_iter().flatten();
        let between = beside.filter_map(|place| self.tried.get(place)).map(|&(other, _)| own.midpoint(other));
        between.into_iter().find(|length| self.tried.iter().all(|(tried, _)| tried != length))
    }
}

/// Mean entropy in nats; 0 of no rows.
fn mean(choices: &[RowChoice]) -> f32 {
    let sum: f64 = choices.iter().map(|choice| f64::from(choice.entropy)).sum();
    (sum / choices.len().max(1) as f64) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 32;
    const END: u32 = 1;

    fn gap(before: usize, suffix: usize, most: usize) -> Gap {
        let around = Around {
            before: vec![40; before],
            suffix: (50..50 + suffix as u32).collect(),
            fill: END,
            ends: vec![END],
        };
        Gap::new(ROWS, around, most, 100)
    }

    /// What a model says that knows the gap to have `right` tokens: the suffix 50, 51, … comes behind so many.
    fn say(gap: &Gap, right: usize, suffix: usize, entropy: f32) -> Vec<RowChoice> {
        let before = gap.before().len();
        assert_eq!(before + gap.length() + gap.behind().len(), ROWS);
        let token = |row: usize| match row.checked_sub(before + right) {
            Some(place) if place < suffix => 50 + place as u32,
            _ => 7,
        };
        (0..ROWS).map(|row| RowChoice { argmax: token(row), sampled: token(row), entropy }).collect()
    }

    /// The lengths that are denoised, in order, with the steps of each.
    fn search(mut gap: Gap, right: usize, suffix: usize, entropy: f32) -> Vec<(usize, usize)> {
        let mut seen = vec![(gap.length(), 0)];
        loop {
            let Some((_, steps)) = seen.last_mut() else { unreachable!() };
            *steps += 1;
            let now = *steps;
            // Sure models stop after two steps, others run all ten.
            let done = now == if entropy < 0.005 { 2 } else { 10 };
            let said = say(&gap, right, suffix, entropy);
            if gap.look(&said, now, done) {
                seen.push((gap.length(), 0));
            } else if done {
                return seen;
            }
        }
    }

    #[test]
    fn the_length_at_which_the_suffix_stands_where_the_model_wants_it_is_found() {
        for (before, right) in (0..=8).flat_map(|before| (1..=18).map(move |right| (before, right))) {
            let unsure = search(gap(before, 6, usize::MAX), right, 6, 0.5);
            assert_eq!(unsure.last(), Some(&(right, 10)), "{right}: {unsure:?}");
            assert!(unsure[..unsure.len() - 1].iter().all(|&(_, steps)| steps == TRIAL), "{unsure:?}");
            assert!(unsure.len() < 20, "{} lengths for {right}", unsure.len());
        }
        let sure = search(gap(3, 6, usize::MAX), 11, 6, 0.001);
        assert_eq!(sure, [(1, 2), (11, 2)], "a sure fit ends the search");
    }

    #[test]
    fn no_length_is_past_the_most_and_the_suffix_keeps_its_share() {
        for (before, most, suffix) in
            [0, 3, 8].into_iter().flat_map(|b| (1..40).flat_map(move |m| [1, 5, 8, 9, 40].map(|s| (b, m, s))))
        {
            let lengths = search(gap(before, suffix, most), 1000, suffix, 0.5);
            let bound = most.min(ROWS - before - suffix.min(ROWS / 4));
            assert!(lengths.iter().all(|&(length, _)| (1..=bound).contains(&length)), "{lengths:?}");
            assert!(lengths.iter().any(|&(length, _)| length == bound), "{lengths:?}");
        }
        assert_eq!(search(gap(0, 6, 1), 1, 6, 0.5), [(1, 10)], "with one length there is nothing to try");
        assert_eq!([0, 5, 8, 9, 1000].map(|text| Gap::held(ROWS, text)), [0, 5, 8, 8, 8]);
    }

    #[test]
    fn what_is_left_of_the_canvas_is_filled_and_what_does_not_fit_is_left_out() {
        let short = gap(0, 2, 1).behind();
        assert_eq!((&short[..2], &short[2..]), (&[50, 51][..], &[END; ROWS - 3][..]));
        let long = gap(8, 60, 1);
        assert_eq!(long.behind(), (50..50 + 23).collect::<Vec<u32>>());
        let around = Around { suffix: vec![50], ..Around::default() };
        assert_eq!(Gap::new(1, around, 9, 100).length(), 1, "the smallest canvas is all gap");
    }

    #[test]
    fn a_length_that_is_filled_with_ends_loses_to_one_that_is_not() {
        let mut gap = gap(0, 6, 4);
        let mut lengths = vec![gap.length()];
        loop {
            // Right at every length, but only two tokens are text.
            let tokens = [7, 7, END, END].into_iter().take(gap.length()).chain(50..56);
            let tokens: Vec<u32> = tokens.chain([END; ROWS]).take(ROWS).collect();
            let said = tokens.iter().map(|&argmax| RowChoice {
                argmax,
                sampled: argmax,
                entropy: if gap.length() == 1 { 0.2 } else { 0.1 },
            });
            if !gap.look(&said.collect::<Vec<_>>(), TRIAL, false) {
                break;
            }
            lengths.push(gap.length());
        }
        assert_eq!(lengths, [1, 2, 3, 4, 2]);
    }

    #[test]
    fn of_equals_the_shortest_is_taken() {
        let mut gap = gap(0, 6, 4);
        let same = [RowChoice { argmax: 9, sampled: 9, entropy: 0.5 }; ROWS];
        let mut lengths = vec![gap.length()];
        while gap.look(&same, TRIAL, false) {
            lengths.push(gap.length());
        }
        assert_eq!(lengths, [1, 2, 3, 4, 1]);
    }
}
