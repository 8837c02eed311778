//! What can be wrong with a directory of safetensors files, told so that its reader knows where and what to do.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::gguf::quoted;
use crate::checkpoint::mapping::MappingError;

/// Why a checkpoint of safetensors files was refused, or why it does not answer a question.
#[derive(Debug, Error)]
pub enum SafetensorsError {
    /// A file cannot be opened or mapped.
    #[error(transparent)]
    File(#[from] MappingError),
    /// A directory cannot be listed, or a small file cannot be read.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Read {
        /// What was to be read.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// Something is not as it must be.
    #[error(transparent)]
    Invalid(#[from] Box<Fault>),
    /// A tensor that is needed is not there.
    #[error(
        "{}: tensor `{name}` is missing; the checkpoint is not complete, or of another architecture: \
         download or convert it again",
        path.display()
    )]
    MissingTensor {
        /// The directory or file.
        path: PathBuf,
        /// The tensor that was asked for.
        name: String,
    },
}

/// One thing that is wrong: where it is, what was found and expected there, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}: {place}found {found}, expected {expected}; {advice}", path.display())]
pub struct Fault {
    /// The file or directory.
    pub path: PathBuf,
    /// The part of it.
    pub place: Place,
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
    /// All of it.
    Whole,
    /// The description at the start of a safetensors file.
    Header,
    /// The tensor of this name.
    Tensor(String),
    /// The value at this path of keys in a JSON file, with dots between them.
    Key(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Whole => Ok(()),
            Place::Header => f.write_str("header: "),
            Place::Tensor(name) => write!(f, "tensor {}: ", quoted(name)),
            Place::Key(key) => write!(f, "key {}: ", quoted(key)),
        }
    }
}

/// Advice for what a new copy of the files would not have.
pub(in crate::checkpoint) const COPY_AGAIN: &str =
    "the file is incomplete or damaged: download or convert it again";
/// Advice for what does not fit the model.
pub(in crate::checkpoint) const WRONG_MODEL: &str =
    "the files do not belong together, or to another model: download or convert them again";
