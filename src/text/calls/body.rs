//! Calls as JSON: the forms that models write objects of name and arguments in.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Call;

/// Why a text holds no calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoCalls {
    /// It ends too early.
    Unfinished,
    /// It is something else.
    Else,
}

/// An object that stands for a call.
#[derive(Deserialize)]
struct Written {
    name: Option<String>,
    #[serde(alias = "parameters")]
    arguments: Option<Box<RawValue>>,
    /// Some models put name and arguments one level deeper, others only the name.
    function: Option<Box<RawValue>>,
}

/// An object of name and arguments, several of them, or a list.
pub(super) fn objects(text: &str) -> Result<Vec<Call>, NoCalls> {
    let text = without_raw_controls(text.trim());
    let fault = |error: serde_json::Error| match error.is_eof() {
        true => NoCalls::Unfinished,
        false => NoCalls::Else,
    };
    let written: Vec<Written> = if text.starts_with('[') {
        serde_json::from_str(&text).map_err(fault)?
    } else {
        let objects = serde_json::Deserializer::from_str(&text).into_iter();
        objects.collect::<Result<_, _>>().map_err(fault)?
    };
    match written.is_empty() {
        true => Err(NoCalls::Unfinished),
        false => written.iter().map(|written| call(written, 0).ok_or(NoCalls::Else)).collect(),
    }
}

fn call(written: &Written, depth: usize) -> Option<Call> {
    let name = match (&written.name, &written.function) {
        (Some(name), _) => name.clone(),
        (None, Some(function)) => match serde_json::from_str::<String>(function.get()) {
            Ok(name) => name,
            Err(_) if depth == 0 => return call(&serde_json::from_str(function.get()).ok()?, 1),
            Err(_) => return None,
        },
        (None, None) => return None,
    };
    Some(Call { name, arguments: arguments(written.arguments.as_ref().map_or("", |raw| raw.get()))? })
}

/// The object that `text` is, or that the string it is holds; none at all is an empty one.
pub(super) fn arguments(text: &str) -> Option<String> {
    let text = text.trim();
    if text.is_empty() || text == "null" {
        return Some("{}".to_owned());
    }
    if text.starts_with('"') {
        let inner: String = serde_json::from_str(text).ok()?;
        return if inner.trim_start().starts_with('"') { None } else { arguments(&inner) };
    }
    let text = without_raw_controls(text);
    let object: Box<RawValue> = serde_json::from_str(&text).ok()?;
    object.get().starts_with('{').then(|| object.get().to_owned())
}

/// `NAME.call(key="value", …)`, as Llama calls tools that it was trained with.
pub(super) fn python(text: &str) -> Result<Vec<Call>, NoCalls> {
    let (name, rest) = text.trim().split_once(".call(").ok_or(NoCalls::Else)?;
    let inside = rest.strip_suffix(')').ok_or(NoCalls::Unfinished)?;
    let letters: Vec<_> = format!("{{{inside}}}").bytes().map(super::value::Letter::Byte).collect();
    let mut letters = super::value::Letters(&letters);
    let mut arguments = String::new();
    match letters.object(&mut arguments, 0) {
        Ok(()) if letters.0.is_empty() => Ok(vec![Call { name: name.to_owned(), arguments }]),
        _ => Err(NoCalls::Else),
    }
}

/// The text with line breaks and other control characters in strings written as JSON wants them.
pub(super) fn without_raw_controls(text: &str) -> Cow<'_, str> {
    if !text.bytes().any(|byte| byte < 0x20) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let (mut in_string, mut escaped) = (false, false);
    for letter in text.chars() {
        match letter {
            letter if in_string && u32::from(letter) < 0x20 => {
                let written = serde_json::Value::from(letter.to_string()).to_string();
                out.push_str(written.trim_matches('"'));
                escaped = false;
                continue;
            }
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ => {}
        }
        out.push(letter);
    }
    Cow::Owned(out)
}
