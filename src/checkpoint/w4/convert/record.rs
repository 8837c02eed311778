//! What an unfinished conversion has done, in a file of the target.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// What a conversion depends on, and the files that are finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub made_by: String,
    /// The source's identity.
    pub source: String,
    pub text_only: bool,
    pub shard_bytes: u64,
    /// By name.
    pub finished: BTreeMap<String, Finished>,
}

/// A file as it was when it got its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Finished {
    pub bytes: u64,
    pub sha256: String,
}

impl Record {
    /// Whether it is of a conversion that would write the same bytes.
    pub fn is_of(&self, other: &Record) -> bool {
        (&self.made_by, &self.source, self.text_only, self.shard_bytes)
            == (&other.made_by, &other.source, other.text_only, other.shard_bytes)
    }
}

impl Finished {
    /// Of the file as it is now.
    pub fn of(path: &Path) -> io::Result<Finished> {
        let mut file = File::open(path)?;
        let mut digest = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                n => {
                    digest.update(&buffer[..n]);
                    bytes += n as u64;
                }
            }
        }
        let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Finished { bytes, sha256 })
    }
}
