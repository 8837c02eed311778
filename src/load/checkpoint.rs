//! What is at a path, opened far enough to know which kind of model it is. Only headers are read.

use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::kind::Kind;
use crate::decode::BackendError;
use crate::model::diffusion_gemma::{DiffusionCheckpoint, GGUF_ARCHITECTURE};

/// A checkpoint of either kind.
#[derive(Debug, Clone)]
pub enum Checkpoint {
    /// Of a causal model.
    Causal(Arc<Gguf>),
    /// Of a model that denoises.
    Diffusion(DiffusionCheckpoint),
}

impl Checkpoint {
    /// Opens what is at `path`.
    ///
    /// # Errors
    /// What is there instead of a checkpoint, or what is wrong with its headers.
    pub fn open(path: &Path) -> Result<Self, BackendError> {
        if let Kind::Gguf(path) = Kind::of(path)? {
            let gguf = Arc::new(Gguf::open(&path)?);
            if gguf.metadata().str("general.architecture")? != Some(GGUF_ARCHITECTURE) {
                return Ok(Self::Causal(gguf));
            }
            return Ok(Self::Diffusion(DiffusionCheckpoint::Gguf(gguf)));
        }
        Ok(Self::Diffusion(DiffusionCheckpoint::open(path)?))
    }
}
