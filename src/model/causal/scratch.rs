//! Buffers for the activations of a pass.

use std::collections::BTreeMap;

use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, ExpertsConfig, LatentConfig, LayerConfig};
use crate::model::error::ModelError;
use crate::ops::{CacheKind, Products, ROW_MULTIPLE, Routing, STRIDE_MULTIPLE, choice_values, round_up};

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
pub(super) struct Scratch {
    /// The residual stream, and its copy after a normed branch has joined.
    pub(super) residual: [Buffer; 2],
    pub(super) qkv: Buffer,
    /// Queries of layers whose attention takes them in another form than their rows.
    pub(super) queries: Option<Buffer>,
    /// What attention leaves, for layers of each width.
    pub(super) attended: ByWidth,
    /// What heads that see a latent make of it.
    pub(super) values: ByWidth,
    pub(super) branch: Buffer,
    /// Gates whose matrix is not joined with up's, for networks of each inner width.
    pub(super) gate: ByWidth,
    /// Gated inner values, likewise.
    pub(super) inner: ByWidth,
    pub(super) packed: Buffer,
    pub(super) sums: Buffer,
    pub(super) logits: Buffer,
    pub(super) choices: Buffer,
    pub(super) experts: Option<ExpertScratch>,
    pub(super) inputs: Option<InputScratch>,
    pub(super) latent: Option<LatentScratch>,
}

/// The way of rows to experts and back.
pub(super) struct ExpertScratch {
    pub(super) routing: Routing,
    /// i32 `[rows][used]`: the experts of each row.
    pub(super) chosen: Buffer,
    /// The router's scores.
    pub(super) scores: Buffer,
    pub(super) scores_stride: usize,
    /// Rows in the order of their experts, what the experts make of them inside, and what they leave.
    pub(super) slots: Buffer,
    pub(super) slot_sums: Buffer,
    pub(super) inner: Buffer,
    pub(super) inner_sums: Buffer,
    pub(super) out: Buffer,
}

/// Heads on their way to a latent and back.
pub(super) struct LatentScratch {
    /// Queries as their matrix makes them.
    pub(super) queries: Buffer,
    pub(super) queries_stride: usize,
    /// The latent that they are made out of.
    pub(super) query_latent: Buffer,
    pub(super) query_latent_stride: usize,
    /// Packed heads of rows.
    pub(super) packed: Buffer,
    pub(super) sums: Buffer,
}

impl LatentScratch {
    /// Bytes of queries, of their latent, of packed heads and their sums.
    fn sizes(heads: usize, latent: &LatentConfig, rows: usize, products: Products) -> [usize; 4] {
        let widest = stride_of(latent.plain.max(latent.size));
        [
            rows * stride_of(heads * latent.query_head()),
            rows * stride_of(latent.query.unwrap_or(1)),
            products.packed_values(rows * heads, widest),
            products.sums_values(rows * heads, widest),
        ]
        .map(|values| values * 4)
    }

    fn new(
        device: &Device,
        heads: usize,
        latent: &LatentConfig,
        rows: usize,
        products: Products,
    ) -> Result<Self, ModelError> {
        let [queries, query_latent, packed, sums] = Self::sizes(heads, latent, rows, products);
        Ok(Self {
            queries: zeros(device, queries)?,
            queries_stride: stride_of(heads * latent.query_head()),
            query_latent: zeros(device, query_latent)?,
            query_latent_stride: stride_of(latent.query.unwrap_or(1)),
            packed: zeros(device, packed)?,
            sums: zeros(device, sums)?,
        })
    }
}

/// Inputs that layers have of their own.
pub(super) struct InputScratch {
    /// What tokens are for each layer, put there by the host.
    pub(super) embedded: Buffer,
    /// The inputs of all layers.
    pub(super) parts: Buffer,
    /// Values from row to row of both.
    pub(super) stride: usize,
    /// A layer's input, gated.
    pub(super) gate: Buffer,
    pub(super) gate_stride: usize,
}

impl ExpertScratch {
    /// Bytes of scores, chosen experts, slots and what experts make of them, for a model of `hidden` values.
    fn sizes(experts: &ExpertsConfig, hidden: usize, rows: usize, products: Products) -> [usize; 7] {
        let slots = rows * experts.used;
        let (hidden, inner) = (stride_of(hidden), stride_of(experts.inner));
        [
            rows * round_up(experts.count, ROW_MULTIPLE),
            slots,
            products.packed_values(slots, hidden),
            products.sums_values(slots, hidden),
            products.packed_values(slots, inner),
            products.sums_values(slots, inner),
            slots * hidden,
        ]
        .map(|values| values * 4)
    }

