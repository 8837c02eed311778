//! The tokenizer: special tokens first, the rest by the vocabulary's own method.

use std::borrow::Cow;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

use super::bpe::{self, Bpe};
use super::gemma::{self, Gemma};
use super::merge::{MAX_BYTES, Merger};
use super::reply::Channel;
use super::spm::{self, Spm};
use super::template::Rendered;
use super::vocabulary::Strings;
use super::{TextError, TokenKind, Vocabulary};

/// Texts of control tokens that end a reply, whatever the checkpoint says about them: many files name only the end
/// of text, while chat models end their turns with another token.
const TURN_ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|end_of_sentence|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "</s>",
];

/// Texts of the control tokens that open and close the thinking channel.
const CHANNEL: [&str; 2] = ["<|channel>", "<channel|>"];

/// Most bytes that the texts of all special tokens may have; real models have some ten thousands.
const MAX_SPECIAL_BYTES: usize = 4 << 20;

/// Whether special tokens are recognised in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// The text of a control token is text like any other. For all that users write.
    Text,
    /// The text of a control token is that token. For templates and raw prompts.
    Parse,
}

/// Text to tokens and back.
#[derive(Debug)]
pub struct Tokenizer {
    /// What each token stands for: bytes of ordinary ones, the name of special ones.
    pieces: Strings,
    kinds: Vec<TokenKind>,
    index: TokenIndex,
    method: Method,
    /// Control and unknown tokens.
    control: Arc<Matcher>,
    /// User-defined tokens, which match in any text.
    user_defined: Matcher,
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    pad: Option<u32>,
    ends: Vec<u32>,
    channel: Option<Channel>,
    add_bos: bool,
    add_eos: bool,
}

#[derive(Debug)]
enum Method {
    Bpe(Bpe),
    Spm(Spm),
    Gemma(Gemma),
}

/// Which method a vocabulary asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Bpe,
    Spm,
    Gemma,
}

impl Tokenizer {
    /// Builds the tokenizer of a vocabulary.
    ///
    /// # Errors
    /// Kinds of tokenizers and pre-tokenizers that are not built in, lists that do not fit together, merges of
    /// what is no token, byte tokens that name no byte.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, TextError> {
        vocabulary.check()?;
        let wanted = match vocabulary.model.as_str() {
            "gpt2" => Wanted::Bpe,
            "llama" => Wanted::Spm,
            "gemma4" => Wanted::Gemma,
            found => return Err(TextError::UnknownModel { found: found.to_owned() }),
        };
        let mut kinds = vocabulary.kinds.clone();
        kinds.resize(vocabulary.tokens.len(), TokenKind::Normal);
        if wanted == Wanted::Gemma {
            let tokens = vocabulary.tokens.iter();
            kinds.iter_mut().zip(tokens).for_each(|(kind, token)| *kind = gemma::kind_of(token, *kind));
        }

        let mut pieces = Strings::with_capacity(vocabulary.tokens.len(), vocabulary.tokens.total_bytes());
        for (id, (token, kind)) in vocabulary.tokens.iter().zip(&kinds).enumerate() {
            match kind {
                TokenKind::Normal if wanted == Wanted::Bpe => bpe::decode_token(token, &mut pieces),
                TokenKind::Normal => spm::decode_token(token, &mut pieces),
                TokenKind::UserDefined if wanted == Wanted::Gemma => spm::decode_token(token, &mut pieces),
                TokenKind::Byte => {
                    pieces.push(&[spm::byte_of(token).ok_or_else(|| TextError::BadVocabulary {
                        what: format!(
                            "token {id} `{}` is of kind byte, expected `<0xXX>`",
                            String::from_utf8_lossy(token)
                        ),
                    })?])
                }
                _ => pieces.push(token),
            }
        }

        let mut index = TokenIndex::with_capacity(pieces.len());
        let of_kind = |wanted: TokenKind| move |&(_, kind): &(usize, &TokenKind)| *kind == wanted;
        for (id, _) in kinds.iter().enumerate().filter(of_kind(TokenKind::Normal)) {
            index.insert(&pieces, id as u32);
        }
        if wanted != Wanted::Spm {
            // Merges may lead to tokens that are user-defined too.
            for (id, _) in kinds.iter().enumerate().filter(of_kind(TokenKind::UserDefined)) {
                index.insert(&pieces, id as u32);
            }
        }
        let method = match wanted {
            Wanted::Spm => Method::Spm(Spm::new(&vocabulary, &pieces, &kinds)?),
            Wanted::Bpe => Method::Bpe(Bpe::new(&vocabulary, &pieces, &index)?),
            Wanted::Gemma => Method::Gemma(Gemma::new(&vocabulary, &pieces, &index, &kinds)?),
        };

