//! What the engine's thread gets when the model is loaded, and what of it everyone may read.

use std::sync::Arc;

use super::constraints::Constraints;
use crate::decode::Backend;
use crate::text::{ChatTemplate, Tokenizer};

/// A loaded model.
pub struct Loaded {
    /// The model on its device; stays on the engine's thread.
    pub backend: Box<dyn Backend>,
    /// What others may read.
    pub model: Model,
}

/// How a model makes its tokens, which decides what a request may ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModelKind {
    /// One after the other, each from those before it.
    #[default]
    Causal,
    /// A canvas at a time, all its positions together.
    BlockDiffusion {
        /// Positions of a canvas.
        canvas: usize,
        /// Denoising steps for a canvas when the request does not say.
        max_steps: usize,
    },
}

impl ModelKind {
    /// One word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Causal => "causal",
            Self::BlockDiffusion { .. } => "block_diffusion",
        }
    }
}

/// The facts and the text side of the loaded model.
pub struct Model {
    /// Name it is served under.
    pub name: String,
    /// Identity of the checkpoint and of what was made of it: changes when anything but the device changes that could
    /// change replies.
    pub identity: String,
    /// The device in words, e.g. `Intel(R) OpenCL CPU, 2 compute units`.
    pub device: String,
    /// How it makes tokens.
    pub kind: ModelKind,
    /// Most positions of a request, prompt and output together.
    pub context_length: usize,
    /// Text to tokens and back; knows the tokens that end a reply.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to prompts; base models have none.
    pub template: Option<ChatTemplate>,
    /// What replies can be held to.
    pub constraints: Constraints,
}
