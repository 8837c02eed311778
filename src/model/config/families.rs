//! Families: what their files leave unsaid, as data.

use crate::ops::Activation;

/// Models that share tensor names and switches.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `general.architecture` of its files, and the prefix of their keys.
    pub architecture: &'static str,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Rotated pairs are neighbours (2i, 2i + 1) rather than halves (i, i + rotated / 2).
    pub interleaved: bool,
    /// Base of the rotary embedding where the file says nothing; none: the file must say it.
    pub rope_base: Option<f32>,
    /// Which layers see a window.
    pub windows: Windows,
    /// Query and key heads are normed.
    pub head_norms: bool,
    /// Branches are normed before they join the residual stream.
    pub branch_norms: bool,
    /// Embeddings are multiplied by the square root of their length.
    pub scaled_embeddings: bool,
}

/// Which layers of a family see a window only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// All, if the file has a window.
    Everywhere,
    /// All but every n-th. The file may say n, or which.
    Alternating {
        /// n where the file says nothing.
        full_every: usize,
    },
}

/// All families that [`Causal`](crate::model::Causal) runs.
static FAMILIES: &[Family] = &[
    // Llama 2 and 3, SmolLM, Mistral.
    Family {
        architecture: "llama",
        activation: Activation::Silu,
        interleaved: true,
        // Llama 2 files predate the key; their base is the paper's.
        rope_base: Some(10_000.0),
        windows: Windows::Everywhere,
        head_norms: false,
        branch_norms: false,
        scaled_embeddings: false,
    },
    Family {
        architecture: "gemma3",
        activation: Activation::GeluTanh,
        interleaved: false,
        rope_base: None,
        windows: Windows::Alternating { full_every: 6 },
        head_norms: true,
        branch_norms: true,
        scaled_embeddings: true,
    },
];

impl Family {
    /// The family of an architecture.
    pub fn of(architecture: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.architecture == architecture)
    }

    /// Architectures this program runs, as `general.architecture` spells them.
    pub fn supported() -> String {
        FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ")
    }
}
