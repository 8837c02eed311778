//! Forms that replies of the loaded model can be held to.

use std::sync::{Arc, OnceLock};

use super::Model;
use crate::decode::{Constraint, ConstraintError, Format, Grammars, Thoughts, Word, Words};
use crate::text::{ChannelForm, TokenKind, Tokenizer};

/// Compiles forms for a model's vocabulary; made ready when the first one is asked for.
#[derive(Default)]
pub struct Constraints(OnceLock<Result<Grammars, ConstraintError>>);

impl Model {
    /// Compiles a form that a reply is to be held to. With `channels` it leaves alone what the model thinks. Takes up to
    /// some 100 ms, the first time longer: nothing for a thread that others wait for.
    ///
    /// # Errors
    /// [`ConstraintError`]: what is wrong with the form, or with the vocabulary.
    pub fn constraint(&self, format: &Format, channels: bool) -> Result<Constraint, ConstraintError> {
        let grammars = self.constraints.0.get_or_init(|| Grammars::new(words(&self.tokenizer)));
        let constraint = grammars.as_ref().map_err(Clone::clone)?.compile(format)?;
        Ok(match self.tokenizer.channel().filter(|_| channels) {
            Some(channel) => constraint.behind(Thoughts {
                open: channel.open,
                close: channel.close,
                breaks: channel.form == ChannelForm::Plain,
            }),
            None => constraint,
        })
    }
}

/// A tokenizer's vocabulary as forms see it.
fn words(tokenizer: &Arc<Tokenizer>) -> Words {
    let count = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let word = |id: u32| match tokenizer.kind(id) {
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte) => {
            Word::Text(tokenizer.piece(id).to_vec())
        }
        Some(TokenKind::Control) => Word::Control(tokenizer.text(id).to_vec()),
        _ => Word::Nothing,
    };
    let encoder = Arc::clone(tokenizer);
    Words {
        tokens: (0..count).map(word).collect(),
        ends: tokenizer.eos_ids().to_vec(),
        encode: Box::new(move |text| encoder.encode_on(text)),
    }
}
