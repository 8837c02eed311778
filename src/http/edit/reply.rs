//! From what a model says to the new part of a text.

/// How the new part stands in a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The reply is the part.
    Plain,
    /// The same, behind a space that stands in the text already.
    Spaced,
    /// A block of code that was opened before: its first line says no more than a language. The fence that closes it has
    /// ended the reply.
    Block {
        /// Whether the part is to end with a line break.
        ends_line: bool,
    },
}

/// Makes the new part from pieces of the reply. What comes out does not depend on how it is cut.
#[derive(Debug)]
pub(super) struct Part {
    form: Form,
    /// What the reply has begun with, until it is known what it is.
    head: String,
    begun: bool,
    last: Option<char>,
}

impl Part {
    pub(super) fn new(form: Form) -> Self {
        Self { form, head: String::new(), begun: form == Form::Plain, last: None }
    }

    /// Takes the next piece of the reply; returns what of the part is certain with it.
    pub(super) fn push(&mut self, text: &str) -> String {
        let out = if self.begun {
            text.to_owned()
        } else {
            self.head.push_str(text);
            let rest = match self.form {
                Form::Block { .. } => self.head.split_once('\n').map(|(_, rest)| rest),
                _ if self.head.is_empty() => None,
                _ => Some(self.head.strip_prefix(' ').unwrap_or(&self.head)),
            };
            let Some(rest) = rest.map(str::to_owned) else { return String::new() };
            self.begun = true;
            rest
        };
        self.last = out.chars().next_back().or(self.last);
        out
    }

    /// The end of the reply, which was `closed` or cut off: what remains of the part.
    pub(super) fn finish(&mut self, closed: bool) -> String {
        let Form::Block { ends_line } = self.form else { return String::new() };
        let mut rest = String::new();
        if !self.begun && !self.head.trim().is_empty() {
            // No block, but one line that says it all.
            self.head.trim().clone_into(&mut rest);
            self.last = rest.chars().next_back();
        }
        self.begun = true;
        if ends_line && closed && self.last.is_some_and(|last| last != '\n') {
            rest.push('\n');
        }
        rest
    }

    /// The space that a draft begins with and that stands in the text already.
    pub(super) fn spaced(&self) -> bool {
        self.form == Form::Spaced && !self.begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part, however the reply is cut.
    fn part(form: Form, reply: &str, closed: bool) -> String {
        let of = |cut: usize| {
            let mut part = Part::new(form);
            let chars: Vec<char> = reply.chars().collect();
            let mut out = String::new();
            for piece in chars.chunks(cut) {
                out.push_str(&part.push(&piece.iter().collect::<String>()));
            }
            out + &part.finish(closed)
        };
        let whole = of(1000);
        (1..5).for_each(|cut| assert_eq!(of(cut), whole, "{form:?} {reply:?}"));
        whole
    }

    #[test]
    fn a_space_that_is_there_comes_no_second_time() {
        assert_eq!(part(Form::Plain, " x ", true), " x ");
        assert_eq!(part(Form::Spaced, " x ", true), "x ");
        assert_eq!(part(Form::Spaced, "  x", true), " x");
        assert_eq!(part(Form::Spaced, "x", true), "x");
        assert_eq!(part(Form::Spaced, "", true), "");
    }

    #[test]
    fn a_block_is_what_stands_behind_its_first_line() {
        let (open, ends) = (Form::Block { ends_line: false }, Form::Block { ends_line: true });
        assert_eq!(part(open, "\na\nb", true), "a\nb");
        assert_eq!(part(open, "rust\na", true), "a");
        assert_eq!(part(ends, "\na\nb", true), "a\nb\n");
        assert_eq!(part(ends, "\na\n", true), "a\n");
        assert_eq!(part(ends, "\na", false), "a", "what was cut off is not rounded up");
        assert_eq!(part(ends, "\n", true), "");
        assert_eq!(part(ends, "", true), "");
        assert_eq!(part(open, " one line ", true), "one line");
        assert_eq!(part(ends, "one line", true), "one line\n");
    }
}
