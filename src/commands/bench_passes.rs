//! `axed bench-passes`

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use axe::checkpoint::gguf::Gguf;
use axe::config::Config;
use axe::decode::diffusion::noise;
use axe::model::{Causal, CausalConfig, LoadOptions, Logits};
use clap::Args;
use serde_json::json;

/// Time a causal model's passes of a few rows, as block decoding makes them.
///
/// Tokens are random ids, and every row gets logits. Widths take turns, so that what disturbs the machine disturbs all of
/// them. With `device.profiling` in the configuration, each kernel's share follows.
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
    /// From the first call to the answer.
    whole: Vec<f64>,
    /// Until everything was enqueued.
    host: Vec<f64>,
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
    let load = LoadOptions {
        context,
        rows,
        logit_rows: widest,
        cache: config.device.kv_cache,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
    };
    let device = axe::load::open_device(&config.device)?;
    let mut model = Causal::load(device, gguf, &load, &mut |_| {})?;
    let ids: Vec<u32> = (0..context).map(|row| noise::initial(1, 0, row, trained.vocabulary)).collect();
    for (part, tokens) in ids[..at].chunks(rows).enumerate() {
        model.forward(tokens, part * rows, Logits::None)?;
    }
    let mut times: Vec<Times> = widths.iter().map(|_| Times::default()).collect();
    for round in 0..=options.rounds {
        if round == 1 {
            model.device().reset_profile(); // the first round prepares the passes and does not count
        }
        for (&width, times) in widths.iter().zip(&mut times) {
            let began = Instant::now();
            model.forward(&ids[at..at + width], at, Logits::All)?;
            let enqueued = began.elapsed().as_secs_f64();
            model.with_logits(0, |_| ())?;
            if round > 0 {
                times.whole.push(began.elapsed().as_secs_f64());
                times.host.push(enqueued);
            }
        }
    }
    print(options, &widths, times, &model)
}

fn print(options: &Options, widths: &[usize], times: Vec<Times>, model: &Causal) -> Result<()> {
    let rows: Vec<(usize, usize, f64, f64, f64)> = widths
        .iter()
        .zip(times)
        .map(|(&width, times)| {
            let (whole, best) = median_and_best(times.whole);
            (width, model.launches(width, Logits::All), whole, best, median_and_best(times.host).0)
        })
        .collect();
    let (first, first_best) = rows.first().map_or((f64::NAN, f64::NAN), |row| (row.2, row.3));
    super::to_stdout(|out| {
        if options.json {
            let passes: Vec<_> = rows
                .iter()
                .map(|&(width, launches, whole, best, host)| {
                    json!({ "width": width, "launches": launches, "s": whole, "best_s": best, "host_s": host })
                })
                .collect();
            writeln!(out, "{}", json!({ "at": options.at, "passes": passes }))?;
            return Ok(());
        }
        writeln!(
            out,
            "{:>5} {:>9} {:>9} {:>6} {:>9} {:>6} {:>10} {:>11}",
            "rows", "launches", "ms", "ratio", "best ms", "ratio", "enqueue ms", "of the pass"
        )?;
        for (width, launches, whole, best, host) in rows {
            writeln!(
                out,
                "{width:>5} {launches:>9} {:>9.3} {:>6.2} {:>9.3} {:>6.2} {:>10.3} {:>10.1}%",
                whole * 1e3,
                whole / first,
                best * 1e3,
                best / first_best,
                host * 1e3,
                100.0 * host / whole
            )?;
        }
        for time in model.device().profile()? {
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
