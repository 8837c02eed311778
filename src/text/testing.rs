//! Small vocabularies for unit tests.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test that calls them")]

use super::{Strings, TokenKind, Tokenizer, Vocabulary};

/// Control tokens of [`bytes_and`] begin here.
pub(super) const CONTROL: u32 = 256;

/// Byte-pair tokens for the 256 bytes, in order, and then the given control tokens, of which the first is begin of
/// text.
pub(super) fn bytes_and(control: &[&str]) -> Tokenizer {
    let control: Vec<_> = control.iter().map(|&name| (name, TokenKind::Control)).collect();
    bytes_with(&control)
}

/// As [`bytes_and`], with the kinds of the tokens behind the bytes.
pub(super) fn bytes_with(more: &[(&str, TokenKind)]) -> Tokenizer {
    let letters = (0..=255u8).map(letter).map(String::from);
    let tokens: Strings = letters.chain(more.iter().map(|&(name, _)| name.to_owned())).collect();
    let mut kinds = vec![TokenKind::Normal; 256];
    kinds.extend(more.iter().map(|&(_, kind)| kind));
    Tokenizer::new(Vocabulary {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens,
        kinds,
        bos: (!more.is_empty()).then_some(CONTROL),
        ..Vocabulary::default()
    })
    .unwrap()
}

/// A byte in GPT-2's alphabet.
pub(super) fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !printable(byte)).count() as u32;
    char::from_u32(0x100 + before).unwrap()
}

/// A SentencePiece vocabulary of `(token, kind, score)`; every byte has a token behind them.
pub(super) fn pieces(tokens: &[(&str, TokenKind, f32)], space_prefix: bool) -> Tokenizer {
    let names = tokens.iter().map(|&(name, ..)| name.to_owned());
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let mut kinds: Vec<TokenKind> = tokens.iter().map(|&(_, kind, _)| kind).collect();
    kinds.resize(kinds.len() + 256, TokenKind::Byte);
    let mut scores: Vec<f32> = tokens.iter().map(|&(.., score)| score).collect();
    scores.resize(kinds.len(), 0.0);
    Tokenizer::new(Vocabulary {
        model: "llama".to_owned(),
        tokens: names.chain(bytes).collect(),
        kinds,
        scores,
        add_bos: Some(false),
        add_space_prefix: Some(space_prefix),
        ..Vocabulary::default()
    })
    .unwrap()
}
