//! The text files of a Hugging Face directory: its tokenizer and its chat template.

use std::path::{Path, PathBuf};

use crate::checkpoint::safetensors::read_bytes;
use crate::decode::BackendError;
use crate::text::Vocabulary;

/// What the text files of a Hugging Face directory say.
#[derive(Debug)]
pub struct PublishedText {
    /// From `tokenizer.json` and `tokenizer_config.json`.
    pub vocabulary: Vocabulary,
    /// The file that holds the vocabulary.
    pub vocabulary_file: PathBuf,
    /// Source of the chat template, from `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`: the
    /// first of them that has one.
    pub template: Option<String>,
    /// The file that holds the template, if there is one.
    pub template_file: PathBuf,
}

/// Reads the tokenizer and the chat template of a Hugging Face directory. `ends` are the tokens that end a reply, from
/// `eos_token_id` of `generation_config.json`; without it `eos_token` does, and tokens whose names say so.
///
/// # Errors
/// Files that are missing, too large or not understood, by file and key; ends that are no tokens are the tokenizer's to
/// find.
pub fn published_text(directory: &Path, ends: Option<&[u32]>) -> Result<PublishedText, BackendError> {
    let needed = |name: &str| {
        let missing = || {
            format!(
                "{}: the file is missing, and with it the tokenizer; download the checkpoint again, with all of its files",
                directory.join(name).display()
            )
        };
        read(directory, name)?.ok_or_else(|| BackendError::from(missing()))
    };
    let name = |name: &str| directory.join(name).display().to_string();
    let (tokenizer, config) = ("tokenizer.json", "tokenizer_config.json");
    let mut vocabulary = Vocabulary::from_tokenizer_json(&name(tokenizer), &needed(tokenizer)?)?;
    let inside = vocabulary.read_tokenizer_config(&name(config), &needed(config)?)?;
    if let Some(ends) = ends {
        vocabulary.ends = ends.to_vec();
        vocabulary.ends_are_all = true;
    }
    let (template, template_file) = match template(directory)? {
        Some((template, name)) => (Some(template), directory.join(name)),
        None => (inside, directory.join(config)),
    };
    Ok(PublishedText { vocabulary, vocabulary_file: directory.join(tokenizer), template, template_file })
}

/// The chat template that has a file of its own, and that file's name.
fn template(directory: &Path) -> Result<Option<(String, &'static str)>, BackendError> {
    let (plain, wrapped) = ("chat_template.jinja", "chat_template.json");
    if let Some(bytes) = read(directory, plain)? {
        let text = String::from_utf8(bytes).map_err(|error| {
            format!(
                "{}: found no UTF-8 text: {error}; download the file again, or save it as UTF-8",
                directory.join(plain).display()
            )
        })?;
        return Ok(Some((text, plain)));
    }
    let Some(bytes) = read(directory, wrapped)? else { return Ok(None) };
    let file = directory.join(wrapped);
    let json: serde_json::Value = serde_json::from_slice(&bytes)
        .map_err(|error| format!("{}: {error}; download the file again", file.display()))?;
    match json.get("chat_template").and_then(|template| template.as_str()) {
        Some(template) => Ok(Some((template.to_owned(), wrapped))),
        None => Err(format!(
            "{}: `chat_template`: expected a template's text; download the file again, or name a template of your own \
             (`model.chat_template`)",
            file.display()
        )
        .into()),
    }
}

/// A file of the directory, or nothing where there is none.
fn read(directory: &Path, name: &str) -> Result<Option<Vec<u8>>, BackendError> {
    Ok(read_bytes(&directory.join(name))?)
}
