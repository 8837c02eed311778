//! Calls that are JSON between markers, or without any.
//!
//! Markers are found in the text, since vocabularies differ in whether they are tokens; those that are control tokens
//! count as their text.

use super::body::{NoCalls, arguments, objects, python};
use super::lexer::Depth;
use super::reader::{Declared, Said, Segment};
use super::{Call, Syntax};
use crate::text::Tokenizer;

/// What stands around calls.
#[derive(Debug)]
struct Frame {
    /// Begin a call.
    opens: &'static [&'static str],
    /// Ends it; without one, it ends with its last bracket.
    close: Option<&'static str>,
    /// Stand around several calls and mean nothing.
    layout: &'static [&'static str],
    /// Stand inside calls.
    inside: &'static [&'static str],
    /// A reply may begin with a call that has no marker.
    bare: bool,
}

const HERMES: Frame =
    Frame { opens: &["<tool_call>"], close: Some("</tool_call>"), layout: &[], inside: &[], bare: false };

const LLAMA: Frame = Frame { opens: &["<|python_tag|>"], close: None, layout: &[], inside: &[], bare: true };

const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

const MISTRAL: Frame =
    Frame { opens: &["[TOOL_CALLS]"], close: None, layout: &[], inside: &[ARGS, CALL_ID], bare: false };

const SEP: &str = "<｜tool▁sep｜>";

const DEEPSEEK: Frame = Frame {
    opens: &["<｜tool▁call▁begin｜>"],
    close: Some("<｜tool▁call▁end｜>"),
    layout: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
    inside: &[SEP],
    bare: false,
};

/// Members that an object of a call begins with.
const FIRST: [&str; 6] = ["name", "type", "function", "parameters", "arguments", "id"];

/// Reads calls.
#[derive(Debug, Clone)]
pub(super) struct Framed {
    syntax: Syntax,
    frame: &'static Frame,
    /// Markers that are control tokens, and their texts.
    control: Vec<(u32, &'static str)>,
    /// Outside of calls: what could become a marker. In a call: all of it, its marker included.
    held: Vec<u8>,
    /// Where in what was written the held bytes begin.
    at: usize,
    call: Option<Begun>,
    /// Nothing but white space and calls has come.
    at_start: bool,
    /// The last thing that came was a call without a marker.
    after_bare: bool,
}

/// The call that `held` holds.
#[derive(Debug, Clone, Copy)]
struct Begun {
    /// Bytes of its marker.
    marker: usize,
    depth: Depth,
    /// Brackets count from here on.
    armed: bool,
    /// It was looked whether it can be a call at all.
    looked: bool,
}

impl Framed {
    pub fn new(syntax: Syntax, tokenizer: &Tokenizer) -> Self {
        let frame = match syntax {
            Syntax::Gemma | Syntax::Hermes => &HERMES,
            Syntax::Llama => &LLAMA,
            Syntax::Mistral => &MISTRAL,
            Syntax::DeepSeek => &DEEPSEEK,
        };
        let markers = frame.opens.iter().chain(&frame.close).chain(frame.layout).chain(frame.inside);
        let control = markers.filter_map(|text| Some((tokenizer.special(text)?, *text)));
        // What prints is there already.
        let control = control.filter(|(id, _)| tokenizer.piece(*id).is_empty()).collect();
        Self {
            syntax,
            frame,
            control,
            held: Vec::new(),
            at: 0,
            call: None,
            at_start: true,
            after_bare: false,
        }
    }

    /// Bytes that were written, markers by their names.
    pub fn written(&self) -> usize {
        self.at + self.held.len()
    }

    /// Takes the next token.
    pub fn push(&mut self, token: u32, piece: &[u8], tools: &Declared, out: &mut Vec<Segment>) {
        let marker = self.control.iter().find(|(id, _)| *id == token);
        let bytes = marker.map_or(piece, |(_, text)| text.as_bytes());
        for &byte in bytes {
            match self.call {
                Some(call) => self.inside(call, byte, tools, out),
                None => self.outside(byte, out),
            }
        }
    }

    /// A call that was begun goes no further. True if it was cut.
    pub fn end(&mut self, tools: &Declared, out: &mut Vec<Segment>) -> bool {
        match self.call {
            Some(call) => self.settle(call, self.held.len(), tools, out) == Err(NoCalls::Unfinished),
            None => {
                self.release(self.held.len(), out);
                false
            }
        }
    }

    fn outside(&mut self, byte: u8, out: &mut Vec<Segment>) {
        if self.frame.bare && self.at_start && self.held.is_empty() {
            if byte.is_ascii_whitespace() {
                out.push(Segment::Content(Said { from: self.at, bytes: vec![byte] }));
                self.at += 1;
                return;
            }
            if std::mem::take(&mut self.after_bare) && b";,".contains(&byte) {
                self.at += 1;
                return;
            }
            if b"{[".contains(&byte) {
                self.begin(0);
                self.held.push(byte);
                if let Some(call) = &mut self.call {
                    call.depth.step(byte);
                }
                return;
            }
        }
        self.held.push(byte);
        loop {
            let frame = self.frame;
            if frame.opens.iter().any(|open| open.as_bytes() == self.held) {
                self.begin(self.held.len());
                return;
            }
            if frame.layout.iter().any(|layout| layout.as_bytes() == self.held) {
                self.drop_held();
                return;
            }
            let mut markers = frame.opens.iter().chain(frame.layout);
            if self.held.is_empty() || markers.any(|marker| marker.as_bytes().starts_with(&self.held)) {
                return;
            }
            self.release(1, out);
        }
    }

