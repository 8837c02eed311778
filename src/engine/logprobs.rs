//! Log-probabilities of a reply's tokens, held back as long as their text is.

use std::collections::VecDeque;

use super::event::ContentToken;
use crate::decode::TokenLogprobs;

/// How far the content of a reply is: its bytes, held back ones and those of an incomplete character included, and bytes
/// that it was made of.
type Place = (usize, usize);

/// Tokens whose text is not out yet, and may never be: it may be a call of a tool, or be cut off by a stop string.
#[derive(Default)]
pub(super) struct HeldBack {
    /// Tokens of which it is not known yet whether they are content, with how many bytes each prints.
    open: Vec<(usize, TokenLogprobs)>,
    /// Those that are.
    content: VecDeque<ContentToken>,
    /// Bytes of content that are out.
    released: usize,
}

impl HeldBack {
    /// A token that is no thought and prints so many bytes.
    pub(super) fn push(&mut self, logprobs: TokenLogprobs, bytes: usize) {
        if bytes > 0 {
            self.open.push((bytes, logprobs));
        }
    }

    /// The content has grown: by the last tokens that make up so many bytes. Those before them were something else.
    pub(super) fn settle(&mut self, before: Place, after: Place) {
        let grown = after.1 - before.1;
        if grown == 0 {
            return;
        }
        let (mut covered, mut end) = (0, after.0);
        let mut grew = Vec::new();
        while covered < grown
            && let Some((bytes, logprobs)) = self.open.pop()
        {
            covered += bytes;
            end = end.saturating_sub(bytes).max(before.0);
            grew.push(ContentToken { start: end, logprobs });
        }
        self.open.clear();
        self.content.extend(grew.into_iter().rev());
    }

    /// Text of the content is out: the tokens that it is made of, as far as none of them came before.
    pub(super) fn release(&mut self, text: &str) -> Vec<ContentToken> {
        self.released += text.len();
        let out = self.content.iter().take_while(|token| token.start < self.released).count();
        self.content.drain(..out).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(token: u32) -> TokenLogprobs {
        TokenLogprobs { token, logprob: 0.0, top: Vec::new() }
    }

    fn starts(tokens: &[ContentToken]) -> Vec<(u32, usize)> {
        tokens.iter().map(|token| (token.logprobs.token, token.start)).collect()
    }

    #[test]
    fn tokens_come_with_their_text() {
        let mut held = HeldBack::default();
        held.push(told(1), 3);
        held.settle((0, 0), (3, 3));
        assert_eq!(starts(&held.release("ab")), [(1, 0)]);
        held.push(told(2), 1);
        held.settle((3, 3), (4, 4));
        assert_eq!(starts(&held.release("c")), []);
        assert_eq!(starts(&held.release("d")), [(2, 3)]);
        // Two bytes of a character, then the rest of it.
        held.push(told(3), 2);
        held.settle((4, 4), (6, 6));
        held.push(told(4), 2);
        held.settle((6, 6), (8, 8));
        assert_eq!(starts(&held.release("\u{1f44d}")), [(3, 4), (4, 6)]);
        // A byte that belongs to no character becomes three with the next one.
        held.push(told(8), 1);
        held.settle((8, 8), (9, 9));
        held.push(told(9), 1);
        held.settle((9, 9), (12, 10));
        assert_eq!(starts(&held.release("\u{fffd},")), [(8, 8), (9, 11)]);
        held.push(told(5), 0);
        assert!(held.release("x").is_empty());
    }

    #[test]
    fn what_turns_out_to_be_something_else_is_left_out() {
        let mut held = HeldBack::default();
        for token in 1..4 {
            held.push(told(token), 2);
            held.settle((0, 0), (0, 0));
        }
        // The last token ended a call with one byte and went on with another one.
        held.settle((0, 0), (1, 1));
        assert_eq!(starts(&held.release("x")), [(3, 0)]);
        // Held back, and content after all.
        held.push(told(6), 2);
        held.push(told(7), 3);
        held.settle((1, 1), (6, 6));
        assert_eq!(starts(&held.release("abcde")), [(6, 1), (7, 3)]);
    }
}
