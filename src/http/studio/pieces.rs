//! The texts of a draft's tokens, one by one.

use crate::text::{TokenKind, Tokenizer};

/// What each token prints; `None` for tokens that are structure, the end of a turn among them. A character that is
/// spread over tokens stands with the last of them; bytes that are no UTF-8 show as U+FFFD.
pub(super) fn pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<Option<String>> {
    let mut held: Vec<u8> = Vec::new();
    tokens
        .iter()
        .map(|&token| {
            if !matches!(
                tokenizer.kind(token),
                Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte)
            ) {
                held.clear();
                return None;
            }
            held.extend_from_slice(tokenizer.piece(token));
            Some(released(&mut held))
        })
        .collect()
}

/// The characters that are whole; an unfinished one at the end stays.
fn released(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(held) {
            Ok(whole) => {
                text.push_str(whole);
                held.clear();
                return text;
            }
            Err(error) => {
                let (whole, rest) = held.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(whole));
                let wrong = error.error_len();
                *held = rest[wrong.unwrap_or(0)..].to_vec();
                if wrong.is_none() {
                    return text;
                }
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_wait_until_they_are_whole() {
        let mut held = Vec::new();
        let mut said = Vec::new();
        for part in [&b"a\xe2"[..], b"\x82", b"\xac!", b"\xff\xc3", b"x"] {
            held.extend_from_slice(part);
            said.push(released(&mut held));
        }
        assert_eq!(said, ["a", "", "€!", "\u{fffd}", "\u{fffd}x"]);
        assert!(held.is_empty());
    }
}
