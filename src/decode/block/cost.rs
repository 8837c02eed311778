//! What a pass costs at each width, and how many guesses pay.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::pace::Fastest;
use super::{BlockModel, MOST_ROWS};
use crate::model::{Logits, ModelError};

/// Widths whose passes are timed; the others lie between them. Products by integers take a register more from 6 rows on, and from 11.
const TIMED: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16];

/// Tokens before the timed passes: attention has something to do.
const BEFORE: usize = 64;

/// Passes of one row that take longer, in seconds, are those of a large model: of such a one fewer are timed.
const LONG: f64 = 0.1;

/// Time spent on each width, the pass that prepares it included; but two are timed at least, one of a large model.
const PATIENCE: Duration = Duration::from_millis(60);

/// Most timed passes of a width.
const PASSES: usize = 12;

/// Widths that are timed at each start, to see whether what was kept still holds; a few passes of each.
const CHECKED: [usize; 2] = [1, 4];

/// Most passes of each of them.
const CHECKING_PASSES: usize = 4;

/// What was kept holds while a wide pass takes no more times this of what it took, beside a narrow one, nor less.
const MOST_CHANGE: f64 = 1.4;

/// Until passes have been timed, each row more is taken to cost this much of a pass of one row.
const ASSUMED: f64 = 0.15;

/// How fast the cost of a width follows what its passes take.
const SLOW: f64 = 0.04;

/// How fast the cost of all widths does: other work on the machine, and a longer context, slow all of them.
const FAST: f64 = 0.2;

/// Guesses must promise so much more than one token a pass before any is evaluated: estimates are never exact.
const LEAST_GAIN: f64 = 1.03;

/// Seconds of a pass by its width.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// By width, from 1 on, in seconds of the machine as it was when they were measured.
    seconds: Vec<f64>,
    /// How much slower it is now; 0 where that is not known yet.
    scale: f64,
    /// Whether passes correct them.
    learns: bool,
}

/// Timed passes: width, and seconds of the fastest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Which model on which device.
    key: String,
    /// Widths, rising, and seconds.
    passes: Vec<(usize, f64)>,
}

