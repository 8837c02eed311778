//! Which format a checkpoint has, told from its first bytes or its files' names.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::directory::CONFIG;
use super::safetensors::{EXTENSION, INDEX, SINGLE};
use super::w4;

/// Stands in a directory as long as a conversion into it is not finished.
pub const UNFINISHED: &str = ".axed-convert.json";

/// The format of a checkpoint and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A GGUF file, of either byte order; opening it tells more.
    Gguf(PathBuf),
    /// A directory of format `dg-w4a16-v1`.
    W4Directory(PathBuf),
    /// A Hugging Face directory of safetensors files.
    HfDirectory(PathBuf),
}

/// Why a path is no checkpoint.
#[derive(Debug, Error)]
pub enum KindError {
    /// It cannot be looked at.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Read {
        /// What was asked for.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// A file of another format.
    #[error("{}: found {found}, expected a GGUF file (it begins with `GGUF`) or a directory of safetensors files; {advice}", path.display())]
    File {
        /// What was asked for.
        path: PathBuf,
        /// What it begins with.
        found: String,
        /// What to do.
        advice: String,
    },
    /// A directory without a checkpoint.
    #[error(
        "{}: found no checkpoint in this directory: looked for {CONFIG} with {SINGLE} or {INDEX} (a Hugging Face \
         directory), and {} beside them ({}); {advice}",
        path.display(),
        w4::META,
        w4::FORMAT
    )]
    Directory {
        /// What was asked for.
        path: PathBuf,
        /// What to do.
        advice: String,
    },
    /// A directory that `axed convert` has not finished.
    #[error(
        "{}: found a conversion that was not finished ({UNFINISHED}); run `axed convert` with the same source and \
         this directory again: it continues",
        path.display()
    )]
    Unfinished {
        /// What was asked for.
        path: PathBuf,
    },
}

impl Kind {
    /// Looks at a file's first bytes or at the names in a directory.
    ///
    /// # Errors
    /// What is neither, with what was found and looked for.
    pub fn of(path: &Path) -> Result<Kind, KindError> {
        let refuse = |source| KindError::Read { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(refuse)?.is_dir() {
            return Self::of_directory(path);
        }
        if !path.is_file() {
            return Err(refuse(io::Error::other("it is neither a regular file nor a directory")));
        }
        let mut start = Vec::new();
        File::open(path).map_err(refuse)?.take(4).read_to_end(&mut start).map_err(refuse)?;
        if start == b"GGUF" || start == b"FUGG" {
            return Ok(Kind::Gguf(path.to_owned()));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let beside = name.ends_with(EXTENSION) || [CONFIG, INDEX, w4::META].contains(&name.as_ref());
        Err(KindError::File {
            path: path.to_owned(),
            found: format!("a file that begins with \"{}\"", start.escape_ascii()),
            advice: if beside {
                "give the directory that holds this file".to_owned()
            } else {
                "give a model in one of these formats".to_owned()
            },
        })
    }

    fn of_directory(path: &Path) -> Result<Kind, KindError> {
        if path.join(UNFINISHED).exists() {
            return Err(KindError::Unfinished { path: path.to_owned() });
        }
        if path.join(w4::META).exists() {
            return Ok(Kind::W4Directory(path.to_owned()));
        }
        let entries =
            std::fs::read_dir(path).map_err(|source| KindError::Read { path: path.to_owned(), source })?;
        let names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        let has = |name: &str| names.iter().any(|other| other == name);
        let tensors = names.iter().any(|name| name.starts_with("model") && name.ends_with(EXTENSION));
        if has(CONFIG) && (tensors || has(INDEX)) {
            return Ok(Kind::HfDirectory(path.to_owned()));
        }
        let mut ggufs: Vec<&String> = names.iter().filter(|name| name.ends_with(".gguf")).collect();
        ggufs.sort();
        let advice = match ggufs.first() {
            Some(name) => format!("to use the GGUF file in it, give its path: {}", path.join(name).display()),
            None => "give the directory of a whole checkpoint".to_owned(),
        };
        Err(KindError::Directory { path: path.to_owned(), advice })
    }
}
