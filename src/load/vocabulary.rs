//! The vocabulary of a checkpoint, as the tokenizer wants it.

use std::io::ErrorKind;
use std::path::Path;

use crate::checkpoint::gguf::{Gguf, GgufError};
use crate::decode::BackendError;
use crate::text::{Strings, TokenKind, Vocabulary};

/// Largest file of a tokenizer; real ones have some dozen MiB.
const MOST_BYTES: u64 = 256 << 20;

/// Average bytes of a token or merge, to reserve about the right room.
const TYPICAL_BYTES: usize = 10;

/// Copies the vocabulary out of a GGUF file's metadata.
///
/// # Errors
/// Missing keys, keys of the wrong type, token types that GGUF does not define. Whether the lists fit together is
/// the tokenizer's to check.
pub fn vocabulary(gguf: &Gguf) -> Result<Vocabulary, GgufError> {
    let metadata = gguf.metadata();
    let id = |name: &str| metadata.u32(&format!("tokenizer.ggml.{name}_token_id"));

    let list = metadata.require_array_str("tokenizer.ggml.tokens")?;
    let mut tokens = Strings::with_capacity(list.len(), list.len() * TYPICAL_BYTES);
    list.iter().for_each(|token| tokens.push(token.as_bytes()));

    let types_key = "tokenizer.ggml.token_type";
    let mut kinds = Vec::new();
    if let Some(types) = metadata.array_i64(types_key)? {
        kinds.reserve(types.len());
        for (index, number) in types.iter().enumerate() {
            kinds.push(TokenKind::from_gguf(number).ok_or_else(|| {
                metadata.fault(types_key, format!("type {number} of token {index}"), "types from 1 to 6")
            })?);
        }
    }
    let mut merges = Strings::default();
    if let Some(list) = metadata.array_str("tokenizer.ggml.merges")? {
        merges = Strings::with_capacity(list.len(), list.len() * TYPICAL_BYTES);
        list.iter().for_each(|merge| merges.push(merge.as_bytes()));
    }
    Ok(Vocabulary {
        model: metadata.require_str("tokenizer.ggml.model")?.to_owned(),
        pre: metadata.str("tokenizer.ggml.pre")?.map(str::to_owned),
        tokens,
        kinds,
        scores: metadata
            .array_f32("tokenizer.ggml.scores")?
            .map(|list| list.iter().collect())
            .unwrap_or_default(),
        merges,
        bos: id("bos")?,
        eos: id("eos")?,
        unk: id("unknown")?,
        pad: id("padding")?,
        ends: id("eot")?.into_iter().chain(id("eom")?).collect(),
        ends_are_all: false,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        whole_words: false,
    })
}

/// What the text files of a Hugging Face directory say.
#[derive(Debug)]
pub struct PublishedText {
    /// From `tokenizer.json` and `tokenizer_config.json`.
    pub vocabulary: Vocabulary,
    /// Source of the chat template, from `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`: the
    /// first of them that has one.
    pub template: Option<String>,
}

/// Reads the tokenizer and the chat template of a Hugging Face directory. `ends` are the tokens that end a reply, from
/// `eos_token_id` of `generation_config.json`; without it `eos_token` does, and tokens whose names say so.
///
/// # Errors
/// Files that are missing, too large or not understood, by file and key; ends that are no tokens are the tokenizer's to
/// find.
pub fn published_text(directory: &Path, ends: Option<&[u32]>) -> Result<PublishedText, BackendError> {
    let needed = |name: &str| {
        let missing =
            || format!("{}: the file is missing, and with it the tokenizer", directory.join(name).display());
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
    Ok(PublishedText { vocabulary, template: template(directory)?.or(inside) })
}

/// The chat template that has a file of its own.
fn template(directory: &Path) -> Result<Option<String>, BackendError> {
    let (plain, wrapped) = ("chat_template.jinja", "chat_template.json");
    if let Some(bytes) = read(directory, plain)? {
        let text = String::from_utf8(bytes)
            .map_err(|error| format!("{}: found no UTF-8 text: {error}", directory.join(plain).display()))?;
        return Ok(Some(text));
    }
    let Some(bytes) = read(directory, wrapped)? else { return Ok(None) };
    let file = directory.join(wrapped);
    let json: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|error| format!("{}: {error}", file.display()))?;
    match json.get("chat_template").and_then(|template| template.as_str()) {
        Some(template) => Ok(Some(template.to_owned())),
        None => Err(format!("{}: `chat_template`: expected a template's text", file.display()).into()),
    }
}

/// A file of the directory, or nothing where there is none.
fn read(directory: &Path, name: &str) -> Result<Option<Vec<u8>>, BackendError> {
    let path = directory.join(name);
    let failed =
        |error: std::io::Error| BackendError::from(format!("cannot read {}: {error}", path.display()));
    let bytes = match std::fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found.map_err(failed)?.len(),
    };
    if bytes > MOST_BYTES {
        return Err(format!("{}: found {bytes} bytes, expected at most {MOST_BYTES}", path.display()).into());
    }
    std::fs::read(&path).map(Some).map_err(failed)
}
