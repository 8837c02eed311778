//! `axed`: command line to configuration to daemon.

mod commands;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use axe::admin::Board;
use axe::config::Config;
use axe::daemon::{DaemonError, Source};
use axe::decode::BackendError;
use axe::engine::Loader;
use axe::load::ModelLoader;
use clap::{Args, Parser, Subcommand};

/// Serves text generation on OpenCL devices.
#[derive(Debug, Parser)]
#[command(name = "axed", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// `axed` alone is `axed serve`.
    #[command(flatten)]
    serve: Settings,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Load the model and answer requests (the default).
    Serve(Settings),
    /// Generate text without the daemon.
    Run(Box<commands::run::Options>),
    /// Say what would be chosen for a model, and why, without loading it.
    Plan(commands::plan::Options),
    /// Write the logits of every position of a text to a safetensors file.
    Logits(commands::logits::Options),
    /// Denoise with a diffusion model, or replay a recorded run on it.
    Denoise(commands::denoise::Options),
    /// Print the token ids of a text.
    Tokenize(commands::tokenize::Options),
    /// Print the text of token ids.
    Detokenize(commands::detokenize::Options),
    /// Show every setting in force and where it comes from.
    Config(commands::config::Options),
    /// List the OpenCL devices of this machine.
    Devices(commands::devices::Options),
    /// Quantise the experts of a DiffusionGemma checkpoint to 4 bits.
    Convert(commands::convert::Options),
    /// Time a diffusion model's passes.
    BenchDenoise(commands::bench_denoise::Options),
    /// Time a causal model's passes of a few rows.
    BenchPasses(commands::bench_passes::Options),
    /// Time every kernel against what the device can do at best.
    BenchOps(commands::bench_ops::Options),
}

/// Flags for what people change most; everything else is in `daemon.toml`.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Configuration file [default: $AXE_CONFIG, else ./daemon.toml, else /etc/axed/daemon.toml].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The checkpoint: a GGUF file, or the directory of a DiffusionGemma.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Name of the model in the API.
    #[arg(long, value_name = "NAME")]
    served_name: Option<String>,
    /// Positions of the cache: prompt and output of a request must fit.
    #[arg(long, value_name = "TOKENS")]
    context_length: Option<String>,
    /// Address to listen on.
    #[arg(long, value_name = "IP")]
    host: Option<String>,
    /// Port to listen on; 0 is any free one.
    #[arg(short, long, value_name = "PORT")]
    port: Option<String>,
    /// Most rows of a pass of a causal model: auto, or an integer from 1 to 16. The text does not depend on it.
    #[arg(short, long, value_name = "B")]
    block_size: Option<String>,
    /// Sort of device: auto, cpu, gpu or accelerator.
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// The operator's Unix socket.
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,
    /// Log level, or directives as in `info,axe::http=debug`.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl Settings {
    /// The configuration with these flags on top.
    fn config(&self) -> Result<Config> {
        let path = |path: &Option<PathBuf>| path.as_ref().map(|p| p.to_string_lossy().into_owned());
        let flags = [
            ("--model", "model.path", path(&self.model)),
            ("--served-name", "model.served_name", self.served_name.clone()),
            ("--context-length", "model.context_length", self.context_length.clone()),
            ("--host", "server.host", self.host.clone()),
            ("--port", "server.port", self.port.clone()),
            ("--block-size", "decode.block_size", self.block_size.clone()),
            ("--device", "device.kind", self.device.clone()),
            ("--admin-socket", "admin.socket", path(&self.admin_socket)),
            ("--log-level", "log.level", self.log_level.clone()),
        ];
        commands::configured(self.config.as_deref(), flags)
    }
}

fn main() -> ExitCode {
    // clap itself answers wrong usage, with exit status 2.
    let cli = Cli::parse();
    let outcome = match cli.command.unwrap_or(Command::Serve(cli.serve)) {
        Command::Serve(settings) => {
            let status = match serve(settings) {
                Ok(()) => 0,
                Err(error) => {
                    commands::tell(format_args!("axed: {}", chain(&error)));
                    let of_daemon = error.downcast_ref().map_or(1, DaemonError::status);
                    if error.is::<commands::WrongUsage>() { 2 } else { of_daemon }
                }
            };
            axe::device::process::leave(status)
        }
        Command::Run(options) => commands::run::run(&options),
        Command::Plan(options) => commands::plan::run(&options),
        Command::Logits(options) => commands::logits::run(&options),
        Command::Denoise(options) => commands::denoise::run(&options),
        Command::Tokenize(options) => commands::tokenize::run(&options),
        Command::Detokenize(options) => commands::detokenize::run(&options),
        Command::Config(options) => commands::config::run(&options),
        Command::Devices(options) => commands::devices::run(&options),
        Command::Convert(options) => commands::convert::run(&options),
        Command::BenchDenoise(options) => commands::bench_denoise::run(&options),
        Command::BenchPasses(options) => commands::bench_passes::run(&options),
        Command::BenchOps(options) => commands::bench_ops::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            commands::tell(format_args!("axed: {}", chain(&error)));
            if error.is::<commands::WrongUsage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// An error and its causes on one line, leaving out causes that the text before already tells.
fn chain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut told, cause| {
        let cause = cause.to_string();
        if !told.contains(&cause) {
            if !told.is_empty() {
                told.push_str(": ");
            }
            told.push_str(&cause);
        }
        told
    })
}

fn serve(settings: Settings) -> Result<()> {
    let config = settings.config()?;
    // Before any thread starts: it may have to set variables that the OpenCL loader reads.
    let runtime = axe::device::runtime::locate(config.device.threads)?;
    // Before a port is taken.
    ModelLoader::path(&config).map_err(anyhow::Error::from_boxed)?;
    axe::daemon::run(config, Served { settings, runtime: runtime.reason.to_string() })?;
    Ok(())
}

/// The daemon's configurations, by the same flags each time, and the models that they name.
struct Served {
    settings: Settings,
    /// Why this OpenCL runtime.
    runtime: String,
}

impl Source for Served {
    fn config(&self) -> Result<Config, BackendError> {
        self.settings.config().map_err(|error| chain(&error).into())
    }

    fn loader(&self, config: &Config, board: &Arc<Board>) -> Result<Box<dyn Loader>, BackendError> {
        let vendors = axe::device::runtime::vendor_folder();
        tracing::info!(vendors = %vendors.display(), "OpenCL runtime: {}", self.runtime);
        Ok(Box::new(ModelLoader::new(config.clone(), Arc::clone(board))?))
    }
}
