//! `axed bench-passes`

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use axe::checkpoint::gguf::Gguf;
use axe::config::{Config, DeviceConfig};
use axe::decode::diffusion::noise;
use axe::device::{DeviceInfo, KernelTime};
use axe::load::KernelFacts;
use axe::model::{Causal, CausalConfig, LoadOptions, Logits};
use clap::Args;
use serde_json::json;

/// Time a causal model's passes of a few rows, as block decoding makes them.
///
/// Tokens are random ids, and every row gets logits. Widths take turns, so that what disturbs the machine disturbs all of
/// them. `host` is the share of a pass in which the device does not work: its time less the time that kernels ran by the
/// device's events, in rounds of their own. `joins` is the share in which it works, but computes nothing: where a pass is one
/// launch, what that takes when every part of it ends at once. With `device.profiling` in the configuration, passes are many launches and each kernel's share follows.
#[derive(Debug, Args)]
pub struct Options {
    /// The checkpoint.
    #[arg(short, long, value_name = "FILE", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Rows of a pass; the first is what the others are compared with.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,3,4,6,8,12,16",
          value_parser = clap::value_parser!(u32).range(1..=512))]
    pub widths: Vec<u32>,
    /// Positions that are in the cache already.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(..=1 << 24))]
    pub at: u32,
    /// Do not encode them: fill the cache with one number, which takes as long to look at as any other.
    #[arg(long)]
    pub filled: bool,
    /// Passes of each width.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// Configuration file, for device and cache [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// What passes of one width took, in seconds.
#[derive(Default)]
struct Times {
    launches: usize,
    /// From the first call to the answer.
    whole: Vec<f64>,
    /// Until everything was enqueued.
    enqueued: Vec<f64>,
    /// Share of the pass that no kernel worked, where the device's events were asked.
    host: Vec<f64>,
    /// Share that kernels would have worked without anything to compute, where a pass is one launch.
    joins: Vec<f64>,
}

/// Loads the model and times it.
pub fn run(options: &Options) -> Result<()> {
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    axe::device::runtime::locate(config.device.threads)?;
    let gguf = Arc::new(Gguf::open(&options.model)?);
    let trained = CausalConfig::read(&gguf)?;
    let at = options.at as usize;
    let widths: Vec<usize> = options.widths.iter().map(|&width| width as usize).collect();
    let widest = widths.iter().copied().max().context("no widths to time")?;
    let context = at + widest;
    if context > trained.context {
        bail!("{at} positions and a pass of {widest} are more than the {} of the model", trained.context);
    }
    let rows = config.device.prefill_chunk.unwrap_or(axe::load::DEFAULT_CHUNK).max(widest);
    let load = |info: &DeviceInfo| LoadOptions {
        context,
        rows,
        logit_rows: widest,
        cache: config.device.kv_cache,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
        join: config.device.joins(),
        products: KernelFacts::new(&config.device, info).products(false).0,
    };
    let times = |profiling: bool, rounds: u32| -> Result<(Vec<Times>, Causal)> {
        let device = axe::load::open_device(&DeviceConfig { profiling, ..config.device.clone() })?;
        let load = load(device.info());
        let mut model = Causal::load(device, Arc::clone(&gguf), &load, &mut |_| {})?;
        Ok((measure(&mut model, &widths, at, options.filled, rounds)?, model))
    };
    // One model after the other: there may not be room for two.
    let (mut found, model) = times(config.device.profiling, options.rounds)?;
    let profile = model.device().profile()?;
    drop(model);
    if !config.device.profiling {
        let (by_events, _) = times(true, options.rounds.div_ceil(4))?;
        for (times, by_events) in found.iter_mut().zip(by_events) {
            times.host = by_events.host;
            times.joins = by_events.joins;
        }
    }
    print(options, &widths, found, &profile)
}

