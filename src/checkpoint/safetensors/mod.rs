//! Tensors of safetensors files: one file, or the files of a Hugging Face directory with their index.
//!
//! [`Safetensors::open`] reads the description of every file and refuses them unless all of it is sound; its cost is
//! bounded by the lengths of the headers. Tensor data are not touched.

mod error;
mod header;
mod json;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use ::safetensors::Dtype;
use serde::Deserialize;

pub(super) use error::{COPY_AGAIN, WRONG_MODEL};
pub use error::{Fault, Place, SafetensorsError};
pub use json::read_bytes;
pub(super) use json::read_json;

use crate::checkpoint::gguf::quoted;
use crate::checkpoint::identity::Identity;
use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::quant::{GgmlType, dequantize};
use crate::checkpoint::rows::{Encoding, Rows, Span};
use json::Entries;

/// The file of a checkpoint that is not sharded.
pub const SINGLE: &str = "model.safetensors";
/// Says which file holds which tensor of a checkpoint that is sharded.
pub const INDEX: &str = "model.safetensors.index.json";
/// Ends the names of files of tensors.
pub const EXTENSION: &str = ".safetensors";

/// A tensor where it lies in a mapped file.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its values.
    pub dtype: Dtype,
    /// Its dimensions, the contiguous one last.
    pub shape: Vec<usize>,
    /// Its values, little-endian, as many as the shape says.
    pub bytes: Span,
}

impl Tensor {
    /// The file that holds it.
    pub fn path(&self) -> &Path {
        self.bytes.file().path()
    }

    /// The tensor's own error: what was found and expected of it.
    pub(super) fn fault(
        &self,
        found: impl Into<String>,
        expected: impl Into<String>,
        advice: &'static str,
    ) -> SafetensorsError {
        SafetensorsError::from(Box::new(Fault {
            path: self.path().to_owned(),
            place: Place::Tensor(self.name.clone()),
            found: found.into(),
            expected: expected.into(),
            advice,
        }))
    }

    /// Its type as one of plain numbers that kernels know.
    ///
    /// # Errors
    /// Any type but F32, F16 and BF16.
    pub fn plain_type(&self) -> Result<GgmlType, SafetensorsError> {
        match self.dtype {
            Dtype::F32 => Ok(GgmlType::F32),
            Dtype::F16 => Ok(GgmlType::F16),
            Dtype::BF16 => Ok(GgmlType::BF16),
            other => Err(self.fault(
                format!("type {other:?}"),
                "F32, F16 or BF16",
                "use a checkpoint whose weights are plain numbers",
            )),
        }
    }

    /// Refuses a tensor that is not the same as `first` in type, shape and bytes. Both are read whole.
    ///
    /// # Errors
    /// What differs, by both names.
    pub fn require_copy_of(&self, first: &Tensor) -> Result<(), SafetensorsError> {
        let whose =
            || format!("`{}` in {}, of which it is a second copy", first.name, first.path().display());
        if self.dtype != first.dtype || self.shape != first.shape {
            let found = format!("type {:?} and shape {:?}", self.dtype, self.shape);
            let expected = format!("{:?} and {:?} as {}", first.dtype, first.shape, whose());
            return Err(self.fault(found, expected, WRONG_MODEL));
        }
        let (own, others) = (self.bytes.as_ref(), first.bytes.as_ref());
        if own != others {
            let at = own.iter().zip(others).position(|(a, b)| a != b).unwrap_or(0);
            let found = format!("other bytes from byte {at} on");
            return Err(self.fault(found, format!("those of {}", whose()), WRONG_MODEL));
        }
        Ok(())
    }

    fn require_shape(&self, shape: &[usize]) -> Result<(), SafetensorsError> {
        if self.shape != shape {
            return Err(self.fault(
                format!("shape {:?}", self.shape),
                format!("shape {shape:?} by the model's configuration"),
                WRONG_MODEL,
            ));
        }
        Ok(())
    }
}

/// An open file of tensors.
#[derive(Debug)]
struct Shard {
    map: Arc<Mapping>,
    /// Bytes before those of tensors.
    header_len: usize,
}

/// The tensors of one or more files, each name once. It can be shared between threads.
#[derive(Debug)]
pub struct Safetensors {
    path: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
    /// Hashed when first asked for.
    identity: OnceLock<Identity>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: Entries<String>,
}

