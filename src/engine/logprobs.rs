//! Log-probabilities of a reply's tokens, held back as long as their text is.

use std::collections::VecDeque;

use super::event::ContentToken;
use crate::decode::TokenLogprobs;

/// Tokens whose text is not out yet, and may never be: a stop string may cut it off.
#[derive(Default)]
pub(super) struct HeldBack {
    tokens: VecDeque<ContentToken>,
    /// Bytes of content that are out.
    released: usize,
}

impl HeldBack {
    /// A token of the content whose text begins at a byte of it.
    pub(super) fn push(&mut self, start: usize, logprobs: TokenLogprobs) {
        self.tokens.push_back(ContentToken { start, logprobs });
    }

    /// Text of the content is out: the tokens that it is made of, as far as none of them came before.
    pub(super) fn release(&mut self, text: &str) -> Vec<ContentToken> {
        self.released += text.len();
        let out = self.tokens.iter().take_while(|token| token.start < self.released).count();
        self.tokens.drain(..out).collect()
    }
}
