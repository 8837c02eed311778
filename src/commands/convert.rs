//! `axed convert`

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use axe::checkpoint::w4::FORMAT;
use axe::checkpoint::w4::convert::{ConvertEvent, ConvertOptions, convert};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

/// Quantise the experts of a DiffusionGemma checkpoint to 4 bits (format dg-w4a16-v1).
///
/// All other tensors are bf16 in the result. A conversion that was cut off, by a signal or a full disk, goes on where it
/// was when the same command is run again.
#[derive(Debug, Args)]
pub struct Options {
    /// The Hugging Face directory to read: safetensors in bf16, f16 or f32.
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// The directory to make.
    #[arg(value_name = "DST")]
    pub target: PathBuf,
    /// Leave the vision tower out.
    #[arg(long)]
    pub text_only: bool,
    /// Remove what an earlier conversion left in DST, finished or not, and start over.
    #[arg(long)]
    pub force: bool,
}

/// Converts, and tells how far it is on standard error.
pub fn run(options: &Options) -> Result<()> {
    let how = ConvertOptions { text_only: options.text_only, force: options.force, ..Default::default() };
    let start = Instant::now();
    let mut teller = Teller::new(std::io::stderr().is_terminal());
    let converted = convert(&options.source, &options.target, &how, &mut |event| teller.hear(event));
    teller.end();
    let converted = converted?;
    super::to_stdout(|out| {
        writeln!(
            out,
            "{}: {FORMAT}, {} files of tensors ({} kept from an earlier run), {:.1} MiB, {:.1} s",
            options.target.display(),
            converted.made + converted.kept,
            converted.kept,
            converted.bytes as f64 / f64::from(1 << 20),
            start.elapsed().as_secs_f64()
        )?;
        Ok(())
    })
}

/// Shows a bar on a terminal, and a line for each file elsewhere.
struct Teller {
    bar: Option<ProgressBar>,
    files: usize,
    in_place: usize,
}

impl Teller {
    fn new(terminal: bool) -> Self {
        Self { bar: terminal.then(ProgressBar::no_length), files: 0, in_place: 0 }
    }

    fn hear(&mut self, event: ConvertEvent) {
        match (event, &self.bar) {
            (ConvertEvent::Start { bytes, files }, bar) => {
                self.files = files;
                if let Some(bar) = bar {
                    let template = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}";
                    // The default style shows less, and is no failure.
                    bar.set_style(
                        ProgressStyle::with_template(template)
                            .unwrap_or_else(|_| ProgressStyle::default_bar()),
                    );
                    bar.set_length(bytes);
                }
            }
            (ConvertEvent::Note(text), Some(bar)) => bar.println(text),
            (ConvertEvent::Note(text), None) => super::tell(text),
            (ConvertEvent::Progress { bytes }, Some(bar)) => bar.inc(bytes),
            (ConvertEvent::Progress { .. }, None) => {}
            (ConvertEvent::File { name, kept }, bar) => {
                self.in_place += 1;
                match bar {
                    Some(bar) => bar.set_message(format!("{} of {}", self.in_place, self.files)),
                    None => {
                        let how = if kept { "kept" } else { "written" };
                        super::tell(format_args!("{name}: {how} ({} of {})", self.in_place, self.files));
                    }
                }
            }
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
