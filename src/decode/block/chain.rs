//! The chain of guesses of a pass: at each place the guess that is trusted most.

use super::proposer::{Context, Guess, Proposer, Seen};
use super::trust::{Calibration, bucket};
use super::{BlockStats, FixedPoint, Lookup, MOST_ROWS, Pool, ProposerStats, Recycled};
use crate::decode::{Allowed, Sampler};

/// Most proposers.
const PROPOSERS: usize = 4;

/// What guesses are told of where a grammar leaves only one token: no proposer made them.
const CONSTRAINT: &str = "constraint";

/// Levels of the best guess's trust that are joined with the others' votes alike.
const LEVELS: [f32; 11] = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97];

/// Guesses of one place: what is guessed there, and what each proposer said.
#[derive(Debug, Clone, Copy)]
struct Link {
    token: u32,
    /// Estimated probability that it is right if all before it are.
    trust: f32,
    /// Which proposer's guess was taken.
    by: usize,
    /// Kind for the joint calibration.
    /// None of a token that only one can follow.
    kind: Option<usize>,
    said: [Option<Guess>; PROPOSERS],
}

/// Guesses for the places behind a text, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    links: Vec<Link>,
}

impl Chain {
    /// The guesses.
    pub(super) fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.links.iter().map(|link| link.token)
    }

    /// Which proposer each of some tokens was guessed by, as far as the first `offered` guesses are what they are.
    pub(super) fn hits(&self, offered: usize, tokens: &[u32]) -> Vec<Option<usize>> {
        let same =
            self.links.iter().take(offered).zip(tokens).take_while(|(link, token)| link.token == **token);
        same.map(|(link, _)| Some(link.by)).collect()
    }

    /// How likely each guess is right if all before it are.
    pub(super) fn trusts(&self) -> impl Iterator<Item = f32> + '_ {
        self.links.iter().map(|link| link.trust)
    }
}

/// How far a chain goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach<'a> {
    /// Most guesses.
    pub(super) most: usize,
    /// A chain ends where all of it is less likely right than this.
    pub(super) least: f32,
    /// Tokens behind which nothing is committed: guesses at them are left out, since their row would be for nothing.
    pub(super) ends: &'a [u32],
}

/// What is certain of the tokens behind a text, by what the reply must match.
#[derive(Debug, Default)]
pub(super) struct Certain<'a> {
    /// The next tokens.
    pub(super) forced: Vec<u32>,
    /// Of what the next one is.
    pub(super) first: Allowed<'a>,
}

/// All proposers of a model. They stay from one generation to the next, and so do the counts of what came true. What was
/// said stays with a text that goes on, as a conversation does; others' words are guessed from with the pool only.
pub(super) struct Proposers {
    all: Vec<Box<dyn Proposer>>,
    /// Generations may be guessed from what others said.
    pool: bool,
    /// Prompt and answer of the generation before, where there is no pool.
    text: Vec<u32>,
    /// Corrects the best guess's trust by what the others say.
    joint: Calibration,
}

impl Proposers {
    pub(super) fn new(pool: bool) -> Self {
        let mut all: Vec<Box<dyn Proposer>> =
            vec![Box::new(Lookup::default()), Box::<Recycled>::default(), Box::<FixedPoint>::default()];
        if pool {
            all.push(Box::<Pool>::default());
        }
        // The middle of each level, whatever the others say.
        let bounds = [&[0.0], &LEVELS[..], &[1.0]].concat();
        let middles = bounds.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let joint = Calibration::new(middles.flat_map(|middle| [middle; VOTES]));
        Self { all, pool, text: Vec::new(), joint }
    }

    /// A generation begins with a prompt.
    pub(super) fn begin(&mut self, prompt: &[u32]) {
        if !self.pool {
            // Who has all of the text before may see guesses made from it.
            if !prompt.starts_with(&self.text) {
                self.all.iter_mut().for_each(|proposer| proposer.forget());
            }
            self.text.clear();
            self.text.extend_from_slice(prompt);
        }
        self.joint.fade();
        self.all.iter_mut().for_each(|proposer| proposer.begin());
    }

