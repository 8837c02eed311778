//! From a checkpoint on disk to a model on the device, ready for the engine.

use std::path::Path;

use crate::admin::Board;
use crate::checkpoint::gguf::Gguf;
use crate::config::Config;
use crate::decode::BackendError;
use crate::engine::{LoadProgress, Loaded};
use crate::text::{ChatTemplate, Tokenizer};

/// The text side of a checkpoint: its tokenizer and its chat template, which the configuration may replace.
///
/// # Errors
/// Vocabularies and templates that are broken or not supported, a template file that cannot be read.
pub fn text_side(config: &Config, gguf: &Gguf) -> Result<(Tokenizer, Option<ChatTemplate>), BackendError> {
    let tokenizer = Tokenizer::new(crate::model::vocabulary(gguf)?)?;
    let source = match &config.model.chat_template {
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| {
            format!("cannot read the chat template {} (`model.chat_template`): {error}", path.display())
        })?),
        None => gguf.metadata().str("tokenizer.chat_template")?.map(str::to_owned),
    };
    let template = source.map(|source| ChatTemplate::new(&source, &tokenizer)).transpose()?;
    Ok((tokenizer, template))
}

/// Loads the model for serving; runs on the engine's thread.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub fn load(
    config: &Config,
    path: &Path,
    progress: &LoadProgress,
    _board: &Board,
) -> Result<Loaded, BackendError> {
    progress.report(0.0, "reading the checkpoint");
    let gguf = Gguf::open(path)?;
    let _text = text_side(config, &gguf)?;
    Err(format!("cannot run {}: this build has no forward pass", path.display()).into())
}
