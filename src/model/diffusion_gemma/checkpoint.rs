//! A DiffusionGemma on disk, whichever file format it comes in, and what may become of its weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::DiffusionConfig;
use super::generation::GenerationConfig;
use crate::checkpoint::directory::{CONFIG, GENERATION_CONFIG, HfDirectory};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::kind::Kind;
use crate::model::error::ModelError;

/// A checkpoint in one of its file formats.
#[derive(Debug, Clone)]
pub enum DiffusionCheckpoint {
    /// A GGUF of architecture `diffusion-gemma`.
    Gguf(Arc<Gguf>),
    /// A Hugging Face directory, with plain experts or those of `dg-w4a16-v1`.
    Directory(Arc<HfDirectory>),
}

impl DiffusionCheckpoint {
    /// Opens what is at `path`, whichever of the formats it has.
    ///
    /// # Errors
    /// What is there instead of a checkpoint, or what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Ok(match Kind::of(path)? {
            Kind::Gguf(path) => Self::Gguf(Arc::new(Gguf::open(&path)?)),
            Kind::W4Directory(path) | Kind::HfDirectory(path) => {
                Self::Directory(Arc::new(HfDirectory::open(&path)?))
            }
        })
    }

    /// How the checkpoint wants to be sampled; a directory that does not say gets the defaults, with a warning in the log.
    ///
    /// # Errors
    /// Values that are not supported, by file and key.
    pub fn generation_config(&self) -> Result<GenerationConfig, ModelError> {
        match self {
            Self::Gguf(gguf) => GenerationConfig::from_gguf(gguf),
            Self::Directory(directory) => match &directory.generation_config {
                Some(value) => GenerationConfig::from_json(&directory.path().join(GENERATION_CONFIG), value),
                None => {
                    let path = directory.path().join(GENERATION_CONFIG);
                    let assumed = GenerationConfig::default();
                    tracing::warn!(
                        path = %path.display(),
                        ?assumed,
                        "the file is missing: the sampler's settings are assumed, and replies end where the tokenizer says; \
                         download the file if the model has one"
                    );
                    Ok(assumed)
                }
            },
        }
    }

    /// Where the sampler's settings would be, if a directory lacks them.
    pub fn lacks_generation_config(&self) -> Option<PathBuf> {
        match self {
            Self::Directory(directory) if directory.generation_config.is_none() => {
                Some(directory.path().join(GENERATION_CONFIG))
            }
            _ => None,
        }
    }

    /// The file or directory.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(gguf) => gguf.path(),
            Self::Directory(directory) => directory.path(),
        }
    }

    /// Tells the checkpoint from every other one.
    pub fn identity(&self) -> String {
        match self {
            Self::Gguf(gguf) => gguf.identity().to_string(),
            Self::Directory(directory) => directory.identity().to_string(),
        }
    }

    /// The model's sizes and switches.
    ///
    /// # Errors
    /// What is missing or not supported, by file and key.
    pub fn config(&self) -> Result<DiffusionConfig, ModelError> {
        match self {
            Self::Gguf(gguf) => DiffusionConfig::from_gguf(gguf),
            Self::Directory(directory) => {
                DiffusionConfig::from_json(&directory.path().join(CONFIG), &directory.config)
            }
        }
    }

    /// Lets go of the pages that were read.
    pub fn release(&self) {
        match self {
            Self::Gguf(gguf) => gguf.release(),
            Self::Directory(directory) => directory.release(),
        }
    }

    /// Whether its experts are plain numbers, which may be quantised while loading.
    pub(super) fn has_plain_experts(&self) -> bool {
        matches!(self, Self::Directory(directory) if directory.experts.is_none())
    }
}

/// What becomes of plain expert weights on their way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ExpertWeights {
    /// Quantised to 4 bits as `dg-w4a16-v1` does it, where their sizes allow.
    #[serde(rename = "w4")]
    Quantised,
    /// Kept as the file has them.
    #[serde(rename = "as-stored")]
    AsStored,
}

/// What becomes of the other plain matrices (embedding and head, attention, dense networks) on their way to the device.
/// The router's stay as they are: which experts a token goes to hangs on small differences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub enum DenseWeights {
    /// Kept as the file has them.
    #[default]
    #[serde(rename = "as-stored")]
    AsStored,
    /// Quantised to 8 bits as Q8_0, where their sizes allow: half of bf16's memory.
    #[serde(rename = "q8")]
    Quantised,
}
