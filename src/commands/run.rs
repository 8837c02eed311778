//! `axed run`

mod ask;
mod report;
mod screen;
mod session;
mod talk;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Result;
use axe::config::Config;
use axe::load::Checkpoint;
use clap::{ArgGroup, Args};
use tracing_subscriber::EnvFilter;

use ask::{Asked, Conversation};
use report::Answer;
use screen::Screen;
use session::Session;

/// Generate text without the daemon.
///
/// With a prompt (`--prompt`, `--file`) the answer goes to standard output as it is made, and what it took to standard
/// error. Without one it is a conversation: a line is a message; Ctrl-C stops an answer, and ends the program where none is
/// being made; Ctrl-D ends it; `/new` begins anew. Lines may come through a pipe, too.
///
/// Exit status: 0 done, 1 failed, 2 wrong command line, 130 ended by Ctrl-C.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").args(["prompt", "file"]))]
pub struct Options {
    /// The checkpoint: a GGUF file, or the directory of a DiffusionGemma.
    #[arg(short, long, value_name = "PATH", env = "AXE_MODEL")]
    model: PathBuf,
    /// The prompt: a message to the model, or with --raw a text to continue.
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the prompt; `-` is standard input as a whole.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Positions of the cache, prompt and answer together [default: chosen; `axed plan` says why].
    #[arg(short, long, visible_alias = "context-length", value_name = "TOKENS")]
    context: Option<String>,
    /// Most tokens of an answer [default: what the context leaves].
    #[arg(short = 'n', long, allow_negative_numbers = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Most rows of a pass that may commit tokens: auto, or an integer from 1 to 16. The text does not depend on it.
    #[arg(short, long, value_name = "B", value_parser = super::block_size)]
    block_size: Option<String>,
    /// 0 takes the most probable token [default: `sampling.temperature`; 1, its schedule, of a model that denoises].
    #[arg(long, visible_alias = "temp", allow_negative_numbers = true, value_name = "T", value_parser = number::<0, 2>)]
    temperature: Option<f32>,
    /// Keep the K most probable tokens; 0 keeps all [default: `sampling.top_k`; so for those below].
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = number::<0, 1>)]
    top_p: Option<f32>,
    /// Drop tokens less probable than this times the most probable; 0 drops none.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = number::<0, 1>)]
    min_p: Option<f32>,
    /// Keys the random numbers: the same seed gives the same text [default: random].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
    /// A system message, the first of the conversation.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the text as it is, without the chat template. Names of special tokens in it are read as those tokens.
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Go on past the tokens that end an answer.
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object instead: text, token ids, counts and times.
    #[arg(long, requires = "input")]
    json: bool,
    /// Sort of device: auto, cpu, gpu or accelerator.
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// Configuration file [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What the log tells on standard error: error, warn, info or debug.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<tracing::Level>,
}

/// Loads the model and answers.
pub fn run(options: &Options) -> Result<()> {
    let config = options.config()?;
    let prompt = match (&options.prompt, &options.file) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, Some(file)) => Some(super::read_text(file)?),
        (None, None) => None,
    };
    if prompt.as_ref().is_some_and(String::is_empty) {
        return Err(super::WrongUsage("the prompt is empty".to_owned()).into());
    }
    let asked = Asked::new(options);
    // What cannot be has to be told before seconds go into loading.
    let checkpoint = Checkpoint::open(&options.model).map_err(anyhow::Error::from_boxed)?;
    asked.check(&checkpoint)?;
    drop(checkpoint);
    log(options.log_level);
    let mut session = Session::open(&config, &options.model)?;
    let outcome = match prompt {
        Some(prompt) => once(&mut session, &config, &asked, &prompt, options),
        None => talk::talk(&mut session, &config, &asked),
    };
    session.close();
    super::unless_closed(outcome)
}

/// One prompt, one answer.
fn once(
    session: &mut Session,
    config: &Config,
    asked: &Asked,
    prompt: &str,
    options: &Options,
) -> Result<()> {
    let mut conversation = Conversation::new(asked, &session.model)?;
    let request = conversation.ask(prompt, asked, &session.model, config)?;
    let mut screen = if options.json { Screen::Silent } else { Screen::of_stdout(session.model.kind) };
    let seed = request.sampling.seed;
    let answer = session.ask(request, &mut screen)?;
    if options.json {
        let object = report::json(&session.model, &answer, seed, session.load_s);
        super::to_stdout(|out| Ok(writeln!(out, "{object}")?))?;
    } else {
        report::tell(&answer, seed);
    }
    stopped(&answer)
}

/// Ends the program after an answer that Ctrl-C stopped, as the shell expects it.
fn stopped(answer: &Answer) -> Result<()> {
    if answer.cancelled() {
        axe::device::process::leave(session::INTERRUPTED);
    }
    Ok(())
}

impl Options {
    /// The configuration with the flags on top.
    fn config(&self) -> Result<Config> {
        let config = super::configured(
            self.config.as_deref(),
            [
                ("--model", "model.path", Some(self.model.to_string_lossy().into_owned())),
                ("--context", "model.context_length", self.context.clone()),
                ("--block-size", "decode.block_size", self.block_size.clone()),
                ("--device", "device.kind", self.device.clone()),
            ],
        )?;
        axe::device::runtime::locate(config.device.threads)?;
        Ok(config)
    }
}

/// Warnings, or what was asked for, on standard error.
fn log(level: Option<tracing::Level>) {
    // What the engine fails with is told at the end, as the error of this command.
    let words = level.map_or("warn,axe::engine=off".to_owned(), |level| level.to_string().to_lowercase());
    let lines = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(words))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time();
    // Only a program that had started its log before would fail here.
    let _started = lines.try_init();
}

/// A number from `LOW` to `HIGH`.
fn number<const LOW: i8, const HIGH: i8>(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (f32::from(LOW)..=f32::from(HIGH)).contains(&number) => Ok(number),
        _ => Err(format!("expected a number from {LOW} to {HIGH}")),
    }
}
