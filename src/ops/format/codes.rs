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

    /// The words of 32 codes, of which there are `bytes() / 64`; the others are zero. This is most of the work of a start that
    /// repacks, so it goes by eight codes at a time, not by [`parts`](Self::parts).
    pub(super) fn words(self, codes: &[u8; GROUP]) -> [u32; 8] {
        let eights = codes.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight));
        let mut words = [0; 8];
        match self {
            Self::Numbers(_) => {}
            Self::Nibbles { high } => {
                for (j, eight) in eights.enumerate() {
                    words[j] = joined::<4>(eight & LOW_NIBBLES);
                    if high > 0 {
                        let above = joined::<4>(eight >> 4 & LOW_NIBBLES);
                        words[4 + j * high / 4] |= above.rotate_left(4) << (j * high % 4);
                    }
                }
            }
            Self::Bytes => {
                for (word, four) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*four);
                }
            }
            Self::Pairs => {
                for (j, eight) in eights.enumerate() {
                    words[j / 2] |= joined::<2>(eight) << (16 * (j % 2));
                }
            }
            Self::Triples => {
                for (j, eight) in eights.enumerate() {
                    let (half, eight) = (j / 2, joined::<3>(eight));
                    if j % 2 == 0 {
                        words[half] = eight;
                    } else {
                        let last = eight >> 21;
                        words[half] |= (eight & 0o77) << 24 | (last & 3) << 30;
                        words[2] |= (eight >> 6 & 0o77777 | last >> 2 << 15) << (16 * half);
                    }
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

/// The lower half of each byte.
const LOW_NIBBLES: u64 = 0x0F0F_0F0F_0F0F_0F0F;

/// Eight codes of `BITS` bits, at most four, from bytes that hold nothing else, the first lowest: two and two, four and four,
/// and then all of them are moved together.
fn joined<const BITS: usize>(eight: u64) -> u32 {
    let mask = |bits: usize| (1u64 << bits) - 1;
    let two = (eight | eight >> (8 - BITS)) & (mask(2 * BITS) * 0x0001_0001_0001_0001);
    let four = (two | two >> (16 - 2 * BITS)) & (mask(4 * BITS) * 0x0000_0001_0000_0001);
    ((four | four >> (32 - 4 * BITS)) & mask(8 * BITS)) as u32
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

    #[test]
    fn words_hold_any_codes_beside_each_other() {
        for codes in [
            Codes::Nibbles { high: 0 },
            Codes::Nibbles { high: 1 },
            Codes::Nibbles { high: 2 },
            Codes::Bytes,
            Codes::Pairs,
            Codes::Triples,
        ] {
            for turn in 0..64u32 {
                let mixed = |at: u32| (turn * 32 + at + 1).wrapping_mul(2_654_435_761) >> 11;
                let values: [u8; GROUP] = std::array::from_fn(|at| (mixed(at as u32) % codes.below()) as u8);
                let words = codes.words(&values);
                for (at, &code) in values.iter().enumerate() {
                    assert_eq!(codes.code(at, |word| words[word]), u32::from(code), "{codes:?}, column {at}");
                }
            }
        }
    }
}
