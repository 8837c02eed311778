//! Buffers for the activations of a pass.

use std::collections::BTreeMap;

use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::ops::{ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
pub(super) struct Scratch {
    /// The residual stream, and its copy after a normed branch has joined.
    pub(super) residual: [Buffer; 2],
    pub(super) qkv: Buffer,
    /// What attention leaves, for layers of each width.
    pub(super) attended: ByWidth,
    pub(super) branch: Buffer,
    /// Gates whose matrix is not joined with up's, for networks of each inner width.
    pub(super) gate: ByWidth,
    /// Gated inner values, likewise.
    pub(super) inner: ByWidth,
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

/// Rows of several widths, each in a buffer of its own, whose padding nobody else writes to.
pub(super) struct ByWidth(BTreeMap<usize, Buffer>);

impl ByWidth {
    fn bytes(widths: &[usize], rows: usize) -> usize {
        widths.iter().map(|&width| stride_of(width) * rows * 4).sum()
    }

    fn new(device: &Device, widths: &[usize], rows: usize) -> Result<Self, ModelError> {
        let buffer = |&width| Ok((width, zeros(device, stride_of(width) * rows * 4)?));
        Ok(Self(widths.iter().map(buffer).collect::<Result<_, ModelError>>()?))
    }

    /// The rows of this width, and the values from row to row.
    ///
    /// # Errors
    /// No layer has that width: a fault of this program.
    pub(super) fn rows(&self, width: usize) -> Result<(&Buffer, usize), ModelError> {
        match self.0.get(&width) {
            Some(buffer) => Ok((buffer, stride_of(width))),
            None => Err(crate::ops::OpsError::Shape {
                op: "scratch",
                what: format!("no rows of {width} values were set aside"),
            }
            .into()),
        }
    }
}

/// Values from row to row of rows of that width.
fn stride_of(width: usize) -> usize {
    round_up(width, STRIDE_MULTIPLE)
}

/// A buffer of zeros: kernels read the padding of rows and count on zeros there.
fn zeros(device: &Device, bytes: usize) -> Result<Buffer, ModelError> {
    let buffer = device.alloc(Purpose::Scratch, bytes)?;
    device.fill(&buffer, 0)?;
    Ok(buffer)
}

impl Scratch {
    /// Bytes of all buffers.
    pub(super) fn bytes(strides: &Strides, rows: ScratchRows) -> usize {
        let ScratchRows { pass, branch, gate, logits } = rows;
        Self::sizes(strides, rows).iter().sum::<usize>()
            + ByWidth::bytes(&strides.attended, pass)
            + ByWidth::bytes(&strides.inner, gate)
            + ByWidth::bytes(&strides.inner, pass)
            + (strides.hidden * (pass + 2 * branch) + strides.logits * logits) * 4
    }

    /// Bytes of the rows of queries, keys and values, of packed rows and of their sums.
    fn sizes(strides: &Strides, rows: ScratchRows) -> [usize; 3] {
        let widest = strides.widest_input();
        [strides.qkv, widest, widest / 32 * 3].map(|values| values * rows.pass * 4)
    }

    pub(super) fn new(device: &Device, strides: &Strides, rows: ScratchRows) -> Result<Self, ModelError> {
        let ScratchRows { pass, branch, gate, logits } = rows;
        let [qkv, packed, sums] = Self::sizes(strides, rows);
        let stream = |rows: usize| zeros(device, strides.hidden * rows * 4);
        Ok(Self {
            residual: [stream(pass)?, stream(branch)?],
            qkv: zeros(device, qkv)?,
            attended: ByWidth::new(device, &strides.attended, pass)?,
            branch: stream(branch)?,
            gate: ByWidth::new(device, &strides.inner, gate)?,
            inner: ByWidth::new(device, &strides.inner, pass)?,
            packed: zeros(device, packed)?,
            sums: zeros(device, sums)?,
            logits: zeros(device, strides.logits * logits * 4)?,
        })
    }
}

/// Row strides in values, the widest layer's where layers share a buffer, and the widths that have buffers of their own.
#[derive(Clone)]
pub(super) struct Strides {
    pub(super) hidden: usize,
    pub(super) qkv: usize,
    pub(super) logits: usize,
    /// Widths of what attention leaves, each once.
    attended: Vec<usize>,
    /// Inner widths of dense networks, each once.
    inner: Vec<usize>,
}

/// Where a layer's keys and values start in a qkv row, and where they end.
#[derive(Clone, Copy)]
pub(super) struct QkvPlaces {
    pub(super) k_at: usize,
    pub(super) v_at: usize,
    end: usize,
}

impl QkvPlaces {
    pub(super) fn new(layer: &LayerConfig) -> Self {
        let k_at = round_up(layer.q_width(), ROW_MULTIPLE);
        let v_at = k_at + round_up(layer.k_width(), ROW_MULTIPLE);
        Self { k_at, v_at, end: v_at + round_up(layer.v_width(), ROW_MULTIPLE) }
    }
}

impl Strides {
    pub(super) fn new(config: &CausalConfig) -> Self {
        let each = |of: &dyn Fn(&LayerConfig) -> usize| {
            let mut widths: Vec<usize> = config.layers.iter().map(of).collect();
            widths.sort_unstable();
            widths.dedup();
            widths
        };
        let qkv = config.layers.iter().map(|layer| QkvPlaces::new(layer).end).max().unwrap_or(0);
        Self {
            hidden: stride_of(config.hidden),
            qkv: stride_of(qkv),
            logits: round_up(config.vocabulary, ROW_MULTIPLE),
            attended: each(&LayerConfig::attended_width),
            inner: each(&|layer| layer.feed_forward.inner()),
        }
    }

    /// The stride of the widest rows that go into a product.
    fn widest_input(&self) -> usize {
        let widths = self.attended.iter().chain(&self.inner);
        widths.map(|&width| stride_of(width)).max().unwrap_or(0).max(self.hidden)
    }
}
