//! The search for special tokens in a text.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::TextError;
use super::vocabulary::Strings;

/// Most bytes that the texts of all special tokens may have; real models have some ten thousands.
pub(super) const MAX_SPECIAL_BYTES: usize = 4 << 20;

/// `text` without any `mark`.
pub(super) fn without(text: &str, mark: Option<char>) -> Cow<'_, str> {
    match mark {
        Some(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
        _ => Cow::Borrowed(text),
    }
}

/// A stretch of text after the search for special tokens.
pub(super) enum Part<'t> {
    /// A special token.
    Token(u32),
    /// Text between them; never empty.
    Text(&'t str),
}

/// Finds the texts of some tokens: the leftmost, and of those that begin there the longest.
#[derive(Debug)]
pub(super) struct Matcher {
    search: Option<AhoCorasick>,
    /// Token of each pattern.
    pub ids: Vec<u32>,
}

impl Matcher {
    /// Of the tokens that `picks` names by id.
    ///
    /// # Errors
    /// More text than any real vocabulary has.
    pub fn new(pieces: &Strings, picks: impl Fn(usize) -> bool) -> Result<Self, TextError> {
        let (patterns, ids): (Vec<&[u8]>, Vec<u32>) = pieces
            .iter()
            .enumerate()
            // Text that is not UTF-8 cannot occur in a string.
            .filter(|&(id, piece)| picks(id) && !piece.is_empty() && std::str::from_utf8(piece).is_ok())
            .map(|(id, piece)| (piece, id as u32))
            .unzip();
        if patterns.is_empty() {
            return Ok(Self { search: None, ids });
        }
        // The automaton takes some dozens of bytes for each of theirs.
        let bytes: usize = patterns.iter().map(|pattern| pattern.len()).sum();
        if bytes > MAX_SPECIAL_BYTES {
            return Err(TextError::BadVocabulary {
                what: format!(
                    "special tokens have {bytes} bytes together, expected at most {MAX_SPECIAL_BYTES}"
                ),
            });
        }
        // The cheapest automaton to build: six thousand patterns are usual.
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::NoncontiguousNFA))
            .build(&patterns)
            .map_err(|error| TextError::BadVocabulary { what: format!("special tokens: {error}") })?;
        Ok(Self { search: Some(search), ids })
    }

    /// Where the first token at or after byte `from` begins in `text`, and which it is.
    pub fn find(&self, text: &str, from: usize) -> Option<(usize, u32)> {
        let input = aho_corasick::Input::new(text).range(from..);
        let found = self.search.as_ref()?.find(input)?;
        Some((found.start(), self.ids[found.pattern().as_usize()]))
    }

    /// Hands out the tokens in `text` and the text between them, in order. What ends before a `mark` is text.
    pub fn split<'t>(&self, text: &'t str, mark: Option<char>, part: &mut dyn FnMut(Part<'t>)) {
        let mut at = 0;
        for found in self.search.iter().flat_map(|search| search.find_iter(text)) {
            if mark.is_some_and(|mark| text[found.end()..].starts_with(mark)) {
                continue;
            }
            if at < found.start() {
                part(Part::Text(&text[at..found.start()]));
            }
            part(Part::Token(self.ids[found.pattern().as_usize()]));
            at = found.end();
        }
        if at < text.len() {
            part(Part::Text(&text[at..]));
        }
    }
}