    fn bytes(experts: &ExpertsConfig, hidden: usize, rows: usize, products: Products) -> usize {
        Self::sizes(experts, hidden, rows, products).iter().sum::<usize>()
            + Routing::bytes(experts.count, experts.used, rows)
    }

    fn new(
        device: &Device,
        experts: &ExpertsConfig,
        hidden: usize,
        rows: usize,
        products: Products,
    ) -> Result<Self, ModelError> {
        let [scores, chosen, slots, slot_sums, inner, inner_sums, out] =
            Self::sizes(experts, hidden, rows, products);
        Ok(Self {
            routing: Routing::new(device, experts.count, experts.used, rows)?,
            chosen: zeros(device, chosen)?,
            scores: zeros(device, scores)?,
            scores_stride: round_up(experts.count, ROW_MULTIPLE),
            slots: zeros(device, slots)?,
            slot_sums: zeros(device, slot_sums)?,
            inner: zeros(device, inner)?,
            inner_sums: zeros(device, inner_sums)?,
            out: zeros(device, out)?,
        })
    }
}

impl InputScratch {
    /// Values from row to row of the inputs of all layers, and of one.
    fn strides(size: usize, layers: usize) -> (usize, usize) {
        (stride_of(size * layers), stride_of(size))
    }

    fn bytes(size: usize, layers: usize, rows: usize) -> usize {
        let (all, one) = Self::strides(size, layers);
        (2 * all + one) * rows * 4
    }

    fn new(device: &Device, size: usize, layers: usize, rows: usize) -> Result<Self, ModelError> {
        let (stride, gate_stride) = Self::strides(size, layers);
        Ok(Self {
            embedded: zeros(device, stride * rows * 4)?,
            parts: zeros(device, stride * rows * 4)?,
            stride,
            gate: zeros(device, gate_stride * rows * 4)?,
            gate_stride,
        })
    }
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
    /// How they are packed.
    pub(super) products: Products,
    /// What keys and values are kept in.
    pub(super) cache: CacheKind,
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
        let ScratchRows { pass, branch, gate, logits, products, .. } = rows;
        Self::sizes(strides, rows).iter().sum::<usize>()
            + strides.query_bytes(rows)
            + ByWidth::bytes(&strides.attended, pass)
            + ByWidth::bytes(&strides.values, pass)
            + ByWidth::bytes(&strides.inner, gate)
            + ByWidth::bytes(&strides.inner, pass)
            + (strides.hidden * (pass + 2 * branch) + strides.logits * logits + choice_values(logits)) * 4
            + strides
                .experts
                .map_or(0, |experts| ExpertScratch::bytes(&experts, strides.stream, pass, products))
            + strides.inputs.map_or(0, |size| InputScratch::bytes(size, strides.layers, pass))
            + strides.latent.map_or(0, |(heads, latent)| {
                LatentScratch::sizes(heads, &latent, pass, products).iter().sum()
            })
    }

    /// Bytes of the rows of queries, keys and values, of packed rows and of their sums.
    fn sizes(strides: &Strides, rows: ScratchRows) -> [usize; 3] {
        let widest = strides.widest_input();
        let ScratchRows { pass, products, .. } = rows;
        let packed = [products.packed_values(pass, widest), products.sums_values(pass, widest)];
        [strides.qkv * pass, packed[0], packed[1]].map(|values| values * 4)
    }

    pub(super) fn new(device: &Device, strides: &Strides, rows: ScratchRows) -> Result<Self, ModelError> {
        let ScratchRows { pass, branch, gate, logits, products, .. } = rows;
        let [qkv, packed, sums] = Self::sizes(strides, rows);
        let queries = Some(strides.query_bytes(rows)).filter(|&bytes| bytes > 0);
        let stream = |rows: usize| zeros(device, strides.hidden * rows * 4);
        Ok(Self {
            residual: [stream(pass)?, stream(branch)?],
            qkv: zeros(device, qkv)?,
            queries: queries.map(|bytes| zeros(device, bytes)).transpose()?,
            attended: ByWidth::new(device, &strides.attended, pass)?,
            values: ByWidth::new(device, &strides.values, pass)?,
            branch: stream(branch)?,
            gate: ByWidth::new(device, &strides.inner, gate)?,
            inner: ByWidth::new(device, &strides.inner, pass)?,
            packed: zeros(device, packed)?,
            sums: zeros(device, sums)?,
            logits: zeros(device, strides.logits * logits * 4)?,
            choices: zeros(device, choice_values(logits) * 4)?,
            experts: strides
                .experts
                .map(|experts| ExpertScratch::new(device, &experts, strides.stream, pass, products))
                .transpose()?,
            inputs: strides
                .inputs
                .map(|size| InputScratch::new(device, size, strides.layers, pass))
                .transpose()?,
            latent: strides
                .latent
                .map(|(heads, latent)| LatentScratch::new(device, heads, &latent, pass, products))
                .transpose()?,
        })
    }
}

