//! JSON files beside the tensors, and objects in which a repeated key is seen.

use std::fmt;
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, Visitor};

use super::error::{COPY_AGAIN, Fault, Place, SafetensorsError};
use crate::checkpoint::gguf::quoted;

/// Longest JSON or text file that is read: several times the longest tokenizer in use.
const MOST_BYTES: u64 = 256 << 20;

/// The bytes of a small regular file; none if there is no file of this name.
///
/// # Errors
/// What is no regular file, is longer than any file beside tensors is, or cannot be read.
pub fn read_bytes(path: &Path) -> Result<Option<Vec<u8>>, SafetensorsError> {
    let refuse = |source| SafetensorsError::Read { path: path.to_owned(), source };
    // Asked before opening, since opening a pipe would wait for its writer.
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refuse(error)),
        Ok(meta) if !meta.is_file() => return Err(refuse(io::Error::other("it is not a regular file"))),
        Ok(_) => {}
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(refuse)?;
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(refuse)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(refuse(io::Error::other(format!("it is longer than {} MiB", MOST_BYTES >> 20))));
    }
    Ok(Some(bytes))
}

/// What a JSON file says; none if there is no file of this name.
pub(in crate::checkpoint) fn read_json<T: DeserializeOwned>(
    path: &Path,
    expected: &str,
) -> Result<Option<T>, SafetensorsError> {
    let Some(bytes) = read_bytes(path)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        SafetensorsError::from(Box::new(Fault {
            path: path.to_owned(),
            place: Place::Whole,
            found: format!("text that does not fit ({error})"),
            expected: expected.to_owned(),
            advice: COPY_AGAIN,
        }))
    })
}

/// A value of an object whose key may decide how it is read.
pub(super) trait Valued<'de>: Sized {
    /// Reads the value that comes next in `map`.
    fn next<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error>;
}

impl<'de> Valued<'de> for String {
    fn next<A: MapAccess<'de>>(_key: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }
}

/// The entries of a JSON object in its own order, each key once; a repeated one is an error.
pub(super) struct Entries<T>(pub Vec<(String, T)>);

impl<'de, T: Valued<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each<T>(PhantomData<T>);
        impl<'de, T: Valued<'de>> Visitor<'de> for Each<T> {
            type Value = Entries<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("{} a second time", quoted(&key))));
                    }
                    let value = T::next(&key, &mut map)
                        .map_err(|error| A::Error::custom(format!("{}: {error}", quoted(&key))))?;
                    entries.push((key, value));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Each(PhantomData))
    }
}
