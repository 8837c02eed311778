//! Brackets and strings, byte by byte: where a value ends, without reading it.

/// How deep in brackets a text is, and whether in a string.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Depth {
    open: usize,
    in_string: bool,
    escaped: bool,
    /// A bracket was opened.
    begun: bool,
}

impl Depth {
    /// Takes one byte. Quotes outside of all brackets are text like any other.
    pub fn step(&mut self, byte: u8) {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return;
        }
        match byte {
            b'{' | b'[' | b'(' => {
                self.open += 1;
                self.begun = true;
            }
            b'}' | b']' | b')' => self.open = self.open.saturating_sub(1),
            b'"' if self.open > 0 => self.in_string = true,
            _ => {}
        }
    }

    /// Whether the byte taken last stands in a string.
    pub fn in_string(self) -> bool {
        self.in_string
    }

    /// Whether every bracket is closed, and one was opened.
    pub fn complete(self) -> bool {
        self.begun && self.open == 0 && !self.in_string
    }

    /// Whether something is open.
    pub fn unfinished(self) -> bool {
        self.open > 0
    }
}
