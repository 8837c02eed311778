//! Log lines: to standard error or the journal, and into the ring that operators read.

use std::io::IsTerminal;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

use super::journal::Journal;
use crate::admin::{LogControl, LogRing};
use crate::config::{LogConfig, LogFormat};

/// Starts logging for the whole process; returns the control that changes the level.
pub(super) fn start(config: &LogConfig, ring: LogRing) -> Result<LogControl, String> {
    let (filter, control) = LogControl::new(&config.level)?;
    let journal = (config.format == LogFormat::Auto).then(Journal::of_process).flatten();
    let lines: Box<dyn Layer<_> + Send + Sync> = match (config.format, journal) {
        (_, Some(journal)) => journal.boxed(),
        (LogFormat::Text | LogFormat::Auto, None) => fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .boxed(),
        (LogFormat::Json, None) => fmt::layer().json().with_writer(std::io::stderr).boxed(),
    };
    Registry::default()
        .with(filter)
        .with(ring)
        .with(lines)
        .try_init()
        .map_err(|error| format!("logging was started already: {error}"))?;
    Ok(control)
}
