//! `axed plan`

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use axe::device::DeviceInfo;
use axe::engine::ModelKind;
use axe::load::Plan;
use clap::Args;
use serde_json::{Value, json};

/// Say what would be chosen for a model on this machine, and why, without loading it.
///
/// Context, rows of a pass and kernels are chosen from the device, its memory and the model where the configuration leaves
/// them open. Memory is what `axed serve` and `axed run` would allocate with the same settings, to the byte. A model that
/// does not fit is an error that says what would.
#[derive(Debug, Args)]
pub struct Options {
    /// The checkpoint: a GGUF file, or the directory of a DiffusionGemma.
    #[arg(short, long, value_name = "PATH", env = "AXE_MODEL")]
    model: PathBuf,
    /// Positions of the cache, prompt and answer together [default: chosen].
    #[arg(short, long, visible_alias = "context-length", value_name = "TOKENS")]
    context: Option<String>,
    /// Rows of a pass that may commit tokens, as for `axed run`: auto, or an integer from 1 to 16.
    #[arg(short, long, value_name = "B", value_parser = super::block_size)]
    block_size: Option<String>,
    /// Sort of device: auto, cpu, gpu or accelerator.
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Configuration file [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Opens the device, reads the checkpoint's headers, and prints.
pub fn run(options: &Options) -> Result<()> {
    let config = super::configured(
        options.config.as_deref(),
        [
            ("--model", "model.path", Some(options.model.to_string_lossy().into_owned())),
            ("--context", "model.context_length", options.context.clone()),
            ("--block-size", "decode.block_size", options.block_size.clone()),
            ("--device", "device.kind", options.device.clone()),
        ],
    )?;
    axe::device::runtime::locate(config.device.threads)?;
    let device = axe::load::open_device(&config.device)?;
    let plan = axe::load::plan(&config, &options.model, &device).map_err(anyhow::Error::from_boxed)?;
    if options.block_size.is_some() && plan.kind != ModelKind::Causal {
        return Err(super::meaningless("--block-size", &options.model).into());
    }
    super::to_stdout(|out| {
        if options.json {
            writeln!(out, "{}", object(options, device.info(), &plan))?;
        } else {
            lines(out, options, device.info(), &plan)?;
        }
        Ok(())
    })
}

fn object(options: &Options, info: &DeviceInfo, plan: &Plan) -> Value {
    let (shape, memory) = (plan.choice.shape, plan.choice.memory);
    json!({
        "model": {
            "path": options.model,
            "kind": plan.kind.name(),
            "architecture": plan.architecture,
            "quantisation": plan.quantisation,
            "trained_context": plan.trained,
        },
        "device": {
            "name": info.name,
            "kind": info.kind,
            "platform": info.platform,
            "budget_bytes": plan.device.budget,
            "available_bytes": plan.device.available,
        },
        "context_length": shape.context,
        "prefill_chunk": shape.rows,
        "memory": {
            "weights_bytes": memory.weights,
            "kv_cache_bytes": memory.kv_cache,
            "scratch_bytes": memory.scratch,
            "total_bytes": memory.weights + memory.kv_cache + memory.scratch,
        },
        "weights_bytes_a_token": plan.weights_read,
        "reasons": plan.choice.reasons,
        "warnings": plan.choice.warnings,
    })
}

fn lines(out: &mut impl Write, options: &Options, info: &DeviceInfo, plan: &Plan) -> io::Result<()> {
    let kind = match plan.kind {
        ModelKind::Causal => "causal".to_owned(),
        ModelKind::BlockDiffusion { canvas, .. } => format!("denoises canvases of {canvas}"),
    };
    let (path, memory) = (options.model.display(), plan.choice.memory);
    writeln!(
        out,
        "model      {path}: {}, {}, {kind}, trained for {} tokens",
        plan.architecture, plan.quantisation, plan.trained
    )?;
    write!(out, "device     {info}: {} MiB may be allocated", plan.device.budget >> 20)?;
    if let Some(available) = plan.device.available {
        write!(out, ", {} MiB are free now", available >> 20)?;
    }
    writeln!(out)?;
    for reason in &plan.choice.reasons {
        writeln!(out, "{:<10} {}: {}", reason.what, reason.value, reason.why)?;
    }
    let total = memory.weights + memory.kv_cache + memory.scratch;
    writeln!(
        out,
        "memory     {}: weights {}, cache {}, scratch {}",
        mib(total),
        mib(memory.weights),
        mib(memory.kv_cache),
        mib(memory.scratch)
    )?;
    if let Some(read) = plan.weights_read {
        writeln!(
            out,
            "a token    reads {} of weights, and of the cache what it holds of the tokens before",
            mib(read as usize)
        )?;
    }
    plan.choice.warnings.iter().try_for_each(|warning| writeln!(out, "warning    {warning}"))
}

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
