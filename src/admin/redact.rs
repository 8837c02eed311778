//! Hides secrets in a configuration before it is shown.

use serde_json::Value;

/// What stands in the place of a secret.
const HIDDEN: &str = "[hidden]";

/// `config` with the value of every key that names a secret replaced, at any depth. Absent secrets (null, empty)
/// stay visible, since "no key is set" is what an operator may be looking for.
pub fn redacted(mut config: Value) -> Value {
    hide_within(&mut config);
    config
}

fn hide_within(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                if names_a_secret(key) { hide(value) } else { hide_within(value) }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide_within),
        _ => {}
    }
}

/// A list stays a list, so that the number of keys can be seen.
fn hide(value: &mut Value) {
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::String(text) if text.is_empty() => {}
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::Object(map) => map.values_mut().for_each(hide),
        _ => *value = HIDDEN.into(),
    }
}

fn names_a_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase().replace('-', "_");
    // `key_file` and the like are places, which help to find a mistake and open nothing.
    if ["_file", "_path", "_dir"].iter().any(|suffix| key.ends_with(suffix)) {
        return false;
    }
    ["api_key", "secret", "password", "passphrase", "credential", "private_key", "bearer", "auth_token"]
        .iter()
        .any(|word| key.contains(word))
        || matches!(key.as_str(), "key" | "keys" | "token")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secrets_are_hidden_at_any_depth() {
        let config = json!({
            "http": {"api_keys": ["sk-1", "sk-2"], "port": 8080, "api-key": "x", "api_key_file": "/etc/axed/key"},
            "list": [{"password": "p"}, {"token": 7}],
            "max_tokens": 5,
            "Secret": {"inner": "s"},
        });
        assert_eq!(
            redacted(config),
            json!({
                "http": {"api_keys": [HIDDEN, HIDDEN], "port": 8080, "api-key": HIDDEN,
                         "api_key_file": "/etc/axed/key"},
                "list": [{"password": HIDDEN}, {"token": HIDDEN}],
                "max_tokens": 5,
                "Secret": {"inner": HIDDEN},
            })
        );
    }

    #[test]
    fn an_absent_secret_shows_as_absent() {
        let config = json!({"api_key": null, "password": "", "keys": [], "require_api_key": true});
        assert_eq!(redacted(config.clone()), config);
    }
}
