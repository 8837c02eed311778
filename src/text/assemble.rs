//! From the bytes of generated tokens to text that is safe to send.
//!
//! Two things are held back: bytes of a character that is not complete yet, and text that could still become a stop
//! string. What comes out does not depend on how the bytes are cut into pieces.

use std::str;

/// Assembles a reply: whole characters only, ended by the first stop string.
///
/// The stop string whose last byte comes first ends the reply; of several that end there the longest is cut off.
/// Bytes that cannot be UTF-8 become U+FFFD once that is certain; a character that is cut at the end is dropped.
#[derive(Debug, Clone)]
pub struct Assembler {
    stops: Vec<StopString>,
    /// Bytes of a character that is not complete yet.
    partial: Vec<u8>,
    /// Text whose end could become a stop string.
    held: String,
    /// The next space is the one the tokenizer puts before text.
    strip_space: bool,
    stopped: Option<usize>,
    /// Bytes of all text so far, what is held back included.
    assembled: usize,
    /// Bytes that were taken.
    taken: usize,
}

impl Assembler {
    /// A new reply, ended by any of `stops` (empty ones never match). With `strip_space` a space at its very
    /// beginning is left out ([`Tokenizer::strips_leading_space`](super::Tokenizer::strips_leading_space)).
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>, strip_space: bool) -> Self {
        let stops = stops.into_iter().map(|stop| StopString::new(stop.as_ref())).collect();
        Self {
            stops,
            partial: Vec::with_capacity(4),
            held: String::new(),
            strip_space,
            stopped: None,
            assembled: 0,
            taken: 0,
        }
    }

    /// Takes the bytes of the next token and appends the text they release to `out`. Returns which stop string
    /// (index into `stops`) has ended the reply; everything after it is ignored.
    pub fn push(&mut self, piece: &[u8], out: &mut String) -> Option<usize> {
        if self.stopped.is_none() {
            self.taken += piece.len();
        }
        if self.partial.is_empty() {
            self.take(piece, out);
        } else {
            let mut bytes = std::mem::take(&mut self.partial);
            bytes.extend_from_slice(piece);
            self.take(&bytes, out);
        }
        self.stopped
    }

    /// Whether these bytes would end the reply, if they came next.
    pub fn would_stop<'b>(&self, bytes: impl IntoIterator<Item = &'b u8>) -> bool {
        if self.stops.is_empty() || self.stopped.is_some() {
            return false;
        }
        let bytes: Vec<u8> = bytes.into_iter().copied().collect();
        !bytes.is_empty() && self.clone().push(&bytes, &mut String::new()).is_some()
    }

    /// Ends the reply: appends what was held back for stop strings to `out` and drops an incomplete character.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.partial.clear();
    }

    /// From here on no stop string is looked for; appends what was held back for one to `out`.
    pub fn end_search(&mut self, out: &mut String) {
        if self.stopped.is_none() {
            self.stops.clear();
            out.push_str(&self.held);
            self.held.clear();
        }
    }

    /// Which stop string has ended the reply.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Bytes so far, of what is held back, was cut off or is not a whole character yet included, and bytes of all pieces
    /// that they were made of.
    pub fn place(&self) -> (usize, usize) {
        (self.assembled + self.partial.len(), self.taken)
    }

    /// Splits bytes into text, what can never be text, and an incomplete character at the end.
    fn take(&mut self, mut bytes: &[u8], out: &mut String) {
        while !bytes.is_empty() && self.stopped.is_none() {
            match str::from_utf8(bytes) {
                Ok(text) => return self.text(text, out),
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    self.text(str::from_utf8(valid).unwrap_or_default(), out);
                    let Some(invalid) = error.error_len() else {
                        self.partial.extend_from_slice(rest);
                        return;
                    };
                    self.text("\u{fffd}", out);
                    bytes = &rest[invalid..];
                }
            }
        }
    }

    /// Takes text and releases what cannot become a stop string.
    fn text(&mut self, mut text: &str, out: &mut String) {
        if text.is_empty() || self.stopped.is_some() {
            return;
        }
        if std::mem::take(&mut self.strip_space) {
            text = text.strip_prefix(' ').unwrap_or(text);
        }
        self.assembled += text.len();
        if self.stops.is_empty() {
            out.push_str(text);
            return;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (place, byte) in text.bytes().enumerate() {
            let mut ended: Option<(usize, usize)> = None;
            for (which, stop) in self.stops.iter_mut().enumerate() {
                if stop.advance(byte) && ended.is_none_or(|(_, len)| stop.text.len() > len) {
                    ended = Some((which, stop.text.len()));
                }
            }
            if let Some((which, len)) = ended {
                self.held.truncate(before + place + 1 - len);
                self.stopped = Some(which);
                self.flush(out);
                return;
            }
        }
        // What a stop string has matched so far begins with a whole character, so this is a boundary.
        let matched = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let safe = self.held.len() - matched;
        out.push_str(&self.held[..safe]);
        self.held.drain(..safe);
    }
}

