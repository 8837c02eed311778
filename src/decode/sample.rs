//! The choice of the next token: biases, penalties, what a constraint allows, temperature, filters, and the argmax of
//! logits plus Gumbel noise.
//!
//! Noise is keyed by seed, position and token, so that a choice depends on nothing that happened before.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use super::philox::{gumbel, gumbel_of, words};
use super::scan::{GROUP, pairs, survey};
use super::{Allowed, Sampling, SamplingError};
use crate::ops::RowTop;

/// A token this far below the best, in units of the temperature, cannot win: noise spans less than 26.1.
const HOPELESS: f64 = 26.1;

/// Candidates this close to the best, in units of the temperature, are drawn for first; what wins among them rules out
/// most others.
const CLOSE: f64 = 3.0;

/// Candidates that share one bound on the noise they would need.
const SHARED: usize = 64;

/// Chooses tokens for one generation.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    prompt: HashSet<u32>,
    output: HashMap<u32, u32>,
    /// What is added to the logits of some tokens.
    bias: HashMap<u32, f32>,
    adjusted: Vec<f32>,
    /// The largest logit of each group of a row.
    largest: Vec<f32>,
    /// Tokens that may win, with their distance from the best in units of the temperature.
    candidates: Vec<(u32, f64)>,
}

impl Sampler {
    /// A sampler for a generation over `prompt`.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let remembers = sampling.repetition_penalty != 1.0;
        Self {
            sampling: sampling.clone(),
            prompt: if remembers { prompt.iter().copied().collect() } else { HashSet::new() },
            output: HashMap::new(),
            bias: sampling.logit_bias.iter().copied().filter(|&(_, bias)| bias != 0.0).collect(),
            adjusted: Vec::new(),
            largest: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Chooses the token at `position` from its logits and remembers it for penalties.
    ///
    /// # Errors
    /// [`SamplingError`] when a logit is not finite or there is none.
    pub fn choose(&mut self, logits: &[f32], position: usize) -> Result<u32, SamplingError> {
        self.choose_among(logits, position, Allowed::All)
    }

    /// Chooses the token at `position` from those of its row that are allowed, and remembers it.
    ///
    /// # Errors
    /// [`SamplingError`] when a logit is not finite, there is none, or none is allowed.
    pub fn choose_among(
        &mut self,
        logits: &[f32],
        position: usize,
        allowed: Allowed<'_>,
    ) -> Result<u32, SamplingError> {
        let top = self.survey(logits, position)?.ok_or(SamplingError::NoLogits)?;
        let token = if self.adjusts() || !matches!(allowed, Allowed::All) {
            let mut row = std::mem::take(&mut self.adjusted);
            row.clear();
            row.extend_from_slice(logits);
            let token = self.choose_adjusted(&mut row, position, allowed);
            self.adjusted = row;
            token?
        } else {
            self.pick(logits, top, position)
        };
        let token = token.ok_or(SamplingError::NoLogits)?;
        self.remember(token);
        Ok(token)
    }

    /// Chooses from a row of its own, which is changed by biases and penalties.
    fn choose_adjusted(
        &mut self,
        row: &mut [f32],
        position: usize,
        allowed: Allowed<'_>,
    ) -> Result<Option<u32>, SamplingError> {
        self.adjust(row);
        let mut top = self.survey(row, position)?;
        if !matches!(allowed, Allowed::All) {
            allowed.keep(row);
            top = self.heights(row);
            if top.is_none_or(|top| top == f32::NEG_INFINITY) {
                return Err(SamplingError::NothingAllowed { position });
            }
        }
        Ok(top.and_then(|top| self.pick(row, top, position)))
    }

    /// Chooses the token from the best of its row and remembers it, if they are enough to tell which one
    /// [`Sampler::choose_among`] would choose.
    pub fn choose_from(&mut self, top: &RowTop, allowed: Allowed<'_>) -> Option<u32> {
        if top.bad {
            return None;
        }
        if let Allowed::One(token) = allowed {
            self.remember(token);
            return Some(token);
        }
        if !self.is_greedy() {
            return None;
        }
        let mut named = pairs(top).filter(|&(token, _)| allowed.has(token));
        let token = if self.adjusts() {
            let s = &self.sampling;
            if s.repetition_penalty < 1.0 || s.presence_penalty < 0.0 || s.frequency_penalty < 0.0 {
                return None;
            }
            if self.bias.values().any(|&bias| bias > 0.0) {
                return None;
            }
            // What is not named here has a logit no larger than that of any token here, and what changes logits only lowers
            // them: one token that is left as it is keeps all of them away.
            named.find(|&(token, _)| !self.seen(token) && !self.bias.contains_key(&token))?;
            let named = pairs(top).filter(|&(token, _)| allowed.has(token));
            best(named.map(|(token, logit)| (token, self.adjusted_logit(token, logit))))?.0
        } else {
            named.next()?.0
        };
        self.remember(token);
        Some(token)
    }

    /// Which of some tokens the model would choose at `position` if they were the only ones, filters aside, and how far
    /// the next of them is behind: in units of the temperature, or of logits where there is none.
    pub fn likely(&self, tokens: impl Iterator<Item = (u32, f32)>, position: usize) -> Option<(u32, f32)> {
        let adjusts = self.adjusts();
        let tokens = tokens
            .map(|(token, logit)| (token, if adjusts { self.adjusted_logit(token, logit) } else { logit }));
        if self.is_greedy() {
            return best(tokens);
        }
        let (seed, temperature) = (self.sampling.seed, self.sampling.temperature);
        best(tokens.map(|(token, logit)| (token, logit / temperature + gumbel(seed, position, token) as f32)))
    }

    /// Whether no noise decides.
    pub(super) fn is_greedy(&self) -> bool {
        self.sampling.temperature <= 0.0 || self.sampling.top_k == 1
    }

    fn remember(&mut self, token: u32) {
        *self.output.entry(token).or_insert(0) += 1;
    }

    /// Whether a token's logit may be changed by a penalty.
    fn seen(&self, token: u32) -> bool {
        self.output.contains_key(&token) || self.prompt.contains(&token)
    }

    /// Whether biases or penalties change any logit.
    fn adjusts(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0
            || s.presence_penalty != 0.0
            || s.frequency_penalty != 0.0
            || !self.bias.is_empty()
    }

    /// A logit after bias and penalties, in this order.
    fn adjusted_logit(&self, token: u32, logit: f32) -> f32 {
        let s = &self.sampling;
        let mut adjusted = logit + self.bias.get(&token).copied().unwrap_or(0.0);
        let count = self.output.get(&token).copied();
        if s.repetition_penalty != 1.0 && (count.is_some() || self.prompt.contains(&token)) {
            adjusted = if adjusted > 0.0 {
                adjusted / s.repetition_penalty
            } else {
                adjusted * s.repetition_penalty
            };
        }
        match count {
            Some(count) => adjusted - (s.presence_penalty + s.frequency_penalty * count as f32),
            None => adjusted,
        }
    }

    /// Changes the logits of a row by biases and penalties.
    fn adjust(&self, row: &mut [f32]) {
        let output = self.output.keys().filter(|token| !self.bias.contains_key(token));
        let seen = self
            .prompt
            .iter()
            .filter(|&token| !self.output.contains_key(token) && !self.bias.contains_key(token));
        for &token in self.bias.keys().chain(output).chain(seen) {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit = self.adjusted_logit(token, *logit);
            }
        }
    }

