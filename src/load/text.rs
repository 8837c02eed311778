//! The text side of a checkpoint: its tokenizer and its chat template, which the configuration may replace.

use std::path::Path;

use crate::checkpoint::directory::HfDirectory;
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::kind::Kind;
use crate::checkpoint::safetensors::read_bytes;
use crate::config::{Config, ToolCalls};
use crate::decode::BackendError;
use crate::model::diffusion_gemma::DiffusionCheckpoint;
use crate::text::{ChatTemplate, Tokenizer};

use super::published::published_text;
use super::vocabulary::vocabulary;

/// Tokenizer and template, if there is one.
pub type TextSide = (Tokenizer, Option<ChatTemplate>);

/// The text side of a GGUF file.
///
/// # Errors
/// Vocabularies and templates that are broken or not supported, a template file that cannot be read.
pub fn of_gguf(config: &Config, gguf: &Gguf) -> Result<TextSide, BackendError> {
    let tokenizer = Tokenizer::new(vocabulary(gguf)?).map_err(|error| error.in_file(gguf.path()))?;
    let own = gguf.metadata().str("tokenizer.chat_template")?.map(str::to_owned);
    with_template(config, tokenizer, own, gguf.path())
}

/// The text side of a Hugging Face directory; `ends` are the tokens that end a reply.
///
/// # Errors
/// As for [`of_gguf`].
pub fn of_directory(
    config: &Config,
    directory: &HfDirectory,
    ends: &[u32],
) -> Result<TextSide, BackendError> {
    let published = published_text(directory.path(), (!ends.is_empty()).then_some(ends))?;
    let tokenizer =
        Tokenizer::new(published.vocabulary).map_err(|error| error.in_file(&published.vocabulary_file))?;
    with_template(config, tokenizer, published.template, &published.template_file)
}

/// The text side of a DiffusionGemma in either format; `ends` are the tokens that end a reply.
///
/// # Errors
/// As for [`of_gguf`].
pub fn of_diffusion(
    config: &Config,
    checkpoint: &DiffusionCheckpoint,
    ends: &[u32],
) -> Result<TextSide, BackendError> {
    match checkpoint {
        DiffusionCheckpoint::Gguf(gguf) => of_gguf(config, gguf),
        DiffusionCheckpoint::Directory(directory) => of_directory(config, directory, ends),
    }
}

fn with_template(
    config: &Config,
    mut tokenizer: Tokenizer,
    own: Option<String>,
    own_file: &Path,
) -> Result<TextSide, BackendError> {
    let (source, file) = match &config.model.chat_template {
        Some(path) => (Some(template_file(path)?), path.as_path()),
        None => (own, own_file),
    };
    let template = source.map(|source| ChatTemplate::new(&source, &tokenizer)).transpose();
    let mut template = template.map_err(|error| error.in_file(file))?;
    if let Some(template) = &mut template {
        match config.model.tool_calls {
            ToolCalls::Auto => {}
            ToolCalls::Off => template.set_calls(None),
            ToolCalls::As(syntax) => match syntax.missing(&tokenizer) {
                None => template.set_calls(Some(syntax)),
                Some(token) => {
                    return Err(format!(
                        "`model.tool_calls` is \"{syntax}\", but the vocabulary of {} has no token `{token}`, by which \
                         such calls are told; set \"auto\", or the syntax that the model writes",
                        own_file.display()
                    )
                    .into());
                }
            },
        }
    }
    // Only now: the template's marks know the channel's tokens.
    if !config.model.thoughts_apart {
        tokenizer.forget_channel();
    }
    Ok((tokenizer, template))
}

/// The template that the configuration names.
fn template_file(path: &Path) -> Result<String, BackendError> {
    let refuse = |error: &dyn std::fmt::Display| {
        format!("cannot read the chat template {} (`model.chat_template`): {error}", path.display())
    };
    let bytes = read_bytes(path)
        .map_err(|error| refuse(&error))?
        .ok_or_else(|| refuse(&"there is no such file; correct the path"))?;
    Ok(String::from_utf8(bytes)
        .map_err(|error| refuse(&format_args!("found no UTF-8 text: {error}; save it as UTF-8")))?)
}

/// The tokenizer of the checkpoint at `path`, whatever its format.
///
/// # Errors
/// No checkpoint, or a vocabulary that is broken or not supported.
pub fn tokenizer(path: &Path) -> Result<Tokenizer, BackendError> {
    let (vocabulary, file) = match Kind::of(path)? {
        Kind::Gguf(path) => (vocabulary(&Gguf::open(&path)?)?, path),
        Kind::W4Directory(path) | Kind::HfDirectory(path) => {
            let published = published_text(&path, None)?;
            (published.vocabulary, published.vocabulary_file)
        }
    };
    Ok(Tokenizer::new(vocabulary).map_err(|error| error.in_file(&file))?)
}
