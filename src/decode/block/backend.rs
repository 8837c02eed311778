//! The loop over blocks: prefill in chunks, then guess, evaluate, choose, commit, again.

use std::time::Instant;

use super::chain::{Certain, Chain, Proposers, Reach};
use super::{BlockModel, BlockOptions, BlockSize, BlockStats, Costs, MOST_ROWS, Seen};
use crate::decode::constraint::Walk;
use crate::decode::prompt::{check_prompt, common_prefix};
use crate::decode::sample::Sampler;
use crate::decode::{
    Allowed, Backend, BackendError, Generation, Memory, Sampling, SamplingError, Step, TokenLogprobs, Wanted,
};
use crate::model::{Causal, Logits};
use crate::ops::RowTop;

/// A chain that adapts ends where all of it is less likely right than this: no row is that cheap.
const HOPELESS: f32 = 0.03;

/// A causal model that generates blocks. What it has read stays in the key-value cache: a prompt that starts the same way
/// is read from where it differs. Results do not depend on how tokens were cut into passes, so neither reuse nor guesses
/// change a bit of what follows.
pub struct CausalBackend<M = Causal> {
    model: M,
    options: BlockOptions,
    /// Ids from here on are padding: neither taken nor generated.
    vocabulary: usize,
    /// Tokens that have run and whose keys and values the cache holds, from position 0 on. Refused guesses are no part
    /// of them.
    cached: Vec<u32>,
    /// None where every pass has one row.
    guessing: Option<Guessing>,
}

/// What guesses come from, and whether they pay.
struct Guessing {
    proposers: Proposers,
    costs: Costs,
    /// A bit for each width that has run: the model prepares the first pass of one, so that its time is no other's.
    begun: u32,
}

impl Guessing {
    /// A pass of `width` rows took so many seconds.
    fn took(&mut self, width: usize, seconds: f64) {
        let bit = 1 << width.min(MOST_ROWS);
        if self.begun & bit != 0 {
            self.costs.learn(width, seconds);
        }
        self.begun |= bit;
    }
}

impl<M: BlockModel> CausalBackend<M> {
    /// Generates with `model`.
    pub fn new(model: M, options: BlockOptions) -> Self {
        let vocabulary = model.vocabulary();
        let guesses = options.size != BlockSize::Fixed(1) && model.logit_rows() > 1;
        let guessing = guesses.then(|| Guessing {
            proposers: Proposers::new(options.pool),
            costs: Costs::default(),
            begun: 0,
        });
        Self { model, options, vocabulary, cached: Vec::new(), guessing }
    }

    /// Keeps to ids below `tokens`: models may have more rows than their tokenizers have tokens.
    #[must_use]
    pub fn with_vocabulary(mut self, tokens: usize) -> Self {
        self.vocabulary = self.vocabulary.min(tokens);
        self.model.limit(self.vocabulary);
        self
    }

    /// Starts from these costs of passes.
    #[must_use]
    pub fn with_costs(mut self, costs: Costs) -> Self {
        if let Some(guessing) = &mut self.guessing {
            guessing.costs = costs;
        }
        self
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// What passes cost, where their width adapts.
    pub fn costs(&self) -> Option<&Costs> {
        self.guessing
            .as_ref()
            .filter(|_| self.options.size == BlockSize::Auto)
            .map(|guessing| &guessing.costs)
    }

    /// Most rows of a block.
    fn width(&self) -> usize {
        let wanted = match self.options.size {
            BlockSize::Auto => MOST_ROWS,
            BlockSize::Fixed(rows) => rows.clamp(1, MOST_ROWS),
        };
        wanted.min(self.model.logit_rows()).min(self.model.rows()).max(1)
    }
}

impl<M: BlockModel> Backend for CausalBackend<M> {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        check_prompt(prompt, self.model.context(), self.vocabulary)?;
        let common = common_prefix(&self.cached, prompt);
        // The last token is always run: its logits are not kept.
        let reused = common.min(prompt.len() - 1);
        let mut stats = BlockStats::default();
        if let Some(guessing) = &mut self.guessing {
            guessing.proposers.begin(prompt);
            stats.proposers = guessing.proposers.stats(sampling.constraint.is_some());
        }
        Ok(Box::new(CausalGeneration {
            width: self.width(),
            sampler: Sampler::new(sampling, prompt),
            walk: sampling.constraint.as_ref().map(|constraint| Walk::new(constraint, prompt)),
            backend: self,
            text: prompt.to_vec(),
            prompt: prompt.len(),
            reused,
            done: reused,
            wanted: Wanted::default(),
            drafted: None,
            over: false,
            stats,
            guessed_by: Vec::new(),
            logprobs: Vec::new(),
        }))
    }

    fn context_length(&self) -> usize {
        self.model.context()
    }

    fn memory(&self) -> Memory {
        self.model.memory()
    }
}

