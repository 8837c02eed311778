//! GGUF files, versions 2 and 3: metadata and tensors over a memory map, every length and offset checked.
//!
//! [`Gguf::open`] reads the whole description of a file and refuses it unless all of it is sound; after that
//! nothing can fail but a question for what is not there. Its cost in time and memory is bounded by the length
//! of the file, whatever the file claims. Tensor data are not touched.
//!
//! A file starts with the magic `GGUF`, a version (u32), the number of tensors and of keys (u64 each). Then
//! come the keys with their values, the table of tensors, padding up to `general.alignment`, and the tensors'
//! bytes. All numbers are little-endian.

mod error;
mod metadata;
mod reader;
mod tensors;
mod value;

use std::path::Path;
use std::sync::{Arc, OnceLock};

pub(super) use error::quoted;
pub use error::{Fault, GgufError, Place};
pub use metadata::Metadata;
pub use tensors::TensorInfo;
pub use value::{Array, List, Value, ValueType};

pub use crate::checkpoint::identity::Identity;

use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::rows::{Encoding, Rows, Span};
use error::CONVERT_AGAIN;
use reader::Reader;
use tensors::{LEAST_INFO_BYTES, Tensors};

/// The fewest bytes of a metadata entry: a key's length and one byte of it, a type, a value of one byte.
const LEAST_ENTRY_BYTES: usize = 8 + 1 + 4 + 1;
/// The alignment of a file that does not name one.
const DEFAULT_ALIGNMENT: u64 = 32;

/// An open file. It can be shared between threads; clones of [`mapping`](Self::mapping) keep the map alive.
#[derive(Debug)]
pub struct Gguf {
    file: Arc<Mapping>,
    version: u32,
    metadata: Metadata,
    tensors: Tensors,
    header_len: usize,
    /// Hashed when first asked for: a large vocabulary makes a header of megabytes.
    identity: OnceLock<Identity>,
}

impl Gguf {
    /// Maps the file at `path` and checks all of its description.
    ///
    /// Errors name the file, the key or tensor, the byte, what was found there and what was expected.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let file = Arc::new(Mapping::open(path)?);
        let mut reader = Reader::new(path, (*file).as_ref());
        let version = read_version(&mut reader)?;
        let tensor_count = reader.count(LEAST_INFO_BYTES, "tensors")?;
        let key_count = reader.count(LEAST_ENTRY_BYTES, "keys")?;
        let metadata = Metadata::read(&mut reader, &file, key_count)?;
        refuse_shards(&metadata)?;
        let alignment = alignment(&metadata)?;
        let tensors = Tensors::read(&mut reader, tensor_count, alignment)?;
        let header_len = reader.at();
        Ok(Gguf { file, version, metadata, tensors, header_len, identity: OnceLock::new() })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file.stamp().len
    }

    /// The keys and their values.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in the order of the file's table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors.list
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensor of this name, which must have exactly this shape (`shape[0]` is the contiguous dimension).
    pub fn require_tensor(&self, name: &str, shape: &[u64]) -> Result<&TensorInfo, GgufError> {
        let info = self.tensor(name).ok_or_else(|| GgufError::MissingTensor {
            path: self.path().to_owned(),
            name: name.to_owned(),
        })?;
        if info.shape != shape {
            return Err(GgufError::from(Box::new(Fault {
                path: self.path().to_owned(),
                place: Place::Tensor(name.to_owned()),
                offset: info.declared_at,
                found: format!("shape {:?}", info.shape),
                expected: format!("shape {shape:?} by the file's metadata"),
                advice: CONVERT_AGAIN,
            })));
        }
        Ok(info)
    }

    /// The bytes of a tensor of this file; empty for a description that lies outside of it.
    pub fn bytes(&self, info: &TensorInfo) -> &[u8] {
        (*self.file).as_ref().get(info.range()).unwrap_or_default()
    }

    /// The rows of a tensor of this file, matrices of more dimensions one below the other; none of them for a description
    /// that lies outside of it.
    pub fn rows(&self, info: &TensorInfo) -> Rows {
        let (bytes, rows) = match Span::new(Arc::clone(&self.file), info.range()) {
            Some(bytes) => (bytes, info.rows() as usize),
            None => (Span::none(Arc::clone(&self.file)), 0),
        };
        Rows {
            name: info.name.clone(),
            encoding: Encoding::Ggml(info.ty),
            rows,
            columns: info.row_values() as usize,
            bytes,
        }
    }

    /// The mapped file, for whoever hands parts of it to a device; [`TensorInfo::range`] says which.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.file
    }

    /// What tells this file from every other one; see [`Identity`].
    pub fn identity(&self) -> Identity {
        *self.identity.get_or_init(|| {
            let header = (*self.file).as_ref().get(..self.header_len).unwrap_or_default();
            Identity::of([(self.file.stamp(), header)])
        })
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

/// A shard alone is not a model: its tensors are only some of them.
fn refuse_shards(metadata: &Metadata) -> Result<(), GgufError> {
    const KEY: &str = "split.count";
    match metadata.u32(KEY)? {
        None | Some(0 | 1) => Ok(()),
        Some(count) => Err(metadata.fault(
            KEY,
            format!("one of {count} shards"),
            "a model in one file: merge the shards (`llama-gguf-split --merge`)",
        )),
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
