//! Byte-pair encoding as GPT-2 defined it: words of bytes, joined pair by pair in the order of a merge list.

use hashbrown::{DefaultHashBuilder, HashMap};

use super::index::TokenIndex;
use super::merge::{Merger, NO_TOKEN};
use super::pretokenize::PreTokenizer;
use super::vocabulary::Strings;
use super::{TextError, Vocabulary};

/// The byte that stands behind a character of GPT-2's printable byte alphabet.
///
/// Bytes that print stand for themselves; the 68 others, in order, for the characters from U+0100 on.
fn byte_of(letter: char) -> Option<u8> {
    let code = u32::from(letter);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes a normal token stands for. A token with characters outside the byte alphabet stands for itself.
pub(super) fn decode_token(token: &[u8], pieces: &mut Strings) {
    match std::str::from_utf8(token).ok().filter(|text| text.chars().all(|letter| byte_of(letter).is_some()))
    {
        Some(text) => pieces.push_bytes(text.chars().filter_map(byte_of)),
        None => pieces.push(token),
    }
}

/// The merge list.
#[derive(Debug)]
pub(super) struct Merges {
    /// Left and right token (high and low half) to the rank of their merge and its token.
    table: HashMap<u64, (u32, u32), DefaultHashBuilder>,
}

impl Merges {
    /// Reads the merge list; `pieces` and `index` hold the tokens as `decode` reads them.
    pub fn new(
        vocabulary: &Vocabulary,
        pieces: &Strings,
        index: &TokenIndex,
        decode: fn(&[u8], &mut Strings),
    ) -> Result<Self, TextError> {
        let count = vocabulary.merges.len();
        let mut table = HashMap::with_capacity_and_hasher(count, DefaultHashBuilder::default());
        let mut scratch = Strings::with_capacity(2, 256);
        for (rank, merge) in vocabulary.merges.iter().enumerate() {
            let bad = |why: &str| TextError::BadVocabulary {
                what: format!("merge {rank} `{}`: {why}", String::from_utf8_lossy(merge)),
            };
            // A part may itself begin with a space in no known file, so the first space after it divides.
            let space = merge.iter().skip(1).position(|&byte| byte == b' ').map(|place| place + 1);
            let space = space.ok_or_else(|| bad("expected two parts with a space between them"))?;
            scratch.clear();
            decode(&merge[..space], &mut scratch);
            decode(&merge[space + 1..], &mut scratch);
            let (left, right) = (scratch.get(0).unwrap_or_default(), scratch.get(1).unwrap_or_default());
            let middle = left.len();
            let whole = scratch.joined();
            let find = |part: &[u8], what| index.find(pieces, part).ok_or_else(|| bad(what));
            let key = pair(
                find(&whole[..middle], "its left part is no token")?,
                find(right, "its right part is no token")?,
            );
            let merged = find(whole, "the two parts together are no token")?;
            // Of a pair listed twice the better rank holds.
            table.entry(key).or_insert((rank as u32, merged));
        }
        Ok(Self { table })
    }

    /// The rank of the merge of two tokens, and the token they make.
    pub fn find(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.table.get(&pair(left, right)).copied()
    }
}

/// The merges and what they need.
#[derive(Debug)]
pub(super) struct Bpe {
    pub pre: PreTokenizer,
    merges: Merges,
    /// Token of each single byte, or [`NO_TOKEN`].
    bytes: [u32; 256],
}

impl Bpe {
    /// Reads the merge list; `pieces` and `index` hold the decoded tokens.
    pub fn new(vocabulary: &Vocabulary, pieces: &Strings, index: &TokenIndex) -> Result<Self, TextError> {
        let pre = PreTokenizer::named(vocabulary.pre.as_deref())?;
        let mut bytes = [NO_TOKEN; 256];
        for byte in 0..=u8::MAX {
            if let Some(id) = index.find(pieces, &[byte]) {
                bytes[byte as usize] = id;
            }
        }
        let merges = Merges::new(vocabulary, pieces, index, decode_token)?;
        Ok(Self { pre, merges, bytes })
    }

    /// Appends the tokens of `text`, which holds no special token. A byte that has no token is left out, as the
    /// reference tokenizers do.
    pub fn encode(
        &self,
        text: &str,
        pieces: &Strings,
        index: &TokenIndex,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) {
        self.pre.split(&self.pre.normal(text), &mut |word| {
            let word = word.as_bytes();
            if let Some(id) = index.find(pieces, word).filter(|_| self.pre.whole_words) {
                ids.push(id);
                return;
            }
            merger.clear();
            for &byte in word {
                merger.push(1, self.bytes[byte as usize]);
            }
            merger.run(|left, right| self.merges.find(left.id, right.id));
            ids.extend(merger.symbols().map(|symbol| symbol.id).filter(|&id| id != NO_TOKEN));
        });
    }
}

/// The key of a pair of tokens.
fn pair(left: u32, right: u32) -> u64 {
    (u64::from(left) << 32) | u64::from(right)
}
