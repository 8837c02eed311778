//! Why a model cannot be loaded or run.

use std::path::PathBuf;

use thiserror::Error;

use crate::checkpoint::gguf::GgufError;
use crate::checkpoint::kind::KindError;
use crate::checkpoint::quant::QuantError;
use crate::checkpoint::safetensors::SafetensorsError;
use crate::device::DeviceError;
use crate::ops::OpsError;

use super::repack::RepackError;

/// Why a model cannot be loaded or run.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The file is damaged or lacks something.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// There is no checkpoint.
    #[error(transparent)]
    Kind(#[from] KindError),
    /// Kernels of the `xmx` family were asked for where they cannot run.
    #[error(
        "kernels of the xmx family need sub-groups with loads of blocks (cl_intel_subgroups) and f16, which {device} lacks; set \
         device.kernels = \"vector\", or choose another device"
    )]
    NoSubGroups {
        /// The device.
        device: String,
    },
    /// A directory of tensors is damaged or lacks something.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A tensor's bytes cannot be read as its type.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// Rows that cannot be brought into the kernels' layout.
    #[error(transparent)]
    Repack(#[from] RepackError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel refused.
    #[error(transparent)]
    Ops(#[from] OpsError),
    /// The file is sound, but this program does not run such a model.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The model file.
        path: PathBuf,
        /// Key or tensor, what was found, what is supported.
        what: String,
    },
    /// The model does not fit.
    #[error(
        "the model needs {} MiB of device memory ({weights_mib} MiB weights, {kv_mib} MiB for a context of \
         {context} tokens, {scratch_mib} MiB scratch), the limit is {limit_mib} MiB: choose a smaller context \
         ([model] context_length) or a smaller model",
        weights_mib + kv_mib + scratch_mib
    )]
    TooLarge {
        /// Weights.
        weights_mib: u64,
        /// Key-value cache.
        kv_mib: u64,
        /// Scratch.
        scratch_mib: u64,
        /// Context in tokens.
        context: usize,
        /// What may be used.
        limit_mib: u64,
    },
    /// A token the vocabulary does not have.
    #[error("token id {id} is outside the vocabulary of {vocabulary} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Number of tokens.
        vocabulary: usize,
    },
    /// More positions than the cache holds.
    #[error("position {position} is past the context of {context} tokens")]
    PastContext {
        /// First position that does not fit.
        position: usize,
        /// Positions the cache holds.
        context: usize,
    },
    /// More rows at once than the scratch buffers hold.
    #[error("a pass of {rows} rows, {most} at most")]
    TooManyRows {
        /// Rows asked for.
        rows: usize,
        /// Rows that fit.
        most: usize,
    },
    /// A canvas of another length than the model's.
    #[error("a canvas of {found} tokens; this model's has {expected}")]
    CanvasLength {
        /// Tokens given.
        found: usize,
        /// Rows of a canvas.
        expected: usize,
    },
    /// Logits of the step before that do not belong to a canvas.
    #[error(
        "{found} logits of the step before; a canvas has {expected}, a row of the vocabulary for each position"
    )]
    PreviousLogits {
        /// Logits given.
        found: usize,
        /// Rows of a canvas times the vocabulary.
        expected: usize,
    },
    /// A canvas whose numbers are broken: nothing after them can be trusted.
    #[error(
        "row {row} of canvas {canvas} has logits that are not finite at denoising step {step}: a pass overflowed or the \
         weights are damaged; copy the checkpoint again from its source, and if that does not help, look for a NaN in it"
    )]
    NotFinite {
        /// Canvases of this generation before.
        canvas: u32,
        /// Steps of the canvas before.
        step: u32,
        /// The row.
        row: usize,
    },
}
