//! The merge loop that byte-pair and SentencePiece tokenizers share.
//!
//! Text is a chain of symbols. The best mergeable pair of neighbours is joined, then its new neighbours are looked
//! at, until no pair is left. Candidates wait in a heap, so that a text of n symbols takes O(n log n) steps whatever
//! it holds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Id of a symbol that is no token.
pub(super) const NO_TOKEN: u32 = u32::MAX;

/// Neither neighbour: the end of the chain.
const END: u32 = u32::MAX;

/// The longest text in bytes that one chain may hold, so that places fit 32 bits.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// A stretch of text that is (or may become) one token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Where it begins, in bytes.
    pub start: u32,
    /// Bytes it spans; 0 once it was joined to its left neighbour.
    pub len: u32,
    /// Its token, or [`NO_TOKEN`].
    pub id: u32,
    left: u32,
    right: u32,
}

impl Symbol {
    /// The bytes of `text` it spans.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

/// A pair that may be joined: the smaller `key` first, of equal ones the leftmost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    key: u32,
    left: u32,
    /// Bytes of both together: tells whether either has changed since.
    len: u32,
    id: u32,
}

/// The chain and the heap, kept between words so that they allocate once.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Starts a new text.
    pub fn clear(&mut self) {
        self.symbols.clear();
        self.heap.clear();
    }

    /// Appends a symbol of `len` bytes (at least 1; together at most [`MAX_BYTES`]).
    pub fn push(&mut self, len: usize, id: u32) {
        let index = self.symbols.len() as u32;
        let (start, left) = match self.symbols.last_mut() {
            Some(last) => {
                last.right = index;
                (last.start + last.len, index - 1)
            }
            None => (0, END),
        };
        self.symbols.push(Symbol { start, len: len as u32, id, left, right: END });
    }

    /// Joins pairs until none is left. `join` gives the order (smaller first) and the token of a pair of
    /// neighbours, if they make one.
    pub fn run(&mut self, join: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for left in 0..self.symbols.len() as u32 {
            self.offer(left, &join);
        }
        while let Some(Reverse(candidate)) = self.heap.pop() {
            let left = self.symbols[candidate.left as usize];
            if left.len == 0 || left.right == END {
                continue;
            }
            let right = self.symbols[left.right as usize];
            // Symbols only grow, so an equal length means that both are as they were.
            if left.len + right.len != candidate.len {
                continue;
            }
            self.symbols[left.right as usize].len = 0;
            if right.right != END {
                self.symbols[right.right as usize].left = candidate.left;
            }
            let merged = &mut self.symbols[candidate.left as usize];
            merged.len = candidate.len;
            merged.id = candidate.id;
            merged.right = right.right;
            if left.left != END {
                self.offer(left.left, &join);
            }
            self.offer(candidate.left, &join);
        }
    }

    /// Puts the pair that begins at `left` on the heap if it makes a token.
    fn offer(&mut self, left: u32, join: &impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        let first = &self.symbols[left as usize];
        if first.right == END {
            return;
        }
        let second = &self.symbols[first.right as usize];
        if let Some((key, id)) = join(first, second) {
            self.heap.push(Reverse(Candidate { key, left, len: first.len + second.len, id }));
        }
    }

    /// What is left, in text order.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }
}