    /// The largest logit of a row; leaves the largest of each group behind. None if there are no logits.
    fn heights(&mut self, row: &[f32]) -> Option<f32> {
        self.largest.clear();
        self.largest.extend(row.chunks(GROUP).map(|group| survey(group).0));
        self.largest.iter().copied().reduce(|most, v| if v > most { v } else { most })
    }

    /// The same, for a row that must be sound.
    fn survey(&mut self, logits: &[f32], position: usize) -> Result<Option<f32>, SamplingError> {
        self.largest.clear();
        let mut sound = true;
        self.largest.extend(logits.chunks(GROUP).map(|group| {
            let (largest, finite) = survey(group);
            sound &= finite;
            largest
        }));
        if !sound && let Some(token) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(SamplingError::NotFinite { position, token, logit: logits[token] });
        }
        Ok(self.largest.iter().copied().reduce(|most, v| if v > most { v } else { most }))
    }

    /// The token chosen from a row that was surveyed and whose largest logit is `top`.
    fn pick(&mut self, logits: &[f32], top: f32, position: usize) -> Option<u32> {
        if self.is_greedy() {
            let group = self.largest.iter().position(|&largest| largest == top)?;
            let within = logits.chunks(GROUP).nth(group)?.iter().position(|&logit| logit == top)?;
            return Some((group * GROUP + within) as u32);
        }
        let s = &self.sampling;
        let (top, temperature) = (f64::from(top), f64::from(s.temperature));
        let ranked = s.top_k > 0 || s.top_p < 1.0;
        let least = if s.min_p > 0.0 { f64::from(s.min_p).ln() } else { f64::NEG_INFINITY };
        // What stays has a chance to win; for top_p the rest weighs less than one in a million.
        let mut floor = top - HOPELESS * temperature;
        if !ranked {
            // Not the last word: that is `retain` below, on the scaled distance.
            floor = floor.max(top + (least - 1e-3) * temperature);
        }
        let coarse = (floor as f32).next_down();
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for (group, (values, &largest)) in logits.chunks(GROUP).zip(&self.largest).enumerate() {
            if largest < coarse {
                continue;
            }
            for (place, &logit) in values.iter().enumerate() {
                if logit >= coarse && f64::from(logit) >= floor {
                    let token = (group * GROUP + place) as u32;
                    candidates.push((token, (f64::from(logit) - top) / temperature));
                }
            }
        }
        if ranked {
            cut(&mut candidates, s.top_k, f64::from(s.top_p));
        }
        if s.min_p > 0.0 {
            candidates.retain(|&(_, scaled)| scaled >= least);
        }
        let token = draw(&candidates, s.seed, position);
        self.candidates = candidates;
        token
    }
}

