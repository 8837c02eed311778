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
}

impl Assembler {
    /// A new reply, ended by any of `stops` (empty ones never match). With `strip_space` a space at its very
    /// beginning is left out ([`Tokenizer::strips_leading_space`](super::Tokenizer::strips_leading_space)).
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>, strip_space: bool) -> Self {
        let stops = stops.into_iter().map(|stop| StopString::new(stop.as_ref())).collect();
        Self { stops, partial: Vec::with_capacity(4), held: String::new(), strip_space, stopped: None }
    }

    /// Takes the bytes of the next token and appends the text they release to `out`. Returns which stop string
    /// (index into `stops`) has ended the reply; everything after it is ignored.
    pub fn push(&mut self, piece: &[u8], out: &mut String) -> Option<usize> {
        if self.partial.is_empty() {
            self.take(piece, out);
        } else {
            let mut bytes = std::mem::take(&mut self.partial);
            bytes.extend_from_slice(piece);
            self.take(&bytes, out);
        }
        self.stopped
    }

    /// Ends the reply: appends what was held back for stop strings to `out` and drops an incomplete character.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.partial.clear();
    }

    /// Which stop string has ended the reply.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
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
        out.extend(self.held.drain(..self.held.len() - matched));
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
