//! From a checkpoint on disk to a model on the device, ready for the engine. Beside the daemon this is the one place
//! that knows all rooms: it tells the operator's board what it found.

mod vocabulary;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use axectl::protocol;

use crate::admin::Board;
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quant::GgmlType;
use crate::config::{Config, DeviceConfig, DeviceKind};
use crate::decode::{Backend, BackendError, CausalBackend, Generation, Memory, Sampling};
use crate::device::{self, Device, DeviceOptions, DeviceSelector};
use crate::engine::{LoadProgress, Loaded, Model, ModelKind};
use crate::model::{Causal, CausalConfig, LoadOptions};
use crate::text::{ChatTemplate, Tokenizer};

pub use vocabulary::{PublishedText, published_text, vocabulary};

/// Context of a request when the configuration names none and the model would allow more.
const DEFAULT_CONTEXT: usize = 8192;
/// Prompt tokens in one pass when the configuration does not say: enough rows to make a pass compute-bound, few enough
/// to cancel soon.
const DEFAULT_CHUNK: usize = 256;

/// The text side of a checkpoint: its tokenizer and its chat template, which the configuration may replace.
///
/// # Errors
/// Vocabularies and templates that are broken or not supported, a template file that cannot be read.
pub fn text_side(config: &Config, gguf: &Gguf) -> Result<(Tokenizer, Option<ChatTemplate>), BackendError> {
    let template = gguf.metadata().str("tokenizer.chat_template")?.map(str::to_owned);
    text_of(config, PublishedText { vocabulary: vocabulary(gguf)?, template })
}

/// The text side of what a checkpoint of any format says.
///
/// # Errors
/// As [`text_side`].
pub fn text_of(
    config: &Config,
    text: PublishedText,
) -> Result<(Tokenizer, Option<ChatTemplate>), BackendError> {
    let tokenizer = Tokenizer::new(text.vocabulary)?;
    let source = match &config.model.chat_template {
        Some(path) => Some(std::fs::read_to_string(path).map_err(|error| {
            format!("cannot read the chat template {} (`model.chat_template`): {error}", path.display())
        })?),
        None => text.template,
    };
    let template = source.map(|source| ChatTemplate::new(&source, &tokenizer)).transpose()?;
    Ok((tokenizer, template))
}

/// Which device the configuration means.
pub fn selector(config: &DeviceConfig) -> DeviceSelector {
    DeviceSelector {
        platform: config.platform.clone(),
        kind: match config.kind {
            DeviceKind::Auto => None,
            DeviceKind::Cpu => Some(device::DeviceKind::Cpu),
            DeviceKind::Gpu => Some(device::DeviceKind::Gpu),
            DeviceKind::Accelerator => Some(device::DeviceKind::Accelerator),
        },
        name: config.name.clone(),
        pci: config.pci.clone(),
    }
}

/// Opens the device that the configuration means.
///
/// # Errors
/// No device, or none that fits.
pub fn open_device(config: &DeviceConfig) -> Result<Device, device::DeviceError> {
    Device::open(
        &selector(config),
        &DeviceOptions {
            cache_dir: Some(config.cache_dir.clone()),
            profiling: config.profiling,
            memory_limit: config.memory_limit,
        },
    )
}

