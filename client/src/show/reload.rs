//! `axectl reload`, and what the status says of loads, reloads and faults.

use axectl::protocol::{Change, Faults, Loading, Reload, ReloadState};
use serde_json::Value;

use crate::units::{duration, plain};

/// What a reload changed.
pub fn reload(reload: &Reload) -> String {
    let mut lines = Vec::new();
    for change in &reload.changed {
        lines.push(format!("{}  {} -> {}", plain(&change.key), value(&change.from), value(&change.to)));
    }
    for Change { key, from, to } in &reload.restart {
        lines.push(format!(
            "{}  {} -> {}  (needs a restart; until then {} counts)",
            plain(key),
            value(from),
            value(to),
            value(from)
        ));
    }
    if let Some(model) = &reload.model {
        let name = |name: &Option<String>| name.as_deref().map_or_else(|| "none".to_owned(), plain);
        let how =
            if model.beside { "beside the old one" } else { "after the old one, for want of room for both" };
        lines.push(format!(
            "model  {} -> {}, loaded {how} in {}; requests waited {}",
            name(&model.from),
            name(&model.to),
            duration(model.load_s),
            duration(model.waited_s)
        ));
    }
    if lines.is_empty() {
        lines.push("nothing has changed".to_owned());
    }
    lines.push(format!("reloaded in {:.2} s", reload.elapsed_s));
    lines.join("\n")
}

/// A reload that is going on, or the last one.
pub fn state(state: &ReloadState) -> String {
    let since = duration(state.since_s);
    match state.succeeded {
        None => format!("going on for {since}"),
        Some(true) => format!("{} ({since} ago)", plain(&state.message)),
        Some(false) => format!("failed {since} ago: {}", plain(&state.message)),
    }
}

/// A model on its way.
pub fn loading(loading: &Loading) -> String {
    format!("{}, {:.0} % ({})", plain(&loading.what), loading.progress * 100.0, plain(&loading.occasion))
}

/// What the engine recovered from.
pub fn faults(faults: &Faults) -> String {
    format!(
        "{} resets of the engine: device lost {}, passes too long {}, panics {}; {} failed rebuilds",
        faults.resets, faults.lost, faults.overdue, faults.panics, faults.rebuilds
    )
}

fn value(value: &Value) -> String {
    match value {
        Value::Null => "unset".to_owned(),
        Value::String(text) => plain(text),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told_with_what_becomes_of_them() {
        let change = |key: &str, from: Value, to: Value| Change { key: key.to_owned(), from, to };
        let told = reload(&Reload {
            changed: vec![change("server.api_key", Value::Null, "(secret)".into())],
            restart: vec![change("server.port", 1.into(), 2.into())],
            model: None,
            elapsed_s: 0.5,
        });
        assert!(told.contains("server.api_key  unset -> (secret)"), "{told}");
        assert!(told.contains("server.port  1 -> 2  (needs a restart; until then 1 counts)"), "{told}");
        assert!(told.contains("reloaded in 0.50 s"), "{told}");
        assert!(reload(&Reload::default()).starts_with("nothing has changed"));
    }
}
