//! API keys: who may ask, under which name, and how much.
//!
//! A key file has one key a line, `name:key`, or the key alone. Behind it may stand `requests_per_minute=N` and
//! `tokens_per_minute=N`, which are for that key what the keys of the same names under `[server]` are for all. Empty
//! lines and lines that begin with `#` count for nothing.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::source::{Origin, Sources};
use super::{ConfigError, Secret};

/// The credential that systemd may hand over in place of `server.api_key_file`.
const CREDENTIAL: &str = "api_keys";

/// What a key is made of.
const SENDABLE: &str = "letters, digits and signs of ASCII, which is what a request's header can carry";

/// Whether the header of a request can carry a key.
fn can_be_sent(key: &str) -> bool {
    key.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) && key.trim() == key
}

/// Longest name of a key.
const LONGEST_NAME: usize = 64;

/// A key that clients may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ApiKey {
    /// What it is called in logs and metrics.
    pub name: String,
    /// The key itself.
    pub secret: Secret,
    /// How much may be asked for with it.
    pub limits: RateLimits,
}

/// How much may be asked for in a minute; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RateLimits {
    /// Requests that generate.
    pub requests: Option<u64>,
    /// Tokens, those of prompts and those generated.
    pub tokens: Option<u64>,
}

/// What the configuration says of keys.
pub(super) struct Keys {
    pub(super) keys: Vec<ApiKey>,
    /// Of callers without a key, where none is asked for.
    pub(super) limits: RateLimits,
    /// What the operator should know.
    pub(super) warnings: Vec<String>,
}

/// Reads limits, the key in the configuration, and the keys of the file or the credential.
pub(super) fn read(s: &mut Sources) -> Result<Keys, ConfigError> {
    const MOST: u64 = 1 << 40;
    let mut limit = |key| Ok::<_, ConfigError>(Some(s.integer(key, 0, 0, MOST)?).filter(|n| *n != 0));
    let limits = RateLimits {
        requests: limit("server.requests_per_minute")?,
        tokens: limit("server.tokens_per_minute")?,
    };
    let mut keys: Vec<ApiKey> = Vec::new();
    let alone = s.optional::<String>("server.api_key", SENDABLE, |key| can_be_sent(key))?;
    keys.extend(alone.filter(|(key, _)| !key.is_empty()).map(|(key, _)| ApiKey {
        name: "api_key".to_owned(),
        secret: Secret::new(key),
        limits,
    }));
    let mut warnings = Vec::new();
    let named = s.path("server.api_key_file")?;
    if let Some(path) = named.or_else(|| credential(s)) {
        keys.extend(read_file(&path, limits)?);
        warnings.extend(exposed(&path));
        unique(&keys).map_err(|reason| ConfigError::KeyFile { path, reason })?;
    }
    Ok(Keys { keys, limits, warnings })
}

/// The file of the credential, if systemd handed one over.
fn credential(s: &mut Sources) -> Option<PathBuf> {
    let path = Path::new(s.variable("CREDENTIALS_DIRECTORY")?).join(CREDENTIAL);
    if !path.is_file() {
        return None;
    }
    let origin = Origin::Credential(path.clone());
    s.settle("server.api_key_file", path.display().to_string().into(), Some(origin));
    Some(path)
}

fn read_file(path: &Path, defaults: RateLimits) -> Result<Vec<ApiKey>, ConfigError> {
    let unusable = |reason: String| ConfigError::KeyFile { path: path.to_owned(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| unusable(error.to_string()))?;
    let mut keys = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let unnamed = format!("key-{}", keys.len() + 1);
        let key = read_line(line, unnamed, defaults)
            .map_err(|reason| unusable(format!("line {}: {reason}", number + 1)))?;
        keys.push(key);
    }
    if keys.is_empty() {
        return Err(unusable("it holds no key; write one key a line, as name:key".to_owned()));
    }
    Ok(keys)
}