/// Times `rounds` passes of each width behind `at` positions.
fn measure(model: &mut Causal, widths: &[usize], at: usize, filled: bool, rounds: u32) -> Result<Vec<Times>> {
    let ids: Vec<u32> =
        (0..model.context()).map(|row| noise::initial(1, 0, row, model.config().vocabulary)).collect();
    let rows = model.rows();
    if filled {
        model.fill_cache()?;
    } else {
        for (part, tokens) in ids[..at].chunks(rows).enumerate() {
            model.forward(tokens, part * rows, Logits::None)?;
        }
    }
    let mut times: Vec<Times> = widths.iter().map(|_| Times::default()).collect();
    for round in 0..=rounds {
        for (&width, times) in widths.iter().zip(&mut times) {
            let before = worked(model)?;
            let began = Instant::now();
            model.forward(&ids[at..at + width], at, Logits::All)?;
            let enqueued = began.elapsed().as_secs_f64();
            let choices = model.choices()?;
            let whole = began.elapsed().as_secs_f64();
            if choices.iter().any(|row| row.bad) {
                bail!("a logit is not a finite number");
            }
            if round == 0 {
                continue; // it prepares the passes and does not count
            }
            times.launches = model.launches(width, Logits::All);
            times.whole.push(whole);
            times.enqueued.push(enqueued);
            if model.device().is_profiling() {
                let after = worked(model)?;
                times.host.push(1.0 - (after - before) / whole);
                let hollow = model.run_hollow(width, Logits::All)?;
                times.joins.push(if hollow { (worked(model)? - after) / whole } else { 0.0 });
            }
        }
    }
    Ok(times)
}

/// Seconds that kernels have run, by the device's events, where it keeps them.
fn worked(model: &Causal) -> Result<f64> {
    Ok(model.device().profile()?.iter().map(|time| time.total_ns as f64 / 1e9).sum())
}

fn print(options: &Options, widths: &[usize], times: Vec<Times>, profile: &[KernelTime]) -> Result<()> {
    struct Row {
        width: usize,
        launches: usize,
        whole: f64,
        best: f64,
        enqueued: f64,
        /// Shares of the whole.
        host: f64,
        joins: f64,
    }
    let row = |(&width, times): (&usize, Times)| {
        let (whole, best) = median_and_best(times.whole);
        let [enqueued, host, joins] =
            [times.enqueued, times.host, times.joins].map(|times| median_and_best(times).0);
        Row { width, launches: times.launches, whole, best, enqueued, host, joins }
    };
    let rows: Vec<Row> = widths.iter().zip(times).map(row).collect();
    let (first, first_best) = rows.first().map_or((f64::NAN, f64::NAN), |row| (row.whole, row.best));
    super::to_stdout(|out| {
        if options.json {
            let passes: Vec<_> = rows
                .iter()
                .map(|row| {
                    json!({
                        "width": row.width,
                        "launches": row.launches,
                        "s": row.whole,
                        "best_s": row.best,
                        "enqueue_s": row.enqueued,
                        "host_share": row.host,
                        "joins_share": row.joins,
                    })
                })
                .collect();
            writeln!(out, "{}", json!({ "at": options.at, "passes": passes }))?;
            return Ok(());
        }
        writeln!(
            out,
            "{:>5} {:>9} {:>9} {:>6} {:>9} {:>6} {:>10} {:>7} {:>7}",
            "rows", "launches", "ms", "ratio", "best ms", "ratio", "enqueue ms", "host", "joins"
        )?;
        for row in &rows {
            writeln!(
                out,
                "{:>5} {:>9} {:>9.3} {:>6.2} {:>9.3} {:>6.2} {:>10.3} {:>6.1}% {:>6.1}%",
                row.width,
                row.launches,
                row.whole * 1e3,
                row.whole / first,
                row.best * 1e3,
                row.best / first_best,
                row.enqueued * 1e3,
                100.0 * row.host,
                100.0 * row.joins
            )?;
        }
        for time in profile {
            let ms = time.total_ns as f64 / 1e6;
            writeln!(out, "{ms:10.1} ms {:6} launches  {}: {}", time.launches, time.program, time.kernel)?;
        }
        Ok(())
    })
}

fn median_and_best(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
    (at(values.len() / 2), at(0))
}
