//! What the passes of a model have to do, by its shapes: enough to say what a card would take for them.

use crate::ops::Format;

/// A matrix that rows go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductShape {
    /// Format of its weights.
    pub format: Format,
    /// Values that come out, padding included.
    pub outputs: usize,
    /// Values that go in.
    pub columns: usize,
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsShape {
    /// How many there are.
    pub count: usize,
    /// How many of them a row goes to.
    pub used: usize,
    /// Gate and up of one.
    pub gate_up: ProductShape,
    /// The second product of one.
    pub down: ProductShape,
}

/// The attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values of a key.
    pub head_size: usize,
    /// Positions that a row sees, its own included; none: all up to itself.
    pub window: Option<usize>,
    /// Whether all heads see one latent.
    pub latent: bool,
    /// Whether scores are capped.
    pub capped: bool,
}

/// What the passes of a model have to do. Norms, routers' choices and rotary embeddings are left out, which take little.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Matrices that all rows of a pass go through, those of all layers.
    pub products: Vec<ProductShape>,
    /// Matrices that only the rows of a canvas go through, besides.
    pub conditioning: Vec<ProductShape>,
    /// Experts of the layers that have them.
    pub experts: Vec<ExpertsShape>,
    /// Attention of all layers.
    pub attention: Vec<AttentionShape>,
    /// The head, or the table of embeddings that is one.
    pub head: ProductShape,
    /// Rows of a canvas of a model that denoises.
    pub canvas: Option<usize>,
}
