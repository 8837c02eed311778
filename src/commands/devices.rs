//! `axed devices`

use anyhow::{Result, bail};
use clap::Args;

/// List the OpenCL devices of this machine.
#[derive(Debug, Args)]
pub struct Options {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Prints a line for each device.
pub fn run(_options: &Options) -> Result<()> {
    bail!("cannot list devices: this build has no device layer")
}
