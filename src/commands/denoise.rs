//! `axed denoise`

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use axe::checkpoint::mapping::Mapping;
use axe::config::Config;
use axe::decode::diffusion::replay::{Agreement, Difference, ReplayOptions, follow, replay};
use axe::decode::diffusion::{CanvasModel, DenoisingRules, Trajectory, manifest_entry};
use axe::decode::{Backend, BackendError, DiffusionBackend, Sampling, Step};
use axe::model::diffusion_gemma::{DiffusionCheckpoint, DiffusionGemma, GenerationConfig};
use axe::ops::CacheKind;
use clap::{ArgGroup, Args};

/// Denoise with a diffusion model, or replay a recorded run on it.
///
/// With `--replay`, each recorded step is run from the canvas that was recorded, and most probable tokens, entropies,
/// drawn tokens, accepted positions and the next canvas are compared. The first difference ends the command, with exit
/// status 1. How far logits differ is printed, and judged with `--logits-tolerance` only. Without `--replay`, a canvas
/// is denoised freely, and each step is printed.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("prompt").required(true).args(["ids", "manifest"]))]
pub struct Options {
    /// The checkpoint.
    #[arg(short, long, value_name = "PATH", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Recorded run (safetensors, as `traj_<name>.safetensors`).
    #[arg(long, value_name = "FILE")]
    pub replay: Option<PathBuf>,
    /// List of recorded runs (JSON): prompt and sampling of the run, found by the name of its file.
    #[arg(long, value_name = "FILE", requires = "replay")]
    pub manifest: Option<PathBuf>,
    /// Prompt as token ids, separated by commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub ids: Vec<u32>,
    /// Replay through the streaming head, as a server runs it: each step is conditioned on the model's own step before.
    #[arg(long, requires = "replay")]
    pub streaming: bool,
    /// Largest difference of an entropy in a replay.
    #[arg(long, value_name = "NATS", default_value_t = 1e-4, value_parser = tolerance)]
    pub tolerance: f32,
    /// Largest difference of a logit in a replay [default: not judged, only printed].
    #[arg(long, value_name = "X", value_parser = tolerance, conflicts_with = "streaming")]
    pub logits_tolerance: Option<f32>,
    /// Most denoising steps of a canvas [default: as the manifest, then the checkpoint says; so for those below].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=GenerationConfig::MOST_STEPS as i64))]
    pub steps: Option<u32>,
    /// Temperature towards which the schedule falls.
    #[arg(long, value_name = "T")]
    pub t_min: Option<f64>,
    /// Temperature of the first step.
    #[arg(long, value_name = "T")]
    pub t_max: Option<f64>,
    /// Entropy up to which positions are accepted.
    #[arg(long, value_name = "NATS")]
    pub entropy_bound: Option<f64>,
    /// Unchanged steps that make a canvas stable.
    #[arg(long, value_name = "N")]
    pub stability_threshold: Option<u32>,
    /// Mean entropy below which a stable canvas is done.
    #[arg(long, value_name = "NATS")]
    pub confidence_threshold: Option<f64>,
    /// Canvases to denoise without `--replay`.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub canvases: u32,
    /// Seed of the noise without `--replay`.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Let a reply end before its first token.
    #[arg(long)]
    pub allow_immediate_end: bool,
    /// Number type of the key-value cache. The server's default is f16; f32 shows the model without that rounding.
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub kv_cache: CacheKind,
    /// Configuration file, for the device to use [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Replays or denoises.
pub fn run(options: &Options) -> Result<()> {
    let mut config = Config::load(options.config.as_deref(), Vec::new())?;
    config.device.kv_cache = options.kv_cache;
    axe::device::runtime::locate(config.device.threads)?;
    match &options.replay {
        Some(path) => {
            let file = Mapping::open(path)?;
            let tried = || format!("cannot replay {}", path.display());
            let trajectory = Trajectory::read(file.as_ref()).with_context(tried)?;
            let recorded = options.recorded(path)?;
            let checkpoint = DiffusionCheckpoint::open(&options.model)?;
            let (prompt, said) = match recorded {
                Some(recorded) => recorded,
                None => (options.ids.clone(), said_by(&checkpoint)?),
            };
            let said = options.sampling(said)?;
            let context = check(&checkpoint, &prompt)?;
            let canvas = checkpoint.config()?.canvas;
            if trajectory.rows() != canvas {
                bail!(
                    "{}: the record is of canvases of {}, this model's have {canvas}",
                    path.display(),
                    trajectory.rows()
                );
            }
            let model = open(&config, &checkpoint, context)?;
            compare(model, &prompt, &trajectory, &said, options).with_context(tried)
        }
        None => {
            let checkpoint = DiffusionCheckpoint::open(&options.model)?;
            let mut said = options.sampling(said_by(&checkpoint)?)?;
            if let Some(warning) = axe::load::bar_what_fits(&mut said.eos) {
                super::tell(format_args!("axed: {warning}"));
            }
            let context = check(&checkpoint, &options.ids)?;
            denoise(open(&config, &checkpoint, context)?, said, options)
        }
    }
}

/// How the checkpoint wants to be sampled.
fn said_by(checkpoint: &DiffusionCheckpoint) -> Result<GenerationConfig> {
    let said = checkpoint.generation_config()?;
    if let Some(path) = checkpoint.lacks_generation_config() {
        super::tell(format_args!("axed: {} is missing: assuming {said:?}", path.display()));
    }
    Ok(said)
}

/// Checks a prompt before anything takes long; the context to open the model with.
fn check(checkpoint: &DiffusionCheckpoint, prompt: &[u32]) -> Result<usize> {
    let trained = checkpoint.config()?;
    let context = trained.context.min(axe::load::DEFAULT_CONTEXT);
    super::check_ids(prompt, trained.vocabulary)?;
    if !(1..context).contains(&prompt.len()) {
        bail!("the prompt has {} tokens, expected 1 to {}", prompt.len(), context - 1);
    }
    Ok(context)
}

fn open(config: &Config, checkpoint: &DiffusionCheckpoint, context: usize) -> Result<DiffusionGemma> {
    axe::load::open_diffusion(config, checkpoint, context, axe::load::DEFAULT_CHUNK)
        .map_err(anyhow::Error::from_boxed)
}

impl Options {
    /// What the manifest says of the run recorded at `path`, if a manifest was given.
    fn recorded(&self, path: &Path) -> Result<Option<(Vec<u32>, GenerationConfig)>> {
        let Some(manifest) = &self.manifest else { return Ok(None) };
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = stem.strip_prefix("traj_").unwrap_or(&stem);
        let text = super::read_text(manifest)?;
        let tried = || format!("cannot use {}", manifest.display());
        let value = serde_json::from_str(&text).with_context(tried)?;
        Ok(Some(manifest_entry(&value, name).with_context(tried)?))
    }

