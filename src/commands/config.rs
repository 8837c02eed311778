//! `axed config`

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use axe::admin::shown;
use axe::config::Config;
use clap::Args;

/// Show every setting in force and where it comes from, without starting anything; ends with status 1 where the
/// configuration is wrong.
#[derive(Debug, Args)]
pub struct Options {
    /// Configuration file [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only what somebody set.
    #[arg(long)]
    pub set: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Prints a line for each setting, in the form of `daemon.toml`.
pub fn run(options: &Options) -> Result<()> {
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    for warning in &config.warnings {
        eprintln!("axed: warning: {warning}");
    }
    let mut shown = shown(&config);
    if options.set {
        shown.settings.retain(|setting| setting.place.is_some());
    }
    super::to_stdout(|out| {
        if options.json {
            return Ok(writeln!(out, "{}", serde_json::to_string(&shown)?)?);
        }
        for setting in &shown.settings {
            let place = setting.place.as_deref().map(|place| format!(" {place}")).unwrap_or_default();
            writeln!(out, "{} = {}  # {}{place}", setting.key, setting.value, setting.source)?;
        }
        Ok(())
    })
}