impl Measured {
    /// Times passes of `model` at several widths; what its cache holds is gone then. `key` names model and device.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(key: &str, model: &mut impl BlockModel) -> Result<Self, ModelError> {
        Self::timed(key, model, &TIMED, PASSES)
    }

    /// The same at these widths, with so many passes of each at most.
    fn timed(
        key: &str,
        model: &mut impl BlockModel,
        widths: &[usize],
        most_passes: usize,
    ) -> Result<Self, ModelError> {
        let vocabulary = model.vocabulary();
        let token = |place: usize| (place * 7919 % vocabulary.max(1)) as u32;
        let most = MOST_ROWS.min(model.logit_rows()).min(model.context() / 2).max(1);
        let before = BEFORE.min(model.context().saturating_sub(MOST_ROWS));
        let tokens: Vec<u32> = (0..before).map(token).collect();
        for (part, chunk) in tokens.chunks(model.rows().max(1)).enumerate() {
            model.forward(chunk, part * model.rows().max(1), Logits::None)?;
        }
        model.finish()?;
        let mut timed: Vec<(usize, Fastest)> = Vec::new();
        for &width in widths.iter().filter(|&&width| width <= most) {
            let long = timed.first().is_some_and(|(_, one)| one.seconds() > LONG);
            if long && !width.is_power_of_two() {
                continue;
            }
            let mut fastest = Fastest::new(model.processors());
            let began = Instant::now();
            for pass in 0..=most_passes {
                let tokens: Vec<u32> = (0..width).map(|row| token(before + pass * width + row + 1)).collect();
                let mut run = || -> Result<(), ModelError> {
                    model.forward(&tokens, before, if width == 1 { Logits::Last } else { Logits::All })?;
                    model.tops().map(|_| ())
                };
                // The first one prepares.
                if pass > 0 {
                    fastest.time(run)?
                } else {
                    run()?
                }
                if pass >= (if long { 1 } else { 2 }) && began.elapsed() > PATIENCE {
                    break;
                }
            }
            timed.push((width, fastest));
        }
        let (widths, fastest): (Vec<usize>, Vec<Fastest>) = timed.into_iter().unzip();
        let passes = widths.into_iter().zip(Fastest::all(&fastest)).collect();
        Ok(Self { key: key.to_owned(), passes })
    }

    /// What was kept for `key` in a folder, or else is timed now and kept there.
    ///
    /// # Errors
    /// What the device says.
    pub fn once(folder: &Path, key: &str, model: &mut impl BlockModel) -> Result<Self, ModelError> {
        if let Some(kept) = Self::kept(folder, key) {
            if kept.holds(model)? {
                return Ok(kept);
            }
            tracing::info!("passes take other times than those that were kept: they are timed anew");
        }
        let measured = Self::new(key, model)?;
        tracing::debug!(passes = ?measured.passes, "timed passes at each width");
        if let Err(error) = measured.keep(folder) {
            tracing::warn!(folder = %folder.display(), %error, "cannot keep the times of passes: they are taken again");
        }
        Ok(measured)
    }

    /// Whether wide passes take about as many times as long as narrow ones as when they were timed, which may have been a
    /// bad moment: where guesses seem never to pay none is evaluated, and nothing else would correct the times. Of large
    /// models it is taken for granted.
    fn holds(&self, model: &mut impl BlockModel) -> Result<bool, ModelError> {
        if self.passes.first().is_some_and(|(_, seconds)| *seconds > LONG) {
            return Ok(true);
        }
        let timed = Self::timed(&self.key, model, &CHECKED, CHECKING_PASSES)?;
        let [now, then] = [&timed, self].map(|measured| Costs::new(measured, |_| 1.0));
        let wide = CHECKED[1].min(model.logit_rows()).max(1);
        let change = (now.of(wide) / now.of(1)) / (then.of(wide) / then.of(1));
        Ok((1.0 / MOST_CHANGE..=MOST_CHANGE).contains(&change))
    }

    /// What was kept for `key` in a folder, if it is there and whole.
    pub fn kept(folder: &Path, key: &str) -> Option<Self> {
        let measured: Self = serde_json::from_slice(&std::fs::read(file(folder, key)).ok()?).ok()?;
        let sound = measured.key == key
            && measured.passes.first().is_some_and(|(width, _)| *width == 1)
            && measured.passes.windows(2).all(|pair| pair[0].0 < pair[1].0)
            && measured.passes.iter().all(|(_, seconds)| *seconds > 0.0 && *seconds < 1e6)
            // A wide pass does all that a narrow one does: times that say otherwise were taken at a bad moment.
            && measured.passes.windows(2).all(|pair| pair[0].1 <= MOST_CHANGE * pair[1].1);
        sound.then_some(measured)
    }

    /// Keeps it in a folder for the next start.
    ///
    /// # Errors
    /// What the system says.
    pub fn keep(&self, folder: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut draft = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut draft, self)?;
        draft.persist(file(folder, &self.key))?;
        Ok(())
    }
}

fn file(folder: &Path, key: &str) -> PathBuf {
    let digest = Sha256::digest(key.as_bytes());
    let name: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    folder.join(format!("widths-{name}.json"))
}

impl Default for Costs {
    /// Nothing is known.
    fn default() -> Self {
        Self {
            seconds: (0..MOST_ROWS).map(|more| 1.0 + ASSUMED * more as f64).collect(),
            scale: 0.0,
            learns: true,
        }
    }
}

/// What passes take between two that were timed, as seconds a byte of weights and seconds a row. Rows of a model with experts
/// go to more of them the more rows there are, so a pass reads more bytes the wider it is; less and less more.
fn between(
    (narrow, low): (usize, f64),
    (wide, high): (usize, f64),
    width: usize,
    bytes: &impl Fn(usize) -> f64,
) -> f64 {
    let [few, some, most] = [narrow, width, wide].map(bytes);
    let rows = [narrow, width, wide].map(|rows| rows as f64);
    let apart = few * rows[2] - most * rows[0];
    let byte = (low * rows[2] - high * rows[0]) / apart;
    let row = (few * high - most * low) / apart;
    if byte >= 0.0 && row >= 0.0 && (byte + row).is_finite() {
        return byte * some + row * rows[1];
    }
    // One of the two would have to be less than nothing.
    low + (high - low) * (rows[1] - rows[0]) / (rows[2] - rows[0])
}

