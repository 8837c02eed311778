//! What can be wrong with a GGUF file, told so that its reader knows where and what to do.

use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::mapping::MappingError;

/// Why a GGUF file was refused, or why it does not answer a question.
#[derive(Debug, Error)]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error(transparent)]
    File(#[from] MappingError),
    /// Something in the file is not as it must be.
    #[error(transparent)]
    Invalid(#[from] Box<Fault>),
    /// A metadata key that is needed is not there.
    #[error(
        "{}: key `{key}` is missing, and there is no safe value to assume; \
         convert the model again with a current converter",
        path.display()
    )]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key that was asked for.
        key: String,
    },
    /// A tensor that is needed is not there.
    #[error(
        "{}: tensor `{name}` is missing; the file is not a complete model of its architecture: \
         download or convert it again",
        path.display()
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor that was asked for.
        name: String,
    },
    /// Some files of a split model are not there.
    #[error(
        "{}: this is one of {count} shards of a model, and {} not beside it; download all {count} shards into one \
         folder, under the names they were published with",
        path.display(),
        missing_words(missing)
    )]
    MissingShards {
        /// The shard that was opened.
        path: PathBuf,
        /// How many there are.
        count: u64,
        /// Those that are missing, at least the first few.
        missing: Vec<PathBuf>,
    },
}

/// `a.gguf is`, or `a.gguf, b.gguf and more are`.
fn missing_words(missing: &[PathBuf]) -> String {
    /// How many are named.
    const MOST: usize = 4;
    let name = |path: &PathBuf| quoted(&path.file_name().unwrap_or_default().to_string_lossy());
    let names: Vec<String> = missing.iter().take(MOST).map(name).collect();
    let more = if missing.len() > MOST { " and more" } else { "" };
    format!("{}{more} {}", names.join(", "), if missing.len() == 1 { "is" } else { "are" })
}

/// One thing that is wrong in a file: where it is, what was found and expected there, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}: {place}, byte {offset}: found {found}, expected {expected}; {advice}", path.display())]
pub struct Fault {
    /// The file.
    pub path: PathBuf,
    /// The part of the file.
    pub place: Place,
    /// The byte offset from the start of the file.
    pub offset: u64,
    /// What is there.
    pub found: String,
    /// What should be there.
    pub expected: String,
    /// What to do about it.
    pub advice: &'static str,
}

/// The part of a file that a [`Fault`] is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The first bytes: magic, version and counts.
    Header,
    /// The name of the metadata entry with this number, counted from 0.
    KeyName(u64),
    /// The metadata entry of this key.
    Key(String),
    /// The name of the tensor with this number, counted from 0.
    TensorName(u64),
    /// The tensor of this name.
    Tensor(String),
    /// What lies behind the tables.
    Data,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header => f.write_str("header"),
            Place::KeyName(index) => write!(f, "name of key {index}"),
            Place::Key(key) => write!(f, "key {}", quoted(key)),
            Place::TensorName(index) => write!(f, "name of tensor {index}"),
            Place::Tensor(name) => write!(f, "tensor {}", quoted(name)),
            Place::Data => f.write_str("tensor data"),
        }
    }
}

/// A text from a file, fit for one line of a log: control characters escaped, long ones cut.
pub(crate) fn quoted(text: &str) -> String {
    const SHOWN: usize = 96;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

/// The advice for damage that a new copy of the file would not have.
pub(super) const COPY_AGAIN: &str = "the file is incomplete or damaged: download or convert it again";
/// The advice for what no converter of the format should write.
pub(super) const CONVERT_AGAIN: &str = "convert the model again with a current converter";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_short_and_on_one_line() {
        assert_eq!(quoted("a\nb"), "`a\\nb`");
        let long = quoted(&"ä".repeat(5000));
        assert_eq!(long.chars().count(), 96 + 3);
    }
}
