//! A whole file as read-only bytes, without copying it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions, UncheckedAdvice};
use thiserror::Error;

/// Why a file could not be mapped.
#[derive(Debug, Error)]
pub enum MappingError {
    /// The file is missing, or this user may not read it.
    #[error("cannot open {}: {source}; check the path and its permissions", path.display())]
    Open {
        /// The file that was asked for.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// A directory, a pipe or a device: nothing that has a fixed content.
    #[error("{} is not a regular file; give the path of the model file itself", path.display())]
    NotAFile {
        /// What was asked for.
        path: PathBuf,
    },
    /// The system refused the mapping.
    #[error("cannot map {} ({len} bytes) into memory: {source}", path.display())]
    Map {
        /// The file that was asked for.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// What the system answered.
        source: io::Error,
    },
}

/// What tells one content of a file from another without reading it, taken from the open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Length in bytes.
    pub len: u64,
    /// Time of the last modification, in seconds since 1970.
    pub modified_s: i64,
    /// The part of that time below a second, in nanoseconds.
    pub modified_ns: i64,
    /// The file's number in its file system.
    pub inode: u64,
}

/// A private, read-only map of a whole file. `AsRef<[u8]>` gives its bytes; the start is page aligned.
///
/// Model files must not be shortened while they are mapped: the system ends a process that touches a page
/// which no longer exists. Replace a model by renaming the new file over it.
#[derive(Debug)]
pub struct Mapping {
    path: PathBuf,
    stamp: Stamp,
    map: Mmap,
}

impl Mapping {
    /// Maps the regular file at `path`.
    pub fn open(path: &Path) -> Result<Mapping, MappingError> {
        let open_error = |source| MappingError::Open { path: path.to_owned(), source };
        // Asked before opening, since opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(open_error)?.is_file() {
            return Err(MappingError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(open_error)?;
        let meta = file.metadata().map_err(open_error)?;
        let stamp = Stamp {
            len: meta.len(),
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec(),
            inode: meta.ino(),
        };
        // SAFETY: the map is private and read-only; nobody in this process writes the file, and every view
        // checks its own bounds and encoding again, so a file that others change gives wrong values only.
        #[allow(unsafe_code)]
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }
            .map_err(|source| MappingError::Map { path: path.to_owned(), len: stamp.len, source })?;
        Ok(Mapping { path: path.to_owned(), stamp, map })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets go of the pages that were read so far; those that are needed again come back from the file. The system maps
    /// pages in large runs, so that a few reads all over a file make much of it count as this process's memory.
    pub fn forget_pages(&self) {
        // SAFETY: nobody has written to the map, so its pages hold what the file holds, now and when they come back.
        #[allow(unsafe_code)]
        let advised = unsafe { self.map.unchecked_advise(UncheckedAdvice::DontNeed) };
        if let Err(error) = advised {
            tracing::debug!(path = %self.path.display(), %error, "the pages of the file stay mapped");
        }
    }

    /// Length, time and number of the file when it was opened.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
