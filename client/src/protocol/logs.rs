//! Log lines, one JSON object a line.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One event of the daemon's log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLine {
    /// When it happened, RFC 3339 in UTC with microseconds.
    pub time: String,
    /// How severe it is.
    pub level: Level,
    /// The module that wrote it.
    pub target: String,
    /// The text.
    pub message: String,
    /// Everything else that was said with it; the fields of enclosing spans first.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub fields: Map<String, Value>,
}

/// Severity of a log line, the most severe first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Something failed.
    Error,
    /// Something is wrong and was worked around, or will fail soon.
    Warn,
    /// What an operator wants to know.
    Info,
    /// What a developer wants to know.
    Debug,
    /// Everything.
    Trace,
}

impl Level {
    /// The name used on the wire and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace]
            .into_iter()
            .find(|level| level.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| format!("`{text}` is no log level; use error, warn, info, debug or trace"))
    }
}
