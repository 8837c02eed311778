//! SentencePiece's merging by score, with single bytes for what has no token.

use super::index::TokenIndex;
use super::merge::{Merger, NO_TOKEN};
use super::vocabulary::Strings;
use super::{TextError, TokenKind, Vocabulary};

/// SentencePiece writes a space in its tokens as this character, U+2581.
pub(super) const SPACE: &str = "\u{2581}";

/// The bytes a normal token stands for: itself, with spaces where `▁` is written.
pub(super) fn decode_token(token: &[u8], pieces: &mut Strings) {
    let mark = SPACE.as_bytes();
    let mut at = 0;
    pieces.push_bytes(std::iter::from_fn(|| {
        let rest = &token[at..];
        let (byte, len) = if rest.starts_with(mark) { (b' ', mark.len()) } else { (*rest.first()?, 1) };
        at += len;
        Some(byte)
    }));
}

/// The byte that a token of kind byte stands for, written `<0xXX>`.
pub(super) fn byte_of(token: &[u8]) -> Option<u8> {
    let hex = token.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    if hex.len() != 2 || !hex.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
}

/// Scores and bytes.
#[derive(Debug)]
pub(super) struct Spm {
    /// Order of merges by token, smaller first.
    keys: Vec<u32>,
    /// Token of each single byte, the unknown token where it has none, or [`NO_TOKEN`].
    bytes: [u32; 256],
    /// Bytes of the longest token: longer text need not be looked up.
    longest: usize,
    /// Whether a space is put before text.
    pub space_prefix: bool,
}

impl Spm {
    /// Reads the scores; `pieces` holds the decoded tokens.
    pub fn new(vocabulary: &Vocabulary, pieces: &Strings, kinds: &[TokenKind]) -> Result<Self, TextError> {
        let bad = |what| Err(TextError::BadVocabulary { what });
        if vocabulary.scores.len() != pieces.len() {
            return bad(format!("{} scores for {} tokens", vocabulary.scores.len(), pieces.len()));
        }
        if let Some(id) = vocabulary.scores.iter().position(|score| score.is_nan()) {
            return bad(format!("score of token {id} is NaN"));
        }
        let mut bytes = [vocabulary.unk.unwrap_or(NO_TOKEN); 256];
        let mut longest = 0;
        for (id, (piece, kind)) in pieces.iter().zip(kinds).enumerate() {
            match (kind, piece) {
                (TokenKind::Byte, &[byte]) => bytes[byte as usize] = id as u32,
                _ => longest = longest.max(piece.len()),
            }
        }
        let keys = vocabulary.scores.iter().map(|&score| merge_key(score)).collect();
        Ok(Self { keys, bytes, longest, space_prefix: vocabulary.add_space_prefix.unwrap_or(true) })
    }

    /// Appends the tokens of `text`, which holds no special token and has spaces where tokens write `▁`.
    pub fn encode(
        &self,
        text: &str,
        pieces: &Strings,
        index: &TokenIndex,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) {
        let text = text.as_bytes();
        merger.clear();
        let mut start = 0;
        while start < text.len() {
            let len = char_len(text[start]).min(text.len() - start);
            merger.push(len, index.find(pieces, &text[start..start + len]).unwrap_or(NO_TOKEN));
            start += len;
        }
        merger.run(|left, right| {
            let (start, end) = (left.range().start, right.range().end);
            if end - start > self.longest {
                return None;
            }
            let id = index.find(pieces, &text[start..end])?;
            Some((self.keys[id as usize], id))
        });
        for symbol in merger.symbols() {
            if symbol.id == NO_TOKEN {
                let bytes = text[symbol.range()].iter().map(|&byte| self.bytes[byte as usize]);
                ids.extend(bytes.filter(|&id| id != NO_TOKEN));
            } else {
                ids.push(symbol.id);
            }
        }
    }
}

/// Bytes of the UTF-8 character that begins with `first`.
fn char_len(first: u8) -> usize {
    match first {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => 1,
    }
}

/// Numbers ordered so that the highest score comes first.
fn merge_key(score: f32) -> u32 {
    // Adding 0.0 makes -0.0 the same score as 0.0.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 };
    !ascending
}
