//! What differs between two configurations, and what a running daemon makes of each difference.

use serde_json::Value;

use super::Config;

/// What becomes of a changed setting while the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It counts from the next request on.
    Live,
    /// The model has to be loaded again for it.
    Model,
    /// Only a new process can heed it.
    Restart,
}

/// A setting that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Its dotted key.
    pub key: &'static str,
    /// What it was; secrets show as `(secret)`.
    pub from: Value,
    /// What it is.
    pub to: Value,
    /// What becomes of it.
    pub effect: Effect,
}

/// Sections that say which model is loaded, and how.
const OF_THE_MODEL: [&str; 4] = ["model", "device", "decode", "denoising"];

/// What the faces and the engine take up as they go, though it stands in such a section.
const LIVE: [&str; 5] = [
    "model.aliases",
    "model.idle_unload_s",
    "device.pass_timeout_s",
    "device.max_faults",
    "device.fault_window_s",
];

/// What is fixed when the process starts.
const FIXED: [&str; 7] = [
    "server.host",
    "server.port",
    "admin.socket",
    "admin.group",
    "log.format",
    "log.ring_size",
    // Read by OpenCL's runtime when it is loaded.
    "device.threads",
];

/// What becomes of a setting.
#[must_use]
pub fn effect(key: &str) -> Effect {
    let section = key.split('.').next().unwrap_or_default();
    if FIXED.contains(&key) {
        Effect::Restart
    } else if OF_THE_MODEL.contains(&section) && !LIVE.contains(&key) {
        Effect::Model
    } else {
        Effect::Live
    }
}

/// The settings in which two configurations differ, in the order of the second.
#[must_use]
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let was =
        |key| old.settings.iter().find(|setting| setting.key == key).map(|setting| setting.value.clone());
    let of_file = new.settings.iter().any(|s| s.key == "server.api_key_file" && !s.value.is_null());
    let hidden = |key: &str| match key {
        "server.api_key" => !of_file && old.server.api_keys != new.server.api_keys,
        "server.api_key_file" => old.server.api_keys != new.server.api_keys,
        "studio.remote_key" => remote_key(old) != remote_key(new),
        "studio.remote_url" => remote_url(old) != remote_url(new),
        _ => false,
    };
    let change = |setting: &super::Effective| {
        let (key, to) = (setting.key, setting.value.clone());
        let from = was(key).unwrap_or_default();
        // Secrets, and files of secrets, look the same when they are others.
        let differs = from != to || (!to.is_null() && hidden(key));
        differs.then(|| Change { key, from, to, effect: effect(key) })
    };
    new.settings.iter().filter_map(change).collect()
}

fn remote_url(config: &Config) -> Option<&str> {
    config.studio.remote.as_ref().map(|remote| remote.url.expose())
}

fn remote_key(config: &Config) -> Option<&str> {
    config.studio.remote.as_ref()?.key.as_ref().map(super::Secret::expose)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn config(toml: &str) -> Config {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), toml).unwrap();
        Config::from_sources(Some(file.path()), BTreeMap::new(), Vec::new()).unwrap()
    }

    #[test]
    fn each_difference_is_told_with_what_becomes_of_it() {
        let old = config("[server]\nport = 1\n[model]\npath = \"/a\"");
        let new = config(
            "[server]\nport = 2\nqueue_capacity = 3\n[model]\npath = \"/b\"\naliases = [\"x\"]\n[device]\nkv_cache = \"f32\"",
        );
        let told: Vec<_> =
            changes(&old, &new).into_iter().map(|change| (change.key, change.effect)).collect();
        for expected in [
            ("server.port", Effect::Restart),
            ("server.queue_capacity", Effect::Live),
            ("model.path", Effect::Model),
            ("model.aliases", Effect::Live),
            ("device.kv_cache", Effect::Model),
        ] {
            assert!(told.contains(&expected), "{expected:?} in {told:?}");
        }
        assert_eq!(told.len(), 5);
        assert_eq!(changes(&new, &new), []);
    }

    #[test]
    fn another_secret_is_a_change_that_is_not_shown() {
        let (old, new) = (config("[server]\napi_key = \"one\""), config("[server]\napi_key = \"two\""));
        let found = changes(&old, &new);
        assert_eq!(found.iter().map(|change| change.key).collect::<Vec<_>>(), ["server.api_key"]);
        assert!(!format!("{found:?}").contains("two"));
    }

    #[test]
    fn exceptions_name_settings_that_exist() {
        let known = config("").settings;
        for key in LIVE.iter().chain(&FIXED) {
            assert!(known.iter().any(|setting| setting.key == *key), "{key}");
        }
    }
}