        let adds_bos = match &method {
            Method::Bpe(bpe) => bpe.pre.adds_bos,
            Method::Spm(_) | Method::Gemma(_) => true,
        };

        // Special tokens match as they are written, not as they print.
        let control = Matcher::new(&vocabulary.tokens, &kinds, &[TokenKind::Control, TokenKind::Unknown])?;
        let user_defined = Matcher::new(&vocabulary.tokens, &kinds, &[TokenKind::UserDefined])?;
        let is = |id: u32, name: &str| pieces.get(id as usize) == Some(name.as_bytes());
        let [open, close] = CHANNEL.map(|name| control.ids.iter().copied().find(|&id| is(id, name)));
        let channel = open.zip(close).map(|(open, close)| Channel { open, close });
        let mut ends = vocabulary.ends.clone();
        if !vocabulary.ends_are_all {
            ends.extend(vocabulary.eos);
            let ends_turn = |&id: &u32| TURN_ENDS.iter().any(|name| is(id, name));
            ends.extend(control.ids.iter().copied().filter(ends_turn));
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            pieces,
            kinds,
            index,
            method,
            control: Arc::new(control),
            user_defined,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            unk: vocabulary.unk,
            pad: vocabulary.pad,
            ends,
            channel,
            add_bos: vocabulary.add_bos.unwrap_or(adds_bos),
            add_eos: vocabulary.add_eos.unwrap_or(false),
        })
    }

    /// The tokens of `text`; no begin or end of text is added.
    ///
    /// User-defined tokens are found in any text; control tokens only where `specials` says so.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        self.encode_marked(text, specials, None)
    }

    /// The tokens of a rendered chat prompt, which begins with exactly one begin-of-text token if the template or
    /// the model's flag adds it.
    ///
    /// Special tokens are found in the template's own text only, never in what came from a message.
    pub fn encode_prompt(&self, prompt: &Rendered) -> Vec<u32> {
        self.with_bos(self.encode_marked(prompt.marked(), Specials::Parse, Some(prompt.mark())))
    }

    /// Puts the begin-of-text token before `ids` if the model wants one, and leaves one where there are several.
    pub fn with_bos(&self, mut ids: Vec<u32>) -> Vec<u32> {
        let Some(bos) = self.bos else { return ids };
        let present = ids.iter().take_while(|&&id| id == bos).count();
        if present > 1 {
            ids.drain(1..present);
        } else if present == 0 && self.add_bos {
            ids.insert(0, bos);
        }
        ids
    }

    /// Encodes text in which `mark` stands for nothing, but inside or behind the text of a special token makes it
    /// plain text.
    fn encode_marked(&self, text: &str, specials: Specials, mark: Option<char>) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        let mut after_special = true;
        let mut plain = |text: &str, after_special: &mut bool, ids: &mut Vec<u32>| {
            let text = without(text, mark);
            self.user_defined.split(&text, None, &mut |part| match part {
                Part::Token(id) => {
                    ids.push(id);
                    *after_special = true;
                }
                Part::Text(text) => {
                    self.encode_plain(text, *after_special, &mut merger, ids);
                    *after_special = false;
                }
            });
        };
        match specials {
            Specials::Text => plain(text, &mut after_special, &mut ids),
            Specials::Parse => self.control.split(text, mark, &mut |part| match part {
                Part::Token(id) => {
                    ids.push(id);
                    after_special = true;
                }
                Part::Text(text) => plain(text, &mut after_special, &mut ids),
            }),
        }
        ids
    }

    /// Encodes text without special tokens.
    fn encode_plain(&self, mut text: &str, after_special: bool, merger: &mut Merger, ids: &mut Vec<u32>) {
        // Places in the merge loop have 32 bits; nobody sends a gigabyte, but it must not go wrong.
        while text.len() > MAX_BYTES / 4 {
            let near = (0..4).map(|back| MAX_BYTES / 4 - back).find(|&place| text.is_char_boundary(place));
            let (head, tail) = text.split_at(near.unwrap_or(text.len()));
            self.encode_plain(head, after_special, merger, ids);
            text = tail;
        }
        match &self.method {
            Method::Bpe(bpe) => bpe.encode(text, &self.pieces, &self.index, merger, ids),
            Method::Gemma(gemma) => {
                let text = match text.contains(spm::SPACE) {
                    true => Cow::Owned(text.replace(spm::SPACE, " ")),
                    false => Cow::Borrowed(text),
                };
                gemma.encode(&text, &self.pieces, &self.index, merger, ids);
            }
            Method::Spm(spm) => {
                let mut text = Cow::Borrowed(text);
                if text.contains(spm::SPACE) {
                    text = Cow::Owned(text.replace(spm::SPACE, " "));
                }
                if after_special && spm.space_prefix {
                    text = Cow::Owned(format!(" {text}"));
                }
                spm.encode(&text, &self.pieces, &self.index, merger, ids);
            }
        }
    }

    /// The bytes that a token prints: empty for control, unknown and unused tokens and for ids past the vocabulary.
    /// A character may be spread over several tokens.
    pub fn piece(&self, id: u32) -> &[u8] {
        match self.kinds.get(id as usize) {
            Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte) => self.text(id),
            _ => &[],
        }
    }

    /// The bytes that a token stands for, names of control tokens included; empty for ids past the vocabulary.
    pub fn text(&self, id: u32) -> &[u8] {
        self.pieces.get(id as usize).unwrap_or_default()
    }

    /// What a token is, or `None` for ids past the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The text of `ids`, with U+FFFD for bytes that are no UTF-8. Control tokens print nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes: Vec<u8> = ids.iter().flat_map(|&id| self.piece(id)).copied().collect();
        if self.strips_leading_space() && bytes.first() == Some(&b' ') {
            bytes.remove(0);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether text begins with a space that `encode` put there and that printing leaves out again.
    pub fn strips_leading_space(&self) -> bool {
        matches!(&self.method, Method::Spm(spm) if spm.space_prefix)
    }

    /// How many tokens there are.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The begin-of-text token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-text token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token for text that no token expresses.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }

    /// The padding token.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Every token that ends a reply, in ascending order.
    pub fn eos_ids(&self) -> &[u32] {
        &self.ends
    }

    /// The tokens that open and close the thinking channel, if the vocabulary has them.
    pub fn channel(&self) -> Option<Channel> {
        self.channel
    }

    /// Whether prompts begin with the begin-of-text token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Whether whole texts (not prompts) end with the end-of-text token.
    pub fn adds_eos(&self) -> bool {
        self.add_eos && self.eos.is_some()
    }

    /// What finds control tokens, for those that must break their texts.
    pub(super) fn control(&self) -> &Arc<Matcher> {
        &self.control
    }
}

