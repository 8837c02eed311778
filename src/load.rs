//! From a checkpoint on disk to a model on the device, ready for the engine. Beside the daemon this is the one place
//! that knows all rooms: it tells the operator's board what it found.

mod causal;
mod checkpoint;
mod diffusion;
mod family;
mod observed;
mod pace;
mod planned;
mod predicted;
mod profiled;
mod published;
mod stamp;
pub mod startup;
pub mod text;
mod vocabulary;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use axectl::protocol;

use crate::admin::Board;
use crate::config::{Config, DeviceConfig, DeviceKind};
use crate::decode::{Backend, BackendError, Memory};
use crate::device::{self, Device, DeviceOptions, DeviceSelector};
use crate::engine::{Constraints, LoadProgress, Loaded, Loader, Model, ModelKind};
use crate::ops::Products;
use crate::text::{ChatTemplate, Tokenizer};
use observed::{Observed, Pins};
use pace::Pace;
use startup::{Choice, Reason};

pub use checkpoint::Checkpoint;
pub use diffusion::{bar_what_fits, open_diffusion};
pub use family::KernelFacts;
pub use planned::{Plan, plan};
pub use predicted::{PredictedPart, PredictedPass, predicted_passes};
pub use published::{PublishedText, published_text};
pub use stamp::Stamp;
pub use startup::{DEFAULT_CHUNK, DEFAULT_CONTEXT};
pub use vocabulary::vocabulary;

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

/// Loads the model that a configuration names, as often as the engine needs it.
pub struct ModelLoader {
    config: Config,
    path: PathBuf,
    board: Arc<Board>,
}

impl ModelLoader {
    /// Of the model of `config`, which must name one that is there; what is found out goes to `board`.
    ///
    /// # Errors
    /// No model is named, or it cannot be opened.
    pub fn new(config: Config, board: Arc<Board>) -> Result<Self, BackendError> {
        let path = Self::path(&config)?;
        Ok(Self { config, path, board })
    }

    /// The model that `config` names. Loading happens on another thread and later; what is missing is known at once.
    ///
    /// # Errors
    /// As for [`ModelLoader::new`].
    pub fn path(config: &Config) -> Result<PathBuf, BackendError> {
        let path = config.model.path.clone();
        let path =
            path.ok_or("no model to serve: name one with --model, AXE_MODEL or `model.path` in daemon.toml")?;
        std::fs::File::open(&path)
            .map_err(|error| format!("cannot open the model {}: {error}", path.display()))?;
        Ok(path)
    }
}

impl Loader for ModelLoader {
    fn load(&mut self, progress: &LoadProgress) -> Result<Loaded, BackendError> {
        load(&self.config, &self.path, progress, &self.board)
    }

    fn fits_beside(&mut self, held: Memory) -> Result<bool, BackendError> {
        let device = open_device(&self.config.device)?;
        let held = held.weights + held.kv_cache + held.scratch;
        planned::fits_beside(&self.config, &self.path, &device, held)
    }
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
    let load = Load {
        config,
        path,
        progress,
        board,
        warnings: RefCell::default(),
        pace: RefCell::new(Pace::new(Instant::now())),
    };
    match Checkpoint::open(path)? {
        Checkpoint::Causal(gguf) => causal::load(&gguf, &load),
        Checkpoint::Diffusion(checkpoint) => diffusion::load(&checkpoint, &load),
    }
}

/// What loading has to do with, whatever the model.
struct Load<'a> {
    config: &'a Config,
    path: &'a Path,
    progress: &'a LoadProgress,
    board: &'a Arc<Board>,
    /// What the operator should know of this model.
    warnings: RefCell<Vec<String>>,
    /// When the log is told how far it is.
    pace: RefCell<Pace>,
}

