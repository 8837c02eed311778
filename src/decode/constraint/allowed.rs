//! Which tokens may come next.

use llguidance::toktrie::SimpleVob;

/// Tokens by a bit each.
#[derive(Debug, Clone)]
pub struct Mask(SimpleVob);

impl Mask {
    pub(super) fn new(set: SimpleVob) -> Self {
        Self(set)
    }

    /// Adds a token; one past the vocabulary is left out.
    pub(super) fn add(&mut self, token: u32) {
        if (token as usize) < self.0.len() {
            self.0.allow_token(token);
        }
    }

    /// Whether a token is among them.
    #[must_use]
    pub fn has(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }
}

/// Which tokens may be chosen.
#[derive(Debug, Clone, Copy, Default)]
pub enum Allowed<'m> {
    /// Any.
    #[default]
    All,
    /// This one.
    One(u32),
    /// These.
    Only(&'m Mask),
    /// Any but these.
    Except(&'m [u32]),
}

impl Allowed<'_> {
    /// Whether a token is among them.
    #[must_use]
    pub fn has(self, token: u32) -> bool {
        match self {
            Self::All => true,
            Self::One(only) => token == only,
            Self::Only(mask) => mask.has(token),
            Self::Except(tokens) => !tokens.contains(&token),
        }
    }

    /// Makes all others impossible.
    pub(in crate::decode) fn keep(self, logits: &mut [f32]) {
        match self {
            Self::All => {}
            Self::One(only) => {
                let logit = logits.get(only as usize).copied();
                logits.fill(f32::NEG_INFINITY);
                if let (Some(place), Some(logit)) = (logits.get_mut(only as usize), logit) {
                    *place = logit;
                }
            }
            Self::Only(mask) => {
                let mut words = mask.0.as_slice().iter();
                for logits in logits.chunks_mut(32) {
                    let word = words.next().copied().unwrap_or(0);
                    if word == u32::MAX {
                        continue;
                    }
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
            Self::Except(tokens) => {
                for &token in tokens {
                    if let Some(logit) = logits.get_mut(token as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}
