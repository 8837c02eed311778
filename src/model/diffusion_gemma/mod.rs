//! DiffusionGemma: one stack of layers that encodes committed tokens into a cache and denoises a canvas over it.

mod builder;
mod checkpoint;
mod config;
mod generation;
mod layer;
mod parts;
mod planned;
mod scratch;
mod source;
mod step;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

pub use checkpoint::{DenseWeights, DiffusionCheckpoint, ExpertWeights};
pub use config::{DiffusionConfig, GGUF_ARCHITECTURE, HeadRope, LayerConfig};
pub use generation::GenerationConfig;
pub use step::{DenoiseStep, RowChoice};

use super::error::ModelError;
use super::gate_up::GateUp;
use super::kernels;
use super::pass::Pass;
use super::weights;
use crate::device::process::release_unused;
use crate::device::{Buffer, Device, Launch, Purpose};
use crate::ops::{
    Cache, CacheKind, Experts, Family, Format, HeadOptions, HeadRow, HeadRun, HeadState, Heads, Kernels,
    Matrix, OpsError, Products, Routing, STRIDE_MULTIPLE, round_up, self_test, self_test_fused,
    self_test_head, self_test_moe,
};
use builder::Mode;
use layer::{Layer, Scalars};
use parts::{Parts, WeightFormats};
use scratch::{Scratch, Strides};
use source::Source;

/// Passes of different widths that are kept prepared; one more drops all of them.
const PREPARED: usize = 24;
/// Positions that sliding layers keep beyond their window and a pass, so that a conversation can be taken up again a
/// little before where it ended.
const REWIND: usize = 512;

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct DiffusionOptions {
    /// Positions a request may take, prompt and answer together; the canvas has room of its own.
    pub context: usize,
    /// Most tokens encoded in a pass.
    pub rows: usize,
    /// Ids from here on are never chosen, where the table has more rows than there are tokens.
    pub vocabulary: Option<usize>,
    /// Number type of the key-value cache.
    pub cache: CacheKind,
    /// How products are to be made. The processor's matrix unit is taken only where there is one that may be used and works.
    pub products: Products,
    /// Where repacked weights are kept.
    pub cache_dir: Option<PathBuf>,
    /// What becomes of plain expert weights.
    pub experts: ExpertWeights,
    /// What becomes of other plain matrices.
    pub dense: DenseWeights,
}

impl DiffusionOptions {
    /// A model as its file has it, with a cache of `context` positions in f16: weights are neither kept nor quantised.
    pub fn new(context: usize) -> Self {
        Self {
            context,
            rows: 256,
            vocabulary: None,
            cache: CacheKind::F16,
            products: Products::MatrixUnit,
            cache_dir: None,
            experts: ExpertWeights::AsStored,
            dense: DenseWeights::AsStored,
        }
    }

    /// Most rows of a pass: tokens to encode, or a canvas.
    fn pass_rows(&self, config: &DiffusionConfig) -> usize {
        self.rows.clamp(1, self.context.max(1)).max(config.canvas)
    }

    /// Positions that a layer's cache holds. A canvas lies behind the context.
    fn positions(&self, config: &DiffusionConfig, layer: &LayerConfig) -> usize {
        let all = self.context + config.canvas;
        if layer.sliding { all.min(config.window - 1 + self.pass_rows(config) + REWIND) } else { all }
    }

    /// Bytes of the tables of angles: one for all layers that turn their heads alike.
    fn angle_bytes(&self, config: &DiffusionConfig) -> usize {
        let mut tables: Vec<(HeadRope, usize)> = Vec::new();
        for layer in &config.layers {
            if !tables.contains(&layer.table()) {
                tables.push(layer.table());
            }
        }
        let positions = self.context + config.canvas;
        tables.iter().map(|(rope, _)| (positions * rope.pairs * 8).max(4)).sum()
    }

