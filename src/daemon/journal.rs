//! Log lines as entries of the systemd journal, by its own protocol: with a priority, and with each field as a field,
//! so that `journalctl -u axed -p warning` and `journalctl -u axed AXE_ID=chatcmpl-…` find them.

use std::fmt::Write as _;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use axectl::protocol::{Level, LogLine};
use serde_json::Value;
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::admin::logs::line_of;

/// Where the journal listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Longest name of a field that the journal takes.
const LONGEST_NAME: usize = 64;

/// A layer that writes to the journal.
pub(super) struct Journal {
    socket: UnixDatagram,
}

impl Journal {
    /// The system's journal, if standard error of this process goes there.
    pub(super) fn of_process() -> Option<Self> {
        let named = std::env::var("JOURNAL_STREAM").ok()?;
        let stderr = std::fs::metadata("/proc/self/fd/2").ok()?;
        is_stream(&named, stderr.dev(), stderr.ino()).then(|| Self::at(Path::new(SOCKET)).ok()).flatten()
    }

    fn at(socket: &Path) -> io::Result<Self> {
        let ours = UnixDatagram::unbound()?;
        ours.connect(socket)?;
        Ok(Self { socket: ours })
    }
}

/// Whether `JOURNAL_STREAM` names this device and file.
fn is_stream(named: &str, device: u64, file: u64) -> bool {
    named == format!("{device}:{file}")
}

impl<S> Layer<S> for Journal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let line = line_of(event, &context);
        let (file, number) = (event.metadata().file(), event.metadata().line());
        if self.socket.send(&entry(&line, file, number)).is_err() {
            // The journal takes what is printed, too, only without its fields.
            eprintln!("{}: {}", line.level, text_of(&line));
        }
    }
}

/// One entry in the journal's form.
fn entry(line: &LogLine, file: Option<&str>, number: Option<u32>) -> Vec<u8> {
    let priority = match line.level {
        Level::Error => "3",
        Level::Warn => "4",
        Level::Info => "6",
        Level::Debug | Level::Trace => "7",
    };
    let mut bytes = Vec::new();
    put(&mut bytes, "MESSAGE", &text_of(line));
    put(&mut bytes, "PRIORITY", priority);
    put(&mut bytes, "SYSLOG_IDENTIFIER", "axed");
    put(&mut bytes, "AXE_TARGET", &line.target);
    if let (Some(file), Some(number)) = (file, number) {
        put(&mut bytes, "CODE_FILE", file);
        put(&mut bytes, "CODE_LINE", &number.to_string());
    }
    for (name, value) in &line.fields {
        let mut field = format!("AXE_{}", name.to_ascii_uppercase());
        field.retain(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        field.truncate(LONGEST_NAME);
        put(&mut bytes, &field, &plain(value));
    }
    bytes
}

/// A field: `NAME=value`, or, for a value of several lines, its name, its length and itself.
fn put(bytes: &mut Vec<u8>, name: &str, value: &str) {
    bytes.extend(name.as_bytes());
    if value.contains('\n') {
        bytes.push(b'\n');
        bytes.extend((value.len() as u64).to_le_bytes());
    } else {
        bytes.push(b'=');
    }
    bytes.extend(value.as_bytes());
    bytes.push(b'\n');
}

/// The message, and its fields behind it, as people read them.
fn text_of(line: &LogLine) -> String {
    let mut text = line.message.clone();
    for (name, value) in &line.fields {
        // Writing to a string cannot fail.
        let _written = write!(text, " {name}={}", plain(value));
    }
    text
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::admin::LogRing;

    /// The fields of an entry, read as the journal reads them.
    fn fields(mut bytes: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            match line.iter().position(|byte| *byte == b'=') {
                Some(equals) => {
                    fields.insert(text(&line[..equals]), text(&line[equals + 1..]));
                    bytes = rest;
                }
                None => {
                    let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                    fields.insert(text(line), text(&rest[8..8 + length]));
                    assert_eq!(rest[8 + length], b'\n');
                    bytes = &rest[8 + length + 1..];
                }
            }
        }
        fields
    }

    #[test]
    fn entries_carry_priority_and_fields() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let journal = UnixDatagram::bind(&path).unwrap();
        let subscriber =
            tracing_subscriber::registry().with(LogRing::new(5)).with(Journal::at(&path).unwrap());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info_span!("http", request = "req-1").in_scope(|| {
                tracing::warn!(target: "axe::http", tokens = 5, text = "a\nb", "odd");
            });
        });
        let mut buffer = [0; 4096];
        let read = journal.recv(&mut buffer).unwrap();
        let fields = fields(&buffer[..read]);
        for (name, value) in [
            ("MESSAGE", "odd request=req-1 tokens=5 text=a\nb"),
            ("PRIORITY", "4"),
            ("SYSLOG_IDENTIFIER", "axed"),
            ("AXE_TARGET", "axe::http"),
            ("AXE_REQUEST", "req-1"),
            ("AXE_TOKENS", "5"),
            ("AXE_TEXT", "a\nb"),
        ] {
            assert_eq!(fields.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(fields["CODE_FILE"].ends_with("journal.rs"));
    }

    #[test]
    fn the_stream_is_the_journals_only_if_both_numbers_agree() {
        assert!(is_stream("9:24011", 9, 24_011));
        for named in ["9:24012", "8:24011", "", "9", "9:24011:"] {
            assert!(!is_stream(named, 9, 24_011), "{named}");
        }
    }
}
