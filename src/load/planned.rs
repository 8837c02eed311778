//! What would be chosen for a model, told without loading it.

use std::path::Path;

use super::family::KernelFacts;
use super::startup::{Choice, DeviceFacts, Facts, ModelFacts, Wanted};
use super::{Checkpoint, causal, diffusion, text};
use crate::config::Config;
use crate::decode::BackendError;
use crate::device::Device;
use crate::device::telemetry::Sampler;
use crate::engine::ModelKind;
use crate::model::diffusion_gemma::{DiffusionGemma, GGUF_ARCHITECTURE};
use crate::model::{Causal, CausalConfig, FeedForward, Workload};

/// What loading would do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// How the model makes tokens.
    pub kind: ModelKind,
    /// Its family, as the checkpoint names it.
    pub architecture: String,
    /// The type of most of its weights, or the formats there is a choice about.
    pub quantisation: String,
    /// Positions the model was trained for.
    pub trained: usize,
    /// What is chosen, what it takes, and why.
    pub choice: Choice,
    /// Bytes of weights that a pass of one row reads; none where that depends on the row.
    pub weights_read: Option<u64>,
    /// What the choice depended on of the device.
    pub device: DeviceFacts,
    /// What passes have to do.
    pub workload: Workload,
}

/// What the configuration, the device and the checkpoint lead to. Reads headers, and a few small tensors at most.
///
/// # Errors
/// A checkpoint that is broken or not supported; too little memory, with what would fit.
pub fn plan(config: &Config, path: &Path, device: &Device) -> Result<Plan, BackendError> {
    plan_with(config, path, device, 0)
}

fn plan_with(config: &Config, path: &Path, device: &Device, freed: u64) -> Result<Plan, BackendError> {
    match Checkpoint::open(path)? {
        Checkpoint::Causal(gguf) => {
            let model = CausalConfig::read(&gguf)?;
            let mut choice = causal::choose(&gguf, config, device, freed)?;
            warn_of_text(&mut choice, text::of_gguf(config, &gguf));
            let dense =
                model.layers.iter().all(|layer| matches!(layer.feed_forward, FeedForward::Dense { .. }));
            Ok(Plan {
                kind: ModelKind::Causal,
                architecture: model.family.architecture.to_owned(),
                quantisation: causal::quantisation(&gguf).to_owned(),
                trained: model.context,
                weights_read: dense.then_some(choice.memory.weights as u64),
                device: device_facts(config, device, freed),
                workload: Causal::workload(&gguf)?,
                choice,
            })
        }
        Checkpoint::Diffusion(checkpoint) => {
            let model = checkpoint.config()?;
            let mut choice = diffusion::choose(&checkpoint, config, device, freed)?;
            let generation = checkpoint.generation_config()?;
            warn_of_text(&mut choice, text::of_diffusion(config, &checkpoint, &generation.eos));
            let max_steps = generation.max_denoising_steps;
            let kinds = (config.model.experts, config.model.dense);
            Ok(Plan {
                kind: ModelKind::BlockDiffusion { canvas: model.canvas, max_steps },
                architecture: GGUF_ARCHITECTURE.to_owned(),
                quantisation: DiffusionGemma::planned_formats(&checkpoint, kinds)?,
                trained: model.context,
                choice,
                weights_read: None,
                device: device_facts(config, device, freed),
                workload: DiffusionGemma::workload(&checkpoint, kinds)?,
            })
        }
    }
}

/// Memory and passes can be told of a model whose text cannot be read or written.
fn warn_of_text(choice: &mut Choice, text: Result<text::TextSide, BackendError>) {
    if let Err(error) = text {
        let refused = "`axed serve` and `axed run` refuse this model";
        choice.warnings.push(format!("{refused}: its vocabulary or chat template cannot be used: {error}"));
    }
}

/// Whether the model of `path` has room on `device` beside one that takes `held` bytes, with the choices that would be
/// made for it alone.
///
/// # Errors
/// As for [`plan`].
pub(super) fn fits_beside(
    config: &Config,
    path: &Path,
    device: &Device,
    held: u64,
) -> Result<bool, BackendError> {
    let memory = plan_with(config, path, device, held)?.choice.memory;
    let needed = (memory.weights + memory.kv_cache + memory.scratch) as u64;
    let facts = device_facts(config, device, 0);
    Ok(needed.saturating_add(held) <= facts.budget && facts.available.is_none_or(|free| needed <= free))
}

/// The facts of a choice; `freed` are bytes that will be free when it counts.
pub(super) fn facts(config: &Config, device: &Device, model: ModelFacts, freed: u64) -> Facts {
    Facts {
        device: device_facts(config, device, freed),
        model,
        kernels: KernelFacts::new(&config.device, device.info()),
        wanted: Wanted {
            context: config.model.context_length,
            rows: config.device.prefill_chunk,
            blocks: config.decode.size,
        },
    }
}

fn device_facts(config: &Config, device: &Device, freed: u64) -> DeviceFacts {
    let info = device.info();
    let free = || Some(Sampler::new().sample().host.memory_available_bytes?.saturating_add(freed));
    DeviceFacts {
        kind: info.kind,
        unified: info.unified_memory,
        budget: device.memory().budget,
        // Who set a limit has thought of what else there is.
        available: if info.unified_memory && config.device.memory_limit.is_none() { free() } else { None },
    }
}
