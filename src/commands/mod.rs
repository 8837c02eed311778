//! What `axed` does besides serving, one command a file.

use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, Result};

pub mod bench_ops;
pub mod detokenize;
pub mod devices;
pub mod logits;
pub mod tokenize;

/// The text of a file, or of standard input for `-`.
fn read_text(path: &Path) -> Result<String> {
    if path.as_os_str() != "-" {
        return std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    }
    let mut input = std::io::stdin();
    if input.is_terminal() {
        eprintln!("reading text from the terminal; end it with Ctrl-D");
    }
    let mut text = String::new();
    input.read_to_string(&mut text).context("cannot read standard input")?;
    Ok(text)
}
