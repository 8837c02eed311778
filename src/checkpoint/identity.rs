//! What a cache of something made from a file is filed under.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::checkpoint::mapping::Stamp;

/// Tells one file from another, and one content of a file from a later one: a digest of its length, the time
/// of its last change, its number in the file system, and all of its metadata and tensor table. A checkpoint of several
/// files has one for all of them together.
///
/// The same file gives the same identity on every run. Touching, replacing or copying it gives another, which
/// costs no more than making anew what was cached. Displays as 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity([u8; 16]);

impl Identity {
    /// Of the files with these stamps and headers, in this order.
    pub(super) fn of<'a>(files: impl IntoIterator<Item = (Stamp, &'a [u8])>) -> Identity {
        let mut digest = Sha256::new();
        for (stamp, header) in files {
            digest.update(stamp.len.to_le_bytes());
            digest.update(stamp.modified_s.to_le_bytes());
            digest.update(stamp.modified_ns.to_le_bytes());
            digest.update(stamp.inode.to_le_bytes());
            digest.update(header);
        }
        let digest = digest.finalize();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        Identity(id)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({self})")
    }
}