struct CausalGeneration<'a, M> {
    backend: &'a mut CausalBackend<M>,
    /// Most rows of a pass after the prompt.
    width: usize,
    /// Prompt and committed tokens.
    text: Vec<u32>,
    /// Tokens of the prompt.
    prompt: usize,
    sampler: Sampler,
    /// Where the reply is in what it must match.
    walk: Option<Walk>,
    reused: usize,
    /// Positions in the cache. After the prompt all of the text but its last token.
    done: usize,
    wanted: Wanted,
    /// Guesses that were shown and are to be evaluated next, and how many of them.
    drafted: Option<(Chain, usize)>,
    /// A step failed.
    over: bool,
    stats: BlockStats,
    /// Who guessed each token that was committed last.
    guessed_by: Vec<Option<usize>>,
    /// Log-probabilities of the tokens that were committed last.
    logprobs: Vec<TokenLogprobs>,
}

impl<M: BlockModel> CausalGeneration<'_, M> {
    fn advance(&mut self) -> Result<Step, BackendError> {
        if self.over {
            return Err("the generation has ended with an error".into());
        }
        if self.done < self.prompt {
            return self.prefill();
        }
        if self.text.len() == self.prompt {
            // The last pass of the prompt has made these logits.
            let start = self.prompt - 1;
            let input = [self.text[start]];
            let choices = self.choose(start, &input)?;
            return Ok(self.commit(start, &input, choices, &Chain::default(), 0));
        }
        let (chain, guesses) = match self.drafted.take() {
            Some(drafted) => drafted,
            None => {
                let (chain, guesses) = self.guess()?;
                if self.wanted.drafts && guesses > 0 {
                    let tokens = chain.tokens().take(guesses).collect();
                    self.drafted = Some((chain, guesses));
                    return Ok(Step::Draft { tokens, entropy: Vec::new() });
                }
                (chain, guesses)
            }
        };
        self.pass(&chain, guesses)
    }

    fn prefill(&mut self) -> Result<Step, BackendError> {
        let (total, start) = (self.prompt, self.done);
        let backend = &mut *self.backend;
        let end = total.min(start + backend.model.rows());
        let logits = if end == total { Logits::Last } else { Logits::None };
        backend.cached.truncate(start);
        backend.model.forward(&self.text[start..end], start, logits)?;
        // The device is at work meanwhile.
        if let Some(guessing) = &mut backend.guessing {
            guessing.proposers.read(&self.text[..end]);
        }
        // Progress and cancellation mean what they say: the chunk has run. Only then the cache ends with it.
        backend.model.finish()?;
        backend.cached.extend_from_slice(&self.text[start..end]);
        self.done = end;
        Ok(Step::Prefill { done: end, total })
    }

    /// Guesses for the next pass, and how many of them to evaluate.
    fn guess(&mut self) -> Result<(Chain, usize), BackendError> {
        let left = self.wanted.most.saturating_sub(self.text.len() - self.prompt);
        // A pass commits one token more than it has guesses; none of its rows lies past the context.
        let room = (self.backend.model.context() - self.done).min(left).min(self.width);
        let Some(guessing) = self.backend.guessing.as_mut().filter(|_| room > 1) else {
            return Ok((Chain::default(), 0));
        };
        let certain = match &mut self.walk {
            Some(walk) => {
                walk.allowed()?;
                Certain { forced: walk.forced().collect(), first: walk.allowed()? }
            }
            None => Certain::default(),
        };
        let adapts = self.backend.options.size == BlockSize::Auto;
        let reach =
            Reach { most: room - 1, least: if adapts { HOPELESS } else { 0.0 }, ends: &self.wanted.ends };
        let chain = guessing.proposers.chain(&mut self.text, reach, &self.sampler, &certain);
        let guesses = if adapts { guessing.costs.best(chain.trusts()) } else { chain.tokens().count() };
        Ok((chain, guesses))
    }

    /// Evaluates the last token and the first `guesses` of a chain.
    fn pass(&mut self, chain: &Chain, guesses: usize) -> Result<Step, BackendError> {
        let start = self.done;
        let input: Vec<u32> =
            self.text[start..].iter().copied().chain(chain.tokens().take(guesses)).collect();
        let began = Instant::now();
        self.backend.cached.truncate(start);
        self.backend.model.forward(&input, start, if guesses == 0 { Logits::Last } else { Logits::All })?;
        let choices = self.choose(start, &input)?;
        if let Some(guessing) = &mut self.backend.guessing {
            guessing.took(input.len(), began.elapsed().as_secs_f64());
        }
        self.backend.cached.extend_from_slice(&input[..choices.tokens.len()]);
        Ok(self.commit(start, &input, choices, chain, guesses))
    }

    /// What the model chooses at the rows of a pass that began at `start`, as far as its rows follow right tokens and have
    /// numbers for logits.
    fn choose(&mut self, start: usize, input: &[u32]) -> Result<Choices, BackendError> {
        let tops = if self.backend.guessing.is_some() || self.sampler.is_greedy() {
            self.backend.model.tops()?
        } else {
            Vec::new()
        };
        let mut tokens = Vec::with_capacity(input.len());
        self.logprobs.clear();
        for row in 0..input.len() {
            let token = match self.choose_at(row, start + row + 1, tops.get(row))? {
                Ok(token) => token,
                // The rows before are sound. If the reply goes on, the next pass begins with this one, and fails.
                Err(_) if !tokens.is_empty() => break,
                Err(error) => return Err(error),
            };
            tokens.push(token);
            if input.get(row + 1) != Some(&token) || self.wanted.ends.contains(&token) {
                break;
            }
        }
        self.logprobs.truncate(tokens.len());
        Ok(Choices { tops, tokens })
    }

    /// The choice for a position, from the row before it; what may stand there is asked only now that all before it is
    /// certain. The inner error ends the text here: there is no choice.
    fn choose_at(
        &mut self,
        row: usize,
        position: usize,
        top: Option<&RowTop>,
    ) -> Result<Result<u32, BackendError>, BackendError> {
        let (model, vocabulary) = (&self.backend.model, self.backend.vocabulary);
        let sampler = &mut self.sampler;
        let allowed = match self.walk.as_mut().map(Walk::allowed) {
            Some(Ok(allowed)) => allowed,
            Some(Err(error)) => return Ok(Err(error.into())),
            None => Allowed::All,
        };
        let mut chosen = top.and_then(|top| sampler.choose_from(top, allowed)).map(Ok);
        if chosen.is_none() || self.wanted.logprobs.is_some() {
            let logprobs = self.wanted.logprobs;
            let mut told = None;
            model.look(row, &mut |logits| {
                let logits = &logits[..logits.len().min(vocabulary)];
                let chosen = chosen.get_or_insert_with(|| sampler.choose_among(logits, position, allowed));
                if let (Ok(token), Some(most)) = (chosen, logprobs) {
                    told = Some(TokenLogprobs::of(logits, *token, most));
                }
            })?;
            self.logprobs.extend(told);
        }
        let token = match chosen.unwrap_or(Err(SamplingError::NoLogits)) {
            Ok(token) => token,
            Err(error) => return Ok(Err(error.into())),
        };
        let taken = self.walk.as_mut().map_or(Ok(()), |walk| walk.take(token));
        Ok(taken.map(|()| token).map_err(Into::into))
    }

    /// Puts what was chosen behind the text.
    fn commit(
        &mut self,
        start: usize,
        input: &[u32],
        choices: Choices,
        chain: &Chain,
        guesses: usize,
    ) -> Step {
        let Choices { tops, tokens } = choices;
        self.done = start + tokens.len();
        self.text.extend_from_slice(&tokens);
        self.stats.passes += 1;
        self.stats.evaluated += input.len();
        self.stats.committed += tokens.len();
        self.guessed_by = chain.hits(guesses, &tokens);
        self.guessed_by.resize(tokens.len(), None);
        if let Some(guessing) = &mut self.backend.guessing {
            let seen = Seen {
                text: &self.text,
                start,
                input,
                tops: &tops,
                accepted: tokens.len() - 1,
                sampler: &self.sampler,
            };
            guessing.proposers.settle(chain, guesses, &seen, &mut self.stats);
        }
        Step::Commit(tokens)
    }
}

