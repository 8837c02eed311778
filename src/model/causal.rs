//! Causal transformers: one forward pass for all families, switched by [`CausalConfig`].

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::config::{CausalConfig, Rope};
use super::error::ModelError;
use super::pass::Pass;
use super::repack::Blueprint;
use super::weights;
use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::device::{Buffer, Device, Purpose};
use crate::ops::{
    ATTENTION_START, Attention, Cache, CacheKind, Finish, Format, Kernels, Matrix, Output, ROTATE_START,
    ROW_MULTIPLE, Rotation, RowInput, STRIDE_MULTIPLE, round_up, self_test,
};

/// Passes of different widths that are kept prepared; the oldest goes first.
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

/// Bytes a model takes on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Repacked matrices and norms.
    pub weights: usize,
    /// Keys and values of all layers.
    pub kv_cache: usize,
    /// Activations, logits and tables.
    pub scratch: usize,
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

/// Matrices of a layer, and its norms.
struct Layer {
    /// Query, key and value matrices, those of one type joined; each with its first value in the qkv row.
    qkv: Vec<(Matrix, usize)>,
    output: Matrix,
    gate_up: GateUp,
    down: Matrix,
    attention_norm: Buffer,
    feed_forward_norm: Buffer,
    branch_norms: Option<(Buffer, Buffer)>,
    head_norms: Option<(Buffer, Buffer)>,
    window: Option<usize>,
    scale: f32,
    angles: Buffer,
    cache: Cache,
}

enum GateUp {
    /// Tiles of both alternate in one matrix.
    Joined(Matrix),
    /// Two types: gate, then up.
    Apart(Matrix, Matrix),
}

/// Activations of the rows of a pass, f32; row strides are multiples of [`STRIDE_MULTIPLE`] and rows zero-padded.
struct Scratch {
    /// The residual stream, and its copy after a normed branch has joined.
    residual: [Buffer; 2],
    qkv: Buffer,
    attended: Buffer,
    branch: Buffer,
    gate: Buffer,
    inner: Buffer,
    packed: Buffer,
    sums: Buffer,
    logits: Buffer,
}

/// Row strides in values, and where keys and values start in a qkv row.
#[derive(Clone, Copy)]
struct Strides {
    hidden: usize,
    qkv: usize,
    attended: usize,
    inner: usize,
    logits: usize,
    k_at: usize,
    v_at: usize,
}

