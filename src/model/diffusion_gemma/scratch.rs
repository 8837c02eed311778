//! Buffers for the activations of a pass.

use super::config::{DiffusionConfig, LayerConfig};
use crate::device::{Buffer, Device, Purpose};
use crate::model::error::ModelError;
use crate::ops::{Products, ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
pub(super) struct Scratch {
    /// The residual stream, and its copy after the attention branch has joined.
    pub(super) residual: [Buffer; 2],
    pub(super) qkv: Buffer,
    /// What attention makes, before its norm.
    pub(super) branch: Buffer,
    /// Gated inner values of the dense network.
    pub(super) inner: Buffer,
    /// What the dense network makes, before its norm.
    pub(super) dense: Buffer,
    /// The router's scores.
    pub(super) scores: Buffer,
    pub(super) packed: Buffer,
    pub(super) sums: Buffer,
    /// Rows in the order of their experts, and what the experts make of them.
    pub(super) slots: Buffer,
    pub(super) slot_sums: Buffer,
    pub(super) slot_inner: Buffer,
    pub(super) slot_inner_sums: Buffer,
    pub(super) slot_out: Buffer,
    /// Token ids of the rows, i32.
    pub(super) ids: Buffer,
}

impl Scratch {
    /// Bytes of each buffer, in the order of the fields, both residual streams first.
    pub(super) fn bytes(strides: &Strides, rows: usize, products: Products) -> [usize; 15] {
        let widest = strides.hidden.max(strides.attended).max(strides.inner);
        let slots = rows * strides.experts_used;
        [
            strides.hidden * rows,
            strides.hidden * rows,
            strides.qkv * rows,
            strides.hidden * rows,
            strides.inner * rows,
            strides.hidden * rows,
            strides.scores * rows,
            products.packed_values(rows, widest),
            products.sums_values(rows, widest),
            products.packed_values(slots, strides.hidden),
            products.sums_values(slots, strides.hidden),
            products.packed_values(slots, strides.expert_inner),
            products.sums_values(slots, strides.expert_inner),
            strides.hidden * slots,
            rows,
        ]
        .map(|values| values * 4)
    }

    pub(super) fn new(
        device: &Device,
        strides: &Strides,
        rows: usize,
        products: Products,
    ) -> Result<Self, ModelError> {
        let mut sizes = Self::bytes(strides, rows, products).into_iter();
        let mut zeros = || -> Result<Buffer, ModelError> {
            let buffer = device.alloc(Purpose::Scratch, sizes.next().unwrap_or(4))?;
            device.fill(&buffer, 0)?; // kernels read the padding of rows and count on zeros there
            Ok(buffer)
        };
        Ok(Self {
            residual: [zeros()?, zeros()?],
            qkv: zeros()?,
            branch: zeros()?,
            inner: zeros()?,
            dense: zeros()?,
            scores: zeros()?,
            packed: zeros()?,
            sums: zeros()?,
            slots: zeros()?,
            slot_sums: zeros()?,
            slot_inner: zeros()?,
            slot_inner_sums: zeros()?,
            slot_out: zeros()?,
            ids: zeros()?,
        })
    }
}

/// Row strides in values: the widest layer's where layers differ.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) hidden: usize,
    pub(super) qkv: usize,
    pub(super) attended: usize,
    pub(super) inner: usize,
    pub(super) expert_inner: usize,
    pub(super) scores: usize,
    experts_used: usize,
}

impl Strides {
    pub(super) fn new(config: &DiffusionConfig) -> Self {
        let widest = |of: &dyn Fn(&LayerConfig) -> usize| config.layers.iter().map(of).max().unwrap_or(0);
        let q = |layer: &LayerConfig| config.heads * layer.head_size;
        Self {
            hidden: round_up(config.hidden, STRIDE_MULTIPLE),
            qkv: round_up(
                widest(&|layer| {
                    round_up(q(layer), ROW_MULTIPLE)
                        + 2 * round_up(layer.kv_heads * layer.head_size, ROW_MULTIPLE)
                }),
                STRIDE_MULTIPLE,
            ),
            attended: round_up(widest(&q), STRIDE_MULTIPLE),
            inner: round_up(config.feed_forward, STRIDE_MULTIPLE),
            expert_inner: round_up(config.expert_feed_forward, STRIDE_MULTIPLE),
            scores: round_up(config.experts, ROW_MULTIPLE),
            experts_used: config.experts_used,
        }
    }

    /// First value of keys and of values in a layer's qkv row; the same where raw keys are the values.
    pub(super) fn kv_at(&self, config: &DiffusionConfig, layer: &LayerConfig) -> (usize, usize) {
        let k_at = round_up(config.heads * layer.head_size, ROW_MULTIPLE);
        let kv = round_up(layer.kv_heads * layer.head_size, ROW_MULTIPLE);
        (k_at, if layer.sliding { k_at + kv } else { k_at })
    }
}
