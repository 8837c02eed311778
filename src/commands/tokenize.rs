//! `axed tokenize`

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use axe::text::Specials;
use clap::Args;

/// Print the token ids of a text.
#[derive(Debug, Args)]
pub struct Options {
    /// The checkpoint: a GGUF file or a Hugging Face directory.
    #[arg(short, long, value_name = "FILE", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// File with the text; `-` is standard input.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub text: PathBuf,
    /// Read names of special tokens in the text as those tokens.
    #[arg(long)]
    pub special: bool,
    /// Put the begin-of-text token first if the model wants one.
    #[arg(long)]
    pub bos: bool,
    /// Print each token's text beside its id.
    #[arg(long)]
    pub pieces: bool,
}

/// Prints ids separated by commas, as `axed logits --ids` and `axed detokenize` take them.
pub fn run(options: &Options) -> Result<()> {
    let tokenizer = axe::load::text::tokenizer(&options.model).map_err(anyhow::Error::from_boxed)?;
    let text = super::read_text(&options.text)?;
    let specials = if options.special { Specials::Parse } else { Specials::Text };
    let mut ids = tokenizer.encode(&text, specials);
    if options.bos {
        ids = tokenizer.with_bos(ids);
    }
    super::to_stdout(|out| {
        if !options.pieces {
            writeln!(out, "{}", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?;
            return Ok(());
        }
        for id in ids {
            writeln!(out, "{id}\t{}", tokenizer.text(id).escape_ascii())?;
        }
        Ok(())
    })
}
