//! What can go wrong between strings and tokens.

use std::path::Path;

/// A name out of a file, fit for one line of a log: control characters escaped, long ones cut.
pub(super) fn shown(name: &str) -> String {
    const LONGEST: usize = 96;
    name.chars().take(LONGEST).flat_map(char::escape_debug).collect()
}

/// An error of the `text` room.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Something is wrong with what a file holds.
    #[error("{file}: {source}")]
    InFile {
        /// The file.
        file: String,
        /// What is wrong.
        source: Box<TextError>,
    },
    /// The vocabulary names a kind of tokenizer that is not built in.
    #[error(
        "tokenizer model `{found}` is not supported (supported: gpt2, llama, gemma4); use a checkpoint with one of these"
    )]
    UnknownModel {
        /// The name found in the vocabulary.
        found: String,
    },
    /// A byte-pair vocabulary names a pre-tokenizer that is not built in, or none.
    #[error(
        "pre-tokenizer `{found}` is not supported (supported: {supported}); splitting the text by another one's \
         rules would give wrong tokens, so the model is refused"
    )]
    UnknownPreTokenizer {
        /// The name found in the vocabulary, empty when it has none.
        found: String,
        /// Names that are built in.
        supported: String,
    },
    /// The vocabulary contradicts itself.
    #[error("vocabulary: {what}")]
    BadVocabulary {
        /// The field, the entry, what was found and what was expected.
        what: String,
    },
    /// A published tokenizer file is none.
    #[error("{file}: not understood as a tokenizer's file: {message}")]
    PublishedSyntax {
        /// The file.
        file: String,
        /// What is wrong with its JSON, and where.
        message: String,
    },
    /// A published tokenizer file holds what is not understood.
    #[error("{file}: `{key}`: {what}")]
    Published {
        /// The file.
        file: String,
        /// The key, with dots between levels.
        key: String,
        /// What was found and what was expected.
        what: String,
    },
    /// The model has no chat template.
    #[error(
        "the model has no chat template, so it cannot answer chat messages: use a chat (instruct) model, or set \
         `chat_template` in the configuration"
    )]
    NoChatTemplate,
    /// The chat template cannot be parsed.
    #[error("chat template does not parse: {message}")]
    TemplateSyntax {
        /// What the template engine says, with the line.
        message: String,
    },
    /// The chat template failed on these messages, or refused them.
    #[error("chat template: {message}")]
    Template {
        /// The template's own words where it raised an exception, else what the template engine says.
        message: String,
    },
    /// A variable for the chat template that is not the request's to set.
    #[error("`chat_template_kwargs.{key}` cannot be set: the server sets `{key}` itself")]
    ReservedVariable {
        /// Its name.
        key: String,
    },
    /// The messages cannot be given to a chat template.
    #[error("{what}")]
    BadMessages {
        /// The field, what was found and what was expected.
        what: String,
    },
}

impl TextError {
    /// This error, about what `file` holds. One that names its file already stays as it is.
    #[must_use]
    pub fn in_file(self, file: &Path) -> Self {
        match self {
            Self::InFile { .. } | Self::PublishedSyntax { .. } | Self::Published { .. } => self,
            error => Self::InFile { file: file.display().to_string(), source: Box::new(error) },
        }
    }
}
