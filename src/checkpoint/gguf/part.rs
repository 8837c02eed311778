//! One file of the format, read and checked by itself.

use std::path::Path;
use std::sync::Arc;

use super::error::{CONVERT_AGAIN, Fault, GgufError};
use super::metadata::Metadata;
use super::reader::Reader;
use super::tensors::{LEAST_INFO_BYTES, TensorInfo, read_table};
use crate::checkpoint::mapping::Mapping;

/// The fewest bytes of a metadata entry: a key's length and one byte of it, a type, a value of one byte.
const LEAST_ENTRY_BYTES: usize = 8 + 1 + 4 + 1;
/// The alignment of a file that does not name one.
const DEFAULT_ALIGNMENT: u64 = 32;

/// What one file says, whether it is a whole model or a shard of one.
#[derive(Debug)]
pub(super) struct Part {
    pub file: Arc<Mapping>,
    pub version: u32,
    pub metadata: Metadata,
    /// In the order of the table, no name twice.
    pub tensors: Vec<TensorInfo>,
    /// Where the table of tensors ends.
    pub header_len: usize,
}

impl Part {
    /// Maps the file at `path`, which is number `shard` of its set, and checks all of its description.
    pub fn open(path: &Path, shard: usize) -> Result<Part, GgufError> {
        let file = Arc::new(Mapping::open(path)?);
        let mut reader = Reader::new(path, (*file).as_ref());
        let version = read_version(&mut reader)?;
        let tensor_count = reader.count(LEAST_INFO_BYTES, "tensors")?;
        let key_count = reader.count(LEAST_ENTRY_BYTES, "keys")?;
        let metadata = Metadata::read(&mut reader, &file, key_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = read_table(&mut reader, tensor_count, alignment, shard)?;
        let header_len = reader.at();
        Ok(Part { file, version, metadata, tensors, header_len })
    }

    /// All bytes up to the end of the table of tensors.
    pub fn header(&self) -> &[u8] {
        (*self.file).as_ref().get(..self.header_len).unwrap_or_default()
    }

    /// Where the last tensor ends.
    pub fn data_end(&self) -> usize {
        self.tensors.iter().map(|info| info.range().end).fold(self.header_len, usize::max)
    }
}

/// Reads magic and version, and says what a file is that is not readable GGUF.
fn read_version(reader: &mut Reader<'_>) -> Result<u32, Box<Fault>> {
    const NOT_A_MODEL: &str = "give a model file in GGUF format";
    const LITTLE: &str = "convert the model again for little-endian machines";
    let magic = reader.take(4, "the magic `GGUF`")?;
    if magic == b"FUGG" {
        return Err(reader.fault(0, "a big-endian GGUF file", "a little-endian one", LITTLE));
    }
    if magic != b"GGUF" {
        let found = format!("the bytes {magic:02x?} (\"{}\")", magic.escape_ascii());
        return Err(reader.fault(0, found, "the magic \"GGUF\"", NOT_A_MODEL));
    }
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        _ if (1..=3).contains(&version.swap_bytes()) => {
            let found = format!("a big-endian GGUF file, version {}", version.swap_bytes());
            Err(reader.fault(4, found, "a little-endian one", LITTLE))
        }
        _ => Err(reader.fault(4, format!("GGUF version {version}"), "version 2 or 3", CONVERT_AGAIN)),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    const KEY: &str = "general.alignment";
    match metadata.u32(KEY)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(alignment) if alignment.is_power_of_two() && alignment >= 8 => Ok(alignment.into()),
        Some(alignment) => Err(metadata.fault(KEY, alignment.to_string(), "a power of two, 8 or more")),
    }
}
