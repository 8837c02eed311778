//! Buffers for the activations of a pass.

use std::ops::Range;

use super::config::{DiffusionConfig, LayerConfig};
use crate::device::{Buffer, Device, Purpose};
use crate::model::error::ModelError;
use crate::ops::{HeadState, Products, ROW_MULTIPLE, STRIDE_MULTIPLE, round_up};

/// Shared buffers start at multiples of a page, more than any device asks for.
const PAGE: usize = 4096;

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
///
/// Most of it is needed for a short time only, and shares memory with what is needed at another time: see [`Shared`].
pub(super) struct Scratch {
    /// The residual stream, and its copy after the attention branch has joined.
    pub(super) residual: [Buffer; 2],
    /// What attention makes, before its norm.
    pub(super) branch: Buffer,
    /// Gated inner values of the dense network: packed rows, or, where gate and up are two matrices, plain ones.
    pub(super) inner: Buffer,
    pub(super) inner_sums: Buffer,
    /// What the dense network makes, before its norm.
    pub(super) dense: Buffer,
    /// The router's scores.
    pub(super) scores: Buffer,
    /// Token ids of the rows, i32.
    pub(super) ids: Buffer,
    pub(super) qkv: Buffer,
    pub(super) packed: Buffer,
    pub(super) sums: Buffer,
    /// The stream with the router's norm, packed beside what the dense network gets.
    pub(super) router_packed: Buffer,
    pub(super) router_sums: Buffer,
    /// Rows in the order of their experts, and what the experts make of them.
    pub(super) slots: Buffer,
    pub(super) slot_sums: Buffer,
    pub(super) slot_inner: Buffer,
    pub(super) slot_inner_sums: Buffer,
    pub(super) slot_out: Buffer,
    /// Partial sums of the head's soft embeddings.
    pub(super) soft_partial: Buffer,
}

/// Where in one buffer each of those lies that only a few launches in a row need. Nothing counts on what it holds before.
///
/// On the left, one after the other: query, key and value rows; rows that are packed for the router; what is packed for experts,
/// later their results; at the end the head's partial sums. Beside them packed rows, which the first two are made of or along
/// with, and which are made of experts' results for the next layer; and, when no rows are packed, what is inside experts.
struct Shared {
    packed: Range<usize>,
    sums: Range<usize>,
    qkv: Range<usize>,
    soft_partial: Range<usize>,
    router_packed: Range<usize>,
    router_sums: Range<usize>,
    slots: Range<usize>,
    slot_sums: Range<usize>,
    slot_out: Range<usize>,
    slot_inner: Range<usize>,
    slot_inner_sums: Range<usize>,
}

impl Shared {
    fn new(config: &DiffusionConfig, rows: usize, products: Products) -> Self {
        let strides = Strides::new(config);
        let widest = strides.hidden.max(strides.attended).max(strides.inner);
        let slots = rows * config.experts_used;
        let after = |before: &Range<usize>, values: usize| {
            let start = round_up(before.end, PAGE);
            start..start + values.max(1) * 4
        };
        let first = |values: usize| after(&(0..0), values);
        let qkv = first(strides.qkv * rows);
        let soft_partial = first(HeadState::partial_bytes(config.canvas, config.hidden) / 4);
        let router_packed = first(products.packed_values(rows, strides.hidden));
        let router_sums = after(&router_packed, products.sums_values(rows, strides.hidden));
        let slot_out = first(strides.hidden * slots);
        let slots_at = first(products.packed_values(slots, strides.hidden));
        let slot_sums = after(&slots_at, products.sums_values(slots, strides.hidden));
        let ends = [&qkv, &soft_partial, &router_sums, &slot_out, &slot_sums].map(|range| range.end);
        let left = 0..ends.into_iter().max().unwrap_or(0);
        let packed = after(&left, products.packed_values(rows, widest));
        let sums = after(&packed, products.sums_values(rows, widest));
        let slot_inner = after(&left, products.packed_values(slots, strides.expert_inner));
        let slot_inner_sums = after(&slot_inner, products.sums_values(slots, strides.expert_inner));
        Self {
            packed,
            sums,
            qkv,
            soft_partial,
            router_packed,
            router_sums,
            slots: slots_at,
            slot_sums,
            slot_out,
            slot_inner,
            slot_inner_sums,
        }
    }

    fn bytes(&self) -> usize {
        self.sums.end.max(self.slot_inner_sums.end)
    }
}

