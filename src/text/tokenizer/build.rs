//! From a vocabulary to a tokenizer.

use std::sync::Arc;

use super::{Method, Tokenizer};
use crate::text::bpe::{self, Bpe};
use crate::text::error::shown;
use crate::text::gemma::{self, Gemma};
use crate::text::index::TokenIndex;
use crate::text::reply::{Channel, ChannelForm};
use crate::text::special::Matcher;
use crate::text::spm::{self, Spm};
use crate::text::vocabulary::Strings;
use crate::text::{TextError, TokenKind, Vocabulary};

/// Texts of control tokens that end a reply, whatever the checkpoint says about them: many files name only the end
/// of text, while chat models end their turns with another token.
const TURN_ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|end_of_sentence|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "</s>",
];

/// Names of the tokens that open and close the thinking channel, and what is written around thoughts.
const CHANNELS: [(&str, &str, ChannelForm); 3] = [
    ("<|channel>", "<channel|>", ChannelForm::Named),
    ("<think>", "</think>", ChannelForm::Plain),
    ("[THINK]", "[/THINK]", ChannelForm::Plain),
];

/// Which method a vocabulary asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Bpe,
    Spm,
    Gemma,
}

impl Tokenizer {
    /// Builds the tokenizer of a vocabulary.
    ///
    /// # Errors
    /// Kinds of tokenizers and pre-tokenizers that are not built in, lists that do not fit together, merges of
    /// what is no token, byte tokens that name no byte.
    pub fn new(vocabulary: Vocabulary) -> Result<Self, TextError> {
        vocabulary.check()?;
        let wanted = Wanted::by(&vocabulary)?;
        let kinds = kinds(&vocabulary, wanted);
        let pieces = pieces(&vocabulary, &kinds, wanted)?;
        let channel = channel(&vocabulary, &kinds);
        let marks_channel =
            |id: usize| channel.is_some_and(|channel| [channel.open, channel.close].contains(&(id as u32)));
        let is = |id: usize, kind: TokenKind| kinds[id] == kind && !marks_channel(id);

        let mut index = TokenIndex::with_capacity(pieces.len());
        for id in (0..pieces.len()).filter(|&id| is(id, TokenKind::Normal)) {
            index.insert(&pieces, id as u32);
        }
        if wanted != Wanted::Spm {
            // Merges may lead to tokens that are user-defined too.
            for id in (0..pieces.len()).filter(|&id| is(id, TokenKind::UserDefined)) {
                index.insert(&pieces, id as u32);
            }
        }
        let method = match wanted {
            Wanted::Spm => Method::Spm(Spm::new(&vocabulary, &pieces, &kinds)?),
            Wanted::Bpe => Method::Bpe(Bpe::new(&vocabulary, &pieces, &index)?),
            Wanted::Gemma => Method::Gemma(Gemma::new(&vocabulary, &pieces, &index, &kinds)?),
        };
        let adds_bos = match &method {
            Method::Bpe(bpe) => bpe.pre.adds_bos,
            Method::Spm(_) | Method::Gemma(_) => true,
        };

        // Special tokens match as they are written, not as they print.
        let control = Matcher::new(&vocabulary.tokens, |id| {
            matches!(kinds[id], TokenKind::Control | TokenKind::Unknown) || marks_channel(id)
        })?;
        let user_defined = Matcher::new(&vocabulary.tokens, |id| is(id, TokenKind::UserDefined))?;
        let mut ends = vocabulary.ends.clone();
        if !vocabulary.ends_are_all {
            ends.extend(vocabulary.eos);
            let ends_turn = |&id: &u32| {
                let text = vocabulary.tokens.get(id as usize).unwrap_or_default();
                TURN_ENDS.iter().any(|name| name.as_bytes() == text)
            };
            ends.extend(control.ids.iter().copied().filter(ends_turn));
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(Self {
            pieces,
            kinds,
            index,
            method,
            control: Arc::new(control),
            user_defined,
            bos: vocabulary.bos,
            eos: vocabulary.eos,
            unk: vocabulary.unk,
            pad: vocabulary.pad,
            ends,
            channel,
            fim: vocabulary.fim,
            add_bos: vocabulary.add_bos.unwrap_or(adds_bos),
            add_eos: vocabulary.add_eos.unwrap_or(false),
        })
    }
}

impl Wanted {
    fn by(vocabulary: &Vocabulary) -> Result<Self, TextError> {
        match vocabulary.model.as_str() {
            "gpt2" => Ok(Self::Bpe),
            "llama" => Ok(Self::Spm),
            "gemma4" => Ok(Self::Gemma),
            found => Err(TextError::UnknownModel { found: shown(found) }),
        }
    }
}

/// What each token is.
fn kinds(vocabulary: &Vocabulary, wanted: Wanted) -> Vec<TokenKind> {
    let mut kinds = vocabulary.kinds.clone();
    kinds.resize(vocabulary.tokens.len(), TokenKind::Normal);
    if wanted == Wanted::Gemma {
        let tokens = vocabulary.tokens.iter();
        kinds.iter_mut().zip(tokens).for_each(|(kind, token)| *kind = gemma::kind_of(token, *kind));
    }
    kinds
}

/// What each token stands for.
fn pieces(vocabulary: &Vocabulary, kinds: &[TokenKind], wanted: Wanted) -> Result<Strings, TextError> {
    let mut pieces = Strings::with_capacity(vocabulary.tokens.len(), vocabulary.tokens.total_bytes());
    for (id, (token, kind)) in vocabulary.tokens.iter().zip(kinds).enumerate() {
        match kind {
            TokenKind::Normal if wanted == Wanted::Bpe => bpe::decode_token(token, &mut pieces),
            TokenKind::Normal => spm::decode_token(token, &mut pieces),
            TokenKind::UserDefined if wanted == Wanted::Gemma => spm::decode_token(token, &mut pieces),
            TokenKind::Byte => {
                pieces.push(&[spm::byte_of(token).ok_or_else(|| TextError::BadVocabulary {
                    what: format!(
                        "token {id} `{}` is of kind byte, expected `<0xXX>`",
                        String::from_utf8_lossy(token)
                    ),
                })?])
            }
            _ => pieces.push(token),
        }
    }
    Ok(pieces)
}

/// The thinking channel, if both of its markers are tokens. Some files let them print and call them user-defined.
fn channel(vocabulary: &Vocabulary, kinds: &[TokenKind]) -> Option<Channel> {
    let mut found = [[None; 2]; CHANNELS.len()];
    let marker = |kind: &TokenKind| matches!(kind, TokenKind::Control | TokenKind::UserDefined);
    let tokens = vocabulary.tokens.iter().zip(kinds).enumerate();
    for (id, (token, _)) in tokens.filter(|(_, (_, kind))| marker(kind)) {
        for (places, (open, close, _)) in found.iter_mut().zip(CHANNELS) {
            for (place, name) in places.iter_mut().zip([open, close]) {
                if name.as_bytes() == token {
                    place.get_or_insert(id as u32);
                }
            }
        }
    }
    let pairs = found.iter().zip(CHANNELS);
    pairs
        .filter_map(|(&[open, close], (_, _, form))| Some(Channel { open: open?, close: close?, form }))
        .next()
}
