//! GGUF files, versions 2 and 3: metadata and tensors over a memory map, every length and offset checked.
//!
//! [`Gguf::open`] reads the whole description of a model and refuses it unless all of it is sound; after that
//! nothing can fail but a question for what is not there. Its cost in time and memory is bounded by the length
//! of the files, whatever they claim. Tensor data are not touched.
//!
//! A file starts with the magic `GGUF`, a version (u32), the number of tensors and of keys (u64 each). Then
//! come the keys with their values, the table of tensors, padding up to `general.alignment`, and the tensors'
//! bytes. All numbers are little-endian. A model may be split into shards, each a whole file of this kind
//! (`shards.rs`); they are one [`Gguf`].

mod error;
mod metadata;
mod part;
mod reader;
mod shards;
mod tensors;
mod value;

use std::path::Path;
use std::sync::{Arc, OnceLock};

pub(crate) use error::quoted;
pub use error::{Fault, GgufError, Place};
pub use metadata::Metadata;
pub use tensors::TensorInfo;
pub use value::{Array, List, Value, ValueType};

pub use crate::checkpoint::identity::Identity;

use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::rows::{Encoding, Rows, Span};
use error::CONVERT_AGAIN;
use part::Part;
use tensors::Tensors;

/// An open model, of one file or of a set of shards. It can be shared between threads; its [`rows`](Self::rows) keep
/// the maps alive.
#[derive(Debug)]
pub struct Gguf {
    /// At least one; the first has the keys.
    parts: Vec<Part>,
    tensors: Tensors,
    /// Hashed when first asked for: a large vocabulary makes a header of megabytes.
    identity: OnceLock<Identity>,
}

impl Gguf {
    /// Maps the file at `path` and checks all of its description. Any shard of a split model leads to the whole set,
    /// which lies in the same folder.
    ///
    /// # Errors
    /// Errors name the file, the key or tensor, the byte, what was found there and what was expected. Of a set, shards
    /// that are missing, that belong to another set, or that were joined or renamed.
    pub fn open(path: &Path) -> Result<Gguf, GgufError> {
        let mut parts = shards::open(path)?;
        let tensors = parts.iter_mut().flat_map(|part| std::mem::take(&mut part.tensors)).collect();
        Ok(Gguf { parts, tensors: Tensors::new(tensors), identity: OnceLock::new() })
    }

    /// The path of the file, or of the first shard, which has the keys.
    pub fn path(&self) -> &Path {
        self.first().file.path()
    }

    /// The path of the file that holds a tensor.
    pub fn path_of(&self, info: &TensorInfo) -> &Path {
        self.mapping(info).path()
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.first().version
    }

    /// How many files the model has.
    pub fn shards(&self) -> usize {
        self.parts.len()
    }

    /// The length of all files in bytes.
    pub fn file_len(&self) -> u64 {
        self.parts.iter().map(|part| part.file.stamp().len).sum()
    }

    /// The keys and their values.
    pub fn metadata(&self) -> &Metadata {
        &self.first().metadata
    }

    /// All tensors in the order of the files' tables.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors.list
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensor of this name, which must have exactly this shape (`shape[0]` is the contiguous dimension).
    ///
    /// # Errors
    /// A tensor that is missing or has another shape, with the file that holds it.
    pub fn require_tensor(&self, name: &str, shape: &[u64]) -> Result<&TensorInfo, GgufError> {
        let info = self.tensor(name).ok_or_else(|| GgufError::MissingTensor {
            path: self.path().to_owned(),
            name: name.to_owned(),
        })?;
        if info.shape != shape {
            return Err(GgufError::from(Box::new(Fault {
                path: self.path_of(info).to_owned(),
                place: Place::Tensor(name.to_owned()),
                offset: info.declared_at,
                found: format!("shape {:?}", info.shape),
                expected: format!("shape {shape:?} by the file's metadata"),
                advice: CONVERT_AGAIN,
            })));
        }
        Ok(info)
    }

    /// The bytes of a tensor of this model; empty for a description that lies outside of it.
    pub fn bytes(&self, info: &TensorInfo) -> &[u8] {
        let part = self.parts.get(info.shard);
        part.and_then(|part| (*part.file).as_ref().get(info.range())).unwrap_or_default()
    }

    /// The rows of a tensor of this model, matrices of more dimensions one below the other; none of them for a
    /// description that lies outside of it.
    pub fn rows(&self, info: &TensorInfo) -> Rows {
        let file = self.mapping(info);
        let inside = info.shard < self.parts.len();
        let (bytes, rows) = match Span::new(Arc::clone(file), info.range()).filter(|_| inside) {
            Some(bytes) => (bytes, info.rows() as usize),
            None => (Span::none(Arc::clone(file)), 0),
        };
        Rows {
            name: info.name.clone(),
            encoding: Encoding::Ggml(info.ty),
            rows,
            columns: info.row_values() as usize,
            bytes,
        }
    }

    /// The mapped file that holds a tensor; [`TensorInfo::range`] says where in it.
    pub fn mapping(&self, info: &TensorInfo) -> &Arc<Mapping> {
        &self.parts.get(info.shard).unwrap_or_else(|| self.first()).file
    }

    /// Tells the system that what has been read of all files will not be needed soon.
    pub fn release(&self) {
        self.parts.iter().for_each(|part| part.file.release());
    }

    /// What tells this model from every other one; see [`Identity`].
    pub fn identity(&self) -> Identity {
        *self
            .identity
            .get_or_init(|| Identity::of(self.parts.iter().map(|part| (part.file.stamp(), part.header()))))
    }

    fn first(&self) -> &Part {
        // Opening gives at least one.
        &self.parts[0]
    }
}