    /// Bytes of what attention leaves where it cannot lie in the rows of its queries: see [`Layer::attended`].
    fn attended_bytes(&self, config: &DiffusionConfig) -> usize {
        let widths: BTreeSet<usize> =
            config.layers.iter().map(|layer| config.heads * layer.head_size).collect();
        let padded = widths.iter().filter(|width| !width.is_multiple_of(STRIDE_MULTIPLE));
        padded.map(|&width| round_up(width, STRIDE_MULTIPLE) * self.pass_rows(config) * 4).sum()
    }
}

/// A DiffusionGemma on its device, with the cache of one sequence.
pub struct DiffusionGemma {
    device: Device,
    kernels: Kernels,
    config: DiffusionConfig,
    formats: WeightFormats,
    /// Products as they were asked for failed their self-test.
    fell_back: bool,
    layers: Vec<Layer>,
    /// Embedding and head.
    table: Matrix,
    head_norm: Buffer,
    conditioning: Conditioning,
    routing: Routing,
    head: HeadState,
    head_launches: Vec<Launch>,
    scratch: Scratch,
    strides: Strides,
    /// Most tokens encoded in a pass.
    rows: usize,
    context: usize,
    /// Ids below this may be chosen.
    vocabulary: usize,
    /// Positions of the smallest ring of a sliding layer.
    ring: Option<usize>,
    /// The position after the last that was written since the cache was last begun anew.
    written: usize,
    prepared: HashMap<(usize, Mode), Pass>,
    /// Room for plain logits, made when first asked for.
    plain: Option<Buffer>,
}

/// Self-conditioning on the device.
struct Conditioning {
    norm: Buffer,
    gate_up: GateUp<Matrix>,
    down: Matrix,
}

