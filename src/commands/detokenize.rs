//! `axed detokenize`

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;

/// Print the text of token ids.
#[derive(Debug, Args)]
pub struct Options {
    /// The checkpoint: a GGUF file or a Hugging Face directory.
    #[arg(short, long, value_name = "FILE", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Token ids, separated by commas.
    #[arg(value_name = "IDS", value_delimiter = ',', required = true)]
    pub ids: Vec<u32>,
}

/// Prints the text; special tokens print nothing.
pub fn run(options: &Options) -> Result<()> {
    let tokenizer = axe::load::text::tokenizer(&options.model).map_err(anyhow::Error::from_boxed)?;
    let size = tokenizer.vocab_size();
    for id in &options.ids {
        ensure!((*id as usize) < size, "token id {id} is outside the vocabulary of {size} tokens");
    }
    super::to_stdout(|out| Ok(writeln!(out, "{}", tokenizer.decode(&options.ids))?))
}
