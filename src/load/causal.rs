//! Causal models, from a GGUF file.

use std::collections::HashMap;
use std::sync::Arc;

use super::planned::facts;
use super::startup::{self, Choice, ModelFacts, Shape};
use super::{Opened, cache_dir, check_vocabulary, text};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quant::GgmlType;
use crate::config::Config;
use crate::decode::block::MOST_ROWS;
use crate::decode::{BackendError, BlockOptions, CausalBackend};
use crate::device::Device;
use crate::engine::{Loaded, ModelKind};
use crate::model::{Causal, CausalConfig, LoadOptions};

/// Loads the model of `gguf`.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub(super) fn load(gguf: &Arc<Gguf>, load: &super::Load<'_>) -> Result<Loaded, BackendError> {
    let trained = CausalConfig::read(gguf)?;
    let Opened { device, tokenizer, template } = load.open(|| text::of_gguf(load.config, gguf))?;
    check_vocabulary(gguf.path(), tokenizer.vocab_size(), trained.vocabulary, "token_embd.weight")?;
    let choice = choose(gguf, load.config, &device)?;
    load.chosen(&choice);
    let options = options(load.config, choice.shape);
    let model = Causal::load(device.clone(), Arc::clone(gguf), &options, &mut |share| load.preparing(share))?;
    let backend = CausalBackend::new(model, BlockOptions::default()).with_vocabulary(tokenizer.vocab_size());
    Ok(load.loaded(
        Opened { device, tokenizer, template },
        Box::new(backend),
        super::Facts {
            architecture: trained.family.architecture,
            quantisation: quantisation(gguf).to_owned(),
            identity: gguf.identity().to_string(),
            choices: String::new(),
            context: options.context,
            kind: ModelKind::Causal,
        },
    ))
}

/// What is chosen for the model of `gguf` on `device`.
///
/// # Errors
/// A file that is broken or not supported, too little memory.
pub(super) fn choose(gguf: &Gguf, config: &Config, device: &Device) -> Result<Choice, BackendError> {
    let trained = CausalConfig::read(gguf)?.context;
    let facts = facts(config, device, ModelFacts { trained, canvas: None });
    startup::choose(&facts, |shape| Ok(Causal::plan(gguf, &options(config, shape))?))
}

fn options(config: &Config, shape: Shape) -> LoadOptions {
    LoadOptions {
        context: shape.context,
        rows: shape.rows,
        logit_rows: MOST_ROWS,
        cache: config.device.kv_cache,
        cache_dir: cache_dir(&config.device),
    }
}

/// The type of most weights.
pub(super) fn quantisation(gguf: &Gguf) -> &'static str {
    let mut values: HashMap<GgmlType, u64> = HashMap::new();
    for tensor in gguf.tensors().iter().filter(|tensor| tensor.name.starts_with("blk.")) {
        *values.entry(tensor.ty).or_default() += tensor.values();
    }
    values.into_iter().max_by_key(|&(ty, count)| (count, ty.id())).map_or("unknown", |(ty, _)| ty.name())
}
