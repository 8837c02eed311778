//! Log-probabilities of a reply's tokens, held back as long as their text is.

use std::collections::VecDeque;
use std::ops::Range;

use super::event::ContentToken;
use crate::decode::TokenLogprobs;
use crate::text::Origin;

/// Tokens whose text is not out yet, and may never be: it may be a call of a tool, or be cut off by a stop string.
#[derive(Default)]
pub(super) struct HeldBack {
    /// Tokens of which it is not known yet whether they are content, with the bytes that each has written.
    open: VecDeque<(Range<usize>, TokenLogprobs)>,
    /// Those that are.
    content: VecDeque<ContentToken>,
    /// Bytes of content that are out.
    released: usize,
}

impl HeldBack {
    /// A token that is no thought and has written these bytes.
    pub(super) fn push(&mut self, logprobs: TokenLogprobs, written: Range<usize>) {
        if !written.is_empty() {
            self.open.push_back((written, logprobs));
        }
    }

    /// The content has grown. Tokens that were written before what it has grown by, and are not content yet, are none.
    pub(super) fn settle(&mut self, origin: &Origin) {
        let Range { start, end } = origin.written;
        while let Some((written, _)) = self.open.front()
            && written.start < end
        {
            let Some((written, logprobs)) = self.open.pop_front() else { break };
            if written.end > start {
                // Counted from behind: bytes that are no text are longer in the content.
                let place = origin.content.end.saturating_sub(end - written.start.max(start));
                self.content.push_back(ContentToken { start: place.max(origin.content.start), logprobs });
            }
        }
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

    fn grown(written: Range<usize>, content: Range<usize>) -> Origin {
        Origin { written, content }
    }

    #[test]
    fn tokens_come_with_their_text() {
        let mut held = HeldBack::default();
        held.push(told(1), 0..3);
        held.settle(&grown(0..3, 0..3));
        assert_eq!(starts(&held.release("ab")), [(1, 0)]);
        held.push(told(2), 3..4);
        held.settle(&grown(3..4, 3..4));
        assert_eq!(starts(&held.release("c")), []);
        assert_eq!(starts(&held.release("d")), [(2, 3)]);
        // Two bytes of a character, then the rest of it.
        held.push(told(3), 4..6);
        held.settle(&grown(4..6, 4..6));
        held.push(told(4), 6..8);
        held.settle(&grown(6..8, 6..8));
        assert_eq!(starts(&held.release("\u{1f44d}")), [(3, 4), (4, 6)]);
        // A byte that belongs to no character becomes three with the next one.
        held.push(told(8), 8..9);
        held.settle(&grown(8..9, 8..9));
        held.push(told(9), 9..10);
        held.settle(&grown(9..10, 9..12));
        assert_eq!(starts(&held.release("\u{fffd},")), [(8, 8), (9, 11)]);
        held.push(told(5), 10..10);
        assert!(held.release("x").is_empty());
        // A stop string cut this one in the middle: it is told whole.
        let mut cut = HeldBack::default();
        cut.push(told(1), 0..3);
        cut.settle(&grown(0..3, 0..3));
        cut.push(told(2), 3..4);
        cut.settle(&grown(3..4, 3..4));
        assert_eq!(starts(&cut.release("a")), [(1, 0)]);
    }

    #[test]
    fn what_turns_out_to_be_something_else_is_left_out() {
        let mut held = HeldBack::default();
        held.push(told(1), 0..2);
        held.push(told(2), 2..4);
        // This one ended a call with one byte and went on with another one.
        held.push(told(3), 4..6);
        held.settle(&grown(5..6, 0..1));
        assert_eq!(starts(&held.release("x")), [(3, 0)]);
        // Held back, and content after all.
        held.push(told(6), 6..8);
        held.push(told(7), 8..11);
        held.settle(&grown(6..11, 1..6));
        assert_eq!(starts(&held.release("abcde")), [(6, 1), (7, 3)]);
        // White space on both sides of a call.
        for (token, written) in [(8, 11..12), (9, 12..20), (10, 20..21), (11, 21..22)] {
            held.push(told(token), written);
        }
        held.settle(&grown(11..12, 6..7));
        held.settle(&grown(20..21, 7..8));
        held.settle(&grown(21..22, 8..9));
        assert_eq!(starts(&held.release("  y")), [(8, 6), (10, 7), (11, 8)]);
    }
}
