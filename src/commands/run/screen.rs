//! Where an answer is shown: on a terminal, with drafts that are drawn over, or plainly.

use std::io::{self, IsTerminal, Stdout, Write};

use axe::engine::{Model, ModelKind};
use console::Term;

/// Columns of a tab.
const TAB: usize = 8;

/// Where an answer goes.
pub(super) enum Screen {
    /// Nowhere.
    Silent,
    /// Text to standard output as it is committed.
    Plain { out: Stdout, last: Option<char> },
    /// To a person.
    Terminal(Canvas<Stdout>),
}

impl Screen {
    /// Standard output. Drafts are shown on a terminal, of models that draft whole canvases.
    pub(super) fn of_stdout(kind: ModelKind) -> Self {
        let out = io::stdout();
        if !out.is_terminal() {
            return Self::Plain { out, last: None };
        }
        let (height, width) = Term::stdout().size();
        let drafts = matches!(kind, ModelKind::BlockDiffusion { .. });
        Self::Terminal(Canvas::new(out, usize::from(width), usize::from(height), drafts))
    }

    /// Shows final text; thoughts only to a person.
    pub(super) fn commit(&mut self, text: &str, thought: &str) -> io::Result<()> {
        match self {
            Self::Silent => Ok(()),
            Self::Plain { out, last } => {
                *last = text.chars().last().or(*last);
                out.write_all(text.as_bytes())?;
                out.flush()
            }
            Self::Terminal(canvas) => canvas.commit(text, thought),
        }
    }

    /// Shows the guess at what comes.
    pub(super) fn draft(&mut self, model: &Model, tokens: &[u32]) -> io::Result<()> {
        let Self::Terminal(canvas) = self else { return Ok(()) };
        let ends = model.tokenizer.eos_ids();
        let length = tokens.iter().position(|id| ends.contains(id)).unwrap_or(tokens.len());
        canvas.draft(&model.tokenizer.decode(&tokens[..length]))
    }

    /// Ends the answer: what comes next is on a line of its own.
    pub(super) fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Silent => Ok(()),
            Self::Plain { out, last } => {
                if *last != Some('\n') {
                    out.write_all(b"\n")?;
                }
                out.flush()
            }
            Self::Terminal(canvas) => canvas.end(),
        }
    }
}

/// A terminal on which drafts stand below what is committed. Lines are broken here, so that it is known how many there
/// are to go back over.
pub(super) struct Canvas<W> {
    out: W,
    width: usize,
    height: usize,
    drafts: bool,
    /// Where the committed text ends.
    column: usize,
    /// Whether a draft is below.
    drawn: bool,
    /// Whether what was written last was a thought.
    thinking: bool,
}

impl<W: Write> Canvas<W> {
    fn new(out: W, width: usize, height: usize, drafts: bool) -> Self {
        let (width, height) = (width.max(2), height.max(3));
        Self { out, width, height, drafts, column: 0, drawn: false, thinking: false }
    }

    fn commit(&mut self, text: &str, thought: &str) -> io::Result<()> {
        self.wipe()?;
        if !thought.is_empty() {
            self.thinking = true;
            self.write(thought, true)?;
        }
        if !text.is_empty() {
            if std::mem::take(&mut self.thinking) && self.column > 0 {
                self.write("\n", false)?;
            }
            self.write(text, false)?;
        }
        self.out.flush()
    }

    fn draft(&mut self, text: &str) -> io::Result<()> {
        if !self.drafts {
            return Ok(());
        }
        self.wipe()?;
        let lines = broken(text, self.width);
        let shown = &lines[..lines.len().min(self.height - 2)];
        for line in shown {
            write!(self.out, "\r\n\x1b[2m{line}\x1b[0m")?;
        }
        if !shown.is_empty() {
            write!(self.out, "\x1b[{}A\x1b[{}G", shown.len(), self.column + 1)?;
            self.drawn = true;
        }
        self.out.flush()
    }

    fn end(&mut self) -> io::Result<()> {
        self.wipe()?;
        if self.column > 0 {
            self.write("\n", false)?;
        }
        self.out.flush()
    }

    /// Removes the draft.
    fn wipe(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.drawn) {
            self.out.write_all(b"\x1b[J")?;
        }
        Ok(())
    }

    fn write(&mut self, text: &str, dim: bool) -> io::Result<()> {
        let shown: String = text.chars().map(harmless).collect();
        for letter in shown.chars() {
            self.column = after(letter, self.column, self.width);
        }
        if dim {
            write!(self.out, "\x1b[2m{shown}\x1b[0m")?
        } else {
            self.out.write_all(shown.as_bytes())?
        };
        if self.column == self.width {
            // A full line: terminals differ in where the cursor is now, so it is told.
            self.out.write_all(b" \r")?;
            self.column = 0;
        }
        Ok(())
    }
}

