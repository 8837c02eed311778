//! Why a conversion did not happen, or ended early.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::kind::{KindError, UNFINISHED};
use crate::checkpoint::safetensors::SafetensorsError;
use crate::checkpoint::w4::{FORMAT, QuantiseError};

/// Everything that can be wrong with a conversion.
#[derive(Debug, Error)]
pub enum ConvertError {
    /// The source is no checkpoint.
    #[error(transparent)]
    Kind(#[from] KindError),
    /// The source is not sound.
    #[error(transparent)]
    Source(#[from] SafetensorsError),
    /// The source is a checkpoint of another kind.
    #[error("{}: found {found}, expected a Hugging Face directory of a diffusion_gemma model; {advice}", path.display())]
    OtherKind {
        /// The source.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// A weight that cannot be quantised.
    #[error(
        "{}: tensor `{tensor}`: group of weights that begins at index {index:?}: {fault}; the source is damaged or was \
         trained badly: download it again",
        path.display()
    )]
    Weight {
        /// The source file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Expert, row and column of the group's first weight.
        index: Vec<usize>,
        /// What is wrong.
        fault: QuantiseError,
    },
    /// A finite number that bf16 cannot hold.
    #[error(
        "{}: tensor `{tensor}`: found {value} at index {index:?}, expected a number that fits bf16; the source is damaged \
         or was trained badly: download it again",
        path.display()
    )]
    Number {
        /// The source file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The number's place, one index for each dimension.
        index: Vec<usize>,
        /// The number.
        value: f32,
    },
    /// Source and target are one directory.
    #[error("{}: the source and the target are the same directory; name another one for the result", path.display())]
    Same {
        /// The directory.
        path: PathBuf,
    },
    /// The target holds what this conversion did not make.
    #[error(
        "{}: the directory is not empty: found {found}, expected nothing, or an earlier part of this conversion \
         ({UNFINISHED}); name a new directory",
        path.display()
    )]
    Foreign {
        /// The target.
        path: PathBuf,
        /// What is in it.
        found: String,
    },
    /// The target holds part of another conversion.
    #[error(
        "{}: the directory holds part of a conversion of another source, with other options or by another version; give the \
         same source and options to go on with it, or --force to start over",
        path.display()
    )]
    OtherWork {
        /// The target.
        path: PathBuf,
    },
    /// The target holds a finished conversion.
    #[error("{}: the directory holds a finished checkpoint of format {FORMAT}; use it, or make it again with --force", path.display())]
    Finished {
        /// The target.
        path: PathBuf,
    },
    /// Another process converts into the target.
    #[error("{}: another `axed convert` is writing to this directory; wait for its end", path.display())]
    Busy {
        /// The target.
        path: PathBuf,
    },
    /// The result does not fit the file system.
    #[error(
        "{}: {needed} bytes are still to be written, but the file system has {available} left; \
         free some, or choose a directory on another one",
        path.display()
    )]
    Space {
        /// The target.
        path: PathBuf,
        /// Bytes to be written.
        needed: u64,
        /// Bytes left.
        available: u64,
    },
    /// The system refuses something.
    #[error(
        "cannot {action} {}: {source}; see to the directory's permissions and its disk, then run `axed convert` again: \
         what is finished is kept",
        path.display()
    )]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}