    /// The first bytes held are content.
    fn release(&mut self, bytes: usize, out: &mut Vec<Segment>) {
        if bytes > 0 {
            self.at_start &= self.held[..bytes].iter().all(u8::is_ascii_whitespace);
            let said = Said { from: self.at, bytes: self.held.drain(..bytes).collect() };
            out.push(Segment::Content(said));
            self.at += bytes;
        }
    }

    /// What is held is no content.
    fn drop_held(&mut self) {
        self.at += self.held.len();
        self.held.clear();
    }

    /// A call begins with the marker that is held.
    fn begin(&mut self, marker: usize) {
        // A name may stand before the brackets that matter.
        let armed = marker == 0 || self.syntax != Syntax::Mistral;
        self.call = Some(Begun { marker, depth: Depth::default(), armed, looked: false });
    }

    fn inside(&mut self, mut call: Begun, byte: u8, tools: &Declared, out: &mut Vec<Segment>) {
        self.held.push(byte);
        if call.armed {
            call.depth.step(byte);
        } else {
            let body = self.held[call.marker..].trim_ascii_start();
            if matches!(body, [b'[' | b'{']) {
                call.armed = true;
                call.depth.step(byte);
            }
            call.armed |= body.ends_with(ARGS.as_bytes());
        }
        self.call = Some(call);
        let ends = |text: &str| self.held.len() > call.marker && self.held.ends_with(text.as_bytes());
        if let Some(close) = self.frame.close {
            // No value has a marker outside of its strings.
            if !call.depth.in_string() && ends(close) {
                let body = self.held.len() - close.len();
                self.settle(call, body, tools, out).ok();
                return;
            }
        } else if call.depth.complete() {
            self.settle(call, self.held.len(), tools, out).ok();
            return;
        }
        if !call.depth.in_string()
            && !call.depth.unfinished()
            && let Some(open) = self.frame.opens.iter().copied().find(|open| ends(open))
        {
            // The one before has no end marker.
            self.held.truncate(self.held.len() - open.len());
            self.settle(call, self.held.len(), tools, out).ok();
            self.held.extend(open.as_bytes());
            self.begin(open.len());
            return;
        }
        if call.marker == 0 && !call.looked {
            match begins_like_a_call(&self.held) {
                Some(true) => self.call = Some(Begun { looked: true, ..call }),
                Some(false) => {
                    self.call = None;
                    self.release(self.held.len(), out);
                }
                None => {}
            }
        }
    }

    /// The call has come to its end, its text up to byte `end`: hands it on, or what is held as content.
    fn settle(
        &mut self,
        call: Begun,
        end: usize,
        tools: &Declared,
        out: &mut Vec<Segment>,
    ) -> Result<(), NoCalls> {
        self.call = None;
        let body = String::from_utf8_lossy(&self.held[call.marker..end]);
        let read = self.read(&body);
        let outcome = read.as_ref().map(drop).map_err(|fault| *fault);
        match read.ok().and_then(|calls| tools.check(calls)) {
            Some(calls) => {
                out.extend(calls.into_iter().map(Segment::Call));
                self.drop_held();
                self.after_bare = true;
            }
            None => self.release(self.held.len(), out),
        }
        outcome
    }

    fn read(&self, body: &str) -> Result<Vec<Call>, NoCalls> {
        match self.syntax {
            Syntax::Gemma | Syntax::Hermes => objects(body),
            Syntax::Llama => objects(body).or_else(|fault| match body.contains(".call(") {
                true => python(body),
                false => Err(fault),
            }),
            Syntax::Mistral => match body.split_once(ARGS) {
                Some((name, written)) => {
                    let name = name.split(CALL_ID).next().unwrap_or_default();
                    named(name, written)
                }
                None => objects(body),
            },
            Syntax::DeepSeek => {
                let (before, behind) = body.split_once(SEP).ok_or(NoCalls::Unfinished)?;
                // An older form names the kind of tool first, and puts the object in a block of code.
                let (name, written) = match behind.split_once("```json") {
                    Some((name, block)) => (name, block.trim_end().trim_end_matches("```")),
                    None => (before, behind),
                };
                named(name, written)
            }
        }
    }
}

/// The call of a tool by name and arguments.
fn named(name: &str, written: &str) -> Result<Vec<Call>, NoCalls> {
    let mut depth = Depth::default();
    written.bytes().for_each(|byte| depth.step(byte));
    let cut = depth.unfinished() || written.trim().is_empty();
    let arguments = arguments(written).filter(|_| !cut);
    let arguments = arguments.ok_or(if cut { NoCalls::Unfinished } else { NoCalls::Else })?;
    Ok(vec![Call { name: name.trim().to_owned(), arguments }])
}

/// Whether a text that begins with a bracket begins as calls without markers do; `None` as long as both is possible.
fn begins_like_a_call(text: &[u8]) -> Option<bool> {
    let mut rest = text;
    if let [b'[', behind @ ..] = rest {
        rest = behind.trim_ascii_start();
    }
    match rest {
        [] => return None,
        [b'{', behind @ ..] => rest = behind.trim_ascii_start(),
        _ => return Some(false),
    }
    match rest {
        [] => return None,
        [b'"', behind @ ..] => rest = behind,
        _ => return Some(false),
    }
    if let Some(end) = rest.iter().position(|byte| *byte == b'"') {
        return Some(FIRST.iter().any(|name| name.as_bytes() == &rest[..end]));
    }
    match FIRST.iter().any(|name| name.as_bytes().starts_with(rest)) {
        true => None,
        false => Some(false),
    }
}
