//! What chat templates expect of Python: methods, functions, how values print, how JSON is written.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

/// An exception that a template raised by itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Gives the environment what Hugging Face's libraries give theirs.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(print);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let mut now = String::new();
        write!(now, "{}", chrono::Local::now().format(&format)).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: `{format}` is no time format"))
        })?;
        Ok(now)
    });
    environment.add_filter("tojson", to_json);
}

/// What to tell about a failed rendering: the template's own words if it raised them.
pub(super) fn message(error: &Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut last = error.to_string();
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return message.clone();
        }
        last = match current.downcast_ref::<std::io::Error>() {
            Some(error) => error.to_string(),
            None => last,
        };
        cause = current.source();
    }
    last
}

/// Whether Unicode reserves a character for no text at all.
pub(super) fn is_noncharacter(letter: char) -> bool {
    let code = u32::from(letter);
    (0xfdd0..=0xfdef).contains(&code) || code & 0xfffe == 0xfffe
}

/// Prints a value as Python's `str` does.
fn print(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    let printed = match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String | ValueKind::Number => write!(out, "{value}"),
        _ => {
            let mut text = String::new();
            repr(value, 0, &mut text)?;
            out.write_str(&text)
        }
    };
    printed.map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write the prompt"))
}

/// Deepest nesting of lists and maps that is printed.
const MAX_DEPTH: usize = 128;

fn too_deep(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "value is nested too deeply to print"));
    }
    Ok(())
}

/// Appends a value as Python's `repr` writes it.
fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    too_deep(depth)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if letter == quote => out.extend(['\\', quote]),
            _ => out.push(letter),
        }
    }
    out.push(quote);
}

/// How Python's `json.dumps` was asked to write.
struct JsonStyle {
    indent: Option<usize>,
    item: String,
    key: String,
    sorted: bool,
    ascii: bool,
}

/// The filter `tojson` as Hugging Face defines it: `json.dumps` without HTML escapes and with Unicode as it is.
fn to_json(value: Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let (item, key) = match options.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => (item, key),
            Err(_) => {
                return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair"));
            }
        },
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = JsonStyle {
        indent: indent.map(|indent| indent.min(64)),
        item,
        key,
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let value = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))?;
    let mut out = String::new();
    write_json(&value, &style, 0, &mut out)?;
    Ok(out)
}

fn write_json(
    value: &serde_json::Value,
    style: &JsonStyle,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    use serde_json::Value as Json;
    too_deep(depth)?;
    let new_line = |depth: usize, out: &mut String| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { &style.item } else { "" });
                new_line(depth + 1, out);
                write_json(item, style, depth + 1, out)?;
            }
            new_line(depth, out);
            out.push(']');
        }
        Json::Object(fields) if !fields.is_empty() => {
            let mut fields: Vec<_> = fields.iter().collect();
            if style.sorted {
                fields.sort_unstable_by_key(|(key, _)| *key);
            }
            out.push('{');
            for (index, (key, field)) in fields.into_iter().enumerate() {
                out.push_str(if index > 0 { &style.item } else { "" });
                new_line(depth + 1, out);
                write_json_string(key, style, out);
                out.push_str(&style.key);
                write_json(field, style, depth + 1, out)?;
            }
            new_line(depth, out);
            out.push('}');
        }
        Json::String(text) => write_json_string(text, style, out),
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_json_string(text: &str, style: &JsonStyle, out: &mut String) {
    let quoted = serde_json::Value::from(text).to_string();
    if !style.ascii {
        out.push_str(&quoted);
        return;
    }
    for letter in quoted.chars() {
        // Noncharacters may be marks, which must stay what they are.
        if letter.is_ascii() || is_noncharacter(letter) {
            out.push(letter);
        } else {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}
