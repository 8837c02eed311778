//! The configuration in force.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Answer to `GET /config`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Config {
    /// The file that was read, if any.
    pub file: Option<String>,
    /// Every setting, in the order of `daemon.toml`.
    pub settings: Vec<Setting>,
}

/// A setting in force.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Its dotted key, e.g. `server.port`.
    pub key: String,
    /// Its value in force; `null` where nothing is set. A secret shows as `(secret)`, and so does what an address has of
    /// names and passwords.
    pub value: Value,
    /// What a reload has found in its place, which only a restart brings into force.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    pub after_restart: Option<Value>,
    /// What kind of place named it.
    pub source: Source,
    /// The place: the file, the variable, the flag, the credential; `null` for a default.
    pub place: Option<String>,
}

/// A member that is there, though it may be null.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// What kind of place a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Nobody set it.
    Default,
    /// The configuration file.
    File,
    /// An environment variable.
    Environment,
    /// A flag of the command line.
    Flag,
    /// A credential of systemd's.
    Credential,
    /// The operator, while the daemon runs.
    Operator,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
            Self::Credential => "credential",
            Self::Operator => "operator",
        })
    }
}

impl Config {
    /// The value of a setting, if there is such a setting and it is set.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.settings
            .iter()
            .find(|setting| setting.key == key)
            .map(|setting| &setting.value)
            .filter(|v| !v.is_null())
    }

    /// The same as text, without quotes.
    pub fn text(&self, key: &str) -> Option<String> {
        let value = self.value(key)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned)).filter(|text| !text.is_empty())
    }
}