/// `text` without any `mark`.
pub(super) fn without(text: &str, mark: Option<char>) -> Cow<'_, str> {
    match mark {
        Some(mark) if text.contains(mark) => Cow::Owned(text.replace(mark, "")),
        _ => Cow::Borrowed(text),
    }
}

/// Ordinary tokens by their bytes, which lie in the arena of pieces.
#[derive(Debug)]
pub(super) struct TokenIndex {
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TokenIndex {
    fn with_capacity(count: usize) -> Self {
        Self { table: HashTable::with_capacity(count), hasher: DefaultHashBuilder::default() }
    }

    /// Adds token `id`, unless it is empty or its bytes are there already.
    fn insert(&mut self, pieces: &Strings, id: u32) {
        let piece = |id: u32| pieces.get(id as usize).unwrap_or_default();
        let bytes = piece(id);
        if bytes.is_empty() {
            return;
        }
        let hash = self.hasher.hash_one(bytes);
        self.table
            .entry(hash, |&other| piece(other) == bytes, |&other| self.hasher.hash_one(piece(other)))
            .or_insert(id);
    }

    /// The token whose bytes are `bytes`.
    pub fn find(&self, pieces: &Strings, bytes: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(bytes);
        self.table.find(hash, |&id| pieces.get(id as usize) == Some(bytes)).copied()
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
    fn new(pieces: &Strings, kinds: &[TokenKind], wanted: &[TokenKind]) -> Result<Self, TextError> {
        let (patterns, ids): (Vec<&[u8]>, Vec<u32>) = pieces
            .iter()
            .zip(kinds)
            .enumerate()
            // Text that is not UTF-8 cannot occur in a string.
            .filter(|(_, (piece, kind))| {
                wanted.contains(kind) && !piece.is_empty() && std::str::from_utf8(piece).is_ok()
            })
            .map(|(id, (piece, _))| (piece, id as u32))
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

    /// Where the first token at or after byte `from` begins in `text`.
    pub fn find(&self, text: &str, from: usize) -> Option<usize> {
        let input = aho_corasick::Input::new(text).range(from..);
        Some(self.search.as_ref()?.find(input)?.start())
    }

    /// Hands out the tokens in `text` and the text between them, in order. What ends before a `mark` is text.
    fn split<'t>(&self, text: &'t str, mark: Option<char>, part: &mut dyn FnMut(Part<'t>)) {
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

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::super::testing::{CONTROL, bytes_and, letter, pieces};
    use super::*;
    use crate::text::TokenKind::{Control, Normal, Unused, UserDefined};

    fn vocabulary(tokens: &[&str], merges: &[&str]) -> Vocabulary {
        Vocabulary {
            model: "gpt2".to_owned(),
            pre: Some("gpt-2".to_owned()),
            tokens: tokens.iter().collect(),
            merges: merges.iter().collect(),
            ..Vocabulary::default()
        }
    }

    fn refusal(vocabulary: Vocabulary) -> String {
        Tokenizer::new(vocabulary).unwrap_err().to_string()
    }

    #[test]
    fn merges_go_by_rank_and_then_from_the_left() {
        let tokenizer = Tokenizer::new(vocabulary(
            &["a", "b", "c", "ab", "bc", "aa", "abc"],
            &["b c", "a b", "a a", "ab c"],
        ));
        let tokenizer = tokenizer.unwrap();
        assert_eq!(tokenizer.encode("abc", Specials::Text), [0, 4]);
        assert_eq!(tokenizer.encode("aaa", Specials::Text), [5, 0]);
        assert_eq!(tokenizer.encode("ab", Specials::Text), [3]);
        // A byte without a token is left out, and its neighbours stay apart.
        assert_eq!(tokenizer.encode("a?b", Specials::Text), [0, 1]);
    }

    #[test]
    fn the_byte_alphabet_has_every_byte() {
        let tokenizer = bytes_and(&[]);
        for byte in 0..=255u8 {
            assert_eq!(tokenizer.piece(u32::from(byte)), [byte], "{}", letter(byte));
        }
    }

    #[test]
    fn control_tokens_are_found_only_on_request() {
        let tokenizer = bytes_and(&["<s>", "<s>x"]);
        assert_eq!(tokenizer.encode("a<s>", Specials::Text), [97, 60, 115, 62]);
        assert_eq!(tokenizer.encode("a<s>", Specials::Parse), [97, CONTROL]);
        assert_eq!(tokenizer.encode("<s>x<s>", Specials::Parse), [CONTROL + 1, CONTROL]);
        assert_eq!(tokenizer.decode(&[97, CONTROL, 98]), "ab");
    }

    #[test]
    fn there_is_one_begin_of_text() {
        let tokenizer = bytes_and(&["<s>"]);
        assert_eq!(tokenizer.with_bos(vec![1]), [1]);
        assert_eq!(tokenizer.with_bos(vec![CONTROL, CONTROL, 1, CONTROL]), [CONTROL, 1, CONTROL]);
        let flagged = Vocabulary { bos: Some(0), add_bos: Some(true), ..vocabulary(&["<s>", "a"], &[]) };
        let flagged = Tokenizer::new(flagged).unwrap();
        assert!(flagged.adds_bos());
        assert_eq!(flagged.with_bos(vec![1]), [0, 1]);
        assert_eq!(flagged.with_bos(vec![0, 1]), [0, 1]);
        assert_eq!(flagged.with_bos(vec![]), [0]);
    }

    #[test]
    fn scores_order_the_merges_of_sentence_pieces() {
        let tokens = [
            ("a", Normal, 0.0),
            ("b", Normal, 0.0),
            ("ab", Normal, -2.0),
            ("ba", Normal, -1.0),
            ("\u{2581}", Normal, -9.0),
            ("\u{2581}a", Normal, -3.0),
        ];
        let tokenizer = pieces(&tokens, false);
        assert_eq!(tokenizer.encode("aba", Specials::Text), [0, 3]);
        assert_eq!(tokenizer.encode("ab", Specials::Text), [2]);
        assert_eq!(tokenizer.encode(" a", Specials::Text), [5]);
        assert_eq!(tokenizer.encode("é", Specials::Text), [6 + 0xc3, 6 + 0xa9]);
        assert_eq!(tokenizer.decode(&[5, 6 + 0xc3, 6 + 0xa9]), " aé");
    }

    #[test]
    fn a_space_goes_before_text_where_the_vocabulary_says_so() {
        let tokens = [
            ("a", Normal, 0.0),
            ("\u{2581}", Normal, -1.0),
            ("\u{2581}a", Normal, -1.0),
            ("<s>", Control, 0.0),
            ("[u]", UserDefined, 0.0),
        ];
        let tokenizer = pieces(&tokens, true);
        assert_eq!(tokenizer.encode("aa", Specials::Text), [2, 0]);
        assert_eq!(tokenizer.encode("a<s>a[u]a", Specials::Parse), [2, 3, 2, 4, 2]);
        assert_eq!(tokenizer.encode("", Specials::Parse), [0; 0]);
        assert_eq!(tokenizer.decode(&[2, 0]), "aa");
        assert_eq!(tokenizer.decode(&[1, 2]), " a");
        assert_eq!(pieces(&tokens, false).decode(&[2, 0]), " aa");
    }

    #[test]
    fn user_defined_tokens_match_anywhere_and_control_tokens_never_arise_from_merges() {
        let tokens = [
            ("a", Normal, 0.0),
            ("b", Normal, 0.0),
            ("ab", Control, 9.0),
            ("aab", UserDefined, 0.0),
            ("bb", Unused, 9.0),
        ];
        let tokenizer = pieces(&tokens, false);
        assert_eq!(tokenizer.encode("ab", Specials::Text), [0, 1]);
        assert_eq!(tokenizer.encode("ab", Specials::Parse), [2]);
        assert_eq!(tokenizer.encode("aaabb", Specials::Text), [0, 3, 1]);
        assert_eq!(tokenizer.encode("bb", Specials::Text), [1, 1]);
        // The name of a byte token is text too.
        let name = tokenizer.encode("<0x61>", Specials::Text);
        assert_eq!(tokenizer.decode(&name), "<0x61>");
        assert_eq!(name.len(), 6);
    }

    #[test]
    fn ends_of_turns_are_known_by_name() {
        let tokenizer = bytes_and(&["<s>", "<end_of_turn>", "<|im_start|>", "<|eot_id|>"]);
        assert_eq!(tokenizer.eos_ids(), [CONTROL + 1, CONTROL + 3]);
        let named = Vocabulary { eos: Some(1), ends: vec![0, 1], ..vocabulary(&["a", "b"], &[]) };
        assert_eq!(Tokenizer::new(named).unwrap().eos_ids(), [0, 1]);
    }

    #[test]
    fn contradictions_are_refused() {
        let is = |vocabulary, what: &str| {
            let error = refusal(vocabulary);
            assert!(error.contains(what), "{error}");
        };
        is(Vocabulary { model: "bert".to_owned(), ..vocabulary(&["a"], &[]) }, "`bert` is not supported");
        is(vocabulary(&[], &[]), "0 tokens");
        is(Vocabulary { kinds: vec![Normal; 2], ..vocabulary(&["a"], &[]) }, "2 token types for 1 tokens");
        is(
            Vocabulary { eos: Some(1), ..vocabulary(&["a"], &[]) },
            "end of text token id 1 is past the last of 1",
        );
        is(Vocabulary { ends: vec![7], ..vocabulary(&["a"], &[]) }, "end of turn token id 7");
        is(vocabulary(&["a", "b"], &["a b"]), "merge 0 `a b`: the two parts together are no token");
        is(vocabulary(&["a", "b"], &["a c"]), "its right part");
        is(vocabulary(&["a", "b"], &["ab"]), "merge 0 `ab`");
        is(vocabulary(&["a", "b"], &[""]), "merge 0 ``");
        let spm = |scores| Vocabulary { model: "llama".to_owned(), scores, ..vocabulary(&["a"], &[]) };
        is(spm(vec![]), "0 scores for 1 tokens");
        is(spm(vec![f32::NAN]), "score of token 0 is NaN");
        let byte = Vocabulary { kinds: vec![TokenKind::Byte], ..spm(vec![0.0]) };
        is(byte, "token 0 `a` is of kind byte");
        let huge = "x".repeat(MAX_SPECIAL_BYTES + 1);
        is(
            Vocabulary { kinds: vec![Control], ..vocabulary(&[&huge], &[]) },
            "special tokens have 4194305 bytes",
        );
    }

    proptest! {
        #[test]
        fn bytes_round_trip(text in any::<String>()) {
            static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| bytes_and(&["<s>"]));
            prop_assert_eq!(BYTES.decode(&BYTES.encode(&text, Specials::Text)), text);
        }
    }
}
