//! Writes GGUF files field by field, sound or not.

use std::path::PathBuf;

use tempfile::TempDir;

pub const U8: u32 = 0;
pub const I8: u32 = 1;
pub const U16: u32 = 2;
pub const I16: u32 = 3;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;
pub const I64: u32 = 11;
pub const F64: u32 = 12;

/// The bytes of a file, written in order. Nothing is checked: tests write what no converter would.
#[derive(Clone, Default)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Magic, version and the two counts.
    pub fn header(version: u32, tensors: u64, keys: u64) -> Bytes {
        Bytes(b"GGUF".to_vec()).u32(version).u64(tensors).u64(keys)
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn u32(self, value: u32) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    pub fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    /// A key and its value's type; the value's bytes come next.
    pub fn key(self, name: &str, ty: u32) -> Self {
        self.string(name).u32(ty)
    }

    /// A key of an array; the elements' bytes come next.
    pub fn array(self, name: &str, element: u32, len: u64) -> Self {
        self.key(name, ARRAY).u32(element).u64(len)
    }

    pub fn tensor(self, name: &str, shape: &[u64], ty: u32, offset: u64) -> Self {
        let mut out = self.string(name).u32(shape.len() as u32);
        for &dim in shape {
            out = out.u64(dim);
        }
        out.u32(ty).u64(offset)
    }

    /// Zeros up to the next multiple of `alignment`, then `data`.
    pub fn data(mut self, alignment: usize, data: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self.raw(data)
    }

    /// Puts the bytes into a file of a folder that lives as long as the first part.
    pub fn save(&self) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, &self.0).unwrap();
        (dir, path)
    }
}
