//! Byte-pair encoding as Gemma uses it: merges of whole characters over text that is not split into words, with
//! single bytes for characters that have no token.

use super::bpe::Merges;
use super::index::TokenIndex;
use super::merge::{Merger, NO_TOKEN};
use super::spm;
use super::vocabulary::Strings;
use super::{TextError, TokenKind, Vocabulary};

/// Names of tokens that structure a chat. Files made for other servers call some of them user-defined so that they
/// print; here they are control tokens always, so that nobody can write one and none shows.
const MARKERS: &[&str] = &[
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

/// What a token is, whatever the file says about the markers of a chat.
pub(super) fn kind_of(token: &[u8], kind: TokenKind) -> TokenKind {
    let marker = || MARKERS.iter().any(|marker| marker.as_bytes() == token);
    match kind {
        TokenKind::Normal | TokenKind::UserDefined if marker() => TokenKind::Control,
        kind => kind,
    }
}

/// The merges and what they need.
#[derive(Debug)]
pub(super) struct Gemma {
    merges: Merges,
    /// Token of each single byte, or [`NO_TOKEN`].
    bytes: [u32; 256],
    unk: Option<u32>,
    whole_words: bool,
}

impl Gemma {
    /// Reads the merge list; `pieces` and `index` hold the decoded tokens.
    pub fn new(
        vocabulary: &Vocabulary,
        pieces: &Strings,
        index: &TokenIndex,
        kinds: &[TokenKind],
    ) -> Result<Self, TextError> {
        let merges = Merges::new(vocabulary, pieces, index, spm::decode_token)?;
        let mut bytes = [NO_TOKEN; 256];
        for (id, (piece, kind)) in pieces.iter().zip(kinds).enumerate() {
            if let (TokenKind::Byte, &[byte]) = (kind, piece) {
                bytes[byte as usize] = id as u32;
            }
        }
        Ok(Self { merges, bytes, unk: vocabulary.unk, whole_words: vocabulary.whole_words })
    }

    /// Appends the tokens of `text`, which holds no special token and has spaces where tokens write `▁`. Characters
    /// in a row that have neither a token nor one for each of their bytes become one unknown token.
    pub fn encode(
        &self,
        text: &str,
        pieces: &Strings,
        index: &TokenIndex,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) {
        if let Some(id) = index.find(pieces, text.as_bytes()).filter(|_| self.whole_words) {
            ids.push(id);
            return;
        }
        merger.clear();
        let mut letter = [0; 4];
        for character in text.chars() {
            let bytes = character.encode_utf8(&mut letter).as_bytes();
            merger.push(bytes.len(), index.find(pieces, bytes).unwrap_or(NO_TOKEN));
        }
        merger.run(|left, right| self.merges.find(left.id, right.id));
        let mut after_unknown = false;
        for symbol in merger.symbols() {
            let mut unknown = false;
            if symbol.id == NO_TOKEN {
                let bytes = || text.as_bytes()[symbol.range()].iter().map(|&byte| self.bytes[byte as usize]);
                if bytes().all(|id| id != NO_TOKEN) {
                    ids.extend(bytes());
                } else {
                    unknown = true;
                    ids.extend(self.unk.filter(|_| !after_unknown));
                }
            } else {
                ids.push(symbol.id);
            }
            after_unknown = unknown;
        }
    }
}
