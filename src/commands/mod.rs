//! What `axed` does besides serving, one command a file.

use std::fmt::Display;
use std::io::{BufWriter, ErrorKind, IsTerminal, Read, StdoutLock, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use axe::config::{Config, ConfigError, Origin, Override};
use axe::decode::BlockSize;

pub mod bench_denoise;
pub mod bench_ops;
pub mod bench_passes;
pub mod config;
pub mod convert;
pub mod denoise;
pub mod detokenize;
pub mod devices;
pub mod logits;
pub mod plan;
pub mod run;
pub mod tokenize;

/// What was typed cannot be meant. Such an error ends the program with status 2, as those that clap finds.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUsage(pub String);

/// The configuration with flags on top: each as it is typed, the key it stands for, and its value if it was given.
///
/// # Errors
/// Whatever is wrong with file, environment or flags; of flags, a [`WrongUsage`].
pub fn configured(
    file: Option<&Path>,
    flags: impl IntoIterator<Item = (&'static str, &'static str, Option<String>)>,
) -> Result<Config> {
    let given = |(flag, key, value)| Some(Override { flag, key, value: value? });
    Config::load(file, flags.into_iter().filter_map(given).collect()).map_err(|error| match error {
        ConfigError::Invalid { origin: Origin::Flag(_), .. } => WrongUsage(error.to_string()).into(),
        other => other.into(),
    })
}

/// A line for people on standard error. Where it cannot be written nobody can be told so either.
pub fn tell(line: impl Display) {
    let _told = writeln!(std::io::stderr(), "{line}");
}

/// The text, if it is a block size.
fn block_size(text: &str) -> Result<String, String> {
    text.parse::<BlockSize>().map(|_| text.to_owned())
}

/// What is said of a flag that only causal models know.
fn meaningless(flag: &str, model: &Path) -> WrongUsage {
    let model = model.display();
    WrongUsage(format!("{flag}: {model} is a model that denoises, where it has no meaning; leave it out"))
}

/// Refuses ids that a model has no token for.
fn check_ids(ids: &[u32], vocabulary: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        Some(id) => bail!("token id {id} is outside the vocabulary of {vocabulary} tokens"),
        None => Ok(()),
    }
}

/// The text of a file, or of standard input for `-`.
fn read_text(path: &Path) -> Result<String> {
    if path.as_os_str() != "-" {
        return std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    }
    let mut input = std::io::stdin();
    if input.is_terminal() {
        tell("reading text from the terminal; end it with Ctrl-D");
    }
    let mut text = String::new();
    input.read_to_string(&mut text).context("cannot read standard input")?;
    Ok(text)
}

/// Has `print` write to standard output. A reader that has seen enough, as `head` does, is no failure.
fn to_stdout(print: impl FnOnce(&mut BufWriter<StdoutLock<'static>>) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let result = print(&mut out).and_then(|()| out.flush().context("cannot write to standard output"));
    // Whatever is still buffered would be written again.
    let _ = out.into_parts();
    unless_closed(result)
}

/// A reader of standard output that went away ends a command, but as no failure.
fn unless_closed(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(closed) => Ok(()),
        other => other,
    }
}

fn closed(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe
}
