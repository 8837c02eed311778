//! The tokenizer: special tokens first, the rest by the vocabulary's own method.

mod build;

use std::borrow::Cow;
use std::sync::Arc;

use super::TokenKind;
use super::bpe::Bpe;
use super::gemma::Gemma;
use super::index::TokenIndex;
use super::merge::{MAX_BYTES, Merger};
use super::reply::Channel;
use super::special::{Matcher, Part, without};
use super::spm::{self, Spm};
use super::template::Rendered;
use super::vocabulary::{Fim, Strings};

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
    /// Control and unknown tokens, and the markers of the thinking channel whatever they are.
    control: Arc<Matcher>,
    /// All other user-defined tokens, which match in any text.
    user_defined: Matcher,
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    pad: Option<u32>,
    ends: Vec<u32>,
    channel: Option<Channel>,
    fim: Option<Fim>,
    add_bos: bool,
    add_eos: bool,
}

#[derive(Debug)]
enum Method {
    Bpe(Bpe),
    Spm(Spm),
    Gemma(Gemma),
}

impl Tokenizer {
    /// The tokens of `text`; no begin or end of text is added.
    ///
    /// User-defined tokens are found in any text; control tokens, and the markers of the thinking channel, only where
    /// `specials` says so.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        self.encode_marked(text, specials, None)
    }

    /// The tokens of a text that goes on behind other text: no space is put before it. Control tokens are not found.
    pub fn encode_on(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut merger = Merger::default();
        self.user_defined.split(text, None, &mut |part| match part {
            Part::Token(id) => ids.push(id),
            Part::Text(text) => self.encode_plain(text, false, &mut merger, &mut ids),
        });
        ids
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

    /// The tokens that say what stands before and behind a gap, if the checkpoint names them.
    pub fn fim(&self) -> Option<Fim> {
        self.fim
    }

    /// From now on there is no thinking channel: what the model writes between its markers is part of the reply.
    pub fn forget_channel(&mut self) {
        self.channel = None;
    }

    /// Whether prompts begin with the begin-of-text token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos && self.bos.is_some()
    }

    /// Whether whole texts (not prompts) end with the end-of-text token.
    pub fn adds_eos(&self) -> bool {
        self.add_eos && self.eos.is_some()
    }

    /// The special or user-defined token with exactly this text.
    pub fn special(&self, text: &str) -> Option<u32> {
        let found = [self.control.as_ref(), &self.user_defined].map(|tokens| tokens.find(text, 0));
        found.into_iter().flatten().map(|(_, id)| id).find(|&id| self.text(id) == text.as_bytes())
    }

    /// What finds control tokens, for those that must break their texts.
    pub(super) fn control(&self) -> &Arc<Matcher> {
        &self.control
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::super::special::MAX_SPECIAL_BYTES;
    use super::super::testing::{CONTROL, bytes_and, bytes_with, letter, pieces};
    use super::*;
    use crate::text::TokenKind::{Control, Normal, Unused, UserDefined};
    use crate::text::Vocabulary;

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
        assert_eq!(tokenizer.encode_on("aa[u]a a"), [0, 0, 4, 0, 2]);
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
    fn markers_of_thoughts_are_found_where_control_tokens_are() {
        use crate::text::{Channel, ChannelForm};
        for kind in [UserDefined, Control] {
            let names = [("<s>", Control), ("</think>", kind), ("<call>", UserDefined), ("<think>", kind)];
            let mut tokenizer = bytes_with(&names);
            let channel = Channel { open: CONTROL + 3, close: CONTROL + 1, form: ChannelForm::Plain };
            assert_eq!(tokenizer.channel(), Some(channel));
            assert_eq!(tokenizer.encode("<think></think>", Specials::Parse), [CONTROL + 3, CONTROL + 1]);
            assert_eq!(tokenizer.encode("<think>", Specials::Text), b"<think>".map(u32::from));
            // Another user-defined token is one in any text.
            assert_eq!(tokenizer.encode("<call>", Specials::Text), [CONTROL + 2]);
            assert_eq!(tokenizer.piece(CONTROL + 3), if kind == Control { &b""[..] } else { b"<think>" });
            tokenizer.forget_channel();
            assert_eq!(tokenizer.channel(), None);
        }
        // One marker makes no channel, nor do ordinary tokens.
        assert_eq!(bytes_and(&["<s>", "<think>"]).channel(), None);
        assert_eq!(bytes_with(&[("<think>", Normal), ("</think>", Normal)]).channel(), None);
        let gemma = bytes_and(&["<s>", "<|channel>", "<channel|>"]).channel();
        assert_eq!(gemma.map(|channel| channel.form), Some(ChannelForm::Named));
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