/// One stop string and how much of it the text ends with (Knuth, Morris, Pratt).
#[derive(Debug, Clone)]
struct StopString {
    text: Vec<u8>,
    /// For each prefix of `text`: the length of its longest proper prefix that is also its suffix.
    fallback: Vec<usize>,
    matched: usize,
}

impl StopString {
    fn new(text: &str) -> Self {
        let text = text.as_bytes().to_vec();
        let mut fallback = vec![0; text.len()];
        let mut matched = 0;
        for end in 1..text.len() {
            while matched > 0 && text[end] != text[matched] {
                matched = fallback[matched - 1];
            }
            if text[end] == text[matched] {
                matched += 1;
            }
            fallback[end] = matched;
        }
        Self { text, fallback, matched: 0 }
    }

    /// Takes one byte; true when it completes the stop string.
    fn advance(&mut self, byte: u8) -> bool {
        while self.text.get(self.matched) != Some(&byte) {
            if self.matched == 0 {
                return false;
            }
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += 1;
        self.matched == self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The reply to these pieces, and how it ended.
    fn assemble<P: AsRef<[u8]>>(stops: &[&str], pieces: &[P]) -> (String, Option<usize>) {
        let (mut assembler, mut out) = (Assembler::new(stops, false), String::new());
        for piece in pieces {
            assembler.push(piece.as_ref(), &mut out);
        }
        assembler.flush(&mut out);
        (out, assembler.stopped())
    }

    #[test]
    fn characters_come_out_whole() {
        let (mut assembler, mut out) = (Assembler::new([""; 0], false), String::new());
        for byte in "a👍é".bytes() {
            assembler.push(&[byte], &mut out);
            assert!("a👍é".starts_with(&out), "{out:?}");
        }
        assert_eq!(out, "a👍é");
    }

    #[test]
    fn bytes_that_are_no_text_become_replacements_and_a_cut_tail_is_dropped() {
        assert_eq!(
            assemble(&[], &[b"a\xff".as_slice(), b"b\xf0\x9f", b"c\xf0\x9f"]).0,
            "a\u{fffd}b\u{fffd}c"
        );
        let (mut assembler, mut out) = (Assembler::new([""; 0], false), String::new());
        assembler.push(b"\xf0\x9f", &mut out);
        assert_eq!(out, "");
        assembler.push(b"x", &mut out);
        assert_eq!(out, "\u{fffd}x");
    }

    #[test]
    fn a_stop_string_ends_the_reply_and_never_shows() {
        assert_eq!(assemble(&["STOP"], &["ab ST", "OP more"]), ("ab ".to_owned(), Some(0)));
        assert_eq!(assemble(&["STOP"], &["ab S", "TO", "Px", "STOP"]), ("ab ".to_owned(), Some(0)));
        assert_eq!(assemble(&["\n\n"], &["a\n", "b\n", "\n", "c"]), ("a\nb".to_owned(), Some(0)));
        assert_eq!(assemble(&["aab"], &["aaaab"]), ("aa".to_owned(), Some(0)));
        assert_eq!(assemble(&["é"], &["è\u{c3}é"]), ("è\u{c3}".to_owned(), Some(0)));
    }

    #[test]
    fn the_first_stop_string_wins() {
        assert_eq!(assemble(&["later", "b"], &["a b later"]), ("a ".to_owned(), Some(1)));
        assert_eq!(assemble(&["lo", "hello"], &["hello"]), (String::new(), Some(1)));
        assert_eq!(assemble(&["abc", "b"], &["abc"]), ("a".to_owned(), Some(1)));
    }

    #[test]
    fn held_text_comes_at_the_end_or_once_it_is_harmless() {
        let (mut assembler, mut out) = (Assembler::new(["STOP", "TOx"], false), String::new());
        assert_eq!(assembler.push(b"a STO", &mut out), None);
        assert_eq!(out, "a ");
        assert_eq!(assembler.push(b"T", &mut out), None);
        assert_eq!(out, "a STO");
        assembler.flush(&mut out);
        assert_eq!(out, "a STOT");
    }

    #[test]
    fn a_place_tells_what_a_piece_has_added() {
        let (mut assembler, mut out) = (Assembler::new(["STOP"], false), String::new());
        let places = [&b""[..], b"a ST", b"\xf0\x9f", b"\x91\x8d", b"", b"STOP", b"x"].map(|piece| {
            assembler.push(piece, &mut out);
            assembler.place()
        });
        assert_eq!(places, [(0, 0), (4, 4), (6, 6), (8, 8), (8, 8), (12, 12), (12, 12)]);
        assert_eq!(out, "a ST👍");
    }

    #[test]
    fn nothing_follows_a_stop() {
        let (mut assembler, mut out) = (Assembler::new(["."], false), String::new());
        assert_eq!(assembler.push(b"a.", &mut out), Some(0));
        assert_eq!(assembler.push(b"b", &mut out), Some(0));
        assembler.flush(&mut out);
        assert_eq!(out, "a");
    }

    #[test]
    fn empty_stop_strings_never_match() {
        assert_eq!(assemble(&["", "x"], &["abx"]), ("ab".to_owned(), Some(1)));
    }

    #[test]
    fn one_leading_space_is_left_out_on_request() {
        let (mut assembler, mut out) = (Assembler::new([""; 0], true), String::new());
        assembler.push(b"", &mut out);
        assembler.push(b"  a", &mut out);
        assembler.push(b" b", &mut out);
        assert_eq!(out, " a b");
    }

    /// What the rules say, without any increments.
    fn whole(stops: &[String], bytes: &[u8]) -> String {
        // An incomplete character at the end is dropped.
        let cut = (1..=bytes.len().min(3)).find(|&len| {
            let tail = str::from_utf8(&bytes[bytes.len() - len..]);
            tail.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        });
        let text = String::from_utf8_lossy(&bytes[..bytes.len() - cut.unwrap_or(0)]).into_owned();
        for end in 1..=text.len() {
            let longest = stops
                .iter()
                .filter(|stop| !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes()));
            if let Some(stop) = longest.max_by_key(|stop| stop.len()) {
                return text[..end - stop.len()].to_owned();
            }
        }
        text
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            bytes in prop_oneof![
                "[ab.\u{e9}👍]{0,30}".prop_map(String::into_bytes),
                prop::collection::vec(prop_oneof![Just(b'a'), Just(0xf0), Just(0x9f), Just(0x91), Just(0xc3), Just(0xa9)], 0..20),
            ],
            stops in prop::collection::vec("[ab.\u{e9}]{0,4}", 0..4),
            cuts in prop::collection::vec(0usize..8, 0..40),
        ) {
            let (mut assembler, mut out) = (Assembler::new(&stops, false), String::new());
            let expected = whole(&stops, &bytes);
            let mut rest = bytes.as_slice();
            for cut in cuts {
                let (piece, tail) = rest.split_at(cut.min(rest.len()));
                rest = tail;
                assembler.push(piece, &mut out);
                prop_assert!(expected.starts_with(&out), "{:?} was sent of {:?}", out, expected);
            }
            assembler.push(rest, &mut out);
            assembler.flush(&mut out);
            prop_assert_eq!(out, expected);
        }
    }
}
