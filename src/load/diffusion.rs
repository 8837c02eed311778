//! DiffusionGemma, from a GGUF file or a Hugging Face directory.

use std::path::Path;

use super::{Facts, Load, check_vocabulary, context, open_device, text};
use crate::config::Config;
use crate::decode::diffusion::DiffusionOptions as Denoising;
use crate::decode::{BackendError, DiffusionBackend};
use crate::engine::{Loaded, ModelKind};
use crate::model::diffusion_gemma::{
    DenseWeights, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, ExpertWeights, GGUF_ARCHITECTURE,
    GenerationConfig,
};

/// Loads the model of `checkpoint`.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub(super) fn load(checkpoint: &DiffusionCheckpoint, load: &Load<'_>) -> Result<Loaded, BackendError> {
    let trained = checkpoint.config()?;
    let mut generation = checkpoint.generation_config()?;
    let opened = load.open(|| text::of_diffusion(load.config, checkpoint, &generation.eos))?;
    check_vocabulary(
        checkpoint.path(),
        opened.tokenizer.vocab_size(),
        trained.vocabulary,
        "the embedding table",
    )?;
    // What ends a reply is what may not begin it.
    generation.eos = opened.tokenizer.eos_ids().to_vec();
    let context = context(load, trained.context);
    let experts = load.config.model.experts;
    let options = DiffusionOptions {
        context,
        rows: load.rows(),
        vocabulary: Some(opened.tokenizer.vocab_size()),
        cache: load.config.device.kv_cache,
        matrix_unit: load.config.device.matrix_unit,
        cache_dir: load.cache_dir(),
        experts,
        dense: load.config.model.dense,
    };
    let model = DiffusionGemma::load(opened.device.clone(), checkpoint, &options, &mut |share| {
        load.preparing(share);
    })?;
    let quantisation = model.formats();
    let kind =
        ModelKind::BlockDiffusion { canvas: trained.canvas, max_steps: generation.max_denoising_steps };
    let choices = Denoising { bar_immediate_end: load.config.denoising.bar_immediate_end };
    let backend =
        DiffusionBackend::new(model, generation, choices).with_vocabulary(opened.tokenizer.vocab_size());
    let facts = Facts {
        architecture: GGUF_ARCHITECTURE,
        quantisation,
        identity: checkpoint.identity(),
        context,
        kind,
    };
    Ok(load.loaded(opened, Box::new(backend), facts))
}

/// Opens a DiffusionGemma for a command, as its file has it: nothing is quantised on the way. `context` are positions of
/// prompt and answer together, `rows` the most tokens encoded in a pass.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub fn open_diffusion(
    config: &Config,
    path: &Path,
    context: Option<usize>,
    rows: Option<usize>,
) -> Result<(DiffusionGemma, GenerationConfig), BackendError> {
    let checkpoint = DiffusionCheckpoint::open(path)?;
    let trained = checkpoint.config()?;
    let options = DiffusionOptions {
        context: context.unwrap_or_else(|| trained.context.min(super::DEFAULT_CONTEXT)),
        rows: rows.unwrap_or(super::DEFAULT_CHUNK),
        vocabulary: None,
        cache: config.device.kv_cache,
        matrix_unit: config.device.matrix_unit,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
        experts: ExpertWeights::AsStored,
        dense: DenseWeights::AsStored,
    };
    let device = open_device(&config.device)?;
    let model = DiffusionGemma::load(device, &checkpoint, &options, &mut |_| {})?;
    Ok((model, checkpoint.generation_config()?))
}
