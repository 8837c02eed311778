//! Guesses from what earlier generations said: the token that followed the same few tokens.

use super::proposer::{Context, Guess, Proposer, Seen};
use super::recycled::hash;
use super::trust::{Calibration, bucket};

/// Slots of the table.
const SLOTS: usize = 1 << 18;

/// Tokens that must be the same, longest first.
const ORDERS: [usize; 3] = [8, 5, 3];

/// How often a token must have followed to be trusted more.
const COUNTS: [u32; 3] = [2, 4, 8];

/// First estimates by count, for each order.
const PRIORS: [[f32; 4]; 3] = [[0.6, 0.75, 0.85, 0.9], [0.45, 0.6, 0.75, 0.85], [0.2, 0.3, 0.45, 0.6]];

/// What followed some tokens, over all generations; the oldest give way (3 MB). It is for those who want this, and never
/// forgets.
pub struct Pool {
    slots: Vec<Slot>,
    calibration: Calibration,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Which tokens it is about; 0 where it is empty.
    tag: u32,
    /// What followed.
    token: u32,
    /// How often it did, less the times that another one did.
    count: u32,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            slots: vec![Slot::default(); SLOTS],
            calibration: Calibration::new(PRIORS.into_iter().flatten()),
        }
    }
}

/// Slot and tag of what follows the last `order` tokens of a text.
fn place(text: &[u32], order: usize) -> Option<(usize, u32)> {
    let hash = hash(text.get(text.len().checked_sub(order)?..)?);
    Some((hash as usize % SLOTS, (hash >> 32) as u32 | 1))
}

impl Proposer for Pool {
    fn name(&self) -> &'static str {
        "pool"
    }

    fn begin(&mut self) {
        self.calibration.fade();
    }

    fn observe(&mut self, seen: &Seen<'_>) {
        for (at, &token) in (seen.start + 1..).zip(seen.committed()) {
            for order in ORDERS {
                let Some((slot, tag)) = place(&seen.text[..at], order) else { continue };
                let slot = &mut self.slots[slot];
                if slot.tag != tag || (slot.token != token && slot.count <= 1) {
                    *slot = Slot { tag, token, count: 1 };
                } else if slot.token == token {
                    slot.count = slot.count.saturating_add(1);
                } else {
                    slot.count /= 2;
                }
            }
        }
    }

    fn propose(&mut self, context: &Context<'_>) -> Option<Guess> {
        ORDERS.into_iter().enumerate().find_map(|(rank, order)| {
            let (slot, tag) = place(context.text, order)?;
            let slot = self.slots.get(slot).filter(|slot| slot.tag == tag)?;
            let kind = rank * (COUNTS.len() + 1) + bucket(slot.count, &COUNTS);
            Some(Guess { token: slot.token, trust: self.calibration.trust(kind), kind })
        })
    }

    fn learn(&mut self, guess: &Guess, hit: bool) {
        self.calibration.learn(guess.kind, hit);
    }
}
