//! A conversation, line by line.

use std::io::{BufRead, IsTerminal, StdinLock};

use anyhow::{Context, Result, bail};
use axe::config::Config;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::super::closed;
use super::ask::{Asked, Conversation};
use super::report;
use super::screen::Screen;
use super::session::{INTERRUPTED, Session};

/// What begins a new conversation.
const NEW: &str = "/new";

/// Answers line after line until there are no more. What fails on the way is told and is no end; through a pipe, where
/// nobody may be looking, it is the command's failure in the end.
pub(super) fn talk(session: &mut Session, config: &Config, asked: &Asked) -> Result<()> {
    let mut lines = Lines::open()?;
    let mut conversation = Conversation::new(asked, &session.model)?;
    let mut failed = 0;
    while let Some(line) = lines.next()? {
        match line.trim() {
            "" => continue,
            NEW => {
                conversation = Conversation::new(asked, &session.model)?;
                continue;
            }
            _ => {}
        }
        match answer(session, &mut conversation, config, asked, &line) {
            Ok(()) => {}
            Err(error) if error.downcast_ref().is_some_and(closed) => return Err(error),
            Err(error) => {
                failed += 1;
                crate::commands::tell(format_args!("axed: {}", crate::chain(&error)));
            }
        }
    }
    match (lines, failed) {
        (Lines::Pipe(_), 1..) => bail!("{failed} of the messages got no answer"),
        _ => Ok(()),
    }
}

fn answer(
    session: &mut Session,
    conversation: &mut Conversation,
    config: &Config,
    asked: &Asked,
    line: &str,
) -> Result<()> {
    let answer = conversation.ask(line, asked, &session.model, config).and_then(|request| {
        let seed = request.sampling.seed;
        Ok((session.ask(request, &mut Screen::of_stdout(session.model.kind))?, seed))
    });
    conversation.answered(answer.as_ref().ok().map(|(answer, _)| &*answer.text));
    let (answer, seed) = answer?;
    report::tell(&answer, seed);
    Ok(())
}

/// Where lines come from.
enum Lines {
    /// A person, with a line editor.
    Terminal(Box<DefaultEditor>),
    /// A program or a file.
    Pipe(StdinLock<'static>),
}

impl Lines {
    fn open() -> Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Pipe(std::io::stdin().lock()));
        }
        crate::commands::tell(format_args!(
            "A line is a message. {NEW} begins anew, Ctrl-C stops an answer, Ctrl-D ends."
        ));
        Ok(Self::Terminal(Box::new(DefaultEditor::new().context("cannot edit lines on this terminal")?)))
    }

    /// The next line without its end.
    fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // A history that is full or has the line already is as good.
                    let _ = editor.add_history_entry(line.as_str());
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof) => Ok(None),
                Err(ReadlineError::Interrupted) => axe::device::process::leave(INTERRUPTED),
                Err(error) => Err(error).context("cannot read a line from the terminal"),
            },
            Self::Pipe(input) => {
                let mut line = String::new();
                let bytes = input.read_line(&mut line).context("cannot read standard input")?;
                Ok((bytes > 0).then(|| line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}
