//! How values print.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Output, State, Value};

use super::is_noncharacter;

/// Prints a value as Python's `str` does.
pub(super) fn print(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    let printed = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)?),
    };
    printed.map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write the prompt"))
}

/// A value as Python's `str` gives it.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(value, 0, &mut out)?,
    }
    Ok(out)
}

/// Appends a number as Python writes it: the fewest digits that tell it from others, with an exponent where it is
/// below -4 or above 15.
pub(super) fn float(number: f64, out: &mut String) {
    let shown = format!("{number:e}");
    let exponent = shown.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok());
    match exponent.filter(|exponent| number.is_finite() && !(-4..16).contains(exponent)) {
        Some(exponent) => {
            let digits = shown.split('e').next().unwrap_or_default();
            let sign = if exponent < 0 { '-' } else { '+' };
            out.push_str(&format!("{digits}e{sign}{:02}", exponent.unsigned_abs()));
        }
        None if number.is_nan() => out.push_str("nan"),
        None => out.push_str(&format!("{number:?}")),
    }
}

/// Deepest nesting of lists and maps that is printed.
const MAX_DEPTH: usize = 128;

/// Refuses values that nobody nests so deeply.
pub(super) fn too_deep(depth: usize) -> Result<(), Error> {
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
        ValueKind::Number if !value.is_integer() => {
            float(f64::try_from(value.clone()).unwrap_or(f64::NAN), out);
        }
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
            // Noncharacters may be marks, which must stay what they are.
            _ if prints(letter) || is_noncharacter(letter) => out.push(letter),
            _ => match u32::from(letter) {
                code @ ..0x100 => out.push_str(&format!("\\x{code:02x}")),
                code @ ..0x10000 => out.push_str(&format!("\\u{code:04x}")),
                code => out.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    out.push(quote);
}

/// Whether Python shows a character as it is, as far as Rust's own notion of that reaches: neither control characters
/// nor spaces but the plain one.
fn prints(letter: char) -> bool {
    letter == ' ' || !(letter.is_control() || letter.is_whitespace())
}
