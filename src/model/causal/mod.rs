//! Causal transformers: one forward pass for all families, switched by [`CausalConfig`].

mod builder;
mod finder;
mod joined;
mod layer;
mod layer_weights;
mod parts;
mod scratch;
mod tables;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::config::{CausalConfig, ExpertsConfig};
use super::error::ModelError;
use super::kernels;
use super::pass::Pass;
use super::plan::MemoryPlan;
use super::repack::Blueprint;
use super::weights;
use super::workload::Workload;
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device};
use crate::ops::{
    CacheKind, Format, Joiner, Kernels, LatentHeads, Matrix, OpsError, Products, RowTop, read_choices,
    self_test, self_test_choice, self_test_latent, self_test_moe, self_test_products, self_test_router,
    self_test_stream,
};
use layer::{Layer, Loader};
use parts::Parts;
use scratch::{Scratch, Strides};

/// Passes of different widths that are kept prepared; one more drops the wide ones.
const PREPARED: usize = 24;

/// Most rows of a pass that stays prepared.
const NARROW: usize = 16;

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Positions the cache holds.
    pub context: usize,
    /// Most rows in a pass.
    pub rows: usize,
    /// Most rows of a pass whose logits are wanted.
    pub logit_rows: usize,
    /// Number type of the key-value cache.
    pub cache: CacheKind,
    /// Where repacked weights are kept.
    pub cache_dir: Option<PathBuf>,
    /// Make one launch of a pass of a few rows where the device can: faster on processors, and the same bits.
    pub join: bool,
    /// How products are to be made. The processor's matrix unit is taken only where there is one that may be used and works.
    pub products: Products,
}

/// Which rows of a pass get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Logits {
    /// None: the pass only fills the cache.
    None,
    /// The last row.
    Last,
    /// All rows.
    All,
}

/// A causal model on its device, with the key-value cache of one sequence.
pub struct Causal {
    device: Device,
    kernels: Kernels,
    config: CausalConfig,
    gguf: Arc<Gguf>,
    embedding: TensorInfo,
    layers: Vec<Layer>,
    head: Matrix,
    head_norm: Buffer,
    inputs: Option<LayerInputs>,
    scratch: Scratch,
    strides: Strides,
    rows: usize,
    logit_rows: usize,
    context: usize,
    /// Ids from here on are no choice.
    choice_limit: usize,
    /// Rows of the last pass that have logits.
    rows_with_logits: usize,
    prepared: HashMap<(usize, Logits), Pass>,
    /// What makes one launch of a narrow pass.
    joiner: Option<Joiner>,
    joining_failed: bool,
    fell_back: bool,
    embedded: Vec<f32>,
}

/// What the inputs that each layer has of its own are made of.
struct LayerInputs {
    /// A row for each token, with a part for each layer; rows are read from the file.
    embedding: TensorInfo,
    projection: Matrix,
    norm: Buffer,
}

impl LoadOptions {
    /// Most rows of a pass, and of one whose logits are wanted.
    pub(super) fn pass_rows(&self) -> (usize, usize) {
        let rows = self.rows.clamp(1, self.context.max(1));
        (rows, self.logit_rows.clamp(1, rows))
    }
}

impl Causal {
    /// What the model of a file takes on a device when it is loaded with these options.
    ///
    /// # Errors
    /// What the file lacks or has wrong, by name.
    pub fn plan(gguf: &Gguf, options: &LoadOptions) -> Result<MemoryPlan, ModelError> {
        let config = CausalConfig::read(gguf)?;
        let parts = Parts::find(gguf, &config, options.context)?;
        let scratch_rows = parts.scratch_rows(&config, options, options.products);
        Ok(parts.plan(&config, &Strides::new(&config), options, scratch_rows))
    }

    /// What the passes of the model of a file have to do.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan).
    pub fn workload(gguf: &Gguf) -> Result<Workload, ModelError> {
        let config = CausalConfig::read(gguf)?;
        Ok(Parts::find(gguf, &config, config.context)?.workload(&config))
    }

