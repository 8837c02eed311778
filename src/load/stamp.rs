//! What the files of a model looked like, to tell whether they are others now.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::config::ModelConfig;

/// The files of a model and of its chat template: which they are, how long, and when they were written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stamp(Vec<(PathBuf, u64, u64, i64, i64)>);

impl Stamp {
    /// Of the files that `model` names, as they are now; what cannot be looked at is left out.
    #[must_use]
    pub fn of(model: &ModelConfig) -> Self {
        let mut stamp = Self::default();
        model.chat_template.iter().for_each(|path| stamp.add(path));
        if let Some(path) = &model.path {
            stamp.add(path);
            // A directory's files, and the other shards of a model whose first one is named.
            let folder = if path.is_dir() { Some(path.as_path()) } else { shards_folder(path) };
            if let Some(Ok(entries)) = folder.map(std::fs::read_dir) {
                entries.flatten().for_each(|entry| stamp.add(&entry.path()));
            }
        }
        stamp.0.sort();
        stamp
    }

    fn add(&mut self, path: &Path) {
        if let Ok(file) = std::fs::metadata(path)
            && file.is_file()
        {
            self.0.push((path.to_owned(), file.ino(), file.len(), file.mtime(), file.mtime_nsec()));
        }
    }
}

/// The folder of a file that is one of several by its name, as `model-00001-of-00003.gguf` is.
fn shards_folder(path: &Path) -> Option<&Path> {
    path.file_stem()?.to_str()?.contains("-of-").then(|| path.parent())?
}
