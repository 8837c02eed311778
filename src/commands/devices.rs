//! `axed devices`

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use axe::config::Config;
use axe::device::list_devices;
use clap::Args;

/// List the OpenCL devices of this machine.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Configuration file, which says what device is taken [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Prints a line for each device; the one the daemon would take has a star.
pub fn run(options: &Options) -> Result<()> {
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    axe::device::runtime::locate(config.device.threads)?;
    let devices = list_devices(&axe::load::selector(&config.device))?;
    super::to_stdout(|out| {
        if options.json {
            return Ok(writeln!(out, "{}", serde_json::to_string_pretty(&devices)?)?);
        }
        for device in devices {
            let info = &device.info;
            writeln!(
                out,
                "{} {info}: {} compute units, {} MiB, driver {}",
                if device.selected { '*' } else { ' ' },
                info.compute_units,
                info.global_mem >> 20,
                info.driver_version
            )?;
        }
        Ok(())
    })
}
