//! How the codes of a group lie: 32 columns of 16 rows, in words that hold codes of one row.

/// Columns in a group.
pub(super) const GROUP: usize = 32;

/// The way in which the codes of a row's 32 columns lie in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// None: columns are numbers of so many bytes.
    Numbers(usize),
    /// Eight to a word, the bits of each above four in words of their own.
    Nibbles {
        /// Bits above the nibble: 0, 1 or 2.
        high: usize,
    },
    /// Four to a word.
    Bytes,
    /// 2 bits each, 16 to a word.
    Pairs,
    /// 3 bits each. A word has the first ten of 16 columns; a third one has five more of each 16, in half a word; the
    /// last is in what is left of both: its lower bits above the ten, its highest above the five.
    Triples,
}

impl Codes {
    /// Bytes of a group: 16 rows.
    pub(super) fn bytes(self) -> usize {
        super::TILE
            * match self {
                Self::Numbers(size) => GROUP * size,
                Self::Nibbles { high } => 16 + 4 * high,
                Self::Bytes => 32,
                Self::Pairs => 8,
                Self::Triples => 12,
            }
    }

    /// Different codes there are.
    pub(super) fn below(self) -> u32 {
        match self {
            Self::Numbers(_) => 0,
            Self::Nibbles { high } => 16 << high,
            Self::Bytes => 256,
            Self::Pairs => 4,
            Self::Triples => 8,
        }
    }

    /// The words of 32 codes, of which there are `bytes() / 64`. This is most of the work of a start that repacks, so it goes
    /// by words, not by [`parts`](Self::parts).
    pub(super) fn words(self, codes: &[u8]) -> [u32; 8] {
        let mut words = [0; 8];
        // The first code lowest, `bits` apart.
        let joined = |codes: &[u8], bits: usize| {
            codes.iter().rev().fold(0, |word, &code| word << bits | u32::from(code))
        };
        match self {
            Self::Numbers(_) => {}
            Self::Nibbles { high } => {
                for (j, eight) in codes.chunks_exact(8).enumerate() {
                    words[j] = eight.iter().rev().fold(0, |word, &code| word << 4 | u32::from(code & 15));
                    if high > 0 {
                        let above =
                            eight.iter().rev().fold(0, |word, &code| word << 4 | u32::from(code >> 4));
                        words[4 + j * high / 4] |= above.rotate_left(4) << (j * high % 4);
                    }
                }
            }
            Self::Bytes => {
                for (word, four) in words.iter_mut().zip(codes.chunks_exact(4)) {
                    *word = joined(four, 8);
                }
            }
            Self::Pairs => {
                for (word, sixteen) in words.iter_mut().zip(codes.chunks_exact(16)) {
                    *word = joined(sixteen, 2);
                }
            }
            Self::Triples => {
                for (half, sixteen) in codes.chunks_exact(16).enumerate() {
                    let last = u32::from(sixteen[15]);
                    words[half] = joined(&sixteen[..10], 3) | (last & 3) << 30;
                    words[2] |= (joined(&sixteen[10..15], 3) | last >> 2 << 15) << (16 * half);
                }
            }
        }
        words
    }

    /// The code of a column; `word` gives the words.
    pub(super) fn code(self, column: usize, word: impl Fn(usize) -> u32) -> u32 {
        let bits = |part: Part| (word(part.word) >> part.shift & part.mask()) << part.first;
        self.parts(column).into_iter().flatten().map(bits).sum()
    }

    /// Where the bits of a column's code lie.
    fn parts(self, column: usize) -> [Option<Part>; 2] {
        let whole = |word, shift, bits| [Some(Part { word, shift, first: 0, bits }), None];
        let (half, within) = (column / 16, column % 16);
        match self {
            Self::Numbers(_) => [None, None],
            Self::Nibbles { high: 0 } => whole(column / 8, 4 * (column % 8), 4),
            Self::Nibbles { high } => {
                let (j, i) = (column / 8, column % 8);
                // Just above the nibble, where that stands in its own word.
                let shift = 4 * ((i + 1) % 8) + j * high % 4;
                let above = Part { word: 4 + j * high / 4, shift, first: 4, bits: high };
                [Some(Part { word: j, shift: 4 * i, first: 0, bits: 4 }), Some(above)]
            }
            Self::Bytes => whole(column / 4, 8 * (column % 4), 8),
            Self::Pairs => whole(half, 2 * within, 2),
            Self::Triples if within < 10 => whole(half, 3 * within, 3),
            Self::Triples if within < 15 => whole(2, 16 * half + 3 * (within - 10), 3),
            Self::Triples => [
                Some(Part { word: half, shift: 30, first: 0, bits: 2 }),
                Some(Part { word: 2, shift: 16 * half + 15, first: 2, bits: 1 }),
            ],
        }
    }
}

/// Some bits of a code.
#[derive(Debug, Clone, Copy)]
struct Part {
    word: usize,
    /// Their place in the word.
    shift: usize,
    /// The first of them, counted in the code.
    first: usize,
    bits: usize,
}

impl Part {
    /// Its bits, from bit 0 on.
    fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_word_belongs_to_one_code() {
        for codes in [
            Codes::Nibbles { high: 0 },
            Codes::Nibbles { high: 1 },
            Codes::Nibbles { high: 2 },
            Codes::Bytes,
            Codes::Pairs,
            Codes::Triples,
        ] {
            let count = codes.bytes() / 64;
            let mut all = [0u32; 8];
            for column in 0..GROUP {
                let mut one = [0u8; GROUP];
                one[column] = (codes.below() - 1) as u8;
                let words = codes.words(&one);
                for (all, word) in all.iter_mut().zip(words) {
                    assert_eq!(*all & word, 0, "{codes:?}, column {column}");
                    *all |= word;
                }
                for (at, &code) in one.iter().enumerate() {
                    assert_eq!(codes.code(at, |word| words[word]), u32::from(code), "{codes:?}, column {at}");
                }
            }
            assert!(all[..count].iter().all(|&word| word == u32::MAX), "{codes:?}");
            assert!(all[count..].iter().all(|&word| word == 0), "{codes:?}");
        }
    }
}
