//! `axed plan`

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use axe::device::DeviceInfo;
use axe::engine::ModelKind;
use axe::load::{Plan, PredictedPart, PredictedPass};
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
    /// Say what a card should take for the model's passes, by the cost model of the kernels that are made for it.
    ///
    /// The floor is what memory and matrix engines could do by the data sheet. Nothing of it has been measured on a card.
    #[arg(long, value_enum, value_name = "CARD")]
    card: Option<Card>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Configuration file [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// A card that there is a cost model of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Card {
    /// Arc Pro B70.
    B70,
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
    let passes = options.card.map(|Card::B70| {
        let shape = plan.choice.shape;
        axe::load::predicted_passes(&plan.workload, shape.context, shape.rows)
    });
    super::to_stdout(|out| {
        if options.json {
            let mut all = object(options, device.info(), &plan);
            if let Some(passes) = &passes {
                all["b70"] = passes.iter().map(pass).collect();
            }
            writeln!(out, "{all}")?;
        } else {
            lines(out, options, device.info(), &plan)?;
            if let Some(passes) = &passes {
                predicted(out, passes)?;
            }
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

fn pass(pass: &PredictedPass) -> Value {
    let part = |part: &PredictedPart| {
        json!({
            "what": part.what,
            "bytes": part.bytes,
            "floor_ms": part.floor * 1e3,
            "one_term_ms": part.predicted[0] * 1e3,
            "two_terms_ms": part.predicted[1] * 1e3,
            "kernels": part.kernels,
        })
    };
    let [one, two] = pass.predicted();
    json!({
        "pass": pass.what,
        "rows": pass.rows,
        "context": pass.context,
        "floor_ms": pass.floor() * 1e3,
        "one_term_ms": one * 1e3,
        "two_terms_ms": two * 1e3,
        "parts": pass.parts.iter().map(part).collect::<Vec<_>>(),
    })
}

/// Milliseconds of each pass and of its parts: by the data sheet, and predicted with activations in one term and in two.
fn predicted(out: &mut impl Write, passes: &[PredictedPass]) -> io::Result<()> {
    let table = |out: &mut dyn Write, what: &str, bytes: u64, floor: f64, [one, two]: [f64; 2], note| {
        writeln!(
            out,
            "  {what:<42}{:>10}{:>10.3}{:>10.3}{:>6.2}{:>10.3}{:>6.2}{note}",
            mib(bytes as usize),
            floor * 1e3,
            one * 1e3,
            one / floor,
            two * 1e3,
            two / floor
        )
    };
    writeln!(
        out,
        "\nArc Pro B70, predicted: milliseconds and multiples of the floor, by kernels that no card has run yet; activations in one \
         f16 term and in two\n  {:<42}{:>10}{:>10}{:>16}{:>16}",
        "", "reads", "floor", "one term", "two terms"
    )?;
    for pass in passes {
        let what = match pass.rows {
            1 => format!("{} behind {}", pass.what, pass.context),
            rows => format!("{}, {rows} rows behind {}", pass.what, pass.context),
        };
        let bytes = pass.parts.iter().map(|part| part.bytes).sum();
        table(out, &what, bytes, pass.floor(), pass.predicted(), "")?;
        for part in &pass.parts {
            let note = if part.kernels { "" } else { "  not all kernels exist" };
            table(out, &format!("  {}", part.what), part.bytes, part.floor, part.predicted, note)?;
        }
        if matches!(pass.what, "encoding" | "prefill") {
            let each = pass.rows.max(1) as f64;
            let predicted = pass.predicted().map(|seconds| seconds / each);
            table(
                out,
                "  a token of them",
                bytes / pass.rows.max(1) as u64,
                pass.floor() / each,
                predicted,
                "",
            )?;
        }
    }
    writeln!(out, "  not counted: starts of launches, norms, rotary embeddings, choices of experts")
}

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
