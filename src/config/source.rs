//! Where settings come from, and how a wrong one is reported.
//!
//! A setting has one dotted key, e.g. `server.port`. Its value is the flag if there is one, else the environment
//! variable, else the file's entry, else the default.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::ConfigError;
use crate::decode::BlockSize;

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The configuration file.
    File(PathBuf),
    /// An environment variable.
    Env(String),
    /// A command line flag, with its dashes.
    Flag(&'static str),
    /// A credential that systemd handed over.
    Credential(PathBuf),
    /// Nowhere: the built-in default.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Env(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Credential(path) => write!(f, "credential {}", path.display()),
            Self::Default => f.write_str("built-in defaults"),
        }
    }
}

impl Origin {
    /// Whether it is a variable that other programs have, too.
    pub(super) fn is_foreign(&self) -> bool {
        matches!(self, Self::Env(name) if !name.starts_with("AXE_"))
    }
}

/// A setting with its value and the place that named it.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// The dotted key.
    pub key: &'static str,
    /// The value; null where nothing is set and nothing is the default. A secret shows as `(secret)`.
    pub value: Value,
    /// Where it was written.
    pub origin: Origin,
}

/// A type a setting can have.
pub(super) trait Setting: Sized {
    /// What a person should have written, e.g. `a string`.
    const EXPECTED: &'static str;
    /// Reads the TOML form.
    fn from_toml(value: &toml::Value) -> Option<Self>;
    /// Reads the form used in environment variables and flags.
    fn from_text(text: &str) -> Option<Self>;
    /// The value as the operator is shown it.
    fn to_json(&self) -> Value;
}

impl Setting for String {
    const EXPECTED: &'static str = "a string";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }
    fn from_text(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }
    fn to_json(&self) -> Value {
        self.as_str().into()
    }
}

impl Setting for BlockSize {
    const EXPECTED: &'static str = "\"auto\" or an integer from 1 to 16";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        match value {
            toml::Value::String(text) => text.parse().ok(),
            toml::Value::Integer(rows) => rows.to_string().parse().ok(),
            _ => None,
        }
    }
    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok()
    }
    fn to_json(&self) -> Value {
        match self {
            Self::Auto => "auto".into(),
            Self::Fixed(rows) => (*rows).into(),
        }
    }
}

impl Setting for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        value.as_bool()
    }
    fn from_text(text: &str) -> Option<Self> {
        match text {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        }
    }
    fn to_json(&self) -> Value {
        (*self).into()
    }
}

impl Setting for u64 {
    const EXPECTED: &'static str = "an integer, 0 or more";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        value.as_integer().and_then(|n| u64::try_from(n).ok())
    }
    fn from_text(text: &str) -> Option<Self> {
        text.trim().parse().ok()
    }
    fn to_json(&self) -> Value {
        (*self).into()
    }
}

impl Setting for f64 {
    const EXPECTED: &'static str = "a finite number";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        let number = value.as_float().or_else(|| value.as_integer().map(|n| n as f64))?;
        number.is_finite().then_some(number)
    }
    fn from_text(text: &str) -> Option<Self> {
        text.trim().parse::<f64>().ok().filter(|n| n.is_finite())
    }
    fn to_json(&self) -> Value {
        (*self).into()
    }
}

/// The longest time a setting may name; beyond it timer arithmetic could overflow.
const LONGEST_S: f64 = 365.0 * 86_400.0;

impl Setting for Duration {
    const EXPECTED: &'static str = "a number of seconds, 0 up to a year";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        f64::from_toml(value).filter(|s| (0.0..=LONGEST_S).contains(s)).map(Self::from_secs_f64)
    }
    fn from_text(text: &str) -> Option<Self> {
        f64::from_text(text).filter(|s| (0.0..=LONGEST_S).contains(s)).map(Self::from_secs_f64)
    }
    fn to_json(&self) -> Value {
        self.as_secs_f64().into()
    }
}

impl Setting for Vec<String> {
    const EXPECTED: &'static str = "a list of strings (in the environment: separated by commas)";
    fn from_toml(value: &toml::Value) -> Option<Self> {
        value.as_array()?.iter().map(String::from_toml).collect()
    }
    fn from_text(text: &str) -> Option<Self> {
        Some(text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect())
    }
    fn to_json(&self) -> Value {
        self.clone().into()
    }
}

