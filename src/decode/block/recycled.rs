//! Guesses from logits the passes made anyway: the best successors of what stood there, kept for the next time it does.

use super::proposer::{Context, Guess, Proposer, Seen};
use super::trust::{Calibration, bucket};

/// Slots of the table.
const SLOTS: usize = 1 << 16;

/// Successors that are kept.
const KEPT: usize = 4;

/// Most tokens that say what stood there.
const ORDERS: usize = 3;

/// Margins of choices that are trusted alike.
const MARGINS: [f32; 6] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0];

/// First estimates by margin, for each order.
const PRIORS: [[f32; 7]; ORDERS] = [
    [0.1, 0.12, 0.15, 0.2, 0.3, 0.4, 0.5],
    [0.25, 0.3, 0.35, 0.45, 0.55, 0.65, 0.75],
    [0.35, 0.4, 0.45, 0.55, 0.65, 0.75, 0.85],
];

/// A table of the best successors after one, two and three tokens; what was seen last stays (2.4 MB).
pub struct Recycled {
    slots: Vec<Slot>,
    calibration: Calibration,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Which tokens it is about; 0 where it is empty.
    tag: u32,
    ids: [u32; KEPT],
    logits: [f32; KEPT],
}

impl Default for Recycled {
    fn default() -> Self {
        Self {
            slots: vec![Slot::default(); SLOTS],
            calibration: Calibration::new(PRIORS.into_iter().flatten()),
        }
    }
}

/// Slot and tag of some tokens, the last one first.
fn place(tokens: &[u32]) -> (usize, u32) {
    let hash = hash(tokens);
    (hash as usize % SLOTS, (hash >> 32) as u32 | 1)
}

/// A hash that is the same every time.
pub(super) fn hash(tokens: &[u32]) -> u64 {
    let mut hash = tokens.len() as u64;
    for &token in tokens {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash ^= hash >> 29;
    }
    hash.wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (hash >> 32)
}

impl Proposer for Recycled {
    fn name(&self) -> &'static str {
        "recycled"
    }

    fn begin(&mut self) {
        self.calibration.fade();
    }

    fn forget(&mut self) {
        self.slots.fill(Slot::default());
    }

    fn observe(&mut self, seen: &Seen<'_>) {
        for (row, top) in seen.tops.iter().enumerate() {
            let mut slot = Slot::default();
            slot.ids.copy_from_slice(&top.ids[..KEPT]);
            slot.logits.copy_from_slice(&top.logits[..KEPT]);
            let mut tokens = [0; ORDERS];
            for order in 0..ORDERS {
                let Some(token) = seen.before(row, order) else { break };
                tokens[order] = token;
                let (at, tag) = place(&tokens[..=order]);
                // What was seen behind a wrong guess is worth less than what was not.
                if row <= seen.accepted || self.slots[at].tag != tag {
                    self.slots[at] = Slot { tag, ..slot };
                }
            }
        }
    }

    fn propose(&mut self, context: &Context<'_>) -> Option<Guess> {
        let mut tokens = [0; ORDERS];
        let most = context.text.len().min(ORDERS);
        context.text.iter().rev().zip(&mut tokens).for_each(|(&token, place)| *place = token);
        for order in (0..most).rev() {
            let (at, tag) = place(&tokens[..=order]);
            let slot = &self.slots[at];
            if slot.tag != tag {
                continue;
            }
            let known = |(_, logit): &(u32, f32)| *logit > f32::NEG_INFINITY;
            let pairs = slot.ids.into_iter().zip(slot.logits).take_while(known);
            let (token, margin) = context.sampler.likely(pairs, context.text.len())?;
            let kind = order * (MARGINS.len() + 1) + bucket(margin, &MARGINS);
            return Some(Guess { token, trust: self.calibration.trust(kind), kind });
        }
        None
    }

    fn learn(&mut self, guess: &Guess, hit: bool) {
        self.calibration.learn(guess.kind, hit);
    }
}
