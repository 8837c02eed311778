//! Strings to tokens and back: tokenizers, chat templates, and the assembly of replies.
//!
//! [`Tokenizer`] is built from a plain [`Vocabulary`] that the caller fills from its checkpoint.
//! [`ChatTemplate`] renders messages to a [`Rendered`] prompt in which only text of the template itself can become
//! a special token. [`Assembler`] turns the pieces of generated tokens into text that is safe to send, [`ReplyText`]
//! tells what of it is thought and what is said.

mod assemble;
mod bpe;
pub mod calls;
mod error;
mod gemma;
mod index;
mod limits;
mod merge;
mod pretokenize;
mod published;
mod python;
mod reply;
mod special;
mod spm;
mod template;
#[cfg(test)]
mod testing;
mod tokenizer;
mod vocabulary;

pub use assemble::Assembler;
pub use error::TextError;
pub use reply::{Channel, ChannelForm, Origin, Parts, ReplyText};
pub use template::{ChatInput, ChatTemplate, Rendered};
pub use tokenizer::{Specials, Tokenizer};
pub use vocabulary::{Fim, Strings, TokenKind, Vocabulary};
