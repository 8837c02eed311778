//! `axed bench-denoise`

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use axe::config::Config;
use axe::decode::Memory;
use axe::load::KernelFacts;
use axe::model::diffusion_gemma::{
    DenoiseStep, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, RowChoice,
};
use clap::Args;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde_json::json;

/// Time a diffusion model's passes: the encoder over a prompt, and denoising steps of a canvas.
///
/// Prompt and canvas are random ids. Steps after a canvas's first are conditioned on the step before, as most are; the
/// first is not counted. With `device.profiling` in the configuration, each kernel's share follows.
#[derive(Debug, Args)]
pub struct Options {
    /// The checkpoint.
    #[arg(short, long, value_name = "PATH", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(..=1 << 28))]
    pub prompt: u32,
    /// Positions before the prompt that count as encoded: they are filled with one number, which takes as long to look at as
    /// any other.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1 << 28))]
    pub at: u32,
    /// Denoising steps that are timed.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub steps: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Configuration file, for device, cache and what becomes of plain experts [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Loads the model and times it.
pub fn run(options: &Options) -> Result<()> {
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    axe::device::runtime::locate(config.device.threads)?;
    let checkpoint = DiffusionCheckpoint::open(&options.model)?;
    let trained = checkpoint.config()?;
    let (tokens, at) = (options.prompt as usize, options.at as usize);
    if at + tokens + trained.canvas > trained.context {
        bail!("{} tokens and a canvas are more than the {} of the model", at + tokens, trained.context);
    }
    let rows = config.device.prefill_chunk.unwrap_or(axe::load::DEFAULT_CHUNK);
    let device = axe::load::open_device(&config.device)?;
    let load = DiffusionOptions {
        context: (at + tokens).max(1),
        rows,
        vocabulary: None,
        cache: config.device.kv_cache,
        products: KernelFacts::new(&config.device, device.info()).products(true).0,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
        experts: config.model.experts,
        dense: config.model.dense,
    };
    let began = Instant::now();
    let mut model = DiffusionGemma::load(device, &checkpoint, &load, &mut |_| {})?;
    let load_s = began.elapsed().as_secs_f64();
    let prompt = ids(1, tokens, trained.vocabulary);
    if at > 0 {
        model.fill_cache()?;
    }
    let encode_s = (0..3).map(|_| encode(&mut model, &prompt, at)).collect::<Result<Vec<_>>>()?;
    let canvas = ids(2, trained.canvas, trained.vocabulary);
    let (mut step_s, mut step_cpu_s) = (Vec::new(), Vec::new());
    let mut before_steps = 0;
    for step in 0..=options.steps {
        let how = DenoiseStep {
            first: step == 0,
            temperature: 0.8,
            seed: 7,
            canvas: 0,
            step,
            greedy: false,
            barred: Vec::new(),
        };
        let (began, before) = (Instant::now(), processor_s()?);
        let choices: Vec<RowChoice> = model.denoise(&canvas, at + tokens, &how)?;
        // What is counted are the other steps.
        if step == 0 {
            model.device().reset_profile();
            before_steps = model.device().calls().launches;
        } else {
            step_s.push(began.elapsed().as_secs_f64());
            step_cpu_s.push(processor_s()? - before);
        }
        if choices.len() != canvas.len() {
            bail!("the model answered {} rows of a canvas of {}", choices.len(), canvas.len());
        }
    }
    let launches = (model.device().calls().launches - before_steps) / u64::from(options.steps);
    let memory = Memory::of(model.device());
    let (encode, step, step_cpu) = (median(encode_s), median(step_s), median(step_cpu_s));
    let (peak, private) = (resident("VmHWM:")?, resident("RssAnon:")?);
    super::to_stdout(|out| {
        if options.json {
            let result = json!({
                "load_s": load_s,
                "encode_s": encode,
                "encode_tokens_per_s": tokens as f64 / encode,
                "step_s": step,
                "step_cpu_s": step_cpu,
                "canvas": trained.canvas,
                "at": at,
                "launches_per_step": launches,
                "device_bytes": memory.weights + memory.kv_cache + memory.scratch,
                "weights_bytes": memory.weights,
                "peak_resident_bytes": peak,
                "private_bytes": private,
            });
            writeln!(out, "{result}")?;
        } else {
            writeln!(out, "load             {load_s:.2} s")?;
            writeln!(
                out,
                "encode           {encode:.3} s ({tokens} tokens at {at}, {:.0} t/s)",
                tokens as f64 / encode
            )?;
            writeln!(
                out,
                "denoising step   {step:.3} s ({} positions, median of {}; {launches} launches)",
                trained.canvas, options.steps
            )?;
            let mib = |bytes: u64| bytes >> 20;
            writeln!(
                out,
                "device memory    {} MiB weights, {} MiB cache, {} MiB scratch",
                mib(memory.weights),
                mib(memory.kv_cache),
                mib(memory.scratch)
            )?;
            writeln!(out, "resident         {} MiB at most, {} MiB of it private", mib(peak), mib(private))?;
        }
        let times = model.device().profile()?;
        let waited: u64 = times.iter().map(|time| time.waited_ns).sum();
        if !times.is_empty() && !options.json {
            let share =
                100.0 * waited as f64 / (times.iter().map(|time| time.total_ns).sum::<u64>() + waited) as f64;
            writeln!(
                out,
                "gaps             {share:.2} % of the time of all steps' launches, in which none ran"
            )?;
        }
        for time in times {
            let ms = time.total_ns as f64 / 1e6;
            if ms > 0.0 && !options.json {
                writeln!(
                    out,
                    "{ms:10.1} ms {:8.1} ms waited {:6} launches  {}: {}",
                    time.waited_ns as f64 / 1e6,
                    time.launches,
                    time.program,
                    time.kernel
                )?;
            }
        }
        Ok(())
    })
}

/// Encodes the whole prompt from position `start` on and waits; seconds.
fn encode(model: &mut DiffusionGemma, prompt: &[u32], start: usize) -> Result<f64> {
    let began = Instant::now();
    let rows = model.rows();
    for (part, tokens) in prompt.chunks(rows).enumerate() {
        model.encode(tokens, start + part * rows)?;
    }
    model.device().finish()?;
    Ok(began.elapsed().as_secs_f64())
}

/// Ids that are the same every time, all below `vocabulary`.
fn ids(seed: u64, count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count).map(|row| axe::decode::diffusion::noise::initial(seed, 0, row, vocabulary)).collect()
}

/// Processor time of this process so far, all threads together; seconds.
fn processor_s() -> Result<f64> {
    let used = getrusage(UsageWho::RUSAGE_SELF).context("cannot ask for the processor time used")?;
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(used.user_time()) + seconds(used.system_time()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// A line of this process's memory in bytes.
fn resident(field: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib =
        line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<u64>().ok());
    Ok(kib.unwrap_or(0) << 10)
}
