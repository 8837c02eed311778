//! The configuration as operators are shown it.

use axectl::protocol::{Config, Setting, Source};

use crate::config::{self, Effect, Origin, changes};

/// Every setting of a configuration, with its value and where it comes from; secrets are hidden already.
pub fn shown(config: &config::Config) -> Config {
    let setting = |effective: &config::Effective| {
        let (source, place) = match &effective.origin {
            Origin::Default => (Source::Default, None),
            Origin::File(path) => (Source::File, Some(path.display().to_string())),
            Origin::Env(name) => (Source::Environment, Some(name.clone())),
            Origin::Flag(name) => (Source::Flag, Some((*name).to_owned())),
            Origin::Credential(path) => (Source::Credential, Some(path.display().to_string())),
        };
        let (key, value) = (effective.key.to_owned(), effective.value.clone());
        Setting { key, value, after_restart: None, source, place }
    };
    Config {
        file: config.file.as_ref().map(|path| path.display().to_string()),
        settings: config.settings.iter().map(setting).collect(),
    }
}

/// Every setting in force in a process that `started` with one configuration and has taken up `present`: what only a restart
/// changes is as it was, with what it will be.
pub fn in_force(started: &config::Config, present: &config::Config) -> Config {
    let before = shown(started);
    let mut now = shown(present);
    for change in changes(started, present).into_iter().filter(|change| change.effect == Effect::Restart) {
        let was = before.settings.iter().find(|setting| setting.key == change.key);
        let is = now.settings.iter_mut().find(|setting| setting.key == change.key);
        if let (Some(was), Some(is)) = (was, is) {
            *is = Setting { after_restart: Some(change.to), ..was.clone() };
        }
    }
    now
}