impl DiffusionGemma {
    /// Puts the model on `device`. `progress` hears the share that is done, 0 to 1.
    ///
    /// # Errors
    /// What the checkpoint lacks or has wrong, by name; too little memory, with the plan; a kernel that fails its
    /// self-test.
    pub fn load(
        device: Device,
        checkpoint: &DiffusionCheckpoint,
        options: &DiffusionOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, ModelError> {
        let config = checkpoint.config()?;
        let mut parts =
            Parts::find(&mut Source::new(checkpoint, &config, (options.experts, options.dense)), &config)?;
        let wanted = kernels::wanted(&device, options.products)?;
        let products = wanted.as_ref().map_or(Products::Vector, Kernels::products);
        parts.plan(&config, options, products).check(&device, options.context)?;
        parts.made_for(products);
        // What is made of one checkpoint depends on what becomes of its weights.
        let formats = parts.formats();
        if options.experts == ExpertWeights::Quantised
            && checkpoint.has_plain_experts()
            && !formats.experts_are_w4()
        {
            tracing::warn!(
                hidden = config.hidden,
                inner = config.expert_feed_forward,
                "experts are not made 4-bit where their sizes are no multiples of the format's groups (128 and 64)"
            );
        }
        let identity = format!("{}-{formats}", checkpoint.identity());
        let cache_dir = options.cache_dir.as_deref();
        let progress_of_weights = &mut |share| progress(0.95 * share);
        let test = || {
            let tested = kernels::tested(&device, wanted, |kernels| {
                Self::test(&device, kernels, &config, &parts, options)
            });
            // Everything is compiled from here on.
            release_unused();
            tested
        };
        let (mut matrices, kernels) =
            weights::load(&device, &identity, &parts.blueprints, cache_dir, test, progress_of_weights)?;
        let fell_back = products != kernels.products();
        if fell_back && products == Products::Xmx {
            // What was made is for kernels that failed.
            parts.made_for(kernels.products());
            drop(matrices);
            matrices =
                weights::load_alone(&device, &identity, &parts.blueprints, cache_dir, progress_of_weights)?;
        }
        checkpoint.release();
        let model = Self::assemble(device, kernels, config, &parts, &matrices, options)?;
        drop(parts);
        release_unused();
        progress(1.0);
        Ok(Self { fell_back, ..model })
    }

    fn test(
        device: &Device,
        kernels: &Kernels,
        config: &DiffusionConfig,
        parts: &Parts,
        options: &DiffusionOptions,
    ) -> Result<(), OpsError> {
        let mut dense: Vec<Format> = parts.blueprints.iter().map(|blueprint| blueprint.format()).collect();
        dense.sort_unstable();
        dense.dedup();
        let mut heads: Vec<Heads> =
            config.layers.iter().map(|layer| builder::heads(layer, options.cache)).collect();
        heads.sort_unstable();
        heads.dedup();
        for (index, heads) in heads.iter().enumerate() {
            self_test(device, kernels, if index == 0 { &dense } else { &[] }, heads)?;
        }
        let experts = parts.layers.iter().flat_map(|layer| [layer.experts_gate_up, layer.experts_down]);
        let mut of_experts: Vec<Format> = experts.map(|matrix| parts.blueprints[matrix].format()).collect();
        of_experts.sort_unstable();
        of_experts.dedup();
        self_test_moe(device, kernels, &of_experts)?;
        if kernels.family() == Family::Vector {
            let [gated, routers] = parts.fused();
            self_test_fused(device, kernels, &gated, &routers)?;
        }
        self_test_head(device, kernels, parts.blueprints[parts.table].format())
    }

    /// Everything but the matrices.
    fn assemble(
        device: Device,
        kernels: Kernels,
        config: DiffusionConfig,
        parts: &Parts,
        matrices: &[Matrix],
        options: &DiffusionOptions,
    ) -> Result<Self, ModelError> {
        let strides = Strides::new(&config);
        let pass_rows = options.pass_rows(&config);
        let positions = options.context + config.canvas;
        let scratch = Scratch::new(&device, &config, pass_rows, kernels.products(), options.cache)?;
        let mut angles: Vec<((HeadRope, usize), Buffer)> = Vec::new();
        let mut attended: HashMap<usize, Buffer> = HashMap::new();
        let mut layers = Vec::with_capacity(config.layers.len());
        for (layer, parts) in config.layers.iter().zip(&parts.layers) {
            let table = match angles.iter().find(|(of, _)| *of == layer.table()) {
                Some((_, table)) => table.clone(),
                None => {
                    let table = layer::angles(&device, &layer.rope, layer.head_size, positions)?;
                    angles.push((layer.table(), table.clone()));
                    table
                }
            };
            let width = config.heads * layer.head_size;
            let (attended, attended_stride) = match round_up(width, STRIDE_MULTIPLE) {
                stride if stride == width => (scratch.qkv.clone(), strides.qkv),
                stride => match attended.entry(width) {
                    Entry::Occupied(made) => (made.get().clone(), stride),
                    Entry::Vacant(place) => {
                        let buffer = device.alloc(Purpose::Scratch, stride * pass_rows * 4)?;
                        device.fill(&buffer, 0)?;
                        (place.insert(buffer).clone(), stride)
                    }
                },
            };
            let experts = |matrix: usize, outputs| Experts {
                matrix: matrices[matrix].clone(),
                experts: config.experts,
                outputs,
            };
            layers.push(Layer {
                qkv: parts.qkv.iter().map(|&(matrix, at)| (matrices[matrix].clone(), at)).collect(),
                output: matrices[parts.output].clone(),
                gate_up: parts.gate_up.map(|&matrix| matrices[matrix].clone()),
                down: matrices[parts.down].clone(),
                router: matrices[parts.router].clone(),
                experts_gate_up: experts(parts.experts_gate_up, config.expert_feed_forward),
                experts_down: experts(parts.experts_down, config.hidden),
                norms: parts.norms.map(|values| layer::vector(&device, values))?,
                router_norm: layer::vector(&device, &parts.router_norm)?,
                per_expert_scale: layer::vector(&device, &parts.per_expert_scale)?,
                scalars: Scalars { encoder: parts.encoder_scalar, decoder: parts.decoder_scalar },
                window: layer.sliding.then_some(config.window),
                rotated_pairs: layer.rope.pairs,
                kv_at: strides.kv_at(&config, layer),
                attended,
                attended_stride,
                angles: table,
                cache: Cache::of_family(
                    &device,
                    kernels.products().attention(options.cache, layer.head_size),
                    options.cache,
                    layer.kv_heads,
                    layer.head_size,
                    options.positions(&config, layer),
                )?,
                chosen: device.alloc(Purpose::Scratch, pass_rows * config.experts_used * 4)?,
            });
        }
        let partial = scratch.soft_partial.clone();
        let head = HeadState::with_partial(&device, config.canvas, config.hidden, partial)?;
        let ring =
            layers.iter().filter(|layer| layer.window.is_some()).map(|layer| layer.cache.capacity).min();
        let mut model = Self {
            formats: parts.formats(),
            fell_back: false,
            layers,
            table: matrices[parts.table].clone(),
            head_norm: layer::vector(&device, &parts.head_norm)?,
            conditioning: Conditioning {
                norm: layer::vector(&device, &parts.conditioning.norm)?,
                gate_up: parts.conditioning.gate_up.map(|&matrix| matrices[matrix].clone()),
                down: matrices[parts.conditioning.down].clone(),
            },
            routing: Routing::new(&device, config.experts, config.experts_used, pass_rows)?,
            head,
            head_launches: Vec::new(),
            scratch,
            strides,
            rows: options.rows.clamp(1, options.context.max(1)),
            context: options.context,
            vocabulary: options.vocabulary.map_or(config.vocabulary, |most| most.min(config.vocabulary)),
            ring,
            written: 0,
            prepared: HashMap::new(),
            plain: None,
            kernels,
            config,
            device,
        };
        let options = model.head_options();
        let (packed, sums) = (&model.scratch.packed, &model.scratch.sums);
        model.head_launches = model.kernels.streaming_head(
            &model.device,
            &model.table,
            packed,
            sums,
            model.config.canvas,
            &options,
            &model.head,
        )?;
        Ok(model)
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &DiffusionConfig {
        &self.config
    }

    /// The kernels' formats of experts and of the table of embeddings, in words.
    pub fn formats(&self) -> String {
        self.formats.to_string()
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the processor has a matrix unit that was asked for and failed its self-test.
    pub fn fell_back(&self) -> bool {
        self.fell_back
    }

    /// How products of rows are made.
    pub fn products(&self) -> Products {
        self.kernels.products()
    }

    /// Positions a request may take; a canvas lies behind them.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Most tokens encoded in a pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn head_options(&self) -> HeadOptions {
        let (softcap, vocabulary) = (self.config.softcap, self.vocabulary);
        HeadOptions { softcap, vocabulary, scale: self.embedding_scale() }
    }

    /// Embeddings are multiplied by the square root of their length.
    fn embedding_scale(&self) -> f32 {
        (self.config.hidden as f32).sqrt()
    }

    /// Whether the cache still has what a pass at `start` looks at: sliding layers keep their window only, and what was
    /// written since, canvases included, has taken the place of what was before.
    pub fn reusable(&self, start: usize) -> bool {
        match self.ring {
            // The oldest position a row at `start` sees, and the oldest that is still there.
            Some(ring) => (start + 1).saturating_sub(self.config.window) + ring >= self.written,
            None => true,
        }
    }

    /// Encodes `tokens` at positions `start..`, on top of what the cache holds for the positions before (the caller knows
    /// what that is, and has asked [`reusable`](Self::reusable)). Only enqueued.
    ///
    /// # Errors
    /// Unknown tokens, too many rows, positions past the context, all before anything runs; or what the device says.
    pub fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError> {
        self.check(tokens, start, self.rows, self.context)?;
        self.run(tokens, start, Mode::Encode)
    }

    /// One denoising step over `canvas`, whose first position is `start`: everything before is in the cache, which stays
    /// as it is. Unless the step is a canvas's first, it is conditioned on the step before, which must have been this
    /// canvas's.
    ///
    /// # Errors
    /// A canvas of another length, unknown tokens, positions past the context, numbers that are not finite; or what the
    /// device says.
    pub fn denoise(
        &mut self,
        canvas: &[u32],
        start: usize,
        step: &DenoiseStep,
    ) -> Result<Vec<RowChoice>, ModelError> {
        self.check_canvas(canvas, start)?;
        self.run(canvas, start, Mode::Decode { conditioned: !step.first })?;
        let run = HeadRun {
            temperature: step.temperature,
            seed: step.seed,
            canvas: step.canvas,
            step: step.step,
            greedy: step.greedy,
            barred: &step.barred,
            soft: true,
        };
        run.set(&self.device, &mut self.head_launches, &self.head)?;
        self.head_launches.iter().try_for_each(|launch| self.device.enqueue(launch))?;
        let rows = self.head.read(&self.device, canvas.len())?;
        rows.iter().enumerate().map(|(row, result)| choice(row, result, step)).collect()
    }

    /// The soft-capped logits `[canvas][vocabulary]` of a canvas by the plain head. `previous` are the logits of the step
    /// before, soft-capped and divided by its temperature; none for a canvas's first step.
    ///
    /// # Errors
    /// As for [`denoise`](Self::denoise).
    pub fn canvas_logits(
        &mut self,
        canvas: &[u32],
        start: usize,
        previous: Option<&[f32]>,
    ) -> Result<Vec<f32>, ModelError> {
        self.check_canvas(canvas, start)?;
        let (rows, vocabulary) = (canvas.len(), self.config.vocabulary);
        let stride = round_up(vocabulary, crate::ops::ROW_MULTIPLE);
        let logits = match self.plain.take() {
            Some(buffer) => buffer,
            None => self.device.alloc(Purpose::Scratch, rows * stride * 4)?,
        };
        if let Some(previous) = previous {
            let expected = rows * vocabulary;
            if previous.len() != expected {
                return Err(ModelError::PreviousLogits { found: previous.len(), expected });
            }
            let mut padded = vec![0f32; rows * stride];
            for (to, from) in padded.chunks_exact_mut(stride).zip(previous.chunks_exact(vocabulary)) {
                to[..vocabulary].copy_from_slice(from);
            }
            self.device.write(&logits, 0, bytemuck::cast_slice(&padded))?;
            let soft = self.kernels.soft_embedding(
                &self.device,
                &self.table,
                &logits,
                stride,
                rows,
                &self.head_options(),
                &self.head.soft,
                self.head.stride,
            )?;
            soft.iter().try_for_each(|launch| self.device.enqueue(launch))?;
        }
        self.run(canvas, start, Mode::Decode { conditioned: previous.is_some() })?;
        let (packed, sums) = (&self.scratch.packed, &self.scratch.sums);
        let head = self.kernels.plain_logits(
            &self.device,
            &self.table,
            packed,
            sums,
            rows,
            self.config.softcap,
            &logits,
            stride,
        )?;
        head.iter().try_for_each(|launch| self.device.enqueue(launch))?;
        let found = self.device.with_mapped(&logits, 0..rows * stride * 4, |bytes| {
            let values: &[f32] = bytemuck::cast_slice(bytes);
            values.chunks_exact(stride).flat_map(|row| row[..vocabulary].to_vec()).collect()
        })?;
        self.plain = Some(logits);
        Ok(found)
    }

    /// The experts that each row of the last pass went to in a layer, by falling weight, `[row][experts used]`. The last
    /// layer has none of an encoder pass.
    ///
    /// # Errors
    /// What the device says.
    pub fn chosen_experts(&self, layer: usize, rows: usize) -> Result<Vec<i32>, ModelError> {
        let mut chosen = vec![0i32; rows * self.config.experts_used];
        self.device.read(&self.layers[layer].chosen, 0, bytemuck::cast_slice_mut(&mut chosen))?;
        Ok(chosen)
    }

    /// A layer's keys and values of the positions `from..to`, each `[kv head][position][head size]`.
    ///
    /// # Errors
    /// What the device says.
    pub fn cached(&self, layer: usize, from: usize, to: usize) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        Ok(self.layers[layer].cache.read(&self.device, from, to)?)
    }

    /// Fills the cache of all positions with one small number, so that passes at any position can be timed without
    /// encoding what is before it.
    ///
    /// # Errors
    /// What the device says.
    pub fn fill_cache(&mut self) -> Result<(), ModelError> {
        Ok(self.layers.iter().try_for_each(|layer| layer.cache.fill(&self.device))?)
    }

    /// The kernels of a denoising step's pass in the order of its launches, layer by layer: the first layer's with those
    /// before it, and those behind the last. The head's follow; they are [`head_launches`](Self::head_launches).
    ///
    /// # Errors
    /// What the device says.
    pub fn step_kernels(&self, conditioned: bool) -> Result<Vec<Vec<String>>, ModelError> {
        Ok(builder::pass(self, self.config.canvas, Mode::Decode { conditioned })?.kernels_by_layer())
    }

    /// How many launches the head is.
    pub fn head_launches(&self) -> usize {
        self.head_launches.len()
    }

    fn check(&self, tokens: &[u32], start: usize, most: usize, end: usize) -> Result<(), ModelError> {
        let rows = tokens.len();
        if rows == 0 || rows > most {
            return Err(ModelError::TooManyRows { rows, most });
        }
        if start.saturating_add(rows) > end {
            return Err(ModelError::PastContext { position: start.max(end), context: end });
        }
        let vocabulary = self.config.vocabulary;
        match tokens.iter().find(|&&id| id as usize >= vocabulary) {
            Some(&id) => Err(ModelError::UnknownToken { id, vocabulary }),
            None => Ok(()),
        }
    }

    fn check_canvas(&self, canvas: &[u32], start: usize) -> Result<(), ModelError> {
        let (found, expected) = (canvas.len(), self.config.canvas);
        if found != expected {
            return Err(ModelError::CanvasLength { found, expected });
        }
        self.check(canvas, start, self.config.canvas, self.context + self.config.canvas)
    }

    fn run(&mut self, tokens: &[u32], start: usize, mode: Mode) -> Result<(), ModelError> {
        let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
        self.device.write(&self.scratch.ids, 0, bytemuck::cast_slice(&ids))?;
        if start == 0 {
            self.written = 0;
        }
        self.written = self.written.max(start + tokens.len());
        let key = (tokens.len(), mode);
        if !self.prepared.contains_key(&key) {
            if self.prepared.len() >= PREPARED {
                self.prepared.clear();
            }
            let pass = builder::pass(self, tokens.len(), mode)?;
            tracing::debug!(rows = tokens.len(), ?mode, launches = pass.len(), "prepared a pass");
            self.prepared.insert(key, pass);
        }
        if let Some(pass) = self.prepared.get_mut(&key) {
            pass.run(&self.device, start as i32)?;
        }
        self.device.flush()?;
        Ok(())
    }
}

/// What the head says of a row, if it says anything sound.
fn choice(row: usize, result: &HeadRow, step: &DenoiseStep) -> Result<RowChoice, ModelError> {
    let sound = result.bad == 0 && result.entropy.is_finite();
    match (u32::try_from(result.argmax), u32::try_from(result.sampled)) {
        (Ok(argmax), Ok(sampled)) if sound => Ok(RowChoice { argmax, sampled, entropy: result.entropy }),
        _ => Err(ModelError::NotFinite { canvas: step.canvas, step: step.step, row }),
    }
}
