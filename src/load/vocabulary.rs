//! The vocabulary of a GGUF file, as the tokenizer wants it.

use crate::checkpoint::gguf::{Gguf, GgufError};
use crate::text::{Fim, Strings, TokenKind, Vocabulary};

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

    // Older files have the second name.
    let around = |name: &str, older: &str| Ok::<_, GgufError>(id(name)?.or(id(older)?));
    let fim = match (around("fim_pre", "prefix")?, around("fim_suf", "suffix")?, around("fim_mid", "middle")?)
    {
        (Some(prefix), Some(suffix), Some(middle)) => Some(Fim { prefix, suffix, middle }),
        _ => None,
    };

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
        fim,
        ends_are_all: false,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        whole_words: false,
    })
}