    /// A prompt's tokens up to some position are known.
    pub(super) fn read(&mut self, prompt: &[u32]) {
        self.all.iter_mut().for_each(|proposer| proposer.read(prompt));
    }

    /// No guesses yet, for each proposer, and for the constraint if there is one.
    pub(super) fn stats(&self, constrained: bool) -> Vec<ProposerStats> {
        let names = self.all.iter().map(|proposer| proposer.name());
        let names = names.chain(constrained.then_some(CONSTRAINT));
        names.map(|name| ProposerStats { name, offered: 0, accepted: 0 }).collect()
    }

    /// The chain of guesses behind a committed text, which is as it was when this returns.
    pub(super) fn chain(
        &mut self,
        text: &mut Vec<u32>,
        reach: Reach<'_>,
        sampler: &Sampler,
        certain: &Certain<'_>,
    ) -> Chain {
        let committed = text.len();
        let mut links = Vec::with_capacity(MOST_ROWS);
        let mut all_right = 1.0;
        while links.len() < reach.most {
            let context = Context { text, committed, sampler };
            let place = links.len();
            let allowed = match certain.forced.get(place) {
                Some(&token) => Allowed::One(token),
                None if place == 0 => certain.first,
                None => Allowed::All,
            };
            let Some(link) = self.link(&context, allowed) else { break };
            all_right *= link.trust;
            if all_right < reach.least && !links.is_empty() || reach.ends.contains(&link.token) {
                break;
            }
            links.push(link);
            text.push(link.token);
            if all_right < reach.least {
                break; // kept all the same: the proposers learn from its outcome
            }
        }
        text.truncate(committed);
        Chain { links }
    }

    fn link(&mut self, context: &Context<'_>, allowed: Allowed<'_>) -> Option<Link> {
        let mut said = [None; PROPOSERS];
        for (said, proposer) in said.iter_mut().zip(&mut self.all) {
            *said = proposer.propose(context).filter(|guess| allowed.has(guess.token));
        }
        if let Allowed::One(token) = allowed {
            return Some(Link { token, trust: 1.0, by: self.all.len(), kind: None, said });
        }
        // The first of equals, so that it is the same every time.
        let (by, best) = said
            .iter()
            .enumerate()
            .filter_map(|(by, guess)| Some((by, (*guess)?)))
            .reduce(|a, b| if b.1.trust > a.1.trust { b } else { a })?;
        let others = said.iter().flatten().filter(|guess| guess.token == best.token).count() - 1;
        let against = said.iter().flatten().any(|guess| guess.token != best.token);
        let kind = bucket(best.trust, &LEVELS) * VOTES + others.min(2) * 2 + usize::from(against);
        Some(Link { token: best.token, trust: self.joint.trust(kind), by, kind: Some(kind), said })
    }

    /// Learns from a pass whose input was the first `offered` guesses of a chain.
    pub(super) fn settle(&mut self, chain: &Chain, offered: usize, seen: &Seen<'_>, stats: &mut BlockStats) {
        for (place, (link, &token)) in chain.links.iter().zip(seen.committed()).enumerate() {
            for (proposer, guess) in self.all.iter_mut().zip(&link.said) {
                if let Some(guess) = guess {
                    proposer.learn(guess, guess.token == token);
                }
            }
            let hit = link.token == token;
            if let Some(kind) = link.kind {
                self.joint.learn(kind, hit);
            }
            if hit && place < offered {
                stats.proposers[link.by].accepted += 1;
            }
            if !hit {
                break;
            }
        }
        for link in chain.links.iter().take(offered) {
            stats.proposers[link.by].offered += 1;
        }
        self.all.iter_mut().for_each(|proposer| proposer.observe(seen));
        if !self.pool {
            self.text.extend_from_slice(seen.committed());
        }
    }
}