impl Scratch {
    /// Bytes of each buffer of its own, in the order of the fields, both residual streams first.
    fn own(strides: &Strides, rows: usize, products: Products) -> [usize; 8] {
        [
            strides.hidden * rows,
            strides.hidden * rows,
            strides.hidden * rows,
            products.packed_values(rows, strides.inner).max(strides.inner * rows),
            products.sums_values(rows, strides.inner),
            strides.hidden * rows,
            strides.scores * rows,
            rows,
        ]
        .map(|values| values * 4)
    }

    /// Bytes of all of it.
    pub(super) fn bytes(config: &DiffusionConfig, rows: usize, products: Products) -> usize {
        let own: usize = Self::own(&Strides::new(config), rows, products).iter().sum();
        own + Shared::new(config, rows, products).bytes()
    }

    pub(super) fn new(
        device: &Device,
        config: &DiffusionConfig,
        rows: usize,
        products: Products,
    ) -> Result<Self, ModelError> {
        let mut sizes = Self::own(&Strides::new(config), rows, products).into_iter();
        let mut zeros = || -> Result<Buffer, ModelError> {
            let buffer = device.alloc(Purpose::Scratch, sizes.next().unwrap_or(4))?;
            device.fill(&buffer, 0)?; // kernels read the padding of rows and count on zeros there
            Ok(buffer)
        };
        let shared = Shared::new(config, rows, products);
        let all = device.alloc(Purpose::Scratch, shared.bytes())?;
        let part = |range: Range<usize>| device.part(&all, range);
        Ok(Self {
            residual: [zeros()?, zeros()?],
            branch: zeros()?,
            inner: zeros()?,
            inner_sums: zeros()?,
            dense: zeros()?,
            scores: zeros()?,
            ids: zeros()?,
            qkv: part(shared.qkv)?,
            packed: part(shared.packed)?,
            sums: part(shared.sums)?,
            router_packed: part(shared.router_packed)?,
            router_sums: part(shared.router_sums)?,
            slots: part(shared.slots)?,
            slot_sums: part(shared.slot_sums)?,
            slot_inner: part(shared.slot_inner)?,
            slot_inner_sums: part(shared.slot_inner_sums)?,
            slot_out: part(shared.slot_out)?,
            soft_partial: part(shared.soft_partial)?,
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
        }
    }

    /// First value of keys and of values in a layer's qkv row; the same where raw keys are the values.
    pub(super) fn kv_at(&self, config: &DiffusionConfig, layer: &LayerConfig) -> (usize, usize) {
        let k_at = round_up(config.heads * layer.head_size, ROW_MULTIPLE);
        let kv = round_up(layer.kv_heads * layer.head_size, ROW_MULTIPLE);
        (k_at, if layer.sliding { k_at + kv } else { k_at })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::model::diffusion_gemma::DiffusionCheckpoint;
    use std::path::Path;

    #[test]
    fn what_is_needed_at_one_time_lies_apart() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/diffusion-random/model");
        let mut config = DiffusionCheckpoint::open(&path).unwrap().config().unwrap();
        for (hidden, inner, top) in [(64, 32, 1), (256, 4096, 2), (4096, 64, 8)] {
            (config.hidden, config.expert_feed_forward, config.experts_used) = (hidden, inner, top);
            for products in [Products::Vector, Products::MatrixUnit, Products::Xmx] {
                let shared = Shared::new(&config, 16, products);
                let Shared { packed, sums, qkv, soft_partial, router_packed, router_sums, .. } = &shared;
                let slots = &shared.slots;
                let Shared { slot_sums, slot_out, slot_inner, slot_inner_sums, .. } = &shared;
                // What a launch reads and writes, and what is read later.
                for together in [
                    vec![packed, sums, qkv],
                    vec![packed, sums, soft_partial],
                    vec![packed, sums, router_packed, router_sums],
                    vec![slot_out, packed, sums],
                    vec![slots, slot_sums, slot_inner, slot_inner_sums],
                    vec![slot_inner, slot_inner_sums, slot_out],
                ] {
                    let mut ends: Vec<_> = together.iter().map(|range| (range.start, range.end)).collect();
                    ends.sort_unstable();
                    assert!(ends.iter().all(|(start, end)| start < end && start % PAGE == 0), "{ends:?}");
                    assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ends:?}");
                    assert!(ends.iter().all(|(_, end)| *end <= shared.bytes()), "{ends:?}");
                }
            }
        }
    }
}