/// The token with the largest value, of equals the lowest, and how far the next of them is behind.
fn best(tokens: impl Iterator<Item = (u32, f32)>) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    let mut margin = f32::INFINITY;
    for (token, value) in tokens {
        match best {
            Some((other, top)) if value < top || (value == top && token > other) => {
                margin = margin.min(top - value);
            }
            Some((_, top)) => {
                margin = value - top;
                best = Some((token, value));
            }
            None => best = Some((token, value)),
        }
    }
    best.map(|(token, _)| (token, margin))
}

/// Larger first; ties go to the lower id, so that a cut is the same every time.
fn by_rank(a: &(u32, f64), b: &(u32, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the `top_k` best (0: all), and of them the fewest whose probabilities reach `top_p`.
fn cut(candidates: &mut Vec<(u32, f64)>, top_k: usize, top_p: f64) {
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, by_rank);
        candidates.truncate(top_k);
    }
    if top_p >= 1.0 {
        return;
    }
    // The sum is made in one order, whatever the order candidates were found in.
    candidates.sort_unstable_by_key(|&(token, _)| token);
    let total: f64 = candidates.iter().map(|(_, scaled)| scaled.exp()).sum();
    let (mut sorted, mut step, mut reached) = (0, 64, 0.0);
    while sorted < candidates.len() {
        let end = candidates.len().min(sorted + step);
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted - 1, by_rank);
        }
        candidates[sorted..end].sort_unstable_by(by_rank);
        for place in sorted..end {
            reached += candidates[place].1.exp() / total;
            if reached >= top_p {
                candidates.truncate(place + 1);
                return;
            }
        }
        (sorted, step) = (end, step * 4);
    }
}

