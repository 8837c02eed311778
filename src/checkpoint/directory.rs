//! A directory of a model as Hugging Face publishes it: tensors, configuration, tokenizer; its experts either as plain
//! numbers among the tensors or 4-bit in files of their own.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::identity::Identity;
use super::kind;
use super::safetensors::{Fault, Place, Safetensors, SafetensorsError, read_bytes, read_json};
use super::w4::{self, W4Experts};

/// The model's configuration.
pub const CONFIG: &str = "config.json";
/// The sampler's settings.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// An open directory.
#[derive(Debug)]
pub struct HfDirectory {
    path: PathBuf,
    /// The tensors under their names; all of the model, or all but the experts' projections.
    pub safetensors: Safetensors,
    /// The experts' projections of a `dg-w4a16-v1` directory.
    pub experts: Option<W4Experts>,
    /// What [`CONFIG`] says: an object.
    pub config: Value,
    /// What [`GENERATION_CONFIG`] says: an object, if the file is there.
    pub generation_config: Option<Value>,
}

impl HfDirectory {
    /// Opens a directory of either format; see [`w4::META`] for what tells them apart.
    ///
    /// # Errors
    /// Files that are missing, cannot be read, are not sound or do not agree; a conversion that was not finished.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        if path.join(kind::UNFINISHED).exists() {
            return Err(SafetensorsError::from(Box::new(Fault {
                path: path.to_owned(),
                place: Place::Whole,
                found: format!("a conversion that was not finished ({})", kind::UNFINISHED),
                expected: "a whole checkpoint".to_owned(),
                advice: "run `axed convert` with the same source and this directory again: it continues",
            })));
        }
        let Some(config) = object(&path.join(CONFIG))? else {
            return Err(SafetensorsError::from(Box::new(Fault {
                path: path.to_owned(),
                place: Place::Whole,
                found: format!("no {CONFIG}"),
                expected: "the configuration of a model".to_owned(),
                advice: "give the directory of a whole checkpoint",
            })));
        };
        let generation_config = object(&path.join(GENERATION_CONFIG))?;
        let experts = if w4::read_meta(path)? { Some(W4Experts::open(path)?) } else { None };
        let safetensors = Safetensors::open(path)?;
        Ok(Self { path: path.to_owned(), safetensors, experts, config, generation_config })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of another small file of the directory, such as `tokenizer.json`; none if it is not there.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>, SafetensorsError> {
        read_bytes(&self.path.join(name))
    }

    /// What tells the tensors of this directory from all others; see [`Identity`].
    pub fn identity(&self) -> Identity {
        match &self.experts {
            None => self.safetensors.identity(),
            Some(experts) => Identity::of(self.safetensors.described().chain(experts.described())),
        }
    }

    /// Lets go of what has been read of the tensors.
    pub fn release(&self) {
        self.safetensors.release();
        if let Some(experts) = &self.experts {
            experts.release();
        }
    }
}

/// The object in a JSON file; none if the file is not there.
fn object(path: &Path) -> Result<Option<Value>, SafetensorsError> {
    let map = read_json::<serde_json::Map<String, Value>>(path, "a JSON object")?;
    Ok(map.map(Value::Object))
}