impl Costs {
    /// From timed passes of a model, of which a pass of so many rows reads so many `bytes` of weights.
    pub fn new(measured: &Measured, bytes: impl Fn(usize) -> f64) -> Self {
        let passes = &measured.passes;
        let at = |width: usize| -> f64 {
            let after = passes.partition_point(|(timed, _)| *timed < width);
            match (after.checked_sub(1).and_then(|before| passes.get(before)), passes.get(after)) {
                (Some(&narrow), Some(&wide)) => between(narrow, wide, width, &bytes),
                (None, Some(&(_, seconds))) => seconds,
                // Wider than any that was timed: as if rows were all that takes time.
                (Some(&(a, seconds)), None) => seconds * width as f64 / a as f64,
                (None, None) => 1.0 + ASSUMED * (width - 1) as f64,
            }
        };
        Self { seconds: (1..=MOST_ROWS).map(at).collect(), scale: 1.0, learns: true }
    }

    /// Costs in any unit by width, from 1 on, that stay as they are whatever passes take.
    pub fn given(seconds: [f64; MOST_ROWS]) -> Self {
        Self { seconds: seconds.to_vec(), scale: 1.0, learns: false }
    }

    /// Seconds of a pass of `width` rows, up to a factor that all widths share.
    pub fn of(&self, width: usize) -> f64 {
        let last = self.seconds.len().saturating_sub(1);
        self.seconds.get(width.saturating_sub(1).min(last)).copied().unwrap_or(1.0)
    }

    /// A pass of `width` rows took so long.
    pub fn learn(&mut self, width: usize, seconds: f64) {
        let expected = self.of(width);
        let Some(cost) = self.seconds.get_mut(width.saturating_sub(1)) else { return };
        let ratio = seconds / expected;
        if !(self.learns && ratio.is_finite() && ratio > 0.0) {
            return;
        }
        if self.scale == 0.0 {
            self.scale = ratio;
            return;
        }
        // One pass that was held up says little.
        let ratio = ratio.clamp(self.scale / 2.0, self.scale * 2.0);
        if width > 1 {
            *cost += SLOW * (ratio / self.scale - 1.0) * expected;
        }
        self.scale += FAST * (ratio - self.scale);
    }