/// A value and the place that named it.
#[derive(Debug, Clone)]
enum Found {
    Toml(toml::Value),
    Text(String),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Toml(value) => write!(f, "{} {}", value.type_str(), value),
            Self::Text(text) => write!(f, "\"{text}\""),
        }
    }
}

/// A command line flag that stands for a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// The flag as typed, e.g. `--port`.
    pub flag: &'static str,
    /// The setting's dotted key.
    pub key: &'static str,
    /// The value given.
    pub value: String,
}

/// Everything that was written, waiting to be read key by key.
pub(super) struct Sources {
    file: Option<PathBuf>,
    entries: BTreeMap<String, toml::Value>,
    env: BTreeMap<String, String>,
    flags: Vec<Override>,
    known: Vec<&'static str>,
    effective: Vec<Effective>,
}

/// Short names for the settings people change most; the full name `AXE_<SECTION>_<KEY>` works for every setting.
const SHORT_ENV: [(&str, &str); 8] = [
    ("model.path", "AXE_MODEL"),
    ("model.served_name", "AXE_SERVED_NAME"),
    ("server.host", "AXE_HOST"),
    ("server.port", "AXE_PORT"),
    ("server.api_key", "AXE_API_KEY"),
    ("studio.remote_url", "NVIDIA_BASE_URL"),
    ("studio.remote_model", "NVIDIA_MODEL"),
    ("studio.remote_key", "NVIDIA_API_KEY"),
];

/// Settings whose values are never shown.
const SECRET: [&str; 2] = ["server.api_key", "studio.remote_key"];

/// A setting whose value may hold a name and a password, which are not shown.
const ADDRESS: &str = "studio.remote_url";

/// Stands for what is not shown.
const HIDDEN: &str = "(secret)";

/// An address without the name and the password in it, and without what is asked of it. What is no address may hold them in
/// another place.
pub(super) fn without_password(address: &str) -> String {
    let (begun, rest) = match address.split_once("://") {
        Some((scheme, rest)) if ["http", "https"].contains(&scheme) => (format!("{scheme}://"), rest),
        _ => (String::new(), address),
    };
    let end = rest.find(['/', '?', '#']).filter(|_| !begun.is_empty()).unwrap_or(rest.len());
    let mut shown = match rest[..end].rfind('@') {
        Some(at) => format!("{begun}{HIDDEN}{}", &rest[at..]),
        None => address.to_owned(),
    };
    if let Some(asked) = shown.find('?') {
        shown.truncate(asked + 1);
        shown.push_str(HIDDEN);
    }
    shown
}

/// A value as errors tell it, which end up in logs, where a mistyped secret must not.
fn told(key: &str, found: &Found) -> String {
    match found {
        _ if SECRET.contains(&key) => "something else".to_owned(),
        Found::Toml(toml::Value::String(text)) | Found::Text(text) if key == ADDRESS => {
            format!("{:?}", without_password(text))
        }
        Found::Toml(value) if key == ADDRESS => value.type_str().to_owned(),
        found => found.to_string(),
    }
}

/// What is wrong with a file that is not TOML, and where. Not its words: there may be a secret among them.
fn complaint(text: &str, error: &toml::de::Error) -> String {
    let what = error.message().lines().next().unwrap_or("it cannot be read").to_owned();
    let Some(at) = error.span().map(|span| span.start.min(text.len())) else { return what };
    let before = text.get(..at).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!("line {line}, column {column}: {what}")
}

