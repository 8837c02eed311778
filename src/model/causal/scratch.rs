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

impl Scratch {
    /// Bytes of each buffer, in the order of the fields, both residual streams first.
    pub(super) fn bytes(strides: &Strides, rows: usize, logit_rows: usize) -> [usize; 10] {
        let widest = strides.widest_input();
        [
            strides.hidden * rows,
            strides.hidden * rows,
            strides.qkv * rows,
            strides.attended * rows,
            strides.hidden * rows,
            strides.inner * rows,
            strides.inner * rows,
            widest * rows,
            widest / 32 * 3 * rows,
            strides.logits * logit_rows,
        ]
        .map(|values| values * 4)
    }

    pub(super) fn new(
        device: &Device,
        strides: &Strides,
        rows: usize,
        logit_rows: usize,
    ) -> Result<Self, ModelError> {
        let mut sizes = Self::bytes(strides, rows, logit_rows).into_iter();
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