impl Strides {
    fn new(config: &CausalConfig) -> Self {
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

    fn widest_input(&self) -> usize {
        self.hidden.max(self.attended).max(self.inner)
    }
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

impl Causal {
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
        let embedding = gguf
            .require_tensor("token_embd.weight", &[config.hidden as u64, config.vocabulary as u64])?
            .clone();
        let rows = options.rows.clamp(1, options.context.max(1));
        let logit_rows = options.logit_rows.clamp(1, rows);
        let strides = Strides::new(&config);
        let parts = Parts::find(&gguf, &config)?;
        let plan = parts.plan(&config, &strides, options, rows, logit_rows);
        let report = device.memory();
        let needed = plan.weights + plan.kv_cache + plan.scratch;
        if needed as u64 > report.budget.saturating_sub(report.total) {
            return Err(ModelError::TooLarge {
                weights_mib: plan.weights as u64 >> 20,
                kv_mib: plan.kv_cache as u64 >> 20,
                scratch_mib: plan.scratch as u64 >> 20,
                context: options.context,
                limit_mib: report.budget >> 20,
            });
        }
        tracing::info!(
            weights_mib = plan.weights >> 20,
            kv_cache_mib = plan.kv_cache >> 20,
            scratch_mib = plan.scratch >> 20,
            limit_mib = report.budget >> 20,
            context = options.context,
            "memory plan"
        );

        let kernels = Kernels::new(&device)?;
        let mut formats: Vec<Format> = parts.blueprints.iter().map(Blueprint::format).collect();
        formats.sort_unstable();
        formats.dedup();
        self_test(&device, &kernels, &formats, config.head_size, options.cache)?;
        progress(0.05);
        let matrices =
            weights::load(&device, &gguf, &parts.blueprints, options.cache_dir.as_deref(), &mut |share| {
                progress(0.05 + 0.9 * share)
            })?;
        let loader = Loader { device: &device, gguf: &gguf, config: &config, options };
        let angles = loader.angles(&config.rope)?;
        let sliding_angles = match &config.sliding {
            Some((_, rope)) => loader.angles(rope)?,
            None => angles.clone(),
        };
        let layers = parts
            .layers
            .iter()
            .enumerate()
            .map(|(index, shape)| {
                let sliding = config.layer(index).0.is_some();
                loader.layer(index, shape, &matrices, if sliding { &sliding_angles } else { &angles })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let head = matrices[parts.head].clone();
        let head_norm = loader.vector("output_norm.weight", config.hidden)?;
        let scratch = Scratch::new(&device, &strides, rows, logit_rows)?;
        // From here on only rows of the embedding are read from the file.
        gguf.mapping().forget_pages();
        progress(1.0);
        Ok(Self {
            kernels,
            gguf,
            embedding,
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

    /// Bytes of weights that a pass of any width reads.
    pub fn weight_bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            let gate_up = match &layer.gate_up {
                GateUp::Joined(matrix) => matrix.bytes(),
                GateUp::Apart(gate, up) => gate.bytes() + up.bytes(),
            };
            layer.qkv.iter().map(|(matrix, _)| matrix.bytes()).sum::<usize>()
                + layer.output.bytes()
                + gate_up
                + layer.down.bytes()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
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
        let key = (rows, logits);
        if !self.prepared.contains_key(&key) {
            if self.prepared.len() >= PREPARED {
                self.prepared.clear();
            }
            let pass = self.prepare(rows, logits)?;
            tracing::debug!(rows, ?logits, launches = pass.len(), "prepared a pass");
            self.prepared.insert(key, pass);
        }
        if let Some(pass) = self.prepared.get_mut(&key) {
            pass.run(&self.device, start as i32)?;
        }
        self.device.flush()?;
        Ok(())
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

    fn prepare(&self, rows: usize, logits: Logits) -> Result<Pass, ModelError> {
        let mut builder = Builder { model: self, rows, pass: Pass::default(), at: 0, branch_norm: None };
        let last = self.layers.len() - 1;
        for (index, layer) in self.layers.iter().enumerate() {
            builder.attention_inputs(layer)?;
            if index == last && logits == Logits::None {
                return Ok(builder.pass); // keys and values of the last layer are all that is wanted of it
            }
            builder.attention(layer)?;
            builder.feed_forward(layer)?;
        }
        builder.head(logits)?;
        Ok(builder.pass)
    }
}

/// Adds the launches of a pass one op after the other, keeping track of where the residual stream is.
struct Builder<'a> {
    model: &'a Causal,
    rows: usize,
    pass: Pass,
    /// Which residual buffer holds the stream.
    at: usize,
    /// The branch buffer waits to be normed with this weight and added.
    branch_norm: Option<&'a Buffer>,
}

impl<'a> Builder<'a> {
    fn residual(&self) -> &'a Buffer {
        &self.model.scratch.residual[self.at]
    }

    /// The residual stream as an input, with what waits to be added to it.
    fn normed(&self, norm: &'a Buffer) -> RowInput<'a> {
        let model = self.model;
        RowInput {
            rows: self.residual(),
            at: 0,
            branch: self
                .branch_norm
                .map(|weight| (&model.scratch.branch, weight, &model.scratch.residual[1 - self.at])),
            norm: Some(norm),
            n: model.config.hidden,
            stride: model.strides.hidden,
            epsilon: model.config.epsilon,
        }
    }

    fn plain(&self, rows: &'a Buffer, n: usize, stride: usize) -> RowInput<'a> {
        RowInput { rows, at: 0, branch: None, norm: None, n, stride, epsilon: self.model.config.epsilon }
    }

    /// Multiplies one input with several matrices.
    fn products(
        &mut self,
        input: RowInput<'a>,
        products: &[(&Matrix, Finish<'_>, Output<'_>)],
    ) -> Result<(), ModelError> {
        let model = self.model;
        let (device, kernels, scratch) = (&model.device, &model.kernels, &model.scratch);
        let mut input = input;
        if self.rows > 1 {
            self.pass.push(kernels.pack_rows(device, &input, self.rows, &scratch.packed, &scratch.sums)?);
        }
        for (matrix, finish, output) in products {
            self.pass.push(if self.rows > 1 {
                kernels.matmul(device, matrix, &scratch.packed, &scratch.sums, self.rows, *finish, output)?
            } else {
                kernels.matvec(device, matrix, &input, *finish, output)?
            });
            // The first product has added the branch; the others find the sum.
            if let Some((_, _, sum)) = input.branch.take() {
                input.rows = sum;
            }
        }
        Ok(())
    }

    /// A branch has been added on the way into a product: the stream is in the other buffer now.
    fn joined(&mut self) {
        if self.branch_norm.take().is_some() {
            self.at = 1 - self.at;
        }
    }

    fn attention_inputs(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let products: Vec<_> = layer
            .qkv
            .iter()
            .map(|(matrix, at)| {
                let output = Output { rows: &model.scratch.qkv, at: *at, stride: model.strides.qkv };
                (matrix, Finish::Store, output)
            })
            .collect();
        self.products(self.normed(&layer.attention_norm), &products)?;
        self.joined();
        let rotation = Rotation {
            qkv: &model.scratch.qkv,
            stride: model.strides.qkv,
            q_heads: model.config.heads,
            k_at: model.strides.k_at,
            v_at: model.strides.v_at,
            angles: &layer.angles,
            half_rotated: model.config.rotated / 2,
            interleaved: model.config.interleaved,
            norms: layer.head_norms.as_ref().map(|(q, k)| (q, k)),
            epsilon: model.config.epsilon,
        };
        let launch = model.kernels.rotate_and_cache(&model.device, &rotation, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ROTATE_START);
        Ok(())
    }

    fn attention(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let attention = Attention {
            q: &model.scratch.qkv,
            stride: model.strides.qkv,
            out: &model.scratch.attended,
            out_stride: model.strides.attended,
            q_heads: model.config.heads,
            window: layer.window,
            scale: layer.scale,
        };
        let launch = model.kernels.attention(&model.device, &attention, &layer.cache, self.rows)?;
        self.pass.push_positioned(launch, ATTENTION_START);
        let width = model.config.heads * model.config.head_size;
        let input = self.plain(&model.scratch.attended, width, model.strides.attended);
        self.branch(input, &layer.output, layer.branch_norms.as_ref().map(|(norm, _)| norm))
    }

    fn feed_forward(&mut self, layer: &'a Layer) -> Result<(), ModelError> {
        let model = self.model;
        let activation = model.config.activation;
        let rows = |rows| Output { rows, at: 0, stride: model.strides.inner };
        let (gate, inner) = (&model.scratch.gate, &model.scratch.inner);
        let input = self.normed(&layer.feed_forward_norm);
        match &layer.gate_up {
            GateUp::Joined(matrix) => {
                self.products(input, &[(matrix, Finish::Gated(activation), rows(inner))])?;
            }
            GateUp::Apart(first, up) => self.products(
                input,
                &[(first, Finish::Store, rows(gate)), (up, Finish::GatedWith(activation, gate), rows(inner))],
            )?,
        }
        self.joined();
        let input = self.plain(inner, model.config.feed_forward, model.strides.inner);
        self.branch(input, &layer.down, layer.branch_norms.as_ref().map(|(_, norm)| norm))
    }

    /// The last product of a branch: added to the stream at once, or left to be normed first.
    fn branch(
        &mut self,
        input: RowInput<'a>,
        matrix: &Matrix,
        norm: Option<&'a Buffer>,
    ) -> Result<(), ModelError> {
        let model = self.model;
        let stream = self.residual();
        let (finish, rows) = match norm {
            Some(_) => (Finish::Store, &model.scratch.branch),
            None => (Finish::Add(stream), stream),
        };
        self.branch_norm = norm;
        self.products(input, &[(matrix, finish, Output { rows, at: 0, stride: model.strides.hidden })])
    }

    fn head(&mut self, logits: Logits) -> Result<(), ModelError> {
        let model = self.model;
        let mut input = self.normed(&model.head_norm);
        if logits == Logits::Last {
            input.at = (self.rows - 1) * model.strides.hidden;
            self.rows = 1;
        }
        let output = Output { rows: &model.scratch.logits, at: 0, stride: model.strides.logits };
        self.products(input, &[(&model.head, Finish::Store, output)])
    }
}

/// The matrices that a file gives, and which of them belong where.
struct Parts {
    blueprints: Vec<Blueprint>,
    layers: Vec<LayerShape>,
    head: usize,
}

/// A layer's matrices as indices of their blueprints.
struct LayerShape {
    /// Each with its first value in the qkv row.
    qkv: Vec<(usize, usize)>,
    output: usize,
    /// One where both have one type, else gate and up.
    gate_up: (usize, Option<usize>),
    down: usize,
}

impl Parts {
    fn add(&mut self, name: String, tensors: Vec<TensorInfo>, alternating: bool) -> usize {
        self.blueprints.push(Blueprint { name, tensors, alternating });
        self.blueprints.len() - 1
    }

    fn find(gguf: &Gguf, config: &CausalConfig) -> Result<Self, ModelError> {
        let mut parts = Self { blueprints: Vec::new(), layers: Vec::new(), head: 0 };
        for index in 0..config.layers {
            let layer = parts.layer(gguf, config, index)?;
            parts.layers.push(layer);
        }
        let head = match gguf.tensor("output.weight") {
            Some(_) => "output.weight",
            None => "token_embd.weight",
        };
        let head = gguf.require_tensor(head, &[config.hidden as u64, config.vocabulary as u64])?.clone();
        parts.head = parts.add("output".to_owned(), vec![head], false);
        Ok(parts)
    }

    fn layer(&mut self, gguf: &Gguf, config: &CausalConfig, index: usize) -> Result<LayerShape, ModelError> {
        let (hidden, inner) = (config.hidden as u64, config.feed_forward as u64);
        let q = (config.heads * config.head_size) as u64;
        let kv = (config.kv_heads * config.head_size) as u64;
        let strides = Strides::new(config);
        let name = |part: &str| format!("blk.{index}.{part}");
        let tensor = |part: &str, shape: [u64; 2]| -> Result<TensorInfo, ModelError> {
            Ok(gguf.require_tensor(&name(&format!("{part}.weight")), &shape)?.clone())
        };
        if let Some(bias) = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
            .map(|part| name(&format!("{part}.bias")))
            .iter()
            .find(|name| gguf.tensor(name).is_some())
        {
            let what = format!("tensor {bias}: this version runs models without biases");
            return Err(ModelError::Unsupported { path: gguf.path().to_owned(), what });
        }
        let mut joined: Vec<(Vec<TensorInfo>, usize)> = Vec::new();
        for (part, rows, at) in [("attn_q", q, 0), ("attn_k", kv, strides.k_at), ("attn_v", kv, strides.v_at)]
        {
            let tensor = tensor(part, [hidden, rows])?;
            match joined.last_mut() {
                Some((tensors, _)) if tensors[0].ty == tensor.ty => tensors.push(tensor),
                _ => joined.push((vec![tensor], at)),
            }
        }
        let qkv = joined
            .into_iter()
            .map(|(tensors, at)| (self.add(name(&format!("qkv from {at}")), tensors, false), at))
            .collect();
        let output = self.add(name("attn_output"), vec![tensor("attn_output", [q, hidden])?], false);
        let (gate, up) = (tensor("ffn_gate", [hidden, inner])?, tensor("ffn_up", [hidden, inner])?);
        let gate_up = if gate.ty == up.ty {
            (self.add(name("ffn_gate_up"), vec![gate, up], true), None)
        } else {
            let gate = self.add(name("ffn_gate"), vec![gate], false);
            (gate, Some(self.add(name("ffn_up"), vec![up], false)))
        };
        let down = self.add(name("ffn_down"), vec![tensor("ffn_down", [inner, hidden])?], false);
        Ok(LayerShape { qkv, output, gate_up, down })
    }

    fn plan(
        &self,
        config: &CausalConfig,
        strides: &Strides,
        options: &LoadOptions,
        rows: usize,
        logit_rows: usize,
    ) -> MemoryPlan {
        let context = options.context;
        let norms = if config.branch_norms { 4 } else { 2 } * strides.hidden
            + if config.head_norms { 2 * round_up(config.head_size, STRIDE_MULTIPLE) } else { 0 };
        let tables = if config.sliding.is_some() { 2 } else { 1 } * context * config.rotated * 4;
        MemoryPlan {
            weights: self.blueprints.iter().map(Blueprint::bytes).sum::<usize>()
                + (norms * config.layers + strides.hidden) * 4,
            kv_cache: config.layers * Cache::bytes(options.cache, config.kv_heads, config.head_size, context),
            scratch: Scratch::bytes(strides, rows, logit_rows).iter().sum::<usize>() + tables + 64,
        }
    }
}

impl Scratch {
    /// Bytes of each buffer, in the order of the fields, both residual streams first.
    fn bytes(strides: &Strides, rows: usize, logit_rows: usize) -> [usize; 10] {
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

    fn new(device: &Device, strides: &Strides, rows: usize, logit_rows: usize) -> Result<Self, ModelError> {
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

/// Makes layers out of matrices and the file's vectors.
struct Loader<'a> {
    device: &'a Device,
    gguf: &'a Gguf,
    config: &'a CausalConfig,
    options: &'a LoadOptions,
}

impl Loader<'_> {
    fn layer(
        &self,
        index: usize,
        shape: &LayerShape,
        matrices: &[Matrix],
        angles: &Buffer,
    ) -> Result<Layer, ModelError> {
        let config = self.config;
        let vector = |part: &str, n| self.vector(&format!("blk.{index}.{part}.weight"), n);
        let pair = |wanted: bool, first: &str, second: &str, n| -> Result<_, ModelError> {
            Ok(if wanted { Some((vector(first, n)?, vector(second, n)?)) } else { None })
        };
        Ok(Layer {
            qkv: shape.qkv.iter().map(|&(matrix, at)| (matrices[matrix].clone(), at)).collect(),
            output: matrices[shape.output].clone(),
            gate_up: match shape.gate_up {
                (both, None) => GateUp::Joined(matrices[both].clone()),
                (gate, Some(up)) => GateUp::Apart(matrices[gate].clone(), matrices[up].clone()),
            },
            down: matrices[shape.down].clone(),
            attention_norm: vector("attn_norm", config.hidden)?,
            feed_forward_norm: vector("ffn_norm", config.hidden)?,
            branch_norms: pair(config.branch_norms, "post_attention_norm", "post_ffw_norm", config.hidden)?,
            head_norms: pair(config.head_norms, "attn_q_norm", "attn_k_norm", config.head_size)?,
            window: config.layer(index).0,
            scale: config.attention_scale,
            angles: angles.clone(),
            cache: Cache::new(
                self.device,
                self.options.cache,
                config.kv_heads,
                config.head_size,
                self.options.context,
            )?,
        })
    }

    /// A tensor of `n` values as f32, zero-padded to the row stride.
    fn vector(&self, name: &str, n: usize) -> Result<Buffer, ModelError> {
        let values = self.values(name, n)?;
        let mut padded = vec![0f32; round_up(n, STRIDE_MULTIPLE)];
        padded[..n].copy_from_slice(&values);
        let buffer = self.device.alloc(Purpose::Weights, padded.len() * 4)?;
        self.device.write(&buffer, 0, bytemuck::cast_slice(&padded))?;
        Ok(buffer)
    }

    fn values(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.gguf.require_tensor(name, &[n as u64])?;
        let mut values = vec![0f32; n];
        dequantize(tensor.ty, self.gguf.bytes(tensor), &mut values)?;
        Ok(values)
    }

    /// Cosine and sine of every position's angles, `[position][half rotated][2]`. Angles are products in f32 of
    /// position and frequency, as in the reference implementations.
    fn angles(&self, rope: &Rope) -> Result<Buffer, ModelError> {
        let config = self.config;
        let half = config.rotated / 2;
        // Llama 3's slower low frequencies, as divisors; only layers that see everything have them.
        let divisors = match self.gguf.tensor("rope_freqs.weight") {
            Some(_) if *rope == config.rope => self.values("rope_freqs.weight", half)?,
            _ => vec![1.0; half],
        };
        let frequencies: Vec<f32> = (0..half)
            .zip(&divisors)
            .map(|(i, divisor)| {
                let exponent = 2.0 * i as f32 / config.rotated as f32;
                1.0 / rope.base.powf(exponent) / (divisor * rope.linear_factor)
            })
            .collect();
        let table: Vec<f32> = (0..self.options.context)
            .flat_map(|position| {
                frequencies.iter().flat_map(move |frequency| {
                    let angle = f64::from(position as f32 * frequency);
                    [angle.cos() as f32, angle.sin() as f32]
                })
            })
            .collect();
        let buffer = self.device.alloc(Purpose::Scratch, table.len().max(1) * 4)?;
        self.device.write(&buffer, 0, bytemuck::cast_slice(&table))?;
        Ok(buffer)
    }
}