impl Sources {
    /// Reads the file, if any, and takes over what the environment and the command line say.
    pub(super) fn read(
        file: Option<&Path>,
        env: BTreeMap<String, String>,
        flags: Vec<Override>,
    ) -> Result<Self, ConfigError> {
        let mut entries = BTreeMap::new();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
            let table: toml::Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
                path: path.to_owned(),
                message: complaint(&text, &error),
            })?;
            for (section, value) in table {
                match value {
                    // An empty section stays, so that `finish` can tell whether there is such a one.
                    toml::Value::Table(keys) if !keys.is_empty() => {
                        entries.extend(keys.into_iter().map(|(k, v)| (format!("{section}.{k}"), v)));
                    }
                    other => drop(entries.insert(section, other)),
                }
            }
        }
        Ok(Self {
            file: file.map(Path::to_owned),
            entries,
            env,
            flags,
            known: Vec::new(),
            effective: Vec::new(),
        })
    }

    fn find(&mut self, key: &'static str) -> Result<Option<(Origin, Found)>, ConfigError> {
        self.known.push(key);
        if let Some(flag) = self.flags.iter().find(|o| o.key == key) {
            return Ok(Some((Origin::Flag(flag.flag), Found::Text(flag.value.clone()))));
        }
        let short = SHORT_ENV.iter().find(|(k, _)| *k == key).map(|(_, name)| (*name).to_owned());
        let full = format!("AXE_{}", key.replace('.', "_").to_uppercase());
        // An empty variable means unset, as scripts pass on variables they did not get themselves.
        let set = short.into_iter().chain([full]).filter_map(|name| {
            let text = self.env.get(&name).filter(|text| !text.is_empty())?;
            Some((name, text))
        });
        let set: Vec<(String, &String)> = set.collect();
        if let [(short, one), (full, other)] = set.as_slice()
            && one != other
        {
            // What other programs are told is no contradiction.
            if Origin::Env(short.clone()).is_foreign() {
                return Ok(Some((Origin::Env(full.clone()), Found::Text((*other).clone()))));
            }
            return Err(ConfigError::Contradiction { short: short.clone(), full: full.clone(), key });
        }
        // The full name before the short one, so that a mistake is told of the name that is this program's own.
        if let Some((name, text)) = set.into_iter().next_back() {
            return Ok(Some((Origin::Env(name), Found::Text(text.clone()))));
        }
        Ok(self.entries.get(key).map(|value| (self.file_origin(), Found::Toml(value.clone()))))
    }

    fn file_origin(&self) -> Origin {
        self.file.clone().map_or(Origin::Default, Origin::File)
    }

    /// The value of `key` if anyone wrote it and `ok` holds for it; `expected` describes what `ok` wants.
    pub(super) fn optional<T: Setting>(
        &mut self,
        key: &'static str,
        expected: &str,
        ok: impl FnOnce(&T) -> bool,
    ) -> Result<Option<(T, Origin)>, ConfigError> {
        let Some((origin, found)) = self.find(key)? else {
            self.effective.push(Effective { key, value: Value::Null, origin: Origin::Default });
            return Ok(None);
        };
        let value = match &found {
            Found::Toml(value) => T::from_toml(value),
            Found::Text(text) => T::from_text(text),
        };
        match value.filter(ok) {
            Some(value) => {
                let shown = match value.to_json() {
                    // An empty one is none.
                    Value::String(text) if SECRET.contains(&key) && !text.is_empty() => HIDDEN.into(),
                    Value::String(text) if key == ADDRESS => without_password(&text).into(),
                    shown => shown,
                };
                self.effective.push(Effective { key, value: shown, origin: origin.clone() });
                Ok(Some((value, origin)))
            }
            None => Err(ConfigError::Invalid {
                origin,
                key: key.to_owned(),
                found: told(key, &found),
                expected: if expected.is_empty() { T::EXPECTED.to_owned() } else { expected.to_owned() },
            }),
        }
    }

    /// Any value of the type, or the default.
    pub(super) fn any<T: Setting>(&mut self, key: &'static str, default: T) -> Result<T, ConfigError> {
        self.checked(key, default, "", |_| true)
    }

    /// A value for which `ok` holds, or the default.
    pub(super) fn checked<T: Setting>(
        &mut self,
        key: &'static str,
        default: T,
        expected: &str,
        ok: impl FnOnce(&T) -> bool,
    ) -> Result<T, ConfigError> {
        match self.optional(key, expected, ok)? {
            Some((value, _)) => Ok(value),
            None => {
                self.settle(key, default.to_json(), None);
                Ok(default)
            }
        }
    }

    /// Shows `value` for a setting that nobody wrote, and where it comes from if that is not the built-in default.
    pub(super) fn settle(&mut self, key: &'static str, value: Value, origin: Option<Origin>) {
        if let Some(effective) = self.effective.iter_mut().rev().find(|effective| effective.key == key)
            && effective.origin == Origin::Default
        {
            effective.value = value;
            effective.origin = origin.unwrap_or(Origin::Default);
        }
    }

    /// A variable of the environment that is no setting.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    /// An integer from `low` to `high`, or the default.
    pub(super) fn integer(
        &mut self,
        key: &'static str,
        default: u64,
        low: u64,
        high: u64,
    ) -> Result<u64, ConfigError> {
        self.checked(key, default, &format!("an integer from {low} to {high}"), |n| (low..=high).contains(n))
    }

    /// A number from `low` to `high`, or the default.
    pub(super) fn number(
        &mut self,
        key: &'static str,
        default: f64,
        low: f64,
        high: f64,
    ) -> Result<f64, ConfigError> {
        self.checked(key, default, &format!("a number from {low} to {high}"), |n| (low..=high).contains(n))
    }

    /// A path; relative ones in the file count from the file's folder, all others from the working directory. An
    /// empty string in the file means unset.
    pub(super) fn path(&mut self, key: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        let Some((text, origin)) = self.optional::<String>(key, "a path as a string", |_| true)? else {
            return Ok(None);
        };
        if text.is_empty() {
            return Ok(None);
        }
        Ok(Some(match origin {
            Origin::File(file) => file.parent().map_or_else(|| PathBuf::from(&text), |dir| dir.join(&text)),
            _ => PathBuf::from(text),
        }))
    }

    /// A string; an empty one means unset.
    pub(super) fn text(&mut self, key: &'static str) -> Result<Option<String>, ConfigError> {
        Ok(self.optional::<String>(key, "", |_| true)?.map(|(text, _)| text).filter(|t| !t.is_empty()))
    }

    /// Complains about the first variable that looks like a setting's and is none.
    fn check_environment(&self) -> Result<(), ConfigError> {
        let variable = |key: &str| format!("AXE_{}", key.replace('.', "_").to_uppercase());
        let short = |name: &str| SHORT_ENV.iter().any(|(_, short)| *short == name);
        let sections: BTreeSet<&str> = self.known.iter().filter_map(|key| key.split('.').next()).collect();
        for (name, text) in self.env.iter().filter(|(_, text)| !text.is_empty()) {
            let Some(section) =
                sections.iter().find(|section| name.starts_with(&format!("{}_", variable(section))))
            else {
                continue;
            };
            if short(name) || self.known.iter().any(|key| variable(key) == *name) {
                continue;
            }
            let expected: Vec<String> = self
                .known
                .iter()
                .filter(|key| key.split('.').next() == Some(section))
                .map(|key| variable(key))
                .collect();
            return Err(ConfigError::UnknownKey {
                origin: Origin::Env(name.clone()),
                key: name.clone(),
                // It may be a secret under a mistyped name.
                found: format!("{} characters", text.chars().count()),
                expected: expected.join(", "),
            });
        }
        Ok(())
    }

    /// Complains about the first entry of the file or the environment that nobody asked for; all settings otherwise, in
    /// the order in which they were read.
    pub(super) fn finish(self) -> Result<Vec<Effective>, ConfigError> {
        self.check_environment()?;
        let empty_section = |key: &str, value: &toml::Value| {
            value.is_table() && self.known.iter().any(|known| known.split('.').next() == Some(key))
        };
        let unknown = self
            .entries
            .iter()
            .find(|(key, value)| !self.known.contains(&key.as_str()) && !empty_section(key, value));
        let Some((key, value)) = unknown else { return Ok(self.effective) };
        let section = key.split('.').next().unwrap_or_default();
        let mut expected: Vec<&str> =
            self.known.iter().copied().filter(|k| k.split('.').next() == Some(section)).collect();
        if expected.is_empty() {
            expected = self.known.iter().filter_map(|k| k.split('.').next()).collect();
        }
        expected.dedup();
        Err(ConfigError::UnknownKey {
            origin: self.file_origin(),
            key: key.clone(),
            // It may be a secret under a mistyped name.
            found: value.type_str().to_owned(),
            expected: expected.join(", "),
        })
    }
}