/// Sorts of votes: how many others say the same, up to two, and whether any says something else.
const VOTES: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::{Sampling, top_of};
    use crate::ops::RowTop;

    /// The best of a row that says one token.
    fn top(token: u32) -> RowTop {
        let mut logits = [0.0; 40];
        logits[token as usize] = 5.0;
        top_of(&logits)
    }

    /// Generates `said` behind a prompt, a token a pass; each pass has 30 for a wrong guess, behind which 31 would come.
    fn generate(proposers: &mut Proposers, prompt: &[u32], said: &[u32]) {
        let sampler = Sampler::new(&Sampling::default(), &[]);
        let mut stats = BlockStats { proposers: proposers.stats(false), ..BlockStats::default() };
        proposers.begin(prompt);
        proposers.read(prompt);
        let mut text = prompt.to_vec();
        for &token in said {
            let (start, input) = (text.len() - 1, [text[text.len() - 1], 30]);
            text.push(token);
            let tops = [top(token), top(31)];
            let seen =
                Seen { text: &text, start, input: &input, tops: &tops, accepted: 0, sampler: &sampler };
            proposers.settle(&Chain::default(), 0, &seen, &mut stats);
        }
    }

    /// What is guessed behind the prompt of a generation that begins.
    fn guessed(proposers: &mut Proposers, prompt: &[u32]) -> Vec<u32> {
        proposers.begin(prompt);
        proposers.read(prompt);
        let reach = Reach { most: 3, least: 0.0, ends: &[] };
        let sampler = Sampler::new(&Sampling::default(), &[]);
        proposers.chain(&mut prompt.to_vec(), reach, &sampler, &Certain::default()).tokens().collect()
    }

    #[test]
    fn nothing_is_guessed_from_texts_that_a_prompt_does_not_continue() {
        let (prompt, said) = ([1, 2, 3], [11, 12, 13, 14]);
        for (next, goes_on, expected) in [
            (&[1, 2, 3, 11, 12, 13, 14, 30][..], true, &[31][..]),
            (&[1, 2, 3, 11], false, &[12, 13, 14]),
            (&[1, 2, 3, 11, 12, 13], false, &[14]),
            (&[1, 2, 3, 11, 12, 13, 15, 30], false, &[31]),
            (&[30], false, &[31]),
        ] {
            for pool in [false, true] {
                let mut proposers = Proposers::new(pool);
                generate(&mut proposers, &prompt, &said);
                let known = if pool || goes_on { expected } else { &[] };
                assert_eq!(guessed(&mut proposers, next), known, "{next:?}, pool {pool}");
                assert_eq!(guessed(&mut Proposers::new(pool), next), [0; 0]);
            }
        }
        // Once forgotten, it does not come back with the text of then.
        let mut proposers = Proposers::new(false);
        generate(&mut proposers, &prompt, &said);
        generate(&mut proposers, &[7], &[8]);
        assert_eq!(guessed(&mut proposers, &[1, 2, 3, 11, 12, 13, 14, 20]), [0; 0]);
        generate(&mut proposers, &[8], &[9]);
        assert_eq!(guessed(&mut proposers, &[8, 9, 11]), [0; 0]);
        // A generation that ended before it said anything takes nothing along, nor does it hide what was said before.
        let mut proposers = Proposers::new(false);
        generate(&mut proposers, &prompt, &said);
        generate(&mut proposers, &[1, 2, 3, 11, 12, 13, 14, 5], &[]);
        assert_eq!(guessed(&mut proposers, &[1, 2, 3, 11, 12, 13, 14, 30]), [0; 0]);
        let mut proposers = Proposers::new(false);
        generate(&mut proposers, &prompt, &said);
        generate(&mut proposers, &[1, 2, 3, 11, 12, 13, 14, 5], &[]);
        assert_eq!(guessed(&mut proposers, &[1, 2, 3, 11, 12, 13, 14, 5, 30]), [31]);
    }
}
