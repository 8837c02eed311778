//! The key-value part of a file.

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::ops::Range;
use std::sync::Arc;

use super::error::{CONVERT_AGAIN, COPY_AGAIN, Fault, GgufError, Place, quoted};
use super::reader::Reader;
use super::value::{Array, List, Value, ValueType};
use crate::checkpoint::mapping::Mapping;

/// How deep arrays may lie in arrays. No key in use has any; the cap keeps the reader off a hostile stack.
const NESTING: u32 = 4;
/// The format's limit on the bytes of a key.
const KEY_BYTES: usize = 65_535;

/// All keys of a file with their values, each checked when the file was opened.
///
/// The typed getters return `None` only for an absent key: a key with a value of another type is an error that
/// names the file, the key and both types. `require_*` turns absence into an error too. Whole numbers may be
/// stored at any width, as long as the value fits.
#[derive(Debug)]
pub struct Metadata {
    file: Arc<Mapping>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Where the value starts in the file.
    at: usize,
    stored: Stored,
}

/// A value without its bytes, which stay in the file.
#[derive(Debug)]
enum Stored {
    Fixed(Value<'static>),
    String(Range<usize>),
    Array(StoredArray),
}

#[derive(Debug)]
struct StoredArray {
    element: ValueType,
    len: usize,
    bytes: Range<usize>,
    starts: Vec<u64>,
}

impl Metadata {
    /// Reads `count` entries.
    pub(super) fn read(
        reader: &mut Reader<'_>,
        file: &Arc<Mapping>,
        count: usize,
    ) -> Result<Metadata, Box<Fault>> {
        let mut entries = BTreeMap::new();
        for index in 0..count {
            reader.place = Place::KeyName(index as u64);
            let start = reader.at();
            let (key, _) = reader.string("a key")?;
            if key.is_empty() || key.len() > KEY_BYTES {
                let found = format!("a key of {} bytes", key.len());
                return Err(reader.fault(start, found, format!("1 to {KEY_BYTES} bytes"), COPY_AGAIN));
            }
            if key.contains(char::is_control) {
                return Err(reader.fault(start, quoted(key), "no control characters", CONVERT_AGAIN));
            }
            reader.place = Place::Key(key.to_owned());
            let ty = value_type(reader, "a value's type")?;
            let entry = Entry { at: reader.at(), stored: value(reader, ty)? };
            match entries.entry(key.to_owned()) {
                btree_map::Entry::Vacant(slot) => slot.insert(entry),
                btree_map::Entry::Occupied(_) => {
                    return Err(reader.fault(start, "the key a second time", "each key once", CONVERT_AGAIN));
                }
            };
        }
        Ok(Metadata { file: Arc::clone(file), entries })
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All keys in alphabetical order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.entries.get(key).and_then(|entry| self.view(entry))
    }

    fn view<'a>(&'a self, entry: &'a Entry) -> Option<Value<'a>> {
        let bytes = (*self.file).as_ref();
        match &entry.stored {
            Stored::Fixed(value) => Some(*value),
            Stored::String(range) => std::str::from_utf8(bytes.get(range.clone())?).ok().map(Value::String),
            Stored::Array(array) => Some(Value::Array(Array {
                element: array.element,
                len: array.len,
                bytes: bytes.get(array.bytes.clone())?,
                starts: &array.starts,
            })),
        }
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.typed(key, "a string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })
    }

    /// A whole number that fits 32 bits without sign.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.typed(key, "a whole number from 0 to 4294967295", |value| value.integer()?.try_into().ok())
    }

