//! Objects of a JSON file, read key by key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::error::ModelError;

/// A JSON object of a file; errors name file and key.
pub(super) struct Object<'a> {
    path: PathBuf,
    /// The object's own place, with a dot at its end.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub(super) fn new(path: &Path, prefix: &str, value: &'a Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Ok(Self { path: path.to_owned(), prefix: prefix.to_owned(), map }),
            other => Err(ModelError::Unsupported {
                path: path.to_owned(),
                what: format!("{} is {}; expected an object", prefix.trim_end_matches('.'), short(other)),
            }),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn is_absent(&self, key: &str) -> bool {
        self.get(key).is_none()
    }

    pub(super) fn fault(&self, key: &str, expected: &str) -> ModelError {
        let found = match self.map.get(key) {
            Some(value) => format!("is {}", short(value)),
            None => "is missing".to_owned(),
        };
        ModelError::Unsupported {
            path: self.path.clone(),
            what: format!("{}{key} {found}; expected {expected}", self.prefix),
        }
    }

    pub(super) fn optional_object(&self, key: &str) -> Result<Option<Object<'a>>, ModelError> {
        self.get(key).map(|value| Self::new(&self.path, &format!("{}{key}.", self.prefix), value)).transpose()
    }

    pub(super) fn object(&self, key: &str) -> Result<Object<'a>, ModelError> {
        self.optional_object(key)?.ok_or_else(|| self.fault(key, "an object"))
    }

    /// A text that must be one of these, if it is there.
    pub(super) fn known(&self, key: &str, texts: &[&str]) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value.as_str().is_some_and(|text| texts.contains(&text)) => Ok(()),
            Some(_) => Err(self.fault(key, &texts.join(" or "))),
        }
    }

    pub(super) fn none_or(&self, key: &str, text: &str) -> Result<(), ModelError> {
        self.known(key, &[text])
    }

    pub(super) fn flag(&self, key: &str, expected: bool) -> Result<(), ModelError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value.as_bool() == Some(expected) => Ok(()),
            Some(_) => Err(self.fault(key, if expected { "true" } else { "false" })),
        }
    }

    pub(super) fn optional_size(&self, key: &str, most: usize) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => {
                match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= most) {
                    Some(size) => Ok(Some(size)),
                    None => Err(self.fault(key, &format!("a whole number up to {most}"))),
                }
            }
        }
    }

    /// A null that has no meaning here must not become a default.
    fn not_null(&self, key: &str) -> Result<(), ModelError> {
        match self.map.get(key) {
            Some(Value::Null) => Err(self.fault(key, "a number, or no such key")),
            _ => Ok(()),
        }
    }

    pub(super) fn size_or(
        &self,
        key: &str,
        default: Option<usize>,
        most: usize,
    ) -> Result<usize, ModelError> {
        self.not_null(key)?;
        match self.optional_size(key, most)?.or(default) {
            Some(size) if size > 0 => Ok(size),
            _ => Err(self.fault(key, &format!("a whole number from 1 to {most}"))),
        }
    }

    pub(super) fn number_or(
        &self,
        key: &str,
        default: f32,
        least: f32,
        most: f32,
    ) -> Result<f32, ModelError> {
        self.not_null(key)?;
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64().map(|number| number as f32) {
            Some(number) if number >= least && number <= most => Ok(number),
            _ => Err(self.fault(key, &format!("a number from {least} to {most}"))),
        }
    }

    /// Whether each layer slides; every sixth sees everything where nothing is said, and the last one always.
    pub(super) fn layer_types(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "layer_types";
        let expected = || format!("sliding_attention or full_attention for each of {count} layers");
        let mut slides: Vec<bool> = match self.get(KEY) {
            None => (0..count).map(|index| !(index + 1).is_multiple_of(6)).collect(),
            Some(Value::Array(list)) => list
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("sliding_attention") => Some(true),
                    Some("full_attention") => Some(false),
                    _ => None,
                })
                .collect::<Option<Vec<bool>>>()
                .filter(|list| list.len() == count)
                .ok_or_else(|| self.fault(KEY, &expected()))?,
            Some(_) => return Err(self.fault(KEY, &expected())),
        };
        if let Some(last) = slides.last_mut() {
            *last = false;
        }
        Ok(slides)
    }
}

/// A value as errors show it.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}