impl Safetensors {
    /// Opens a file, or a directory with [`SINGLE`], with the shards that [`INDEX`] names, or with a whole set of shards
    /// without it.
    ///
    /// # Errors
    /// What cannot be opened or is not sound, each with file and tensor; an index and files that do not agree.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        if path.is_file() {
            return Self::of_files(path, &[path.to_owned()]);
        }
        let index_path = path.join(INDEX);
        let Some(index) =
            read_json::<Index>(&index_path, "an object with `weight_map`: tensor name to file")?
        else {
            return Self::of_files(path, &unindexed(path)?);
        };
        let fault = |place: Place, found: String, expected: &str| {
            SafetensorsError::from(Box::new(Fault {
                path: index_path.clone(),
                place,
                found,
                expected: expected.to_owned(),
                advice: WRONG_MODEL,
            }))
        };
        let Entries(weight_map) = index.weight_map;
        let mut names: Vec<&str> = weight_map.iter().map(|(_, file)| file.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if let Some(name) = names.iter().find(|name| !is_plain_name(name)) {
            let found = format!("file {}", quoted(name));
            return Err(fault(Place::Key("weight_map".to_owned()), found, "names of files beside the index"));
        }
        if !names.contains(&SINGLE) && path.join(SINGLE).exists() {
            let found = format!("an index that does not name {SINGLE}, which stands beside it");
            return Err(fault(Place::Whole, found, "one of the two: it is not clear which is meant"));
        }
        if let Some(name) = names.iter().find(|name| !path.join(name).exists()) {
            let found = format!("file {}, which is missing", quoted(name));
            return Err(fault(Place::Key("weight_map".to_owned()), found, "every shard of the checkpoint"));
        }
        let files: Vec<PathBuf> = names.iter().map(|name| path.join(name)).collect();
        let opened = Self::of_files(path, &files)?;
        for (tensor, file) in &weight_map {
            let place = || Place::Key(format!("weight_map.{tensor}"));
            match opened.tensors.get(tensor) {
                Some(found) if found.path().file_name().is_some_and(|name| name == file.as_str()) => {}
                Some(found) => {
                    let found =
                        format!("file {}, but {} holds the tensor", quoted(file), found.path().display());
                    return Err(fault(place(), found, "the file that holds it"));
                }
                None => {
                    let found = format!("file {}, which lacks the tensor", quoted(file));
                    return Err(fault(place(), found, "the file that holds it"));
                }
            }
        }
        Ok(opened)
    }

    /// Opens these files as the one checkpoint at `path`.
    fn of_files(path: &Path, files: &[PathBuf]) -> Result<Self, SafetensorsError> {
        let mut opened = Self {
            path: path.to_owned(),
            shards: Vec::with_capacity(files.len()),
            tensors: BTreeMap::new(),
            identity: OnceLock::new(),
        };
        for file in files {
            let (shard, tensors) = open_file(file)?;
            opened.shards.push(shard);
            for tensor in tensors {
                match opened.tensors.entry(tensor.name.clone()) {
                    Entry::Vacant(slot) => {
                        slot.insert(tensor);
                    }
                    Entry::Occupied(other) => {
                        let found = format!("the name a second time, after {}", other.get().path().display());
                        return Err(tensor.fault(found, "each tensor in one file", WRONG_MODEL));
                    }
                }
            }
        }
        Ok(opened)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All names in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors in alphabetical order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The tensor of this name, which must be there.
    ///
    /// # Errors
    /// It is not.
    pub fn require(&self, name: &str) -> Result<&Tensor, SafetensorsError> {
        self.tensor(name)
            .ok_or_else(|| SafetensorsError::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }

    /// The matrix of this name and shape.
    ///
    /// # Errors
    /// No such tensor, another shape, values other than F32, F16 and BF16.
    pub fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Result<Rows, SafetensorsError> {
        let tensor = self.require(name)?;
        tensor.require_shape(&[rows, columns])?;
        plain_rows(tensor, rows, columns)
    }

    /// The matrices of this name, all of one shape, one below the other: [`Rows::part`] gives the rows of each.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn matrices(&self, name: &str, [count, rows, columns]: [usize; 3]) -> Result<Rows, SafetensorsError> {
        let tensor = self.require(name)?;
        tensor.require_shape(&[count, rows, columns])?;
        // The product is no larger than the file.
        plain_rows(tensor, count.saturating_mul(rows), columns)
    }

    /// The `n` numbers of this name in f32.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, SafetensorsError> {
        let tensor = self.require(name)?;
        tensor.require_shape(&[n])?;
        let mut values = vec![0.0; n];
        // Shape and length were found to agree when the file was opened.
        dequantize(tensor.plain_type()?, tensor.bytes.as_ref(), &mut values)
            .map_err(|error| tensor.fault(error.to_string(), format!("{n} numbers"), COPY_AGAIN))?;
        Ok(values)
    }

    /// What tells these files from all others; see [`Identity`].
    pub fn identity(&self) -> Identity {
        *self.identity.get_or_init(|| Identity::of(self.described()))
    }

    /// Stamp and header of every file.
    pub(super) fn described(&self) -> impl Iterator<Item = (crate::checkpoint::mapping::Stamp, &[u8])> {
        self.shards.iter().map(|shard| {
            let header = (*shard.map).as_ref().get(..shard.header_len).unwrap_or_default();
            (shard.map.stamp(), header)
        })
    }

    /// Lets go of what has been read; see [`Mapping::release`].
    pub fn release(&self) {
        self.shards.iter().for_each(|shard| shard.map.release());
    }

    /// Opens files whose tensors may stand in several of them: all of them, file by file.
    pub(super) fn open_overlapping(files: &[PathBuf]) -> Result<Opened, SafetensorsError> {
        let mut opened = Opened::default();
        for file in files {
            let (shard, tensors) = open_file(file)?;
            let header = (*shard.map).as_ref().get(..shard.header_len).unwrap_or_default().to_vec();
            opened.headers.push((shard.map.stamp(), header));
            opened.files.push(shard.map);
            opened.tensors.extend(tensors);
        }
        Ok(opened)
    }
}

