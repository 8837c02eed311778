//! Arguments as Gemma writes them, brought to JSON.
//!
//! Strings stand between two quote tokens, literally; everything else is written almost as in JSON, without quotes
//! around keys. JSON's own strings, spaces after separators, and parentheses for braces are taken, too.

/// One piece of a call: a byte of text, or a quote token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Letter {
    /// Of text.
    Byte(u8),
    /// The token around strings.
    Quote,
}

/// Deepest nesting of values.
const MAX_DEPTH: usize = 64;

/// Why letters are no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// They end too early.
    Unfinished,
    /// They are something else.
    Wrong,
}

/// Reads letters one after the other.
pub(super) struct Letters<'l>(pub &'l [Letter]);

impl Letters<'_> {
    /// The next letter, which stays.
    fn peek(&self) -> Result<Letter, Fault> {
        self.0.first().copied().ok_or(Fault::Unfinished)
    }

    fn skip(&mut self, count: usize) {
        self.0 = self.0.get(count..).unwrap_or_default();
    }

    /// Skips white space.
    pub fn spaces(&mut self) {
        while matches!(self.0.first(), Some(Letter::Byte(byte)) if byte.is_ascii_whitespace()) {
            self.skip(1);
        }
    }

    /// Takes `text` if it comes next.
    pub fn text(&mut self, text: &str) -> Result<(), Fault> {
        for byte in text.bytes() {
            if self.peek()? != Letter::Byte(byte) {
                return Err(Fault::Wrong);
            }
            self.skip(1);
        }
        Ok(())
    }

    /// Takes bytes up to one that `ends`, which stays.
    pub fn until(&mut self, ends: impl Fn(u8) -> bool) -> Result<String, Fault> {
        let mut bytes = Vec::new();
        loop {
            match self.peek()? {
                Letter::Byte(byte) if ends(byte) => break,
                Letter::Byte(byte) => bytes.push(byte),
                Letter::Quote => return Err(Fault::Wrong),
            }
            self.skip(1);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Takes an object, in braces or parentheses, and appends it to `out` as JSON.
    pub fn object(&mut self, out: &mut String, depth: usize) -> Result<(), Fault> {
        let close = match self.peek()? {
            Letter::Byte(b'{') => b'}',
            Letter::Byte(b'(') => b')',
            _ => return Err(Fault::Wrong),
        };
        self.list(close, out, ['{', '}'], depth, |letters, out, depth| {
            letters.key(out)?;
            letters.spaces();
            match letters.peek()? {
                Letter::Byte(b':' | b'=') => letters.skip(1),
                _ => return Err(Fault::Wrong),
            }
            out.push(':');
            letters.spaces();
            letters.value(out, depth)
        })
    }

    /// Takes what stands between brackets, separated by commas. The opening one comes next.
    fn list(
        &mut self,
        close: u8,
        out: &mut String,
        brackets: [char; 2],
        depth: usize,
        item: impl Fn(&mut Self, &mut String, usize) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if depth >= MAX_DEPTH {
            return Err(Fault::Wrong);
        }
        self.skip(1);
        out.push(brackets[0]);
        self.spaces();
        if self.peek()? == Letter::Byte(close) {
            self.skip(1);
            out.push(brackets[1]);
            return Ok(());
        }
        loop {
            item(self, out, depth + 1)?;
            self.spaces();
            match self.peek()? {
                Letter::Byte(b',') => out.push(','),
                Letter::Byte(byte) if byte == close => {
                    self.skip(1);
                    out.push(brackets[1]);
                    return Ok(());
                }
                _ => return Err(Fault::Wrong),
            }
            self.skip(1);
            self.spaces();
        }
    }

    fn key(&mut self, out: &mut String) -> Result<(), Fault> {
        match self.peek()? {
            Letter::Quote | Letter::Byte(b'"') => self.string(out),
            Letter::Byte(_) => {
                let key = self.until(|byte| b":={}()[],\"".contains(&byte))?;
                let key = key.trim_end();
                if key.is_empty() {
                    return Err(Fault::Wrong);
                }
                out.push_str(&quoted(key));
                Ok(())
            }
        }
    }

    fn value(&mut self, out: &mut String, depth: usize) -> Result<(), Fault> {
        match self.peek()? {
            Letter::Quote | Letter::Byte(b'"') => self.string(out),
            Letter::Byte(b'{' | b'(') => self.object(out, depth),
            Letter::Byte(b'[') => {
                self.list(b']', out, ['[', ']'], depth, |letters, out, depth| letters.value(out, depth))
            }
            Letter::Byte(_) => {
                let bare = self.until(|byte| b",]})".contains(&byte) || byte.is_ascii_whitespace())?;
                let literal = ["true", "false", "null"].contains(&bare.as_str());
                // What JSON takes for a number stays as it is written: no digit is lost.
                if !literal && serde_json::from_str::<serde_json::Number>(&bare).is_err() {
                    return Err(Fault::Wrong);
                }
                out.push_str(&bare);
                Ok(())
            }
        }
    }

    /// Takes a string of either kind.
    fn string(&mut self, out: &mut String) -> Result<(), Fault> {
        let json = self.peek()? != Letter::Quote;
        self.skip(1);
        let mut bytes = Vec::new();
        let mut escaped = false;
        loop {
            match self.peek()? {
                Letter::Quote if !json => break,
                Letter::Quote => return Err(Fault::Wrong),
                Letter::Byte(b'"') if json && !escaped => break,
                Letter::Byte(byte) => {
                    escaped = json && byte == b'\\' && !escaped;
                    bytes.push(byte);
                }
            }
            self.skip(1);
        }
        self.skip(1);
        let text = String::from_utf8_lossy(&bytes);
        if json {
            // Line breaks are written as they are now and then.
            let written = format!("\"{text}\"");
            let text = super::body::without_raw_controls(&written);
            let text: String = serde_json::from_str(&text).map_err(|_| Fault::Wrong)?;
            out.push_str(&quoted(&text));
        } else {
            out.push_str(&quoted(&text));
        }
        Ok(())
    }
}

/// A JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