/// Row strides in values, the widest layer's where layers share a buffer, and the widths that have buffers of their own.
#[derive(Clone)]
pub(super) struct Strides {
    pub(super) hidden: usize,
    pub(super) qkv: usize,
    pub(super) logits: usize,
    /// Query heads, key-value heads and values of a head, of layers whose heads see no latent, each once.
    heads: Vec<[usize; 3]>,
    /// Widths of what attention leaves, each once.
    attended: Vec<usize>,
    /// Widths of what heads that see a latent make of it, each once.
    values: Vec<usize>,
    /// Inner widths of dense networks, each once.
    inner: Vec<usize>,
    /// The experts of the layers that have any.
    experts: Option<ExpertsConfig>,
    /// Values of the input that each layer has of its own.
    inputs: Option<usize>,
    /// Heads that see a latent, the most of a layer.
    latent: Option<(usize, LatentConfig)>,
    /// Values of the stream, and layers.
    stream: usize,
    layers: usize,
}

/// Where a layer's keys and values start in a qkv row, and where they end.
#[derive(Clone, Copy)]
pub(super) struct QkvPlaces {
    pub(super) k_at: usize,
    pub(super) v_at: usize,
    pub(super) end: usize,
}

impl QkvPlaces {
    pub(super) fn new(layer: &LayerConfig) -> Self {
        let k_at = round_up(layer.q_width(), ROW_MULTIPLE);
        let after = k_at + round_up(layer.k_width(), ROW_MULTIPLE);
        if layer.kv_from.is_some() {
            return Self { k_at: 0, v_at: 0, end: k_at };
        }
        if layer.keys_are_values {
            return Self { k_at, v_at: k_at, end: after };
        }
        Self { k_at, v_at: after, end: after + round_up(layer.v_width(), ROW_MULTIPLE) }
    }
}

impl Strides {
    pub(super) fn new(config: &CausalConfig) -> Self {
        let each = |of: &dyn Fn(&LayerConfig) -> usize| {
            let widths = config.layers.iter().map(of);
            let mut widths: Vec<usize> = widths.filter(|&width| width > 0).collect();
            widths.sort_unstable();
            widths.dedup();
            widths
        };
        let qkv = config.layers.iter().map(|layer| QkvPlaces::new(layer).end).max().unwrap_or(0);
        let plain = config.layers.iter().filter(|layer| layer.latent.is_none());
        let mut heads: Vec<_> = plain.map(|layer| [layer.heads, layer.kv_heads, layer.key_size]).collect();
        heads.sort_unstable();
        heads.dedup();
        Self {
            hidden: stride_of(config.hidden),
            qkv: stride_of(qkv),
            logits: round_up(config.vocabulary, ROW_MULTIPLE),
            heads,
            attended: each(&LayerConfig::attended_width),
            values: each(&|layer| layer.latent.map_or(0, |_| layer.output_width())),
            inner: each(&|layer| layer.feed_forward.inner()),
            experts: config.layers.iter().find_map(|layer| layer.feed_forward.experts().copied()),
            inputs: Some(config.layer_input).filter(|&size| size > 0),
            latent: config
                .layers
                .iter()
                .filter_map(|layer| Some((layer.heads, layer.latent?)))
                .max_by_key(|(heads, _)| *heads),
            stream: config.hidden,
            layers: config.layers.len(),
        }
    }

    /// Bytes of the queries of a pass beside their rows, for the layer with the most.
    fn query_bytes(&self, rows: ScratchRows) -> usize {
        let of = |&heads: &[usize; 3]| rows.products.query_bytes(rows.cache, heads, rows.pass);
        self.heads.iter().map(of).max().unwrap_or(0)
    }

    /// The stride of the widest rows that go into a product.
    fn widest_input(&self) -> usize {
        let widths = self.attended.iter().chain(&self.values).chain(&self.inner);
        let query = self.latent.and_then(|(_, latent)| latent.query).map_or(0, stride_of);
        widths.map(|&width| stride_of(width)).max().unwrap_or(0).max(self.hidden).max(query)
    }
}
