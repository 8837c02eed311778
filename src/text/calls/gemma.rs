//! Gemma's calls. Their markers and the quotes of their strings are tokens, told by id: the same characters written as
//! text mean nothing.

use super::reader::{Declared, Said, Segment};
use super::value::{Fault, Letter, Letters};
use super::{Call, GEMMA_CLOSE, GEMMA_OPEN, GEMMA_QUOTE};
use crate::text::Tokenizer;

/// How a call's text begins.
const PREFIX: &str = "call:";

/// Reads calls.
#[derive(Debug, Clone)]
pub(super) struct Gemma {
    open: Option<u32>,
    close: Option<u32>,
    quote: Option<u32>,
    /// The call that was begun.
    call: Option<Begun>,
    /// Bytes that were written, markers by their names where they stand for something.
    at: usize,
}

/// What came behind an opening marker, or behind a whole call that another follows without one.
#[derive(Debug, Clone, Default)]
struct Begun {
    /// Where in what was written it begins, its marker included.
    from: usize,
    /// An opening marker stands before it.
    marked: bool,
    letters: Vec<Letter>,
    /// Brackets that are open.
    depth: usize,
    string: Option<Quotes>,
    escaped: bool,
    /// Up to here every bracket is closed: the call is whole.
    whole: Option<usize>,
}

/// What a letter behind a whole call makes of it.
enum Next {
    /// It may belong to the call.
    Inside,
    /// One more call begins.
    Another,
    /// Something else does.
    Else,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quotes {
    Token,
    Json,
}

impl Gemma {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let [open, close, quote] = [GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE].map(|name| tokenizer.special(name));
        Self { open, close, quote, call: None, at: 0 }
    }

    /// Bytes that were written, markers by their names where they stand for something.
    pub fn written(&self) -> usize {
        self.at
    }

    /// Takes the next token.
    pub fn push(&mut self, token: u32, piece: &[u8], tools: &Declared, out: &mut Vec<Segment>) {
        let is = |marker: Option<u32>| marker == Some(token);
        if is(self.open) {
            // The one before has no end marker.
            self.end(tools, out);
            self.call = Some(Begun { from: self.at, marked: true, ..Begun::default() });
            self.at += GEMMA_OPEN.len();
            return;
        }
        let Some(call) = &mut self.call else {
            content(&mut self.at, piece, out);
            return;
        };
        if is(self.close) {
            std::mem::take(call).settle(true, tools, out).ok();
            self.call = None;
            self.at += GEMMA_CLOSE.len();
            return;
        }
        if is(self.quote) {
            // Behind a whole call it means nothing.
            if call.whole.is_none() {
                call.push(Letter::Quote);
                self.at += GEMMA_QUOTE.len();
            }
            return;
        }
        for (place, &byte) in piece.iter().enumerate() {
            self.at += 1;
            match call.push(Letter::Byte(byte)) {
                Next::Inside => {}
                Next::Another => {
                    let whole = std::mem::take(call);
                    let behind = whole.whole.unwrap_or_default();
                    let mut letters = Letters(&whole.letters[behind..]);
                    letters.spaces();
                    call.letters = letters.0.to_vec();
                    call.from = self.at - call.letters.len();
                    whole.settle(false, tools, out).ok();
                }
                Next::Else => {
                    std::mem::take(call).settle(false, tools, out).ok();
                    self.call = None;
                    content(&mut self.at, &piece[place + 1..], out);
                    return;
                }
            }
        }
    }

    /// A call that was begun goes no further. True if it was cut.
    pub fn end(&mut self, tools: &Declared, out: &mut Vec<Segment>) -> bool {
        self.call.take().is_some_and(|call| call.settle(false, tools, out) == Err(Fault::Unfinished))
    }
}

impl Begun {
    /// Takes a letter.
    fn push(&mut self, letter: Letter) -> Next {
        self.letters.push(letter);
        match (self.string, letter) {
            (Some(Quotes::Token), Letter::Quote) => self.string = None,
            (Some(Quotes::Json), Letter::Byte(b'"')) if !self.escaped => self.string = None,
            (Some(Quotes::Json), Letter::Byte(byte)) => self.escaped = byte == b'\\' && !self.escaped,
            (Some(_), _) => {}
            (None, _) if self.whole.is_some() => {
                return behind(&self.letters[self.whole.unwrap_or_default()..]);
            }
            (None, Letter::Quote) => self.string = Some(Quotes::Token),
            (None, Letter::Byte(b'"')) => {
                self.string = Some(Quotes::Json);
                self.escaped = false;
            }
            (None, Letter::Byte(b'{' | b'(' | b'[')) => self.depth += 1,
            (None, Letter::Byte(b'}' | b')' | b']')) => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    self.whole = Some(self.letters.len());
                }
            }
            (None, Letter::Byte(_)) => {}
        }
        Next::Inside
    }

    /// Hands on the call, or as text what is none. What stands behind a whole call is content, unless another call
    /// begins with it.
    fn settle(mut self, closed: bool, tools: &Declared, out: &mut Vec<Segment>) -> Result<(), Fault> {
        let rest = self.letters.split_off(self.whole.unwrap_or(self.letters.len()));
        let (calls, outcome) = match read(&self.letters) {
            Ok(call) => (tools.check(vec![call]), Ok(())),
            Err(fault) => (None, Err(fault)),
        };
        let mut text = if self.marked { GEMMA_OPEN.as_bytes().to_vec() } else { Vec::new() };
        text.extend(shown(&self.letters));
        let (mut at, is_call) = (self.from, calls.is_some());
        match calls {
            Some(calls) => {
                out.extend(calls.into_iter().map(Segment::Call));
                at += text.len();
            }
            None => content(&mut at, &text, out),
        }
        if !matches!(behind(&rest), Next::Another) {
            content(&mut at, &shown(&rest), out);
        }
        if closed && !is_call {
            content(&mut at, GEMMA_CLOSE.as_bytes(), out);
        }
        outcome
    }
}

/// What letters behind a whole call are.
fn behind(rest: &[Letter]) -> Next {
    let mut rest = Letters(rest);
    rest.spaces();
    match rest.text(PREFIX) {
        Ok(()) => Next::Another,
        Err(Fault::Unfinished) => Next::Inside,
        Err(Fault::Wrong) => Next::Else,
    }
}

/// What was written from `at` on is content.
fn content(at: &mut usize, bytes: &[u8], out: &mut Vec<Segment>) {
    if !bytes.is_empty() {
        out.push(Segment::Content(Said { from: *at, bytes: bytes.to_vec() }));
        *at += bytes.len();
    }
}

/// A whole call.
fn read(letters: &[Letter]) -> Result<Call, Fault> {
    let mut letters = Letters(letters);
    letters.spaces();
    letters.text(PREFIX)?;
    let name = letters.until(|byte| b"{(".contains(&byte))?;
    let mut arguments = String::new();
    letters.object(&mut arguments, 0)?;
    letters.spaces();
    match letters.0 {
        [] => Ok(Call { name: name.trim().to_owned(), arguments }),
        _ => Err(Fault::Wrong),
    }
}

/// Letters as text, quotes by the name of their token.
fn shown(letters: &[Letter]) -> Vec<u8> {
    let mut text = Vec::with_capacity(letters.len());
    for letter in letters {
        match letter {
            Letter::Byte(byte) => text.push(*byte),
            Letter::Quote => text.extend(GEMMA_QUOTE.as_bytes()),
        }
    }
    text
}