/// What a pass said.
struct Choices {
    /// The best of each row, where they were asked for.
    tops: Vec<RowTop>,
    /// The model's choices, at least one; all but the last are guesses that were right.
    tokens: Vec<u32>,
}

impl<M: BlockModel> Generation for CausalGeneration<'_, M> {
    fn step(&mut self) -> Result<Step, BackendError> {
        // After a failure nobody knows what ran, nor whether its numbers are sound.
        self.advance().inspect_err(|_| {
            self.over = true;
            self.backend.cached.clear();
        })
    }

    fn want(&mut self, wanted: Wanted) {
        self.wanted = wanted;
    }

    fn kept(&mut self, tokens: usize) {
        for by in self.guessed_by.drain(tokens.min(self.guessed_by.len())..) {
            self.stats.committed -= 1;
            if let Some(proposer) = by.and_then(|by| self.stats.proposers.get_mut(by)) {
                proposer.accepted -= 1;
            }
        }
    }

    fn logprobs(&mut self) -> Vec<TokenLogprobs> {
        std::mem::take(&mut self.logprobs)
    }

    fn cached_tokens(&self) -> usize {
        self.reused
    }

    fn blocks(&self) -> Option<BlockStats> {
        Some(self.stats.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pass_of_a_width_says_nothing_of_its_cost() {
        let new = || Guessing { proposers: Proposers::new(false), costs: Costs::default(), begun: 0 };
        let mut guessing = new();
        (0..3).for_each(|_| guessing.took(1, 1.0));
        let before = guessing.costs.of(4);
        guessing.took(4, 100.0);
        assert_eq!(guessing.costs.of(4), before);
        guessing.took(4, 100.0);
        assert!(guessing.costs.of(4) > before);
    }
}
