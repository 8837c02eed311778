//! Compiled programs on disk, so that only the first start compiles.
//!
//! A file is `<key>.bin`: magic, format version, the key, the payload's length and SHA-256, the payload. Whatever is
//! not exactly that counts as absent, since the source is at hand and can be compiled again.

use std::cell::Cell;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

const MAGIC: &[u8; 8] = b"AXECLBIN";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 32 + 8 + 32;

/// Names one program as one device compiles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// Hashes the parts, each with its length before it, so that no two lists of parts run into one.
    pub(super) fn of(parts: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        Self(hash.finalize().into())
    }

    fn file_name(self) -> String {
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.bin")
    }
}

/// A folder of compiled programs.
pub(super) struct BinaryCache {
    folder: PathBuf,
    /// Set once a write failed: one warning is enough, and the daemon works without.
    warned: Cell<bool>,
}

impl BinaryCache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, warned: Cell::new(false) }
    }

    /// The binary stored under `key`, if it is there and whole.
    pub(super) fn load(&self, key: Key) -> Option<Vec<u8>> {
        let path = self.folder.join(key.file_name());
        let file = match fs::read(&path) {
            Ok(file) => file,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::debug!(path = %path.display(), %error, "a compiled program cannot be read");
                }
                return None;
            }
        };
        let payload = unpack(key, &file);
        if payload.is_none() {
            tracing::debug!(path = %path.display(), "a compiled program is damaged or foreign");
        }
        payload.map(<[u8]>::to_vec)
    }

    /// Stores a binary; failing is no error, only slower next time.
    pub(super) fn store(&self, key: Key, payload: &[u8]) {
        if let Err(error) = self.try_store(&self.folder.join(key.file_name()), key, payload)
            && !self.warned.replace(true)
        {
            tracing::warn!(
                folder = %self.folder.display(), %error,
                "compiled programs cannot be kept, every start compiles them anew"
            );
        }
    }

    fn try_store(&self, path: &Path, key: Key, payload: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        // Written aside, under a name that nobody else has, and renamed: a reader sees the old file or the new one,
        // never a half. A leftover goes with the handle.
        let mut file = NamedTempFile::new_in(&self.folder)?;
        file.write_all(&header(key, payload))?;
        file.write_all(payload)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    }
}

fn header(key: Key, payload: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&key.0);
    header.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    header.extend_from_slice(&Sha256::digest(payload));
    header
}

/// The payload, if the file is what [`BinaryCache::store`] would write for it.
fn unpack(key: Key, file: &[u8]) -> Option<&[u8]> {
    let (head, payload) = file.split_at_checked(HEADER)?;
    (!payload.is_empty() && head == header(key, payload)).then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> (tempfile::TempDir, BinaryCache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = BinaryCache::new(dir.path().join("programs"));
        (dir, cache)
    }

    #[test]
    fn what_is_stored_is_loaded_and_only_under_its_key() {
        let (_dir, cache) = cache();
        let key = Key::of(&["source", "options"]);
        assert_eq!(cache.load(key), None);
        cache.store(key, b"binary");
        assert_eq!(cache.load(key).as_deref(), Some(&b"binary"[..]));
        assert_eq!(cache.load(Key::of(&["sourceo", "ptions"])), None);
    }

    #[test]
    fn a_file_moved_to_another_key_is_foreign() {
        let (_dir, cache) = cache();
        let (key, other) = (Key::of(&["a"]), Key::of(&["b"]));
        cache.store(key, b"binary");
        fs::rename(cache.folder.join(key.file_name()), cache.folder.join(other.file_name())).unwrap();
        assert_eq!(cache.load(other), None);
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_noticed() {
        let (_dir, cache) = cache();
        let key = Key::of(&["a"]);
        cache.store(key, b"binary");
        let path = cache.folder.join(key.file_name());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut broken = whole.clone();
            broken[at] ^= 0x10;
            fs::write(&path, &broken).unwrap();
            assert_eq!(cache.load(key), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.load(key), None, "cut at {at}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        fs::write(&path, &longer).unwrap();
        assert_eq!(cache.load(key), None, "a byte too many");
    }

    #[test]
    fn a_folder_that_cannot_be_made_warns_once_and_loads_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = BinaryCache::new(file.join("programs"));
        let key = Key::of(&["a"]);
        cache.store(key, b"binary");
        assert!(cache.warned.get());
        assert_eq!(cache.load(key), None);
    }

    #[test]
    fn nothing_is_left_beside_the_stored_file() {
        let (_dir, cache) = cache();
        cache.store(Key::of(&["a"]), b"one");
        cache.store(Key::of(&["a"]), b"two");
        assert_eq!(cache.load(Key::of(&["a"])).as_deref(), Some(&b"two"[..]));
        assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 1);
    }
}
