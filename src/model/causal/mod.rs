//! Causal transformers: one forward pass for all families, switched by [`CausalConfig`].

mod builder;
mod layer;
mod parts;
mod scratch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::config::CausalConfig;
use super::error::ModelError;
use super::pass::Pass;
use super::plan::MemoryPlan;
use super::repack::Blueprint;
use super::weights;
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device};
use crate::ops::{CacheKind, Format, Kernels, Matrix, self_test};
use layer::{Layer, Loader};
use parts::Parts;
use scratch::{Scratch, Strides};

/// Passes of different widths that are kept prepared; one more drops all of them.
const PREPARED: usize = 24;

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
    scratch: Scratch,
    strides: Strides,
    rows: usize,
    logit_rows: usize,
    context: usize,
    prepared: HashMap<(usize, Logits), Pass>,
    embedded: Vec<f32>,
}

impl LoadOptions {
    /// Most rows of a pass, and of one whose logits are wanted.
    fn pass_rows(&self) -> (usize, usize) {
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
        let (rows, logit_rows) = options.pass_rows();
        let parts = Parts::find(gguf, &config)?;
        let scratch_rows = parts.scratch_rows(&config, rows, logit_rows);
        Ok(parts.plan(&config, &Strides::new(&config), options, scratch_rows))
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
        let parts = Parts::find(&gguf, &config)?;
        let scratch_rows = parts.scratch_rows(&config, rows, logit_rows);
        parts.plan(&config, &strides, options, scratch_rows).check(&device, options.context)?;

        let kernels = Kernels::new(&device)?;
        let mut formats: Vec<Format> = parts.blueprints.iter().map(Blueprint::format).collect();
        formats.sort_unstable();
        formats.dedup();
        for (index, heads) in builder::heads(&config, options.cache).iter().enumerate() {
            self_test(&device, &kernels, if index == 0 { &formats } else { &[] }, heads)?;
        }
        progress(0.05);
        let matrices = weights::load(
            &device,
            &gguf.identity().to_string(),
            &parts.blueprints,
            options.cache_dir.as_deref(),
            &mut |share| progress(0.05 + 0.9 * share),
        )?;
        let angles = config
            .ropes
            .iter()
            .map(|rope| layer::angles(&device, &gguf, rope, parts.rope_divisors.as_ref(), options.context))
            .collect::<Result<Vec<_>, ModelError>>()?;
        let loader = Loader { device: &device, gguf: &gguf, config: &config, options, angles: &angles };
        let mut layers = Vec::with_capacity(parts.layers.len());
        for (index, parts) in parts.layers.iter().enumerate() {
            layers.push(loader.layer(index, parts, &matrices, &layers)?);
        }
        let head = matrices[parts.head].clone();
        let head_norm = layer::vector(&device, &gguf, &parts.head_norm)?;
        let scratch = Scratch::new(&device, &strides, scratch_rows)?;
        gguf.release(); // only rows of the embedding are read from now on
        progress(1.0);
        Ok(Self {
            kernels,
            gguf,
            embedding: parts.embedding,
            layers,
            head,
            head_norm,
            scratch,
            strides,
            rows,
            logit_rows,
            context: options.context,
            prepared: HashMap::new(),
            embedded: Vec::new(),
            config,
            device,
        })
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
        self.embed(tokens)?;
        if rows > 1 {
            // Rows of the embedding lie all over the file, and the system maps a run of pages around each.
            self.gguf.release();
        }
        let key = (rows, logits);
        if !self.prepared.contains_key(&key) {
            if self.prepared.len() >= PREPARED {
                self.prepared.clear();
            }
            let pass = builder::pass(self, rows, logits)?;
            tracing::debug!(rows, ?logits, launches = pass.len(), "prepared a pass");
            self.prepared.insert(key, pass);
        }
        if let Some(pass) = self.prepared.get_mut(&key) {
            pass.run(&self.device, start as i32)?;
        }
        self.device.flush()?;
        Ok(())
    }

    /// Launches of a pass of `rows` rows; 0 before the first such pass.
    pub fn launches(&self, rows: usize, logits: Logits) -> usize {
        self.prepared.get(&(rows, logits)).map_or(0, Pass::len)
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

    fn embed(&mut self, tokens: &[u32]) -> Result<(), ModelError> {
        let stride = self.strides.hidden;
        let row_bytes = self.embedding.row_bytes() as usize;
        let bytes = self.gguf.bytes(&self.embedding);
        self.embedded.clear();
        self.embedded.resize(tokens.len() * stride, 0.0);
        for (&id, row) in tokens.iter().zip(self.embedded.chunks_exact_mut(stride)) {
            let Some(encoded) = (id as usize)
                .checked_mul(row_bytes)
                .and_then(|at| bytes.get(at..at + row_bytes))
                .filter(|_| (id as usize) < self.config.vocabulary)
            else {
                return Err(ModelError::UnknownToken { id, vocabulary: self.config.vocabulary });
            };
            let row = &mut row[..self.config.hidden];
            dequantize(self.embedding.ty, encoded, row)?;
            if self.config.embedding_scale != 1.0 {
                row.iter_mut().for_each(|value| *value *= self.config.embedding_scale);
            }
        }
        self.device.write(&self.scratch.residual[0], 0, bytemuck::cast_slice(&self.embedded))?;
        Ok(())
    }
}