    /// How to sample: what was said, changed by the flags.
    fn sampling(&self, said: GenerationConfig) -> Result<GenerationConfig> {
        let config = GenerationConfig {
            max_denoising_steps: self.steps.map_or(said.max_denoising_steps, |steps| steps as usize),
            t_min: self.t_min.unwrap_or(said.t_min),
            t_max: self.t_max.unwrap_or(said.t_max),
            entropy_bound: self.entropy_bound.unwrap_or(said.entropy_bound),
            stability_threshold: self.stability_threshold.map(|n| n as usize).or(said.stability_threshold),
            confidence_threshold: self.confidence_threshold.or(said.confidence_threshold),
            ..said
        };
        config.checked().map_err(anyhow::Error::msg)
    }
}

/// Replays a recorded run and prints a line for each step that agrees.
fn compare<M: CanvasModel>(
    mut model: M,
    prompt: &[u32],
    trajectory: &Trajectory<'_>,
    config: &GenerationConfig,
    options: &Options,
) -> Result<()> {
    let limits = ReplayOptions { logits: options.logits_tolerance, entropy: options.tolerance };
    let (mut steps, mut logits, mut entropy) = (0usize, None::<f32>, 0f32);
    let mut outcome: Result<Option<Difference>, BackendError> = Ok(None);
    super::to_stdout(|out| {
        let mut written = Ok(());
        let mut report = |seen: &Agreement| {
            steps += 1;
            logits = logits.into_iter().chain(seen.logits).reduce(f32::max);
            entropy = entropy.max(seen.entropy);
            if written.is_ok() {
                written = line(out, seen);
            }
        };
        let (model, report) = (&mut model, &mut report);
        outcome = if options.streaming {
            follow(model, prompt, trajectory, config, &limits, report)
        } else {
            replay(model, prompt, trajectory, config, &limits, report)
        };
        written?;
        if matches!(outcome, Ok(None)) {
            let canvases = trajectory.canvases();
            let logits = logits.map_or_else(|| "not compared".to_owned(), |off| format!("within {off:.1e}"));
            writeln!(
                out,
                "all agrees: canvases {canvases}, steps {steps}, logits {logits}, entropies within {entropy:.1e}"
            )?;
        }
        Ok(())
    })?;
    match outcome.map_err(anyhow::Error::from_boxed)? {
        Some(difference) => bail!("{difference}"),
        None => Ok(()),
    }
}

fn line(out: &mut impl Write, seen: &Agreement) -> std::io::Result<()> {
    write!(out, "canvas {} step {}: temperature {:.4}", seen.canvas, seen.step, seen.temperature)?;
    if let Some(logits) = seen.logits {
        write!(out, ", logits within {logits:.1e}")?;
    }
    writeln!(
        out,
        ", entropies within {:.1e} (mean {:.4}), accepted {} of {}{}",
        seen.entropy,
        seen.mean_entropy,
        seen.accepted,
        seen.rows,
        if seen.done { ", done" } else { "" }
    )
}

/// Denoises freely and prints what each step guesses.
fn denoise<M: CanvasModel>(model: M, config: GenerationConfig, options: &Options) -> Result<()> {
    let rules = DenoisingRules { bar_immediate_end: !options.allow_immediate_end };
    // 1: the schedule as it is.
    let sampling = Sampling { temperature: 1.0, seed: options.seed, ..Sampling::default() };
    let mut backend = DiffusionBackend::new(model, config, rules);
    let mut outcome: Result<(), BackendError> = Ok(());
    super::to_stdout(|out| {
        let mut generation = match backend.start(&options.ids, &sampling) {
            Ok(generation) => generation,
            Err(error) => {
                outcome = Err(error);
                return Ok(());
            }
        };
        let (mut canvas, mut step) = (0, 0);
        while canvas < options.canvases as usize {
            match generation.step() {
                Ok(Step::Prefill { .. }) => {}
                Ok(Step::Draft { tokens, entropy }) => {
                    let mean = entropy.iter().sum::<f32>() / entropy.len().max(1) as f32;
                    writeln!(
                        out,
                        "canvas {canvas} step {step}: mean entropy {mean:.4}: {}",
                        joined(&tokens)
                    )?;
                    step += 1;
                }
                Ok(Step::Commit(tokens)) => {
                    writeln!(out, "canvas {canvas}: {}", joined(&tokens))?;
                    (canvas, step) = (canvas + 1, 0);
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        Ok(())
    })?;
    outcome.map_err(anyhow::Error::from_boxed)
}

fn joined(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// A number from 0.
fn tolerance(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(number) if number >= 0.0 => Ok(number),
        _ => Err("expected a number from 0".to_owned()),
    }
}
