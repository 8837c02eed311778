//! The filter `tojson`, as Python's `json.dumps` writes.

use std::fmt::Write;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

use super::is_noncharacter;
use super::print::{float, too_deep};

/// How Python's `json.dumps` was asked to write.
struct JsonStyle {
    indent: Option<usize>,
    item: String,
    key: String,
    sorted: bool,
    ascii: bool,
}

/// The filter `tojson` as Hugging Face defines it: `json.dumps` without HTML escapes and with Unicode as it is.
pub(super) fn to_json(value: Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
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

/// A value as `json.dumps` writes it when nothing is asked for but Unicode as it is. What is nested too deeply is
/// written without spaces.
pub(in crate::text) fn dumps(value: &serde_json::Value) -> String {
    let (item, key) = (", ".to_owned(), ": ".to_owned());
    let style = JsonStyle { indent: None, item, key, sorted: false, ascii: false };
    let mut out = String::new();
    match write_json(value, &style, 0, &mut out) {
        Ok(()) => out,
        Err(_) => value.to_string(),
    }
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
        Json::Number(number) if number.is_f64() => float(number.as_f64().unwrap_or_default(), out),
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