    /// A whole number that fits 64 bits without sign.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.typed(key, "a whole number from 0 to 18446744073709551615", |value| {
            value.integer()?.try_into().ok()
        })
    }

    /// A 32-bit floating point number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.typed(key, "an f32", float)
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.typed(key, "a bool", truth)
    }

    /// An array of texts.
    pub fn array_str(&self, key: &str) -> Result<Option<List<'_, &str>>, GgufError> {
        self.list(
            key,
            "an array of strings",
            |ty| ty == ValueType::String,
            |value| match value {
                Value::String(text) => Some(text),
                _ => None,
            },
        )
    }

    /// An array of 32-bit floating point numbers.
    pub fn array_f32(&self, key: &str) -> Result<Option<List<'_, f32>>, GgufError> {
        self.list(key, "an array of f32", |ty| ty == ValueType::F32, float)
    }

    /// An array of truth values.
    pub fn array_bool(&self, key: &str) -> Result<Option<List<'_, bool>>, GgufError> {
        self.list(key, "an array of bool", |ty| ty == ValueType::Bool, truth)
    }

    /// An array of whole numbers of any width; a number over `i64::MAX` is an error.
    pub fn array_i64(&self, key: &str) -> Result<Option<List<'_, i64>>, GgufError> {
        let list = self.list(key, "an array of whole numbers", ValueType::is_integer, |value| {
            value.integer()?.try_into().ok()
        })?;
        if let Some(list) = &list
            && let Some(index) = (0..list.len()).find(|&index| list.get(index).is_none())
        {
            let found = format!("a number over {} at index {index}", i64::MAX);
            return Err(self.fault(key, found, "whole numbers that fit 64 bits with sign"));
        }
        Ok(list)
    }

    /// [`str`](Self::str), where absence is an error.
    pub fn require_str(&self, key: &str) -> Result<&str, GgufError> {
        self.present(key, self.str(key)?)
    }

    /// [`u32`](Self::u32), where absence is an error.
    pub fn require_u32(&self, key: &str) -> Result<u32, GgufError> {
        self.present(key, self.u32(key)?)
    }

    /// [`u64`](Self::u64), where absence is an error.
    pub fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.present(key, self.u64(key)?)
    }

    /// [`f32`](Self::f32), where absence is an error.
    pub fn require_f32(&self, key: &str) -> Result<f32, GgufError> {
        self.present(key, self.f32(key)?)
    }

    /// [`bool`](Self::bool), where absence is an error.
    pub fn require_bool(&self, key: &str) -> Result<bool, GgufError> {
        self.present(key, self.bool(key)?)
    }

    /// [`array_str`](Self::array_str), where absence is an error.
    pub fn require_array_str(&self, key: &str) -> Result<List<'_, &str>, GgufError> {
        self.present(key, self.array_str(key)?)
    }

    /// [`array_f32`](Self::array_f32), where absence is an error.
    pub fn require_array_f32(&self, key: &str) -> Result<List<'_, f32>, GgufError> {
        self.present(key, self.array_f32(key)?)
    }

    /// [`array_bool`](Self::array_bool), where absence is an error.
    pub fn require_array_bool(&self, key: &str) -> Result<List<'_, bool>, GgufError> {
        self.present(key, self.array_bool(key)?)
    }

    /// [`array_i64`](Self::array_i64), where absence is an error.
    pub fn require_array_i64(&self, key: &str) -> Result<List<'_, i64>, GgufError> {
        self.present(key, self.array_i64(key)?)
    }

    /// An error about the value of a present `key`, for callers that understand its type and not its value.
    pub fn fault(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> GgufError {
        self.fault_with(key, found, expected, CONVERT_AGAIN)
    }

    /// As [`fault`](Self::fault), with what to do.
    pub(super) fn fault_with(
        &self,
        key: &str,
        found: impl Into<String>,
        expected: impl Into<String>,
        advice: &'static str,
    ) -> GgufError {
        let fault = Box::new(Fault {
            path: self.file.path().to_owned(),
            place: Place::Key(key.to_owned()),
            offset: self.entries.get(key).map_or(0, |entry| entry.at as u64),
            found: found.into(),
            expected: expected.into(),
            advice,
        });
        fault.into()
    }

    fn present<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        value.ok_or_else(|| GgufError::MissingKey { path: self.file.path().to_owned(), key: key.to_owned() })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.fault(key, value.to_string(), expected)),
        }
    }

    fn list<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        fits: impl Fn(ValueType) -> bool,
        read: fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<List<'a, T>>, GgufError> {
        self.typed(key, expected, |value| match value {
            Value::Array(array) if fits(array.element_type()) => Some(List::new(array, read)),
            _ => None,
        })
    }
}

fn float(value: Value<'_>) -> Option<f32> {
    match value {
        Value::F32(number) => Some(number),
        _ => None,
    }
}

fn truth(value: Value<'_>) -> Option<bool> {
    match value {
        Value::Bool(truth) => Some(truth),
        _ => None,
    }
}

fn value_type(reader: &mut Reader<'_>, what: &str) -> Result<ValueType, Box<Fault>> {
    let start = reader.at();
    let id = reader.u32(what)?;
    ValueType::from_id(id).ok_or_else(|| {
        let expected = format!("one of {}", ValueType::known());
        reader.fault(start, format!("value type {id}"), expected, COPY_AGAIN)
    })
}

fn value(reader: &mut Reader<'_>, ty: ValueType) -> Result<Stored, Box<Fault>> {
    match ty {
        ValueType::String => Ok(Stored::String(reader.string("a string value")?.1)),
        ValueType::Array => array(reader, NESTING).map(Stored::Array),
        _ => {
            let start = reader.at();
            let size = ty.least_bytes();
            let raw = reader.take(size as u64, ty.name())?;
            check_truths(reader, ty, raw, start)?;
            Value::from_fixed(ty, raw)
                .map(Stored::Fixed)
                .ok_or_else(|| reader.fault(start, format!("{size} bytes"), format!("one {ty}"), COPY_AGAIN))
        }
    }
}

/// Reads and checks an array that may hold `nesting - 1` further levels.
fn array(reader: &mut Reader<'_>, nesting: u32) -> Result<StoredArray, Box<Fault>> {
    let start = reader.at();
    let Some(deeper) = nesting.checked_sub(1) else {
        let expected = format!("at most {NESTING} levels");
        return Err(reader.fault(start, "arrays nested deeper than that", expected, CONVERT_AGAIN));
    };
    let element = value_type(reader, "an array's element type")?;
    let len = reader.count(element.least_bytes(), &format!("{element} elements"))?;
    let first = reader.at();
    let mut starts = Vec::new();
    match element {
        ValueType::String => {
            starts.reserve_exact(len);
            for _ in 0..len {
                starts.push((reader.at() - first) as u64);
                reader.string("a string element")?;
            }
        }
        ValueType::Array => {
            for _ in 0..len {
                array(reader, deeper)?;
            }
        }
        _ => {
            // The count is known to fit the file, so that the product cannot overflow.
            let raw = reader.take((len * element.least_bytes()) as u64, "array elements")?;
            check_truths(reader, element, raw, first)?;
        }
    }
    Ok(StoredArray { element, len, bytes: first..reader.at(), starts })
}

/// Truth values are bytes of 0 or 1 and nothing else.
fn check_truths(reader: &Reader<'_>, ty: ValueType, raw: &[u8], start: usize) -> Result<(), Box<Fault>> {
    if ty == ValueType::Bool
        && let Some(index) = raw.iter().position(|&byte| byte > 1)
    {
        let found = format!("the byte {}", raw[index]);
        return Err(reader.fault(start + index, found, "0 or 1 for a bool", COPY_AGAIN));
    }
    Ok(())
}
