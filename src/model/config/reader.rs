//! The metadata of one architecture, read key by key; which keys were asked for is remembered, so that
//! [`keys`](super::super::keys) can look at the rest.

use std::cell::RefCell;
use std::collections::HashSet;

use crate::checkpoint::gguf::{Gguf, Metadata, Value};
use crate::model::error::ModelError;

/// Keys of a file that begin with its architecture. Names are given without that prefix.
pub struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'static str,
    asked: RefCell<HashSet<String>>,
}

impl<'a> Keys<'a> {
    /// The keys of `architecture` in a file.
    pub fn new(gguf: &'a Gguf, architecture: &'static str) -> Self {
        Self { gguf, architecture, asked: RefCell::default() }
    }

    /// The file.
    pub fn gguf(&self) -> &'a Gguf {
        self.gguf
    }

    /// The prefix of the keys, without its dot.
    pub fn architecture(&self) -> &'static str {
        self.architecture
    }

    /// Whether a key has been read.
    pub fn asked_for(&self, name: &str) -> bool {
        self.asked.borrow().contains(name)
    }

    /// The file does not go together with this program for this reason.
    pub fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.gguf.path().to_owned(), what }
    }

    /// A key's name in full.
    pub fn full(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn metadata(&self) -> &'a Metadata {
        self.gguf.metadata()
    }

    /// A key's name in full, which from now on counts as read.
    fn ask(&self, name: &str) -> String {
        self.asked.borrow_mut().insert(name.to_owned());
        self.full(name)
    }

    /// A key's value, whatever its type.
    pub fn get(&self, name: &str) -> Option<Value<'a>> {
        self.metadata().get(&self.ask(name))
    }

    /// A whole number, if it is there.
    pub fn optional_count(&self, name: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.metadata().u32(&self.ask(name))?.map(|value| value as usize))
    }

    /// A whole number from 1 to `most`, if it is there.
    pub fn optional_size(&self, name: &str, most: usize) -> Result<Option<usize>, ModelError> {
        match self.optional_count(name)? {
            Some(value) if value == 0 || value > most => {
                Err(self.unsupported(format!("{} is {value}; expected 1 to {most}", self.full(name))))
            }
            found => Ok(found),
        }
    }

    /// A whole number from 1 to `most`.
    pub fn size(&self, name: &str, most: usize) -> Result<usize, ModelError> {
        match self.optional_size(name, most)? {
            Some(value) => Ok(value),
            None => Ok(self.metadata().require_u32(&self.full(name))? as usize), // an error that names it
        }
    }

    /// A whole number from 1 to `most` for each layer, or one for all of them; none if the key is missing.
    pub fn optional_sizes(
        &self,
        name: &str,
        layers: usize,
        most: usize,
    ) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(Value::Array(_)) = self.get(name) else {
            return Ok(self.optional_size(name, most)?.map(|value| vec![value; layers]));
        };
        let key = self.full(name);
        let list: Vec<i64> = self.metadata().require_array_i64(&key)?.iter().collect();
        if list.len() == layers && list.iter().all(|&value| value >= 1 && value <= most as i64) {
            return Ok(Some(list.iter().map(|&value| value as usize).collect()));
        }
        Err(self.unsupported(format!("{key} is {list:?}; expected 1 to {most} for each of {layers} layers")))
    }

    /// A whole number from 1 to `most` for each layer, or one for all of them.
    pub fn sizes(&self, name: &str, layers: usize, most: usize) -> Result<Vec<usize>, ModelError> {
        match self.optional_sizes(name, layers, most)? {
            Some(sizes) => Ok(sizes),
            None => Ok(vec![self.size(name, most)?; layers]), // an error that names it
        }
    }

    /// A number from `least` to `most`, if it is there.
    pub fn optional_number(&self, name: &str, least: f32, most: f32) -> Result<Option<f32>, ModelError> {
        match self.metadata().f32(&self.ask(name))? {
            Some(value) if !(value >= least && value <= most) => {
                let expected = match most {
                    f32::MAX => format!("a finite number of at least {least}"),
                    most => format!("{least} to {most}"),
                };
                Err(self.unsupported(format!("{} is {value}; expected {expected}", self.full(name))))
            }
            found => Ok(found),
        }
    }

    /// A number from `least` to `most`.
    pub fn number(&self, name: &str, least: f32, most: f32) -> Result<f32, ModelError> {
        match self.optional_number(name, least, most)? {
            Some(value) => Ok(value),
            None => Ok(self.metadata().require_f32(&self.full(name))?), // an error that names it
        }
    }

    /// A text, if it is there.
    pub fn optional_text(&self, name: &str) -> Result<Option<&'a str>, ModelError> {
        Ok(self.metadata().str(&self.ask(name))?)
    }

    /// A truth value, if it is there.
    pub fn optional_flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        Ok(self.metadata().bool(&self.ask(name))?)
    }

    /// Truth values, one for each layer.
    pub fn flags(&self, name: &str, layers: usize) -> Result<Vec<bool>, ModelError> {
        let key = self.ask(name);
        let list: Vec<bool> = self.metadata().require_array_bool(&key)?.iter().collect();
        if list.len() == layers {
            return Ok(list);
        }
        Err(self.unsupported(format!("{key} is {list:?}; expected one value for each of {layers} layers")))
    }
}
