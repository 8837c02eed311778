//! From the tokens of a reply to content and calls, whatever the syntax.

use super::framed::Framed;
use super::gemma::Gemma;
use super::{Call, Calling, Syntax};
use crate::text::Tokenizer;

/// What a reply consists of, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// Content.
    Content(Said),
    /// A call, whole.
    Call(Call),
}

/// Bytes of content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Where they stand in all that was written ([`Reader::written`]).
    pub from: usize,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// Takes calls out of a reply.
///
/// White space between content and a call, and between calls, is layout: it is content only where other content
/// follows.
#[derive(Debug, Clone)]
pub struct Reader {
    form: Form,
    tools: Declared,
    one: bool,
    /// White space that is content only if content follows.
    spaces: Vec<Said>,
    calls: usize,
    unfinished: bool,
    /// What the form has found and was not looked at.
    found: Vec<Segment>,
}

#[derive(Debug, Clone)]
enum Form {
    Gemma(Gemma),
    Framed(Framed),
}

/// The tools that may be called.
#[derive(Debug, Clone)]
pub(super) struct Declared(std::sync::Arc<[String]>);

impl Declared {
    /// The calls, if all of them are of declared tools.
    pub fn check(&self, calls: Vec<Call>) -> Option<Vec<Call>> {
        let known = |call: &Call| self.0.contains(&call.name);
        (!calls.is_empty() && calls.iter().all(known)).then_some(calls)
    }
}

impl Reader {
    /// A reader of a reply that `tokenizer`'s model writes.
    #[must_use]
    pub fn new(calling: &Calling, tokenizer: &Tokenizer) -> Self {
        let form = match calling.syntax {
            Syntax::Gemma => Form::Gemma(Gemma::new(tokenizer)),
            framed => Form::Framed(Framed::new(framed, tokenizer)),
        };
        Self {
            form,
            tools: Declared(std::sync::Arc::clone(&calling.tools)),
            one: calling.one,
            spaces: Vec::new(),
            calls: 0,
            unfinished: false,
            found: Vec::new(),
        }
    }

    /// Takes the next token, which prints `piece`. What it settles is appended to `out`.
    pub fn push(&mut self, token: u32, piece: &[u8], out: &mut Vec<Segment>) {
        match &mut self.form {
            Form::Gemma(gemma) => gemma.push(token, piece, &self.tools, &mut self.found),
            Form::Framed(framed) => framed.push(token, piece, &self.tools, &mut self.found),
        }
        self.settle(out);
    }

    /// Bytes that were written so far: all text, calls included, and the names of those markers that stand for something.
    #[must_use]
    pub fn written(&self) -> usize {
        match &self.form {
            Form::Gemma(gemma) => gemma.written(),
            Form::Framed(framed) => framed.written(),
        }
    }

    /// Something else begins, such as thoughts: a call that was begun goes no further.
    pub fn interrupt(&mut self, out: &mut Vec<Segment>) {
        self.end(out);
    }

    /// Ends the reply.
    pub fn finish(&mut self, out: &mut Vec<Segment>) {
        self.unfinished |= self.end(out);
        let spaces = std::mem::take(&mut self.spaces);
        if self.calls == 0 {
            out.extend(spaces.into_iter().map(Segment::Content));
        }
    }

    /// Whether the reply is to end here, since its one call is there.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.one && self.calls > 0
    }

    /// Whether the reply ended in the middle of a call.
    #[must_use]
    pub fn unfinished(&self) -> bool {
        self.unfinished
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// White space that is content only if content follows, for which nobody waits any longer.
    pub fn take_spaces(&mut self) -> Vec<Said> {
        std::mem::take(&mut self.spaces)
    }

    /// What [`take_spaces`](Self::take_spaces) would give.
    #[must_use]
    pub fn spaces(&self) -> &[Said] {
        &self.spaces
    }

    /// Ends the call that was begun. True if it was cut.
    fn end(&mut self, out: &mut Vec<Segment>) -> bool {
        let cut = match &mut self.form {
            Form::Gemma(gemma) => gemma.end(&self.tools, &mut self.found),
            Form::Framed(framed) => framed.end(&self.tools, &mut self.found),
        };
        self.settle(out);
        cut
    }

    /// Holds white space back and counts.
    fn settle(&mut self, out: &mut Vec<Segment>) {
        for segment in self.found.drain(..) {
            if self.one && self.calls > 0 {
                break;
            }
            match segment {
                Segment::Content(Said { from, mut bytes }) => {
                    let spaces = bytes.iter().rev().take_while(|byte| byte.is_ascii_whitespace()).count();
                    let tail = bytes.split_off(bytes.len() - spaces);
                    let behind = from + bytes.len();
                    if !bytes.is_empty() {
                        out.extend(self.spaces.drain(..).map(Segment::Content));
                        out.push(Segment::Content(Said { from, bytes }));
                    }
                    if !tail.is_empty() {
                        self.spaces.push(Said { from: behind, bytes: tail });
                    }
                }
                Segment::Call(call) => {
                    self.calls += 1;
                    out.push(Segment::Call(call));
                }
            }
        }
        self.found.clear();
    }
}