/// The candidate with the largest sum of scaled logit and noise; of equals the lowest.
fn draw(candidates: &[(u32, f64)], seed: u64, position: usize) -> Option<u32> {
    let better = |a: &(u32, f64), b: &(u32, f64)| match a.1.total_cmp(&b.1) {
        Ordering::Greater => true,
        Ordering::Less => false,
        Ordering::Equal => a.0 < b.0,
    };
    let mut best: Option<(u32, f64)> = None;
    let mut offer = |scored: (u32, f64)| {
        if best.as_ref().is_none_or(|best| better(&scored, best)) {
            best = Some(scored);
        }
        best.map_or(f64::NEG_INFINITY, |best| best.1)
    };
    let mut score = f64::NEG_INFINITY;
    for &(token, scaled) in candidates.iter().filter(|(_, scaled)| *scaled >= -CLOSE) {
        score = offer((token, scaled + gumbel(seed, position, token)));
    }
    let mut group = (u32::MAX, [0; 4]);
    for shared in candidates.chunks(SHARED) {
        let largest = shared
            .iter()
            .map(|(_, scaled)| *scaled)
            .filter(|scaled| *scaled < -CLOSE)
            .fold(f64::NEG_INFINITY, f64::max);
        // Noise above x has the probability 1 - exp(-exp(-x)), which is less than exp(-x); a little is added for rounding.
        let chance = (largest - score).exp() * 1.001 + 1e-9;
        let least = ((1.0 - chance).max(0.0) * 2f64.powi(32)) as u64;
        for &(token, scaled) in shared.iter().filter(|(_, scaled)| *scaled < -CLOSE) {
            if group.0 != token / 4 {
                group = (token / 4, words(seed, position, token / 4));
            }
            let word = group.1[token as usize % 4];
            if u64::from(word) >= least {
                score = offer((token, scaled + gumbel_of(word)));
            }
        }
    }
    best.map(|(token, _)| token)
}

/// The token with the largest logit, the first of several; none if there are no logits.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == top).map(|token| token as u32)
}

#[cfg(test)]
mod tests {
    use super::super::scan::top_of;
    use super::*;

    fn sampler(change: impl FnOnce(&mut Sampling)) -> Sampler {
        let mut sampling = Sampling { temperature: 1.0, seed: 11, ..Sampling::default() };
        change(&mut sampling);
        Sampler::new(&sampling, &[])
    }

    /// Share of draws that chose each token, over many positions.
    fn shares(logits: &[f32], change: impl Fn(&mut Sampling)) -> Vec<f64> {
        const DRAWS: usize = 20_000;
        let mut counts = vec![0.0; logits.len()];
        for position in 0..DRAWS {
            let token = sampler(&change).choose(logits, position).unwrap();
            counts[token as usize] += 1.0 / DRAWS as f64;
        }
        counts
    }

