//! The configuration as operators are shown it.

use axectl::protocol::{Config, Setting, Source};

use crate::config::{self, Origin};

/// Every setting in force, with its value and where it comes from; secrets are hidden already.
pub fn shown(config: &config::Config) -> Config {
    let setting = |effective: &config::Effective| {
        let (source, place) = match &effective.origin {
            Origin::Default => (Source::Default, None),
            Origin::File(path) => (Source::File, Some(path.display().to_string())),
            Origin::Env(name) => (Source::Environment, Some(name.clone())),
            Origin::Flag(name) => (Source::Flag, Some((*name).to_owned())),
            Origin::Credential(path) => (Source::Credential, Some(path.display().to_string())),
        };
        Setting { key: effective.key.to_owned(), value: effective.value.clone(), source, place }
    };
    Config {
        file: config.file.as_ref().map(|path| path.display().to_string()),
        settings: config.settings.iter().map(setting).collect(),
    }
}
