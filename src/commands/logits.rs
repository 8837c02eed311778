//! `axed logits`

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

/// Write the logits of every position of a text to a safetensors file.
#[derive(Debug, Args)]
#[group(id = "input", required = true, multiple = false, args = ["ids", "text"])]
pub struct Options {
    /// The checkpoint (GGUF).
    #[arg(short, long, value_name = "FILE", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Token ids, separated by commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub ids: Vec<u32>,
    /// File with a text to tokenize.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Tokens fed in one pass; all at once by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub block: Option<u32>,
    /// The file to write: `ids` i32 [T] and `logits` f32 [T, V].
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Runs the model over the tokens.
pub fn run(options: &Options) -> Result<()> {
    bail!("cannot run {}: this build has no forward pass", options.model.display())
}
