//! The description at the start of a safetensors file.
//!
//! A file is the length of the header (u64, little-endian), the header (a JSON object: tensor name to type, shape and
//! the range of its bytes), and the tensors' bytes without gaps.

use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::de::{IgnoredAny, MapAccess};

use super::error::{COPY_AGAIN, Fault, Place};
use super::json::{Entries, Valued};
use crate::checkpoint::gguf::quoted;

/// The format's limit on the header's length.
const MOST_HEADER_BYTES: u64 = 100_000_000;
/// The entry that describes no tensor.
const METADATA: &str = "__metadata__";

/// A tensor that the header describes, checked: its bytes are as many as type and shape say, and lie in the file.
pub(super) struct Described {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Where the bytes lie, counted from the start of the file.
    pub range: Range<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// One entry of the header.
enum Entry {
    Tensor(Raw),
    Metadata,
}

impl<'de> Valued<'de> for Entry {
    fn next<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error> {
        if key == METADATA {
            map.next_value::<IgnoredAny>()?;
            return Ok(Entry::Metadata);
        }
        Ok(Entry::Tensor(map.next_value()?))
    }
}

/// Reads the header of the file at `path`, which holds `bytes`: the tensors in the order of their bytes, and where the
/// first of those stands.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<(Vec<Described>, usize), Box<Fault>> {
    let fault = |place: Place, found: String, expected: String| {
        Box::new(Fault { path: path.to_owned(), place, found, expected, advice: COPY_AGAIN })
    };
    let Some((&length, rest)) = bytes.split_first_chunk() else {
        let found = format!("a file of {} bytes", bytes.len());
        return Err(fault(Place::Header, found, "its length in the first 8 bytes".to_owned()));
    };
    let length = u64::from_le_bytes(length);
    let most = MOST_HEADER_BYTES.min(rest.len() as u64);
    let Some(text) = rest.get(..length.min(most + 1) as usize).filter(|_| length <= most) else {
        let found = format!("a length of {length} bytes");
        let expected = format!("at most {most} in a file of {} bytes", bytes.len());
        return Err(fault(Place::Header, found, expected));
    };
    let Entries(entries) = serde_json::from_slice::<Entries<Entry>>(text).map_err(|error| {
        let expected = "a JSON object of tensors with dtype, shape and data_offsets".to_owned();
        fault(Place::Header, format!("text that does not fit ({error})"), expected)
    })?;
    let start = size_of::<u64>() + text.len();
    let data = bytes.len() - start;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let Entry::Tensor(raw) = entry else { continue };
        let tensor = describe(&name, &raw, data as u64)
            .map_err(|(found, expected)| fault(Place::Tensor(name.clone()), found, expected))?;
        tensors.push(tensor);
    }
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    let mut end = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.range.start != end {
            let found = format!("bytes from offset {}", tensor.range.start);
            let expected = match index.checked_sub(1).and_then(|before| tensors.get(before)) {
                Some(before) => format!("a start at {end}, where tensor {} ends", quoted(&before.name)),
                None => format!("a start at {end}"),
            };
            return Err(fault(Place::Tensor(tensor.name.clone()), found, expected));
        }
        end = tensor.range.end;
    }
    if end != data {
        let found = format!("{data} bytes of tensors");
        return Err(fault(Place::Whole, found, format!("the {end} that its header describes")));
    }
    for tensor in &mut tensors {
        tensor.range = start + tensor.range.start..start + tensor.range.end;
    }
    Ok((tensors, start))
}

/// Checks an entry against the `data` bytes that the file has for tensors; the range counts from their start. An error
/// is what was found and what was expected.
fn describe(name: &str, raw: &Raw, data: u64) -> Result<Described, (String, String)> {
    let Ok(dtype) = Dtype::deserialize(StrDeserializer::<ValueError>::new(&raw.dtype)) else {
        let found = format!("type {}", quoted(&raw.dtype));
        return Err((found, "a type of the safetensors format, such as BF16".to_owned()));
    };
    let bits = raw
        .shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|values| values.checked_mul(dtype.bitsize() as u64));
    let (start, end) = raw.data_offsets;
    if start > end || end > data {
        let found = format!("bytes {start} to {end} of the tensors'");
        return Err((found, format!("a range within their {data} bytes")));
    }
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|&dim| dim.try_into().ok()).collect();
    match (bits, shape) {
        (Some(bits), Some(shape)) if bits.is_multiple_of(8) && bits / 8 == end - start => Ok(Described {
            name: name.to_owned(),
            dtype,
            shape,
            // Both lie in the mapped file.
            range: start as usize..end as usize,
        }),
        (bits, _) => {
            let expected = match bits {
                Some(bits) if bits.is_multiple_of(8) => format!("{} bytes", bits / 8),
                Some(_) => "whole bytes".to_owned(),
                None => "a shape that fits the file".to_owned(),
            };
            let found = format!("{} bytes for shape {} of type {dtype:?}", end - start, shown(&raw.shape));
            Err((found, expected))
        }
    }
}

/// A shape, cut where it is hostile.
fn shown(shape: &[u64]) -> String {
    const SHOWN: usize = 8;
    match shape.get(..SHOWN) {
        Some(first) if shape.len() > SHOWN => format!("{first:?} and {} more", shape.len() - SHOWN),
        _ => format!("{shape:?}"),
    }
}
