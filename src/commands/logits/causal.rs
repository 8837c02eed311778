//! Logits of every position of a text.

use std::sync::Arc;

use anyhow::Result;
use axe::checkpoint::gguf::Gguf;
use axe::config::Config;
use axe::load::KernelFacts;
use axe::model::{Causal, CausalConfig, LoadOptions, Logits};
use safetensors::tensor::{Dtype, TensorView};

use super::super::check_ids;
use super::{Options, check_length, id_bytes};

/// Tokens in a pass when `--block` does not say: more only cost memory for logits.
const DEFAULT_BLOCK: usize = 64;

pub(super) fn run(options: &Options, config: &Config, gguf: Arc<Gguf>) -> Result<()> {
    let ids = options.lists()?.concat();
    let trained = CausalConfig::read(&gguf)?;
    check_ids(&ids, trained.vocabulary)?;
    check_length(ids.len(), trained.context)?;
    let block = options.block.map_or(DEFAULT_BLOCK, |block| block as usize).min(ids.len());
    let device = axe::load::open_device(&config.device)?;
    let load = LoadOptions {
        context: ids.len(),
        rows: block,
        logit_rows: block,
        cache: options.kv_cache,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
        join: config.device.joins(),
        products: KernelFacts::new(&config.device, device.info()).products(false).0,
    };
    let mut model = Causal::load(device, gguf, &load, &mut |_| {})?;
    let vocabulary = model.config().vocabulary;
    let mut logits: Vec<u8> = Vec::with_capacity(ids.len() * vocabulary * 4);
    for (part, tokens) in ids.chunks(block).enumerate() {
        model.forward(tokens, part * block, Logits::All)?;
        for row in 0..tokens.len() {
            model.with_logits(row, |row| {
                row.iter().for_each(|logit| logits.extend_from_slice(&logit.to_le_bytes()));
            })?;
        }
    }
    let id_bytes = id_bytes(&ids);
    options.write(vec![
        ("ids".to_owned(), TensorView::new(Dtype::I32, vec![ids.len()], &id_bytes)?),
        ("logits".to_owned(), TensorView::new(Dtype::F32, vec![ids.len(), vocabulary], &logits)?),
    ])
}
