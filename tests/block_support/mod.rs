//! A causal model that answers from a hash of what its cache holds: any stale or missing position shows in its text.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::rc::Rc;

use axe::decode::block::BlockModel;
use axe::decode::{
    Backend, BlockOptions, BlockSize, BlockStats, CausalBackend, Memory, RowTop, Sampling, Step, Wanted,
    top_of,
};
use axe::model::{Logits, ModelError};

/// A pass as it was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub start: usize,
    pub tokens: Vec<u32>,
    pub logits: Logits,
}

/// What goes wrong with the scripted model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The pass of this number fails.
    Pass(usize),
    /// The logits of the row at this position are not numbers if its token is not `but`.
    NotANumber { position: usize, but: Option<u32> },
}

/// The scripted model.
#[derive(Clone)]
pub struct Hashed {
    pub vocabulary: usize,
    pub context: usize,
    pub rows: usize,
    pub logit_rows: usize,
    /// How much of a logit depends on the last two tokens alone (and on six sorts of them); the rest depends on all of the text. The more, the more
    /// the text repeats itself.
    pub habit: f32,
    pub fault: Option<Fault>,
    pub calls: Rc<RefCell<Vec<Call>>>,
    pub cache: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
}

impl Default for Hashed {
    fn default() -> Self {
        Self {
            vocabulary: 60,
            context: 400,
            rows: 32,
            logit_rows: 16,
            habit: 0.96,
            fault: None,
            calls: Rc::default(),
            cache: Vec::new(),
            logits: Vec::new(),
        }
    }
}

fn mix(seed: u64, value: u64) -> u64 {
    let mut x = (seed ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 31;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 29)
}

fn unit(x: u64) -> f32 {
    (x >> 40) as f32 / (1 << 24) as f32
}

impl Hashed {
    fn row(&self, end: usize) -> Vec<f32> {
        let text = &self.cache[..end];
        let all = text.iter().fold(1, |hash, &token| mix(hash, u64::from(token)));
        let near = text.iter().rev().take(2).fold(2, |hash, &token| mix(hash, u64::from(token % 6)));
        let logit = |token: u64| {
            let (habit, whim) = (unit(mix(near, token)), unit(mix(all, token)));
            8.0 * (self.habit * habit + (1.0 - self.habit) * whim)
        };
        (0..self.vocabulary as u64).map(logit).collect()
    }
}

impl BlockModel for Hashed {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn logit_rows(&self) -> usize {
        self.logit_rows
    }

    fn forward(&mut self, tokens: &[u32], start: usize, logits: Logits) -> Result<(), ModelError> {
        let most = if logits == Logits::All { self.logit_rows } else { self.rows };
        assert!(!tokens.is_empty() && tokens.len() <= most, "{} rows, at most {most}", tokens.len());
        assert!(tokens.iter().all(|&token| (token as usize) < self.vocabulary));
        assert!(start <= self.cache.len(), "positions {}..{start} are empty", self.cache.len());
        if start + tokens.len() > self.context {
            return Err(ModelError::PastContext { position: self.context, context: self.context });
        }
        let call = Call { start, tokens: tokens.to_vec(), logits };
        self.calls.borrow_mut().push(call);
        // What lies behind stays, as it does on a device.
        self.cache.resize(self.cache.len().max(start + tokens.len()), 0);
        self.cache[start..start + tokens.len()].copy_from_slice(tokens);
        if self.fault == Some(Fault::Pass(self.calls.borrow().len())) {
            self.cache.fill(7);
            return Err(ModelError::UnknownToken { id: 0, vocabulary: 0 });
        }
        let ends = match logits {
            Logits::None => 0..0,
            Logits::Last => start + tokens.len()..start + tokens.len() + 1,
            Logits::All => start + 1..start + tokens.len() + 1,
        };
        self.logits = ends
            .map(|end| {
                let mut row = self.row(end);
                if let Some(Fault::NotANumber { position, but }) = self.fault
                    && position == end - 1
                    && but != Some(self.cache[end - 1])
                {
                    row[3] = f32::NAN;
                }
                row
            })
            .collect();
        Ok(())
    }

    fn finish(&self) -> Result<(), ModelError> {
        Ok(())
    }

    fn tops(&self, rows: usize, limit: usize) -> Result<Vec<RowTop>, ModelError> {
        assert_eq!(rows, self.logits.len(), "every row with logits is asked for");
        Ok(self.logits.iter().map(|row| top_of(&row[..limit])).collect())
    }

    fn look(&self, row: usize, look: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        look(&self.logits[row]);
        Ok(())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }
}

/// Blocks of up to so many rows.
pub fn fixed(rows: usize) -> BlockOptions {
    BlockOptions { size: BlockSize::Fixed(rows), pool: false }
}

/// Widths that adapt.
pub fn auto() -> BlockOptions {
    BlockOptions::default()
}

/// A generation, whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    pub tokens: Vec<u32>,
    pub cached: usize,
    pub stats: BlockStats,
    pub drafts: usize,
}

/// Generates up to `wanted.most` tokens, or up to one that ends.
pub fn generate<M: BlockModel>(
    backend: &mut CausalBackend<M>,
    prompt: &[u32],
    sampling: &Sampling,
    wanted: &Wanted,
) -> Told {
    let mut generation = backend.start(prompt, sampling).unwrap();
    generation.want(wanted.clone());
    let (mut tokens, mut drafts, mut shown) = (Vec::new(), 0, None);
    while tokens.len() < wanted.most && !tokens.last().is_some_and(|last| wanted.ends.contains(last)) {
        match generation.step().unwrap() {
            Step::Prefill { .. } => assert!(tokens.is_empty()),
            Step::Commit(new) => {
                assert!(!new.is_empty());
                if let Some(draft) = shown.take() {
                    let draft: Vec<u32> = draft;
                    assert!(new.len() <= draft.len() + 1);
                    assert_eq!(
                        new[..new.len() - 1],
                        draft[..new.len() - 1],
                        "a draft is what is evaluated next"
                    );
                }
                tokens.extend(new);
            }
            Step::Draft { tokens, entropy } => {
                assert!(wanted.drafts && !tokens.is_empty() && entropy.is_empty() && shown.is_none());
                drafts += 1;
                shown = Some(tokens);
            }
        }
    }
    let stats = generation.blocks().unwrap();
    Told { tokens, cached: generation.cached_tokens(), stats, drafts }
}

/// Up to so many tokens.
pub fn most(most: usize) -> Wanted {
    Wanted { most, ..Wanted::default() }
}