    #[test]
    fn draws_follow_the_softmax_at_the_temperature() {
        let logits = [1.0f32, 0.0, 2.0, -1.0];
        for temperature in [0.5f32, 1.0, 2.0] {
            let weights: Vec<f64> = logits.iter().map(|l| f64::from(l / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            let found = shares(&logits, |s| s.temperature = temperature);
            for (f, w) in found.iter().zip(&weights) {
                assert!((f - w / total).abs() < 0.015, "{found:?} at {temperature}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        // Probabilities 0.6439, 0.2369, 0.0871, 0.0321.
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let kept = |change: &dyn Fn(&mut Sampling)| -> Vec<usize> {
            let found = shares(&logits, change);
            (0..4).filter(|&i| found[i] > 0.0).collect()
        };
        assert_eq!(kept(&|s| s.top_k = 2), [0, 1]);
        assert_eq!(kept(&|s| s.top_p = 0.6), [0]);
        assert_eq!(kept(&|s| s.top_p = 0.65), [0, 1]);
        assert_eq!(kept(&|s| s.min_p = 0.1), [0, 1, 2]);
        assert_eq!(kept(&|s| s.temperature = 0.0), [0]);
        assert_eq!(kept(&|_| ()), [0, 1, 2, 3]);
    }

    #[test]
    fn a_choice_depends_on_seed_and_position_only() {
        let logits: Vec<f32> = (0..1000).map(|i| (i % 7) as f32 * 0.1).collect();
        let choose = |seed, position| sampler(|s| s.seed = seed).choose(&logits, position).unwrap();
        assert_eq!(choose(1, 5), choose(1, 5));
        assert!((0..20).any(|p| choose(1, p) != choose(2, p)));
        assert!((0..20).any(|p| choose(1, p) != choose(1, p + 1)));
        let mut with_history = sampler(|s| s.seed = 1);
        with_history.choose(&logits, 4).unwrap();
        assert_eq!(with_history.choose(&logits, 5).unwrap(), choose(1, 5));
    }

    #[test]
    fn penalties_count_prompt_and_output_as_documented() {
        let logits = [2.0f32, 1.5, -1.0];
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(Sampler::new(&sampling, &[0]).choose(&logits, 0).unwrap(), 1);
        let mut twice = Sampler::new(&Sampling { frequency_penalty: 0.3, ..Sampling::default() }, &[0]);
        let chosen: Vec<u32> = (0..4).map(|p| twice.choose(&logits, p).unwrap()).collect();
        assert_eq!(chosen, [0, 0, 1, 0], "2.0, 1.7, then 1.4 under 1.5, then 1.4 over 1.2");
        let mut once = Sampler::new(&Sampling { presence_penalty: 0.6, ..Sampling::default() }, &[0]);
        let chosen: Vec<u32> = (0..3).map(|p| once.choose(&logits, p).unwrap()).collect();
        assert_eq!(chosen, [0, 1, 0], "the prompt does not count; each is lowered once");
    }

    #[test]
    fn numbers_that_are_none_end_the_generation() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = sampler(|_| ()).choose(&[0.0, bad], 9).unwrap_err();
            assert!(error.to_string().contains("position 9"), "{error}");
        }
        assert!(sampler(|_| ()).choose(&[], 0).is_err());
    }

    /// The rules written down plainly: everything sorted, noise for all that is left.
    fn plainly(s: &Sampling, logits: &[f32], position: usize) -> u32 {
        if s.temperature == 0.0 {
            return argmax(logits).unwrap();
        }
        let top = f64::from(logits[argmax(logits).unwrap() as usize]);
        let scaled = |logit: f32| (f64::from(logit) - top) / f64::from(s.temperature);
        let mut all: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&logit| scaled(logit))).collect();
        all.retain(|(_, scaled)| *scaled >= -26.1);
        all.sort_by(by_rank);
        if s.top_k > 0 {
            all.truncate(s.top_k);
        }
        if s.top_p < 1.0 {
            let total: f64 = all.iter().map(|(_, scaled)| scaled.exp()).sum();
            let mut reached = 0.0;
            let last = all.iter().position(|(_, scaled)| {
                reached += scaled.exp() / total;
                reached >= f64::from(s.top_p)
            });
            all.truncate(last.map_or(all.len(), |last| last + 1));
        }
        all.retain(|(_, scaled)| s.min_p == 0.0 || *scaled >= f64::from(s.min_p).ln());
        let score = |&(token, scaled): &(u32, f64)| scaled + gumbel(s.seed, position, token);
        all.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.0.cmp(&b.0)));
        all[0].0
    }

    #[test]
    fn shortcuts_choose_what_the_plain_rules_choose() {
        let mut unlikely = 0;
        for row in 0..18u64 {
            let spread = [0.3, 2.0, 12.0][row as usize % 3];
            let logits: Vec<f32> = (0..2000u32)
                .map(|token| (gumbel(row + 1000, 0, token) * spread).mul_add(4.0, 0.0).round() as f32 / 4.0)
                .collect();
            for (temperature, top_k, top_p, min_p) in [
                (0.0, 0, 1.0, 0.0),
                (0.8, 0, 1.0, 0.0),
                (2.0, 0, 1.0, 0.0),
                (0.1, 0, 1.0, 0.0),
                (0.8, 40, 1.0, 0.0),
                (0.8, 40, 0.95, 0.05),
                (1.5, 0, 0.9, 0.0),
                (1.5, 0, 0.999, 0.01),
                (1.0, 0, 1.0, 0.1),
                (1.0, 3, 0.5, 0.0),
            ] {
                let sampling =
                    Sampling { temperature, top_k, top_p, min_p, seed: row, ..Sampling::default() };
                let token = Sampler::new(&sampling, &[]).choose(&logits, 7).unwrap();
                assert_eq!(token, plainly(&sampling, &logits, 7), "row {row}, {sampling:?}");
                let top = f64::from(logits[argmax(&logits).unwrap() as usize]);
                unlikely +=
                    usize::from(f64::from(logits[token as usize]) < top - CLOSE * f64::from(temperature));
            }
        }
        assert!(unlikely > 5, "only {unlikely} choices were far from the best");
    }

    #[test]
    fn the_best_of_a_row_are_enough_or_say_that_they_are_not() {
        let (mut told, mut untold) = (0, 0);
        for row in 0..200u64 {
            let logits: Vec<f32> =
                (0..400).map(|token| (gumbel(row, 1, token) * 4.0).round() as f32 / 4.0).collect();
            let top = top_of(&logits);
            for (repetition_penalty, presence_penalty, frequency_penalty) in [
                (1.0, 0.0, 0.0),
                (1.3, 0.0, 0.0),
                (1.0, 0.5, 0.0),
                (1.0, 0.0, 0.4),
                (0.9, 0.0, 0.0),
                (1.2, 2.0, 1.0),
            ] {
                let sampling = Sampling {
                    repetition_penalty,
                    presence_penalty,
                    frequency_penalty,
                    ..Sampling::default()
                };
                // Part of the best tokens were in the prompt, for some rows all of them.
                let prompt: Vec<u32> = top.ids[..row as usize % 9].to_vec();
                let mut from_top = Sampler::new(&sampling, &prompt);
                let mut from_all = Sampler::new(&sampling, &prompt);
                for position in 0..6 {
                    let expected = from_all.choose(&logits, position).unwrap();
                    match from_top.choose_from(&top, Allowed::All) {
                        Some(token) => {
                            told += 1;
                            assert_eq!(token, expected, "row {row}, {sampling:?}");
                        }
                        None => {
                            untold += 1;
                            from_top.remember(expected);
                        }
                    }
                }
            }
        }
        assert!(told > 3000 && untold > 500, "{told} told, {untold} not");
        let warm = Sampling { temperature: 0.5, ..Sampling::default() };
        assert_eq!(Sampler::new(&warm, &[]).choose_from(&top_of(&[1.0, 2.0]), Allowed::All), None);
        let bad = top_of(&[1.0, f32::NAN]);
        assert_eq!(Sampler::new(&Sampling::default(), &[]).choose_from(&bad, Allowed::All), None);
    }

    #[test]
    fn a_likely_token_is_the_choice_among_the_tokens_named() {
        let logits = [4.0f32, 3.0, 3.9, -2.0];
        for temperature in [0.0, 0.7, 3.0] {
            let sampling = Sampling { temperature, seed: 5, ..Sampling::default() };
            for position in 0..50 {
                let mut sampler = Sampler::new(&sampling, &[]);
                let (token, margin) = sampler.likely((0..).zip(logits), position).unwrap();
                assert!(margin >= 0.0);
                assert_eq!(token, sampler.choose(&logits, position).unwrap());
            }
        }
        let penalised = Sampling { presence_penalty: 1.0, ..Sampling::default() };
        let mut sampler = Sampler::new(&penalised, &[]);
        sampler.remember(0);
        assert_eq!(sampler.likely((0..).zip(logits), 0).unwrap().0, 2);
        assert_eq!(sampler.likely(std::iter::empty(), 0), None);
    }
}
