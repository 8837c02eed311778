//! Causal models, from a GGUF file.

use std::collections::HashMap;
use std::sync::Arc;

use super::family::{KernelFacts, products_name};
use super::planned::facts;
use super::startup::{self, Choice, ModelFacts, Shape};
use super::{cache_dir, check_vocabulary, text};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quant::GgmlType;
use crate::config::Config;
use crate::decode::block::{Costs, MOST_ROWS, Measured};
use crate::decode::{BackendError, BlockSize, CausalBackend};
use crate::device::{Device, DeviceInfo};
use crate::engine::{Loaded, ModelKind};
use crate::model::{Causal, CausalConfig, LoadOptions};

/// Loads the model of `gguf`.
///
/// # Errors
/// A checkpoint that is broken or not supported, no fitting device, too little memory.
pub(super) fn load(gguf: &Arc<Gguf>, load: &super::Load<'_>) -> Result<Loaded, BackendError> {
    let trained = CausalConfig::read(gguf)?;
    let opened = load.open(|| text::of_gguf(load.config, gguf))?;
    check_vocabulary(gguf.path(), opened.tokenizer.vocab_size(), trained.vocabulary, "token_embd.weight")?;
    let choice = choose(gguf, load.config, &opened.device, 0)?;
    load.chosen(&choice);
    let options = options(load.config, choice.shape);
    let mut model =
        Causal::load(opened.device.clone(), Arc::clone(gguf), &options, &mut |share| load.preparing(share))?;
    let products = model.products();
    load.fell_back(choice.shape.products, model.fell_back());
    model.limit_choices(opened.tokenizer.vocab_size());
    if model.joining_failed() {
        load.board.warn(
            "passes as one launch failed their self-test and stay many launches (see the log): slower"
                .to_owned(),
        );
    }
    let blocks = load.config.decode;
    let costs = match blocks.size {
        BlockSize::Auto => costs(load, gguf, &mut model)?,
        BlockSize::Fixed(_) => Costs::default(),
    };
    let backend =
        CausalBackend::new(model, blocks).with_vocabulary(opened.tokenizer.vocab_size()).with_costs(costs);
    Ok(load.loaded(
        opened,
        Box::new(backend),
        super::Facts {
            architecture: trained.family.architecture,
            quantisation: quantisation(gguf).to_owned(),
            identity: gguf.identity().to_string(),
            choices: String::new(),
            context: options.context,
            kind: ModelKind::Causal,
            products,
        },
    ))
}

/// What is chosen for the model of `gguf` on `device` when `freed` more bytes of memory are free.
///
/// # Errors
/// A file that is broken or not supported, too little memory.
pub(super) fn choose(
    gguf: &Gguf,
    config: &Config,
    device: &Device,
    freed: u64,
) -> Result<Choice, BackendError> {
    let trained = CausalConfig::read(gguf)?.context;
    let measured = Measured::kept(&config.device.cache_dir, &cost_key(config, gguf, device.info()));
    let costs = measured.map(|measured| of_model(&measured, gguf)).transpose()?;
    let facts = facts(config, device, ModelFacts { trained, canvas: None, costs }, freed);
    startup::choose(&facts, |shape| Ok(Causal::plan(gguf, &options(config, shape))?))
}

fn options(config: &Config, shape: Shape) -> LoadOptions {
    LoadOptions {
        context: shape.context,
        rows: shape.rows,
        logit_rows: match config.decode.size {
            BlockSize::Auto => MOST_ROWS,
            BlockSize::Fixed(rows) => rows.clamp(1, MOST_ROWS),
        },
        cache: config.device.kv_cache,
        cache_dir: cache_dir(&config.device),
        join: config.device.joins(),
        products: shape.products,
    }
}

/// What passes of the model cost at each width, from the cache folder or by timing some.
fn costs(load: &super::Load<'_>, gguf: &Gguf, model: &mut Causal) -> Result<Costs, BackendError> {
    let key = cost_key(load.config, gguf, model.device().info());
    load.progress.report(1.0, "timing passes");
    of_model(&Measured::once(&load.config.device.cache_dir, &key, model)?, gguf)
}

/// The costs of all widths, from passes of the model that were timed.
fn of_model(measured: &Measured, gguf: &Gguf) -> Result<Costs, BackendError> {
    let workload = Causal::workload(gguf)?;
    Ok(Costs::new(measured, |rows| workload.weight_bytes(rows)))
}

/// What the cost of passes depends on.
fn cost_key(config: &Config, gguf: &Gguf, info: &DeviceInfo) -> String {
    format!(
        "{} {} {} {}, {} of {} compute units, {}, {}, axe {}",
        gguf.identity(),
        config.device.kv_cache,
        info.name,
        info.driver_version,
        config.device.threads.map_or("all".to_owned(), |threads| threads.to_string()),
        info.compute_units,
        if config.device.joins() { "joined" } else { "launches" },
        products_name(KernelFacts::new(&config.device, info).products(false).0),
        env!("CARGO_PKG_VERSION"),
    )
}

/// The type of most weights.
pub(super) fn quantisation(gguf: &Gguf) -> &'static str {
    let mut values: HashMap<GgmlType, u64> = HashMap::new();
    for tensor in gguf.tensors().iter().filter(|tensor| tensor.name.starts_with("blk.")) {
        *values.entry(tensor.ty).or_default() += tensor.values();
    }
    values.into_iter().max_by_key(|&(ty, count)| (count, ty.id())).map_or("unknown", |(ty, _)| ty.name())
}
