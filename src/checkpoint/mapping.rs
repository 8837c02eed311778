//! A whole file as read-only bytes, without copying it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};
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

    /// Tells the system that what has been read will not be needed soon, so that it does not count as this process's
    /// memory; reading it again is only slower.
    pub fn release(&self) {
        // SAFETY: the map is private and never written, so its pages can be read again from the file unchanged.
        #[allow(unsafe_code)]
        let released = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        if let Err(error) = released {
            tracing::debug!(path = %self.path.display(), %error, "the system keeps the pages of a file");
        }
    }

    /// Has the system read a part of the file from the disk, without waiting for it. Where it does not, reading is only
    /// slower.
    pub fn prefetch(&self, range: Range<usize>) {
        /// Of a longer wish, Linux reads no more than it would read ahead by itself: by default, so much.
        const AT_ONCE: usize = 128 << 10;
        let end = range.end.min(self.map.len());
        for from in (range.start..end).step_by(AT_ONCE) {
            if self.map.advise_range(memmap2::Advice::WillNeed, from, AT_ONCE.min(end - from)).is_err() {
                return;
            }
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