    /// Puts the model on `device`. `progress` hears the share that is done, 0 to 1.
    ///
    /// # Errors
    /// What the file lacks or has wrong, by name; too little memory, with the plan; a kernel that fails its self-test.
    pub fn load(
        device: Device,
        gguf: Arc<Gguf>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self, ModelError> {
        let config = CausalConfig::read(&gguf)?;
        let (rows, logit_rows) = options.pass_rows();
        let strides = Strides::new(&config);
        let mut parts = Parts::find(&gguf, &config, options.context)?;
        let wanted = kernels::wanted(&device, options.products)?;
        let products = wanted.as_ref().map_or(Products::Vector, Kernels::products);
        let scratch_rows = parts.scratch_rows(&config, options, products);
        parts.plan(&config, &strides, options, scratch_rows).check(&device, options.context)?;
        parts.made_for(products);
        let (identity, cache_dir) = (gguf.identity().to_string(), options.cache_dir.as_deref());
        let progress_of_weights = &mut |share| progress(0.95 * share);
        let test = || {
            kernels::tested(&device, wanted, |kernels| Self::test(&device, kernels, &config, &parts, options))
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
        let scratch_rows = parts.scratch_rows(&config, options, kernels.products());
        let vectors = parts.vectors.iter().map(|values| layer::vector(&device, values));
        let vectors = vectors.collect::<Result<Vec<_>, ModelError>>()?;
        let tables = config.ropes.iter().zip(&parts.divisors);
        let angles = tables
            .map(|(rope, divisors)| tables::angles(&device, rope, divisors.as_deref(), options.context))
            .collect::<Result<Vec<_>, ModelError>>()?;
        let loader = Loader {
            device: &device,
            config: &config,
            options,
            products: kernels.products(),
            matrices: &matrices,
            vectors: &vectors,
            angles: &angles,
        };
        let mut layers = Vec::with_capacity(parts.layers.len());
        for (index, weights) in parts.layers.iter().enumerate() {
            layers.push(loader.layer(index, weights, &layers)?);
        }
        let head = matrices[parts.head].clone();
        let head_norm = vectors[parts.head_norm].clone();
        let inputs = parts.inputs.map(|inputs| LayerInputs {
            projection: matrices[inputs.projection].clone(),
            norm: vectors[inputs.norm].clone(),
            embedding: inputs.embedding,
        });
        let scratch = Scratch::new(&device, &strides, scratch_rows)?;
        gguf.release(); // only rows of the embedding are read from now on
        let mut model = Self {
            kernels,
            gguf,
            embedding: parts.embedding,
            layers,
            head,
            head_norm,
            inputs,
            scratch,
            strides,
            rows,
            logit_rows,
            context: options.context,
            choice_limit: config.vocabulary,
            rows_with_logits: 0,
            prepared: HashMap::new(),
            joiner: None,
            joining_failed: false,
            fell_back,
            embedded: Vec::new(),
            config,
            device,
        };
        // Launches of the xmx family are no parts of one.
        if options.join && model.products() != Products::Xmx {
            model.join_passes()?;
        }
        progress(1.0);
        Ok(model)
    }

    fn test(
        device: &Device,
        kernels: &Kernels,
        config: &CausalConfig,
        parts: &Parts,
        options: &LoadOptions,
    ) -> Result<(), OpsError> {
        let mut formats: Vec<Format> = parts.blueprints.iter().map(Blueprint::format).collect();
        formats.sort_unstable();
        formats.dedup();
        for (index, heads) in builder::heads(config, options.cache).iter().enumerate() {
            self_test(device, kernels, if index == 0 { &formats } else { &[] }, heads)?;
        }
        self_test_choice(device, kernels)?;
        self_test_moe(device, kernels, &parts.expert_formats())?;
        for layer in config.layers.iter().filter(|layer| layer.latent.is_some()).take(1) {
            let rope = &config.ropes[layer.rope];
            let heads = LatentHeads {
                size: layer.value_size,
                turns: layer.key_size - layer.value_size,
                pairing: rope.pairing,
                cache: options.cache,
            };
            self_test_products(device, kernels, &formats)?;
            self_test_latent(device, kernels, &parts.head_formats(), &heads)?;
        }
        let routed = parts.layers.iter().zip(&config.layers).find_map(|(weights, layer)| {
            let biased = weights.experts.as_ref()?.choice_bias.is_some();
            layer.feed_forward.experts().map(|experts| (experts, biased))
        });
        if let Some((experts, biased)) = routed {
            let ExpertsConfig { choice, count, used, .. } = experts;
            self_test_router(device, kernels, choice, *count, *used, biased)?;
        }
        if config.needs_stream_kernels() {
            self_test_stream(device, kernels, config.family.activation)?;
        }
        Ok(())
    }

    /// How products are made.
    pub fn products(&self) -> Products {
        self.kernels.products()
    }

    /// True if products as they were wanted failed their self-test, and vectors took their place.
    pub fn fell_back(&self) -> bool {
        self.fell_back
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &CausalConfig {
        &self.config
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Positions the cache holds.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Most rows of a pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Most rows of a pass whose logits are wanted.
    pub fn logit_rows(&self) -> usize {
        self.logit_rows
    }

    /// Runs `tokens` at positions `start..` through the model, on top of what the cache holds for the positions before
    /// (the caller knows what that is). Only enqueued where nothing is read back.
    ///
    /// # Errors
    /// Unknown tokens, too many rows, positions past the context, all before anything runs; or what the device says.
    pub fn forward(&mut self, tokens: &[u32], start: usize, logits: Logits) -> Result<(), ModelError> {
        let rows = tokens.len();
        let most = if logits == Logits::All { self.logit_rows } else { self.rows };
        if rows == 0 || rows > most {
            return Err(ModelError::TooManyRows { rows, most });
        }
        if start + rows > self.context {
            return Err(ModelError::PastContext { position: self.context, context: self.context });
        }
        self.rows_with_logits = match logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => rows,
        };
        self.embed(tokens)?;
        if rows > 1 {
            // Rows of the embedding lie all over the file, and the system maps a run of pages around each.
            self.gguf.release();
        }
        let key = (rows, logits);
        if !self.prepared.contains_key(&key) {
            if self.prepared.len() >= PREPARED {
                // The narrow ones come back all the time; a wide one belongs to the end of one prompt.
                self.prepared.retain(|(rows, _), _| *rows <= NARROW);
            }
            let mut pass = builder::pass(self, rows, logits)?;
            if let Some(joiner) = self.joiner.as_ref().filter(|_| rows <= NARROW) {
                pass.join(&self.device, joiner)?;
            }
            tracing::debug!(rows, ?logits, launches = pass.len(), "prepared a pass");
            self.prepared.insert(key, pass);
        }
        if let Some(pass) = self.prepared.get_mut(&key) {
            pass.run(&self.device, start as i32)?;
        }
        self.device.flush()?;
        Ok(())
    }

    /// Enqueues what a pass like the last one of `rows` rows costs beside its kernels' work, where it is one launch; false
    /// where it is not. Nothing is computed.
    ///
    /// # Errors
    /// What the device says.
    pub fn run_hollow(&mut self, rows: usize, logits: Logits) -> Result<bool, ModelError> {
        let pass = self.prepared.get_mut(&(rows, logits));
        Ok(pass.map_or(Ok(false), |pass| pass.run_hollow(&self.device))?)
    }

    /// Launches of a pass of `rows` rows; 0 before the first such pass.
    pub fn launches(&self, rows: usize, logits: Logits) -> usize {
        self.prepared.get(&(rows, logits)).map_or(0, Pass::len)
    }

    /// The kernels of a pass in the order of its launches, layer by layer: the first layer's with those before it, and
    /// those behind the last. Passes of a few rows may be one launch that does all of this: see
    /// [`launches`](Self::launches).
    ///
    /// # Errors
    /// What the device says.
    pub fn pass_kernels(&self, rows: usize, logits: Logits) -> Result<Vec<Vec<String>>, ModelError> {
        Ok(builder::pass(self, rows, logits)?.kernels_by_layer())
    }

    /// Waits for the device and shows the logits of a row: of row 0 after [`Logits::Last`], of any after
    /// [`Logits::All`].
    ///
    /// # Errors
    /// What the device says.
    pub fn with_logits<T>(&self, row: usize, look: impl FnOnce(&[f32]) -> T) -> Result<T, ModelError> {
        let from = row.min(self.logit_rows - 1) * self.strides.logits * 4;
        let range = from..from + self.config.vocabulary * 4;
        Ok(self.device.with_mapped(&self.scratch.logits, range, |bytes| look(bytemuck::cast_slice(bytes)))?)
    }

    /// [`choices`](Self::choices) are made among the first `vocabulary` ids only: the others belong to no token.
    pub fn limit_choices(&mut self, vocabulary: usize) {
        let limit = vocabulary.clamp(1, self.config.vocabulary);
        if std::mem::replace(&mut self.choice_limit, limit) != limit {
            self.prepared.clear();
        }
    }

    /// Waits for the device and gives the largest logits of each row of the last pass that has logits: one after
    /// [`Logits::Last`], all after [`Logits::All`].
    ///
    /// # Errors
    /// What the device says.
    pub fn choices(&self) -> Result<Vec<RowTop>, ModelError> {
        Ok(read_choices(&self.device, &self.scratch.choices, self.rows_with_logits)?)
    }

    /// Fills the cache of all positions with one small number, so that passes at any position can be timed without
    /// encoding what is before it.
    ///
    /// # Errors
    /// What the device says.
    pub fn fill_cache(&mut self) -> Result<(), ModelError> {
        Ok(self.layers.iter().try_for_each(|layer| layer.cache.fill(&self.device))?)
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<(), ModelError> {
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= self.config.vocabulary) {
            return Err(ModelError::UnknownToken { id, vocabulary: self.config.vocabulary });
        }
        let (config, gguf, rows) = (&self.config, &self.gguf, &mut self.embedded);
        embedded_rows(gguf, &self.embedding, tokens, config.embedding_scale, self.strides.hidden, rows)?;
        self.device.write(&self.scratch.residual[0], 0, bytemuck::cast_slice(rows))?;
        if let (Some(inputs), Some(scratch)) = (&self.inputs, &self.scratch.inputs) {
            let scale = (config.layer_input as f32).sqrt();
            embedded_rows(gguf, &inputs.embedding, tokens, scale, scratch.stride, rows)?;
            self.device.write(&scratch.embedded, 0, bytemuck::cast_slice(rows))?;
        }
        Ok(())
    }
}

/// The rows of a table that belong to tokens, which it has, times `scale`, `stride` values apart and zero-padded.
fn embedded_rows(
    gguf: &Gguf,
    table: &TensorInfo,
    tokens: &[u32],
    scale: f32,
    stride: usize,
    rows: &mut Vec<f32>,
) -> Result<(), ModelError> {
    let (row_bytes, values) = (table.row_bytes() as usize, table.row_values() as usize);
    let bytes = gguf.bytes(table);
    rows.clear();
    rows.resize(tokens.len() * stride, 0.0);
    for (&id, row) in tokens.iter().zip(rows.chunks_exact_mut(stride)) {
        let encoded = bytes.get(id as usize * row_bytes..).and_then(|rest| rest.get(..row_bytes));
        let row = &mut row[..values];
        dequantize(table.ty, encoded.unwrap_or_default(), row)?;
        if scale != 1.0 {
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
    Ok(())
}
