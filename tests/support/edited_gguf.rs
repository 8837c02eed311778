//! A copy of a model file with some keys and tensors changed.
#![allow(dead_code)] // each test file uses its part

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use axe::checkpoint::gguf::{Gguf, Value, ValueType};
use axe::checkpoint::quant::dequantize;
use tempfile::TempDir;

use crate::checkpoint_support::{ARRAY, BOOL, Bytes, F32, I32, STRING, U32, U64};

/// A tensor of f32, the contiguous dimension first.
#[derive(Clone)]
pub struct Tensor {
    pub shape: Vec<u64>,
    pub values: Vec<f32>,
}

/// What a file holds: its keys as type and value, its tensors as f32.
#[derive(Clone)]
pub struct Edited {
    keys: BTreeMap<String, Bytes>,
    tensors: BTreeMap<String, Tensor>,
}

/// A value's type and bytes, of the types that fixtures have.
fn encoded(value: Value<'_>) -> Bytes {
    let out = Bytes::default();
    match value {
        Value::U32(v) => out.u32(U32).u32(v),
        Value::U64(v) => out.u32(U64).u64(v),
        Value::F32(v) => out.u32(F32).raw(&v.to_le_bytes()),
        Value::Bool(v) => out.u32(BOOL).raw(&[u8::from(v)]),
        Value::String(v) => out.u32(STRING).string(v),
        Value::Array(list) => {
            let id = match list.element_type() {
                ValueType::Bool => BOOL,
                ValueType::I32 => I32,
                ValueType::U32 => U32,
                ValueType::F32 => F32,
                ValueType::String => STRING,
                other => panic!("an array of {other}"),
            };
            let head = out.u32(ARRAY).u32(id).u64(list.len() as u64);
            (0..list.len()).fold(head, |out, i| match list.get(i).unwrap() {
                Value::I32(v) => out.raw(&v.to_le_bytes()),
                other => out.raw(&encoded(other).0[4..]),
            })
        }
        other => panic!("{other}"),
    }
}

impl Edited {
    /// What a file holds.
    pub fn of(path: &Path) -> Self {
        let gguf = Gguf::open(path).unwrap();
        let metadata = gguf.metadata();
        let keys = metadata.keys().map(|key| (key.to_owned(), encoded(metadata.get(key).unwrap()))).collect();
        let tensors = gguf.tensors().iter().map(|tensor| {
            let mut values = vec![0f32; tensor.values() as usize];
            dequantize(tensor.ty, gguf.bytes(tensor), &mut values).unwrap();
            (tensor.name.clone(), Tensor { shape: tensor.shape.clone(), values })
        });
        Self { keys, tensors: tensors.collect() }
    }

    pub fn number(mut self, key: &str, value: f32) -> Self {
        self.keys.insert(key.to_owned(), encoded(Value::F32(value)));
        self
    }

    pub fn count(mut self, key: &str, value: u32) -> Self {
        self.keys.insert(key.to_owned(), encoded(Value::U32(value)));
        self
    }

    pub fn counts(mut self, key: &str, values: &[u32]) -> Self {
        let head = Bytes::default().u32(ARRAY).u32(U32).u64(values.len() as u64);
        self.keys.insert(key.to_owned(), values.iter().fold(head, |out, &value| out.u32(value)));
        self
    }

    pub fn text(mut self, key: &str, value: &str) -> Self {
        self.keys.insert(key.to_owned(), encoded(Value::String(value)));
        self
    }

    pub fn without_key(mut self, key: &str) -> Self {
        assert!(self.keys.remove(key).is_some(), "no key {key}");
        self
    }

    pub fn tensor(mut self, name: &str, shape: &[u64], values: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64);
        self.tensors.insert(name.to_owned(), Tensor { shape: shape.to_vec(), values });
        self
    }

    /// Without the tensors whose names contain this.
    pub fn without(mut self, part: &str) -> Self {
        let before = self.tensors.len();
        self.tensors.retain(|name, _| !name.contains(part));
        assert!(self.tensors.len() < before, "no tensor {part}");
        self
    }

    /// A tensor as it is.
    pub fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Writes the file into a folder that lives as long as the first part.
    pub fn save(&self) -> (TempDir, PathBuf) {
        let mut out = Bytes::header(3, self.tensors.len() as u64, self.keys.len() as u64);
        for (key, value) in &self.keys {
            out = out.string(key).raw(&value.0);
        }
        let mut offset = 0;
        for (name, tensor) in &self.tensors {
            out = out.tensor(name, &tensor.shape, 0, offset);
            offset += (tensor.values.len() as u64 * 4).next_multiple_of(32);
        }
        for tensor in self.tensors.values() {
            let bytes: Vec<u8> = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            out = out.data(32, &bytes);
        }
        out.data(32, &[]).save()
    }
}
