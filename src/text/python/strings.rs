//! Methods of Python's strings that the template engine's own set lacks or reads otherwise. Places are counted in
//! characters.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

/// Widest that text is padded to.
const MAX_WIDTH: usize = 9999;

/// Calls `name` on `text`; `None` for what is not among these methods.
pub(in crate::text) fn method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "split" => split(text, args, false),
        "rsplit" => split(text, args, true),
        "find" | "rfind" | "index" | "rindex" if args.len() == 1 => find(text, name, args),
        "removeprefix" => one(name, args).map(|part| text.strip_prefix(part).unwrap_or(text).into()),
        "removesuffix" => one(name, args).map(|part| text.strip_suffix(part).unwrap_or(text).into()),
        "partition" => one(name, args).map(|at| match text.split_once(at) {
            Some((before, after)) => Value::from_serialize([before, at, after]),
            None => Value::from_serialize([text, "", ""]),
        }),
        "rpartition" => one(name, args).map(|at| match text.rsplit_once(at) {
            Some((before, after)) => Value::from_serialize([before, at, after]),
            None => Value::from_serialize(["", "", text]),
        }),
        "swapcase" => Ok(swap_case(text).into()),
        "casefold" => Ok(text.to_lowercase().into()),
        "ljust" | "rjust" | "center" | "zfill" => pad(text, name, args),
        _ => return None,
    })
}

fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The one string that a method takes.
fn one<'a>(name: &str, args: &'a [Value]) -> Result<&'a str, Error> {
    match args {
        [only] if only.as_str().is_some_and(|text| !text.is_empty()) => Ok(only.as_str().unwrap_or_default()),
        [only] if only.as_str().is_some() && name.starts_with("remove") => Ok(""),
        _ => Err(wrong(format!("{name}: expected one string that is not empty"))),
    }
}

/// `split(sep=None, maxsplit=-1)`, from either end.
fn split(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let name = if from_end { "rsplit" } else { "split" };
    let (plain, keywords) = match args.last().cloned().map(Kwargs::try_from) {
        Some(Ok(keywords)) => (&args[..args.len() - 1], Some(keywords)),
        _ => (args, None),
    };
    let keyword = |key: &str| keywords.as_ref().and_then(|keywords| keywords.get::<Value>(key).ok());
    let separator = plain.first().cloned().or_else(|| keyword("sep")).unwrap_or_default();
    let most = plain.get(1).cloned().or_else(|| keyword("maxsplit"));
    if let Some(keywords) = &keywords {
        keywords.assert_all_used()?;
    }
    // A negative number means all.
    let most = match most.map(i64::try_from) {
        None => usize::MAX,
        Some(Ok(most)) => usize::try_from(most).unwrap_or(usize::MAX),
        Some(Err(_)) => return Err(wrong(format!("{name}: maxsplit must be a number"))),
    };
    let pieces = most.saturating_add(1);
    let mut parts: Vec<&str> = match separator.as_str() {
        Some("") => return Err(wrong(format!("{name}: the separator is empty"))),
        Some(separator) if from_end => text.rsplitn(pieces, separator).collect(),
        Some(separator) => text.splitn(pieces, separator).collect(),
        None if !separator.is_none() && !separator.is_undefined() => {
            return Err(wrong(format!("{name}: the separator must be a string")));
        }
        None => words(text, most, from_end),
    };
    if from_end {
        parts.reverse();
    }
    Ok(Value::from_serialize(parts))
}

/// What stands between spaces, at most `most` words and the rest; from the end, the last word comes first.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        rest = if from_end { rest.trim_end() } else { rest.trim_start() };
        if rest.is_empty() {
            return parts;
        }
        let place = match from_end {
            _ if parts.len() == most => None,
            true => rest.char_indices().rfind(|(_, letter)| letter.is_whitespace()),
            false => rest.char_indices().find(|(_, letter)| letter.is_whitespace()),
        };
        let Some((place, space)) = place else {
            parts.push(rest);
            return parts;
        };
        let (before, after) = (&rest[..place], &rest[place + space.len_utf8()..]);
        parts.push(if from_end { after } else { before });
        rest = if from_end { before } else { after };
    }
}

/// Where a part begins, in characters; -1 or an error where it is not.
fn find(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(part) = args[0].as_str() else {
        return Err(wrong(format!("{name}: expected a string")));
    };
    let place = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
    match place {
        Some(place) => Ok(Value::from(text[..place].chars().count())),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(wrong(format!("{name}: substring not found"))),
    }
}

fn swap_case(text: &str) -> String {
    text.chars()
        .flat_map(|letter| {
            let upper = letter.is_uppercase();
            let lowered = letter.to_lowercase().filter(move |_| upper);
            lowered.chain(letter.to_uppercase().filter(move |_| !upper))
        })
        .collect()
}

/// Text made as wide as wanted.
fn pad(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let width = args.first().and_then(Value::as_usize);
    let Some(width) = width.filter(|width| *width <= MAX_WIDTH) else {
        return Err(wrong(format!("{name}: expected a width of at most {MAX_WIDTH}")));
    };
    let missing = width.saturating_sub(text.chars().count());
    let fill = match args.get(1).map(Value::as_str) {
        None => {
            if name == "zfill" {
                "0"
            } else {
                " "
            }
        }
        Some(Some(fill)) if fill.chars().count() == 1 => fill,
        Some(_) => return Err(wrong(format!("{name}: expected one character to fill with"))),
    };
    let signed = name == "zfill" && text.starts_with(['+', '-']);
    let (sign, text) = text.split_at(usize::from(signed));
    let left = match name {
        "ljust" => 0,
        // Python puts the odd one to the left where the width is odd.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    Ok(Value::from(format!("{sign}{}{text}{}", fill.repeat(left), fill.repeat(missing - left))))
}
