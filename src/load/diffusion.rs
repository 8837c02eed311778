//! DiffusionGemma, from a GGUF file or a Hugging Face directory.

use super::family::KernelFacts;
use super::planned::facts;
use super::startup::{self, Choice, ModelFacts, Shape};
use super::{Facts, Load, cache_dir, check_vocabulary, open_device, text};
use crate::config::Config;
use crate::decode::diffusion::DenoisingRules;
use crate::decode::{BackendError, DiffusionBackend};
use crate::device::Device;
use crate::engine::{Loaded, ModelKind};
use crate::model::diffusion_gemma::{
    DenseWeights, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, ExpertWeights, GGUF_ARCHITECTURE,
};
use crate::ops::MOST_BARRED;

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
    if let Some(warning) = bar_what_fits(&mut generation.eos) {
        load.warn(warning);
    }
    let choice = choose(checkpoint, load.config, &opened.device, 0)?;
    load.chosen(&choice);
    let vocabulary = Some(opened.tokenizer.vocab_size());
    let options = DiffusionOptions { vocabulary, ..options(load.config, choice.shape) };
    let model = DiffusionGemma::load(opened.device.clone(), checkpoint, &options, &mut |share| {
        load.preparing(share);
    })?;
    let quantisation = model.formats();
    let bars = load.config.denoising.bar_immediate_end;
    let products = model.products();
    let choices = format!("{quantisation} {products:?} {bars}");
    load.fell_back(choice.shape.products, model.fell_back());
    let kind =
        ModelKind::BlockDiffusion { canvas: trained.canvas, max_steps: generation.max_denoising_steps };
    let rules = DenoisingRules { bar_immediate_end: bars };
    let backend =
        DiffusionBackend::new(model, generation, rules).with_vocabulary(opened.tokenizer.vocab_size());
    let facts = Facts {
        architecture: GGUF_ARCHITECTURE,
        quantisation,
        identity: checkpoint.identity(),
        choices,
        context: options.context,
        kind,
        products,
    };
    Ok(load.loaded(opened, Box::new(backend), facts))
}

/// What is chosen for the model of `checkpoint` on `device` when `freed` more bytes of memory are free.
///
/// # Errors
/// A checkpoint that is broken or not supported, too little memory.
pub(super) fn choose(
    checkpoint: &DiffusionCheckpoint,
    config: &Config,
    device: &Device,
    freed: u64,
) -> Result<Choice, BackendError> {
    let trained = checkpoint.config()?;
    let model = ModelFacts { trained: trained.context, canvas: Some(trained.canvas), costs: None };
    startup::choose(&facts(config, device, model, freed), |shape| {
        Ok(DiffusionGemma::plan(checkpoint, &options(config, shape), shape.products)?)
    })
}

fn options(config: &Config, shape: Shape) -> DiffusionOptions {
    DiffusionOptions {
        context: shape.context,
        rows: shape.rows,
        vocabulary: None,
        cache: config.device.kv_cache,
        products: shape.products,
        cache_dir: cache_dir(&config.device),
        experts: config.model.experts,
        dense: config.model.dense,
    }
}

/// Keeps as many of the tokens that end a reply as kernels can bar from its first position; a warning if there are more.
/// All of them still end one.
pub fn bar_what_fits(ends: &mut Vec<u32>) -> Option<String> {
    let found = ends.len();
    ends.truncate(MOST_BARRED);
    (found > MOST_BARRED).then(|| {
        format!(
            "{found} tokens end a reply (eos_token_id): only the first {MOST_BARRED} of them are kept from being its first"
        )
    })
}

/// Puts a DiffusionGemma on the device for a command, as its file has it: nothing is quantised on the way. `context` are
/// positions of prompt and answer together, `rows` the most tokens encoded in a pass. What the command was given is to be
/// checked before, against the checkpoint's configuration: this takes long.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub fn open_diffusion(
    config: &Config,
    checkpoint: &DiffusionCheckpoint,
    context: usize,
    rows: usize,
) -> Result<DiffusionGemma, BackendError> {
    let device = open_device(&config.device)?;
    let options = DiffusionOptions {
        context,
        rows,
        vocabulary: None,
        cache: config.device.kv_cache,
        products: KernelFacts::new(&config.device, device.info()).products(true).0,
        cache_dir: cache_dir(&config.device),
        experts: ExpertWeights::AsStored,
        dense: DenseWeights::AsStored,
    };
    Ok(DiffusionGemma::load(device, checkpoint, &options, &mut |_| {})?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_ends_are_barred_than_kernels_take() {
        let mut ends: Vec<u32> = (0..64).collect();
        assert_eq!((bar_what_fits(&mut ends), ends.len()), (None, 64));
        ends.push(64);
        let warning = bar_what_fits(&mut ends).unwrap();
        assert!(warning.starts_with("65 tokens") && warning.contains("first 64"), "{warning}");
        assert_eq!(ends, (0..64).collect::<Vec<u32>>());
    }
}
