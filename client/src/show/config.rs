//! `axectl config`

use axectl::protocol::{Config, Source};

use super::{lines_of, table};
use crate::units::{known, plain};

/// The settings, one a line; only those that somebody set, where `set` says so.
pub fn config(config: &Config, set: bool) -> String {
    let mut table = table(["KEY", "VALUE", "FROM"], 0..0);
    for setting in config.settings.iter().filter(|setting| !set || setting.source != Source::Default) {
        let place = setting.place.as_deref().map(plain);
        table.add_row([
            plain(&setting.key),
            match &setting.after_restart {
                Some(later) => format!("{} ({} after a restart)", value(&setting.value), value(later)),
                None => value(&setting.value),
            },
            match setting.source {
                Source::Default => "default".to_owned(),
                Source::File => place.unwrap_or_default(),
                Source::Environment | Source::Flag | Source::Credential | Source::Operator => {
                    format!("{} {}", setting.source, place.unwrap_or_default())
                }
            },
        ]);
    }
    format!("{}\n\nFile: {}", lines_of(&table), known(config.file.as_deref(), plain))
}

fn value(value: &serde_json::Value) -> String {
    if value.is_null() { "-".to_owned() } else { plain(&value.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axectl::protocol::Setting;

    #[test]
    fn settings_tell_where_they_come_from() {
        let setting = |key: &str, value: serde_json::Value, source, place: Option<&str>| Setting {
            key: key.to_owned(),
            value,
            after_restart: (key == "log.ring_size").then(|| 7.into()),
            source,
            place: place.map(str::to_owned),
        };
        let shown = Config {
            file: Some("/etc/axed/daemon.toml".to_owned()),
            settings: vec![
                setting("server.port", 8080.into(), Source::Environment, Some("AXE_PORT")),
                setting("server.host", "127.0.0.1".into(), Source::Default, None),
                setting("model.path", "/m.gguf".into(), Source::File, Some("/etc/axed/daemon.toml")),
                setting("device.name", serde_json::Value::Null, Source::Default, None),
                setting("log.ring_size", 2000.into(), Source::Default, None),
                setting("log.level", "debug".into(), Source::Operator, Some("axectl log-level")),
            ],
        };
        assert_eq!(
            config(&shown, false),
            "\
KEY            VALUE                     FROM
server.port    8080                      environment AXE_PORT
server.host    \"127.0.0.1\"               default
model.path     \"/m.gguf\"                 /etc/axed/daemon.toml
device.name    -                         default
log.ring_size  2000 (7 after a restart)  default
log.level      \"debug\"                   operator axectl log-level

File: /etc/axed/daemon.toml"
        );
        assert!(!config(&shown, true).contains("server.host"));
    }
}