/// Files whose tensors may have the same names.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub files: Vec<Arc<Mapping>>,
    pub headers: Vec<(crate::checkpoint::mapping::Stamp, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

fn plain_rows(tensor: &Tensor, rows: usize, columns: usize) -> Result<Rows, SafetensorsError> {
    Ok(Rows {
        name: tensor.name.clone(),
        encoding: Encoding::Ggml(tensor.plain_type()?),
        rows,
        columns,
        bytes: tensor.bytes.clone(),
    })
}

fn open_file(path: &Path) -> Result<(Shard, Vec<Tensor>), SafetensorsError> {
    let map = Arc::new(Mapping::open(path)?);
    let (described, header_len) = header::read(path, (*map).as_ref())?;
    let tensors = described
        .into_iter()
        .map(|tensor| Tensor {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            // The range was found to lie in the file.
            bytes: Span::new(Arc::clone(&map), tensor.range).unwrap_or_else(|| Span::none(Arc::clone(&map))),
        })
        .collect();
    Ok((Shard { map, header_len }, tensors))
}

/// A name that leads to no other directory.
fn is_plain_name(name: &str) -> bool {
    name.ends_with(EXTENSION) && !name.contains(['/', '\0'])
}

/// The files of a directory without an index.
fn unindexed(path: &Path) -> Result<Vec<PathBuf>, SafetensorsError> {
    if path.join(SINGLE).exists() {
        return Ok(vec![path.join(SINGLE)]);
    }
    let names = list(path, "model")?;
    let fault = |found: String, expected: String| {
        SafetensorsError::from(Box::new(Fault {
            path: path.to_owned(),
            place: Place::Whole,
            found,
            expected,
            advice: "download the checkpoint again, with all of its files",
        }))
    };
    if names.is_empty() {
        let found = format!("neither {SINGLE} nor {INDEX}");
        return Err(fault(found, "the tensors of a model".to_owned()));
    }
    // model-00001-of-00003.safetensors says how many there must be.
    for name in &names {
        let total = name
            .strip_suffix(EXTENSION)
            .and_then(|stem| stem.rsplit_once("-of-"))
            .and_then(|(_, total)| total.parse::<usize>().ok());
        if let Some(total) = total.filter(|&total| total != names.len()) {
            let found = format!("{} files of tensors, one of them {}", names.len(), quoted(name));
            return Err(fault(found, format!("{total} as that name says, or {INDEX}")));
        }
    }
    Ok(names.iter().map(|name| path.join(name)).collect())
}

/// Names of the files of tensors in a directory that begin so, in alphabetical order.
pub(super) fn list(path: &Path, prefix: &str) -> Result<Vec<String>, SafetensorsError> {
    let refuse = |source| SafetensorsError::Read { path: path.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(refuse)? {
        if let Ok(name) = entry.map_err(refuse)?.file_name().into_string()
            && name.starts_with(prefix)
            && name.ends_with(EXTENSION)
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