    /// How many guesses to evaluate that are right with these probabilities, each if all before it are: the number that
    /// promises the most tokens a second.
    pub fn best(&self, trusts: impl Iterator<Item = f32>) -> usize {
        let (mut best, mut rate) = (0, LEAST_GAIN / self.of(1));
        let (mut tokens, mut all_right) = (1.0, 1.0);
        for (guesses, trust) in (1..).zip(trusts) {
            all_right *= f64::from(trust);
            tokens += all_right;
            let promised = tokens / self.of(1 + guesses);
            if promised > rate {
                (best, rate) = (guesses, promised);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(passes: &[(usize, f64)]) -> Measured {
        Measured { key: "model on device".to_owned(), passes: passes.to_vec() }
    }

    /// All passes of such a model read the same.
    fn of_dense(measured: &Measured) -> Costs {
        Costs::new(measured, |_| 1.0)
    }

    #[test]
    fn widths_between_timed_ones_lie_between_them() {
        let costs = of_dense(&measured(&[(1, 1.0), (2, 1.2), (4, 1.6), (8, 2.0)]));
        for (width, cost) in [(1, 1.0), (2, 1.2), (3, 1.4), (4, 1.6), (6, 1.8), (8, 2.0), (16, 4.0)] {
            assert!((costs.of(width) - cost).abs() < 1e-9, "{width}: {}", costs.of(width));
        }
    }

    #[test]
    fn between_timed_widths_the_bytes_of_experts_count() {
        // 2 of 8 experts a row, which are all that is read, at a second each; rows cost nothing besides.
        let expected = |rows: usize| 8.0 * (1.0 - 0.75f64.powi(rows as i32));
        let timed = [1, 4, 16].map(|rows| (rows, expected(rows)));
        let costs = Costs::new(&measured(&timed), expected);
        for width in 1..=MOST_ROWS {
            assert!((costs.of(width) - expected(width)).abs() < 1e-9, "{width}: {}", costs.of(width));
        }
        assert!(costs.of(8) > of_dense(&measured(&timed)).of(8) + 0.5);
        // Neither rows nor bytes explain that wide passes take less time: a line does as well.
        let odd = Costs::new(&measured(&[(1, 2.0), (3, 1.0)]), expected);
        assert!((odd.of(2) - 1.5).abs() < 1e-9, "{}", odd.of(2));
    }

    #[test]
    fn guesses_are_evaluated_as_far_as_they_pay() {
        let costs = of_dense(&measured(&[(1, 1.0), (2, 1.3), (16, 5.5)]));
        assert_eq!(costs.best([0.2, 0.9].into_iter()), 0, "1.2 + 0.18 tokens for 1.6 passes");
        assert_eq!(costs.best([0.5].into_iter()), 1, "1.5 tokens for 1.3 passes");
        assert_eq!(
            costs.best([0.9; 15].into_iter()),
            5,
            "0.9 to the sixth is less than 0.3 times 4.7 tokens in 2.5"
        );
        assert_eq!(costs.best([1.0; 15].into_iter()), 15);
        assert_eq!(costs.best([0.9, 0.9, 0.1, 0.9].into_iter()), 2);
        assert_eq!(costs.best([].into_iter()), 0);
        let free = of_dense(&measured(&[(1, 1.0), (16, 1.0)]));
        assert_eq!(free.best([0.02].into_iter()), 0, "too little to be sure");
    }

    #[test]
    fn what_passes_take_corrects_the_costs_of_widths_but_not_for_a_slower_machine() {
        let before = of_dense(&measured(&[(1, 1.0), (2, 1.2), (16, 4.0)]));
        let mut slower = before.clone();
        for pass in 0..300 {
            let width = [1, 4, 8][pass % 3];
            slower.learn(width, 3.0 * before.of(width));
        }
        for width in [4, 8] {
            let ratio = slower.of(width) / before.of(width);
            assert!((0.9..1.1).contains(&ratio), "{width}: {ratio}");
        }
        let mut dear = before.clone();
        for _ in 0..300 {
            dear.learn(1, 1.0);
            dear.learn(4, 2.0 * before.of(4));
        }
        assert!(dear.of(4) > 1.5 * before.of(4), "{} from {}", dear.of(4), before.of(4));
        let mut odd = before.clone();
        for seconds in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            odd.learn(4, seconds);
        }
        assert_eq!(odd, before);
        odd.learn(99, 1.0);
        assert_eq!(odd, before);
    }

    #[test]
    fn what_was_measured_is_kept_for_the_same_model_and_device_only() {
        let folder = tempfile::tempdir().unwrap();
        let measured = measured(&[(1, 0.5), (2, 0.75)]);
        assert_eq!(Measured::kept(folder.path(), &measured.key), None);
        measured.keep(folder.path()).unwrap();
        assert_eq!(Measured::kept(folder.path(), &measured.key), Some(measured.clone()));
        assert_eq!(Measured::kept(folder.path(), "another"), None);
        let odd = Measured { passes: vec![(1, 0.3), (2, 0.1)], ..measured.clone() };
        odd.keep(folder.path()).unwrap();
        assert_eq!(Measured::kept(folder.path(), &odd.key), None, "one row takes longer than two");
        for damage in ["", "{}", "{\"key\":\"model on device\",\"passes\":[[1,0.0]]}"] {
            std::fs::write(file(folder.path(), &measured.key), damage).unwrap();
            assert_eq!(Measured::kept(folder.path(), &measured.key), None, "{damage:?}");
        }
    }
}
