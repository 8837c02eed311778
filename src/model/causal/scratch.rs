//! Buffers for the activations of a pass.

use crate::device::{Buffer, Device, Purpose};
use crate::model::config::CausalConfig;
use crate::model::error::ModelError;
use crate::ops::{ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
pub(super) struct Scratch {
    /// The residual stream, and its copy after a normed branch has joined.
    pub(super) residual: [Buffer; 2],
    pub(super) qkv: Buffer,
    pub(super) attended: Buffer,
    pub(super) branch: Buffer,
    pub(super) gate: Buffer,
    pub(super) inner: Buffer,
    pub(super) packed: Buffer,
    pub(super) sums: Buffer,
    pub(super) logits: Buffer,
}

/// Rows that the buffers hold.
#[derive(Clone, Copy)]
pub(super) struct ScratchRows {
    /// Of a pass.
    pub(super) pass: usize,
    /// Of branches that are normed before they join the stream; 1 where a model has none.
    pub(super) branch: usize,
    /// Of gates whose matrix is not joined with up's; 1 where a model has none.
    pub(super) gate: usize,
    /// With logits.
    pub(super) logits: usize,
}

impl Scratch {
    /// Bytes of each buffer, in the order of the fields, both residual streams first.
    pub(super) fn bytes(strides: &Strides, rows: ScratchRows) -> [usize; 10] {
        let ScratchRows { pass, branch, gate, logits } = rows;
        let widest = strides.widest_input();
        [
            strides.hidden * pass,
            strides.hidden * branch,
            strides.qkv * pass,
            strides.attended * pass,
            strides.hidden * branch,
            strides.inner * gate,
            strides.inner * pass,
            widest * pass,
            widest / 32 * 3 * pass,
            strides.logits * logits,
        ]
        .map(|values| values * 4)
    }

    pub(super) fn new(device: &Device, strides: &Strides, rows: ScratchRows) -> Result<Self, ModelError> {
        let mut sizes = Self::bytes(strides, rows).into_iter();
        let mut zeros = || -> Result<Buffer, ModelError> {
            let buffer = device.alloc(Purpose::Scratch, sizes.next().unwrap_or(4))?;
            device.fill(&buffer, 0)?; // kernels read the padding of rows and count on zeros there
            Ok(buffer)
        };
        Ok(Self {
            residual: [zeros()?, zeros()?],
            qkv: zeros()?,
            attended: zeros()?,
            branch: zeros()?,
            gate: zeros()?,
            inner: zeros()?,
            packed: zeros()?,
            sums: zeros()?,
            logits: zeros()?,
        })
    }
}

/// Row strides in values, and where keys and values start in a qkv row.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) hidden: usize,
    pub(super) qkv: usize,
    pub(super) attended: usize,
    pub(super) inner: usize,
    pub(super) logits: usize,
    pub(super) k_at: usize,
    pub(super) v_at: usize,
}

impl Strides {
    pub(super) fn new(config: &CausalConfig) -> Self {
        let q = config.heads * config.head_size;
        let kv = config.kv_heads * config.head_size;
        let k_at = round_up(q, ROW_MULTIPLE);
        let v_at = k_at + round_up(kv, ROW_MULTIPLE);
        Self {
            hidden: round_up(config.hidden, STRIDE_MULTIPLE),
            qkv: round_up(v_at + round_up(kv, ROW_MULTIPLE), STRIDE_MULTIPLE),
            attended: round_up(q, STRIDE_MULTIPLE),
            inner: round_up(config.feed_forward, STRIDE_MULTIPLE),
            logits: round_up(config.vocabulary, ROW_MULTIPLE),
            k_at,
            v_at,
        }
    }

    pub(super) fn widest_input(&self) -> usize {
        self.hidden.max(self.attended).max(self.inner)
    }
}
