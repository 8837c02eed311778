//! Causal models, from a GGUF file.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Opened, check_vocabulary, context, text};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quant::GgmlType;
use crate::decode::{BackendError, CausalBackend};
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
    let context = context(load, trained.context);
    let options = LoadOptions {
        context,
        rows: load.rows(),
        logit_rows: 1,
        cache: load.config.device.kv_cache,
        cache_dir: load.cache_dir(),
    };
    let model = Causal::load(device.clone(), Arc::clone(gguf), &options, &mut |share| load.preparing(share))?;
    let backend = CausalBackend::new(model).with_vocabulary(tokenizer.vocab_size());
    Ok(load.loaded(
        Opened { device, tokenizer, template },
        Box::new(backend),
        super::Facts {
            architecture: trained.family.architecture,
            quantisation: quantisation(gguf).to_owned(),
            identity: gguf.identity().to_string(),
            choices: String::new(),
            context,
            kind: ModelKind::Causal,
        },
    ))
}

/// The type of most weights.
fn quantisation(gguf: &Gguf) -> &'static str {
    let mut values: HashMap<GgmlType, u64> = HashMap::new();
    for tensor in gguf.tensors().iter().filter(|tensor| tensor.name.starts_with("blk.")) {
        *values.entry(tensor.ty).or_default() += tensor.values();
    }
    values.into_iter().max_by_key(|&(ty, count)| (count, ty.id())).map_or("unknown", |(ty, _)| ty.name())
}