/// A model may write anything, a terminal's commands as well.
fn harmless(letter: char) -> char {
    if letter.is_control() && !matches!(letter, '\n' | '\t') { '\u{fffd}' } else { letter }
}

/// The column after a letter that is written at `column`.
fn after(letter: char, column: usize, width: usize) -> usize {
    match letter {
        '\n' => 0,
        '\t' => ((column / TAB + 1) * TAB).min(width - 1),
        _ => {
            let wide = console::measure_text_width(letter.encode_utf8(&mut [0; 4]));
            // What does not fit is written at the beginning of the next line.
            if column + wide > width { wide } else { column + wide }
        }
    }
}

/// The text as lines that are shorter than `width` columns.
fn broken(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let (mut part, mut column) = (String::new(), 0);
        for letter in line.chars().map(|letter| if letter == '\t' { ' ' } else { harmless(letter) }) {
            let next = after(letter, column, width);
            if next < column || next >= width {
                lines.push(std::mem::take(&mut part));
                column = 0;
            }
            part.push(letter);
            column = after(letter, column, width);
        }
        lines.push(part);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a terminal of `width` columns shows after these bytes, and where the cursor is. Knows the few commands used.
    fn shown(bytes: &[u8], width: usize) -> (Vec<String>, (usize, usize)) {
        let text = std::str::from_utf8(bytes).unwrap();
        let (mut lines, mut row, mut column) = (vec![Vec::<char>::new()], 0usize, 0usize);
        let mut rest = text.chars();
        while let Some(letter) = rest.next() {
            match letter {
                '\x1b' => {
                    assert_eq!(rest.next(), Some('['));
                    let mut number = String::new();
                    let command = loop {
                        match rest.next().unwrap() {
                            digit if digit.is_ascii_digit() => number.push(digit),
                            command => break command,
                        }
                    };
                    let number = number.parse().unwrap_or(0);
                    match command {
                        'm' => {}
                        'A' => row -= number,
                        'G' => column = number - 1,
                        'J' => {
                            lines.truncate(row + 1);
                            lines[row].truncate(column);
                        }
                        other => panic!("command {other}"),
                    }
                }
                '\r' => column = 0,
                letter => {
                    if letter == '\n' || column == width {
                        (row, column) = (row + 1, 0);
                        if lines.len() <= row {
                            lines.push(Vec::new());
                        }
                    }
                    if letter != '\n' {
                        let length = lines[row].len().max(column + 1);
                        lines[row].resize(length, ' ');
                        lines[row][column] = letter;
                        column += 1;
                    }
                }
            }
        }
        let lines = lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned());
        (lines.collect(), (row, column))
    }

    fn canvas(width: usize) -> Canvas<Vec<u8>> {
        Canvas::new(Vec::new(), width, 6, true)
    }

    #[test]
    fn drafts_leave_nothing_behind() {
        for width in [4, 7, 10, 80] {
            let mut canvas = canvas(width);
            let mut said = String::new();
            for (draft, commit) in [
                ("a draft of two\nlines", "One. "),
                ("x", "2\nthree"),
                ("", "Four, and more than that."),
                ("z\n\n", ""),
            ] {
                canvas.draft(draft).unwrap();
                canvas.draft("another").unwrap();
                canvas.commit(commit, "").unwrap();
                said.push_str(commit);
                let mut plainly = self::canvas(width);
                plainly.commit(&said, "").unwrap();
                let (mut found, at) = shown(&canvas.out, width);
                let (expected, expected_at) = shown(&plainly.out, width);
                found.truncate(
                    expected.len().max(found.iter().rposition(|l| !l.is_empty()).map_or(0, |l| l + 1)),
                );
                assert_eq!((found, at), (expected, expected_at), "{width}: {said:?}");
            }
        }
    }

    #[test]
    fn a_draft_stands_below_and_is_cut_to_the_height() {
        let mut canvas = canvas(10);
        canvas.commit("abc", "").unwrap();
        canvas.draft("0123456789012345678901234567890123456789 and more").unwrap();
        let (lines, at) = shown(&canvas.out, 10);
        assert_eq!(at, (0, 3));
        assert_eq!(lines.len(), 5, "{lines:?}");
        assert_eq!(lines[..2], ["abc", "012345678"]);
    }

    #[test]
    fn a_terminal_gets_no_commands_from_a_model() {
        let mut canvas = canvas(80);
        canvas.commit("a\x1b[2Jb\rc\td", "\x07thought").unwrap();
        let text = String::from_utf8(canvas.out).unwrap();
        assert_eq!(text, "\x1b[2m\u{fffd}thought\x1b[0m\na\u{fffd}[2Jb\u{fffd}c\td");
    }

    #[test]
    fn wide_letters_count_twice() {
        assert_eq!(after('漢', 0, 10), 2);
        assert_eq!(after('漢', 9, 10), 2);
        assert_eq!(broken("漢漢漢", 5), ["漢漢", "漢"]);
        assert_eq!(broken("", 5), [""]);
    }
}