/// Complaints must not repeat the line: it holds a secret.
fn read_line(line: &str, unnamed: String, defaults: RateLimits) -> Result<ApiKey, String> {
    let mut words = line.split_whitespace();
    let first = words.next().unwrap_or_default();
    let (name, key) = match first.split_once(':') {
        Some((name, key)) => (name.to_owned(), key),
        None => (unnamed, first),
    };
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(good) {
        return Err(format!(
            "the name before the colon needs 1 to {LONGEST_NAME} letters, digits, dots, underscores or hyphens"
        ));
    }
    if key.is_empty() {
        return Err(format!("no key follows the name `{name}`"));
    }
    if !can_be_sent(key) {
        return Err(format!("key `{name}`: no request can carry it, expected {SENDABLE}"));
    }
    let (mut limits, mut seen) = (defaults, BTreeSet::new());
    for word in words {
        let number = |text: &str| match text.parse::<u64>() {
            // 0 lifts the limit that all keys have.
            Ok(number) => Ok(Some(number).filter(|n| *n != 0)),
            Err(_) => Err(format!("key `{name}`: a limit needs a whole number")),
        };
        let limit = word.split_once('=');
        if let Some((what, _)) = limit
            && !seen.insert(what)
        {
            return Err(format!("key `{name}`: a limit is there twice; say each once"));
        }
        match limit {
            Some(("requests_per_minute", n)) => limits.requests = number(n)?,
            Some(("tokens_per_minute", n)) => limits.tokens = number(n)?,
            _ => {
                return Err(format!(
                    "key `{name}`: only requests_per_minute=N and tokens_per_minute=N may follow the key"
                ));
            }
        }
    }
    Ok(ApiKey { name, secret: Secret::new(key), limits })
}

fn unique(keys: &[ApiKey]) -> Result<(), String> {
    let mut names = BTreeSet::new();
    let mut secrets = BTreeSet::new();
    for key in keys {
        if !names.insert(&key.name) {
            return Err(format!("two keys are called `{}`; give each a name of its own", key.name));
        }
        if !secrets.insert(key.secret.expose()) {
            return Err(format!("the key `{}` is there twice; give each name a key of its own", key.name));
        }
    }
    Ok(())
}

/// A warning, if users other than the file's own and its group may read it.
fn exposed(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode();
    (mode & 0o004 != 0).then(|| {
        format!(
            "everybody on this machine may read the API keys in {0} (mode {1:03o}): chmod o-r {0}",
            path.display(),
            mode & 0o777
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<Vec<ApiKey>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let defaults = RateLimits { requests: Some(60), tokens: None };
        read_file(file.path(), defaults).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_name_keys_and_their_limits() {
        let found = keys(
            "# ours\nalice:a:1\n\n  secret  \nbob:b2 tokens_per_minute=900\ncarol:c requests_per_minute=0\n",
        )
        .unwrap();
        let shown: Vec<_> = found
            .iter()
            .map(|key| (key.name.as_str(), key.secret.expose(), key.limits.requests, key.limits.tokens))
            .collect();
        assert_eq!(
            shown,
            [
                ("alice", "a:1", Some(60), None),
                ("key-2", "secret", Some(60), None),
                ("bob", "b2", Some(60), Some(900)),
                ("carol", "c", None, None),
            ]
        );
        assert!(unique(&found).is_ok());
    }

    #[test]
    fn a_wrong_line_is_named_and_not_repeated() {
        for (text, part) in [
            ("a:one\n:hidden", "line 2: the name before the colon"),
            ("big name!:hidden", "line 1: key"),
            ("sp/ace:hidden", "line 1: the name before the colon"),
            ("alice:", "line 1: no key follows the name `alice`"),
            ("alice:hiddén", "line 1: key `alice`: no request can carry it"),
            ("a:one\nalice:hidden\0", "line 2: key `alice`: no request can carry it"),
            ("alice:hidden\u{7f}", "line 1: key `alice`: no request can carry it"),
            ("hiddén", "line 1: key `key-1`: no request can carry it"),
            ("alice:hidden rpm=5", "line 1: key `alice`: only requests_per_minute=N"),
            ("alice:hidden tokens_per_minute=many", "line 1: key `alice`: a limit needs a whole number"),
            (
                "alice:hidden requests_per_minute=1 requests_per_minute=2",
                "line 1: key `alice`: a limit is there twice",
            ),
            ("# nothing\n", "it holds no key"),
        ] {
            let error = keys(text).unwrap_err();
            assert!(error.contains(part) && !error.contains("hidden"), "{text}: {error}");
        }
    }

    #[test]
    fn names_and_keys_are_there_once() {
        assert!(unique(&keys("a:1\na:2").unwrap()).unwrap_err().contains("two keys are called `a`"));
        let error = unique(&keys("a:same\nb:same").unwrap()).unwrap_err();
        assert!(error.contains("`b` is there twice") && !error.contains("same"), "{error}");
    }

    #[test]
    fn a_file_that_all_may_read_is_warned_of() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mode = |mode| std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
        mode(0o640);
        assert_eq!(exposed(file.path()), None);
        mode(0o644);
        assert!(exposed(file.path()).unwrap().contains("mode 644"));
    }
}