/// What is there before weights are.
struct Opened {
    device: Device,
    pinned: protocol::Device,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

/// What is told of a model that is loaded.
struct Facts {
    architecture: &'static str,
    quantisation: String,
    identity: String,
    /// What was chosen for it and may change replies, besides the cache's type.
    choices: String,
    context: usize,
    kind: ModelKind,
    products: Products,
}

impl Load<'_> {
    /// Opens the device and the text side. The tokenizer takes host time only: a runtime can be loaded meanwhile. What is
    /// wrong with the text must show before anything is repacked.
    fn open(
        &self,
        text: impl FnOnce() -> Result<text::TextSide, BackendError> + Send,
    ) -> Result<Opened, BackendError> {
        let (text, device) = std::thread::scope(|scope| {
            let text = scope.spawn(text);
            let device = open_device(&self.config.device);
            (text.join(), device)
        });
        let (tokenizer, template) = match text {
            Ok(text) => text?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let device = device?;
        let info = device.info();
        tracing::info!(device = %info, driver = info.driver_version, "opened");
        let pinned = protocol::Device {
            name: info.name.clone(),
            kind: info.kind.to_string(),
            platform: format!("{} ({})", info.platform, info.platform_version),
            driver: info.driver_version.clone(),
            pci: info.pci.clone(),
            compute_units: info.compute_units,
            memory_bytes: info.global_mem,
        };
        // Of the first model the device is shown while it loads, of others when they serve.
        self.board.pin_first_device(&pinned);
        Ok(Opened { device, pinned, tokenizer, template })
    }

    /// Tells what was chosen.
    fn chosen(&self, choice: &Choice) {
        for Reason { what, value, why } in &choice.reasons {
            tracing::info!("chosen {what}: {value}: {why}");
        }
        choice.warnings.iter().for_each(|warning| self.warn(warning.clone()));
    }

    /// Tells of a matrix unit that is not used although it could be.
    fn fell_back(&self, wanted: Products, failed: bool) {
        let what = match wanted {
            Products::Xmx => "the xmx family's kernels",
            Products::MatrixUnit | Products::Integer | Products::Vector => "the processor's matrix unit",
        };
        if failed {
            self.warn(format!("{what} failed the self-test and vectors are used (see the log): slower"));
        }
    }

    /// Warns the operator of something about this model.
    fn warn(&self, warning: String) {
        tracing::warn!("{warning}");
        self.warnings.borrow_mut().push(warning);
    }

    fn preparing(&self, share: f32) {
        const WHAT: &str = "preparing kernels and weights";
        if self.pace.borrow_mut().is_due(Instant::now()) {
            tracing::info!("{WHAT}: {:.0} %", 100.0 * share);
        }
        self.progress.report(f64::from(share), WHAT);
    }

    /// Hands the model over; the board shows it once it serves.
    fn loaded(&self, opened: Opened, backend: Box<dyn Backend>, facts: Facts) -> Loaded {
        let Opened { device, pinned, tokenizer, template } = opened;
        let name = self.config.model.name();
        let shown = protocol::Model {
            name: name.clone(),
            path: self.path.display().to_string(),
            architecture: facts.architecture.to_owned(),
            quantisation: facts.quantisation,
            identity: facts.identity.clone(),
            context_length: facts.context,
        };
        let kernels = kernels(&device, facts.products);
        let pins = Pins { device: pinned, model: shown, kernels, warnings: self.warnings.take() };
        let info = device.info();
        let words = format!("{} ({}, {} compute units)", info.name, info.platform, info.compute_units);
        Loaded {
            backend: Box::new(Observed::new(backend, device, Arc::clone(self.board), pins)),
            model: Model {
                name,
                identity: format!("{} {} {}", facts.identity, facts.choices, self.config.device.kv_cache),
                device: words,
                kind: facts.kind,
                context_length: facts.context,
                tokenizer: tokenizer.into(),
                template,
                constraints: Constraints::default(),
            },
        }
    }
}

/// What operators are told of the kernels.
fn kernels(device: &Device, products: Products) -> protocol::Kernels {
    let test = |check: device::Check| protocol::SelfTest {
        kernel: check.kernel,
        passed: check.passed,
        // A number that is none has no share, and JSON no word for it.
        worst: if check.worst.is_finite() { check.worst } else { f64::MAX },
    };
    protocol::Kernels {
        family: if products == Products::Xmx { "xmx" } else { "vector" }.to_owned(),
        products: family::products_name(products).to_owned(),
        self_tests: device.checks().into_iter().map(test).collect(),
    }
}

/// Where repacked weights are kept.
fn cache_dir(config: &DeviceConfig) -> Option<PathBuf> {
    config.zero_copy.then(|| config.cache_dir.clone())
}

/// A tokenizer must not make ids that the model has no row for. Rows without a token are padding.
fn check_vocabulary(path: &Path, tokens: usize, rows: usize, table: &str) -> Result<(), BackendError> {
    if tokens > rows {
        return Err(format!(
            "{}: the tokenizer has {tokens} tokens, the model has embeddings for {rows} ({table}): they belong to \
             different models; use the tokenizer and weights of one checkpoint",
            path.display()
        )
        .into());
    }
    if tokens < rows {
        tracing::info!(tokens, rows, "rows past the tokenizer's last token are never generated");
    }
    Ok(())
}