/// Loads the model for serving; runs on the engine's thread.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub fn load(
    config: &Config,
    path: &Path,
    progress: &LoadProgress,
    board: &Arc<Board>,
) -> Result<Loaded, BackendError> {
    progress.report(0.0, "reading the checkpoint");
    let gguf = Arc::new(Gguf::open(path)?);
    let trained = CausalConfig::read(&gguf)?;
    // The tokenizer takes host time only: a runtime can be loaded meanwhile. What is wrong with the text must show
    // before anything is repacked.
    let (text, device) = std::thread::scope(|scope| {
        let text = scope.spawn(|| text_side(config, &gguf));
        let device = open_device(&config.device);
        (text.join(), device)
    });
    let (tokenizer, template) = match text {
        Ok(text) => text?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    check_vocabulary(path, tokenizer.vocab_size(), trained.vocabulary)?;
    let device = device?;
    let info = device.info().clone();
    tracing::info!(device = %info, driver = info.driver_version, "opened");
    board.pin_device(protocol::Device {
        name: info.name.clone(),
        kind: info.kind.to_string(),
        platform: format!("{} ({})", info.platform, info.platform_version),
        driver: info.driver_version.clone(),
        pci: info.pci.clone(),
        compute_units: info.compute_units,
        memory_bytes: info.global_mem,
    });
    let context = match config.model.context_length {
        Some(wanted) if wanted > trained.context => {
            board.warn(format!(
                "model.context_length is {wanted}, the model was trained for {}: using that",
                trained.context
            ));
            trained.context
        }
        Some(wanted) => wanted,
        None => trained.context.min(DEFAULT_CONTEXT),
    };
    let options = LoadOptions {
        context,
        rows: config.device.prefill_chunk.unwrap_or(DEFAULT_CHUNK),
        logit_rows: 1,
        cache: config.device.kv_cache,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
    };
    let model = Causal::load(device, Arc::clone(&gguf), &options, &mut |share| {
        progress.report(f64::from(share), "preparing kernels and weights");
    })?;
    let backend = CausalBackend::new(model).with_vocabulary(tokenizer.vocab_size());
    let identity = gguf.identity().to_string();
    board.pin_model(protocol::Model {
        name: config.model.name(),
        path: path.display().to_string(),
        architecture: trained.family.architecture().to_owned(),
        quantisation: quantisation(&gguf).to_owned(),
        identity: identity.clone(),
        context_length: context,
    });
    Ok(Loaded {
        backend: Box::new(Observed { backend, board: Arc::clone(board) }),
        model: Model {
            name: config.model.name(),
            identity,
            device: format!("{} ({}, {} compute units)", info.name, info.platform, info.compute_units),
            kind: ModelKind::Causal,
            context_length: context,
            tokenizer,
            template,
        },
    })
}

/// A tokenizer must not make ids that the model has no row for. Rows without a token are padding.
fn check_vocabulary(path: &Path, tokens: usize, rows: usize) -> Result<(), BackendError> {
    if tokens > rows {
        return Err(format!(
            "{}: the tokenizer has {tokens} tokens (tokenizer.ggml.tokens), the model has embeddings for {rows} \
             (token_embd.weight): they belong to different models",
            path.display()
        )
        .into());
    }
    if tokens < rows {
        tracing::info!(tokens, rows, "rows past the tokenizer's last token are never generated");
    }
    Ok(())
}

/// The type of most weights.
fn quantisation(gguf: &Gguf) -> &'static str {
    let mut values: HashMap<GgmlType, u64> = HashMap::new();
    for tensor in gguf.tensors().iter().filter(|tensor| tensor.name.starts_with("blk.")) {
        *values.entry(tensor.ty).or_default() += tensor.values();
    }
    values.into_iter().max_by_key(|&(ty, count)| (count, ty.id())).map_or("unknown", |(ty, _)| ty.name())
}

/// The backend, with the kernels' times shown on the operator's board.
struct Observed {
    backend: CausalBackend,
    board: Arc<Board>,
}

impl Backend for Observed {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.backend.start(prompt, sampling)
    }

    fn context_length(&self) -> usize {
        self.backend.context_length()
    }

    /// The engine asks after every job: the moment to show what kernels took, too.
    fn memory(&self) -> Memory {
        let device = self.backend.model().device();
        match device.profile() {
            Ok(times) => self.board.pin_profile(protocol::Profile {
                enabled: device.is_profiling(),
                kernels: times
                    .into_iter()
                    .map(|time| protocol::KernelTime {
                        kernel: format!("{}: {}", time.program, time.kernel),
                        launches: time.launches,
                        total_ns: time.total_ns,
                    })
                    .collect(),
            }),
            Err(error) => tracing::debug!(%error, "no kernel times"),
        }
        self.backend.memory()
    }
}
